use serde_json::{Value, json};

use super::*;
use crate::http::decode;

const NOW: i64 = 1_893_456_000_000;

fn rules() -> CreateRules {
    CreateRules { max_timeout: Some(Duration::from_secs(86_400)), ..CreateRules::embedded() }
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
    run_with(changes, None, &rules())
}

fn run_with(changes: Value, restored: Option<Restored>, rules: &CreateRules) -> ApiResult<ValidatedCreate> {
    let request = decode::create::create(&body(changes))?;
    create(request, restored, rules, Timestamp::clamped(NOW))
}

#[test]
fn every_refusal_has_its_documented_code() {
    let parameter = (400, "SANDBOX::INVALID_PARAMETER");
    for (changes, expected) in [
        (json!({"extensions": {"access.renew.extend.seconds": "299"}}), parameter),
        (json!({"extensions": {"access.renew.extend.seconds": "86401"}}), parameter),
        (json!({"extensions": {"access.renew.extend.seconds": ""}}), parameter),
        (json!({"extensions": {"access.renew.extend.seconds": "5m"}}), parameter),
        (json!({"extensions": {"access.wake": "yes"}}), parameter),
        (json!({"extensions": {"access.wake": ""}}), parameter),
        (json!({"image": null, "entrypoint": null, "snapshotId": "s"}), (404, "SNAPSHOT::NOT_FOUND")),
        (json!({"lifecycle": {"preStart": {"command": ["a", "b\u{0}"]}}}), parameter),
        (
            json!({"lifecycle": {"periodic": [{"name": "n", "schedule": "61 * * * *", "command": ["x"]}]}}),
            parameter,
        ),
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
        (json!({"resourceLimits": {"cpu": "0"}}), parameter),
        (json!({"resourceLimits": {"memory": "1.5Gi"}}), parameter),
        (json!({"resourceLimits": {"gpu": "1"}}), parameter),
        (json!({"resourceLimits": {"memory": "1"}}), parameter),
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
        "lifecycle": {"periodic": [{"name": "n", "schedule": "x", "command": ["x"]}]},
        "entrypoint": [""], "metadata": {"-": ""}, "timeout": 90_000,
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

fn docker() -> CreateRules {
    let rules = CreateRules::docker(|config| {
        config.docker.sandbox_env.insert("BASE".to_owned(), crate::config::Secret::new("1"));
    });
    CreateRules { max_timeout: Some(Duration::from_secs(86_400)), ..rules }
}

#[test]
fn the_first_failing_check_wins_on_docker_too() {
    let mut wrong = json!({
        "extensions": {"access.renew.extend.seconds": "1", "poolRef": " "},
        "lifecycle": {"periodic": [{"name": "n", "schedule": "x", "command": ["x"]}]},
        "entrypoint": [""], "metadata": {"-": ""}, "platform": {"os": "plan9", "arch": "amd64"},
        "timeout": 90_000, "networkPolicy": {}, "credentialProxy": {"enabled": true},
        "resourceLimits": {"gpu": "none"}, "env": {"OPENSANDBOX_EGRESS_TOKEN": "x"},
        "volumes": [{"name": "v", "ossfs": {"bucket": "a b", "endpoint": "e", "accessKeyId": "i",
            "accessKeySecret": "s", "options": ["-o"]}, "mountPath": "/m"}],
        "image": {"uri": "user@registry/x"},
    });
    let parameter = "SANDBOX::INVALID_PARAMETER";
    for (repair, value, said, about) in [
        ("extensions", json!({}), parameter, "access.renew"),
        ("lifecycle", json!(null), parameter, "lifecycle"),
        ("entrypoint", json!(["x"]), "DOCKER::INVALID_ENTRYPOINT", "program"),
        ("metadata", json!({}), "SANDBOX::INVALID_METADATA_LABEL", "label"),
        ("platform", json!(null), parameter, "platform"),
        ("timeout", json!(60), parameter, "timeout"),
        ("credentialProxy", json!({}), parameter, "dns+nft"),
        ("resourceLimits", json!({}), parameter, "gpu"),
        ("env", json!({}), parameter, "env"),
        ("volumes", json!([]), "VOLUME::INVALID_OSSFS_OPTION", "option"),
        ("image", json!({"uri": "x"}), parameter, "image.uri"),
    ] {
        let refused = run_with(wrong.clone(), None, &docker()).unwrap_err();
        assert_eq!(refused.code, said, "before {repair} is repaired");
        assert!(refused.message.contains(about), "before {repair} is repaired: {}", refused.message);
        wrong[repair] = value;
    }
    assert!(run_with(wrong, None, &docker()).is_ok());
}

#[test]
fn docker_takes_what_the_embedded_runtime_lacks() {
    let seen = run_with(
        json!({
            "platform": {"os": "linux", "arch": "ARM64"},
            "resourceLimits": {"gpu": "all", "memory": "64Mi"},
            "networkPolicy": {"defaultAction": "deny", "egress": [{"action": "allow", "target": "pypi.org"}]},
            "env": {"A": "1", "OPENSANDBOX_EGRESS_LOG_LEVEL": "debug"},
            "volumes": [
                {"name": "d", "pvc": {"claimName": "data"}, "mountPath": "/d", "subPath": "in/side"},
                {"name": "o", "mountPath": "/o", "readOnly": true, "ossfs": {"bucket": "bucket", "endpoint": "oss.example",
                    "accessKeyId": "i", "accessKeySecret": "hunter2"}},
            ],
        }),
        None,
        &docker(),
    )
    .unwrap();
    assert_eq!(seen.spec.platform.as_ref().map(|p| p.arch.as_str()), Some("arm64"));
    assert_eq!(seen.spec.env, [("A".to_owned(), "1".to_owned()), ("BASE".to_owned(), "1".to_owned())]);
    let egress = seen.spec.egress.as_ref().unwrap();
    assert_eq!(egress.policy.default_action.as_deref(), Some("deny"));
    assert_eq!(egress.policy.egress[0].target, "pypi.org");
    assert_eq!(egress.env, [("OPENSANDBOX_EGRESS_LOG_LEVEL".to_owned(), "debug".to_owned())]);
    assert!(!egress.credential_proxy);
    assert_eq!(seen.secrets.object_stores["o"].secret, "hunter2");
    assert!(!serde_json::to_string(&seen.spec).unwrap().contains("hunter2"));
    assert!(seen.hosts.is_empty());
}

#[test]
fn secure_access_is_refused_only_where_every_port_is_open() {
    let secure = json!({"secureAccess": true});
    assert!(run_with(secure.clone(), None, &docker()).unwrap().spec.secure_access);
    let host = CreateRules::docker(|config| config.docker.network_mode = "host".to_owned());
    assert_eq!(run_with(secure, None, &host).unwrap_err().code, "SANDBOX::INVALID_PARAMETER");
}

#[test]
fn an_empty_policy_is_a_policy() {
    let seen = run_with(json!({"networkPolicy": {}}), None, &docker()).unwrap();
    assert_eq!(seen.spec.egress.map(|egress| egress.policy), Some(NetworkPolicy::default()));
    assert!(run_with(json!({}), None, &docker()).unwrap().spec.egress.is_none());
}

#[test]
fn windows_machines_have_their_own_limits() {
    let windows = |limits: Value| {
        let platform = json!({"os": "windows", "arch": "amd64"});
        run_with(json!({"platform": platform, "resourceLimits": limits}), None, &docker())
    };
    let seen = windows(json!({"cpu": "4", "memory": "8Gi", "disk": "64G"})).unwrap();
    assert_eq!(seen.spec.limits.disk_bytes, Some(64_000_000_000));
    assert_eq!(windows(json!({"cpu": "1"})).unwrap_err().code, "SANDBOX::INVALID_PARAMETER");
}

#[test]
fn a_snapshot_is_the_image_and_brings_a_default_entrypoint() {
    let asked = json!({"image": null, "entrypoint": null, "snapshotId": "s"});
    let snapshot = SnapshotId::random();
    let restored = Restored { snapshot, image: "snapshots:1".to_owned() };
    let seen = run_with(asked.clone(), Some(restored.clone()), &docker()).unwrap();
    assert_eq!((seen.spec.image.as_str(), seen.spec.snapshot), ("snapshots:1", Some(snapshot)));
    let tail = RESTORED_ENTRYPOINT.map(str::to_owned).to_vec();
    assert_eq!(seen.spec.entrypoint, Entrypoint::Command(tail));
    assert_eq!(seen.echoed_entrypoint, None);
    let mut own = asked.clone();
    own["entrypoint"] = json!(["x"]);
    let seen = run_with(own, Some(restored), &docker()).unwrap();
    assert_eq!(seen.spec.entrypoint, Entrypoint::Command(vec!["x".to_owned()]));
    assert_eq!(run_with(asked, None, &docker()).unwrap_err().code, "SNAPSHOT::NOT_FOUND");
}

#[test]
fn hooks_are_taken_along_and_what_is_wrong_with_them_is_said() {
    let asked = json!({"lifecycle": {
        "preStart": {"command": ["sh", "-c", "make"], "timeoutSeconds": 600},
        "periodic": [{"name": " tick ", "schedule": "TZ=Europe/Berlin */5 * * * *", "command": ["tick"]}],
    }});
    for rules in [rules(), docker()] {
        let hooks = run_with(asked.clone(), None, &rules).unwrap().spec.hooks;
        assert_eq!(hooks.pre_start.unwrap().timeout(), Duration::from_secs(600));
        assert_eq!(hooks.periodic[0].name, "tick");
        assert!(run_with(json!({"lifecycle": {}}), None, &rules).unwrap().spec.hooks.is_empty());
    }
    for (schedule, says) in [
        ("0 0 30 2 *", "lifecycle.periodic[0].schedule never happens"),
        ("* * *", "lifecycle.periodic[0].schedule has 3 fields"),
        ("TZ=Nowhere @daily", "the time zone \"Nowhere\" is not known"),
        ("@every 90", "whole seconds"),
    ] {
        let hook = json!({"name": "n", "schedule": schedule, "command": ["x"]});
        let refused = run(json!({"lifecycle": {"periodic": [hook]}})).unwrap_err();
        assert_eq!((refused.status.as_u16(), refused.code), (400, "SANDBOX::INVALID_PARAMETER"));
        assert!(refused.message.contains(says), "{}", refused.message);
    }
    let windows = json!({"platform": {"os": "windows", "arch": "amd64"}, "lifecycle": asked["lifecycle"]});
    let refused = run_with(windows, None, &docker()).unwrap_err();
    assert!(refused.message.contains("Windows"), "{}", refused.message);
}
