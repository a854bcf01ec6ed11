"""What whoever reaches the server, or one box, can do to everybody else: pushes without end, connections without end, secrets by name, certificates."""

import hashlib
import hmac
import resource
import socket
from pathlib import Path

import httpx
import pytest

import git_image
from stack import free_port, wait_for
from workspace_stacks import client_of, embedded
from workspaces import QUICK_AGENT

pytestmark = pytest.mark.sandglass

MIB = 1 << 20
# More than a listener for every box lets in.
MANY = 4200
# Of a connection that sends no more.
PATIENCE = 60


@pytest.fixture(scope="module")
def secrets_dir(tmp_path_factory):
    return tmp_path_factory.mktemp("secrets")


@pytest.fixture(scope="module")
def stack(secrets_dir):
    port = free_port()
    agents = {"agent_listen": f"127.0.0.1:{port}", "agent_url": f"http://127.0.0.1:{port}", "grace_seconds": 4}
    with embedded(workspaces={"failed_retention_seconds": 2, "secrets_dir": str(secrets_dir), **agents}) as made:
        made.agents = port
        yield made


def resident(stack):
    """Bytes of the server's memory."""
    lines = Path(f"/proc/{stack.server.pid}/status").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith("VmRSS")]
    return int(line.split()[1]) * 1024


def hanging(port, path, length, *headers, sent=0):
    """A connection with a request whose body does not come to its end."""
    connection = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE)
    head = [f"POST {path} HTTP/1.1", "Host: x", f"Content-Length: {length}", *headers, "", ""]
    connection.sendall("\r\n".join(head).encode())
    try:
        for _ in range(sent // MIB):
            connection.sendall(b"x" * MIB)
    except OSError:
        # Answered and closed already.
        pass
    return connection


def status_of(connection):
    """The status that came on a connection; None when it was closed without one."""
    with connection:
        head = connection.recv(4096)
        return int(head.split()[1]) if head else None


# ---------------------------------------------------------------- pushes


def prebuild(spaces, repository, **more):
    body = {"repository": {"url": repository.url}, "enabled": False, "webhookSecret": "shh-shh-shh", **more}
    answer = spaces.http.post("/v1/prebuilds", json=body)
    assert answer.status_code == 201, answer.text
    return answer.json()["id"]


UNKNOWN = "00000000-0000-4000-8000-000000000000"
SHAPE = "X-Hub-Signature-256: sha256=" + "0" * 64


def push_status(stack, identity):
    """Of a push that the prebuild's host signed."""
    signed = "sha256=" + hmac.new(b"shh-shh-shh", b"{}", hashlib.sha256).hexdigest()
    with httpx.Client(base_url=stack.url, timeout=PATIENCE) as host:
        path = f"/v1/prebuilds/{identity}/webhook"
        return host.post(path, content=b"{}", headers={"X-Hub-Signature-256": signed}).status_code


def test_pushes_of_nobody_take_no_memory(spaces, stack, git):
    identity = prebuild(spaces, git.repository({"README": "x\n"}))
    before = resident(stack)
    for path, headers in [(UNKNOWN, [SHAPE]), (identity, []), (identity, [SHAPE])]:
        many = [hanging(stack.port, f"/v1/prebuilds/{path}/webhook", 5 * MIB, *headers, sent=4 * MIB) for _ in range(60)]
        grown = resident(stack) - before
        statuses = [] if headers else [status_of(connection) for connection in many]
        for connection in many:
            connection.close()
        assert set(statuses) <= {401}, statuses
        # Two hundred and forty came.
        assert grown < 96 * MIB, f"{grown // MIB} MiB"
    assert push_status(stack, identity) == 202
    assert spaces.http.delete(f"/v1/prebuilds/{identity}").status_code == 204


def test_pushes_that_hang_keep_no_host_out_and_tell_nothing(spaces, stack, git):
    identity = prebuild(spaces, git.repository({"README": "x\n"}))
    for path in (identity, UNKNOWN):
        many = [hanging(stack.port, f"/v1/prebuilds/{path}/webhook", 100, SHAPE) for _ in range(200)]
        # At once, not when theirs are given up.
        assert push_status(stack, identity) == 202
        # Those that gave way to newer ones, and those whose time was over.
        statuses = [status_of(connection) for connection in many]
        assert set(statuses) == {503, 408}, statuses
        assert statuses.count(408) <= 64, statuses
    assert spaces.http.delete(f"/v1/prebuilds/{identity}").status_code == 204


def test_an_interval_has_bounds(spaces, git):
    repository = git.repository({"README": "x\n"})
    for seconds in (0, 59, 30 * 86_400 + 1, 2**63, 2**64 - 1):
        body = {"repository": {"url": repository.url}, "pollSeconds": seconds}
        answer = spaces.http.post("/v1/prebuilds", json=body)
        assert (answer.status_code, answer.json()["code"]) == (400, "SANDBOX::INVALID_PARAMETER"), answer.text
        assert "between 60 and 2592000" in answer.json()["message"], answer.text


# ---------------------------------------------------------------- agents


def test_a_box_cannot_keep_the_agents_of_others_out(spaces, stack, git):
    """All connections come from one address, as from behind an engine on another machine."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    repository = git.repository({"README": "x\n"})
    other, loud = (spaces.ready(repository, agent=QUICK_AGENT) for _ in range(2))
    attach = "/internal/agent/v1/attach"
    token = (stack.state / "workspaces" / loud / "workspace.token").read_text().strip()
    own = [f"Authorization: Bearer {token}", f"X-Sandbox-Id: {loud}", "X-Sandbox-Generation: 1"]
    for headers in ([], own):
        many = [hanging(stack.agents, attach, 60_000, *headers) for _ in range(MANY)]
        # Whoever comes with a token that is known is heard. Nothing is said without one, and nothing is waited for.
        token = (stack.state / "workspaces" / other / "workspace.token").read_text().strip()
        for _ in range(5):
            answer = httpx.post(
                f"http://127.0.0.1:{stack.agents}/internal/agent/v1/heartbeat",
                headers={"Authorization": f"Bearer {token}", "X-Sandbox-Id": other, "X-Sandbox-Generation": "1"},
                json={},
                timeout=PATIENCE,
            )
            # Known, but without the lease of the agent itself.
            assert answer.status_code in (400, 409, 410), answer.text
        for connection in many:
            connection.close()
    assert spaces.show(other)["status"]["reason"] == "ready", spaces.show(other)


def test_a_body_for_an_agent_comes_soon_or_not(spaces, stack, git):
    identity = spaces.ready(git.repository({"README": "x\n"}), agent=QUICK_AGENT)
    token = (stack.state / "workspaces" / identity / "workspace.token").read_text().strip()
    own = [f"Authorization: Bearer {token}", f"X-Sandbox-Id: {identity}", "X-Sandbox-Generation: 1"]
    silent = hanging(stack.agents, "/internal/agent/v1/attach", 60_000, *own)
    assert status_of(silent) == 400
    assert spaces.show(identity)["status"]["reason"] == "ready"


# ---------------------------------------------------------------- secrets by name


def test_a_secret_goes_to_its_hosts_alone(spaces, git, secrets_dir):
    repository = git.repository({"README": "x\n"}, "private/bound")
    (secrets_dir / "git").write_text(git.token_credential["token"] + "\n")
    source = {"url": repository.url, "credential": {"username": git.token_credential["username"], "secretRef": "git"}}
    hosts = secrets_dir / "git.hosts"
    hosts.write_text("git.example.com\n")
    refused = spaces.ask(source)
    assert (refused.status_code, refused.json()["code"]) == (400, "SANDBOX::INVALID_PARAMETER"), refused.text
    assert git.address in refused.json()["message"] and "git.example" not in refused.text, refused.text
    assert spaces.ask({**source, "credential": {"secretRef": "git.hosts"}}).status_code == 400
    hosts.write_text(f"# ours\n{git.address}\n")
    spaces.ready(source)


def test_builds_and_prebuilds_may_name_a_secret(spaces, git, secrets_dir):
    repository = git.repository({"README": "x\n"}, "private/named")
    credential = git.token_credential
    (secrets_dir / "named").write_text(credential["token"] + "\n")
    source = {"url": repository.url, "credential": {"username": credential["username"], "secretRef": "named"}}
    spaces.until_build(spaces.start_build(source)["id"], "Succeeded")
    repository.commit({"README": "y\n"})
    made = spaces.http.post("/v1/prebuilds", json={"repository": source})
    assert made.status_code == 201 and "credential" not in made.json()["repository"], made.text
    identity = made.json()["id"]

    def seen():
        return spaces.http.get(f"/v1/prebuilds/{identity}").json()

    assert wait_for(lambda: seen().get("imageBuildId")), seen()
    built = spaces.until_build(seen()["imageBuildId"], "Succeeded")
    assert built["repository"]["commit"] == repository.head, built
    for credential in (credential, {"secretRef": "absent"}, {**credential, "secretRef": "named"}):
        refused = spaces.http.post("/v1/prebuilds", json={"repository": {**source, "credential": credential}})
        assert (refused.status_code, refused.json()["code"]) == (400, "SANDBOX::INVALID_PARAMETER"), refused.text
    refused = spaces.http.post("/v1/image-builds", json={"repository": {**source, "credential": {"secretRef": "absent"}}})
    assert refused.status_code == 400 and "secretRef" in refused.text, refused.text
    assert spaces.http.delete(f"/v1/prebuilds/{identity}").status_code == 204


# ---------------------------------------------------------------- certificates


def test_a_certificate_that_nobody_vouches_for_is_named(spaces, git):
    git.over_tls()
    shown = spaces.failed({"url": git.repository({"README": "x\n"}).tls_url})
    assert shown["status"]["reason"] == "repository_unreachable", shown
    assert "certificate" in shown["status"]["message"], shown
    assert "certificate" in shown["lastFailure"]["outputTail"], shown
    assert shown["lastFailure"]["phase"] == "resolve", shown


def test_a_private_authority_that_the_configuration_names(git, tmp_path):
    """The image knows nothing of it: server, boot and programs in the box do."""
    bundle = tmp_path / "authorities.pem"
    bundle.write_text(git.over_tls())
    repository = git.repository({".sandbox/setup.sh": "#!/bin/sh\ncp version /var/version\n", "version": "1\n"}, "private/vouched")
    source = {"url": repository.tls_url, "credential": git.token_credential}
    with embedded(builds={"base_image": git_image.NAME, "git_authorities": str(bundle)}) as stack, client_of(stack) as spaces:
        first = spaces.ready(source)
        assert spaces.text(first, "cat /var/version") == "1"
        repository.commit({"version": "2\n"}, "second")
        # From the image of the commit before: the box gets the new one itself.
        second = spaces.ready(source)
        place = spaces.show(second)["source"]["repositories"][0]["path"]
        assert spaces.text(second, f"cat {place}/version") == "2"
        repository.commit({"version": "3\n"}, "third")
        assert spaces.text(second, f"cd {place} && git pull --quiet && cat version") == "3"
