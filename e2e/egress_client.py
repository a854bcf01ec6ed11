"""Sandboxes with an egress policy as a client sees them, the same on every runtime, and a server that trusts the test's authority."""

import os
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

from opensandbox import SandboxSync
from opensandbox.config import ConnectionConfigSync
from opensandbox.models.sandboxes import NetworkPolicy, NetworkRule

from conftest import texts


def trusting(world, tmp_path_factory):
    """The binary, started so that the world's authority is one of the host's: the host itself stays as it is."""
    certificates = tmp_path_factory.mktemp("certs")
    # The image `host` shows what everybody may read.
    certificates.chmod(0o755)
    bundle = Path("/etc/ssl/certs/ca-certificates.crt")
    own = bundle.read_text() if bundle.exists() else ""
    (certificates / "ca-certificates.crt").write_text(own + world.authority.read_text())
    (certificates / "world.pem").write_text(world.authority.read_text())
    wrapper = tmp_path_factory.mktemp("bin") / "sandglass"
    inner = 'mount --bind "$0" /etc/ssl/certs && exec "$@"'
    binary = os.environ["SANDGLASS_BIN"]
    wrapper.write_text(
        f"#!/bin/sh\nexec unshare --mount --propagation private sh -c '{inner}' {certificates} {binary} \"$@\"\n"
    )
    wrapper.chmod(0o755)
    return str(wrapper)


def allow(*targets, default="deny"):
    return NetworkPolicy(defaultAction=default, egress=[NetworkRule(action="allow", target=t) for t in targets])


def creating(stack, api, image):
    """Yields what makes sandboxes, with a policy unless there is none; they are deleted after the test."""
    stack.revive()
    made = []

    def make(policy=None, **keys):
        keys.setdefault("network_policy", policy if policy is not None else allow("allowed.test"))
        sandbox = SandboxSync.create(
            image,
            connection_config=ConnectionConfigSync(domain=stack.domain, api_key=stack.key),
            timeout=timedelta(minutes=10),
            resource={"cpu": "1", "memory": "512Mi"},
            **keys,
        )
        made.append(sandbox)
        return sandbox

    yield make
    stack.revive()
    for sandbox in made:
        assert api.delete(f"/v1/sandboxes/{sandbox.id}").status_code in (204, 404)
        sandbox.close()


def run(sandbox, command):
    done = sandbox.commands.run(command)
    return SimpleNamespace(
        code=done.exit_code, out="\n".join(texts(done.logs.stdout)), err="\n".join(texts(done.logs.stderr))
    )


def curl(sandbox, url, options="", seconds=15):
    """A bounded request; what is refused has to be refused long before that."""
    return run(sandbox, f"curl -sS --noproxy '*' -m {seconds} {options} {url}")


def refused(done):
    """Not by the clock of the client, whose code is 28."""
    return done.code not in (0, 28)
