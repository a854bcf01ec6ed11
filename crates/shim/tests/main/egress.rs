//! The place of the egress policy: what stands in for the enforcer says what it can see, and is killed in many ways.

use std::fs;
use std::path::Path;
use std::process::Command;

use rustix::process::{Pid, Signal, kill_process};
use sandglass_shim::protocol::Request;
use sandglass_shim::spec::{Bind, BoxSpec, EgressLimits, EgressSpec, ProcessMark};
use sandglass_shim::{shim_alive, teardown};

use crate::stage::{Outside, Stage, TestBox, enforcer, eventually, stage, traces};

const NOTHING: Vec<String> = Vec::new();
const USER: u32 = 699_990_000;

fn egress(mode: &str) -> EgressSpec {
    EgressSpec {
        program: enforcer().to_owned(),
        env: vec![
            ("MODE".into(), mode.into()),
            ("SETTING".into(), "as asked".into()),
            ("SANDGLASS_EGRESS_BOX".into(), "198.51.100.99".into()),
        ],
        user: USER,
        ready_within_ms: 500,
        limits: EgressLimits { cpu_millis: None, memory_bytes: Some(64 << 20) },
        views: vec![Bind { source: "/etc/hostname".into(), target: "/etc/hostname".into(), read_only: true }],
        authority: true,
    }
}

/// A stand-in that has its time.
pub fn ready() -> EgressSpec {
    EgressSpec { ready_within_ms: 20_000, ..egress("ready") }
}

fn guarded(stage: &Stage, change: impl FnOnce(&mut BoxSpec)) -> TestBox {
    stage.boxed_with(|spec| {
        spec.egress = Some(ready());
        change(spec);
    })
}

fn enforcer_of(boxed: &TestBox) -> Option<ProcessMark> {
    boxed.current().enforcer
}

/// What the stand-in said about `what`, newest last.
fn said(boxed: &TestBox, what: &str) -> Vec<String> {
    let text = fs::read_to_string(boxed.dir.join("egress-events.jsonl")).unwrap_or_default();
    let lines = text.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
    let about = lines.filter(|event| event["data"]["what"] == what);
    about.map(|event| event["data"]["detail"].as_str().unwrap().trim().to_owned()).collect()
}

fn signal(mark: ProcessMark, signal: Signal) {
    kill_process(Pid::from_raw(mark.pid).unwrap(), signal).unwrap();
}

#[test]
fn the_enforcer_has_one_capability_and_sees_next_to_nothing() {
    let stage = stage();
    let boxed = guarded(&stage, |_| {});
    println!("timings: {:?}", boxed.timings);
    assert_eq!(boxed.run("echo hello").0, "hello");
    eventually("it has said everything", || said(&boxed, "attempts").len() == 1);
    let one = |what: &str| said(&boxed, what).pop().unwrap();
    let sorted = |what: &str| {
        let mut words: Vec<String> = one(what).split_whitespace().map(str::to_owned).collect();
        words.sort();
        words.join(" ")
    };
    assert_eq!(one("ids"), "0 0 pid 1");
    let mark = enforcer_of(&boxed).unwrap();
    let status = fs::read_to_string(format!("/proc/{}/status", mark.pid)).unwrap();
    assert!(status.contains(&format!("Uid:\t{USER}\t{USER}\t{USER}\t{USER}")), "{status}");
    assert!(status.contains("Groups:\t \n"), "{status}");
    // NET_ADMIN is number 12.
    assert_eq!(one("capabilities"), "CapEff: 0000000000001000");
    assert_eq!(one("bounding"), "CapBnd: 0000000000001000");
    assert_eq!(one("filter"), "Seccomp: 2");
    assert_eq!(sorted("root"), "authority dev etc proc sandglass-egress state");
    // Three, and the one with which it looks.
    assert_eq!(sorted("descriptors"), "0 1 2 3");
    assert_eq!(sorted("interfaces"), "all default down lo up");
    assert_eq!(one("processes"), "1");
    assert_eq!(one("box"), boxed.address().to_string(), "where it is placed is not for the request to say");
    assert_eq!(one("setting"), "as asked");
    assert_eq!(one("attempts"), "kept kept kept stored");
    assert_eq!(boxed.run("cat /opt/opensandbox/mitmproxy-ca-cert.pem").0, "a certificate");
    assert_eq!(boxed.run("echo x > /opt/opensandbox/authority/mitmproxy-ca-cert.pem").1, 1);
    assert_eq!(boxed.run("ls /opt/opensandbox/authority").0, "mitmproxy-ca-cert.pem");
    let group = fs::read_to_string(format!("/proc/{}/cgroup", mark.pid)).unwrap();
    assert!(group.contains(&format!("/sandglass/{}.egress", boxed.spec.id)), "{group}");
    assert!(boxed.remove().ok);
    assert_eq!(traces(&boxed.spec, &boxed.dir), NOTHING);
    assert!(!Path::new(&format!("/proc/{}", mark.pid)).exists());
}

#[test]
fn the_box_goes_out_through_the_middle_and_not_to_it() {
    let stage = stage();
    let boxed = guarded(&stage, |_| {});
    let world = stage.home.join("egress-world");
    fs::create_dir_all(&world).unwrap();
    fs::write(world.join("hello"), "from the world").unwrap();
    let _outside = Outside::set_up("egr", 8, &world);
    eventually("the box reaches the outside", || {
        let ask = format!("printf 'GET /hello HTTP/1.0\\r\\n\\r\\n' | nc -w 2 {} 9000", Outside::there(8));
        boxed.run(&ask).0.contains("from the world")
    });
    // The way there has one station more.
    let mark = enforcer_of(&boxed).unwrap();
    let inside = |line: &str| {
        let net = format!("--net=/proc/{}/ns/net", mark.pid);
        let out = Command::new("nsenter").arg(net).args(line.split(' ')).output().unwrap();
        String::from_utf8_lossy(&out.stdout).into_owned()
    };
    let addresses = inside("ip -o addr");
    for expected in ["down    inet 169.254.1.1/32", "up    inet 169.254.1.3/32"] {
        assert!(addresses.contains(expected), "{addresses}");
    }
    assert!(!addresses.contains("inet6"), "{addresses}");
    assert_eq!(inside("cat /proc/sys/net/ipv4/ip_forward").trim(), "1");
    let links = fs::read_dir("/sys/class/net").unwrap().flatten();
    let ours = links.filter(|link| link.file_name().to_string_lossy().starts_with(&stage.prefix));
    assert!(ours.count() >= 1, "the host has the box's one link");
    // What it pretends to be goes nowhere.
    boxed.run("ip addr add 203.0.113.9/32 dev eth0");
    let spoofed = format!("ping -I 203.0.113.9 -c 1 -W 1 {} >/dev/null 2>&1", Outside::there(8));
    assert_ne!(boxed.run(&spoofed).1, 0);
}

#[test]
fn pausing_the_box_does_not_stop_the_enforcer() {
    let stage = stage();
    let boxed = guarded(&stage, |_| {});
    assert!(boxed.ask(Request::Pause).ok);
    signal(enforcer_of(&boxed).unwrap(), Signal::USR1);
    eventually("the enforcer speaks", || said(&boxed, "asked") == ["alive"]);
    assert!(boxed.ask(Request::Resume).ok);
}

#[test]
fn an_enforcer_that_dies_is_started_again_in_its_place() {
    let stage = stage();
    let boxed = guarded(&stage, |_| {});
    let first = enforcer_of(&boxed).unwrap();
    let namespace = |mark: ProcessMark| fs::read_link(format!("/proc/{}/ns/net", mark.pid)).unwrap();
    let net = namespace(first);
    signal(first, Signal::KILL);
    eventually("another runs", || enforcer_of(&boxed).is_some_and(|mark| mark != first));
    let second = enforcer_of(&boxed).unwrap();
    assert_eq!(namespace(second), net);
    eventually("it has said everything", || said(&boxed, "attempts").len() == 2);
    let why = said(&boxed, "enforcer-ended").pop().unwrap();
    assert!(why.contains("killed by signal 9"), "{why}");
    assert_eq!(boxed.run("echo still").0, "still");
    signal(second, Signal::USR1);
    eventually("the new one is heard", || said(&boxed, "asked") == ["alive"]);
    assert!(boxed.remove().ok);
    assert_eq!(traces(&boxed.spec, &boxed.dir), NOTHING);
}

#[test]
fn an_enforcer_that_does_not_enforce_fails_the_create() {
    let stage = stage();
    for (mode, ready_within_ms, expected) in [
        ("silent", 500, "it did not enforce the policy within 0.5 s"),
        ("ends", 20_000, "it ended before it enforced the policy: no rules; here"),
    ] {
        let mut spec = stage.spec();
        spec.egress = Some(EgressSpec { ready_within_ms, ..egress(mode) });
        let (phase, message) = stage.create(spec).err().unwrap();
        assert_eq!(phase, "egress", "{message}");
        assert!(message.contains(expected), "{message}");
    }
    let mut spec = stage.spec();
    spec.egress = Some(EgressSpec { program: "/nowhere".into(), ..egress("ready") });
    let (phase, message) = stage.create(spec).err().unwrap();
    assert!(phase == "egress" && message.contains("/nowhere"), "{phase}: {message}");
    for at in ["egress", "rootfs", "network", "exec"] {
        let mut spec = stage.spec();
        spec.egress = Some(ready());
        spec.about = serde_json::json!({ "failAt": at });
        let (phase, message) = stage.create(spec).err().unwrap();
        assert_eq!((phase.as_str(), message.as_str()), (at, "injected failure"));
    }
}

#[test]
fn a_killed_shim_takes_the_enforcer_along() {
    let stage = stage();
    let boxed = guarded(&stage, |_| {});
    let mark = enforcer_of(&boxed).unwrap();
    kill_process(Pid::from_raw(boxed.state.shim_pid).unwrap(), Signal::KILL).unwrap();
    eventually("the enforcer is gone", || !Path::new(&format!("/proc/{}", mark.pid)).exists());
    eventually("the shim is gone", || !shim_alive(&boxed.dir).unwrap());
    teardown(&boxed.dir).unwrap();
    assert_eq!(traces(&boxed.spec, &boxed.dir), NOTHING);
}

#[test]
fn the_end_of_the_box_is_the_end_of_the_enforcer() {
    let stage = stage();
    let boxed = guarded(&stage, |spec| {
        spec.process.entrypoint = vec!["/bin/sh".into(), "-c".into(), "exit 4".into()];
    });
    assert_eq!(boxed.wait_exited().exit.unwrap().code, Some(4));
    assert_eq!(boxed.current().enforcer, None);
    assert_eq!(traces(&boxed.spec, &boxed.dir.join("root")), NOTHING);
    assert!(boxed.remove().ok);
}
