"""Volumes on Docker: host paths and the tricks against their allow-list, named volumes and whose they are."""

import os
from types import SimpleNamespace

import pytest

from docker_engine import MANAGED, PYTHON
from stack import wait_for


@pytest.fixture(scope="module")
def allowed(engine, tmp_path_factory):
    """A server that allows one folder, with things around it that must stay out of reach."""
    from docker_stack import DockerStack
    from plain import Plain

    root = tmp_path_factory.mktemp("volumes").resolve()
    for folder in ("data", "data-other", "outside"):
        (root / folder).mkdir()
    (root / "outside" / "secret").write_text("s3cret")
    (root / "data" / "file").write_text("a file")
    os.symlink(root / "outside", root / "data" / "way-out")
    os.symlink("..", root / "data" / "up")
    stack = DockerStack(engine, {"storage": {"allowed_host_paths": [str(root / "data")]}}).start()
    client = Plain(stack.url, stack.key, PYTHON)
    yield SimpleNamespace(docker=client, root=root, data=root / "data")
    client.close()
    assert not stack.close()


@pytest.fixture
def volumes(engine, allowed):
    """Names of volumes; removed after the test, and before them the sandboxes that use them."""
    names = []

    def name(word):
        names.append(f"e2e-{word}-{len(names)}-{os.getpid()}")
        return names[-1]

    yield name
    for box in allowed.docker.made:
        allowed.docker.delete(box)
    allowed.docker.made.clear()
    for one in names:
        engine.call("volume", "rm", "-f", one, check=False)


def host(path, target="/data", **keys):
    return {"name": "data", "host": {"path": str(path)}, "mountPath": target, **keys}


def named(claim, target="/data", **keys):
    more = {key: keys.pop(key) for key in ("createIfNotExists", "deleteOnSandboxTermination") if key in keys}
    return {"name": "data", "pvc": {"claimName": claim, **more}, "mountPath": target, **keys}


def refused(allowed, volume):
    state, code, message = allowed.docker.outcome(allowed.docker.post(volumes=[volume]))
    return state, code


def test_host_folder(allowed):
    docker = allowed.docker
    box = docker.create(volumes=[host(allowed.data / "fresh" / "deep")])
    docker.text(box, "echo from-inside > /data/x")
    assert (allowed.data / "fresh" / "deep" / "x").read_text() == "from-inside\n"
    docker.delete(box)
    assert (allowed.data / "fresh" / "deep" / "x").exists()


def test_host_folder_read_only_and_sub_path(allowed):
    docker = allowed.docker
    (allowed.data / "parts" / "one").mkdir(parents=True)
    (allowed.data / "parts" / "one" / "here").write_text("part one")
    box = docker.create(volumes=[host(allowed.data / "parts", readOnly=True, subPath="one")])
    assert docker.text(box, "cat /data/here") == "part one"
    assert docker.run(box, "touch /data/new").error


def test_host_file(allowed):
    box = allowed.docker.create(volumes=[host(allowed.data / "file", "/etc/given", readOnly=True)])
    assert allowed.docker.text(box, "cat /etc/given") == "a file"


@pytest.mark.parametrize("path", ["../outside", "../data-other", "way-out", "way-out/deeper", "up/outside", "/etc", "/"])
def test_host_path_outside(allowed, path):
    path = allowed.data / path if not path.startswith("/") else path
    lexical = {(400, "VOLUME::INVALID_HOST_PATH"), (400, "VOLUME::HOST_PATH_NOT_ALLOWED")}
    assert refused(allowed, host(path)) in lexical
    assert not (allowed.root / "outside" / "deeper").exists()


@pytest.mark.parametrize("sub", ["way-out", "up/outside"])
def test_sub_path_that_leads_out_through_a_link(allowed, sub):
    state, code = refused(allowed, host(allowed.data, subPath=sub))
    assert state == 400 and code in ("VOLUME::HOST_PATH_NOT_ALLOWED", "VOLUME::INVALID_SUB_PATH")


def test_nothing_is_allowed_by_default(docker, tmp_path):
    state, code, _ = docker.outcome(docker.post(volumes=[host(tmp_path)]))
    assert (state, code) == (400, "VOLUME::HOST_PATH_NOT_ALLOWED")


def test_named_volume_outlives_its_sandbox(allowed, engine, volumes):
    docker, name = allowed.docker, volumes("kept")
    first = docker.create(volumes=[named(name)])
    docker.text(first, "echo kept > /data/a")
    assert engine.volumes()[name]["Labels"] == {MANAGED: "server"}
    docker.delete(first)
    second = docker.create(volumes=[named(name, readOnly=True)])
    assert docker.text(second, "cat /data/a") == "kept"
    assert docker.run(second, "touch /data/b").error


def test_named_volume_that_goes_with_its_sandbox(allowed, engine, volumes):
    docker, name = allowed.docker, volumes("gone")
    box = docker.create(volumes=[named(name, deleteOnSandboxTermination=True)])
    assert name in engine.volumes()
    assert docker.delete(box) == 204
    assert wait_for(lambda: name not in engine.volumes())


def test_volume_of_somebody_else_is_never_removed(allowed, engine, volumes):
    docker, name = allowed.docker, volumes("theirs")
    engine.call("volume", "create", name)
    box = docker.create(volumes=[named(name, deleteOnSandboxTermination=True)])
    assert docker.delete(box) == 204
    assert name in engine.volumes()


def test_missing_named_volume(allowed, volumes):
    assert refused(allowed, named(volumes("missing"), createIfNotExists=False)) == (400, "VOLUME::PVC_NOT_FOUND")


def test_failed_create_leaves_no_volume_that_was_to_go(allowed, engine, volumes):
    name = volumes("failed")
    body = {"volumes": [named(name, deleteOnSandboxTermination=True)], "entrypoint": ["/no/such/program"]}
    answer = allowed.docker.post(**body)
    state = allowed.docker.outcome(answer)[0]
    if answer.status_code == 202:
        assert state == "Failed"
        allowed.docker.delete(answer.json()["id"])
    assert wait_for(lambda: name not in engine.volumes())


def test_sub_path_of_a_named_volume(allowed, engine, volumes):
    docker, name = allowed.docker, volumes("parts")
    box = docker.create(volumes=[named(name)])
    docker.text(box, "mkdir -p /data/one /data/two; echo 1 > /data/one/a; ln -s / /data/root")
    part = docker.create(volumes=[named(name, subPath="one")])
    assert docker.text(part, "ls /data") == "a"
    state, code = refused(allowed, named(name, subPath="root"))
    assert state == 400 and code.startswith("VOLUME::"), code


def test_anonymous_volumes_go_with_the_sandbox(docker, engine):
    from docker_engine import busybox_tree

    name = engine.bring("sandglass-e2e/anonymous:1", busybox_tree(), "ENV PATH=/bin", "VOLUME /cache")
    before = set(engine.volumes())
    box = docker.create(name)
    assert set(engine.volumes()) - before
    assert docker.delete(box) == 204
    assert wait_for(lambda: set(engine.volumes()) == before)


def test_several_volumes_at_once(allowed, volumes):
    one, two = named(volumes("a"), "/a"), {**named(volumes("b"), "/b"), "name": "other"}
    box = allowed.docker.create(volumes=[one, two])
    assert allowed.docker.text(box, "touch /a/x /b/y; ls /a /b | tr '\\n' ' '").split() == ["/a:", "x", "/b:", "y"]


def test_ossfs_without_its_program(allowed):
    store = {"bucket": "bucket-one", "endpoint": "oss.example", "accessKeyId": "id", "accessKeySecret": "s3cr3t-key"}
    volume = {"name": "data", "ossfs": store, "mountPath": "/data"}
    state, code, message = allowed.docker.outcome(allowed.docker.post(volumes=[volume]))
    assert state in (500, "Failed"), (state, code)
    assert "s3cr3t-key" not in message
    if state == 500:
        assert code in ("VOLUME::OSSFS_MOUNT_FAILED", "VOLUME::INVALID_OSSFS_MOUNT_ROOT")
