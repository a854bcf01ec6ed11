#!/usr/bin/env python3
"""Starts one subject with what it needs, runs the conformance cases against it, and ends everything again.

    run.py sandglass docker | sandglass embedded | reference docker   [--out FILE] [pytest arguments]

Against any other server: set the environment of conftest.py and run pytest in this folder.
"""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from docker_engine import PYTHON, STUB_AGENT, Engine  # noqa: E402
from docker_stack import DockerStack, Reference  # noqa: E402
from stack import Stack  # noqa: E402

MAXIMUM = {"max_sandbox_timeout_seconds": 86400}


def pytest(subject, runtime, server, image, folder, out, arguments):
    environment = {
        **os.environ,
        "CONFORMANCE_URL": server.url,
        "CONFORMANCE_KEY": server.key,
        "CONFORMANCE_RUNTIME": runtime,
        "CONFORMANCE_IMAGE": image,
        "CONFORMANCE_SUBJECT": subject,
        "CONFORMANCE_HOST_PATH": folder,
        **({"CONFORMANCE_OUT": str(Path(out).absolute())} if out else {}),
    }
    command = [sys.executable, "-m", "pytest", "-c", "pytest.ini", "-q", *arguments]
    return subprocess.run(command, env=environment, cwd=HERE, check=False).returncode


def main():
    # What was started has to be ended, also when somebody ends this.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    subject, runtime, *arguments = sys.argv[1:]
    out = None
    if "--out" in arguments:
        at = arguments.index("--out")
        out = arguments[at + 1]
        del arguments[at : at + 2]
    engine, server = None, None
    problems = []
    # Resolved, because allowed paths are compared after following symbolic links.
    with tempfile.TemporaryDirectory(prefix="sandglass-conformance-") as folder:
        more = {"server": MAXIMUM, "storage": {"allowed_host_paths": [folder]}}
        try:
            if runtime == "docker":
                engine = Engine().start().images(PYTHON, STUB_AGENT)
                server = Reference(engine, config=more) if subject == "reference" else DockerStack(engine, more)
            else:
                server = Stack(config=more)
            server.start()
            code = pytest(subject, runtime, server, PYTHON if engine else "host", folder, out, arguments)
            if code and subject == "sandglass":
                print(f"the server's last lines:\n{server.tail()}")
        finally:
            problems += (server.close() if server else None) or []
            if engine:
                problems += [] if subject == "reference" else engine.wait_clean()
                engine.close()
    for problem in problems:
        print(f"left over: {problem}")
    return code or bool(problems)


if __name__ == "__main__":
    sys.exit(main())
