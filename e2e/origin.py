"""An HTTP server that says exactly the bytes it was told to say, and remembers exactly the bytes it got.

It runs inside a sandbox (`python3 origin.py DATA INSIDE CONTROL`) and needs the standard library only. DATA is a port on every address,
INSIDE one on loopback, so that only the agent gets there. Over CONTROL the test says beforehand what is to happen when a request with
a certain `X-Exchange` arrives: a list of steps. Requests without one get 404. A connection is kept until a step closes it.

Steps: ["send", base64], ["flood", bytes], ["body"] reads a body as its head delimits it, ["read", bytes], ["to_end"], ["echo"] until the end,
["accept", [lines]] answers a WebSocket handshake, ["mark", name] says that it came this far, ["gate", name] waits until it is opened,
["shut"] ends the sending side, ["close"], ["reset"].
"""

import base64
import hashlib
import json
import socket
import struct
import sys
import threading

PATIENCE = 60
WEBSOCKET = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"


class Exchange:
    def __init__(self, steps):
        self.steps = steps
        self.seen = bytearray()
        self.count, self.digest = 0, hashlib.sha256()
        self.events = {}
        self.over = threading.Event()
        self.end = ""
        self.connection = 0

    def event(self, kind, name):
        return self.events.setdefault((kind, name), threading.Event())

    def note(self, data):
        """All of what arrives is counted and hashed; only the first of it is kept."""
        self.count += len(data)
        self.digest.update(data)
        if len(self.seen) < 1 << 20:
            self.seen += data[: (1 << 20) - len(self.seen)]

    def record(self):
        return {
            "seen": base64.b64encode(bytes(self.seen)).decode(),
            "count": self.count,
            "digest": self.digest.hexdigest(),
            "end": self.end,
            "connection": self.connection,
        }


EXCHANGES = {}
CONNECTIONS = 0


class Connection:
    def __init__(self, link, number):
        self.link, self.number, self.unread = link, number, b""
        link.settimeout(PATIENCE)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def more(self, most=1 << 18):
        data = self.link.recv(most)
        if not data:
            raise EOFError
        return data

    def until(self, mark):
        while mark not in self.unread:
            self.unread += self.more()
        end = self.unread.index(mark) + len(mark)
        taken, self.unread = self.unread[:end], self.unread[end:]
        return taken

    def exactly(self, size, into):
        while size:
            part = self.unread[:size] if self.unread else self.more(min(size, 1 << 18))
            self.unread = self.unread[len(part) :] if self.unread else b""
            into.note(part)
            size -= len(part)

    def body(self, head, into):
        fields = [line.partition(b":") for line in head.lower().split(b"\r\n")[1:]]
        values = {name.strip(): value.strip() for name, _, value in fields}
        if values.get(b"transfer-encoding") == b"chunked":
            while True:
                line = self.until(b"\r\n")
                into.note(line)
                size = int(line.split(b";")[0], 16)
                if not size:
                    break
                self.exactly(size + 2, into)
            line = b""
            while line != b"\r\n":
                line = self.until(b"\r\n")
                into.note(line)
        else:
            self.exactly(int(values.get(b"content-length", 0)), into)

    def serve(self):
        try:
            while self.one():
                pass
        except (OSError, EOFError):
            pass
        finally:
            self.link.close()

    def one(self):
        head = self.until(b"\r\n\r\n")
        name = [line.split(b":", 1)[1].strip().decode() for line in head.split(b"\r\n") if line.lower().startswith(b"x-exchange:")]
        exchange = EXCHANGES.get(name[0]) if name else None
        if exchange is None:
            self.link.sendall(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            return False
        exchange.connection = self.number
        exchange.note(head)
        try:
            for step in exchange.steps:
                if not self.step(exchange, head, *step):
                    return False
            exchange.end = "done"
            return True
        except EOFError:
            exchange.end = "eof"
        except TimeoutError:
            exchange.end = "timeout"
        except OSError as error:
            exchange.end = type(error).__name__
        finally:
            exchange.over.set()
        return False

    def step(self, exchange, head, what, argument=None):
        if what == "send":
            self.link.sendall(base64.b64decode(argument))
        elif what == "flood":
            block = bytes(range(256)) * 1024
            while argument > 0:
                self.link.sendall(block[:argument])
                argument -= len(block)
        elif what == "body":
            self.body(head, exchange)
        elif what == "read":
            self.exactly(argument, exchange)
        elif what in ("to_end", "echo"):
            self.to_end(exchange, what == "echo")
        elif what == "accept":
            self.accept(head, argument)
        elif what == "mark":
            exchange.event("mark", argument).set()
        elif what == "gate":
            if not exchange.event("gate", argument).wait(PATIENCE):
                raise TimeoutError
        elif what == "shut":
            self.link.shutdown(socket.SHUT_WR)
        else:
            if what == "reset":
                self.link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            exchange.end = what
            return False
        return True

    def to_end(self, exchange, back):
        while True:
            data, self.unread = self.unread, b""
            try:
                data = data or self.more()
            except EOFError:
                return
            exchange.note(data)
            if back:
                self.link.sendall(data)

    def accept(self, head, lines):
        key = [line.split(b":", 1)[1].strip() for line in head.split(b"\r\n") if line.lower().startswith(b"sec-websocket-key:")][0]
        token = base64.b64encode(hashlib.sha1(key + WEBSOCKET).digest()).decode()
        fixed = ["HTTP/1.1 101 Switching Protocols", "Connection: Upgrade", "Upgrade: websocket", f"Sec-WebSocket-Accept: {token}"]
        self.link.sendall("\r\n".join([*fixed, *lines, "", ""]).encode())


def control(link):
    with link, link.makefile("rb") as lines:
        for line in lines:
            link.sendall(json.dumps(command(json.loads(line))).encode() + b"\n")


def command(asked):
    if asked["op"] == "expect":
        EXCHANGES[asked["id"]] = Exchange(asked["steps"])
        return {}
    exchange = EXCHANGES[asked["id"]]
    if asked["op"] == "record":
        over = exchange.over.wait(PATIENCE)
        return {**exchange.record(), "over": over}
    if asked["op"] == "peek":
        return exchange.record()
    if asked["op"] == "open":
        exchange.event("gate", asked["name"]).set()
        return {}
    return {"reached": exchange.event("mark", asked["name"]).wait(PATIENCE)}


def listen(host, port, serve):
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((host, port))
    listener.listen(1024)

    def accept():
        global CONNECTIONS
        while True:
            link, _ = listener.accept()
            CONNECTIONS += 1
            threading.Thread(target=serve, args=(link, CONNECTIONS), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()


def main():
    data, inside, steering = map(int, sys.argv[1:])
    listen("0.0.0.0", data, lambda link, number: Connection(link, number).serve())
    listen("127.0.0.1", inside, lambda link, number: Connection(link, number).serve())
    listen("0.0.0.0", steering, lambda link, _: control(link))
    print("listening", flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main()
