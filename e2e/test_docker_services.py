"""With real services beside the server: snapshots in PostgreSQL, renewals through Redis."""

import json
import os
import subprocess
from datetime import datetime, timedelta, timezone

import pytest

from docker_engine import BUSYBOX
from services import Postgres, Redis
from stack import wait_for

QUEUE = "opensandbox:renew:intent"
RENEWS = {"access.renew.extend.seconds": "86400"}


@pytest.fixture(scope="module")
def postgres():
    made = Postgres().start()
    yield made
    made.close()


@pytest.fixture
def redis():
    made = Redis().start()
    yield made
    made.close()


def end_of(docker, box):
    return datetime.fromisoformat(docker.get(box).json()["expiresAt"].replace("Z", "+00:00"))


def later(docker, box, hours=20):
    return end_of(docker, box) > datetime.now(timezone.utc) + timedelta(hours=hours)


# ---------------------------------------------------------------- PostgreSQL


def taken(docker, box, name):
    made = docker.http.post(f"/v1/sandboxes/{box}/snapshots", json={"name": name}).json()["id"]
    assert wait_for(lambda: docker.http.get(f"/v1/snapshots/{made}").json()["status"]["state"] == "Ready")
    return made


def test_snapshots_are_kept_in_postgresql(on_docker, postgres):
    config = {"store": {"type": "postgresql", "postgresql": {"dsn": postgres.dsn}}}
    stack, docker = on_docker(image=BUSYBOX, config=config)
    box = docker.create()
    snapshot = taken(docker, box, "first")
    assert postgres.query(f"select state from sandglass.snapshots where id = '{snapshot}'") == "Ready"
    stack.kill()
    stack.start()
    told = docker.http.get(f"/v1/snapshots/{snapshot}").json()
    assert told["name"] == "first" and told["sandboxId"] == box
    copy = docker.create(snapshotId=snapshot)
    assert docker.state(copy) == "Running"
    for one in (copy, box):
        assert docker.delete(one) == 204
    assert docker.http.delete(f"/v1/snapshots/{snapshot}").status_code == 204
    assert postgres.query("select count(*) from sandglass.snapshots") == "0"


def test_dsn_from_the_environment_and_never_in_the_log(on_docker, postgres):
    stack, docker = on_docker(start=False, image=BUSYBOX, config={"store": {"type": "postgresql"}})
    stack.extra = {"OPENSANDBOX_STORE_POSTGRESQL_DSN": postgres.dsn}
    stack.start()
    box = docker.create()
    snapshot = taken(docker, box, "env")
    assert docker.delete(box) == 204
    assert docker.http.delete(f"/v1/snapshots/{snapshot}").status_code == 204
    assert "store-password" not in stack.log.read_text(errors="replace")


def test_snapshots_move_between_the_stores(on_docker, postgres):
    stack, docker = on_docker(image=BUSYBOX)
    box = docker.create()
    snapshot = taken(docker, box, "moves")
    stack.stop()
    path = f"sqlite:{stack.home / 'store.db'}"
    done = subprocess.run([stack.binary, "store", "migrate", "--from", path, "--to", postgres.dsn],
                          capture_output=True, text=True, check=False, env={**os.environ, **stack.environment()})
    assert done.returncode == 0, done.stderr
    assert postgres.query(f"select name from sandglass.snapshots where id = '{snapshot}'") == "moves"
    assert "store-password" not in done.stdout + done.stderr
    stack.start()
    assert docker.delete(box) == 204
    assert docker.http.delete(f"/v1/snapshots/{snapshot}").status_code == 204
    postgres.query("delete from sandglass.snapshots")


# ---------------------------------------------------------------- renewals


def test_renewed_by_use_through_the_proxy(on_docker):
    _, docker = on_docker(image=BUSYBOX, config={"renew_intent": {"enabled": True, "min_interval_seconds": 60}})
    used, unused, skipped, plain = (docker.create(extensions=RENEWS if n < 3 else {}) for n in range(4))
    before = {box: docker.get(box).json()["expiresAt"] for box in (unused, skipped, plain)}
    assert docker.agent("GET", used, "ping").status_code == 200
    assert docker.agent("GET", plain, "ping").status_code == 200
    assert docker.agent("GET", skipped, "ping", headers={"OpenSandbox-Access-Renew": "skip"}).status_code == 200
    assert wait_for(lambda: later(docker, used))
    # The cool-down: at once again changes nothing.
    end = end_of(docker, used)
    for _ in range(5):
        docker.agent("GET", used, "ping")
    assert end_of(docker, used) == end
    assert {box: docker.get(box).json()["expiresAt"] for box in before} == before
    docker.close()


def intent(box, seconds=0, **more):
    seen = datetime.now(timezone.utc) - timedelta(seconds=seconds)
    return json.dumps({"sandbox_id": box, "observed_at": seen.isoformat().replace("+00:00", "Z"), **more})


def test_renewed_by_messages_through_redis(on_docker, redis):
    config = {"renew_intent": {"enabled": True, "redis": {"enabled": True, "dsn": redis.dsn, "consumer_concurrency": 2}}}
    stack, docker = on_docker(image=BUSYBOX, config=config)
    used, old = docker.create(extensions=RENEWS), docker.create(extensions=RENEWS)
    before = docker.get(old).json()["expiresAt"]
    for nonsense in ("", "{", "[]", "7", json.dumps({"sandbox_id": used}), intent("unknown"), intent(old, seconds=400), "x" * 100_000):
        redis.call("LPUSH", QUEUE, nonsense)
    redis.call("LPUSH", QUEUE, intent(used, port=8080, request_uri="/x"))
    assert wait_for(lambda: later(docker, used))
    assert redis.call("LLEN", QUEUE) == 0
    assert docker.get(old).json()["expiresAt"] == before

    # Redis goes away and comes back: messages are taken again, and the proxy worked meanwhile.
    redis.stop()
    third = docker.create(extensions=RENEWS)
    assert docker.agent("GET", third, "ping").status_code == 200
    redis.start()
    fourth = docker.create(extensions=RENEWS)
    redis.call("LPUSH", QUEUE, intent(fourth))
    assert wait_for(lambda: later(docker, fourth))
    assert redis.password not in stack.log.read_text(errors="replace")
    docker.close()


def test_server_that_starts_before_its_redis(on_docker, redis):
    redis.stop()
    config = {"renew_intent": {"enabled": True, "redis": {"enabled": True, "dsn": redis.dsn}}}
    _, docker = on_docker(image=BUSYBOX, config=config)
    box = docker.create(extensions=RENEWS)
    redis.start()
    redis.call("LPUSH", QUEUE, intent(box))
    assert wait_for(lambda: later(docker, box))
    docker.close()
