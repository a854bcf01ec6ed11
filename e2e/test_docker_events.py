"""The history of a sandbox on Docker, read along over real connections: nothing missing, nothing twice, whatever dies meanwhile."""

import contextlib
import json
import threading

from stack import wait_for


class Stream:
    """Reads server-sent events in a thread of its own."""

    def __init__(self, docker, box, last=None):
        self.frames, self.over = [], threading.Event()
        headers = {"accept": "text/event-stream", **({"last-event-id": str(last)} if last is not None else {})}
        self._thread = threading.Thread(target=self._read, args=(docker, f"/v1/sandboxes/{box}/events", headers), daemon=True)
        self._thread.start()

    def _read(self, docker, path, headers):
        # A server that is killed cuts the connection; what came before counts.
        with contextlib.suppress(Exception), docker.http.stream("GET", path, headers=headers, timeout=60) as answer:
            self.status = answer.status_code
            frame = {}
            for line in answer.iter_lines():
                name, _, value = line.partition(": ")
                if line:
                    frame[name] = value
                elif "event" in frame:
                    frame["data"] = json.loads(frame["data"])
                    self.frames.append(frame)
                    frame = {}
                else:
                    frame = {}
        self.over.set()

    def ids(self):
        return [int(frame["id"]) for frame in self.frames]

    def kinds(self):
        return [frame["event"] for frame in self.frames]

    def states(self):
        return [frame["data"]["data"]["to"] for frame in self.frames if "to" in frame["data"]["data"]]


def history(docker, box):
    return docker.http.get(f"/v1/sandboxes/{box}/events?limit=1000").json()["items"]


def test_a_life_is_told_once(docker):
    box = docker.create()
    stream = Stream(docker, box)
    assert wait_for(lambda: stream.frames)
    assert stream.frames[0]["data"]["data"] == docker.get(box).json()
    for step in ("pause", "resume"):
        assert docker.http.post(f"/v1/sandboxes/{box}/{step}").status_code == 202
    docker.delete(box)
    assert stream.over.wait(60)
    assert stream.states() == ["Pausing", "Paused", "Resuming", "Running", "Stopping"]
    assert stream.kinds()[0] == "sandbox.snapshot" and stream.kinds()[-1] == "sandbox.terminated"
    assert docker.get(box).status_code == 404
    told = history(docker, box)
    assert [event["type"] for event in told][:1] == ["sandbox.created"]
    assert stream.ids()[1:] == [event["seq"] for event in told if event["seq"] > stream.ids()[0]]


def test_what_happens_behind_our_back_is_told(docker, engine):
    box = docker.create()
    stream = Stream(docker, box)
    assert wait_for(lambda: stream.frames)
    engine.call("pause", f"sandbox-{box}")
    # What is over again before anybody looks is not told.
    assert wait_for(lambda: stream.states() == ["Paused"]), stream.frames
    engine.call("unpause", f"sandbox-{box}")
    assert wait_for(lambda: stream.states() == ["Paused", "Running"]), stream.frames
    engine.call("kill", f"sandbox-{box}")
    assert wait_for(lambda: "sandbox.failed" in stream.kinds()), stream.frames
    engine.call("rm", "-f", f"sandbox-{box}")
    assert stream.over.wait(60)
    assert stream.kinds()[-1] == "sandbox.terminated"


def test_a_reader_comes_back_to_another_server(on_docker):
    stack, docker = on_docker()
    box = docker.create()
    first = Stream(docker, box)
    assert wait_for(lambda: first.frames)
    assert docker.http.post(f"/v1/sandboxes/{box}/pause").status_code == 202
    assert wait_for(lambda: first.states() == ["Pausing", "Paused"])
    stack.kill()
    assert first.over.wait(60)
    stack.start()
    assert docker.http.post(f"/v1/sandboxes/{box}/resume").status_code == 202
    second = Stream(docker, box, last=first.ids()[-1])
    assert wait_for(lambda: second.states() == ["Resuming", "Running"]), second.frames
    assert second.ids()[0] > first.ids()[-1]
    docker.delete(box)
    assert second.over.wait(60)
    # The end is told again to nobody who knows it.
    answer = docker.http.get(
        f"/v1/sandboxes/{box}/events", headers={"accept": "text/event-stream", "last-event-id": str(second.ids()[-1])}
    )
    assert answer.status_code == 204


def test_many_readers_that_do_not_read_hold_up_nobody(docker):
    box = docker.create()
    with contextlib.ExitStack() as idle:
        for _ in range(50):
            answer = docker.http.stream(
                "GET", f"/v1/sandboxes/{box}/events", headers={"accept": "text/event-stream"}, timeout=60
            )
            idle.enter_context(answer)
        for n in range(300):
            answer = docker.http.patch(f"/v1/sandboxes/{box}/metadata", json={"n": str(n)})
            assert answer.status_code == 200, answer.text
        docker.delete(box)
    told = history(docker, box)
    assert sum(event["type"] == "sandbox.metadata_changed" for event in told) == 300
