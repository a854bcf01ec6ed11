//! What dies and comes back: nothing gets out meanwhile, and what was known is known again.

use std::net::{IpAddr, TcpListener, UdpSocket};
use std::time::{Duration, Instant};

use rustix::process::{Signal, kill_process};

use super::client::{connect, echo, resolve};
use super::program::{Home, Program, call, change};
use super::stage::{Place, Stage};
use super::world::World;

const GOOD: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(203, 0, 113, 10));
const OTHER: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(203, 0, 113, 12));

const NOTHING: &str = "";

fn a_worker_is_replaced(place: Place) {
    let stage = Stage::new(place);
    let _world = World::start(&stage.world);
    let home = Home::new(NOTHING);
    let mut program = Program::start(&stage, &home);
    change(&stage, "PATCH", r#"[{"action":"allow","target":"good.test"}]"#);
    // The policy is known without its file.
    std::fs::remove_file(home.folder.path().join("policy.json")).unwrap();
    let mut held = stage.sandbox.within(|| {
        assert_eq!(resolve("good.test"), [GOOD]);
        let mut held = connect(GOOD, 7).unwrap();
        // Once the server has acknowledged the first bytes the kernel goes on alone.
        (0..3).for_each(|_| echo(&mut held).unwrap());
        held
    });
    let first = program.worker();
    kill_process(first, Signal::KILL).unwrap();
    stage.sandbox.within(|| {
        connect(OTHER, 7).expect_err("nobody is there to allow it");
    });
    program.await_line(|line| line["ready"] == true);
    assert_ne!(program.worker(), first);
    stage.sandbox.within(|| {
        echo(&mut held).expect("what was open stays open");
        echo(&mut connect(GOOD, 7).expect("what was resolved is known")).unwrap();
        connect(OTHER, 7).expect_err("it is not allowed");
    });
    assert!(call(&stage, "GET", "/policy", "").1.contains("good.test"));
}

#[test]
fn a_worker_is_replaced_in_a_gateway() {
    a_worker_is_replaced(Place::Gateway);
}

#[test]
fn a_worker_is_replaced_in_a_shared_network() {
    a_worker_is_replaced(Place::Shared);
}

fn without_a_program_nothing_gets_out(place: Place, signal: Signal) {
    let stage = Stage::new(place);
    let _world = World::start(&stage.world);
    let home = Home::new(NOTHING);
    let mut program = Program::start(&stage, &home);
    change(&stage, "PATCH", r#"[{"action":"allow","target":"good.test"}]"#);
    stage.sandbox.within(|| assert_eq!(resolve("good.test"), [GOOD]));
    program.end(signal);
    stage.sandbox.within(|| {
        std::thread::scope(|scope| {
            // Connections that are neither refused nor answered take their time.
            scope.spawn(|| {
                stage.sandbox.enter();
                connect(OTHER, 7).expect_err("the rules stay")
            });
            scope.spawn(|| {
                stage.sandbox.enter();
                connect(GOOD, 80).expect_err("nobody looks into it")
            });
        });
    });
    let _next = Program::start(&stage, &home);
    stage.sandbox.within(|| {
        assert_eq!(resolve("good.test"), [GOOD], "the policy was stored");
        echo(&mut connect(GOOD, 7).unwrap()).unwrap();
        connect(OTHER, 7).expect_err("it is not allowed");
    });
}

#[test]
fn nothing_gets_out_of_a_gateway_without_a_program() {
    without_a_program_nothing_gets_out(Place::Gateway, Signal::KILL);
}

#[test]
fn nothing_gets_out_of_a_shared_network_without_a_program() {
    without_a_program_nothing_gets_out(Place::Shared, Signal::KILL);
}

#[test]
fn nothing_gets_out_after_an_orderly_end() {
    without_a_program_nothing_gets_out(Place::Gateway, Signal::TERM);
}

#[test]
fn nobody_takes_the_place_of_a_worker_that_is_gone() {
    let stage = Stage::new(Place::Shared);
    let _world = World::start(&stage.world);
    let home = Home::new(NOTHING);
    let mut program = Program::start(&stage, &home);
    let taken = || {
        stage.sandbox.within(|| {
            TcpListener::bind("0.0.0.0:18080").is_ok()
                || TcpListener::bind("127.0.0.1:18081").is_ok()
                || TcpListener::bind("127.0.0.1:15353").is_ok()
                || UdpSocket::bind("127.0.0.1:15353").is_ok()
        })
    };
    for _ in 0..2 {
        assert!(!taken());
        kill_process(program.worker(), Signal::KILL).unwrap();
        assert!(!taken());
        // Asked while nobody is there, answered by the next one.
        let (status, _) = call(&stage, "GET", "/policy", "");
        assert_eq!(status, 200);
        program.await_line(|line| line["ready"] == true);
    }
}

#[test]
fn who_asks_after_health_is_told_while_nobody_is_there() {
    let stage = Stage::new(Place::Shared);
    let _world = World::start(&stage.world);
    let home = Home::new(NOTHING);
    let mut program = Program::start(&stage, &home);
    assert_eq!(call(&stage, "GET", "/healthz", ""), (200, "ok".to_owned()));
    // The third pause is one of seconds.
    for _ in 0..2 {
        kill_process(program.worker(), Signal::KILL).unwrap();
        program.await_line(|line| line["ready"] == true);
    }
    kill_process(program.worker(), Signal::KILL).unwrap();
    assert_eq!(call(&stage, "GET", "/healthz", ""), (503, "mitmproxy not ready".to_owned()));
    // What only a worker can answer has waited for one.
    assert_eq!(call(&stage, "GET", "/policy", "").0, 200);
    program.await_line(|line| line["ready"] == true);
    assert_eq!(call(&stage, "GET", "/healthz", ""), (200, "ok".to_owned()));
}

#[test]
fn settings_that_make_no_sense_end_it() {
    for (name, value) in [
        ("OPENSANDBOX_EGRESS_DNS_UPSTREAM", "dns.test"),
        ("OPENSANDBOX_EGRESS_RULES", "{\"defaultAction\":\"maybe\"}"),
    ] {
        let stage = Stage::new(Place::Shared);
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_sandglass-egress"));
        command
            .env_clear()
            .env(name, value)
            .env("OPENSANDBOX_EGRESS_DNS_UPSTREAM", "192.0.2.53")
            .env(name, value);
        let mut child = stage.sandbox.within(|| command.spawn().unwrap());
        let end = Instant::now() + Duration::from_secs(60);
        let status = loop {
            match child.try_wait().unwrap() {
                Some(status) => break status,
                None if Instant::now() > end => panic!("it goes on with {name}"),
                None => std::thread::sleep(Duration::from_millis(20)),
            }
        };
        assert_eq!(status.code(), Some(78), "{name}");
    }
}
