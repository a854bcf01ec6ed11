"""Whatever is killed, in whatever phase: a sandbox from a repository gets ready or says what happened to it, and nothing is left."""

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

import git_image
from docker_engine import Engine
from stack import wait_for
from workspace_stacks import client_of, embedded, on_engine
from workspaces import QUICK_AGENT

pytestmark = pytest.mark.sandglass

WAITS = "#!/bin/sh\necho begun\nsleep 600\n"
# What begins a phase and keeps it going: files of the repository, and of the request.
PHASES = {
    "setup": ({".sandbox/setup.sh": WAITS}, {"imageBuild": {"policy": "never"}}),
    "services": ({}, {"services": [{"name": "deaf", "command": ["sleep", "600"], "port": 8000, "required": True}]}),
    "start": ({".sandbox/start.sh": WAITS}, {}),
}


@pytest.fixture(scope="module")
def stack():
    with embedded() as made:
        yield made


@pytest.fixture(scope="module")
def private():
    """An engine of these tests' own, and a server on it."""
    engine = Engine()
    try:
        with on_engine(engine.start()) as made:
            yield engine, made
        problems = engine.wait_clean()
    finally:
        engine.close()
    assert not problems, "\n".join(problems)


@pytest.fixture
def shaky(private):
    """An engine that tests may kill, a server on it, and a client; containers go on without the engine. After every test nothing is left."""
    engine, stack = private
    engine.revive()
    with client_of(stack, engine) as spaces:
        yield engine, stack, spaces
        engine.revive()


def boots(spaces, identity, phase):
    spaces.until(identity, "Pending", reason="booting")
    reached = wait_for(lambda: (spaces.show(identity).get("progress") or {}).get("phase") == phase)
    assert reached, spaces.show(identity)


def ended_by_agent(spaces, identity, phase):
    """What is shown of a sandbox whose agent was killed: that it failed, and in which phase."""
    shown = spaces.until(identity, "Failed")
    # From the first moment on, and with all that is known once its last words have been waited for.
    assert shown["status"]["reason"] == "runtime_error" and shown["status"]["message"].startswith(f"{phase}: "), shown
    known = wait_for(lambda: (spaces.show(identity).get("lastFailure") or {}).get("phase") == phase)
    assert known, spaces.show(identity)
    spaces.delete(identity)
    spaces.until_gone(identity)


@pytest.mark.parametrize("phase", PHASES)
def test_an_agent_that_is_killed_while_it_boots(spaces, stack, git, phase):
    files, body = PHASES[phase]
    identity = spaces.begin(git.repository({"README": "x", **files}), agent=QUICK_AGENT, **body)
    boots(spaces, identity, phase)
    agent = min((p for p in stack.guests() if identity in p.cgroups), key=lambda p: p.started)
    os.kill(agent.pid, signal.SIGKILL)
    ended_by_agent(spaces, identity, phase)


def test_a_server_that_is_killed_while_it_takes_a_sandbox_down(spaces, stack, git):
    stop = {"command": ["/bin/sh", "-c", "sleep 8"], "timeoutSeconds": 30}
    identity = spaces.ready(git.repository({"README": "x"}), lifecycle={"preStop": stop})
    with ThreadPoolExecutor(1) as pool:
        # Answered when it is gone, or not at all.
        asked = pool.submit(lambda: pytest.raises(httpx.HTTPError, spaces.http.delete, f"/v1/sandboxes/{identity}", timeout=60))
        stopping = wait_for(lambda: spaces.show(identity)["status"]["state"] == "Stopping")
        assert stopping, spaces.show(identity)
        assert spaces.show(identity)["status"]["reason"] == "user_delete", spaces.show(identity)
        stack.kill()
        asked.result(timeout=60)
    stack.start()
    # What was asked for is carried out, once.
    spaces.until_gone(identity)


@pytest.mark.parametrize("phase", ["setup", "start"])
def test_an_agent_that_is_killed_while_it_boots_on_an_engine(shaky, git, phase):
    engine, _, spaces = shaky
    files, body = PHASES[phase]
    identity = spaces.begin(git.repository({"README": "x", **files}), agent=QUICK_AGENT, **body)
    boots(spaces, identity, phase)
    os.kill(engine.container(identity)["State"]["Pid"], signal.SIGKILL)
    ended_by_agent(spaces, identity, phase)


@pytest.mark.parametrize("recipe", ["hooks", "dockerfile"])
def test_an_engine_that_is_killed_during_a_build(shaky, git, recipe):
    engine, _, spaces = shaky
    wait = "echo begun; sleep 5; echo done >> /var/done"
    hook, dockerfile = f"#!/bin/sh\n{wait}\n", f"FROM {git_image.NAME}\nRUN {wait}\n"
    repository = git.repository({".sandbox/setup.sh": hook} if recipe == "hooks" else {"Dockerfile": dockerfile})
    identity = spaces.begin(repository)
    spaces.until(identity, "Pending", reason="image_building")
    (build,) = spaces.builds_of(repository)
    assert wait_for(lambda: "\nbegun" in spaces.build_log(build["id"]), 60)
    engine.kill()
    # Nothing of the build is known without the engine, and nothing is claimed.
    assert spaces.show(identity)["status"]["state"] in ("Pending", 503)
    engine.start()
    spaces.until_ready(identity)
    assert spaces.text(identity, "cat /var/done") == "done"
    assert len(spaces.builds_of(repository)) == 1
    for container in engine.containers():
        # The engine's own: it keeps no record of the container that its builder ran an instruction in.
        if not container["Names"][0].startswith("/sandbox-"):
            engine.call("rm", "-f", container["Id"], check=False)
    assert wait_for(lambda: len(engine.containers()) == 1), engine.leftovers(living=[identity])


def test_an_engine_that_is_killed_during_a_boot(shaky, git):
    engine, stack, spaces = shaky
    repository = git.repository({".sandbox/start.sh": "#!/bin/sh\necho ran >> /var/start.count\nsleep 4\n"})
    identity = spaces.begin(repository)
    boots(spaces, identity, "start")
    engine.kill()
    before = len(stack.log.read_text(errors="replace").splitlines())
    time.sleep(3)
    # It waits for the engine, and does not ask for it without end.
    after = len(stack.log.read_text(errors="replace").splitlines())
    assert after - before < 40, "\n".join(stack.tail(60).splitlines())
    engine.start()
    spaces.until_ready(identity)
    assert spaces.text(identity, "cat /var/start.count") == "ran"
    assert wait_for(lambda: len(engine.containers()) == 1), engine.leftovers(living=[identity])
