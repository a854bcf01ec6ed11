"""From a repository to a sandbox of use and back: builds, boots, services, credentials, and what is left when it ends."""

import base64
import hashlib
import hmac
import json
import os
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

import git_image
from git_servers import USER
from stack import wait_for
from workspace_stacks import embedded
from workspaces import QUICK_AGENT, give_image

pytestmark = pytest.mark.sandglass

# Nobody's but the build's.
SECRET = "npm-9c1f0e7ab25d4c66"
# A hook that counts how often it ran, in a file beside the repository.
COUNT = '#!/bin/sh\necho ran >> "/var/{0}.count"\necho "this is {0}"\n'


def searched(text, folder):
    """A command that prints the files below a folder that hold the text, which is put together inside so that the search does not find itself."""
    return f'p={text[:6]}; find {folder} -xdev -type f -exec grep -lF "$p""{text[6:]}" {{}} + 2>/dev/null || true'


@pytest.fixture(scope="module")
def stack():
    with embedded() as made:
        yield made


# ---------------------------------------------------------------- from request to ready


def test_the_four_fields_of_the_short_dialect(spaces, git, stack):
    repository = git.repository({"README": "four fields\n"})
    # The proxy takes no bearer token: that header is the applications'.
    bearer = httpx.Client(base_url=stack.url, headers={"Authorization": f"Bearer {stack.key}"}, timeout=60)
    body = {"repo_url": repository.url, "image_tag": "latest", "env": {"COLOUR": "blue"}, "ttl_seconds": 600}
    answer = bearer.post("/v1/sandboxes", json=body)
    assert answer.status_code == 202, answer.text
    identity = answer.json()["id"]
    spaces.made.append(identity)
    seen = []

    def look():
        seen.append(bearer.get(f"/v1/sandboxes/{identity}").json())
        return seen[-1]["state"] in ("READY", "FAILED")

    assert wait_for(look, 120) and seen[-1]["state"] == "READY", seen[-1]
    assert {shown["state"] for shown in seen} <= {"SCHEDULED", "BUILDING", "STARTING", "READY"}
    uptime = seen[-1]["uptime_seconds"]
    assert wait_for(lambda: look() and seen[-1]["uptime_seconds"] > uptime)
    place = spaces.show(identity)["source"]["repositories"][0]["path"]
    assert spaces.text(identity, f"cat {place}/README; echo $COLOUR") == "four fields\nblue"
    assert bearer.delete(f"/v1/sandboxes/{identity}").status_code == 204
    bearer.close()
    spaces.until_gone(identity)


def test_a_dockerfile_is_built_once(spaces, git):
    lines = f"FROM {git_image.NAME}\nWORKDIR /made\nCOPY part.txt .\nRUN echo built >> log && cat part.txt >> log\nENV FROM_IMAGE=yes\n"
    repository = git.repository({"Dockerfile": lines, "part.txt": "a part\n"})
    first = spaces.ready(repository)
    second = spaces.ready(repository)
    for identity in (first, second):
        assert spaces.text(identity, "cat /made/log; echo $FROM_IMAGE") == "built\na part\nyes"
        assert "image.resolved" in spaces.history(identity)
    sources = [spaces.show(identity)["source"] for identity in (first, second)]
    assert sources[0]["imageId"] == sources[1]["imageId"]
    (build,) = spaces.builds_of(repository)
    assert (build["status"]["state"], build["imageId"]) == ("Succeeded", sources[0]["imageId"])
    assert "RUN" in spaces.build_log(build["id"])
    (image,) = [image for image in spaces.built_images() if image["id"] == sources[0]["imageId"]]
    assert image["sandboxCount"] == 2


def test_what_an_image_tells_agents_is_not_for_the_box_in_which_it_is_made(spaces, git):
    first = f'FROM {git_image.NAME} AS first\nENV BOOTSTRAP_CMD="exit 3" EXECD_ENVS=/nowhere/at/all\n'
    repository = git.repository({"Dockerfile": f'{first}FROM first\nRUN test "$BOOTSTRAP_CMD" = "exit 3"\n'})
    spaces.until_build(spaces.start_build(repository)["id"], "Succeeded")


def test_setup_runs_once_and_start_at_every_boot(spaces, git):
    repository = git.repository({".sandbox/setup.sh": COUNT.format("setup"), ".sandbox/start.sh": COUNT.format("start")})
    for _ in range(2):
        identity = spaces.ready(repository)
        assert spaces.text(identity, "cat /var/setup.count; echo -; cat /var/start.count") == "ran\n-\nran"
    (build,) = spaces.builds_of(repository)
    log = spaces.build_log(build["id"])
    assert "this is setup" in log and "this is start" not in log
    states = {step["name"]: step["state"] for step in build["steps"]}
    assert states["setup"] == "Succeeded" and states["export"] == "Succeeded", states


def test_a_moved_commit_boots_with_the_image_of_the_one_before(spaces, git):
    repository = git.repository({".sandbox/setup.sh": COUNT.format("setup"), "version": "1\n"})
    first = spaces.ready(repository)
    commit = repository.commit({"version": "2\n"})
    second = spaces.ready(repository)
    place = spaces.show(second)["source"]["repositories"][0]
    assert place["commit"] == commit
    assert spaces.text(second, f"cat {place['path']}/version; git -C {place['path']} rev-parse HEAD") == f"2\n{commit}"
    assert spaces.text(first, f"cat {place['path']}/version") == "1"
    # What is behind is brought up to date meanwhile, once.
    assert wait_for(lambda: len(spaces.builds_of(repository)) == 2)
    newest = max(spaces.builds_of(repository), key=lambda build: build["createdAt"])
    assert spaces.until_build(newest["id"], "Succeeded")["repository"]["commit"] == commit


def test_a_devcontainer_with_an_image_and_a_command(spaces, git):
    container = {
        "name": "web",
        "image": git_image.NAME,
        "containerEnv": {"IN_CONTAINER": "1"},
        "postCreateCommand": "echo created > /var/created; echo $IN_CONTAINER >> /var/created",
        "postStartCommand": ["sh", "-c", "echo started > /tmp/started"],
    }
    repository = git.repository({".devcontainer/devcontainer.json": f"// comments are fine\n{json.dumps(container)}"})
    identity = spaces.ready(repository)
    assert spaces.text(identity, "cat /var/created /tmp/started; echo $IN_CONTAINER") == "created\n1\nstarted\n1"


def test_an_exact_match_waits_for_an_image_of_its_own(spaces, git):
    repository = git.repository({".sandbox/setup.sh": "#!/bin/sh\ncp version /var/version\n", "version": "1\n"})
    spaces.ready(repository)
    repository.commit({"version": "2\n"})
    missing = spaces.ask(repository, imageBuild={"match": "exact", "policy": "requireCached"})
    assert (missing.status_code, missing.json()["code"]) == (412, "IMAGE::NOT_CACHED"), missing.text
    identity = spaces.ready(repository, imageBuild={"match": "exact"})
    assert spaces.text(identity, "cat /var/version") == "2"


def test_the_user_of_a_manifest_works_in_files_of_its_own(spaces, git):
    manifest = "user: worker\nsetup: id -un > setup.who\nstart: id -un > start.who\nenv: {FROM_MANIFEST: '1'}\n"
    repository = git.repository({".sandbox.yml": manifest, "version": "1\n"})
    for version in ("1", "2"):
        identity = spaces.ready(repository)
        place = spaces.show(identity)["source"]["repositories"][0]["path"]
        look = f"cd {place} && cat version setup.who start.who && stat -c %U version && git log --oneline | wc -l && echo $FROM_MANIFEST"
        assert spaces.text(identity, look) == f"{version}\nworker\nworker\nworker\n{version}\n1"
        spaces.text(identity, f"cd {place} && touch mine && git status", uid=1234, gid=1235)
        repository.commit({"version": "2\n"})


def test_submodules_and_repositories_beside_the_first(spaces, git):
    part = git.repository({"part": "of another\n"})
    main = git.repository({"main": "1\n"})
    main.submodule(part, "vendor/part")
    beside = git.repository({"beside": "2\n"})
    repository = {"url": main.url, "submodules": True, "additional": [{"url": beside.url, "path": "/workspace/beside"}]}
    identity = spaces.ready(repository)
    places = {place["url"]: place for place in spaces.show(identity)["source"]["repositories"]}
    first = places[main.url]["path"]
    assert spaces.text(identity, f"cat {first}/vendor/part/part /workspace/beside/beside") == "of another\n2"
    assert places[beside.url]["commit"] == beside.head


def test_many_of_one_repository_share_one_build(spaces, git):
    repository = git.repository({".sandbox/setup.sh": "#!/bin/sh\nsleep 1\n"})
    with ThreadPoolExecutor(12) as pool:
        made = list(pool.map(lambda _: spaces.begin(repository), range(12)))
    for identity in made:
        spaces.until_ready(identity)
    assert len(spaces.builds_of(repository)) == 1
    (image,) = {spaces.show(identity)["source"]["imageId"] for identity in made}
    assert next(i for i in spaces.built_images() if i["id"] == image)["sandboxCount"] == 12


def test_the_history_of_a_life(spaces, git):
    repository = git.repository({".sandbox/start.sh": COUNT.format("start")})
    identity = spaces.ready(repository)
    spaces.delete(identity)
    spaces.until_gone(identity)
    events = spaces.event_page(identity)
    numbers = [event["seq"] for event in events]
    assert numbers == sorted(set(numbers))
    told = [event["type"] for event in events if not event["type"].startswith(("box.", "boot.phase_progress", "image.build"))]
    assert told == [
        *("sandbox.created", "image.resolved", "agent.attached"),
        *("boot.phase_started", "boot.phase_finished") * 2,
        *("boot.completed", "sandbox.state_changed", "sandbox.state_changed", "sandbox.terminated"),
    ], told
    changes = [(event["data"]["to"], event["data"]["reason"]) for event in events if event["type"] == "sandbox.state_changed"]
    assert changes == [("Running", "ready"), ("Stopping", "user_delete")], changes


# ---------------------------------------------------------------- failures that say what happened


def test_a_setup_that_fails_is_told_with_its_end_and_not_tried_again(spaces, git):
    repository = git.repository({".sandbox/setup.sh": "#!/bin/sh\necho one step\necho the disk is green >&2\nexit 7\n"})
    shown = spaces.failed(repository)
    failure = shown["lastFailure"]
    assert (shown["status"]["reason"], failure["phase"], failure["exitCode"]) == ("image_build_failed", "setup", 7)
    assert "the disk is green" in failure["outputTail"], failure
    (build,) = spaces.builds_of(repository)
    assert (build["status"]["state"], build["attempt"]) == ("Failed", 1)
    assert (build["failure"]["step"], build["failure"]["exitCode"]) == ("setup", 7)
    assert shown["source"]["imageBuildId"] == build["id"]
    assert "one step" in spaces.build_log(build["id"]) and "green" in spaces.build_log(build["id"], step="setup")
    again = spaces.failed(repository)
    assert again["lastFailure"]["exitCode"] == 7
    assert len(spaces.builds_of(repository)) == 1


def test_a_start_hook_that_fails_ends_the_boot(spaces, git):
    repository = git.repository({".sandbox/start.sh": "#!/bin/sh\necho warming up\necho no database >&2\nexit 3\n"})
    shown = spaces.failed(repository)
    failure = shown["lastFailure"]
    assert (shown["status"]["reason"], failure["exitCode"]) == ("boot_failed", 3), shown
    assert failure["phase"].startswith("start"), failure
    assert "no database" in failure["outputTail"], failure
    assert [event["type"] for event in spaces.event_page(shown["id"])].count("sandbox.failed") == 1
    # It comes by itself, and may come after the news that it is over.
    log = f"/v1/sandboxes/{shown['id']}/services/boot.start..sandbox%2Fstart.sh/logs"
    assert wait_for(lambda: spaces.http.get(log).text == "warming up\nno database\n"), spaces.http.get(log).text


def test_a_start_hook_may_fail_where_the_request_says_so(spaces, git):
    repository = git.repository({".sandbox/start.sh": "#!/bin/sh\necho no database\nexit 3\n"})
    identity = spaces.ready(repository, boot={"onStartFailure": "warn"})
    shown = spaces.show(identity)
    assert (shown["status"]["reason"], shown["lastFailure"]["exitCode"]) == ("degraded", 3), shown


def test_silence_ends_a_boot_and_progress_renews_it(spaces, git):
    # Several times what is between two words, and less than all of them take.
    boot = {"startTimeoutSeconds": 5}
    talking = git.repository({".sandbox/start.sh": "#!/bin/sh\nfor i in 1 2 3 4 5 6 7 8; do echo $i; sleep 1; done\n"})
    spaces.ready(talking, boot=boot)
    silent = git.repository({".sandbox/start.sh": "#!/bin/sh\necho begun\nsleep 60\n"})
    shown = spaces.failed(silent, boot=boot)
    assert shown["status"]["reason"] == "boot_timeout", shown
    assert shown["lastFailure"]["phase"].startswith("start") and "begun" in shown["lastFailure"]["outputTail"], shown


def test_an_image_without_git_says_so(spaces, git):
    repository = git.repository({"README": "x"})
    bare = git_image.Image(git_image.layer(*git_image.small_programs()), Env=["PATH=/bin"])
    give_image(spaces, bare, "without-git:test")
    recipe = {"recipe": {"type": "none", "image": "without-git:test"}, "policy": "never"}
    shown = spaces.failed(repository, imageBuild=recipe)
    assert shown["status"]["reason"] == "boot_failed", shown
    assert "git" in shown["lastFailure"]["message"] and shown["lastFailure"]["phase"].startswith("sync"), shown


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"ref": "no-such-branch"}, "ref_not_found"),
        ({"url": "{root}/private/nothing.git"}, "repository_auth_failed"),
        ({"url": "http://{address}:1/open/x.git"}, "repository_unreachable"),
    ],
)
def test_repositories_that_cannot_be_had(spaces, git, change, reason):
    repository = git.repository()
    root = f"http://{git.host}"
    named = {key: value.format(root=root, address=git.address) for key, value in change.items()}
    shown = spaces.failed({"url": repository.url, **named})
    assert shown["status"]["reason"] == reason, shown


# ---------------------------------------------------------------- secrets and credentials


def test_a_build_secret_is_in_the_setup_and_nowhere_else(spaces, git, stack):
    script = '#!/bin/sh\necho "the token is $NPM_TOKEN"\nprintf %s "$NPM_TOKEN" | sha256sum > /var/digest\n'
    repository = git.repository({".sandbox/setup.sh": script})
    identity = spaces.ready(repository, imageBuild={"secrets": {"NPM_TOKEN": SECRET}})
    digest = hashlib.sha256(SECRET.encode()).hexdigest()
    assert digest in spaces.text(identity, "cat /var/digest")
    assert spaces.text(identity, "echo $NPM_TOKEN").strip() == ""
    assert spaces.text(identity, searched(SECRET, "/")) == ""
    (build,) = spaces.builds_of(repository)
    log = spaces.build_log(build["id"])
    assert "the token is ***" in log and SECRET not in log
    shown = [spaces.get(identity).text, json.dumps(build), spaces.history(identity), spaces.logs(identity)]
    assert not [text for text in shown if SECRET in text]
    assert SECRET not in stack.log.read_text(errors="replace")
    spaces.delete(identity)
    spaces.until_gone(identity)
    # With the sandbox goes the server's own copy: nothing of it is in images, logs or the store.
    found = subprocess.run(["grep", "-rlF", SECRET, str(stack.state)], capture_output=True, text=True, check=False)
    assert not found.stdout


def test_a_build_secret_in_a_file_fails_the_build(spaces, git):
    repository = git.repository({".sandbox/setup.sh": '#!/bin/sh\necho "token=$NPM_TOKEN" > /var/npmrc\n'})
    shown = spaces.failed(repository, imageBuild={"secrets": {"NPM_TOKEN": SECRET}})
    failure = shown["lastFailure"]
    assert (shown["status"]["reason"], failure["phase"]) == ("image_build_failed", "sanitize")
    assert "/var/npmrc" in failure["message"] and SECRET not in json.dumps(shown)


def test_private_repositories_by_token(spaces, git, stack):
    name = "private/token"
    repository = git.repository({"secret-sauce": "mustard\n"}, name)
    identity = spaces.ready({"url": repository.url, "credential": git.token_credential})
    place = spaces.show(identity)["source"]["repositories"][0]["path"]
    assert spaces.text(identity, f"cat {place}/secret-sauce") == "mustard"
    inside = spaces.ready({"url": repository.url, "credential": git.token_credential}, imageBuild={"policy": "never"})
    assert spaces.text(inside, f"cat {place}/secret-sauce") == "mustard"
    wrong = {"username": USER, "token": "not-the-token-at-all"}
    shown = spaces.failed({"url": repository.url, "credential": wrong})
    assert shown["status"]["reason"] == "repository_auth_failed"
    token = git.token_credential["token"]
    texts = [spaces.get(identity).text, spaces.history(identity), stack.log.read_text(errors="replace")]
    assert not [text for text in texts if token in text]


def test_private_repositories_by_key(spaces, git):
    repository = git.repository({"sauce": "pesto\n"}, "private/key")
    private = {"url": repository.ssh_url, "credential": git.key_credential()}
    identity = spaces.ready(private)
    place = spaces.show(identity)["source"]["repositories"][0]["path"]
    assert spaces.text(identity, f"cat {place}/sauce") == "pesto"
    # Fetched from inside: nothing of it is in the image.
    repository.commit({"sauce": "harissa\n"})
    for policy in ("ifMissing", "never"):
        identity = spaces.ready(private, imageBuild={"policy": policy})
        assert spaces.text(identity, f"cat {place}/sauce; git -C {place} branch --show-current") == "harissa\nmain"
        assert spaces.text(identity, searched(git.keys["right"].splitlines()[1], "/")) == ""
    shown = spaces.failed({"url": repository.ssh_url, "credential": git.key_credential("wrong")})
    assert shown["status"]["reason"] == "repository_auth_failed", shown


def test_git_inside_gets_credentials_of_declared_repositories_alone(spaces, git):
    mine = git.repository({"a": "1\n"}, "private/mine")
    other = git.repository({"b": "1\n"}, "private/other")
    identity = spaces.ready({"url": mine.url, "credential": git.token_credential})
    place = spaces.show(identity)["source"]["repositories"][0]["path"]
    assert mine.head in spaces.text(identity, f"GIT_TERMINAL_PROMPT=0 git ls-remote {mine.url} HEAD")
    refused = spaces.run(identity, f"GIT_TERMINAL_PROMPT=0 git ls-remote {other.url} HEAD")
    assert refused.error is not None, refused
    who = "-c user.name=Ann -c user.email=ann@example.com"
    spaces.text(identity, f"cd {place} && echo 2 > a && git {who} commit -qam two && git push -q origin HEAD:refs/heads/inside 2>&1")
    token = git.token_credential["token"]
    for text in (token, base64.b64encode(f"{USER}:{token}".encode()).decode()):
        assert spaces.text(identity, searched(text, "/")) == ""
        assert text not in spaces.text(identity, "git config --list --show-origin; env")


def test_an_agent_reaches_its_server_though_nothing_may_leave(spaces, git):
    repository = git.repository({"README": "closed\n", ".sandbox/start.sh": COUNT.format("start")})
    identity = spaces.ready(repository, networkPolicy={"defaultAction": "deny", "egress": []})
    shown = spaces.show(identity)
    assert shown["agent"]["state"] == "Attached", shown
    done = spaces.run(identity, f"timeout 5 git ls-remote {repository.url} 2>&1")
    assert done.error is not None, done


# ---------------------------------------------------------------- services


def test_a_service_that_dies_is_started_again_and_counted(spaces, git):
    repository = git.repository()
    web = {"name": "web", "command": ["sh", "-c", "echo serving; exec httpd -f -p 8000 -h /workspace"], "port": 8000, "required": True}
    identity = spaces.ready(repository, services=[web], agent=QUICK_AGENT)
    assert spaces.services(identity)["web"]["state"] == "Ready"
    for count in (1, 2):
        spaces.text(identity, "kill -9 $(ps | grep '[h]ttpd -f' | awk '{print $1}')")
        shown = spaces.until_service(identity, "web", lambda web: web["restartCount"] == count and web["state"] == "Ready")
        assert shown.get("lastExitCode") in (None, 137), shown
    assert spaces.show(identity)["status"]["reason"] == "ready"
    assert wait_for(lambda: spaces.service_log(identity, "web").count("serving") == 3), spaces.service_log(identity, "web")


def test_a_service_that_is_not_started_again(spaces, git):
    once = {"name": "once", "command": ["sh", "-c", "sleep 1; echo over; exit 3"], "restart": "never"}
    identity = spaces.ready(git.repository(), services=[once], agent=QUICK_AGENT)
    shown = spaces.until(identity, "Running", reason="degraded")
    (service,) = [service for service in shown["services"] if service["name"] == "once"]
    assert (service["state"], service["lastExitCode"], service["restartCount"]) == ("Failed", 3, 0), service
    identity = spaces.begin(git.repository(), services=[{**once, "required": True}], agent=QUICK_AGENT)
    shown = spaces.until(identity, "Failed")
    assert shown["status"]["reason"] == "service_failed", shown
    # What it wrote comes on its own way.
    said = wait_for(lambda: spaces.service_log(identity, "once", tail=1) == "over\n")
    assert said, spaces.service_log(identity, "once")


def test_a_service_is_switched_off_and_on(spaces, git):
    identity = spaces.ready(git.repository(), services=[{"name": "idle", "command": ["sleep", "1000"]}], agent=QUICK_AGENT)
    spaces.until_service(identity, "idle", lambda idle: idle["state"] == "Ready")
    for enabled, state in ((False, "Disabled"), (True, "Ready")):
        answer = spaces.http.put(f"/v1/sandboxes/{identity}/services/idle", json={"enabled": enabled})
        assert answer.status_code in (200, 202), answer.text
        spaces.until_service(identity, "idle", lambda idle, state=state: idle["state"] == state)


# ---------------------------------------------------------------- ends


def test_deleted_sandboxes_leave_their_image_and_nothing_else(spaces, git, stack):
    repository = git.repository({".sandbox/setup.sh": COUNT.format("setup")})
    first = spaces.ready(repository)
    image = spaces.show(first)["source"]["imageId"]
    spaces.delete(first)
    spaces.until_gone(first)
    assert not stack.wait_clean()
    assert not [path for path in stack.state.glob(f"*/{first}*")]
    assert wait_for(lambda: next(i for i in spaces.built_images() if i["id"] == image)["sandboxCount"] == 0)
    second = spaces.ready(repository)
    assert spaces.show(second)["source"]["imageId"] == image
    assert len(spaces.builds_of(repository)) == 1


def test_a_build_sandbox_that_is_killed_is_made_anew(spaces, git, stack):
    repository = git.repository({".sandbox/setup.sh": "#!/bin/sh\necho begun\nsleep 3\n"})
    identity = spaces.begin(repository)
    spaces.until(identity, "Pending", reason="image_building")
    (build,) = spaces.builds_of(repository)
    assert wait_for(lambda: "begun" in spaces.build_log(build["id"]))
    (builder,) = stack.directories()
    os.kill(first_process(stack, builder).pid, signal.SIGKILL)
    spaces.until_ready(identity)
    (build,) = spaces.builds_of(repository)
    assert (build["status"]["state"], build["attempt"]) == ("Succeeded", 2)


def test_a_build_that_takes_too_long_is_ended_with_all_that_it_began(spaces, git, stack):
    repository = git.repository({".sandbox/setup.sh": "#!/bin/sh\nsleep 600 & sleep 601\n"})
    shown = spaces.failed(repository, imageBuild={"timeoutSeconds": 4})
    assert shown["status"]["reason"] == "image_build_timeout", shown
    assert spaces.build(shown["source"]["imageBuildId"])["status"]["state"] == "TimedOut"
    spaces.delete(shown["id"])
    assert not stack.wait_clean(), stack.wait_clean()


def test_deleted_while_its_image_is_built(spaces, git, stack):
    repository = git.repository({".sandbox/setup.sh": "#!/bin/sh\necho begun\nsleep 600\n"})
    identity = spaces.begin(repository)
    spaces.until(identity, "Pending", reason="image_building")
    (build,) = spaces.builds_of(repository)
    assert wait_for(lambda: "begun" in spaces.build_log(build["id"]), 60)
    spaces.delete(identity)
    spaces.until_gone(identity)
    assert spaces.until_build(build["id"], "Cancelled")
    assert not stack.wait_clean(), stack.wait_clean()


@pytest.mark.parametrize("phase", ["setup", "services", "start"])
def test_deleted_while_it_boots(spaces, git, stack, phase):
    body = {}
    files = {"README": "x"}
    if phase == "services":
        body["services"] = [{"name": "deaf", "command": ["sleep", "600"], "port": 8000, "required": True}]
    else:
        files = {f".sandbox/{phase}.sh": "#!/bin/sh\nsleep 600 & sleep 601\n"}
        body["imageBuild"] = {"policy": "never"}
    identity = spaces.begin(git.repository(files), **body)
    spaces.until(identity, "Pending", reason="booting")
    assert wait_for(lambda: (spaces.show(identity).get("progress") or {}).get("phase") == phase), spaces.show(identity)
    began = time.monotonic()
    spaces.delete(identity)
    spaces.until_gone(identity)
    # Of the hook's ten minutes nothing is waited for: it ends when it is told to.
    assert time.monotonic() - began < 60
    assert not stack.wait_clean(), stack.wait_clean()


def first_process(stack, identity):
    """The agent of a sandbox, which is the first process of it."""
    return min((p for p in stack.guests() if identity in p.cgroups), key=lambda p: p.started)


def test_frozen_and_thawed_the_worktree_is_as_it_was(spaces, git):
    repository = git.repository({"a": "1\n", "b": "1\n"})
    identity = spaces.ready(repository, agent=QUICK_AGENT)
    place = spaces.show(identity)["source"]["repositories"][0]["path"]
    spaces.text(identity, f"cd {place} && echo 2 > a && echo 2 > b && git add b && echo 3 > c")
    look = f"cd {place} && git status --porcelain && git rev-parse HEAD && git diff && git diff --cached"
    before = spaces.text(identity, look)
    assert spaces.http.post(f"/v1/sandboxes/{identity}/pause").status_code == 202
    spaces.until(identity, "Paused")
    # Longer than its agent may be silent: a frozen one owes nothing.
    time.sleep(QUICK_AGENT["heartbeatTimeoutSeconds"] + 2)
    assert spaces.show(identity)["status"]["state"] == "Paused"
    assert spaces.http.post(f"/v1/sandboxes/{identity}/resume").status_code == 202
    spaces.until(identity, "Running", reason="ready")
    assert spaces.text(identity, look) == before
    assert wait_for(lambda: spaces.show(identity)["agent"]["state"] == "Attached"), spaces.show(identity)


def test_a_killed_agent_is_noticed(spaces, git, stack):
    identity = spaces.ready(git.repository(), agent=QUICK_AGENT)
    os.kill(first_process(stack, identity).pid, signal.SIGKILL)
    shown = spaces.until(identity, "Failed", "Terminated")
    assert shown["status"]["state"] == "Failed", shown


# ---------------------------------------------------------------- a server that is killed


def test_a_server_killed_during_a_build_goes_on_with_it(own_stack, git):
    stack, spaces = own_stack()
    repository = git.repository({".sandbox/setup.sh": "#!/bin/sh\necho begun\nsleep 4\n"})
    identity = spaces.begin(repository)
    spaces.until(identity, "Pending", reason="image_building")
    (build,) = spaces.builds_of(repository)
    assert wait_for(lambda: "begun" in spaces.build_log(build["id"]), 60)
    stack.kill()
    stack.start()
    spaces.until_ready(identity)
    assert len(spaces.builds_of(repository)) == 1
    assert len(spaces.built_images()) == 1
    spaces.close()
    assert not stack.wait_clean(), stack.wait_clean()


def test_a_server_killed_during_a_boot_takes_it_up(own_stack, git):
    stack, spaces = own_stack()
    repository = git.repository({".sandbox/start.sh": "#!/bin/sh\necho ran >> /var/start.count\nsleep 4\n"})
    identity = spaces.begin(repository)
    spaces.until(identity, "Pending", reason="booting")
    stack.kill()
    stack.start()
    shown = spaces.until_ready(identity)
    assert shown["agent"]["state"] == "Attached", shown
    assert spaces.text(identity, "cat /var/start.count") == "ran"
    boot = [(event["type"], event["data"].get("phase")) for event in spaces.event_page(identity) if event["type"].startswith("boot.")]
    phases = [event for event in boot if event[0] != "boot.phase_progress"]
    both = [("boot.phase_started", phase) for phase in ("sync", "start")], [("boot.phase_finished", phase) for phase in ("sync", "start")]
    assert phases == [*(event for pair in zip(*both, strict=True) for event in pair), ("boot.completed", None)], boot
    stack.kill()
    stack.start()
    shown = spaces.until_ready(identity)
    assert wait_for(lambda: spaces.show(identity)["agent"]["state"] == "Attached"), spaces.show(identity)
    spaces.close()


def test_a_server_killed_at_any_moment_makes_one_image_and_one_box(own_stack, git):
    stack, spaces = own_stack()
    hook = "#!/bin/sh\necho ran >> /var/{0}.count\nsleep 0.4\n"
    made = 0
    for number in range(8):
        repository = git.repository({f".sandbox/{name}.sh": hook.format(name) for name in ("setup", "start")})
        identity = spaces.begin(repository)
        # Spread over the whole way, which takes a few seconds.
        time.sleep(number * 0.3)
        stack.kill()
        stack.start()
        shown = spaces.until(identity, "Running", "Failed")
        (build,) = spaces.builds_of(repository)
        if shown["status"]["state"] == "Failed":
            # Killed in the very moment of the capture, which is never done twice.
            assert "captured" in shown["lastFailure"]["message"] and build["status"]["state"] == "Failed", shown
        else:
            assert spaces.text(identity, "cat /var/setup.count /var/start.count") == "ran\nran", number
            assert build["status"]["state"] == "Succeeded", build
            made += 1
        spaces.delete(identity)
        spaces.until_gone(identity)
        assert not stack.wait_clean(), (number, stack.wait_clean())
    assert made >= 6 and len(spaces.built_images()) == made


# ---------------------------------------------------------------- prebuilds


def test_a_prebuild_follows_pushes_and_triggers(spaces, git):
    repository = git.repository({".sandbox/setup.sh": COUNT.format("setup"), "version": "1\n"})
    secret = "webhook-secret-1"
    answer = spaces.http.post("/v1/prebuilds", json={"repository": {"url": repository.url}, "webhookSecret": secret})
    assert answer.status_code == 201, answer.text
    prebuild = answer.json()["id"]
    try:
        assert spaces.http.post(f"/v1/prebuilds/{prebuild}/trigger").status_code == 202
        assert wait_for(lambda: [b["status"]["state"] for b in spaces.builds_of(repository)] == ["Succeeded"], 60)
        commit = repository.commit({"version": "2\n"})
        body = json.dumps({"ref": "refs/heads/main", "after": commit}).encode()
        signature = hmac.new(secret.encode(), body, hashlib.sha256).hexdigest()
        path = f"/v1/prebuilds/{prebuild}/webhook"
        for sent, status in (("sha256=" + "0" * 64, 401), (f"sha256={signature}", 202)):
            answer = spaces.http.post(path, content=body, headers={"X-Hub-Signature-256": sent})
            assert answer.status_code == status, answer.text
        assert wait_for(lambda: len(spaces.builds_of(repository)) == 2, 60)
        newest = max(spaces.builds_of(repository), key=lambda build: build["createdAt"])
        assert spaces.until_build(newest["id"], "Succeeded")["repository"]["commit"] == commit
        # A second notice of the same commit builds nothing.
        spaces.http.post(path, content=body, headers={"X-Hub-Signature-256": f"sha256={signature}"})
        identity = spaces.ready(repository, imageBuild={"match": "exact", "policy": "requireCached"})
        assert spaces.show(identity)["source"]["imageBuildId"] == newest["id"]
        assert len(spaces.builds_of(repository)) == 2
    finally:
        assert spaces.http.delete(f"/v1/prebuilds/{prebuild}").status_code == 204
