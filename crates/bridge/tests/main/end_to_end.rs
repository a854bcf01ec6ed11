//! A bridge against a server over a real socket. Time is the runtime's and paused: minutes pass when nothing else happens.

use std::net::Ipv4Addr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use jiff::Timestamp;
use sandglass_bridge::Monotonic;
use sandglass_bridge::agent::{
    Address, Bridge, Config, CredentialError, Ending, HttpTransport, Identity, Jitter, Notice, Pace,
    VitalSigns, Vitals,
};
use sandglass_bridge::ring::{Draft, Ring};
use sandglass_bridge::server::{
    LeaseState, LeaseTimes, Notice as Observed, Registration, Registry, RepositoryScope, TokenHash,
};
use sandglass_bridge::wire::{
    Class, Command, FatalReport, GitCredentialRequest, Outcome, Refusal, SandboxId, Secret,
};
use tempfile::TempDir;
use tokio::net::TcpListener;
use tokio::time::{sleep, timeout};

use crate::test_server::{Disk, TestServer};

const SANDBOX: &str = "box-1";
const TOKEN: &str = "0123456789abcdef";

pub struct Quiet;

impl Vitals for Quiet {
    fn read(&self) -> VitalSigns {
        VitalSigns::default()
    }
}

struct Stage {
    dir: TempDir,
    clock: Monotonic,
    disk: Arc<Mutex<Disk>>,
}

impl Stage {
    fn new() -> Self {
        Self { dir: TempDir::new().unwrap(), clock: Monotonic::start(), disk: Arc::default() }
    }

    fn server(&self, registry: Registry) -> TestServer {
        TestServer::unix(&self.dir.path().join("agent.sock"), registry, self.clock, self.disk.clone())
    }

    fn registry(&self) -> Registry {
        let mut registry = Registry::new(1);
        registry.register(registration(1, TOKEN), self.clock.now()).unwrap();
        registry
    }

    fn bridge(&self) -> Bridge {
        self.bridge_to(Address::Unix(self.dir.path().join("agent.sock")))
    }

    fn bridge_to(&self, address: Address) -> Bridge {
        let sandbox: SandboxId = SANDBOX.parse().unwrap();
        let transport = HttpTransport::new(address, &sandbox, 1, &Secret::new(TOKEN.into())).unwrap();
        let rings = self.dir.path().join("ring");
        let boot = Ring::boot_of(&rings).unwrap().unwrap_or_else(|| "boot-1".parse().unwrap());
        let ring = Ring::open(&rings, boot.clone()).unwrap().0;
        let identity =
            Identity { sandbox, generation: 1, boot, agent_version: "1".into(), capabilities: Vec::new() };
        let config = Config { identity, pace: Pace::default(), jitter: Jitter::seeded(3) };
        Bridge::start(config, transport, ring, Quiet)
    }

    fn stored(&self) -> Vec<u64> {
        self.disk.lock().unwrap().events.iter().map(|event| event.seq).collect()
    }

    async fn until(&self, what: &str, mut holds: impl FnMut(&Disk) -> bool) {
        let waiting = async {
            while !holds(&self.disk.lock().unwrap()) {
                sleep(Duration::from_millis(10)).await;
            }
        };
        assert!(timeout(Duration::from_secs(120), waiting).await.is_ok(), "it never happened: {what}");
    }
}

fn registration(generation: u64, token: &str) -> Registration {
    Registration {
        sandbox: SANDBOX.parse().unwrap(),
        generation,
        token: TokenHash::of(token),
        repositories: vec![RepositoryScope::new("git.example.com", "acme/web").unwrap()],
        times: LeaseTimes::default(),
    }
}

fn event(n: u64) -> Draft {
    Draft::new(Class::State, Timestamp::UNIX_EPOCH, "counted", &n).unwrap()
}

async fn told(bridge: &mut Bridge, mut wanted: impl FnMut(&Notice) -> bool) -> Notice {
    let waiting = async {
        loop {
            let notice = bridge.notices.recv().await.unwrap();
            if wanted(&notice) {
                return notice;
            }
        }
    };
    timeout(Duration::from_secs(120), waiting).await.unwrap()
}

fn restart_web(server: &TestServer) -> String {
    let command = Command::ServiceRestart { name: "web".into() };
    let now = server.state.clock.now();
    let id = server
        .state
        .registry
        .lock()
        .unwrap()
        .enqueue(SANDBOX, &command, None, now, Timestamp::now())
        .unwrap();
    server.state.changed.notify_waiters();
    id.to_string()
}

#[tokio::test(start_paused = true)]
async fn events_logs_commands_and_credentials_find_their_way() {
    let stage = Stage::new();
    let server = stage.server(stage.registry());
    let mut bridge = stage.bridge();
    for n in 1..=3 {
        bridge.handle.emit(event(n)).unwrap();
    }
    bridge.handle.log("web", "stdout", 0, b"hello ");
    bridge.handle.log("web", "stdout", 6, b"\xffworld");
    told(&mut bridge, |notice| matches!(notice, Notice::Attached(_))).await;
    stage.until("events and logs", |disk| disk.events.len() == 3 && disk.log == b"hello \xffworld").await;
    let id = restart_web(&server);
    let delivered = bridge.commands.recv().await.unwrap();
    assert_eq!((delivered.id.as_str(), delivered.expires), (id.as_str(), None));
    bridge.handle.settle(delivered.id, Outcome::done());
    stage.until("the result", |disk| disk.results == [(id.clone(), Outcome::done())]).await;
    let ask = |path: &str| GitCredentialRequest { host: "git.example.com".into(), path: path.into() };
    let credential = bridge.handle.git_credential(ask("acme/web.git")).await.unwrap();
    assert_eq!(credential.password.reveal(), "p");
    let refused = bridge.handle.git_credential(ask("acme/other")).await.unwrap_err();
    assert!(matches!(refused, CredentialError::Refused(Refusal::NotDeclared)), "{refused}");
    sleep(Duration::from_secs(300)).await;
    assert_eq!(server.state.registry.lock().unwrap().lease_state(SANDBOX), Some(LeaseState::Live));
    let silent = |notice: &Observed| matches!(notice, Observed::Unresponsive { .. } | Observed::Lost { .. });
    assert!(!stage.disk.lock().unwrap().notices.iter().any(silent));
}

#[tokio::test(start_paused = true)]
async fn five_minutes_without_a_server_lose_and_double_nothing() {
    let stage = Stage::new();
    let server = stage.server(stage.registry());
    let mut bridge = stage.bridge();
    bridge.handle.emit(event(1)).unwrap();
    stage.until("the first event", |disk| disk.events.len() == 1).await;
    let first = restart_web(&server);
    let delivered = bridge.commands.recv().await.unwrap();
    let saved = server.kill();
    bridge.handle.settle(delivered.id, Outcome::done());
    for n in 2..=1_500 {
        bridge.handle.emit(event(n)).unwrap();
        sleep(Duration::from_millis(200)).await;
    }
    assert_eq!(stage.stored(), [1]);
    let server = stage.server(Registry::restored(2, saved, stage.clock.now()));
    stage.until("all events", |disk| disk.events.len() == 1_500).await;
    assert_eq!(stage.stored(), (1..=1_500).collect::<Vec<u64>>());
    let second = restart_web(&server);
    assert_ne!(first, second);
    let delivered = bridge.commands.recv().await.unwrap();
    assert_eq!(delivered.id.as_str(), second);
    stage
        .until("a heartbeat", |disk| {
            disk.notices.iter().any(|notice| matches!(notice, Observed::Live { epoch: 1, .. }))
        })
        .await;
    assert_eq!(bridge.handle.with_ring(|ring| ring.status().events), 0);
}

#[tokio::test(start_paused = true)]
async fn a_stream_resumes_where_it_broke_and_a_command_is_carried_out_once() {
    let stage = Stage::new();
    let server = stage.server(stage.registry());
    let mut bridge = stage.bridge();
    let first = restart_web(&server);
    assert_eq!(bridge.commands.recv().await.unwrap().id.as_str(), first);
    // The same registry behind a new socket: every connection breaks, nothing is forgotten.
    let state = Arc::clone(&server.state);
    server.kill();
    sleep(Duration::from_secs(5)).await;
    let registry = std::mem::replace(&mut *state.registry.lock().unwrap(), Registry::new(99));
    let server = stage.server(registry);
    let second = restart_web(&server);
    let delivered = bridge.commands.recv().await.unwrap();
    assert_eq!(delivered.id.as_str(), second, "the first, which has no result yet, does not come again");
    let resumed = stage.disk.lock().unwrap().resumed.clone();
    assert_eq!(resumed, [None, Some(first)]);
    bridge.handle.settle(delivered.id, Outcome::done());
    stage.until("the result", |disk| disk.results.len() == 1).await;
}

#[tokio::test(start_paused = true)]
async fn a_restarted_agent_goes_on_where_it_was() {
    let stage = Stage::new();
    let bridge = stage.bridge();
    for n in 1..=10 {
        bridge.handle.emit(event(n)).unwrap();
    }
    bridge.task.abort();
    let _ = bridge.task.await;
    drop((bridge.handle, bridge.commands, bridge.notices));
    let _server = stage.server(stage.registry());
    let bridge = stage.bridge();
    bridge.handle.emit(event(11)).unwrap();
    stage.until("all events", |disk| disk.events.len() == 11).await;
    assert_eq!(stage.stored(), (1..=11).collect::<Vec<u64>>());
    bridge.task.abort();
}

#[tokio::test(start_paused = true)]
async fn an_agent_of_an_older_generation_stops() {
    let stage = Stage::new();
    let server = stage.server(stage.registry());
    let mut bridge = stage.bridge();
    told(&mut bridge, |notice| matches!(notice, Notice::Attached(_))).await;
    let now = stage.clock.now();
    server.state.registry.lock().unwrap().register(registration(2, "another"), now).unwrap();
    bridge.handle.emit(event(1)).unwrap();
    let ended = Ending::Revoked(Refusal::Superseded);
    told(&mut bridge, |notice| *notice == Notice::Ended(ended)).await;
    assert_eq!(bridge.task.await.unwrap(), ended);
    assert_eq!(stage.stored(), [0; 0]);
}

#[tokio::test(start_paused = true)]
async fn a_stopping_sandbox_delivers_what_it_has_and_ends() {
    let stage = Stage::new();
    let server = stage.server(stage.registry());
    let mut bridge = stage.bridge();
    told(&mut bridge, |notice| matches!(notice, Notice::Attached(_))).await;
    server.state.registry.lock().unwrap().stop(SANDBOX);
    told(&mut bridge, |notice| *notice == Notice::Draining).await;
    let git = GitCredentialRequest { host: "git.example.com".into(), path: "acme/web".into() };
    let refused = bridge.handle.git_credential(git).await.unwrap_err();
    assert!(matches!(refused, CredentialError::Refused(Refusal::Draining)));
    for n in 1..=700 {
        bridge.handle.emit(event(n)).unwrap();
    }
    bridge.handle.drain();
    assert_eq!(bridge.task.await.unwrap(), Ending::Drained);
    assert_eq!(stage.stored().len(), 700);
}

#[tokio::test(start_paused = true)]
async fn a_fatal_report_arrives_before_any_lease() {
    let stage = Stage::new();
    let bridge = stage.bridge();
    let report = FatalReport::bounded("setup", Some(1), None, "setup failed", "boom\n");
    bridge.handle.fatal(report.clone());
    sleep(Duration::from_secs(20)).await;
    let _server = stage.server(stage.registry());
    stage.until("the report", |disk| disk.fatal.as_ref() == Some(&report)).await;
    bridge.task.abort();
}

#[tokio::test]
async fn tcp_carries_the_same() {
    let stage = Stage::new();
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let address = Address::Tcp(listener.local_addr().unwrap());
    let _server = TestServer::tcp(listener, stage.registry(), stage.clock, stage.disk.clone());
    let bridge = stage.bridge_to(address);
    bridge.handle.emit(event(1)).unwrap();
    stage.until("the event", |disk| disk.events.len() == 1).await;
    bridge.task.abort();
}
