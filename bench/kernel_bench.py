#!/usr/bin/env python3
"""Kernels through the agent, beside `jupyter_client` alone on the same machine in the same run.

    kernel_bench.py AGENT [--rounds N]

Runs with an interpreter that has `ipykernel` and `jupyter_client` (`e2e/requirements-kernels.txt`), which both sides start
their kernels with. Prints a line of JSON for each figure and side: name, who, and all values in milliseconds. The sides take
turns, so that whatever else the machine does costs both the same.
"""

import argparse
import http.client
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from jupyter_client.manager import KernelManager

from measure import now_ms

EVALUATIONS = 50


class Agent:
    """The agent alone, with this interpreter's kernels first on its path."""

    def __init__(self, binary, folder):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        # Not resolved: the link in a virtual environment is what has its packages.
        path = f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}"
        environment = {**os.environ, "PATH": path, "EXECD_ENVS": f"{folder}/env", "EXECD_ACCESS_TOKEN": ""}
        environment.pop("JUPYTER_HOST", None)
        self.process = subprocess.Popen(
            [binary, "--port", str(self.port)], cwd=folder, env=environment, stdin=subprocess.DEVNULL
        )
        deadline = time.monotonic() + 30
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
                break
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.01)
        self.connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)

    def call(self, method, path, body=None):
        self.connection.request(method, path, json.dumps(body) if body is not None else None)
        answer = self.connection.getresponse()
        data = answer.read()
        if answer.status != 200:
            raise RuntimeError(f"{method} {path}: {answer.status} {data[:300]}")
        return data

    def start(self):
        return json.loads(self.call("POST", "/code/context", {"language": "python"}))["id"]

    def evaluate(self, kernel):
        data = self.call("POST", "/code", {"context": {"id": kernel}, "code": "1+1"})
        if b'"results":{"text":"2"}' not in data or b"execution_complete" not in data:
            raise RuntimeError(f"not the answer: {data[:500]}")

    def end(self, kernel):
        self.call("DELETE", f"/code/contexts/{kernel}")

    def close(self):
        self.connection.close()
        self.process.kill()
        self.process.wait()


class Bare:
    """`jupyter_client` as a program that uses it does: started, ready, executed until idle."""

    def start(self):
        manager = KernelManager(kernel_name="python3")
        manager.start_kernel()
        client = manager.client()
        client.start_channels()
        client.wait_for_ready(timeout=120)
        return manager, client

    def evaluate(self, kernel):
        _, client = kernel
        seen = []
        client.execute_interactive("1+1", output_hook=seen.append, timeout=120)
        if not any(message["msg_type"] == "execute_result" for message in seen):
            raise RuntimeError("not the answer")

    def end(self, kernel):
        manager, client = kernel
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def timed(call, *arguments):
    begun = now_ms()
    value = call(*arguments)
    return now_ms() - begun, value


def main():
    options = argparse.ArgumentParser()
    options.add_argument("agent")
    options.add_argument("--rounds", type=int, default=10)
    given = options.parse_args()
    figures = {"start": {}, "first": {}, "run": {}}
    with tempfile.TemporaryDirectory() as folder:
        agent = Agent(given.agent, folder)
        try:
            sides = {"sandglass": agent, "bare": Bare()}
            for turn in range(given.rounds + 1):
                for name, side in sides.items():
                    started, kernel = timed(side.start)
                    first, _ = timed(side.evaluate, kernel)
                    each = [timed(side.evaluate, kernel)[0] for _ in range(EVALUATIONS)]
                    side.end(kernel)
                    # The first turn fills the caches of the machine.
                    if turn:
                        for figure, values in (("start", [started]), ("first", [started + first]), ("run", each)):
                            figures[figure].setdefault(name, []).extend(values)
        finally:
            agent.close()
    whose = {"sandglass": "agent", "bare": "jupyter_client"}
    for figure, sides in figures.items():
        for side, values in sides.items():
            print(json.dumps({"name": f"kernel_{figure}", "who": whose[side], "values": values}), flush=True)


if __name__ == "__main__":
    main()
