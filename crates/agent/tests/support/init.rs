//! Init mode: the entrypoint, signals, exit codes, the boot contract, and reaping as PID 1 of a namespace.

use std::fs::File;
use std::io::{Read, Write};
use std::net::TcpListener;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;

use crate::support::{Agent, BINARY, PATIENCE, root, until};

pub fn wait(agent: &mut Agent) -> ExitStatus {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(status) = agent.child.try_wait().unwrap() {
            return status;
        }
        assert!(Instant::now() < deadline, "the agent does not end");
        std::thread::sleep(Duration::from_millis(5));
    }
}

pub fn signal(agent: &Agent, signal: Signal) {
    kill_process(Pid::from_child(&agent.child), signal).unwrap();
}

#[test]
fn the_entrypoint_decides_the_exit_code() {
    for (script, code) in [("exit 42", 42), ("kill -9 $$", 137)] {
        let script = format!("while [ ! -e go ]; do sleep 0.02; done; {script}");
        let mut agent = Agent::start_with(&["--init", "--", "sh", "-c", &script], &[]);
        std::fs::write(agent.path("go"), "").unwrap();
        assert_eq!(wait(&mut agent).code(), Some(code), "{script}");
    }
}

#[test]
fn signals_reach_the_entrypoint() {
    let script =
        "trap 'echo > hup' HUP; trap 'echo > term; exit 9' TERM; echo > ready; while :; do sleep 0.05; done";
    let mut agent = Agent::start_with(&["--init", "--", "sh", "-c", script], &[]);
    until(|| agent.path("ready").exists().then_some(()));
    signal(&agent, Signal::HUP);
    until(|| agent.path("hup").exists().then_some(()));
    signal(&agent, Signal::TERM);
    assert_eq!(wait(&mut agent).code(), Some(9));
    assert!(agent.path("term").exists());
}

#[test]
fn without_init_the_agent_dies_of_its_signal_and_commands_get_theirs() {
    let mut agent = Agent::start();
    let (_stream, _) = agent.open_stream(
        &json!({ "command": "trap 'echo > got; exit 0' USR1; echo > ready; while :; do sleep 0.05; done" }),
    );
    until(|| agent.path("ready").exists().then_some(()));
    signal(&agent, Signal::USR1);
    until(|| agent.path("got").exists().then_some(()));
    std::thread::sleep(Duration::from_millis(200));
    signal(&agent, Signal::TERM);
    assert_eq!(wait(&mut agent).signal(), Some(15));
}

/// Boots as the control plane does and returns the child and everything it wrote to its status pipe.
pub fn boot(config: &serde_json::Value) -> (std::process::Child, String, u16) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let (status_read, status_write) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap();
    let (config_read, config_write) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap();
    let mut text = config.clone();
    (text["listenFd"], text["statusFd"]) = (json!(4), json!(5));
    (text["sandboxId"], text["cwd"]) = (json!("box-1"), json!("/tmp"));
    File::from(config_write).write_all(text.to_string().as_bytes()).unwrap();
    let mut command = Command::new(BINARY);
    command.args(["--init", "--boot-fd", "3"]).stdin(Stdio::null()).stderr(Stdio::null()).env_clear();
    let fds: [OwnedFd; 3] = [config_read, listener.into(), status_write];
    let numbers = fds.each_ref().map(AsRawFd::as_raw_fd);
    let place = move || {
        // Out of the way first, to numbers that nobody uses: a source may be one of the targets.
        let mut aside = [0; 3];
        for (aside, fd) in aside.iter_mut().zip(numbers) {
            // SAFETY: plain descriptor duplication in the child.
            *aside = unsafe { libc::fcntl(fd, libc::F_DUPFD, 10) };
        }
        for (target, fd) in (3..).zip(aside) {
            // SAFETY: as above.
            unsafe { libc::dup2(fd, target) };
            // SAFETY: as above.
            unsafe { libc::close(fd) };
        }
        Ok(())
    };
    // SAFETY: the closure makes system calls only.
    unsafe { command.pre_exec(place) };
    let child = command.spawn().unwrap();
    drop(fds);
    drop(command);
    let mut line = String::new();
    File::from(status_read).read_to_string(&mut line).unwrap();
    (child, line, port)
}

#[test]
fn the_boot_contract() {
    let config = json!({ "accessToken": "s3cret", "entrypoint": ["sh", "-c", "sleep 1000"],
        "env": [["PATH", "/usr/bin:/bin"], ["A", "b"]], "user": "" });
    let (mut child, status, port) = boot(&config);
    assert_eq!(status, "{\"status\":\"started\"}\n");
    let agent = |token: &str| {
        let mut stream = std::net::TcpStream::connect(("127.0.0.1", port)).unwrap();
        let body = "{\"command\":\"env; ls /proc/self/fd\"}";
        write!(stream, "POST /command HTTP/1.1\r\nHost: b\r\nConnection: close\r\nX-EXECD-ACCESS-TOKEN: {token}\r\nContent-Length: {}\r\n\r\n{body}", body.len()).unwrap();
        let mut raw = Vec::new();
        stream.read_to_end(&mut raw).unwrap();
        crate::support::parse(&raw)
    };
    let refused = agent("wrong");
    assert_eq!(refused.status, 401);
    assert_eq!(
        refused.text(),
        "{\"error\":\"Unauthorized: invalid or missing header X-EXECD-ACCESS-TOKEN\"}"
    );
    let text = agent("s3cret").text();
    for wanted in ["OPENSANDBOX_ID=box-1", "\"A=b\"", "HOME=", "EXECD_ENVS=", "PWD=/tmp"] {
        assert!(text.contains(wanted), "{wanted} in {text}");
    }
    assert!(!text.contains("s3cret"));
    let numbers = text.matches("\"type\":\"stdout\",\"text\":\"").count();
    assert!(numbers > 4 && !text.contains("\"text\":\"5\""), "no boot descriptor leaks: {text}");
    let ping = std::net::TcpStream::connect(("127.0.0.1", port)).and_then(|mut s| {
        s.write_all(b"GET /ping HTTP/1.0\r\n\r\n")?;
        let mut text = String::new();
        s.read_to_string(&mut text).map(|_| text)
    });
    assert!(ping.unwrap().contains(" 200 OK"));
    kill_process(Pid::from_child(&child), Signal::TERM).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(143));
}

#[test]
fn a_boot_that_cannot_start_says_why() {
    for (entrypoint, user, reason) in [
        (json!(["no-such-program"]), "", "executable file not found in $PATH"),
        (json!(["/etc/passwd"]), "", "permission denied"),
        (json!(["sh"]), "no-such-user", "does not exist"),
    ] {
        let env = json!([["PATH", "/usr/bin:/bin"]]);
        let config = json!({ "accessToken": "", "entrypoint": entrypoint, "env": env, "user": user });
        let (mut child, status, _) = boot(&config);
        let status: serde_json::Value = serde_json::from_str(&status).unwrap();
        assert_eq!((&status["status"], &status["phase"]), (&json!("failed"), &json!("entrypoint")));
        assert!(status["message"].as_str().unwrap().contains(reason), "{status}");
        assert_eq!(child.wait().unwrap().code(), Some(127));
    }
}

#[test]
fn programs_ignore_no_signal_that_the_agent_was_started_to_ignore() {
    let mut ignoring = Command::new("sh");
    ignoring.args(["-c", "trap '' HUP INT QUIT TERM; exec \"$0\" \"$@\"", BINARY]);
    let agent = Agent::launch(ignoring, &[], &[]);
    let text = agent.shell("grep SigIgn /proc/self/status; echo end").text();
    let ignored = text.split("SigIgn:\\t").nth(1).and_then(|rest| rest.get(..16)).unwrap();
    assert_eq!(u64::from_str_radix(ignored, 16).unwrap() & 0x7fff_ffff, 0, "{text}");
}

#[test]
fn pid_one_reaps_everything_and_cannot_be_killed_from_inside() {
    if !root() {
        return;
    }
    let mut unshare = Command::new("unshare");
    unshare.args(["--pid", "--fork", "--kill-child", "--mount-proc", BINARY, "--init"]);
    let agent = Agent::launch(unshare, &["--", "sleep", "1000"], &[]);
    let orphans = "for i in $(seq 50); do (sleep 0.05 &) ; done; cat /proc/1/comm; kill -9 1";
    let text = agent.shell(orphans).text();
    assert!(text.contains("\"text\":\"execd\""), "{text}");
    // What nobody has waited for is listed by its name, too: the entrypoint alone is left.
    until(|| agent.shell("ps -eo comm= | grep -c ^sleep").text().contains("\"text\":\"1\"").then_some(()));
    assert_eq!(agent.get("/ping").status, 200);
    assert!(agent.shell("echo $PPID").text().contains("\"text\":\"1\""));
    agent.post("/command", &json!({ "command": "kill -TERM 1; sleep 1000" }));
    let mut agent = agent;
    assert_eq!(wait(&mut agent).code(), Some(143));
}
