"""Pools of warm boxes: filled, taken by sandboxes that name them, drained; and over a kill -9 of the server."""

import pytest

from conftest import body_of, delete
from stack import wait_for

CAPACITY = {"bufferMin": 2, "bufferMax": 2, "poolMin": 0, "poolMax": 20}


@pytest.fixture
def pool(server, http):
    body = {"name": "warm", "image": {"uri": server.image}, "capacitySpec": CAPACITY}
    answer = http.post("/v1/pools", json=body)
    assert answer.status_code == 201, answer.text
    yield "warm"
    assert http.delete("/v1/pools/warm").status_code == 204


def settled(http, available=2):
    def there():
        status = http.get("/v1/pools/warm").json()["status"]
        return (status["available"], status["starting"]) == (available, 0)

    assert wait_for(there, seconds=60), http.get("/v1/pools/warm").text


def created(http, **body):
    body = {"extensions": {"poolRef": "warm"}, "timeout": 600, **body}
    answer = http.post("/v1/sandboxes", json=body)
    assert answer.status_code == 202, answer.text
    return answer.json()["id"]


def events(http, sandbox):
    page = http.get(f"/v1/sandboxes/{sandbox}/events", headers={"accept": "application/json"}).json()
    return [event["type"] for event in page["items"]]


def answer_of(http, sandbox, command):
    """What a command in the sandbox prints, through the server's proxy."""
    answer = http.post(f"/v1/sandboxes/{sandbox}/proxy/44772/command", json={"command": command})
    assert answer.status_code == 200, answer.text
    return answer.text


def test_a_sandbox_takes_a_box_that_waits(server, http, pool):
    settled(http)
    assert http.get("/v1/sandboxes").json()["items"] == []
    sandbox = created(
        http,
        entrypoint=["sh", "-c", "echo $WHO > /tmp/who; sleep 1000"],
        env={"WHO": "ann"},
        metadata={"a": "b"},
    )
    try:
        shown = http.get(f"/v1/sandboxes/{sandbox}").json()
        assert shown["status"]["state"] == "Running" and shown["metadata"] == {"a": "b"}
        assert shown["allocation"] == {"mode": "pool", "poolRef": "warm", "state": "allocated"}
        assert wait_for(lambda: "pool.taken" in events(http, sandbox))
        told = answer_of(http, sandbox, "cat /tmp/who; echo $WHO $OPENSANDBOX_ID")
        assert f"ann {sandbox}" in told
        settled(http)
        assert http.get("/v1/pools/warm").json()["status"]["allocated"] == 1
    finally:
        delete(server, sandbox)


def test_an_entrypoint_that_cannot_be_started_is_told_as_ever(http, pool):
    settled(http)
    body = {"extensions": {"poolRef": "warm"}, "timeout": 600, "entrypoint": ["/no/such/program"]}
    answer = http.post("/v1/sandboxes", json=body)
    assert answer.status_code >= 400 and "/no/such/program" in answer.text
    settled(http)


def test_what_does_not_fit_starts_cold(server, http, pool):
    settled(http)
    sandbox = created(http, resourceLimits={"memory": "256Mi"})
    try:
        assert wait_for(lambda: "pool.missed" in events(http, sandbox))
    finally:
        delete(server, sandbox)


def test_many_sandboxes_at_once_share_no_box(server, http, pool):
    from concurrent.futures import ThreadPoolExecutor

    settled(http)
    with ThreadPoolExecutor(6) as workers:
        made = list(workers.map(lambda _: created(http), range(6)))
    try:
        assert len(set(made)) == 6
        assert wait_for(lambda: sum("pool.taken" in events(http, sandbox) for sandbox in made) >= 2)
    finally:
        for sandbox in made:
            delete(server, sandbox)


def test_pools_answer_by_the_contract(server, http, pool):
    body = {"name": "warm", "image": {"uri": server.image}, "capacitySpec": CAPACITY}
    again = http.post("/v1/pools", json=body)
    assert (again.status_code, again.json()["code"]) == (409, "KUBERNETES::POOL_ALREADY_EXISTS")
    unknown = http.get("/v1/pools/other")
    assert (unknown.status_code, unknown.json()["code"]) == (404, "KUBERNETES::POOL_NOT_FOUND")
    missing = http.post("/v1/sandboxes", json=body_of(server, extensions={"poolRef": "other"}))
    assert (missing.status_code, missing.json()["code"]) == (404, "KUBERNETES::POOL_NOT_FOUND")
    grown = http.put("/v1/pools/warm", json={"capacitySpec": {**CAPACITY, "bufferMin": 3, "bufferMax": 3}})
    assert grown.status_code == 200
    settled(http, 3)
    template = {"name": "pods", "template": {"spec": {}}, "capacitySpec": CAPACITY}
    assert http.post("/v1/pools", json=template).status_code == 501
