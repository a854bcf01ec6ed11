"""The ways into a sandbox that has a scripted program in it, and the comparison of what each of them makes of an exchange.

Every exchange is made twice, at the program's own address and through the way under test, by hand on both ends. A new way is one
more entry in `WAYS` and one more method of `Stage`.
"""

import secrets
import subprocess
from pathlib import Path
from types import SimpleNamespace

from plain import Plain
from stack import Stack as Server
from stack import free_port, wait_for
from wire import HOP_BY_HOP, Answer, Origin, Reader, Way

DATA, INSIDE, STEERING, AGENT = 8080, 9000, 9999, 44772
# By runtime: the server, the same under its other mount, the server to what listens on loopback only, the agent's own relay, a published port.
WAYS = {
    "embedded": ["server", "server_bare", "server_inside", "agent"],
    "docker": ["server", "server_inside", "agent", "published"],
    # Within a server, found by a header or by the host's name; and alone beside it, found by the path.
    "gateway": ["header", "host_name", "path"],
}
# What the server says itself in every answer. Whoever sends an answer without a date adds one.
OWN = {"server": {"x-request-id", "vary", "date", "server"}, "agent": {"date"}, "gateway": {"date", "reverse-proxy-server-powerby"}}
DROPS = {"forwarded", "x-real-ip", "open-sandbox-api-key", "opensandbox-secure-access", "opensandbox-access-renew", "x-sandglass-access"}
ADDS = {"host", "x-forwarded-for", "x-forwarded-host", "x-forwarded-proto", "x-exchange"}


class Stage:
    """A sandbox with the scripted origin in it."""

    def __init__(self, server):
        self.server = server
        self.plain = Plain(server.url, server.key, server.image)
        self.box = self.plain.create(resourceLimits={"cpu": "1", "memory": "512Mi"})
        here = "import socket; s = socket.socket(2, 2); s.connect(('192.0.2.1', 9)); print(s.getsockname()[0])"
        self.address = self.plain.text(self.box, ["python3", "-c", here])
        written = self.plain.write(self.box, "/tmp/origin.py", Path(__file__).with_name("origin.py").read_bytes())
        assert written.status_code == 200, written.text
        self.plain.run(self.box, ["python3", "/tmp/origin.py", str(DATA), str(INSIDE), str(STEERING)], background=True)
        self.origin = Origin((self.address, STEERING))
        assert wait_for(self.listening)
        self.direct = Way("direct", (self.address, DATA))

    def listening(self):
        try:
            return self.origin.expect([])
        except OSError:
            return None

    # ------------------------------------------------------------ ways

    def way(self, name):
        return getattr(self, f"by_{name}")()

    def through_server(self, port, mount="/v1"):
        host, _, own = self.server.domain.partition(":")
        prefix = f"{mount}/sandboxes/{self.box}/proxy/{port}"
        key = [("OPEN-SANDBOX-API-KEY", self.server.key)]
        return Way(f"server to {port}", (host, int(own)), prefix, key, ("server",), prefix)

    def by_server(self):
        return self.through_server(DATA)

    def by_server_bare(self):
        return self.through_server(DATA, "")

    def by_server_inside(self):
        way = self.through_server(INSIDE)
        way.hops = ("server", "agent")
        return way

    def endpoint(self, port):
        found = self.plain.http.get(f"/v1/sandboxes/{self.box}/endpoints/{port}").json()
        place, slash, prefix = found["endpoint"].partition("/")
        host, _, own = place.partition(":")
        return (host, int(own)), slash + prefix, list((found.get("headers") or {}).items())

    def by_agent(self):
        address, prefix, headers = self.endpoint(AGENT if self.server.runtime == "embedded" else INSIDE)
        if self.server.runtime == "embedded":
            address, prefix = (self.address, AGENT), f"/proxy/{INSIDE}"
        return Way("agent", address, prefix, headers, ("agent",))

    def by_published(self):
        address, prefix, headers = self.endpoint(DATA)
        return Way("published", address, prefix, headers)

    def close(self):
        self.plain.close()


class GatewayStage(Stage):
    """The same behind a server of its own, with the gateway in it and another one beside it."""

    def __init__(self):
        self.inner, self.outer, key = free_port(), free_port(), secrets.token_hex(16)
        sections = {
            "ingress": {"mode": "gateway", "key": key, "listen": f"127.0.0.1:{self.inner}"},
            "ingress.gateway": {"address": f"127.0.0.1:{self.inner}"},
            "ingress.gateway.route": {"mode": "header"},
        }
        self.stack = Server(config=sections)
        self.beside = None
        try:
            self.stack.start()
            command = [self.stack.binary, "ingress", f"--server={self.stack.url}", "--mode=uri", "-host", "127.0.0.1", "-port", str(self.outer)]
            with open(self.stack.home / "gateway.log", "ab") as log:
                environment = {"SANDGLASS_INGRESS_KEY": key, "PATH": "/usr/bin:/bin"}
                self.beside = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment)
            super().__init__(SimpleNamespace(**vars(self.stack), url=self.stack.url, domain=self.stack.domain, image="host", runtime="embedded"))
            assert wait_for(lambda: all(self.answers(way) for way in WAYS["gateway"]))
        except BaseException:
            self.stop()
            raise

    def answers(self, name):
        try:
            answer, _ = once(self, self.way(name), says("HTTP/1.1 200 OK\nContent-Length: 0"))
        except (OSError, EOFError):
            return False
        return answer.status == 200

    def by_header(self):
        return Way("header", ("127.0.0.1", self.inner), "", self.endpoint(DATA)[2], ("gateway",))

    def token(self):
        """What opens the sandbox, whichever way its route is written."""
        return [(name, value) for name, value in self.endpoint(DATA)[2] if name != "OpenSandbox-Ingress-To"]

    def by_host_name(self):
        return Way("host name", ("127.0.0.1", self.inner), "", self.token(), ("gateway",), name_of_host=f"{self.box}-{DATA}.sandbox.example")

    def by_path(self):
        return Way("path", ("127.0.0.1", self.outer), f"/{self.box}/{DATA}", self.token(), ("gateway",))

    def close(self):
        super().close()
        problems = self.stop()
        assert not problems, "\n".join(problems)

    def stop(self):
        if self.beside:
            self.beside.terminate()
            self.beside.wait(60)
        return self.stack.close()


# ---------------------------------------------------------------- exchanges


def once(stage, way, steps, method="GET", target="/", headers=(), body=b"", version="HTTP/1.1"):
    """(answer, what the origin recorded) of one exchange on a connection of its own."""
    identity = stage.origin.expect(steps)
    with way.connect() as link:
        link.sendall(way.head(method, target, headers, identity, version) + body)
        answer = Reader(link).answer(method)
    return answer, stage.origin.record(identity, "record" if answer.status < 500 else "peek")


def says(head, body=b""):
    """The step that sends a head, written with bare line ends, and a body."""
    return [("send", head.replace("\n", "\r\n").encode("latin-1") + b"\r\n\r\n" + body)]


def tidy(headers, *without):
    """Names in lower case, grouped by name, values in their order; those of one hop are left out."""
    told = {}
    for name, value in headers:
        if name.lower() not in HOP_BY_HOP.union(*without):
            told.setdefault(name.lower(), []).append(value)
    return told


def asked(record):
    """(request line, header pairs, body) as the origin got them."""
    head, _, body = record["seen"].partition(b"\r\n\r\n")
    lines = head.decode("latin-1").split("\r\n")
    fields = [line.partition(":") for line in lines[1:]]
    return lines[0], [(name, value.strip(" \t")) for name, _, value in fields], body


def once_each(told):
    """A length that is said once is as good as one that is said twice."""
    lengths = told.get("content-length", [])
    return {**told, "content-length": sorted(set(lengths))}


def same_answer(way, given, direct):
    own = set().union(*(OWN[hop] for hop in way.hops))
    assert (given.status, given.reason) == (direct.status, direct.reason)
    assert once_each(tidy(given.headers, own)) == once_each(tidy(direct.headers, own))
    assert given.body == direct.body and given.whole == direct.whole
    # Where a body ends with its connection, another connection may say otherwise how it ends.
    assert given.framing == direct.framing or (way.hops and (direct.framing, given.framing) == ("close", "chunked"))


def same_request(way, given, direct):
    (line, headers, body), (direct_line, direct_headers, direct_body) = asked(given), asked(direct)
    assert line == direct_line
    drops = {name.lower() for name, _ in way.headers} | (DROPS if "server" in way.hops else set())
    assert tidy(headers, ADDS, drops) == tidy(direct_headers, ADDS, drops)
    if "chunked" in [value for name, value in direct_headers if name.lower() == "transfer-encoding"]:
        assert unchunked(body) == unchunked(direct_body)
    else:
        assert body == direct_body


def unchunked(body):
    reader, answer = Reader(None), Answer("", 0, "", [], [])
    reader.unread = body
    reader.chunks(answer)
    assert answer.whole and not reader.unread
    return answer.body


def compare(place, steps, **request):
    stage, way = place
    direct, direct_record = once(stage, stage.direct, steps, **request)
    given, record = once(stage, way, steps, **request)
    same_answer(way, given, direct)
    same_request(way, record, direct_record)
    return given, direct
