//! Lifecycle hooks: before the entrypoint, on a schedule, and what becomes of those that fail.

use std::io::Read;
use std::process::{Command, Stdio};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;

use crate::init::{boot, signal, wait};
use crate::support::{Agent, BINARY, root, until};

fn pre_start(script: &str) -> String {
    json!({ "preStart": { "command": ["sh", "-c", script], "timeoutSeconds": 20 } }).to_string()
}

fn lines(agent: &Agent, name: &str) -> usize {
    std::fs::read_to_string(agent.path(name)).map_or(0, |text| text.lines().count())
}

#[test]
fn the_hook_runs_while_the_agent_answers_and_before_the_entrypoint() {
    let hook =
        pre_start("echo > begun; while [ ! -e go ]; do sleep 0.02; done; echo $SECRET$EXECD_ENVS > hook");
    let argv = ["--init", "--", "sh", "-c", "cat hook > main; env > env; sleep 1000"];
    let env = [("OPENSANDBOX_LIFECYCLE", hook.as_str()), ("SECRET", "x"), ("OPENSANDBOX_ID", "box")];
    let agent = Agent::start_with(&argv, &env);
    until(|| agent.path("begun").exists().then_some(()));
    assert_eq!(agent.get("/ping").status, 200);
    let waiting = agent.get("/ready");
    assert_eq!(
        (waiting.status, waiting.text().as_str()),
        (503, r#"{"initialized":false,"sandboxId":"box"}"#)
    );
    assert!(!agent.path("main").exists());
    assert!(agent.shell("echo hi").text().contains("\"text\":\"hi\""), "commands do not wait for it");
    std::fs::write(agent.path("go"), "").unwrap();
    until(|| (lines(&agent, "env") > 3).then_some(()));
    assert_eq!(std::fs::read_to_string(agent.path("main")).unwrap(), "x\n");
    assert_eq!(
        until(|| Some(agent.get("/ready")).filter(|answer| answer.status == 200)).json()["initialized"],
        true
    );
    let env = std::fs::read_to_string(agent.path("env")).unwrap();
    assert!(!env.contains("LIFECYCLE"), "{env}");
}

/// Runs the agent to its end with nothing but a hook; returns its exit code and what it said.
fn fails_with(lifecycle: &str, extra: &[&str]) -> (Option<i32>, String) {
    let dir = tempfile::tempdir().unwrap();
    let port = crate::support::free_port().to_string();
    let mut child = Command::new(BINARY)
        .args(["--port", &port])
        .args(extra)
        .args(["--init", "--", "touch", "main"])
        .current_dir(dir.path())
        .env("EXECD_ENVS", dir.path().join("env"))
        .env("HOME", dir.path())
        .env("OPENSANDBOX_LIFECYCLE", lifecycle)
        .stdin(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut said = String::new();
    child.stderr.take().unwrap().read_to_string(&mut said).unwrap();
    let code = child.wait().unwrap().code();
    assert!(!dir.path().join("main").exists(), "the entrypoint ran");
    (code, said)
}

#[test]
fn a_hook_that_fails_prevents_the_entrypoint_and_says_why() {
    let dir = tempfile::tempdir().unwrap();
    let report = dir.path().join("report");
    let flag = format!("--lifecycle-startup-status-file={}", report.display());
    let (code, said) = fails_with(&pre_start("seq 5000; echo 'no \"luck\"' >&2; exit 3"), &[&flag]);
    assert_eq!(code, Some(1));
    let line = said.lines().last().unwrap();
    assert!(line.starts_with("execd: preStart: exit status 3; its output ended with \""), "{line}");
    assert!(line.ends_with("4999\\n5000\\nno \\\"luck\\\"\"") && line.len() < 4096, "{line}");
    assert_eq!(std::fs::read_to_string(report).unwrap(), "running 20\ndone 1\n");

    let slow =
        json!({ "preStart": { "command": ["sh", "-c", "echo here; sleep 1000"], "timeoutSeconds": 3 } });
    let (code, said) = fails_with(&slow.to_string(), &[]);
    assert_eq!(code, Some(1));
    assert!(
        said.ends_with(
            "preStart: was killed because it took longer than 3 s; its output ended with \"here\"\n"
        ),
        "{said}"
    );

    let (_, said) = fails_with(&json!({ "preStart": { "command": ["/no/such"] } }).to_string(), &[]);
    assert!(said.ends_with("execd: preStart: exec /no/such: no such file or directory\n"), "{said}");

    let (code, said) = fails_with(r#"{"periodic":[{"name":"n","schedule":"x","command":["y"]}]}"#, &[]);
    assert_eq!(code, Some(2));
    assert!(said.contains("hooks: lifecycle.periodic[0].schedule has 1 fields"), "{said}");
}

#[test]
fn what_a_hook_leaves_running_lives_on() {
    let hook = pre_start("(while :; do echo noise; sleep 0.01; done) & echo $! > pid");
    let argv = ["--init", "--", "sh", "-c", "sleep 0.3; kill -0 $(cat pid) && echo > alive; sleep 1000"];
    let agent = Agent::start_with(&argv, &[("OPENSANDBOX_LIFECYCLE", &hook)]);
    until(|| agent.path("alive").exists().then_some(()));
    signal(&agent, Signal::TERM);
    let mut agent = agent;
    assert_eq!(wait(&mut agent).code(), Some(143));
    let pid = std::fs::read_to_string(agent.path("pid")).unwrap();
    until(|| (!std::path::Path::new(&format!("/proc/{}", pid.trim())).exists()).then_some(()));
}

#[test]
fn a_box_can_be_stopped_while_its_hook_runs() {
    let mut agent = Agent::start_with(
        &["--init", "--", "touch", "main"],
        &[("OPENSANDBOX_LIFECYCLE", &pre_start("echo > begun; sleep 1000"))],
    );
    until(|| agent.path("begun").exists().then_some(()));
    signal(&agent, Signal::HUP);
    signal(&agent, Signal::TERM);
    assert_eq!(wait(&mut agent).code(), Some(143));
    assert!(!agent.path("main").exists());
}

#[test]
fn periodic_hooks_run_again_and_again_and_never_twice_at_a_time() {
    let hook = |name: &str, script: &str| json!({ "name": name, "schedule": "@every 1s", "command": ["sh", "-c", script], "timeoutSeconds": 30 });
    let slow = "echo >> slow; while [ ! -e go ]; do sleep 0.02; done";
    let hooks =
        json!({ "periodic": [hook("tick", "echo >> ticks"), hook("slow", slow), hook("bad", "exit 1")] });
    let log = tempfile::NamedTempFile::new().unwrap();
    let env = [
        ("OPENSANDBOX_LIFECYCLE", hooks.to_string()),
        ("EXECD_LOG_FILE", log.path().to_str().unwrap().to_owned()),
    ];
    let env = env.each_ref().map(|(name, value)| (*name, value.as_str()));
    let agent = Agent::start_with(&["--init", "--", "sleep", "1000"], &env);
    until(|| (lines(&agent, "ticks") >= 3).then_some(()));
    assert_eq!(lines(&agent, "slow"), 1, "the first run is not over");
    std::fs::write(agent.path("go"), "").unwrap();
    until(|| (lines(&agent, "slow") >= 2).then_some(()));
    let said = std::fs::read_to_string(log.path()).unwrap();
    assert!(said.contains("warning periodic hook bad: exit status 1\n"), "{said}");
}

#[test]
fn the_control_plane_boots_a_box_with_hooks() {
    let dir = tempfile::tempdir().unwrap();
    let (ran, main) = (dir.path().join("ran"), dir.path().join("main"));
    let env = json!([["PATH", "/usr/bin:/bin"]]);
    let config = |script: String, entrypoint: &[&str]| {
        json!({ "accessToken": "", "entrypoint": entrypoint, "env": env,
            "lifecycle": { "preStart": { "command": ["sh", "-c", script] } } })
    };
    let touch = main.to_str().unwrap();
    let (mut child, status, _) = boot(&config(format!("echo > {}", ran.display()), &["touch", touch]));
    assert_eq!(status, "{\"status\":\"started\"}\n");
    assert_eq!(child.wait().unwrap().code(), Some(0));
    assert!(ran.exists() && main.exists());

    let (mut child, status, _) = boot(&config("echo reason; exit 9".into(), &["true"]));
    let failed = r#"{"message":"exit status 9; its output ended with \"reason\"","phase":"preStart","status":"failed"}"#;
    assert_eq!(status, format!("{{\"status\":\"started\"}}\n{failed}\n"));
    assert_eq!(child.wait().unwrap().code(), Some(1));

    let (mut child, status, _) = boot(&config("true".into(), &["/no/such"]));
    let second: serde_json::Value = serde_json::from_str(status.lines().nth(1).unwrap()).unwrap();
    assert_eq!(second["phase"], "entrypoint");
    assert_eq!(child.wait().unwrap().code(), Some(127));
}

#[test]
fn as_pid_one_it_takes_the_hook_along_when_it_ends() {
    if !root() {
        return;
    }
    let mut unshare = Command::new("unshare");
    unshare.args(["--pid", "--fork", "--kill-child", "--mount-proc", BINARY, "--init"]);
    let hook = pre_start("echo > begun; sleep 1000");
    let agent = Agent::launch(unshare, &["--", "true"], &[("OPENSANDBOX_LIFECYCLE", &hook)]);
    until(|| agent.path("begun").exists().then_some(()));
    agent.post("/command", &json!({ "command": "kill -TERM 1; sleep 1000" }));
    let mut agent = agent;
    assert_eq!(wait(&mut agent).code(), Some(143));
}

#[test]
fn without_init_the_hook_still_runs_first() {
    let agent = Agent::start_with(&[], &[("OPENSANDBOX_LIFECYCLE", &pre_start("echo > ran"))]);
    until(|| agent.path("ran").exists().then_some(()));
    until(|| (agent.get("/ready").status == 200).then_some(()));
    kill_process(Pid::from_child(&agent.child), Signal::TERM).unwrap();
}
