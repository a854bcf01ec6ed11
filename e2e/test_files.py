"""Files and directories through the synchronous SDK."""

import asyncio
import io
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta, timezone

import pytest
from opensandbox import Sandbox
from opensandbox.exceptions import SandboxApiException, SandboxException
from opensandbox.models.filesystem import (
    ContentReplaceEntry,
    DirectoryListEntry,
    MoveEntry,
    SearchEntry,
    SetPermissionEntry,
    WriteEntry,
)

from stack import wait_for


@pytest.fixture
def folder(box, request):
    path = f"/tmp/e2e/{request.node.name[:60]}"
    box.files.create_directories([WriteEntry(path=path, mode=755)])
    yield path
    box.files.delete_directories([path])


def test_text_bytes_and_streams_arrive_unchanged(box, folder):
    blob = bytes(range(256)) * 4096
    box.files.write_files(
        [
            WriteEntry(path=f"{folder}/text", data="äöü\nline\n", mode=644),
            WriteEntry(path=f"{folder}/deep/er/blob", data=blob, mode=600),
            WriteEntry(path=f"{folder}/stream", data=io.BytesIO(blob), mode=755),
        ]
    )
    assert box.files.read_file(f"{folder}/text") == "äöü\nline\n"
    assert box.files.read_bytes(f"{folder}/deep/er/blob") == blob
    assert b"".join(box.files.read_bytes_stream(f"{folder}/stream")) == blob


def test_names_that_need_escaping(box, folder):
    for name in ("with space", "plus+and&amp", "per%20cent", "quo'te", "ünï", "a?b#c"):
        box.files.write_file(f"{folder}/{name}", name)
        assert box.files.read_file(f"{folder}/{name}") == name


def test_info_of_files(box, folder):
    before = datetime.now(timezone.utc)
    box.files.write_file(f"{folder}/a", "12345", mode=640, owner="nobody", group="nogroup")
    info = box.files.get_file_info([f"{folder}/a", folder])
    assert set(info) == {f"{folder}/a", folder}
    assert (info[f"{folder}/a"].size, info[f"{folder}/a"].mode) == (5, 640)
    assert (info[f"{folder}/a"].owner, info[f"{folder}/a"].group) == ("nobody", "nogroup")
    assert info[f"{folder}/a"].entry_type == "file" and info[folder].entry_type == "directory"
    assert abs((info[f"{folder}/a"].modified_at - before).total_seconds()) < 60


def test_a_missing_file_is_404(box, folder):
    for attempt in (
        lambda: box.files.read_file(f"{folder}/none"),
        lambda: box.files.get_file_info([f"{folder}/none"]),
        lambda: box.files.replace_contents([ContentReplaceEntry(path=f"{folder}/none", old_content="a", new_content="b")]),
    ):
        with pytest.raises(SandboxApiException) as missing:
            attempt()
        assert missing.value.status_code == 404


def test_ranges_and_lines(box, folder):
    box.files.write_file(f"{folder}/a", "line1\nline2\nline3\nline4\n")
    assert box.files.read_file(f"{folder}/a", range_header="bytes=0-4") == "line1"
    assert box.files.read_bytes(f"{folder}/a", range_header="bytes=-6") == b"line4\n"
    assert box.files.read_file(f"{folder}/a", offset=2, limit=2) == "line2\nline3"
    assert box.files.read_file(f"{folder}/a", offset=4) == "line4"
    assert box.files.read_file(f"{folder}/a", limit=2) == "line1\nline2"


def test_search_by_pattern(box, folder):
    for name in ("a.txt", "b.txt", "sub/c.txt", "sub/d.log"):
        box.files.write_file(f"{folder}/{name}", name)
    found = box.files.search(SearchEntry(path=folder, pattern="*.txt"))
    assert sorted(entry.path for entry in found) == [f"{folder}/{name}" for name in ("a.txt", "b.txt", "sub/c.txt")]
    everything = box.files.search(SearchEntry(path=folder, pattern="*"))
    assert len(everything) == 4
    assert [e.path for e in box.files.search(SearchEntry(path=folder, pattern="{d,x}.log"))] == [f"{folder}/sub/d.log"]


def test_listing_with_depth(box, folder):
    for name in ("b", "a/one", "a/deep/two"):
        box.files.write_file(f"{folder}/{name}", "")
    names = lambda depth: [  # noqa: E731
        entry.path.removeprefix(folder)
        for entry in box.files.list_directory(DirectoryListEntry(path=folder, depth=depth))
    ]
    assert names(1) == ["/a", "/b"]
    assert names(2) == ["/a", "/a/deep", "/a/one", "/b"]
    assert names(3) == ["/a", "/a/deep", "/a/deep/two", "/a/one", "/b"]


def test_move_needs_a_free_destination(box, folder):
    box.files.write_file(f"{folder}/a", "1")
    box.files.write_file(f"{folder}/b", "2")
    box.files.move_files([MoveEntry(src=f"{folder}/a", dest=f"{folder}/new/place")])
    assert box.files.read_file(f"{folder}/new/place") == "1"
    with pytest.raises(SandboxException):
        box.files.read_file(f"{folder}/a")
    with pytest.raises(SandboxApiException):
        box.files.move_files([MoveEntry(src=f"{folder}/b", dest=f"{folder}/new/place")])


def test_permissions_and_owners(box, folder):
    box.files.write_file(f"{folder}/a", "1", mode=600)
    box.files.set_permissions([SetPermissionEntry(path=f"{folder}/a", mode=751, owner="nobody", group="nogroup")])
    assert box.commands.run(f"stat -c '%a %U %G' '{folder}/a'").text == "751 nobody nogroup"


def test_replace_counts(box, folder):
    box.files.write_files([WriteEntry(path=f"{folder}/a", data="x x x"), WriteEntry(path=f"{folder}/b", data="y")])
    counted = box.files.replace_contents_detailed(
        [
            ContentReplaceEntry(path=f"{folder}/a", old_content="x", new_content="zz"),
            ContentReplaceEntry(path=f"{folder}/b", old_content="none", new_content="zz"),
        ]
    )
    assert {entry.path: entry.replaced_count for entry in counted} == {f"{folder}/a": 3, f"{folder}/b": 0}
    box.files.replace_contents([ContentReplaceEntry(path=f"{folder}/b", old_content="y", new_content="w")])
    assert (box.files.read_file(f"{folder}/a"), box.files.read_file(f"{folder}/b")) == ("zz zz zz", "w")


def test_directories_with_modes_and_recursive_removal(box, folder):
    box.files.create_directories(
        [WriteEntry(path=f"{folder}/d1", mode=755), WriteEntry(path=f"{folder}/d2/inner", mode=700)]
    )
    done = box.commands.run(f"stat -c '%a' '{folder}/d1' '{folder}/d2/inner'")
    assert done.text == "755\n700"
    box.files.write_file(f"{folder}/d2/inner/file", "x")
    box.files.delete_directories([f"{folder}/d1", f"{folder}/d2"])
    assert box.files.list_directory(DirectoryListEntry(path=folder, depth=1)) == []


def test_deleting_a_missing_file_is_no_error_and_a_directory_is(box, folder):
    box.files.write_file(f"{folder}/a", "x")
    box.files.delete_files([f"{folder}/a", f"{folder}/none"])
    with pytest.raises(SandboxApiException):
        box.files.delete_files([folder])


def test_overwriting_keeps_the_content_whole(box, folder):
    box.files.write_file(f"{folder}/a", "long content " * 1000)
    box.files.write_file(f"{folder}/a", "short")
    assert box.files.read_file(f"{folder}/a") == "short"


# ---------------------------------------------------------------- as somebody else


@pytest.fixture
def shared(box, folder):
    """A folder that everybody may write to."""
    box.commands.run(f"chmod 777 '{folder}'")
    return folder


def refused(attempt, word="permission"):
    with pytest.raises(SandboxApiException) as failure:
        attempt()
    assert failure.value.status_code >= 400 and word in str(failure.value).lower()


def test_an_identity_owns_what_it_makes(box, shared):
    other = box.files_with_identity(1234, 2345)
    blob = bytes(range(256)) * 8192
    other.write_files(
        [WriteEntry(path=f"{shared}/new/a", data="l1\nl2\n", mode=640), WriteEntry(path=f"{shared}/b", data=io.BytesIO(blob), mode=600)]
    )
    assert other.read_bytes(f"{shared}/b") == blob and b"".join(other.read_bytes_stream(f"{shared}/b")) == blob
    assert other.read_file(f"{shared}/new/a", offset=2) == "l2"
    other.create_directories([WriteEntry(path=f"{shared}/dir", mode=700)])
    other.replace_contents([ContentReplaceEntry(path=f"{shared}/new/a", old_content="l1", new_content="L1")])
    other.move_files([MoveEntry(src=f"{shared}/new/a", dest=f"{shared}/dir/a")])
    other.set_permissions([SetPermissionEntry(path=f"{shared}/dir/a", mode=600)])
    info = other.get_file_info([f"{shared}/dir/a"])[f"{shared}/dir/a"]
    assert (info.owner, info.group, info.mode) == ("1234", "2345", 600)
    assert [e.path for e in other.search(SearchEntry(path=f"{shared}/dir", pattern="*"))] == [f"{shared}/dir/a"]
    assert len(other.list_directory(DirectoryListEntry(path=shared, depth=1))) == 3
    owners = box.commands.run(f"stat -c '%u:%g' '{shared}'/b '{shared}'/new '{shared}'/dir '{shared}'/dir/a")
    assert owners.text.split() == ["1234:2345"] * 4
    other.delete_files([f"{shared}/b"])
    other.delete_directories([f"{shared}/dir", f"{shared}/new"])
    assert box.files.list_directory(DirectoryListEntry(path=shared, depth=1)) == []


def test_an_identity_may_do_what_the_kernel_lets_it(box, shared):
    box.files.write_file(f"{shared}/secret", "root's", mode=600)
    box.files.create_directories([WriteEntry(path=f"{shared}/closed", mode=700)])
    box.commands.run(f"ln -s '{shared}/secret' '{shared}/link'; mkfifo -m 666 '{shared}/fifo'")
    other = box.files_with_identity(1234, 2345)
    refused(lambda: other.read_file(f"{shared}/secret"))
    refused(lambda: other.read_file(f"{shared}/link"))
    refused(lambda: other.write_file(f"{shared}/link", "mine"))
    refused(lambda: other.write_file(f"{shared}/closed/a", "mine"))
    refused(lambda: other.write_file(f"{shared}/given", "mine", owner="root", group="root"))
    refused(lambda: other.set_permissions([SetPermissionEntry(path=f"{shared}/secret", mode=666)]))
    refused(lambda: other.list_directory(DirectoryListEntry(path=f"{shared}/closed", depth=1)))
    refused(lambda: other.read_file(f"{shared}/fifo"), "not a regular file")
    assert box.files.read_file(f"{shared}/secret") == "root's"
    assert box.commands.run(f"ls '{shared}'").text.split() == ["closed", "fifo", "link", "secret"]


def test_identities_at_once_do_not_mix(box, shared):
    def write(number):
        uid = 3000 + number
        box.files_with_identity(uid, uid).write_file(f"{shared}/{uid}", "x" * 100_000, mode=600)
        return f"{uid}:{uid}"

    with ThreadPoolExecutor(8) as pool:
        wanted = list(pool.map(write, range(24)))
    assert box.commands.run(f"stat -c '%u:%g' '{shared}'/3*").text.split() == wanted
    assert box.commands.run("id -u; cat /proc/1/status | grep Uid").text.split() == ["0", "Uid:", "0", "0", "0", "0"]


def test_an_identity_needs_no_account_but_a_number_of_the_sandbox(box, server):
    assert box.files_with_identity(61234, 62345).get_file_info(["/"])["/"].entry_type == "directory"
    last = box.files_with_identity(4294967294, 4294967294)
    if server.runtime == "docker":
        assert last.get_file_info(["/"])["/"].entry_type == "directory"
    else:  # where a sandbox has a user namespace, its numbers end at 65535
        refused(lambda: last.get_file_info(["/"]), "filesystem_identity_unavailable")


@pytest.mark.parametrize("through_proxy", [False, True])
def test_an_identity_through_the_asynchronous_sdk(server, async_config, through_proxy):
    async def walk():
        config = async_config(use_server_proxy=through_proxy)
        box = await Sandbox.create(server.image, connection_config=config, timeout=timedelta(minutes=5))
        try:
            await box.commands.run("mkdir -m 777 /tmp/async; echo secret > /tmp/async/secret; chmod 600 /tmp/async/secret")
            other = box.files_with_identity(1234, 2345)
            await other.write_files([WriteEntry(path=f"/tmp/async/{n}", data=str(n), mode=644) for n in range(20)])
            assert await other.read_file("/tmp/async/7") == "7"
            assert [c async for c in await other.read_bytes_stream("/tmp/async/11")] == [b"11"]
            with pytest.raises(SandboxApiException) as failure:
                await other.read_file("/tmp/async/secret")
            assert "permission" in str(failure.value)
            info = await other.get_file_info(["/tmp/async/7"])
            assert (info["/tmp/async/7"].owner, info["/tmp/async/7"].group) == ("1234", "2345")
        finally:
            await box.kill()
            await box.close()

    asyncio.run(walk())


# ---------------------------------------------------------------- large, many, in the way


def test_many_files_in_one_request(box, folder):
    box.files.write_files([WriteEntry(path=f"{folder}/{n % 50}/{n}", data=f"file {n}", mode=644) for n in range(1000)])
    assert box.commands.run(f"find '{folder}' -type f | wc -l").text.strip() == "1000"
    assert box.files.read_file(f"{folder}/49/999") == "file 999"


def test_a_large_file_goes_and_comes_back(box, folder):
    class Large(io.RawIOBase):
        left = 200 << 20

        def readable(self):
            return True

        def readinto(self, buffer):
            count = min(self.left, len(buffer))
            buffer[:count] = b"\x5a" * count
            self.left -= count
            return count

    box.files.write_files([WriteEntry(path=f"{folder}/large", data=Large(), mode=644)])
    assert sum(len(piece) for piece in box.files.read_bytes_stream(f"{folder}/large")) == 200 << 20
    assert box.files.read_bytes(f"{folder}/large", range_header="bytes=-3") == b"ZZZ"
    assert box.commands.run(f"ls -A '{folder}'").text.split() == ["large"]


def test_a_program_that_runs_and_one_with_two_names_can_be_written(box, folder):
    box.commands.run(f"cp $(command -v sleep) '{folder}/program'; '{folder}/program' 60 >/dev/null 2>&1 & sleep 0.2")
    box.files.write_file(f"{folder}/program", "#!/bin/sh\necho new\n", mode=755)
    assert box.commands.run(f"'{folder}/program'").text.strip() == "new"
    box.commands.run(f"echo one > '{folder}/first'; ln '{folder}/first' '{folder}/second'")
    box.files.write_file(f"{folder}/first", "two", mode=644)
    assert box.files.read_file(f"{folder}/second") == "two"


def test_a_directory_cannot_be_downloaded(box, folder):
    refused(lambda: box.files.read_file(folder), "is a directory")


def test_metrics_are_those_of_the_limits(create):
    box = create(resource={"cpu": "500m", "memory": "128Mi"})
    metrics = box.get_metrics()
    assert (metrics.cpu_count, metrics.memory_total_in_mib) == (0.5, 128)
    assert 0 <= metrics.cpu_used_percentage <= 100 and 0 < metrics.memory_used_in_mib <= 128
    box.commands.run("timeout 60 sh -c 'while :; do :; done' >/dev/null 2>&1 &")
    seen = []

    def most_of_it():
        seen.append(box.get_metrics().cpu_used_percentage)
        return seen[-1] > 50

    # Of the limit, not of the machine, which may have other things to do.
    assert wait_for(most_of_it, 50) and max(seen) <= 100, seen
