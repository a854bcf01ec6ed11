//! Limits hold, and hitting them is told.

use std::time::{Duration, Instant};

use sandglass_shim::protocol::Request;
use sandglass_shim::spec::{ExitCause, Phase};

use crate::stage::{eventually, stage};

const EAT: &str = "/opt/opensandbox/execd probe eat";

#[test]
fn memory_is_limited_and_a_kill_is_told() {
    let stage = stage();
    let boxed = stage.boxed_with(|spec| spec.limits.memory_bytes = Some(64 << 20));
    let (_, code) = boxed.run(EAT);
    assert_eq!(code, 137);
    eventually("the kill is an event", || boxed.event_kinds().contains(&"oom-kill".into()));
    assert_eq!(boxed.current().phase, Phase::Running, "only the eater dies");
    assert_eq!(
        boxed.run("cat /sys/fs/cgroup/memory/memory.limit_in_bytes /sys/fs/cgroup/memory.max 2>/dev/null").0,
        "67108864"
    );
}

#[test]
fn an_entrypoint_that_runs_out_of_memory_is_the_cause() {
    let stage = stage();
    let boxed = stage.boxed_with(|spec| {
        spec.limits.memory_bytes = Some(48 << 20);
        spec.process.entrypoint = EAT.split(' ').map(Into::into).collect();
    });
    let exit = boxed.wait_exited().exit.unwrap();
    assert_eq!(exit.cause, ExitCause::OutOfMemory, "{exit:?}");
    assert_eq!(boxed.event_kinds().last().unwrap(), "exited");
}

#[test]
fn shared_memory_counts_too() {
    let stage = stage();
    let boxed = stage.boxed_with(|spec| spec.limits.memory_bytes = Some(64 << 20));
    let (out, code) = boxed.run("dd if=/dev/zero of=/dev/shm/x bs=1M count=200");
    assert_ne!(code, 0, "{out}");
    let used = boxed.ask(Request::State).usage.unwrap().memory_bytes.unwrap();
    assert!(used <= 64 << 20);
}

#[test]
fn a_fork_bomb_is_bounded_and_told() {
    let stage = stage();
    let boxed = stage.boxed_with(|spec| spec.limits.pids = 50);
    let (out, _) = boxed.run("/opt/opensandbox/execd probe forks 500");
    let made: u32 = out.lines().find_map(|line| line.strip_prefix("forked ")?.parse().ok()).unwrap_or(0);
    assert!(made > 10 && made < 50, "{out}");
    eventually("the refusal is an event", || boxed.event_kinds().contains(&"pids-limit".into()));
    // A real bomb must neither take the host nor the shim along.
    let _ = boxed.try_run("bomb() { bomb | bomb & }; bomb; sleep 0.5");
    let begun = Instant::now();
    assert!(boxed.ask(Request::State).ok && begun.elapsed() < Duration::from_secs(60));
    let told = boxed.event_kinds().iter().filter(|kind| *kind == "pids-limit").count();
    assert!(told <= 5, "{told} events");
    assert!(boxed.remove().ok);
}

#[test]
fn cpu_is_limited() {
    let stage = stage();
    let boxed = stage.boxed_with(|spec| spec.limits.cpu_millis = Some(200));
    let before = boxed.ask(Request::State).usage.unwrap().cpu_usec.unwrap();
    let begun = Instant::now();
    boxed.run("/opt/opensandbox/execd probe spin 2");
    let wall = begun.elapsed().as_micros() as u64;
    let used = boxed.ask(Request::State).usage.unwrap().cpu_usec.unwrap() - before;
    assert!(used * 100 / wall < 35, "{used} of {wall} us");
    let (out, _) = boxed.run("cat /sys/fs/cgroup/cpu/cpu.stat /sys/fs/cgroup/cpu.stat 2>/dev/null");
    let throttled = out.lines().find_map(|line| line.strip_prefix("nr_throttled ")).unwrap();
    assert!(throttled.parse::<u64>().unwrap() > 0, "{out}");
}

#[test]
fn open_files_are_limited_and_cannot_be_raised() {
    let stage = stage();
    let boxed = stage.boxed_with(|spec| spec.limits.nofile = 512);
    assert_eq!(boxed.run("ulimit -n; ulimit -Hn; ulimit -Hc").0, "512\n512\n0");
    assert!(boxed.run("/opt/opensandbox/execd probe nofile").0.contains("denied"));
}
