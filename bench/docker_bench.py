#!/usr/bin/env python3
"""The Docker half of the benchmark: Sandglass and the reference on the same private engine, one after the other, and the bare engine in turns with each.

    docker_bench.py [--quick] [--only NAME[,NAME]] [--without-reference]

The two servers never run at the same time: the reference removes what it takes for its own. Raw values go to results/docker-<time>.jsonl.
Load goes to the engine's own network namespace only; every loop is bounded. Needs root, SANDGLASS_BIN (a release build), gcc,
busybox-static, docker.io and wrk.
"""

import argparse
import concurrent.futures
import contextlib
import http.client
import json
import os
import re
import socket
import subprocess
import time
from pathlib import Path

from measure import Api, Recorder, machine, now_ms, status_kib
from reference import IMAGE, Docker, Namespace, Reference, ServerOnEngine, busybox_tree

HERE = Path(__file__).parent
ORDER = ("idle", "create", "parallel", "proxy", "big_body", "many")
TARGET = "sandglass-bench/target:1"
PORT = 8080
# What every measured server asks of the engine; the engine is measured with the same.
DROPPED = "AUDIT_WRITE MKNOD NET_ADMIN NET_RAW SYS_ADMIN SYS_MODULE SYS_PTRACE SYS_TIME SYS_TTY_CONFIG".split()

CONFIGURATION = """
[server]
host = "127.0.0.1"
port = {port}
api_key = "{key}"
[log]
level = "WARNING"
[runtime]
type = "docker"
[store]
type = "sqlite"
path = "{home}/sandglass.db"
[docker]
network_mode = "bridge"
publish_host = "127.0.0.1"
"""


class Sandglass(ServerOnEngine):
    def __init__(self, docker):
        super().__init__(docker, 18091, CONFIGURATION)

    def command(self):
        return [os.environ["SANDGLASS_BIN"], "serve"]


class Engine:
    """The bare engine over its socket: what any server on it has to pay."""

    def __init__(self, path):
        self.path = str(path)

    def connection(self):
        path = self.path

        class Connection(http.client.HTTPConnection):
            def connect(self):
                self.sock = socket.socket(socket.AF_UNIX)
                self.sock.connect(path)

        return Connection("engine", timeout=120)

    @staticmethod
    def call(connection, method, path, body=None):
        data = json.dumps(body) if body is not None else None
        connection.request(method, f"/v1.41{path}", data, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        content = answer.read()
        if answer.status >= 400:
            raise RuntimeError(f"{method} {path}: {answer.status} {content!r}")
        return json.loads(content) if content else None

    def make(self, connection):
        """Create and start; milliseconds and the container."""
        ports = {f"{port}/tcp": [{"HostIp": "127.0.0.1", "HostPort": ""}] for port in (44772, 8080)}
        wanted = {
            "Image": IMAGE,
            "Cmd": ["tail", "-f", "/dev/null"],
            "ExposedPorts": {port: {} for port in ports},
            "HostConfig": {
                "PortBindings": ports,
                "NanoCpus": 500_000_000,
                "Memory": 256 << 20,
                "PidsLimit": 4096,
                "CapDrop": DROPPED,
                "SecurityOpt": ["no-new-privileges=true"],
            },
        }
        begun = now_ms()
        container = self.call(connection, "POST", "/containers/create", wanted)["Id"]
        self.call(connection, "POST", f"/containers/{container}/start")
        return now_ms() - begun, container

    def remove(self, connection, container):
        begun = now_ms()
        self.call(connection, "DELETE", f"/containers/{container}?force=1&v=1")
        return now_ms() - begun


class Bench(Recorder):
    def __init__(self, options):
        super().__init__(options.quick, "docker-")
        self.options = options

    def run(self):
        with contextlib.ExitStack() as undo:
            self.namespace = Namespace()
            undo.callback(self.namespace.close)
            self.docker = Docker(self.namespace)
            undo.callback(self.docker.close)
            self.docker.start()
            self.engine = Engine(self.docker.socket)
            self.target_image()
            self.record("machine", "machine", machine(os.environ.get("SANDGLASS_BIN")), quick=self.quick)
            subjects = [("sandglass", Sandglass)]
            if not self.options.without_reference:
                subjects.append(("reference", Reference))
            for who, kind in subjects:
                self.who, self.server = who, kind(self.docker)
                undo.callback(self.server.close)
                self.server.start()
                for name in ORDER:
                    if not self.options.only or name in self.options.only.split(","):
                        print(f"== {who}: {name}", flush=True)
                        getattr(self, name)()
                self.within(drain, self.server.api)
                self.server.close()
        self.done()

    def within(self, function, *arguments):
        return self.namespace.run(function, *arguments)

    def target_image(self):
        binary = self.docker.home / "target"
        subprocess.run(["gcc", "-O2", "-static", "-pthread", "-o", str(binary), str(HERE / "target_server.c")], check=True)
        image = busybox_tree({"target": binary.read_bytes()})
        self.docker.call("import", "--change", "ENV PATH=/usr/bin:/bin", "-", TARGET, input=image)

    def memory(self):
        pid = self.server.process.pid
        threads = int(re.search(r"Threads:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[1])
        return {"rss_mib": round(status_kib(pid, "VmRSS") / 1024, 1), "threads": threads}

    def wrk(self, connections, path, host="127.0.0.1", port=None):
        """Requests per second and latency of one load of fixed length."""
        load = ["wrk", "-t1", f"-c{connections}", f"-d{self.n(4, 1)}s", "--latency", "--timeout", "20s"]
        url = f"http://{host}:{port or self.server.port}{path}"
        command = [*self.namespace.enter, *load, "-H", f"OPEN-SANDBOX-API-KEY: {self.server.key}", url]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        scale = {"us": 0.001, "ms": 1, "s": 1000, "m": 60_000}
        found = {}
        for percent in ("50", "99"):
            value = re.search(rf"^\s+{percent}%\s+([\d.]+)(us|ms|s|m)", text, re.M)
            found[f"p{percent}"] = round(float(value[1]) * scale[value[2]], 3) if value else None
        failed = re.search(r"Non-2xx or 3xx responses: (\d+)", text)
        found["rps"] = float(re.search(r"Requests/sec:\s+([\d.]+)", text)[1])
        found["failed"] = int(failed[1]) if failed else 0
        return found

    # ------------------------------------------------------------ measurements

    def idle(self):
        time.sleep(1)
        self.record("memory", self.who, self.memory(), when="idle")

    def create(self):
        """POST until Running, and delete; in blocks of ten in turns with the engine's own create and start, and forced removal."""
        ours, removed, engine, engine_removed = [], [], [], []
        connection = self.engine.connection()
        for _ in range(self.n(3, 1)):
            for _ in range(10):
                took, container = self.engine.make(connection)
                engine.append(took)
                engine_removed.append(self.engine.remove(connection, container))
            for _ in range(10):
                took, gone = self.within(one_create, self.server.api)
                ours.append(took)
                removed.append(gone)
        self.record("create", self.who, ours)
        self.record("delete", self.who, removed)
        self.record("create", f"engine beside {self.who}", engine)
        self.record("delete", f"engine beside {self.who}", engine_removed)

    def parallel(self):
        """Eight creates at once, in turns with eight of the engine's own."""
        ours, engine = [], []
        for _ in range(self.n(5, 1)):
            engine.append(self.engine_parallel(8))
            ours.append(self.within(parallel_creates, self.server.api, 8))
            self.within(drain, self.server.api)
        self.record("parallel_8", self.who, ours)
        self.record("parallel_8", f"engine beside {self.who}", engine)

    def engine_parallel(self, count):
        connections = [self.engine.connection() for _ in range(count)]
        with concurrent.futures.ThreadPoolExecutor(count) as pool:
            begun = now_ms()
            made = list(pool.map(self.engine.make, connections))
            took = now_ms() - begun
            list(pool.map(lambda pair: self.engine.remove(pair[0], pair[1][1]), zip(connections, made)))
        return took

    def proxy(self):
        """A small body at 1, 16 and 64 connections, and 100 MB each way: through the server, and directly to the container's address."""
        api = self.server.api
        sandbox = self.within(target_sandbox, api)
        address = self.container_address(sandbox)
        route = f"/v1/sandboxes/{sandbox}/proxy/{PORT}"
        legs = {"direct": (address, PORT, ""), "proxy": ("127.0.0.1", self.server.port, route)}
        for connections in (1, 16, 64):
            for leg, (host, port, prefix) in legs.items():
                found = self.wrk(connections, f"{prefix}/", host, port)
                self.record("proxy_small", self.who, found, leg=leg, connections=connections)
        size = self.n(100, 20) * 1_000_000
        for leg, (host, port, prefix) in legs.items():
            for name, move in (("proxy_down", download), ("proxy_up", upload)):
                rates = [self.within(move, host, port, prefix, size, api.key) for _ in range(self.n(5, 2))]
                self.record(name, self.who, {"unit": "MB/s", "best": round(max(rates), 1), "raw": [round(r, 1) for r in rates]}, leg=leg)
        self.within(api.delete, sandbox)
        self.record("memory", self.who, self.memory(), when="after proxying")

    def container_address(self, sandbox):
        shape = "{{range .NetworkSettings.Networks}}{{.IPAddress}}{{end}}"
        return self.docker.call("inspect", "-f", shape, f"sandbox-{sandbox}").stdout.decode().strip()

    def big_body(self):
        """A JSON body of 20 MB that is refused, and what it costs."""
        status = self.within(big_body, self.server.api)
        time.sleep(1)
        self.record("memory", self.who, self.memory(), when="after a 20 MB body", status=status)

    def many(self):
        """Two hundred alive: reads one at a time and at once, memory, and a start among them."""
        api, alive = self.server.api, self.n(200, 30)
        self.within(fill, api, alive)
        self.record("memory", self.who, self.memory(), when="many alive", alive=alive)
        self.record("list", self.who, self.within(listing, api, self.n(40, 10)), alive=alive)
        self.record("list_16", self.who, self.within(parallel_lists, api, 16, self.n(3, 2)), alive=alive)
        one = self.within(api.identities)[0]
        self.record("get", self.who, self.within(getting, api, one, self.n(200, 20)), alive=alive)
        self.record("get_64", self.who, self.wrk(64, f"/v1/sandboxes/{one}"), alive=alive)
        self.record("health_64", self.who, self.wrk(64, "/health"), alive=alive)
        self.record("memory", self.who, self.memory(), when="many alive, after load", alive=alive)
        times = []
        for _ in range(self.n(3, 2)):
            self.server.stop()
            begun = now_ms()
            self.server.start()
            while not self.within(complete, api, alive):
                time.sleep(0.002)
            times.append(now_ms() - begun)
        self.record("start_to_list", self.who, times, alive=alive)


# ---------------------------------------------------------------- pieces that run in the engine's namespace


def one_create(api):
    begun = now_ms()
    answer = api.expect(202, "POST", "/v1/sandboxes", api.specification())
    state, sandbox = answer["status"]["state"], answer["id"]
    while state != "Running":
        state = api.expect(200, "GET", f"/v1/sandboxes/{sandbox}")["status"]["state"]
    took = now_ms() - begun
    begun = now_ms()
    api.delete(sandbox)
    return took, now_ms() - begun


def parallel_creates(api, count):
    def make(_):
        mine = Api(api.port, api.key, api.image)
        mine.create()
        mine.close()

    with concurrent.futures.ThreadPoolExecutor(count) as pool:
        begun = now_ms()
        list(pool.map(make, range(count)))
        return now_ms() - begun


def drain(api):
    def remove(sandbox):
        mine = Api(api.port, api.key, api.image)
        mine.call("DELETE", f"/v1/sandboxes/{sandbox}")
        mine.close()

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        list(pool.map(remove, api.identities()))


def fill(api, count):
    def make(_):
        mine = Api(api.port, api.key, api.image)
        mine.create()
        mine.close()

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        list(pool.map(make, range(count - api.total())))


def target_sandbox(api):
    image, api.image = api.image, TARGET
    sandbox = api.expect(202, "POST", "/v1/sandboxes", {**api.specification(), "entrypoint": ["/target", str(PORT)]})["id"]
    api.image = image
    for _ in range(500):
        status, _ = api.call("GET", f"/v1/sandboxes/{sandbox}/proxy/{PORT}/")
        if status == 200:
            return sandbox
        time.sleep(0.02)
    raise RuntimeError(f"the target does not answer: {status}")


def request_head(method, host, port, path, key, length=None):
    more = "" if length is None else f"Content-Length: {length}\r\n"
    return f"{method} {path} HTTP/1.1\r\nHost: {host}:{port}\r\nOPEN-SANDBOX-API-KEY: {key}\r\n{more}Connection: close\r\n\r\n".encode()


def download(host, port, prefix, size, key):
    """MB/s."""
    with socket.create_connection((host, port), timeout=120) as link:
        block, got = bytearray(1 << 20), 0
        begun = now_ms()
        link.sendall(request_head("GET", host, port, f"{prefix}/bytes/{size}", key))
        while count := link.recv_into(block):
            got += count
        took = now_ms() - begun
    if got < size:
        raise RuntimeError(f"{got} of {size} bytes arrived")
    return size / took / 1000


def upload(host, port, prefix, size, key):
    """MB/s."""
    with socket.create_connection((host, port), timeout=120) as link:
        block, left, answer = bytes(1 << 18), size, b""
        begun = now_ms()
        link.sendall(request_head("POST", host, port, f"{prefix}/sink", key, size))
        while left:
            count = min(left, len(block))
            link.sendall(block[:count])
            left -= count
        while part := link.recv(65536):
            answer += part
        took = now_ms() - begun
    if b" 200 " not in answer[:20] or str(size).encode() not in answer:
        raise RuntimeError(repr(answer[:200]))
    return size / took / 1000


def big_body(api):
    body = {**api.specification(), "metadata": {f"key{n}": "x" * 1000 for n in range(20_000)}}
    try:
        return api.call("POST", "/v1/sandboxes", body)[0]
    except OSError as error:
        api.close()
        return str(error)


def listing(api, count):
    times = []
    for _ in range(count):
        begun = now_ms()
        answer = api.expect(200, "GET", "/v1/sandboxes?pageSize=20")
        times.append(now_ms() - begun)
        if len(answer["items"]) != 20:
            raise RuntimeError(f"{len(answer['items'])} items")
    return times


def parallel_lists(api, count, rounds):
    """Each of the answers' times, `count` asked at once."""

    def ask(_):
        mine = Api(api.port, api.key, api.image)
        begun = now_ms()
        mine.expect(200, "GET", "/v1/sandboxes?pageSize=20")
        took = now_ms() - begun
        mine.close()
        return took

    times = []
    with concurrent.futures.ThreadPoolExecutor(count) as pool:
        for _ in range(rounds):
            times += pool.map(ask, range(count))
    return times


def getting(api, sandbox, count):
    times = []
    for _ in range(count):
        begun = now_ms()
        api.expect(200, "GET", f"/v1/sandboxes/{sandbox}")
        times.append(now_ms() - begun)
    return times


def complete(api, alive):
    try:
        status, answer = api.call("GET", "/v1/sandboxes?pageSize=1")
    except OSError:
        api.close()
        return False
    return status == 200 and answer["pagination"]["totalItems"] == alive


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer repetitions; results are not for publishing")
    parser.add_argument("--only", help=f"some of: {', '.join(ORDER)}")
    parser.add_argument("--without-reference", action="store_true")
    Bench(parser.parse_args()).run()


if __name__ == "__main__":
    main()
