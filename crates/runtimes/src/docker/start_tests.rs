use std::collections::BTreeMap;

use sandglass_sandbox::{
    Timestamp,
    spec::{Egress, MutableFacts, NetworkPolicy},
};

use super::{
    super::{DockerConfig, DockerRuntime, EngineAddress, host_config::tests as fixtures},
    *,
};

struct Bench {
    runtime: DockerRuntime,
    _dir: tempfile::TempDir,
}

fn bench(change: impl FnOnce(&mut DockerConfig)) -> Bench {
    let dir = tempfile::tempdir().unwrap();
    let mut config = fixtures::config();
    config.engine = EngineAddress::Unix(dir.path().join("none.sock"));
    config.state_dir = dir.path().join("state");
    config.side_facts_dir = dir.path().join("side");
    change(&mut config);
    Bench { runtime: DockerRuntime::open(config).unwrap(), _dir: dir }
}

fn plan(spec: Spec) -> StartPlan {
    StartPlan {
        spec,
        facts: MutableFacts { expires_at: None, metadata: BTreeMap::from([("a".into(), "b".into())]) },
        created_at: Timestamp::clamped(1_893_456_000_000),
        agent_token: "agent-secret".into(),
        route_token: "route-secret".into(),
        delivery: Vec::new(),
        root_agent: false,
    }
}

fn parts(plan: &StartPlan) -> Parts<'_> {
    let argv = vec!["sleep".to_owned(), "1".to_owned()];
    Parts { id: SandboxId::random(), plan, image: Arc::default(), argv, mounts: vec![], sidecar: None }
}

#[test]
fn the_agent_is_the_first_process_and_the_entrypoint_its_argument() {
    let bench = bench(|_| {});
    let plan = plan(fixtures::spec());
    let parts = parts(&plan);
    let made = Made::default();
    let agent = bench.runtime.shared.agent.mount();
    let body = bench.runtime.shared.body(&parts, &made, None, agent).unwrap();
    assert_eq!(body.entrypoint.unwrap(), ["/opt/opensandbox/execd", "--init", "--"]);
    assert_eq!(body.cmd.unwrap(), ["sleep", "1"]);
    assert_eq!(body.image.as_deref(), Some("busybox"));
    let labels = body.labels.unwrap();
    assert_eq!(labels["opensandbox.io/id"], parts.id.to_string());
    assert_eq!(labels["a"], "b");
    let host = body.host_config.unwrap();
    assert_eq!(host.network_mode.as_deref(), Some("bridge"));
    let mounts = host.mounts.unwrap();
    assert_eq!(mounts.len(), 1);
    assert_eq!((mounts[0].target.as_deref(), mounts[0].read_only), (Some(agent::TARGET), Some(true)));
    assert_eq!((host.privileged, host.restart_policy, host.auto_remove), (None, None, None));
}

#[test]
fn the_agent_is_root_where_it_has_to_be_and_runs_everything_as_the_images_user() {
    let bench = bench(|_| {});
    let image = |user: &str| Arc::new(ImageFacts { user: user.to_owned(), ..ImageFacts::default() });
    let started = |root_agent: bool, user: &str| {
        let plan = StartPlan { root_agent, ..plan(fixtures::spec()) };
        let parts = Parts { image: image(user), ..parts(&plan) };
        let body = bench.runtime.shared.body(&parts, &Made::default(), None, None).unwrap();
        (body.user, body.entrypoint.unwrap().join(" "))
    };
    let plain = (None, "/opt/opensandbox/execd --init --".to_owned());
    assert_eq!(started(false, "ann"), plain);
    assert_eq!(started(true, ""), plain);
    let apart = (Some("0:0".to_owned()), "/opt/opensandbox/execd --init --user=ann --".to_owned());
    assert_eq!(started(true, "ann"), apart);
}

#[test]
fn a_box_with_a_sidecar_has_no_ports_of_its_own() {
    let bench = bench(|_| {});
    let egress = Egress { policy: NetworkPolicy::default(), credential_proxy: true, env: vec![] };
    let plan = plan(Spec { egress: Some(egress), ..fixtures::spec() });
    let parts = Parts { sidecar: Some("abc".into()), ..parts(&plan) };
    let made = Made { sidecar: true, ..Made::default() };
    let body = bench.runtime.shared.body(&parts, &made, None, None).unwrap();
    let host = body.host_config.unwrap();
    assert_eq!(host.network_mode.as_deref(), Some("container:abc"));
    assert_eq!((host.port_bindings, body.exposed_ports, body.networking_config), (None, None, None));
    assert_eq!(host.binds.unwrap(), [format!("opensandbox-runtime-{}:/opt/opensandbox:rw", parts.id)]);
    assert!(body.env.unwrap().contains(&format!("{}=true", crate::enforcement::TRANSPARENT)));
}

#[test]
fn the_runtime_volume_gives_way_to_what_was_asked_for() {
    let id = SandboxId::random();
    let mut host = HostConfig { binds: Some(vec!["/x:/opt/opensandbox:ro".into()]), ..HostConfig::default() };
    share_runtime_volume(&mut host, &[], id);
    assert_eq!(host.binds.unwrap().len(), 1);
    let mut host = HostConfig::default();
    share_runtime_volume(&mut host, &[Mount { target: Some(agent::HOME.into()), ..Mount::default() }], id);
    assert!(host.binds.unwrap().is_empty());
}

#[test]
fn the_environment_ends_with_the_id_and_cannot_fake_it() {
    let env = [("A", "1"), ("OPENSANDBOX_ID", "x"), ("A", "2"), ("EXECD_ACCESS_TOKEN", "mine")];
    let spec = Spec { env: env.map(|(k, v)| (k.to_owned(), v.to_owned())).to_vec(), ..fixtures::spec() };
    let plan = plan(spec);
    let parts = parts(&plan);
    let id = format!("OPENSANDBOX_ID={}", parts.id);
    assert_eq!(
        environment(&parts, &[], true),
        ["A=2", "EXECD_INIT=1", "EXECD_ACCESS_TOKEN=agent-secret", &id]
    );
    assert_eq!(environment(&parts, &[], false).last(), Some(&id));
}

#[test]
fn failures_of_a_start_are_told_apart() {
    use RuntimeErrorKind as Kind;
    let table = [
        (
            "OCI runtime create failed: exec /opt/opensandbox/execd: exec format error: unknown",
            Kind::Failed,
            "agent",
        ),
        (
            "OCI runtime create failed: container_linux.go:380: starting container process caused: exec: \"/opt/opensandbox/execd\": stat /opt/opensandbox/execd: no such file or directory: unknown",
            Kind::Failed,
            "agent-copy",
        ),
        (
            "OCI runtime create failed: runc: exec: \"nope\": executable file not found in $PATH: unknown",
            Kind::Invalid,
            "entrypoint",
        ),
        ("OCI runtime create failed: something else", Kind::Invalid, "start"),
    ];
    for (message, kind, phase) in table {
        let error = of_start(&Failure::Refused { status: 400, message: message.into() });
        assert_eq!((error.kind, error.phase.as_str()), (kind, phase), "{message}");
    }
}

#[test]
fn only_the_agent_speaks_for_the_agent() {
    let words = |text: &[&str]| text.iter().map(|line| (*line).to_owned()).collect::<Vec<_>>();
    let complaint = agent_complaint(&words(&["hello", "execd: nope: No such file or directory"]));
    assert_eq!(complaint.as_deref(), Some("nope: No such file or directory"));
    assert_eq!(agent_complaint(&words(&["sh: nope: not found"])), None);
}

#[tokio::test]
async fn without_an_engine_everything_says_so_and_nothing_hangs() {
    let bench = bench(|_| {});
    let shared = &bench.runtime.shared;
    let id = SandboxId::random();
    let plan = plan(fixtures::spec());
    let secrets = Secrets::default();
    let errors = [
        shared.admit(&plan.spec).await.unwrap_err(),
        shared.prepare(&plan.spec, &secrets, &|_| {}).await.unwrap_err(),
        shared.start(id, &plan, &secrets).await.unwrap_err(),
    ];
    for error in errors {
        assert_eq!((error.kind, error.phase.as_str()), (RuntimeErrorKind::Unavailable, "engine"), "{error}");
        assert!(!error.message.contains("secret"));
    }
    assert!(shared.making().is_empty());
}
