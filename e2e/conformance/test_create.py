"""Creation: each validation rule with its status and code, their order, and what is accepted and how it is told back."""

import os
import re
from datetime import datetime, timezone

import pytest
from target import DROP, UNKNOWN, coded, invalid

TIME = re.compile(r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{6})?Z$")
PARAMETER = "SANDBOX::INVALID_PARAMETER"
LABEL = "SANDBOX::INVALID_METADATA_LABEL"
COMMAND = {"command": ["true"]}
PERIODIC = {"name": "a", "schedule": "* * * * *", "command": ["true"]}
# A runtime without hooks refuses any; one with hooks refuses a schedule of a minute that does not exist.
NEVER = {"periodic": [{**PERIODIC, "schedule": "61 * * * *"}]}
POLICY = {"egress": [{"action": "allow", "target": "example.com"}]}
ONLY = {"image": DROP, "entrypoint": DROP, "resourceLimits": DROP}
HOSTS = os.environ.get("CONFORMANCE_HOST_PATH", "/nowhere")
RENEW = "access.renew.extend.seconds"


def volume(**keys):
    return {"volumes": [{"name": "data", "mountPath": "/data", **keys}]}


def refused(name, status, code, changes, *marks):
    return pytest.param(changes, status, code, id=name, marks=marks)


SCHEMA = [
    # Cross-field rules, in their order.
    refused("env-of-lifecycle", 422, None, {"env": {"OPENSANDBOX_LIFECYCLE": "x"}}),
    refused("template-with-image", 422, None, {"templateId": "tpl-a"}),
    refused("template-with-entrypoint", 422, None, {**ONLY, "templateId": "tpl-a", "entrypoint": ["a"]}),
    refused("template-with-empty-env", 422, None, {**ONLY, "templateId": "tpl-a", "env": {}}),
    refused("template-with-limits", 422, None, {**ONLY, "templateId": "tpl-a", "resourceLimits": {}}),
    refused("template-without-timeout", 422, None, {**ONLY, "templateId": "tpl-a", "timeout": DROP}),
    refused("template-empty", 422, None, {"templateId": ""}),
    refused("pool-with-lifecycle", 422, None, {"extensions": {"poolRef": "p"}, "lifecycle": {}}),
    refused("pool-with-snapshot", 422, None, {**ONLY, "extensions": {"poolRef": "p"}, "snapshotId": "s"}),
    refused("credential-proxy-alone", 422, None, {"credentialProxy": {"enabled": True}}),
    refused("no-image", 422, None, {"image": DROP}),
    refused("null-image", 422, None, {"image": None}),
    refused("blank-image", 422, None, {"image": {"uri": "  "}}),
    refused("image-and-snapshot", 422, None, {"snapshotId": UNKNOWN}),
    refused("no-entrypoint", 422, None, {"entrypoint": DROP}),
    refused("null-entrypoint", 422, None, {"entrypoint": None}),
    refused("no-limits", 422, None, {"resourceLimits": DROP}),
    refused("no-limits-for-a-snapshot", 422, None, {"image": DROP, "snapshotId": UNKNOWN, "resourceLimits": DROP}),
    # Fields.
    *(refused(f"timeout-{value!r}", 422, None, {"timeout": value}) for value in (59, 0, -1, "abc", 60.5, True, [600])),
    refused("image-is-text", 422, None, {"image": "busybox"}),
    refused("image-without-uri", 422, None, {"image": {}}),
    refused("image-auth-without-password", 422, None, {"image": {"uri": "a", "auth": {"username": "ann"}}}),
    refused("entrypoint-empty", 422, None, {"entrypoint": []}),
    refused("entrypoint-is-text", 422, None, {"entrypoint": "sleep 1"}),
    refused("entrypoint-of-numbers", 422, None, {"entrypoint": [1]}),
    refused("metadata-number", 422, None, {"metadata": {"a": 1}}),
    refused("metadata-null", 422, None, {"metadata": {"a": None}}),
    refused("metadata-list", 422, None, {"metadata": ["a"]}),
    refused("env-number", 422, None, {"env": {"A": 1}}),
    refused("env-list", 422, None, {"env": ["A=1"]}),
    refused("limits-number", 422, None, {"resourceLimits": {"cpu": 1}}),
    refused("requests-number", 422, None, {"resourceRequests": {"cpu": 1}}),
    refused("extensions-number", 422, None, {"extensions": {"a": 1}}),
    refused("platform-without-arch", 422, None, {"platform": {"os": "linux"}}),
    refused("policy-without-target", 422, None, {"networkPolicy": {"egress": [{"action": "allow"}]}}),
    refused("policy-empty-target", 422, None, {"networkPolicy": {"egress": [{"action": "allow", "target": ""}]}}),
    refused("secure-access-word", 422, None, {"secureAccess": "perhaps"}),
    refused("credential-proxy-number", 422, None, {"credentialProxy": {"enabled": 7}}),
    # Lifecycle hooks.
    refused("lifecycle-unknown-key", 422, None, {"lifecycle": {"postStop": COMMAND}}),
    refused("pre-start-empty-command", 422, None, {"lifecycle": {"preStart": {"command": []}}}),
    refused("pre-start-blank-command", 422, None, {"lifecycle": {"preStart": {"command": ["  "]}}}),
    refused("pre-start-no-time", 422, None, {"lifecycle": {"preStart": {**COMMAND, "timeoutSeconds": 0}}}),
    refused("pre-start-too-long", 422, None, {"lifecycle": {"preStart": {**COMMAND, "timeoutSeconds": 10801}}}),
    refused("pre-start-unknown-key", 422, None, {"lifecycle": {"preStart": {**COMMAND, "x": 1}}}),
    refused("periodic-blank-name", 422, None, {"lifecycle": {"periodic": [{**PERIODIC, "name": " "}]}}),
    refused("periodic-blank-schedule", 422, None, {"lifecycle": {"periodic": [{**PERIODIC, "schedule": ""}]}}),
    refused("periodic-too-long", 422, None, {"lifecycle": {"periodic": [{**PERIODIC, "timeoutSeconds": 301}]}}),
    refused("periodic-same-name", 422, None, {"lifecycle": {"periodic": [PERIODIC, {**PERIODIC, "name": " a "}]}}),
    refused("periodic-unknown-key", 422, None, {"lifecycle": {"periodic": [{**PERIODIC, "x": 1}]}}),
    # Volumes.
    refused("volume-without-backend", 422, None, volume()),
    refused("volume-unknown-backend", 422, None, volume(nfs={"server": "a", "path": "/b"})),
    refused("volume-two-backends", 422, None, volume(host={"path": "/a"}, pvc={"claimName": "b"})),
    refused("volume-name-upper-case", 422, None, {"volumes": [{"name": "Data", "mountPath": "/d", "pvc": {"claimName": "b"}}]}),
    refused("volume-relative-mount", 422, None, {"volumes": [{"name": "d", "mountPath": "d", "pvc": {"claimName": "b"}}]}),
    refused("volume-host-relative", 422, None, volume(host={"path": "a/b"})),
    refused("volume-claim-name", 422, None, volume(pvc={"claimName": "Upper_case"})),
    refused("volume-storage-size", 422, None, volume(pvc={"claimName": "b", "storage": "many"})),
    refused("volume-ossfs-without-secret", 422, None,
            volume(ossfs={"bucket": "bucket", "endpoint": "e.example", "accessKeyId": "a"})),
    refused("volume-ossfs-version", 422, None,
            volume(ossfs={"bucket": "bucket", "endpoint": "e", "version": "3.0", "accessKeyId": "a", "accessKeySecret": "b"})),
    refused("volume-ossfs-short-bucket", 422, None,
            volume(ossfs={"bucket": "ab", "endpoint": "e", "accessKeyId": "a", "accessKeySecret": "b"})),
]

RULES = [
    *(refused(f"renew-{value!r}", 400, PARAMETER, {"extensions": {RENEW: value}})
      for value in ("299", "86401", "abc", "", "  ", "600.5", "-600", "0x258")),
    refused("snapshot-unknown", 404, "SNAPSHOT::NOT_FOUND", {"image": DROP, "snapshotId": UNKNOWN}),
    refused("lifecycle", 400, PARAMETER, {"lifecycle": NEVER}),
    refused("lifecycle-hook", 400, PARAMETER, {"lifecycle": {"preStart": COMMAND, **NEVER}}),
    refused("pool", 400, "SANDBOX::UNSUPPORTED_POOL_REF", {"extensions": {"poolRef": "p"}}),
    refused("pool-alone", 400, "SANDBOX::UNSUPPORTED_POOL_REF", {**ONLY, "extensions": {"poolRef": "p"}}),
    refused("template", 400, "DOCKER::INVALID_ENTRYPOINT", {**ONLY, "templateId": "tpl-a"}),
    *(refused(f"metadata-{name}", 400, LABEL, {"metadata": labels}) for name, labels in {
        "reserved": {"opensandbox.io/id": "x"}, "empty-key": {"": "x"}, "bad-key": {"a b": "x"}, "dash": {"-a": "x"},
        "long-key": {"k" * 64: "x"}, "two-slashes": {"a/b/c": "x"}, "upper-prefix": {"Example.com/a": "x"},
        "empty-prefix": {"/a": "x"}, "empty-name": {"example.com/": "x"}, "long-value": {"a": "v" * 64},
        "bad-value": {"a": "b c"}, "value-dash": {"a": "b-"}, "unicode-value": {"a": "ü"}}.items()),
    refused("platform-os", 400, PARAMETER, {"platform": {"os": "plan9", "arch": "amd64"}}),
    refused("platform-arch", 400, PARAMETER, {"platform": {"os": "linux", "arch": "mips"}}),
    refused("timeout-overflow", 400, PARAMETER, {"timeout": 10**15}),
    refused("timeout-over-the-maximum", 400, PARAMETER, {"timeout": 86401}),
    *(refused(f"cpu-{value!r}", 400, PARAMETER, {"resourceLimits": {"cpu": value}})
      for value in ("0", "-1", "abc", "", "inf", "nan", "1mm", "1e40")),
    *(refused(f"memory-{value!r}", 400, PARAMETER, {"resourceLimits": {"memory": value}})
      for value in ("0", "-1", "abc", "", "1.5Gi", "512MiB", "1e3", "0Mi")),
    *(refused(f"gpu-{value!r}", 400, PARAMETER, {"resourceLimits": {"gpu": value}}) for value in ("0", "-1", "x", "1.5", "")),
    refused("env-of-egress-unknown", 400, PARAMETER, {"env": {"OPENSANDBOX_EGRESS_ANYTHING": "1"}}),
    refused("volume-same-name", 400, "VOLUME::DUPLICATE_NAME",
            {"volumes": [{"name": "a", "mountPath": f"/{n}", "pvc": {"claimName": "c"}} for n in "xy"]}),
    refused("volume-sub-path-absolute", 400, "VOLUME::INVALID_SUB_PATH", volume(pvc={"claimName": "c"}, subPath="/a")),
    refused("volume-sub-path-up", 400, "VOLUME::INVALID_SUB_PATH", volume(pvc={"claimName": "c"}, subPath="a/../../b")),
    refused("volume-host-up", 400, "VOLUME::INVALID_HOST_PATH", volume(host={"path": f"{HOSTS}/../etc"})),
    refused("volume-host-doubled-slash", 400, "VOLUME::INVALID_HOST_PATH", volume(host={"path": f"{HOSTS}//a"})),
    refused("volume-host-trailing-slash", 400, "VOLUME::INVALID_HOST_PATH", volume(host={"path": f"{HOSTS}/a/"})),
    refused("volume-host-elsewhere", 400, "VOLUME::HOST_PATH_NOT_ALLOWED", volume(host={"path": "/etc"})),
    refused("volume-host-sibling", 400, "VOLUME::HOST_PATH_NOT_ALLOWED", volume(host={"path": f"{HOSTS}-other"})),
    refused("volume-host-root", 400, "VOLUME::HOST_PATH_NOT_ALLOWED", volume(host={"path": "/"}),),
    refused("volume-ossfs-option-dash", 400, "VOLUME::INVALID_OSSFS_OPTION",
            volume(ossfs={"bucket": "bucket", "endpoint": "e.example", "accessKeyId": "a", "accessKeySecret": "b", "options": ["-o"]}),
            pytest.mark.docker),
    refused("volume-ossfs-bad-endpoint", 400, PARAMETER,
            volume(ossfs={"bucket": "bucket", "endpoint": "e x;y", "accessKeyId": "a", "accessKeySecret": "b"}), pytest.mark.docker),
]

# Two mistakes at once: the earlier check answers.
ORDER = [
    refused("schema-before-renew", 422, None, {"timeout": 1, "extensions": {RENEW: "1"}}),
    refused("cross-field-before-renew", 422, None, {"entrypoint": DROP, "extensions": {RENEW: "1"}}),
    refused("renew-before-snapshot", 400, PARAMETER, {"image": DROP, "snapshotId": UNKNOWN, "extensions": {RENEW: "1"}}),
    refused("snapshot-before-lifecycle", 404, "SNAPSHOT::NOT_FOUND", {"image": DROP, "snapshotId": UNKNOWN, "lifecycle": {}}),
    refused("lifecycle-before-labels", 400, PARAMETER, {"lifecycle": NEVER, "metadata": {"a b": "c"}}),
    refused("pool-before-labels", 400, "SANDBOX::UNSUPPORTED_POOL_REF",
            {"extensions": {"poolRef": "p"}, "metadata": {"a b": "c"}}),
    refused("labels-before-platform", 400, LABEL, {"metadata": {"a b": "c"}, "platform": {"os": "x", "arch": "y"}}),
    refused("labels-before-timeout", 400, LABEL, {"metadata": {"a b": "c"}, "timeout": 10**6}),
    refused("limits-before-volumes", 400, PARAMETER, {"resourceLimits": {"cpu": "x"}, **volume(host={"path": "/etc"})}),
    refused("volumes-before-image", 400, "VOLUME::HOST_PATH_NOT_ALLOWED",
            {"image": {"uri": "127.0.0.1:1/none:1"}, **volume(host={"path": "/etc"})}),
    refused("labels-before-image", 400, LABEL, {"image": {"uri": "127.0.0.1:1/none:1"}, "metadata": {"a b": "c"}}),
]


@pytest.mark.parametrize("changes, status, code", SCHEMA)
def test_schema(target, changes, status, code):
    invalid(target.post(**changes), ["body"])


@pytest.mark.parametrize("changes, status, code", RULES)
def test_rule(target, changes, status, code):
    coded(target.post(**changes), status, code)


@pytest.mark.parametrize("changes, status, code", ORDER)
def test_order(target, changes, status, code):
    answer = target.post(**changes)
    invalid(answer) if code is None else coded(answer, status, code)


def test_refused_creates_leave_nothing(target):
    before = target.call("GET", "/v1/sandboxes").json()["pagination"]["totalItems"]
    for changes in ({"lifecycle": NEVER}, {"timeout": 1}, {"resourceLimits": {"cpu": "x"}}):
        assert target.post(**changes).status_code in (400, 422)
    assert target.call("GET", "/v1/sandboxes").json()["pagination"]["totalItems"] == before


@pytest.mark.docker
def test_image_that_nobody_serves(target):
    coded(target.post(image={"uri": "127.0.0.1:1/none:1"}), 500, "DOCKER::SANDBOX_IMAGE_PULL_FAILED")


# ---------------------------------------------------------------- what is accepted

ACCEPTED = {
    "timeout-digits": ({"timeout": "600"}, {}),
    "timeout-float": ({"timeout": 600.0}, {}),
    "timeout-maximum": ({"timeout": 86400}, {}),
    "limits-empty": ({"resourceLimits": {}}, {}),
    "limits-unknown-key": ({"resourceLimits": {"cpu": "0.5", "shoes": "2"}}, {}),
    "cpu-milli-upper": ({"resourceLimits": {"cpu": "250M"}}, {}),
    "memory-bytes": ({"resourceLimits": {"memory": "268435456"}}, {}),
    "memory-blanks-around": ({"resourceLimits": {"memory": " 256mi "}}, {}),
    "memory-kb": ({"resourceLimits": {"memory": "262144KB"}}, {}),
    "unknown-fields": ({"pullPolicy": "Always", "x": {"y": 1}}, {}),
    "snake-case": ({"resourceLimits": DROP, "resource_limits": {"cpu": "1"}, "secure_access": False}, {}),
    "blank-snapshot": ({"snapshotId": "  "}, {}),
    "blank-template": ({"templateId": "  "}, {}),
    "blank-pool": ({"extensions": {"poolRef": "  "}}, {}),
    "requests-ignored": ({"resourceRequests": {"cpu": "100"}}, {}),
    "secure-access-no": ({"secureAccess": "no"}, {}),
    "secure-access": ({"secureAccess": True}, {}),
    "secure-access-lenient": ({"secureAccess": "yes"}, {}),
    "policy": ({"networkPolicy": POLICY}, {}),
    "policy-empty": ({"networkPolicy": {}}, {}),
    "nulls": ({"snapshotId": None, "platform": None, "env": None, "volumes": None, "networkPolicy": None,
               "credentialProxy": None, "lifecycle": None, "extensions": None, "resourceRequests": None}, {}),
    "metadata-empty": ({"metadata": {}}, {"metadata": {}}),
    "metadata": ({"metadata": {"a": "1", "example.com/b": "", "c_.-d": "V.a-l_9"}},
                 {"metadata": {"a": "1", "example.com/b": "", "c_.-d": "V.a-l_9"}}),
    "env-null": ({"env": {"A": "1", "B": None}}, {}),
    "env-of-egress-ignored": ({"env": {"OPENSANDBOX_EGRESS_LOG_LEVEL": "debug"}}, {}),
    "renew-extension": ({"extensions": {RENEW: " 300 "}}, {"extensions": DROP}),
    "extensions-echoed": ({"extensions": {"opensandbox.extensions.mine": "x", "other": "y"}},
                          {"extensions": {"opensandbox.extensions.mine": "x"}}),
    "platform": ({"platform": {"os": " Linux ", "arch": "AMD64"}}, {"platform": {"os": "linux", "arch": "amd64"}}),
    "no-platform": ({}, {"platform": DROP}),
    "entrypoint-split": ({"entrypoint": ["sleep 600"]}, {"entrypoint": ["sleep 600"]}),
}

SECURE = pytest.mark.different("secureAccess needs no cluster")
ENFORCED = pytest.mark.different("a network policy needs no image of the operator's")
MARKS = {"secure-access": SECURE, "secure-access-lenient": SECURE, "policy": ENFORCED, "policy-empty": ENFORCED}


@pytest.mark.parametrize("name", [pytest.param(name, marks=MARKS.get(name, ())) for name in ACCEPTED])
def test_accepted(target, name):
    changes, told = ACCEPTED[name]
    answer = target.post(**changes)
    assert answer.status_code == 202, answer.text
    made = answer.json()
    try:
        for field, value in told.items():
            assert made.get(field, DROP) == value, made
        assert {"id", "status", "createdAt", "entrypoint"} <= set(made) and "image" not in made and "snapshotId" not in made
        assert not [field for field, value in made.items() if value is None]
    finally:
        target.delete(made["id"])


def test_create_and_read(target):
    before = datetime.now(timezone.utc)
    made = target.create(metadata={"suite": "read"}, env={"A": "1"}, extensions={"opensandbox.extensions.mine": "x"})
    got = target.get(made["id"]).json()
    try:
        assert re.fullmatch(r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}", made["id"])
        assert got["image"] == {"uri": target.image} and got["metadata"] == {"suite": "read"}
        assert got["entrypoint"] == ["sleep", "600"] and got["extensions"] == {"opensandbox.extensions.mine": "x"}
        assert got["status"]["state"] == "Running" and got["status"]["reason"] == "CONTAINER_RUNNING"
        for value in (got["createdAt"], got["expiresAt"], got["status"]["lastTransitionAt"], made["createdAt"]):
            assert TIME.match(value), value
        assert got["expiresAt"] == made["expiresAt"]
        end = datetime.fromisoformat(got["expiresAt"].replace("Z", "+00:00"))
        assert abs((end - before).total_seconds() - 600) < 30
        assert not [field for field, value in got.items() if value is None]
        assert "platform" not in got and "snapshotId" not in got and "allocation" not in got
        assert target.call("GET", f"/sandboxes/{made['id']}").json() == got
    finally:
        target.delete(made["id"])


def test_entrypoint_of_one_word_with_blanks_is_split(target):
    made = target.create(entrypoint=["sh -c 'sleep 600; true'"])
    assert target.get(made["id"]).json()["entrypoint"] == ["sh", "-c", "sleep 600; true"]
    assert target.delete(made["id"]) == 204


def test_empty_metadata_is_left_out_of_reads(target, idle):
    assert "metadata" not in target.get(idle).json()


@pytest.mark.parametrize("timeout", [None, DROP])
def test_no_timeout_is_manual_cleanup(target, timeout):
    made = target.create(timeout=timeout)
    got = target.get(made["id"]).json()
    assert "expiresAt" not in made and "expiresAt" not in got
    future = {"expiresAt": "2099-01-01T00:00:00Z"}
    coded(target.call("POST", f"/v1/sandboxes/{made['id']}/renew-expiration", json=future), 409, "DOCKER::INVALID_EXPIRATION")
    assert target.delete(made["id"]) == 204
