"""Servers with tenants: what the embedded and the Docker suite about them have in common."""

import httpx
from opensandbox import SandboxManagerSync
from opensandbox.config import ConnectionConfigSync
from opensandbox.models.sandboxes import SandboxFilter

from docker_stack import DockerStack
from stack import Stack

KEY = "OPEN-SANDBOX-API-KEY"


class Shared:
    """Mixed into a stack: tenants instead of the server's key. `tenants` is their section; keys are `<name>-key`."""

    def __init__(self, *arguments, tenants=None, names=("a", "b"), **more):
        self.section, self.names = tenants, names
        super().__init__(*arguments, **more)
        self.key = f"{names[0]}-key"

    def configuration(self, extra):
        self.file = self.home / "tenants.toml"
        section = self.section or {"provider": "file", "file": str(self.file)}
        self.tell(*((name, f"{name}-key") for name in self.names))
        text = super().configuration({**extra, "tenants": section})
        return "\n".join(line for line in text.splitlines() if not line.startswith("api_key =")) + "\n"

    def tell(self, *tenants):
        """Replaces the tenants file as a whole."""
        rows = (
            f'[[tenants]]\nname = "{name}"\nnamespace = "ns-{name}"\napi_keys = ["{key}"]\n' for name, key in tenants
        )
        fresh = self.file.with_suffix(".new")
        fresh.write_text("\n".join(rows))
        fresh.rename(self.file)

    def http(self, tenant=None, key=None):
        headers = {KEY: key or f"{tenant}-key"} if key or tenant else {}
        return httpx.Client(base_url=self.url, headers=headers, timeout=60)

    def sdk(self, tenant, **keys):
        return ConnectionConfigSync(domain=self.domain, api_key=f"{tenant}-key", **keys)

    def listed(self, tenant):
        manager = SandboxManagerSync.create(connection_config=self.sdk(tenant))
        try:
            return [info.id for info in manager.list_sandbox_infos(SandboxFilter(page_size=100)).sandbox_infos]
        finally:
            manager.close()

    def clear(self):
        for tenant in self.names:
            with self.http(tenant) as client:
                for what in ("sandboxes", "snapshots"):
                    for item in client.get(f"/v1/{what}?pageSize=200").json()["items"]:
                        client.delete(f"/v1/{what}/{item['id']}")


class SharedStack(Shared, Stack):
    pass


class SharedDockerStack(Shared, DockerStack):
    pass
