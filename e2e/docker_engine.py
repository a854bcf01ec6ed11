"""A private Docker engine for the tests, the images that they use, and the audit of what is left on it.

The engine runs in the host's network namespace with a bridge of its own: the server under test has to reach the addresses
of containers, as it does in production. It makes no firewall rules (published ports go through Docker's own proxy program),
so several engines live side by side and none leaves anything in the host's tables. Data, sockets, cgroups and processes of
an engine all carry its home or its name, and are ended and removed by that.
"""

import hashlib
import http.client
import io
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import tarfile
import tempfile
import time
from pathlib import Path
from urllib.parse import quote

from stack import PATIENCE, processes, wait_for

HERE = Path(__file__).parent
CACHE = HERE / ".cache"
BUSYBOX = "sandglass-e2e/busybox:1"
PYTHON = "sandglass-e2e/debian-python:1"
SCRATCH = "sandglass-e2e/scratch:1"
STUB_AGENT = "sandglass-e2e/stub-agent:1"
START_SECONDS = 60
ID = "opensandbox.io/id"
SIDECAR = "opensandbox.io/egress-sidecar-for"
MANAGED = "opensandbox.io/volume-managed-by"

SUITE = "bookworm"
PACKAGES = "python3,procps,iproute2,busybox-static,curl,ca-certificates"
LEAN = ("/usr/share/doc/*", "/usr/share/man/*", "/usr/share/locale/*", "/usr/share/info/*")

STATIC_PROGRAM = r"""
#include <stdio.h>
#include <string.h>
#include <unistd.h>
int main(int count, char **words) {
    if (count > 1 && !strcmp(words[1], "exit")) return 7;
    printf("alone\n");
    fflush(stdout);
    for (;;) pause();
}
"""

BOOTSTRAP = """#!/bin/sh
/opt/opensandbox/execd &
exec "$@"
"""


# ---------------------------------------------------------------- images


def busybox_tree(files=None):
    """An archive of busybox, its applets and the given files."""
    busybox = shutil.which("busybox") or "/bin/busybox"
    applets = subprocess.run([busybox, "--list"], capture_output=True, text=True, check=True).stdout.split()
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        for folder in ("bin", "usr", "usr/bin", "etc", "tmp", "root", "proc", "sys", "dev", "opt", "mnt"):
            entry = tarfile.TarInfo(folder)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o1777 if folder == "tmp" else 0o755
            tar.addfile(entry)
        contents = {
            "bin/busybox": Path(busybox).read_bytes(),
            "etc/passwd": b"root:x:0:0:root:/root:/bin/sh\nann:x:1000:1000::/tmp:/bin/sh\n",
            "etc/group": b"root:x:0:\nann:x:1000:\n",
            **(files or {}),
        }
        for path, data in contents.items():
            entry = tarfile.TarInfo(path)
            entry.size, entry.mode = len(data), 0o755
            tar.addfile(entry, io.BytesIO(data))
        for applet in applets:
            if applet != "busybox":
                entry = tarfile.TarInfo(f"bin/{applet}")
                entry.type, entry.linkname = tarfile.SYMTYPE, "busybox"
                tar.addfile(entry)
    return archive.getvalue()


def debian_tree():
    """The path of a Debian tree with Python, made once from the system's mirror and kept for the next run."""
    key = hashlib.sha256(" ".join((SUITE, PACKAGES, *LEAN)).encode()).hexdigest()[:12]
    path = CACHE / f"debian-python-{key}.tar"
    if path.exists():
        return path
    CACHE.mkdir(exist_ok=True)
    fresh = path.with_suffix(f".{os.getpid()}.tar")
    exclude = [f"--dpkgopt=path-exclude={pattern}" for pattern in LEAN]
    command = ["mmdebstrap", "--quiet", "--variant=minbase", f"--include={PACKAGES}", *exclude, SUITE, str(fresh)]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{command}: {done.stderr[-2000:]}")
        fresh.rename(path)
    finally:
        fresh.unlink(missing_ok=True)
    return path


def compiled(source, name, *flags):
    """The bytes of a static program, from C text or a path to it."""
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder, name)
        text = source.read_text() if isinstance(source, Path) else source
        command = ["gcc", "-O2", "-static", *flags, "-x", "c", "-", "-o", str(program)]
        subprocess.run(command, input=text.encode(), check=True)
        subprocess.run(["strip", str(program)], check=True)
        return program.read_bytes()


def archive_of(files):
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        for path, data in files.items():
            entry = tarfile.TarInfo(path)
            entry.size, entry.mode = len(data), 0o755
            tar.addfile(entry, io.BytesIO(data))
    return archive.getvalue()


# ---------------------------------------------------------------- the engine


class UnixConnection(http.client.HTTPConnection):
    def __init__(self, path, timeout):
        super().__init__("localhost", timeout=timeout)
        self.path = path

    def connect(self):
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self.path))


def free_subnet():
    """A /24 below 10.128/9 that no interface of this host has, and the name of a bridge for it."""
    listed = subprocess.run(["ip", "-4", "-o", "addr"], capture_output=True, text=True, check=True).stdout
    while True:
        second, third = random.randint(128, 250), random.randint(0, 250)
        if f" 10.{second}." not in listed:
            return f"10.{second}", third, f"sgd{random.randrange(16**6):06x}"


class Engine:
    """One dockerd with its own data. `live_restore` keeps containers running while the engine is away; more `settings` are
    those of `daemon.json`."""

    def __init__(self, live_restore=True, settings=None):
        self.home = Path(tempfile.mkdtemp(prefix="sandglass-docker-"))
        self.socket = self.home / "docker.sock"
        self.host = f"unix://{self.socket}"
        self.base, third, self.bridge = free_subnet()
        self.gateway = f"{self.base}.{third}.1"
        self.environment = {**os.environ, "DOCKER_HOST": self.host, "DOCKER_CONFIG": str(self.home / "client")}
        self.process = None
        self.killed = False
        self.known = set()
        # Sandboxes that may be there for the whole run, or end by themselves, and are not taken for left over.
        self.lasting = set()
        configuration = {
            "bridge": self.bridge,
            "iptables": False,
            "ip-forward": False,
            "ip-masq": False,
            "live-restore": live_restore,
            "default-address-pools": [{"base": f"{self.base}.0.0/17", "size": 26}],
            "cgroup-parent": f"/{self.bridge}",
            "shutdown-timeout": 5,
            "max-concurrent-downloads": 6,
            **(settings or {}),
        }
        if shutil.which("runsc"):
            # Debian's runsc takes every network namespace of a newer kernel for the root one and refuses its own network
            # there; with `host` it uses the sockets of the container's namespace. Nor does it know every layout of cgroups.
            arguments = ["--ignore-cgroups", "--network=host"]
            configuration["runtimes"] = {"runsc": {"path": shutil.which("runsc"), "runtimeArgs": arguments}}
        (self.home / "daemon.json").write_text(json.dumps(configuration))

    # ------------------------------------------------------------ its life

    def start(self):
        self.killed = False
        if not Path("/sys/class/net", self.bridge).exists():
            subprocess.run(["ip", "link", "add", self.bridge, "type", "bridge"], check=True)
            subprocess.run(["ip", "addr", "add", f"{self.gateway}/24", "dev", self.bridge], check=True)
            subprocess.run(["ip", "link", "set", self.bridge, "up"], check=True)
        with open(self.home / "dockerd.log", "ab") as log:
            self.process = subprocess.Popen(
                [
                    *("dockerd", "--host", self.host, "--pidfile", str(self.home / "pid")),
                    *("--data-root", str(self.home / "data"), "--exec-root", str(self.home / "exec")),
                    *("--config-file", str(self.home / "daemon.json")),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        if not wait_for(self.answers, START_SECONDS):
            raise RuntimeError(f"dockerd did not start:\n{self.tail()}")
        return self

    def answers(self):
        if self.process.poll() is not None:
            raise RuntimeError(f"dockerd ended with {self.process.returncode}:\n{self.tail()}")
        try:
            return self.api("GET", "/_ping", timeout=2)[0] == 200
        except OSError:
            return False

    def tail(self, characters=3000):
        return (self.home / "dockerd.log").read_text(errors="replace")[-characters:]

    def stop(self, seconds=40):
        """As an operator does."""
        if self.process and self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(seconds)
            except subprocess.TimeoutExpired:
                self.kill()

    def kill(self):
        """As a crash of the daemon alone."""
        self.process.kill()
        self.process.wait()
        self.killed = True
        # Its containerd died with it, but stays in the process table where nobody reaps, and would be taken for alive.
        for name in ("pid", "exec/containerd/containerd.pid"):
            (self.home / name).unlink(missing_ok=True)

    def revive(self):
        """Starts what a test killed and, since it failed, did not start again."""
        if self.killed:
            self.start()

    def freeze(self):
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self):
        self.process.send_signal(signal.SIGCONT)

    def restart(self):
        self.stop()
        return self.start()

    def close(self):
        """Removes everything; returns what should not have been there."""
        problems = []
        if self.process and self.process.poll() is None:
            self.thaw()
            left = self.call("ps", "-aq", check=False).stdout.split()
            if left:
                problems += [f"container {name}" for name in left]
                self.call("rm", "-fv", *left, check=False)
            self.stop()
        for process in processes():
            # containerd and its shims of a daemon that was killed; all name the home in their command.
            if str(self.home) in process.command and process.pid != os.getpid() and process.state != "Z":
                try:
                    os.kill(process.pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
        for _ in range(3):
            mounts = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
            for mount in sorted((m for m in mounts if m.startswith(str(self.home))), reverse=True):
                subprocess.run(["umount", "-l", mount], check=False, capture_output=True)
        subprocess.run(["ip", "link", "del", self.bridge], check=False, capture_output=True)
        for hierarchy in Path("/sys/fs/cgroup").iterdir():
            for folder, _, _ in os.walk(hierarchy / self.bridge, topdown=False):
                try:
                    os.rmdir(folder)
                except OSError:
                    continue
        shutil.rmtree(self.home, ignore_errors=True)
        return problems

    # ------------------------------------------------------------ using it

    def call(self, *arguments, check=True, **keys):
        """The docker command line; text in and out unless `input` is bytes."""
        keys.setdefault("text", not isinstance(keys.get("input"), bytes))
        done = subprocess.run(["docker", *arguments], env=self.environment, capture_output=True, check=False, **keys)
        if check and done.returncode:
            raise RuntimeError(f"docker {arguments}: {done.stderr}")
        return done

    def text(self, *arguments):
        return self.call(*arguments).stdout.strip()

    def api(self, method, path, body=None, timeout=30.0):
        """(status, parsed body), straight from the engine."""
        connection = UnixConnection(self.socket, timeout)
        try:
            headers = {"Content-Type": "application/json"} if body is not None else {}
            connection.request(method, path, json.dumps(body) if body is not None else None, headers)
            answer = connection.getresponse()
            data = answer.read()
        finally:
            connection.close()
        try:
            return answer.status, json.loads(data) if data else None
        except ValueError:
            return answer.status, data.decode("utf-8", "replace")

    def bring(self, name, archive, *changes):
        """An image from an archive (bytes or a path)."""
        options = [word for change in changes for word in ("--change", change)]
        if isinstance(archive, Path):
            self.call("import", *options, str(archive), name)
        else:
            self.call("import", *options, "-", name, input=archive)
        return name

    def images(self, *names):
        """Makes the named test images (all without arguments)."""
        path = "ENV PATH=/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"
        for name in names or (BUSYBOX, PYTHON, SCRATCH, STUB_AGENT):
            if name == BUSYBOX:
                self.bring(BUSYBOX, busybox_tree(), path)
            elif name == PYTHON:
                self.bring(PYTHON, debian_tree(), path, "ENV LANG=C.UTF-8")
            elif name == SCRATCH:
                self.bring(SCRATCH, archive_of({"program": compiled(STATIC_PROGRAM, "program")}))
            elif name == STUB_AGENT:
                source = HERE.parent / "bench" / "stub_agent.c"
                agent = {"execd": compiled(source, "execd", "-pthread"), "bootstrap.sh": BOOTSTRAP.encode()}
                self.bring(STUB_AGENT, busybox_tree(agent), path)
        return self

    def containers(self, *labels):
        """What is on the engine, running or not, that has all these labels (`name` or `name=value`)."""
        filters = quote(json.dumps({"label": list(labels)})) if labels else ""
        status, found = self.api("GET", f"/containers/json?all=1&filters={filters}" if filters else "/containers/json?all=1")
        if status != 200:
            raise RuntimeError(f"the engine answered {status}: {found}")
        return found

    def container(self, sandbox):
        """What `docker inspect` says of a sandbox, or None."""
        status, found = self.api("GET", f"/containers/sandbox-{sandbox}/json")
        return found if status == 200 else None

    def volumes(self):
        return {volume["Name"]: volume for volume in (self.api("GET", "/volumes")[1].get("Volumes") or [])}

    def snapshots(self):
        """Tags of committed images."""
        filters = quote(json.dumps({"reference": ["opensandbox-snapshots"]}))
        found = self.api("GET", f"/images/json?filters={filters}")[1]
        return {tag.partition(":")[2] for image in found for tag in image["RepoTags"] or []}

    def leftovers(self, living=(), snapshots=(), volumes=()):
        """What belongs to none of the living sandboxes. Empty means clean; meant to be polled."""
        found, kept = [], {*living, *self.lasting}
        for container in self.containers():
            labels = container["Labels"] or {}
            owner = labels.get(ID) or labels.get(SIDECAR)
            if owner not in kept:
                found.append(f"container {container['Names']} of {owner} ({container['State']})")
        alive = {c["Labels"].get(ID) for c in self.containers(ID)}
        found += [f"no container of {sandbox}" for sandbox in set(living) - alive]
        for name, volume in self.volumes().items():
            if name not in volumes and not any(sandbox in name for sandbox in kept):
                found.append(f"volume {name} {volume.get('Labels')}")
        found += [f"snapshot image {tag} {self.history(tag)}" for tag in self.snapshots() - set(snapshots)]
        return found

    def history(self, tag):
        """When a snapshot's image was made, and of which container: whose it was, now that nobody knows it."""
        status, image = self.api("GET", f"/images/opensandbox-snapshots:{tag}/json")
        return f"made {image['Created']} of {image.get('Container', '')[:12]} {image['Config'].get('Cmd')}" if status == 200 else ""

    def sweep(self):
        """Removes everything that is left over but what may stay."""
        whose = lambda labels: labels.get(ID) or labels.get(SIDECAR)  # noqa: E731
        left = [one["Id"] for one in self.containers() if whose(one["Labels"] or {}) not in self.lasting]
        if left:
            self.call("rm", "-fv", *left, check=False)
        for name in self.volumes():
            if not any(sandbox in name for sandbox in self.lasting):
                self.call("volume", "rm", "-f", name, check=False)

    def wait_clean(self, seconds=PATIENCE, **keys):
        deadline = time.monotonic() + seconds
        while True:
            found = self.leftovers(**keys)
            if not found or time.monotonic() > deadline:
                return found
            time.sleep(0.1)
