"""The walk of the first-generation Python SDK; runs in its own environment, says `walk complete` at the end."""

import os
import time
from datetime import timedelta

from opensandbox import SandboxSync
from opensandbox.config import ConnectionConfigSync
from opensandbox.models.execd import RunCommandOpts
from opensandbox.models.filesystem import (
    ContentReplaceEntry,
    DirectoryListEntry,
    MoveEntry,
    SearchEntry,
    SetPermissionEntry,
    WriteEntry,
)


def texts(messages):
    return [message.text for message in messages]


def walk(box):
    done = box.commands.run("printf 'a\\n\\nb\\n'; echo err >&2; exit 7")
    assert texts(done.logs.stdout) == ["a", "\n", "b"], done
    assert texts(done.logs.stderr) == ["err"] and done.exit_code == 7, done
    options = RunCommandOpts(working_directory="/tmp", envs={"E2E": "x"})
    assert texts(box.commands.run("echo $PWD $E2E", opts=options).logs.stdout) == ["/tmp x"]

    started = box.commands.run("echo bg; sleep 0.3", opts=RunCommandOpts(background=True))
    deadline = time.monotonic() + 10
    while box.commands.get_command_status(started.id).running and time.monotonic() < deadline:
        time.sleep(0.05)
    assert box.commands.get_command_status(started.id).exit_code == 0
    assert box.commands.get_background_command_logs(started.id).content == "bg\n"

    long = box.commands.run("sleep 60", opts=RunCommandOpts(background=True))
    box.commands.interrupt(long.id)
    assert not box.commands.get_command_status(long.id).running


    files = box.files
    files.create_directories([WriteEntry(path="/tmp/old", mode=755)])
    files.write_files([WriteEntry(path="/tmp/old/a", data="l1\nl2\nl3\n", mode=644), WriteEntry(path="/tmp/old/b", data=b"\0\1")])
    assert files.read_file("/tmp/old/a", range_header="bytes=0-1") == "l1"
    assert files.read_bytes("/tmp/old/b") == b"\0\1"
    assert files.get_file_info(["/tmp/old/a"])["/tmp/old/a"].mode == 644
    assert len(files.search(SearchEntry(path="/tmp/old", pattern="*"))) == 2
    assert len(files.list_directory(DirectoryListEntry(path="/tmp/old"))) == 2
    files.replace_contents([ContentReplaceEntry(path="/tmp/old/a", old_content="l2", new_content="L2")])
    files.move_files([MoveEntry(src="/tmp/old/a", dest="/tmp/old/c")])
    files.set_permissions([SetPermissionEntry(path="/tmp/old/c", mode=600)])
    assert files.read_file("/tmp/old/c") == "l1\nL2\nl3\n"
    files.delete_files(["/tmp/old/b"])
    files.delete_directories(["/tmp/old"])


def main():
    config = ConnectionConfigSync(
        domain=os.environ["OPEN_SANDBOX_DOMAIN"],
        api_key=os.environ["OPEN_SANDBOX_API_KEY"],
        use_server_proxy=bool(os.environ.get("E2E_THROUGH_PROXY")),
    )
    box = SandboxSync.create(
        os.environ["E2E_IMAGE"],
        timeout=timedelta(minutes=5),
        resource={"cpu": "500m", "memory": "256Mi"},
        metadata={"walk": "old"},
        connection_config=config,
    )
    try:
        info = box.get_info()
        assert info.status.state == "Running" and info.metadata == {"walk": "old"}
        walk(box)
        renewed = box.renew(timedelta(minutes=9))
        assert box.get_info().expires_at == renewed.expires_at
        assert box.patch_metadata({"walk": None, "b": "1"}).metadata == {"b": "1"}
        box.pause()
        assert box.get_info().status.state == "Paused"
        again = SandboxSync.resume(box.id, connection_config=config)
        assert texts(again.commands.run("echo resumed").logs.stdout) == ["resumed"]
        again.close()
        assert box.get_endpoint(8080).endpoint
        assert box.get_metrics().cpu_count > 0
    finally:
        box.kill()
        box.close()
    print("walk complete")


main()
