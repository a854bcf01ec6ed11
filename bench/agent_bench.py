#!/usr/bin/env python3
"""The agent's half of the benchmark: the static release agent alone on loopback, beside the plainest server of the same bytes.

    agent_bench.py [--quick] [--only NAME[,NAME]] [--without-sandbox]

What is compared is taken in turns. Raw values go to results/agent-<time>.jsonl. Needs SANDGLASS_AGENT (the static agent) and gcc; for the
rows through a sandbox also root and SANDGLASS_BIN. Load goes to loopback only; every loop is bounded.
"""

import argparse
import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from measure import Api, Recorder, machine, now_ms, status_kib

sys.path.insert(0, str(Path(__file__).parent.parent / "e2e"))
from stack import Stack, free_port  # noqa: E402

ORDER = ("start", "true", "exit_to_end", "lines", "transfer", "pty", "kernel", "sandbox")
HERE = Path(__file__).parent
MIB = 1 << 20
DONE = b"\r\n0\r\n\r\n"

# Prints the moment before its end, by the clock that the client reads too.
STAMP = r"""
#include <stdio.h>
#include <time.h>
#include <unistd.h>
int main(void) {
    struct timespec now;
    char text[32];
    clock_gettime(CLOCK_MONOTONIC, &now);
    int size = sprintf(text, "%lld\n", now.tv_sec * 1000000000LL + now.tv_nsec);
    write(1, text, size);
    _exit(0);
}
"""


def build(source, target):
    given = source.encode() if isinstance(source, str) else source.read_bytes()
    subprocess.run(["gcc", "-O2", "-static", "-pthread", "-x", "c", "-", "-o", str(target)], input=given, check=True)
    return target


def connected(port, seconds=10):
    """A connection, as soon as anybody listens."""
    deadline = time.monotonic() + seconds
    while True:
        link = socket.socket()
        try:
            link.connect(("127.0.0.1", port))
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return link
        except ConnectionRefusedError:
            link.close()
            if time.monotonic() > deadline:
                raise


class Process:
    """A server of the measurement, and its memory."""

    def __init__(self, command, port, home, **environment):
        self.port = port
        self.child = subprocess.Popen(
            [str(word) for word in command], cwd=home, env={"PATH": os.environ["PATH"], "HOME": str(home), **environment},
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        )
        connected(port).close()

    def rss(self):
        return status_kib(self.child.pid, "VmRSS")

    def watched(self, work):
        """What `work` answers, and by how many KiB the memory had grown at most meanwhile."""
        before, most, over = self.rss(), [0], threading.Event()

        def watch():
            while not over.wait(0.01):
                most[0] = max(most[0], self.rss())

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            return work(), max(0, most[0] - before)
        finally:
            over.set()
            watcher.join()

    def close(self):
        self.child.send_signal(signal.SIGTERM)
        try:
            self.child.wait(10)
        except subprocess.TimeoutExpired:
            self.child.kill()
            self.child.wait()


def command_request(body, prefix="", headers=None):
    data = json.dumps(body).encode()
    more = "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items())
    head = f"POST {prefix}/command HTTP/1.1\r\nHost: agent\r\nAccept: text/event-stream\r\n{more}Content-Length: {len(data)}\r\n\r\n"
    return head.encode() + data


def exchange(link, request):
    """Sends a request and reads to the end of its chunked answer."""
    link.sendall(request)
    seen = b""
    while not seen.endswith(DONE):
        part = link.recv(65536)
        if not part:
            raise RuntimeError(f"closed after {seen[-200:]!r}")
        seen += part
    return seen


def form(path, size):
    """Head and tail of an upload, around `size` bytes of content."""
    boundary = "opensandbox_0123_456"
    metadata = json.dumps({"path": path, "mode": 644})
    head = (
        f'--{boundary}\r\nContent-Disposition: form-data; name="metadata"; filename="metadata"\r\n'
        f"Content-Type: application/json\r\n\r\n{metadata}\r\n"
        f'--{boundary}\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n'
        f"Content-Type: application/octet-stream\r\n\r\n"
    ).encode()
    tail = f"\r\n--{boundary}--\r\n".encode()
    kind = f"multipart/form-data; boundary={boundary}"
    return kind, head, tail, len(head) + size + len(tail)


def upload(port, target, path, size, headers=None):
    """Seconds that it took to send and be told of success."""
    kind, head, tail, length = form(path, size)
    more = "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items())
    request = f"POST {target} HTTP/1.1\r\nHost: agent\r\n{more}Content-Type: {kind}\r\nContent-Length: {length}\r\n\r\n".encode()
    # No zeros, and no line ends: what a compiled or packed file looks like to a search for a boundary.
    piece = bytes(range(33, 256)) * ((MIB // 223) + 1)
    with connected(port) as link:
        begun, left = time.perf_counter(), size
        link.sendall(request + head)
        while left:
            count = min(left, MIB)
            link.sendall(memoryview(piece)[:count])
            left -= count
        link.sendall(tail)
        answer = link.recv(65536)
        took = time.perf_counter() - begun
    if b" 200 " not in answer[:20]:
        raise RuntimeError(repr(answer[:300]))
    return took


def download(port, target, size, headers=None):
    """Seconds until the last byte was here."""
    more = "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items())
    block = bytearray(MIB)
    with connected(port) as link:
        begun = time.perf_counter()
        link.sendall(f"GET {target} HTTP/1.1\r\nHost: agent\r\n{more}\r\n".encode())
        seen = b""
        while b"\r\n\r\n" not in seen:
            seen += link.recv(4096)
        head, rest = seen.split(b"\r\n\r\n", 1)
        if b" 200 " not in head[:20]:
            raise RuntimeError(repr(seen[:300]))
        got = len(rest)
        while got < size:
            count = link.recv_into(block)
            if not count:
                raise RuntimeError(f"{got} of {size} bytes")
            got += count
        return time.perf_counter() - begun


class Bench(Recorder):
    def __init__(self, options):
        super().__init__(options.quick, "agent-")
        self.options = options
        self.agent_file = os.environ["SANDGLASS_AGENT"]

    def run(self):
        with contextlib.ExitStack() as undo:
            self.home = Path(undo.enter_context(tempfile.TemporaryDirectory(prefix="agent-bench-")))
            build(HERE / "static_server.c", self.home / "static_server")
            build(STAMP, self.home / "stamp")
            (self.home / "served").mkdir()
            self.record("machine", "machine", machine(os.environ.get("SANDGLASS_BIN")), quick=self.quick)
            self.agent = self.start_agent()
            undo.callback(lambda: self.agent.close())
            port = free_port()
            self.plain = Process([self.home / "static_server", port, self.home / "served"], port, self.home)
            undo.callback(self.plain.close)
            for name in ORDER:
                if not self.options.only or name in self.options.only.split(","):
                    print(f"== {name}", flush=True)
                    getattr(self, name)()
        self.done()

    def start_agent(self):
        port = free_port()
        return Process([self.agent_file, "--port", port], port, self.home, EXECD_ENVS=str(self.home / "env"))

    # ------------------------------------------------------------ measurements

    def start(self):
        """From the fork to the first accepted connection; then what an agent that nobody uses takes."""
        times, memory = [], []
        for _ in range(self.n(30, 8)):
            port = free_port()
            begun = now_ms()
            pid = os.posix_spawn(self.agent_file, ["execd", "--port", str(port)], {"EXECD_ENVS": str(self.home / "env")})
            connected(port).close()
            times.append(now_ms() - begun)
            time.sleep(0.2)
            memory.append(status_kib(pid, "VmRSS"))
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        self.record("exec_to_listening", "agent", times)
        self.record("idle", "agent", {"rss_kib": max(memory), "binary_bytes": os.path.getsize(self.agent_file)})

    def true(self):
        """A foreground `true` over one raw connection."""
        with connected(self.agent.port) as link:
            for name, body in (("shell_true", {"command": "true"}), ("argv_true", {"argv": ["true"]})):
                request, times = command_request(body), []
                for _ in range(self.n(2000, 300)):
                    begun = now_ms()
                    exchange(link, request)
                    times.append(now_ms() - begun)
                self.record(name, "agent", times)

    def exit_to_end(self):
        """From the program's last instruction to the last byte of the stream."""
        request, times = command_request({"argv": [str(self.home / "stamp")]}), []
        with connected(self.agent.port) as link:
            for _ in range(self.n(2000, 300)):
                seen = exchange(link, request)
                end = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
                stamp = int(seen.split(b'"stdout","text":"')[1].split(b'"')[0])
                times.append((end - stamp) / 1e6)
        self.record("exit_to_end", "agent", times)

    def lines(self):
        """A million short lines through the SDK, and the same bytes to the same SDK from the plain server."""
        count = self.n(1_000_000, 100_000)
        command = f"seq 1 {count}"
        with connected(self.agent.port) as link:
            begun = now_ms()
            answer, grown = self.agent.watched(lambda: self.raw_body(link, command))
            self.record("lines_raw", "agent", {"unit": "ms", "value": round(now_ms() - begun, 1), "lines": count, "grown_kib": grown})
        (self.home / "served" / "stream").write_bytes(answer)
        times = {"agent": [], "plain server": []}
        for _ in range(self.n(3, 2)):
            for who, server in (("plain server", self.plain), ("agent", self.agent)):
                times[who].append(sdk_run(server.port, command, count))
        for who, values in times.items():
            self.record("lines_sdk", who, values, lines=count)

    def raw_body(self, link, command):
        """The stream's bytes without the chunks around them."""
        link.sendall(command_request({"command": command}))
        source = link.makefile("rb", buffering=MIB)
        while source.readline() != b"\r\n":
            pass
        parts = []
        while size := int(source.readline(), 16):
            parts.append(source.read(size))
            source.readline()
        return b"".join(parts)

    def transfer(self):
        """One file up and down, the two servers in turns."""
        size = self.n(1024, 128) * MIB
        path, rounds = str(self.home / "up"), self.n(5, 2)
        rates = {}
        for _ in range(rounds):
            for who, server in (("plain server", self.plain), ("agent", self.agent)):
                took, grown = server.watched(lambda s=server: upload(s.port, "/files/upload", path, size))
                rates.setdefault(("upload", who), []).append((size / took / 1e6, grown))
            os.replace(path, self.home / "served" / "up")
            for who, server in (("plain server", self.plain), ("agent", self.agent)):
                target = "/up" if who != "agent" else f"/files/download?path={self.home}/served/up"
                took, grown = server.watched(lambda s=server, t=target: download(s.port, t, size))
                rates.setdefault(("download", who), []).append((size / took / 1e6, grown))
        for (name, who), found in rates.items():
            speeds = [round(speed, 1) for speed, _ in found]
            figures = {"unit": "MB/s", "p50": sorted(speeds)[len(speeds) // 2], "raw": speeds, "grown_kib": max(grown for _, grown in found)}
            self.record(name, who, figures, megabytes=size // MIB)

    def pty(self):
        """From a key to its echo, over a terminal's WebSocket."""
        import httpx

        made = httpx.post(f"http://127.0.0.1:{self.agent.port}/pty", json={})
        if made.status_code != 201:
            print(f"no terminals: {made.status_code}")
            return
        session = made.json()["session_id"]
        self.record("pty_echo", "agent", asyncio.run(keystrokes(self.agent.port, session, self.n(2000, 300))))
        httpx.delete(f"http://127.0.0.1:{self.agent.port}/pty/{session}")

    def kernel(self):
        """A Python kernel by the agent, and by the bare client."""
        command = [sys.executable, str(HERE / "kernel_bench.py"), self.agent_file, "--rounds", str(self.n(20, 4))]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        for line in filter(None, map(str.strip, done.stdout.splitlines())):
            found = json.loads(line)
            self.record(found["name"], found["who"], found["values"])

    def sandbox(self):
        """The same through the server's proxy, into a sandbox on the embedded runtime."""
        if self.options.without_sandbox or "SANDGLASS_BIN" not in os.environ:
            print("no server")
            return
        stack = Stack()
        try:
            stack.start()
            api = Api(stack.port, stack.key, "host")
            sandbox = api.expect(202, "POST", "/v1/sandboxes", api.specification(resourceLimits={"memory": "3Gi"}))["id"]
            (host, port), prefix, headers = api.agent(sandbox)
            headers = {"OPEN-SANDBOX-API-KEY": stack.key, **headers}
            request, times = command_request({"command": "true"}, prefix, headers), []
            with connected(port) as link:
                for _ in range(self.n(1000, 200)):
                    begun = now_ms()
                    exchange(link, request)
                    times.append(now_ms() - begun)
            self.record("shell_true", "sandbox", times)
            size = self.n(1024, 128) * MIB
            for name in ("upload", "download"):
                rates = []
                for _ in range(self.n(3, 2)):
                    if name == "upload":
                        took = upload(port, f"{prefix}/files/upload", "/tmp/up", size, headers)
                    else:
                        took = download(port, f"{prefix}/files/download?path=/tmp/up", size, headers)
                    rates.append(round(size / took / 1e6, 1))
                self.record(name, "sandbox", {"unit": "MB/s", "p50": sorted(rates)[len(rates) // 2], "raw": rates}, megabytes=size // MIB)
            api.delete(sandbox)
        finally:
            problems = stack.close()
        if problems:
            raise RuntimeError("\n".join(problems))


def sdk_run(port, command, count):
    """Milliseconds that the synchronous SDK takes for one command, from the call to its answer."""
    from opensandbox.config import ConnectionConfigSync
    from opensandbox.models.sandboxes import SandboxEndpoint
    from opensandbox.sync.adapters.command_adapter import CommandsAdapterSync

    config = ConnectionConfigSync(domain=f"127.0.0.1:{port}", disable_metrics=True)
    commands = CommandsAdapterSync(config, SandboxEndpoint(endpoint=f"127.0.0.1:{port}"))
    begun = now_ms()
    done = commands.run(command)
    took = now_ms() - begun
    if len(done.logs.stdout) != count or done.exit_code != 0:
        raise RuntimeError(f"{len(done.logs.stdout)} lines, exit code {done.exit_code}")
    return took


async def keystrokes(port, session, count):
    from websockets.asyncio.client import connect

    times = []
    async with connect(f"ws://127.0.0.1:{port}/pty/{session}/ws", max_size=None, compression=None) as link:
        # `cat` without line ends: what comes back is the terminal's echo, a letter at a time.
        await link.send(b"\x00cat\n")
        await asyncio.sleep(1)
        with contextlib.suppress(asyncio.TimeoutError):
            while True:
                await asyncio.wait_for(link.recv(), 0.3)
        for number in range(count):
            begun = now_ms()
            await link.send(b"\x00" + bytes([97 + number % 26]))
            while True:
                frame = await asyncio.wait_for(link.recv(), 10)
                if isinstance(frame, bytes) and frame[:1] == b"\x01":
                    break
            times.append(now_ms() - begun)
            if number % 500 == 499:
                # A terminal's line has an end; its echo is not counted.
                await link.send(b"\x00\n")
                with contextlib.suppress(asyncio.TimeoutError):
                    while True:
                        await asyncio.wait_for(link.recv(), 0.2)
    return times


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only")
    parser.add_argument("--without-sandbox", action="store_true")
    Bench(parser.parse_args()).run()


if __name__ == "__main__":
    main()
