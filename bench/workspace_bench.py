#!/usr/bin/env python3
"""The repositories' part of the benchmark: from a request to a sandbox of use, on the embedded runtime and on a private Docker engine.

    workspace_bench.py [--quick] [--only NAME[,NAME]] [--without-embedded] [--without-docker] [--agents NUMBER]

Beside most figures stands what nobody can do without, taken in turns: the question to the git server, the engine's own create and start, its own
build, OpenSSH's own server. Raw values go to results/workspace-<time>.jsonl. Needs root, SANDGLASS_BIN (a release build), git, OpenSSH,
busybox-static and, for its half, docker.io. The git server is in a network namespace of its own; every loop is bounded.
"""

import argparse
import concurrent.futures
import contextlib
import os
import signal
import sys
import tempfile
import time
from datetime import datetime
from pathlib import Path

import httpx

import pool_bench
from docker_bench import Engine as BareEngine
from measure import Api, Recorder, machine, now_ms, percentile, status_kib
from workspace_parts import Sshd, built, kill_noticed, ready, ready_with_ssh, ssh_true, until, waiting_work

sys.path.insert(0, str(Path(__file__).parent.parent / "e2e"))
import git_image  # noqa: E402
from docker_engine import Engine  # noqa: E402
from docker_stack import DockerStack  # noqa: E402
from git_servers import GitServers, git  # noqa: E402
from ssh_clients import Keys  # noqa: E402
from stack import Stack, wait_for  # noqa: E402

ORDER = ("create", "rebuild", "pool", "repository_pool", "build", "kill", "ssh", "heartbeats")
SETTINGS = {"builds": {"base_image": git_image.NAME, "allowed_hosts": ["*"], "http_urls": True}}
SETUP = "#!/bin/sh\necho done > /var/setup\n"
# What a sandbox of the heartbeats' measurement may not take from the machine.
MEMORY_LEFT_KIB = 2 << 20


class Bench(Recorder):
    def __init__(self, options):
        super().__init__(options.quick, "workspace-")
        self.options = options
        self.failed = []

    def run(self):
        self.record("machine", "machine", machine(os.environ["SANDGLASS_BIN"]), quick=self.quick)
        with contextlib.ExitStack() as undo:
            self.home = Path(undo.enter_context(tempfile.TemporaryDirectory(prefix="workspace-bench-")))
            self.git = undo.enter_context(GitServers())
            files = {f"part{n // 10}/file{n}": f"{n}\n" * 200 for n in range(99)}
            self.repository = self.git.repository({".sandbox/setup.sh": SETUP, **files})
            self.keys = Keys(self.home)
            self.sshd = Sshd(self.home, self.keys)
            undo.callback(self.sshd.close)
            if not self.options.without_embedded:
                self.half("embedded")
            if not self.options.without_docker:
                self.half("docker")
        self.done()
        if self.failed:
            raise SystemExit(f"not measured: {', '.join(self.failed)}")

    def half(self, who):
        """Every measurement on one runtime, with a server of its own."""
        self.who = who
        with contextlib.ExitStack() as undo:
            if who == "docker":
                self.engine = Engine(live_restore=False).start()
                undo.callback(lambda: self.clean(self.engine.close()))
                self.engine.call("load", input=git_image.image().docker_save(git_image.NAME))
                self.bare = BareEngine(self.engine.socket)
                self.stack = DockerStack(self.engine, config=SETTINGS)
            else:
                self.stack = Stack(config=SETTINGS)
            undo.callback(lambda: self.clean(self.stack.close()))
            self.stack.start()
            self.api = Api(self.stack.port, self.stack.key, git_image.NAME)
            undo.callback(self.api.close)
            if who == "embedded":
                archive = git_image.image().docker_save()
                answer = httpx.post(f"{self.stack.url}/v1/images/import", params={"name": git_image.NAME}, content=archive,
                                    headers={"OPEN-SANDBOX-API-KEY": self.stack.key}, timeout=120)
                answer.raise_for_status()
            for name in ORDER:
                wanted = not self.options.only or name in self.options.only.split(",")
                work = getattr(self, f"{name}_{who}", None) or getattr(self, name, None)
                if wanted and work:
                    print(f"== {who}: {name}", flush=True)
                    try:
                        work()
                    except RuntimeError as error:
                        # The others are worth having.
                        print(f"{who}: {name} failed: {error}", file=sys.stderr, flush=True)
                        self.failed.append(f"{who}: {name}")

    @staticmethod
    def clean(problems):
        for problem in problems:
            print(f"left behind: {problem}", file=sys.stderr)

    def asked(self, repository=None, **more):
        return {"repository": {"url": (repository or self.repository).url}, "timeout": 7200, **more}

    def git_asks(self):
        """What any server has to ask the git server before it can know whether an image is current."""
        begun = now_ms()
        git(self.home, "ls-remote", self.repository.url, "HEAD", "refs/heads/main")
        return now_ms() - begun

    # ------------------------------------------------------------ measurements

    def create_embedded(self):
        """A repository whose image is there until the sandbox is of use, in turns with the same box from its image alone."""
        sandbox, first = ready(self.api, self.asked())
        image = self.api.expect(200, "GET", f"/v1/sandboxes/{sandbox}")["image"]["uri"]
        self.api.delete(sandbox)
        self.record("first_build", self.who, [first])
        times, plain, asking = [], [], []
        for _ in range(self.n(60, 8)):
            asking.append(self.git_asks())
            sandbox, took = ready(self.api, {"image": {"uri": image}, "entrypoint": ["sleep", "1d"], "timeout": 600, "resourceLimits": {}})
            self.api.delete(sandbox)
            plain.append(took)
            sandbox, took = ready(self.api, self.asked())
            self.api.delete(sandbox)
            times.append(took)
        self.record("create", self.who, times)
        self.record("create", f"image alone, {self.who}", plain)
        self.record("ls_remote", f"git beside {self.who} create", asking)

    def create_docker(self):
        """The same, in turns with the engine's own create and start of the same image with the same limits and ports."""
        sandbox, first = ready(self.api, self.asked())
        self.record("first_build", self.who, [first])
        found = self.engine.container(sandbox)
        host = {key: found["HostConfig"][key] for key in ("NanoCpus", "Memory", "PidsLimit", "CapDrop", "SecurityOpt")}
        host["PortBindings"] = {port: [{"HostIp": "127.0.0.1", "HostPort": ""}] for port in found["HostConfig"]["PortBindings"] or {}}
        exposed = {port: {} for port in host["PortBindings"]}
        wanted = {"Image": found["Image"], "Cmd": ["tail", "-f", "/dev/null"], "ExposedPorts": exposed, "HostConfig": host}
        self.api.delete(sandbox)
        times, engine, connection = [], [], self.bare.connection()
        for _ in range(self.n(30, 5)):
            begun = now_ms()
            container = self.bare.call(connection, "POST", "/containers/create", wanted)["Id"]
            self.bare.call(connection, "POST", f"/containers/{container}/start")
            engine.append(now_ms() - begun)
            self.bare.remove(connection, container)
            sandbox, took = ready(self.api, self.asked())
            self.api.delete(sandbox)
            times.append(took)
            wait_for(lambda: not self.engine.containers(), 30)
        self.record("create", self.who, times, ports=len(host["PortBindings"]))
        self.record("create", f"engine beside {self.who}", engine)

    def rebuild(self):
        """A build of what is built already: asked until answered with the image."""
        body = {"repository": {"url": self.repository.url}}
        built(self.api, body)
        times, asking = [], []
        for _ in range(self.n(60, 10)):
            asking.append(self.git_asks())
            begun = now_ms()
            answer = self.api.expect(200, "POST", "/v1/image-builds", body)
            times.append(now_ms() - begun)
            if not answer.get("imageId"):
                raise RuntimeError(f"no image: {answer}")
        self.record("rebuild", self.who, times)
        self.record("ls_remote", f"git beside {self.who} rebuild", asking)

    def pool_embedded(self):
        """A box that waits is taken, in turns with one that is made."""
        client = httpx.Client(base_url=self.stack.url, headers={"OPEN-SANDBOX-API-KEY": self.stack.key}, timeout=60)
        common = {"timeout": 600, "entrypoint": ["sleep", "1d"], "resourceLimits": {}}
        capacity = {"bufferMin": 2, "bufferMax": 2, "poolMin": 0, "poolMax": 10}
        pool = {"name": "bench", "image": {"uri": git_image.NAME}, "capacitySpec": capacity}
        client.post("/v1/pools", json=pool).raise_for_status()
        cold, warm = [], []
        try:
            for _ in range(self.n(100, 10)):
                for times, way in ((cold, {"image": {"uri": git_image.NAME}}), (warm, {"extensions": {"poolRef": "bench"}})):
                    pool_bench.waits(client, 2)
                    sandbox, took = pool_bench.one(client, {**common, **way})
                    times.append(took)
                    client.delete(f"/v1/sandboxes/{sandbox}").raise_for_status()
        finally:
            client.delete("/v1/pools/bench")
            client.close()
        self.record("pool", self.who, warm)
        self.record("pool", f"without a pool, {self.who}", cold)

    def repository_pool(self):
        """A box of the repository's image that waits becomes a workspace: from the request, and from its assignment by the server's own history."""
        capacity = {"bufferMin": 2, "bufferMax": 2, "poolMin": 0, "poolMax": 10}
        pool = {"name": "workspaces", "repository": {"url": self.repository.url}, "capacitySpec": capacity}
        self.api.expect(201, "POST", "/v1/pools", pool)
        waiting = lambda: self.api.expect(200, "GET", "/v1/pools/workspaces")["status"]  # noqa: E731
        asking, times, assigned = [], [], []
        try:
            for _ in range(self.n(60 if self.who == "embedded" else 20, 5)):
                until(lambda: (waiting()["available"], waiting()["starting"]) == (2, 0))
                asking.append(self.git_asks())
                sandbox, took = ready(self.api, {"timeout": 7200, "extensions": {"poolRef": "workspaces"}})
                times.append(took)
                assigned.append(self.between(sandbox, "pool.taken", "boot.completed"))
                self.api.delete(sandbox)
        finally:
            self.api.call("DELETE", "/v1/pools/workspaces")
        self.record("repository_pool", self.who, times)
        self.record("repository_pool", f"from its assignment, {self.who}", assigned)
        self.record("ls_remote", f"git beside {self.who} repository_pool", asking)

    def between(self, sandbox, first, last):
        """Milliseconds between two lines of a sandbox's history, by the server's clock."""
        page = self.api.expect(200, "GET", f"/v1/sandboxes/{sandbox}/events?limit=1000")["items"]
        at = {event["type"]: moment(event["time"]) for event in page}
        if first not in at or last not in at:
            raise RuntimeError(f"no {first} or {last} in {sorted(at)}")
        return (at[last] - at[first]) * 1000

    def build_docker(self):
        """A Dockerfile by the server's build and by `docker build`; what is copied differs each time, so that the step that works is done anew."""
        dockerfile = f"FROM {git_image.NAME}\nCOPY stamp /made/stamp\nRUN {waiting_work(self.n(4, 1))}\nCOPY . /made/all\n"
        files = {f"part{n // 10}/file{n}": f"{n}\n" * 200 for n in range(97)}
        repository = self.git.repository({"Dockerfile": dockerfile, ".dockerignore": ".git\n", "stamp": "0\n", **files})
        times, engine, clones, steps = [], [], [], {}
        for number in range(self.n(10, 2)):
            repository.commit({"stamp": f"bare {number}\n"})
            folder = self.home / f"clone{number}"
            begun = now_ms()
            git(self.home, "clone", "--quiet", "--depth", "1", repository.url, folder)
            cloned = now_ms()
            self.engine.call("build", "--quiet", "--tag", f"bare:{number}", folder)
            engine.append(now_ms() - cloned)
            clones.append(cloned - begun)
            repository.commit({"stamp": f"ours {number}\n"})
            build, took = built(self.api, {"repository": {"url": repository.url}})
            times.append(took)
            for step in build["steps"]:
                steps.setdefault(step["name"], []).append(lasted(step))
            self.engine.call("rmi", f"bare:{number}", check=False)
        self.record("build", self.who, times)
        self.record("build", f"engine beside {self.who}", engine)
        self.record("clone", f"git beside {self.who}", clones)
        for name, values in steps.items():
            self.record(f"build_step_{name}", self.who, values)

    def kill(self):
        """The agent is killed; until the API shows that the sandbox is of no use any more."""
        times, shown = [], {}
        for _ in range(self.n(15, 3)):
            sandbox, _ = ready(self.api, self.asked())
            took, status = kill_noticed(self.api, sandbox, self.first_process(sandbox))
            times.append(took)
            named = f"{status['state']}/{status.get('reason')}"
            shown[named] = shown.get(named, 0) + 1
            self.api.delete(sandbox)
        self.record("agent_killed", self.who, times, shown=shown)

    def first_process(self, sandbox):
        if self.who == "docker":
            return self.engine.container(sandbox)["State"]["Pid"]
        wait_for(lambda: sandbox in self.stack.known, 10)
        return min((p for p in self.stack.guests() if sandbox in p.cgroups), key=lambda p: p.started).pid

    def ssh(self):
        """`ssh … true` by a listed key, from the client's start to its end: through the server, to the box's address, to OpenSSH on loopback."""
        service = {"name": "ssh", "authorizedKeys": [self.keys.public("ann")]}
        sandbox, host_key = ready_with_ssh(self.api, self.asked(services=[service]))
        environment = {**os.environ, "SANDGLASS_URL": self.stack.url, "SANDGLASS_API_KEY": self.stack.key}
        command = f"{os.environ['SANDGLASS_BIN']} ssh --proxy {sandbox}"
        address = self.address(sandbox)
        loopback = {"Port": self.sshd.port, "KexAlgorithms": "curve25519-sha256"}
        ways = {
            "server": lambda: ssh_true(self.keys, host_key, "box", environment, ProxyCommand=command),
            "box": lambda: ssh_true(self.keys, host_key, address, environment, Port=2222),
            # By the exchange of keys that a box offers; the one that OpenSSH prefers takes it longer.
            "OpenSSH": lambda: ssh_true(self.keys, self.sshd.host_key, "127.0.0.1", environment, **loopback),
        }
        times = {way: [] for way in ways}
        for _ in range(self.n(40, 5)):
            for way, connect in ways.items():
                times[way].append(connect())
        for way, values in times.items():
            self.record("ssh_true", f"{way}, {self.who}", values)
        self.api.delete(sandbox)

    def address(self, sandbox):
        if self.who == "docker":
            (network,) = self.engine.container(sandbox)["NetworkSettings"]["Networks"].values()
            return network["IPAddress"]
        return self.stack.document(sandbox, "spec.json")["network"]["address"]

    def heartbeats_embedded(self):
        """The server's own processor time while many agents have nothing to do but to beat; real boxes, as many as asked for or fit."""
        built(self.api, {"repository": {"url": self.repository.url}})
        idle = [self.used(5) for _ in range(self.n(4, 2))]
        self.percent("idle_cpu", idle, agents=0)
        wanted, stopped = self.options.agents or self.n(1000, 40), None
        made = []
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            while len(made) < wanted and not stopped:
                try:
                    made += pool.map(self.one_more, range(min(40, wanted - len(made))))
                except RuntimeError as error:
                    stopped = str(error)
                if available_kib() < MEMORY_LEFT_KIB:
                    stopped = "memory"
        until(lambda: self.attached() >= len(made), 120)
        # Until what the starts left to be done is done.
        time.sleep(self.n(20, 2))
        interval = 15
        windows = [self.used(interval) for _ in range(self.n(8, 2))]
        beating = self.attached(within=interval + 5)
        rss = round(status_kib(self.stack.server.pid, "VmRSS") / 1024, 1)
        self.percent("heartbeat_cpu", windows, agents=len(made), beating=beating, wanted=wanted, stopped=stopped, rss_mib=rss)
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            list(pool.map(self.one_less, self.api.identities()))

    def one_more(self, _):
        mine = Api(self.api.port, self.api.key, None)
        try:
            return ready(mine, self.asked(), every=0.05, seconds=120)[0]
        finally:
            mine.close()

    def one_less(self, sandbox):
        mine = Api(self.api.port, self.api.key, None)
        mine.call("DELETE", f"/v1/sandboxes/{sandbox}")
        mine.close()

    def attached(self, within=None):
        """Agents that are there; those alone that were heard within so many seconds."""
        found, page = 0, 1
        while True:
            answer = self.api.expect(200, "GET", f"/v1/sandboxes?pageSize=200&page={page}")
            for agent in (sandbox.get("agent") or {} for sandbox in answer["items"]):
                heard = agent.get("lastHeartbeatAt")
                if agent.get("state") == "Attached" and heard and (within is None or time.time() - moment(heard) <= within):
                    found += 1
            if not answer["pagination"]["hasNextPage"]:
                return found
            page += 1

    def used(self, seconds):
        """Percent of one core that the server used over a while in which nobody asks it anything."""
        before, begun = cpu_seconds(self.stack.server.pid), time.monotonic()
        time.sleep(seconds)
        return (cpu_seconds(self.stack.server.pid) - before) / (time.monotonic() - begun) * 100

    def percent(self, name, values, **more):
        figures = {"unit": "% of a core", "n": len(values), **{f"p{p}": round(percentile(values, p), 3) for p in (50, 90)}}
        self.record(name, self.who, figures, raw=[round(value, 3) for value in values], **more)


def cpu_seconds(pid):
    """Of the whole process, threads that have ended included: the kernel's clock of its processor time."""
    return time.clock_gettime(~pid << 3 | 2)


def available_kib():
    (line,) = (line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemAvailable"))
    return int(line.split()[1])


def moment(text):
    return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()


def lasted(step):
    return (moment(step["finishedAt"]) - moment(step["startedAt"])) * 1000 if step.get("finishedAt") and step.get("startedAt") else 0.0


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only")
    parser.add_argument("--without-docker", action="store_true")
    parser.add_argument("--without-embedded", action="store_true")
    parser.add_argument("--agents", type=int)
    # Ended from outside, it takes away what it began.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))
    Bench(parser.parse_args()).run()


if __name__ == "__main__":
    main()
