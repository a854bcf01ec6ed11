"""Every route on both mounts: found, closed without a key; router answers; headers of every answer."""

import json
import re

import httpx
import pytest
from target import KEY, UNKNOWN, coded, invalid

POLICY = {"egress": [{"action": "allow", "target": "example.com"}]}
POOL = {
    "name": "pool-a",
    "template": {"spec": {}},
    "capacitySpec": {"bufferMax": 1, "bufferMin": 0, "poolMax": 2, "poolMin": 0},
}
SANDBOX = f"/sandboxes/{UNKNOWN}"
NO_SANDBOX = (404, "DOCKER::SANDBOX_NOT_FOUND")
NO_SNAPSHOT = (404, "SNAPSHOT::NOT_FOUND")
NO_POOLS = (501, "KUBERNETES::POOL_NOT_SUPPORTED")
NO_TEMPLATES = (501, "FSB::API_NOT_SUPPORTED")

# Method, path, body, and what a sound request for something unknown is answered with.
ROUTES = [
    ("POST", "/sandboxes", {}, (422, None)),
    ("GET", "/sandboxes", None, (200, None)),
    ("GET", SANDBOX, None, NO_SANDBOX),
    ("DELETE", SANDBOX, None, NO_SANDBOX),
    ("PATCH", f"{SANDBOX}/metadata", {}, NO_SANDBOX),
    ("POST", f"{SANDBOX}/pause", None, NO_SANDBOX),
    ("POST", f"{SANDBOX}/resume", None, NO_SANDBOX),
    ("POST", f"{SANDBOX}/renew-expiration", {"expiresAt": "2099-01-01T00:00:00Z"}, NO_SANDBOX),
    ("GET", f"{SANDBOX}/endpoints/44772", None, NO_SANDBOX),
    ("POST", f"{SANDBOX}/snapshots", None, NO_SANDBOX),
    ("GET", "/snapshots", None, (200, None)),
    ("GET", f"/snapshots/{UNKNOWN}", None, NO_SNAPSHOT),
    ("DELETE", f"/snapshots/{UNKNOWN}", None, NO_SNAPSHOT),
    ("GET", f"{SANDBOX}/diagnostics/logs", None, NO_SANDBOX),
    ("GET", f"{SANDBOX}/diagnostics/events", None, NO_SANDBOX),
    ("GET", f"{SANDBOX}/diagnostics/inspect", None, NO_SANDBOX),
    ("GET", f"{SANDBOX}/diagnostics/summary", None, NO_SANDBOX),
    ("GET", f"{SANDBOX}/networkpolicy", None, NO_SANDBOX),
    ("PUT", f"{SANDBOX}/networkpolicy", POLICY, NO_SANDBOX),
    ("PATCH", f"{SANDBOX}/networkpolicy", POLICY["egress"], NO_SANDBOX),
    ("DELETE", f"{SANDBOX}/networkpolicy", ["example.com"], NO_SANDBOX),
    ("POST", "/pools", POOL, NO_POOLS),
    ("GET", "/pools", None, NO_POOLS),
    ("GET", "/pools/pool-a", None, NO_POOLS),
    ("PUT", "/pools/pool-a", {"capacitySpec": POOL["capacitySpec"]}, NO_POOLS),
    ("DELETE", "/pools/pool-a", None, NO_POOLS),
    ("POST", "/templates", {"image": "a", "publish": "b"}, NO_TEMPLATES),
    ("GET", "/templates", None, NO_TEMPLATES),
    ("GET", "/templates/tpl-a", None, NO_TEMPLATES),
    ("DELETE", "/templates/tpl-a", None, NO_TEMPLATES),
]
PROXY = [(method, f"{SANDBOX}/proxy/8080{rest}", None, NO_SANDBOX) for method in ("GET", "POST", "PUT", "PATCH", "DELETE")
         for rest in ("", "/a/b")]


def name(route):
    return f"{route[0]} {route[1].replace(UNKNOWN, 'id')}"


@pytest.mark.parametrize("mount", ["bare", "v1"])
@pytest.mark.parametrize("route", ROUTES + PROXY, ids=name)
def test_route(target, route, mount):
    method, path, body, (status, code) = route
    answer = target.call(method, ("/v1" if mount == "v1" else "") + path, json=body)
    assert answer.status_code == status, answer.text
    if code:
        coded(answer, status, code)


@pytest.mark.parametrize("route", ROUTES, ids=name)
def test_key(target, route):
    method, path, body, _ = route
    for mount in ("", "/v1"):
        coded(target.anonymous(method, mount + path, json=body), 401, "MISSING_API_KEY")
        coded(target.anonymous(method, mount + path, key="wrong", json=body), 401, "INVALID_API_KEY")


@pytest.mark.better("the proxy is open although a key is configured")
@pytest.mark.parametrize("route", PROXY, ids=name)
def test_proxy_key(target, route):
    for mount in ("", "/v1"):
        assert target.anonymous(route[0], mount + route[1]).status_code == 401
        assert target.anonymous(route[0], mount + route[1], key="wrong").status_code == 401


@pytest.mark.parametrize("path", ["/health", "/version"])
def test_open_without_a_key(target, path):
    assert target.anonymous("GET", path).status_code == 200


def test_health(target):
    assert target.call("GET", "/health").json() == {"status": "healthy"}


def test_version(target):
    assert re.match(r"^\d+\.\d+\.\d+", target.call("GET", "/version").json()["version"])


@pytest.mark.parametrize("path", ["/docs", "/redoc"])
@pytest.mark.different("documentation pages load scripts from a public network; the description itself is served")
def test_no_page_loads_scripts_from_elsewhere(target, path):
    assert "https://cdn" not in target.call("GET", path).text


def test_openapi(target):
    answer = target.anonymous("GET", "/openapi.json")
    assert answer.status_code == 200 and answer.json()["openapi"].startswith("3.")
    assert "/v1/sandboxes" in answer.json()["paths"] or "/sandboxes" in answer.json()["paths"]


@pytest.mark.better("exempt paths are matched by prefix, so /healthzzz needs no key")
def test_exempt_paths_are_not_prefixes(target):
    assert target.anonymous("GET", "/healthzzz").status_code == 401


@pytest.mark.parametrize("path", ["/v1/health", "/v1/version"])
def test_only_bare(target, path):
    assert target.call("GET", path).status_code == 404
    assert target.anonymous("GET", path).status_code == 401


# ---------------------------------------------------------------- the router


@pytest.mark.parametrize("path", ["/", "/v1", "/v2/sandboxes", "/v1/nothing", "/v1/sandboxes/a/b/c", "/v1/sandboxes/a%2Fb"])
def test_unknown_path(target, path):
    assert target.raw("GET", path)[0] == 404


@pytest.mark.parametrize(
    "method, path, allow",
    [
        ("PUT", "/v1/sandboxes", "POST"),
        ("DELETE", "/v1/sandboxes", "POST"),
        ("POST", f"/v1{SANDBOX}", "GET"),
        ("GET", f"/v1{SANDBOX}/pause", "POST"),
        ("GET", f"/v1{SANDBOX}/metadata", "PATCH"),
        ("POST", f"/v1{SANDBOX}/endpoints/1", "GET"),
        ("POST", "/v1/snapshots", "GET"),
        ("PUT", "/v1/templates", "POST"),
    ],
)
def test_wrong_method(target, method, path, allow):
    answer = target.call(method, path)
    assert answer.status_code == 405 and allow in answer.headers["allow"]


@pytest.mark.parametrize("path", ["/v1/sandboxes", "/health", f"/v1{SANDBOX}"])
@pytest.mark.parametrize("method", ["HEAD", "OPTIONS"])
def test_no_head_no_options(target, method, path):
    assert target.call(method, path).status_code == 405


def test_proxy_tells_its_methods(target):
    allow = target.call("TRACE", f"/v1{SANDBOX}/proxy/80/x").headers["allow"]
    assert {"GET", "POST", "PUT", "PATCH", "DELETE"} <= {one.strip() for one in allow.split(",")}


@pytest.mark.better("router errors carry no code and no message, which SDKs then fail to read")
@pytest.mark.parametrize("method, path", [("GET", "/v1/nothing"), ("PUT", "/v1/sandboxes"), ("GET", "/v1/sandboxes/a%2Fb")])
def test_router_errors_have_a_code(target, method, path):
    status, _, body = target.raw(method, path)
    assert status in (404, 405) and {"code", "message"} <= set(json.loads(body))


@pytest.mark.parametrize("path", ["/v1/sandboxes/", "/v1/snapshots/", "/sandboxes/"])
def test_trailing_slash(target, path):
    answer = target.call("GET", path, headers={"Host": "there.example:81"})
    assert answer.status_code == 307
    assert answer.headers["location"] == f"http://there.example:81{path.rstrip('/')}"


# ---------------------------------------------------------------- headers

ANY = [("GET", "/v1/sandboxes", 200), ("GET", f"/v1{SANDBOX}", 404), ("PUT", "/v1/sandboxes", 405), ("POST", "/v1/sandboxes", 422)]


@pytest.mark.parametrize("method, path, status", [*ANY, ("GET", "/v1/none", 404), ("GET", "/health", 200)])
def test_request_id_is_echoed(target, method, path, status):
    got, headers, _ = target.raw(method, path, headers=[("X-Request-ID", "  mine-7 ")])
    assert got == status and {name.lower(): value for name, value in headers}["x-request-id"] == "mine-7"


@pytest.mark.parametrize("given", [None, "", "   "])
def test_request_id_is_made(target, given):
    _, headers, _ = target.raw("GET", "/v1/sandboxes", headers=[] if given is None else [("X-Request-ID", given)])
    assert re.fullmatch("[0-9a-f]{32}", {name.lower(): value for name, value in headers}["x-request-id"])


def test_request_id_on_401(target):
    assert target.anonymous("GET", "/v1/sandboxes").headers["x-request-id"]


@pytest.mark.parametrize("method, path, status", ANY)
def test_cross_origin(target, method, path, status):
    answer = target.call(method, path, headers={"Origin": "https://app.example"})
    assert answer.headers["access-control-allow-origin"] == "https://app.example"
    assert answer.headers["access-control-allow-credentials"] == "true"
    assert answer.headers["access-control-expose-headers"].upper() == "OPEN-SANDBOX-ORIGIN"
    assert "Origin" in answer.headers["vary"]


def test_preflight_needs_no_key(target):
    asked = {
        "Origin": "https://app.example",
        "Access-Control-Request-Method": "DELETE",
        "Access-Control-Request-Headers": "open-sandbox-api-key, content-type",
    }
    answer = httpx.options(f"{target.url}/v1/sandboxes", headers=asked)
    assert answer.status_code == 200 and answer.text == "OK" and answer.headers["access-control-max-age"] == "600"
    assert {"DELETE", "PATCH", "PUT"} <= {one.strip() for one in answer.headers["access-control-allow-methods"].split(",")}
    assert "open-sandbox-api-key" in answer.headers["access-control-allow-headers"].lower()


def test_json_is_compact_utf8_and_never_compressed(target):
    answer = target.call("GET", "/v1/sandboxes", headers={"Accept-Encoding": "gzip"})
    assert answer.headers["content-type"] == "application/json" and "content-encoding" not in answer.headers
    assert answer.text == json.dumps(answer.json(), separators=(",", ":"), ensure_ascii=False)


def test_one_date(target):
    assert len(target.call("GET", "/v1/sandboxes").headers.get_list("date")) == 1


# ---------------------------------------------------------------- metrics

EVENT = {"eventType": "sandbox.create", "createDurationMs": 5, "success": True}


@pytest.mark.parametrize("event", [EVENT, {**EVENT, "sandboxId": "a", "image": "b"}, {**EVENT, "success": False},
                                   {"event_type": "sandbox.create", "create_duration_ms": "7", "success": "yes"}])
def test_metrics_event(target, event):
    answer = target.call("POST", "/v1/metrics/events", json=event, headers={"User-Agent": "OpenSandbox-Python-SDK/1.1.1"})
    assert (answer.status_code, answer.content) == (204, b"")


@pytest.mark.parametrize("wrong", [{"eventType": "other"}, {"createDurationMs": -1}, {"createDurationMs": "x"}, {"success": "perhaps"}])
def test_metrics_event_refused(target, wrong):
    invalid(target.call("POST", "/v1/metrics/events", json={**EVENT, **wrong}), ["body"])


def test_metrics_only_below_v1_and_with_the_key(target):
    assert target.call("POST", "/metrics/events", json=EVENT).status_code == 404
    coded(target.anonymous("POST", "/v1/metrics/events", json=EVENT), 401, "MISSING_API_KEY")


# ---------------------------------------------------------------- reading bodies


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", None])
def test_body_needs_a_json_type(target, kind):
    headers = {"Content-Type": kind} if kind else {}
    invalid(target.call("POST", "/v1/sandboxes", content=json.dumps(target.body()), headers=headers), ["body"])


@pytest.mark.parametrize("content", ["", "{", "[]", "null", '"text"', "7", '{"a":1,}', b"\xff\xfe"])
def test_body_is_not_an_object(target, content):
    invalid(target.call("POST", "/v1/sandboxes", content=content, headers={"Content-Type": "application/json"}), ["body"])


@pytest.mark.better("a schema error echoes the input, with registry passwords in it")
def test_schema_errors_echo_no_secrets(target):
    image = {"uri": target.image, "auth": {"username": "ann", "password": "s3cr3t-pw"}}
    answer = target.call("POST", "/v1/sandboxes", json=target.body(image=image, snapshotId="x"))
    invalid(answer)
    assert "s3cr3t-pw" not in answer.text


@pytest.mark.better("a schema error carries no code and no message")
def test_schema_errors_have_a_code(target):
    answer = target.call("POST", "/v1/sandboxes", json={})
    assert answer.status_code == 422 and {"code", "message"} <= set(answer.json())


def test_all_field_errors_at_once(target):
    answer = target.call("POST", "/v1/sandboxes", json=target.body(timeout=1, entrypoint=[], metadata={"a": 1}))
    invalid(answer)
    assert {one["loc"][1] for one in answer.json()["detail"]} == {"timeout", "entrypoint", "metadata"}


def test_key_header_is_case_insensitive(target):
    assert httpx.get(f"{target.url}/v1/sandboxes", headers={KEY.lower(): target.key}).status_code == 200
