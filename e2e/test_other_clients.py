"""Clients that run in a process of their own: the first generation of the Python SDK, JavaScript, MCP."""

import asyncio
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def walk(command, server, **extra):
    environment = {
        **os.environ,
        "OPEN_SANDBOX_DOMAIN": server.domain,
        "OPEN_SANDBOX_API_KEY": server.key,
        "E2E_IMAGE": server.image,
        **extra,
    }
    done = subprocess.run(command, env=environment, cwd=HERE, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.mark.parametrize("through_proxy", ["", "1"])
def test_the_old_python_sdk(server, through_proxy):
    python = os.environ.get("SANDGLASS_E2E_OLD_PYTHON", str(HERE / ".venv-old/bin/python"))
    assert "walk complete" in walk([python, "old_sdk.py"], server, E2E_THROUGH_PROXY=through_proxy)


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
@pytest.mark.parametrize("through_proxy", ["", "1"])
def test_the_javascript_sdk(server, through_proxy):
    version = subprocess.run(["node", "--version"], capture_output=True, text=True).stdout
    if int(re.match(r"v(\d+)", version)[1]) < 20:
        pytest.skip("the SDK needs Node.js 20")
    assert "walk complete" in walk(["node", "js/walk.mjs"], server, E2E_THROUGH_PROXY=through_proxy)


def test_the_mcp_server(server):
    mcp = pytest.importorskip("mcp")
    from mcp.client.stdio import stdio_client

    program = str(Path(sys.executable).with_name("opensandbox-mcp"))
    environment = {**os.environ, "OPEN_SANDBOX_DOMAIN": server.domain, "OPEN_SANDBOX_API_KEY": server.key}
    parameters = mcp.StdioServerParameters(command=program, args=["--transport", "stdio"], env=environment)

    async def run():
        async with stdio_client(parameters) as (reader, writer), mcp.ClientSession(reader, writer) as session:
            await session.initialize()

            async def call(name, **arguments):
                answer = await asyncio.wait_for(session.call_tool(name, arguments), 60)
                text = " ".join(getattr(part, "text", "") for part in answer.content)
                failed = getattr(answer, "isError", None) or getattr(answer, "is_error", None)
                assert not failed, f"{name}: {text}"
                return text

            made = await call(
                "sandbox_create", image=server.image, entrypoint=["tail", "-f", "/dev/null"], timeout_seconds=120
            )
            sandbox = re.search(r"[0-9a-f]{8}-[0-9a-f-]{27}", made)[0]
            try:
                assert sandbox in await call("sandbox_list")
                await call("sandbox_healthcheck", sandbox_id=sandbox)
                assert "from-mcp" in await call("command_run", sandbox_id=sandbox, command="echo from-mcp")
                await call("file_write", sandbox_id=sandbox, path="/tmp/a", content="written")
                assert "written" in await call("file_read", sandbox_id=sandbox, path="/tmp/a")
                await call("sandbox_renew", sandbox_id=sandbox, timeout_seconds=300)
            finally:
                await call("sandbox_kill", sandbox_id=sandbox)

    asyncio.run(run())
