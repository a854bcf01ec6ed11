//! What a thousand idle agents cost. Prints; asserts nothing about time.

use std::sync::Arc;
use std::time::{Duration, Instant};

use jiff::Timestamp;
use sandglass_bridge::agent::{Address, Bridge, Config, HttpTransport, Identity, Jitter, Pace};
use sandglass_bridge::ring::Ring;
use sandglass_bridge::server::{Caller, LeaseTimes, Registration, Registry, TokenHash};
use sandglass_bridge::wire::{AttachRequest, SandboxId, Secret};
use sandglass_bridge::{Moment, Monotonic};
use tempfile::TempDir;

use crate::end_to_end::Quiet;
use crate::test_server::TestServer;

const AGENTS: u64 = 1_000;
const MINUTES: u32 = 10;

fn name(n: u64) -> String {
    format!("box-{n}")
}

fn registry(now: Moment) -> Registry {
    let mut registry = Registry::new(1);
    for n in 0..AGENTS {
        let registration = Registration {
            sandbox: name(n).parse().unwrap(),
            generation: 1,
            token: TokenHash::of(&name(n)),
            repositories: Vec::new(),
            times: LeaseTimes::default(),
        };
        registry.register(registration, now).unwrap();
    }
    registry
}

/// Seconds of processor time that this process has used, in the kernel and outside.
fn processor_seconds() -> f64 {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap();
    let fields: Vec<&str> = stat.rsplit_once(')').unwrap().1.split_whitespace().collect();
    let ticks: u64 = fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap();
    ticks as f64 / 100.0
}

#[test]
#[ignore = "a measurement"]
fn the_registrys_part_of_a_heartbeat() {
    let mut registry = registry(Moment::default());
    let leases: Vec<(String, String)> = (0..AGENTS)
        .map(|n| {
            let me = name(n);
            let caller = Caller { sandbox: &me, generation: 1, token: &me, lease: None };
            let request = AttachRequest {
                sandbox_id: me.parse().unwrap(),
                generation: 1,
                boot_id: "b".parse().unwrap(),
                agent_version: "1".into(),
                protocol_version: 1,
                capabilities: Vec::new(),
                last_seq: 0,
            };
            let reply = registry.attach(&caller, &request, Moment::default(), Timestamp::UNIX_EPOCH).unwrap();
            (me.clone(), reply.lease_id.to_string())
        })
        .collect();
    let begun = Instant::now();
    let rounds = 100;
    for round in 0..rounds {
        let now = Moment::from_millis(round * 15_000);
        for (me, lease) in &leases {
            let caller = Caller { sandbox: me, generation: 1, token: me, lease: Some(lease) };
            registry.heartbeat(&caller, now).unwrap();
        }
        registry.advance(now);
    }
    println!("{:?} a heartbeat", begun.elapsed() / (rounds * AGENTS) as u32);
}

/// Needs some 5,000 file descriptors.
#[tokio::test(start_paused = true)]
#[ignore = "a measurement"]
async fn a_thousand_idle_agents_on_one_socket() {
    let dir = TempDir::new().unwrap();
    let socket = dir.path().join("agent.sock");
    let clock = Monotonic::start();
    let disk = Arc::default();
    let _server = TestServer::unix(&socket, registry(clock.now()), clock, disk);
    let bridges: Vec<Bridge> = (0..AGENTS)
        .map(|n| {
            let sandbox: SandboxId = name(n).parse().unwrap();
            let address = Address::Unix(socket.clone());
            let transport = HttpTransport::new(address, &sandbox, 1, &Secret::new(name(n))).unwrap();
            let boot: sandglass_bridge::wire::BootId = "b".parse().unwrap();
            let ring = Ring::in_memory(boot.clone());
            let identity = Identity {
                sandbox,
                generation: 1,
                boot,
                agent_version: "1".into(),
                capabilities: Vec::new(),
            };
            let config = Config { identity, pace: Pace::default(), jitter: Jitter::seeded(n) };
            Bridge::start(config, transport, ring, Quiet)
        })
        .collect();
    tokio::time::sleep(Duration::from_secs(60)).await;
    let before = processor_seconds();
    tokio::time::sleep(Duration::from_secs(60) * MINUTES).await;
    let used = processor_seconds() - before;
    let share = used / f64::from(MINUTES * 60);
    println!(
        "{used:.2} s of processor time in {MINUTES} min for both sides: {:.2} % of a core",
        share * 100.0
    );
    for bridge in bridges {
        bridge.task.abort();
    }
}
