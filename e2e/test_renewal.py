"""Renewal on use on the embedded runtime: through the proxy, and by messages from a Redis behind TLS."""

import json
import subprocess
import tempfile
from datetime import datetime, timedelta, timezone
from pathlib import Path

import httpx
import pytest

from services import Redis
from stack import Stack, free_port, wait_for

pytestmark = pytest.mark.sandglass

BODY = {
    "image": {"uri": "host"},
    "entrypoint": ["sleep", "600"],
    "timeout": 120,
    "resourceLimits": {},
    "extensions": {"access.renew.extend.seconds": "3600"},
}


class TlsRedis(Redis):
    """The same with a certificate of its own making; the plain port stays for the test's own commands."""

    def __init__(self):
        super().__init__(password="tls p@ss/word")
        self.tls_port = free_port()
        certificate, key = self.folder / "certificate.pem", self.folder / "key.pem"
        made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
        made += ["-addext", "subjectAltName=DNS:localhost", "-addext", "basicConstraints=critical,CA:FALSE", "-keyout", str(key), "-out", str(certificate)]
        subprocess.run(made, check=True, capture_output=True)
        self.certificate = certificate
        self.options = ["--tls-port", str(self.tls_port), "--tls-auth-clients", "no"]
        self.options += ["--tls-cert-file", str(certificate), "--tls-key-file", str(key)]
        self.dsn = f"rediss://:tls%20p%40ss%2Fword@localhost:{self.tls_port}/0"


class Trusting(Stack):
    certificate = None

    def environment(self):
        return {"SSL_CERT_FILE": str(self.certificate)}


def warnings(stack):
    return "\n".join(line for line in stack.log.read_text().splitlines() if "INFO" not in line)


def left(http, sandbox):
    expires = http.get(f"/v1/sandboxes/{sandbox}").json()["expiresAt"]
    return datetime.fromisoformat(expires.replace("Z", "+00:00")) - datetime.now(timezone.utc)


def test_renewed_by_messages_over_tls():
    redis = TlsRedis().start()
    stack = Trusting(config={"renew_intent": {"enabled": True}, "renew_intent.redis": {"enabled": True, "dsn": redis.dsn}})
    stack.certificate = redis.certificate
    try:
        stack.start()
        with httpx.Client(base_url=stack.url, headers={"OPEN-SANDBOX-API-KEY": stack.key}, timeout=30) as http:
            sandbox = http.post("/v1/sandboxes", json=BODY).json()["id"]
            now = datetime.now(timezone.utc).isoformat().replace("+00:00", "Z")
            redis.call("LPUSH", "opensandbox:renew:intent", json.dumps({"sandbox_id": sandbox, "observed_at": now}))
            assert wait_for(lambda: left(http, sandbox) > timedelta(minutes=30)), warnings(stack)
            # Counted once it is done, which may be a moment after it shows.
            counted = 'sandglass_renewals_total{source="redis",outcome="renewed"} 1'
            assert wait_for(lambda: counted in http.get("/metrics").text)
            assert "sandglass_renew_redis_consumers 8" in http.get("/metrics").text
        assert "p@ss" not in stack.log.read_text()
    finally:
        problems = stack.close()
        redis.close()
    assert not problems, "\n".join(problems)


def test_renewed_by_use_through_the_proxy_and_counted():
    stack = Stack(config={"renew_intent": {"enabled": True}})
    try:
        stack.start()
        with httpx.Client(base_url=stack.url, headers={"OPEN-SANDBOX-API-KEY": stack.key}, timeout=30) as http:
            sandbox = http.post("/v1/sandboxes", json=BODY).json()["id"]
            assert wait_for(lambda: http.get(f"/v1/sandboxes/{sandbox}").json()["status"]["state"] == "Running")
            agent = f"/v1/sandboxes/{sandbox}/proxy/44772/ping"
            skipped = http.get(agent, headers={"OpenSandbox-Access-Renew": "skip"})
            assert skipped.status_code == 200, skipped.text
            assert left(http, sandbox) < timedelta(minutes=3)
            for _ in range(20):
                assert http.get(agent).status_code == 200
            assert wait_for(lambda: left(http, sandbox) > timedelta(minutes=30)), warnings(stack)
            page = http.get("/metrics").text
            assert 'sandglass_renewals_total{source="proxy",outcome="renewed"} 1' in page
            assert 'sandglass_proxy_requests_total{kind="http",outcome="answered"} 21' in page
    finally:
        problems = stack.close()
    assert not problems, "\n".join(problems)
