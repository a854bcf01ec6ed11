"""Egress policies and the credential vault on the embedded runtime, with the published clients, against a world of the test's own."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

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

from egress_client import allow, creating, curl, refused, run, trusting
from egress_world import BARE, NAMES, RESOLVER, World
from stack import Stack, wait_for

pytestmark = pytest.mark.sandglass

SECRET = "s3cr3t-of-the-test"
OSB = str(Path(sys.executable).with_name("osb"))


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    with World(tmp_path_factory.mktemp("world")) as made:
        yield made


@pytest.fixture(scope="module")
def stack(world, tmp_path_factory):
    made = Stack(binary=trusting(world, tmp_path_factory), config={"embedded": {"dns": [RESOLVER]}})
    made.start()
    yield made
    problems = made.close()
    assert not problems, "\n".join(problems)


@pytest.fixture(scope="module")
def api(stack):
    with httpx.Client(base_url=stack.url, headers={"OPEN-SANDBOX-API-KEY": stack.key}, timeout=60) as client:
        yield client


@pytest.fixture
def create(stack, api):
    yield from creating(stack, api, "host")


def events(api, sandbox, kind=None):
    answer = api.get(f"/v1/sandboxes/{sandbox.id}/diagnostics/events", params={"scope": "all", "limit": 500})
    assert answer.status_code == 200, answer.text
    text = answer.json()["content"]
    return [line for line in text.splitlines() if kind is None or kind in line]


def enforcer(stack, sandbox):
    return (stack.document(sandbox.id, "state.json").get("enforcer") or {}).get("pid")


def test_what_is_allowed_gets_out_and_the_rest_fails_fast(create, api, world):
    sandbox = create()
    assert curl(sandbox, "http://allowed.test/").out == f"hello from {NAMES['allowed.test']}"
    assert curl(sandbox, "https://allowed.test/").out == f"hello from {NAMES['allowed.test']}"
    begun = time.monotonic()
    # By name, by address, by a name in the wrong place.
    for url, options in [
        ("http://other.test/", ""),
        (f"http://{NAMES['other.test']}/", ""),
        (f"https://{BARE}/", "-k"),
        ("http://allowed.test/", "-H 'Host: other.test'"),
        ("https://other.test/", f"-k --connect-to other.test:443:{NAMES['allowed.test']}:443"),
    ]:
        done = curl(sandbox, url, f"{options} -f")
        assert refused(done), (url, done)
    print(f"five refusals in {time.monotonic() - begun:.2f} s")
    told = wait_for(lambda: events(api, sandbox, "egress.denied"))
    assert any("other.test" in line for line in told), told
    stream = api.get(f"/v1/sandboxes/{sandbox.id}/events", params={"types": "egress"}).json()["items"]
    assert {event["type"] for event in stream} <= {"egress.denied", "egress.noted"}, stream
    assert any("other.test" in event["data"]["message"] for event in stream), stream
    assert all(request["at"] == NAMES["allowed.test"] for request in world.requests())


def test_the_policy_changes_through_the_sdk_and_osb(create, stack, tmp_path):
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

    environment = {
        **{"PATH": os.environ["PATH"], "HOME": str(tmp_path), "NO_COLOR": "1", "COLUMNS": "200"},
        **{"OPEN_SANDBOX_DOMAIN": stack.domain, "OPEN_SANDBOX_API_KEY": stack.key},
    }

    def osb(*arguments):
        done = subprocess.run(
            [OSB, *arguments], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, f"{arguments}: {done.stdout}\n{done.stderr}"
        return done.stdout

    osb("egress", "patch", sandbox.id, "--rule", "allow=*.wild.test", "-o", "json")
    assert curl(sandbox, "http://sub.wild.test/").code == 0
    assert "*.wild.test" in osb("egress", "get", sandbox.id, "-o", "json")
    file = tmp_path / "policy.json"
    file.write_text(json.dumps({"defaultAction": "deny", "egress": [{"action": "allow", "target": "allowed.test"}]}))
    made = json.loads(
        osb("sandbox", "create", "--image", "host", "-t", "10m", "--network-policy-file", str(file), "-o", "json")
    )
    try:
        assert "allowed.test" in osb("egress", "get", made["id"], "-o", "json")
    finally:
        osb("sandbox", "kill", made["id"])


def test_the_policy_route_of_the_lifecycle_api(create, api):
    sandbox = create()
    route = f"/v1/sandboxes/{sandbox.id}/networkpolicy"
    seen = api.get(route).json()
    assert (seen["status"], seen["enforcementMode"], seen["policy"]["defaultAction"]) == ("ok", "dns+nft", "deny")
    whole = {"defaultAction": "deny", "egress": [{"action": "allow", "target": "other.test"}]}
    assert api.put(route, json=whole).status_code == 200
    assert curl(sandbox, "http://other.test/").code == 0
    assert refused(curl(sandbox, "http://allowed.test/"))
    assert api.patch(route, json=[{"action": "allow", "target": BARE}]).status_code == 200
    assert curl(sandbox, f"http://{BARE}/").code == 0
    assert api.request("DELETE", route, json=["other.test"]).status_code == 200
    assert [rule["target"] for rule in api.get(route).json()["policy"]["egress"]] == [BARE]
    assert api.patch(route, json=[{"action": "maybe", "target": "x"}]).status_code in (400, 422)


def test_a_sandbox_without_a_policy_has_no_enforcer(stack, api):
    made = api.post("/v1/sandboxes", json={"image": {"uri": "host"}, "entrypoint": ["sleep", "600"], "timeout": 300, "resourceLimits": {}})
    assert made.status_code == 202, made.text
    sandbox = SimpleNamespace(id=made.json()["id"])
    try:
        assert wait_for(lambda: stack.document(sandbox.id, "state.json").get("phase") == "running")
        assert enforcer(stack, sandbox) is None
        assert api.get(f"/v1/sandboxes/{sandbox.id}/networkpolicy").status_code != 200
    finally:
        api.delete(f"/v1/sandboxes/{sandbox.id}")


def vault(sandbox, path="/*"):
    return sandbox.credential_vault.create(
        credentials=[Credential(name="token", source=InlineCredentialSource(value=SECRET))],
        bindings=[
            CredentialBinding(
                name="web",
                match=CredentialMatch(hosts=["allowed.test"], methods=["GET"], paths=[path]),
                auth=CredentialAuth(type="bearer", credential="token"),
            )
        ],
    )


def proxied(create, policy=None):
    return create(policy, credential_proxy=CredentialProxyConfig(enabled=True))


def test_a_credential_is_lent_to_requests_and_never_seen_inside(create, api, world, stack):
    sandbox = proxied(create, allow("allowed.test", "other.test"))
    state = vault(sandbox)
    assert state.revision == 1
    begun = len(world.requests())
    for client in ("curl -sS -m 10", "python3 -c 'import sys,urllib.request as u; print(u.urlopen(sys.argv[1]).read())'"):
        done = run(sandbox, f"{client} https://allowed.test/data")
        assert done.code == 0 and "hello" in done.out, done
    assert run(sandbox, "curl -sS -m 10 https://other.test/").code == 0
    seen = world.requests()[begun:]
    lent = [request["headers"].get("authorization") for request in seen]
    assert lent == [f"Bearer {SECRET}", f"Bearer {SECRET}", None], seen
    # A pattern that does not find the search itself.
    pattern = f"'{SECRET[:-1]}[{SECRET[-1]}]'"
    found = run(sandbox, f"grep -rl {pattern} /proc/*/environ /proc/*/cmdline /opt/opensandbox /etc /tmp 2>/dev/null")
    assert found.out == ""
    assert wait_for(lambda: events(api, sandbox, "egress.injected"))
    sandbox.credential_vault.delete()
    run(sandbox, "curl -sS -m 10 https://allowed.test/data")
    assert "authorization" not in world.requests()[-1]["headers"]
    # Nowhere but in the enforcer's memory.
    folder = stack.state / "sandboxes" / sandbox.id
    kept = subprocess.run(["grep", "-rl", SECRET, str(folder), str(stack.log)], capture_output=True, text=True, check=False)
    assert kept.stdout == ""


def test_osb_manages_the_vault(create, stack, world, tmp_path):
    sandbox = proxied(create, allow("allowed.test"))
    environment = {
        **{"PATH": os.environ["PATH"], "HOME": str(tmp_path), "NO_COLOR": "1", "COLUMNS": "200"},
        **{"OPEN_SANDBOX_DOMAIN": stack.domain, "OPEN_SANDBOX_API_KEY": stack.key},
    }

    def osb(*arguments, given=None):
        text = json.dumps(given) if given else None
        command = [OSB, "credential-vault", *arguments, "-o", "json"]
        done = subprocess.run(command, env=environment, cwd=tmp_path, input=text, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, f"{arguments}: {done.stdout}\n{done.stderr}"
        assert SECRET not in done.stdout + done.stderr
        return done.stdout

    def lent():
        assert run(sandbox, "curl -sS -m 10 https://allowed.test/osb").code == 0
        return world.requests()[-1]["headers"].get("x-token")

    binding = {
        "name": "web",
        "match": {"hosts": ["allowed.test"], "methods": ["GET"]},
        "auth": {"type": "apiKey", "name": "x-token", "credential": "token"},
    }
    first = {"name": "token", "source": {"type": "inline", "value": SECRET + "-1"}}
    osb("create", sandbox.id, "--file", "-", given={"credentials": [first], "bindings": [binding]})
    assert lent() == SECRET + "-1"
    assert "token" in osb("credential", "list", sandbox.id) and "web" in osb("binding", "get", sandbox.id, "web")
    second = {**first, "source": {"type": "inline", "value": SECRET + "-2"}}
    osb("patch", sandbox.id, "--file", "-", given={"expectedRevision": 1, "credentials": {"replace": [second]}})
    assert lent() == SECRET + "-2"
    assert json.loads(osb("get", sandbox.id))["revision"] == 2
    osb("delete", sandbox.id)
    assert lent() is None


def test_a_killed_enforcer_comes_back_with_the_policy_of_then(create, api, stack):
    sandbox = create()
    sandbox.patch_egress_rules([NetworkRule(action="allow", target="other.test")])
    first = enforcer(stack, sandbox)
    for _ in range(2):
        before = enforcer(stack, sandbox)
        os.kill(before, signal.SIGKILL)
        # While nobody decides, nothing new gets out.
        assert refused(curl(sandbox, f"http://{BARE}/"))
        assert wait_for(lambda: enforcer(stack, sandbox) not in (None, before))
        assert wait_for(lambda: curl(sandbox, "http://other.test/").code == 0)
        assert refused(curl(sandbox, f"http://{BARE}/"))
        assert refused(curl(sandbox, "http://sub.wild.test/"))
    assert enforcer(stack, sandbox) != first
    assert [rule.target for rule in sandbox.get_egress_policy().egress] == ["other.test", "allowed.test"]
    assert events(api, sandbox, "killed by signal 9")


def test_policies_and_authority_outlive_pauses_and_servers(create, api, stack, world):
    sandbox = proxied(create, allow("allowed.test"))
    vault(sandbox)
    authority = run(sandbox, "cat /opt/opensandbox/mitmproxy-ca-cert.pem").out
    assert "BEGIN CERTIFICATE" in authority
    pid = enforcer(stack, sandbox)
    sandbox.pause()
    assert wait_for(lambda: sandbox.get_info().status.state == "Paused")
    stack.kill()
    stack.start()
    assert api.post(f"/v1/sandboxes/{sandbox.id}/resume").status_code == 202
    assert wait_for(lambda: sandbox.get_info().status.state == "Running")
    assert enforcer(stack, sandbox) == pid
    assert wait_for(lambda: run(sandbox, "curl -sS -m 10 https://allowed.test/again").code == 0)
    assert world.requests()[-1]["headers"]["authorization"] == f"Bearer {SECRET}"
    assert refused(curl(sandbox, "http://other.test/"))
    assert run(sandbox, "cat /opt/opensandbox/mitmproxy-ca-cert.pem").out == authority
    assert sandbox.credential_vault.get().revision == 1
    sandbox.patch_egress_rules([NetworkRule(action="allow", target="other.test")])
    assert run(sandbox, "curl -sS -m 10 https://other.test/").code == 0


def test_a_killed_shim_ends_the_sandbox_and_leaves_nothing(create, api, stack):
    sandbox = create()
    pid, shim = enforcer(stack, sandbox), stack.document(sandbox.id, "state.json")["shimPid"]
    os.kill(shim, signal.SIGKILL)
    assert wait_for(lambda: api.get(f"/v1/sandboxes/{sandbox.id}").json()["status"]["state"] == "Failed")
    assert wait_for(lambda: not Path(f"/proc/{pid}").exists())
    assert api.delete(f"/v1/sandboxes/{sandbox.id}").status_code == 204
    living = {one["id"] for one in api.get("/v1/sandboxes").json()["items"]}
    assert not stack.wait_clean(living)


def test_the_enforcer_is_out_of_the_sandboxs_reach(create, stack):
    sandbox = create()
    address = run(sandbox, "hostname -I").out.split()[0]
    for target in ("169.254.1.1", "169.254.1.2", "169.254.1.3", "127.0.0.1", address):
        for port in (18080, 15353, 18081):
            assert curl(sandbox, f"http://{target}:{port}/policy", seconds=1).code != 0, (target, port)
    assert "sandglass-egress" not in run(sandbox, "ps -eo args").out
    # A program on the enforcer's port hears nothing of what is for the enforcer.
    run(sandbox, "nohup python3 -m http.server 18080 --bind 0.0.0.0 >/tmp/heard 2>&1 &")
    os.kill(enforcer(stack, sandbox), signal.SIGKILL)
    for _ in range(5):
        try:
            sandbox.get_egress_policy()
        except Exception:  # noqa: BLE001 - whatever the client says while the enforcer is away
            pass
    assert wait_for(lambda: enforcer(stack, sandbox))
    assert wait_for(lambda: answers(sandbox))
    assert "/policy" not in run(sandbox, "cat /tmp/heard").out


def answers(sandbox):
    try:
        return sandbox.get_egress_policy() is not None
    except Exception:  # noqa: BLE001
        return False


def test_how_long_a_create_takes_with_a_policy(api):
    def once(**policy):
        begun = time.perf_counter()
        answer = api.post(
            "/v1/sandboxes",
            json={"image": {"uri": "host"}, "entrypoint": ["sleep", "600"], "timeout": 300, "resourceLimits": {}, **policy},
        )
        assert answer.status_code == 202, answer.text
        taken = time.perf_counter() - begun
        api.delete(f"/v1/sandboxes/{answer.json()['id']}")
        return taken * 1000

    policy = {"networkPolicy": {"defaultAction": "deny", "egress": [{"action": "allow", "target": "allowed.test"}]}}
    kinds = {"none": {}, "policy": policy, "with vault": {**policy, "credentialProxy": {"enabled": True}}}
    for name, keys in kinds.items():
        taken = sorted(once(**keys) for _ in range(10))
        print(f"create, {name}: p50 {taken[5]:.1f} ms, worst {taken[-1]:.1f} ms")
