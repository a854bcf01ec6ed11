"""The agent under load that means harm, through the whole product: no reader, endless lines, crowds, too little memory.

While each of them lasts, `/ping` is asked all the time, and every answer has to come. Crowds are never larger than what the
limit of the sandbox under test plus a little: a limit that does not hold must not take the machine along.
"""

import concurrent.futures
import contextlib
import json
import re
import socket
import threading
import time
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from plain import Plain, parse
from stack import processes, wait_for

pytestmark = pytest.mark.sandglass
MIB = 1 << 20
# What the agent may take at worst: its own few, all streams together, and a little for each.
BOUND = 48 * MIB


@pytest.fixture
def plain(server):
    made = Plain(server.url, server.key, server.image)
    yield made
    made.close()


class Pings:
    """Asks a sandbox's agent whether it is there, until the block ends; a missing answer fails the test."""

    def __init__(self, server, box):
        self.client, self.box = Plain(server.url, server.key), box
        self.over, self.failed, self.answered, self.slowest = threading.Event(), [], 0, 0
        self.thread = threading.Thread(target=self._ask)

    def _ask(self):
        while not self.over.wait(0.05):
            begun = time.monotonic()
            try:
                answer = self.client.agent("GET", self.box, "ping")
                if answer.status_code != 200:
                    self.failed.append(answer.status_code)
            except Exception as error:  # noqa: BLE001  (whatever it is, it is the failure)
                self.failed.append(repr(error))
            self.answered += 1
            self.slowest = max(self.slowest, time.monotonic() - begun)

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.over.set()
        self.thread.join()
        self.client.close()
        assert self.answered and not self.failed, (self.answered, self.failed[:5], self.slowest)


def agent_process(box):
    """The first process of a sandbox, from the host."""
    found = [p for p in processes() if "execd" in p.command.split(" ")[0] and box in p.cgroups + environment(p.pid)]
    assert found, "no agent"
    return min(found, key=lambda p: p.pid).pid


def environment(pid):
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().decode("utf-8", "replace")
    except OSError:
        return ""


def resident(pid):
    return int(re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[1]) * 1024


@contextlib.contextmanager
def reading(plain, box, command):
    """A foreground command whose answer is read by the caller, or not."""
    with plain.http.stream("POST", f"/v1/sandboxes/{box}/proxy/44772/command", json={"command": command}, timeout=300) as answer:
        assert answer.status_code == 200
        yield answer


def test_a_line_of_one_gigabyte_and_nobody_who_reads(plain, server):
    box = plain.create()
    with Pings(server, box):
        with reading(plain, box, "yes ''") as unread:
            chunks = unread.iter_raw(4096)
            assert b'"init"' in next(chunks)
            with reading(plain, box, "head -c 1000000000 /dev/zero | tr '\\0' x; echo; echo end") as answer:
                got, tail = 0, b""
                for piece in answer.iter_raw():
                    got += piece.count(b"x")
                    tail = (tail + piece)[-1000:]
            assert got >= 1_000_000_000 and b'"text":"end"' in tail and b"execution_complete" in tail, (got, tail)
            if server.runtime == "embedded":
                pid = server.stack.document(box, "state.json")["initPid"]
                assert resident(pid) < BOUND
    assert plain.text(box, "echo fine") == "fine"


def test_a_thousand_commands_at_once(plain, server):
    """In the foreground, each with a connection of its own to the server and through it to the agent."""
    box = plain.create(resourceLimits={"memory": "1Gi", "pids": "4096"})
    address = urlsplit(server.url)
    body = json.dumps({"argv": ["sleep", "15"]}).encode()
    head = (
        f"POST /v1/sandboxes/{box}/proxy/44772/command HTTP/1.1\r\nHost: {address.netloc}\r\nOPEN-SANDBOX-API-KEY: {server.key}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    ).encode()

    def one(_):
        with socket.create_connection((address.hostname, address.port), timeout=120) as link:
            link.sendall(head + body)
            seen = b""
            while part := link.recv(65536):
                seen += part
        return b" 200 " in seen[:20] and seen.count(b'"init"') == 1 and seen.count(b"execution_complete") == 1

    with Pings(server, box), concurrent.futures.ThreadPoolExecutor(1000) as pool:
        results = list(pool.map(one, range(1000)))
    assert all(results), results.count(False)
    assert plain.text(box, "echo fine") == "fine"


def test_at_the_limit_of_processes_the_agent_serves_and_the_sandbox_recovers(plain, server):
    box = plain.create(resourceLimits={"memory": "512Mi", "pids": "64"})
    crowd = "for i in 1 2 3 4 5 6 7 8 9 10; do for j in 1 2 3 4 5 6 7 8 9 10; do sleep 300 & done; done; wait"
    begun = plain.agent("POST", box, "command", json={"command": crowd, "background": True})
    identity = json.loads(begun.text.split("\n\n")[0])["text"]
    assert wait_for(lambda: plain.run(box, ["true"]).error is not None), "the limit does not hold"
    with Pings(server, box):
        for number in range(20):
            assert plain.write(box, "/tmp/file", b"%d" % number).status_code == 200
            assert plain.read(box, "/tmp/file").content == b"%d" % number
        assert plain.agent("DELETE", box, "command", params={"id": identity}).status_code == 200
    assert wait_for(lambda: plain.run(box, ["true"]).complete)
    assert plain.state(box) == "Running"


def test_the_kernel_ends_commands_and_not_the_agent_when_memory_is_short(plain, server):
    box = plain.create(resourceLimits={"memory": "96Mi", "pids": "300"})
    # Many processes that are each smaller than the agent: the largest of the box would be the agent itself.
    crowd = "i=0; while [ $i -lt 150 ]; do i=$((i+1)); sh -c 'x=$(head -c 1500000 /dev/zero | tr \"\\0\" x); sleep 20' & done; wait"
    with Pings(server, box):
        done = plain.run(box, "tail /dev/zero")
        assert not done.complete and done.error["evalue"] in ("-1", "137"), done
        plain.agent("POST", box, "command", json={"command": crowd, "background": True})
        time.sleep(6)
        assert plain.state(box) == "Running", plain.status(box)
    assert wait_for(lambda: plain.run(box, ["true"]).complete)


def test_a_storm_of_zombies_is_cleared(plain, server):
    box = plain.create(resourceLimits={"memory": "512Mi", "pids": "1024"})
    storm = "for i in 1 2 3 4 5 6 7 8 9 10; do (for j in 1 2 3 4 5 6 7 8 9 10; do (:) & done) & done; wait"
    with Pings(server, box):
        for _ in range(20):
            assert plain.run(box, storm).complete
        count = "cat /proc/[0-9]*/stat 2>/dev/null | grep -c ') Z ' || true"
        assert wait_for(lambda: plain.text(box, count) == "0")


def test_output_that_is_no_text_arrives_as_events(plain):
    box = plain.create()
    done = plain.agent("POST", box, "command", json={"command": "head -c 1000000 /dev/urandom; printf '\\303'; printf '\\251\\n'"})
    outcome = parse(done.content)
    assert outcome.complete and outcome.stdout and outcome.stdout[-1].endswith("é")


def test_a_child_that_stays_behind_does_not_hold_the_stream(plain):
    box = plain.create()
    waits = "(until test -e /tmp/go; do sleep 0.1; done; echo late > /tmp/late) & echo now"
    assert plain.run(box, waits).stdout == ["now"]
    assert plain.text(box, "test -e /tmp/late || echo alive; touch /tmp/go") == "alive"
    assert wait_for(lambda: plain.text(box, "cat /tmp/late 2>/dev/null || true") == "late")
