"""The asynchronous SDK: the same walk in one event loop, and several sandboxes at once."""

import asyncio
from datetime import timedelta

import pytest
from opensandbox import Sandbox, SandboxManager
from opensandbox.exceptions import SandboxApiException
from opensandbox.models.execd import RunCommandOpts
from opensandbox.models.filesystem import SearchEntry, WriteEntry
from opensandbox.models.sandboxes import SandboxFilter

from conftest import texts


async def made(server, config, **keys):
    keys.setdefault("timeout", timedelta(minutes=5))
    keys.setdefault("resource", {"cpu": "500m", "memory": "256Mi"})
    return await Sandbox.create(server.image, connection_config=config, **keys)


@pytest.mark.parametrize("through_proxy", [False, True])
def test_a_whole_life(server, async_config, through_proxy):
    async def walk():
        box = await made(server, async_config(use_server_proxy=through_proxy), metadata={"walk": "async"})
        try:
            done = await box.commands.run("echo out; echo err >&2; exit 3")
            assert (texts(done.logs.stdout), texts(done.logs.stderr), done.exit_code) == (["out"], ["err"], 3)
            await box.files.write_files([WriteEntry(path="/tmp/walk/a", data="1"), WriteEntry(path="/tmp/walk/b", data=b"2")])
            assert await box.files.read_file("/tmp/walk/a") == "1"
            assert [c async for c in await box.files.read_bytes_stream("/tmp/walk/b")] == [b"2"]
            found = await box.files.search(SearchEntry(path="/tmp/walk", pattern="*"))
            assert sorted(entry.path for entry in found) == ["/tmp/walk/a", "/tmp/walk/b"]
            started = await box.commands.run("sleep 0.3; echo bg", opts=RunCommandOpts(background=True))
            for _ in range(100):
                if not (await box.commands.get_command_status(started.id)).running:
                    break
                await asyncio.sleep(0.05)
            assert (await box.commands.get_background_command_logs(started.id)).content == "bg\n"
            renewed = await box.renew(timedelta(minutes=9))
            assert (await box.get_info()).expires_at == renewed.expires_at
            assert (await box.patch_metadata({"more": "1"})).metadata == {"walk": "async", "more": "1"}
            await box.pause()
            again = await Sandbox.resume(box.id, connection_config=async_config(use_server_proxy=through_proxy))
            assert texts((await again.commands.run("cat /tmp/walk/a")).logs.stdout) == ["1"]
            await again.close()
        finally:
            await box.kill()
            await box.close()
        manager = await SandboxManager.create(connection_config=async_config())
        with pytest.raises(SandboxApiException) as missing:
            await manager.get_sandbox_info(box.id)
        assert missing.value.status_code == 404
        await manager.close()

    asyncio.run(walk())


def test_many_at_once(server, async_config):
    async def one(number):
        box = await made(server, async_config(), metadata={"crowd": "yes"})
        try:
            return texts((await box.commands.run(f"echo {number}")).logs.stdout)
        finally:
            await box.kill()
            await box.close()

    async def crowd():
        assert await asyncio.gather(*[one(n) for n in range(8)]) == [[str(n)] for n in range(8)]
        manager = await SandboxManager.create(connection_config=async_config())
        left = await manager.list_sandbox_infos(SandboxFilter(metadata={"crowd": "yes"}))
        assert left.sandbox_infos == []
        await manager.close()

    asyncio.run(crowd())


def test_a_cancelled_command_leaves_the_sandbox_usable(server, async_config):
    async def walk():
        box = await made(server, async_config())
        try:
            with pytest.raises((TimeoutError, asyncio.TimeoutError)):
                await asyncio.wait_for(box.commands.run("sleep 30"), 0.5)
            assert texts((await box.commands.run("echo alive")).logs.stdout) == ["alive"]
        finally:
            await box.kill()
            await box.close()

    asyncio.run(walk())
