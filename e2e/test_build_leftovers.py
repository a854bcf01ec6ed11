"""What builds leave behind: secrets in any form, processes that go on writing, a disk that is full; on both runtimes where they differ."""

import os
import subprocess
import time

import pytest

import git_image
from stack import Stack, wait_for
from workspace_stacks import embedded, on_engine, settings
from workspaces import Workspaces, give_image

pytestmark = pytest.mark.sandglass

# Nobody's but the build's.
SECRET = "npm/9c1f0e7ab25d+c66"
# Longer than a line of what encoders write.
LONG = "-".join(f"word{number:03}" for number in range(16))
BACKGROUND = 'setsid sh -c "{}" >/dev/null 2>&1 &'
ENDS = {"Succeeded", "Failed", "Cancelled", "TimedOut"}

LEAKS = {
    "base64": 'printf "%s" "$A" | base64 > /leak',
    "base64 after one byte": 'printf "x%s" "$A" | base64 > /leak',
    "base64 after two bytes": 'printf "xy%s" "$A" | base64 > /leak',
    "base64 in lines": 'printf "%s" "$LONG" | base64 > /leak',
    "hexadecimal": 'printf "%s" "$A" | od -An -tx1 > /leak',
    "percent-encoded": 'printf "%s" "$A" | sed "s,/,%2F,g; s,+,%2B,g" > /leak',
    "behind NUL": 'head -c 4096 /dev/zero > /leak; printf "%s" "$A" >> /leak',
    "times set back": 'printf "%s" "$A" > /leak; touch -d 2001-01-01 /leak',
    "large": 'head -c 4000000 /dev/zero > /leak; printf "%s" "$A" >> /leak',
    "name": 'touch "/leak-$(printf "%s" "$A" | sed "s,/,%2F,g; s,+,%2B,g")"',
    "link": 'ln -s "$A" /leak',
    "packages": 'mkdir -p /leak/node_modules; printf "%s" "$A" > /leak/node_modules/x',
}


def build(spaces, repository, secrets=None, **body):
    """A build that ended, as it is shown."""
    asked = {"repository": {"url": repository.url}, "secrets": secrets or {"A": SECRET, "LONG": LONG}, **body}
    answer = spaces.http.post("/v1/image-builds", json=asked)
    assert answer.status_code == 202, answer.text
    return ended(spaces, answer.json()["id"])


def ended(spaces, identity, seconds=180):
    wait_for(lambda: spaces.build(identity)["status"]["state"] in ENDS, seconds)
    return spaces.build(identity)


@pytest.fixture(scope="module", params=["embedded", "docker"])
def stack(request):
    with embedded() if request.param == "embedded" else on_engine(request.getfixturevalue("engine")) as made:
        yield made


@pytest.fixture
def spaces(stack):
    made = Workspaces(stack.url, stack.key)
    yield made
    made.close()


@pytest.mark.parametrize("leak", LEAKS)
def test_a_secret_that_is_left_in_any_form_fails_the_build(spaces, git, stack, leak):
    repository = git.repository({".sandbox/setup.sh": f"#!/bin/sh\n{LEAKS[leak]}\n"})
    failed = build(spaces, repository)
    assert (failed["status"]["state"], failed["failure"]["step"]) == ("Failed", "sanitize"), failed
    assert "/leak" in failed["failure"]["message"] and "build secret" in failed["failure"]["message"]
    log = spaces.build_log(failed["id"])
    assert SECRET not in log and SECRET not in stack.log.read_text(errors="replace")


def test_a_secret_that_an_earlier_stage_left_fails_the_build(spaces, git):
    dockerfile = f"FROM {git_image.NAME} AS first\nRUN --mount=type=secret,id=A cat /run/secrets/A > /leak\nFROM first\nRUN true\n"
    failed = build(spaces, git.repository({"Dockerfile": dockerfile}))
    assert (failed["status"]["state"], failed["failure"]["step"]) == ("Failed", "sanitize"), failed
    assert "/leak" in failed["failure"]["message"]


def test_what_is_left_running_ends_before_the_search(spaces, git):
    # One writes all the time, the other one when the search would be over.
    always = BACKGROUND.format("while :; do echo $A > /late; rm -f /late; done")
    later = BACKGROUND.format("sleep 2; echo $A > /later")
    immune = BACKGROUND.format("trap '' TERM HUP INT; while :; do sleep 1; echo $A > /immune; done")
    script = f"#!/bin/sh\n{always}\n{later}\n{immune}\nexit 0\n"
    for attempt in range(3):
        repository = git.repository({".sandbox/setup.sh": script})
        made = build(spaces, repository)
        if made["status"]["state"] == "Failed":
            # It was ended in the middle of its work, and what it had written was found.
            assert made["failure"]["step"] == "sanitize", made
            continue
        identity = spaces.ready(repository, imageBuild={"secrets": {"A": SECRET, "LONG": LONG}})
        # One that was ended between opening and writing leaves an empty file.
        assert spaces.text(identity, "cat /late /later /immune 2>/dev/null || true") == ""
        spaces.delete(identity)
        spaces.until_gone(identity)


def test_a_build_that_leaves_nothing_succeeds(spaces, git, stack):
    script = '#!/bin/sh\nprintf "%s" "$A" | sha256sum > /var/digest\nsleep 1000 >/dev/null 2>&1 &\n'
    identity = spaces.ready(git.repository({".sandbox/setup.sh": script}), imageBuild={"secrets": {"A": SECRET}})
    assert len(spaces.text(identity, "cat /var/digest").split()[0]) == 64
    # The sandbox lives, and the server knows the secret no more.
    found = subprocess.run(["grep", "-rlF", SECRET, str(stack.state)], capture_output=True, text=True, check=False)
    assert not found.stdout
    spaces.delete(identity)
    spaces.until_gone(identity)


def test_another_platform_is_refused(spaces, git):
    repository = git.repository({"README": "x\n"})
    answer = spaces.http.post("/v1/image-builds", json={"repository": {"url": repository.url}, "platform": "linux/sparc"})
    assert (answer.status_code, answer.json()["code"]) == (400, "SANDBOX::INVALID_PARAMETER"), answer.text
    assert "linux/sparc" in answer.json()["message"]


def test_an_entrypoint_that_is_not_there_costs_no_image(spaces, git):
    repository = git.repository({".sandbox/setup.sh": "#!/bin/sh\ntrue\n"})
    first = spaces.ready(repository)
    for _ in range(3):
        spaces.failed(repository, entrypoint=["/nowhere/program"])
    spaces.ready(repository)
    states = [image["state"] for image in spaces.built_images() if image["id"] == spaces.show(first)["source"].get("imageId")]
    assert "Quarantined" not in states
    assert len(spaces.builds_of(repository)) == 1


def test_a_server_that_is_killed_at_a_capture_does_not_fail_the_build(git):
    with embedded() as stack:
        spaces = Workspaces(stack.url, stack.key)
        for pause in (0, 0.01, 0.05):
            repository = git.repository({".sandbox/setup.sh": "#!/bin/sh\nhead -c 50000000 /dev/urandom > /var/data\n"})
            identity = spaces.http.post("/v1/image-builds", json={"repository": {"url": repository.url}}).json()["id"]
            wait_for(lambda i=identity: spaces.build(i)["status"]["state"] in {"Finalizing", *ENDS}, 60)
            time.sleep(pause)
            stack.kill()
            stack.start()
            made = ended(spaces, identity)
            assert made["status"]["state"] == "Succeeded", made
        spaces.close()


def test_a_build_that_fills_the_disk_makes_room_when_its_time_is_over(git, tmp_path):
    place = tmp_path / "small"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=240m", "tmpfs", str(place)], check=True)
    stack = None
    try:
        stack = Stack(config=settings({"builds": {"timeout_seconds": 15}}), state=place / "state")
        stack.start()
        spaces = Workspaces(stack.url, stack.key)
        give_image(spaces, git_image.image(), git_image.NAME)
        fill = "#!/bin/sh\nwhile :; do head -c 900000000 /dev/zero >> /fill 2>/dev/null; sleep 0.05; done\n"
        repository = git.repository({".sandbox/setup.sh": fill})
        identity = spaces.http.post("/v1/image-builds", json={"repository": {"url": repository.url}}).json()["id"]
        free = lambda: os.statvfs(place).f_bavail * os.statvfs(place).f_frsize  # noqa: E731
        wait_for(lambda: free() == 0, 30)
        for body in ({}, {"imageBuild": {"secrets": {"A": SECRET}}}):
            answer = spaces.ask(git.repository({"README": "x\n"}), **body)
            if answer.status_code != 202:
                assert (answer.status_code, answer.json()["code"]) == (503, "GENERAL::UNAVAILABLE"), answer.text
        made = ended(spaces, identity)
        assert made["status"]["state"] in {"TimedOut", "Failed"}, made
        wait_for(lambda: free() > 50_000_000, 30)
        spaces.close()
    finally:
        problems = stack.close() if stack else []
        subprocess.run(["umount", "-l", str(place)], check=True)
    assert not problems, "\n".join(problems)
