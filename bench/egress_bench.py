#!/usr/bin/env python3
"""The network policy's half of the benchmark: the same programs in a sandbox without a policy and in one with.

    egress_bench.py [--quick] [--only NAME[,NAME]]

Both sandboxes are of one server and one image; what is compared is taken in turns, round after round. What they talk to is a network
namespace of the benchmark's own with a name server and nginx in it. Nothing is intercepted: the policy names a host and lends it no
credential. Raw values go to results/egress-<time>.jsonl. Needs root, SANDGLASS_BIN (a release build), curl, nginx and openssl. Traffic
stays on this machine; every loop is bounded.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from measure import Api, Recorder, machine, now_ms, percentile

sys.path.insert(0, str(Path(__file__).parent.parent / "e2e"))
from egress_world import BARE, RESOLVER, World  # noqa: E402
from stack import Stack  # noqa: E402

ORDER = ("connection", "throughput", "update")
MIB = 1 << 20

NGINX = """
user root;
worker_processes 1;
daemon off;
pid {home}/nginx.pid;
error_log stderr warn;
events {{ worker_connections 1024; }}
http {{
    access_log off;
    sendfile on;
    root {home}/files;
    server {{
        listen 80;
        listen 8080;
        listen 443 ssl;
        ssl_certificate {world}/server.pem;
        ssl_certificate_key {world}/server.key;
        ssl_session_cache off;
    }}
}}
"""

# Connects again and again and tells when it begins to get through, and when it no longer does.
PROBER = """
import socket, sys, time
target, until = (sys.argv[1], 80), time.time() + float(sys.argv[2])
before = None
while time.time() < until:
    begun = time.time()
    try:
        socket.create_connection(target, 2).close()
        now = "open"
    except ConnectionRefusedError:
        now = "closed"
    if now != before:
        print(now, begun, time.time(), flush=True)
        before = now
    time.sleep(0.001)
"""


class Bench(Recorder):
    def __init__(self, options):
        super().__init__(options.quick, "egress-")
        self.options = options

    def run(self):
        self.record("machine", "machine", machine(os.environ.get("SANDGLASS_BIN")), quick=self.quick)
        with contextlib.ExitStack() as undo:
            self.prepare(undo)
            for name in ORDER:
                if not self.options.only or name in self.options.only.split(","):
                    print(f"== {name}", flush=True)
                    getattr(self, name)()
        self.done()

    def prepare(self, undo):
        """The world with nginx in it, the server, and the two sandboxes."""
        self.home = Path(undo.enter_context(tempfile.TemporaryDirectory(prefix="egress-bench-")))
        world = undo.enter_context(World(self.home / "world", web=False))
        self.megabytes = self.n(1024, 1024)
        files = self.home / "files"
        files.mkdir()
        (files / "small").write_text("small\n")
        with open(files / "large", "wb") as large:
            large.truncate(self.megabytes * MIB)
        (self.home / "nginx.conf").write_text(NGINX.format(home=self.home, world=world.folder))
        command = ["ip", "netns", "exec", world.name, "nginx", "-p", str(self.home), "-c", str(self.home / "nginx.conf")]
        server = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        undo.callback(lambda: (server.terminate(), server.wait(20)))
        self.stack = Stack(config={"log": {"level": "WARNING"}, "embedded": {"dns": [RESOLVER]}})
        undo.callback(self.stack.close)
        self.stack.start()
        self.api = Api(self.stack.port, self.stack.key, "host")
        limits = {"cpu": "2", "memory": "512Mi"}
        policy = {"defaultAction": "deny", "egress": [{"action": "allow", "target": "allowed.test"}]}
        self.boxes = {}
        for who, keys in (("without a policy", {}), ("with a policy", {"networkPolicy": policy})):
            box = self.api.expect(202, "POST", "/v1/sandboxes", self.api.specification(resourceLimits=limits, **keys))["id"]
            self.boxes[who] = box, self.api.agent(box)
            for _ in range(100):
                if self.curl(who, "http://allowed.test/small", "%{http_code}") == ["200"]:
                    break
                time.sleep(0.1)
            else:
                raise RuntimeError(f"{who}: nothing answers")

    def inside(self, who, text):
        """Lines that a command in the sandbox writes."""
        body = self.api.command(self.boxes[who][1], text)
        frames = [json.loads(line.removeprefix("data: ")) for line in body.decode().splitlines() if line.strip()]
        return [frame["text"].strip() for frame in frames if frame.get("type") == "stdout" and frame["text"].strip()]

    def curl(self, who, url, wanted, times=1):
        one = f"curl -ks --noproxy '*' -m 60 -o /dev/null -w '{wanted}\\n' {url}"
        return self.inside(who, f"i=0; while [ $i -lt {times} ]; do {one}; i=$((i+1)); done")

    def connection(self):
        """A new program asks for the name, connects, shakes hands and gets six bytes."""
        found = {who: [] for who in self.boxes}
        for _ in range(self.n(10, 3)):
            for who in self.boxes:
                taken = self.curl(who, "https://allowed.test/small", "%{http_code} %{time_total}", self.n(50, 20))
                if any(not line.startswith("200 ") for line in taken):
                    raise RuntimeError(f"{who}: {taken}")
                found[who] += [float(line.split()[1]) * 1000 for line in taken]
        for who, values in found.items():
            self.record("https_connection", who, values)

    def throughput(self):
        # By the kernel alone, the same with the ends' own work for TLS, and through the gate that reads each request.
        for name, where in (("plain", "http://allowed.test:8080"), ("https", "https://allowed.test"), ("http", "http://allowed.test")):
            found = {who: [] for who in self.boxes}
            for _ in range(self.n(7, 3)):
                for who in self.boxes:
                    code, speed = self.curl(who, f"{where}/large", "%{http_code} %{speed_download}")[0].split()
                    if code != "200":
                        raise RuntimeError(f"{who}: {code}")
                    found[who].append(float(speed) / 1e6)
            for who, values in found.items():
                figures = {"unit": "MB/s", "p50": round(percentile(values, 50), 1), "raw": [round(value, 1) for value in values]}
                self.record(f"download_{name}", who, figures, megabytes=self.megabytes)

    def update(self):
        """From the beginning of the request until it is answered, and until a program in the sandbox feels it."""
        who = "with a policy"
        box, (address, prefix, headers) = self.boxes[who]
        for count in (1, 100, 4000):
            filling = [{"action": "allow", "target": f"10.{n >> 8}.{n & 255}.0/24"} for n in range(count - 1)]
            answered, felt, rounds = [], [], self.n(20, 6)
            script = f"cat > /tmp/prober.py <<'END'\n{PROBER}\nEND\nnohup python3 /tmp/prober.py {BARE} {rounds * 0.7 + 6} > /tmp/probed 2>&1 &"
            self.inside(who, script)
            time.sleep(1)
            begun = []
            for turn in range(rounds):
                action = "deny" if turn % 2 else "allow"
                policy = {"defaultAction": "deny", "egress": [{"action": action, "target": BARE}, *filling]}
                wall, start = time.time(), now_ms()
                self.api.expect(200, "PUT", f"/v1/sandboxes/{box}/networkpolicy", policy)
                answered.append(now_ms() - start)
                begun.append((wall, wall + answered[-1] / 1000, "closed" if turn % 2 else "open"))
                time.sleep(0.3)
            seen = [line.split() for line in self.inside(who, "sleep 0.5; cat /tmp/probed")]
            seen = [line for line in seen if len(line) == 3]
            for wall, end, state in begun:
                # The first attempt that went the new way, by when it had ended.
                after = [float(ended) for what, _, ended in seen if what == state and wall <= float(ended) <= wall + 0.3 + (end - wall)]
                if not after:
                    raise RuntimeError(f"the policy of {count} rules was not felt: {seen}")
                felt.append((after[0] - wall) * 1000)
                late = [line for line in seen if line[0] != state and end < float(line[1]) < end + 0.25]
                if late:
                    raise RuntimeError(f"the old policy of {count} rules was still in force after the answer: {late}")
            self.record("policy_answered", who, answered, rules=count)
            self.record("policy_felt", who, felt, rules=count)
            self.inside(who, "sleep 6; true")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only")
    Bench(parser.parse_args()).run()


if __name__ == "__main__":
    main()
