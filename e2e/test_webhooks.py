"""Webhooks of a real server: a receiver in this process, signatures checked with Python's own HMAC, kill -9 in between."""

import base64
import hashlib
import hmac
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from stack import Client, Stack, wait_for

pytestmark = pytest.mark.sandglass

CREATE = {
    "image": {"uri": "host"},
    "entrypoint": ["sleep", "600"],
    "timeout": 600,
    "resourceLimits": {"cpu": "100m", "memory": "64Mi"},
}


class Receiver:
    """Keeps what it gets; answers what `answers` holds first, then 200. `None` waits until it is let go."""

    def __init__(self):
        self.got, self.answers, self.go = [], [], threading.Event()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["content-length"]))
                receiver.got.append((dict(self.headers.items()), body))
                answer = receiver.answers.pop(0) if receiver.answers else 200
                if answer is None:
                    receiver.go.wait(60)
                    answer = 200
                self.send_response(answer)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}/hook"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def types(self):
        return [json.loads(body)["type"] for _, body in self.got]

    def close(self):
        self.go.set()
        self.server.shutdown()
        self.server.server_close()


def verified(headers, body, secret):
    headers = {name.lower(): value for name, value in headers.items()}
    signed = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode() + body
    key = base64.b64decode(secret.removeprefix("whsec_"))
    expected = "v1," + base64.b64encode(hmac.new(key, signed, hashlib.sha256).digest()).decode()
    return expected in headers["webhook-signature"].split(" ")


@pytest.fixture
def stack():
    made = Stack()
    made.start()
    yield made
    problems = made.close()
    assert not problems, "\n".join(problems)


@pytest.fixture
def receivers():
    made = []

    def make():
        made.append(Receiver())
        return made[-1]

    yield make
    for receiver in made:
        receiver.close()


def test_a_life_over_a_kill(stack, receivers):
    receiver, stuck = receivers(), receivers()
    stuck.answers = [None] * 1000
    client = Client(stack.port, stack.key)
    status, hook = client.call("POST", "/v1/webhooks", {"url": receiver.url})
    assert status == 201, hook
    assert client.call("POST", "/v1/webhooks", {"url": stuck.url})[0] == 201
    status, made = client.call("POST", "/v1/sandboxes", {**CREATE, "metadata": {"team": "a"}})
    assert status == 202, made
    assert wait_for(lambda: "sandbox.state_changed" in receiver.types()), receiver.types()
    stack.kill()
    stack.start()
    client = Client(stack.port, stack.key)
    path = f"/v1/sandboxes/{made['id']}"
    assert client.call("DELETE", path)[0] == 204
    assert wait_for(lambda: "sandbox.terminated" in receiver.types()), receiver.types()
    status, page = client.call("GET", f"{path}/events")
    assert status == 200
    messages = [json.loads(body) for _, body in receiver.got]
    seqs = [message["seq"] for message in messages]
    assert seqs == sorted(seqs) and sorted(set(seqs)) == [event["seq"] for event in page["items"]], (seqs, page)
    assert len(seqs) <= len(set(seqs)) + 1, "more than one came twice"
    assert all(message["metadata"] == {"team": "a"} for message in messages)
    for headers, body in receiver.got:
        assert verified(headers, body, hook["secret"])
    assert client.call("GET", path)[0] == 404
    status, past = client.call("GET", f"{path}?includeTerminated=true")
    assert (status, past["status"]["state"], past["metadata"]) == (200, "Terminated", {"team": "a"}), past

    def listed():
        status, page = client.call("GET", f"/v1/webhooks/{hook['id']}/deliveries?state=Delivered")
        assert status == 200, page
        return page["items"]

    # Written down once the receiver has answered.
    assert wait_for(lambda: len(listed()) == len(set(seqs))), listed()


def test_a_failure_is_tried_again_and_shown(stack, receivers):
    receiver = receivers()
    receiver.answers = [500]
    client = Client(stack.port, stack.key)
    status, hook = client.call("POST", "/v1/webhooks", {"url": receiver.url, "events": ["sandbox.created"]})
    assert status == 201, hook
    status, made = client.call("POST", "/v1/sandboxes", CREATE)
    assert status == 202, made
    assert wait_for(lambda: len(receiver.got) == 2), receiver.types()
    assert receiver.got[0][1] == receiver.got[1][1]

    def delivered():
        items = client.call("GET", f"/v1/webhooks/{hook['id']}/deliveries")[1]["items"]
        return [(item["state"], [attempt.get("status") for attempt in item["attempts"]]) for item in items]

    assert wait_for(lambda: delivered() == [("Delivered", [500, 200])]), delivered()
    assert client.call("DELETE", f"/v1/sandboxes/{made['id']}")[0] == 204
