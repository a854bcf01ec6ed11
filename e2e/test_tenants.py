"""Several tenants on one server: each with a key of its own, none with a way to what is another's."""

import json
import os
import subprocess
import threading
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest
from opensandbox import SandboxManagerSync, SandboxSync
from opensandbox.exceptions import SandboxApiException
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from conftest import body_of, texts
from stack import wait_for
from tenants import KEY, SharedStack

pytestmark = pytest.mark.sandglass

IMAGE = "host"
NOBODYS = "00000000-0000-4000-8000-000000000000"


@pytest.fixture(scope="module")
def shared():
    stack = SharedStack().start()
    yield stack
    stack.clear()
    problems = stack.close()
    assert not problems, "\n".join(problems)


@pytest.fixture
def create(shared):
    made = []

    def make(tenant, **keys):
        sandbox = SandboxSync.create(
            IMAGE,
            timeout=timedelta(minutes=5),
            resource={"cpu": "1", "memory": "512Mi"},
            connection_config=shared.sdk(tenant, **keys),
        )
        made.append(sandbox)
        return sandbox

    yield make
    for sandbox in made:
        sandbox.close()
    shared.clear()


def test_each_tenant_lives_as_if_alone(shared, create):
    boxes = {"a": create("a"), "b": create("b", use_server_proxy=True)}
    for tenant, box in boxes.items():
        assert texts(box.commands.run(f"echo of {tenant}").logs.stdout) == [f"of {tenant}"]
        box.files.write_file("/tmp/mine", tenant)
        assert shared.listed(tenant) == [box.id]
        assert box.get_info().status.state == "Running"
    assert {t: box.files.read_file("/tmp/mine") for t, box in boxes.items()} == {"a": "a", "b": "b"}


def test_anothers_sandbox_cannot_be_found_by_any_means_of_the_sdk(shared, create):
    box = create("a")
    with pytest.raises(SandboxApiException) as refused:
        SandboxSync.connect(box.id, connection_config=shared.sdk("b"))
    assert refused.value.status_code == 404
    manager = SandboxManagerSync.create(connection_config=shared.sdk("b"))
    for attempt in (
        lambda: manager.get_sandbox_info(box.id),
        lambda: manager.kill_sandbox(box.id),
        lambda: manager.pause_sandbox(box.id),
        lambda: manager.resume_sandbox(box.id),
        lambda: manager.renew_sandbox(box.id, timedelta(minutes=9)),
    ):
        with pytest.raises(SandboxApiException) as refused:
            attempt()
        assert refused.value.status_code == 404
    manager.close()
    assert shared.listed("b") == []
    assert texts(box.commands.run("echo still here").logs.stdout) == ["still here"]


def test_ports_open_to_the_owner_and_to_whoever_has_the_token(shared, create):
    box = create("a")
    box.files.write_file("/tmp/site/index.html", "hello")
    box.commands.run("cd /tmp/site && (python3 -m http.server 8000 >/dev/null 2>&1 &)")
    path = f"/v1/sandboxes/{box.id}/proxy/8000/index.html"
    with shared.http("a") as a, shared.http("b") as b, shared.http() as nobody:
        assert wait_for(lambda: a.get(path).text == "hello")
        absent = b.get(f"/v1/sandboxes/{NOBODYS}/proxy/8000/index.html")
        hidden = b.get(path)
        assert (hidden.status_code, hidden.content) == (absent.status_code, absent.content) == (404, absent.content)
        assert nobody.get(path).status_code == 401
        assert nobody.get(path, headers={KEY: "no-key"}).json()["code"] == "INVALID_API_KEY"
        endpoint = a.get(f"/v1/sandboxes/{box.id}/endpoints/8000", params={"use_server_proxy": "true"}).json()
        assert nobody.get(path, headers=endpoint["headers"]).text == "hello"
        # The agent's port is no exception.
        assert b.get(f"/v1/sandboxes/{box.id}/proxy/44772/ping").status_code == 404


def test_websockets_are_accepted_and_closed_with_the_reason(shared, create):
    box = create("a")

    def close_code(headers):
        with connect(f"ws://{shared.domain}/v1/sandboxes/{box.id}/proxy/9/x", additional_headers=headers) as socket:
            with pytest.raises(ConnectionClosed) as closed:
                socket.recv(timeout=10)
            return closed.value.rcvd.code

    assert close_code({}) == 1008
    assert close_code({KEY: "no-key"}) == 1008
    # For the other tenant there is no such sandbox; for the owner, nothing listens on the port.
    assert close_code({KEY: "b-key"}) == 1011
    assert close_code({KEY: "a-key"}) == 1011


def test_what_belongs_to_the_server_is_not_a_tenants(shared):
    with shared.http("a") as a:
        for method, path in (("GET", "/v1/images?kind=local"), ("POST", "/v1/images/prune"), ("DELETE", "/v1/images/x")):
            answer = a.request(method, path)
            assert (answer.status_code, answer.json()["code"]) == (403, "GENERAL::FORBIDDEN"), path


def test_idempotency_keys_are_each_tenants_own(shared, create):
    class Server:
        image = IMAGE

    ids = []
    for tenant in ("a", "b", "a"):
        with shared.http(tenant) as client:
            answer = client.post(
                "/v1/sandboxes", json=body_of(Server, metadata={"of": tenant}), headers={"Idempotency-Key": "same"}
            )
            assert answer.status_code == 202, answer.text
            ids.append(answer.json()["id"])
    assert ids[0] == ids[2] != ids[1]


def test_ownership_outlives_the_server(shared, create):
    box = create("a")
    shared.kill()
    shared.start()
    assert shared.listed("a") == [box.id]
    assert shared.listed("b") == []
    again = SandboxSync.connect(box.id, connection_config=shared.sdk("a"))
    assert texts(again.commands.run("echo back").logs.stdout) == ["back"]
    again.close()


def test_keys_change_while_the_server_runs(shared, create):
    box = create("a")
    path = f"/v1/sandboxes/{box.id}"

    def status(key):
        with shared.http(key=key) as client:
            return client.get(path).status_code

    try:
        shared.tell(("a", "fresh-key"), ("b", "b-key"))
        assert wait_for(lambda: status("fresh-key") == 200)
        assert status("a-key") == 401 and status("b-key") == 404
        # What cannot be read changes nothing.
        shared.file.write_text("[[tenants]]\nname = ")
        assert wait_for(lambda: "the last tenants stay" in shared.log.read_text())
        assert status("fresh-key") == 200
        shared.file.unlink()
        assert wait_for(lambda: status("fresh-key") == 401)
    finally:
        shared.tell(("a", "a-key"), ("b", "b-key"))
    assert wait_for(lambda: status("a-key") == 200)
    text = shared.log.read_text()
    assert "fresh-key" not in text and "a-key" not in text


class Service:
    """The other side of the provider `http`."""

    def __init__(self):
        self.answers, self.seen = {}, []
        service = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                service.seen.append(self.headers)
                status, body = service.answers.get(self.headers[KEY], (401, {}))
                data = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server.server_port}/whose"

    def close(self):
        self.server.shutdown()
        self.server.server_close()


def test_tenants_from_a_service():
    service = Service()
    for name in ("a", "b"):
        service.answers[f"{name}-key"] = (200, {"namespace": f"team-{name}", "ttl": 0})
    section = {
        "provider": "http",
        "endpoint": service.url,
        "auth_header": "X-Service-Auth",
        "auth_token": "service-secret",
        "timeout_seconds": 5,
    }
    stack = SharedStack(tenants=section).start()
    try:
        box = SandboxSync.create(
            IMAGE, timeout=timedelta(minutes=5), resource={"cpu": "1", "memory": "512Mi"}, connection_config=stack.sdk("a")
        )
        assert texts(box.commands.run("echo in").logs.stdout) == ["in"]
        assert stack.listed("a") == [box.id] and stack.listed("b") == []
        assert service.seen[0]["X-Service-Auth"] == "service-secret"
        path = f"/v1/sandboxes/{box.id}"
        with stack.http("a") as a, stack.http("b") as b, stack.http(key="c-key") as c:
            assert c.get(path).json()["code"] == "INVALID_API_KEY"
            # Out of order, it is taken at its last word, and says nothing about keys it never vouched for.
            service.answers["a-key"] = service.answers["c-key"] = (500, {})
            assert a.get(path).status_code == 200
            refused = c.get(path)
            assert (refused.status_code, refused.json()["code"]) == (503, "TENANT_PROVIDER_UNAVAILABLE")
            assert b.get(path).status_code == 404
            # A key that is taken back is refused as soon as the service says so.
            service.answers["a-key"] = (401, {})
            assert wait_for(lambda: a.get(path).status_code == 401)
            service.answers["a-key"] = (200, {"namespace": "team-a"})
            assert wait_for(lambda: a.get(path).status_code == 200)
        box.kill()
        box.close()
        text = stack.log.read_text()
        assert not any(secret in text for secret in ("service-secret", "a-key", "c-key"))
    finally:
        problems = stack.close()
        service.close()
    assert not problems, "\n".join(problems)


def refusal(stack):
    done = subprocess.run(
        [os.environ["SANDGLASS_BIN"], "serve", "--config", str(stack.config)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode != 0, done.stderr
    return done.stdout + done.stderr


@pytest.fixture
def unstarted():
    stack = SharedStack()
    yield stack
    stack.close()


def test_tenants_and_a_key_of_the_server_exclude_each_other(unstarted):
    text = unstarted.config.read_text().replace("[server]", '[server]\napi_key = "hunter2"')
    unstarted.config.write_text(text)
    said = refusal(unstarted)
    assert "server.api_key" in said and "hunter2" not in said


@pytest.mark.parametrize("text", [None, "", "[[tenants]]\nname = 'a'\nnamespace = 'n'\napi_keys = ['hunter2', 7]"])
def test_a_server_without_usable_tenants_does_not_start(unstarted, text):
    Path(unstarted.file).unlink()
    if text is not None:
        unstarted.file.write_text(text)
    said = refusal(unstarted)
    assert str(unstarted.file) in said and "hunter2" not in said


def test_the_machines_own_files_are_not_offered_to_tenants():
    stack = SharedStack(config={"embedded": {"host_image": "loopback"}}).start()
    try:
        with stack.http("a") as a:

            class Server:
                image = IMAGE

            answer = a.post("/v1/sandboxes", json=body_of(Server))
            assert answer.status_code >= 400, answer.text
    finally:
        problems = stack.close()
    assert not problems, "\n".join(problems)
