//! Sandboxes from repositories over the whole router: a fake runtime, fake images, and agents that speak over real sockets.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
    time::Duration,
};

use async_trait::async_trait;
use sandglass_bridge::{
    agent::{
        Address, Bridge, Config, CredentialError, HttpTransport, Identity, Jitter, Notice, Pace, VitalSigns,
        Vitals,
    },
    ring::{Draft, Ring},
    wire::{BootId, Class, FatalReport, GitCredentialRequest, Outcome, Refusal, Secret},
};
use sandglass_repository::{HostAllowList, Policy, RepositorySpec, Source, SpecError, WorkspaceRoot};
use sandglass_sandbox::{
    Clock, ImageBuildId, ImageId, SandboxId,
    lifecycle::{
        boot::{Failure, Reason},
        intent::Progress,
    },
    ports::Store,
    source::{CacheResult, FoundImage, ImageMatch, ImageNews},
    workspace,
};
use sandglass_server::{
    engine::stages::Timing,
    workspace::{Images, Wanted},
};
use sandglass_testkit::Fault;
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::sync::watch;

use crate::service::Service;

pub(crate) const URL: &str = "https://git.example.com/acme/web.git";

/// What comes of looking for an image.
#[derive(Debug, Clone)]
pub(crate) enum Fate {
    Found,
    /// A build is waited for, until the fate changes.
    Building,
    Fails(Failure),
}

pub(crate) struct FakeImages {
    pub(crate) fate: watch::Sender<Fate>,
    build: ImageBuildId,
    /// The image that is found, and what the runtime calls it.
    image: Mutex<(ImageId, String)>,
    /// The newest image of the repository, when it is not the one that is found.
    pub(crate) newest: Mutex<Option<ImageId>>,
    /// What is found once an image turned out to be unusable.
    pub(crate) instead: Mutex<Option<String>>,
    pub(crate) asked: AtomicUsize,
    released: Mutex<Vec<SandboxId>>,
    /// Who holds which image.
    pub(crate) holds: Mutex<BTreeSet<(SandboxId, ImageId)>>,
}

impl FakeImages {
    fn new(fate: Fate) -> Arc<Self> {
        Arc::new(Self {
            fate: watch::Sender::new(fate),
            build: ImageBuildId::random(),
            image: Mutex::new((ImageId::random(), "built:1".into())),
            newest: Mutex::default(),
            instead: Mutex::default(),
            asked: AtomicUsize::new(0),
            released: Mutex::default(),
            holds: Mutex::default(),
        })
    }

    /// From now on this one is found. It is of `newest`, as far as anybody asks.
    pub(crate) fn moves(&self, reference: &str) -> ImageId {
        let image = ImageId::random();
        *self.image.lock().unwrap() = (image, reference.to_owned());
        *self.newest.lock().unwrap() = Some(image);
        image
    }

    fn released(&self) -> usize {
        self.released.lock().unwrap().len()
    }
}

#[async_trait]
impl Images for FakeImages {
    fn check(&self, repository: &RepositorySpec) -> Result<Source, SpecError> {
        let hosts = HostAllowList::parse(["git.example.com"]).unwrap();
        let root = WorkspaceRoot::default();
        repository.validate(&Policy { hosts, allow_file: false, allow_http: false, root })
    }

    async fn find(
        &self,
        wanted: Wanted<'_>,
        told: &(dyn Fn(ImageNews) + Send + Sync),
    ) -> Result<FoundImage, Failure> {
        self.asked.fetch_add(1, SeqCst);
        let mut fate = self.fate.subscribe();
        loop {
            match fate.borrow_and_update().clone() {
                Fate::Found => break,
                Fate::Fails(failure) => return Err(failure),
                Fate::Building => told(ImageNews::Stands(Progress::Building { build: self.build })),
            }
            fate.changed().await.unwrap();
        }
        let (image, reference) = self.image.lock().unwrap().clone();
        self.holds.lock().unwrap().insert((wanted.sandbox, image));
        let commits = wanted.asked.repositories.iter().map(|r| (r.path.clone(), "1".repeat(40)));
        Ok(FoundImage {
            reference,
            image: Some(image),
            build: Some(self.build),
            cache: Some(CacheResult::Built),
            fit: Some(ImageMatch::Exact),
            commits: commits.collect(),
            refs: wanted
                .asked
                .repositories
                .iter()
                .map(|r| (r.path.clone(), "refs/heads/main".into()))
                .collect(),
            source: workspace::Source::Image,
            user: None,
            setup: vec![hook("web/app")],
            start: Vec::new(),
            env: BTreeMap::from([("RECIPE".into(), "yes".into())]),
        })
    }

    async fn newest(&self, image: ImageId) -> Option<ImageId> {
        Some(self.newest.lock().unwrap().unwrap_or(image))
    }

    async fn made(&self, _: ImageId, good: bool) {
        if !good && let Some(reference) = self.instead.lock().unwrap().take() {
            self.moves(&reference);
        }
    }

    async fn release(
        &self,
        sandbox: SandboxId,
        _: Option<ImageBuildId>,
        image: Option<ImageId>,
    ) -> Result<(), String> {
        self.released.lock().unwrap().push(sandbox);
        self.holds.lock().unwrap().retain(|(holder, held)| *holder != sandbox || Some(*held) != image);
        Ok(())
    }

    async fn release_absent(&self, present: &(dyn Fn(SandboxId) -> bool + Sync)) {
        self.holds.lock().unwrap().retain(|(holder, _)| present(*holder));
    }
}

fn hook(label: &str) -> workspace::Hook {
    workspace::Hook {
        label: label.into(),
        command: workspace::Command { command: vec!["true".into()], ..workspace::Command::default() },
        timeout_seconds: None,
        cap_seconds: None,
        on_failure: workspace::OnFailure::Fail,
    }
}

struct Quiet;

impl Vitals for Quiet {
    fn read(&self) -> VitalSigns {
        VitalSigns::default()
    }
}

pub(crate) struct Stage {
    pub(crate) service: Service,
    pub(crate) images: Arc<FakeImages>,
    pub(crate) dir: TempDir,
}

impl Stage {
    pub(crate) async fn new(fate: Fate) -> Self {
        let dir = TempDir::new().unwrap();
        let images = FakeImages::new(fate);
        let service = Service::with_repositories(images.clone(), dir.path().to_path_buf()).await;
        Self { service, images, dir }
    }

    pub(crate) async fn create(&self, body: Value) -> String {
        let made = self.service.call("POST", "/v1/sandboxes", body).await;
        assert_eq!(made.status, 202, "{}", made.body);
        let id = made.body["id"].as_str().unwrap().to_owned();
        assert_eq!(made.headers["location"], format!("/v1/sandboxes/{id}"));
        id
    }

    pub(crate) async fn get(&self, id: &str) -> Value {
        self.service.get(&format!("/v1/sandboxes/{id}")).await.body
    }

    pub(crate) async fn delete(&self, id: &str) -> u16 {
        self.service.call("DELETE", &format!("/v1/sandboxes/{id}"), Value::Null).await.status
    }

    /// Waits until the sandbox shows this state and reason.
    pub(crate) async fn until(&self, id: &str, state: &str, reason: &str) -> Value {
        self.until_seen(id, |seen| seen["status"]["state"] == state && seen["status"]["reason"] == reason)
            .await
    }

    /// Waits until the sandbox is seen as wanted.
    pub(crate) async fn until_seen(&self, id: &str, wanted: impl Fn(&Value) -> bool) -> Value {
        let look = async {
            loop {
                let seen = self.get(id).await;
                if wanted(&seen) {
                    return seen;
                }
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        match tokio::time::timeout(Duration::from_secs(600), look).await {
            Ok(seen) => seen,
            Err(_) => panic!("it never came so far, but is {}", self.get(id).await),
        }
    }

    pub(crate) fn files(&self, id: &str) -> PathBuf {
        self.dir.path().join("workspaces").join(id)
    }

    pub(crate) fn agent(&self, id: &str) -> Bridge {
        agent(self.dir.path(), id)
    }

    pub(crate) async fn types(&self, id: &str) -> Vec<String> {
        let page = self.service.get(&format!("/v1/sandboxes/{id}/events?limit=1000")).await.body;
        page["items"].as_array().unwrap().iter().map(|e| e["type"].as_str().unwrap().to_owned()).collect()
    }

    /// Waits until its history has an event of this type.
    pub(crate) async fn until_told(&self, id: &str, kind: &str) {
        let told = async {
            while !self.types(id).await.iter().any(|told| told == kind) {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        if tokio::time::timeout(Duration::from_secs(600), told).await.is_err() {
            panic!("{kind} is not among {:?}", self.types(id).await);
        }
    }

    /// Nothing of a sandbox is left anywhere.
    pub(crate) async fn nothing_is_left(&self, id: &str) {
        assert_eq!(self.service.get(&format!("/v1/sandboxes/{id}")).await.status, 404);
        assert!(self.service.runtime.boxes().is_empty());
        assert!(self.service.store.open_intents().await.unwrap().is_empty());
        assert!(self.service.store.agents().await.unwrap().is_empty());
        assert!(!self.files(id).exists() && !self.dir.path().join("bridge").join(id).exists());
    }
}

/// The agent of a box, with what the box was handed.
fn agent(dir: &Path, id: &str) -> Bridge {
    agent_with(dir, id, Quiet)
}

/// An agent that tells these signs of life.
pub(crate) fn agent_with(dir: &Path, id: &str, vitals: impl Vitals) -> Bridge {
    let sandbox: sandglass_bridge::wire::SandboxId = id.parse().unwrap();
    let token = std::fs::read_to_string(dir.join("workspaces").join(id).join("workspace.token")).unwrap();
    let socket = dir.join("bridge").join(id).join("agent.sock");
    let transport = HttpTransport::new(Address::Unix(socket), &sandbox, 1, &Secret::new(token)).unwrap();
    let rings = dir.join("rings").join(id);
    std::fs::create_dir_all(&rings).unwrap();
    let boot: BootId = Ring::boot_of(&rings).unwrap().unwrap_or_else(|| "boot-1".parse().unwrap());
    let ring = Ring::open(&rings, boot.clone()).unwrap().0;
    let identity =
        Identity { sandbox, generation: 1, boot, agent_version: "1.2.3".into(), capabilities: Vec::new() };
    Bridge::start(
        Config { identity, pace: Pace::default(), jitter: Jitter::seeded(3) },
        transport,
        ring,
        vitals,
    )
}

pub(crate) fn tell(bridge: &Bridge, kind: &str, data: &Value) {
    let draft = Draft::new(Class::State, jiff::Timestamp::UNIX_EPOCH, kind, data).unwrap();
    bridge.handle.emit(draft).unwrap();
}

pub(crate) fn asked() -> Value {
    json!({
        "repository": {"url": URL, "ref": "main", "credential": {"username": "bot", "token": "hunter2-token"}},
        "services": [{"name": "app", "command": ["npm", "start"], "port": 3000, "required": true}],
        "imageBuild": {"secrets": {"NPM_TOKEN": "hunter3-token"}},
        "env": {"A": "b"},
        "timeout": 600,
    })
}

#[tokio::test(start_paused = true)]
async fn four_fields_become_a_sandbox_that_is_ready() {
    let stage = Stage::new(Fate::Building).await;
    let id = stage
        .create(json!({"repo_url": URL, "image_tag": "latest", "env": {"A": "b"}, "ttl_seconds": 600}))
        .await;
    let seen = stage.until(&id, "Pending", "image_building").await;
    assert_eq!(seen["state"], "BUILDING");
    assert_eq!(seen["source"]["imageBuildId"], stage.images.build.to_string());
    // Life does not run while the image is built.
    tokio::time::sleep(Duration::from_secs(700)).await;
    assert_eq!(stage.get(&id).await["state"], "BUILDING");
    stage.images.fate.send_replace(Fate::Found);
    let seen = stage.until(&id, "Pending", "agent_connecting").await;
    assert_eq!((&seen["state"], &seen["uptime_seconds"]), (&json!("STARTING"), &json!(0)));
    assert_eq!(seen["image"]["uri"], "built:1");
    let bridge = stage.agent(&id);
    tell(&bridge, "boot.phase_started", &json!({"phase": "sync", "timeoutSeconds": 300}));
    stage.until_seen(&id, |seen| seen["progress"]["phase"] == "sync").await;
    assert_eq!(stage.get(&id).await["status"]["reason"], "booting");
    tell(&bridge, "boot.completed", &json!({"warnings": 0}));
    let seen = stage.until(&id, "Running", "ready").await;
    assert_eq!((&seen["state"], &seen["agent"]["state"]), (&json!("READY"), &json!("Attached")));
    assert_eq!(seen["agent"]["version"], "1.2.3");
    tokio::time::sleep(Duration::from_secs(100)).await;
    let up = stage.get(&id).await["uptime_seconds"].as_u64().unwrap();
    assert!((99..=105).contains(&up), "{up}");
    assert_eq!(stage.service.runtime.starts(id.parse().unwrap()), 1);
    let types = stage.types(&id).await;
    let order =
        ["sandbox.created", "image.resolved", "agent.attached", "boot.completed", "sandbox.state_changed"];
    let places: Vec<_> = order.iter().map(|kind| types.iter().position(|t| t == kind)).collect();
    assert!(places.windows(2).all(|pair| pair[0].is_some() && pair[0] < pair[1]), "{types:?}");
    // The agent ends with its box.
    let ending = tokio::spawn(async move {
        let mut bridge = bridge;
        while let Some(command) = bridge.commands.recv().await {
            bridge.handle.settle(command.id, Outcome::done());
        }
    });
    assert_eq!(stage.delete(&id).await, 204);
    stage.nothing_is_left(&id).await;
    assert_eq!(stage.images.released(), 1);
    ending.abort();
}

#[tokio::test(start_paused = true)]
async fn how_long_a_create_took_is_told_by_stage() {
    let stage = Stage::new(Fate::Building).await;
    let told = Arc::new(Mutex::new(Vec::<Timing>::new()));
    let kept = told.clone();
    stage.service.engine.on_timed(move |timing| kept.lock().unwrap().push(timing.clone()));
    let id = stage.create(asked()).await;
    stage.until(&id, "Pending", "image_building").await;
    tokio::time::sleep(Duration::from_secs(5)).await;
    stage.images.fate.send_replace(Fate::Found);
    stage.until(&id, "Pending", "agent_connecting").await;
    tokio::time::sleep(Duration::from_secs(2)).await;
    let bridge = stage.agent(&id);
    tell(&bridge, "boot.phase_started", &json!({"phase": "sync", "timeoutSeconds": 300}));
    stage.until(&id, "Pending", "booting").await;
    tokio::time::sleep(Duration::from_secs(3)).await;
    assert!(told.lock().unwrap().is_empty());
    tell(&bridge, "boot.completed", &json!({"warnings": 0}));
    stage.until(&id, "Running", "ready").await;
    let told = told.lock().unwrap().clone();
    assert_eq!((told.len(), told[0].source, told[0].cache), (1, "repository", Some(CacheResult::Built)));
    let stages: Vec<&str> = told[0].stages.iter().map(|(stage, _)| stage.word()).collect();
    assert_eq!(stages, ["resolve", "build", "pull", "create", "attach", "boot"]);
    for (stage, least) in [(1, 5), (4, 2), (5, 3)] {
        assert!(told[0].stages[stage].1 >= Duration::from_secs(least), "{told:?}");
    }
    assert!(told[0].stages.iter().map(|(_, took)| *took).sum::<Duration>() <= told[0].total);
    bridge.task.abort();
}

#[tokio::test(start_paused = true)]
async fn a_box_is_handed_its_document_and_no_secret_is_seen_anywhere() {
    let stage = Stage::new(Fate::Found).await;
    let id = stage.create(asked()).await;
    stage.until(&id, "Pending", "agent_connecting").await;
    let document = std::fs::read_to_string(stage.files(&id).join("workspace.json")).unwrap();
    let document: workspace::Workspace = serde_json::from_str(&document).unwrap();
    assert_eq!(document.sandbox_id.to_string(), id);
    assert_eq!(document.repositories[0].commit, "1".repeat(40));
    assert_eq!(document.repositories[0].reference.as_deref(), Some("refs/heads/main"));
    assert!(document.repositories[0].credential);
    assert_eq!(document.services[0].name, "app");
    let mut bridge = stage.agent(&id);
    while !matches!(bridge.notices.recv().await.unwrap(), Notice::Attached(_)) {}
    let ask = |path: &str| GitCredentialRequest { host: "git.example.com".into(), path: path.into() };
    let credential = bridge.handle.git_credential(ask("acme/web.git")).await.unwrap();
    assert_eq!(
        (credential.username.as_str(), credential.password.reveal().as_str()),
        ("bot", "hunter2-token")
    );
    let refused = bridge.handle.git_credential(ask("acme/other")).await.unwrap_err();
    assert!(matches!(refused, CredentialError::Refused(Refusal::NotDeclared)));
    // Not even when the agent gives them away.
    let started = json!({"phase": "setup", "timeoutSeconds": 9, "step": "hunter3-token"});
    tell(&bridge, "boot.phase_started", &started);
    let seen = stage.until_seen(&id, |seen| seen["progress"]["phase"] == "setup").await;
    let mut seen = seen.to_string();
    seen.push_str(&stage.service.get("/v1/sandboxes").await.body.to_string());
    seen.push_str(&stage.service.get(&format!("/v1/sandboxes/{id}/events")).await.body.to_string());
    for record in stage.service.store.agents().await.unwrap() {
        seen.push_str(&record.body.to_string());
    }
    for intent in stage.service.store.open_intents().await.unwrap() {
        seen.push_str(&serde_json::to_string(&intent).unwrap());
    }
    assert!(!seen.contains("hunter"), "{seen}");
    let environment = &stage.service.engine.index().get(id.parse().unwrap()).unwrap();
    let environment = &environment.spec().unwrap().env;
    assert!(
        environment.contains(&("A".into(), "b".into()))
            && environment.contains(&("RECIPE".into(), "yes".into()))
    );
    bridge.task.abort();
}

#[tokio::test(start_paused = true)]
async fn a_build_that_fails_is_told_with_its_step_and_tail() {
    let failure = Failure {
        phase: Some("setup".into()),
        exit_code: Some(1),
        output_tail: "npm ERR!".into(),
        ..Failure::new(Reason::ImageBuildFailed, "setup ended with 1")
    };
    let stage = Stage::new(Fate::Fails(failure)).await;
    let id = stage.create(asked()).await;
    let seen = stage.until(&id, "Failed", "image_build_failed").await;
    let told = &seen["lastFailure"];
    assert_eq!(
        (&told["phase"], &told["exitCode"], &told["outputTail"]),
        (&json!("setup"), &json!(1), &json!("npm ERR!"))
    );
    assert_eq!(stage.images.asked.load(SeqCst), 1, "it is not tried again");
    assert!(stage.types(&id).await.contains(&"sandbox.failed".to_owned()));
    assert_eq!(stage.delete(&id).await, 204);
    stage.nothing_is_left(&id).await;
}

#[tokio::test(start_paused = true)]
async fn what_must_be_cached_and_is_not_is_refused() {
    let failure = Failure::new(Reason::ImageNotCached, "no image fits");
    let stage = Stage::new(Fate::Fails(failure)).await;
    let body = json!({"repository": {"url": URL}, "imageBuild": {"policy": "requireCached"}});
    let refused = stage.service.call("POST", "/v1/sandboxes", body).await;
    assert_eq!(refused.code(), (412, "IMAGE::NOT_CACHED"));
    assert!(stage.service.engine.index().is_empty());
}

#[tokio::test(start_paused = true)]
async fn a_boot_that_fails_is_told_with_its_phase_and_its_box_stays_a_while() {
    let stage = Stage::new(Fate::Found).await;
    let mut long = asked();
    long["timeout"] = json!(6000);
    let id = stage.create(long).await;
    stage.until(&id, "Pending", "agent_connecting").await;
    let bridge = stage.agent(&id);
    tell(&bridge, "boot.phase_started", &json!({"phase": "start", "step": "web", "timeoutSeconds": 120}));
    bridge.handle.fatal(FatalReport::bounded(
        "start of web",
        Some(7),
        None,
        "the hook ended with 7",
        "no such table\n",
    ));
    let seen = stage.until(&id, "Failed", "boot_failed").await;
    let told = &seen["lastFailure"];
    assert_eq!((&told["phase"], &told["exitCode"]), (&json!("start of web"), &json!(7)));
    assert_eq!(told["outputTail"], "no such table\n");
    assert_eq!(stage.service.runtime.boxes().len(), 1, "for diagnosis");
    tokio::time::sleep(Duration::from_secs(610)).await;
    assert!(stage.service.runtime.boxes().is_empty());
    bridge.task.abort();
    assert_eq!(stage.delete(&id).await, 204);
    stage.nothing_is_left(&id).await;
}

#[tokio::test(start_paused = true)]
async fn nobody_attaches() {
    let stage = Stage::new(Fate::Found).await;
    let id = stage.create(asked()).await;
    stage.until(&id, "Pending", "agent_connecting").await;
    stage.until(&id, "Failed", "agent_connect_timeout").await;
}

#[tokio::test(start_paused = true)]
async fn silence_is_told_and_forgiven_in_time_but_not_for_ever() {
    let stage = Stage::new(Fate::Found).await;
    let id = stage.create(asked()).await;
    stage.until(&id, "Pending", "agent_connecting").await;
    let bridge = stage.agent(&id);
    tell(&bridge, "boot.completed", &json!({"warnings": 0}));
    stage.until(&id, "Running", "ready").await;
    bridge.task.abort();
    drop(bridge);
    let seen = stage.until(&id, "Running", "unresponsive").await;
    assert_eq!(seen["state"], "UNHEALTHY");
    let bridge = stage.agent(&id);
    stage.until(&id, "Running", "ready").await;
    bridge.task.abort();
    drop(bridge);
    stage.until(&id, "Running", "unresponsive").await;
    let seen = stage.until(&id, "Failed", "heartbeat_lost").await;
    assert_eq!(seen["lastFailure"]["reason"], "heartbeat_lost");
    tokio::time::sleep(Duration::from_secs(610)).await;
    assert!(stage.service.runtime.boxes().is_empty());
}

#[tokio::test(start_paused = true)]
async fn a_box_that_somebody_else_removed_is_told_as_lost() {
    let stage = Stage::new(Fate::Found).await;
    let id = stage.create(asked()).await;
    stage.until(&id, "Pending", "agent_connecting").await;
    let bridge = stage.agent(&id);
    tell(&bridge, "boot.completed", &json!({"warnings": 0}));
    stage.until(&id, "Running", "ready").await;
    let of: sandglass_sandbox::SandboxId = id.parse().unwrap();
    stage.service.runtime.vanishes(of);
    stage.service.runtime.tell(sandglass_sandbox::ports::runtime::RuntimeEvent::Removed(of));
    let seen = stage.until(&id, "Failed", "runtime_lost").await;
    assert_eq!(seen["lastFailure"]["reason"], "runtime_lost");
    bridge.task.abort();
    assert_eq!(stage.service.call("DELETE", &format!("/v1/sandboxes/{id}"), Value::Null).await.status, 204);
}

/// Ready, with other labels and another expiry than it was made with.
async fn ready(stage: &Stage) -> String {
    let id = stage.create(asked()).await;
    stage.until(&id, "Pending", "agent_connecting").await;
    let bridge = stage.agent(&id);
    tell(&bridge, "boot.completed", &json!({"warnings": 0}));
    stage.until(&id, "Running", "ready").await;
    let path = format!("/v1/sandboxes/{id}/metadata");
    assert_eq!(stage.service.call("PATCH", &path, json!({"team": "web"})).await.status, 200);
    let expires = stage.service.clock.now().checked_add(Duration::from_secs(7200)).unwrap().to_string();
    let path = format!("/v1/sandboxes/{id}/renew-expiration");
    assert_eq!(stage.service.call("POST", &path, json!({"expiresAt": expires})).await.status, 200);
    bridge.task.abort();
    id
}

#[tokio::test(start_paused = true)]
async fn a_box_that_somebody_else_removed_while_no_server_looked_is_told_as_lost() {
    let mut stage = Stage::new(Fate::Found).await;
    let id = ready(&stage).await;
    let released = stage.images.released();
    stage.service.runtime.vanishes(id.parse().unwrap());
    for _ in 0..2 {
        stage.service.restart().await;
        let path = format!("/v1/sandboxes/{id}");
        assert_eq!(stage.service.get(&path).await.status, 404);
        let past = stage.service.get(&format!("{path}?includeTerminated=true")).await.body;
        let status = &past["status"];
        assert_eq!(
            (&status["state"], &status["reason"]),
            (&json!("Failed"), &json!("runtime_lost")),
            "{past}"
        );
        assert_eq!(
            (&past["lastFailure"]["reason"], &past["metadata"]["team"]),
            (&json!("runtime_lost"), &json!("web"))
        );
        let kinds = stage.types(&id).await;
        let ends: Vec<_> = kinds
            .iter()
            .filter(|kind| ["sandbox.failed", "sandbox.terminated"].contains(&kind.as_str()))
            .collect();
        assert_eq!(ends, ["sandbox.failed", "sandbox.terminated"], "once");
    }
    assert_eq!(stage.images.released(), released + 1, "its image is let go of");
    assert!(stage.service.store.agents().await.unwrap().is_empty());
}

#[tokio::test(start_paused = true)]
async fn a_box_that_went_by_its_expiry_while_no_server_looked_is_told_as_expired() {
    let mut stage = Stage::new(Fate::Found).await;
    let id = ready(&stage).await;
    stage.service.runtime.vanishes(id.parse().unwrap());
    stage.service.restart_after(Duration::from_secs(7201)).await;
    let past = stage.service.get(&format!("/v1/sandboxes/{id}?includeTerminated=true")).await.body;
    let status = &past["status"];
    assert_eq!((&status["state"], &status["reason"]), (&json!("Terminated"), &json!("ttl_expiry")), "{past}");
    assert!(!stage.types(&id).await.contains(&"sandbox.failed".to_owned()));
}

#[tokio::test(start_paused = true)]
async fn what_is_lost_is_told_when_the_runtime_is_back() {
    let mut stage = Stage::new(Fate::Found).await;
    let id = ready(&stage).await;
    stage.service.runtime.vanishes(id.parse().unwrap());
    stage.service.runtime.goes_away();
    stage.service.restart().await;
    assert!(!stage.types(&id).await.contains(&"sandbox.terminated".to_owned()), "nobody knows yet");
    stage.service.runtime.comes_back();
    stage.until_told(&id, "sandbox.terminated").await;
    let past = stage.service.get(&format!("/v1/sandboxes/{id}?includeTerminated=true")).await.body;
    assert_eq!(past["status"]["reason"], "runtime_lost");
}

#[tokio::test(start_paused = true)]
async fn a_frozen_box_owes_no_heartbeat() {
    let stage = Stage::new(Fate::Found).await;
    let id = stage.create(asked()).await;
    stage.until(&id, "Pending", "agent_connecting").await;
    let bridge = stage.agent(&id);
    tell(&bridge, "boot.completed", &json!({"warnings": 0}));
    stage.until(&id, "Running", "ready").await;
    assert_eq!(
        stage.service.call("POST", &format!("/v1/sandboxes/{id}/pause"), Value::Null).await.status,
        202
    );
    bridge.task.abort();
    drop(bridge);
    tokio::time::sleep(Duration::from_secs(300)).await;
    assert_eq!(stage.get(&id).await["state"], "PAUSED");
    let bridge = stage.agent(&id);
    assert_eq!(
        stage.service.call("POST", &format!("/v1/sandboxes/{id}/resume"), Value::Null).await.status,
        202
    );
    stage.until(&id, "Running", "ready").await;
    bridge.task.abort();
}

#[tokio::test(start_paused = true)]
async fn a_restarted_server_adopts_what_was_booting_and_what_was_ready() {
    let mut stage = Stage::new(Fate::Found).await;
    let (booting, ready) = (stage.create(asked()).await, stage.create(asked()).await);
    for id in [&booting, &ready] {
        stage.until(id, "Pending", "agent_connecting").await;
    }
    let (first, second) = (stage.agent(&booting), stage.agent(&ready));
    tell(&second, "boot.completed", &json!({"warnings": 0}));
    tell(&first, "boot.phase_started", &json!({"phase": "setup", "timeoutSeconds": 300}));
    stage.until(&ready, "Running", "ready").await;
    stage.until(&booting, "Pending", "booting").await;
    stage.service.restart().await;
    assert_eq!(stage.get(&booting).await["status"]["reason"], "booting");
    assert_eq!(stage.get(&ready).await["status"]["reason"], "ready");
    tell(&first, "boot.completed", &json!({"warnings": 1}));
    let seen = stage.until(&booting, "Running", "degraded").await;
    assert_eq!(seen["state"], "READY");
    for id in [&booting, &ready] {
        assert_eq!(stage.service.runtime.starts(id.parse().unwrap()), 1);
    }
    let completed = stage.types(&ready).await.iter().filter(|kind| *kind == "boot.completed").count();
    assert_eq!(completed, 1, "nothing is told twice");
    tokio::time::sleep(Duration::from_secs(200)).await;
    assert_eq!(stage.get(&ready).await["status"]["reason"], "ready");
    first.task.abort();
    second.task.abort();
}

#[tokio::test(start_paused = true)]
async fn a_restart_while_the_image_is_built_goes_on_waiting() {
    let mut stage = Stage::new(Fate::Building).await;
    let id = stage.create(asked()).await;
    stage.until(&id, "Pending", "image_building").await;
    stage.service.restart().await;
    stage.until(&id, "Pending", "image_building").await;
    stage.images.fate.send_replace(Fate::Found);
    stage.until(&id, "Pending", "agent_connecting").await;
    let bridge = stage.agent(&id);
    tell(&bridge, "boot.completed", &json!({"warnings": 0}));
    stage.until(&id, "Running", "ready").await;
    bridge.task.abort();
}

#[tokio::test(start_paused = true)]
async fn a_delete_at_every_step_leaves_nothing() {
    for step in 0..5 {
        let stage = Stage::new(if step == 0 { Fate::Building } else { Fate::Found }).await;
        if step == 1 {
            stage.service.runtime.inject("prepare", Fault::Slow(Duration::from_secs(30)));
        }
        if step == 2 {
            stage.service.runtime.inject("start", Fault::Slow(Duration::from_secs(30)));
        }
        let id = stage.create(asked()).await;
        let reason =
            ["image_building", "image_pulling", "container_creating", "agent_connecting", "agent_connecting"]
                [step];
        stage.until(&id, "Pending", reason).await;
        let bridge = (step == 4).then(|| stage.agent(&id));
        if let Some(bridge) = &bridge {
            tell(bridge, "boot.phase_started", &json!({"phase": "sync", "timeoutSeconds": 300}));
            stage.until(&id, "Pending", "booting").await;
        }
        assert_eq!(stage.delete(&id).await, 204, "at {reason}");
        tokio::time::sleep(Duration::from_secs(60)).await;
        stage.nothing_is_left(&id).await;
        assert_eq!(stage.images.released(), 1, "at {reason}");
        if let Some(bridge) = bridge {
            bridge.task.abort();
        }
    }
}

#[tokio::test(start_paused = true)]
async fn services_are_shown_and_commanded() {
    let mut stage = Stage::new(Fate::Found).await;
    let id = stage.create(asked()).await;
    stage.until(&id, "Pending", "agent_connecting").await;
    let services = format!("/v1/sandboxes/{id}/services");
    assert_eq!(
        stage.service.call("POST", &format!("{services}/app/restart"), Value::Null).await.code(),
        (503, "GENERAL::UNAVAILABLE")
    );
    let mut bridge = stage.agent(&id);
    let change = json!({"name": "app", "kind": "custom", "from": "Starting", "to": "Ready", "required": true,
        "restartCount": 2, "lastExit": {"signal": 9}, "startedAt": "2026-01-01T00:00:00.500000Z"});
    tell(&bridge, "service.state_changed", &change);
    tell(&bridge, "boot.completed", &json!({"warnings": 0}));
    stage.until(&id, "Running", "ready").await;
    let listed = stage.service.get(&services).await.body;
    let names: Vec<_> = listed["items"].as_array().unwrap().iter().map(|s| s["name"].clone()).collect();
    assert_eq!(names, ["app", "bridge"]);
    let app = stage.service.get(&format!("{services}/app")).await.body;
    assert_eq!(
        (&app["state"], &app["restartCount"], &app["port"]),
        (&json!("Ready"), &json!(2), &json!(3000))
    );
    assert_eq!((&app["lastExit"], app.get("lastExitCode")), (&json!({"signal": 9}), None));
    assert_eq!(app["startedAt"], "2026-01-01T00:00:00.500000Z");
    let endpoint = stage.service.get(&format!("/v1/sandboxes/{id}/endpoints/3000")).await;
    assert_eq!((endpoint.status, &app["endpoint"]), (200, &endpoint.body));
    assert_eq!(listed["items"][0], app);
    assert!(listed["items"][1].get("endpoint").is_none() && listed["items"][1].get("startedAt").is_none());
    let summary = stage.get(&id).await["services"][0].clone();
    assert!(summary["startedAt"] == app["startedAt"] && summary.get("endpoint").is_none(), "{summary}");
    assert_eq!(stage.service.get(&format!("{services}/none")).await.code(), (404, "SERVICE::NOT_FOUND"));
    let path = format!("{services}/app/restart");
    let (answered, ()) = tokio::join!(stage.service.call("POST", &path, Value::Null), async {
        let command = bridge.commands.recv().await.unwrap();
        bridge.handle.settle(command.id, Outcome::done());
    });
    assert_eq!(answered.status, 202);
    let path = format!("{services}/app");
    let (answered, ()) = tokio::join!(stage.service.call("PUT", &path, json!({"enabled": false})), async {
        let command = bridge.commands.recv().await.unwrap();
        bridge.handle.settle(command.id, Outcome::failed("SERVICE::BUSY", "not now"));
    });
    assert_eq!(answered.code(), (409, "SANDBOX::INVALID_STATE"));
    stage.service.restart().await;
    let kept = stage.service.get(&format!("{services}/app")).await.body;
    for name in ["startedAt", "lastExit", "restartCount"] {
        assert_eq!(kept[name], app[name], "{name} outlives the server");
    }
    bridge.task.abort();
}

#[tokio::test(start_paused = true)]
async fn a_required_service_that_is_lost_fails_the_sandbox() {
    let stage = Stage::new(Fate::Found).await;
    let id = stage.create(asked()).await;
    stage.until(&id, "Pending", "agent_connecting").await;
    let bridge = stage.agent(&id);
    tell(&bridge, "boot.completed", &json!({"warnings": 0}));
    stage.until(&id, "Running", "ready").await;
    let failure = json!({"reason": "service_failed", "phase": "services", "step": "app", "exitCode": 1,
        "message": "given up after 5 restarts", "outputTail": "listen EADDRINUSE"});
    tell(&bridge, "service.required_failed", &failure);
    let seen = stage.until(&id, "Failed", "service_failed").await;
    assert_eq!(seen["lastFailure"]["outputTail"], "listen EADDRINUSE");
    bridge.task.abort();
}

#[tokio::test(start_paused = true)]
async fn an_agent_is_heard_over_its_own_socket_alone() {
    let stage = Stage::new(Fate::Found).await;
    let (one, other) = (stage.create(asked()).await, stage.create(asked()).await);
    for id in [&one, &other] {
        stage.until(id, "Pending", "agent_connecting").await;
    }
    let sandbox: sandglass_bridge::wire::SandboxId = one.parse().unwrap();
    let token = std::fs::read_to_string(stage.files(&one).join("workspace.token")).unwrap();
    let socket = stage.dir.path().join("bridge").join(&other).join("agent.sock");
    let transport = HttpTransport::new(Address::Unix(socket), &sandbox, 1, &Secret::new(token)).unwrap();
    let rings = TempDir::new().unwrap();
    let boot: BootId = "boot-9".parse().unwrap();
    let ring = Ring::open(rings.path(), boot.clone()).unwrap().0;
    let identity =
        Identity { sandbox, generation: 1, boot, agent_version: "1".into(), capabilities: Vec::new() };
    let config = Config { identity, pace: Pace::default(), jitter: Jitter::seeded(3) };
    let bridge = Bridge::start(config, transport, ring, Quiet);
    let ended = bridge.task.await.unwrap();
    assert_eq!(ended, sandglass_bridge::agent::Ending::Revoked(Refusal::WrongSandbox));
    assert_eq!(stage.get(&one).await["status"]["reason"], "agent_connecting");
}

#[tokio::test(start_paused = true)]
async fn the_same_key_is_the_same_sandbox() {
    let stage = Stage::new(Fate::Building).await;
    let key = [("idempotency-key", "k")];
    let first = stage.service.call_with("POST", "/v1/sandboxes", &key, asked()).await;
    let again = stage.service.call_with("POST", "/v1/sandboxes", &key, asked()).await;
    assert_eq!((first.status, again.status), (202, 202));
    assert_eq!(first.body["id"], again.body["id"]);
    let other = json!({"repository": {"url": URL}});
    assert_eq!(stage.service.call_with("POST", "/v1/sandboxes", &key, other).await.status, 409);
    assert_eq!(std::fs::read_dir(stage.dir.path().join("workspaces")).unwrap().count(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_start_that_has_to_wait_for_its_runtime_does_not_spin() {
    let stage = Stage::new(Fate::Found).await;
    for _ in 0..5 {
        stage.service.runtime.inject("start", Fault::Away);
    }
    let begun = tokio::time::Instant::now();
    let id = stage.create(json!({ "repository": { "url": URL } })).await;
    stage.until(&id, "Pending", "agent_connecting").await;
    // Every attempt renews what the agent is handed, which must not count as news to its own wait.
    let waited = begun.elapsed();
    assert!((Duration::from_secs(5)..Duration::from_secs(10)).contains(&waited), "{waited:?}");
    stage.delete(&id).await;
}
