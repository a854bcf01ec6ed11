"""The bytes of the lifecycle API: headers, error bodies, schema errors, pagination, authentication."""

import http.client
import json
import re
import threading
import uuid
from datetime import datetime, timedelta, timezone

import httpx
import pytest

from conftest import body_of, delete
from stack import wait_for

TIME = re.compile(r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{6})?Z$")
UNKNOWN = "00000000-0000-4000-8000-000000000000"

ROUTES = [
    ("POST", "/sandboxes"),
    ("GET", "/sandboxes"),
    ("GET", f"/sandboxes/{UNKNOWN}"),
    ("DELETE", f"/sandboxes/{UNKNOWN}"),
    ("PATCH", f"/sandboxes/{UNKNOWN}/metadata"),
    ("POST", f"/sandboxes/{UNKNOWN}/pause"),
    ("POST", f"/sandboxes/{UNKNOWN}/resume"),
    ("POST", f"/sandboxes/{UNKNOWN}/renew-expiration"),
    ("GET", f"/sandboxes/{UNKNOWN}/endpoints/44772"),
    ("POST", f"/sandboxes/{UNKNOWN}/snapshots"),
    ("GET", "/snapshots"),
    ("GET", f"/snapshots/{UNKNOWN}"),
    ("DELETE", f"/snapshots/{UNKNOWN}"),
    ("GET", f"/sandboxes/{UNKNOWN}/diagnostics/logs"),
    ("GET", f"/sandboxes/{UNKNOWN}/diagnostics/events"),
    ("GET", f"/sandboxes/{UNKNOWN}/diagnostics/inspect"),
    ("GET", f"/sandboxes/{UNKNOWN}/diagnostics/summary"),
    ("GET", f"/sandboxes/{UNKNOWN}/networkpolicy"),
    ("POST", "/pools"),
    ("GET", "/pools"),
    ("POST", "/templates"),
    ("GET", "/templates"),
]
PROXY_ROUTES = [
    ("GET", f"/sandboxes/{UNKNOWN}/proxy/8080"),
    ("POST", f"/sandboxes/{UNKNOWN}/proxy/44772/command"),
    ("GET", f"/sandboxes/{UNKNOWN}/proxy/44772/files/download"),
]


def anonymous(server, method, path, key=None):
    headers = {} if key is None else {"OPEN-SANDBOX-API-KEY": key}
    return httpx.request(method, server.url + path, headers=headers, json={} if method != "GET" else None, timeout=60)


# ---------------------------------------------------------------- authentication


@pytest.mark.parametrize("mount", ["", "/v1"])
@pytest.mark.parametrize("method, path", ROUTES)
def test_every_route_asks_for_the_key(server, mount, method, path):
    missing = anonymous(server, method, mount + path)
    assert (missing.status_code, missing.json()["code"]) == (401, "MISSING_API_KEY")
    wrong = anonymous(server, method, mount + path, key=server.key + "x")
    assert (wrong.status_code, wrong.json()["code"]) == (401, "INVALID_API_KEY")
    for answer in (missing, wrong):
        assert set(answer.json()) == {"code", "message"} and answer.headers["x-request-id"]


@pytest.mark.sandglass
@pytest.mark.parametrize("mount", ["", "/v1"])
@pytest.mark.parametrize("method, path", PROXY_ROUTES)
def test_the_proxy_asks_for_the_key_too(server, mount, method, path):
    assert anonymous(server, method, mount + path).status_code == 401
    assert anonymous(server, method, mount + path, key="wrong").status_code == 401


@pytest.mark.sandglass
def test_the_proxy_of_a_living_sandbox_is_closed_without_a_token(server, raw, http):
    sandbox = raw()["id"]
    path = f"/v1/sandboxes/{sandbox}/proxy/44772"
    run = {"command": "echo leaked"}
    assert httpx.post(f"{server.url}{path}/command", json=run, timeout=60).status_code == 401
    # A dot segment must not talk its way around the check.
    connection = http_connection(server)
    connection.request("GET", f"/health/../v1/sandboxes/{sandbox}/proxy/44772/ping")
    assert connection.getresponse().status in (400, 401, 404)
    assert http.post(f"{path}/command", json=run, timeout=60).status_code == 200


@pytest.mark.parametrize("path", ["/health", "/version"])
def test_health_and_version_are_open(server, path):
    assert anonymous(server, "GET", path).status_code == 200


@pytest.mark.sandglass
def test_an_exempt_name_is_not_a_prefix(server):
    assert anonymous(server, "GET", "/healthzzz").status_code in (401, 404)
    assert anonymous(server, "GET", "/readyz").status_code == 200


# ---------------------------------------------------------------- headers


def http_connection(server):
    return http.client.HTTPConnection(server.domain.split(":")[0], int(server.domain.split(":")[1]), timeout=60)


def test_the_request_id_is_echoed_or_made(http):
    assert http.get("/v1/sandboxes", headers={"X-Request-ID": "mine-1"}).headers["x-request-id"] == "mine-1"
    made = {http.get("/v1/sandboxes").headers["x-request-id"] for _ in range(2)}
    assert len(made) == 2 and all(re.fullmatch("[0-9a-f]{32}", one) for one in made)
    for path in (f"/v1/sandboxes/{UNKNOWN}", "/v1/no-such-route"):
        assert http.get(path, headers={"X-Request-ID": "err-1"}).headers["x-request-id"] == "err-1"


def test_cross_origin_requests_are_answered(http, server):
    origin = {"Origin": "https://app.example"}
    for path in ("/health", "/v1/sandboxes", f"/v1/sandboxes/{UNKNOWN}"):
        answer = http.get(path, headers=origin)
        assert answer.headers["access-control-allow-origin"] == "https://app.example"
        assert answer.headers["access-control-allow-credentials"] == "true"
        assert "OPEN-SANDBOX-ORIGIN" in answer.headers["access-control-expose-headers"].upper()
        assert "Origin" in answer.headers["vary"]
    asked = {
        **origin,
        "Access-Control-Request-Method": "DELETE",
        "Access-Control-Request-Headers": "open-sandbox-api-key, content-type",
    }
    preflight = httpx.options(f"{server.url}/v1/sandboxes", headers=asked)
    assert preflight.status_code == 200
    assert preflight.headers["access-control-allow-origin"] == "https://app.example"
    assert "DELETE" in preflight.headers["access-control-allow-methods"]
    assert "open-sandbox-api-key" in preflight.headers["access-control-allow-headers"].lower()


def test_json_is_compact_and_not_compressed(http):
    answer = http.get("/v1/sandboxes", headers={"Accept-Encoding": "gzip"})
    assert answer.headers["content-type"] == "application/json"
    assert "content-encoding" not in answer.headers
    assert answer.text == json.dumps(answer.json(), separators=(",", ":"), ensure_ascii=False)


@pytest.mark.sandglass
@pytest.mark.parametrize("method, path, status", [("GET", "/v1/none", 404), ("PUT", "/v1/sandboxes", 405)])
def test_unknown_paths_and_methods_have_a_code_and_a_message(http, method, path, status):
    answer = http.request(method, path)
    assert answer.status_code == status
    assert {"code", "message"} <= set(answer.json())


# ---------------------------------------------------------------- bodies


def test_a_sandbox_on_the_wire(http, raw, server):
    before = datetime.now(timezone.utc)
    made = raw(metadata={"a": "1"}, extensions={"opensandbox.extensions.mine": "x", "other": "y"})
    assert {"id", "status", "createdAt", "entrypoint", "metadata", "expiresAt"} <= set(made)
    assert "image" not in made
    assert made["extensions"] == {"opensandbox.extensions.mine": "x"}
    assert wait_for(lambda: http.get(f"/v1/sandboxes/{made['id']}").json()["status"]["state"] == "Running")
    for path in (f"/v1/sandboxes/{made['id']}", f"/sandboxes/{made['id']}"):
        got = http.get(path).json()
        assert got["image"] == {"uri": server.image} and got["metadata"] == {"a": "1"}
        assert got["entrypoint"] == ["tail", "-f", "/dev/null"]
        assert TIME.match(got["createdAt"]) and TIME.match(got["expiresAt"]), got
        assert got["expiresAt"] == made["expiresAt"]
        assert not [key for key, value in got.items() if value is None]
        end = datetime.fromisoformat(got["expiresAt"].replace("Z", "+00:00"))
        assert abs((end - before).total_seconds() - 300) < 30


def test_answers_without_a_body_have_length_zero(raw, http, server):
    sandbox = raw()["id"]
    assert wait_for(lambda: http.get(f"/v1/sandboxes/{sandbox}").json()["status"]["state"] == "Running")
    for method, path, status in (
        ("POST", f"/v1/sandboxes/{sandbox}/pause", 202),
        ("POST", f"/v1/sandboxes/{sandbox}/resume", 202),
        ("POST", "/v1/metrics/events", 204),
        ("DELETE", f"/v1/sandboxes/{sandbox}", 204),
    ):
        event = {"eventType": "sandbox.create", "createDurationMs": 5, "success": True}
        answer = http.request(method, path, json=event if "metrics" in path else None)
        assert (answer.status_code, answer.content) == (status, b""), path
        assert "transfer-encoding" not in answer.headers
        if status == 202:
            assert answer.headers["content-length"] == "0"


def test_the_unknown_sandbox_is_404_on_every_route(http):
    for method, path in ROUTES:
        if UNKNOWN in path and path.startswith("/sandboxes") and "networkpolicy" not in path:
            body = {"expiresAt": "2099-01-01T00:00:00Z"} if "renew" in path else {}
            answer = http.request(method, f"/v1{path}", json=body if method != "GET" else None)
            assert answer.status_code == 404, (method, path, answer.text)
            assert set(answer.json()) == {"code", "message"}
            assert answer.json()["code"].endswith("SANDBOX_NOT_FOUND")
    # Ids are opaque: any word is unknown and never malformed.
    assert http.get("/v1/sandboxes/not-a-uuid").status_code == 404


BAD = [
    ({"resourceLimits": None}, 422),
    ({"image": None}, 422),
    ({"entrypoint": None}, 422),
    ({"entrypoint": []}, 422),
    ({"timeout": 59}, 422),
    ({"timeout": "soon"}, 422),
    ({"metadata": {"a": 1}}, 422),
    ({"env": {"A": 1}}, 422),
    ({"image": "host"}, 422),
    ({"env": {"OPENSANDBOX_LIFECYCLE": "{}"}}, 422),
    ({"snapshotId": "x"}, 422),
    ({"volumes": [{"name": "a", "mountPath": "relative", "host": {"path": "/x"}}]}, 422),
    ({"metadata": {"bad key": "x"}}, 400),
    ({"metadata": {"k": "x" * 64}}, 400),
    ({"resourceLimits": {"cpu": "none"}}, 400),
    ({"resourceLimits": {"memory": "1.5Gi"}}, 400),
    ({"extensions": {"access.renew.extend.seconds": "5"}}, 400),
    ({"platform": {"os": "plan9", "arch": "amd64"}}, 400),
    ({"volumes": [{"name": "a", "mountPath": "/x", "host": {"path": "/etc"}}]}, 400),
]


@pytest.mark.parametrize("change, status", BAD, ids=lambda value: json.dumps(value)[:50])
def test_a_bad_create_is_refused_and_makes_nothing(http, server, change, status):
    before = http.get("/v1/sandboxes").json()["pagination"]["totalItems"]
    answer = http.post("/v1/sandboxes", json=body_of(server, **change))
    assert answer.status_code == status, answer.text
    body = answer.json()
    if status == 422:
        assert body["detail"] and {"type", "loc", "msg"} <= set(body["detail"][0]), body
        assert body["detail"][0]["loc"][0] == "body"
    else:
        assert set(body) == {"code", "message"}
    assert http.get("/v1/sandboxes").json()["pagination"]["totalItems"] == before


@pytest.mark.sandglass
def test_schema_errors_carry_a_code_and_never_echo_the_input(http, server):
    secret = {"uri": server.image, "auth": {"username": "u", "password": "hunter2-secret"}}
    answer = http.post("/v1/sandboxes", json=body_of(server, image=secret, resourceLimits=None))
    assert answer.status_code == 422
    assert {"code", "message", "detail"} == set(answer.json())
    assert "hunter2" not in answer.text


def test_bodies_that_are_not_json(http):
    for headers, content in (
        ({"Content-Type": "application/json"}, b"{not json"),
        ({"Content-Type": "application/json"}, b""),
        ({"Content-Type": "text/plain"}, b'{"a": 1}'),
        ({"Content-Type": "application/json"}, b"[]"),
    ):
        answer = http.post("/v1/sandboxes", content=content, headers=headers)
        assert answer.status_code == 422 and answer.json()["detail"], (headers, content)


def test_pagination_on_the_wire(http, raw):
    made = [raw()["id"] for _ in range(3)]
    page = http.get("/v1/sandboxes?pageSize=2").json()
    assert [item["id"] for item in page["items"]] == made[::-1][:2]
    assert set(page["pagination"]) == {"page", "pageSize", "totalItems", "totalPages", "hasNextPage"}
    assert page["pagination"]["page"] == 1 and page["pagination"]["pageSize"] == 2
    assert page["pagination"]["hasNextPage"] is True
    empty = http.get("/v1/sandboxes?metadata=none%3Dnone").json()
    assert empty == {
        "items": [],
        "pagination": {"page": 1, "pageSize": 20, "totalItems": 0, "totalPages": 0, "hasNextPage": False},
    }
    for query in ("page=0", "pageSize=0", "pageSize=201", "page=x"):
        assert http.get(f"/v1/sandboxes?{query}").status_code == 422, query
    assert http.get("/v1/sandboxes?page_size=1").json()["pagination"]["pageSize"] == 20
    assert http.get("/v1/sandboxes?metadata=nonsense").json()["code"] == "INVALID_METADATA_FORMAT"


def test_metadata_filters_are_decoded_twice(http, raw):
    made = raw(metadata={"k-1": "a.b_c"})
    assert http.get("/v1/sandboxes?metadata=k-1%3Da%252Eb_c").json()["items"][0]["id"] == made["id"]


def test_renewing_on_the_wire(http, raw):
    sandbox = raw()["id"]
    path = f"/v1/sandboxes/{sandbox}/renew-expiration"
    end = (datetime.now(timezone.utc) + timedelta(hours=1)).replace(microsecond=0)
    for text in (end.isoformat(), end.strftime("%Y-%m-%dT%H:%M:%S"), end.astimezone(timezone(timedelta(hours=5))).isoformat()):
        answer = http.post(path, json={"expiresAt": text})
        assert answer.status_code == 200 and answer.json() == {"expiresAt": end.strftime("%Y-%m-%dT%H:%M:%SZ")}
    past = http.post(path, json={"expiresAt": "2001-01-01T00:00:00Z"})
    assert past.status_code == 400 and past.json()["code"].endswith("INVALID_EXPIRATION")
    for body in ({}, {"expiresAt": "soon"}):
        assert http.post(path, json=body).status_code == 422


def test_endpoint_look_ups_check_the_port(http, raw):
    sandbox = raw()["id"]
    assert http.get(f"/v1/sandboxes/{sandbox}/endpoints/x").status_code == 422
    assert http.get(f"/v1/sandboxes/{sandbox}/endpoints/70000").status_code == 400
    both = http.get(f"/v1/sandboxes/{sandbox}/endpoints/8080?use_server_proxy=true&expires=2000000000")
    assert both.status_code == 400 and both.json()["code"] == "SANDBOX::INVALID_PARAMETER"
    bare = http.get(f"/sandboxes/{sandbox}/endpoints/8080?use_server_proxy=yes").json()["endpoint"]
    assert bare.endswith(f"/sandboxes/{sandbox}/proxy/8080") and "/v1/" not in bare


@pytest.mark.sandglass
def test_deleting_from_many_threads_is_204_once_and_404_else(http, raw, server):
    sandbox = raw()["id"]
    answers = []
    threads = [
        threading.Thread(
            target=lambda: answers.append(
                httpx.delete(
                    f"{server.url}/v1/sandboxes/{sandbox}", headers={"OPEN-SANDBOX-API-KEY": server.key}, timeout=60
                ).status_code
            )
        )
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(answers) <= {204, 404} and 204 in answers


# ---------------------------------------------------------------- idempotency


@pytest.mark.sandglass
def test_the_same_key_and_body_make_one_sandbox(http, raw, server):
    headers = {"Idempotency-Key": uuid.uuid4().hex}
    body = body_of(server, metadata={"idem": "1"})
    answers = []

    def post():
        with httpx.Client(headers={"OPEN-SANDBOX-API-KEY": server.key}, timeout=60) as client:
            answers.append(client.post(f"{server.url}/v1/sandboxes", json=body, headers=headers))

    threads = [threading.Thread(target=post) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ids = {answer.json()["id"] for answer in answers if answer.status_code == 202}
    assert len(ids) == 1, [answer.text for answer in answers]
    assert {answer.status_code for answer in answers} == {202}
    other = http.post("/v1/sandboxes", json={**body, "timeout": 301}, headers=headers)
    assert other.status_code == 409
    listed = http.get("/v1/sandboxes?metadata=idem%3D1").json()
    assert [item["id"] for item in listed["items"]] == list(ids)
    delete(server, ids.pop())


# ---------------------------------------------------------------- the stream of a command


@pytest.mark.sandglass
def test_a_command_stream_is_json_lines_that_every_client_can_read(http, raw, server):
    sandbox = raw()["id"]
    with http.stream(
        "POST", f"/v1/sandboxes/{sandbox}/proxy/44772/command", json={"command": "printf 'a\\n\\nb\\n'"}
    ) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        text = answer.read().decode()
    assert text.startswith("{") and text.endswith("}\n\n") and "\r" not in text
    frames = text.removesuffix("\n\n").split("\n\n")
    events = [json.loads(frame) for frame in frames]
    assert all("\n" not in frame for frame in frames)
    assert all(isinstance(event["timestamp"], int) for event in events)
    kinds = [event["type"] for event in events if event["type"] != "ping"]
    assert kinds == ["init", "stdout", "stdout", "stdout", "execution_complete"]
    assert [event["text"] for event in events if event["type"] == "stdout"] == ["a", "\n", "b"]


@pytest.mark.sandglass
def test_the_first_output_arrives_while_the_command_runs(http, raw):
    sandbox = raw()["id"]
    command = {"command": "echo first; sleep 2; echo last"}
    begun = datetime.now()
    with http.stream("POST", f"/v1/sandboxes/{sandbox}/proxy/44772/command", json=command) as answer:
        for chunk in answer.iter_text():
            if "first" in chunk:
                assert (datetime.now() - begun).total_seconds() < 1.5
                break
        else:
            pytest.fail("no output")
