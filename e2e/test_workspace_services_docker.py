"""OpenSSH's clients through the tunnel into sandboxes on a Docker engine, where only the agent's port leads into a container."""

import os

import pytest

from ssh_clients import Client, Keys, Refused, Tunnel
from workspace_stacks import on_engine

pytestmark = pytest.mark.sandglass


@pytest.fixture(scope="module")
def stack(engine):
    with on_engine(engine) as made:
        yield made


def test_ssh_and_sftp_by_a_listed_key_and_a_certificate(stack, spaces, git, tmp_path):
    keys = Keys(tmp_path)
    services = [{"name": "ssh", "authorizedKeys": [keys.public("ann")]}]
    identity = spaces.ready(git.repository({"README": "docker\n"}), services=services)
    shown = spaces.until_service(identity, "ssh", lambda service: service["state"] == "Ready" and "hostKey" in service)
    tunnel = f"{stack.url}/v1/sandboxes/{identity}/services/ssh/tunnel"
    host_key = shown["hostKey"]["publicKey"]

    listed = Client(tunnel, stack.key, host_key, keys.pair("ann"))
    done = listed.ssh("cat /workspace/*/README; exit 5")
    assert (done.returncode, done.stdout) == (5, b"docker\n"), done
    refused = Client(tunnel, stack.key, host_key, keys.pair("bob")).ssh("true")
    assert refused.returncode == 255 and b"Permission denied" in refused.stderr, refused

    answer = spaces.http.post(f"/v1/sandboxes/{identity}/services/ssh/access", json={"publicKey": keys.public("bob")})
    assert answer.status_code == 200, answer.text
    certificate = tmp_path / "bob-cert.pub"
    certificate.write_text(answer.json()["credential"]["certificate"] + "\n")
    certified = Client(tunnel, stack.key, host_key, keys.pair("bob"), certificate)
    big = os.urandom(4 << 20)
    (tmp_path / "big").write_bytes(big)
    done = certified.sftp(f"put {tmp_path}/big /tmp/big\nget /tmp/big {tmp_path}/back\n")
    assert done.returncode == 0, done
    assert (tmp_path / "back").read_bytes() == big

    assert spaces.http.post(f"/v1/sandboxes/{identity}/pause").status_code == 202
    spaces.until(identity, "Paused")
    with pytest.raises(Refused) as refused:
        Tunnel(tunnel, stack.key)
    assert refused.value.status == 409
    assert spaces.http.post(f"/v1/sandboxes/{identity}/resume").status_code == 202
    spaces.until_ready(identity)
    assert listed.ssh("true").returncode == 0
