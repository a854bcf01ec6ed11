"""Each way into a sandbox, over time: what moves when, what is cut and stays cut, and connections that stop being HTTP.

No claim is about how long something takes: whatever has to come first is waited for before the next is done.
"""

import hashlib
import json
import os
import socket
import threading

import pytest

from plain import Plain
from stack import Stack
from wire import Reader, Way, frame, handshake
from ways import DATA, Stage, asked, compare, once, says, tidy

pytestmark = pytest.mark.sandglass
PLAIN = "HTTP/1.1 200 OK\nContent-Length: 2"
SSE = "HTTP/1.1 200 OK\nContent-Type: text/event-stream\nCache-Control: no-cache"


# ---------------------------------------------------------------- streams


@pytest.mark.parametrize("framed", ["chunked", "close"])
def test_an_event_arrives_before_the_next_is_made(place, framed):
    stage, way = place
    events = [b"data: %d\n\n" % n for n in range(5)]
    wrapped = [b"%x\r\n%s\r\n" % (len(event), event) if framed == "chunked" else event for event in events]
    steps = says(SSE + ("\nTransfer-Encoding: chunked" if framed == "chunked" else ""))
    for number, part in enumerate(wrapped):
        steps += [("gate", str(number)), ("send", part)]
    steps += [("send", b"0\r\n\r\n" if framed == "chunked" else b""), ("close",)]
    identity = stage.origin.expect(steps)
    with way.connect() as link:
        link.sendall(way.head("GET", "/", [("Accept", "text/event-stream")], identity))
        reader = Reader(link)
        answer = reader.head()
        assert answer.values("content-type") == ["text/event-stream"]
        as_chunks = "chunked" in answer.values("transfer-encoding")
        assert as_chunks or framed == "close"
        for number, event in enumerate(events):
            stage.origin.open(identity, str(number))
            assert (reader.chunk() if as_chunks else reader.exactly(len(event))) == event
        assert (reader.chunk() if as_chunks else reader.exactly(1)) == b""


def test_half_a_chunk_is_not_held_back(place):
    stage, way = place
    steps = [*says(SSE + "\nTransfer-Encoding: chunked", b"a\r\nhalf "), ("gate", "go"), ("send", b"more.\r\n0\r\n\r\n")]
    identity = stage.origin.expect(steps)
    with way.connect() as link:
        link.sendall(way.head("GET", "/", [], identity))
        seen = b""
        while b"half " not in seen:
            seen += link.recv(65536)
        stage.origin.open(identity, "go")
        while not seen.endswith(b"0\r\n\r\n"):
            seen += link.recv(65536)
    assert b"more." in seen


def test_a_part_of_a_body_arrives_before_the_next_is_sent(place):
    stage, way = place
    identity = stage.origin.expect([("read", 5), ("mark", "first"), ("read", 5), *says(PLAIN, b"hi")])
    with way.connect() as link:
        link.sendall(way.head("POST", "/", [("Content-Length", "10")], identity) + b"first")
        stage.origin.reached(identity, "first")
        link.sendall(b"other")
        assert Reader(link).answer().body == b"hi"
    assert stage.origin.record(identity)["seen"].endswith(b"firstother")


def test_both_directions_at_once(place):
    stage, way = place
    steps = [*says("HTTP/1.1 200 OK\nTransfer-Encoding: chunked", b"2\r\nhi\r\n"), ("read", 3), ("send", b"3\r\nbye\r\n0\r\n\r\n")]
    identity = stage.origin.expect(steps)
    with way.connect() as link:
        link.sendall(way.head("POST", "/", [("Content-Length", "6")], identity) + b"abc")
        reader = Reader(link)
        reader.head()
        assert reader.chunk() == b"hi" and reader.chunk() == b"bye"
        link.sendall(b"def")
    assert stage.origin.record(identity)["seen"].endswith(b"abc")


@pytest.mark.parametrize("length", [1 << 20, 64 << 20])
def test_an_early_answer_arrives_while_the_client_still_sends(place, length):
    stage, way = place
    identity = stage.origin.expect([*says("HTTP/1.1 413 Content Too Large\nContent-Length: 3\nConnection: close", b"big"), ("shut",), ("to_end",)])
    with way.connect() as link:
        link.sendall(way.head("POST", "/", [("Content-Length", str(length))], identity) + b"begin")
        answer = Reader(link).answer()
        assert (answer.status, answer.body) == (413, b"big")


def test_large_bodies_both_ways(place):
    stage, way = place
    size = 32 << 20
    identity = stage.origin.expect([("body",), *says(f"HTTP/1.1 200 OK\nContent-Length: {size}"), ("flood", size)])
    block = bytes(range(256)) * 1024
    with way.connect() as link:
        link.sendall(way.head("PUT", "/", [("Content-Length", str(size))], identity))
        for _ in range(size // len(block)):
            link.sendall(block)
        answer = Reader(link).answer()
    assert answer.whole and answer.body == block * (size // len(block))
    record = stage.origin.record(identity)
    head = record["seen"].index(b"\r\n\r\n") + 4
    whole = hashlib.sha256(record["seen"][:head] + block * (size // len(block)))
    assert record["count"] == head + size and record["digest"] == whole.hexdigest()


def test_a_client_that_leaves_is_noticed(place):
    stage, way = place
    identity = stage.origin.expect([*says(SSE + "\nTransfer-Encoding: chunked", b"1\r\nx\r\n"), ("to_end",)])
    with way.connect() as link:
        link.sendall(way.head("GET", "/", [], identity))
        reader = Reader(link)
        reader.head()
        assert reader.chunk() == b"x"
    assert stage.origin.record(identity)["over"]


def test_questions_that_are_sent_at_once_are_answered_in_turn(place):
    stage, way = place
    known = [stage.origin.expect(says("HTTP/1.1 200 OK\nContent-Length: 1", b"%d" % n)) for n in range(6)]
    with way.connect() as link:
        link.sendall(b"".join(way.head("GET", f"/{n}", [], identity) for n, identity in enumerate(known)))
        reader = Reader(link)
        assert [reader.answer().body for _ in known] == [b"%d" % n for n in range(6)]


def test_a_connection_serves_many_exchanges(place):
    stage, way = place
    with way.connect() as link:
        reader = Reader(link)
        for number in range(50):
            identity = stage.origin.expect([("body",), *says("HTTP/1.1 200 OK\nTransfer-Encoding: chunked", b"3\r\n%03d\r\n0\r\n\r\n" % number)])
            body = b"x" * number
            link.sendall(way.head("POST", "/", [("Content-Length", str(number))], identity) + body)
            assert reader.answer().body == b"%03d" % number


# ---------------------------------------------------------------- what goes wrong

CUTS = {
    "a length": (says("HTTP/1.1 200 OK\nContent-Length: 10", b"half"), b"half"),
    "between chunks": (says("HTTP/1.1 200 OK\nTransfer-Encoding: chunked", b"4\r\nhalf\r\n"), b"half"),
    "within a chunk": (says("HTTP/1.1 200 OK\nTransfer-Encoding: chunked", b"8\r\nhalf"), b""),
    "before the last line": (says("HTTP/1.1 200 OK\nTransfer-Encoding: chunked", b"4\r\nhalf\r\n0\r\n"), b"half"),
}


@pytest.mark.parametrize("end", ["close", "reset"])
@pytest.mark.parametrize("name", CUTS)
def test_what_is_cut_stays_cut(place, name, end):
    stage, way = place
    steps, arrives = CUTS[name]
    # A reset overtakes what was sent before it, so that has to have arrived.
    identity = stage.origin.expect([*steps, ("gate", "end"), (end,)])
    with way.connect() as link:
        link.sendall(way.head("GET", "/", [], identity))
        reader = Reader(link)
        while b"\r\n\r\n" not in reader.unread or (b"half" not in reader.unread):
            assert reader.more()
        stage.origin.open(identity, "end")
        answer = reader.answer()
    assert answer.status == 200 and not answer.whole
    assert answer.body == arrives or name == "within a chunk"


@pytest.mark.through("server")
@pytest.mark.parametrize("steps", [[("close",)], [("reset",)], [("send", b"HTTP/1.1 2"), ("close",)], [("send", b"SSH-2.0-OpenSSH\r\n")],
                                   says("HTTP/1.1 200 OK\nContent-Length: x"), says("HTTP/1.1 200 OK\nContent-Length: 1\nContent-Length: 2", b"ab")])
def test_what_is_no_answer_is_told_as_such(place, steps):
    stage, way = place
    answer, _ = once(stage, way, [*steps, ("close",)])
    assert answer.status == 502 and json.loads(answer.body)["code"] in ("BACKEND_RESPONSE_FAILED", "BACKEND_CONNECTION_FAILED")
    assert "agent" in way.hops or json.loads(answer.body)["code"] == "BACKEND_RESPONSE_FAILED"


@pytest.mark.through("server", "server_bare")
def test_nobody_listens(place):
    stage, way = place
    closed = stage.through_server(9)
    with closed.connect() as link:
        link.sendall(closed.head("GET", "/", [], "none"))
        answer = Reader(link).answer()
    assert answer.status == 502 and json.loads(answer.body)["code"] == "BACKEND_CONNECTION_FAILED"
    assert answer.values("content-type") == ["application/json"]


@pytest.mark.through("server")
@pytest.mark.parametrize("location, kept", [("/next?x=1#y", False), ("/", False), ("//other.example/x", True), ("http://other.example/x", True), ("next", True), ("?q", True), ("", True)])
def test_redirects_stay_on_the_way(place, location, kept):
    stage, way = place
    answer, _ = once(stage, way, says(f"HTTP/1.1 302 Found\nLocation: {location}\nContent-Length: 0"))
    assert answer.values("location") == [location if kept else way.location + location]


@pytest.mark.through("server")
def test_credentials_of_the_application_pass_and_ours_do_not(place):
    stage, way = place
    headers = [("Authorization", "Basic YTpi"), ("Cookie", "a=1"), ("Cookie", "b=2"), ("X-Sandglass-Access", "x"), ("OpenSandbox-Secure-Access", "y"), ("X-EXECD-ACCESS-TOKEN", "z")]
    _, record = once(stage, way, says(PLAIN, b"hi"), headers=headers)
    told = tidy(asked(record)[1])
    assert told["authorization"] == ["Basic YTpi"] and told["cookie"] == ["a=1", "b=2"]
    for name in ("open-sandbox-api-key", "x-sandglass-access", "opensandbox-secure-access", "x-execd-access-token"):
        assert name not in told
    assert stage.server.key.encode() not in record["seen"]


def test_proxies_of_the_environment_are_not_used():
    """A server that is told of a proxy by its environment still goes to the sandbox itself."""
    trap = socket.create_server(("127.0.0.1", 0))
    visits = []

    def watch():
        while True:
            try:
                link, _ = trap.accept()
            except OSError:
                return
            visits.append(link.recv(4096))
            link.close()

    threading.Thread(target=watch, daemon=True).start()
    address = f"http://127.0.0.1:{trap.getsockname()[1]}"

    class Behind(Stack):
        def environment(self):
            names = ("HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")
            return {**dict.fromkeys(names, address), "NO_PROXY": "", "no_proxy": ""}

    stack = Behind()
    try:
        stack.start()
        plain = Plain(stack.url, stack.key)
        box = plain.create()
        assert plain.text(box, ["echo", "here"]) == "here"
        assert plain.agent("GET", box, "ping").status_code == 200
        plain.close()
    finally:
        problems = stack.close()
        trap.close()
    assert not problems and visits == []


# ---------------------------------------------------------------- WebSockets


def upgraded(stage, way, steps, *headers):
    """(link, reader, answer, identity) after a handshake that the origin accepts with these steps."""
    identity = stage.origin.expect(steps)
    link = way.connect()
    link.sendall(handshake(way, "/ws?x=%2F", identity, *headers))
    reader = Reader(link)
    return link, reader, reader.head(), identity


FRAMES = {
    "text": frame(1, "grüße".encode()),
    "binary": frame(2, bytes(range(256))),
    "fragments": frame(1, b"one ", final=False) + frame(0, b"two ", final=False) + frame(9, b"between") + frame(0, b"three"),
    "ping and pong": frame(9, b"ping") + frame(10, b"pong") + frame(9),
    "compressed": frame(1, b"\xf2\x48\xcd\xc9\xc9\x07\x00", compressed=True),
    "close with a code": frame(8, (4001).to_bytes(2, "big") + "grund ü".encode()),
    "close without one": frame(8),
    "reserved bits": bytes([0xB1, 0x80, 0, 0, 0, 0]),
    "unmasked": frame(1, b"against the rules", masked=False),
    "empty": frame(1) + frame(2),
    "65536 bytes": frame(2, b"x" * 65536),
}


@pytest.mark.parametrize("name", FRAMES)
def test_frames_arrive_as_they_were_sent(place, name):
    stage, way = place
    data = FRAMES[name]
    link, reader, answer, identity = upgraded(stage, way, [("accept", []), ("echo",), ("close",)])
    with link:
        assert answer.status == 101
        link.sendall(data)
        assert reader.exactly(len(data)) == data
    assert stage.origin.record(identity)["seen"].endswith(data)


def test_what_is_agreed_in_the_handshake_is_agreed_end_to_end(place):
    stage, way = place
    asks = [("Sec-WebSocket-Extensions", "permessage-deflate; client_max_window_bits"), ("Sec-WebSocket-Protocol", "one, two"), ("Origin", "https://app.example"), ("Cookie", "a=1")]
    says_yes = ["Sec-WebSocket-Extensions: permessage-deflate; server_no_context_takeover", "Sec-WebSocket-Protocol: two", "Set-Cookie: a=1", "Set-Cookie: b=2", "X-Own: yes"]
    link, reader, answer, identity = upgraded(stage, way, [("accept", says_yes), ("close",)], *asks)
    with link:
        assert answer.status == 101 and not answer.values("content-length")
        for line in says_yes:
            name, _, value = line.partition(": ")
            assert value in answer.values(name)
        assert answer.values("set-cookie") == ["a=1", "b=2"]
        assert [value.lower() for value in answer.values("connection")] == ["upgrade"] and answer.values("upgrade") == ["websocket"]
        assert len(answer.values("sec-websocket-accept")) == 1
    line, headers, _ = asked(stage.origin.record(identity))
    told = {name.lower(): value for name, value in headers}
    assert line == "GET /ws?x=%2F HTTP/1.1"
    for name, value in asks:
        assert told[name.lower()] == value
    assert "upgrade" in told["connection"].lower() and told["upgrade"] == "websocket" and told["sec-websocket-version"] == "13"


def test_the_first_words_may_come_with_the_handshake(place):
    stage, way = place
    identity = stage.origin.expect([("accept", []), ("send", frame(1, b"first", masked=False)), ("read", 9), ("send", b"got it"), ("close",)])
    with way.connect() as link:
        link.sendall(handshake(way, "/", identity) + b"eager one")
        reader = Reader(link)
        assert reader.head().status == 101
        assert reader.exactly(13) == frame(1, b"first", masked=False) + b"got it"


def test_a_message_of_64_mebibytes(place):
    stage, way = place
    size = 64 << 20
    link, reader, answer, identity = upgraded(stage, way, [("accept", []), ("echo",), ("close",)])
    message = frame(2, bytes(range(256)) * (size // 256))
    with link:
        sending = threading.Thread(target=link.sendall, args=(message,))
        sending.start()
        back = reader.exactly(len(message))
        sending.join()
    assert hashlib.sha256(back).digest() == hashlib.sha256(message).digest()


@pytest.mark.parametrize("who", ["client", "origin"])
def test_half_a_connection_may_close(place, who):
    stage, way = place
    steps = [("accept", []), ("to_end",), ("send", b"after the end"), ("close",)] if who == "client" else [("accept", []), ("send", b"bye"), ("shut",), ("to_end",), ("close",)]
    link, reader, answer, identity = upgraded(stage, way, steps)
    with link:
        assert answer.status == 101
        if who == "client":
            link.sendall(b"last words")
            link.shutdown(socket.SHUT_WR)
            assert reader.exactly(100) == b"after the end"
        else:
            assert reader.exactly(100) == b"bye"
            link.sendall(b"last words")
            link.shutdown(socket.SHUT_WR)
    record = stage.origin.record(identity)
    assert record["end"] == "close" and record["seen"].endswith(b"last words")


def test_a_client_that_vanishes_ends_the_connection(place):
    stage, way = place
    link, _, answer, identity = upgraded(stage, way, [("accept", []), ("to_end",), ("close",)])
    assert answer.status == 101
    link.close()
    assert stage.origin.record(identity)["over"]


def test_other_protocols_are_carried_too(place):
    stage, way = place
    identity = stage.origin.expect([*says("HTTP/1.1 101 Switching Protocols\nConnection: Upgrade\nUpgrade: own-protocol/3"), ("echo",), ("close",)])
    with way.connect() as link:
        link.sendall(way.head("POST", "/", [("Connection", "Upgrade"), ("Upgrade", "own-protocol/3"), ("Content-Length", "0")], identity))
        reader = Reader(link)
        answer = reader.head()
        assert answer.status == 101 and answer.values("upgrade") == ["own-protocol/3"]
        link.sendall(b"\x00\xffanything\r\n")
        assert reader.exactly(12) == b"\x00\xffanything\r\n"


@pytest.mark.through("server")
def test_http2_in_the_clear_is_no_tunnel(place):
    stage, way = place
    asks = [("Connection", "Upgrade, HTTP2-Settings"), ("Upgrade", "h2c"), ("HTTP2-Settings", "AAMAAABkAAQAAP__")]
    answer, record = once(stage, way, says(PLAIN, b"hi"), headers=asks)
    assert answer.status == 200 and "http2-settings" not in tidy(asked(record)[1])


def test_a_refused_upgrade_to_something_else_is_an_answer(place):
    stage, way = place
    headers = [("Connection", "Upgrade"), ("Upgrade", "own/1")]
    compare(place, says("HTTP/1.1 426 Upgrade Required\nContent-Length: 2", b"no"), headers=headers)


@pytest.mark.through("server")
def test_a_refused_handshake_is_told_with_a_close(place):
    stage, way = place
    link, reader, answer, _ = upgraded(stage, way, says("HTTP/1.1 403 Forbidden\nContent-Length: 2", b"no"))
    with link:
        assert answer.status == 101
        assert reader.exactly(4) == b"\x88\x02" + (1008).to_bytes(2, "big")
