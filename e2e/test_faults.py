"""What goes wrong: memory, processes and disk used up, programs that end, clients that misbehave, servers that die."""

import json
import os
import random
import re
import socket
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta, timezone
from http.client import HTTPException
from pathlib import Path

import httpx
import pytest

from archives import Image, busybox
from plain import Plain, parse
from registries import PASSWORD, USER, SlowRegistry
from stack import Client, Stack, wait_for

pytestmark = pytest.mark.sandglass

EXHAUSTED = "SANDBOX::RESOURCES_EXHAUSTED"
MIB = 1 << 20


@pytest.fixture
def plain(server):
    """After every test no sandbox of it is left, and nothing of one on the host."""
    made = Plain(server.url, server.key)
    yield made
    made.close()
    living = {sandbox["id"] for sandbox in made_by_others(server)}
    assert not server.stack.wait_clean(living)


def made_by_others(server):
    client = Client(server.stack.port, server.key)
    try:
        return client.sandboxes()
    finally:
        client.close()


@pytest.fixture
def private():
    """Stacks of a test's own, each audited at the end."""
    stacks = []

    def make(**keys):
        stacks.append(Stack(**keys))
        return stacks[-1]

    yield make
    problems = [problem for stack in stacks for problem in stack.close()]
    assert not problems, "\n".join(problems)


# ---------------------------------------------------------------- memory and processes


def test_an_entrypoint_that_runs_out_of_memory(plain):
    box = plain.create(entrypoint=["tail", "/dev/zero"], resourceLimits={"memory": "32Mi"})
    assert wait_for(lambda: plain.state(box) == "Failed"), plain.status(box)
    status = plain.status(box)
    assert status["reason"] == "OUT_OF_MEMORY" and "memory" in status["message"], status
    assert "oom-kill" in plain.events(box)
    assert plain.delete(box) == 204


def test_a_command_that_runs_out_of_memory_leaves_the_sandbox_running(plain):
    box = plain.create(resourceLimits={"memory": "64Mi"})
    done = plain.run(box, "tail /dev/zero")
    assert not done.complete and done.error["traceback"] == ["signal: killed"], done
    assert plain.state(box) == "Running"
    assert plain.text(box, "echo still here") == "still here"
    assert wait_for(lambda: "oom-kill" in plain.events(box)), plain.events(box)


def test_a_fork_bomb_stops_at_the_limit_and_the_agent_answers(plain, server):
    box = plain.create(resourceLimits={"pids": "64", "memory": "256Mi"})
    bomb = {"command": "bomb() { bomb | bomb & }; bomb; sleep 2", "background": True}
    assert plain.agent("POST", box, "command", json=bomb).status_code == 200
    assert wait_for(lambda: "pids-limit" in plain.events(box)), plain.events(box)
    assert plain.agent("GET", box, "ping").status_code == 200
    inside = [p for p in server.stack.guests() if box in p.cgroups]
    assert 0 < len(inside) <= 64
    assert plain.state(box) == "Running"
    done = plain.run(box, ["true"])
    assert done.complete or done.error, done
    assert plain.delete(box) == 204


# ---------------------------------------------------------------- disk


@pytest.fixture
def small_disk(tmp_path, private):
    """A server whose state directory has 64 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m,mode=0700", "tmpfs", disk], check=True)
    stack = Stack(state=disk / "state")
    try:
        stack.start()
        yield stack
        problems = stack.close()
    finally:
        # Lazily, so that a failure does not take later tests along.
        subprocess.run(["umount", "--lazy", disk], check=True)
    assert not problems, "\n".join(problems)


def test_a_full_disk_is_told_and_survived(small_disk):
    stack = small_disk
    plain = Plain(stack.url, stack.key)
    box = plain.create()
    done = plain.run(box, "dd if=/dev/zero of=/fill bs=64k 2>&1; cat /dev/zero > /rest")
    assert done.error and "No space left" in "".join(done.stdout + done.stderr), done
    assert wait_for(lambda: "disk-full" in plain.events(box)), plain.events(box)
    assert plain.state(box) == "Running" and plain.http.get("/healthz").status_code == 200
    for _ in range(3):
        answer = plain.post()
        assert answer.status_code in (429, 507), answer.text
        assert answer.json()["code"] == EXHAUSTED, answer.text
        assert re.search(r"space|full", answer.json()["message"]), answer.text
    assert plain.made == [box]
    assert stack.wait_clean([box]) == []
    assert plain.delete(box) == 204
    assert plain.get(box).status_code == 404
    again = plain.create()
    assert plain.text(again, "echo room again") == "room again"
    plain.close()


def test_an_import_that_does_not_fit(small_disk):
    stack = small_disk
    plain = Plain(stack.url, stack.key)
    box = plain.create()
    plain.run(box, "dd if=/dev/zero of=/fill bs=64k")
    answer = plain.http.post("/v1/images/import?name=fit:1", content=busybox())
    last = json.loads(answer.text.splitlines()[-1])
    # Refused while it is uploaded, or told at the end of the stream while it is unpacked.
    assert last.get("code") == "GENERAL::NO_SPACE" and answer.status_code in (200, 507), answer.text
    assert list((stack.state / "images/tmp").iterdir()) == [] and list((stack.state / "uploads").iterdir()) == []
    assert all("fit" not in name for i in plain.http.get("/v1/images").json()["items"] for name in i["references"])
    plain.close()


# ---------------------------------------------------------------- ends


@pytest.mark.parametrize("code, state, reason", [(0, "Terminated", "CONTAINER_EXITED"), (3, "Failed", "CONTAINER_EXITED_ERROR")])
def test_an_entrypoint_that_ends(plain, code, state, reason):
    box = plain.create(entrypoint=["sh", "-c", f"sleep 0.3; exit {code}"])
    assert wait_for(lambda: plain.state(box) == state), plain.status(box)
    status = plain.status(box)
    assert status["reason"] == reason and str(code) in status["message"], status
    for verb in ("pause", "resume"):
        assert plain.http.post(f"/v1/sandboxes/{box}/{verb}").status_code == 409
    assert plain.http.get(f"/v1/sandboxes/{box}/endpoints/80").status_code in (404, 409)
    assert plain.agent("GET", box, "ping").status_code in (404, 409, 502)
    assert plain.delete(box) == 204 and plain.get(box).status_code == 404


def test_an_entrypoint_that_is_killed_names_the_signal(plain):
    box = plain.create(entrypoint=["sh", "-c", "sleep 0.2; kill -SEGV $$"])
    assert wait_for(lambda: plain.state(box) == "Failed"), plain.status(box)
    assert re.search(r"SEGV|signal 11|139", plain.status(box)["message"]), plain.status(box)


def test_expiry_removes_and_can_be_brought_forward(plain):
    box = plain.create(timeout=60)
    assert "created" in plain.events(box)
    soon = datetime.now(timezone.utc) + timedelta(seconds=5)
    renewed = plain.http.post(f"/v1/sandboxes/{box}/renew-expiration", json={"expiresAt": soon.isoformat()})
    assert renewed.status_code == 200, renewed.text
    assert plain.state(box) == "Running"
    assert wait_for(lambda: plain.get(box).status_code == 404, 30)
    assert datetime.now(timezone.utc) >= soon


# ---------------------------------------------------------------- streams


def resident(server, box):
    """Resident memory of the agent, seen from the host."""
    pid = server.stack.document(box, "state.json")["initPid"]
    assert "execd" in Path(f"/proc/{pid}/cmdline").read_text()
    return int(re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[1]) * 1024


def stream(server, box, command):
    client = Client(server.stack.port, server.key, timeout=30)
    body = json.dumps({"command": command})
    headers = {"OPEN-SANDBOX-API-KEY": server.key, "Content-Type": "application/json"}
    client.connection.request("POST", f"/v1/sandboxes/{box}/proxy/44772/command", body, headers)
    answer = client.connection.getresponse()
    assert answer.status == 200
    return client, answer


def test_a_slow_reader_costs_the_agent_no_memory_and_misses_nothing(plain, server):
    box = plain.create()
    lines = 600_000
    client, answer = stream(server, box, f"yes | head -n {lines}")
    head = answer.read(100_000)
    most = 0
    for _ in range(30):
        time.sleep(0.1)
        most = max(most, resident(server, box))
    assert most < 16 * MIB, most
    whole = head + answer.read()
    client.close()
    assert whole.count(b'{"type":"stdout","text":"y",') == lines
    # Parsing all of them is what takes the time: both ends, and every frame is separated as it should be.
    assert whole.count(b"\n\n") >= lines + 2
    assert parse(whole[: whole.index(b"\n\n", 200_000)]).stdout and parse(whole[whole.rindex(b"\n\n", 0, -2) :]).complete


def test_a_client_that_leaves_does_not_end_its_command(plain, server):
    box = plain.create()
    script = "i=0; while [ $i -lt 200 ]; do i=$((i+1)); echo $i; echo $i >> /tmp/ticks; sleep 0.05; done"
    client, answer = stream(server, box, script)
    assert answer.read(40)
    client.connection.sock.shutdown(socket.SHUT_RDWR) if client.connection.sock else answer.fp.raw._sock.shutdown(2)
    client.close()
    answer.close()
    ticks = lambda: int(plain.text(box, "touch /tmp/ticks; wc -l < /tmp/ticks"))  # noqa: E731
    first = ticks()
    assert wait_for(lambda: ticks() > first + 5), first
    assert plain.state(box) == "Running"


# ---------------------------------------------------------------- requests that make no sense


def test_many_creates_and_deletes_among_nonsense(plain, server):
    nonsense = [
        lambda http: http.post("/v1/sandboxes", content=b"{"),
        lambda http: http.post("/v1/sandboxes", json={"image": {"uri": "host"}, "timeout": "soon"}),
        lambda http: http.get("/v1/sandboxes/no-such"),
        lambda http: http.delete("/v1/sandboxes/00000000-0000-4000-8000-000000000000"),
        lambda http: http.get("/v1/sandboxes?page=-1"),
        lambda http: http.put("/v1/sandboxes"),
        lambda http: http.post("/v1/images/pull", json=[]),
    ]
    before = {sandbox["id"] for sandbox in made_by_others(server)}

    def one(number):
        seen = []
        with httpx.Client(base_url=server.url, headers={"OPEN-SANDBOX-API-KEY": server.key}, timeout=60) as http:
            bad = random.Random(number).choice(nonsense)
            body = {"image": {"uri": "host"}, "entrypoint": ["sleep", "60"], "timeout": 60, "resourceLimits": {}}
            made = http.post("/v1/sandboxes", json=body)
            seen += [made.status_code, bad(http).status_code]
            if made.status_code == 202:
                path = f"/v1/sandboxes/{made.json()['id']}"
                seen += [http.get(path).status_code, http.delete(path).status_code, http.get(path).status_code]
        return seen

    with ThreadPoolExecutor(20) as pool:
        answers = list(pool.map(one, range(100)))
    assert all(seen[0] == 202 and 400 <= seen[1] < 500 for seen in answers), answers
    assert all(seen[2:] == [200, 204, 404] for seen in answers), answers
    assert {sandbox["id"] for sandbox in made_by_others(server)} == before
    assert not server.stack.wait_clean(before)


def test_a_body_that_is_too_large(plain):
    answer = plain.http.post("/v1/sandboxes", content=b'{"image": "' + b"x" * (20 * MIB) + b'"}')
    assert (answer.status_code, answer.json()["code"]) == (413, "GENERAL::BODY_TOO_LARGE")


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 100_000,
        b'{"image":' * 20_000 + b"1" + b"}" * 20_000,
        b'{"image": {"uri": "\xff\xfe"}}',
        b'{"image": {"uri": "\\ud800"}}',
        b"",
        b"null",
        b"\x00",
        b'{"timeout": 1e400}',
    ],
    ids=["open brackets", "nested objects", "no UTF-8", "half a surrogate", "nothing", "null", "zero byte", "infinity"],
)
def test_a_body_that_is_no_json(plain, body):
    for path in ("/v1/sandboxes", "/v1/images/pull"):
        answer = plain.http.post(path, content=body, headers={"Content-Type": "application/json"})
        assert answer.status_code in (400, 422) and answer.json()["code"], answer.text


@pytest.mark.parametrize("timeout", [-1, 0, 59, 2**31, 2**63 - 1, 2**63, 2**70, -(2**63), 60.5, 1e300, "60", True, [60]])
def test_a_timeout_that_makes_no_sense(plain, timeout):
    answer = plain.post(timeout=timeout)
    if answer.status_code == 202:
        # 68 years fit into a date.
        assert timeout == 2**31 or timeout == "60", answer.text
    else:
        assert answer.status_code in (400, 422) and answer.json()["code"], answer.text


@pytest.mark.parametrize("limits", [{"memory": "-1"}, {"memory": "99999999999Ei"}, {"cpu": "nan"}, {"pids": "-1"}, {"pids": "1e9"}])
def test_limits_that_make_no_sense(plain, limits):
    answer = plain.post(resourceLimits=limits)
    assert answer.status_code in (400, 422), answer.text
    assert plain.made == []


def test_a_sandbox_that_no_memory_is_left_for(plain, server):
    answer = plain.post(resourceLimits={"memory": "1"})
    assert answer.status_code in (400, 500) and answer.json()["code"], answer.text
    assert plain.made == []
    assert not server.stack.wait_clean({sandbox["id"] for sandbox in made_by_others(server)})


@pytest.mark.parametrize("identity", ["..", "%2e%2e", "%2E%2E%2f%2e%2e", "%2F", "..%2Flock", "%00", "x" * 10_000, "%ff", "a%0d%0ab", "."])
def test_an_id_that_is_none(server, identity):
    client = Client(server.stack.port, server.key)
    for method, rest in [("GET", ""), ("DELETE", ""), ("GET", "/diagnostics/logs"), ("POST", "/pause"), ("GET", "/proxy/80/x")]:
        status, answer = client.call(method, f"/v1/sandboxes/{identity}{rest}")
        assert status in ((404, 405) if set(identity) == {"."} else (400, 404)), (method, rest, status, answer)
        assert answer is None or "code" in answer, answer
    client.close()


# ---------------------------------------------------------------- servers


def test_two_servers_on_one_state_directory(private):
    first = private()
    first.start()
    plain = Plain(first.url, first.key)
    box = plain.create()
    second = private(state=first.state)
    second.start(wait=False)
    assert second.server.wait(60) != 0
    assert str(first.state) in second.tail() and "Running" == plain.state(box), second.tail()
    assert plain.text(box, "echo undisturbed") == "undisturbed"
    plain.close()


@pytest.fixture
def slow():
    made = []

    def make(**keys):
        made.append(SlowRegistry(Image(busybox()), **keys))
        return made[-1]

    yield make
    for stub in made:
        stub.close()


def test_a_pull_goes_on_after_the_server_was_killed(private, slow):
    stack, stub = private(config={"embedded": {"create_grace_ms": 100}}), slow()
    stack.start()
    plain = Plain(stack.url, stack.key)
    identity = plain.post(f"{stub.address}/slow:1").json()["id"]
    assert stub.asked.wait(60) and plain.state(identity) == "Pending"
    stack.kill()
    stub.asked.clear()
    stack.start()
    assert plain.state(identity) == "Pending"
    assert stub.asked.wait(60)
    stub.released.set()
    assert wait_for(lambda: plain.state(identity) == "Running"), plain.status(identity)
    assert plain.text(identity, "echo pulled") == "pulled"
    assert wait_for(lambda: not list((stack.state / "images/tmp").iterdir()))
    plain.close()


def test_a_pull_with_a_password_fails_when_the_server_was_killed(private, slow):
    stack, stub = private(config={"embedded": {"create_grace_ms": 100}}), slow(password=PASSWORD)
    stack.start()
    plain = Plain(stack.url, stack.key)
    image = {"uri": f"{stub.address}/slow:1", "auth": {"username": USER, "password": PASSWORD}}
    identity = plain.post(image).json()["id"]
    assert stub.asked.wait(60) and plain.state(identity) == "Pending"
    stack.kill()
    stack.start()
    assert wait_for(lambda: plain.state(identity) == "Failed"), plain.status(identity)
    status = plain.status(identity)
    assert status["reason"] == "CREATE_FAILED" and "credentials" in status["message"], status
    kept = b"".join(path.read_bytes() for path in stack.state.glob("server.db*")) + stack.log.read_bytes()
    assert PASSWORD.encode() not in kept
    assert plain.delete(identity) == 204
    plain.close()
