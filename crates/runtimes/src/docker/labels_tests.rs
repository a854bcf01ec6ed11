use std::time::Duration;

use sandglass_sandbox::spec::Entrypoint;

use super::{super::Published, *};

fn map(pairs: &[(&str, &str)]) -> HashMap<String, String> {
    pairs.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect()
}

fn plan() -> StartPlan {
    let mut spec = Spec::new("python:3.12", Entrypoint::Command(vec!["sleep".into(), "9".into()]));
    spec.env = vec![("A".into(), "b".into())];
    spec.tenant = Some("team-a".into());
    spec.platform = Some(Platform { os: "linux".into(), arch: "amd64".into() });
    spec.extensions = BTreeMap::from([
        ("access.renew.extend.seconds".into(), "600".into()),
        ("opensandbox.extensions.team".into(), "x".into()),
        ("bootstrap.execd.isolation".into(), "enable".into()),
    ]);
    StartPlan {
        spec,
        facts: MutableFacts {
            expires_at: Some(Timestamp::clamped(1_893_456_000_250)),
            metadata: BTreeMap::from([
                ("project".into(), "p".into()),
                ("com.docker.compose.project".into(), "mine".into()),
                ("opensandbox.io/id".into(), "stolen".into()),
            ]),
        },
        created_at: Timestamp::clamped(1_893_455_000_000),
        agent_token: "agent-secret".into(),
        route_token: "route-secret".into(),
        delivery: Vec::new(),
        root_agent: false,
    }
}

fn plainly(id: SandboxId, plan: &StartPlan) -> HashMap<String, String> {
    for_create(id, plan, &[], &Made::default(), &HashMap::new())
}

#[test]
fn what_is_written_reads_back_and_is_what_the_reference_reads() {
    let (id, plan) = (SandboxId::random(), plan());
    let argv = vec!["sleep".to_owned(), "9".to_owned()];
    let volumes = vec!["v1".to_owned(), "v2".to_owned()];
    let made = Made {
        published: Some(Published { agent: 40001, http: 40002, egress: None }),
        egress_token: Some("tok".into()),
        volumes: volumes.clone(),
        object_stores: vec!["/mnt/a/b".into()],
        ..Made::default()
    };
    let labels = for_create(id, &plan, &argv, &made, &HashMap::new());
    let expected = [
        (ID, id.to_string()),
        (EXPIRES_AT, "2030-01-01T00:00:00.250000+00:00".to_owned()),
        (TENANT, "team-a".to_owned()),
        (PLATFORM_OS, "linux".to_owned()),
        (PLATFORM_ARCH, "amd64".to_owned()),
        (RENEW_SECONDS, "600".to_owned()),
        ("opensandbox.io/extensions.team", "x".to_owned()),
        (AGENT_PORT, "40001".to_owned()),
        (HTTP_PORT, "40002".to_owned()),
        (EGRESS_TOKEN, "tok".to_owned()),
        (MANAGED_VOLUMES, r#"["v1","v2"]"#.to_owned()),
        (OSSFS_MOUNTS, r#"["/mnt/a/b"]"#.to_owned()),
        ("project", "p".to_owned()),
    ];
    for (key, value) in &expected {
        assert_eq!(labels.get(*key), Some(value), "{key}");
    }
    // Beside those only the record: nothing that a user gave gets a system's name.
    assert_eq!(labels.len(), expected.len() + 1, "{:?}", labels.keys());

    let parsed = parse(&labels).unwrap();
    let record = parsed.record.as_ref().unwrap();
    assert_eq!((&record.spec, &record.argv), (&plan.spec, &argv));
    assert_eq!((record.agent_token.as_str(), record.route_token.as_str()), ("agent-secret", "route-secret"));
    assert_eq!((parsed.id, &parsed.facts), (id, &plan.facts));
    assert_eq!(parsed.published, Some((40001, 40002)));
    assert_eq!((parsed.managed_volumes, parsed.ossfs_mounts), (volumes, made.object_stores));
}

#[test]
fn debug_texts_keep_the_tokens() {
    let labels = plainly(SandboxId::random(), &plan());
    let text = format!("{:?}", parse(&labels).unwrap());
    assert!(!text.contains("secret"), "{text}");
}

#[test]
fn a_sandbox_without_an_expiry_is_marked_for_manual_cleanup() {
    let mut plan = plan();
    plan.facts.expires_at = None;
    let mut labels = plainly(SandboxId::random(), &plan);
    assert_eq!(labels.get(MANUAL).map(String::as_str), Some("true"));
    assert!(!labels.contains_key(EXPIRES_AT));
    labels.remove(RECORD);
    assert_eq!(parse(&labels).unwrap().facts.expires_at, None);
}

#[test]
fn what_an_image_brings_along_is_overridden_or_blanked() {
    let made = Made { egress_token: Some("t".into()), ..Made::default() };
    let source = for_create(SandboxId::random(), &plan(), &[], &made, &HashMap::new());
    let mut plan = plan();
    (plan.facts.expires_at, plan.spec.platform) = (None, None);
    plan.spec.extensions.clear();
    let id = SandboxId::random();
    let restored = for_create(id, &plan, &[], &Made::default(), &source);
    for key in source.keys().filter(|k| k.starts_with(SYSTEM)) {
        assert!(restored.contains_key(key), "{key} would be inherited");
    }
    // As the engine merges them: the container's own value wins, also an empty one.
    let mut merged = source.clone();
    merged.extend(restored);
    let parsed = parse(&merged).unwrap();
    assert_eq!((parsed.id, parsed.record.unwrap().id), (id, id));
    assert_eq!((parsed.egress_token, parsed.platform, parsed.extensions.len()), (None, None, 0));
    merged.remove(RECORD);
    assert_eq!(parse(&merged).unwrap().facts.expires_at, None);
}

#[test]
fn a_record_of_another_sandbox_is_not_believed() {
    let mut labels = plainly(SandboxId::random(), &plan());
    let id = SandboxId::random();
    labels.insert(ID.into(), id.to_string());
    let parsed = parse(&labels).unwrap();
    assert_eq!((parsed.id, parsed.record), (id, None));
    labels.insert(RECORD.into(), "{\"v\":1".into());
    assert_eq!(parse(&labels).unwrap().record, None);
}

#[test]
fn containers_of_the_reference_are_read_by_its_rules() {
    let id = "0f04bd3a-82ce-431d-8ec7-0a4b0ca245d3";
    let labels = map(&[
        (ID, id),
        (EXPIRES_AT, "2026-11-29T19:12:13.123456+00:00"),
        (AGENT_PORT, "45123"),
        (HTTP_PORT, "45124"),
        ("opensandbox.io/extensions.k", "v"),
        (RENEW_SECONDS, " 300 "),
        ("project", "demo"),
        ("org.opencontainers.image.version", "22.04"),
        ("com.docker.compose.project", "x"),
        ("maintainer", "from the image"),
    ]);
    let parsed = parse(&labels).unwrap();
    assert_eq!(parsed.id.to_string(), id);
    assert_eq!(parsed.facts.expires_at.unwrap().to_string(), "2026-11-29T19:12:13.123000Z");
    let metadata: Vec<_> = parsed.facts.metadata.iter().map(|(k, v)| (k.as_str(), v.as_str())).collect();
    assert_eq!(metadata, [("maintainer", "from the image"), ("project", "demo")]);
    let extensions: Vec<_> = parsed.extensions.iter().map(|(k, v)| (k.as_str(), v.as_str())).collect();
    assert_eq!(extensions, [("access.renew.extend.seconds", "300"), ("opensandbox.extensions.k", "v")]);
    assert_eq!((parsed.published, parsed.platform), (Some((45123, 45124)), None));
}

#[test]
fn a_restored_sandbox_of_the_reference_does_not_take_over_the_expiry_of_its_source() {
    let id = SandboxId::random().to_string();
    let labels = map(&[
        (ID, &id),
        (SNAPSHOT, "0f04bd3a-82ce-431d-8ec7-0a4b0ca245d3"),
        (MANUAL, "true"),
        (EXPIRES_AT, "2026-11-29T19:12:13.123456+00:00"),
    ]);
    assert_eq!(parse(&labels).unwrap().facts.expires_at, None);
}

#[test]
fn nonsense_in_labels_is_absent() {
    for no_sandbox in [map(&[]), map(&[(ID, "")]), map(&[(ID, "../x")])] {
        assert_eq!(parse(&no_sandbox), None);
    }
    let id = SandboxId::random().to_string();
    let labels = map(&[
        (ID, &id),
        (EXPIRES_AT, "soon"),
        (AGENT_PORT, "0"),
        (HTTP_PORT, "x"),
        (MANAGED_VOLUMES, "[1"),
        (OSSFS_MOUNTS, ""),
        (EGRESS_TOKEN, ""),
    ]);
    let parsed = parse(&labels).unwrap();
    assert_eq!((parsed.facts.expires_at, parsed.published, parsed.egress_token), (None, None, None));
    assert!(parsed.managed_volumes.is_empty() && parsed.ossfs_mounts.is_empty());
}

#[test]
fn instants_in_every_spelling_that_occurs() {
    let table = [
        ("2026-11-29T19:12:13.123456789Z", Some(1_795_979_533_123)),
        ("2026-11-29T19:12:13Z", Some(1_795_979_533_000)),
        ("2026-11-29T20:12:13+01:00", Some(1_795_979_533_000)),
        ("2026-11-29T19:12:13.5", Some(1_795_979_533_500)),
        ("0001-01-01T00:00:00Z", None),
        ("", None),
        ("yesterday", None),
    ];
    for (text, expected) in table {
        assert_eq!(instant(text).map(Timestamp::as_millis), expected, "{text}");
    }
    let at = Timestamp::clamped(1_795_979_533_123).checked_add(Duration::from_millis(1)).unwrap();
    assert_eq!(instant(&spell(at)), Some(at));
}

#[test]
fn what_a_builder_runs_is_nobodys_sandbox() {
    let id = SandboxId::random();
    let by_builder = format!("sha256:{}", "ab".repeat(32));
    for (label, own) in [(ID, format!("sandbox-{id}")), (SIDECAR_FOR, format!("sandbox-egress-{id}"))] {
        let labels = HashMap::from([(label.to_owned(), id.to_string()), (TENANT.to_owned(), "a".to_owned())]);
        assert!(!are_genuine(&labels, "stoic_shaw", &by_builder), "{label}");
        assert!(are_genuine(&labels, &own, &by_builder), "{label}: made from an id, under its own name");
        assert!(are_genuine(&labels, "by-hand", "busybox:1"), "{label}");
    }
    assert!(are_genuine(&HashMap::new(), "stoic_shaw", &by_builder), "nothing is claimed");
}
