"""Black-box conformance: what any server of the lifecycle API has to answer, whoever wrote it.

The server is found in CONFORMANCE_URL and CONFORMANCE_KEY; CONFORMANCE_RUNTIME (docker or embedded) and
CONFORMANCE_IMAGE (one that has python3) say what it runs. The expectation of every case is the right behaviour. Where the reference is
known to do otherwise the case says so with `better` (a defect there) or `different` (a decision here), and against
CONFORMANCE_SUBJECT=reference exactly these cases have to fail. CONFORMANCE_OUT names a file for the results.
"""

import json
import os
from pathlib import Path

import pytest

from target import Target

RESULTS = {}


def pytest_configure(config):
    config.addinivalue_line("markers", "better(defect): the reference has this named defect")
    config.addinivalue_line("markers", "different(reason): decided otherwise here")
    config.addinivalue_line("markers", "docker: needs a runtime that is Docker")


@pytest.fixture(scope="session")
def target():
    found = Target(
        os.environ["CONFORMANCE_URL"],
        os.environ.get("CONFORMANCE_KEY", ""),
        os.environ.get("CONFORMANCE_RUNTIME", "docker"),
        os.environ["CONFORMANCE_IMAGE"],
    )
    yield found
    found.close()


@pytest.fixture(scope="session")
def web(target):
    """A sandbox that runs the echo program, shared by every case that does not change its life."""
    return target.create_echo()


@pytest.fixture
def idle(target):
    """A sandbox of one test alone."""
    made = target.create()
    yield made["id"]
    target.delete(made["id"])


def pytest_collection_modifyitems(items):
    runtime = os.environ.get("CONFORMANCE_RUNTIME", "docker")
    subject = os.environ.get("CONFORMANCE_SUBJECT", "sandglass")
    kept = [item for item in items if runtime == "docker" or "docker" not in item.keywords]
    items[:] = kept
    if subject == "reference":
        for item in items:
            for kind in ("better", "different"):
                for marker in item.iter_markers(kind):
                    item.add_marker(pytest.mark.xfail(strict=True, reason=f"{kind}: {marker.args[0]}"))


def case_of(report):
    file, _, name = report.nodeid.partition("::")
    return f"{Path(file).stem.removeprefix('test_')} / {name.removeprefix('test_')}"


def pytest_runtest_logreport(report):
    case = case_of(report)
    if report.when == "call":
        wrong = getattr(report, "wasxfail", None)
        RESULTS[case] = {"passed": report.passed and wrong is None}
        if wrong is not None:
            RESULTS[case]["reason"] = wrong
        elif report.failed:
            RESULTS[case]["error"] = str(report.longrepr)[-1500:]
    elif report.failed:
        RESULTS[case] = {"passed": False, "error": str(report.longrepr)[-1500:]}


def pytest_sessionfinish():
    out = os.environ.get("CONFORMANCE_OUT")
    if out:
        Path(out).write_text(json.dumps(RESULTS, indent=1, sort_keys=True) + "\n")
