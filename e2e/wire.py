"""HTTP/1.1 and WebSocket frames by hand: what is sent is what was written, and what arrives is shown as it arrived."""

import base64
import json
import os
import socket
import struct
import uuid
from dataclasses import dataclass, field

PATIENCE = 60
HOP_BY_HOP = {"connection", "keep-alive", "proxy-connection", "proxy-authenticate", "te", "transfer-encoding", "upgrade"}


@dataclass
class Way:
    """One way to a port of a sandbox."""

    name: str
    address: tuple
    prefix: str = ""
    headers: list = field(default_factory=list)
    # Which of our programs are on it, the first one first.
    hops: tuple = ()
    # What is put before redirects to `/…`.
    location: str = ""
    name_of_host: str = ""

    @property
    def host(self):
        return self.name_of_host or f"{self.address[0]}:{self.address[1]}"

    def connect(self):
        link = socket.create_connection(self.address, timeout=PATIENCE)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return link

    def head(self, method, target, headers, identity, version="HTTP/1.1"):
        """A request's head; `headers` are pairs of text or bytes, in their order."""
        lines = [f"{method} {self.prefix}{target} {version}", f"Host: {self.host}", f"X-Exchange: {identity}"]
        text = "\r\n".join(lines).encode("latin-1")
        for name, value in [*self.headers, *headers]:
            text += b"\r\n" + name.encode() + b": " + (value if isinstance(value, bytes) else value.encode())
        return text + b"\r\n\r\n"


@dataclass
class Answer:
    """An answer, taken apart but not tidied up."""

    version: str
    status: int
    reason: str
    headers: list
    interim: list
    framing: str = "none"
    body: bytes = b""
    trailers: list = field(default_factory=list)
    whole: bool = True

    def values(self, name):
        return [value for key, value in self.headers if key.lower() == name.lower()]


class Reader:
    """Reads answers off one connection."""

    def __init__(self, link):
        self.link, self.unread = link, b""

    def more(self):
        try:
            data = self.link.recv(1 << 18)
        except ConnectionResetError:
            data = b""
        self.unread += data
        return bool(data)

    def until(self, mark):
        while mark not in self.unread:
            if not self.more():
                raise EOFError(self.unread)
        end = self.unread.index(mark) + len(mark)
        taken, self.unread = self.unread[:end], self.unread[end:]
        return taken

    def exactly(self, size):
        """As many bytes, or fewer where the connection ends."""
        parts, left = [], size
        while left:
            if not self.unread and not self.more():
                break
            parts.append(self.unread[:left])
            self.unread = self.unread[left:]
            left -= len(parts[-1])
        return b"".join(parts)

    def head(self):
        interim = []
        while True:
            lines = self.until(b"\r\n\r\n")[:-4].split(b"\r\n")
            version, status, reason = (lines[0].decode("latin-1").split(" ", 2) + [""])[:3]
            fields = [line.decode("latin-1").partition(":") for line in lines[1:]]
            answer = Answer(version, int(status), reason, [(name, value.strip()) for name, _, value in fields], interim)
            if answer.status >= 200 or answer.status == 101:
                return answer
            interim.append(answer.status)

    def answer(self, method="GET"):
        answer = self.head()
        if method != "HEAD" and answer.status not in (101, 204, 304):
            self.body(answer)
        return answer

    def body(self, answer):
        length = answer.values("content-length")
        if "chunked" in [value.lower() for value in answer.values("transfer-encoding")]:
            answer.framing = "chunked"
            self.chunks(answer)
        elif length:
            answer.framing = "length"
            answer.body = self.exactly(int(length[0]))
            answer.whole = len(answer.body) == int(length[0])
        else:
            answer.framing = "close"
            while self.more():
                pass
            answer.body, self.unread = self.unread, b""

    def chunk(self):
        """One chunk; None when it is cut short, empty at the end."""
        try:
            size = int(self.until(b"\r\n").split(b";")[0], 16)
        except EOFError:
            return None
        if not size:
            return b""
        data = self.exactly(size)
        return data if len(data) == size and self.exactly(2) == b"\r\n" else None

    def chunks(self, answer):
        parts = []
        while part := self.chunk():
            parts.append(part)
        answer.body, answer.whole = b"".join(parts), part is not None
        while answer.whole:
            try:
                line = self.until(b"\r\n")[:-2].decode("latin-1")
            except EOFError:
                answer.whole = False
                break
            if not line:
                break
            name, _, value = line.partition(":")
            answer.trailers.append((name, value.strip()))


# ---------------------------------------------------------------- WebSocket


def handshake(way, target, identity, *more):
    key = base64.b64encode(os.urandom(16)).decode()
    fixed = [("Connection", "keep-alive, Upgrade"), ("Upgrade", "websocket"), ("Sec-WebSocket-Version", "13"), ("Sec-WebSocket-Key", key)]
    return way.head("GET", target, [*fixed, *more], identity)


def frame(code, payload=b"", final=True, compressed=False, masked=True):
    first = code | (0x80 if final else 0) | (0x40 if compressed else 0)
    size, mask = len(payload), 0x80 if masked else 0
    if size < 126:
        head = bytes([first, mask | size])
    elif size < 1 << 16:
        head = bytes([first, mask | 126]) + struct.pack(">H", size)
    else:
        head = bytes([first, mask | 127]) + struct.pack(">Q", size)
    # With a key of zeros the payload is as it was, so that what arrives can be compared.
    return head + (bytes(4) if masked else b"") + payload


# ---------------------------------------------------------------- the origin's other end


class Origin:
    """Steers the program in `origin.py`."""

    def __init__(self, address):
        self.address = address

    def ask(self, **what):
        with socket.create_connection(self.address, timeout=PATIENCE + 30) as link, link.makefile("rb") as lines:
            link.sendall(json.dumps(what).encode() + b"\n")
            return json.loads(lines.readline())

    def expect(self, steps):
        identity = uuid.uuid4().hex
        encoded = [[step[0], base64.b64encode(step[1]).decode()] if step[0] == "send" else list(step) for step in steps]
        self.ask(op="expect", id=identity, steps=encoded)
        return identity

    def record(self, identity, op="record"):
        found = self.ask(op=op, id=identity)
        found["seen"] = base64.b64decode(found["seen"])
        return found

    def open(self, identity, name):
        self.ask(op="open", id=identity, name=name)

    def reached(self, identity, name):
        assert self.ask(op="reached", id=identity, name=name)["reached"], name
