"""The binary itself: what a person runs first."""

import contextlib
import os
import signal
import subprocess
import tempfile
import threading
import time
from pathlib import Path

import pytest

from stack import Client, Stack, wait_for

pytestmark = pytest.mark.sandglass

# Where the demonstration may keep its state.
STATES = (tempfile.gettempdir(), "/var/tmp", "/dev/shm")


def sandglass(*arguments, **more):
    return subprocess.run(
        [os.environ["SANDGLASS_BIN"], *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        **more,
    )


@pytest.fixture
def stack():
    made = Stack()
    yield made
    assert not made.close()


def test_the_demo_works_and_leaves_nothing(tmp_path):
    seen, over = set(), threading.Event()

    def watch():
        """Notes its sandboxes: others come and go on this machine meanwhile."""
        while not over.wait(0.02):
            with contextlib.suppress(OSError):
                seen.update(box.name for place in STATES for box in Path(place).glob("sandglass-demo-*/sandboxes/*"))

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        done = sandglass("demo", cwd=tmp_path)
    finally:
        over.set()
        watching.join()
    assert done.returncode == 0, done.stdout + done.stderr
    assert seen, "no sandbox was seen"
    assert wait_for(lambda: not [path for path in Stack.cgroup_folders() if any(box in path for box in seen)])
    assert list(tmp_path.iterdir()) == []


def test_the_doctor_finds_this_machine_fit():
    done = sandglass("doctor")
    assert done.returncode == 0, done.stdout + done.stderr


def test_an_unknown_configuration_key_names_the_nearest_one(tmp_path):
    (tmp_path / "c.toml").write_text('[server]\nprot = 1\n[runtime]\ntype = "embedded"\n')
    done = sandglass("serve", "--config", str(tmp_path / "c.toml"))
    assert done.returncode != 0 and "prot" in done.stderr and "port" in done.stderr


def test_a_second_server_on_the_same_state_directory_is_refused(stack):
    stack.start()
    other = stack.home / "other.toml"
    other.write_text(stack.config.read_text().replace(f"port = {stack.port}", "port = 1"))
    done = sandglass("serve", "--config", str(other))
    assert done.returncode != 0
    assert stack.server.poll() is None


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_sandboxes_outlive_the_server(stack, how):
    stack.start()
    client = stack.client()
    body = {
        "image": {"uri": "host"},
        "entrypoint": ["sleep", "infinity"],
        "timeout": 600,
        "resourceLimits": {},
        "metadata": {"kept": "yes"},
    }
    status, made = client.call("POST", "/v1/sandboxes", body)
    assert status == 202, made
    path = f"/v1/sandboxes/{made['id']}"
    assert wait_for(lambda: client.call("GET", path)[1]["status"]["state"] == "Running")
    command = f"{path}/proxy/44772/command"
    background = {"command": "while :; do echo tick; sleep 0.1; done", "background": True}
    assert client.call("POST", command, background)[0] == 200
    before = client.call("GET", path)[1]
    client.close()

    stack.server.send_signal(how)
    stack.server.wait(60)
    shims = {shim.pid for shim in stack.shims()}
    stack.start()
    client = stack.client()
    assert client.call("GET", path)[1] == before
    assert stack.document(made["id"], "state.json")["shimPid"] in shims
    status, _, stream = client.raw("POST", command, {"command": "echo still here"})
    assert status == 200 and b"still here" in stream
    client.close()


def test_state_and_logs_hold_no_secret_that_others_can_read(stack):
    stack.start()
    client = stack.client()
    body = {"image": {"uri": "host"}, "entrypoint": ["sleep", "9"], "timeout": 60, "resourceLimits": {}}
    identity = client.call("POST", "/v1/sandboxes", body)[1]["id"]
    assert wait_for(lambda: stack.document(identity, "spec.json"))
    assert stack.state.stat().st_mode & 0o077 == 0
    spec = stack.document(identity, "spec.json")
    log = stack.log.read_text()
    assert stack.key not in log and spec["accessToken"] not in log and spec["routeToken"] not in log
    client.close()


def test_idle_costs_little_processor_time(stack):
    stack.start()
    ticks = lambda: sum(map(int, Path(f"/proc/{stack.server.pid}/stat").read_text().split()[13:15]))  # noqa: E731
    spent = []

    def idle():
        """Three seconds of it. What is prepared in the background after the start is no idleness, and takes as long as it is let."""
        begun = ticks()
        time.sleep(3)
        spent.append((ticks() - begun) / os.sysconf("SC_CLK_TCK"))
        return spent[-1] < 0.15

    assert wait_for(idle), spent


def test_a_slow_client_does_not_hold_up_the_others(stack):
    stack.start()
    slow = [Client(stack.port, stack.key) for _ in range(50)]
    for client in slow:
        client.connection.connect()
        client.connection.sock.sendall(b"POST /v1/sandboxes HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
    quick = stack.client()
    assert quick.call("GET", "/v1/sandboxes")[0] == 200
    for client in [*slow, quick]:
        client.close()
