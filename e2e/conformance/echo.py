"""The program that runs inside the sandbox of the proxy cases: it tells back what reached it. Standard library only.

/echo…    the request as JSON: method, target, headers in order, body
/reply    answers with the status, headers (repeatable `h=Name:value`) and text (`b=`) that the query names
/drop     closes the connection without an answer
/sse      one event, and the second only after /release was asked for
Upgrade   a WebSocket that echoes frames; /ws/close?code=&reason= closes, /ws/refuse answers 403
"""

import base64
import hashlib
import json
import socket
import struct
import threading
from urllib.parse import parse_qsl, urlsplit

RELEASED = threading.Event()


def head(stream):
    first = stream.readline().decode("latin-1").split()
    if len(first) < 3:
        return None
    headers = []
    while True:
        line = stream.readline().decode("latin-1").rstrip("\r\n")
        if not line:
            return first[0], first[1], headers
        name, _, value = line.partition(":")
        headers.append((name.strip(), value.strip()))


def body(stream, headers):
    known = {name.lower(): value for name, value in headers}
    if known.get("transfer-encoding", "").lower() == "chunked":
        data = b""
        while True:
            size = int(stream.readline().split(b";")[0], 16)
            data += stream.read(size)
            stream.readline()
            if size == 0:
                return data
    return stream.read(int(known.get("content-length", 0)))


def send(client, status, headers, data, length=True):
    lines = [f"HTTP/1.1 {status} X"] + [f"{name}: {value}" for name, value in headers]
    if length:
        lines.append(f"Content-Length: {len(data)}")
    client.sendall(("\r\n".join(lines) + "\r\n\r\n").encode("latin-1") + data)


def frame(opcode, data):
    if len(data) < 126:
        return struct.pack("!BB", 0x80 | opcode, len(data)) + data
    if len(data) < 65536:
        return struct.pack("!BBH", 0x80 | opcode, 126, len(data)) + data
    return struct.pack("!BBQ", 0x80 | opcode, 127, len(data)) + data


def socket_frames(client, stream, query):
    if "code" in query:
        client.sendall(frame(8, struct.pack("!H", int(query["code"])) + query.get("reason", "").encode()))
    while True:
        first = stream.read(2)
        if len(first) < 2:
            return
        size = first[1] & 127
        if size == 126:
            size = struct.unpack("!H", stream.read(2))[0]
        elif size == 127:
            size = struct.unpack("!Q", stream.read(8))[0]
        mask = stream.read(4) if first[1] & 128 else b"\0\0\0\0"
        data = bytes(one ^ mask[at % 4] for at, one in enumerate(stream.read(size)))
        opcode = first[0] & 15
        if opcode == 8:
            print("closed", struct.unpack("!H", data[:2])[0] if data else "none", flush=True)
            client.sendall(frame(8, data[:2]))
            return
        client.sendall(frame(opcode if opcode != 9 else 10, data))


def upgrade(client, stream, target, headers):
    known = {name.lower(): value for name, value in headers}
    where = urlsplit(target)
    if where.path == "/ws/refuse":
        return send(client, 403, [], b"no")
    accept = base64.b64encode(
        hashlib.sha1((known["sec-websocket-key"] + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11").encode()).digest()
    )
    lines = ["HTTP/1.1 101 X", "Upgrade: websocket", "Connection: Upgrade", "Sec-WebSocket-Accept: " + accept.decode()]
    offered = [one.strip() for one in known.get("sec-websocket-protocol", "").split(",") if one.strip()]
    if offered:
        lines.append("Sec-WebSocket-Protocol: " + offered[-1])
    client.sendall(("\r\n".join(lines) + "\r\n\r\n").encode())
    if where.path == "/ws/headers":
        client.sendall(frame(1, json.dumps(headers).encode()))
    return socket_frames(client, stream, dict(parse_qsl(where.query)))


def answer(client, stream, method, target, headers):
    data = body(stream, headers)
    where = urlsplit(target)
    query = parse_qsl(where.query)
    if where.path == "/drop":
        return False
    if where.path == "/reply":
        named = dict(query)
        lines = [(k, v) for k, _, v in (value.partition(":") for name, value in query if name == "h")]
        send(client, int(named.get("s", 200)), lines, named.get("b", "").encode())
    elif where.path == "/sse":
        RELEASED.clear()
        send(client, 200, [("Content-Type", "text/event-stream"), ("Connection", "close")], b"data: 1\n\n", False)
        RELEASED.wait(20)
        client.sendall(b"data: 2\n\n")
        return False
    elif where.path == "/release":
        RELEASED.set()
        send(client, 200, [], b"")
    else:
        told = {"method": method, "target": target, "headers": headers, "body": data.decode("latin-1")}
        send(client, 200, [("Content-Type", "application/json"), ("Server", "echo")], json.dumps(told).encode())
    return True


def serve(client):
    stream = client.makefile("rb")
    try:
        while True:
            got = head(stream)
            if got is None:
                return
            if any(name.lower() == "upgrade" for name, _ in got[2]):
                return upgrade(client, stream, got[1], got[2])
            if not answer(client, stream, *got):
                return
    except (OSError, ValueError):
        return
    finally:
        stream.close()
        client.close()


listener = socket.create_server(("0.0.0.0", 8080), backlog=128)
print("ready", flush=True)
while True:
    threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()
