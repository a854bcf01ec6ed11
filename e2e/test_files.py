"""Files and directories through the synchronous SDK."""

import io
from datetime import datetime, timezone

import pytest
from opensandbox.exceptions import SandboxApiException, SandboxException
from opensandbox.models.filesystem import (
    ContentReplaceEntry,
    DirectoryListEntry,
    MoveEntry,
    SearchEntry,
    SetPermissionEntry,
    WriteEntry,
)


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


def test_files_as_another_identity_are_refused_clearly(box, folder):
    other = box.files_with_identity(1234, 2345)
    with pytest.raises(SandboxApiException) as refused:
        other.write_file(f"{folder}/mine", "x" * 1_000_000, mode=600)
    assert refused.value.status_code == 501 and "NOT_SUPPORTED" in str(refused.value)
