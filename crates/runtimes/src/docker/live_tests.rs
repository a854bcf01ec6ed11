//! Against a real engine: `SANDGLASS_TEST_DOCKER` is its address, `SANDGLASS_TEST_DOCKER_IMAGE` an image there that has a shell.

use std::{collections::BTreeMap, net::Ipv4Addr, sync::Mutex};

use bollard::query_parameters::CommitContainerOptions;
use sandglass_sandbox::{
    Clock, SystemClock,
    ports::{
        RuntimeErrorKind as Kind,
        runtime::{Condition, Exposure, Observation, Runtime, StartPlan},
    },
    spec::{Credentials, Entrypoint, Limits, MutableFacts, Secrets, Spec, Volume, VolumeSource},
};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::{host_config::tests as fixtures, observe::container_name, *};

pub(super) struct Bench {
    pub(super) runtime: DockerRuntime,
    pub(super) image: String,
    pub(super) dir: tempfile::TempDir,
    pub(super) made: Mutex<Vec<SandboxId>>,
}

/// `None`, and says so, where there is no engine.
pub(super) fn bench(change: impl FnOnce(&mut DockerConfig)) -> Option<Bench> {
    let (Ok(host), Ok(image)) =
        (std::env::var("SANDGLASS_TEST_DOCKER"), std::env::var("SANDGLASS_TEST_DOCKER_IMAGE"))
    else {
        eprintln!("SKIPPED: no Docker engine; set SANDGLASS_TEST_DOCKER and SANDGLASS_TEST_DOCKER_IMAGE");
        return None;
    };
    let dir = tempfile::tempdir().unwrap();
    let mut config = DockerConfig {
        engine: EngineAddress::parse(Some(&host), None).unwrap(),
        state_dir: dir.path().join("state"),
        side_facts_dir: dir.path().join("side"),
        publish_host: Ipv4Addr::LOCALHOST,
        ..fixtures::config()
    };
    change(&mut config);
    let runtime = DockerRuntime::open(config).unwrap();
    Some(Bench { runtime, image, dir, made: Mutex::default() })
}

impl Bench {
    pub(super) fn shared(&self) -> &Shared {
        &self.runtime.shared
    }

    pub(super) fn spec(&self, argv: &[&str]) -> Spec {
        let argv = argv.iter().map(|a| (*a).to_owned()).collect();
        Spec::new(self.image.clone(), Entrypoint::Command(argv))
    }

    pub(super) fn plan(spec: Spec) -> StartPlan {
        StartPlan {
            spec,
            facts: MutableFacts { expires_at: None, metadata: BTreeMap::from([("a".into(), "b".into())]) },
            created_at: SystemClock.now(),
            agent_token: "agent-token".into(),
            route_token: "route-token".into(),
            delivery: Vec::new(),
            root_agent: false,
        }
    }

    pub(super) async fn start(&self, spec: Spec) -> Result<Observation, RuntimeError> {
        self.start_with(spec, &Secrets::default()).await
    }

    pub(super) async fn start_with(
        &self,
        spec: Spec,
        secrets: &Secrets,
    ) -> Result<Observation, RuntimeError> {
        let id = SandboxId::random();
        self.made.lock().unwrap().push(id);
        self.shared().admit(&spec).await?;
        self.shared().prepare(&spec, secrets, &|_| {}).await?;
        self.shared().start(id, &Self::plan(spec), secrets).await
    }

    /// What a command says inside a box, through its agent.
    pub(super) async fn run(&self, observed: &Observation, command: &str) -> String {
        let address = self.shared().agent_address(observed).await.unwrap().unwrap();
        let body = serde_json::json!({ "command": command }).to_string();
        let mut stream = tokio::net::TcpStream::connect(address).await.unwrap();
        let request = format!(
            "POST /command HTTP/1.1\r\nHost: box\r\nConnection: close\r\nX-EXECD-ACCESS-TOKEN: agent-token\r\n\
             Content-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}",
            body.len()
        );
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        answer
    }

    /// Removes every box of this bench, and shows that nothing of them is left.
    pub(super) async fn close(self) {
        let ids = self.made.lock().unwrap().clone();
        for id in &ids {
            self.shared().remove_container(&container_name(*id)).await.unwrap();
            self.shared().remove_container(&sidecar::container_name(*id)).await.unwrap();
            self.shared().remove_volumes(*id, &[]).await.unwrap();
            self.shared().ports.release(*id);
        }
        self.nothing_is_left_of(&ids).await;
    }

    pub(super) async fn nothing_is_left_of(&self, ids: &[SandboxId]) {
        let all = self.shared().containers_with(labels::ID).await.unwrap();
        let names: Vec<_> = all.into_iter().map(|c| c.name).collect();
        let all = self.shared().client.call(|d| async move {
            d.list_volumes(None::<bollard::query_parameters::ListVolumesOptions>).await
        });
        let volumes: Vec<_> =
            all.await.unwrap().volumes.unwrap_or_default().into_iter().map(|v| v.name).collect();
        for id in ids {
            let id = id.to_string();
            assert!(!names.iter().any(|name| name.contains(&id)), "a container of {id} is left");
            assert!(!volumes.iter().any(|name| name.contains(&id)), "a volume of {id} is left");
        }
    }
}

pub(super) const IDLE: &[&str] = &["sleep", "1000"];

#[tokio::test]
async fn a_box_runs_and_answers_where_it_says() {
    let Some(bench) = bench(|_| {}) else { return };
    let limits = Limits { memory_bytes: Some(128 << 20), pids: Some(64), ..Limits::default() };
    let env = vec![("GREETING".to_owned(), "hello".to_owned())];
    let spec = Spec { limits, env, ..bench.spec(IDLE) };
    let seen = bench.start(spec.clone()).await.unwrap();
    assert_eq!(seen.condition, Condition::Running);
    assert_eq!(seen.spec, spec);
    assert_eq!(seen.entrypoint, IDLE);
    assert!(seen.address.is_some());
    assert!(matches!(seen.exposure, Exposure::Published { egress: None, .. }));
    let said = bench.run(&seen, "echo $GREETING-$OPENSANDBOX_ID-[$EXECD_ACCESS_TOKEN]").await;
    assert!(said.contains(&format!("hello-{}-[]", seen.id)), "{said}");
    let said = bench.run(&seen, "cat /proc/1/cmdline /proc/1/status").await;
    assert!(said.contains("execd") && said.contains("NoNewPrivs:\\t1"), "{said}");
    bench.close().await;
}

#[tokio::test]
async fn starting_twice_is_one_box_and_a_leftover_is_made_anew() {
    let Some(bench) = bench(|_| {}) else { return };
    let first = bench.start(bench.spec(IDLE)).await.unwrap();
    let plan = Bench::plan(bench.spec(IDLE));
    let again = bench.shared().start(first.id, &plan, &Secrets::default()).await.unwrap();
    assert_eq!((again.created_at, again.started_at), (first.created_at, first.started_at));
    let held = bench.shared().ports.taken_by(first.id);
    assert_eq!(held.len(), 2, "the second start kept ports of its own: {held:?}");

    // Made and never started: what a server leaves that was killed in between.
    let id = SandboxId::random();
    bench.made.lock().unwrap().push(id);
    let (name, image) = (container_name(id), bench.image.clone());
    let label = std::collections::HashMap::from([(labels::ID.to_owned(), id.to_string())]);
    let body = bollard::models::ContainerCreateBody {
        image: Some(image),
        labels: Some(label),
        cmd: Some(vec!["true".to_owned()]),
        ..Default::default()
    };
    let options =
        bollard::query_parameters::CreateContainerOptions { name: Some(name), ..Default::default() };
    bench
        .shared()
        .client
        .call(|d| async move { d.create_container(Some(options), body).await })
        .await
        .unwrap();
    let made = bench.shared().start(id, &plan, &Secrets::default()).await.unwrap();
    assert_eq!(made.condition, Condition::Running);
    bench.close().await;
}

#[tokio::test]
async fn a_stranger_of_the_same_name_is_left_alone() {
    let Some(bench) = bench(|_| {}) else { return };
    let id = SandboxId::random();
    let cmd = Some(vec!["true".to_owned()]);
    let body =
        bollard::models::ContainerCreateBody { image: Some(bench.image.clone()), cmd, ..Default::default() };
    let options = bollard::query_parameters::CreateContainerOptions {
        name: Some(container_name(id)),
        ..Default::default()
    };
    bench
        .shared()
        .client
        .call(|d| async move { d.create_container(Some(options), body).await })
        .await
        .unwrap();
    let plan = Bench::plan(bench.spec(IDLE));
    let refused = bench.shared().start(id, &plan, &Secrets::default()).await.unwrap_err();
    assert_eq!(refused.kind, Kind::Exists);
    assert!(bench.shared().inspect_container(&container_name(id)).await.unwrap().is_some());
    bench.shared().remove_container(&container_name(id)).await.unwrap();
    bench.close().await;
}

#[tokio::test]
async fn what_cannot_run_leaves_nothing() {
    let Some(bench) = bench(|_| {}) else { return };
    let failed = bench.start(bench.spec(&["/no/such/program"])).await.unwrap_err();
    assert_eq!((failed.kind, failed.phase.as_str()), (Kind::Invalid, "entrypoint"), "{failed}");
    let image = Spec { image: "127.0.0.1:9/none/such:1".into(), ..bench.spec(IDLE) };
    let secrets = Secrets {
        registry: Some(Credentials { username: "someone".into(), password: "hush-hush".into() }),
        ..Secrets::default()
    };
    let failed = bench.start_with(image, &secrets).await.unwrap_err();
    assert_eq!((failed.kind, failed.phase.as_str()), (Kind::ImagePull, "image"), "{failed}");
    assert!(!failed.message.contains("hush"), "{failed}");
    let ids = bench.made.lock().unwrap().clone();
    bench.nothing_is_left_of(&ids).await;
    assert!(ids.iter().all(|id| bench.shared().ports.taken_by(*id).is_empty()));
    bench.close().await;
}

#[tokio::test]
async fn an_entrypoint_that_ends_at_once_is_a_box_that_ended() {
    let Some(bench) = bench(|_| {}) else { return };
    for (script, code) in [("exit 0", 0), ("exit 7", 7), ("no-such-program", 127)] {
        let seen = bench.start(bench.spec(&["sh", "-c", script])).await.unwrap();
        let ended = async {
            loop {
                let now = bench.shared().observe(seen.id).await.unwrap().unwrap();
                if let Condition::Exited(exit) = now.condition {
                    return exit;
                }
            }
        };
        let exit = tokio::time::timeout(Duration::from_secs(60), ended).await.unwrap();
        assert_eq!(exit.code, Some(code), "{script}");
    }
    bench.close().await;
}

#[tokio::test]
async fn the_agent_is_uploaded_where_it_cannot_be_bound() {
    let Some(bench) = bench(|_| {}) else { return };
    let file = std::fs::read_dir(bench.dir.path().join("state/bin")).unwrap().next().unwrap().unwrap();
    std::fs::remove_file(file.path()).unwrap();
    let seen = bench.start(bench.spec(IDLE)).await.unwrap();
    assert_eq!(seen.condition, Condition::Running);
    assert!(bench.shared().agent.mount().is_none());
    assert!(bench.run(&seen, "echo up").await.contains("up"));
    bench.close().await;
}

#[tokio::test]
async fn ports_that_are_used_up_are_a_clear_end_and_come_back() {
    let Some(bench) = bench(|config| config.ports = 30100..=30104) else { return };
    let starts = (0..3).map(|_| bench.start(bench.spec(IDLE)));
    let outcomes = futures_util::future::join_all(starts).await;
    let (made, failed): (Vec<_>, Vec<_>) = outcomes.into_iter().partition(Result::is_ok);
    assert_eq!((made.len(), failed.len()), (2, 1));
    let error = failed.into_iter().next().unwrap().unwrap_err();
    assert_eq!((error.kind, error.phase.as_str()), (Kind::Exhausted, "ports"));

    // One goes behind our back: its ports are found again.
    let gone = made[0].as_ref().unwrap().id;
    bench.shared().remove_container(&container_name(gone)).await.unwrap();
    assert_eq!(bench.start(bench.spec(IDLE)).await.unwrap().condition, Condition::Running);
    bench.close().await;
}

#[tokio::test]
async fn volumes_are_mounted_checked_and_removed_again() {
    let allowed = tempfile::tempdir().unwrap();
    let root = allowed.path().canonicalize().unwrap();
    let Some(bench) = bench(|config| config.allowed_host_paths = vec![root.clone()]) else { return };
    let claim = format!("claim-{}", uuid::Uuid::new_v4());
    let named = |create_if_missing: bool, sub_path: Option<&str>| Volume {
        name: "named".into(),
        source: VolumeSource::Named {
            claim: claim.clone(),
            sub_path: sub_path.map(PathBuf::from),
            create_if_missing,
            delete_with_sandbox: true,
        },
        target: "/named".into(),
        read_only: false,
    };
    let host = |path: PathBuf| Volume {
        name: "host".into(),
        source: VolumeSource::Host { path },
        target: "/host".into(),
        read_only: true,
    };
    let with = |volumes: Vec<Volume>| Spec { volumes, ..bench.spec(IDLE) };

    let missing = bench.start(with(vec![named(false, None)])).await.unwrap_err();
    assert_eq!((missing.kind, missing.phase.as_str()), (Kind::Invalid, "volume-missing"));
    std::os::unix::fs::symlink("/etc", root.join("out")).unwrap();
    let refused = bench.start(with(vec![host(root.join("out"))])).await.unwrap_err();
    assert_eq!((refused.kind, refused.phase.as_str()), (Kind::Invalid, "volume-host"));

    let mounted =
        bench.start(with(vec![host(root.join("new/deep")), named(true, Some("a/b"))])).await.unwrap();
    assert!(root.join("new/deep").is_dir());
    let said =
        bench.run(&mounted, "echo x > /named/file && echo written; touch /host/x || echo refused").await;
    assert!(said.contains("written") && said.contains("refused"), "{said}");
    let reader = bench.start(with(vec![named(false, None)])).await.unwrap();
    assert!(bench.run(&reader, "ls /named/a/b").await.contains("file"));

    // A failure after the volume was made takes it away again; here the entrypoint is the failure.
    let other = format!("claim-{}", uuid::Uuid::new_v4());
    let mut volume = named(true, None);
    if let VolumeSource::Named { claim, .. } = &mut volume.source {
        claim.clone_from(&other);
    }
    let failing = Spec { volumes: vec![volume], ..bench.spec(&["/no/such/program"]) };
    bench.start(failing).await.unwrap_err();
    let gone =
        bench.shared().client.call(|d| async move { d.inspect_volume(&other).await }).await.unwrap_err();
    assert!(gone.is_absent());
    bench.shared().remove_container(&container_name(reader.id)).await.unwrap();
    bench.close().await;
}

#[tokio::test]
async fn a_box_of_a_committed_image_inherits_no_system_label() {
    let Some(bench) = bench(|_| {}) else { return };
    let source = bench.start(bench.spec(IDLE)).await.unwrap();
    let repo = format!("sandglass-test-{}", uuid::Uuid::new_v4());
    let options = CommitContainerOptions {
        container: Some(container_name(source.id)),
        repo: Some(repo.clone()),
        ..CommitContainerOptions::default()
    };
    let config = bollard::models::ContainerConfig {
        labels: Some(std::collections::HashMap::from([(
            labels::EGRESS_TOKEN.to_owned(),
            "stolen".to_owned(),
        )])),
        ..Default::default()
    };
    bench.shared().client.call(|d| async move { d.commit_container(options, config).await }).await.unwrap();
    let copy = bench.start(Spec { image: repo.clone(), ..bench.spec(IDLE) }).await.unwrap();
    assert_eq!(copy.egress_token, None);
    let container = bench.shared().inspect_container(&container_name(copy.id)).await.unwrap().unwrap();
    assert_eq!(container.labels[labels::EGRESS_TOKEN], "");
    assert_eq!(container.labels[labels::ID], copy.id.to_string());
    let shared = bench.runtime.shared.clone();
    bench.close().await;
    let removed = shared.client.call(|d| async move {
        d.remove_image(&repo, None::<bollard::query_parameters::RemoveImageOptions>, None).await
    });
    removed.await.unwrap();
}

/// Mounts memory, if the key is the right one.
const MOUNTING_PROGRAM: &str = r#"#!/bin/sh
grep -q '^--oss_access_key_secret=right$' "$4" || { cat "$4" >&2; exit 1; }
mount -t tmpfs bucket "$2" && echo from-the-bucket > "$2/file"
"#;

#[tokio::test]
async fn a_bucket_is_mounted_once_for_a_key_and_unmounted_after_its_last_box() {
    use std::os::unix::fs::PermissionsExt;

    let mounts = tempfile::tempdir().unwrap();
    let Some(mut bench) = bench(|config| config.ossfs_mount_root = mounts.path().to_owned()) else { return };
    let program = bench.dir.path().join("ossfs2");
    std::fs::write(&program, MOUNTING_PROGRAM).unwrap();
    std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
    let programs = bench.dir.path().to_owned();
    Arc::get_mut(&mut bench.runtime.shared).unwrap().object_stores.programs = programs;

    let volume = Volume {
        name: "data".into(),
        source: VolumeSource::ObjectStore {
            bucket: "data".into(),
            endpoint: "oss.example.com".into(),
            version: 2,
            options: vec![],
            sub_path: None,
        },
        target: "/data".into(),
        read_only: true,
    };
    let spec = Spec { volumes: vec![volume], ..bench.spec(IDLE) };
    let key = |secret: &str| {
        let key = sandglass_sandbox::spec::ObjectStoreKey { id: "AKID-1".into(), secret: secret.into() };
        Secrets { object_stores: BTreeMap::from([("data".to_owned(), key)]), ..Secrets::default() }
    };
    let mounted = || std::fs::read_dir(mounts.path()).unwrap().count();

    let failed = bench.start_with(spec.clone(), &key("wrong-secret")).await.unwrap_err();
    assert_eq!((failed.kind, failed.phase.as_str()), (Kind::Failed, "ossfs"), "{failed}");
    assert!(!failed.message.contains("wrong-secret") && !failed.message.contains("AKID-1"), "{failed}");
    assert_eq!(mounted(), 0);

    let first = bench.start_with(spec.clone(), &key("right")).await.unwrap();
    let second = bench.start_with(spec, &key("right")).await.unwrap();
    assert_eq!(mounted(), 1);
    for seen in [&first, &second] {
        assert!(bench.run(seen, "cat /data/file").await.contains("from-the-bucket"));
    }
    assert_eq!(std::fs::read_dir(bench.dir.path().join("state/keys")).unwrap().count(), 0, "a key is left");
    // Another server process knows of the users by the containers alone.
    bench.shared().object_stores.forget_users();
    bench.runtime.remove(first.id, Duration::ZERO).await.unwrap();
    assert!(bench.run(&second, "cat /data/file").await.contains("from-the-bucket"));
    bench.runtime.remove(second.id, Duration::ZERO).await.unwrap();
    assert_eq!(mounted(), 0);
    bench.close().await;
}
