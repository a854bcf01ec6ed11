"""OpenSSH's clients as people use them with a sandbox, and the tunnel that leads them there.

As a program (`python ssh_clients.py URL`, with the API key in `SANDGLASS_API_KEY`) it is a ProxyCommand: bytes of its standard input become
binary messages of a WebSocket, messages become its standard output. It needs the standard library alone.
"""

import base64
import hashlib
import os
import secrets
import socket
import ssl
import struct
import subprocess
import sys
import threading
from pathlib import Path
from urllib.parse import urlsplit

GUID = "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
BINARY, CLOSE, PING, PONG = 2, 8, 9, 10
# Against hanging only.
PATIENCE = 120


class Refused(Exception):
    """The handshake was answered otherwise."""

    def __init__(self, status, body):
        super().__init__(f"{status}: {body}")
        self.status, self.body = status, body


class Tunnel:
    """One connection to the port of a service."""

    def __init__(self, url, key, query=""):
        parts = urlsplit(url)
        secure = parts.scheme in ("https", "wss")
        plain = socket.create_connection((parts.hostname, parts.port or (443 if secure else 80)), timeout=PATIENCE)
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = ssl.create_default_context().wrap_socket(plain, server_hostname=parts.hostname) if secure else plain
        self.lock = threading.Lock()
        nonce = base64.b64encode(secrets.token_bytes(16)).decode()
        lines = {
            "Host": parts.netloc,
            "Connection": "Upgrade",
            "Upgrade": "websocket",
            "Sec-WebSocket-Version": "13",
            "Sec-WebSocket-Key": nonce,
            **({"OPEN-SANDBOX-API-KEY": key} if key else {}),
        }
        head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        target = f"{parts.path}?{query}" if query else parts.path
        self.socket.sendall(f"GET {target} HTTP/1.1\r\n{head}\r\n".encode())
        self.reader = self.socket.makefile("rb")
        status = int(self.reader.readline().split()[1])
        headers = {}
        while line := self.reader.readline().strip():
            name, _, value = line.decode().partition(":")
            headers[name.lower()] = value.strip()
        if status != 101:
            raise Refused(status, self.reader.read(int(headers.get("content-length", 0))).decode())
        accept = base64.b64encode(hashlib.sha1((nonce + GUID).encode()).digest()).decode()
        assert headers["sec-websocket-accept"] == accept, headers
        self.socket.settimeout(None)

    def send(self, data, kind=BINARY):
        """One message; an empty one says that there is no more to send."""
        mask = secrets.token_bytes(4)
        size = len(data)
        if size < 126:
            length = bytes([0x80 | size])
        elif size < 1 << 16:
            length = struct.pack("!BH", 0x80 | 126, size)
        else:
            length = struct.pack("!BQ", 0x80 | 127, size)
        whole = int.from_bytes(mask * (size // 4 + 1), "big") >> (8 * (4 - size % 4))
        masked = (int.from_bytes(data, "big") ^ whole).to_bytes(size, "big")
        with self.lock:
            self.socket.sendall(bytes([0x80 | kind]) + length + mask + masked)

    def receive(self):
        """The next kind and data, after pings have been answered."""
        while True:
            head = self.reader.read(2)
            if len(head) < 2:
                return CLOSE, b""
            kind, size = head[0] & 15, head[1]
            assert head[0] & 0x80, "a message in parts"
            if size == 126:
                (size,) = struct.unpack("!H", self.reader.read(2))
            elif size == 127:
                (size,) = struct.unpack("!Q", self.reader.read(8))
            data = self.reader.read(size)
            if kind == PING:
                self.send(data, PONG)
            elif kind != PONG:
                return kind, data

    def close(self):
        self.socket.close()


def proxy(url):
    """Standard input and output, until the other side closes."""
    tunnel = Tunnel(url, os.environ["SANDGLASS_API_KEY"])

    def feed():
        try:
            while data := os.read(0, 1 << 16):
                tunnel.send(data)
            tunnel.send(b"")
        except OSError:
            pass

    threading.Thread(target=feed, daemon=True).start()
    while True:
        kind, data = tunnel.receive()
        if kind == CLOSE:
            return
        while data:
            data = data[os.write(1, data) :]


class Keys:
    """Key pairs in a folder."""

    def __init__(self, folder):
        self.folder = Path(folder)

    def pair(self, name):
        """The path of a private key; its public half is beside it."""
        path = self.folder / name
        if not path.exists():
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", name, "-f", str(path)], check=True)
        return path

    def public(self, name):
        return Path(f"{self.pair(name)}.pub").read_text().strip()


class Client:
    """OpenSSH's programs with one identity and one sandbox, which they believe by its host key alone."""

    def __init__(self, url, api_key, host_key, identity, certificate=None):
        self.folder = identity.parent
        self.known = self.folder / f"known-{secrets.token_hex(4)}"
        self.known.write_text(f"box {host_key}\n")
        command = f"{sys.executable} {Path(__file__)} {url}"
        options = {
            "ProxyCommand": command,
            "UserKnownHostsFile": self.known,
            "GlobalKnownHostsFile": "/dev/null",
            "StrictHostKeyChecking": "yes",
            "IdentityFile": identity,
            "IdentitiesOnly": "yes",
            "BatchMode": "yes",
            "LogLevel": "ERROR",
            **({"CertificateFile": certificate} if certificate else {}),
        }
        self.options = [part for name, value in options.items() for part in ("-o", f"{name}={value}")]
        self.environment = {**os.environ, "SANDGLASS_API_KEY": api_key}

    def run(self, *command, **keys):
        """Runs one of the programs; answers how it went."""
        known = {"capture_output": True, "env": self.environment, "timeout": PATIENCE, "check": False}
        return subprocess.run(list(map(str, command)), **{**known, **keys})

    def ssh(self, *command, login="root", options=(), **keys):
        return self.run("ssh", "-F", "none", *self.options, *options, f"{login}@box", *command, **keys)

    def start(self, *options):
        """A client that goes on."""
        command = ["ssh", "-F", "none", *self.options, *options, "root@box"]
        return subprocess.Popen(command, env=self.environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    def sftp(self, script):
        return self.run("sftp", "-F", "none", *self.options, "-b", "-", "root@box", input=script.encode())

    def scp(self, *arguments):
        return self.run("scp", "-F", "none", *self.options, *arguments)

    def rsync(self, *arguments):
        shell = " ".join(["ssh", "-F", "none", *(f"'{option}'" for option in self.options)])
        return self.run("rsync", "-e", shell, *arguments)


if __name__ == "__main__":
    proxy(sys.argv[1])
