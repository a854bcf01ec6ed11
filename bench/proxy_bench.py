#!/usr/bin/env python3
"""The proxy's half of the benchmark: one program in a sandbox, reached directly, through the server, and through nginx on the same machine.

    proxy_bench.py [--quick] [--only NAME[,NAME]] [--without-reference]

What is compared is taken in turns, round after round. nginx (Debian's package; `cargo xtask setup` installs it) has as many workers as
there are processors and keeps connections to the program. The reference's proxy is measured afterwards on a private Docker engine, beside
the program at its container's own address. Raw values go to results/proxy-<time>.jsonl. Needs root, SANDGLASS_BIN (a release build), gcc,
nginx and wrk; with the reference also docker.io and busybox-static. Load goes to this machine only; every loop is bounded.
"""

import argparse
import contextlib
import os
import re
import resource
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from measure import Api, Recorder, machine, now_ms, percentile, status_kib

sys.path.insert(0, str(Path(__file__).parent.parent / "e2e"))
from stack import Stack, free_port  # noqa: E402

HERE = Path(__file__).parent
ORDER = ("small", "one", "download", "upload", "echo", "events", "idle", "reference")
PORT = 8080
MIB = 1 << 20

NGINX = """
user root;
worker_processes {workers};
daemon off;
pid {home}/nginx.pid;
error_log stderr warn;
events {{ worker_connections 8192; }}
http {{
    access_log off;
    client_max_body_size 0;
    client_body_temp_path {home}/body;
    proxy_temp_path {home}/proxy;
    fastcgi_temp_path {home}/fastcgi;
    uwsgi_temp_path {home}/uwsgi;
    scgi_temp_path {home}/scgi;
    upstream box {{ server {box}:{target}; keepalive 128; }}
    map $http_upgrade $wanted {{ default upgrade; "" ""; }}
    server {{
        listen 127.0.0.1:{port} backlog=4096;
        keepalive_requests 100000000;
        location / {{
            proxy_pass http://box;
            proxy_http_version 1.1;
            proxy_set_header Connection $wanted;
            proxy_set_header Upgrade $http_upgrade;
            proxy_request_buffering off;
            proxy_buffering {buffering};
            proxy_max_temp_file_size 0;
            proxy_read_timeout 1h;
        }}
    }}
}}
"""


class Leg:
    """One way to the program."""

    def __init__(self, who, host, port, prefix="", headers=()):
        self.who, self.host, self.port, self.prefix, self.headers = who, host, port, prefix, list(headers)

    def connect(self):
        link = socket.create_connection((self.host, self.port), timeout=120)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return link

    def head(self, method, path, *more):
        lines = [f"{method} {self.prefix}{path} HTTP/1.1", f"Host: {self.host}:{self.port}", *self.headers, *more, "", ""]
        return "\r\n".join(lines).encode()

    def wrk(self, connections, seconds):
        load = ["wrk", "-t1", f"-c{connections}", f"-d{seconds}s", "--latency", "--timeout", "20s"]
        for line in self.headers:
            load += ["-H", line]
        text = subprocess.run([*load, f"http://{self.host}:{self.port}{self.prefix}/"], capture_output=True, text=True, check=True).stdout
        failed = re.search(r"Non-2xx or 3xx responses: (\d+)|Socket errors: (.*)", text)
        if failed:
            raise RuntimeError(f"{self.who}: {failed[0]}")
        return float(re.search(r"Requests/sec:\s+([\d.]+)", text)[1])


def read_head(link):
    seen = b""
    while b"\r\n\r\n" not in seen:
        part = link.recv(65536)
        if not part:
            raise RuntimeError(repr(seen))
        seen += part
    return seen.split(b"\r\n\r\n", 1)


def download(leg, size, block=bytearray(MIB)):
    """MB/s."""
    with leg.connect() as link:
        begun = now_ms()
        link.sendall(leg.head("GET", f"/bytes/{size}"))
        head, rest = read_head(link)
        got = len(rest)
        while got < size and (count := link.recv_into(block)):
            got += count
        took = now_ms() - begun
    if got != size or b" 200 " not in head[:20]:
        raise RuntimeError(f"{leg.who}: {got} of {size} bytes, {head[:60]!r}")
    return size / took / 1000


def upload(leg, size, block=bytes(MIB)):
    """MB/s."""
    with leg.connect() as link:
        begun, left = now_ms(), size
        link.sendall(leg.head("POST", "/sink", f"Content-Length: {size}"))
        while left:
            count = min(left, len(block))
            link.sendall(memoryview(block)[:count])
            left -= count
        head, _ = read_head(link)
        took = now_ms() - begun
    if b" 200 " not in head[:20]:
        raise RuntimeError(f"{leg.who}: {head[:60]!r}")
    return size / took / 1000


def upgraded(leg):
    link = leg.connect()
    asks = ("Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13", "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==")
    link.sendall(leg.head("GET", "/echo", *asks))
    head, _ = read_head(link)
    if b" 101 " not in head[:20]:
        raise RuntimeError(f"{leg.who}: {head[:60]!r}")
    return link


def echoes(link, count):
    """Milliseconds from a frame of 32 bytes to its echo, with nothing but the socket in between."""
    frame, times = b"\x82\xa0" + bytes(4) + b"x" * 32, []
    for _ in range(count):
        begun = now_ms()
        link.sendall(frame)
        got = 0
        while got < len(frame):
            got += len(link.recv(4096))
        times.append(now_ms() - begun)
    return times


def client_echoes(leg, count):
    """The same as a program sees it that uses a WebSocket library."""
    import asyncio

    from websockets.asyncio.client import connect

    async def run():
        headers = dict(line.split(": ", 1) for line in leg.headers)
        times = []
        async with connect(f"ws://{leg.host}:{leg.port}{leg.prefix}/ws", additional_headers=headers, compression=None, close_timeout=0.1) as link:
            for _ in range(count):
                begun = now_ms()
                await link.send(b"x" * 32)
                await link.recv()
                times.append(now_ms() - begun)
        return times

    return asyncio.run(run())


def delays(leg, count):
    """Milliseconds from the moment in an event to its arrival."""
    times, unread = [], b""
    with leg.connect() as link:
        link.sendall(leg.head("GET", f"/events/{count}", "Accept: text/event-stream"))
        while len(times) < count:
            part = link.recv(65536)
            arrived = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
            if not part:
                raise RuntimeError(f"{leg.who}: {len(times)} events")
            unread += part
            *whole, unread = re.split(rb"\n\n", unread)
            times += [(arrived - int(event.rpartition(b"data: ")[2])) / 1e6 for event in whole]
    return times


class Bench(Recorder):
    def __init__(self, options):
        super().__init__(options.quick, "proxy-")
        self.options = options

    def run(self):
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        self.record("machine", "machine", {**machine(os.environ.get("SANDGLASS_BIN")), "nginx": nginx_version()}, quick=self.quick)
        wanted = [name for name in ORDER if not self.options.only or name in self.options.only.split(",")]
        with contextlib.ExitStack() as undo:
            self.prepare(undo)
            for name in wanted:
                if name != "reference":
                    print(f"== {name}", flush=True)
                    getattr(self, name)()
        if "reference" in wanted and not self.options.without_reference:
            print("== reference", flush=True)
            self.reference()
        self.done()

    def prepare(self, undo):
        """The server, a sandbox with the program, and nginx before the same program."""
        self.home = Path(undo.enter_context(tempfile.TemporaryDirectory(prefix="proxy-bench-")))
        subprocess.run(["gcc", "-O2", "-static", "-pthread", "-o", str(self.home / "target"), str(HERE / "target_server.c")], check=True)
        self.stack = Stack(config={"log": {"level": "WARNING"}})
        undo.callback(self.stack.close)
        self.stack.start()
        api = self.api = Api(self.stack.port, self.stack.key, "host")
        limits = {"cpu": "8", "memory": "2Gi", "pids": "8192"}
        # The image `host` is this machine's own tree, without the temporary directories.
        place = Path("/usr/local/lib") / f"sandglass-bench-{os.getpid()}"
        place.write_bytes((self.home / "target").read_bytes())
        place.chmod(0o755)
        undo.callback(place.unlink)
        box = api.expect(202, "POST", "/v1/sandboxes", api.specification(entrypoint=[str(place), str(PORT)], resourceLimits=limits))["id"]
        agent = api.agent(box)
        found = api.command(agent, "hostname -I 2>/dev/null || ip -4 -o addr show dev eth0")
        address = re.search(rb"\b(\d+\.\d+\.\d+\.\d+)\b(?!/8)", found)[1].decode()
        key = f"OPEN-SANDBOX-API-KEY: {self.stack.key}"
        self.direct = Leg("direct", address, PORT)
        self.ours = Leg("sandglass", "127.0.0.1", self.stack.port, f"/v1/sandboxes/{box}/proxy/{PORT}", [key])
        self.nginx = Leg("nginx", "127.0.0.1", self.start_nginx(undo, address, "on"))
        self.nginx_streams = Leg("nginx", "127.0.0.1", self.start_nginx(undo, address, "off"))
        self.legs = [self.direct, self.ours, self.nginx]
        for leg in self.legs:
            self.answers(leg)

    def start_nginx(self, undo, address, buffering):
        port, home = free_port(), self.home / f"nginx-{buffering}"
        home.mkdir()
        text = NGINX.format(workers=os.cpu_count(), home=home, box=address, target=PORT, port=port, buffering=buffering)
        (home / "nginx.conf").write_text(text)
        server = subprocess.Popen(["nginx", "-p", str(home), "-c", str(home / "nginx.conf")], stdin=subprocess.DEVNULL)
        undo.callback(lambda: (server.terminate(), server.wait(20)))
        return port

    def answers(self, leg):
        for _ in range(200):
            with contextlib.suppress(OSError, RuntimeError):
                with leg.connect() as link:
                    link.sendall(leg.head("GET", "/", "Connection: close"))
                    if b" 200 " in read_head(link)[0][:20]:
                        return
            time.sleep(0.05)
        raise RuntimeError(f"{leg.who} does not answer")

    def rates(self, name, legs, unit, take, rounds, **more):
        """Figures of `take`, in turns; the median counts."""
        found = {leg.who: [] for leg in legs}
        for _ in range(rounds):
            for leg in legs:
                found[leg.who].append(take(leg))
        for who, values in found.items():
            self.record(name, who, {"unit": unit, "p50": round(percentile(values, 50), 1), "raw": [round(value, 1) for value in values]}, **more)

    # ------------------------------------------------------------ measurements

    def small(self):
        """A body of three bytes over 64 connections."""
        seconds = self.n(4, 1)
        self.rates("small", self.legs, "req/s", lambda leg: leg.wrk(64, seconds), self.n(5, 2), connections=64)

    def one(self):
        """The same, over one."""
        seconds = self.n(3, 1)
        self.rates("one", self.legs, "req/s", lambda leg: leg.wrk(1, seconds), self.n(5, 2), connections=1)

    def download(self):
        size = self.n(1024, 256) * MIB
        self.rates("download", self.legs, "MB/s", lambda leg: download(leg, size), self.n(7, 3), megabytes=size // MIB)

    def upload(self):
        size = self.n(1024, 256) * MIB
        self.rates("upload", self.legs, "MB/s", lambda leg: upload(leg, size), self.n(7, 3), megabytes=size // MIB)

    def echo(self):
        """From a WebSocket frame to its echo: by bare sockets, and with a client library around them."""
        for name, take in (("echo", lambda leg, count: echoes(upgraded(leg), count)), ("echo_library", client_echoes)):
            found = {leg.who: [] for leg in self.legs}
            for _ in range(self.n(10, 3)):
                for leg in self.legs:
                    found[leg.who] += take(leg, self.n(1000, 300))
            for who, values in found.items():
                self.record(name, who, values)

    def events(self):
        legs = [self.direct, self.ours, self.nginx_streams]
        found = {leg.who: [] for leg in legs}
        for _ in range(self.n(4, 2)):
            for leg in legs:
                found[leg.who] += delays(leg, self.n(1000, 300))
        for who, values in found.items():
            self.record("event_delay", who, values)

    def idle(self):
        """What the server takes with many WebSockets on which nothing happens."""
        pid, count = self.stack.server.pid, self.n(2000, 500)
        before, links = status_kib(pid, "VmRSS"), []
        try:
            for _ in range(count):
                links.append(upgraded(self.ours))
                # A word each way, so that every one of them has been used.
                links[-1].sendall(b"\x81\x80\0\0\0\0")
                links[-1].recv(16)
            time.sleep(1)
            self.record("idle_websockets", "sandglass", {"rss_kib": status_kib(pid, "VmRSS"), "before_kib": before}, count=count)
        finally:
            for link in links:
                link.close()

    def reference(self):
        """The reference's proxy, and the program at its container's own address; both in the engine's namespace."""
        import docker_bench
        from reference import Docker, Namespace, Reference, busybox_tree

        with contextlib.ExitStack() as undo:
            namespace = Namespace()
            undo.callback(namespace.close)
            docker = Docker(namespace)
            undo.callback(docker.close)
            docker.start()
            target = self.home_target(undo)
            image = busybox_tree({"target": target.read_bytes()})
            docker.call("import", "--change", "ENV PATH=/usr/bin:/bin", "-", docker_bench.TARGET, input=image)
            server = Reference(docker)
            undo.callback(server.close)
            server.start()
            box = namespace.run(docker_bench.target_sandbox, server.api)
            undo.callback(namespace.run, docker_bench.drain, server.api)
            shape = "{{range .NetworkSettings.Networks}}{{.IPAddress}}{{end}}"
            address = docker.call("inspect", "-f", shape, f"sandbox-{box}").stdout.decode().strip()
            legs = [
                Leg("beside the reference", address, PORT),
                Leg("reference", "127.0.0.1", server.port, f"/v1/sandboxes/{box}/proxy/{PORT}", [f"OPEN-SANDBOX-API-KEY: {server.key}"]),
            ]
            size, seconds = self.n(256, 64) * MIB, self.n(3, 1)
            self.rates("small", legs, "req/s", lambda leg: namespace.run(leg.wrk, 64, seconds), self.n(3, 2), connections=64)
            self.rates("download", legs, "MB/s", lambda leg: namespace.run(download, leg, size), self.n(3, 2), megabytes=size // MIB)
            self.rates("upload", legs, "MB/s", lambda leg: namespace.run(upload, leg, size), self.n(3, 2), megabytes=size // MIB)
            for leg in legs:
                self.record("event_delay", leg.who, namespace.run(delays, leg, self.n(1000, 300)))

    def home_target(self, undo):
        folder = Path(undo.enter_context(tempfile.TemporaryDirectory(prefix="proxy-bench-")))
        subprocess.run(["gcc", "-O2", "-static", "-pthread", "-o", str(folder / "target"), str(HERE / "target_server.c")], check=True)
        return folder / "target"


def nginx_version():
    text = subprocess.run(["nginx", "-v"], capture_output=True, text=True, check=True).stderr
    return re.search(r"nginx/([\d.]+)", text)[1]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only")
    parser.add_argument("--without-reference", action="store_true")
    Bench(parser.parse_args()).run()


if __name__ == "__main__":
    main()
