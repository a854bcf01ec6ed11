"""Terminals over WebSocket, as a browser would reach them: through the server's proxy, with the endpoint's headers."""

import json
import time

import httpx
import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

from stack import wait_for


class Terminal:
    """One connection; binary frames are collected until a text that is waited for has come."""

    def __init__(self, url, headers):
        self.socket = connect(url, additional_headers=headers, open_timeout=30, max_size=None)
        self.shown = b""
        self.replays = []

    def next(self):
        """The next text frame as an object, or None after a binary one."""
        frame = self.socket.recv(timeout=60)
        if isinstance(frame, str):
            return json.loads(frame)
        if frame[0] == 3:
            self.replays.append(int.from_bytes(frame[1:9], "big"))
        self.shown += frame[9:] if frame[0] == 3 else frame[1:]
        return None

    def told(self):
        while True:
            told = self.next()
            if told:
                return told

    def wait_for(self, text):
        while text.encode() not in self.shown:
            told = self.next()
            assert told is None, (told, self.shown)
        before, _, self.shown = self.shown.partition(text.encode())
        return before.decode(errors="replace")

    def type(self, text):
        self.socket.send(b"\0" + text.encode())

    def say(self, **keys):
        self.socket.send(json.dumps(keys))

    def closed(self):
        while True:
            try:
                self.next()
            except ConnectionClosed as closed:
                return closed.rcvd.code, closed.rcvd.reason


@pytest.fixture(params=["endpoint", "proxy"])
def terminals(request, http, server, box):
    """Makes terminals in the shared sandbox, reached as its endpoint says or through the server."""
    query = {"use_server_proxy": "true"} if request.param == "proxy" else {}
    told = http.get(f"/v1/sandboxes/{box.id}/endpoints/44772", params=query).json()
    headers = {**(told.get("headers") or {}), "OPEN-SANDBOX-API-KEY": server.key}
    base = "http://" + told["endpoint"].removeprefix("http://")
    opened, made = [], []

    class Terminals:
        def make(self, **body):
            answer = httpx.post(f"{base}/pty", json=body, headers=headers, timeout=30)
            assert answer.status_code == 201, answer.text
            made.append(answer.json()["session_id"])
            return made[-1]

        def connect(self, terminal, **query):
            url = f"{base}/pty/{terminal}/ws?{httpx.QueryParams(query)}".replace("http://", "ws://", 1)
            opened.append(Terminal(url, headers))
            return opened[-1]

        def call(self, method, terminal):
            return httpx.request(method, f"{base}/pty/{terminal}", headers=headers, timeout=30)

    yield Terminals()
    for terminal in opened:
        terminal.socket.close()
    for terminal in made:
        httpx.delete(f"{base}/pty/{terminal}", headers=headers, timeout=30)


def test_a_shell_on_a_terminal(terminals):
    made = terminals.make(cwd="/tmp/terminal")
    assert terminals.call("GET", made).json() == {"session_id": made, "running": False, "output_offset": 0}
    terminal = terminals.connect(made)
    assert terminal.told() == {"type": "connected", "session_id": made, "mode": "pty", "role": "holder"}
    terminal.type("stty size; tty; pwd\n")
    terminal.wait_for("24 80\r\n/dev/pts/")
    terminal.wait_for("/tmp/terminal\r\n")
    terminal.say(type="resize", cols=132, rows=43)
    terminal.say(type="stdin", data="stty size\n")
    terminal.wait_for("43 132\r\n")
    terminal.say(type="ping")
    assert terminal.told() == {"type": "pong"}
    terminal.type("sleep 60; echo after=$?\n")
    time.sleep(0.3)
    terminal.type("\x03")
    terminal.type("echo still here\n")
    terminal.wait_for("still here\r\n")
    terminal.type("exit 3\n")
    assert terminal.told() == {"type": "exit", "exit_code": 3}
    assert terminal.closed() == (1000, "process exited")
    again = terminals.connect(made, since=10**9)
    assert again.told()["type"] == "connected" and again.replays == []


def test_a_terminal_outlives_its_connection(terminals):
    made = terminals.make()
    first = terminals.connect(made)
    first.type("kept=1; echo mark$kept\n")
    first.told()
    first.wait_for("mark1\r\n")
    first.socket.close()
    assert wait_for(lambda: terminals.call("GET", made).json()["running"])
    second = terminals.connect(made, takeover=1)
    second.wait_for("mark1\r\n")
    assert second.replays == [0] and second.told()["type"] == "connected"
    second.type("echo again$kept\n")
    second.wait_for("again1\r\n")


def test_one_types_others_watch_and_a_third_takes_over(terminals):
    made = terminals.make()
    holder = terminals.connect(made)
    assert holder.told()["role"] == "holder"
    # The server accepts before it asks the sandbox, so a refusal becomes a close frame there.
    with pytest.raises((InvalidStatus, ConnectionClosed)) as busy:
        terminals.connect(made).told()
    if busy.type is InvalidStatus:
        assert busy.value.response.status_code == 409
        assert json.loads(busy.value.response.body)["code"] == "ALREADY_CONNECTED"
    else:
        assert busy.value.rcvd.code == 1008
    viewer = terminals.connect(made, mode="viewer")
    assert viewer.told()["role"] == "viewer"
    holder.type("echo seen-by-all\n")
    viewer.wait_for("seen-by-all\r\n")
    viewer.type("echo not me\n")
    assert viewer.told()["code"] == "READ_ONLY"
    taker = terminals.connect(made, takeover=1)
    assert holder.closed() == (4001, "TAKEN_OVER")
    assert taker.told()["role"] == "holder"
    assert terminals.call("DELETE", made).status_code == 200
    assert taker.told() == {"type": "exit", "exit_code": -1}
    assert terminals.call("GET", made).status_code == 404


def test_pipes_instead_of_a_terminal(terminals):
    made = terminals.make(command="echo out; sleep 0.2; echo err >&2; exit 4")
    terminal = terminals.connect(made, pty=0)
    assert terminal.told()["mode"] == "pipe"
    assert terminal.told() == {"type": "exit", "exit_code": 4}
    assert terminal.shown == b"out\nerr\n"


def test_keystrokes_are_echoed_at_once(terminals):
    terminal = terminals.connect(terminals.make(command="exec cat"))
    terminal.told()
    times = []
    for _ in range(100):
        begun = time.monotonic()
        terminal.type("x")
        terminal.wait_for("x")
        times.append(time.monotonic() - begun)
    # What holds a keystroke back does so with most of them; a machine that is busy with something else leaves some alone.
    assert sorted(times)[10] < 0.1, times


def test_much_output_arrives_whole(terminals):
    terminal = terminals.connect(terminals.make(command="seq 1 200000"), pty=0)
    terminal.told()
    assert terminal.told()["exit_code"] == 0
    assert terminal.shown.decode().split() == [str(number) for number in range(1, 200001)]
