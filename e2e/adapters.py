"""Walks of packages by others that use this API; each runs in the environment that holds it and says `walk complete`.

    adapters.py hermes | deepagents | langchain
"""

import os
import sys
from datetime import timedelta

DOMAIN, KEY, IMAGE = (os.environ[name] for name in ("OPEN_SANDBOX_DOMAIN", "OPEN_SANDBOX_API_KEY", "E2E_IMAGE"))


def hermes():
    """Session of the Hermes agent: create, commands with exit codes, renew, end; and what it says of a wrong key."""
    from hermes_opensandbox import OpenSandboxSession, SandboxConfig
    from hermes_opensandbox.session import SandboxAuthError

    settings = {"image": IMAGE, "domain": DOMAIN, "timeout": 300, "cpu": 0.5, "memory": 256}
    with OpenSandboxSession(SandboxConfig(api_key=KEY, **settings)) as session:
        session.create()
        assert session.is_alive() and session.sandbox_id
        output, code = session.execute("echo from hermes; exit 3")
        assert "from hermes" in output and code == 3, (output, code)
        session.execute("echo kept > /tmp/kept")
        assert session.execute("cat /tmp/kept") == ("kept", 0) or "kept" in session.execute("cat /tmp/kept")[0]
        session.renew()
        session.kill()
    try:
        OpenSandboxSession(SandboxConfig(api_key="wrong", **settings)).create()
        raise AssertionError("a wrong key was accepted")
    except SandboxAuthError:
        pass


def connection():
    from opensandbox.config.connection_sync import ConnectionConfigSync

    return ConnectionConfigSync(domain=DOMAIN, api_key=KEY)


def backend_walk(backend, keeps_lines=True):
    """What Deep Agents does with a sandbox: commands, uploads and downloads, and its file tools, which are commands.

    One of the adapters glues the lines of an output together, whatever the server; its `ls` of two files is empty then.
    """
    done = backend.execute("echo out; echo err >&2; exit 4")
    assert "out" in done.output and done.exit_code == 4, done
    sent = backend.upload_files([("/tmp/w/a.txt", b"one\ntwo\n"), ("/tmp/w/b.bin", bytes(range(256)))])
    assert all(answer.error is None for answer in sent), sent
    got = backend.download_files(["/tmp/w/b.bin", "/tmp/w/missing"])
    assert got[0].content == bytes(range(256)) and got[1].error, got
    assert "two" in str(backend.read("/tmp/w/a.txt"))
    assert not getattr(backend.write("/tmp/w/c.txt", "three\n"), "error", None)
    assert not getattr(backend.edit("/tmp/w/c.txt", "three", "four"), "error", None)
    assert "four" in backend.execute("cat /tmp/w/c.txt").output
    if not keeps_lines:
        return
    listing = str(backend.ls("/tmp/w") if hasattr(backend, "ls") else backend.ls_info("/tmp/w"))
    assert "a.txt" in listing and "c.txt" in listing, listing
    found = str(backend.grep("two", "/tmp/w") if hasattr(backend, "grep") else backend.grep_raw("two", "/tmp/w"))
    assert "a.txt" in found, found


def deepagents():
    """Backend of Deep Agents by deepagents-opensandbox."""
    from deepagents_opensandbox import OpensandboxBackend
    from opensandbox.sync.sandbox import SandboxSync

    sandbox = SandboxSync.create(
        IMAGE, timeout=timedelta(minutes=5), resource={"cpu": "1", "memory": "512Mi"}, connection_config=connection()
    )
    backend = OpensandboxBackend(sandbox=sandbox)
    try:
        assert backend.id == sandbox.id
        backend_walk(backend, keeps_lines=False)
    finally:
        backend.kill()
        backend.close()


def langchain():
    """One sandbox for each conversation by langchain-opensandbox: found again by its metadata, sync and async, through the server."""
    import asyncio
    from types import SimpleNamespace

    from langchain_opensandbox.factory import SandboxFactory, get_backend
    from opensandbox.sync.manager import SandboxManagerSync

    os.environ.update(OPENSANDBOX_URL=DOMAIN, OPENSANDBOX_API_KEY=KEY, OPENSANDBOX_IMAGE=IMAGE)
    threads = [SimpleNamespace(config={"configurable": {"thread_id": f"conversation-{n}"}}) for n in range(2)]
    made = set()
    try:
        for thread in threads:
            backend = get_backend(thread)
            backend_walk(backend)
            made.add(backend.id)
            again = SandboxFactory(thread).get_sandbox()
            assert again.id == backend.id
            again.close()
            backend.close()
        assert len(made) == 2

        async def walk():
            backend = get_backend(threads[0])
            done = await backend.aexecute("cat /tmp/w/c.txt")
            assert "four" in done.output and done.exit_code == 0, done
            await backend.aclose()

        asyncio.run(walk())
    finally:
        manager = SandboxManagerSync.create(connection_config=connection())
        for sandbox in made:
            manager.kill_sandbox(sandbox)
        manager.close()


{"hermes": hermes, "deepagents": deepagents, "langchain": langchain}[sys.argv[1]]()
print("walk complete")
