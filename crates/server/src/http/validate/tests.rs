use serde_json::{Value, json};

use super::*;
use crate::http::decode;

fn rules() -> CreateRules {
    CreateRules { max_timeout: Some(Duration::from_secs(3600)), ..CreateRules::embedded() }
}

fn run(change: impl Fn(&mut Value), rules: &CreateRules) -> ApiResult<ValidatedCreate> {
    let mut value = json!({"image": {"uri": "x"}, "entrypoint": ["tail"], "resourceLimits": {}});
    change(&mut value);
    let mut done = create(decode::create::create(&value).unwrap(), None, rules, Timestamp::clamped(1_000))?;
    done.hosts.settle(&rules.allowed_host_paths, &mut done.spec.volumes)?;
    Ok(done)
}

#[test]
fn each_refusal_has_its_status_and_code() {
    let cases: Vec<(&str, Value, u16, &str)> = vec![
        ("extensions", json!({"access.renew.extend.seconds": "299"}), 400, "SANDBOX::INVALID_PARAMETER"),
        ("extensions", json!({"access.renew.extend.seconds": ""}), 400, "SANDBOX::INVALID_PARAMETER"),
        (
            "lifecycle",
            json!({"periodic": [{"name": "n", "schedule": "@never", "command": ["x"]}]}),
            400,
            "SANDBOX::INVALID_PARAMETER",
        ),
        ("extensions", json!({"poolRef": "p"}), 400, "SANDBOX::UNSUPPORTED_POOL_REF"),
        ("entrypoint", json!([""]), 400, "DOCKER::INVALID_ENTRYPOINT"),
        ("entrypoint", json!([" "]), 400, "DOCKER::INVALID_ENTRYPOINT"),
        ("entrypoint", json!(["sh 'x"]), 400, "DOCKER::INVALID_ENTRYPOINT"),
        ("metadata", json!({"-": "x"}), 400, "SANDBOX::INVALID_METADATA_LABEL"),
        ("platform", json!({"os": "plan9", "arch": "amd64"}), 400, "SANDBOX::INVALID_PARAMETER"),
        ("platform", json!({"os": "linux", "arch": "arm64"}), 400, "SANDBOX::INVALID_PARAMETER"),
        ("timeout", json!(3601), 400, "SANDBOX::INVALID_PARAMETER"),
        ("timeout", json!(i64::MAX), 400, "SANDBOX::INVALID_PARAMETER"),
        ("resourceLimits", json!({"cpu": "0"}), 400, "SANDBOX::INVALID_PARAMETER"),
        ("resourceLimits", json!({"gpu": "1"}), 400, "SANDBOX::INVALID_PARAMETER"),
        ("env", json!({"OPENSANDBOX_EGRESS_SECRET": "x"}), 400, "SANDBOX::INVALID_PARAMETER"),
        ("env", json!({"A=B": "x"}), 400, "SANDBOX::INVALID_PARAMETER"),
    ];
    for (field, value, status, code) in cases {
        let error = run(|v| v[field] = value.clone(), &rules()).unwrap_err();
        assert_eq!((error.status.as_u16(), error.code), (status, code), "{field}: {value}");
    }
}

#[test]
fn snapshots_and_templates_answer_as_on_a_single_host() {
    let of = |value: Value| {
        create(decode::create::create(&value).unwrap(), None, &rules(), Timestamp::clamped(1)).unwrap_err()
    };
    let snapshot = of(json!({"snapshotId": "s", "resourceLimits": {}}));
    assert_eq!((snapshot.status.as_u16(), snapshot.code), (404, "SNAPSHOT::NOT_FOUND"));
    let template = of(json!({"templateId": "t", "timeout": 60}));
    assert_eq!((template.status.as_u16(), template.code), (400, "DOCKER::INVALID_ENTRYPOINT"));
}

#[test]
fn what_is_accepted_is_converted() {
    let done = run(
        |v| {
            v["timeout"] = json!(60);
            v["env"] = json!({"A": "1", "B": null, "OPENSANDBOX_EGRESS_LOG_LEVEL": "x"});
            v["metadata"] = json!({});
            v["platform"] = json!({"os": " Linux ", "arch": "AMD64"});
            v["image"]["auth"] = json!({"username": "u", "password": "hunter2"});
        },
        &rules(),
    )
    .unwrap();
    assert_eq!(done.facts.expires_at.map(Timestamp::as_millis), Some(61_000));
    assert_eq!(done.spec.env, [("A".to_owned(), "1".to_owned())]);
    assert_eq!(done.echoed_metadata, Some(BTreeMap::new()));
    assert_eq!(done.spec.platform.as_ref().map(|p| p.os.as_str()), Some("linux"));
    assert!(!format!("{done:?}").contains("hunter2"));
}

#[test]
fn host_volumes_stay_under_the_allowed_prefixes() {
    let dir = tempfile::tempdir().unwrap();
    let allowed = dir.path().join("allowed");
    std::fs::create_dir_all(allowed.join("data")).unwrap();
    std::os::unix::fs::symlink("/etc", allowed.join("escape")).unwrap();
    let rules = CreateRules { allowed_host_paths: vec![allowed.clone()], ..rules() };
    let text = |name: &str| allowed.join(name).to_string_lossy().into_owned();
    let code = |volume: Value| run(|v| v["volumes"] = json!([volume.clone()]), &rules).err().map(|e| e.code);
    let host = |path: &str| json!({"name": "a", "mountPath": "/m", "host": {"path": path}});
    assert_eq!(code(host(&text("data"))), None);
    assert_eq!(code(host("/etc")), Some("VOLUME::HOST_PATH_NOT_ALLOWED"));
    assert_eq!(code(host(&text("escape"))), Some("VOLUME::HOST_PATH_NOT_ALLOWED"));
    assert_eq!(code(host(&format!("{}/../x", text("data")))), Some("VOLUME::INVALID_HOST_PATH"));
    assert_eq!(code(host(&format!("{}/", text("data")))), Some("VOLUME::INVALID_HOST_PATH"));
    let mut sub = host(&text("data"));
    sub["subPath"] = json!("../x");
    assert_eq!(code(sub), Some("VOLUME::INVALID_SUB_PATH"));
    assert_eq!(
        code(json!({"name": "a", "mountPath": "/", "host": {"path": text("data")}})),
        Some("VOLUME::INVALID_MOUNT_PATH")
    );
    assert_eq!(
        code(json!({"name": "a", "mountPath": "/m", "pvc": {"claimName": "c"}})),
        Some("VOLUME::UNSUPPORTED_BACKEND")
    );
    let twice = run(|v| v["volumes"] = json!([host(&text("data")), host(&text("data"))]), &rules);
    assert_eq!(twice.unwrap_err().code, "VOLUME::DUPLICATE_NAME");
}

#[test]
fn a_command_line_is_split_and_echoed_as_it_was_sent() {
    let line = json!(["python -c 'print(1)'"]);
    let done = run(|v| v["entrypoint"] = line.clone(), &rules()).unwrap();
    let words = ["python", "-c", "print(1)"].map(str::to_owned).to_vec();
    assert_eq!(done.spec.entrypoint, Entrypoint::Command(words));
    assert_eq!(done.echoed_entrypoint, Some(vec!["python -c 'print(1)'".to_owned()]));
    let several = run(|v| v["entrypoint"] = json!(["a b", "c"]), &rules()).unwrap();
    assert_eq!(several.spec.entrypoint, Entrypoint::Command(vec!["a b".into(), "c".into()]));
}
