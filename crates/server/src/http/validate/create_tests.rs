use serde_json::{Value, json};

use super::*;
use crate::http::decode;

const NOW: i64 = 1_893_456_000_000;

fn rules() -> CreateRules {
    CreateRules {
        max_timeout: Some(Duration::from_secs(86_400)),
        allowed_host_paths: Vec::new(),
        arch: "amd64",
    }
}

/// A minimal body with some fields replaced; `null` takes a field away.
fn body(changes: Value) -> Value {
    let mut body =
        json!({"image": {"uri": "python:3.12"}, "entrypoint": ["tail", "-f"], "resourceLimits": {}});
    if let (Value::Object(body), Value::Object(changes)) = (&mut body, changes) {
        body.extend(changes);
    }
    body
}

fn run(changes: Value) -> ApiResult<ValidatedCreate> {
    let request = decode::create::create(&body(changes))?;
    create(request, &rules(), Timestamp::clamped(NOW))
}

#[test]
fn every_refusal_has_its_documented_code() {
    let parameter = (400, "SANDBOX::INVALID_PARAMETER");
    for (changes, expected) in [
        (json!({"extensions": {"access.renew.extend.seconds": "299"}}), parameter),
        (json!({"extensions": {"access.renew.extend.seconds": "86401"}}), parameter),
        (json!({"extensions": {"access.renew.extend.seconds": ""}}), parameter),
        (json!({"extensions": {"access.renew.extend.seconds": "5m"}}), parameter),
        (json!({"image": null, "entrypoint": null, "snapshotId": "s"}), (404, "SNAPSHOT::NOT_FOUND")),
        (json!({"lifecycle": {}}), parameter),
        (json!({"extensions": {"poolRef": "p"}}), (400, "SANDBOX::UNSUPPORTED_POOL_REF")),
        (
            json!({"image": null, "entrypoint": null, "resourceLimits": null, "templateId": "t", "timeout": 60}),
            (400, "DOCKER::INVALID_ENTRYPOINT"),
        ),
        (json!({"entrypoint": [""]}), (400, "DOCKER::INVALID_ENTRYPOINT")),
        (json!({"entrypoint": ["a", "b\u{0}c"]}), (400, "DOCKER::INVALID_ENTRYPOINT")),
        (json!({"metadata": {"-": "x"}}), (400, "SANDBOX::INVALID_METADATA_LABEL")),
        (json!({"metadata": {"opensandbox.io/id": "x"}}), (400, "SANDBOX::INVALID_METADATA_LABEL")),
        (json!({"platform": {"os": "windows", "arch": "amd64"}}), parameter),
        (json!({"platform": {"os": "linux", "arch": "arm64"}}), parameter),
        (json!({"platform": {"os": "plan9", "arch": "amd64"}}), parameter),
        (json!({"timeout": 86_401}), parameter),
        (json!({"timeout": i64::MAX}), parameter),
        (json!({"networkPolicy": {"egress": []}}), parameter),
        (json!({"networkPolicy": {"egress": []}, "credentialProxy": {"enabled": true}}), parameter),
        (json!({"resourceLimits": {"cpu": "0"}}), parameter),
        (json!({"resourceLimits": {"memory": "1.5Gi"}}), parameter),
        (json!({"resourceLimits": {"gpu": "1"}}), parameter),
        (json!({"env": {"OPENSANDBOX_EGRESS_TOKEN": "x"}}), parameter),
        (
            json!({"volumes": [{"name": "v", "host": {"path": "/data"}, "mountPath": "/m"}]}),
            (400, "VOLUME::HOST_PATH_NOT_ALLOWED"),
        ),
        (
            json!({"volumes": [{"name": "v", "pvc": {"claimName": "c"}, "mountPath": "/m"}]}),
            (400, "VOLUME::UNSUPPORTED_BACKEND"),
        ),
        (json!({"entrypoint": null}), (422, "GENERAL::VALIDATION_ERROR")),
        (json!({"timeout": 59}), (422, "GENERAL::VALIDATION_ERROR")),
    ] {
        let error = run(changes.clone()).expect_err(&changes.to_string());
        assert_eq!((error.status.as_u16(), error.code), expected, "{changes}");
    }
}

#[test]
fn the_first_failing_check_wins() {
    let mut wrong = json!({
        "extensions": {"access.renew.extend.seconds": "1", "poolRef": " "},
        "lifecycle": {}, "entrypoint": [""], "metadata": {"-": ""}, "timeout": 90_000,
        "volumes": [{"name": "v", "host": {"path": "/data"}, "mountPath": "/m"}],
    });
    for (repair, value, said) in [
        ("extensions", json!({}), "SANDBOX::INVALID_PARAMETER"),
        ("lifecycle", json!(null), "SANDBOX::INVALID_PARAMETER"),
        ("entrypoint", json!(["x"]), "DOCKER::INVALID_ENTRYPOINT"),
        ("metadata", json!({}), "SANDBOX::INVALID_METADATA_LABEL"),
        ("timeout", json!(60), "SANDBOX::INVALID_PARAMETER"),
        ("volumes", json!([]), "VOLUME::HOST_PATH_NOT_ALLOWED"),
    ] {
        assert_eq!(run(wrong.clone()).unwrap_err().code, said, "before {repair} is repaired");
        wrong[repair] = value;
    }
    assert!(run(wrong).is_ok());
}

#[test]
fn a_full_request_becomes_a_specification() {
    let seen = run(json!({
        "image": {"uri": "python:3.12", "auth": {"username": "u", "password": "p"}},
        "timeout": 600, "secureAccess": true, "platform": {"os": " Linux ", "arch": "AMD64"},
        "resourceLimits": {"cpu": "500m", "memory": "1Gi", "pids": "64", "disk": "9"},
        "env": {"B": "2", "A": null}, "metadata": {"team": "x"}, "credentialProxy": {"enabled": false},
        "extensions": {"opensandbox.extensions.a": "b", "access.renew.extend.seconds": " 300 ", "poolRef": " "},
    }))
    .unwrap();
    assert_eq!(seen.spec.image, "python:3.12");
    assert_eq!(seen.spec.entrypoint, Entrypoint::Command(vec!["tail".to_owned(), "-f".to_owned()]));
    assert_eq!(seen.spec.env, [("B".to_owned(), "2".to_owned())]);
    assert_eq!(
        (seen.spec.limits.cpu_millis, seen.spec.limits.memory_bytes, seen.spec.limits.pids),
        (Some(500), Some(1 << 30), Some(64))
    );
    assert_eq!(seen.spec.platform, Some(Platform { os: "linux".to_owned(), arch: "amd64".to_owned() }));
    assert!(seen.spec.secure_access);
    assert_eq!(seen.spec.extensions.len(), 3);
    assert_eq!(seen.facts.expires_at, Timestamp::from_millis(NOW + 600_000));
    assert_eq!(seen.facts.metadata, BTreeMap::from([("team".to_owned(), "x".to_owned())]));
    assert_eq!(seen.secrets.registry.map(|c| c.username), Some("u".to_owned()));
}

#[test]
fn absent_and_empty_metadata_are_told_apart_in_the_answer() {
    assert_eq!(run(json!({})).unwrap().echoed_metadata, None);
    assert_eq!(run(json!({"metadata": {}})).unwrap().echoed_metadata, Some(BTreeMap::new()));
}

#[test]
fn no_timeout_means_manual_cleanup() {
    assert_eq!(run(json!({})).unwrap().facts.expires_at, None);
    assert_eq!(run(json!({"timeout": null})).unwrap().facts.expires_at, None);
}

#[test]
fn the_entrypoint_may_be_left_to_the_image_or_to_the_agent() {
    for (word, expected) in [("image", Entrypoint::Image), ("none", Entrypoint::AgentOnly)] {
        let seen = run(json!({"entrypoint": null, "extensions": {"sandglass.entrypoint": word}})).unwrap();
        assert_eq!(seen.spec.entrypoint, expected);
    }
}
