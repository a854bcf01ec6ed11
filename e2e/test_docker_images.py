"""Images on Docker: pulls from a real registry with and without credentials, silent registries, images that are odd or gone."""

import json
import socket
import threading

import pytest

from docker_engine import BUSYBOX, SCRATCH
from registries import PASSWORD, USER, Registry
from stack import wait_for

PULL_FAILED = "DOCKER::SANDBOX_IMAGE_PULL_FAILED"


@pytest.fixture(scope="module")
def registry(engine, tmp_path_factory):
    """A private registry with busybox in it, which the engine itself no longer has under that name."""
    made = Registry(tmp_path_factory.mktemp("registry"), private=True)
    name = f"{made.address}/team/busybox:7"
    engine.call("login", made.address, "--username", USER, "--password-stdin", input=PASSWORD + "\n")
    engine.call("tag", BUSYBOX, name)
    engine.call("push", name)
    engine.call("rmi", name)
    engine.call("logout", made.address)
    yield name
    engine.call("rmi", "-f", name, check=False)
    made.close()


@pytest.fixture
def absent(engine, registry):
    engine.call("rmi", "-f", registry, check=False)
    return registry


def failed(outcome):
    """Refused with the code of a failed pull, or accepted and then failed, saying why."""
    state, reason, message = outcome
    assert state == 500 and reason == PULL_FAILED or state == "Failed", outcome
    return f"{reason} {message}"


def test_pull_with_credentials(docker, absent, engine):
    image = {"uri": absent, "auth": {"username": USER, "password": PASSWORD}}
    box = docker.create(image)
    assert docker.state(box) == "Running", docker.status(box)
    got = docker.get(box).json()
    assert got["image"] == {"uri": absent}
    assert PASSWORD not in json.dumps(got)
    assert PASSWORD not in json.dumps(engine.container(box)), "the password is in the container's record"
    assert docker.text(box, "echo pulled") == "pulled"
    assert "pull" in docker.events(box).lower()


def test_present_image_is_not_pulled_again_and_needs_no_credentials(docker, absent):
    docker.create({"uri": absent, "auth": {"username": USER, "password": PASSWORD}})
    box = docker.create({"uri": absent})
    assert docker.state(box) == "Running"


@pytest.mark.parametrize("auth", [None, {"username": USER, "password": "wrong-" + PASSWORD}], ids=["none", "wrong"])
def test_pull_with_wrong_credentials(docker, absent, auth, docker_server):
    image = {"uri": absent, **({"auth": auth} if auth else {})}
    told = failed(docker.outcome(docker.post(image)))
    assert PASSWORD not in told
    assert "wrong-" not in docker_server.stack.log.read_text(errors="replace")


def test_image_that_the_registry_does_not_have(docker, registry):
    name = registry.replace("busybox:7", "nothing:1")
    image = {"uri": name, "auth": {"username": USER, "password": PASSWORD}}
    assert "nothing" in failed(docker.outcome(docker.post(image)))


def test_registry_that_is_not_there(docker):
    failed(docker.outcome(docker.post("127.0.0.1:1/none:1")))


@pytest.mark.parametrize("name", ["UPPER/case", "a b", "a:b:c", "-x", "x" * 300])
def test_name_that_no_image_can_have(docker, name):
    status, code, _ = docker.outcome(docker.post(name))
    assert status in (400, 500) and "::" in code


class Silent:
    """Accepts connections and never says anything."""

    def __init__(self):
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.address = f"127.0.0.1:{self.listener.getsockname()[1]}"
        self.held = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        while True:
            try:
                self.held.append(self.listener.accept()[0])
            except OSError:
                return

    def close(self):
        self.listener.close()
        for one in self.held:
            one.close()


def test_registry_that_never_answers(docker, engine):
    silent = Silent()
    try:
        answer = docker.post(f"{silent.address}/slow:1")
        assert answer.status_code == 202 and answer.json()["status"]["state"] == "Pending", answer.text
        box = answer.json()["id"]
        assert wait_for(lambda: silent.held), "nobody asked the registry"
        # Others are served meanwhile, and the delete does not wait for the pull.
        other = docker.create()
        assert docker.state(other) == "Running"
        assert docker.state(box) == "Pending"
        assert docker.delete(box) == 204
        assert docker.get(box).status_code == 404
        assert engine.container(box) is None
    finally:
        silent.close()


def test_image_of_one_static_program(docker):
    box = docker.create(SCRATCH, ["/program"])
    assert docker.state(box) == "Running", docker.status(box)
    assert wait_for(lambda: "alone" in docker.logs(box))
    assert docker.agent("GET", box, "ping").status_code == 200
    ended = docker.create(SCRATCH, ["/program", "exit"])
    assert wait_for(lambda: docker.state(ended) == "Failed"), docker.status(ended)


def test_image_that_is_removed_while_in_use(docker, engine):
    name = "sandglass-e2e/short-lived:1"
    engine.call("tag", BUSYBOX, name)
    box, other = docker.create(name), docker.create()
    engine.call("rmi", "-f", name)
    assert docker.get(box).json()["image"] == {"uri": name}
    listed = {item["id"]: item for item in docker.http.get("/v1/sandboxes?pageSize=200").json()["items"]}
    assert listed[box]["image"] == {"uri": name} and other in listed
    assert docker.text(box, "echo still") == "still"


def test_user_and_working_directory_of_the_image(docker, engine):
    name = engine.bring("sandglass-e2e/ann:1", engine_tree(), "USER ann", "WORKDIR /mnt", "ENV FROM_IMAGE=yes", "ENV PATH=/bin")
    box = docker.create(name, ["sh", "-c", "id -u; pwd; echo $FROM_IMAGE; sleep 600"])
    assert wait_for(lambda: "yes" in docker.logs(box)), docker.logs(box)
    words = docker.logs(box).split()
    assert "1000" in words and "/mnt" in words


def engine_tree():
    from docker_engine import busybox_tree

    return busybox_tree()


def test_labels_of_an_image_are_not_metadata(docker, engine):
    name = engine.bring("sandglass-e2e/labelled:1", engine_tree(), "ENV PATH=/bin", "LABEL team=blue",
                        "LABEL opensandbox.io/id=stolen", "LABEL opensandbox.io/expires-at=2001-01-01T00:00:00+00:00")
    box = docker.create(name, metadata={"mine": "1"})
    got = docker.get(box).json()
    assert got["metadata"] == {"mine": "1"} and got["expiresAt"] > "2020"
    manual = docker.create(name, timeout=None)
    got = docker.get(manual).json()
    assert "metadata" not in got and "expiresAt" not in got


def test_platform_that_is_asked_for(docker):
    box = docker.create(platform={"os": "linux", "arch": "amd64"})
    assert docker.get(box).json()["platform"] == {"os": "linux", "arch": "amd64"}
    failed(docker.outcome(docker.post(platform={"os": "linux", "arch": "arm64"})))
