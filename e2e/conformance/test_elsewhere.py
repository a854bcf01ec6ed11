"""What this runtime does not have: pools, templates, network policies. Bodies are validated before it says so."""

import pytest
from target import UNKNOWN, coded, invalid

CAPACITY = {"bufferMax": 1, "bufferMin": 0, "poolMax": 2, "poolMin": 0}
POOL = {"name": "pool-a", "template": {}, "capacitySpec": CAPACITY}
TEMPLATE = {"image": "a", "publish": "b"}
NO_POOLS = (501, "KUBERNETES::POOL_NOT_SUPPORTED")
NO_TEMPLATES = (501, "FSB::API_NOT_SUPPORTED")


@pytest.mark.parametrize("changes", [
    {"name": "Upper"}, {"name": ""}, {"name": "x" * 254}, {"name": 7}, {"template": "text"}, {"template": None},
    {"capacitySpec": {}}, {"capacitySpec": {**CAPACITY, "poolMax": -1}}, {"capacitySpec": {**CAPACITY, "bufferMin": "x"}},
], ids=str)
def test_pool_body(target, changes):
    invalid(target.call("POST", "/v1/pools", json={**POOL, **changes}), ["body"])


@pytest.mark.parametrize("body", [{}, {"capacitySpec": {}}, {"capacitySpec": {**CAPACITY, "poolMin": -1}}], ids=str)
def test_pool_update_body(target, body):
    invalid(target.call("PUT", "/v1/pools/pool-a", json=body), ["body"])


@pytest.mark.parametrize("changes", [
    {"image": None}, {"publish": ""}, {"publish": None}, {"entrypoint": []},
    {"readiness": {"warmupSeconds": -1}}, {"format": "qcow2"}, {"unknown": 1},
], ids=str)
def test_template_body(target, changes):
    invalid(target.call("POST", "/v1/templates", json={**TEMPLATE, **changes}), ["body"])


@pytest.mark.parametrize("changes", [
    {}, {"format": "native"}, {"resourceLimits": {"cpu": "1", "memory": "1Gi", "disk": "1Gi"}}, {"readiness": {"probe": {}, "warmupSeconds": 1}},
], ids=str)
def test_template(target, changes):
    answer = target.call("POST", "/v1/templates", json={**TEMPLATE, **changes})
    assert answer.status_code == 422 or answer.json()["code"] == NO_TEMPLATES[1]
    if not changes:
        coded(answer, *NO_TEMPLATES)


@pytest.mark.parametrize("query", [{"page": "0"}, {"pageSize": "201"}], ids=str)
def test_template_paging(target, query):
    invalid(target.call("GET", "/v1/templates", params=query), ["query"])


@pytest.mark.parametrize("method, body", [
    ("PUT", {"egress": [{"action": "allow"}]}), ("PUT", []), ("PUT", None), ("PATCH", {}), ("PATCH", [{"action": "allow"}]),
    ("PATCH", None), ("DELETE", None), ("DELETE", {}), ("DELETE", [7]),
], ids=str)
def test_policy_body(target, web, method, body):
    invalid(target.call(method, f"/v1/sandboxes/{web}/networkpolicy", json=body), ["body"])


@pytest.mark.parametrize("method, body", [
    ("GET", None), ("PUT", {"egress": []}), ("PATCH", [{"action": "allow", "target": "a.example"}]), ("DELETE", ["a.example"]),
], ids=str)
def test_policy_of_a_sandbox_without_one(target, web, method, body):
    answer = target.call(method, f"/v1/sandboxes/{web}/networkpolicy", json=body)
    assert answer.status_code in (400, 404, 501, 502), answer.text
    assert {"code", "message"} <= set(answer.json())


def test_template_sandboxes_are_unknown(target):
    coded(target.call("GET", f"/v1/sandboxes/fsb-{UNKNOWN}"), 404)
    coded(target.call("GET", f"/v1/sandboxes/fsb-{UNKNOWN}/networkpolicy"), 404)
