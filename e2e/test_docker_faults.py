"""The engine stops, restarts, dies, hangs; the server dies: what is told meanwhile, and that everything comes back by itself."""

import subprocess
from datetime import datetime, timedelta, timezone

import httpx
import pytest

from docker_engine import BUSYBOX, Engine
from docker_stack import DockerStack
from plain import Plain
from stack import wait_for

LOST = (503, "DOCKER::SANDBOX_QUERY_FAILED")


@pytest.fixture
def shaky():
    """An engine of the test's own, a server and a client; audited, since whatever happens nothing may stay."""
    engine, stack = Engine(), None
    try:
        engine.start().images(BUSYBOX)
        stack = DockerStack(engine).start()
        client = Plain(stack.url, stack.key, BUSYBOX)
        yield engine, stack, client
        client.close()
        problems = stack.close() + engine.wait_clean()
    finally:
        if stack:
            stack.close()
        engine.close()
    assert not problems, "\n".join(problems)


def healthy(docker):
    return httpx.get(f"{docker.http.base_url}/health", timeout=15).status_code == 200


def coded(answer):
    return answer.status_code, answer.json()["code"]


def away(docker, box):
    """The answers while no engine is there."""
    assert wait_for(lambda: docker.get(box).status_code == 503), docker.get(box).text
    assert coded(docker.get(box)) == LOST and coded(docker.http.get("/v1/sandboxes")) == LOST
    assert healthy(docker)
    assert docker.http.get("/readyz").status_code == 503
    answer = docker.post()
    assert answer.status_code == 503 and "::" in answer.json()["code"], answer.text
    for method, path in (("POST", "pause"), ("POST", "snapshots"), ("DELETE", "")):
        answer = docker.http.request(method, f"/v1/sandboxes/{box}/{path}".rstrip("/"), timeout=60)
        assert answer.status_code in (500, 503) and "::" in answer.json()["code"], answer.text
    assert healthy(docker)


def back(docker, box, state="Running"):
    assert wait_for(lambda: docker.get(box).status_code == 200), docker.get(box).text
    assert docker.state(box) == state, docker.status(box)
    assert wait_for(lambda: docker.http.get("/readyz").status_code == 200)


def test_engine_stopped_and_started(shaky):
    engine, _, docker = shaky
    box = docker.create()
    engine.stop()
    away(docker, box)
    engine.start()
    # The delete of the time without an engine is owed and may be carried out now; nothing else may have happened to it.
    assert wait_for(lambda: docker.get(box).status_code in (200, 404))
    other = docker.create()
    assert docker.text(other, "echo works again") == "works again"


def test_engine_killed_keeps_what_runs(shaky):
    engine, _, docker = shaky
    box = docker.create(metadata={"a": "1"})
    before = docker.get(box).json()
    engine.kill()
    assert wait_for(lambda: docker.get(box).status_code == 503)
    assert healthy(docker)
    engine.start()
    back(docker, box)
    assert docker.get(box).json() == before
    assert docker.text(box, "echo same one") == "same one"


def test_engine_that_hangs(shaky):
    engine, _, docker = shaky
    box = docker.create()
    engine.freeze()
    try:
        assert all(healthy(docker) for _ in range(20))
        # The proxy goes on: the container does not need its engine.
        assert docker.text(box, "echo without an engine") == "without an engine"
        answer = docker.get(box)
        assert answer.status_code in (200, 503), answer.text
    finally:
        engine.thaw()
    back(docker, box)


def test_engine_without_live_restore_takes_its_containers_along():
    engine = Engine(live_restore=False).start().images(BUSYBOX)
    stack = DockerStack(engine).start()
    docker = Plain(stack.url, stack.key, BUSYBOX)
    try:
        box = docker.create()
        engine.restart()
        assert wait_for(lambda: docker.state(box) in ("Failed", "Terminated")), docker.status(box)
        docker.close()
        problems = stack.close() + engine.wait_clean()
    finally:
        stack.close()
        engine.close()
    assert not problems, "\n".join(problems)


def soon(seconds):
    return {"expiresAt": (datetime.now(timezone.utc) + timedelta(seconds=seconds)).isoformat()}


def test_end_that_falls_into_the_absence(shaky):
    engine, _, docker = shaky
    box, other = docker.create(), docker.create()
    assert docker.http.post(f"/v1/sandboxes/{box}/renew-expiration", json=soon(3)).status_code == 200
    engine.kill()
    assert wait_for(lambda: docker.get(box).status_code == 503)
    ended = datetime.now(timezone.utc) + timedelta(seconds=4)
    wait_for(lambda: datetime.now(timezone.utc) > ended, 10)
    engine.start()
    assert wait_for(lambda: engine.container(box) is None), docker.status(box)
    assert wait_for(lambda: docker.get(box).status_code == 404)
    back(docker, other)


def test_container_removed_while_the_engine_is_not_watched(shaky):
    """The server is stopped meanwhile: what it knew must not be believed."""
    engine, stack, docker = shaky
    box, other = docker.create(), docker.create()
    stack.stop()
    engine.call("rm", "-f", f"sandbox-{box}")
    stack.start()
    assert docker.get(box).status_code == 404
    assert docker.state(other) == "Running"


def test_server_that_starts_before_its_engine(shaky):
    engine, stack, docker = shaky
    box = docker.create()
    stack.stop()
    engine.stop()
    stack.start(wait=False)
    assert wait_for(lambda: answers(docker))
    assert coded(docker.get(box)) == LOST
    assert docker.http.get("/readyz").status_code == 503
    engine.start()
    back(docker, box)


def answers(docker):
    try:
        return healthy(docker)
    except httpx.TransportError:
        return False


def test_server_killed_and_restarted(shaky):
    engine, stack, docker = shaky
    box = docker.create(metadata={"a": "1"})
    assert docker.http.patch(f"/v1/sandboxes/{box}/metadata", json={"b": "2"}).status_code == 200
    assert docker.http.post(f"/v1/sandboxes/{box}/renew-expiration", json=soon(4000)).status_code == 200
    assert docker.http.post(f"/v1/sandboxes/{box}/pause").status_code == 202
    before = docker.get(box).json()
    stack.kill()
    stack.start()
    after = docker.get(box).json()
    # The moment of the pause is nowhere on record: the engine does not keep it.
    for told in (before, after):
        del told["status"]["lastTransitionAt"]
    assert after == before
    assert docker.http.post(f"/v1/sandboxes/{box}/resume").status_code == 202
    assert docker.text(box, "echo after") == "after"


def test_full_disk_of_the_engine(tmp_path):
    engine = Engine()
    disk = engine.home / "data"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(disk)], check=True)
    stack = DockerStack(engine)
    try:
        engine.start().images(BUSYBOX)
        stack.start()
        docker = Plain(stack.url, stack.key, BUSYBOX)
        box = docker.create()
        assert docker.run(box, "dd if=/dev/zero of=/fill bs=64k").error
        state, code, message = docker.outcome(docker.post())
        assert state in (429, 500, "Failed") and "space" in message, (state, code, message)
        assert docker.state(box) == "Running" and healthy(docker)
        assert docker.text(box, "echo still here") == "still here"
        assert docker.delete(box) == 204
        again = docker.create()
        assert docker.text(again, "echo room again") == "room again"
        docker.close()
        problems = stack.close() + engine.wait_clean()
    finally:
        stack.close()
        engine.close()
    assert not problems, "\n".join(problems)


def test_client_that_hangs_up_during_its_create(shaky):
    engine, _, docker = shaky
    for _ in range(5):
        try:
            httpx.post(f"{docker.http.base_url}/v1/sandboxes", headers=docker.http.headers, timeout=0.05,
                       json={"image": {"uri": BUSYBOX}, "entrypoint": ["sleep", "600"], "timeout": 600, "resourceLimits": {},
                             "metadata": {"hung": "up"}})
        except httpx.TimeoutException:
            continue

    def listed():
        found = docker.http.get("/v1/sandboxes", params={"metadata": "hung=up"}).json()["items"]
        return {item["id"] for item in found if item["status"]["state"] == "Running"}

    # Each is either not there at all or found by its metadata: nothing runs that nobody can find.
    assert wait_for(lambda: listed() == {c["Labels"]["opensandbox.io/id"] for c in engine.containers()})
    docker.made += list(listed())
