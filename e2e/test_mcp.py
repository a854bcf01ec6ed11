"""`sandglass mcp` driven by the official Python SDK over both transports, and by the official inspector."""

import asyncio
import base64
import contextlib
import json
import re
import shutil
import subprocess
from pathlib import Path

import httpx
import pytest

mcp = pytest.importorskip("mcp")
from mcp_sessions import PATIENCE, PROGRAM, Served, connected, environment, run, until  # noqa: E402
from stack import free_port  # noqa: E402

HERE = Path(__file__).parent
TRANSPORTS = ["stdio", "streamable-http"]

READING = {
    "sandbox_connect", "sandbox_get_info", "sandbox_list", "sandbox_get_metrics", "sandbox_healthcheck",
    "sandbox_get_endpoint", "sandbox_diagnostics", "command_status", "command_logs", "file_read", "file_list",
    "file_search", "snapshot_get", "snapshot_list",
}
DESTROYING = {
    "sandbox_kill", "command_run", "command_interrupt", "file_write", "file_replace_contents", "file_move", "file_delete",
    "file_delete_directories", "snapshot_delete",
}
OTHERS = {
    "sandbox_create", "sandbox_renew", "sandbox_pause", "sandbox_resume", "file_create_directories", "snapshot_create",
}

pytestmark = pytest.mark.skipif(not PROGRAM, reason="needs the program in SANDGLASS_BIN")


async def make(tools, server, **arguments):
    made = await tools(
        "sandbox_create", image=server.image, timeout_seconds=300, resource={"cpu": "1", "memory": "256Mi"}, **arguments
    )
    assert made["ready"], made
    return made["sandbox_id"]


@pytest.fixture
def shared(server, http):
    """One sandbox for a test, made by plain HTTP and removed by it."""
    body = {
        "image": {"uri": server.image},
        "entrypoint": ["tail", "-f", "/dev/null"],
        "timeout": 600,
        "resourceLimits": {"cpu": "1", "memory": "256Mi"},
    }
    made = http.post("/v1/sandboxes", json=body)
    assert made.status_code == 202, made.text
    yield made.json()["id"]
    http.delete(f"/v1/sandboxes/{made.json()['id']}")


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_who_it_is_and_what_it_has(server, transport):
    async def body():
        async with connected(server, transport) as tools:
            assert tools.greeting.server_info.name == "sandglass"
            assert "sandbox_create" in tools.greeting.instructions
            listed = {tool.name: tool for tool in (await tools.session.list_tools()).tools}
            assert set(listed) == READING | DESTROYING | OTHERS
            for name, tool in listed.items():
                assert tool.annotations.read_only_hint == (name in READING), name
                assert tool.annotations.destructive_hint == (name in DESTROYING), name
                assert tool.description and tool.title and tool.output_schema, name
            documents = (await tools.session.list_resources()).resources
            assert {"sandbox-lifecycle", "command-execution", "file-operations", "sandbox-troubleshooting"} == {
                document.name for document in documents
            }
            for document in documents:
                read = await tools.session.read_resource(document.uri)
                assert document.name in read.contents[0].text
            with pytest.raises(mcp.MCPError):
                await tools.session.read_resource("skill://nothing/SKILL.md")

    run(body())


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_the_life_of_a_sandbox(server, transport):
    async def body():
        async with connected(server, transport) as tools:
            made = await tools(
                "sandbox_create",
                image=server.image,
                timeout_seconds=200,
                metadata={"purpose": f"mcp-{transport}"},
                env={"GREETING": "hello there"},
                resource={"cpu": "1", "memory": "256Mi"},
            )
            sandbox = made["sandbox_id"]
            assert made["ready"] and made["info"]["status"]["state"] == "Running"
            try:
                found = await tools("sandbox_list", filter={"metadata": {"purpose": f"mcp-{transport}"}})
                assert [info["id"] for info in found["sandbox_infos"]] == [sandbox]
                assert found["pagination"]["total_items"] == 1 and sandbox in found["created_here"]
                assert (await tools("sandbox_get_info", sandbox_id=sandbox))["image"] == server.image
                assert (await tools("sandbox_connect", sandbox_id=sandbox))["ready"]
                assert (await tools("sandbox_healthcheck", sandbox_id=sandbox))["healthy"]
                metrics = await tools("sandbox_get_metrics", sandbox_id=sandbox)
                assert 0 < metrics["memory_used_in_mib"] <= metrics["memory_total_in_mib"]
                before = made["info"]["expires_at"]
                assert (await tools("sandbox_renew", sandbox_id=sandbox, timeout_seconds=900))["expires_at"] > before
                said = await tools("command_run", sandbox_id=sandbox, command='echo "$GREETING"')
                assert said["stdout"]["text"] == "hello there\n"
                paused = await tools("sandbox_pause", sandbox_id=sandbox)
                assert paused["status"]["state"] == "Paused"
                assert not (await tools("sandbox_healthcheck", sandbox_id=sandbox))["healthy"]
                assert (await tools("sandbox_resume", sandbox_id=sandbox))["status"]["state"] == "Running"
                assert (await tools("sandbox_connect", sandbox_id=sandbox))["ready"]
                events = await tools("sandbox_diagnostics", sandbox_id=sandbox, kind="events")
                assert events["content"]["text"]
                for kind in ("logs", "summary"):
                    await tools("sandbox_diagnostics", sandbox_id=sandbox, kind=kind)
            finally:
                assert (await tools("sandbox_kill", sandbox_id=sandbox))["status"] == "killed"
            code, _ = await tools.refused("sandbox_get_info", sandbox_id=sandbox)
            assert "NOT_FOUND" in code
            assert sandbox not in (await tools("sandbox_list"))["created_here"]

    run(body())


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_commands(server, transport, shared):
    async def body():
        async with connected(server, transport) as tools:
            async def sh(command, **more):
                return await tools("command_run", sandbox_id=shared, command=command, **more)

            await tools("sandbox_connect", sandbox_id=shared)
            both = await sh("echo out; echo err >&2; exit 3")
            assert (both["exit_code"], both["stdout"]["text"], both["stderr"]["text"]) == (3, "out\n", "err\n")
            assert (await sh("pwd", working_directory="/tmp"))["stdout"]["text"] == "/tmp\n"
            assert (await sh('echo "$A"', env={"A": "b c"}))["stdout"]["text"] == "b c\n"
            late = await sh("sleep 60", timeout_seconds=0.3)
            assert late["exit_code"] == -1 and "signal" in late["error"]
            much = await sh("i=0; while [ $i -lt 3000 ]; do echo line $i; i=$((i+1)); done", max_output_bytes=2048)
            shown = much["stdout"]
            assert shown["truncated"] and shown["bytes"] > 20_000 and len(shown["text"]) < 2200
            assert shown["text"].startswith("line 0\n") and shown["text"].endswith("line 2999\n")
            assert "bytes left out" in shown["text"]

            started = await sh("echo one; sleep 0.2; echo two; exec sleep 300", background=True)
            which = {"sandbox_id": shared, "execution_id": started["id"]}
            assert started["background"] and "exit_code" not in started
            assert (await tools("command_status", **which))["running"]

            async def whole():
                output = (await tools("command_logs", **which))["output"]
                return "two" in output and output

            assert await until(whole) == "one\ntwo\n"
            first = await tools("command_logs", **which)
            assert await tools("command_logs", cursor=first["cursor"], **which) == {
                "output": "", "cursor": first["cursor"], "truncated": False,
            }
            await tools("command_interrupt", **which)

            async def ended():
                status = await tools("command_status", **which)
                return not status["running"] and status

            assert (await until(ended))["exit_code"] != 0

    run(body())


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_files(server, transport, shared):
    async def body():
        async with connected(server, transport) as tools:
            async def of(tool, **arguments):
                return await tools(f"file_{tool}", sandbox_id=shared, **arguments)

            await tools("sandbox_connect", sandbox_id=shared)
            base = f"/tmp/mcp-{transport}"
            await of("create_directories", entries=[{"path": f"{base}/a/b"}, {"path": f"{base}/c", "mode": 700}])
            await of("write", path=f"{base}/a/t.txt", content="gr\u00fc\u00df dich\nline two\nline three\n", mode=640)
            await of("write", path=f"{base}/a/b/d.bin", content=base64.b64encode(b"\xff\x00\xfe").decode(), encoding="base64")
            whole = await of("read", path=f"{base}/a/t.txt")
            assert whole["content"] == "gr\u00fc\u00df dich\nline two\nline three\n" and not whole["truncated"]
            assert (await of("read", path=f"{base}/a/t.txt", offset=2, limit=1))["content"] == "line two"
            cut = await of("read", path=f"{base}/a/t.txt", max_bytes=3)
            assert (cut["content"], cut["truncated"], cut["next_range_header"]) == ("gr", True, "bytes=2-")
            rest = await of("read", path=f"{base}/a/t.txt", range_header=cut["next_range_header"])
            assert cut["content"] + rest["content"] == whole["content"]
            binary = await of("read", path=f"{base}/a/b/d.bin", encoding="base64")
            assert base64.b64decode(binary["content"]) == b"\xff\x00\xfe"
            assert (await tools.refused("file_read", sandbox_id=shared, path=f"{base}/a/b/d.bin"))[0] == "NOT_TEXT"
            listed = await of("list", path=base, depth=3)
            assert [entry["path"].removeprefix(base) for entry in listed["result"]] == [
                "/a", "/a/b", "/a/b/d.bin", "/a/t.txt", "/c",
            ]
            modes = {entry["path"].removeprefix(base): entry["mode"] for entry in listed["result"]}
            assert (modes["/c"], modes["/a/t.txt"]) == (700, 640)
            found = await of("search", path=base, pattern="*.txt")
            assert [entry["path"] for entry in found["result"]] == [f"{base}/a/t.txt"]
            twice = {"path": f"{base}/a/t.txt", "old_content": "line", "new_content": "row"}
            replaced = await of("replace_contents", entries=[twice, twice])
            assert [entry["replaced_count"] for entry in replaced["result"]] == [2, 0]
            await of("move", entries=[{"source": f"{base}/a/t.txt", "destination": f"{base}/c/moved.txt"}])
            assert "row two" in (await of("read", path=f"{base}/c/moved.txt"))["content"]
            await of("delete", paths=[f"{base}/c/moved.txt", f"{base}/never"])
            code, text = await tools.refused("file_read", sandbox_id=shared, path=f"{base}/c/moved.txt")
            assert code == "FILE_NOT_FOUND" and "HTTP 404" in text
            await of("delete_directories", paths=[base])
            assert (await tools.refused("file_list", sandbox_id=shared, path=base))[0] == "FILE_NOT_FOUND"

    run(body())


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_port_can_be_reached_by_its_endpoint(server, transport, shared):
    async def body():
        async with connected(server, transport) as tools:
            await tools("sandbox_connect", sandbox_id=shared)
            for through in (False, True):
                found = await tools("sandbox_get_endpoint", sandbox_id=shared, port=44772, use_server_proxy=through)
                assert found["url"].endswith(found["endpoint"])
                answer = httpx.get(f"{found['url'].rstrip('/')}/ping", headers=found["headers"], timeout=PATIENCE)
                assert answer.status_code == 200, answer.text

    run(body())


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_snapshots_or_a_word_why_not(server, transport, shared):
    async def body():
        async with connected(server, transport) as tools:
            await tools("sandbox_connect", sandbox_id=shared)
            if server.runtime != "docker":
                code, _ = await tools.refused("snapshot_create", sandbox_id=shared)
                assert code == "SNAPSHOT::NOT_IMPLEMENTED"
                return
            await tools("file_write", sandbox_id=shared, path="/root/kept", content="kept")
            name = f"mcp-{transport}"
            snapshot = (await tools("snapshot_create", sandbox_id=shared, name=name))["id"]

            async def ready():
                return (await tools("snapshot_get", snapshot_id=snapshot))["status"]["state"] == "Ready"

            await until(ready)
            listed = await tools("snapshot_list", sandbox_id=shared, name=name)
            assert [one["id"] for one in listed["snapshots"]] == [snapshot]
            restored = await tools("sandbox_create", snapshot_id=snapshot, resource={}, timeout_seconds=120)
            try:
                kept = await tools("file_read", sandbox_id=restored["sandbox_id"], path="/root/kept")
                assert kept["content"] == "kept"
            finally:
                await tools("sandbox_kill", sandbox_id=restored["sandbox_id"])

            async def deleted():
                answer = await tools.answer("snapshot_delete", {"snapshot_id": snapshot})
                return not answer.is_error

            await until(deleted)

    run(body())


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_cancelled_command_is_interrupted(server, transport, shared):
    async def body():
        async with connected(server, transport) as tools:
            await tools("sandbox_connect", sandbox_id=shared)
            command = f"echo $$ > /tmp/pid-{transport}; exec sleep 300"
            arguments = {"sandbox_id": shared, "command": command}
            call = asyncio.create_task(tools.session.call_tool("command_run", arguments))
            alive = f"kill -0 $(cat /tmp/pid-{transport})"

            async def running():
                return (await tools("command_run", sandbox_id=shared, command=alive))["exit_code"] == 0

            await until(running)
            # The SDK tells the server with notifications/cancelled.
            call.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await call

            async def gone():
                return not await running()

            await until(gone)

    run(body())


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_output_is_reported_while_a_command_runs(server, transport, shared):
    async def body():
        async with connected(server, transport) as tools:
            await tools("sandbox_connect", sandbox_id=shared)
            heard, first = [], asyncio.Event()

            async def progress(amount, total, message):
                heard.append((amount, message))
                first.set()

            # The command ends only when its first output has been reported.
            command = "echo first; while [ ! -e /tmp/heard ]; do sleep 0.05; done; echo last"
            call = asyncio.create_task(
                tools.session.call_tool(
                    "command_run", {"sandbox_id": shared, "command": command}, progress_callback=progress
                )
            )
            await asyncio.wait_for(first.wait(), PATIENCE)
            await tools("file_write", sandbox_id=shared, path="/tmp/heard", content="")
            answer = await asyncio.wait_for(call, PATIENCE)
            assert answer.structured_content["stdout"]["text"] == "first\nlast\n"

            async def complete():
                return "".join(message for _, message in heard) == "first\nlast\n"

            await until(complete)
            amounts = [amount for amount, _ in heard]
            assert amounts == sorted(set(amounts))
            await tools("file_delete", sandbox_id=shared, paths=["/tmp/heard"])

    run(body())


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_bad_input_is_told_and_harms_nothing(server, transport, shared):
    async def body():
        async with connected(server, transport) as tools:
            await tools("sandbox_connect", sandbox_id=shared)
            with pytest.raises(mcp.MCPError):
                await tools.session.call_tool("sandbox_explode", {})
            unknown = "00000000-0000-4000-8000-000000000000"
            for tool, arguments, word in [
                ("command_run", {"sandbox_id": shared}, "command"),
                ("command_run", {"sandbox_id": shared, "command": "ls", "timout": 1}, "timout"),
                ("command_run", {"sandbox_id": shared, "command": ["ls"]}, "string"),
                ("command_run", {"sandbox_id": shared, "command": " "}, "empty"),
                ("command_run", {"sandbox_id": shared, "command": "ls", "timeout_seconds": -1}, "timeout_seconds"),
                ("sandbox_kill", {"sandbox_id": "../sandboxes"}, "an id has"),
                ("sandbox_create", {}, "exactly one"),
                ("file_write", {"sandbox_id": shared, "path": "/tmp/x", "content": "%", "encoding": "base64"}, "base64"),
                ("file_write", {"sandbox_id": shared, "path": "/tmp/x", "content": "", "mode": 999}, "755"),
                ("file_delete", {"sandbox_id": shared, "paths": []}, "empty"),
                ("file_read", {"sandbox_id": shared, "path": "/tmp", "range_header": "bytes=0-1", "offset": 1}, "use one"),
            ]:
                code, text = await tools.refused(tool, **arguments)
                assert code == "INVALID_ARGUMENTS" and word in text, (tool, text)
            for tool, arguments, wanted in [
                ("sandbox_get_info", {"sandbox_id": unknown}, "NOT_FOUND"),
                ("command_run", {"sandbox_id": unknown, "command": "ls"}, "NOT_FOUND"),
                ("command_status", {"sandbox_id": shared, "execution_id": "nothing"}, "INVALID_REQUEST_BODY"),
                ("command_run", {"sandbox_id": shared, "command": "ls", "working_directory": "/never"}, ""),
                ("sandbox_create", {"image": server.image, "timeout_seconds": 1}, ""),
                ("sandbox_create", {"image": "sandglass.invalid/never:1"}, ""),
            ]:
                code, text = await tools.refused(tool, **arguments)
                assert wanted in code and code in text, (tool, text)
            # Arguments of the published server that mean nothing here are no error.
            still = await tools("command_run", sandbox_id=shared, command="echo fine", connect_if_missing=True)
            assert still["stdout"]["text"] == "fine\n"

    run(body())


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_server_that_is_away_or_refuses_the_key_is_a_failure_of_the_tool(server, transport):
    async def body():
        async with connected(server, transport, SANDGLASS_URL=f"http://127.0.0.1:{free_port()}") as tools:
            code, text = await tools.refused("sandbox_list")
            assert code == "UNREACHABLE" and "cannot reach" in text
        async with connected(server, transport, SANDGLASS_API_KEY="wrong-" + server.key[:4]) as tools:
            code, text = await tools.refused("sandbox_list")
            assert "HTTP 401" in text and "SANDGLASS_API_KEY" in text
            assert "wrong-" not in text

    run(body())


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_sandboxes_stay_unless_they_are_to_be_cleaned_up(server, transport, http):
    def state(sandbox):
        return http.get(f"/v1/sandboxes/{sandbox}").status_code

    async def body():
        async with connected(server, transport) as tools:
            kept = await make(tools, server)
        try:
            assert state(kept) == 200 and kept in tools.said
        finally:
            http.delete(f"/v1/sandboxes/{kept}")
        async with connected(server, transport, "--cleanup") as tools:
            removed = await make(tools, server)
            assert state(removed) == 200
        assert state(removed) == 404

    run(body())


def test_a_command_is_interrupted_when_the_client_leaves(server, shared):
    async def body():
        async with connected(server, "stdio") as tools:
            await tools("sandbox_connect", sandbox_id=shared)
            command = "echo $$ > /tmp/left; exec sleep 300"
            call = asyncio.create_task(tools.session.call_tool("command_run", {"sandbox_id": shared, "command": command}))

            async def running():
                found = await tools("command_run", sandbox_id=shared, command="kill -0 $(cat /tmp/left)")
                return found["exit_code"] == 0

            await until(running)
        call.cancel()
        with contextlib.suppress(asyncio.CancelledError, mcp.MCPError):
            await call
        async with connected(server, "stdio") as tools:

            async def gone():
                found = await tools("command_run", sandbox_id=shared, command="kill -0 $(cat /tmp/left)")
                return found["exit_code"] != 0

            await until(gone)

    run(body())


def test_the_current_revision_needs_no_session(server):
    """Clients of the newest protocol discover the server and send requests that stand for themselves."""

    async def body():
        served = Served(server)
        try:
            async with mcp.Client(served.url) as client:
                assert client.protocol_version >= "2026"
                answer = await asyncio.wait_for(client.call_tool("sandbox_list", {}), PATIENCE)
                assert not answer.is_error and "sandbox_infos" in answer.structured_content
        finally:
            served.stop()

    run(body())


GREETING = {
    "jsonrpc": "2.0",
    "id": 1,
    "method": "initialize",
    "params": {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "t", "version": "1"}},
}
ACCEPTED = {"accept": "application/json, text/event-stream"}


def test_web_pages_and_strangers_are_refused(server):
    token = "a-token-of-some-length"
    served = Served(server)
    guarded = Served(server, "--allowed-origin", "https://app.example:443", SANDGLASS_MCP_TOKEN=token)
    try:
        def status(url, **headers):
            return httpx.post(url, json=GREETING, headers={**ACCEPTED, **headers}, timeout=PATIENCE).status_code

        assert status(served.url) == 200
        assert status(served.url, origin="http://evil.example") == 403
        assert status(served.url, origin="http://127.0.0.1:6274") == 403
        assert status(served.url, host="evil.example") == 403
        assert status(guarded.url) == 401
        assert status(guarded.url, authorization="Bearer a-token-of-some-lengti") == 401
        assert status(guarded.url, authorization=f"Bearer {token}") == 200
        assert status(guarded.url, authorization=f"Bearer {token}", origin="https://app.example") == 200
        assert status(guarded.url, authorization=f"Bearer {token}", origin="https://other.example") == 403
        assert httpx.post(served.url, content=b"{", headers={**ACCEPTED, "content-type": "application/json"}).status_code >= 400
    finally:
        served.stop()
        said = guarded.stop()
    assert token not in said


def test_it_does_not_listen_beyond_loopback_without_a_token(server):
    command = [PROGRAM, "mcp", "--transport", "streamable-http", "--port", "0", "--host", "0.0.0.0"]
    done = subprocess.run(command, env=environment(server), capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 1 and "SANDGLASS_MCP_TOKEN" in done.stderr
    served = Served(server, "--host", "0.0.0.0", SANDGLASS_MCP_TOKEN="a-token-of-some-length")
    served.stop()


def inspector(server, *arguments):
    """The official inspector, once, against a server that it starts itself."""
    command = [
        str(HERE / "js/node_modules/.bin/mcp-inspector"), "--cli",
        "-e", f"SANDGLASS_URL={server.url}", "-e", f"SANDGLASS_API_KEY={server.key}",
        PROGRAM, "mcp", *arguments,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=2 * PATIENCE, cwd=HERE)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return json.loads(done.stdout)


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_the_inspector(server, shared):
    version = subprocess.run(["node", "--version"], capture_output=True, text=True).stdout
    if int(re.match(r"v(\d+)", version)[1]) < 20:
        pytest.skip("the inspector needs Node.js 20")
    listed = inspector(server, "--method", "tools/list")
    assert {tool["name"] for tool in listed["tools"]} == READING | DESTROYING | OTHERS
    answer = inspector(
        server, "--method", "tools/call", "--tool-name", "command_run",
        "--tool-arg", f"sandbox_id={shared}", "--tool-arg", "command=echo inspected",
    )
    assert answer["structuredContent"]["stdout"]["text"] == "inspected\n"
