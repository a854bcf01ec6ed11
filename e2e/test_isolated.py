"""Isolated sessions through the SDK, synchronous and asynchronous, in a sandbox that asked for them."""

import asyncio
import os
import re
import shutil
import subprocess
from datetime import timedelta
from pathlib import Path

import pytest
from opensandbox import Sandbox, SandboxSync
from opensandbox.exceptions import SandboxApiException
from opensandbox.models.filesystem import (
    ContentReplaceEntry,
    DirectoryListEntry,
    MoveEntry,
    SearchEntry,
    SetPermissionEntry,
    WriteEntry,
)
from opensandbox.models.isolated import (
    BindMount,
    CreateIsolatedSessionRequest,
    IsolatedRunOpts,
    IsolatedWorkspaceSpec,
)

from conftest import delete, texts
from stack import wait_for

EXTENSION = {"bootstrap.execd.isolation": "enable"}


@pytest.fixture(scope="module")
def able(server, config):
    """A sandbox with the extension; its sessions come and go."""
    sandbox = SandboxSync.create(
        server.image,
        timeout=timedelta(minutes=30),
        resource={"cpu": "1", "memory": "512Mi"},
        extensions=EXTENSION,
        connection_config=config(),
    )
    yield sandbox
    delete(server, sandbox.id)
    sandbox.close()


@pytest.fixture
def session(able):
    """Opens sessions and deletes those that a test leaves."""
    made = []

    def make(path="/workspace", mode="rw", **keys):
        workspace = IsolatedWorkspaceSpec(path=path, mode=mode)
        made.append(able.isolation.create(CreateIsolatedSessionRequest(workspace=workspace, **keys)))
        return made[-1]

    yield make
    left = {summary.session_id for summary in able.isolation.list()}
    for handle in made:
        if handle.session_id in left:
            handle.delete()


def out(execution):
    return texts(execution.logs.stdout)


def test_what_there_is_and_what_there_is_not(able):
    found = able.isolation.capabilities()
    assert found.available, found.message
    assert found.isolator == "bwrap" and "sandglass" in found.version
    assert found.setpriv_available and not found.commit_supported and not found.diff_supported
    for layer in (found.hardening.cap_drop, found.hardening.seccomp, found.hardening.landlock, found.hardening.ebpf):
        assert layer.state == "disabled" and layer.message


def test_without_the_extension_nothing_falls_back(box):
    assert not box.isolation.capabilities().available
    with pytest.raises(SandboxApiException) as refused:
        box.isolation.create(CreateIsolatedSessionRequest(workspace=IsolatedWorkspaceSpec(path="/workspace")))
    assert refused.value.status_code == 503


def test_the_shell_of_a_session_keeps_state_and_survives_exit(session):
    shell = session()
    assert int(out(shell.run("echo $$"))[0]) <= 2
    assert shell.get().status == "active"
    shell.run("export KEPT=yes; f() { echo called; }; cd /tmp")
    assert out(shell.run("echo $KEPT; f; pwd; hostname")) == ["yes", "called", "/tmp", "sandbox"]
    once = shell.run("echo $ONCE", opts=IsolatedRunOpts(envs={"ONCE": "a 'b'"}))
    assert out(once) == ["a 'b'"]
    assert out(shell.run("echo [$ONCE]")) == ["[]"]
    failed = shell.run("KEPT=no; exit 9")
    assert failed.exit_code == 9 and failed.error.name == "ExitError"
    assert out(shell.run("cat; echo $KEPT")) == ["yes"]


def test_a_run_ends_at_its_time_and_the_session_goes_on(session):
    shell = session()
    late = shell.run("while :; do sleep 0.2; done", opts=IsolatedRunOpts(timeout_seconds=1))
    assert late.error.name == "RuntimeError" and late.error.value == "context deadline exceeded"
    assert out(shell.run("echo on")) == ["on"]


def test_modes_of_a_workspace(able, session):
    able.commands.run("mkdir -p /workspace/modes && echo below > /workspace/modes/f")
    at = "/workspace/modes"
    session(at, "rw").run("echo rw > made; touch /tmp/private")
    assert out(able.commands.run("cat /workspace/modes/made; ls /tmp/private 2>&1 | grep -c No")) == ["rw", "1"]
    assert session(at, "ro").run("echo x > f").exit_code != 0
    assert out(session(at, "overlay").run("echo above > f; rm made; mkdir d; cat f; ls")) == ["above", "d", "f"]
    assert out(able.commands.run("cat /workspace/modes/f; ls /workspace/modes")) == ["below", "f", "made"]


def test_binds_come_from_what_is_allowed(able, session):
    able.commands.run("mkdir -p /data/set /workspace/binds && echo set > /data/set/f")
    binds = [
        BindMount(source="/data/set", dest="/workspace/binds/ro", readonly=True),
        BindMount(source="/data/set", dest="/mnt/rw"),
    ]
    shell = session("/workspace/binds", binds=binds)
    assert out(shell.run("cat ro/f; echo x 2>/dev/null > ro/g || echo denied; echo new > /mnt/rw/h")) == ["set", "denied"]
    assert out(able.commands.run("cat /data/set/h")) == ["new"]
    for source in ("/etc", "/data/absent"):
        with pytest.raises(SandboxApiException) as refused:
            session(binds=[BindMount(source=source)])
        assert refused.value.status_code == 400


def test_a_user_of_its_own_has_no_rights(session):
    shell = session("/workspace/own", uid=1234, gid=1235, share_net=False)
    seen = out(shell.run("id -u; id -g; grep CapEff /proc/self/status | cut -f2; touch f; stat -c %u f; tail -n +3 /proc/net/dev | wc -l"))
    assert seen == ["1234", "1235", "0000000000000000", "1234", "1"]


def test_user_code_gets_nowhere(able, session):
    tries = ["mount -t tmpfs t /mnt", "unshare -m true", "unshare -U true", "touch /usr/x", "echo x > /proc/sys/kernel/core_pattern", "kill -9 1; false"]
    shell = session()
    for attempt in tries:
        assert shell.run(f"({attempt}) 2>/dev/null").exit_code != 0, attempt


def test_commands_of_the_sandbox_do_not_get_what_the_agent_has(able, server):
    """On Docker the container's own rights are the operator's and the engine's business."""
    if server.runtime == "embedded":
        assert out(able.commands.run("grep -E 'Cap(Eff|Bnd)' /proc/self/status | cut -f2")) == ["00000000a80425fb"] * 2
        assert able.commands.run("unshare -m true").exit_code != 0
        assert able.commands.run("unshare -U true").exit_code != 0


def test_background_runs(session):
    shell = session(mode="ro")
    run = shell.run_background("echo begun; while [ ! -e /tmp/go ]; do sleep 0.05; done; echo over >&2; exit 4")
    wait_for(lambda: shell.run_logs(run.run_id).text == "begun\n", 20)
    assert shell.run_status(run.run_id).running
    shell.run("touch /tmp/go")
    wait_for(lambda: not shell.run_status(run.run_id).running, 20)
    done = shell.run_status(run.run_id)
    assert done.exit_code == 4 and done.finished_at and done.error is None
    logs = shell.run_logs(run.run_id, cursor=6)
    assert (logs.text, logs.cursor) == ("over\n", 11)


def test_the_whole_file_api_inside_a_session(able, session):
    shell = session("/workspace/files", "overlay")
    files = shell.files
    files.write_files([WriteEntry(path="/workspace/files/a/f", data="one two one", mode=644)])
    assert files.read_file("/workspace/files/a/f") == "one two one"
    assert files.get_file_info(["/workspace/files/a/f"])["/workspace/files/a/f"].mode == 644
    files.set_permissions([SetPermissionEntry(path="/workspace/files/a/f", mode=755)])
    files.replace_contents([ContentReplaceEntry(path="/workspace/files/a/f", old_content="one", new_content="1")])
    files.move_files([MoveEntry(src="/workspace/files/a/f", dest="/workspace/files/g.txt")])
    assert out(shell.run("cat g.txt; echo; stat -c %a g.txt")) == ["1 two 1", "755"]
    found = files.search(SearchEntry(path="/workspace/files", pattern="*.txt"))
    assert [entry.path for entry in found] == ["/workspace/files/g.txt"]
    files.create_directories([WriteEntry(path="/workspace/files/d", mode=755)])
    listed = files.list_directory(DirectoryListEntry(path="/workspace/files", depth=1))
    assert [entry.path for entry in listed] == [f"/workspace/files/{name}" for name in ("a", "d", "g.txt")]
    files.delete_directories(["/workspace/files/d"])
    files.delete_files(["/workspace/files/g.txt"])
    with pytest.raises(SandboxApiException):
        files.get_file_info(["/workspace/files/g.txt"])
    with pytest.raises(SandboxApiException):
        files.read_file("/etc/passwd")
    assert out(able.commands.run("ls /workspace/files | wc -l")) == ["0"]
    big = os.urandom(3 << 20)
    files.write_file("/workspace/files/big", big)
    assert files.read_bytes("/workspace/files/big") == big


def test_attaching_listing_and_deleting(able, session):
    shell = session("/workspace/attach", idle_timeout_seconds=600)
    again = able.isolation.attach(shell.session_id)
    assert (again.info.workspace.path, again.info.workspace.mode) == ("/workspace/attach", "rw")
    assert again.info.idle_timeout_seconds == 600 and shell.get().idle_remaining_seconds <= 600
    assert shell.session_id in {summary.session_id for summary in able.isolation.list()}
    shell.delete()
    assert shell.session_id not in {summary.session_id for summary in able.isolation.list()}
    for gone in (shell.delete, shell.get):
        with pytest.raises(SandboxApiException) as missing:
            gone()
        assert missing.value.status_code == 404
    assert out(able.isolation.run_once("echo once", workspace="/workspace")) == ["once"]


def test_the_asynchronous_client(able, async_config):
    async def walk():
        sandbox = await Sandbox.connect(able.id, connection_config=async_config())
        try:
            workspace = IsolatedWorkspaceSpec(path="/workspace/async", mode="rw")
            async with sandbox.isolation.session(CreateIsolatedSessionRequest(workspace=workspace)) as shell:
                slow, quick = await asyncio.gather(shell.run("sleep 0.5; echo slow"), shell.run("echo quick"))
                assert (texts(slow.logs.stdout), texts(quick.logs.stdout)) == (["slow"], ["quick"])
                await shell.files.write_file("/workspace/async/f", "x", mode=600)
                assert await shell.files.read_file("/workspace/async/f") == "x"
                busy = asyncio.create_task(shell.run("touch /workspace/async/begun; sleep 600"))
                while (await sandbox.commands.run("test -e /workspace/async/begun")).exit_code:
                    await asyncio.sleep(0.05)
            assert (await busy).error.value == "session terminated"
        finally:
            await sandbox.close()

    asyncio.run(walk())


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
@pytest.mark.parametrize("through_proxy", ["", "1"])
def test_the_javascript_client(server, through_proxy):
    version = subprocess.run(["node", "--version"], capture_output=True, text=True).stdout
    if int(re.match(r"v(\d+)", version)[1]) < 20:
        pytest.skip("the SDK needs Node.js 20")
    settings = {
        "OPEN_SANDBOX_DOMAIN": server.domain,
        "OPEN_SANDBOX_API_KEY": server.key,
        "E2E_IMAGE": server.image,
        "E2E_THROUGH_PROXY": through_proxy,
    }
    walk = subprocess.run(
        ["node", "js/isolated.mjs"],
        env={**os.environ, **settings},
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert walk.returncode == 0 and "walk complete" in walk.stdout, walk.stdout + walk.stderr
