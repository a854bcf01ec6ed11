#!/usr/bin/env python3
"""The benchmark: every figure of docs/performance.md, taken in one run on one machine.

    bench.py [--quick] [--only NAME[,NAME]] [--without-reference] [--without-sandglass]

Figures that are compared are taken in the same run and, where one takes less than a second, in turns, so that a busy moment
hits both. Raw values go to results/<time>.jsonl, one measurement a line. Load goes to this machine only; every
loop is bounded. Needs root, SANDGLASS_BIN (a release build), gcc, busybox-static and docker.io for the reference half.
"""

import argparse
import concurrent.futures
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from datetime import timedelta
from pathlib import Path

from measure import Api, Recorder, family, machine, now_ms, pss_kib, status_kib, summary
from reference import Docker, Namespace, Reference, busybox_tree, listens

from stack import Stack  # noqa: E402  (the same server fixture as the black-box tests)

ORDER = ("startup", "create_exec", "sdk", "warm", "burst", "stdout", "list", "restart", "density")
LINE = 4095
BUSYBOX = "bench/busybox:1"


class Bench(Recorder):
    def __init__(self, options):
        super().__init__(options.quick)
        self.options = options
        self.stack = self.docker = self.reference = self.namespace = self.api = None

    # ------------------------------------------------------------ set-up

    def run(self):
        problems = []
        # Undone in reverse order, each part even when another one's end fails.
        with contextlib.ExitStack() as undo:
            if not self.options.without_sandglass:
                self.stack = Stack()
                undo.callback(lambda: problems.extend(self.stack.close()))
                self.stack.start()
                self.import_image()
                self.api = self.api_of(self.stack)
            if not self.options.without_reference:
                self.namespace = Namespace()
                undo.callback(self.namespace.close)
                self.docker = Docker(self.namespace)
                undo.callback(self.docker.close)
                self.docker.start()
                self.reference = Reference(self.docker)
                undo.callback(self.reference.close)
                self.reference.start()
            self.measurements()
        if problems:
            print("left over:\n" + "\n".join(problems))
            return 1
        self.done()
        return 0

    def measurements(self):
        self.record("machine", "machine", machine(os.environ.get("SANDGLASS_BIN")), quick=self.quick)
        wanted = self.options.only.split(",") if self.options.only else ORDER
        for name in ORDER:
            if name in wanted:
                print(f"== {name}", flush=True)
                getattr(self, name)()

    @staticmethod
    def api_of(stack):
        return Api(stack.port, stack.key, BUSYBOX)

    def import_image(self):
        """The same root file system that the containers get."""
        environment = {**os.environ, "SANDGLASS_URL": f"http://127.0.0.1:{self.stack.port}", "SANDGLASS_API_KEY": self.stack.key}
        with tempfile.NamedTemporaryFile(suffix=".tar") as archive:
            archive.write(busybox_tree())
            archive.flush()
            command = [os.environ["SANDGLASS_BIN"], "image", "import", archive.name, "--name", BUSYBOX]
            subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)

    def on_reference(self, function, *arguments):
        """Runs where the reference's ports are."""
        return self.namespace.run(function, *arguments)

    def drain(self, api):
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda sandbox: self._delete(api, sandbox), api.identities()))

    @staticmethod
    def _delete(api, sandbox):
        one = Api(api.port, api.key, api.image)
        one.call("DELETE", f"/v1/sandboxes/{sandbox}")
        one.close()

    def fill(self, api, count):
        """Creates until `count` are alive; milliseconds of each create."""

        def make(_):
            one = Api(api.port, api.key, api.image)
            begun = now_ms()
            one.create()
            took = now_ms() - begun
            one.close()
            return took

        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            return list(pool.map(make, range(count - api.total())))

    # ------------------------------------------------------------ measurements

    def startup(self):
        """From starting the process until its port accepts, with an empty state directory."""
        if self.stack:
            times = []
            for _ in range(self.n(20, 5)):
                fresh = Stack()
                begun = now_ms()
                fresh.start(wait=False)
                while not listens(fresh.port):
                    time.sleep(0.0005)
                times.append(now_ms() - begun)
                fresh.wait_ready()
                fresh.close()
            self.record("startup", "sandglass", times)
        if self.reference:
            times = []
            for _ in range(self.n(5, 2)):
                self.reference.stop()
                times.append(self.reference.start())
            self.record("startup", "reference", times)

    def create_exec(self):
        """POST until the first `true` has ended, over plain HTTP; in turns of ten with `docker run` and `docker exec`."""
        ours, accepted, docker = [], [], []
        # In blocks: a drift of the machine hits both, and neither is measured while the other one is still cleaning up.
        for _ in range(self.n(10, 1)):
            for _ in range(10 if self.stack else 0):
                took, until_accepted = self.one_create(self.api)
                ours.append(took)
                accepted.append(until_accepted)
            for _ in range(10 if self.docker else 0):
                docker.append(self.docker.run_and_exec()["total"])
            time.sleep(0.5)
        if ours:
            self.record("create_exec", "sandglass", ours)
            self.record("create_accepted", "sandglass", accepted)
        if docker:
            self.record("create_exec", "docker", docker)

    @staticmethod
    def one_create(api):
        begun = now_ms()
        sandbox = api.create()
        accepted = now_ms()
        api.command(api.agent(sandbox), "true")
        took = now_ms() - begun
        api.delete(sandbox)
        return took, accepted - begun

    def sdk(self):
        """Sandbox.create and commands.run("true") with the published SDK, in turns."""
        os.environ["OPENSANDBOX_DISABLE_METRICS"] = "1"
        ours, theirs = [], []
        for _ in range(self.n(20, 3)):
            if self.stack:
                ours.append(sdk_walk(self.stack.domain, self.stack.key, BUSYBOX))
            if self.reference:
                reference = self.reference
                theirs.append(self.on_reference(sdk_walk, reference.domain, reference.key, reference.api.image))
        if ours:
            self.record("sdk_create_run", "sandglass", ours)
        if theirs:
            self.record("sdk_create_run", "reference", theirs)

    def warm(self):
        """A foreground `true` in a sandbox that is there."""
        if self.stack:
            self.record("warm_true", "sandglass", warm_true(self.api, self.n(300, 30)))

    def burst(self):
        """Fifty at once: from the first POST until each has run a command."""
        count = self.n(50, 20)
        if self.stack:
            self.record("burst", "sandglass", burst(self.api, count))
            self.drain(self.api)
        if self.reference and not self.quick:
            self.record("burst", "reference", self.on_reference(burst, self.reference.api, count))
            self.on_reference(self.drain, self.reference.api)

    def stdout(self):
        """A hundred megabytes of standard output through /command, and what the agent needs for it."""
        if not self.stack:
            return
        megabytes = self.n(100, 20)
        for mode in ("proxied", "direct"):
            if mode == "direct":
                self.reconfigure({"embedded": {"endpoints": "direct"}})
            # The host's own `yes` and `head`: the ones of busybox write so slowly that they would be what is measured.
            self.api.image = "host"
            sandbox = self.api.create()
            self.api.image = BUSYBOX
            agent = self.api.agent(sandbox)
            self.api.command(agent, "true")
            pid = agent_pid(self.stack, sandbox)
            rates = [self.pull(agent, megabytes) for _ in range(self.n(3, 1))]
            figures = {
                "unit": "MB/s",
                "megabytes": megabytes,
                "best": round(max(rates), 1),
                "raw": [round(rate, 1) for rate in rates],
                "agent_peak_rss_mib": round(status_kib(pid, "VmHWM") / 1024, 1),
                "server_peak_rss_mib": round(status_kib(self.stack.server.pid, "VmHWM") / 1024, 1),
            }
            self.record("stdout", "sandglass", figures, mode=mode)
            self.api.delete(sandbox)
        self.reconfigure({})

    def pull(self, agent, megabytes):
        """MB/s of output text, counted as it arrives and not kept."""
        address, prefix, headers = agent
        lines = megabytes * 1_000_000 // (LINE + 1)
        command = f"yes $(printf '%0{LINE}d' 0) | head -n {lines}"
        connection = self.api.connection(*address)
        sent = {"OPEN-SANDBOX-API-KEY": self.api.key, "Content-Type": "application/json", **headers}
        begun = now_ms()
        connection.request("POST", f"{prefix}/command", json.dumps({"command": command}), sent)
        answer = connection.getresponse()
        seen, tail = 0, b""
        while chunk := answer.read1(1 << 20):
            text = tail + chunk
            seen += text.count(b'"type":"stdout"')
            tail = text[-14:]
        took = now_ms() - begun
        if seen != lines:
            raise RuntimeError(f"{seen} of {lines} lines arrived")
        return lines * (LINE + 1) / 1000 / took

    def reconfigure(self, config):
        """Starts the server again with other settings; the sandboxes live on."""
        self.stack.stop()
        self.stack.config.write_text(self.stack.configuration(config))
        self.stack.start()
        self.api.close()

    def list(self):
        """Twenty out of two hundred living sandboxes."""
        alive = self.n(200, 40)
        if self.stack:
            self.fill(self.api, alive)
            self.record("list", "sandglass", listing(self.api, self.n(300, 50)), alive=alive)
        if self.reference:
            api = self.reference.api
            self.on_reference(self.fill, api, alive)
            self.record("list", "reference", self.on_reference(listing, api, self.n(50, 10)), alive=alive)
            self.on_reference(self.drain, api)

    def restart(self):
        """kill -9 with many alive; from the new start until a list shows all of them."""
        if not self.stack:
            return
        alive = self.n(200, 40)
        self.fill(self.api, alive)
        times = []
        for _ in range(self.n(5, 2)):
            self.stack.kill()
            self.api.close()
            begun = now_ms()
            self.stack.start(wait=False)
            while not self.complete(alive):
                time.sleep(0.001)
            times.append(now_ms() - begun)
        self.record("restart", "sandglass", times, alive=alive)
        self.drain(self.api)

    def complete(self, alive):
        if self.stack.server.poll() is not None:
            raise RuntimeError(self.stack.tail())
        try:
            status, answer = self.api.call("GET", "/v1/sandboxes?pageSize=200")
        except OSError:
            self.api.close()
            return False
        return status == 200 and answer["pagination"]["totalItems"] == alive

    def density(self):
        """Many alive: what each costs, what the server costs, and whether creating still takes as long."""
        if not self.stack:
            return
        alive = self.n(500, 60)
        empty = status_kib(self.stack.server.pid, "VmRSS")
        available = available_kib()
        creates = self.fill(self.api, alive)
        time.sleep(3)
        used = available - available_kib()
        owners = {self.stack.document(sandbox, "state.json").get("shimPid") for sandbox in self.api.identities()}
        agents = [process.pid for process in self.stack.guests() if comm(process.pid) == "execd"]
        figures = {
            "alive": self.api.total(),
            "server_rss_mib": round(status_kib(self.stack.server.pid, "VmRSS") / 1024, 1),
            "server_rss_empty_mib": round(empty / 1024, 1),
            "shim_rss_kib": mean(status_kib(pid, "VmRSS") for pid in owners),
            "shim_pss_kib": mean(pss_kib(pid) for pid in owners),
            "agent_rss_kib": mean(status_kib(pid, "VmRSS") for pid in agents),
            "agent_pss_kib": mean(pss_kib(pid) for pid in agents),
            "agents_counted": len(agents),
            "memory_available_less_kib_each": round(used / alive),
        }
        self.record("density", "sandglass", figures)
        self.record("create_first_50", "sandglass", creates[:50])
        self.record("create_last_50", "sandglass", creates[-50:], alive=alive)
        self.record("warm_true_dense", "sandglass", warm_true(self.api, self.n(100, 20)), alive=alive)
        begun = now_ms()
        self.drain(self.api)
        self.record("drain", "sandglass", {"unit": "ms", "wall_ms": round(now_ms() - begun), "count": alive})


# ---------------------------------------------------------------- pieces that run in either namespace


def sdk_walk(domain, key, image):
    from opensandbox import SandboxSync
    from opensandbox.config import ConnectionConfigSync

    begun = now_ms()
    box = SandboxSync.create(
        image,
        timeout=timedelta(hours=1),
        resource={"cpu": "500m", "memory": "256Mi"},
        connection_config=ConnectionConfigSync(domain=domain, api_key=key, request_timeout=timedelta(seconds=120)),
    )
    done = box.commands.run("true")
    took = now_ms() - begun
    if done.exit_code != 0:
        raise RuntimeError(f"true ended with {done}")
    box.kill()
    box.close()
    return took


def warm_true(api, count):
    sandbox = api.create()
    agent = api.agent(sandbox)
    api.command(agent, "true")
    times = []
    for _ in range(count):
        begun = now_ms()
        api.command(agent, "true")
        times.append(now_ms() - begun)
    api.delete(sandbox)
    return times


def burst(api, count):
    failures, each = [], []
    gate = threading.Barrier(count + 1)

    def one():
        mine = Api(api.port, api.key, api.image)
        gate.wait()
        begun = now_ms()
        try:
            mine.command(mine.agent(mine.create()), "true")
            each.append(now_ms() - begun)
        except Exception as error:  # noqa: BLE001  (a failure is a result here)
            failures.append(str(error)[:200])
        mine.close()

    threads = [threading.Thread(target=one) for _ in range(count)]
    for thread in threads:
        thread.start()
    gate.wait()
    begun = now_ms()
    for thread in threads:
        thread.join()
    return {
        "unit": "ms",
        "count": count,
        "wall_ms": round(now_ms() - begun, 1),
        "failures": len(failures),
        "first_failures": failures[:3],
        "each": summary(each),
    }


def listing(api, count):
    times = []
    for _ in range(count):
        begun = now_ms()
        answer = api.expect(200, "GET", "/v1/sandboxes?pageSize=20")
        times.append(now_ms() - begun)
        if len(answer["items"]) != 20:
            raise RuntimeError(f"{len(answer['items'])} items")
    return times


def agent_pid(stack, sandbox):
    """The agent is the first process of its sandbox; what else runs in there is below it."""
    shim = stack.document(sandbox, "state.json").get("shimPid")
    for pid in family(shim):
        if comm(pid) == "execd":
            return pid
    raise RuntimeError(f"no agent below shim {shim}")


def comm(pid):
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return None


def available_kib():
    return int(next(line.split()[1] for line in open("/proc/meminfo") if line.startswith("MemAvailable")))


def mean(values):
    values = [value for value in values if value]
    return round(sum(values) / len(values)) if values else None


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer repetitions; results are not for publishing")
    parser.add_argument("--only", help=f"some of: {', '.join(ORDER)}")
    parser.add_argument("--without-reference", action="store_true")
    parser.add_argument("--without-sandglass", action="store_true")
    return Bench(parser.parse_args()).run()


if __name__ == "__main__":
    sys.exit(main())
