use proptest::prelude::*;
use serde_json::json;

use super::*;

fn minimal() -> Value {
    json!({"image": {"uri": "python:3.12"}, "entrypoint": ["tail"], "resourceLimits": {}})
}

fn with(change: impl Fn(&mut Value)) -> Value {
    let mut value = minimal();
    change(&mut value);
    value
}

fn places(value: &Value) -> Vec<String> {
    let error = create(value).unwrap_err();
    assert_eq!(error.status, 422);
    error
        .fields()
        .iter()
        .map(|field| {
            let loc: Vec<String> = field
                .loc
                .iter()
                .map(|l| match l {
                    sandglass_api::error::Loc::Field(name) => name.clone(),
                    sandglass_api::error::Loc::Index(n) => n.to_string(),
                })
                .collect();
            format!("{} {}", loc.join("."), field.kind)
        })
        .collect()
}

#[test]
fn what_the_published_sdk_sends_is_read() {
    let sent = json!({
        "image": {"uri": "python:3.11"}, "timeout": 600, "resourceLimits": {"cpu": "1", "memory": "2Gi"},
        "entrypoint": ["tail", "-f", "/dev/null"], "secureAccess": false, "env": {}, "metadata": {}, "extensions": {},
    });
    let read = create(&sent).unwrap();
    assert_eq!(read.timeout, Some(600));
    assert_eq!(read.entrypoint.unwrap().len(), 3);
}

#[test]
fn scalars_are_lenient_and_snake_case_is_read() {
    let value = with(|v| {
        v["timeout"] = json!("60");
        v["secure_access"] = json!("yes");
        v["resource_limits"] = json!({"cpu": "1"});
        v.as_object_mut().unwrap().remove("resourceLimits");
        v["unknown"] = json!(1);
    });
    let read = create(&value).unwrap();
    assert_eq!((read.timeout, read.secure_access), (Some(60), true));
    assert_eq!(create(&with(|v| v["timeout"] = json!(90.0))).unwrap().timeout, Some(90));
    assert_eq!(create(&with(|v| v["timeout"] = json!(null))).unwrap().timeout, None);
}

#[test]
fn every_malformed_field_is_reported() {
    let value = json!({
        "image": {"auth": {"username": 1}}, "timeout": 59, "env": {"A": 1, "B": null}, "metadata": {"a": true},
        "entrypoint": [], "volumes": [{"name": "X", "host": {"path": "relative"}, "mountPath": "relative"}],
        "lifecycle": {"nope": 1},
    });
    let found = places(&value);
    for wanted in [
        "body.image.uri missing",
        "body.image.auth.username string_type",
        "body.image.auth.password missing",
        "body.timeout greater_than_equal",
        "body.env.A string_type",
        "body.metadata.a string_type",
        "body.entrypoint too_short",
        "body.volumes.0.name string_pattern_mismatch",
        "body.volumes.0.host.path string_pattern_mismatch",
        "body.volumes.0.mountPath string_pattern_mismatch",
        "body.lifecycle.nope extra_forbidden",
    ] {
        assert!(found.iter().any(|f| f == wanted), "{wanted} is missing in {found:?}");
    }
}

#[test]
fn rules_across_fields_in_their_order() {
    let broken = |value: &Value| create(value).unwrap_err().fields()[0].msg.clone();
    let cases = [
        (with(|v| v["env"] = json!({"OPENSANDBOX_LIFECYCLE": "x"})), "OPENSANDBOX_LIFECYCLE"),
        (with(|v| v["templateId"] = json!("t")), "entrypoint, image, resourceLimits"),
        (json!({"templateId": "t"}), "timeout is required"),
        (json!({"extensions": {"poolRef": "p"}, "lifecycle": {}}), "lifecycle cannot"),
        (json!({"extensions": {"poolRef": "p"}, "snapshotId": "s"}), "snapshotId cannot"),
        (with(|v| v["credentialProxy"] = json!({"enabled": true})), "needs a networkPolicy"),
        (with(|v| v["snapshotId"] = json!("s")), "exactly one of image"),
        (with(|v| v["image"]["uri"] = json!(" ")), "exactly one of image"),
        (json!({"image": {"uri": "x"}, "resourceLimits": {}}), "entrypoint is required"),
        (json!({"image": {"uri": "x"}, "entrypoint": ["a"]}), "resourceLimits is required"),
    ];
    for (value, text) in cases {
        assert!(broken(&value).contains(text), "{text}: {}", broken(&value));
    }
    let ours =
        json!({"image": {"uri": "x"}, "resourceLimits": {}, "extensions": {"sandglass.entrypoint": "none"}});
    assert!(create(&ours).is_ok());
}

#[test]
fn a_volume_has_exactly_one_backend() {
    let volume = |v: Value| with(|body| body["volumes"] = json!([v.clone()]));
    assert_eq!(places(&volume(json!({"name": "a", "mountPath": "/a"}))), ["body.volumes.0 value_error"]);
    let both = json!({"name": "a", "mountPath": "/a", "host": {"path": "/x"}, "pvc": {"claimName": "c"}});
    assert_eq!(places(&volume(both)), ["body.volumes.0 value_error"]);
    assert!(create(&volume(json!({"name": "a", "mountPath": "/a", "host": {"path": "/x"}}))).is_ok());
}

fn any_json() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<f64>().prop_map(|n| json!(n)),
        ".{0,12}".prop_map(Value::from),
    ];
    leaf.prop_recursive(4, 40, 6, |inner| {
        let names = prop::sample::select(vec![
            "image",
            "uri",
            "auth",
            "timeout",
            "env",
            "volumes",
            "host",
            "path",
            "lifecycle",
            "preStart",
            "command",
            "extensions",
            "poolRef",
            "platform",
            "networkPolicy",
            "egress",
            "entrypoint",
            "resourceLimits",
            "x",
        ]);
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            prop::collection::btree_map(names, inner, 0..6)
                .prop_map(|m| Value::Object(m.into_iter().map(|(k, v)| (k.to_owned(), v)).collect())),
        ]
    })
}

proptest! {
    #[test]
    fn whatever_is_sent_is_answered(value in any_json()) {
        if let Err(error) = create(&value) {
            prop_assert_eq!(error.status, 422);
            prop_assert!(!error.fields().is_empty());
        }
    }
}
