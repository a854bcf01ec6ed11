"""Snapshots: create, list, get, delete, restore."""

import uuid

import pytest
from target import DROP, UNKNOWN, coded, invalid, until

SUITE = uuid.uuid4().hex[:8]
pytestmark = pytest.mark.docker


def take(target, sandbox, mount="/v1", **keys):
    return target.call("POST", f"{mount}/sandboxes/{sandbox}/snapshots", **keys)


def ready(target, snapshot):
    def state():
        return target.call("GET", f"/v1/snapshots/{snapshot}").json()["status"]["state"]

    assert until(lambda: state() not in ("Creating",), 30) and state() == "Ready"
    return snapshot


@pytest.fixture(scope="module")
def source(target):
    script = "echo kept > /tmp/kept; echo written; sleep 600"
    made = target.create(entrypoint=["sh", "-c", script], metadata={"of": "source"}, timeout=3600)["id"]
    assert until(lambda: "written" in target.call("GET", f"/v1/sandboxes/{made}/diagnostics/logs").text)
    yield made
    target.delete(made)


@pytest.fixture(scope="module")
def taken(target, source):
    """Three snapshots of the source, oldest first."""
    made = []
    for name in ("first", "second", "first"):
        made.append(ready(target, take(target, source, json={"name": f"{name}-{SUITE}"}).json()["id"]))
    yield made
    for snapshot in made:
        target.call("DELETE", f"/v1/snapshots/{snapshot}")


@pytest.mark.parametrize("mount", ["", "/v1"])
@pytest.mark.parametrize("body", [{}, {"json": {}}, {"json": None}, {"json": {"name": "n"}}, {"json": {"name": None}}], ids=str)
def test_take(target, source, mount, body):
    if body == {"json": None}:
        body = {"content": "null", "headers": {"Content-Type": "application/json"}}
    answer = take(target, source, mount, **body)
    assert answer.status_code == 202, answer.text
    told = answer.json()
    assert answer.headers["location"] == f"/v1/snapshots/{told['id']}"
    assert told["sandboxId"] == source and told["status"]["state"] == "Creating" and told["status"]["reason"] == "snapshot_accepted"
    assert ("name" in told) == (body == {"json": {"name": "n"}})
    ready(target, told["id"])
    assert target.call("DELETE", f"/v1/snapshots/{told['id']}").status_code == 204
    coded(target.call("GET", f"/v1/snapshots/{told['id']}"), 404, "SNAPSHOT::NOT_FOUND")
    coded(target.call("DELETE", f"/v1/snapshots/{told['id']}"), 404, "SNAPSHOT::NOT_FOUND")


@pytest.mark.parametrize("body", [{"name": ""}, {"name": 7}, [], "x"], ids=str)
def test_take_schema(target, source, body):
    invalid(take(target, source, json=body), ["body"])


def test_take_of_a_paused_one(target, idle):
    assert target.call("POST", f"/v1/sandboxes/{idle}/pause").status_code == 202
    coded(take(target, idle), 409, "SNAPSHOT::INVALID_SOURCE_STATE")


def test_take_of_an_ended_one(target):
    made = target.create(state=None, entrypoint=["sh", "-c", "exit 0"])["id"]
    target.wait(made, "Terminated")
    coded(take(target, made), 409, "SNAPSHOT::INVALID_SOURCE_STATE")
    target.delete(made)


def listed(target, **query):
    answer = target.call("GET", "/v1/snapshots", params=query)
    assert answer.status_code == 200, answer.text
    return [item["id"] for item in answer.json()["items"]]


@pytest.mark.parametrize("query, expected", [
    ({}, [2, 1, 0]), ({"name": f"first-{SUITE}"}, [2, 0]), ({"name": "first"}, []), ({"state": "Ready"}, [2, 1, 0]),
    ({"state": "ready"}, []), ({"state": ["Failed", "Ready"]}, [2, 1, 0]), ({"state": "Creating"}, []), ({"pageSize": 1, "page": 2}, [1]),
], ids=lambda value: str(value).replace(SUITE, "suite"))
def test_list(target, source, taken, query, expected):
    assert listed(target, sandboxId=source, **query) == [taken[at] for at in expected]


def test_list_of_another(target, taken):
    assert listed(target, sandboxId=UNKNOWN) == []


def test_paging(target, source, taken):
    told = target.call("GET", "/v1/snapshots", params={"sandboxId": source, "pageSize": 2}).json()["pagination"]
    assert told == {"page": 1, "pageSize": 2, "totalItems": 3, "totalPages": 2, "hasNextPage": True}


def test_get(target, source, taken):
    told = target.call("GET", f"/v1/snapshots/{taken[0]}").json()
    assert told["name"] == f"first-{SUITE}" and told["sandboxId"] == source and told["createdAt"].endswith("Z")
    assert told["status"]["reason"] == "snapshot_runtime_ready" and "image" not in str(told.keys())


@pytest.fixture
def restored(target, taken):
    script = "cat /tmp/kept; sleep 600"
    made = target.create(image=DROP, snapshotId=taken[0], entrypoint=["sh", "-c", script])["id"]
    yield made
    target.delete(made)


def test_restore(target, taken, restored):
    got = target.get(restored).json()
    assert got["snapshotId"] == taken[0] and "image" not in got
    assert until(lambda: "kept" in target.call("GET", f"/v1/sandboxes/{restored}/diagnostics/logs").text)


@pytest.mark.better("a restored sandbox inherits labels of its source: its metadata")
def test_restore_inherits_no_metadata(target, restored):
    assert "metadata" not in target.get(restored).json()


@pytest.mark.better("a restored sandbox without a timeout inherits the end of its source")
def test_restore_inherits_no_end(target, taken):
    made = target.create(image=DROP, snapshotId=taken[1], entrypoint=DROP, timeout=None)["id"]
    got = target.get(made).json()
    target.delete(made)
    assert "expiresAt" not in got and got["entrypoint"] == ["tail", "-f", "/dev/null"]


def test_delete_of_one_in_use(target, source):
    snapshot = ready(target, take(target, source).json()["id"])
    made = target.create(image=DROP, snapshotId=snapshot)["id"]
    coded(target.call("DELETE", f"/v1/snapshots/{snapshot}"), 409, "SNAPSHOT::DELETE_CONFLICT")
    target.delete(made)
    assert target.call("DELETE", f"/v1/snapshots/{snapshot}").status_code == 204


@pytest.mark.better("a snapshot whose deletion failed stays Deleting and cannot be used")
def test_one_in_use_stays_ready(target, source):
    snapshot = ready(target, take(target, source).json()["id"])
    made = target.create(image=DROP, snapshotId=snapshot)["id"]
    try:
        coded(target.call("DELETE", f"/v1/snapshots/{snapshot}"), 409, "SNAPSHOT::DELETE_CONFLICT")
        assert target.call("GET", f"/v1/snapshots/{snapshot}").json()["status"]["state"] == "Ready"
    finally:
        target.delete(made)
        target.call("DELETE", f"/v1/snapshots/{snapshot}")


def test_snapshot_outlives_its_source(target):
    made = target.create()["id"]
    snapshot = ready(target, take(target, made).json()["id"])
    assert target.delete(made) == 204
    again = target.create(image=DROP, snapshotId=snapshot)["id"]
    assert target.delete(again) == 204
    assert target.call("DELETE", f"/v1/snapshots/{snapshot}").status_code == 204
