"""Pools of repositories, on the embedded runtime and on a Docker engine: boxes of a repository's image that become workspaces when they are taken.

Real git over HTTP, real builds; over a kill -9 of the server; and what is left of images when pools and sandboxes are gone.
"""

import time

import pytest

from git_servers import TOKEN, USER
from stack import wait_for
from workspace_stacks import embedded, on_engine
from workspaces import Workspaces

pytestmark = pytest.mark.sandglass

COUNT = '#!/bin/sh\necho ran >> "/var/{0}.count"\n'


@pytest.fixture(scope="module", params=["embedded", "docker"])
def stack(request, tmp_path_factory):
    """A server that tests may kill, and that they leave running."""
    secrets = tmp_path_factory.mktemp("secrets")
    (secrets / "bot").write_text(TOKEN)
    sections = {"workspaces": {"secrets_dir": str(secrets)}}
    with embedded(**sections) if request.param == "embedded" else on_engine(request.getfixturevalue("engine"), **sections) as made:
        yield made


class Pools(Workspaces):
    """A client that also makes pools."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.pools = []

    def pool(self, name, repository, count=1, **body):
        repository = repository if isinstance(repository, dict) else {"url": repository.url}
        capacity = {"bufferMin": count, "bufferMax": count, "poolMin": 0, "poolMax": 20}
        answer = self.http.post("/v1/pools", json={"name": name, "repository": repository, "capacitySpec": capacity, **body})
        assert answer.status_code == 201, answer.text
        self.pools.append(name)
        return name

    def pool_view(self, name):
        return self.http.get(f"/v1/pools/{name}").json()

    def settled(self, name, count=1, image=None):
        """Waits until so many boxes wait, of this image if one is named; answers the image."""

        def there():
            view = self.pool_view(name)
            full = (view["status"]["available"], view["status"]["starting"]) == (count, 0)
            return full and image in (None, view.get("image", {}).get("uri"))

        assert wait_for(there, 120), self.pool_view(name)
        return self.pool_view(name)["image"]["uri"]

    def taken(self, pool, repository=None, **body):
        """The id of a sandbox that took a box of the pool and is ready."""
        if repository is not None:
            body["repository"] = repository if isinstance(repository, dict) else {"url": repository.url}
        answer = self.send({"timeout": 600, "extensions": {"poolRef": pool}, **body})
        assert answer.status_code == 202, answer.text
        identity = answer.json()["id"]
        self.until_ready(identity)
        return identity

    def close(self):
        for name in self.pools:
            assert self.http.delete(f"/v1/pools/{name}").status_code in (204, 404)
        held = lambda: [image for image in self.built_images() if image["sandboxCount"]]  # noqa: E731
        for identity in list(self.made):
            self.delete(identity)
        # Neither a box nor a sandbox holds an image any more.
        assert wait_for(lambda: not held(), 60), held()
        super().close()


@pytest.fixture
def spaces(stack):
    stack.revive()
    made = Pools(stack.url, stack.key)
    yield made
    stack.revive()
    made.close()


def place(spaces, identity):
    return spaces.show(identity)["source"]["repositories"][0]["path"]


def waiting(spaces, pool):
    return spaces.pool_view(pool)["status"]["available"]


def test_a_sandbox_takes_a_box_that_waits(spaces, git):
    repository = git.repository({".sandbox/setup.sh": COUNT.format("setup"), ".sandbox/start.sh": COUNT.format("start"), "version": "1\n"})
    pool = spaces.pool("web", repository)
    image = spaces.settled(pool)
    # Boxes of builds are sandboxes; those that wait are none.
    listed = spaces.http.get("/v1/sandboxes").json()["items"]
    assert [sandbox for sandbox in listed if sandbox.get("metadata", {}).get("role") != "build"] == []
    identity = spaces.taken(
        pool,
        repository,
        env={"WHO": "ann"},
        entrypoint=["sh", "-c", "echo $WHO > /tmp/who; exec sleep 1000"],
        services=[{"name": "app", "command": ["sh", "-c", "echo $WHO > /tmp/app; exec sleep 1000"], "required": True}],
    )
    shown = spaces.show(identity)
    assert shown["image"]["uri"] == image and shown["agent"]["state"] == "Attached"
    assert shown["allocation"] == {"mode": "pool", "poolRef": pool, "state": "allocated"}
    history = spaces.history(identity)
    assert "pool.taken" in history and "pool.missed" not in history, history
    look = "cat /var/setup.count /var/start.count /tmp/who /tmp/app; echo $WHO $OPENSANDBOX_ID"
    assert spaces.text(identity, look) == f"ran\nran\nann\nann\nann {identity}"
    assert spaces.text(identity, f"git -C {place(spaces, identity)} rev-parse HEAD") == repository.head
    assert spaces.services(identity)["app"]["state"] == "Ready"
    spaces.settled(pool)
    # Without a repository in the request it is the pool's.
    second = spaces.taken(pool)
    assert second != identity and "pool.taken" in spaces.history(second)
    assert spaces.text(second, f"cat {place(spaces, second)}/version") == "1"


def test_a_box_syncs_to_the_commit_that_is_asked_for_and_the_pool_follows_the_build(spaces, git):
    repository = git.repository({".sandbox/setup.sh": COUNT.format("setup"), "version": "1\n"})
    pool = spaces.pool("moving", repository)
    first = spaces.settled(pool)
    commit = repository.commit({"version": "2\n"})
    identity = spaces.taken(pool, repository)
    assert "pool.taken" in spaces.history(identity)
    at = place(spaces, identity)
    assert spaces.text(identity, f"cat {at}/version; git -C {at} rev-parse HEAD") == f"2\n{commit}"
    # The build of the new commit, which that create or the next box began, is followed.
    assert wait_for(lambda: spaces.pool_view(pool).get("image", {}).get("uri") not in (None, first), 120), spaces.pool_view(pool)
    newer = spaces.settled(pool)
    assert newer != first
    second = spaces.taken(pool, repository)
    assert spaces.show(second)["image"]["uri"] == newer and "pool.taken" in spaces.history(second)
    assert spaces.text(second, f"cat {place(spaces, second)}/version; cat /var/setup.count").startswith("2\nran")


def test_a_private_repository_by_a_secret_of_the_server(spaces, git, request):
    repository = git.repository({"version": "1\n"}, name=f"private/pooled-{request.node.callspec.id}")
    credential = {"username": USER, "secretRef": "bot"}
    pool = spaces.pool("private", {"url": repository.url, "credential": credential})
    spaces.settled(pool)
    assert TOKEN not in spaces.http.get("/v1/pools/private").text and "credential" not in spaces.pool_view(pool)["repository"]
    identity = spaces.taken(pool)
    at = place(spaces, identity)
    repository.commit({"version": "2\n"})
    assert "pool.taken" in spaces.history(identity)
    # The credential came with the assignment.
    assert spaces.text(identity, f"cd {at} && git pull -q && cat version") == "2"


def test_a_killed_server_finds_what_waits_and_carries_on(spaces, stack, git):
    repository = git.repository({"version": "1\n"})
    pool = spaces.pool("kept", repository, 2)
    spaces.settled(pool, 2)
    builds = len(spaces.builds_of(repository))
    stack.kill()
    stack.start()
    assert wait_for(lambda: waiting(spaces, pool) == 2, 60), spaces.pool_view(pool)
    identity = spaces.taken(pool, repository)
    assert "pool.taken" in spaces.history(identity), spaces.history(identity)
    # Between the answer and the assignment, wherever that is.
    for delay in (0.0, 0.01, 0.03, 0.1):
        assert wait_for(lambda: waiting(spaces, pool) == 2, 60), spaces.pool_view(pool)
        answer = spaces.send({"timeout": 600, "extensions": {"poolRef": pool}})
        assert answer.status_code == 202, answer.text
        time.sleep(delay)
        stack.kill()
        stack.start()
        identity = answer.json()["id"]
        spaces.until_ready(identity)
        assert spaces.text(identity, f"cat {place(spaces, identity)}/version; echo $OPENSANDBOX_ID") == f"1\n{identity}"
    assert len(spaces.builds_of(repository)) == builds


def test_what_does_not_fit_starts_cold_and_what_cannot_be_is_refused(spaces, git):
    repository, other = git.repository({"version": "1\n"}), git.repository({"version": "other\n"})
    pool = spaces.pool("strict", repository)
    spaces.settled(pool)
    identity = spaces.taken(pool, other)
    assert "pool.missed" in spaces.history(identity)
    assert spaces.text(identity, f"cat {place(spaces, identity)}/version") == "other"
    for body in ({"image": {"uri": "x"}}, {"repository": repository.url}):
        refused = spaces.http.post("/v1/sandboxes", json={"extensions": {"poolRef": pool}, **body})
        assert 400 <= refused.status_code < 500, refused.text
    token = {"url": repository.url, "credential": {"token": TOKEN}}
    capacity = spaces.pool_view(pool)["capacitySpec"]
    refused = spaces.http.post("/v1/pools", json={"name": "x", "repository": token, "capacitySpec": capacity})
    assert refused.status_code == 400 and "secretRef" in refused.text and TOKEN not in refused.text
