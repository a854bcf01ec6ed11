"""Reads, lists, metadata, renewals, pause and resume, ends: the life after the create."""

import threading
import uuid
from datetime import datetime, timedelta, timezone
from urllib.parse import quote

import pytest
from target import UNKNOWN, coded, invalid, until

SUITE = uuid.uuid4().hex[:12]
FUTURE = "2099-01-01T00:00:00Z"


def after(**delta):
    return (datetime.now(timezone.utc) + timedelta(**delta)).isoformat()


# ---------------------------------------------------------------- lists


@pytest.fixture(scope="module")
def three(target):
    """Three sandboxes with metadata of their own, the second one paused; oldest first."""
    made = []
    for extra in ({"n": "1", "kind": "a"}, {"n": "2", "kind": "a", "example.com/x": "y"}, {"n": "3", "empty": ""}):
        made.append(target.create(metadata={"suite": SUITE, **extra})["id"])
    assert target.call("POST", f"/v1/sandboxes/{made[1]}/pause").status_code == 202
    yield made
    for sandbox in made:
        target.delete(sandbox)


def mine(more=""):
    return f"suite={SUITE}{more}"


@pytest.mark.parametrize(
    "query, expected",
    [
        ({}, [2, 1, 0]),
        ({"state": "Running"}, [2, 0]),
        ({"state": "running"}, [2, 0]),
        ({"state": "PAUSED"}, [1]),
        ({"state": ["Paused", "Running"]}, [2, 1, 0]),
        ({"state": "Paused,Running"}, []),
        ({"state": "Nonsense"}, []),
        ({"state": ["", "paused"]}, [1]),
        ({"metadata": "&n=1"}, [0]),
        ({"metadata": "&kind=a"}, [1, 0]),
        ({"metadata": "&kind=a&n=2"}, [1]),
        ({"metadata": "&kind=b"}, []),
        ({"metadata": "&kind=A"}, []),
        ({"metadata": "&n=2&n=3"}, [2]),
        ({"metadata": "&empty="}, [2]),
        ({"metadata": "&n="}, []),
        ({"metadata": "&example.com%2Fx=y"}, [1]),
        ({"metadata": "&example.com/x=y"}, [1]),
        ({"metadata": "&n=%31"}, [0]),
        ({"metadata": "&kind=a", "state": "running"}, [0]),
    ],
    ids=str,
)
def test_filter(target, three, query, expected):
    query = {**query, "metadata": mine(query.get("metadata", ""))}
    assert target.listed(**query) == [three[at] for at in expected]


def test_filter_plus_is_a_blank(target, three):
    assert target.listed(metadata=f"suite={SUITE}+x") == []


def test_empty_filter_is_none(target, three):
    assert set(three) <= set(target.listed(metadata="", pageSize=200))


@pytest.mark.parametrize("metadata", ["suite", "a=b&c", "a=b&&c=d", "&", "%3D"])
def test_malformed_filter(target, metadata):
    coded(target.call("GET", "/v1/sandboxes", params={"metadata": metadata}), 400, "INVALID_METADATA_FORMAT")


@pytest.mark.parametrize("name, value", [("page", "0"), ("page", "-1"), ("page", "x"), ("page", "1.5"), ("page", ""),
                                         ("pageSize", "0"), ("pageSize", "201"), ("pageSize", "x")])
@pytest.mark.parametrize("path", ["/v1/sandboxes", "/v1/snapshots"])
def test_paging_refused(target, path, name, value):
    invalid(target.call("GET", path, params={name: value}), ["query", name])


def page(target, **query):
    answer = target.call("GET", "/v1/sandboxes", params={"metadata": mine(), **query}).json()
    return [item["id"] for item in answer["items"]], answer["pagination"]


def test_paging(target, three):
    newest = list(reversed(three))
    items, told = page(target, page=1, pageSize=2)
    assert items == newest[:2]
    assert told == {"page": 1, "pageSize": 2, "totalItems": 3, "totalPages": 2, "hasNextPage": True}
    items, told = page(target, page=2, pageSize=2)
    assert items == newest[2:] and told["hasNextPage"] is False
    items, told = page(target, page=9, pageSize=2)
    assert items == [] and told == {"page": 9, "pageSize": 2, "totalItems": 3, "totalPages": 2, "hasNextPage": False}


def test_paging_defaults(target, three):
    assert page(target)[1] == {"page": 1, "pageSize": 20, "totalItems": 3, "totalPages": 1, "hasNextPage": False}
    assert page(target, page_size=1)[1]["pageSize"] == 20


def test_paging_of_nothing(target):
    answer = target.call("GET", "/v1/sandboxes", params={"metadata": "suite=none-of-these"}).json()
    assert answer == {"items": [], "pagination": {"page": 1, "pageSize": 20, "totalItems": 0, "totalPages": 0, "hasNextPage": False}}


def test_list_and_get_agree(target, three):
    answer = target.call("GET", "/v1/sandboxes", params={"metadata": mine()}).json()
    for item in answer["items"]:
        assert item == target.get(item["id"]).json()


# ---------------------------------------------------------------- get and delete


@pytest.mark.parametrize("identity", ["not-a-uuid", UNKNOWN, "x" * 300, "..%2e", "%C3%BC", "a b"])
def test_ids_are_opaque(target, identity):
    path = quote(identity, safe="%")
    coded(target.call("GET", f"/v1/sandboxes/{path}"), 404, "DOCKER::SANDBOX_NOT_FOUND")


def test_delete(target):
    made = target.create()["id"]
    answer = target.call("DELETE", f"/v1/sandboxes/{made}")
    assert (answer.status_code, answer.content) == (204, b"")
    coded(target.call("DELETE", f"/v1/sandboxes/{made}"), 404, "DOCKER::SANDBOX_NOT_FOUND")
    coded(target.get(made), 404, "DOCKER::SANDBOX_NOT_FOUND")
    assert made not in target.listed(pageSize=200)


def test_delete_a_paused_one(target):
    made = target.create()["id"]
    assert target.call("POST", f"/v1/sandboxes/{made}/pause").status_code == 202
    assert target.delete(made) == 204
    coded(target.get(made), 404)


@pytest.mark.better("of two deletes at once the second gets a 500")
def test_two_deletes_at_once(target):
    for _ in range(6):
        made, answers = target.create()["id"], []
        both = [threading.Thread(target=lambda made=made: answers.append(target.delete(made))) for _ in range(4)]
        for thread in both:
            thread.start()
        for thread in both:
            thread.join()
        assert 204 in answers and set(answers) <= {204, 404}, answers


# ---------------------------------------------------------------- ends


@pytest.mark.parametrize("code, state, reason", [(0, "Terminated", "CONTAINER_EXITED"), (3, "Failed", "CONTAINER_EXITED_ERROR")])
def test_workload_that_ends(target, code, state, reason):
    made = target.create(state=None, entrypoint=["sh", "-c", f"sleep 0.5; exit {code}"])["id"]
    target.wait(made, state)
    assert target.status(made)["reason"] == reason
    for action in ("pause", "resume"):
        expected = "DOCKER::SANDBOX_NOT_RUNNING" if action == "pause" else "DOCKER::SANDBOX_NOT_PAUSED"
        coded(target.call("POST", f"/v1/sandboxes/{made}/{action}"), 409, expected)
    assert target.call("POST", f"/v1/sandboxes/{made}/renew-expiration", json={"expiresAt": FUTURE}).status_code == 200
    assert target.call("PATCH", f"/v1/sandboxes/{made}/metadata", json={"a": "1"}).json()["metadata"] == {"a": "1"}
    assert target.status(made)["state"] == state
    assert target.delete(made) == 204


def test_expiry_removes(target):
    made = target.create()["id"]
    assert target.call("POST", f"/v1/sandboxes/{made}/renew-expiration", json={"expiresAt": after(seconds=6)}).status_code == 200
    assert target.status(made)["state"] == "Running"
    assert until(lambda: target.get(made).status_code == 404, 30)


def test_expiry_counts_while_paused(target):
    made = target.create()["id"]
    assert target.call("POST", f"/v1/sandboxes/{made}/pause").status_code == 202
    assert target.call("POST", f"/v1/sandboxes/{made}/renew-expiration", json={"expiresAt": after(seconds=6)}).status_code == 200
    assert until(lambda: target.get(made).status_code == 404, 30)


# ---------------------------------------------------------------- pause and resume


def test_pause_and_resume(target, idle):
    answer = target.call("POST", f"/v1/sandboxes/{idle}/pause", content=b"nonsense")
    assert (answer.status_code, answer.content) == (202, b"") and "content-type" not in answer.headers
    assert target.status(idle)["state"] == "Paused" and target.status(idle)["reason"] == "CONTAINER_PAUSED"
    coded(target.call("POST", f"/v1/sandboxes/{idle}/pause"), 409, "DOCKER::SANDBOX_NOT_RUNNING")
    answer = target.call("POST", f"/v1/sandboxes/{idle}/resume")
    assert (answer.status_code, answer.content) == (202, b"")
    assert target.status(idle)["state"] == "Running"
    coded(target.call("POST", f"/v1/sandboxes/{idle}/resume"), 409, "DOCKER::SANDBOX_NOT_PAUSED")


@pytest.mark.better("of two resumes at once the second gets a 500")
def test_two_resumes_at_once(target, idle):
    seen = set()
    for _ in range(8):
        assert target.call("POST", f"/v1/sandboxes/{idle}/pause").status_code == 202
        answers = []

        def resume(answers=answers):
            answers.append(target.call("POST", f"/v1/sandboxes/{idle}/resume").status_code)

        threads = [threading.Thread(target=resume) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert 202 in answers
        assert target.status(idle)["state"] == "Running"
        seen |= set(answers)
    assert seen <= {202, 409}, seen


# ---------------------------------------------------------------- metadata


def patch(target, sandbox, body, **keys):
    return target.call("PATCH", f"/v1/sandboxes/{sandbox}/metadata", json=body, **keys)


def test_patch(target, idle):
    assert patch(target, idle, {"a": "1", "b": "2"}).json()["metadata"] == {"a": "1", "b": "2"}
    assert patch(target, idle, {"a": "3", "b": None, "c": ""}).json()["metadata"] == {"a": "3", "c": ""}
    assert patch(target, idle, {}).json()["metadata"] == {"a": "3", "c": ""}
    assert patch(target, idle, {"none": None, "not a label!": None}).json()["metadata"] == {"a": "3", "c": ""}
    whole = patch(target, idle, {}).json()
    assert whole == target.get(idle).json()
    assert patch(target, idle, {"a": None, "c": None}).status_code == 200
    assert "metadata" not in target.get(idle).json()


def test_patched_metadata_is_filtered_by(target, idle):
    patch(target, idle, {"patched": SUITE})
    assert target.listed(metadata=f"patched={SUITE}") == [idle]


@pytest.mark.parametrize("body, code", [
    ({"opensandbox.io/id": "x"}, "INVALID_METADATA_LABEL"),
    ({"opensandbox.io/id": None}, "INVALID_METADATA_LABEL"),
    ({"a b": "x", "opensandbox.io/y": "x"}, "INVALID_METADATA_LABEL"),
    ({"a b": "x"}, "SANDBOX::INVALID_METADATA_LABEL"),
    ({"a": "b c"}, "SANDBOX::INVALID_METADATA_LABEL"),
    ({"k" * 64: "x"}, "SANDBOX::INVALID_METADATA_LABEL"),
    ({"a": "v" * 64}, "SANDBOX::INVALID_METADATA_LABEL"),
], ids=lambda value: str(value)[:40])
def test_patch_refused(target, web, body, code):
    coded(patch(target, web, body), 400, code)
    assert target.get(web).json()["metadata"] == {"suite": "web"}


@pytest.mark.parametrize("body", [{"a": 1}, {"a": True}, {"a": {"b": "c"}}, {"a": ["b"]}, ["a"], "text", 7], ids=str)
def test_patch_schema(target, web, body):
    invalid(patch(target, web, body), ["body"])


def test_patch_of_an_unknown_one_comes_first(target):
    coded(patch(target, UNKNOWN, {"opensandbox.io/id": "x"}), 404, "DOCKER::SANDBOX_NOT_FOUND")


@pytest.mark.better("parallel patches overwrite each other")
def test_parallel_patches_all_land(target, idle):
    answers = []

    def one(n):
        answers.append(patch(target, idle, {f"k{n}": "v"}).status_code)

    threads = [threading.Thread(target=one, args=(n,)) for n in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(answers) == {200}
    assert set(target.get(idle).json()["metadata"]) == {f"k{n}" for n in range(24)}


# ---------------------------------------------------------------- renewals


def renew(target, sandbox, body):
    return target.call("POST", f"/v1/sandboxes/{sandbox}/renew-expiration", json=body)


@pytest.mark.parametrize("given, told", [
    ("2099-01-01T00:00:00Z", "2099-01-01T00:00:00Z"),
    ("2099-01-01T00:00:00.5Z", "2099-01-01T00:00:00.500000Z"),
    ("2099-01-01T02:00:00+02:00", "2099-01-01T00:00:00Z"),
    ("2099-01-01T00:00:00", "2099-01-01T00:00:00Z"),
    ("2099-01-01 00:00:00Z", "2099-01-01T00:00:00Z"),
    ("2099-01-01", "2099-01-01T00:00:00Z"),
    (4070908800, "2099-01-01T00:00:00Z"),
    (4070908800000, "2099-01-01T00:00:00Z"),
], ids=str)
def test_renew(target, web, given, told):
    answer = renew(target, web, {"expiresAt": given})
    assert answer.status_code == 200 and answer.json() == {"expiresAt": told}
    assert target.get(web).json()["expiresAt"] == told


def test_renew_may_shorten_and_go_past_the_maximum(target, web):
    for delta in ({"days": 90}, {"hours": 1}):
        answer = renew(target, web, {"expires_at": after(**delta)})
        assert answer.status_code == 200 and target.get(web).json()["expiresAt"] == answer.json()["expiresAt"]


@pytest.mark.parametrize("body", [{}, {"expiresAt": None}, {"expiresAt": "soon"}, {"expiresAt": True}, {"expiresAt": ""},
                                  {"expiresAt": "2099-13-01T00:00:00Z"}, {"expiresAt": []}], ids=str)
def test_renew_schema(target, web, body):
    invalid(renew(target, web, body), ["body", "expiresAt"])


@pytest.mark.parametrize("past", ["2001-01-01T00:00:00Z", 0, "2001-01-01"])
def test_renew_into_the_past(target, web, past):
    coded(renew(target, web, {"expiresAt": past}), 400, "DOCKER::INVALID_EXPIRATION")


def test_renew_of_an_unknown_one_comes_first(target):
    coded(renew(target, UNKNOWN, {"expiresAt": "2001-01-01T00:00:00Z"}), 404, "DOCKER::SANDBOX_NOT_FOUND")
