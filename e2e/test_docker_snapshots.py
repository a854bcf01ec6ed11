"""Snapshots on Docker: what a copy has of its source and what it must not have, failures, and a server that dies meanwhile."""

import pytest

from docker_engine import ID
from stack import wait_for


def take(docker, box, **body):
    answer = docker.http.post(f"/v1/sandboxes/{box}/snapshots", json=body or None)
    assert answer.status_code == 202, answer.text
    return answer.json()["id"]


def snapshot_state(docker, snapshot):
    answer = docker.http.get(f"/v1/snapshots/{snapshot}")
    return answer.json()["status"]["state"] if answer.status_code == 200 else answer.status_code


def ready(docker, snapshot):
    assert wait_for(lambda: snapshot_state(docker, snapshot) not in ("Creating",))
    assert snapshot_state(docker, snapshot) == "Ready", docker.http.get(f"/v1/snapshots/{snapshot}").text
    return snapshot


@pytest.fixture
def snapshots(docker):
    made = []
    yield made
    # What a sandbox is made from is not removed.
    for box in docker.made:
        docker.delete(box)
    for snapshot in made:
        answer = docker.http.delete(f"/v1/snapshots/{snapshot}")
        assert answer.status_code in (204, 404), answer.text


def test_restore_has_the_files_and_nothing_else_of_its_source(docker, engine, snapshots):
    source = docker.create(
        timeout=120,
        metadata={"team": "source"},
        env={"SECRET_OF_SOURCE": "x"},
        platform={"os": "linux", "arch": "amd64"},
        extensions={"opensandbox.extensions.of": "source", "access.renew.extend.seconds": "300"},
    )
    docker.text(source, "echo kept > /root/kept")
    snapshots.append(ready(docker, take(docker, source, name="first")))
    made = docker.create(snapshotId=snapshots[0], timeout=None, entrypoint=None)
    got = docker.get(made).json()
    assert got["snapshotId"] == snapshots[0] and "image" not in got
    assert not {"metadata", "expiresAt", "platform", "extensions"} & set(got), got
    assert got["entrypoint"] == ["tail", "-f", "/dev/null"]
    assert docker.text(made, "cat /root/kept; echo [$OPENSANDBOX_ID]") == f"kept\n[{made}]"
    labels = {name: value for name, value in engine.container(made)["Config"]["Labels"].items() if value}
    assert labels[ID] == made and labels.get("opensandbox.io/snapshot-id") == snapshots[0]
    assert labels.get("opensandbox.io/manual-cleanup") == "true"
    assert not {"opensandbox.io/expires-at", "opensandbox.io/access-renew-extend-seconds", "opensandbox.io/extensions.of", "team"} & set(labels)


def test_restored_one_is_independent(docker, snapshots):
    source = docker.create()
    docker.text(source, "echo 1 > /root/n")
    snapshots.append(ready(docker, take(docker, source)))
    docker.text(source, "echo 2 > /root/n")
    one, two = (docker.create(snapshotId=snapshots[0]) for _ in range(2))
    docker.text(one, "echo 3 > /root/n")
    assert [docker.text(box, "cat /root/n") for box in (source, one, two)] == ["2", "3", "1"]
    docker.delete(source)
    assert docker.text(two, "cat /root/n") == "1"


def test_snapshot_of_a_restored_one(docker, snapshots):
    source = docker.create(metadata={"gen": "1"})
    snapshots.append(ready(docker, take(docker, source)))
    second = docker.create(snapshotId=snapshots[0], metadata={"gen": "2"})
    docker.text(second, "echo second > /root/n")
    deeper = ready(docker, take(docker, second))
    third = docker.create(snapshotId=deeper)
    assert docker.text(third, "cat /root/n") == "second" and "metadata" not in docker.get(third).json()
    docker.delete(third)
    docker.delete(second)
    snapshots.insert(0, deeper)


def test_several_at_once_and_a_source_that_goes_on(docker, snapshots):
    source = docker.create()
    snapshots.extend(take(docker, source, name=f"n{n}") for n in range(4))
    assert docker.text(source, "echo alive") == "alive"
    for snapshot in snapshots:
        ready(docker, snapshot)
    assert docker.state(source) == "Running"


def test_image_removed_behind_our_back(docker, engine, snapshots):
    source = docker.create()
    snapshots.append(ready(docker, take(docker, source)))
    engine.call("rmi", "-f", f"opensandbox-snapshots:{snapshots[0]}")
    state, code, message = docker.outcome(docker.post(snapshotId=snapshots[0]))
    assert state in (404, 409, 500, "Failed"), (state, code, message)
    assert docker.http.delete(f"/v1/snapshots/{snapshots[0]}").status_code == 204


def test_server_that_dies_while_it_commits(on_docker, engine):
    stack, docker = on_docker()
    source = docker.create()
    docker.text(source, "dd if=/dev/urandom of=/root/big bs=1M count=200 2>/dev/null")
    taken = [take(docker, source) for _ in range(3)]
    stack.kill()
    stack.start()
    for snapshot in taken:
        assert wait_for(lambda snapshot=snapshot: snapshot_state(docker, snapshot) in ("Ready", "Failed"), 60), snapshot_state(docker, snapshot)
        assert (snapshot_state(docker, snapshot) == "Ready") <= (snapshot in engine.snapshots())
    for snapshot in taken:
        assert docker.http.delete(f"/v1/snapshots/{snapshot}").status_code == 204
    # The engine goes on with what the killed server asked for, and holds the container still meanwhile. What becomes whole only then goes, too.
    assert wait_for(lambda: not engine.container(source)["State"]["Paused"], 60)
    assert wait_for(lambda: not engine.snapshots() & set(taken)), engine.snapshots()
    docker.delete(source)
