"""The rest of the world for tests of egress policies: a network namespace with name, web and TLS servers of its own.

As a program (`python egress_world.py FOLDER BLOCK [names]`) it is those servers, or the name server alone; as a module it makes the
namespace, the authority that the servers' certificates come from, and the programs that run in it. It keeps what it was asked for, and
every packet that reaches an address which no test allows. All addresses are reserved for measurements, and nobody's outside.
"""

import functools
import json
import os
import socket
import ssl
import struct
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

if __name__ != "__main__":
    from stack import SEATS, seat


def own_block():
    """Runs at the same time do not meet, nor what one that was killed has left."""
    told = subprocess.run(["ip", "-o", "-4", "addr"], capture_output=True, text=True, check=True).stdout
    return next(block for block in range(seat(), 250, SEATS) if f" 198.19.{block}." not in told)


BLOCK = int(sys.argv[2]) if __name__ == "__main__" else own_block()
HOST, RESOLVER = f"198.19.{BLOCK}.1", f"198.19.{BLOCK}.2"
NAMES = {"allowed.test": f"198.19.{BLOCK}.10", "other.test": f"198.19.{BLOCK}.11", "sub.wild.test": f"198.19.{BLOCK}.12"}
# Nobody's name.
BARE = f"198.19.{BLOCK}.20"
# Where nothing may arrive from a sandbox that is only let to `allowed.test`.
FORBIDDEN = (NAMES["other.test"], BARE)
# Where datagrams are answered, and plain HTTP beside port 80.
DATAGRAMS, PLAIN = (443, 853, 5000, 5353), 8080


class World:
    """Made by entering it, gone when left."""

    def __init__(self, folder, web=True):
        self.folder, self.web = Path(folder), web
        self.folder.mkdir(parents=True, exist_ok=True)
        tag = f"{os.getpid():x}"[-6:]
        self.name, self.near = f"world{tag}", f"wo{tag}"
        self.servers = None

    def __enter__(self):
        self._certificates()
        self._ip(f"netns add {self.name}")
        try:
            self._ip(f"link add {self.near} type veth peer name far netns {self.name}")
            self._ip(f"addr add {HOST}/30 dev {self.near}")
            self._ip(f"link set {self.near} up")
            for address in [f"{RESOLVER}/30", *(f"{a}/32" for a in {*NAMES.values(), BARE})]:
                self._ip(f"-n {self.name} addr add {address} dev far")
            for link in ("lo", "far"):
                self._ip(f"-n {self.name} link set {link} up")
            self._ip(f"-n {self.name} route add default via {HOST}")
            for address in {*NAMES.values(), BARE}:
                self._ip(f"route add {address}/32 via {RESOLVER} dev {self.near}")
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        if self.servers:
            self.servers.kill()
            self.servers.wait()
        subprocess.run(["ip", "netns", "del", self.name], check=False)
        subprocess.run(["ip", "link", "del", self.near], check=False, capture_output=True)

    @property
    def authority(self):
        return self.folder / "authority.pem"

    def requests(self):
        """What the web servers were asked, oldest first."""
        try:
            return [json.loads(line) for line in (self.folder / "requests.jsonl").read_text().splitlines()]
        except OSError:
            return []

    def questions(self):
        """Names that somebody asked for."""
        return self._lines("questions.log")

    def strays(self):
        """Packets to the forbidden addresses: protocol, source and the first bytes of what they carried."""
        return self._lines("strays.log")

    def _lines(self, name):
        try:
            return (self.folder / name).read_text().splitlines()
        except OSError:
            return []

    def _ip(self, line):
        subprocess.run(["ip", *line.split()], check=True)

    def _start(self):
        only = [] if self.web else ["names"]
        command = ["ip", "netns", "exec", self.name, sys.executable, __file__, str(self.folder), str(BLOCK), *only]
        self.servers = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert self.servers.stdout.readline() == b"ready\n"

    def _certificates(self):
        def openssl(*arguments):
            subprocess.run(["openssl", *arguments], check=True, capture_output=True, cwd=self.folder)

        curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2")
        openssl("req", "-x509", *curve, "-keyout", "authority.key", "-out", "authority.pem", "-subj", "/CN=test world")
        openssl("req", *curve[:-2], "-keyout", "server.key", "-out", "server.csr", "-subj", "/CN=servers")
        names = ",".join(f"DNS:{name}" for name in NAMES)
        (self.folder / "extensions").write_text(f"subjectAltName={names}\n")
        signed = ("-CA", "authority.pem", "-CAkey", "authority.key", "-CAcreateserial", "-days", "2")
        openssl("x509", "-req", "-in", "server.csr", *signed, "-out", "server.pem", "-extfile", "extensions")


class Web(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    log = questions = None

    def do_GET(self):
        body = self.rfile.read(int(self.headers.get("content-length", 0))).decode("utf-8", "replace")
        seen = {
            "method": self.command,
            "path": self.path,
            "headers": {name.lower(): value for name, value in self.headers.items()},
            "body": body,
            "tls": isinstance(self.connection, ssl.SSLSocket),
            "at": self.connection.getsockname()[0],
            "from": self.client_address[0],
        }
        Web.log.add(json.dumps(seen))
        answer = b"hello from " + seen["at"].encode()
        self.send_response(200)
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    do_POST = do_PUT = do_GET

    def log_message(self, *_):
        pass


def answer(question):
    """A name's address, nothing for other types, and no such name."""
    labels, at = [], 12
    while question[at]:
        labels.append(question[at + 1 : at + 1 + question[at]].decode().lower())
        at += question[at] + 1
    (kind,) = struct.unpack("!H", question[at + 1 : at + 3])
    name, asked = ".".join(labels), question[12 : at + 5]
    Web.questions.add(f"{kind} {name}")
    address = NAMES.get(name)
    found = b"" if address is None or kind != 1 else b"\xc0\x0c" + struct.pack("!HHIH", 1, 1, 30, 4) + socket.inet_aton(address)
    # The root exists, too: it is what resolvers are asked for to see whether they live.
    code = 0 if address or not name else 3
    return question[:2] + struct.pack("!HHHHH", 0x8180 | code, 1, 1 if found else 0, 0, 0) + asked + found


class Log:
    """Lines in a file, by several threads."""

    def __init__(self, path):
        self.path, self.lock = path, threading.Lock()

    def add(self, line):
        with self.lock, open(self.path, "a") as log:
            log.write(line + "\n")


def echo_datagrams(port):
    server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    server.bind(("0.0.0.0", port))
    while True:
        said, peer = server.recvfrom(65535)
        server.sendto(said[:64], peer)


def watch(strays):
    forbidden = {socket.inet_aton(address) for address in FORBIDDEN}
    link = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(0x0800))
    while True:
        packet = link.recv(65535)[14:]
        if packet[16:20] in forbidden:
            strays.add(f"{packet[9]} {socket.inet_ntoa(packet[12:16])} {packet[20:80].hex()}")


def resolve_datagrams():
    server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    server.bind((RESOLVER, 53))
    while True:
        question, peer = server.recvfrom(4096)
        server.sendto(answer(question), peer)


def resolve_streams():
    server = socket.create_server((RESOLVER, 53))
    while True:
        peer, _ = server.accept()
        with peer:
            peer.settimeout(5)
            try:
                (length,) = struct.unpack("!H", peer.recv(2))
                said = answer(peer.recv(length))
                peer.sendall(struct.pack("!H", len(said)) + said)
            except (OSError, struct.error):
                pass


def serve(folder, web):
    Web.log, Web.questions = Log(folder / "requests.jsonl"), Log(folder / "questions.log")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "server.pem", folder / "server.key")

    class Tls(ThreadingHTTPServer):
        def finish_request(self, request, address):
            try:
                request.settimeout(20)
                with context.wrap_socket(request, server_side=True) as wrapped:
                    super().finish_request(wrapped, address)
            except (OSError, ssl.SSLError):
                pass

        def handle_error(self, *_):
            pass

    loops = [resolve_datagrams, resolve_streams]
    if web:
        for port in (80, PLAIN):
            plain = ThreadingHTTPServer(("0.0.0.0", port), Web)
            plain.handle_error = lambda *_: None
            loops.append(plain.serve_forever)
        loops.append(Tls(("0.0.0.0", 443), Web).serve_forever)
        loops += [functools.partial(echo_datagrams, port) for port in DATAGRAMS]
        loops.append(functools.partial(watch, Log(folder / "strays.log")))
    for loop in loops:
        threading.Thread(target=loop, daemon=True).start()
    time.sleep(0.2)
    print("ready", flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    serve(Path(sys.argv[1]), web="names" not in sys.argv[3:])
