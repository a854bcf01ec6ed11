//! What a box may do to its agent: output without end, no readers, no descriptors, no processes, no disk, other clocks.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use serde_json::json;

use crate::support::{Agent, BINARY, copy_program, root, until};

fn resident_kib(agent: &Agent) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{}/status", agent.child.id())).unwrap();
    let line = status.lines().find_map(|l| l.strip_prefix("VmRSS:")).unwrap();
    line.split_whitespace().next().unwrap().parse().unwrap()
}

/// Asks for `/ping` all the time; every answer has to come, however late (the client gives up after a minute).
struct Pings {
    stop: Arc<AtomicBool>,
    answered: Arc<AtomicUsize>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Pings {
    fn of(agent: &Agent) -> Self {
        let (stop, answered) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
        let (stopped, count, mut stream) = (Arc::clone(&stop), Arc::clone(&answered), agent.connect());
        let thread = std::thread::spawn(move || {
            while !stopped.load(Ordering::Relaxed) {
                stream.write_all(b"GET /ping HTTP/1.1\r\nHost: b\r\n\r\n").unwrap();
                let mut seen = Vec::new();
                while !seen.ends_with(b"\r\n\r\n") {
                    let mut byte = [0];
                    stream.read_exact(&mut byte).unwrap();
                    seen.push(byte[0]);
                }
                assert!(seen.starts_with(b"HTTP/1.1 200 OK\r\n"));
                count.fetch_add(1, Ordering::Relaxed);
                std::thread::sleep(Duration::from_millis(5));
            }
        });
        Pings { stop, answered, thread: Some(thread) }
    }

    fn end(mut self) {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.take().unwrap().join().unwrap();
        assert!(self.answered.load(Ordering::Relaxed) > 0);
    }
}

#[test]
fn a_hundred_readers_that_do_not_read_cost_a_bounded_amount() {
    let agent = Agent::start();
    let pings = Pings::of(&agent);
    // The shortest lines are those that grow most on the way.
    let streams: Vec<_> = (0..100).map(|_| agent.open_stream(&json!({ "command": "yes ''" }))).collect();
    let mut most = 0;
    for _ in 0..20 {
        std::thread::sleep(Duration::from_millis(50));
        most = most.max(resident_kib(&agent));
    }
    assert!(most < 128_000, "{most} KiB");
    // One more that does read gets all of its lines, in small portions.
    let text = agent.shell("seq 1 3000").text();
    assert!(text.contains("\"text\":\"3000\"") && text.contains("execution_complete"));
    for (stream, id) in streams {
        assert_eq!(agent.delete(&format!("/command?id={id}")).status, 200);
        drop(stream);
    }
    pings.end();
}

#[test]
fn programs_that_never_stop_writing_do_not_keep_the_agent_from_others() {
    let agent = Agent::start();
    let mut ids = Vec::new();
    for command in ["yes ''", "cat /dev/zero >&2"] {
        let (stream, id) = agent.open_stream(&json!({ "command": command }));
        drop(stream);
        ids.push(id);
        ids.push(agent.post("/command", &json!({ "command": command, "background": true })).init_id());
    }
    // One that has ended and left a writer behind.
    agent.shell("yes & echo $! >> left");
    let pings = Pings::of(&agent);
    for n in 0..20 {
        assert!(agent.shell(&format!("echo {n}")).text().contains(&format!("\"text\":\"{n}\"")));
    }
    agent.shell("kill $(cat left)");
    for id in ids {
        assert_eq!(agent.delete(&format!("/command?id={id}")).status, 200);
    }
    pings.end();
}

#[test]
fn a_line_without_an_end_and_bytes_without_meaning() {
    let agent = Agent::start();
    let before = resident_kib(&agent);
    let answer = agent.shell("head -c 64000000 /dev/zero | tr '\\0' x");
    let xs = answer.body.iter().filter(|b| **b == b'x').count();
    // The word "text" and the head's names have a few more of them.
    let events = answer.text().matches("\"text\":\"").count() + answer.text().matches("execution").count();
    assert_eq!(xs - events, 64_000_000);
    let grown = resident_kib(&agent).saturating_sub(before);
    assert!(grown < 40_000, "{grown} KiB");
    let answer = agent.shell("head -c 2000000 /dev/urandom; head -c 3000000 /dev/zero");
    let frames: Vec<_> = answer.body.split(|b| *b == b'\n').filter(|f| !f.is_empty()).collect();
    for frame in &frames {
        assert!(frame.len() < 4 << 20);
        let event: serde_json::Value = serde_json::from_slice(frame).unwrap();
        assert!(event["type"].is_string() && event["timestamp"].is_u64());
    }
    assert!(frames.last().unwrap().starts_with(b"{\"type\":\"execution_complete\""));
}

#[test]
fn a_million_short_lines_arrive() {
    let agent = Agent::start();
    let pings = Pings::of(&agent);
    let answer = agent.shell("yes | head -n 1000000");
    assert_eq!(
        answer.body.windows(27).filter(|w| w == b"{\"type\":\"stdout\",\"text\":\"y\"").count(),
        1_000_000
    );
    pings.end();
}

#[test]
fn a_thousand_commands_at_once() {
    let agent = Agent::start();
    let pings = Pings::of(&agent);
    let ids: Vec<String> = (0..1000)
        .map(|n| {
            let body = json!({ "command": format!("echo {n}; exec sleep 300"), "background": true });
            agent.post("/command", &body).init_id()
        })
        .collect();
    let running = |id: &String| agent.get(&format!("/command/status/{id}")).json()["running"] == true;
    assert!(ids.iter().all(running));
    for (n, id) in ids.iter().enumerate() {
        until(|| (agent.get(&format!("/command/{id}/logs")).text() == format!("{n}\n")).then_some(()));
        assert_eq!(agent.delete(&format!("/command?id={id}")).status, 200);
        assert_eq!(agent.wait_ended(id)["error"], "signal: terminated");
    }
    pings.end();
}

#[test]
fn programs_get_the_limits_the_agent_was_given() {
    let mut limited = Command::new("sh");
    limited.args(["-c", "ulimit -Sn 64; exec \"$@\"", "sh", BINARY]);
    let agent = Agent::launch(limited, &[], &[]);
    let text = agent.shell("ulimit -Sn; cat /proc/self/oom_score_adj").text();
    assert!(text.contains("\"text\":\"64\"") && text.contains("\"text\":\"200\""), "{text}");
    // The agent itself is not held to the low one.
    let ids: Vec<_> = (0..60)
        .map(|_| agent.post("/command", &json!({ "command": "sleep 1000", "background": true })).init_id())
        .collect();
    for id in ids {
        assert_eq!(agent.delete(&format!("/command?id={id}")).status, 200);
    }
}

#[test]
fn without_descriptors_commands_are_refused_and_everything_comes_back() {
    let mut limited = Command::new("sh");
    limited.args(["-c", "ulimit -n 64; exec \"$@\"", "sh", BINARY]);
    let agent = Agent::launch(limited, &[], &[]);
    let pings = Pings::of(&agent);
    let mut refused = 0;
    let mut ids = Vec::new();
    for _ in 0..60 {
        let answer = agent.post("/command", &json!({ "command": "sleep 1000", "background": true }));
        match answer.status {
            200 => ids.push(answer.init_id()),
            500 => refused += 1,
            other => panic!("{other}"),
        }
    }
    assert!(refused > 0 && ids.len() > 10, "{refused} {}", ids.len());
    for id in &ids {
        agent.delete(&format!("/command?id={id}"));
    }
    until(|| agent.shell("echo back").text().contains("\"back\"").then_some(()));
    pings.end();
}

/// The agent as a user of its own who may have few processes, in a directory where that user may write.
fn with_few_processes(limit: u64) -> (Agent, tempfile::TempDir) {
    let place = tempfile::tempdir_in("/tmp").unwrap();
    let open =
        |path: &std::path::Path| std::fs::set_permissions(path, PermissionsExt::from_mode(0o777)).unwrap();
    open(place.path());
    let program = place.path().join("execd");
    copy_program(BINARY, &program);
    open(&program);
    let uid = 400_000_000 + std::process::id();
    let mut command = Command::new("setpriv");
    let script = format!("cd {}; exec \"$@\"", place.path().display());
    command.args([
        "--reuid",
        &uid.to_string(),
        "--regid",
        "12345",
        "--clear-groups",
        "sh",
        "-c",
        &script,
        "sh",
    ]);
    command.arg(&program);
    let few = move || {
        let limit = libc::rlimit { rlim_cur: limit, rlim_max: limit };
        // SAFETY: reads one local struct.
        match unsafe { libc::setrlimit(libc::RLIMIT_NPROC, &raw const limit) } {
            0 => Ok(()),
            _ => Err(std::io::Error::last_os_error()),
        }
    };
    // SAFETY: the closure makes one system call.
    unsafe { command.pre_exec(few) };
    let file = place.path().join("env").display().to_string();
    (Agent::launch(command, &[], &[("EXECD_ENVS", &file)]), place)
}

#[test]
fn at_the_process_limit_files_and_pings_are_served() {
    if !root() {
        return;
    }
    let (agent, place) = with_few_processes(40);
    let pings = Pings::of(&agent);
    // More than there may be, and no more than that: a limit that does not hold must not take the machine along.
    let crowd = "for i in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20; do sleep 1000 & sleep 1000 & sleep 1000 & done; wait";
    let id = agent.post("/command", &json!({ "command": crowd, "background": true })).init_id();
    until(|| {
        let tried = agent.post("/command", &json!({ "argv": ["true"] })).text();
        tried.contains("temporarily unavailable").then_some(())
    });
    let file = place.path().join("file").display().to_string();
    for round in 0..50 {
        let metadata = json!({ "path": file }).to_string();
        let (kind, form) = crate::support::form(&[
            ("metadata", Some("metadata"), metadata.as_bytes()),
            ("file", Some("f"), format!("{round}").as_bytes()),
        ]);
        assert_eq!(agent.send("POST", "/files/upload", &[("Content-Type", &kind)], &form).status, 200);
        assert_eq!(agent.get(&format!("/files/download?path={file}")).text(), round.to_string());
    }
    assert_eq!(agent.delete(&format!("/command?id={id}")).status, 200);
    until(|| agent.shell("echo back").text().contains("\"back\"").then_some(()));
    pings.end();
}

#[test]
fn a_storm_of_orphans_leaves_no_zombie() {
    if !root() {
        return;
    }
    let mut unshare = Command::new("unshare");
    unshare.args(["--pid", "--fork", "--kill-child", "--mount-proc", BINARY, "--init"]);
    let agent = Agent::launch(unshare, &["--", "sleep", "1000"], &[]);
    let pings = Pings::of(&agent);
    let storm = "for i in $(seq 30); do (for j in $(seq 100); do (:) & done) & done; wait; echo over";
    assert!(agent.shell(storm).text().contains("\"over\""));
    until(|| agent.shell("ps -eo stat= | grep -c Z").text().contains("\"text\":\"0\"").then_some(()));
    pings.end();
}

#[test]
fn a_start_that_hangs_holds_up_nobody_else() {
    let agent = Agent::start();
    let program = agent.path("leased");
    copy_program("/bin/true", &program);
    let held = File::open(&program).unwrap();
    // The kernel makes whoever opens the file wait for the lease, and would tell the holder by a signal.
    // SAFETY: ignores one signal.
    unsafe { libc::signal(libc::SIGIO, libc::SIG_IGN) };
    let lease = |kind: i32| {
        // SAFETY: asks for a lease on a descriptor that is open.
        unsafe { libc::fcntl(held.as_raw_fd(), libc::F_SETLEASE, kind) }
    };
    if lease(libc::F_WRLCK) != 0 {
        return;
    }
    let mut stream = agent.connect();
    let body = json!({ "argv": [program] }).to_string();
    write!(
        stream,
        "POST /command HTTP/1.1\r\nHost: b\r\nConnection: close\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    )
    .unwrap();
    let pings = Pings::of(&agent);
    for n in 0..20 {
        assert!(agent.shell(&format!("echo {n}")).text().contains(&format!("\"text\":\"{n}\"")));
    }
    pings.end();
    assert_eq!(lease(libc::F_UNLCK), 0);
    let mut raw = Vec::new();
    stream.read_to_end(&mut raw).unwrap();
    assert!(String::from_utf8_lossy(&raw).contains("execution_complete"));
}

#[test]
fn a_full_disk_costs_a_background_command_its_output_only() {
    if !root() {
        return;
    }
    let mut unshare = Command::new("unshare");
    let script = "mkdir logs && mount -t tmpfs -o size=128k tmpfs logs && exec \"$@\"";
    unshare.args(["--mount", "sh", "-c", script, "sh", BINARY]);
    let agent = Agent::launch(unshare, &[], &[("TMPDIR", "logs")]);
    let body = json!({ "command": "seq 1 200000; echo end; exit 5", "background": true });
    let id = agent.post("/command", &body).init_id();
    assert_eq!(agent.wait_ended(&id)["exit_code"], 5);
    let bytes: usize = (1..=200_000).map(|n| format!("{n}\n").len()).sum::<usize>() + 4;
    let cursor = until(|| {
        let logs = agent.get(&format!("/command/{id}/logs"));
        assert_eq!(logs.status, 200);
        let cursor = logs.header("execd-commands-tail-cursor").unwrap().to_owned();
        (cursor == bytes.to_string()).then_some(cursor)
    });
    let rest = agent.get(&format!("/command/{id}/logs?cursor={cursor}"));
    assert_eq!((rest.status, rest.text().as_str()), (200, ""));
    assert!(agent.shell("echo fine").text().contains("fine"));
}

/// Moves the wall clock of one process: a library that adds what a shared file says to what the system says.
const CLOCK: &str = r#"
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
static volatile long *offset;
__attribute__((constructor)) static void begin(void) {
    int fd = open(getenv("TEST_CLOCK"), O_RDONLY);
    if (fd < 0) return;
    void *at = mmap(0, sizeof(long), PROT_READ, MAP_SHARED, fd, 0);
    if (at != MAP_FAILED) offset = at;
    close(fd);
}
int clock_gettime(clockid_t clock, struct timespec *now) {
    long failed = syscall(SYS_clock_gettime, clock, now);
    if (!failed && clock == CLOCK_REALTIME && offset) now->tv_sec += *offset;
    return failed;
}
"#;

#[test]
fn steps_of_the_wall_clock_change_timestamps_and_nothing_else() {
    let place = tempfile::tempdir().unwrap();
    let (source, library, clock) =
        (place.path().join("clock.c"), place.path().join("clock.so"), place.path().join("clock"));
    std::fs::write(&source, CLOCK).unwrap();
    let built =
        Command::new("cc").args(["-shared", "-fPIC", "-o"]).args([&library, &source]).status().unwrap();
    assert!(built.success());
    std::fs::write(&clock, 0_i64.to_ne_bytes()).unwrap();
    let file = File::options().write(true).open(&clock).unwrap();
    let step = |seconds: i64| file.write_all_at(&seconds.to_ne_bytes(), 0).unwrap();
    let mut command = Command::new(BINARY);
    command.env("LD_PRELOAD", &library).env("TEST_CLOCK", &clock);
    let agent = Agent::launch(command, &[], &[]);
    let now = |agent: &Agent| agent.get("/metrics").json()["timestamp"].as_i64().unwrap();
    let before = now(&agent);
    let day = 86_400;
    let (mut stream, id) = agent.open_stream(&json!({ "command": "sleep 1000", "timeout": 8000 }));
    step(-day);
    assert!(now(&agent) < before - (day - 60) * 1000, "the library does not work");
    std::thread::sleep(Duration::from_millis(100));
    step(day);
    let mut rest = String::new();
    let mut buffer = [0; 4096];
    while !rest.ends_with("0\r\n\r\n") {
        let count = stream.read(&mut buffer).unwrap();
        assert!(count > 0);
        rest.push_str(&String::from_utf8_lossy(&buffer[..count]));
        step(if rest.len().is_multiple_of(2) { -day } else { day });
    }
    // Eight seconds have room for two pings, and the first may have been read with the id.
    let pings = rest.matches("\"pong\"").count();
    assert!((2..=3).contains(&pings), "{rest}");
    assert!(rest.contains("signal: killed"), "{rest}");
    let status = agent.get(&format!("/command/status/{id}")).json();
    let at = |key: &str| status[key].as_str().unwrap().parse::<jiff::Timestamp>().unwrap();
    assert!(at("finished_at") >= at("started_at"), "{status}");
}
