"""Fixtures: the server under test (one of each runtime for the whole run), clients of it, and a sandbox for each test or module.

With SANDGLASS_E2E_URL set, the same tests run against the server there (key in SANDGLASS_E2E_KEY, image in
SANDGLASS_E2E_IMAGE); tests marked `sandglass` are skipped then, and nothing is audited.
"""

import os
from contextlib import ExitStack
from datetime import timedelta
from types import SimpleNamespace
from urllib.parse import urlsplit

import httpx
import pytest
from opensandbox import SandboxSync
from opensandbox.config import ConnectionConfig, ConnectionConfigSync

from docker_engine import PYTHON, Engine
from docker_stack import DockerStack
from git_servers import GitServers
from plain import Plain
from stack import Stack
from ways import WAYS, GatewayStage, Stage
from workspace_stacks import client_of, embedded, on_engine
from workspaces import Workspaces

# These hold for every runtime; the others look at the host, or make servers of their own.
EVERY_RUNTIME = {
    *("test_adapters", "test_lifecycle", "test_async", "test_commands", "test_files", "test_osb", "test_other_clients"),
    *("test_code", "test_hooks", "test_isolated", "test_mcp", "test_sessions", "test_terminals"),
    *("test_agent_images", "test_agent_robustness", "test_pools"),
}

OTHER = os.environ.get("SANDGLASS_E2E_URL")
IMAGE = os.environ.get("SANDGLASS_E2E_IMAGE", "host")


def pytest_generate_tests(metafunc):
    if "server" in metafunc.fixturenames:
        both = not OTHER and metafunc.module.__name__ in EVERY_RUNTIME
        only = metafunc.definition.get_closest_marker("only_on")
        runtimes = only.args if only else ["embedded", "docker"] if both else ["embedded"]
        metafunc.parametrize("server", runtimes, indirect=True, scope="session")
    if "place" in metafunc.fixturenames:
        only = metafunc.definition.get_closest_marker("through")
        places = [(runtime, way) for runtime, ways in WAYS.items() for way in ways if not only or way.startswith(only.args)]
        metafunc.parametrize("place", places, ids="-".join, indirect=True, scope="session")


def of_docker(item):
    """Whether a test needs an engine: by its module, its fixtures, or the runtime that it was given."""
    given = item.callspec.params if hasattr(item, "callspec") else {}
    runtime = given.get("server") or given.get("place", ("",))[0]
    return runtime == "docker" or "engine" in item.fixturenames or "docker" in item.module.__name__


def pytest_collection_modifyitems(items):
    for item in items:
        if of_docker(item):
            item.add_marker("docker")
        if "git" in item.fixturenames:
            item.add_marker("repositories")
    if OTHER:
        skip = pytest.mark.skip(reason="holds for Sandglass only")
        for item in items:
            if "sandglass" in item.keywords:
                item.add_marker(skip)


def pytest_sessionfinish(session):
    """On the machine that decides, a test that did not run is not a test that passed."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if os.environ.get("CI") and not OTHER and reporter.stats.get("skipped"):
        session.exitstatus = 1
    # What a fixture found left over is nothing that a second attempt could take back.
    again = reporter.stats.get("rerun", ())
    attempted = {report.nodeid for report in again if report.when != "teardown"}
    left = [report for report in again if report.when == "teardown" and report.nodeid not in attempted]
    for report in left:
        reporter.write_line(f"FAILED after its test: {report.nodeid}\n{report.longreprtext}", red=True)
    if left:
        session.exitstatus = 1


@pytest.fixture(scope="session")
def engine():
    """A private Docker engine with the test images; whatever is left on it at the end is a failure."""
    made = Engine()
    try:
        made.start().images()
        yield made
    finally:
        problems = made.wait_clean() if made.process else []
        made.close()
    assert not problems, "left on the engine:\n" + "\n".join(problems)


@pytest.fixture(scope="session")
def docker_server(engine):
    stack = DockerStack(engine)
    try:
        stack.start()
        yield SimpleNamespace(url=stack.url, domain=stack.domain, key=stack.key, image=PYTHON, stack=stack, runtime="docker")
    finally:
        problems = stack.close()
    assert not problems, "\n".join(problems)


@pytest.fixture(scope="session")
def embedded_server():
    if OTHER:
        key = os.environ.get("SANDGLASS_E2E_KEY", "")
        yield SimpleNamespace(url=OTHER, domain=urlsplit(OTHER).netloc, key=key, image=IMAGE, stack=None, runtime="other")
        return
    stack = Stack()
    try:
        stack.start()
        yield SimpleNamespace(url=stack.url, domain=stack.domain, key=stack.key, image=IMAGE, stack=stack, runtime="embedded")
    finally:
        problems = stack.close()
    assert not problems, "left over after the last sandbox was deleted:\n" + "\n".join(problems)


@pytest.fixture(scope="session")
def server(request):
    """What the tests need to know of the server: url, domain, key, image, and the stack when it is ours."""
    return request.getfixturevalue(f"{request.param}_server")


@pytest.fixture(scope="session")
def embedded_stage(embedded_server):
    """A sandbox with the scripted origin in it."""
    made = Stage(embedded_server)
    yield made
    made.close()


@pytest.fixture(scope="session")
def docker_stage(docker_server, engine):
    made = Stage(docker_server)
    engine.lasting.add(made.box)
    yield made
    made.close()
    engine.lasting.remove(made.box)


@pytest.fixture(scope="session")
def gateway_stage():
    made = GatewayStage()
    yield made
    made.close()


@pytest.fixture(scope="session")
def place(request):
    """(stage, way): each way into a sandbox, on each runtime; `through` names those that a test is about."""
    runtime, way = request.param
    stage = request.getfixturevalue(f"{runtime}_stage")
    return stage, stage.way(way)


@pytest.fixture
def docker(docker_server):
    """Plain HTTP to the server on Docker; what a test made is deleted after it."""
    made = Plain(docker_server.url, docker_server.key, PYTHON)
    yield made
    made.close()


@pytest.fixture
def on_docker(engine):
    """Servers of a test's own on the shared engine."""
    stacks, clients = [], []

    def make(image=PYTHON, start=True, **keys):
        stacks.append(DockerStack(engine, **keys))
        if start:
            stacks[-1].start()
        clients.append(Plain(stacks[-1].url, stacks[-1].key, image))
        return stacks[-1], clients[-1]

    yield make
    for client in clients:
        client.http.close()
    problems = [problem for stack in stacks for problem in stack.close()]
    assert not problems, "\n".join(problems)


# ---------------------------------------------------------------- sandboxes from repositories; `stack` is each module's own


@pytest.fixture(scope="module")
def git():
    with GitServers() as servers:
        yield servers


@pytest.fixture
def spaces(stack):
    """A client of the module's server; after every test nothing of its sandboxes is left."""
    with client_of(stack, getattr(stack, "engine", None)) as client:
        yield client


@pytest.fixture
def own_stack(request):
    """Servers that a test may kill, each with a client; on the engine in modules that say so by their names."""
    engine = request.getfixturevalue("engine") if "docker" in request.module.__name__ else None
    with ExitStack() as held:

        def make(**sections):
            stack = held.enter_context(on_engine(engine, **sections) if engine else embedded(**sections))
            # Only a server that runs deletes what it made.
            held.callback(stack.revive)
            return stack, Workspaces(stack.url, stack.key)

        yield make
    left = engine.wait_clean() if engine else []
    if left:
        engine.sweep()
    assert not left, left


@pytest.fixture(scope="session")
def http(server):
    """Plain HTTP to the server with the key."""
    with httpx.Client(base_url=server.url, headers={"OPEN-SANDBOX-API-KEY": server.key}, timeout=60) as client:
        yield client


@pytest.fixture(scope="session")
def config(server):
    """Makes connection settings of the synchronous SDK."""

    def make(**keys):
        return ConnectionConfigSync(domain=server.domain, api_key=server.key, **keys)

    return make


@pytest.fixture(scope="session")
def async_config(server):
    def make(**keys):
        return ConnectionConfig(domain=server.domain, api_key=server.key, **keys)

    return make


@pytest.fixture
def create(server, config):
    """Creates sandboxes with the synchronous SDK and deletes what a test leaves alive."""
    made = []

    def make(**keys):
        keys.setdefault("timeout", timedelta(minutes=5))
        keys.setdefault("resource", {"cpu": "1", "memory": "512Mi"})
        sandbox = SandboxSync.create(server.image, connection_config=keys.pop("connection_config", config()), **keys)
        made.append(sandbox)
        return sandbox

    yield make
    for sandbox in made:
        delete(server, sandbox.id)
        sandbox.close()


@pytest.fixture(scope="module")
def box(server, config):
    """One running sandbox shared by the tests of a module that do not change its life."""
    sandbox = SandboxSync.create(
        server.image,
        timeout=timedelta(minutes=30),
        resource={"cpu": "1", "memory": "512Mi"},
        metadata={"suite": "shared"},
        connection_config=config(),
    )
    yield sandbox
    delete(server, sandbox.id)
    sandbox.close()


@pytest.fixture
def raw(http, server):
    """Creates sandboxes by plain HTTP and deletes them; returns the answer's body."""
    made = []

    def make(headers=None, **body):
        answer = http.post("/v1/sandboxes", json=body_of(server, **body), headers=headers)
        assert answer.status_code == 202, answer.text
        made.append(answer.json()["id"])
        return answer.json()

    yield make
    for sandbox in made:
        delete(server, sandbox)


def body_of(server, **keys):
    """The smallest create body that the SDK sends, with changes; None removes a key."""
    body = {
        "image": {"uri": server.image},
        "entrypoint": ["tail", "-f", "/dev/null"],
        "timeout": 300,
        "resourceLimits": {"cpu": "500m", "memory": "256Mi"},
        **keys,
    }
    return {key: value for key, value in body.items() if value is not None}


def delete(server, sandbox):
    answer = httpx.delete(
        f"{server.url}/v1/sandboxes/{sandbox}", headers={"OPEN-SANDBOX-API-KEY": server.key}, timeout=60
    )
    assert answer.status_code in (204, 404), answer.text


def texts(messages):
    return [message.text for message in messages]
