"""The published command line `osb`."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from stack import wait_for

OSB = str(Path(sys.executable).with_name("osb"))


@pytest.fixture
def osb(server, tmp_path):
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(tmp_path),
        "OPEN_SANDBOX_DOMAIN": server.domain,
        "OPEN_SANDBOX_API_KEY": server.key,
        "NO_COLOR": "1",
        "COLUMNS": "200",
    }

    def run(*arguments, code=0):
        done = subprocess.run(
            [OSB, *arguments], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == code, f"osb {arguments}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    return run


@pytest.fixture
def sandbox(osb, server):
    made = osb(
        *("sandbox", "create", "--image", server.image, "-t", "10m", "-m", "team=osb", "-e", "FOO=bar"),
        *("--resource", "cpu=500m", "--resource", "memory=256Mi"),
        *("--entrypoint", "tail", "--entrypoint", "-f", "--entrypoint", "/dev/null", "-o", "json"),
    )
    made = json.loads(made)
    yield made["id"]
    osb("sandbox", "kill", made["id"], code=0)


def test_the_life_of_a_sandbox(osb, sandbox):
    def state():
        return json.loads(osb("sandbox", "get", sandbox, "-o", "json"))["status"]["state"]

    assert state() == "Running"
    assert sandbox in osb("sandbox", "list", "--state", "Running", "--metadata", "team=osb", "-o", "json")
    assert sandbox not in osb("sandbox", "list", "--state", "Paused", "-o", "json")
    osb("sandbox", "health", sandbox, "-o", "json")
    osb("sandbox", "renew", sandbox, "--timeout", "30m", "-o", "json")
    assert sandbox in osb("--use-server-proxy", "sandbox", "endpoint", sandbox, "--port", "8080", "-o", "json")
    osb("sandbox", "pause", sandbox, "-o", "json")
    assert state() == "Paused"
    osb("sandbox", "resume", sandbox, "-o", "json")
    assert state() == "Running"
    metrics = osb("sandbox", "metrics", sandbox, "-o", "json")
    assert "cpu" in metrics


def test_commands(osb, sandbox):
    assert osb("command", "run", sandbox, "-o", "raw", "--", "echo", "hi there").strip() == "hi there"
    assert osb("command", "run", sandbox, "-o", "raw", "--", "sh", "-c", "echo $FOO").strip() == "bar"
    assert osb("command", "run", sandbox, "--argv", "-o", "raw", "--", "printf", "%s", "$HOME").strip() == "$HOME"
    osb("command", "run", sandbox, "-o", "raw", "--", "sh", "-c", "exit 5", code=1)
    started = json.loads(osb("command", "run", sandbox, "-d", "-o", "json", "--", "sh", "-c", "echo bg; sleep 600"))
    identity = started.get("execution_id") or started.get("id")
    assert json.loads(osb("command", "status", sandbox, identity, "-o", "json"))["running"] is True
    osb("command", "interrupt", sandbox, identity)
    assert wait_for(lambda: json.loads(osb("command", "status", sandbox, identity, "-o", "json"))["running"] is False)


def test_sessions(osb, sandbox):
    made = json.loads(osb("command", "session", "create", sandbox, "-w", "/tmp", "-o", "json"))["session_id"]

    def run(*command, options=(), code=0):
        return osb("command", "session", "run", sandbox, made, *options, "--", *command, code=code).strip()

    run("export", "KEPT=1")
    # The command line prints what a session says without line ends.
    assert run("sh", "-c", "echo $KEPT; pwd") == "1/tmp"
    assert run("pwd", options=("-w", "/usr")) == "/usr"
    run("sh", "-c", "exit 5", code=1)
    run("sleep", "30", options=("-t", "1s"), code=1)
    assert run("printenv", "KEPT") == "1"
    osb("command", "session", "delete", sandbox, made)
    run("true", code=1)


def test_files(osb, sandbox, tmp_path):
    osb("file", "write", sandbox, "/tmp/f/a", "-c", "one two")
    assert osb("file", "cat", sandbox, "/tmp/f/a").strip() == "one two"
    osb("file", "replace", sandbox, "/tmp/f/a", "--old", "one", "--new", "three")
    osb("file", "mv", sandbox, "/tmp/f/a", "/tmp/f/b")
    osb("file", "chmod", sandbox, "/tmp/f/b", "--mode", "0640")
    information = osb("file", "info", sandbox, "/tmp/f/b", "-o", "json")
    assert "640" in information
    (tmp_path / "up").write_bytes(b"\0\1\2")
    osb("file", "upload", sandbox, str(tmp_path / "up"), "/tmp/f/up")
    osb("file", "download", sandbox, "/tmp/f/up", str(tmp_path / "down"))
    assert (tmp_path / "down").read_bytes() == b"\0\1\2"
    osb("file", "mkdir", sandbox, "/tmp/f/dir")
    assert "/tmp/f/up" in osb("file", "search", sandbox, "/tmp/f", "--pattern", "*", "-o", "json")
    osb("file", "rm", sandbox, "/tmp/f/up")
    osb("file", "rmdir", sandbox, "/tmp/f")
    osb("file", "cat", sandbox, "/tmp/f/b", code=1)


def test_diagnostics(osb, sandbox):
    osb("diagnostics", "logs", sandbox, "--scope", "container", "-o", "json")
    osb("diagnostics", "events", sandbox, "--scope", "runtime", "-o", "json")
    for what in ("inspect", "events", "logs", "summary"):
        osb("devops", what, sandbox, "-o", "raw")


def test_errors_end_with_a_message_and_a_code(osb):
    osb("sandbox", "get", "00000000-0000-4000-8000-000000000000", "-o", "json", code=1)
    osb("--api-key", "wrong", "sandbox", "list", "-o", "json", code=1)
