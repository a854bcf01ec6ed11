"""The gateway, within the server and alone: the published SDK through it, raw requests, signatures, waking, the end of either side."""

import json
import signal
import socket
import threading
import time
from contextlib import closing, contextmanager
from datetime import timedelta
from types import SimpleNamespace

import httpx
import pytest
from opensandbox import SandboxSync
from opensandbox.config import ConnectionConfigSync

from docker_engine import PYTHON
from gateways import INGRESS_KEY, Gateway, config_of, nested
from services import Redis
from stack import Stack, free_port, wait_for

pytestmark = pytest.mark.sandglass

SERVER_PY = """
import http.server, sys, time
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_GET(self):
        if self.path.startswith("/slow"):
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for piece in (b"first", b"second"):
                self.wfile.write(b"%x\\r\\n%s\\r\\n" % (len(piece), piece))
                self.wfile.flush()
                time.sleep(float(self.path.partition("=")[2]))
            self.wfile.write(b"0\\r\\n\\r\\n")
            return
        body = (self.command + " " + self.path + "\\n" + str(self.headers)).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Set-Cookie", "a=1")
        self.send_header("Set-Cookie", "b=2")
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *_): pass
http.server.ThreadingHTTPServer(("0.0.0.0", int(sys.argv[1])), Handler).serve_forever()
"""


class Scene:
    """A server, its gateway, and how clients come."""

    def __init__(self, stack, gateway_port, image):
        self.stack, self.port, self.image = stack, gateway_port, image
        self.http = httpx.Client(base_url=stack.url, headers={"OPEN-SANDBOX-API-KEY": stack.key}, timeout=60)
        self.made = []

    def sandbox(self, **keys):
        config = ConnectionConfigSync(domain=self.stack.domain, api_key=self.stack.key)
        resource = {"cpu": "1", "memory": "512Mi"}
        made = SandboxSync.create(self.image, connection_config=config, timeout=timedelta(minutes=10), resource=resource, **keys)
        self.made.append(made)
        return made

    def program(self, sandbox, port=8000):
        """A program that answers on a port of the sandbox."""
        sandbox.files.write_file("/tmp/server.py", SERVER_PY)
        sandbox.commands.run(f"nohup python3 /tmp/server.py {port} >/tmp/server.log 2>&1 &")

        def answers():
            done = sandbox.commands.run(f"python3 -c \"import socket; socket.create_connection(('127.0.0.1', {port}))\"")
            return done.error is None

        assert wait_for(answers)
        return port

    def endpoint(self, sandbox, port, **query):
        answer = self.http.get(f"/v1/sandboxes/{sandbox.id}/endpoints/{port}", params=query)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def get(self, endpoint, path="/", headers=None, **keys):
        """As a client that knows nothing but the endpoint; host names lead to the gateway."""
        host, slash, rest = endpoint["endpoint"].partition("/")
        sent = {"Host": host, **endpoint.get("headers", {}), **(headers or {})}
        return httpx.get(f"http://127.0.0.1:{self.port}{slash}{rest}{path}", headers=sent, timeout=60, **keys)

    def close(self):
        for sandbox in self.made:
            self.http.delete(f"/v1/sandboxes/{sandbox.id}")
            sandbox.close()
        self.http.close()


@contextmanager
def embedded(mode="header", flags=(), gateway=True, signature="full", **ingress):
    """A server on the embedded runtime, with the gateway within it when it is told where to listen."""
    port = free_port()
    within = ingress.pop("within", False)
    if within:
        ingress["listen"] = f"127.0.0.1:{port}"
    stack = Stack(config=config_of(mode, port, signature, **ingress))
    made, scene = None, None
    try:
        stack.start()
        if gateway and not within:
            made = Gateway(stack, f"--mode={'uri' if mode == 'uri' else 'header'}", f"--secure-access-signature={signature}", *flags, port=port).ready()
        scene = Scene(stack, port, "host")
        scene.gateway = made
        yield scene
    finally:
        if scene:
            scene.close()
        if made:
            made.close()
        problems = stack.close()
    assert not problems, "\n".join(problems)


def use(scene, sandbox, mode):
    """What everybody does with a sandbox, all of it through the gateway."""
    assert sandbox.commands.run("echo hello from $((20 + 22))").logs.stdout[0].text.strip() == "hello from 42"
    sandbox.files.write_file("/tmp/note.txt", "noted\n")
    assert sandbox.files.read_file("/tmp/note.txt") == "noted\n"
    port = scene.program(sandbox)
    endpoint = scene.endpoint(sandbox, port)
    expected = {
        "header": f"127.0.0.1:{scene.port}",
        "uri": f"127.0.0.1:{scene.port}/{sandbox.id}/{port}",
        "wildcard": f"{sandbox.id}-{port}.sandbox.example",
    }
    assert endpoint["endpoint"] == expected[mode]
    assert endpoint.get("headers", {}).get("OpenSandbox-Ingress-To") == (f"{sandbox.id}-{port}" if mode == "header" else None)
    answer = scene.get(endpoint, "/a%2Fb//c?q=%20", {"OPEN-SANDBOX-API-KEY": scene.stack.key, "Authorization": "Bearer mine"})
    assert answer.status_code == 200, answer.text
    assert answer.text.splitlines()[0] == "GET /a%2Fb//c?q=%20"
    assert answer.headers.get_list("set-cookie") == ["a=1", "b=2"]
    assert answer.headers["reverse-proxy-server-powerby"] == "OpenSandbox-ingress"
    route = {name: value for name, value in endpoint["headers"].items() if name == "OpenSandbox-Ingress-To"}
    bare = {"endpoint": endpoint["endpoint"], "headers": route}
    assert set(endpoint["headers"]) - set(route) == {"X-Sandglass-Access"}
    for shown, status in ({}, 401), ({"X-Sandglass-Access": "wrong"}, 401), (endpoint["headers"], 200):
        assert scene.get(bare, headers=shown).status_code == status, shown
    assert endpoint["headers"]["X-Sandglass-Access"] not in answer.text
    assert "Bearer mine" in answer.text and scene.stack.key not in answer.text and "ingress-to" not in answer.text.lower()


@pytest.mark.parametrize("within", [False, True], ids=["alone", "within"])
@pytest.mark.parametrize("mode", ["header", "uri"])
def test_the_sdk_works_through_the_gateway(mode, within):
    with embedded(mode, within=within) as scene:
        use(scene, scene.sandbox(), mode)


@pytest.mark.parametrize("mode", ["header", "uri"])
def test_the_sdk_works_through_the_gateway_on_docker(on_docker, mode):
    port = free_port()
    stack, _ = on_docker(config=nested(config_of(mode, port)))
    gateway = Gateway(stack, f"--mode={mode}", port=port).ready()
    scene = Scene(stack, port, PYTHON)
    try:
        use(scene, scene.sandbox(), mode)
    finally:
        scene.close()
        assert gateway.close() == 0


def through_server(scene, sandbox):
    """The SDK's own calls by way of the server, for modes whose host names only exist in this test."""
    config = ConnectionConfigSync(domain=scene.stack.domain, api_key=scene.stack.key, use_server_proxy=True)
    return SandboxSync.connect(sandbox, connection_config=config)


@pytest.mark.parametrize("signature", ["full", "short"])
def test_host_names_and_signed_routes(signature):
    with embedded("wildcard", signature=signature) as scene:
        body = {"image": {"uri": "host"}, "entrypoint": ["sleep", "600"], "timeout": 600, "resourceLimits": {}, "secureAccess": True}
        made = scene.http.post("/v1/sandboxes", json=body)
        assert made.status_code == 202, made.text
        sandbox = through_server(scene, made.json()["id"])
        try:
            port = scene.program(sandbox)
            plain = scene.endpoint(sandbox, port)
            assert plain["endpoint"] == f"{sandbox.id}-{port}.sandbox.example"
            assert scene.get(plain).status_code == 200
            bare = {"endpoint": plain["endpoint"]}
            refused = scene.get(bare)
            assert (refused.status_code, refused.text[:21]) == (401, "OpenSandbox Ingress: ")
            assert scene.get(bare, headers={"OpenSandbox-Secure-Access": "wrong"}).status_code == 401

            soon = int(time.time()) + 300
            signed = scene.endpoint(sandbox, port, expires=str(soon))
            assert "OpenSandbox-Secure-Access" not in signed.get("headers", {})
            label = signed["endpoint"].removesuffix(".sandbox.example")
            assert len(label) <= 63
            told = scene.get(signed, "/x").text.lower()
            assert told.startswith("get /x\n")
            # The name is the program's own; it compares it with the origin of its pages.
            assert f"\nhost: {signed['endpoint']}\n" in told and f"\nx-forwarded-host: {signed['endpoint']}\n" in told
            assert scene.get(signed, headers={"OpenSandbox-Secure-Access": ""}).status_code == 401
            last = label[-2]
            forged = label[:-2] + ("0" if last != "0" else "1") + label[-1]
            assert scene.get({"endpoint": f"{forged}.sandbox.example"}).status_code == 401
            for asked, code in ((str(soon - 600), 400), ("-1", 400), (str(2**64), 400), ("soon", 422)):
                answer = scene.http.get(f"/v1/sandboxes/{sandbox.id}/endpoints/{port}", params={"expires": asked})
                assert answer.status_code == code, answer.text
        finally:
            scene.http.delete(f"/v1/sandboxes/{sandbox.id}")
            sandbox.close()


def test_signed_endpoints_of_the_sdk_expire():
    with embedded("header") as scene:
        sandbox = scene.sandbox(secure_access=True)
        port = scene.program(sandbox)
        endpoint = sandbox.get_signed_endpoint(port, int(time.time()) + 10)
        route = {"endpoint": endpoint.endpoint, "headers": dict(endpoint.headers)}
        assert scene.get(route).status_code == 200
        assert wait_for(lambda: scene.get(route).status_code == 401)


def lines(endpoint):
    """The headers of an endpoint, as a raw request has them."""
    return "".join(f"{name}: {value}\r\n" for name, value in endpoint["headers"].items())


def raw(port, request):
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        connection.sendall(request)
        answer = b""
        while piece := connection.recv(65536):
            answer += piece
    return answer


def test_raw_requests_are_answered_as_published():
    with embedded("header") as scene:
        nobody = "11111111-2222-4333-8444-555555555555"
        for head, status in [
            (b"GET /status.ok HTTP/1.1\r\nHost: anything-80.x\r\nConnection: close\r\n", 200),
            (b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n", 400),
            (b"GET / HTTP/1.1\r\nHost: h\r\nOpenSandbox-Ingress-To: x-0\r\nConnection: close\r\n", 400),
            (f"GET / HTTP/1.1\r\nHost: {nobody}-80.x\r\nConnection: close\r\n".encode(), 404),
            (b"GET / HTTP/1.1\r\nHost: h\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n", 400),
            (b"GET / HTTP/1.1\r\nHost: h\r\nHost: i\r\n", 400),
        ]:
            answer = raw(scene.port, head + b"\r\n")
            assert answer.startswith(f"HTTP/1.1 {status}".encode()), (head, answer)
            if status != 200:
                assert b"\r\n\r\nOpenSandbox Ingress: " in answer, answer


def test_answers_come_as_they_are_made_and_removal_cuts_them():
    with embedded("header") as scene:
        sandbox = scene.sandbox()
        port = scene.program(sandbox)
        endpoint = scene.endpoint(sandbox, port)
        with socket.create_connection(("127.0.0.1", scene.port), timeout=60) as connection:
            connection.sendall(f"GET /slow=600 HTTP/1.1\r\nHost: h\r\n{lines(endpoint)}\r\n".encode())
            got = b""
            while b"first" not in got:
                got += connection.recv(65536)
            assert b"second" not in got
            scene.http.delete(f"/v1/sandboxes/{sandbox.id}")
            while piece := connection.recv(65536):
                got += piece
            assert not got.endswith(b"0\r\n\r\n"), "a body that was cut must not look whole"
        assert scene.get(endpoint).status_code == 404


def test_what_is_known_is_served_while_the_server_is_away():
    with embedded("header") as scene:
        sandbox = scene.sandbox()
        port = scene.program(sandbox)
        endpoint = scene.endpoint(sandbox, port)
        scene.stack.kill()
        assert wait_for(lambda: "is away" in scene.gateway.log.read_text())
        for _ in range(3):
            assert scene.get(endpoint).status_code == 200
        scene.stack.start()
        other = scene.sandbox()
        use(scene, other, "header")
        assert scene.get(endpoint).status_code == 200


def test_a_request_wakes_a_paused_sandbox_once():
    with embedded("header") as scene:
        sandbox = scene.sandbox(extensions={"access.wake": "true"})
        port = scene.program(sandbox)
        endpoint = scene.endpoint(sandbox, port)
        assert scene.http.post(f"/v1/sandboxes/{sandbox.id}/pause").status_code == 202
        answers = []
        asking = [threading.Thread(target=lambda: answers.append(scene.get(endpoint).status_code)) for _ in range(12)]
        for thread in asking:
            thread.start()
        for thread in asking:
            thread.join()
        assert answers == [200] * 12
        events = scene.http.get(f"/v1/sandboxes/{sandbox.id}/events", params={"limit": 1000}).json()["items"]
        resumed = [event for event in events if event["type"] == "sandbox.state_changed" and event.get("data", {}).get("to") == "Running"]
        assert len(resumed) <= 2, events

        lazy = scene.sandbox()
        lazy_port = scene.program(lazy)
        lazy_endpoint = scene.endpoint(lazy, lazy_port)
        assert scene.http.post(f"/v1/sandboxes/{lazy.id}/pause").status_code == 202
        assert wait_for(lambda: scene.get(lazy_endpoint).status_code == 503)
        assert scene.get(lazy_endpoint).headers["retry-after"] == "1"


def renewed(scene, sandbox):
    body = scene.http.get(f"/v1/sandboxes/{sandbox}").json()
    return body["expiresAt"]


BODY = {"image": {"uri": "host"}, "entrypoint": ["sleep", "600"], "timeout": 120, "resourceLimits": {}}
RENEWS = {"extensions": {"access.renew.extend.seconds": "3600"}}


def test_use_is_told_to_the_server():
    with embedded("header", flags=("-renew-intent-min-interval", "0")) as scene:
        sandbox = scene.http.post("/v1/sandboxes", json={**BODY, **RENEWS}).json()["id"]
        before = renewed(scene, sandbox)
        route = scene.endpoint(SimpleNamespace(id=sandbox), 44772)
        refused = {"endpoint": route["endpoint"], "headers": {"OpenSandbox-Ingress-To": f"{sandbox}-44772"}}
        assert wait_for(lambda: scene.get(route, "/ping", {"OpenSandbox-Access-Renew": "skip"}).status_code == 200)
        assert scene.get(refused).status_code == 401
        assert renewed(scene, sandbox) == before
        scene.get(route)
        assert wait_for(lambda: renewed(scene, sandbox) > before)
        scene.http.delete(f"/v1/sandboxes/{sandbox}")


def test_use_is_told_to_redis():
    redis = Redis().start()
    flags = ("--renew-intent-enabled", f"--renew-intent-redis-dsn={redis.dsn}", "--renew-intent-queue-max-len", "5", "--renew-intent-min-interval=0")
    try:
        with embedded("uri", flags=flags) as scene:
            sandbox = scene.http.post("/v1/sandboxes", json=BODY).json()["id"]
            route = scene.endpoint(SimpleNamespace(id=sandbox), 44772)
            assert route["endpoint"] == f"127.0.0.1:{scene.port}/{sandbox}/44772"
            assert wait_for(lambda: scene.get(route, "/ping").status_code == 200)
            for _ in range(8):
                scene.get(route, "/ping?x")
            assert wait_for(lambda: redis.call("LLEN", "opensandbox:renew:intent") == 5)
            message = json.loads(redis.call("LINDEX", "opensandbox:renew:intent", "0"))
            assert (message["sandbox_id"], message["port"], message["request_uri"]) == (sandbox, 44772, "/ping")
            scene.http.delete(f"/v1/sandboxes/{sandbox}")
    finally:
        redis.close()


def test_requests_under_way_end_when_the_gateway_is_told_to_stop():
    with embedded("header") as scene:
        sandbox = scene.sandbox()
        port = scene.program(sandbox)
        endpoint = scene.endpoint(sandbox, port)
        with closing(socket.create_connection(("127.0.0.1", scene.port), timeout=60)) as connection:
            connection.sendall(f"GET /slow=2 HTTP/1.1\r\nHost: h\r\n{lines(endpoint)}\r\n".encode())
            got = b""
            while b"first" not in got:
                got += connection.recv(65536)
            scene.gateway.process.send_signal(signal.SIGTERM)
            while piece := connection.recv(65536):
                got += piece
            assert got.endswith(b"0\r\n\r\n") and b"second" in got, got
        assert scene.gateway.process.wait(60) == 0, scene.gateway.log.read_text()


def test_what_does_not_start_says_why():
    with embedded("header", gateway=False) as scene:
        for flags, key, word in [
            ((), "wrong", "refuses the key"),
            (("--provider-type", "batchsandbox"), INGRESS_KEY, "Kubernetes runtime"),
            (("--secure-access-keys", "K=eA=="), INGRESS_KEY, "secure-access-keys"),
            (("--nope",), INGRESS_KEY, "no flag"),
        ]:
            gateway = Gateway(scene.stack, *flags, key=key)
            assert gateway.process.wait(60) != 0
            assert word in gateway.log.read_text(), gateway.log.read_text()
        assert INGRESS_KEY not in scene.stack.log.read_text()


def test_a_gateway_is_open_only_where_it_is_configured_so():
    with embedded("uri", open_gateway=True) as scene:
        sandbox = scene.sandbox()
        port = scene.program(sandbox)
        endpoint = scene.endpoint(sandbox, port)
        assert "headers" not in endpoint or "X-Sandglass-Access" not in endpoint["headers"]
        assert scene.get({"endpoint": endpoint["endpoint"]}).status_code == 200
        guarded = scene.sandbox(secure_access=True)
        port = scene.program(guarded)
        endpoint = scene.endpoint(guarded, port)
        assert scene.get({"endpoint": endpoint["endpoint"]}).status_code == 401
        assert scene.get(endpoint).status_code == 200
