"""What Sandglass is measured beside: a private Docker engine and the reference server on it.

Both live in a network namespace of their own, so that the engine sees only its own containers and publishes ports on that
namespace's loopback. Everything that is started here is ended by process id.
"""

import concurrent.futures
import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from measure import Api, now_ms

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "e2e"))
from docker_engine import busybox_tree  # noqa: E402  (the same root file system as in the black-box tests)

IMAGE = "sandglass-bench/base:1"
AGENT_IMAGE = "sandglass-bench/agent:1"
CLONE_NEWNET = 0x40000000
BOOTSTRAP = """#!/bin/sh
/opt/opensandbox/execd &
exec "$@"
"""


def ended(process, seconds=30):
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


class Namespace:
    """A network namespace, and a thread that lives in it: sockets made there belong to it."""

    def __init__(self):
        self.name = f"sgbench{os.getpid()}"
        subprocess.run(["ip", "netns", "add", self.name], check=True)
        self.path = f"/run/netns/{self.name}"
        subprocess.run([*self.enter, "ip", "link", "set", "lo", "up"], check=True)
        self.thread = concurrent.futures.ThreadPoolExecutor(1, initializer=self._join)

    @property
    def enter(self):
        # Not `ip netns exec`: that one remounts /sys and hides the cgroups.
        return ["nsenter", f"--net={self.path}"]

    def _join(self):
        library = ctypes.CDLL(None, use_errno=True)
        with open(self.path) as handle:
            if library.setns(handle.fileno(), CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "setns")

    def run(self, function, *arguments):
        return self.thread.submit(function, *arguments).result()

    def close(self):
        self.thread.shutdown()
        subprocess.run(["ip", "netns", "del", self.name], check=False)


class Docker:
    """A private engine, with the two images that the measurements need."""

    def __init__(self, namespace):
        self.namespace = namespace
        self.home = Path(tempfile.mkdtemp(prefix="sandglass-bench-docker-"))
        self.socket = self.home / "docker.sock"
        self.environment = {**os.environ, "DOCKER_HOST": f"unix://{self.socket}"}
        self.process = None

    def start(self):
        (self.home / "daemon.json").write_text("{}")
        with open(self.home / "dockerd.log", "ab") as log:
            self.process = subprocess.Popen(
                [
                    *(*self.namespace.enter, "dockerd", "--host", f"unix://{self.socket}"),
                    *("--data-root", str(self.home / "data"), "--exec-root", str(self.home / "exec")),
                    *("--pidfile", str(self.home / "pid"), "--config-file", str(self.home / "daemon.json")),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        for _ in range(150):
            if self.call("version", check=False).returncode == 0:
                break
            time.sleep(0.2)
        else:
            raise RuntimeError("dockerd did not start:\n" + (self.home / "dockerd.log").read_text()[-2000:])
        self._images()

    def call(self, *arguments, check=True, **more):
        done = subprocess.run(["docker", *arguments], env=self.environment, capture_output=True, **more)
        if check and done.returncode:
            raise RuntimeError(f"docker {arguments}: {done.stderr.decode()}")
        return done

    def _images(self):
        binary = self.home / "stub_agent"
        source = str(HERE / "stub_agent.c")
        subprocess.run(["gcc", "-O2", "-static", "-pthread", "-o", str(binary), source], check=True)
        subprocess.run(["strip", str(binary)], check=True)
        self._import(IMAGE, {})
        agent = {"execd": binary.read_bytes(), "bootstrap.sh": BOOTSTRAP.encode()}
        self._import(AGENT_IMAGE, agent)

    def _import(self, name, files):
        self.call("import", "--change", "ENV PATH=/usr/bin:/bin", "-", name, input=busybox_tree(files))

    def run_and_exec(self):
        """Milliseconds of `docker run -d` until a `docker exec` of `true` has ended."""
        limits = ["--cpus", "0.5", "--memory", "256m"]
        begun = now_ms()
        container = self.call("run", "-d", *limits, IMAGE, "tail", "-f", "/dev/null").stdout.decode().strip()
        started = now_ms()
        self.call("exec", container, "true")
        took = now_ms() - begun
        self.call("rm", "-f", container)
        return {"run": started - begun, "total": took}

    def close(self):
        if self.process:
            left = self.call("ps", "-aq", check=False).stdout.decode().split()
            if left:
                self.call("rm", "-f", *left, check=False)
            ended(self.process)
        # The engine leaves its own mounts when it is ended while busy.
        for line in reversed(Path("/proc/self/mountinfo").read_text().splitlines()):
            mount = line.split()[4]
            if mount.startswith(str(self.home)):
                subprocess.run(["umount", "-l", mount], check=False)
        shutil.rmtree(self.home, ignore_errors=True)


CONFIGURATION = """
[server]
host = "127.0.0.1"
port = {port}
api_key = "{key}"
[proxy]
resolve_internal = false
[log]
level = "WARNING"
[runtime]
type = "docker"
execd_image = "{agent}"
[store]
type = "sqlite"
path = "{home}/opensandbox.db"
[docker]
network_mode = "bridge"
publish_host = "127.0.0.1"
[ingress]
mode = "direct"
"""


class ServerOnEngine:
    """A server in the engine's namespace, with a home of its own. Its API is called through `namespace.run`."""

    key = "bench-key"

    def __init__(self, docker, port, configuration):
        self.docker, self.namespace, self.port = docker, docker.namespace, port
        self.home = Path(tempfile.mkdtemp(prefix="sandglass-bench-server-"))
        self.configuration = self.home / "config.toml"
        self.configuration.write_text(configuration.format(port=port, key=self.key, agent=AGENT_IMAGE, home=self.home))
        self.api = Api(port, self.key, IMAGE)
        self.process = None

    def command(self):
        raise NotImplementedError

    def start(self):
        """Milliseconds until it listens."""
        begun = now_ms()
        with open(self.home / "server.log", "ab") as log:
            self.process = subprocess.Popen(
                [*self.namespace.enter, *self.command(), "--config", str(self.configuration)],
                env={**self.docker.environment, "HOME": str(self.home)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        while not self.namespace.run(listens, self.port):
            if self.process.poll() is not None:
                raise RuntimeError("the server ended:\n" + (self.home / "server.log").read_text()[-2000:])
            time.sleep(0.002)
        return now_ms() - begun

    def stop(self):
        if self.process and self.process.poll() is None:
            ended(self.process)
        self.api.close()

    def close(self):
        self.stop()
        shutil.rmtree(self.home, ignore_errors=True)


class Reference(ServerOnEngine):
    def __init__(self, docker):
        super().__init__(docker, 18090, CONFIGURATION)

    @property
    def domain(self):
        return f"127.0.0.1:{self.port}"

    def command(self):
        return [str(Path(sys.executable).with_name("opensandbox-server"))]


def listens(port):
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex(("127.0.0.1", port)) == 0

