"""The server under test, and the sandboxes made on it."""

import http.client
import time
from pathlib import Path
from urllib.parse import urlsplit

import httpx

UNKNOWN = "00000000-0000-4000-8000-000000000000"
KEY = "OPEN-SANDBOX-API-KEY"
ECHO = (Path(__file__).parent / "echo.py").read_text()
DROP = object()


def until(claim, seconds=60.0, every=0.05):
    deadline = time.monotonic() + seconds
    while True:
        value = claim()
        if value or time.monotonic() > deadline:
            return value
        time.sleep(every)


class Target:
    def __init__(self, url, key, runtime, image):
        self.url, self.key, self.runtime, self.image = url.rstrip("/"), key, runtime, image
        self.domain = urlsplit(self.url).netloc
        self.http = httpx.Client(base_url=self.url, headers={KEY: key}, timeout=60)
        self.made = []

    def call(self, method, path, **keys):
        return self.http.request(method, path, **keys)

    def anonymous(self, method, path, key=None, **keys):
        headers = {} if key is None else {KEY: key}
        return httpx.request(method, self.url + path, headers=headers, timeout=60, **keys)

    def raw(self, method, path, body=None, headers=()):
        """The path exactly as given; answers (status, header list, body)."""
        connection = http.client.HTTPConnection(self.domain, timeout=60)
        try:
            connection.putrequest(method, path, skip_accept_encoding=True)
            for name, value in ((KEY, self.key), *headers):
                connection.putheader(name, value)
            if body is not None:
                connection.putheader("Content-Length", str(len(body)))
            connection.endheaders(body)
            answer = connection.getresponse()
            return answer.status, answer.getheaders(), answer.read()
        finally:
            connection.close()

    # ------------------------------------------------------------ sandboxes

    def body(self, **changes):
        whole = {
            "image": {"uri": self.image},
            "entrypoint": ["sleep", "600"],
            "timeout": 600,
            "resourceLimits": {"cpu": "500m", "memory": "256Mi"},
            **changes,
        }
        return {name: value for name, value in whole.items() if value is not DROP}

    def post(self, **changes):
        answer = self.call("POST", "/v1/sandboxes", json=self.body(**changes))
        if answer.status_code == 202:
            self.made.append(answer.json()["id"])
        return answer

    def create(self, state="Running", **changes):
        answer = self.post(**changes)
        assert answer.status_code == 202, answer.text
        made = answer.json()
        if state:
            self.wait(made["id"], state)
        return made

    def create_echo(self):
        made = self.create(entrypoint=["python3", "-u", "-c", ECHO], metadata={"suite": "web"})["id"]
        path = f"/v1/sandboxes/{made}/proxy/8080/echo"
        assert until(lambda: self.call("GET", path).status_code == 200), self.call("GET", path).text
        return made

    def get(self, sandbox):
        return self.call("GET", f"/v1/sandboxes/{sandbox}")

    def status(self, sandbox):
        answer = self.get(sandbox)
        return answer.json()["status"] if answer.status_code == 200 else {"state": answer.status_code}

    def wait(self, sandbox, state):
        assert until(lambda: self.status(sandbox)["state"] == state), self.status(sandbox)

    def delete(self, sandbox):
        return self.call("DELETE", f"/v1/sandboxes/{sandbox}").status_code

    def listed(self, **query):
        answer = self.call("GET", "/v1/sandboxes", params=query)
        assert answer.status_code == 200, answer.text
        return [item["id"] for item in answer.json()["items"]]

    def close(self):
        for sandbox in self.made:
            self.delete(sandbox)
        self.http.close()


def coded(answer, status, code=None):
    """An error answer has exactly a code and a message."""
    assert answer.status_code == status, (answer.status_code, answer.text)
    body = answer.json()
    assert set(body) == {"code", "message"} and body["message"], body
    if code is not None:
        assert body["code"] == code, body


def invalid(answer, place=None):
    """A schema error lists where it is, beginning with body, query or path."""
    assert answer.status_code == 422, (answer.status_code, answer.text)
    detail = answer.json()["detail"]
    assert detail and all({"type", "loc", "msg"} <= set(one) for one in detail), detail
    assert all(one["loc"][0] in ("body", "query", "path") for one in detail), detail
    if place is not None:
        assert any(one["loc"][: len(place)] == list(place) for one in detail), detail
