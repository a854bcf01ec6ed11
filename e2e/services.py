"""Private Redis and PostgreSQL servers, from Debian's packages, each with its data in a folder of its own."""

import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
from pathlib import Path

from stack import free_port, wait_for

POSTGRES_USER = "postgres"


def postgres_programs():
    """Debian keeps them out of the path, one folder for each major version."""
    folders = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda folder: int(folder.parent.name))
    return folders[-1] if folders else Path(shutil.which("initdb") or "/nowhere").parent


class Redis:
    """On loopback, without persistence."""

    def __init__(self, password="queue-password"):
        self.port, self.password = free_port(), password
        self.folder = Path(tempfile.mkdtemp(prefix="sandglass-redis-"))
        self.options = []
        self.dsn = f"redis://:{password}@127.0.0.1:{self.port}/0"
        self.process = None

    def start(self):
        self.process = subprocess.Popen(
            [
                *("redis-server", "--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self.folder)),
                *("--save", "", "--appendonly", "no", "--requirepass", self.password),
                *self.options,
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        if not wait_for(lambda: self._answers()):
            raise RuntimeError("redis-server does not answer")
        return self

    def _answers(self):
        try:
            return self.call("PING") == "PONG"
        except OSError:
            return False

    def call(self, *words):
        """One command in Redis' own protocol; answers text, a number or None."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=5) as connection:
            stream = connection.makefile("rb")
            for command in (("AUTH", self.password), words):
                sent = f"*{len(command)}\r\n".encode()
                for word in command:
                    data = word if isinstance(word, bytes) else str(word).encode()
                    sent += f"${len(data)}\r\n".encode() + data + b"\r\n"
                connection.sendall(sent)
                line = stream.readline().rstrip(b"\r\n")
                kind, rest = line[:1], line[1:].decode()
                if kind == b"-":
                    raise RuntimeError(f"{words[0]}: {rest}")
                answer = rest
                if kind == b":":
                    answer = int(rest)
                elif kind == b"$":
                    answer = None if rest == "-1" else stream.read(int(rest) + 2)[:-2].decode()
            return answer

    def stop(self):
        if self.process and self.process.poll() is None:
            self.process.terminate()
            self.process.wait()

    def close(self):
        self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)


class Postgres:
    """On a socket in its folder and on loopback; runs as Debian's user, since it refuses to run as root."""

    def __init__(self):
        self.port = free_port()
        self.folder = Path(tempfile.mkdtemp(prefix="sandglass-postgres-"))
        self.programs = postgres_programs()
        self.dsn = f"postgresql://{POSTGRES_USER}:store-password@127.0.0.1:{self.port}/postgres"
        self.process = None
        self.user = {}
        if os.geteuid() == 0:
            owner = pwd.getpwnam(POSTGRES_USER)
            self.user = {"user": owner.pw_uid, "group": owner.pw_gid, "extra_groups": []}
            os.chown(self.folder, owner.pw_uid, owner.pw_gid)
        password = self.folder / "password"
        password.write_text("store-password")
        if self.user:
            os.chown(password, self.user["user"], self.user["group"])
        command = [
            *(str(self.programs / "initdb"), "--pgdata", str(self.folder / "data"), "--username", POSTGRES_USER),
            *("--auth", "scram-sha-256", "--pwfile", str(password), "--no-sync", "--encoding", "UTF8", "--locale", "C"),
        ]
        subprocess.run(command, check=True, capture_output=True, cwd=self.folder, **self.user)

    def start(self):
        settings = {
            "listen_addresses": "127.0.0.1",
            "port": self.port,
            "unix_socket_directories": str(self.folder),
            "fsync": "off",
            "shared_buffers": "16MB",
            "max_connections": "40",
        }
        options = [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
        with open(self.folder / "log", "ab") as log:
            self.process = subprocess.Popen(
                [str(self.programs / "postgres"), "-D", str(self.folder / "data"), *options],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.folder,
                **self.user,
            )
        if not wait_for(lambda: self.query("select 1") == "1", every=0.1):
            raise RuntimeError(f"postgres does not answer:\n{(self.folder / 'log').read_text()[-2000:]}")
        return self

    def query(self, text):
        """What psql prints, or None when it could not."""
        command = [str(self.programs / "psql"), self.dsn, "-Atqc", text]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=self.folder)
        return done.stdout.strip() if done.returncode == 0 else None

    def stop(self):
        if self.process and self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            self.process.wait()

    def close(self):
        self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)
