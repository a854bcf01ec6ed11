//! Real processes and real time. Nothing here depends on how fast either is.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use sandglass_supervise::boot::{Boot, Outcome};
use sandglass_supervise::filter::KnownSecrets;
use sandglass_supervise::log::{Limits, Logs};
use sandglass_supervise::plan::{BootPlan, Phase};
use sandglass_supervise::ports::{Entrypoint, Exit, Ports, Program, Progress, Repositories, Signal, Spawn};
use sandglass_supervise::ports::{SpawnError, SyncFailure};
use sandglass_supervise::report::Reason;
use sandglass_supervise::service::definition::{Check, Probe, Run};
use sandglass_supervise::service::restart::Backoff;
use sandglass_supervise::service::{ServiceDefinition, Services, State};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use crate::fake::Heard;
use crate::real::RealSpawn;

/// Much longer than anything here takes.
const PATIENCE: Duration = Duration::from_secs(60);

struct Sandbox {
    spawn: RealSpawn,
    ports: Ports,
    services: Services,
    heard: Heard,
    folder: tempfile::TempDir,
}

impl Sandbox {
    fn new() -> Sandbox {
        let folder = tempfile::tempdir().unwrap();
        let (spawn, heard) = (RealSpawn::default(), Heard::default());
        let logs = Logs::open(&folder.path().join("logs"), Limits::default()).unwrap();
        let filter = Arc::new(KnownSecrets::new(["hunter22"]));
        let ports = Ports::new(Arc::new(spawn.clone()), logs, filter, Arc::new(heard.clone()));
        let backoff = Backoff { base: Duration::from_millis(20), ..Backoff::default() };
        let services = Services::new(ports.clone(), backoff);
        Sandbox { spawn, ports, services, heard, folder }
    }

    async fn reaches(&self, name: &str, wanted: State) {
        let mut changed = self.services.changed();
        let reached = async {
            while self.services.snapshot(name).unwrap().state != wanted {
                changed.changed().await.unwrap();
            }
        };
        let snapshot = || self.services.snapshot(name);
        tokio::time::timeout(PATIENCE, reached)
            .await
            .unwrap_or_else(|_| panic!("{wanted:?}: {:?}", snapshot()));
    }

    /// Waits until this much was written.
    async fn said(&self, source: &str, bytes: u64) {
        let mut changed = self.ports.logs.changed();
        let said = async {
            while self.ports.logs.extent(source).is_none_or(|extent| extent.end < bytes) {
                changed.changed().await.unwrap();
            }
        };
        tokio::time::timeout(PATIENCE, said).await.unwrap();
    }

    async fn restarted(&self, name: &str, count: u64) {
        let mut changed = self.services.changed();
        let restarted = async {
            while self.services.snapshot(name).unwrap().restart_count < count {
                changed.changed().await.unwrap();
            }
        };
        tokio::time::timeout(PATIENCE, restarted).await.unwrap();
        self.reaches(name, State::Ready).await;
    }

    async fn boot(&self, plan: Value, cancel: CancellationToken) -> Outcome {
        let plan: BootPlan = serde_json::from_value(plan).unwrap();
        plan.check().unwrap();
        let boot = Boot {
            plan,
            ports: self.ports.clone(),
            services: self.services.clone(),
            repositories: Arc::new(Nothing),
            entrypoint: Arc::new(Nothing),
        };
        tokio::time::timeout(PATIENCE, boot.run(cancel)).await.unwrap()
    }
}

struct Nothing;

#[async_trait]
impl Repositories for Nothing {
    async fn sync(&self, _: &Value, _: Arc<dyn Progress>, _: CancellationToken) -> Result<(), SyncFailure> {
        Ok(())
    }
}

#[async_trait]
impl Entrypoint for Nothing {
    async fn start(&self, _: &Program) -> Result<(), SpawnError> {
        Ok(())
    }
}

fn shell(script: &str) -> Run {
    Run::Command(vec!["sh".into(), "-c".into(), script.into()])
}

#[tokio::test]
async fn a_killed_service_comes_back() {
    let sandbox = Sandbox::new();
    sandbox.services.add(ServiceDefinition::new("web", shell("echo up; exec sleep 1000"))).unwrap();
    sandbox.services.start("web").await.unwrap();
    for count in 1..=2 {
        sandbox.reaches("web", State::Ready).await;
        sandbox.said("service.web", 3 * count).await;
        sandbox.spawn.signal(sandbox.spawn.last(), Signal::Kill);
        sandbox.restarted("web", count).await;
        let snapshot = sandbox.services.snapshot("web").unwrap();
        assert_eq!(
            (snapshot.restart_count, snapshot.restarts_left),
            (count, 5 - u32::try_from(count).unwrap())
        );
        assert_eq!(snapshot.last_exit, Some(Exit::Signal(9)));
    }
    assert_eq!(sandbox.spawn.count(), 3);
    sandbox.said("service.web", 9).await;
    sandbox.services.stop_all(Duration::from_secs(30)).await;
    assert!(!sandbox.spawn.anybody_left());
    // The output of all three is there, and still is for whoever comes later.
    let logs = Logs::open(&sandbox.folder.path().join("logs"), Limits::default()).unwrap();
    let batch = logs.read("service.web", 0, 1000).unwrap();
    let text: Vec<u8> = batch.frames.into_iter().flat_map(|frame| frame.data).collect();
    assert_eq!(text, b"up\nup\nup\n");
}

/// Ignores TERM, and so does its child.
const STUBBORN: &str = "trap '' TERM; sleep 1000 & echo ready; while :; do sleep 1; done";

#[tokio::test]
async fn who_ignores_the_request_is_killed_with_its_children() {
    let sandbox = Sandbox::new();
    sandbox.services.add(ServiceDefinition::new("stubborn", shell(STUBBORN))).unwrap();
    sandbox.services.start("stubborn").await.unwrap();
    sandbox.reaches("stubborn", State::Ready).await;
    // By then it ignores it.
    sandbox.said("service.stubborn", 6).await;
    sandbox.services.stop_all(Duration::from_millis(300)).await;
    assert!(!sandbox.spawn.anybody_left());
    let snapshot = sandbox.services.snapshot("stubborn").unwrap();
    assert_eq!((snapshot.state, snapshot.last_exit), (State::Stopped, Some(Exit::Signal(9))));
}

#[tokio::test]
async fn a_silent_hook_is_ended_and_quoted_and_a_talking_one_is_not() {
    let hook = |script: &str, seconds: u64| {
        let command = json!(["sh", "-c", script]);
        json!({ "setup": [{ "label": "web", "command": command, "limits": { "timeoutSeconds": seconds } }], "limits": { "graceSeconds": 1 } })
    };
    let sandbox = Sandbox::new();
    let silent = hook("printf 'token hunt'; printf 'er22\\n' >&1; sleep 1000 & sleep 1000", 3);
    let Outcome::Failed(failure) = sandbox.boot(silent, CancellationToken::new()).await else { panic!() };
    assert_eq!((failure.reason, failure.step.phase), (Reason::BootTimeout, Phase::Setup));
    assert_eq!(failure.message, "setup of web: no progress for 3 s");
    assert_eq!(failure.output_tail, "token ***");
    assert!(!sandbox.spawn.anybody_left());

    let sandbox = Sandbox::new();
    let talking = hook("for i in $(seq 25); do echo $i; sleep 0.2; done", 4);
    assert_eq!(sandbox.boot(talking, CancellationToken::new()).await, Outcome::Ready { warnings: vec![] });
}

#[tokio::test]
async fn a_failed_hook_is_quoted_to_its_end() {
    let sandbox = Sandbox::new();
    // A child in the background keeps the output open.
    let script = "sleep 1000 & for i in $(seq 1 500); do echo line $i; done; echo last >&2; exit 3";
    let plan = json!({ "start": [{ "label": "web", "command": ["sh", "-c", script] }] });
    let Outcome::Failed(failure) = sandbox.boot(plan, CancellationToken::new()).await else { panic!() };
    assert_eq!(failure.exit_code, Some(3));
    let lines: Vec<&str> = failure.output_tail.lines().collect();
    assert_eq!(lines.len(), 60);
    assert_eq!(lines[58..], ["line 500", "last"]);
    assert!(!sandbox.spawn.anybody_left());
}

#[tokio::test]
async fn what_a_good_hook_left_in_the_background_goes_on_and_may_write() {
    let sandbox = Sandbox::new();
    let mark = sandbox.folder.path().join("mark");
    let script = format!("(sleep 0.3; echo late; echo done > {}) & echo early", mark.display());
    let plan = json!({ "start": [{ "label": "web", "command": ["sh", "-c", script] }] });
    assert_eq!(sandbox.boot(plan, CancellationToken::new()).await, Outcome::Ready { warnings: vec![] });
    sandbox.said("boot.start.web", 11).await;
}

#[tokio::test]
async fn cancelled_in_a_phase_with_stubborn_processes_nothing_is_left() {
    for phase in [Phase::Setup, Phase::Services, Phase::Start] {
        let sandbox = Sandbox::new();
        let stubborn = json!(["sh", "-c", STUBBORN]);
        let hook = json!([{ "label": "web", "command": stubborn }]);
        let mut plan = json!({
            "services": [{ "name": "app", "command": stubborn, "required": true }],
            "limits": { "graceSeconds": 1 },
        });
        match phase {
            Phase::Setup => plan["setup"] = hook,
            Phase::Start => plan["start"] = hook,
            // Never ready.
            _ => plan["services"][0]["probe"] = json!({ "type": "exec", "command": ["false"] }),
        }
        let cancel = CancellationToken::new();
        let source = match phase {
            Phase::Services => "service.app".to_owned(),
            phase => format!("boot.{phase}.web"),
        };
        let when_it_runs = async {
            let mut changed = sandbox.ports.logs.changed();
            while sandbox.ports.logs.extent(&source).is_none() {
                changed.changed().await.unwrap();
            }
            cancel.cancel();
        };
        let (outcome, ()) = tokio::join!(sandbox.boot(plan, cancel.clone()), when_it_runs);
        assert_eq!(outcome, Outcome::Cancelled { phase }, "{:?}", sandbox.heard.lines());
        assert!(!sandbox.spawn.anybody_left(), "{phase}");
    }
}

async fn answer(listener: TcpListener, status: &'static str) {
    loop {
        let (mut stream, _) = listener.accept().await.unwrap();
        let mut head = [0; 1024];
        let _ = stream.read(&mut head).await;
        let _ = stream.write_all(format!("HTTP/1.1 {status}\r\nContent-Length: 0\r\n\r\n").as_bytes()).await;
    }
}

#[tokio::test]
async fn each_kind_of_probe_tells_whether_a_service_answers() {
    let sandbox = Sandbox::new();
    let good = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let bad = TcpListener::bind("[::1]:0").await;
    let port = good.local_addr().unwrap().port();
    tokio::spawn(answer(good, "204 No Content"));
    let mark = sandbox.folder.path().join("mark");
    let wait_for_mark = vec!["test".into(), "-e".into(), mark.display().to_string()];
    let mut checks = vec![
        ("tcp", Check::Tcp { port: Some(port) }),
        ("http", Check::Http { port: Some(port), path: "/ok".into() }),
        ("exec", Check::Exec { command: wait_for_mark }),
    ];
    if let Ok(bad) = bad {
        let port = bad.local_addr().unwrap().port();
        tokio::spawn(answer(bad, "500 No"));
        checks.push(("six", Check::Tcp { port: Some(port) }));
        checks.push(("broken", Check::Http { port: Some(port), path: "/".into() }));
    }
    for (name, check) in &checks {
        let probe = Probe { check: check.clone(), interval_seconds: 1, timeout_seconds: 30, threshold: 3 };
        let definition = ServiceDefinition {
            probe: Some(probe),
            ready_seconds: if *name == "broken" { 5 } else { 60 },
            ..ServiceDefinition::new(*name, shell("exec sleep 1000"))
        };
        sandbox.services.add(definition).unwrap();
    }
    sandbox.services.start_enabled().await.unwrap();
    for (name, _) in &checks {
        if *name == "broken" {
            sandbox.reaches(name, State::Restarting).await;
            let error = sandbox.services.snapshot(name).unwrap().last_error.unwrap();
            assert_eq!(error, "not ready within 5 s: GET /: status 500");
            continue;
        }
        if *name == "exec" {
            assert_eq!(sandbox.services.snapshot(name).unwrap().state, State::Starting);
            std::fs::write(&mark, "").unwrap();
        }
        sandbox.reaches(name, State::Ready).await;
    }
    sandbox.services.stop_all(Duration::from_secs(30)).await;
    assert!(!sandbox.spawn.anybody_left());
}
