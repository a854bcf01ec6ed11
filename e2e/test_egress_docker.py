"""Egress policies, the credential vault and secure access on Docker, with the published client, against a world of the test's own."""

import json
import os
import socket
from pathlib import Path

import httpx
import pytest
from opensandbox.models.sandboxes import (
    Credential,
    CredentialAuth,
    CredentialBinding,
    CredentialMatch,
    CredentialProxyConfig,
    InlineCredentialSource,
    NetworkRule,
)

from docker_engine import PYTHON, Engine
from docker_stack import DockerStack
from egress_client import allow, creating, curl, refused, run, trusting
from egress_world import BARE, NAMES, RESOLVER, World
from stack import wait_for

pytestmark = pytest.mark.sandglass

SECRET = "s3cr3t-of-the-test"
FORWARDING = Path("/proc/sys/net/ipv4/ip_forward")


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    # It stays, as after any server on the embedded runtime: by now those of others rely on it.
    FORWARDING.write_text("1")
    with World(tmp_path_factory.mktemp("world")) as made:
        yield made


@pytest.fixture(scope="module")
def far_engine(world):
    """An engine whose containers ask the world's resolver."""
    made = Engine(settings={"dns": [RESOLVER]})
    try:
        made.start().images(PYTHON)
        yield made
    finally:
        problems = made.wait_clean() if made.process else []
        made.close()
    assert not problems, "\n".join(problems)


@pytest.fixture(scope="module")
def binary(world, tmp_path_factory):
    return trusting(world, tmp_path_factory)


@pytest.fixture(scope="module")
def stack(far_engine, binary):
    # Everywhere, so that what is not published everywhere is seen.
    made = DockerStack(far_engine, binary=binary, config={"docker": {"publish_host": "0.0.0.0"}})
    made.start()
    yield made
    problems = made.close()
    assert not problems, "\n".join(problems)


@pytest.fixture(scope="module")
def api(stack):
    with httpx.Client(base_url=stack.url, headers={"OPEN-SANDBOX-API-KEY": stack.key}, timeout=60) as client:
        yield client


@pytest.fixture
def create(stack, api, far_engine):
    far_engine.revive()
    yield from creating(stack, api, PYTHON)


def sidecar(sandbox):
    return f"sandbox-egress-{sandbox.id}"


def state(api, sandbox):
    answer = api.get(f"/v1/sandboxes/{sandbox.id}")
    # What nobody can know while the engine is away is an error.
    return answer.json().get("status", {"state": answer.status_code})


def history(api, sandbox):
    return api.get(f"/v1/sandboxes/{sandbox.id}/events", params={"limit": 1000}).json()["items"]


def told(api, sandbox, kind):
    """Lines of the page of events that name this kind."""
    answer = api.get(f"/v1/sandboxes/{sandbox.id}/diagnostics/events", params={"limit": 500})
    return [line for line in answer.text.splitlines() if kind in line]


def test_what_is_allowed_gets_out_and_the_rest_fails_fast(create, api, world):
    sandbox = create()
    assert curl(sandbox, "http://allowed.test/").out == f"hello from {NAMES['allowed.test']}"
    assert curl(sandbox, "https://allowed.test/", "-k").out == f"hello from {NAMES['allowed.test']}"
    begun = len(world.requests())
    for url, options in [
        ("http://other.test/", ""),
        (f"http://{NAMES['other.test']}/", ""),
        (f"https://{BARE}/", "-k"),
        ("http://allowed.test/", "-H 'Host: other.test'"),
        ("https://other.test/", f"-k --connect-to other.test:443:{NAMES['allowed.test']}:443"),
    ]:
        done = curl(sandbox, url, f"{options} -f")
        assert refused(done), (url, done)
    assert len(world.requests()) == begun
    assert wait_for(lambda: any("other.test" in line for line in told(api, sandbox, "egress.denied")))
    assert wait_for(lambda: any(e["type"].startswith("egress.") or "egress" in json.dumps(e) for e in history(api, sandbox)))


def test_the_policy_is_read_patched_and_deleted(create, api):
    sandbox = create()
    assert refused(curl(sandbox, "http://other.test/"))
    sandbox.patch_egress_rules([NetworkRule(action="allow", target="other.test")])
    assert curl(sandbox, "http://other.test/").code == 0
    policy = sandbox.get_egress_policy()
    assert (policy.default_action, [(r.action, r.target) for r in policy.egress]) == (
        "deny",
        [("allow", "other.test"), ("allow", "allowed.test")],
    )
    sandbox.delete_egress_rules(["other.test"])
    assert refused(curl(sandbox, "http://other.test/"))
    route = f"/v1/sandboxes/{sandbox.id}/networkpolicy"
    seen = api.get(route).json()
    assert (seen["status"], seen["enforcementMode"], seen["policy"]["defaultAction"]) == ("ok", "dns+nft", "deny")
    assert api.patch(route, json=[{"action": "allow", "target": BARE}]).status_code == 200
    assert curl(sandbox, f"http://{BARE}/").code == 0


def test_a_credential_is_lent_to_requests_and_never_seen_inside(create, far_engine, world, stack):
    sandbox = create(allow("allowed.test", "other.test"), credential_proxy=CredentialProxyConfig(enabled=True))
    made = sandbox.credential_vault.create(
        credentials=[Credential(name="token", source=InlineCredentialSource(value=SECRET))],
        bindings=[
            CredentialBinding(
                name="web",
                match=CredentialMatch(hosts=["allowed.test"], methods=["GET"]),
                auth=CredentialAuth(type="bearer", credential="token"),
            )
        ],
    )
    assert made.revision == 1
    # Commands run before the entrypoint does, for which the agent makes everything ready.
    assert wait_for(lambda: run(sandbox, "test -s /opt/opensandbox/merged-ca-certificates.pem").code == 0)
    begun = len(world.requests())
    for client in ("curl -sS -m 10", "python3 -c 'import sys,urllib.request as u; print(u.urlopen(sys.argv[1]).read())'"):
        done = run(sandbox, f"{client} https://allowed.test/data")
        assert done.code == 0 and "hello" in done.out, done
    # Where nothing is lent the connection is passed on as it is, with a certificate that only the world trusts.
    assert run(sandbox, "curl -sS -k -m 10 https://other.test/").code == 0
    lent = [request["headers"].get("authorization") for request in world.requests()[begun:]]
    assert lent == [f"Bearer {SECRET}", f"Bearer {SECRET}", None], world.requests()[begun:]
    # Not to be found by itself.
    pattern = SECRET.replace("-", "[-]", 1)
    found = run(sandbox, f"grep -rl {pattern} /proc/*/environ /proc/*/cmdline /opt/opensandbox /etc /tmp 2>/dev/null")
    assert found.out == ""
    # The authority's key stays in the enforcer's memory.
    # The agent itself knows how such files begin.
    assert run(sandbox, "grep -rl 'PRIVATE KEY' --exclude=execd /opt/opensandbox").out == ""
    assert "BEGIN CERTIFICATE" in run(sandbox, "cat /opt/opensandbox/mitmproxy-ca-cert.pem").out
    assert SECRET not in far_engine.call("logs", sidecar(sandbox)).stdout + stack.log.read_text()


def test_the_enforcer_is_out_of_the_sandboxs_reach(create):
    sandbox = create()
    assert "sandglass-egress" not in run(sandbox, "ps -eo args").out
    bounds = int(run(sandbox, "grep CapBnd /proc/self/status").out.split()[1], 16)
    assert not bounds & (1 << 12 | 1 << 13)
    raw = "python3 -c 'import socket; socket.socket(socket.AF_PACKET, socket.SOCK_RAW)'"
    assert "PermissionError" in run(sandbox, raw).err
    marked = "python3 -c 'import socket; socket.socket().setsockopt(socket.SOL_SOCKET, 36, 1)'"
    assert "PermissionError" in run(sandbox, marked).err
    assert curl(sandbox, "http://127.0.0.1:18080/policy").out.strip() == "unauthorized"


def worker(engine, sandbox):
    """The process that decides, on the host: the child of the container's first process."""
    first = int(engine.text("inspect", "-f", "{{.State.Pid}}", sidecar(sandbox)))
    children = Path(f"/proc/{first}/task/{first}/children").read_text().split()
    return int(children[0]) if children else None


def test_a_killed_worker_comes_back_with_the_policy_of_then(create, far_engine):
    sandbox = create()
    sandbox.patch_egress_rules([NetworkRule(action="allow", target="other.test")])
    before = worker(far_engine, sandbox)
    os.kill(before, 9)
    # While nobody decides, nothing new gets out.
    assert curl(sandbox, f"http://{BARE}/").code != 0
    assert wait_for(lambda: worker(far_engine, sandbox) not in (None, before))
    assert wait_for(lambda: curl(sandbox, "http://other.test/").code == 0)
    assert refused(curl(sandbox, f"http://{BARE}/"))


def test_a_program_on_the_enforcers_port_hears_nothing_that_is_for_the_enforcer(create, far_engine):
    sandbox = create()
    before = worker(far_engine, sandbox)
    thief = "import socket,time\nwhile True:\n try:\n  s=socket.create_server(('0.0.0.0',18080)); break\n except OSError: pass\n"
    thief += "while True:\n c,_=s.accept(); open('/tmp/heard','ab').write(c.recv(4096)); c.close()\n"
    sandbox.files.write_file("/tmp/thief.py", thief)
    run(sandbox, "nohup python3 /tmp/thief.py >/dev/null 2>&1 &")
    os.kill(before, 9)
    for _ in range(5):
        try:
            sandbox.get_egress_policy()
        except Exception:  # noqa: BLE001 - whatever the client says while the enforcer is away
            pass
    assert wait_for(lambda: worker(far_engine, sandbox) not in (None, before))
    assert run(sandbox, "cat /tmp/heard").out == ""


def test_it_goes_on_after_pauses_and_servers_and_is_in_no_snapshot(create, api, stack, world):
    sandbox = create()
    sandbox.patch_egress_rules([NetworkRule(action="allow", target="other.test")])
    sandbox.pause()
    assert wait_for(lambda: state(api, sandbox)["state"] == "Paused")
    stack.kill()
    stack.start()
    assert api.post(f"/v1/sandboxes/{sandbox.id}/resume").status_code == 202
    assert wait_for(lambda: state(api, sandbox)["state"] == "Running")
    assert curl(sandbox, "http://other.test/").code == 0
    assert refused(curl(sandbox, f"http://{BARE}/"))
    assert [rule.target for rule in sandbox.get_egress_policy().egress] == ["other.test", "allowed.test"]
    saved = api.post(f"/v1/sandboxes/{sandbox.id}/snapshots").json()["id"]
    assert wait_for(lambda: api.get(f"/v1/snapshots/{saved}").json()["status"]["state"] == "Ready", 60)
    # The copy has the policy that it is given: none.
    body = {"snapshotId": saved, "timeout": 300, "resourceLimits": {}}
    copy = api.post("/v1/sandboxes", json=body).json()["id"]
    assert wait_for(lambda: api.get(f"/v1/sandboxes/{copy}").json()["status"]["state"] == "Running")
    assert api.get(f"/v1/sandboxes/{copy}/networkpolicy").status_code != 200
    assert api.delete(f"/v1/sandboxes/{copy}").status_code == 204
    assert api.delete(f"/v1/snapshots/{saved}").status_code == 204


def test_an_engine_that_restarts_keeps_the_policy(create, far_engine, api):
    sandbox = create()
    far_engine.kill()
    far_engine.start()
    assert wait_for(lambda: state(api, sandbox)["state"] == "Running")
    assert wait_for(lambda: curl(sandbox, "http://allowed.test/").code == 0)
    assert refused(curl(sandbox, f"http://{BARE}/"))


@pytest.mark.parametrize("how", ["kill", "restart", "rm"])
def test_a_sandbox_without_its_enforcer_is_told_as_failed(create, far_engine, api, how):
    sandbox = create()
    options = {"kill": (), "restart": ("-t", "0"), "rm": ("-f",)}[how]
    far_engine.call(how, *options, sidecar(sandbox))
    assert wait_for(lambda: state(api, sandbox)["state"] == "Failed")
    status = state(api, sandbox)
    assert status["reason"] == "EGRESS_LOST" and "egress sidecar" in status["message"], status
    assert wait_for(lambda: not far_engine.container(sandbox.id)["State"]["Running"])
    assert state(api, sandbox) == status
    assert any(event["type"] == "sandbox.failed" for event in history(api, sandbox))
    assert api.delete(f"/v1/sandboxes/{sandbox.id}").status_code == 204


# ------------------------------------------------------------ secure access


def reachable(host, port):
    try:
        socket.create_connection((host, port), timeout=5).close()
    except ConnectionRefusedError:
        return False
    return True


@pytest.mark.parametrize("with_policy", [False, True])
def test_a_secure_sandbox_is_reached_through_the_server_alone(create, far_engine, api, with_policy):
    sandbox = create(secure_access=True, network_policy=allow("allowed.test") if with_policy else None)
    owner = sidecar(sandbox) if with_policy else f"sandbox-{sandbox.id}"
    assert far_engine.text("port", owner) == ""
    for port in (44772, 8080, 18080):
        answer = api.get(f"/v1/sandboxes/{sandbox.id}/endpoints/{port}").json()
        assert answer["endpoint"].endswith(f"/v1/sandboxes/{sandbox.id}/proxy/{port}"), answer
        assert answer["headers"]["OpenSandbox-Secure-Access"]
    run(sandbox, "nohup python3 -m http.server 8080 >/dev/null 2>&1 &")
    answer = api.get(f"/v1/sandboxes/{sandbox.id}/endpoints/8080").json()
    url = f"http://{answer['endpoint']}/"
    assert wait_for(lambda: httpx.get(url, headers=answer["headers"], timeout=60).status_code == 200)
    without = {name: value for name, value in answer["headers"].items() if name != "OpenSandbox-Secure-Access"}
    assert httpx.get(url, headers=without, timeout=60).status_code == 401
    wrong = {**answer["headers"], "OpenSandbox-Secure-Access": "x" * 32}
    assert httpx.get(url, headers=wrong, timeout=60).status_code == 401
    if with_policy:
        assert sandbox.get_egress_policy().default_action == "deny"


def test_published_ports_of_a_secure_sandbox_are_this_machines_alone(far_engine, binary):
    config = {"docker": {"publish_host": "0.0.0.0"}, "proxy": {"resolve_internal": False}}
    made = DockerStack(far_engine, binary=binary, config=config)
    made.start()
    try:
        with httpx.Client(base_url=made.url, headers={"OPEN-SANDBOX-API-KEY": made.key}, timeout=60) as client:
            body = {"image": {"uri": PYTHON}, "entrypoint": ["sleep", "600"], "timeout": 300, "resourceLimits": {}}
            boxes = [client.post("/v1/sandboxes", json={**body, "secureAccess": secure}).json()["id"] for secure in (False, True)]
            for box, secure in zip(boxes, (False, True), strict=True):
                assert wait_for(lambda box=box: client.get(f"/v1/sandboxes/{box}").json()["status"]["state"] == "Running")
                published = [int(line.rpartition(":")[2]) for line in far_engine.text("port", f"sandbox-{box}").splitlines()]
                assert published
                for port in published:
                    assert reachable("127.0.0.1", port)
                    assert reachable(far_engine.gateway, port) is not secure, port
                assert client.get(f"/v1/sandboxes/{box}/proxy/44772/ping").status_code == 200
                assert client.delete(f"/v1/sandboxes/{box}").status_code == 204
    finally:
        problems = made.close()
    assert not problems, "\n".join(problems)
