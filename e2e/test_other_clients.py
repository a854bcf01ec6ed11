"""Clients that run in a process of their own: the first generation of the Python SDK, JavaScript, MCP."""

import asyncio
import contextlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from stack import free_port

HERE = Path(__file__).parent


def walk(command, server, **extra):
    environment = {
        **os.environ,
        "OPEN_SANDBOX_DOMAIN": server.domain,
        "OPEN_SANDBOX_API_KEY": server.key,
        "E2E_IMAGE": server.image,
        **extra,
    }
    done = subprocess.run(command, env=environment, cwd=HERE, capture_output=True, text=True, timeout=360)
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


@pytest.mark.parametrize("transport", ["stdio", "streamable-http"])
def test_the_mcp_server(server, transport):
    mcp = pytest.importorskip("mcp")
    from mcp.client.stdio import stdio_client
    from mcp.client.streamable_http import streamable_http_client

    program = str(Path(sys.executable).with_name("opensandbox-mcp"))
    environment = {**os.environ, "OPEN_SANDBOX_DOMAIN": server.domain, "OPEN_SANDBOX_API_KEY": server.key}
    parameters = mcp.StdioServerParameters(command=program, args=["--transport", "stdio"], env=environment)

    async def over_http(port):
        for _ in range(600):
            with contextlib.suppress(OSError):
                return (await asyncio.open_connection("127.0.0.1", port))[1].close()
            await asyncio.sleep(0.1)
        raise AssertionError("opensandbox-mcp does not listen")

    async def run():
        if transport == "stdio":
            return await walk_mcp(server, mcp, stdio_client(parameters))
        port = free_port()
        command = [program, "--transport", transport, "--port", str(port)]
        served = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            await over_http(port)
            await walk_mcp(server, mcp, streamable_http_client(f"http://127.0.0.1:{port}/mcp"))
        finally:
            served.kill()
            served.wait()

    asyncio.run(run())


async def walk_mcp(server, mcp, streams):
    """Every tool of the published server once."""
    used = set()
    async with streams as (reader, writer, *_), mcp.ClientSession(reader, writer) as session:
        await session.initialize()

        async def call(name, **arguments):
            used.add(name)
            answer = await asyncio.wait_for(session.call_tool(name, arguments), 60)
            assert not answer.is_error, f"{name}: {answer.content}"
            return answer.structured_content

        made = await call(
            "sandbox_create", image=server.image, entrypoint=["tail", "-f", "/dev/null"], timeout_seconds=120
        )
        box = {"sandbox_id": made["sandbox_id"]}
        try:
            listed = await call("sandbox_list")
            assert box["sandbox_id"] in [info["id"] for info in listed["sandbox_infos"]]
            assert (await call("sandbox_get_info", **box))["status"]["state"] == "Running"
            await call("sandbox_connect", **box)
            assert (await call("sandbox_healthcheck", **box))["healthy"]
            assert (await call("sandbox_get_metrics", **box))["cpu_count"] > 0
            assert (await call("sandbox_get_endpoint", port=8000, **box))["endpoint"]
            ran = await call("command_run", command="echo from-mcp", **box)
            assert [line["text"] for line in ran["logs"]["stdout"]] == ["from-mcp"] and ran["exit_code"] == 0
            started = await call("command_run", command="sleep 300", background=True, **box)
            await call("command_interrupt", execution_id=started["id"], **box)
            await call("file_create_directories", entries=[{"path": "/tmp/m/sub"}], **box)
            await call("file_write", path="/tmp/m/a", content="written here", **box)
            found = await call("file_search", path="/tmp/m", pattern="*", **box)
            assert [entry["path"] for entry in found["result"]] == ["/tmp/m/a"]
            change = {"path": "/tmp/m/a", "old_content": "here", "new_content": "there"}
            counted = await call("file_replace_contents", entries=[change], **box)
            assert counted["result"][0]["replaced_count"] == 1
            await call("file_move", entries=[{"source": "/tmp/m/a", "destination": "/tmp/m/b"}], **box)
            assert (await call("file_read", path="/tmp/m/b", **box))["content"] == "written there"
            assert (await call("file_read", path="/tmp/m/b", range_header="bytes=0-6", **box))["content"] == "written"
            await call("file_delete", paths=["/tmp/m/b"], **box)
            await call("file_delete_directories", paths=["/tmp/m"], **box)
            await call("sandbox_renew", timeout_seconds=300, **box)
        finally:
            await call("sandbox_kill", **box)
        assert used == {tool.name for tool in (await session.list_tools()).tools}
