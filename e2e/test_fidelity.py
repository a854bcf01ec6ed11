"""What a client gets through each way into a sandbox, beside what it gets from the program itself: byte for byte, apart from what is documented."""

import gzip

import pytest

from wire import Reader
from ways import asked, compare, once, says, tidy

pytestmark = pytest.mark.sandglass

# ---------------------------------------------------------------- answers

PLAIN = "HTTP/1.1 200 OK\nContent-Length: 2"
STATUSES = [200, 201, 202, 203, 206, 300, 301, 302, 303, 307, 308, 400, 401, 403, 404, 405, 409, 410, 418, 421, 425, 429, 451, 500, 501, 503, 504, 599]


@pytest.mark.parametrize("status", STATUSES)
def test_statuses(place, status):
    compare(place, says(f"HTTP/1.1 {status} Own Words\nContent-Length: 2\nRetry-After: 7\nWWW-Authenticate: Basic realm=\"x\"", b"hi"))


ANSWERS = {
    "no content": says("HTTP/1.1 204 No Content\nX-A: b"),
    "reset content": says("HTTP/1.1 205 Reset Content\nContent-Length: 0"),
    "not modified": says('HTTP/1.1 304 Not Modified\nETag: "x"\nCache-Control: max-age=1'),
    "empty reason": says("HTTP/1.1 200 \nContent-Length: 2", b"hi"),
    "repeated": says(PLAIN + "\nSet-Cookie: a=1; Path=/\nX-A: 1\nSet-Cookie: b=2; Expires=Wed, 21 Oct 2026 07:28:00 GMT\nX-A: 2\nSet-Cookie: a=3", b"hi"),
    "empty value": says(PLAIN + "\nX-Empty:\nX-Spaces: a  b \t c", b"hi"),
    "high bytes": says(PLAIN + "\nX-High: caf\xe9 \xff", b"hi"),
    "date": says(PLAIN + "\nDate: Thu, 01 Jan 1970 00:00:00 GMT\nLast-Modified: x\nAge: 3\nVia: 1.1 other", b"hi"),
    "policies": says(PLAIN + "\nContent-Security-Policy: default-src 'self'\nStrict-Transport-Security: max-age=1\nAlt-Svc: h3=\":443\"\nLink: </x>; rel=preload", b"hi"),
    "zero length": says("HTTP/1.1 200 OK\nContent-Length: 0"),
    "empty chunked": says("HTTP/1.1 200 OK\nTransfer-Encoding: chunked", b"0\r\n\r\n"),
    "gzip": says(f"HTTP/1.1 200 OK\nContent-Encoding: gzip\nContent-Length: {len(gzip.compress(b'x' * 999, mtime=0))}", gzip.compress(b"x" * 999, mtime=0)),
    "not really br": says("HTTP/1.1 200 OK\nContent-Encoding: br\nContent-Length: 4", b"\x00\xff\r\n"),
    "unknown coding": says("HTTP/1.1 200 OK\nContent-Encoding: zstd, x-own\nTransfer-Encoding: chunked", b"3\r\n\x00\x01\x02\r\n0\r\n\r\n"),
    "extensions": says("HTTP/1.1 200 OK\nTransfer-Encoding: chunked", b'5;a="b";c\r\nhello\r\n1 ;d\r\n!\r\n000\r\n\r\n'),
    "range": says("HTTP/1.1 206 Partial Content\nContent-Range: bytes 0-1/9\nAccept-Ranges: bytes\nContent-Length: 2", b"hi"),
    "to the end": [*says("HTTP/1.1 200 OK\nContent-Type: text/plain", b"until it closes"), ("close",)],
    "nothing to the end": [*says("HTTP/1.1 200 OK\nX-A: b"), ("close",)],
    "old version": [*says("HTTP/1.0 200 OK\nContent-Length: 2", b"hi"), ("close",)],
    "old version to the end": [*says("HTTP/1.0 200 OK", b"hi"), ("close",)],
    "two equal lengths": says("HTTP/1.1 200 OK\nContent-Length: 2\nContent-Length: 2", b"hi"),
    "close after": [*says(PLAIN + "\nConnection: close", b"hi"), ("close",)],
    "line by line": [step for part in (b"HTTP/1.1 200 OK\r\nContent-", b"Length: 10\r\n\r", b"\nhel", b"lo wor", b"l") for step in [("send", part)]],
    "many headers": says(PLAIN + "".join(f"\nX-N{n}: {n}" for n in range(90)), b"hi"),
    "a long header": says(PLAIN + f"\nX-Long: {'x' * 60_000}", b"hi"),
    "a large body": [*says(f"HTTP/1.1 200 OK\nContent-Length: {5 << 20}"), ("flood", 5 << 20)],
    "many chunks": says("HTTP/1.1 200 OK\nTransfer-Encoding: chunked", b"".join(b"%x\r\n%s\r\n" % (n, b"x" * n) for n in range(1, 400)) + b"0\r\n\r\n"),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_answers(place, name):
    assert compare(place, ANSWERS[name])[1].whole


@pytest.mark.parametrize("interim", ["100 Continue", "102 Processing", "103 Early Hints\nLink: </a>"])
def test_the_answer_after_an_interim_one_is_the_answer(place, interim):
    stage, way = place
    steps = [*says(f"HTTP/1.1 {interim}"), *says(PLAIN, b"hi")]
    given, _ = once(stage, way, steps)
    assert (given.status, given.body) == (200, b"hi")
    # Interim answers are optional to pass on (only `100` has a meaning that a client waits for), and never invented.
    assert given.interim in ([], [int(interim[:3])])


def test_trailers_reach_who_asks_for_them(place):
    stage, way = place
    steps = says("HTTP/1.1 200 OK\nTrailer: X-Sum\nTransfer-Encoding: chunked", b"2\r\nhi\r\n0\r\nX-Sum: 1\r\n\r\n")
    given, _ = once(stage, way, steps, headers=[("TE", "trailers"), ("Connection", "TE")])
    assert given.body == b"hi" and given.whole
    # The agent's own relay drops them.
    if "agent" not in way.hops:
        assert [(name.lower(), value) for name, value in given.trailers] == [("x-sum", "1")]


HEADS = {
    "a length": says("HTTP/1.1 200 OK\nContent-Length: 1234\nETag: x"),
    "no length": says("HTTP/1.1 200 OK\nETag: x"),
    "not found": says("HTTP/1.1 404 Not Found\nContent-Length: 9"),
}


@pytest.mark.parametrize("name", HEADS)
def test_head(place, name):
    compare(place, HEADS[name], method="HEAD")


def test_a_connection_goes_on_after_head_and_empty_answers(place):
    stage, way = place
    wanted = [("HEAD", HEADS["a length"]), ("GET", ANSWERS["no content"]), ("GET", ANSWERS["not modified"]), ("GET", says(PLAIN, b"hi"))]
    with way.connect() as link:
        reader = Reader(link)
        for method, steps in wanted:
            identity = stage.origin.expect(steps)
            link.sendall(way.head(method, "/", [], identity))
            assert reader.answer(method).status == int(steps[0][1].split()[1])
        assert reader.unread == b""


# ---------------------------------------------------------------- requests

METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "PROPFIND", "REPORT", "QUERY"]
TARGETS = [
    "/", "//", "//a//b/", "/a%2Fb", "/a%2fb", "/a%3Fc/d%25e", "/%2e%2e/x", "/../x", "/./x/..", "/a;b=c;d", "/%E4%BD%A0", "/a:b@c,d$e&f=g+h!i*j'(k)", "/?", "/?a",
    "/a?b?c", "/?x=%2F%3f&&=&a=b&a=c%20d+e", "/~user/%7Euser", "/a%00b", "/%zz", "/a%", "/a|b", "/{x}", "/a%20b", "/" + "long/" * 1500 + "?" + "q=1&" * 500,
]  # fmt: skip


@pytest.mark.parametrize("method", METHODS)
def test_methods(place, method):
    body = b"" if method in ("GET", "OPTIONS") else b"some bytes \x00\xff"
    length = [("Content-Length", str(len(body)))] if body else []
    compare(place, [("body",), *says(PLAIN, b"hi")], method=method, headers=length, body=body)


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target[:24])
def test_targets_arrive_as_they_were_written(place, target):
    compare(place, says(PLAIN, b"hi"), target=target)


REQUESTS = {
    "repeated": [("X-Twice", "1"), ("Accept", "a/b"), ("X-Twice", "2"), ("Cookie", "a=1; b=2"), ("Authorization", "Bearer x")],
    "names of all kinds": [("x-lower", "1"), ("X-UPPER", "2"), ("X_Under", "3"), ("X.Dot", "4"), ("!#$%&'*+-.^_`|~", "5")],
    "values of all kinds": [("X-Empty", ""), ("X-Tab", "a\tb"), ("X-High", b"caf\xe9\xff"), ("X-Quotes", '"a,b", \\"c')],
    "what looks like ours": [("User-Agent", "own/1"), ("Referer", "/"), ("Range", "bytes=0-1"), ("If-None-Match", "*"), ("Accept-Encoding", "br")],
    "many": [(f"X-N{n}", str(n)) for n in range(80)],
    "long": [("Cookie", "c=" + "x" * 30_000)],
}


@pytest.mark.parametrize("name", REQUESTS)
def test_request_headers(place, name):
    compare(place, says(PLAIN, b"hi"), headers=REQUESTS[name])


def test_nothing_is_added_and_what_is_ours_stays_here(place):
    stage, way = place
    hop = [("Connection", "X-Mine, keep-alive"), ("X-Mine", "1"), ("TE", "trailers"), ("Keep-Alive", "5"), ("Proxy-Authorization", "Basic x"), ("Proxy-Connection", "a")]
    secret = [("OpenSandbox-Access-Renew", "skip"), ("Forwarded", "for=6.6.6.6"), ("X-Real-IP", "6.6.6.6")]
    _, record = once(stage, way, says(PLAIN, b"hi"), headers=[*hop, *secret])
    _, headers, _ = asked(record)
    told = tidy(headers)
    if way.hops:
        assert "x-mine" not in told and "proxy-authorization" not in told
    if "server" in way.hops:
        assert set(told) == {"host", "x-exchange", "x-forwarded-for", "x-forwarded-proto", *(() if "agent" in way.hops else ("x-forwarded-host",))}
        assert told["x-forwarded-proto"] == ["http"] and told["x-forwarded-for"] == ["127.0.0.1"]


def length(body):
    return [("Content-Length", str(len(body)))]


CHUNKED = [("Transfer-Encoding", "chunked")]
BODIES = {
    "a length": ("POST", length(b"a" * 70_000), b"a" * 70_000),
    "an empty one": ("POST", length(b""), b""),
    "none": ("POST", [], b""),
    "chunked": ("PUT", CHUNKED, b"3\r\nabc\r\n10\r\n0123456789abcdef\r\n0\r\n\r\n"),
    "chunked with extensions": ("PUT", CHUNKED, b"3;x=y\r\nabc\r\n0;last\r\n\r\n"),
    "chunked and empty": ("PATCH", CHUNKED, b"0\r\n\r\n"),
    "of a GET": ("GET", length(b"of a GET"), b"of a GET"),
    "of a GET, chunked": ("GET", CHUNKED, b"2\r\nhi\r\n0\r\n\r\n"),
    "of a DELETE": ("DELETE", length(b"[]"), b"[]"),
    "binary": ("POST", length(bytes(range(256)) * 16), bytes(range(256)) * 16),
}


@pytest.mark.parametrize("name", BODIES)
def test_request_bodies(place, name):
    method, headers, body = BODIES[name]
    compare(place, [("body",), *says(PLAIN, b"hi")], method=method, headers=headers, body=body)


@pytest.mark.parametrize("framed", ["length", "chunked"])
def test_a_body_that_waits_for_continue(place, framed):
    stage, way = place
    identity = stage.origin.expect([*says("HTTP/1.1 100 Continue"), ("body",), *says(PLAIN, b"hi")])
    headers = [("Expect", "100-continue"), *(length(b"abc") if framed == "length" else CHUNKED)]
    with way.connect() as link:
        reader = Reader(link)
        link.sendall(way.head("POST", "/", headers, identity))
        assert reader.until(b"\r\n\r\n").startswith(b"HTTP/1.1 100")
        link.sendall(b"abc" if framed == "length" else b"3\r\nabc\r\n0\r\n\r\n")
        assert reader.answer().body == b"hi"
    assert b"abc" in stage.origin.record(identity)["seen"]


@pytest.mark.through("server", "published", "header", "path")
def test_a_body_that_is_not_wanted_is_not_asked_for(place):
    stage, way = place
    identity = stage.origin.expect([*says("HTTP/1.1 417 Expectation Failed\nContent-Length: 2", b"no"), ("close",)])
    with way.connect() as link:
        link.sendall(way.head("POST", "/", [("Expect", "100-continue"), *length(b"abc")], identity))
        answer = Reader(link).answer()
    # The agent asks for the body before it knows.
    assert answer.status == 417 and (answer.interim == [] or "agent" in way.hops)
