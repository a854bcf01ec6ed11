"""Many at once: sandboxes of one repository, builds of one key and of many."""

import json
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest

from stack import wait_for
from workspace_stacks import embedded, on_engine

pytestmark = pytest.mark.sandglass

CROWD, BUILDS = 200, 20
# Two processors make this many boxes in about a minute when nothing else runs.
PATIENCE = 600
BUILDS_AT_A_TIME = 2
ENDED = {"Succeeded", "Failed", "Cancelled", "TimedOut"}


@pytest.fixture(scope="module", params=["embedded", "docker"])
def stack(request):
    builds = {"concurrency": BUILDS_AT_A_TIME, "tenant_concurrency": BUILDS_AT_A_TIME}
    if request.param == "embedded":
        made = embedded(builds=builds)
    else:
        made = on_engine(request.getfixturevalue("engine"), builds=builds)
    with made as running:
        yield running


def at_once(number, act):
    with ThreadPoolExecutor(number) as pool:
        return list(pool.map(act, range(number)))


def listed(spaces):
    """Every sandbox that is listed, by its id."""
    items, page = {}, 1
    while True:
        answer = spaces.http.get("/v1/sandboxes", params={"pageSize": 200, "page": page}).json()
        items |= {item["id"]: item for item in answer["items"]}
        if not answer["pagination"]["hasNextPage"]:
            return items
        page += 1


# ---------------------------------------------------------------- sandboxes


@pytest.mark.parametrize("stack", ["embedded"], indirect=True)
def test_a_crowd_of_sandboxes_of_one_repository(spaces, git, stack):
    """All of them at once, the first build among them: each comes to be of use, the image is built once, and nothing stays."""
    hook = "#!/bin/sh\necho ran >> /var/{0}.count\n"
    repository = git.repository({f".sandbox/{name}.sh": hook.format(name) for name in ("setup", "start")})
    with ThreadPoolExecutor(50) as pool:
        made = list(pool.map(lambda _: spaces.begin(repository, timeout=3600, resourceLimits={"memory": "128Mi"}), range(CROWD)))
    assert len(set(made)) == CROWD
    settled = wait_for(lambda: all(box["status"]["state"] != "Pending" for box in listed(spaces).values()), PATIENCE, 0.5)
    boxes = listed(spaces)
    states = Counter((box["status"]["state"], box["status"].get("reason")) for box in boxes.values())
    assert settled and states == {("Running", "ready"): CROWD}, f"{states}\n{stack.tail()}"
    (build,) = spaces.builds_of(repository)
    assert build["status"]["state"] == "Succeeded", build
    (image,) = {spaces.show(identity)["source"]["imageId"] for identity in made}
    assert next(one for one in spaces.built_images() if one["id"] == image)["sandboxCount"] == CROWD
    # Each is a box of its own that booted once.
    for identity in made[:: CROWD // 10]:
        assert spaces.text(identity, "cat /var/setup.count; echo -; cat /var/start.count") == "ran\n-\nran"
    with ThreadPoolExecutor(50) as pool:
        list(pool.map(spaces.delete, made))
    assert wait_for(lambda: not listed(spaces), PATIENCE, 0.5), listed(spaces)
    assert not stack.wait_clean(), stack.wait_clean()
    assert wait_for(lambda: next(one for one in spaces.built_images() if one["id"] == image)["sandboxCount"] == 0)


# ---------------------------------------------------------------- builds


def test_builds_of_many_keys_take_turns(spaces, git):
    scripts = [f"#!/bin/sh\necho number {number} > /var/number\nsleep 0.5\n" for number in range(BUILDS)]
    repositories = [git.repository({".sandbox/setup.sh": script}) for script in scripts]
    answers = at_once(BUILDS, lambda n: spaces.http.post("/v1/image-builds", json={"repository": {"url": repositories[n].url}}))
    assert {answer.status_code for answer in answers} == {202}, [answer.text for answer in answers]
    wanted = {answer.json()["id"] for answer in answers}
    assert len(wanted) == BUILDS
    running = []

    def ended():
        mine = [build for build in spaces.builds(pageSize=200) if build["id"] in wanted]
        states = Counter(build["status"]["state"] for build in mine)
        running.append(states["Running"] + states["Finalizing"])
        return sum(states[state] for state in ENDED) == BUILDS

    assert wait_for(ended, PATIENCE, 0.1), spaces.builds(pageSize=200)
    assert 1 <= max(running) <= BUILDS_AT_A_TIME, running
    builds = [spaces.build(answer.json()["id"]) for answer in answers]
    # What failed in passing was tried again; no failure is these builds' own.
    assert {build["status"]["state"] for build in builds} == {"Succeeded"}, builds
    assert len({build["imageId"] for build in builds}) == len({build["key"] for build in builds}) == BUILDS
    for number in (0, BUILDS - 1):
        identity = spaces.ready(repositories[number], imageBuild={"policy": "requireCached"})
        assert spaces.text(identity, "cat /var/number") == f"number {number}"


def test_requests_for_one_key_are_one_build(spaces, git):
    # Until the last of them has asked.
    repository = git.repository({".sandbox/setup.sh": "#!/bin/sh\necho ran >> /var/setup.count\nsleep 10\n"})
    answers = at_once(BUILDS, lambda _: spaces.http.post("/v1/image-builds", json={"repository": {"url": repository.url}}))
    told = [answer.json() for answer in answers]
    assert sorted(answer.status_code for answer in answers) == [200] * (BUILDS - 1) + [202], json.dumps(told)
    (build,) = {one["id"] for one in told}
    assert sum(bool(one.get("deduplicated")) for one in told) == BUILDS - 1, told
    seen = spaces.until_build(build, "Succeeded")
    assert seen["attempt"] == 1 and len(spaces.builds_of(repository)) == 1
    # Afterwards the image answers.
    again = at_once(BUILDS, lambda _: spaces.http.post("/v1/image-builds", json={"repository": {"url": repository.url}}))
    assert {(answer.status_code, answer.json()["cache"]["hit"], answer.json()["imageId"]) for answer in again} == {(200, True, seen["imageId"])}
    identity = spaces.ready(repository)
    assert spaces.text(identity, "cat /var/setup.count") == "ran"
    assert len(spaces.builds_of(repository)) == 1


def test_requests_for_one_key_fail_alike(spaces, git):
    repository = git.repository({".sandbox/setup.sh": "#!/bin/sh\nsleep 1\necho no licence >&2\nexit 9\n"})
    made = at_once(BUILDS, lambda _: spaces.begin(repository))
    shown = [spaces.until(identity, "Failed", seconds=PATIENCE) for identity in made]
    causes = {(one["status"]["reason"], one["lastFailure"]["exitCode"], one["lastFailure"]["outputTail"]) for one in shown}
    assert len(causes) == 1 and causes.pop()[:2] == ("image_build_failed", 9), shown[0]
    assert len(spaces.builds_of(repository)) == 1
