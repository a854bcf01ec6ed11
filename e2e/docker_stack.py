"""Servers on a private engine: Sandglass with the Docker runtime, and the reference.

Both have a home of their own (the side files of sandboxes live there) which may be shared to hand sandboxes over.
"""

import contextlib
import itertools
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import tempfile
from pathlib import Path

from docker_engine import STUB_AGENT
from stack import SEATS, Client, Stack, free_port, seat, wait_for

REFERENCE_PYTHON = "SANDGLASS_E2E_REFERENCE_PYTHON"


# Above those of the servers themselves, below those of outgoing connections.
PUBLISHED = (20_000, 32_000)
RANGES = 5
_handed_out = itertools.count()


def _range(number):
    first, last = PUBLISHED
    width = (last - first) // SEATS // RANGES
    start = first + (seat() * RANGES + number) * width
    return {"port_range_min": start, "port_range_max": start + width - 1}


def port_range():
    """Few servers of one process publish ports at once; ranges of their own keep them apart, and from those of every other process."""
    return _range(next(_handed_out) % (RANGES - 1))


def untouched_range():
    """One that no server is given otherwise, for a test that counts on every port of it."""
    return _range(RANGES - 1)


class DockerStack(Stack):
    """`sandglass serve` on `engine`. It leaves nothing on the host but on the engine, which is audited instead."""

    def __init__(self, engine, config=None, home=None, **keys):
        self.engine = engine
        self.user_home = home
        self.extra = {}
        super().__init__(config=config, **keys)

    def configuration(self, extra):
        sections = {
            "server": {"host": "127.0.0.1", "port": self.port, "api_key": self.key},
            "runtime": {"type": "docker", "execd_image": STUB_AGENT},
            "embedded": {"state_dir": str(self.state)},
            "docker": {"network_mode": "bridge", "publish_host": "127.0.0.1", **port_range()},
            "store": {"type": "sqlite", "path": str(self.home / "store.db")},
        }
        for name, keys in extra.items():
            sections.setdefault(name, {}).update(keys)
        lines = []
        for name, keys in sections.items():
            lines.append(f"[{name}]")
            lines += [f"{key} = {json.dumps(value)}" for key, value in keys.items() if not isinstance(value, dict)]
            for key, value in keys.items():
                if isinstance(value, dict):
                    lines.append(f"[{name}.{key}]")
                    lines += [f"{inner} = {json.dumps(content)}" for inner, content in value.items()]
        return "\n".join(lines) + "\n"

    def environment(self):
        return {"DOCKER_HOST": self.engine.host, "HOME": str(self.user_home or self.home), **self.extra}

    def rows(self):
        """(table, sandbox) of what the store owes to somebody."""
        with contextlib.closing(sqlite3.connect(f"file:{self.home / 'store.db'}?mode=ro", uri=True)) as store:
            return [("intents", owner) for (owner,) in store.execute("select sandbox_id from intents")]

    def close(self):
        """Ends the server; what it left is looked for on the engine."""
        problems = []
        if self.server and self.server.poll() is None:
            client = self.client()
            try:
                for sandbox in client.sandboxes():
                    client.call("DELETE", f"/v1/sandboxes/{sandbox['id']}")
                status, page = client.call("GET", "/v1/snapshots?pageSize=200")
                for snapshot in page["items"] if status == 200 else ():
                    client.call("DELETE", f"/v1/snapshots/{snapshot['id']}")
            except (OSError, RuntimeError, TypeError) as error:
                problems.append(f"could not delete what was left: {error}")
            finally:
                client.close()
            try:
                code = self.stop()
                if code not in (0, None):
                    problems.append(f"the server ended with {code}")
            except RuntimeError as error:
                problems.append(str(error))
        self._watching.clear()
        if problems:
            problems.append(self.tail())
        shutil.rmtree(self.home, ignore_errors=True)
        return problems


class Reference:
    """The reference server on `engine`, from the environment that holds it."""

    def __init__(self, engine, home=None, config=None):
        self.engine = engine
        self.home = Path(tempfile.mkdtemp(prefix="sandglass-reference-"))
        self.user_home = home or self.home
        self.port, self.key = free_port(), "reference-key"
        self.url, self.domain = f"http://127.0.0.1:{self.port}", f"127.0.0.1:{self.port}"
        self.log = self.home / "server.log"
        sections = {
            "server": {"host": "127.0.0.1", "port": self.port, "api_key": self.key},
            "log": {"level": "WARNING"},
            "runtime": {"type": "docker", "execd_image": STUB_AGENT},
            "docker": {"network_mode": "bridge", "publish_host": "127.0.0.1", **port_range()},
            "store": {"type": "sqlite", "path": str(self.home / "opensandbox.db")},
            "ingress": {"mode": "direct"},
        }
        for name, keys in (config or {}).items():
            sections.setdefault(name, {}).update(keys)
        lines = []
        for name, keys in sections.items():
            lines.append(f"[{name}]")
            lines += [f"{key} = {json.dumps(value)}" for key, value in keys.items()]
        (self.home / "config.toml").write_text("\n".join(lines) + "\n")
        self.process = None

    def start(self):
        program = Path(os.environ[REFERENCE_PYTHON]).with_name("opensandbox-server")
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                [str(program), "--config", str(self.home / "config.toml")],
                env={**os.environ, "DOCKER_HOST": self.engine.host, "HOME": str(self.user_home)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        if not wait_for(self._answers, 60):
            raise RuntimeError(f"the reference does not answer:\n{self.log.read_text()[-3000:]}")
        return self

    def _answers(self):
        if self.process.poll() is not None:
            raise RuntimeError(f"the reference ended:\n{self.log.read_text()[-3000:]}")
        client = Client(self.port, None, timeout=2)
        try:
            return client.raw("GET", "/health")[0] == 200
        except OSError:
            return False
        finally:
            client.close()

    def client(self, timeout=60.0):
        return Client(self.port, self.key, timeout)

    def stop(self):
        if self.process and self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()

    def close(self):
        self.stop()
        shutil.rmtree(self.home, ignore_errors=True)
