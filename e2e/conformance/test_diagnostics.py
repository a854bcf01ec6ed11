"""Diagnostics: the stable JSON form with a scope, the text forms without."""

import re

import pytest
from target import UNKNOWN, coded, invalid, until


@pytest.fixture(scope="module")
def talker(target):
    script = "echo to-stderr >&2; sleep 0.3; for i in $(seq 1 130); do echo line-$i; done; sleep 600"
    made = target.create(entrypoint=["sh", "-c", script], env={"API_TOKEN": "t0psecret", "PLAIN": "seen"})["id"]
    assert until(lambda: "line-130" in target.call("GET", f"/v1/sandboxes/{made}/diagnostics/logs").text)
    yield made
    target.delete(made)


def ask(target, sandbox, kind, mount="/v1", **query):
    return target.call("GET", f"{mount}/sandboxes/{sandbox}/diagnostics/{kind}", params=query)


@pytest.mark.parametrize("kind, scope", [("logs", "container"), ("logs", "all"), ("events", "runtime"), ("events", "all"), ("logs", " Container ")])
def test_json(target, talker, kind, scope):
    answer = ask(target, talker, kind, scope=scope)
    body = answer.json()
    assert answer.headers["content-type"] == "application/json" and "deprecation" not in answer.headers
    assert body["sandboxId"] == talker and body["kind"] == kind and body["scope"] == scope.strip().lower()
    assert body["delivery"] == "inline" and body["contentType"] == "text/plain; charset=utf-8"
    assert body["contentLength"] == len(body["content"].encode()) and isinstance(body["truncated"], bool)
    assert ("warnings" in body) == (scope == "all")


def test_json_logs_are_the_last_hundred(target, talker):
    body = ask(target, talker, "logs", scope="container").json()
    assert body["truncated"] is True and "line-130" in body["content"] and "line-20\n" not in body["content"]


@pytest.mark.parametrize("kind, scope", [("logs", "runtime"), ("logs", ""), ("logs", "x"), ("events", "container"), ("events", "lifecycle")])
def test_unsupported_scope_comes_first(target, kind, scope):
    coded(ask(target, UNKNOWN, kind, scope=scope), 400, "DIAGNOSTICS_SCOPE_UNSUPPORTED")


@pytest.mark.parametrize("kind, scope", [("logs", "container"), ("events", "runtime")])
def test_unknown_sandbox_with_a_scope(target, kind, scope):
    coded(ask(target, UNKNOWN, kind, scope=scope), 404, "DOCKER::SANDBOX_NOT_FOUND")


@pytest.mark.parametrize("mount", ["", "/v1"])
@pytest.mark.parametrize("kind, deprecated", [("logs", True), ("events", True), ("inspect", False), ("summary", False)])
def test_text(target, talker, kind, deprecated, mount):
    answer = ask(target, talker, kind, mount)
    assert answer.status_code == 200 and answer.headers["content-type"] == "text/plain; charset=utf-8"
    assert answer.headers.get("deprecation") == ("true" if deprecated else None)


def test_text_logs(target, talker):
    lines = ask(target, talker, "logs").text.splitlines()
    assert len(lines) in (100, 101) and all(re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d+Z ", line) for line in lines)
    assert len(ask(target, talker, "logs", tail=3).text.splitlines()) in (3, 4)
    everything = ask(target, talker, "logs", tail=10000).text
    assert "line-1\n" in everything and "to-stderr" in everything
    assert "line-130" in ask(target, talker, "logs", since="5m").text
    assert "line-130" in ask(target, talker, "logs", since="nonsense").text


def test_no_logs(target, idle):
    assert ask(target, idle, "logs").text.strip() == "(no logs)"


@pytest.mark.parametrize("kind, query", [
    ("logs", {"tail": 0}), ("logs", {"tail": 10001}), ("logs", {"tail": "x"}), ("events", {"limit": 0}), ("events", {"limit": 501}),
    ("summary", {"tail": 0}), ("summary", {"event_limit": 501}),
], ids=str)
def test_parameters(target, talker, kind, query):
    invalid(ask(target, talker, kind, **query), ["query", next(iter(query))])


@pytest.mark.docker
def test_inspect(target, talker):
    text = ask(target, talker, "inspect").text
    for name in ("Container ID:", "Name:", "Image:", "Status:", "Running:", "Paused:", "OOMKilled:", "Exit Code:", "Started At:"):
        line = next(line for line in text.splitlines() if line.startswith(name))
        assert len(line) > 16 and line[15] == " " and line[16] != " " and line[len(name) : 16].strip() == ""
    for name in ("Resources:", "Network:", "Ports:", "Labels:", "Environment:"):
        assert f"\n{name}" in text
    assert "0.50 cores" in text and "256 MiB" in text
    assert "API_TOKEN=***" in text and "t0psecret" not in text and "PLAIN=seen" in text


@pytest.mark.docker
def test_inspect_shows_the_ports(target, talker):
    assert re.search(r"\n  44772/tcp -> \S+:\d+", ask(target, talker, "inspect").text)


def test_events(target, talker):
    text = ask(target, talker, "events").text
    for name in ("(Container|Sandbox):", "Status:", "Created:"):
        assert re.search(f"^{name} ", text, re.M)


def test_events_of_a_failure(target):
    made = target.create(state=None, entrypoint=["sh", "-c", "exit 9"])["id"]
    target.wait(made, "Failed")
    assert re.search(r"Event:.*9", ask(target, made, "events").text)
    target.delete(made)


def test_summary(target, talker):
    text = ask(target, talker, "summary", tail=3).text
    assert text.startswith("=" * 72 + "\n") and talker in text and text.endswith("\n")
    for section in ("INSPECT", "EVENTS", "LOGS (last 3 lines)"):
        assert section in text
    assert "-" * 40 in text
