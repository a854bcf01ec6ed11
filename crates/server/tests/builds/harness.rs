//! A server that builds images of repositories on this disk.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    process::Command as Program,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

use async_trait::async_trait;
use axum::{
    Router,
    body::{Body, to_bytes},
};
use http::Request;
use sandglass_sandbox::{
    Clock, SandboxId, SystemClock, Timestamp,
    ports::{
        Captures, Dockerfiles, RuntimeErrorKind,
        captures::{Captured, LocalImage, RunConfig},
        dockerfiles::{BuildOutput, DockerfileBuild, DockerfileError},
        runtime::RuntimeError,
    },
    sealing::{self, Found},
};
use sandglass_server::{
    builds::{
        Builds, Parts,
        inside::{Command, Door, Inside, InsideError, Lines},
    },
    config::{BuildsConfig, Config, StoreConfig},
    engine::{Engine, Settings},
    http::{App, router},
    store::SqlStore,
    tenants::Keyring,
};
use sandglass_testkit::{FakeRuntime, MemoryStore};
use serde_json::Value;
use tokio::sync::Semaphore;
use tower::ServiceExt;

/// Long enough for a machine with other things to do; nothing waits that long unless something is wrong.
pub const PATIENCE: Duration = Duration::from_secs(300);

/// Images by name.
#[derive(Default)]
pub struct FakeImages {
    images: Mutex<BTreeMap<String, LocalImage>>,
    pub runtime: Arc<FakeRuntime>,
}

impl FakeImages {
    fn new(runtime: Arc<FakeRuntime>) -> Self {
        let made = Self { images: Mutex::default(), runtime };
        let config = RunConfig {
            env: vec![("PATH".into(), "/bin".into())],
            cmd: vec!["sh".into()],
            ..Default::default()
        };
        made.keep("base", config);
        made
    }

    fn keep(&self, name: &str, config: RunConfig) -> LocalImage {
        let image =
            LocalImage { reference: name.into(), digest: format!("sha256:{name}"), size_bytes: 7, config };
        self.images.lock().unwrap().insert(name.to_owned(), image.clone());
        image
    }

    /// Names of what builds made.
    pub fn made(&self) -> Vec<String> {
        let ours = |name: &&String| *name != "base" && !name.starts_with("osb-layer-");
        self.images.lock().unwrap().keys().filter(ours).cloned().collect()
    }

    /// How many instructions are kept.
    pub fn layers(&self) -> usize {
        self.images.lock().unwrap().keys().filter(|name| name.starts_with("osb-layer-")).count()
    }

    pub fn config(&self, name: &str) -> RunConfig {
        self.images.lock().unwrap()[name].config.clone()
    }
}

#[async_trait]
impl Captures for FakeImages {
    async fn capture(&self, id: SandboxId, name: &str, config: &RunConfig) -> Result<Captured, RuntimeError> {
        if !self.runtime.boxes().contains(&id) {
            return Err(RuntimeError::new(RuntimeErrorKind::NotFound, "find", "no such box"));
        }
        Ok(Captured { image: self.keep(name, config.clone()), left_out: Vec::new() })
    }

    async fn find(&self, name: &str) -> Result<Option<LocalImage>, RuntimeError> {
        Ok(self.images.lock().unwrap().get(name).cloned())
    }

    fn layered(&self) -> bool {
        true
    }

    async fn remove(&self, name: &str) -> Result<(), RuntimeError> {
        self.images.lock().unwrap().remove(name);
        Ok(())
    }
}

/// A builder of the runtime's own: every build is an image with the labels that were asked for.
pub struct FakeDockerfiles {
    images: Arc<FakeImages>,
    /// Everything that was asked for, with the names in its context.
    pub built: Mutex<Vec<(DockerfileBuild, Vec<String>)>>,
    /// What an instruction of every Dockerfile ends with.
    pub code: Mutex<i32>,
    /// How many more builds somebody removes an image under.
    pub disturbed: Mutex<u32>,
    /// What base images have done first.
    pub triggers: Mutex<BTreeMap<String, Vec<String>>>,
}

#[async_trait]
impl Dockerfiles for FakeDockerfiles {
    async fn build(&self, wanted: &DockerfileBuild, output: &BuildOutput<'_>) -> Result<(), DockerfileError> {
        let context = std::fs::File::open(&wanted.context).unwrap();
        let mut context = tar::Archive::new(context);
        let names =
            context.entries().unwrap().map(|entry| entry.unwrap().path().unwrap().display().to_string());
        self.built.lock().unwrap().push((wanted.clone(), names.collect()));
        output("Step 1/1 : RUN make");
        let left = self.disturbed.lock().unwrap().checked_sub(1);
        if let Some(left) = left {
            *self.disturbed.lock().unwrap() = left;
            let message = "No such image: sha256:24b9ba7e5e60";
            return Err(RuntimeError::new(RuntimeErrorKind::Failed, "dockerfile", message).into());
        }
        match *self.code.lock().unwrap() {
            0 => {
                let config =
                    RunConfig { labels: wanted.labels.clone(), user: "app".into(), ..RunConfig::default() };
                self.images.keep(&wanted.name, config);
                Ok(())
            }
            code => Err(DockerfileError::Instruction { exit_code: Some(code), message: "RUN failed".into() }),
        }
    }

    async fn triggers(&self, image: &str) -> Result<Vec<String>, RuntimeError> {
        Ok(self.triggers.lock().unwrap().get(image).cloned().unwrap_or_default())
    }
}

/// What commands in sandboxes do.
#[derive(Default)]
pub struct FakeInside {
    /// Everything that was run.
    pub ran: Mutex<Vec<Command>>,
    /// Names in every archive that was put in.
    pub put: Mutex<Vec<String>>,
    /// What the hook writes, and its exit code.
    pub hook: Mutex<(Vec<String>, i32)>,
    /// Hooks that may go on; absent: all.
    pub gate: Mutex<Option<Arc<Semaphore>>>,
    /// What a search for secrets finds.
    pub found: Mutex<Vec<Found>>,
    /// It does not come to its end.
    pub blind: AtomicBool,
    /// What a command with this word in it writes, and its exit code.
    pub answers: Mutex<Vec<(&'static str, Vec<String>, i32)>>,
}

impl FakeInside {
    /// How often a command with this word in it was run.
    pub fn times(&self, word: &str) -> usize {
        let ran = self.ran.lock().unwrap();
        ran.iter().filter(|command| command.argv.iter().any(|part| part.contains(word))).count()
    }
}

#[async_trait]
impl Inside for FakeInside {
    async fn run(&self, _: &Door, command: &Command, output: &mut Lines<'_>) -> Result<i32, InsideError> {
        self.ran.lock().unwrap().push(command.clone());
        if command.argv[0] == sealing::PROGRAM {
            match command.argv[2].as_str() {
                sealing::CLOCK => output("1"),
                sealing::SEARCH => {
                    let found = self.found.lock().unwrap().clone();
                    let done = (!self.blind.load(Relaxed)).then_some(Found::Done { changed: 1 });
                    let lines = found.iter().chain(&done).map(|found| serde_json::to_string(found).unwrap());
                    lines.for_each(|line| output(&line));
                }
                _ => {}
            }
            return Ok(0);
        }
        if command.argv[0] == "id" {
            output("1000");
            return Ok(0);
        }
        let answers = self.answers.lock().unwrap().clone();
        if let Some((_, lines, code)) =
            answers.into_iter().find(|(word, ..)| command.argv.iter().any(|part| part.contains(word)))
        {
            lines.iter().for_each(|line| output(line));
            return Ok(code);
        }
        if !command.argv.iter().any(|word| word.ends_with("setup.sh") || word.starts_with("make ")) {
            return Ok(0);
        }
        let gate = self.gate.lock().unwrap().clone();
        if let Some(gate) = gate {
            gate.acquire().await.unwrap().forget();
        }
        let (lines, code) = self.hook.lock().unwrap().clone();
        lines.iter().for_each(|line| output(line));
        if let Some(secret) = command.env.get("NPM_TOKEN") {
            output(&format!("logging in with {secret}"));
        }
        Ok(code)
    }

    async fn put(&self, _: &Door, file: &Path, _: &str, _: u32) -> Result<(), InsideError> {
        if let Ok(archive) = std::fs::File::open(file)
            && let Ok(entries) = tar::Archive::new(archive).entries()
        {
            let names = entries.filter_map(|entry| Some(entry.ok()?.path().ok()?.display().to_string()));
            self.put.lock().unwrap().extend(names);
        }
        Ok(())
    }

    async fn get(&self, _: &Door, _: &str, file: &Path) -> Result<(), InsideError> {
        let mut builder = tar::Builder::new(std::fs::File::create(file).unwrap());
        let mut header = tar::Header::new_gnu();
        header.set_mode(0o755);
        header.set_uid(0);
        header.set_gid(0);
        header.set_mtime(0);
        header.set_size(1);
        builder.append_data(&mut header, "out/tool", &b"x"[..]).unwrap();
        builder.into_inner().unwrap();
        Ok(())
    }
}

/// The machine's clock, or ahead of it.
#[derive(Default)]
pub struct AheadClock(AtomicU64);

impl AheadClock {
    /// Goes on by so much at once.
    pub fn advance(&self, time: Duration) {
        self.0.fetch_add(time.as_secs(), Relaxed);
    }
}

impl Clock for AheadClock {
    fn now(&self) -> Timestamp {
        SystemClock.now().checked_add(Duration::from_secs(self.0.load(Relaxed))).unwrap()
    }
}

pub struct Answer {
    pub status: u16,
    pub retry_after: Option<String>,
    pub text: String,
}

impl Answer {
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.text).unwrap_or(Value::Null)
    }

    pub fn code(&self) -> String {
        self.json()["code"].as_str().unwrap_or_default().to_owned()
    }
}

pub struct Stage {
    pub dir: tempfile::TempDir,
    pub runtime: Arc<FakeRuntime>,
    pub images: Arc<FakeImages>,
    pub inside: Arc<FakeInside>,
    pub dockerfiles: Option<Arc<FakeDockerfiles>>,
    pub store: SqlStore,
    pub clock: Arc<AheadClock>,
    pub builds: Builds,
    router: Router,
}

fn git(folder: &Path, arguments: &[&str]) -> String {
    let output = Program::new("git")
        .current_dir(folder)
        .args(["-c", "user.name=t", "-c", "user.email=t@example.com", "-c", "init.defaultBranch=main"])
        .args(arguments)
        .env("GIT_CONFIG_NOSYSTEM", "1")
        .env("HOME", folder)
        .output()
        .unwrap();
    assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap().trim().to_owned()
}

impl Stage {
    pub async fn new() -> Self {
        Self::make(false).await
    }

    /// On a runtime that builds Dockerfiles itself.
    pub async fn with_builder() -> Self {
        Self::make(true).await
    }

    async fn make(builder: bool) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let runtime = Arc::<FakeRuntime>::default();
        let images = Arc::new(FakeImages::new(runtime.clone()));
        let dockerfiles = builder.then(|| {
            let (built, code) = (Mutex::default(), Mutex::default());
            let (disturbed, triggers) = (Mutex::default(), Mutex::default());
            Arc::new(FakeDockerfiles { images: images.clone(), built, code, disturbed, triggers })
        });
        let store = StoreConfig { path: dir.path().join("s.db"), ..StoreConfig::default() };
        let store = SqlStore::open(&store).await.unwrap();
        let inside = Arc::<FakeInside>::default();
        let clock = Arc::<AheadClock>::default();
        let (builds, router) =
            serve(dir.path(), &runtime, (&images, &dockerfiles), &inside, (&store, &clock)).await;
        Self { dir, runtime, images, inside, dockerfiles, store, clock, builds, router }
    }

    /// The server ends, and another one takes its place.
    pub async fn restart(&mut self) {
        self.builds.shut().await;
        let images = (&self.images, &self.dockerfiles);
        (self.builds, self.router) =
            serve(self.dir.path(), &self.runtime, images, &self.inside, (&self.store, &self.clock)).await;
    }

    /// The server loses its store, ends, and another one begins with an empty one.
    pub async fn forget(&mut self) {
        let store = StoreConfig { path: self.dir.path().join("other.db"), ..StoreConfig::default() };
        self.store = SqlStore::open(&store).await.unwrap();
        self.restart().await;
    }

    /// Puts files into the repository and commits them; the commit.
    pub fn commit(&self, files: &[(&str, &str)]) -> String {
        let folder = self.repository();
        if !folder.exists() {
            std::fs::create_dir(&folder).unwrap();
            git(&folder, &["init", "--quiet"]);
        }
        for (path, text) in files {
            let place = folder.join(path);
            std::fs::create_dir_all(place.parent().unwrap()).unwrap();
            std::fs::write(place, text).unwrap();
        }
        git(&folder, &["add", "--all"]);
        git(&folder, &["commit", "--quiet", "--allow-empty", "-m", "x"]);
        git(&folder, &["rev-parse", "HEAD"])
    }

    pub fn repository(&self) -> PathBuf {
        self.dir.path().join("web")
    }

    pub fn url(&self) -> String {
        format!("file://{}", self.repository().display())
    }

    pub async fn send(&self, method: &str, path: &str, headers: &[(&str, &str)], body: String) -> Answer {
        self.send_body(method, path, headers, Body::from(body)).await
    }

    /// With a body that may never end.
    pub async fn send_body(&self, method: &str, path: &str, headers: &[(&str, &str)], body: Body) -> Answer {
        let mut request = Request::builder().method(method).uri(path).header("host", "h");
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let request = request.header("content-type", "application/json").body(body).unwrap();
        let answer = self.router.clone().oneshot(request).await.unwrap();
        let status = answer.status().as_u16();
        let retry_after = answer.headers().get("retry-after").map(|value| value.to_str().unwrap().to_owned());
        let bytes = to_bytes(answer.into_body(), 64 << 20).await.unwrap();
        Answer { status, retry_after, text: String::from_utf8(bytes.to_vec()).unwrap() }
    }

    pub async fn call(&self, method: &str, path: &str, body: Value) -> Answer {
        let body = if body.is_null() { String::new() } else { body.to_string() };
        self.send(method, path, &[], body).await
    }

    pub async fn get(&self, path: &str) -> Answer {
        self.call("GET", path, Value::Null).await
    }

    /// Asks until the answer is as wanted.
    pub async fn until(&self, path: &str, wanted: impl Fn(&Value) -> bool) -> Value {
        let asked = async {
            loop {
                let answer = self.get(path).await.json();
                if wanted(&answer) {
                    return answer;
                }
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        match tokio::time::timeout(PATIENCE, asked).await {
            Ok(answer) => answer,
            Err(_) => panic!("{path} is still {}", self.get(path).await.text),
        }
    }

    /// The build when it ended.
    pub async fn ended(&self, id: &str) -> Value {
        let over = ["Succeeded", "Failed", "Cancelled", "TimedOut", "Superseded"];
        self.until(&format!("/v1/image-builds/{id}"), |build| {
            over.iter().any(|state| build["status"]["state"] == *state)
        })
        .await
    }

    /// Waits until the condition holds.
    pub async fn when(&self, what: &str, holds: impl Fn(&Self) -> bool) {
        let asked = async {
            while !holds(self) {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        assert!(tokio::time::timeout(PATIENCE, asked).await.is_ok(), "{what}");
    }

    /// Everything that is kept on disk, as text.
    pub fn on_disk(&self) -> String {
        fn read(folder: &Path, text: &mut String) {
            for entry in std::fs::read_dir(folder).unwrap() {
                let path = entry.unwrap().path();
                if path.is_dir() {
                    read(&path, text);
                } else {
                    text.push_str(&String::from_utf8_lossy(&std::fs::read(path).unwrap_or_default()));
                }
            }
        }
        let mut text = String::new();
        read(self.dir.path(), &mut text);
        text
    }
}

async fn serve(
    dir: &Path,
    runtime: &Arc<FakeRuntime>,
    (images, dockerfiles): (&Arc<FakeImages>, &Option<Arc<FakeDockerfiles>>),
    inside: &Arc<FakeInside>,
    (store, clock): (&SqlStore, &Arc<AheadClock>),
) -> (Builds, Router) {
    let clock: Arc<dyn Clock> = clock.clone();
    let config = BuildsConfig {
        base_image: "base".into(),
        file_urls: true,
        // Nothing takes long here.
        layer_after: Duration::ZERO,
        ..BuildsConfig::default()
    };
    let builds = Builds::start(Parts {
        host: std::net::Ipv4Addr::LOCALHOST.into(),
        store: Arc::new(store.clone()),
        runtime: runtime.clone(),
        captures: images.clone(),
        dockerfiles: dockerfiles.clone().map(|builder| builder as Arc<dyn Dockerfiles>),
        inside: Some(inside.clone()),
        clock: clock.clone(),
        config,
        folder: dir.join("builds"),
        shared_store: false,
        secrets_dir: None,
    });
    let builds = builds.await.unwrap();
    let rows = Arc::<MemoryStore>::default();
    let engine = Engine::new(runtime.clone(), rows, clock, Settings::default());
    engine.recover().await.unwrap();
    let app = App::new(Arc::new(Config::default()), engine, None, Keyring::single(None));
    let router = router::build(app.with_builds(Some(builds.clone())));
    (builds, router.into_router())
}
