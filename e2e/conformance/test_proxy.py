"""The server proxy: what reaches the program, what comes back, failures, WebSockets."""

import json
import time

import httpx
import pytest
from target import KEY, UNKNOWN, coded, invalid
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

PORT = 8080


def path(web, rest="/echo", mount="/v1"):
    return f"{mount}/sandboxes/{web}/proxy/{PORT}{rest}"


def echoed(target, web, rest="/echo", method="GET", mount="/v1", **keys):
    status, _, body = target.raw(method, path(web, rest, mount), **keys)
    assert status == 200, body
    return json.loads(body)


def values(told, name):
    return [value for key, value in told["headers"] if key.lower() == name.lower()]


# ---------------------------------------------------------------- the request


@pytest.mark.parametrize("mount", ["", "/v1"])
@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "PATCH", "DELETE"])
def test_methods(target, web, method, mount):
    body = None if method == "GET" else b"some bytes \x00\xff"
    told = echoed(target, web, "/echo/x?y=1", method, mount, body=body)
    assert told["method"] == method and told["target"] == "/echo/x?y=1"
    assert told["body"].encode("latin-1") == (body or b"")


@pytest.mark.different("HEAD and OPTIONS reach the application, which knows better than the proxy what they mean")
@pytest.mark.parametrize("method", ["HEAD", "OPTIONS"])
def test_other_methods(target, web, method):
    status, headers, body = target.raw(method, path(web))
    assert status == 200 and (method == "HEAD" or json.loads(body)["method"] == method)


def test_trace_is_refused(target, web):
    assert target.raw("TRACE", path(web))[0] == 405


@pytest.mark.parametrize("rest, arrives", [
    ("", "/"), ("/", "/"), ("/echo/", "/echo/"), ("/echo?", "/echo"), ("/echo?a=b&a=c%20d+e", "/echo?a=b&a=c%20d+e"),
    ("/echo?x=%2F%3f&&=", "/echo?x=%2F%3f&&="), ("/echo/%E4%BD%A0", "/echo/%E4%BD%A0"), ("/echo/a:b@c;d=e,f", "/echo/a:b@c;d=e,f"),
])
def test_path_and_query(target, web, rest, arrives):
    assert echoed(target, web, rest)["target"] in (arrives, rest)


@pytest.mark.better("the path is decoded and encoded again: an encoded ? becomes a query")
@pytest.mark.parametrize("rest", ["/a%2Fb", "/a%3Fc/d%25e", "//double"])
def test_path_is_raw(target, web, rest):
    assert echoed(target, web, rest)["target"] == rest


@pytest.mark.better("a GET with a body is answered 500")
def test_get_with_a_body(target, web):
    assert echoed(target, web, body=b"of a GET")["body"] in ("of a GET", "")


def test_chunked_body(target, web):
    answer = target.call("POST", path(web), content=(part for part in (b"one ", b"two")))
    assert answer.json()["body"] == "one two"


def test_large_body(target, web):
    data = b"x" * 3_000_000
    assert len(target.call("PUT", path(web), content=data).json()["body"]) == len(data)


HOP = [("Connection", "x-mine"), ("X-Mine", "1"), ("TE", "gzip"), ("Proxy-Authorization", "Basic x"), ("Keep-Alive", "timeout=5")]


@pytest.mark.parametrize("name, value", [*HOP[1:], ("Forwarded", "for=1.2.3.4"), ("X-Real-IP", "1.2.3.4"),
                                         ("OpenSandbox-Access-Renew", "skip"), (KEY, "")], ids=lambda v: str(v)[:24])
def test_dropped(target, web, name, value):
    headers = [("Connection", "x-mine")] + ([(name, value)] if name != KEY else [])
    told = echoed(target, web, headers=headers)
    assert values(told, name) == [], told


def test_forwarded_headers(target, web):
    told = echoed(target, web, headers=[("X-Forwarded-Host", "evil.example"), ("X-Forwarded-Port", "1")])
    assert values(told, "x-forwarded-host") == [target.domain] and values(told, "x-forwarded-proto") == ["http"]
    assert values(told, "x-forwarded-for") == ["127.0.0.1"] and values(told, "x-forwarded-port") == []
    assert values(told, "host") != [target.domain] and len(values(told, "host")) == 1


@pytest.mark.parametrize("name", ["User-Agent", "Accept", "X-Request-ID", "Content-Type", "Range", "Origin", "OPEN-SANDBOX-CLIENT-IP"])
def test_passed(target, web, name):
    assert values(echoed(target, web, headers=[(name, "mine/1")]), name) == ["mine/1"]


@pytest.mark.better("Authorization and Cookie, which belong to the application, are stripped")
@pytest.mark.parametrize("name", ["Authorization", "Cookie"])
def test_application_headers(target, web, name):
    assert values(echoed(target, web, headers=[(name, "a=b")]), name) == ["a=b"]


@pytest.mark.better("repeated request headers collapse to the last")
def test_repeated_request_headers(target, web):
    assert values(echoed(target, web, headers=[("X-Twice", "1"), ("X-Twice", "2")]), "x-twice") == ["1", "2"]


@pytest.mark.better("accept, user-agent and accept-encoding are added")
@pytest.mark.parametrize("name", ["accept-encoding", "user-agent", "accept"])
def test_nothing_is_added(target, web, name):
    assert values(echoed(target, web), name) == []


# ---------------------------------------------------------------- the answer


def reply(target, web, query):
    return target.raw("GET", path(web, f"/reply?{query}"))


@pytest.mark.parametrize("status", [200, 201, 204, 304, 400, 404, 418, 500, 503])
def test_status(target, web, status):
    assert target.raw("GET", path(web, f"/reply?s={status}"))[0] == status


def test_repeated_answer_headers(target, web):
    _, headers, _ = reply(target, web, "h=Set-Cookie:a%3D1&h=Set-Cookie:b%3D2&b=x")
    assert [value for name, value in headers if name.lower() == "set-cookie"] == ["a=1", "b=2"]


@pytest.mark.parametrize("location, expected", [
    ("/next?x=1", "{route}/next?x=1"), ("//other.example/x", "//other.example/x"), ("http://other.example/x", "http://other.example/x"), ("next", "next"),
])
@pytest.mark.parametrize("mount", ["", "/v1"])
def test_location(target, web, mount, location, expected):
    _, headers, _ = target.raw("GET", path(web, f"/reply?s=302&h=Location:{location.replace('?', '%3F').replace('=', '%3D')}", mount))
    assert dict(headers)["location"] == expected.replace("{route}", f"{mount}/sandboxes/{web}/proxy/{PORT}")


def test_headers_of_the_server_win(target, web):
    _, headers, _ = reply(target, web, "h=Server:echo&h=X-Request-ID:theirs&h=Connection:close&h=Keep-Alive:5&b=x")
    told = {name.lower(): value for name, value in headers}
    assert told["x-request-id"] != "theirs" and told.get("server") != "echo" and "keep-alive" not in told


def test_date_of_the_program_wins(target, web):
    _, headers, _ = reply(target, web, "h=Date:Mon,%2001%20Jan%202001%2000:00:00%20GMT&b=x")
    assert [value for name, value in headers if name.lower() == "date"] == ["Mon, 01 Jan 2001 00:00:00 GMT"]


def test_bytes_are_not_decoded(target, web):
    _, headers, body = reply(target, web, "h=Content-Encoding:gzip&b=not-really-gzip")
    assert body == b"not-really-gzip" and ("content-encoding", "gzip") in [(k.lower(), v) for k, v in headers]


def test_stream_is_not_held_back(target, web):
    with target.http.stream("GET", path(web, "/sse")) as answer:
        parts = answer.iter_raw()
        assert next(parts) == b"data: 1\n\n"
        assert target.call("GET", path(web, "/release")).status_code == 200
        assert b"".join(parts) == b"data: 2\n\n"


# ---------------------------------------------------------------- failures


def test_nobody_listens(target, web):
    coded(target.call("GET", f"/v1/sandboxes/{web}/proxy/9"), 502, "BACKEND_CONNECTION_FAILED")


def test_dropped_connection(target, web):
    coded(target.call("GET", path(web, "/drop")), 502, "BACKEND_RESPONSE_FAILED")


@pytest.mark.parametrize("port", ["0", "65536"])
def test_port_out_of_range(target, web, port):
    coded(target.call("GET", f"/v1/sandboxes/{web}/proxy/{port}/x"), 400, "DOCKER::INVALID_PORT")


def test_port_is_no_number(target, web):
    invalid(target.call("GET", f"/v1/sandboxes/{web}/proxy/http/x"), ["path", "port"])


def test_unknown_sandbox(target):
    coded(target.call("GET", f"/v1/sandboxes/{UNKNOWN}/proxy/80/x"), 404, "DOCKER::SANDBOX_NOT_FOUND")


# ---------------------------------------------------------------- WebSockets


def dial(target, web, rest="/ws", key=True, **keys):
    headers = {KEY: target.key} if key else {}
    address = target.url.replace("http", "ws", 1) + (path(web, rest) if not rest.startswith("!") else rest[1:])
    return connect(address, additional_headers={**headers, **keys.pop("headers", {})}, open_timeout=60, close_timeout=5, **keys)


def closed(socket):
    try:
        socket.recv(timeout=60)
    except ConnectionClosed as end:
        return end.rcvd.code if end.rcvd else None
    raise AssertionError("a message instead of the end")


@pytest.mark.parametrize("message", ["text", "", "ü" * 40_000, b"\x00\xff" * 3, b"x" * 60_000], ids=lambda m: f"{type(m).__name__}-{len(m)}")
def test_frames(target, web, message):
    with dial(target, web) as socket:
        socket.send(message)
        assert socket.recv(timeout=60) == message


def test_subprotocol(target, web):
    with dial(target, web, subprotocols=["one", "two"]) as socket:
        assert socket.subprotocol == "two"


def test_websocket_headers(target, web):
    with dial(target, web, "/ws/headers", origin="https://app.example", headers={"X-Mine": "1"}) as socket:
        told = {"headers": json.loads(socket.recv(timeout=60))}
    assert values(told, "origin") == ["https://app.example"] and values(told, "x-mine") == ["1"]
    assert values(told, KEY) == [] and values(told, "x-forwarded-host") == [target.domain]


@pytest.mark.parametrize("code, arrives", [(1000, 1000), (1001, 1001), (1008, 1008), (1011, 1011), (3000, 3000), (4999, 4999)])
def test_close_code_of_the_program(target, web, code, arrives):
    with dial(target, web, f"/ws/close?code={code}&reason=why") as socket:
        assert closed(socket) == arrives


@pytest.mark.parametrize("code", [1000, 3001, 4000])
def test_close_code_of_the_client(target, web, code):
    with dial(target, web) as socket:
        socket.send("x")
        socket.recv(timeout=60)
        socket.close(code)
    logs = f"/v1/sandboxes/{web}/diagnostics/logs"
    deadline = time.monotonic() + 60
    while f"closed {code}" not in target.call("GET", logs).text:
        assert time.monotonic() < deadline, target.call("GET", logs).text
        time.sleep(0.1)


def test_refused_handshake(target, web):
    with dial(target, web, "/ws/refuse") as socket:
        assert closed(socket) == 1008


def test_nobody_listens_for_a_websocket(target, web):
    with dial(target, web, f"!/v1/sandboxes/{web}/proxy/9/ws") as socket:
        assert closed(socket) == 1011


def test_websocket_to_an_unknown_sandbox(target):
    with dial(target, UNKNOWN) as socket:
        assert closed(socket) == 1011


@pytest.mark.better("WebSockets are open although a key is configured")
def test_websocket_needs_the_key(target, web):
    try:
        with dial(target, web, key=False) as socket:
            assert closed(socket) == 1008
    except Exception as error:
        if isinstance(error, AssertionError):
            raise
        assert "401" in str(error)


def test_upgrade_to_something_else(target, web):
    told = target.raw("GET", path(web), headers=[("Connection", "Upgrade"), ("Upgrade", "websocket")])
    assert told[0] in (400, 426)


def test_many_at_once(target, web):
    with httpx.Client(headers={KEY: target.key}, timeout=60, limits=httpx.Limits(max_connections=40)) as client:
        import concurrent.futures

        with concurrent.futures.ThreadPoolExecutor(40) as pool:
            answers = list(pool.map(lambda n: client.get(target.url + path(web, f"/echo?n={n}")), range(200)))
    assert all(answer.status_code == 200 and answer.json()["target"] == f"/echo?n={n}" for n, answer in enumerate(answers))
