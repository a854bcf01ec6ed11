"""What holds over the life of a sandbox from a repository: asked for many times, idle, silent, looked after by a prebuild, counted; on the embedded runtime."""

import os
import signal
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations

import httpx
import pytest

from ssh_clients import Client, Keys, Refused, Tunnel
from stack import wait_for
from workspace_stacks import embedded
from workspaces import QUICK_AGENT

pytestmark = pytest.mark.sandglass

# Twice the least that may be asked for, so that what is made has time to be used; and the least.
IDLE, POLL = 20, 60
# Below which an open connection ends to count.
PRESENCE = 15


@pytest.fixture(scope="module")
def stack():
    with embedded(workspaces={"grace_seconds": 6}) as made:
        yield made


def processes_of(stack, identity):
    """Those of a box, its agent first."""
    return sorted((p for p in stack.guests() if identity in p.cgroups), key=lambda p: p.started)


# ---------------------------------------------------------------- asking


def test_a_sandbox_has_one_source(spaces, git):
    sources = {
        "repository": {"url": git.repository().url},
        "image": {"uri": "host"},
        "snapshotId": str(uuid.uuid4()),
        "templateId": "template",
    }
    for names in [(), *combinations(sources, 2), *combinations(sources, 3), tuple(sources)]:
        body = {"timeout": 600, "entrypoint": ["sleep", "600"], "resourceLimits": {"memory": "256Mi"}, **{name: sources[name] for name in names}}
        answer = spaces.send(body)
        assert answer.status_code in (400, 422), (names, answer.text)
        if "repository" in names:
            assert all(name in answer.text for name in names), (names, answer.text)
    assert not [box for box in spaces.http.get("/v1/sandboxes").json()["items"]]


def test_the_same_request_fifty_times_is_one_sandbox(spaces, git):
    repository, key = git.repository(), {"Idempotency-Key": str(uuid.uuid4())}
    with ThreadPoolExecutor(50) as pool:
        answers = list(pool.map(lambda _: spaces.ask(repository, key), range(50)))
    assert {answer.status_code for answer in answers} == {202}, [answer.text for answer in answers]
    (identity,) = {answer.json()["id"] for answer in answers}
    spaces.until_ready(identity)
    other = spaces.ask(repository, key, env={"COLOUR": "blue"})
    assert other.status_code == 409, other.text
    # Its build is a sandbox as well, which goes.
    assert wait_for(lambda: [box["id"] for box in spaces.http.get("/v1/sandboxes").json()["items"]] == [identity])
    assert len(spaces.builds_of(repository)) == 1


# ---------------------------------------------------------------- use


def test_whoever_is_used_stays_and_whoever_is_not_goes(spaces, git, stack, tmp_path):
    repository, keys = git.repository(), Keys(tmp_path)
    policies = {"idleTimeoutSeconds": IDLE, "idleAction": "terminate"}
    listens = {"name": "listens", "command": ["sh", "-c", "while true; do nc -l -p 7000 -e cat; done"], "port": 7000, "probe": {"type": "exec", "command": ["true"]}}
    services = {"ssh": [{"name": "ssh", "authorizedKeys": [keys.public("ann")]}], "open": [listens], "left": [listens]}
    names = ("unused", "command", "requests", "leased", "ssh", "open", "left")
    # What is only open counts for a while: of `left` for less than this test takes.
    presence = {"left": {"maxPresenceExtensionSeconds": PRESENCE}}
    over, tunnels, sessions, asking = threading.Event(), [], [], []

    def ask(identity):
        with httpx.Client(base_url=stack.url, headers={"OPEN-SANDBOX-API-KEY": stack.key}, timeout=60) as client:
            while not over.wait(2):
                client.get(f"/v1/sandboxes/{identity}/proxy/44772/ping")

    def command(identity):
        spaces.agent("POST", identity, "command", json={"command": "sleep 300", "background": True})

    def requests(identity):
        asking.append(threading.Thread(target=ask, args=(identity,), daemon=True))
        asking[-1].start()

    def lease(identity):
        leased = spaces.http.post(f"/v1/sandboxes/{identity}/activity", json={"leaseSeconds": 300})
        assert leased.status_code in (200, 202, 204), leased.text

    def ssh(identity):
        shown = spaces.until_service(identity, "ssh", lambda service: service["state"] == "Ready" and "hostKey" in service)
        client = Client(f"{stack.url}/v1/sandboxes/{identity}/services/ssh/tunnel", stack.key, shown["hostKey"]["publicKey"], keys.pair("ann"))
        sessions.append(client.start("-o", "RemoteCommand=sleep 300"))

    def tunnel(identity):
        def opened():
            try:
                tunnels.append(Tunnel(f"{stack.url}/v1/sandboxes/{identity}/services/listens/tunnel", stack.key))
            except Refused:
                return False
            return True

        # The service may be about to listen.
        assert wait_for(opened)

    uses = {"command": command, "requests": requests, "leased": lease, "ssh": ssh, "open": tunnel, "left": tunnel}

    def box(name):
        """Used as soon as it is of use: one that is ready before the others must not be idle until they are."""
        identity = spaces.ready(repository, agent=QUICK_AGENT, services=services.get(name, []), policies={**policies, **presence.get(name, {})})
        if name in uses:
            uses[name](identity)
        return identity

    try:
        with ThreadPoolExecutor(len(names)) as pool:
            boxes = dict(zip(names, pool.map(box, names), strict=True))
        (session,) = sessions
        gone = {"unused", "left"}
        for name in ("unused", "left"):
            spaces.until_gone(boxes[name])
        left = spaces.http.get(f"/v1/sandboxes/{boxes['unused']}", params={"includeTerminated": "true"})
        assert left.json()["status"]["reason"] == "idle_timeout", left.text
        # The others were idle for at least as long by their heartbeats alone.
        states = {name: spaces.show(identity)["status"]["state"] for name, identity in boxes.items() if name not in gone}
        assert set(states.values()) == {"Running"}, states
        assert session.poll() is None, session.stderr.read()
    finally:
        over.set()
        for thread in asking:
            thread.join()
        for process in sessions:
            process.kill()
            process.wait()
        for opened in tunnels:
            opened.close()


# ---------------------------------------------------------------- signs of life


def test_an_agent_that_falls_silent_may_come_back_in_time_and_not_later(spaces, git, stack):
    identity = spaces.ready(git.repository(), agent=QUICK_AGENT)
    agent = processes_of(stack, identity)[0].pid
    os.kill(agent, signal.SIGSTOP)
    spaces.until(identity, "Running", reason="unresponsive")
    os.kill(agent, signal.SIGCONT)
    spaces.until(identity, "Running", reason="ready")
    assert spaces.text(identity, "echo alive") == "alive"
    os.kill(agent, signal.SIGSTOP)
    shown = spaces.until(identity, "Failed")
    assert shown["status"]["reason"] == "heartbeat_lost", shown
    # After the time in which somebody may look, nothing runs any more.
    assert wait_for(lambda: not processes_of(stack, identity)), processes_of(stack, identity)
    # Each step of it is told once.
    kinds = ("agent.attached", "agent.lease_expired", "sandbox.state_changed", "sandbox.failed")
    told = [(e["type"], e["data"].get("from"), e["data"].get("to")) for e in spaces.event_page(identity) if e["type"] in kinds]
    assert told == [
        ("agent.attached", None, None),
        ("sandbox.state_changed", "Pending", "Running"),
        *[("agent.lease_expired", None, None), ("agent.attached", None, None)],
        *[("agent.lease_expired", None, None), ("sandbox.failed", "Running", "Failed")],
    ], told


# ---------------------------------------------------------------- prebuilds


def test_a_prebuild_looks_by_itself_and_is_not_put_off_by_a_remote_that_is_away(spaces, git):
    """Takes a little more than the shortest time between two looks."""
    hook = {".sandbox/setup.sh": "#!/bin/sh\ncp version /var/version\n", "version": "1\n"}
    followed, away = git.repository(hook), git.repository(hook)
    prebuilds = {}
    try:
        for repository in (followed, away):
            answer = spaces.http.post("/v1/prebuilds", json={"repository": {"url": repository.url}, "pollSeconds": POLL})
            assert answer.status_code == 201, answer.text
            prebuilds[repository.url] = answer.json()["id"]
            assert wait_for(lambda r=repository: [b["status"]["state"] for b in spaces.builds_of(r)] == ["Succeeded"], 2 * POLL), spaces.builds_of(repository)
        path = f"/v1/prebuilds/{prebuilds[away.url]}"
        hidden = away.bare.with_suffix(".away")
        away.bare.rename(hidden)
        commit = followed.commit({"version": "2\n"})
        assert wait_for(lambda: len(spaces.builds_of(followed)) == 2, 2 * POLL, 0.5), spaces.http.get(f"/v1/prebuilds/{prebuilds[followed.url]}").text
        newest = max(spaces.builds_of(followed), key=lambda build: build["createdAt"])
        assert spaces.until_build(newest["id"], "Succeeded")["repository"]["commit"] == commit
        assert wait_for(lambda: spaces.http.get(path).json().get("lastError"), 2 * POLL, 0.5), spaces.http.get(path).text
        assert spaces.http.get(path).json()["enabled"] is True
        assert len(spaces.builds_of(away)) == 1
        # Back again, with something new.
        hidden.rename(away.bare)
        commit = away.commit({"version": "3\n"})
        assert spaces.http.post(f"{path}/trigger").status_code == 202
        assert wait_for(lambda: len(spaces.builds_of(away)) == 2)
        newest = max(spaces.builds_of(away), key=lambda build: build["createdAt"])
        assert spaces.until_build(newest["id"], "Succeeded")["repository"]["commit"] == commit
        assert wait_for(lambda: not spaces.http.get(path).json().get("lastError")), spaces.http.get(path).text
    finally:
        for prebuild in prebuilds.values():
            spaces.http.delete(f"/v1/prebuilds/{prebuild}")


# ---------------------------------------------------------------- numbers


def test_how_long_creates_took_is_told_by_stage_and_by_what_was_there(spaces, git):
    def count(cache, stage=None):
        """How many creates of repositories were measured, all in all or of a stage."""
        family = "sandglass_create_stage_duration" if stage else "sandglass_create_duration"
        lines = [line for line in spaces.http.get("/metrics").text.splitlines() if line.startswith(family) and "_count{" in line]
        wanted = ['source="repository"', f'cache="{cache}"', *([f'stage="{stage}"'] if stage else [])]
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if all(label in line for label in wanted))

    before = {(cache, stage): count(cache, stage) for cache in ("hit", "built") for stage in (None, "resolve", "build", "create", "attach", "boot")}
    repository = git.repository({".sandbox/setup.sh": "#!/bin/sh\ntrue\n"})
    for _ in range(2):
        spaces.ready(repository)


    def counted():
        return {key: count(*key) for key in before}

    # It shows that it is ready a moment before that is counted.
    assert wait_for(lambda: all(counted()[cache, None] > before[cache, None] for cache in ("hit", "built"))), counted()
    after = counted()
    assert after["built", None] == before["built", None] + 1 and after["hit", None] == before["hit", None] + 1, after
    for stage in ("resolve", "create", "attach", "boot"):
        for cache in ("hit", "built"):
            assert after[cache, stage] == before[cache, stage] + 1, (cache, stage, after)
    assert after["built", "build"] == before["built", "build"] + 1 and after["hit", "build"] == before["hit", "build"], after
