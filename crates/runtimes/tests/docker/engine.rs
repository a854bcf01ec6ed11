//! The engine under the runtime, and somebody who acts on it with `docker`.

use std::path::PathBuf;

use async_trait::async_trait;
use sandglass_runtimes::docker::{DockerConfig, DockerRuntime, EgressConfig, EngineAddress};
use sandglass_sandbox::{SandboxId, SnapshotId};
use sandglass_testkit::runtime_contract::Hands;
use tokio::{process::Command, sync::OwnedMutexGuard};

/// Full lists are compared, so that one test at a time uses the engine.
static ALONE: std::sync::LazyLock<std::sync::Arc<tokio::sync::Mutex<()>>> =
    std::sync::LazyLock::new(std::sync::Arc::default);

pub struct Engine {
    host: String,
    pub image: String,
    dir: tempfile::TempDir,
    _alone: OwnedMutexGuard<()>,
}

impl Engine {
    /// `None`, and says so, where there is no engine.
    pub async fn alone() -> Option<Self> {
        let (Ok(host), Ok(image)) =
            (std::env::var("SANDGLASS_TEST_DOCKER"), std::env::var("SANDGLASS_TEST_DOCKER_IMAGE"))
        else {
            eprintln!("SKIPPED: no Docker engine; set SANDGLASS_TEST_DOCKER and SANDGLASS_TEST_DOCKER_IMAGE");
            return None;
        };
        let alone = ALONE.clone().lock_owned().await;
        let dir = tempfile::tempdir().unwrap();
        let engine = Self { host, image, dir, _alone: alone };
        assert_eq!(engine.everything().await, Vec::<String>::new(), "the engine is in use");
        Some(engine)
    }

    pub fn shared_dir(&self) -> PathBuf {
        self.dir.path().join("shared")
    }

    pub fn socket(&self) -> PathBuf {
        PathBuf::from(self.host.strip_prefix("unix://").expect("the engine listens on a unix socket"))
    }

    /// A runtime on this engine. All of them share the state directory, as a restarted server does.
    pub fn runtime(&self) -> DockerRuntime {
        self.runtime_at(EngineAddress::parse(Some(&self.host), None).unwrap())
    }

    pub fn runtime_at(&self, engine: EngineAddress) -> DockerRuntime {
        std::fs::create_dir_all(self.shared_dir()).unwrap();
        DockerRuntime::open(DockerConfig {
            engine,
            state_dir: self.dir.path().join("state"),
            side_facts_dir: self.dir.path().join("side"),
            network_mode: "bridge".into(),
            api_timeout: std::time::Duration::from_secs(60),
            host_ip: None,
            server_host: "127.0.0.1".into(),
            drop_capabilities: vec!["NET_ADMIN".into(), "SYS_ADMIN".into()],
            apparmor_profile: None,
            seccomp_profile: None,
            no_new_privileges: true,
            pids_limit: Some(4096),
            ports: 40000..=60000,
            publish_host: std::net::Ipv4Addr::LOCALHOST,
            reaches_containers: true,
            sandbox_binds: vec![],
            ulimits: vec![],
            egress: EgressConfig {
                image: None,
                mode: "dns".into(),
                limits: Default::default(),
                disable_ipv6: true,
                otlp_endpoint: None,
                readiness_timeout: std::time::Duration::from_secs(30),
                upstream_proxy: None,
            },
            secure_runtime: None,
            run_as_init: false,
            allowed_host_paths: vec![self.shared_dir()],
            ossfs_mount_root: self.dir.path().join("buckets"),
            execd_image: None,
        })
        .unwrap()
    }

    /// As a server leaves it that was killed while it asked for a commit.
    pub fn notes_a_commit(&self, id: SandboxId, snapshot: SnapshotId) {
        let note = self.dir.path().join("state/saving").join(id.to_string());
        std::fs::write(note, snapshot.to_string()).unwrap();
    }

    pub async fn docker(&self, arguments: &[&str]) -> String {
        let done =
            Command::new("docker").env("DOCKER_HOST", &self.host).args(arguments).output().await.unwrap();
        assert!(done.status.success(), "docker {arguments:?}: {}", String::from_utf8_lossy(&done.stderr));
        String::from_utf8_lossy(&done.stdout).into_owned()
    }

    /// Containers, volumes and snapshots on the engine.
    pub async fn everything(&self) -> Vec<String> {
        let mut found = Vec::new();
        for (kind, arguments) in [
            ("container", vec!["ps", "-a", "--format", "{{.Names}}"]),
            ("volume", vec!["volume", "ls", "-q"]),
            ("image", vec!["images", "opensandbox-snapshots", "-q"]),
        ] {
            let names = self.docker(&arguments).await;
            found.extend(names.lines().map(|name| format!("{kind} {name}")));
        }
        found
    }

    pub fn side_files(&self) -> Vec<String> {
        let side = self.dir.path().join("side");
        let mut found = Vec::new();
        for dir in [side.clone(), side.join("_expiration")] {
            for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
                if entry.path().is_file() {
                    found.push(entry.path().display().to_string());
                }
            }
        }
        found
    }
}

#[async_trait]
impl Hands for Engine {
    async fn kill(&self, id: SandboxId) {
        self.docker(&["kill", &format!("sandbox-{id}")]).await;
    }

    async fn pause(&self, id: SandboxId) {
        self.docker(&["pause", &format!("sandbox-{id}")]).await;
    }

    async fn remove(&self, id: SandboxId) {
        self.docker(&["rm", "-f", "-v", &format!("sandbox-{id}")]).await;
    }

    async fn interrupt_a_start(&self, id: SandboxId, image: &str) {
        let (name, label) = (format!("sandbox-{id}"), format!("opensandbox.io/id={id}"));
        self.docker(&["create", "--name", &name, "--label", &label, image, "sleep", "1000"]).await;
    }

    async fn has_volume(&self, name: &str) -> bool {
        self.docker(&["volume", "ls", "-q"]).await.lines().any(|line| line == name)
    }

    async fn remove_volume(&self, name: &str) {
        self.docker(&["volume", "rm", name]).await;
    }
}

impl Drop for Engine {
    /// The engine was empty before; a test that failed must not be the failure of the next.
    fn drop(&mut self) {
        if !std::thread::panicking() {
            return;
        }
        let run = |arguments: &[&str]| {
            let done =
                std::process::Command::new("docker").env("DOCKER_HOST", &self.host).args(arguments).output();
            done.map(|out| String::from_utf8_lossy(&out.stdout).into_owned()).unwrap_or_default()
        };
        for (list, remove) in [
            (&["ps", "-aq"][..], &["rm", "-f", "-v"][..]),
            (&["volume", "ls", "-q"], &["volume", "rm"]),
            (&["images", "opensandbox-snapshots", "--format", "{{.Repository}}:{{.Tag}}"], &["rmi"]),
        ] {
            for name in run(list).lines() {
                run(&[remove, &[name]].concat());
            }
        }
    }
}
