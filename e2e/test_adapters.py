"""Packages by others: a web console, and adapters that give agents a sandbox. Each in an environment of its own."""

import os
import secrets
import subprocess
from pathlib import Path

import httpx
import pytest

from stack import free_port, wait_for
from test_other_clients import walk

ADAPTERS, CONSOLE = "SANDGLASS_E2E_ADAPTERS_PYTHON", "SANDGLASS_E2E_CONSOLE_PYTHON"


@pytest.mark.skipif(ADAPTERS not in os.environ, reason="`cargo xtask e2e` installs them")
@pytest.mark.parametrize("name", ["hermes", "deepagents", "langchain"])
def test_adapter(server, name):
    assert "walk complete" in walk([os.environ[ADAPTERS], "adapters.py", name], server)


@pytest.fixture
def console(tmp_path):
    """The console's own server, with its data in a folder of the test."""
    port, token = free_port(), secrets.token_hex(16)
    environment = {
        **os.environ,
        "EXPLORER_ADMIN_TOKEN": token,
        "EXPLORER_MASTER_KEY": secrets.token_hex(32),
        "EXPLORER_DATABASE_URL": f"sqlite+aiosqlite:///{tmp_path}/console.db",
        "EXPLORER_PUBLIC_URL": f"http://127.0.0.1:{port}",
        "EXPLORER_HOST": "127.0.0.1",
        "EXPLORER_PORT": str(port),
    }
    program = [os.environ[CONSOLE], "-m", "uvicorn", "app.main:app", "--host", "127.0.0.1", "--port", str(port)]
    with open(tmp_path / "log", "ab") as log:
        process = subprocess.Popen(program, env=environment, cwd=tmp_path, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
    client = httpx.Client(base_url=f"http://127.0.0.1:{port}/api/v1", timeout=60)

    def answers():
        assert process.poll() is None, Path(tmp_path, "log").read_text()[-3000:]
        try:
            return client.get("/sandboxes").status_code in (200, 401, 403)
        except httpx.TransportError:
            return False

    try:
        assert wait_for(answers, 60), Path(tmp_path, "log").read_text()[-3000:]
        session = client.post("/auth/login", json={"token": token})
        assert session.status_code == 200, session.text
        client.headers["Authorization"] = f"Bearer {session.json()['session_token']}"
        yield client
    finally:
        client.close()
        process.terminate()
        process.wait(30)


@pytest.mark.skipif(CONSOLE not in os.environ, reason="`cargo xtask e2e` installs it")
def test_console(console, server):
    def call(method, path, status=200, **keys):
        answer = console.request(method, path, **keys)
        assert answer.status_code == status, f"{method} {path}: {answer.status_code} {answer.text}"
        return answer.json() if answer.content else None

    body = {"name": "mine", "provider_type": "opensandbox", "endpoint": server.url, "credentials": {"api_key": server.key}}
    connection = call("POST", "/connections", 201, json=body)["id"]
    tested = call("POST", f"/connections/{connection}/test")
    assert tested.get("ok", tested.get("success")), tested
    made = call("POST", f"/connections/{connection}/sandboxes", 201, json={"image": server.image, "name": "by-console", "ttl_seconds": 300})
    sandbox = made["sandbox_id"] if "sandbox_id" in made else made["id"]
    base = f"/connections/{connection}/sandboxes/{sandbox}"
    try:
        assert sandbox in str(call("GET", "/sandboxes"))
        assert "unning" in str(call("GET", base))
        command = call("POST", f"{base}/commands", 201, json={"command": "echo from-console; exit 0"})["command_id"]

        def ended():
            told = call("GET", f"{base}/commands/{command}")
            return told["status"] not in ("pending", "running", "queued") and told

        assert "from-console" in str(wait_for(ended))
        call("PUT", f"{base}/file", json={"content": "by the console"}, params={"path": "/tmp/console.txt"})
        assert call("GET", f"{base}/file", params={"path": "/tmp/console.txt"})["content"] == "by the console"
        assert "console.txt" in str(call("GET", f"{base}/files", params={"path": "/tmp"}))
        call("POST", f"{base}/pause")
        assert "aused" in str(call("GET", base))
        call("POST", f"{base}/resume")
        assert "unning" in str(call("GET", base))
    finally:
        call("DELETE", base)
    assert httpx.get(f"{server.url}/v1/sandboxes/{sandbox}", headers={"OPEN-SANDBOX-API-KEY": server.key}, timeout=60).status_code == 404
