"""Snapshots of sandboxes from repositories, on Docker: what git knows and what lies in the work tree come through as they were."""

import pytest

from stack import wait_for
from workspace_stacks import on_engine

pytestmark = pytest.mark.sandglass


@pytest.fixture(scope="module")
def stack(engine):
    with on_engine(engine) as made:
        yield made


def test_worktree_index_and_head_are_the_same_byte_for_byte(spaces, git):
    source = spaces.ready(git.repository({"a": "1\n", "b": "1\n", "c/d": "1\n"}))
    place = spaces.show(source)["source"]["repositories"][0]["path"]
    # Changed, staged, new, removed, and a commit that nobody else has.
    who = "-c user.name=Ann -c user.email=ann@example.com"
    spaces.text(source, f"cd {place} && echo 2 > a && git {who} commit -qam two && echo 3 > a && echo 3 > b && git add b && echo 3 > new && rm c/d")
    files = f"cd {place} && find . -type f | sort | xargs sha256sum && find . | sort | xargs stat -c '%n %a %u %g'"
    git_says = f"cd {place} && git status --porcelain && git rev-parse HEAD && git diff && git diff --cached && git fsck"
    before = [spaces.text(source, files), spaces.text(source, git_says)]
    for call, state in (("pause", "Paused"), ("resume", "Running")):
        assert spaces.http.post(f"/v1/sandboxes/{source}/{call}").status_code == 202
        spaces.until(source, state)
    assert spaces.text(source, files) == before[0]
    answer = spaces.http.post(f"/v1/sandboxes/{source}/snapshots", json={"name": "copy"})
    assert answer.status_code == 202, answer.text
    snapshot = answer.json()["id"]
    path = f"/v1/snapshots/{snapshot}"
    try:
        assert wait_for(lambda: spaces.http.get(path).json()["status"]["state"] == "Ready"), spaces.http.get(path).text
        answer = spaces.send({"snapshotId": snapshot, "timeout": 600, "resourceLimits": {"memory": "256Mi"}, "entrypoint": ["sleep", "600"]})
        assert answer.status_code == 202, answer.text
        copy = answer.json()["id"]
        spaces.until_ready(copy)
        # The files first: git may freshen its index when it is asked.
        assert [spaces.text(copy, files), spaces.text(copy, git_says)] == before
        spaces.delete(copy)
        spaces.until_gone(copy)
    finally:
        spaces.http.delete(path)
