"""A Sandglass server under test, and everything that it could leave behind.

Owns starting, stopping, killing and restarting one `sandglass serve`, and the audit of the host afterwards: processes,
mounts, cgroups and links. Needs nothing beyond the standard library, so that the restart loop can use it alone.
"""

import functools
import http.client
import itertools
import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
READY_SECONDS = 60
# How long anything is waited for that has to come: beyond what any of it takes while two suites share two processors. What comes sooner is seen
# sooner, so a test that needs a bound for what it claims says so itself.
PATIENCE = 60.0
# Processes of these tests that may run side by side.
SEATS = 8
# None of them is one that browsers refuse.
SERVER_PORTS = (11_000, 18_000)
_handed_out = itertools.count()


@functools.cache
def _seat():
    """A number, and the socket by whose name it is this process's alone until its end."""
    for number in range(SEATS):
        held = socket.socket(socket.AF_UNIX)
        try:
            # In no folder, so that nothing stays of a process that is killed.
            held.bind(f"\0sandglass-e2e-seat-{number}")
        except OSError:
            held.close()
            continue
        return number, held
    raise RuntimeError(f"{SEATS} processes of these tests run already")


def seat():
    """What no other process of these tests has at the same time: ports and addresses that are numbered by it are this process's alone."""
    return _seat()[0]


def free_port():
    """A port that nobody has and that nobody is given soon, also while nobody listens on it yet or its server is killed and started again. They
    are below those that the kernel gives to outgoing connections."""
    first, last = SERVER_PORTS
    share = (last - first) // SEATS
    while True:
        port = first + seat() * share + next(_handed_out) % share
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


class Client:
    """One keep-alive connection to the server's API; every call returns (status, headers, body bytes)."""

    def __init__(self, port, key, timeout=30.0, host="127.0.0.1", tls=None):
        made = http.client.HTTPSConnection if tls else http.client.HTTPConnection
        self.connection = made(host, port, timeout=timeout, **({"context": tls} if tls else {}))
        self.key = key

    def raw(self, method, path, body=None, headers=None):
        sent = dict(headers or {})
        if self.key is not None:
            sent.setdefault("OPEN-SANDBOX-API-KEY", self.key)
        if body is not None and not isinstance(body, (bytes, str)):
            body = json.dumps(body)
            sent.setdefault("Content-Type", "application/json")
        try:
            self.connection.request(method, path, body, sent)
            answer = self.connection.getresponse()
            return answer.status, answer.headers, answer.read()
        except BaseException:
            self.connection.close()
            raise

    def call(self, method, path, body=None, headers=None):
        """As `raw`, with the body parsed when it is JSON."""
        status, _, data = self.raw(method, path, body, headers)
        try:
            return status, json.loads(data) if data else None
        except ValueError:
            return status, data.decode("utf-8", "replace")

    def close(self):
        self.connection.close()

    def sandboxes(self, query=""):
        """Every listed sandbox, over all pages."""
        found, page = [], 1
        while True:
            status, answer = self.call("GET", f"/v1/sandboxes?pageSize=200&page={page}{query}")
            if status != 200:
                raise RuntimeError(f"list answered {status}: {answer}")
            found += answer["items"]
            if not answer["pagination"]["hasNextPage"]:
                return found
            page += 1


class Process:
    """A line of the process table, as far as it matters here."""

    def __init__(self, pid):
        self.pid = pid
        folder = f"/proc/{pid}"
        stat = Path(folder, "stat").read_text()
        fields = stat[stat.rindex(")") + 2 :].split()
        self.state, self.parent, self.started = fields[0], int(fields[1]), int(fields[19])
        self.command = Path(folder, "cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace").strip()
        self.cgroups = Path(folder, "cgroup").read_text()
        try:
            self.program = os.readlink(f"{folder}/exe")
        except OSError:
            self.program = ""

    def __str__(self):
        return f"pid {self.pid} (parent {self.parent}, {self.state}): {self.command or self.program}"


def processes():
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                found.append(Process(int(name)))
            except (OSError, ValueError):
                continue
    return found


class Stack:
    """One server with its own state directory. `config` adds or replaces TOML text by section."""

    # An ssl.SSLContext of clients, where the server speaks TLS.
    tls = None

    def __init__(self, binary=None, state=None, config=None):
        self.binary = binary or os.environ["SANDGLASS_BIN"]
        self.home = Path(tempfile.mkdtemp(prefix="sandglass-e2e-"))
        self.state = Path(state) if state else self.home / "state"
        self.port = free_port()
        self.key = secrets.token_hex(16)
        self.log = self.home / "server.log"
        self.config = self.home / "sandglass.toml"
        self.config.write_text(self.configuration(config or {}))
        self.server = None
        self.killed = False
        self.known = set()
        self._watching = threading.Event()
        self._cgroups_before = set(self.cgroup_folders())

    @property
    def url(self):
        return f"{'https' if self.tls else 'http'}://127.0.0.1:{self.port}"

    @property
    def domain(self):
        return f"127.0.0.1:{self.port}"

    def configuration(self, extra):
        sections = {
            "server": {"host": "127.0.0.1", "port": self.port, "api_key": self.key},
            "runtime": {"type": "embedded"},
            "embedded": {"state_dir": str(self.state), "host_image": "always"},
        }
        for name, keys in extra.items():
            sections.setdefault(name, {}).update(keys)
        lines = []
        for name, keys in sections.items():
            lines.append(f"[{name}]")
            # JSON strings, numbers, booleans and arrays of them are also TOML.
            lines += [f"{key} = {json.dumps(value)}" for key, value in keys.items()]
        return "\n".join(lines) + "\n"

    def environment(self):
        """What the server's environment has beside ours."""
        return {}

    # ------------------------------------------------------------ running it

    def start(self, wait=True):
        self.killed = False
        with open(self.log, "ab") as log:
            self.server = subprocess.Popen(
                [self.binary, "serve", "--config", str(self.config)],
                env={**os.environ, **self.environment()},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        if not self._watching.is_set():
            self._watching.set()
            threading.Thread(target=self._remember, daemon=True).start()
        if wait:
            self.wait_ready()
        return self

    def _remember(self):
        """Notes every sandbox that ever had a directory, so that the audit knows whose leftovers to look for."""
        while self._watching.is_set():
            self.known.update(self.directories())
            time.sleep(0.05)

    def wait_ready(self):
        deadline = time.monotonic() + READY_SECONDS
        while time.monotonic() < deadline:
            if self.server.poll() is not None:
                raise RuntimeError(f"the server ended with {self.server.returncode}\n{self.tail()}")
            client = Client(self.port, None, timeout=2, tls=self.tls)
            try:
                if client.raw("GET", "/readyz")[0] == 200:
                    return
            except (OSError, http.client.HTTPException):
                pass
            finally:
                client.close()
            time.sleep(0.01)
        raise RuntimeError(f"the server was not ready within {READY_SECONDS} s\n{self.tail()}")

    def kill(self):
        """As a crash: SIGKILL to the server alone."""
        self.server.kill()
        self.server.wait()
        self.killed = True

    def revive(self):
        """Starts what a test killed and, since it failed, did not start again: the tests after it are about something else. A server that ended
        by itself stays ended."""
        if self.killed:
            self.start()

    def stop(self, seconds=PATIENCE):
        """As an operator does: SIGTERM, and a wait."""
        if self.server is None or self.server.poll() is not None:
            return self.server.returncode if self.server else None
        self.server.send_signal(signal.SIGTERM)
        try:
            return self.server.wait(seconds)
        except subprocess.TimeoutExpired:
            self.server.kill()
            self.server.wait()
            raise RuntimeError(f"the server did not stop within {seconds} s of SIGTERM\n{self.tail()}") from None

    def client(self, timeout=30.0):
        return Client(self.port, self.key, timeout, tls=self.tls)

    def tail(self, lines=40):
        try:
            return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])
        except OSError:
            return "(no log)"

    # ------------------------------------------------------------ what is there

    def directories(self):
        try:
            return {entry.name for entry in os.scandir(self.state / "sandboxes") if entry.is_dir()}
        except OSError:
            return set()

    def document(self, sandbox, name):
        try:
            return json.loads((self.state / "sandboxes" / sandbox / name).read_text())
        except (OSError, ValueError):
            return {}

    def prefix(self):
        try:
            return json.loads((self.state / "network.json").read_text())["prefix"]
        except (OSError, ValueError, KeyError):
            return None

    def links(self):
        prefix = self.prefix()
        if not prefix:
            return set()
        return {name for name in os.listdir("/sys/class/net") if name.startswith(prefix)}

    @staticmethod
    def cgroup_folders():
        """Every cgroup below one named sandglass, in every mounted hierarchy (v1) or in the one there is (v2)."""
        found = []
        # os.walk passes over folders that go away meanwhile.
        for folder, _, _ in os.walk(CGROUPS):
            if any(part.startswith("sandglass") for part in Path(folder).relative_to(CGROUPS).parts):
                found.append(folder)
        return found

    def cgroups(self):
        """Cgroups that appeared since the start and belong to a sandbox of this server."""
        fresh = set(self.cgroup_folders()) - self._cgroups_before
        return {path for path in fresh if any(sandbox in path for sandbox in self.known)}

    def mounts(self):
        return [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if str(self.state) in line]

    def guests(self):
        """Processes that run inside a sandbox of this server."""
        return [p for p in processes() if p.state != "Z" and any(s in p.cgroups for s in self.known)]

    def shims(self):
        """Processes that run the shim binary of this state directory: one a sandbox, and the zygote."""
        folder = f"{self.state}/bin/shim"
        return [p for p in processes() if p.program.startswith(folder) and p.state != "Z"]

    # ------------------------------------------------------------ the audit

    def leftovers(self, living=()):
        """What belongs to no sandbox in `living`. Empty means clean; meant to be polled."""
        living = set(living)
        found = [f"directory of {s}" for s in self.directories() - living]
        found += [f"directory of {s} is missing" for s in living - self.directories()]
        mine = {self.server.pid} if self.server and self.server.poll() is None else set()
        owners = {self.document(s, "state.json").get("shimPid") for s in living}
        found += [
            f"shim without a sandbox: {p}" for p in self.shims() if p.pid not in owners and p.parent not in mine
        ]
        found += [f"process in a removed sandbox: {p}" for p in self.guests() if not self._in_any(p.cgroups, living)]
        found += [f"cgroup {path}" for path in self.cgroups() if not self._in_any(path, living)]
        wanted = {(self.document(s, "spec.json").get("network") or {}).get("hostInterface") for s in living}
        found += [f"link {name}" for name in self.links() - wanted]
        found += [f"mount {line.split()[4]}" for line in self.mounts() if not self._in_any(line, living)]
        return found

    @staticmethod
    def _in_any(text, living):
        return any(sandbox in text for sandbox in living)

    def wait_clean(self, living=(), seconds=PATIENCE):
        deadline = time.monotonic() + seconds
        while True:
            found = self.leftovers(living() if callable(living) else living)
            if not found or time.monotonic() > deadline:
                return found
            time.sleep(0.05)

    def sweep(self):
        """Ends every build and deletes every sandbox that is left."""
        client = self.client()
        try:
            status, page = client.call("GET", "/v1/image-builds?pageSize=200")
            for build in page["items"] if status == 200 else ():
                if build["status"]["state"] in ("Queued", "Running", "Finalizing"):
                    client.call("DELETE", f"/v1/image-builds/{build['id']}")
            for sandbox in client.sandboxes():
                client.call("DELETE", f"/v1/sandboxes/{sandbox['id']}")
        finally:
            client.close()

    def close(self):
        """Ends the server and removes what it made for itself; returns what it should not have left."""
        problems = []
        if self.server and self.server.poll() is None:
            try:
                client = self.client()
                for sandbox in client.sandboxes():
                    client.call("DELETE", f"/v1/sandboxes/{sandbox['id']}")
                client.close()
            except (OSError, RuntimeError, http.client.HTTPException) as error:
                problems.append(f"could not delete what was left: {error}")
            problems += self.wait_clean()
            try:
                code = self.stop()
                if code not in (0, None):
                    problems.append(f"the server ended with {code}")
            except RuntimeError as error:
                problems.append(str(error))
        problems += [p for p in self.wait_clean() if p not in problems]
        self._watching.clear()
        self._remove_firewall()
        if problems:
            problems.append(self.tail())
        shutil.rmtree(self.home, ignore_errors=True)
        return problems

    def _remove_firewall(self):
        """The server keeps its firewall table for the next start; the test host has no next start."""
        prefix = self.prefix()
        if not prefix:
            return
        listed = subprocess.run(["nft", "list", "tables"], capture_output=True, text=True, check=False).stdout
        for family, table in re.findall(r"^table (\S+) (\S+)$", listed, re.M):
            if prefix in table:
                subprocess.run(["nft", "delete", "table", family, table], capture_output=True, check=False)


def wait_for(claim, seconds=PATIENCE, every=0.05):
    """Polls `claim` until it is true; returns its last value."""
    deadline = time.monotonic() + seconds
    while True:
        value = claim()
        if value or time.monotonic() > deadline:
            return value
        time.sleep(every)
