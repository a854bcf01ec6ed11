//! What images expect of the start script that the agent replaces, and the last moments of answers.

use std::io::Read;
use std::os::unix::process::CommandExt;
use std::process::Command;

use serde_json::json;

use crate::init::wait;
use crate::support::{Agent, BINARY, until};

fn output(agent: &Agent) -> String {
    until(|| std::fs::read_to_string(agent.path("out")).ok().filter(|text| text.ends_with('\n')))
}

#[test]
fn the_command_in_its_other_spellings() {
    let plain = Agent::start_with(&["--init", "--", "-c", "echo $0", "a", "> out;", "sleep 1000"], &[]);
    assert!(output(&plain).ends_with("sh a\n"));
    let env = [("BOOTSTRAP_CMD", "echo cmd-$0 > out; sleep 1000"), ("BOOTSTRAP_SHELL", "sh")];
    let other = Agent::start_with(&["--init", "--", "touch", "x"], &env);
    assert_eq!(output(&other), "cmd-sh\n");
}

#[test]
fn the_script_before_everything_is_read_by_everybody() {
    let dir = tempfile::tempdir().unwrap();
    let script = dir.path().join("pre.sh");
    std::fs::write(&script, "echo chatter; export FROM_SCRIPT='a\nb'; unset GONE; cd /\n").unwrap();
    let env = [("EXECD_BOOTSTRAP_PRE_SCRIPT", script.to_str().unwrap()), ("GONE", "x"), ("OUT", "1")];
    let argv = ["--init", "--", "sh", "-c", "sleep 1000"];
    let agent = Agent::start_with(&argv, &env);
    let text = agent.shell("pwd; echo \"${FROM_SCRIPT}-${GONE}-$OUT\"").text();
    assert!(
        text.contains("\"text\":\"/\"")
            && text.contains("\"text\":\"a\"")
            && text.contains("\"text\":\"b--1\""),
        "{text}"
    );
    let missing = Agent::start_with(&argv, &[("EXECD_BOOTSTRAP_PRE_SCRIPT", "missing.sh")]);
    assert!(missing.shell("echo on").text().contains("\"text\":\"on\""));
}

#[test]
fn under_the_name_of_the_script_everything_is_the_command() {
    let mut command = Command::new(BINARY);
    command.arg0("/opt/opensandbox/bootstrap.sh");
    // What `launch` adds would be flags.
    let dir = tempfile::tempdir().unwrap();
    let mut child = command
        .args(["-c", "exit 5"])
        .current_dir(dir.path())
        .env("EXECD_ENVS", dir.path().join("env"))
        .env("HOME", dir.path())
        .spawn()
        .unwrap();
    let code = child.wait().unwrap().code();
    // The port may be taken on this machine.
    assert!(matches!(code, Some(5 | 1)), "{code:?}");
}

#[test]
fn an_answer_that_is_under_way_is_finished_when_the_box_ends() {
    let mut agent = Agent::start_with(
        &[
            "--init",
            "--graceful-shutdown-timeout=60s",
            "--",
            "sh",
            "-c",
            "while [ ! -e go ]; do sleep 0.02; done",
        ],
        &[],
    );
    let (mut stream, _) = agent.open_stream(
        &json!({ "command": "trap 'echo last; exit 0' TERM; echo > ready; while :; do sleep 0.02; done" }),
    );
    until(|| agent.path("ready").exists().then_some(()));
    std::fs::write(agent.path("go"), "").unwrap();
    let mut rest = String::new();
    stream.read_to_string(&mut rest).unwrap();
    assert!(rest.contains("\"text\":\"last\"") && rest.contains("execution_complete"), "{rest}");
    assert_eq!(wait(&mut agent).code(), Some(0));
}

#[test]
fn clone3_can_be_made_to_look_absent() {
    for how in ["1", "reexec"] {
        let agent = Agent::start_with(&[], &[("EXECD_CLONE3_COMPAT", how)]);
        let text = agent.shell("grep Seccomp: /proc/self/status").text();
        assert!(text.contains("Seccomp:\\t2"), "{text}");
    }
    let port = crate::support::free_port().to_string();
    let mut refused = Command::new("timeout");
    refused.args(["20", BINARY, "--port", &port]).env("EXECD_CLONE3_COMPAT", "maybe");
    let refused = refused.output().unwrap();
    assert_eq!(refused.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&refused.stderr).contains("EXECD_CLONE3_COMPAT"));
}
