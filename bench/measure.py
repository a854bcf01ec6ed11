"""What the measurements share: a raw HTTP client, statistics, and figures from the process table."""

import http.client
import json
import os
import platform
import re
import subprocess
import time
from datetime import datetime, timezone
from pathlib import Path


def now_ms():
    return time.perf_counter() * 1000


def percentile(values, percent):
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, round(percent / 100 * (len(ordered) - 1))))]


def summary(values, digits=2):
    if not values:
        return {"n": 0}
    return {
        "n": len(values),
        "p50": round(percentile(values, 50), digits),
        "p90": round(percentile(values, 90), digits),
        "p99": round(percentile(values, 99), digits),
        "min": round(min(values), digits),
        "max": round(max(values), digits),
    }


class Recorder:
    """Writes the raw values of one run, a line a measurement."""

    def __init__(self, quick, prefix=""):
        stamp = datetime.now(timezone.utc).strftime("%Y%m%dT%H%M%SZ")
        self.quick = quick
        self.file = Path(__file__).parent / "results" / f"{'quick-' if quick else ''}{prefix}{stamp}.jsonl"
        self.latest = self.file.parent / f".latest{'-' if prefix else ''}{prefix.rstrip('-')}"

    def n(self, full, quick):
        return quick if self.quick else full

    def record(self, name, who, values, **more):
        """`values` is a list of milliseconds, or a dictionary of figures."""
        line = {"name": name, "who": who, **more}
        if isinstance(values, list):
            line.update(unit="ms", summary=summary(values), raw=[round(value, 3) for value in values])
        else:
            line.update(values)
        self.file.parent.mkdir(exist_ok=True)
        with open(self.file, "a") as out:
            out.write(json.dumps(line) + "\n")
        print(json.dumps({key: value for key, value in line.items() if key != "raw"}), flush=True)

    def done(self):
        print(f"raw values: results/{self.file.name}")
        self.latest.write_text(self.file.name)


class Api:
    """The lifecycle API and the agents behind it over keep-alive connections, one for each host and port."""

    def __init__(self, port, key, image):
        self.port, self.key, self.image = port, key, image
        self.connections = {}

    def connection(self, host, port):
        if (host, port) not in self.connections:
            made = http.client.HTTPConnection(host, port, timeout=120)
            self.connections[host, port] = made
        return self.connections[host, port]

    def call(self, method, path, body=None, headers=None, address=None):
        """(status, parsed or raw body); retries once on a connection that the other side has closed."""
        address = address or ("127.0.0.1", self.port)
        sent = {"OPEN-SANDBOX-API-KEY": self.key, **(headers or {})}
        data = json.dumps(body) if body is not None else None
        if data is not None:
            sent["Content-Type"] = "application/json"
        for last in (False, True):
            connection = self.connection(*address)
            try:
                connection.request(method, path, data, sent)
                answer = connection.getresponse()
                content = answer.read()
                break
            except (http.client.RemoteDisconnected, ConnectionResetError, BrokenPipeError):
                connection.close()
                if last:
                    raise
        try:
            return answer.status, json.loads(content) if content else None
        except ValueError:
            return answer.status, content

    def expect(self, status, method, path, body=None, **more):
        got, answer = self.call(method, path, body, **more)
        if got != status:
            raise RuntimeError(f"{method} {path} answered {got}: {answer}")
        return answer

    def specification(self, **keys):
        return {
            "image": {"uri": self.image},
            "entrypoint": ["tail", "-f", "/dev/null"],
            "timeout": 3600,
            "resourceLimits": {"cpu": "500m", "memory": "256Mi"},
            "metadata": {"bench": "1"},
            **keys,
        }

    def create(self):
        return self.expect(202, "POST", "/v1/sandboxes", self.specification())["id"]

    def delete(self, sandbox):
        self.expect(204, "DELETE", f"/v1/sandboxes/{sandbox}")

    def agent(self, sandbox):
        """Address, path prefix and headers of a sandbox's agent, polling as the SDK does while it is not known yet."""
        for _ in range(600):
            status, answer = self.call("GET", f"/v1/sandboxes/{sandbox}/endpoints/44772?use_server_proxy=false")
            if status == 200:
                host, _, prefix = answer["endpoint"].partition("/")
                name, _, port = host.partition(":")
                return (name.replace("localhost", "127.0.0.1"), int(port or 80)), f"/{prefix}" if prefix else "", (
                    answer.get("headers") or {}
                )
            if status != 404:
                break
            time.sleep(0.01)
        raise RuntimeError(f"no endpoint: {status} {answer}")

    def command(self, agent, text):
        """Runs a command to its end; the stream's whole body."""
        address, prefix, headers = agent
        for _ in range(300):
            try:
                status, body = self.call("POST", f"{prefix}/command", {"command": text}, headers, address)
            except OSError:
                self.connections.pop(address, None)
            else:
                if status == 200 and b"execution_complete" in body:
                    return body
                if status not in (404, 502, 503):
                    raise RuntimeError(f"command answered {status}: {body}")
            # The sandbox is accepted and its agent not up yet.
            time.sleep(0.005)
        raise RuntimeError("the agent never answered")

    def total(self):
        return self.expect(200, "GET", "/v1/sandboxes?pageSize=1")["pagination"]["totalItems"]

    def identities(self):
        found, page = [], 1
        while True:
            answer = self.expect(200, "GET", f"/v1/sandboxes?pageSize=200&page={page}")
            found += [sandbox["id"] for sandbox in answer["items"]]
            if not answer["pagination"]["hasNextPage"]:
                return found
            page += 1

    def close(self):
        for connection in self.connections.values():
            connection.close()
        self.connections.clear()


# ---------------------------------------------------------------- processes


def status_kib(pid, field):
    try:
        found = re.search(rf"^{field}:\s+(\d+)", Path(f"/proc/{pid}/status").read_text(), re.M)
        return int(found[1]) if found else 0
    except OSError:
        return 0


def pss_kib(pid):
    try:
        return int(re.search(r"^Pss:\s+(\d+)", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.M)[1])
    except (OSError, TypeError):
        return 0


def family(pid):
    """A process and everything below it."""
    children = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                stat = Path(f"/proc/{name}/stat").read_text()
                parent = int(stat[stat.rindex(")") + 2 :].split()[1])
                children.setdefault(parent, []).append(int(name))
            except (OSError, ValueError):
                continue
    found, waiting = [], [pid]
    while waiting:
        one = waiting.pop()
        found.append(one)
        waiting += children.get(one, [])
    return found


# ---------------------------------------------------------------- the machine


def machine(binary):
    """What a reader needs to judge the figures. No names and no paths."""
    model = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    memory = int(re.search(r"MemTotal:\s+(\d+)", Path("/proc/meminfo").read_text())[1])
    return {
        "cores": os.cpu_count(),
        "processor": model[1] if model else platform.machine(),
        "memory_gib": round(memory / 1024 / 1024, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "docker": version(["dockerd", "--version"]),
        "runc": version(["runc", "--version"]),
        "sandglass": version([binary, "--version"]) if binary else None,
        "reference": distribution("opensandbox-server"),
        "sdk": distribution("opensandbox"),
        "load_before": round(os.getloadavg()[0], 2),
    }


def version(command):
    try:
        text = subprocess.run(command, capture_output=True, text=True, check=False).stdout
        return (re.search(r"\d+\.\d+[\w.+~-]*", text) or [None])[0]
    except OSError:
        return None


def distribution(name):
    from importlib.metadata import PackageNotFoundError, version as installed

    try:
        return installed(name)
    except PackageNotFoundError:
        return None
