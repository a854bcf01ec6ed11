"""The listener as clients meet it: TLS and its certificates, HTTP/2, the redirect, requests that are none, and sandboxes that are woken."""

import json
import signal
import socket
import ssl
import subprocess
import threading
from datetime import timedelta
from pathlib import Path

import httpx
import pytest
from opensandbox import SandboxSync
from opensandbox.config import ConnectionConfigSync
from websockets.sync.client import connect

from conftest import IMAGE, body_of
from stack import Stack, free_port, wait_for

pytestmark = pytest.mark.sandglass
KEY = "OPEN-SANDBOX-API-KEY"


class Secured(Stack):
    """A server with TLS, a second port that redirects, and a certificate of the test's own."""

    def __init__(self, folder, **server):
        self.cert, self.private = folder / "cert.pem", folder / "key.pem"
        self.issue("first")
        self.plain_port = free_port()
        keys = {
            "tls_cert": str(self.cert),
            "tls_key": str(self.private),
            "tls_redirect_port": self.plain_port,
            "hsts_max_age_seconds": 60,
            **server,
        }
        super().__init__(config={"server": keys})

    @property
    def tls(self):
        return ssl.create_default_context(cafile=self.cert)

    def issue(self, name, key=True):
        """Another certificate in the same files."""
        fresh = self.private.with_suffix(".new")
        subprocess.run(
            ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
            + ["-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost"]
            + ["-keyout", str(fresh), "-out", str(self.cert)],
            check=True,
            capture_output=True,
        )
        if key:
            fresh.replace(self.private)

    def presents(self):
        """The name on the certificate that a new connection gets."""
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        with socket.create_connection(("127.0.0.1", self.port), 10) as raw, context.wrap_socket(raw) as secured:
            der = secured.getpeercert(binary_form=True)
        return ssl.DER_cert_to_PEM_cert(der).strip()

    def curl(self, *arguments):
        done = subprocess.run(
            ["curl", "-sS", "--max-time", "60", "--cacert", str(self.cert), *arguments], capture_output=True, text=True, check=True
        )
        return done.stdout


@pytest.fixture(scope="module")
def secured(tmp_path_factory):
    stack = Secured(tmp_path_factory.mktemp("tls"))
    try:
        stack.start()
        yield stack
    finally:
        problems = stack.close()
    assert not problems, "\n".join(problems)


def test_tls_speaks_http_2_and_1_and_tells_browsers_to_stay(secured):
    for option, version in [("--http2", "2"), ("--http1.1", "1.1")]:
        for tls in ["--tlsv1.2", "--tlsv1.3"]:
            written = ["-o", "/dev/null", "-w", "%{http_version} %{http_code}"]
            assert secured.curl(option, tls, *written, f"{secured.url}/health") == f"{version} 200"
    refused = subprocess.run(
        ["curl", "-sS", "--tls-max", "1.1", "--cacert", str(secured.cert), f"{secured.url}/health"], capture_output=True, check=False
    )
    assert refused.returncode == 35
    headers = secured.curl("-D", "-", "-o", "/dev/null", f"{secured.url}/health").lower()
    assert "strict-transport-security: max-age=60\n" in headers
    ready = json.loads(secured.curl(f"{secured.url}/readyz"))
    assert ready["checks"]["certificate"] == "ok"


def test_plain_http_is_sent_to_the_same_place_under_https(secured):
    plain = f"http://127.0.0.1:{secured.plain_port}"
    answer = httpx.post(f"{plain}/v1/sandboxes?a=%2F", json={}, timeout=60)
    assert (answer.status_code, answer.headers["location"]) == (308, f"{secured.url}/v1/sandboxes?a=%2F")
    assert "strict-transport-security" not in answer.headers
    with pytest.raises(httpx.TransportError):
        httpx.get(f"http://127.0.0.1:{secured.port}/health")


def test_the_sdk_works_over_tls(secured, monkeypatch):
    transport = httpx.HTTPTransport(verify=secured.tls)
    given = ConnectionConfigSync(domain=secured.domain, api_key=secured.key, protocol="https", transport=transport)
    # Or from where the machine keeps its authorities.
    monkeypatch.setenv("SSL_CERT_FILE", str(secured.cert))
    found = ConnectionConfigSync(domain=secured.domain, api_key=secured.key, protocol="https")
    for config in (given, found):
        with SandboxSync.create(IMAGE, timeout=timedelta(minutes=5), connection_config=config) as box:
            endpoint = box.get_endpoint(8080).endpoint
            assert "://" not in endpoint
            assert box.commands.run("echo over tls").text.strip() == "over tls"
            box.files.write_file("/tmp/x", "y" * 100_000)
            assert len(box.files.read_file("/tmp/x")) == 100_000
            box.kill()
    transport.close()


def serve_headers(box):
    """A program in the sandbox that tells what it is asked; its port."""
    program = (
        "import http.server as h\n"
        "class A(h.BaseHTTPRequestHandler):\n"
        "  protocol_version='HTTP/1.1'\n"
        "  def do_POST(self):\n"
        "    body=self.rfile.read(int(self.headers.get('content-length',0)))\n"
        "    said=(str(self.headers)+body.decode()).encode()\n"
        "    self.send_response(200);self.send_header('content-length',str(len(said)));self.end_headers();self.wfile.write(said)\n"
        "h.ThreadingHTTPServer(('0.0.0.0',8000),A).serve_forever()\n"
    )
    box.files.write_file("/tmp/tell.py", program)
    box.commands.run("nohup python3 /tmp/tell.py >/dev/null 2>&1 & for i in $(seq 100); do (echo > /dev/tcp/127.0.0.1/8000) 2>/dev/null && break; sleep 0.1; done")
    return 8000


def test_programs_are_told_how_the_client_came(secured):
    transport = httpx.HTTPTransport(verify=secured.tls)
    config = ConnectionConfigSync(domain=secured.domain, api_key=secured.key, protocol="https", transport=transport)
    with SandboxSync.create(IMAGE, timeout=timedelta(minutes=5), connection_config=config) as box:
        port = serve_headers(box)
        url = f"{secured.url}/v1/sandboxes/{box.id}/proxy/{port}/"
        for version in ["--http2", "--http1.1"]:
            said = secured.curl(version, "-H", f"{KEY}: {secured.key}", "-H", "Cookie: a=1; b=2", "--data", "hello", url).lower()
            assert "x-forwarded-proto: https\n" in said and f"x-forwarded-host: {secured.domain}\n" in said
            assert "cookie: a=1; b=2" in said and said.endswith("hello")
            assert said.count("host: ") == 2
        box.kill()
    transport.close()


def test_certificates_are_replaced_without_dropping_anybody(secured):
    # Also where an earlier attempt ended in between.
    secured.issue("whole")
    assert wait_for(lambda: secured.presents() == secured.cert.read_text().strip())
    before = secured.presents()
    old = secured.client()
    assert old.call("GET", "/v1/sandboxes")[0] == 200
    metrics = lambda: old.raw("GET", "/metrics")[2].decode()  # noqa: E731
    # A certificate without its key is not taken, and said to be wrong.
    kept = secured.cert.read_text()
    secured.issue("half", key=False)
    assert wait_for(lambda: "sandglass_tls_certificate_current 0" in metrics())
    assert 'sandglass_tls_certificates_total{outcome="unusable"}' in metrics()
    assert old.call("GET", "/readyz")[1]["checks"]["certificate"] == "outdated"
    assert secured.presents() == before == kept.strip()
    assert "the new certificate cannot be used; the old one serves on" in secured.log.read_text()
    secured.issue("second")
    assert wait_for(lambda: secured.presents() == secured.cert.read_text().strip() != before)
    assert "sandglass_tls_certificate_current 1" in metrics()
    assert old.call("GET", "/v1/sandboxes")[0] == 200, "a connection from before is still there"
    old.close()
    text = secured.log.read_text()
    assert "PRIVATE" not in text and secured.private.read_text().splitlines()[1] not in text


def test_a_check_looks_at_the_files(secured, tmp_path):
    def check(cert, key):
        config = tmp_path / "c.toml"
        config.write_text(f'[server]\nhost = "127.0.0.1"\napi_key = "k"\ntls_cert = "{cert}"\ntls_key = "{key}"\n')
        return subprocess.run([secured.binary, "config", "check", "--config", str(config)], capture_output=True, text=True, check=False)

    assert check(secured.cert, secured.private).returncode == 0
    for cert, key, word in [
        (tmp_path / "no.pem", secured.private, "cannot read"),
        (secured.cert, secured.cert, "no private key"),
        ("", secured.private, "only go together"),
    ]:
        said = check(cert, key)
        assert said.returncode == 1 and word in said.stderr, said
    open_key = tmp_path / "open.pem"
    open_key.write_bytes(secured.private.read_bytes())
    open_key.chmod(0o644)
    said = check(secured.cert, open_key)
    assert said.returncode == 0 and "warning: server.tls_key" in said.stderr


# ---------------------------------------------------------------- HTTP without TLS


def test_http_2_needs_no_tls_when_the_client_knows(server):
    written = ["-o", "/dev/null", "-w", "%{http_version} %{http_code}"]
    command = ["curl", "-sS", "--max-time", "60", "--http2-prior-knowledge", *written, f"{server.url}/health"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "2 200"


@pytest.mark.parametrize(
    "request_text, status",
    [
        ("POST /v1/sandboxes HTTP/1.1\r\nHost: a\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
        ("GET /health HTTP/1.1\nHost: a\n\n", 400),
        ("GET /health HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", 400),
        ("GET /health HTTP/1.1\r\nHost: a\r\nX: " + "y" * 70_000 + "\r\n\r\n", 431),
    ],
)
def test_requests_with_two_meanings_are_refused_and_end_the_connection(server, request_text, status):
    with socket.create_connection(("127.0.0.1", int(server.domain.split(":")[1])), 30) as raw:
        raw.sendall(request_text.encode() + b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n")
        answer = b""
        while piece := raw.recv(65536):
            answer += piece
    assert answer.startswith(f"HTTP/1.1 {status} ".encode()) and answer.count(b"HTTP/1.1 ") == 1
    assert json.loads(answer.split(b"\r\n\r\n", 1)[1])["code"] == "GENERAL::MALFORMED_REQUEST"


def test_a_stop_lets_a_command_finish(tmp_path):
    stack = Stack(config={"server": {"timeout_graceful_shutdown": 30}})
    try:
        stack.start()
        config = ConnectionConfigSync(domain=stack.domain, api_key=stack.key)
        box = SandboxSync.create(IMAGE, timeout=timedelta(minutes=5), connection_config=config)
        told = []
        running = threading.Thread(target=lambda: told.append(box.commands.run("echo begun; sleep 3; echo done").text))
        running.start()
        assert wait_for(lambda: any("sleep 3" in p.command for p in stack.guests()))
        stack.server.send_signal(signal.SIGTERM)
        running.join(60)
        assert told and told[0].split() == ["begun", "done"]
        assert stack.server.wait(30) == 0
        stack.start()
        box.close()
    finally:
        problems = stack.close()
    assert not problems, "\n".join(problems)


# ---------------------------------------------------------------- waking


def state(http, box):
    return http.get(f"/v1/sandboxes/{box}").json()["status"]["state"]


def ping(http, box, **headers):
    return http.get(f"/v1/sandboxes/{box}/proxy/44772/ping", headers=headers)


@pytest.mark.only_on("embedded", "docker")
def test_a_request_wakes_a_sandbox_that_was_made_for_it(server, http, create, config):
    box = create(extensions={"access.wake": "true"}, connection_config=config(use_server_proxy=True))
    box.commands.run("echo kept > /tmp/x")
    for _ in range(3):
        box.pause()
        assert state(http, box.id) == "Paused"
        # A probe is no use of it.
        skipped = ping(http, box.id, **{"OpenSandbox-Access-Renew": "skip"})
        assert (skipped.status_code, skipped.json()["code"]) == (502, "BACKEND_CONNECTION_FAILED")
        assert httpx.get(f"{server.url}/v1/sandboxes/{box.id}/proxy/44772/ping", timeout=60).status_code == 401
        assert state(http, box.id) == "Paused"
        assert box.commands.run("cat /tmp/x").text.strip() == "kept"
        assert state(http, box.id) == "Running"


@pytest.mark.only_on("embedded", "docker")
def test_many_at_once_wake_it_once(server, http, raw):
    box = raw(wakeOnAccess=True)["id"]
    assert wait_for(lambda: ping(http, box).status_code == 200)
    assert http.post(f"/v1/sandboxes/{box}/pause").status_code == 202
    answers = []
    asking = [threading.Thread(target=lambda: answers.append(ping(http, box).status_code)) for _ in range(20)]
    for thread in asking:
        thread.start()
    for thread in asking:
        thread.join(60)
    assert answers == [200] * 20
    events = http.get(f"/v1/sandboxes/{box}/events", params={"limit": 200}).json()["items"]
    assert str(events).count("resume_requested") <= 1
    assert state(http, box) == "Running"


@pytest.mark.only_on("embedded", "docker")
def test_without_it_a_paused_sandbox_stays_so(server, http, raw):
    box = raw()["id"]
    assert wait_for(lambda: ping(http, box).status_code == 200)
    assert http.post(f"/v1/sandboxes/{box}/pause").status_code == 202
    assert ping(http, box).status_code == 502
    assert state(http, box) == "Paused"
    refused = http.post("/v1/sandboxes", json=body_of(server, extensions={"access.wake": "yes"}))
    assert (refused.status_code, refused.json()["code"]) == (400, "SANDBOX::INVALID_PARAMETER")


@pytest.mark.only_on("embedded", "docker")
def test_a_terminal_wakes_it_too(server, http, raw):
    box = raw(wakeOnAccess=True)["id"]
    assert wait_for(lambda: ping(http, box).status_code == 200)
    made = http.post(f"/v1/sandboxes/{box}/proxy/44772/pty", json={})
    assert made.status_code < 300, made.text
    session = made.json()["session_id"]
    assert http.post(f"/v1/sandboxes/{box}/pause").status_code == 202
    url = f"{server.url.replace('http', 'ws')}/v1/sandboxes/{box}/proxy/44772/pty/{session}/ws"
    with connect(url, additional_headers={KEY: server.key}, open_timeout=60) as terminal:
        assert terminal.recv(timeout=60)
    assert state(http, box) == "Running"
