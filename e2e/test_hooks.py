"""Lifecycle hooks through the Python SDK: before the entrypoint, on a schedule, and when they fail."""

import httpx
import pytest

from conftest import body_of, delete, texts
from opensandbox.models.sandboxes import LifecycleHook, PeriodicLifecycleHook, SandboxLifecycle
from stack import wait_for

TICK = {"name": "tick", "schedule": "@every 1s", "command": ["sh", "-c", "echo tick >> /tmp/ticks"]}


def run(box, command):
    return "".join(texts(box.commands.run(command).logs.stdout)).strip()


@pytest.fixture
def hooked(create):
    """Creates with the SDK's own models, so that what they send is what is tested."""

    def make(pre_start=None, periodic=(), **keys):
        keys["lifecycle"] = SandboxLifecycle(
            pre_start=LifecycleHook(**pre_start) if pre_start else None,
            periodic=[PeriodicLifecycleHook(**hook) for hook in periodic] or None,
        )
        return create(**keys)

    return make


def test_the_hook_comes_before_the_entrypoint(hooked):
    box = hooked(
        pre_start={"command": ["sh", "-c", "echo hook-$WHO >> /tmp/order"]},
        entrypoint=["sh", "-c", "echo main >> /tmp/order; sleep 1000"],
        env={"WHO": "ann"},
    )
    assert wait_for(lambda: "main" in run(box, "cat /tmp/order"))
    assert run(box, "cat /tmp/order | tr '\\n' ' '") == "hook-ann main"
    assert "LIFECYCLE" not in run(box, "env")


def test_periodic_hooks_run(hooked):
    box = hooked(periodic=[TICK])
    ticks = lambda: int(run(box, "cat /tmp/ticks 2>/dev/null | wc -l"))
    assert wait_for(lambda: ticks() >= 3, seconds=60)


def test_a_hook_that_fails_makes_the_sandbox_failed_and_says_why(server, http):
    hook = {"command": ["sh", "-c", "echo first; echo the reason >&2; exit 3"], "timeoutSeconds": 30}
    answer = http.post("/v1/sandboxes", json=body_of(server, lifecycle={"preStart": hook}))
    assert answer.status_code == 202, answer.text
    sandbox = answer.json()["id"]

    def failed():
        status = http.get(f"/v1/sandboxes/{sandbox}").json()["status"]
        return status if status["state"] == "Failed" else None

    try:
        status = wait_for(failed, seconds=60)
        assert status["reason"] == "ENTRYPOINT_FAILED"
        assert status["message"] == 'preStart: exit status 3; its output ended with "first\\nthe reason"'
    finally:
        delete(server, sandbox)


def test_what_is_wrong_with_hooks_is_said_before_anything_happens(server, http):
    hook = {**TICK, "schedule": "0 0 30 2 *"}
    answer = http.post("/v1/sandboxes", json=body_of(server, lifecycle={"periodic": [hook]}))
    assert (answer.status_code, answer.json()["code"]) == (400, "SANDBOX::INVALID_PARAMETER")
    assert "lifecycle.periodic[0].schedule never happens" in answer.json()["message"]


def test_the_agent_of_a_box_is_known(server, box):
    page = httpx.get(
        f"{server.url}/v1/sandboxes/{box.id}/diagnostics/inspect", headers={"OPEN-SANDBOX-API-KEY": server.key}, timeout=60
    ).text
    assert "Agent: generation " in page
