//! `run` and `exec` against a stub: streams, exit codes, interruption, what is sent.

#![expect(clippy::unwrap_used, reason = "a stub or helper that fails is a test that fails")]

mod stub;

use std::{
    io::{BufRead, BufReader, Read},
    process::Stdio,
};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use stub::{ID, Stub, stderr, stdout};

fn code(stub: &Stub, arguments: &[&str]) -> i32 {
    stub.run(arguments).status.code().unwrap()
}

#[test]
fn output_goes_to_the_right_stream_unchanged() {
    let stub = Stub::start();
    let output = stub.run(&["run", "tools:1", "--", "talk"]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    assert_eq!(stdout(&output), "héllo\n\n<end>\n");
    assert_eq!(stderr(&output), "oops\n");
    assert!(stub.was_asked(&format!("DELETE /v1/sandboxes/{ID}")));
}

#[test]
fn exit_codes_are_those_of_the_command() {
    let stub = Stub::start();
    for (word, expected) in [("fine", 0), ("seven", 7), ("killed", 137), ("missing", 127), ("denied", 126)] {
        assert_eq!(code(&stub, &["run", "tools:1", "--", word]), expected, "run {word}");
        assert_eq!(code(&stub, &["exec", "first", "--", word]), expected, "exec {word}");
    }
}

#[test]
fn a_cut_stream_is_our_failure_and_the_sandbox_is_still_removed() {
    for word in ["cut", "abort"] {
        let stub = Stub::start();
        let output = stub.run(&["run", "tools:1", "--", word]);
        assert_eq!(output.status.code(), Some(125), "{word}");
        assert_eq!(stdout(&output), "half\n");
        assert!(
            stderr(&output).contains("c0ffee") && stderr(&output).contains("ended before"),
            "{}",
            stderr(&output)
        );
        assert!(stub.was_asked("DELETE /v1/sandboxes/"));
        assert_eq!(code(&stub, &["exec", "first", word]), 125);
    }
}

#[test]
fn what_was_asked_for_is_sent() {
    let stub = Stub::start();
    let arguments = [
        "run",
        "-e",
        "A=b c",
        "--cpu",
        "500m",
        "--memory",
        "64Mi",
        "--pids",
        "9",
        "--timeout",
        "10m",
        "--name",
        "n",
        "--label",
        "k=v",
        "--workdir",
        "/w",
        "--user",
        "5:6",
        "tools:1",
        "fine",
        "-x",
        "--",
        "y z",
    ];
    assert_eq!(code(&stub, &arguments), 0);
    let bodies = stub.seen(|seen| seen.bodies.clone());
    let expected = json!({
        "image": { "uri": "tools:1" },
        "resourceLimits": { "cpu": "500m", "memory": "64Mi", "pids": "9" },
        "extensions": { "sandglass.entrypoint": "none" },
        "env": { "A": "b c" },
        "metadata": { "k": "v", "name": "n" },
        "timeout": 600,
    });
    assert_eq!(bodies[0], expected);
    assert_eq!(bodies[1], json!({ "argv": ["fine", "-x", "--", "y z"], "cwd": "/w", "uid": 5, "gid": 6 }));
}

#[test]
fn a_kept_sandbox_is_neither_removed_nor_given_a_time_to_live() {
    let stub = Stub::start();
    let output = stub.run(&["run", "--keep", "tools:1", "--", "seven"]);
    assert_eq!(output.status.code(), Some(7));
    assert_eq!(stderr(&output), format!("{ID}\n"));
    assert!(!stub.was_asked("DELETE"));
    assert_eq!(stub.seen(|seen| seen.bodies[0].get("timeout").cloned()), None::<Value>);
}

#[test]
fn an_entrypoint_is_followed_to_its_exit_code() {
    let stub = Stub::start();
    let (a, b) = ("2030-01-01T00:00:00.000000001Z", "2030-01-01T00:00:00.000000002Z");
    stub.seen(|seen| {
        seen.logs = vec![format!("{a} stdout one\n"), format!("{a} stdout one\n{b} stderr two\n")];
        seen.status = Some(json!({ "state": "Failed", "reason": "CONTAINER_EXITED_ERROR",
                                   "message": "exited with code 3" }));
    });
    let output = stub.run(&["run", "tools:1"]);
    assert_eq!(output.status.code(), Some(3), "{}", stderr(&output));
    assert_eq!(stdout(&output), "one\n");
    assert_eq!(stub.seen(|seen| seen.bodies[0]["extensions"]["sandglass.entrypoint"].clone()), "image");
    assert!(stub.was_asked("DELETE /v1/sandboxes/"));
}

#[test]
fn users_are_looked_up_by_name_in_the_sandbox() {
    let stub = Stub::start();
    let passwd = b"root:x:0:0::/:\nweb:x:33:34::/:\n".to_vec();
    stub.seen(|seen| {
        seen.files.insert("/etc/passwd".into(), stub::Inside { kind: "file", mode: 0o644, content: passwd })
    });
    assert_eq!(code(&stub, &["exec", "--user", "web", ID, "fine"]), 0);
    assert_eq!(stub.seen(|seen| seen.bodies[0].clone()), json!({ "argv": ["fine"], "uid": 33, "gid": 34 }));
    let output = stub.run(&["exec", "--user", "nobody-here", ID, "fine"]);
    assert_eq!(output.status.code(), Some(125));
    assert!(stderr(&output).contains("nobody-here"));
}

#[test]
fn a_detached_command_prints_its_id() {
    let stub = Stub::start();
    let output = stub.run(&["exec", "--detach", ID, "fine"]);
    assert_eq!((output.status.code(), stdout(&output).as_str()), (Some(0), "c0ffee\n"));
    assert_eq!(stub.seen(|seen| seen.bodies[0]["background"].clone()), true);
}

fn waiting(stub: &Stub) -> (std::process::Child, Pid) {
    let mut child = stub
        .command(&["run", "tools:1", "--", "wait"])
        .stderr(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    // The event before its output tells the command's id.
    let mut output = BufReader::new(child.stdout.take().unwrap());
    let mut line = String::new();
    output.read_line(&mut line).unwrap();
    assert_eq!(line, "waiting\n");
    child.stdout = Some(output.into_inner());
    let pid = Pid::from_child(&child);
    (child, pid)
}

#[test]
fn ctrl_c_interrupts_the_command_and_then_removes_the_sandbox() {
    let stub = Stub::start();
    let (child, pid) = waiting(&stub);
    kill_process(pid, Signal::INT).unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(143), "{}", stderr(&output));
    let requests = stub.seen(|seen| seen.requests.clone());
    let place = |start: &str| requests.iter().position(|request| request.starts_with(start)).expect(start);
    assert!(place(&format!("DELETE /v1/sandboxes/{ID}/proxy/44772/command?id=c0ffee")) < requests.len() - 1);
    assert_eq!(requests.last().unwrap(), &format!("DELETE /v1/sandboxes/{ID}"));
}

#[test]
fn a_request_to_end_removes_the_sandbox() {
    let stub = Stub::start();
    let (child, pid) = waiting(&stub);
    kill_process(pid, Signal::TERM).unwrap();
    assert_eq!(child.wait_with_output().unwrap().status.code(), Some(143));
    assert!(stub.was_asked(&format!("DELETE /v1/sandboxes/{ID}/proxy/44772/command?id=c0ffee")));
    assert!(stub.seen(|seen| seen.requests.last().unwrap() == &format!("DELETE /v1/sandboxes/{ID}")));
}

#[test]
fn a_closed_pipe_ends_everything_silently() {
    let stub = Stub::start();
    let mut child = stub
        .command(&["run", "tools:1", "--", "flood"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    assert_eq!(line, "y\n");
    let mut complaints = String::new();
    child.stderr.take().unwrap().read_to_string(&mut complaints).unwrap();
    assert_eq!((child.wait().unwrap().code(), complaints.as_str()), (Some(141), ""));
    assert!(stub.was_asked(&format!("DELETE /v1/sandboxes/{ID}/proxy/44772/command?id=c0ffee")));
    assert!(stub.seen(|seen| seen.requests.last().unwrap() == &format!("DELETE /v1/sandboxes/{ID}")));
}
