"""Sandboxes by plain HTTP: create, run commands, look at states and events, without any SDK in between."""

import json
from dataclasses import dataclass, field

import httpx

from stack import wait_for


@dataclass
class Outcome:
    """What a command's event stream said."""

    stdout: list = field(default_factory=list)
    stderr: list = field(default_factory=list)
    error: dict = None
    complete: bool = False


def parse(stream):
    done = Outcome()
    for line in stream.split(b"\n"):
        if line.strip():
            take(done, json.loads(line))
    return done


def take(done, event):
    if event["type"] in ("stdout", "stderr"):
        getattr(done, event["type"]).append(event["text"])
    elif event["type"] == "error":
        done.error = event["error"]
    elif event["type"] == "execution_complete":
        done.complete = True


class Plain:
    """HTTP to one server, and the sandboxes made through it; `close` deletes those."""

    def __init__(self, url, key, image="host"):
        self.image = image
        self.http = httpx.Client(base_url=url, headers={"OPEN-SANDBOX-API-KEY": key}, timeout=120)
        self.made = []

    def post(self, image=None, entrypoint=("sleep", "600"), **body):
        """Asks for a sandbox and answers what the server says."""
        body = {"timeout": 600, "resourceLimits": {"memory": "256Mi"}, **body}
        image = image or self.image
        if "snapshotId" not in body:
            body["image"] = {"uri": image} if isinstance(image, str) else image
        if entrypoint is not None:
            body["entrypoint"] = list(entrypoint)
        answer = self.http.post("/v1/sandboxes", json=body)
        if answer.status_code == 202:
            self.made.append(answer.json()["id"])
        return answer

    def create(self, image=None, entrypoint=("sleep", "600"), **body):
        """A sandbox that was accepted; waits until it is no longer Pending."""
        answer = self.post(image, entrypoint, **body)
        assert answer.status_code == 202, answer.text
        identity = answer.json()["id"]
        assert wait_for(lambda: self.state(identity) != "Pending")
        return identity

    def get(self, identity):
        return self.http.get(f"/v1/sandboxes/{identity}")

    def status(self, identity):
        answer = self.get(identity)
        return answer.json()["status"] if answer.status_code == 200 else {"state": answer.status_code}

    def state(self, identity):
        return self.status(identity)["state"]

    def delete(self, identity):
        answer = self.http.delete(f"/v1/sandboxes/{identity}")
        assert answer.status_code in (204, 404), answer.text
        return answer.status_code

    def agent(self, method, identity, path, **keys):
        return self.http.request(method, f"/v1/sandboxes/{identity}/proxy/44772/{path}", **keys)

    def run(self, identity, what, **body):
        """Runs a command line (text) or an argument vector (list) to its end."""
        body["command" if isinstance(what, str) else "argv"] = what
        answer = self.agent("POST", identity, "command", json=body)
        assert answer.status_code == 200, answer.text
        return parse(answer.content)

    def text(self, identity, what, **body):
        """The output of a command that has to succeed."""
        done = self.run(identity, what, **body)
        assert done.complete and done.error is None, done
        return "\n".join(done.stdout)

    def write(self, identity, path, content):
        metadata = json.dumps({"path": path, "mode": 644})
        form = [
            ("metadata", ("metadata", metadata, "application/json")),
            ("file", ("file", content, "application/octet-stream")),
        ]
        return self.agent("POST", identity, "files/upload", files=form)

    def read(self, identity, path):
        return self.agent("GET", identity, "files/download", params={"path": path})

    def events(self, identity):
        answer = self.http.get(f"/v1/sandboxes/{identity}/diagnostics/events")
        return answer.text if answer.status_code == 200 else ""

    def logs(self, identity):
        return self.http.get(f"/v1/sandboxes/{identity}/diagnostics/logs").text

    def outcome(self, answer):
        """What became of a create: its refusal, or the status of the sandbox once it is no longer Pending."""
        if answer.status_code != 202:
            return answer.status_code, answer.json()["code"], answer.json()["message"]
        identity = answer.json()["id"]
        assert wait_for(lambda: self.state(identity) != "Pending", seconds=60)
        status = self.status(identity)
        return status["state"], status.get("reason", ""), status.get("message", "")

    def close(self):
        for identity in self.made:
            self.delete(identity)
        self.http.close()
