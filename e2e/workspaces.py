"""Sandboxes that are made from repositories, by plain HTTP: create, wait until of use, read builds, logs, services and history.

Owns no server and no repositories: those are `stack`'s, `docker_stack`'s and `git_servers`'. Every wait is bounded and says what it saw.
"""

import json

from plain import Plain
from stack import wait_for

# Beyond what any step of these tests takes on a busy machine.
PATIENCE = 180.0
# What a server needs to be told to take repositories of the tests' own servers.
SETTINGS = {"builds": {"allowed_hosts": ["*"], "http_urls": True, "cpu": "1", "memory": "1Gi"}}
# How soon a silent agent is noticed; one that only waits for a processor is not silent for as long.
QUICK_AGENT = {"heartbeatIntervalSeconds": 1, "heartbeatTimeoutSeconds": 6}


class Workspaces(Plain):
    """A client of one server; `close` deletes the sandboxes that were made through it."""

    def ask(self, repository, headers=None, **body):
        """Asks for a sandbox and answers what the server says. `repository` is an address, or the whole object."""
        if hasattr(repository, "url"):
            repository = repository.url
        if isinstance(repository, str):
            repository = {"url": repository}
        return self.send({"repository": repository, "timeout": 600, **body}, headers)

    def send(self, body, headers=None):
        """Any body of a create, as it is."""
        answer = self.http.post("/v1/sandboxes", json=body, headers=headers)
        if answer.status_code == 202:
            self.made.append(answer.json()["id"])
        return answer

    def begin(self, repository, **body):
        """The id of a sandbox that was accepted."""
        answer = self.ask(repository, **body)
        assert answer.status_code == 202, answer.text
        return answer.json()["id"]

    def ready(self, repository, **body):
        """The id of a sandbox that is of use."""
        identity = self.begin(repository, **body)
        self.until_ready(identity)
        return identity

    def failed(self, repository, **body):
        """What is shown of a sandbox that has to fail."""
        identity = self.begin(repository, **body)
        return self.until(identity, "Failed")

    def show(self, identity):
        """Everything that is shown of a sandbox; only `status` of one that is gone."""
        answer = self.get(identity)
        return answer.json() if answer.status_code == 200 else {"status": {"state": answer.status_code}}

    def until(self, identity, *states, reason=None, seconds=PATIENCE):
        """Waits until a sandbox is in one of the states, and for one of those reasons if any is named; answers what is shown of it."""
        ends = {"Failed", "Terminated", 404}
        seen = {}

        def there():
            seen["last"] = self.show(identity)
            status = seen["last"]["status"]
            if status["state"] in states and reason in (None, status.get("reason")):
                return True
            # What has ended does not come back.
            return status["state"] in ends

        wait_for(there, seconds)
        status = seen["last"]["status"]
        right = status["state"] in states and reason in (None, status.get("reason"))
        assert right, f"{json.dumps(seen['last'], indent=1)}\n{self.history(identity)}"
        return seen["last"]

    def until_ready(self, identity, seconds=PATIENCE):
        return self.until(identity, "Running", seconds=seconds)

    def until_gone(self, identity, seconds=PATIENCE):
        gone = wait_for(lambda: self.get(identity).status_code == 404, seconds)
        assert gone, self.show(identity)

    def history(self, identity):
        """The lines of a sandbox's history, oldest first; kinds that this server has no page for are in `diagnostics/events`."""
        return self.events(identity)

    def event_page(self, identity):
        """Every event of a sandbox, oldest first; there is no more than a page of them in these tests."""
        answer = self.http.get(f"/v1/sandboxes/{identity}/events", params={"limit": 1000}, headers={"Accept": "application/json"})
        assert answer.status_code == 200, answer.text
        return answer.json()["items"]

    # ------------------------------------------------------------ builds

    def builds(self, **query):
        answer = self.http.get("/v1/image-builds", params=query)
        assert answer.status_code == 200, answer.text
        return answer.json()["items"]

    def builds_of(self, repository):
        """Every build of a repository, the newest first."""
        return [build for build in self.builds(pageSize=200) if build["repository"]["url"] == repository.url]

    def build(self, identity):
        answer = self.http.get(f"/v1/image-builds/{identity}")
        assert answer.status_code == 200, answer.text
        return answer.json()

    def start_build(self, repository, **body):
        repository = {"url": repository.url} if hasattr(repository, "url") else repository
        answer = self.http.post("/v1/image-builds", json={"repository": repository, **body})
        assert answer.status_code in (200, 202), answer.text
        return answer.json()

    def until_build(self, identity, *states, seconds=PATIENCE):
        wait_for(lambda: self.build(identity)["status"]["state"] in (*states, "Succeeded", "Failed", "Cancelled", "TimedOut"), seconds)
        seen = self.build(identity)
        assert seen["status"]["state"] in states, f"{json.dumps(seen, indent=1)}\n{self.build_log(identity)}"
        return seen

    def build_log(self, identity, **query):
        answer = self.http.get(f"/v1/image-builds/{identity}/logs", params=query)
        assert answer.status_code == 200, answer.text
        return answer.text

    def built_images(self):
        answer = self.http.get("/v1/images", params={"kind": "built"})
        assert answer.status_code == 200, answer.text
        return answer.json()["items"]

    # ------------------------------------------------------------ services

    def services(self, identity):
        answer = self.http.get(f"/v1/sandboxes/{identity}/services")
        assert answer.status_code == 200, answer.text
        return {service["name"]: service for service in answer.json()["items"]}

    def service_log(self, identity, name, **query):
        """What a service wrote, or a hook as `boot.PHASE.HOOK`."""
        answer = self.http.get(f"/v1/sandboxes/{identity}/services/{name}/logs", params=query)
        assert answer.status_code == 200, answer.text
        return answer.text

    def until_service(self, identity, name, claim, seconds=PATIENCE):
        """Waits until what is shown of a service satisfies `claim`; answers it."""
        assert wait_for(lambda: claim(self.services(identity)[name]), seconds), self.services(identity)
        return self.services(identity)[name]


def give_image(client, image, name):
    """Imports an image into the embedded runtime of a client's server."""
    answer = client.http.post("/v1/images/import", params={"name": name}, content=image.docker_save(), timeout=120)
    assert answer.status_code == 200, answer.text
    assert json.loads(answer.text.splitlines()[-1])["event"] == "done", answer.text
    return name
