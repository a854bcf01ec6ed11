"""Several tenants on one Docker engine: their marks on containers, volumes and snapshots, and what these are worth."""

import os
from types import SimpleNamespace

import pytest

from docker_engine import BUSYBOX, ID, PYTHON
from plain import Plain
from stack import wait_for
from tenants import SharedDockerStack

TENANT = "opensandbox.io/tenant"


@pytest.fixture(scope="module")
def shared(engine):
    stack = SharedDockerStack(engine).start()
    yield stack
    stack.clear()
    problems = stack.close()
    assert not problems, "\n".join(problems)


@pytest.fixture
def tenants(shared):
    made = SimpleNamespace(**{name: Plain(shared.url, f"{name}-key", PYTHON) for name in shared.names})
    yield made
    for client in (made.a, made.b):
        client.close()
    shared.clear()


@pytest.fixture
def volumes(engine):
    """Names of volumes; to be asked for before the sandboxes that use them, which go first then."""
    names = []

    def name(label=None, made=False):
        names.append(f"e2e-tenants-{len(names)}-{os.getpid()}")
        if made:
            labels = ["--label", f"{TENANT}={label}"] if label else []
            engine.call("volume", "create", *labels, names[-1])
        return names[-1]

    yield name
    for one in names:
        engine.call("volume", "rm", "-f", one, check=False)


def named(claim, **more):
    return {"name": "data", "pvc": {"claimName": claim, **more}, "mountPath": "/data"}


def test_the_container_says_whose_it_is_and_nobody_else_finds_it(shared, tenants, engine):
    box = tenants.a.create(metadata={"team": "x"})
    assert engine.container(box)["Config"]["Labels"][TENANT] == "a"
    assert shared.listed("a") == [box] and shared.listed("b") == []
    assert tenants.b.get(box).status_code == 404
    assert tenants.b.http.delete(f"/v1/sandboxes/{box}").status_code == 404
    assert tenants.b.http.get(f"/v1/sandboxes/{box}/endpoints/8080").status_code == 404
    assert tenants.a.text(box, "echo mine") == "mine"
    # Nobody can put the mark on by asking for it.
    forged = tenants.b.post(metadata={TENANT: "a"})
    assert forged.status_code == 400, forged.text


def test_marks_are_the_truth_also_for_a_server_that_never_saw_the_sandbox(shared, tenants, engine):
    box = tenants.a.create()
    other = SharedDockerStack(engine, home=shared.home).start()
    try:
        assert other.listed("a") == [box] and other.listed("b") == []
    finally:
        other.kill()
        other.close()


def test_sandboxes_of_another_server_belong_to_whom_their_label_names(shared, tenants, engine):
    made = {}
    try:
        for owner in ("a", "b", None):
            identity = f"00000000-0000-4000-8000-00000000000{len(made)}"
            labels = ["--label", f"{ID}={identity}", "--label", "opensandbox.io/manual-cleanup=true"]
            labels += ["--label", f"{TENANT}={owner}"] if owner else []
            engine.call("run", "-d", "--name", f"sandbox-{identity}", *labels, BUSYBOX, "sleep", "600")
            made[identity] = owner
        for tenant in ("a", "b"):
            mine = [identity for identity, owner in made.items() if owner == tenant]
            assert wait_for(lambda: sorted(shared.listed(tenant)) == mine), shared.listed(tenant)
    finally:
        for identity in made:
            engine.call("rm", "-f", f"sandbox-{identity}", check=False)


def test_named_volumes_are_the_tenants_that_made_them(volumes, tenants):
    claim = volumes()
    box = tenants.a.create(volumes=[named(claim)])
    tenants.a.text(box, "echo secret > /data/file")
    for more in ({}, {"createIfNotExists": False}):
        refused = tenants.b.post(volumes=[named(claim, **more)])
        assert (refused.status_code, refused.json()["code"]) == (400, "VOLUME::PVC_NOT_FOUND"), refused.text
    again = tenants.a.create(volumes=[named(claim)])
    assert tenants.a.text(again, "cat /data/file") == "secret"

    given, unmarked = volumes("b", made=True), volumes(made=True)
    theirs = tenants.b.create(volumes=[named(given)])
    assert tenants.b.text(theirs, "ls -d /data") == "/data"
    for client, claim in ((tenants.a, given), (tenants.a, unmarked), (tenants.b, unmarked)):
        assert client.post(volumes=[named(claim)]).status_code == 400


def test_snapshots_are_restored_by_their_own_tenant_only(tenants):
    box = tenants.a.create()
    tenants.a.text(box, "echo secret > /root/file")
    made = tenants.a.http.post(f"/v1/sandboxes/{box}/snapshots")
    assert made.status_code == 202, made.text
    snapshot = made.json()["id"]
    path = f"/v1/snapshots/{snapshot}"
    assert wait_for(lambda: tenants.a.http.get(path).json()["status"]["state"] == "Ready")
    for answer in (
        tenants.b.http.get(path),
        tenants.b.http.delete(path),
        tenants.b.post(snapshotId=snapshot),
    ):
        assert (answer.status_code, answer.json()["code"]) == (404, "SNAPSHOT::NOT_FOUND"), answer.text
    assert tenants.b.http.get("/v1/snapshots").json()["items"] == []
    again = tenants.a.create(snapshotId=snapshot)
    assert tenants.a.text(again, "cat /root/file") == "secret"
