"""Sandboxes change hands between the reference server and Sandglass on one engine, both ways."""

import json
import os
import shutil
import tempfile
from datetime import datetime, timedelta, timezone
from pathlib import Path

import httpx
import pytest

from docker_engine import BUSYBOX, STUB_AGENT, Engine
from docker_stack import REFERENCE_PYTHON, DockerStack, Reference
from stack import wait_for

pytestmark = pytest.mark.skipif(REFERENCE_PYTHON not in os.environ, reason="`cargo xtask e2e` installs the reference")
BODY = {"image": {"uri": BUSYBOX}, "entrypoint": ["sleep", "3000"], "timeout": 3600, "resourceLimits": {"cpu": "250m", "memory": "64Mi"}}


class Caller:
    """HTTP to whichever server is in charge."""

    def __init__(self, server):
        self.http = httpx.Client(base_url=server.url, headers={"OPEN-SANDBOX-API-KEY": server.key}, timeout=60)

    def create(self, states=("Running",), **changes):
        body = {name: value for name, value in {**BODY, **changes}.items() if value is not None}
        answer = self.http.post("/v1/sandboxes", json=body)
        assert answer.status_code == 202, answer.text
        assert wait_for(lambda: self.state(answer.json()["id"]) in states)
        return answer.json()["id"]

    def get(self, box):
        return self.http.get(f"/v1/sandboxes/{box}")

    def state(self, box):
        answer = self.get(box)
        return answer.json()["status"]["state"] if answer.status_code == 200 else answer.status_code

    def listed(self, **query):
        return {item["id"] for item in self.http.get("/v1/sandboxes", params={"pageSize": 200, **query}).json()["items"]}

    def renew(self, box, **delta):
        end = (datetime.now(timezone.utc) + timedelta(**delta)).isoformat()
        answer = self.http.post(f"/v1/sandboxes/{box}/renew-expiration", json={"expiresAt": end})
        assert answer.status_code == 200, answer.text
        return answer.json()["expiresAt"]

    def patch(self, box, body):
        answer = self.http.patch(f"/v1/sandboxes/{box}/metadata", json=body)
        assert answer.status_code == 200, answer.text

    def act(self, box, action):
        answer = self.http.post(f"/v1/sandboxes/{box}/{action}")
        assert answer.status_code == 202, answer.text


@pytest.fixture
def engine():
    made = Engine().start().images(BUSYBOX, STUB_AGENT)
    yield made
    made.close()


@pytest.fixture
def home():
    """The side files are in the home of the user who runs the server: the same one before and after."""
    folder = Path(tempfile.mkdtemp(prefix="sandglass-home-"))
    yield folder
    shutil.rmtree(folder)


class Shift:
    """One server at a time."""

    def __init__(self, engine, home):
        self.servers = {"reference": Reference(engine, home), "sandglass": DockerStack(engine, home=home)}
        self.current = None

    def to(self, name):
        if self.current:
            self.current.stop()
        self.current = self.servers[name]
        self.current.start()
        return Caller(self.current)

    def close(self):
        for server in self.servers.values():
            server.stop()
            server.close()


@pytest.fixture
def shift(engine, home):
    made = Shift(engine, home)
    yield made
    made.close()


def fleet(caller):
    """One sandbox of each kind of history."""
    made = {
        "plain": caller.create(metadata={"team": "blue"}),
        "manual": caller.create(timeout=None),
        "renewed": caller.create(),
        "patched": caller.create(metadata={"a": "1", "b": "2"}),
        "paused": caller.create(),
        # It may be over before anybody looks.
        "ended": caller.create(("Running", "Failed"), entrypoint=["sh", "-c", "sleep 3; exit 4"]),
        "expiring": caller.create(),
        "extended": caller.create(extensions={"opensandbox.extensions.mine": "x", "access.renew.extend.seconds": "600"},
                                  platform={"os": "linux", "arch": "amd64"}),
    }
    made["ends"] = caller.renew(made["renewed"], hours=9)
    caller.patch(made["patched"], {"a": None, "c": "3"})
    caller.act(made["paused"], "pause")
    assert wait_for(lambda: caller.state(made["ended"]) == "Failed")
    return made


def facts(answer):
    """What both servers have to tell alike of one sandbox."""
    body = answer.json()
    kept = {name: body.get(name) for name in ("id", "entrypoint", "image", "metadata", "extensions", "platform", "expiresAt", "snapshotId")}
    # One counts in microseconds and the other in milliseconds.
    kept["expiresAt"] = datetime.fromisoformat(kept["expiresAt"].replace("Z", "+00:00")).isoformat("T", "milliseconds") if kept["expiresAt"] else None
    return {**kept, "state": body["status"]["state"], "reason": body["status"]["reason"]}


@pytest.mark.parametrize("first, second", [("reference", "sandglass"), ("sandglass", "reference")])
def test_handed_over(shift, engine, first, second):
    before = shift.to(first)
    made = fleet(before)
    ends = made.pop("ends")
    told = {name: facts(before.get(box)) for name, box in made.items()}
    ended = before.renew(made["expiring"], seconds=6)
    assert ended
    after = shift.to(second)
    expiring = made.pop("expiring")
    assert set(made.values()) <= after.listed()
    for name, box in made.items():
        assert facts(after.get(box)) == told[name], name
    assert after.get(made["renewed"]).json()["expiresAt"][:23] == ends[:23]
    assert after.listed(metadata="team=blue") == {made["plain"]} and after.listed(state="paused") == {made["paused"]}
    assert wait_for(lambda: after.state(expiring) == 404), "its end was not kept"
    assert engine.container(expiring) is None

    after.renew(made["plain"], hours=2)
    after.patch(made["plain"], {"from": second})
    assert after.get(made["plain"]).json()["metadata"] == {"team": "blue", "from": second}
    assert after.http.post(f"/v1/sandboxes/{made['manual']}/renew-expiration", json={"expiresAt": "2099-01-01T00:00:00Z"}).status_code == 409
    after.act(made["paused"], "resume")
    after.act(made["renewed"], "pause")
    assert after.state(made["paused"]) == "Running" and after.state(made["renewed"]) == "Paused"
    for port in (44772, 8080, 18080):
        assert after.http.get(f"/v1/sandboxes/{made['plain']}/endpoints/{port}").status_code == 200
    after.renew(made["patched"], seconds=2)
    assert wait_for(lambda: after.state(made["patched"]) == 404)

    # And back again: what the second server changed is what the first one finds.
    told = {name: facts(after.get(box)) for name, box in made.items() if name != "patched"}
    again = shift.to(first)
    for name, box in made.items():
        if name == "patched":
            assert again.state(box) == 404
            continue
        assert facts(again.get(box)) == told[name], name
        assert again.http.delete(f"/v1/sandboxes/{box}").status_code == 204
    assert engine.wait_clean() == []
    side = Path(shift.servers["sandglass"].user_home, ".opensandbox", "metadata")
    assert not [path for path in side.rglob("*.json")], "side files of removed sandboxes"


def test_agent_of_an_adopted_sandbox_is_reached(shift):
    before = shift.to("reference")
    box = before.create()
    after = shift.to("sandglass")
    answer = after.http.get(f"/v1/sandboxes/{box}/proxy/44772/ping")
    assert answer.status_code == 200, answer.text
    direct = after.http.get(f"/v1/sandboxes/{box}/endpoints/44772").json()
    assert httpx.get(f"http://{direct['endpoint']}/ping", headers=direct.get("headers"), timeout=60).status_code == 200
    assert after.http.delete(f"/v1/sandboxes/{box}").status_code == 204


def test_snapshots_of_an_adopted_sandbox(shift, engine):
    before = shift.to("reference")
    box = before.create(metadata={"team": "blue"})
    after = shift.to("sandglass")
    answer = after.http.post(f"/v1/sandboxes/{box}/snapshots")
    assert answer.status_code == 202, answer.text
    path = f"/v1/snapshots/{answer.json()['id']}"
    assert wait_for(lambda: after.http.get(path).json()["status"]["state"] == "Ready"), after.http.get(path).text
    copy = after.create(image=None, snapshotId=answer.json()["id"], timeout=None)
    got = after.get(copy).json()
    assert "metadata" not in got and "expiresAt" not in got, json.dumps(got)
    for one in (copy, box):
        assert after.http.delete(f"/v1/sandboxes/{one}").status_code == 204
    assert after.http.delete(path).status_code == 204
