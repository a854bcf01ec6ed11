//! Sandboxes that live on while they are used: through the proxy's side on a fake runtime, and through a real Redis.

use std::{
    collections::BTreeMap,
    path::PathBuf,
    process::{Child, Command, Stdio},
    sync::Arc,
    time::Duration,
};

use sandglass_sandbox::{
    Clock, Timestamp,
    ports::Store,
    spec::{Entrypoint, MutableFacts, Secrets, Spec},
};
use sandglass_server::{
    config::{RedisConfig, RenewIntentConfig, Secret},
    engine::{Engine, Settings, commit::NewSandbox},
    renewal::Renewals,
    telemetry::metrics::{Metrics, RenewOutcome, RenewSource},
};
use sandglass_testkit::{FakeRuntime, Fault, ManualClock, MemoryStore};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::UnixStream,
};

struct Stack {
    runtime: Arc<FakeRuntime>,
    store: Arc<MemoryStore>,
    clock: Arc<ManualClock>,
    engine: Arc<Engine>,
    metrics: Arc<Metrics>,
    renewals: Renewals,
}

impl Stack {
    async fn new(redis: RedisConfig) -> Self {
        let (runtime, store) = (Arc::<FakeRuntime>::default(), Arc::<MemoryStore>::default());
        let clock = Arc::new(ManualClock::default());
        let engine = Engine::new(runtime.clone(), store.clone(), clock.clone(), Settings::default());
        engine.recover().await.unwrap();
        let config = RenewIntentConfig { enabled: true, min_interval: Duration::from_secs(60), redis };
        let metrics = Arc::<Metrics>::default();
        let renewals = Renewals::start(&engine, &config, metrics.clone()).unwrap().unwrap();
        Self { runtime, store, clock, engine, metrics, renewals }
    }

    async fn create(&self, ttl: Option<u64>, extension: Option<&str>) -> String {
        let expires_at = ttl.and_then(|s| self.clock.now().checked_add(Duration::from_secs(s)));
        let extensions: BTreeMap<String, String> = extension
            .map(|seconds| ("access.renew.extend.seconds".to_owned(), seconds.to_owned()))
            .into_iter()
            .collect();
        let entrypoint = Entrypoint::Command(vec!["sleep".into(), "1d".into()]);
        let spec = Spec { extensions, ..Spec::new("img", entrypoint) };
        let facts = MutableFacts { expires_at, metadata: BTreeMap::new() };
        let new = NewSandbox {
            spec,
            facts,
            secrets: Secrets::default(),
            key: None,
            pool: None,
            confidential: Default::default(),
        };
        self.engine.create(new, self.clock.now()).await.unwrap().id.to_string()
    }

    fn expiry(&self, id: &str) -> Option<Timestamp> {
        self.engine.find(id).unwrap().facts().unwrap().expires_at
    }

    /// Seconds that the sandbox has left.
    fn left(&self, id: &str) -> u64 {
        (self.clock.now().until(self.expiry(id).unwrap()).as_millis() as u64).div_ceil(1000)
    }

    fn count(&self, source: RenewSource, outcome: RenewOutcome) -> u64 {
        self.metrics.renewals(source, outcome)
    }
}

fn no_redis() -> RedisConfig {
    RedisConfig::default()
}

/// Lets everything happen that can happen now.
async fn settle() {
    tokio::time::sleep(Duration::from_millis(1)).await;
}

#[tokio::test(start_paused = true)]
async fn use_extends_a_life_once_an_interval() {
    let stack = Stack::new(no_redis()).await;
    let id = stack.create(Some(60), Some(" 600 ")).await;
    for _ in 0..100 {
        stack.renewals.used(&id);
    }
    settle().await;
    assert_eq!(stack.left(&id), 600);
    assert_eq!(stack.count(RenewSource::Proxy, RenewOutcome::Renewed), 1);
    let history = stack.store.history(id.parse().unwrap(), 100).await.unwrap();
    assert_eq!(history.iter().filter(|event| event.kind == "renewed").count(), 1);

    tokio::time::sleep(Duration::from_secs(59)).await;
    stack.renewals.used(&id);
    settle().await;
    assert_eq!(stack.left(&id), 541);

    tokio::time::sleep(Duration::from_secs(1)).await;
    stack.renewals.used(&id);
    settle().await;
    assert_eq!(stack.left(&id), 600);
}

#[tokio::test(start_paused = true)]
async fn a_longer_life_is_never_shortened() {
    let stack = Stack::new(no_redis()).await;
    let id = stack.create(Some(86_400), Some("600")).await;
    let before = stack.expiry(&id);
    stack.renewals.used(&id);
    settle().await;
    assert_eq!(stack.expiry(&id), before);
    assert_eq!(stack.count(RenewSource::Proxy, RenewOutcome::Enough), 1);

    // A renewal by hand that gets in first wins over one that was computed before it.
    let id = stack.create(Some(60), Some("600")).await;
    stack.runtime.inject("update_facts", Fault::Slow(Duration::from_secs(1)));
    let far = stack.clock.now().checked_add(Duration::from_secs(7200)).unwrap();
    let by_hand = stack.engine.renew(&id, far);
    let (done, ()) = tokio::join!(by_hand, async { stack.renewals.used(&id) });
    done.unwrap();
    tokio::time::sleep(Duration::from_secs(5)).await;
    assert_eq!(stack.expiry(&id), Some(far));
}

#[tokio::test(start_paused = true)]
async fn only_running_sandboxes_with_expiry_and_extension_are_renewed() {
    let stack = Stack::new(no_redis()).await;
    let plain = stack.create(Some(60), None).await;
    let forever = stack.create(None, Some("600")).await;
    let paused = stack.create(Some(60), Some("600")).await;
    stack.engine.pause(&paused).await.unwrap();
    let ended = stack.create(Some(60), Some("600")).await;
    stack.runtime.exits(ended.parse().unwrap(), 0, stack.clock.now());
    settle().await;
    let unknown = sandglass_sandbox::SandboxId::random().to_string();
    for id in [&plain, &forever, &paused, &ended, &unknown, &"fsb-x".to_owned(), &String::new()] {
        stack.renewals.used(id);
    }
    settle().await;
    assert_eq!((stack.left(&plain), stack.left(&paused), stack.expiry(&forever)), (60, 60, None));
    let outcomes = [RenewOutcome::Renewed, RenewOutcome::Enough, RenewOutcome::Failed];
    assert_eq!(outcomes.map(|outcome| stack.count(RenewSource::Proxy, outcome)), [0, 0, 0]);
}

#[tokio::test(start_paused = true)]
async fn one_attempt_at_a_time_and_a_failure_is_tried_again_after_a_rest() {
    let stack = Stack::new(no_redis()).await;
    let id = stack.create(Some(60), Some("600")).await;
    stack.runtime.inject("update_facts", Fault::Slow(Duration::from_secs(10)));
    stack.renewals.used(&id);
    settle().await;
    for _ in 0..10 {
        stack.renewals.used(&id);
    }
    tokio::time::sleep(Duration::from_secs(20)).await;
    assert_eq!(stack.count(RenewSource::Proxy, RenewOutcome::Renewed), 1);

    let other = stack.create(Some(60), Some("600")).await;
    stack.runtime.inject("update_facts", Fault::Refuse);
    stack.renewals.used(&other);
    settle().await;
    stack.renewals.used(&other);
    settle().await;
    assert_eq!(stack.count(RenewSource::Proxy, RenewOutcome::Failed), 1);
    assert_eq!(stack.left(&other), 60);
    tokio::time::sleep(Duration::from_secs(5)).await;
    stack.renewals.used(&other);
    settle().await;
    assert_eq!(stack.left(&other), 600);
}

#[tokio::test(start_paused = true)]
async fn what_waits_is_bounded_and_a_stop_is_clean() {
    let stack = Stack::new(no_redis()).await;
    let mut ids = Vec::new();
    for _ in 0..1100 {
        ids.push(stack.create(Some(60), Some("600")).await);
    }
    // Nothing else runs in between, so the queue fills up.
    for id in &ids {
        stack.renewals.used(id);
    }
    assert_eq!(stack.count(RenewSource::Proxy, RenewOutcome::Crowded), 1100 - 1024);
    settle().await;
    assert_eq!(stack.count(RenewSource::Proxy, RenewOutcome::Renewed), 1024);
    // Those that were turned away get in with their next request.
    for id in &ids {
        stack.renewals.used(id);
    }
    settle().await;
    assert_eq!(stack.count(RenewSource::Proxy, RenewOutcome::Renewed), 1100);
    stack.renewals.stop().await;
    stack.engine.stop().await;
}

/// A Redis of this test's own, on a socket in a directory of its own.
struct Redis {
    dir: tempfile::TempDir,
    server: Option<Child>,
}

impl Redis {
    /// `None`, said loudly, when the program is not installed.
    fn new() -> Option<Self> {
        if Command::new("redis-server").arg("--version").stdout(Stdio::null()).status().is_err() {
            eprintln!("SKIPPED: redis-server is not installed, so renew messages are not tested");
            return None;
        }
        Some(Self { dir: tempfile::tempdir().unwrap(), server: None })
    }

    fn socket(&self) -> PathBuf {
        self.dir.path().join("redis.sock")
    }

    async fn start(&mut self) {
        let mut command = Command::new("redis-server");
        command.args(["--port", "0", "--save", "", "--appendonly", "no", "--requirepass", "pass word"]);
        command.arg("--unixsocket").arg(self.socket()).arg("--dir").arg(self.dir.path());
        self.server = Some(command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap());
        until(async || UnixStream::connect(self.socket()).await.is_ok()).await;
    }

    fn stop(&mut self) {
        if let Some(mut server) = self.server.take() {
            server.kill().unwrap();
            server.wait().unwrap();
        }
    }

    fn config(&self) -> RedisConfig {
        let dsn = format!("unix://{}?db=1&password=pass%20word", self.socket().display());
        RedisConfig { enabled: true, dsn: Some(Secret::new(dsn)), ..RedisConfig::default() }
    }

    /// Commands, answered one by one; returns the last answer's first line.
    async fn tell(&self, commands: &[Vec<Vec<u8>>]) -> String {
        let mut stream = UnixStream::connect(self.socket()).await.unwrap();
        let words = |words: &[&str]| words.iter().map(|w| w.as_bytes().to_vec()).collect::<Vec<_>>();
        let mut all = vec![words(&["AUTH", "pass word"]), words(&["SELECT", "1"])];
        all.extend_from_slice(commands);
        all.push(words(&["ECHO", "the end"]));
        let mut bytes = Vec::new();
        for command in &all {
            bytes.extend_from_slice(format!("*{}\r\n", command.len()).as_bytes());
            for word in command {
                bytes.extend_from_slice(format!("${}\r\n", word.len()).as_bytes());
                bytes.extend_from_slice(word);
                bytes.extend_from_slice(b"\r\n");
            }
        }
        stream.write_all(&bytes).await.unwrap();
        let mut answer = Vec::new();
        while !answer.ends_with(b"the end\r\n") {
            assert_ne!(stream.read_buf(&mut answer).await.unwrap(), 0);
        }
        let text = String::from_utf8_lossy(&answer).into_owned();
        text.lines().rev().nth(2).unwrap_or_default().to_owned()
    }

    async fn push(&self, messages: impl IntoIterator<Item = Vec<u8>>) {
        let key = "opensandbox:renew:intent";
        let push = |message| vec![b"LPUSH".to_vec(), key.into(), message];
        let commands: Vec<_> = messages.into_iter().map(push).collect();
        let answer = self.tell(&commands).await;
        assert!(answer.starts_with(':'), "{answer}");
    }
}

impl Drop for Redis {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Looks again and again; the test's own time limit ends what never comes.
async fn until(mut come: impl AsyncFnMut() -> bool) {
    while !come().await {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

fn message(id: &str, at: Timestamp) -> Vec<u8> {
    format!(r#"{{"sandbox_id":"{id}","observed_at":"{at}","port":8080,"request_uri":"/x"}}"#).into_bytes()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn thousands_of_messages_renew_what_they_name_and_garbage_is_counted() {
    let Some(mut redis) = Redis::new() else { return };
    redis.start().await;
    let stack = Stack::new(redis.config()).await;
    let mut ids = Vec::new();
    for _ in 0..40 {
        ids.push(stack.create(Some(60), Some("600")).await);
    }
    let plain = stack.create(Some(60), None).await;
    let now = stack.clock.now();
    let old = Timestamp::clamped(now.as_millis() - 301_000);
    let mut messages = Vec::new();
    for round in 0..100 {
        messages.extend(ids.iter().map(|id| message(id, now)));
        messages.push(message(&plain, now));
        messages.push(message(&ids[0], old));
        messages.push(message("no-such-id", now));
        messages.push(format!("garbage {round}").into_bytes());
        messages.push(vec![0xff, 0, b'\r', b'\n', b'{']);
    }
    messages.push(vec![b'x'; 1 << 20]);
    messages.push(Vec::new());
    let total = messages.len() as u64;
    redis.push(messages).await;

    use RenewOutcome::{Enough, Failed, Ineligible, Invalid, Renewed, Stale, TooSoon};
    let count = |outcome| stack.count(RenewSource::Redis, outcome);
    let all = [Renewed, Enough, TooSoon, Ineligible, Invalid, Stale, Failed];
    until(async || all.map(count).iter().sum::<u64>() == total).await;
    assert_eq!((count(Renewed) + count(Enough), count(TooSoon)), (40, 3960), "one renewal covers the others");
    assert_eq!((count(Ineligible), count(Invalid), count(Stale), count(Failed)), (200, 202, 100, 0));
    assert!(ids.iter().all(|id| stack.left(id) > 60));
    assert!(stack.left(&plain) <= 60, "nobody asked for it to be renewed");
    assert_eq!(stack.metrics.redis_consumers(), Some(8));
    stack.renewals.stop().await;
    assert_eq!(stack.metrics.redis_consumers(), Some(0));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_redis_that_is_away_at_first_or_for_a_while_is_found_again() {
    let Some(mut redis) = Redis::new() else { return };
    let stack = Stack::new(redis.config()).await;
    let ids = [stack.create(Some(60), Some("600")).await, stack.create(Some(60), Some("600")).await];
    assert_eq!(stack.metrics.redis_consumers(), Some(0));
    redis.start().await;
    redis.push([message(&ids[0], stack.clock.now())]).await;
    until(async || stack.left(&ids[0]) > 60).await;

    redis.stop();
    until(async || stack.metrics.redis_consumers() == Some(0)).await;
    // The proxy's own side does not care.
    redis.start().await;
    redis.push([message(&ids[1], stack.clock.now())]).await;
    until(async || stack.left(&ids[1]) > 60).await;
    until(async || stack.metrics.redis_consumers() == Some(8)).await;
    stack.renewals.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_key_that_is_no_list_is_waited_out() {
    let Some(mut redis) = Redis::new() else { return };
    redis.start().await;
    let key = b"opensandbox:renew:intent".to_vec();
    redis.tell(&[vec![b"SET".to_vec(), key.clone(), b"x".to_vec()]]).await;
    let stack = Stack::new(redis.config()).await;
    let id = stack.create(Some(60), Some("600")).await;
    redis.tell(&[vec![b"DEL".to_vec(), key]]).await;
    redis.push([message(&id, stack.clock.now())]).await;
    until(async || stack.left(&id) > 60).await;
    stack.renewals.stop().await;
}

#[tokio::test]
async fn nothing_is_started_unless_it_is_asked_for() {
    let engine = Engine::new(
        Arc::<FakeRuntime>::default(),
        Arc::<MemoryStore>::default(),
        Arc::<ManualClock>::default(),
        Settings::default(),
    );
    let off = RenewIntentConfig::default();
    assert!(Renewals::start(&engine, &off, Arc::default()).unwrap().is_none());
    let dsn = Some(Secret::new("redis://:hunter2@host:port"));
    let redis = RedisConfig { enabled: true, dsn, ..RedisConfig::default() };
    let wrong = RenewIntentConfig { enabled: true, redis, ..off };
    let error = Renewals::start(&engine, &wrong, Arc::default()).unwrap_err();
    assert!(error.to_string().contains("the address of Redis") && !format!("{error:?}").contains("hunter2"));
}
