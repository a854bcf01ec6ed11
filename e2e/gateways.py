"""The gateway beside a server, and the configuration of a server that sends its clients there."""

import base64
import os
import secrets
import subprocess

import httpx

from stack import free_port, wait_for

SIGNING_KEY = base64.b64encode(secrets.token_bytes(32)).decode()
INGRESS_KEY = secrets.token_hex(16)


class Gateway:
    """`sandglass ingress` beside a server."""

    def __init__(self, stack, *flags, key=INGRESS_KEY, port=None):
        self.port = port or free_port()
        self.scheme = "https" if any(flag.startswith("--tls-cert") for flag in flags) else "http"
        self.log = stack.home / f"gateway-{self.port}.log"
        command = [stack.binary, "ingress", f"--server={stack.url}", "-host", "127.0.0.1", "-port", str(self.port), *flags]
        with open(self.log, "ab") as log:
            environment = {**os.environ, "SANDGLASS_INGRESS_KEY": key, "OPENSANDBOX_SECURE_ACCESS_KEYS": f"k={SIGNING_KEY}"}
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment)

    def ready(self):
        def healthy():
            assert self.process.poll() is None, self.log.read_text()
            try:
                return httpx.get(f"{self.scheme}://127.0.0.1:{self.port}/status.ok", timeout=5, verify=False).text == "OK"
            except httpx.HTTPError:
                return False

        assert wait_for(healthy), self.log.read_text()
        return self

    def close(self):
        if self.process.poll() is None:
            self.process.terminate()
        return self.process.wait(60)


def config_of(mode, port, signature="full", **ingress):
    address = "*.sandbox.example" if mode == "wildcard" else f"127.0.0.1:{port}"
    return {
        "ingress": {"mode": "gateway", "key": INGRESS_KEY, **ingress},
        "ingress.gateway": {"address": address},
        "ingress.gateway.route": {"mode": mode},
        "ingress.secure_access": {"active_key": "k", "keys": f"k={SIGNING_KEY}", "signature": signature},
        "renew_intent": {"enabled": True, "min_interval_seconds": 1},
    }


def nested(sections):
    """The same for servers on Docker, whose tables go with their parents."""
    rest = dict(sections)
    access, route = rest.pop("ingress.secure_access"), rest.pop("ingress.gateway.route")
    rest["ingress"] = {**rest["ingress"], "secure_access": access}
    rest["ingress.gateway"] = {**rest["ingress.gateway"], "route": route}
    return rest
