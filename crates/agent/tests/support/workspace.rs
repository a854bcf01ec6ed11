//! The box as a workspace: from the document to Ready, what is reported, and how it ends.

use std::io::{BufRead, BufReader, Write};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use sandglass_bridge::wire::{self, Outcome};
use serde_json::{Value, json};

use crate::bridge_server::{PASSWORD, SANDBOX, Server, TOKEN};
use crate::init::{signal, wait};
use crate::support::{Agent, free_port, until};

/// Everything of a workspace beside its agent.
struct Stage {
    dir: tempfile::TempDir,
    server: Server,
}

impl Stage {
    fn new() -> Self {
        Self::with_repositories(&[])
    }

    fn with_repositories(repositories: &[(&str, &str)]) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let server = Server::start(dir.path(), repositories);
        std::fs::write(dir.path().join("workspace.token"), format!("{TOKEN}\n")).unwrap();
        Stage { dir, server }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn write(&self, more: Value) -> PathBuf {
        let mut document = json!({
            "sandboxId": SANDBOX, "generation": 1,
            "bridge": { "way": { "socket": self.path("agent.sock") }, "tokenFile": self.path("workspace.token") },
            "stateDir": self.path("state"),
            "git": { "root": self.path("workspace"), "allowFile": true, "allowHttp": true },
        });
        for (key, value) in more.as_object().unwrap() {
            match (document[key.as_str()].as_object_mut(), value.as_object()) {
                (Some(there), Some(value)) => there.extend(value.clone()),
                _ => document[key.as_str()] = value.clone(),
            }
        }
        let path = self.path("workspace.json");
        std::fs::write(&path, document.to_string()).unwrap();
        path
    }

    fn start(&self, more: Value, entrypoint: &[&str]) -> Agent {
        let document = self.write(more);
        let mut args = vec!["--init", "--workspace", document.to_str().unwrap()];
        if !entrypoint.is_empty() {
            args.push("--");
            args.extend(entrypoint);
        }
        Agent::start_with(&args, &[])
    }

    fn ready(&self, agent: &Agent) {
        until(|| (agent.get("/ready").status == 200).then_some(()));
    }

    fn service(agent: &Agent, name: &str) -> Value {
        agent.get(&format!("/v1/workspace/services/{name}")).json()
    }
}

fn git(folder: &Path, args: &[&str]) -> String {
    let output = Command::new("git")
        .args(["-c", "user.name=a", "-c", "user.email=a@b", "-c", "init.defaultBranch=main"])
        .args(args)
        .current_dir(folder)
        .env("GIT_CONFIG_GLOBAL", "/dev/null")
        .env("GIT_CONFIG_NOSYSTEM", "1")
        .output()
        .unwrap();
    assert!(output.status.success(), "git {args:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap().trim().to_owned()
}

/// A repository with one commit, which is returned.
fn repository(folder: &Path) -> String {
    std::fs::create_dir_all(folder).unwrap();
    git(folder, &["init", "-q"]);
    std::fs::write(folder.join("file"), "content\n").unwrap();
    git(folder, &["add", "file"]);
    git(folder, &["commit", "-qm", "first"]);
    git(folder, &["rev-parse", "HEAD"])
}

/// Phases that have ended, with how.
fn finished(server: &Server) -> Vec<String> {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    server
        .events("boot.phase_finished")
        .iter()
        .map(|event| format!("{} {}", text(&event["phase"]), text(&event["outcome"])))
        .collect()
}

#[test]
fn a_workspace_boots_to_ready_and_its_server_hears_of_all_of_it() {
    let stage = Stage::new();
    let origin = stage.path("origin");
    let commit = repository(&origin);
    let checkout = stage.path("workspace/web");
    let agent = stage.start(
        json!({
            "repositories": [{ "url": format!("file://{}", origin.display()), "ref": "refs/heads/main", "commit": commit, "path": checkout }],
            "boot": {
                "setup": [{ "label": "web", "command": ["sh", "-c", "cat file; echo $SANDGLASS_BOOT_SOURCE"], "cwd": checkout }],
                "start": [{ "label": "web", "command": ["sh", "-c", "echo > started"], "cwd": checkout }],
            },
            "services": [
                { "name": "app", "kind": "custom", "command": ["sleep", "1000"], "required": true },
                { "name": "terminal", "kind": "terminal" },
            ],
        }),
        &["sleep", "1000"],
    );
    stage.ready(&agent);
    assert_eq!(git(&checkout, &["rev-parse", "HEAD"]), commit);
    assert_eq!(git(&checkout, &["branch", "--show-current"]), "main");
    assert!(checkout.join("started").exists());
    let server = &stage.server;
    until(|| (server.events("boot.completed").len() == 1).then_some(()));
    assert_eq!(
        finished(server),
        ["sync done", "setup done", "services done", "start done", "entrypoint done"]
    );
    until(|| {
        server.disk(|disk| disk.logs.get("boot.setup.web").cloned()).filter(|log| log == b"content\nfresh\n")
    });
    assert_eq!(Stage::service(&agent, "app")["state"], "Ready");
    // What is in use is told, and the heartbeat itself is not.
    let running = agent.open_stream(&json!({ "command": "sleep 1000" }));
    until(|| {
        server.disk(|disk| disk.heartbeats.iter().any(|beat| beat.activity.commands == 1).then_some(()))
    });
    drop(running);
    let health = server.disk(|disk| disk.heartbeats.last().unwrap().services.clone());
    assert_eq!(health.iter().map(|one| one.name.as_str()).collect::<Vec<_>>(), ["app", "terminal"]);
    let status = agent.get("/v1/workspace/bridge/status").json();
    assert_eq!((&status["generation"], &status["protocolVersion"]), (&json!(1), &json!(1)));
    // The server owns the position in the events.
    assert_eq!(agent.get("/v1/workspace/bridge/events?ack=1").status, 409);
}

#[test]
fn a_box_of_an_image_has_no_setup_and_one_without_a_server_boots_alone() {
    let mut stage = Stage::new();
    stage.server.cut();
    let agent = stage.start(
        json!({ "source": "image", "boot": { "setup": [{ "label": "a", "command": ["touch", stage.path("setup")] }] } }),
        &[],
    );
    stage.ready(&agent);
    assert!(!stage.path("setup").exists());
    stage.server.mend();
    until(|| (stage.server.events("boot.completed").len() == 1).then_some(()));
    assert_eq!(finished(&stage.server), ["setup skipped"]);
}

#[test]
fn a_failing_setup_is_reported_with_its_end_and_ends_the_box() {
    let stage = Stage::new();
    let script = "echo one; echo two >&2; exit 3";
    let mut agent = stage.start(
        json!({ "boot": { "setup": [{ "label": "web", "command": ["sh", "-c", script] }] } }),
        &["sleep", "9"],
    );
    assert_eq!(wait(&mut agent).code(), Some(1));
    let fatal = until(|| stage.server.disk(|disk| disk.fatal.clone()));
    assert_eq!((fatal.phase.as_str(), fatal.exit_code), ("setup of web", Some(3)));
    assert_eq!(fatal.message, "setup of web: exit status 3");
    assert_eq!(fatal.output_tail, "one\ntwo");
    assert_eq!(stage.server.events("boot.failed")[0]["reason"], "boot_failed");
}

#[test]
fn a_repository_that_cannot_be_had_says_why() {
    let stage = Stage::new();
    let url = format!("file://{}", stage.path("nowhere").display());
    let path = stage.path("workspace/x");
    let mut agent =
        stage.start(json!({ "repositories": [{ "url": url, "commit": "0".repeat(40), "path": path }] }), &[]);
    assert_eq!(wait(&mut agent).code(), Some(1));
    let failed = &stage.server.events("boot.failed")[0];
    assert_eq!((&failed["cause"], &failed["phase"]), (&json!("repository_unreachable"), &json!("sync")));
    assert!(!failed["outputTail"].as_str().unwrap().is_empty(), "{failed}");
}

#[test]
fn a_broken_document_keeps_the_box_from_starting() {
    let stage = Stage::new();
    let document = stage.path("broken.json");
    std::fs::write(&document, "{").unwrap();
    let output = Command::new(crate::support::BINARY)
        .args(["--init", "--port", &free_port().to_string(), "--workspace", document.to_str().unwrap()])
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&output.stderr).contains("workspace document"));
}

#[test]
fn a_box_that_waited_says_whose_it_is_before_its_boot_is_over() {
    let stage = Stage::new();
    let (document, go) = (stage.path("workspace.json"), stage.path("go"));
    std::fs::write(&document, "").unwrap();
    let args = ["--standby", "--init", "--workspace", document.to_str().unwrap()];
    let agent = Agent::start_with(&args, &[("EXECD_ACCESS_TOKEN", "pool")]);
    // As a server does that was told whose the box is: into the same file.
    let script = format!(
        "until [ -e {} ]; do sleep 0.02; done; echo $WHO > {}",
        go.display(),
        stage.path("who").display()
    );
    stage.write(json!({ "boot": { "start": [{ "label": "a", "command": ["sh", "-c", script] }] } }));
    let body = json!({ "sandboxId": SANDBOX, "accessToken": "own", "env": [["WHO", "ann"]] }).to_string();
    let assign =
        || agent.send("POST", "/internal/assign", &[("X-EXECD-ACCESS-TOKEN", "pool")], body.as_bytes());
    assert_eq!(assign().status, 200);
    assert_eq!(agent.get("/ready").status, 503, "it boots");
    assert_eq!(assign().status, 200, "as the first time");
    std::fs::write(go, "").unwrap();
    stage.ready(&agent);
    until(|| (stage.server.events("boot.completed").len() == 1).then_some(()));
    assert_eq!(std::fs::read_to_string(stage.path("who")).unwrap(), "ann\n");
}

/// In each phase, the box is asked to end while the phase goes on, and nothing of it is left.
#[test]
fn a_box_that_is_asked_to_end_during_its_boot_ends_with_all_it_began() {
    let script = |name: &str, stage: &Stage| {
        let (pid, ended) = (stage.path("pid"), stage.path(name));
        format!(
            "trap 'touch {}; exit' TERM; echo $$ > {}; while :; do sleep 0.02; done",
            ended.display(),
            pid.display()
        )
    };
    for phase in ["sync", "setup", "services", "start", "entrypoint"] {
        let stage = Stage::new();
        let run = json!(["sh", "-c", script("ended", &stage)]);
        let hook = json!([{ "label": "a", "command": run }]);
        let service = |probe: Value| json!([{ "name": "a", "kind": "custom", "command": run, "required": true, "probe": probe }]);
        // A server that accepts and says nothing.
        let silent = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}/acme/web.git", silent.local_addr().unwrap());
        let document = match phase {
            "sync" => {
                let path = stage.path("workspace/x");
                json!({ "repositories": [{ "url": url, "commit": "0".repeat(40), "path": path }] })
            }
            "setup" => json!({ "boot": { "setup": hook } }),
            "services" => json!({ "services": service(json!({ "type": "tcp", "port": 1 })) }),
            "start" => json!({ "boot": { "start": hook } }),
            _ => json!({ "services": service(Value::Null) }),
        };
        let entrypoint =
            if phase == "entrypoint" { &["sh", "-c", "while :; do sleep 1; done"][..] } else { &[] };
        let mut agent = stage.start(document, entrypoint);
        let leader: Option<Pid> = match phase {
            "sync" => {
                silent.accept().unwrap();
                None
            }
            _ => Some(until(|| {
                let text = std::fs::read_to_string(stage.path("pid")).ok()?;
                Pid::from_raw(text.trim().parse().ok()?)
            })),
        };
        if phase == "entrypoint" {
            stage.ready(&agent);
        }
        signal(&agent, Signal::TERM);
        let asked = Instant::now();
        assert_eq!(wait(&mut agent).code(), Some(143), "{phase}");
        assert!(asked.elapsed() < Duration::from_secs(10), "{phase} took the grace and more");
        if let Some(leader) = leader {
            assert!(stage.path("ended").exists(), "{phase}: it was asked");
            assert!(kill_process(leader, Signal::CONT).is_err(), "{phase}: it is left");
        }
        if phase != "entrypoint" {
            assert_eq!(stage.server.events("boot.cancelled")[0]["phase"], phase);
        }
    }
}

#[test]
fn a_killed_service_comes_back_and_that_is_seen() {
    let stage = Stage::new();
    let pid = stage.path("pid");
    let run = format!("echo $$ > {}; exec sleep 1000", pid.display());
    let agent = stage.start(
        json!({
            "boot": { "restarts": { "baseMillis": 10 } },
            "services": [{ "name": "app", "kind": "custom", "command": ["sh", "-c", run] }],
        }),
        &[],
    );
    until(|| (Stage::service(&agent, "app")["state"] == "Ready").then_some(()));
    let first: i32 = until(|| std::fs::read_to_string(&pid).ok()?.trim().parse().ok());
    kill_process(Pid::from_raw(first).unwrap(), Signal::KILL).unwrap();
    let service = until(|| {
        Some(Stage::service(&agent, "app")).filter(|app| app["restartCount"] == 1 && app["state"] == "Ready")
    });
    assert_eq!(service["lastExit"], json!({ "signal": 9 }));
    until(|| {
        let changes = stage.server.events("service.state_changed");
        changes.iter().any(|change| change["to"] == "Restarting").then_some(())
    });
    // By request of a client, and of the server.
    assert_eq!(agent.send("POST", "/v1/workspace/services/app/restart", &[], b"").status, 202);
    until(|| {
        Some(Stage::service(&agent, "app")).filter(|app| app["restartCount"] == 2 && app["state"] == "Ready")
    });
    let stop = stage.server.command(&wire::Command::ServiceStop { name: "app".into() });
    assert_eq!(until(|| stage.server.outcome(&stop)), Outcome::done());
    until(|| (Stage::service(&agent, "app")["state"] == "Disabled").then_some(()));
    let unknown = stage.server.command(&wire::Command::ServiceStart { name: "nobody".into() });
    assert!(
        matches!(until(|| stage.server.outcome(&unknown)), Outcome::Failed(error) if error.code == "SERVICE::NOT_FOUND")
    );
    let put = |body: &str| agent.send("PUT", "/v1/workspace/services/app", &[], body.as_bytes());
    assert_eq!(put(r#"{"enabled":false}"#).json()["state"], "Disabled");
    assert_eq!(agent.send("POST", "/v1/workspace/services/app/restart", &[], b"").status, 409);
    assert_eq!(put(r#"{"enabled":true}"#).status, 202);
    assert_eq!(agent.get("/v1/workspace/services/nobody").json()["code"], "SERVICE::NOT_FOUND");
}

#[test]
fn what_happens_while_the_link_is_cut_arrives_in_order_and_once() {
    let mut stage = Stage::new();
    let agent = stage.start(
        json!({ "services": [{ "name": "app", "kind": "custom", "command": ["sleep", "1000"] }] }),
        &[],
    );
    until(|| (stage.server.events("boot.completed").len() == 1).then_some(()));
    stage.server.cut();
    for _ in 0..5 {
        let before = Stage::service(&agent, "app")["restartCount"].as_u64().unwrap();
        agent.send("POST", "/v1/workspace/services/app/restart", &[], b"");
        until(|| {
            let app = Stage::service(&agent, "app");
            (app["restartCount"].as_u64() > Some(before) && app["state"] == "Ready").then_some(())
        });
    }
    stage.server.mend();
    // The agent hears a moment after the server has them that it has.
    let last = until(|| {
        let status = agent.get("/v1/workspace/bridge/status").json();
        (status["ackedSeq"] == status["lastSeq"]).then(|| status["lastSeq"].as_u64().unwrap())
    });
    let numbers: Vec<u64> = stage.server.disk(|disk| disk.events.iter().map(|event| event.seq).collect());
    assert_eq!(numbers[..last as usize], (1..=last).collect::<Vec<_>>());
}

#[test]
fn an_agent_that_is_superseded_ends_and_one_with_a_new_token_goes_on() {
    let stage = Stage::new();
    let mut agent = stage.start(json!({}), &["sleep", "1000"]);
    until(|| (stage.server.events("boot.completed").len() == 1).then_some(()));
    // As a resumed box finds it: a new generation, and its token in the place of the old one.
    let next = "fedcba9876543210fedcba9876543210";
    stage.write(json!({ "generation": 2 }));
    std::fs::write(stage.path("workspace.token"), next).unwrap();
    stage.server.expect(2, next);
    let ping = stage.server.command(&wire::Command::Ping);
    assert_eq!(until(|| stage.server.outcome(&ping)), Outcome::done());
    assert_eq!(agent.get("/v1/workspace/bridge/status").json()["generation"], 2);
    // Another box has taken over: nothing of this one has changed.
    stage.server.expect(3, "another");
    assert_eq!(wait(&mut agent).code(), Some(143));
}

#[test]
fn the_server_ends_the_box() {
    let stage = Stage::new();
    let set = stage.path("set");
    let script = format!("trap 'exit 7' TERM; touch {}; while :; do sleep 0.02; done", set.display());
    let mut agent = stage.start(
        json!({ "services": [{ "name": "app", "kind": "custom", "command": ["sleep", "1000"] }] }),
        &["sh", "-c", &script],
    );
    until(|| (stage.server.events("boot.completed").len() == 1).then_some(()));
    until(|| set.exists().then_some(()));
    let end =
        stage.server.command(&wire::Command::Shutdown { grace_seconds: 5, reason: "user_delete".into() });
    assert_eq!(wait(&mut agent).code(), Some(7));
    assert_eq!(until(|| stage.server.outcome(&end)), Outcome::done());
    until(|| (stage.server.events("service.state_changed").last()?["to"] == "Stopped").then_some(()));
}

#[test]
fn variables_that_come_later_reach_what_starts_later() {
    let stage = Stage::new();
    let agent = stage.start(
        json!({ "services": [{ "name": "app", "kind": "custom", "command": ["sh", "-c", "echo v=$LATER; sleep 1000"] }] }),
        &[],
    );
    until(|| (Stage::service(&agent, "app")["state"] == "Ready").then_some(()));
    let log = || agent.get("/v1/workspace/logs/service.app").text();
    until(|| (log() == "v=\n").then_some(()));
    let env = [("LATER".to_owned(), Some("yes".to_owned()))].into();
    let update = stage.server.command(&wire::Command::EnvUpdate { env: wire::Secret::new(env) });
    assert_eq!(until(|| stage.server.outcome(&update)), Outcome::done());
    agent.send("POST", "/v1/workspace/services/app/restart", &[], b"");
    until(|| (log() == "v=\nv=yes\n").then_some(()));
    let rest = agent.get("/v1/workspace/logs/service.app?from=3");
    assert_eq!((rest.text().as_str(), rest.header("x-log-next")), ("v=yes\n", Some("9")));
}

#[test]
fn a_server_that_asks_gets_the_same() {
    let stage = Stage::new();
    let agent = stage.start(json!({ "bridge": { "way": "pull" } }), &["sleep", "1000"]);
    stage.ready(&agent);
    let page = agent.get("/v1/workspace/bridge/events?limit=2").json();
    assert_eq!((page["events"].as_array().unwrap().len(), &page["more"]), (2, &json!(true)));
    assert_eq!(page["events"][0]["type"], "boot.phase_started");
    let boot = page["bootId"].as_str().unwrap();
    let rest = agent.get(&format!("/v1/workspace/bridge/events?boot={boot}&after=2&ack=2")).json();
    assert_eq!((&rest["events"][0]["seq"], &rest["ackedSeq"]), (&json!(3), &json!(2)));
    assert_eq!(agent.get("/v1/workspace/bridge/events?after=x").status, 400);
}

#[test]
fn ssh_runs_programs_and_its_host_key_stays() {
    let stage = Stage::new();
    let key = stage.path("key");
    let made = Command::new("ssh-keygen").args(["-q", "-t", "ed25519", "-N", "", "-f"]).arg(&key).status();
    assert!(made.unwrap().success(), "the tests need ssh and ssh-keygen");
    let public = std::fs::read_to_string(stage.path("key.pub")).unwrap();
    let port = free_port();
    let document = json!({ "services": [{ "name": "ssh", "kind": "ssh", "port": port, "authorizedKeys": [public.trim()] }] });
    let user = String::from_utf8(Command::new("id").arg("-un").output().unwrap().stdout).unwrap();
    let ssh = |args: &[&str]| {
        Command::new("ssh")
            .args(["-F", "/dev/null", "-o", "BatchMode=yes", "-o", "StrictHostKeyChecking=accept-new"])
            .args(["-o", "IdentitiesOnly=yes", "-p", &port.to_string(), "-i"])
            .arg(&key)
            .arg("-o")
            .arg(format!("UserKnownHostsFile={}", stage.path("known_hosts").display()))
            .arg(format!("{}@127.0.0.1", user.trim()))
            .args(args)
            .output()
            .unwrap()
    };
    let agent = stage.start(document.clone(), &[]);
    let fingerprint = until(|| {
        let service = Stage::service(&agent, "ssh");
        (service["state"] == "Ready").then(|| service["hostKey"]["fingerprint"].as_str().unwrap().to_owned())
    });
    let ran = ssh(&["echo out; echo $PWD; exit 5"]);
    let told = || String::from_utf8_lossy(&ran.stderr).into_owned();
    assert_eq!(ran.status.code(), Some(5), "{}", told());
    assert!(ran.stdout.starts_with(b"out\n"), "{}", told());
    until(|| {
        let keys = stage.server.events("service.host_key");
        keys.iter().any(|key| key["hostKey"]["fingerprint"] == fingerprint.as_str()).then_some(())
    });
    // A session counts as use.
    let mut session = Command::new("ssh")
        .args(["-F", "/dev/null", "-o", "BatchMode=yes", "-p", &port.to_string(), "-i"])
        .arg(&key)
        .arg("-o")
        .arg(format!("UserKnownHostsFile={}", stage.path("known_hosts").display()))
        .arg(format!("{}@127.0.0.1", user.trim()))
        .arg("sleep 1000")
        .spawn()
        .unwrap();
    until(|| {
        stage
            .server
            .disk(|disk| disk.heartbeats.iter().any(|beat| beat.activity.ssh_sessions == 1).then_some(()))
    });
    session.kill().unwrap();
    session.wait().unwrap();
    // Killed, it comes back with the same key; so does that of a later box.
    let server = until(|| {
        let text = std::fs::read_to_string(format!("/proc/{0}/task/{0}/children", agent.child.id())).unwrap();
        text.split_whitespace().next()?.parse::<i32>().ok().and_then(Pid::from_raw)
    });
    kill_process(server, Signal::KILL).unwrap();
    until(|| {
        let service = Stage::service(&agent, "ssh");
        (service["restartCount"] == 1 && service["state"] == "Ready").then_some(())
    });
    assert_eq!(ssh(&["exit 6"]).status.code(), Some(6), "the host key is the known one");
    let file = stage.path("file");
    std::fs::write(&file, "over sftp").unwrap();
    let batch = stage.path("batch");
    std::fs::write(&batch, format!("put {} {}\n", file.display(), stage.path("copy").display())).unwrap();
    let moved = Command::new("sftp")
        .args(["-F", "/dev/null", "-o", "BatchMode=yes", "-P", &port.to_string(), "-i"])
        .arg(&key)
        .arg("-o")
        .arg(format!("UserKnownHostsFile={}", stage.path("known_hosts").display()))
        .arg("-b")
        .arg(&batch)
        .arg(format!("{}@127.0.0.1", user.trim()))
        .output()
        .unwrap();
    assert!(moved.status.success(), "{}", String::from_utf8_lossy(&moved.stderr));
    assert_eq!(std::fs::read_to_string(stage.path("copy")).unwrap(), "over sftp");
    drop(agent);
    let again = stage.start(document, &[]);
    until(|| (Stage::service(&again, "ssh")["hostKey"]["fingerprint"] == fingerprint.as_str()).then_some(()));
}

/// `x-access-token` and [`PASSWORD`].
const AUTHORIZATION: &str = "Basic eC1hY2Nlc3MtdG9rZW46Z2hzX3RoZS1zZWNyZXQtb2YtdGhlLXJlcG9zaXRvcnk=";

/// Serves the files of a folder to who is authorised, until the test ends; its port.
fn file_server(folder: PathBuf) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            let mut head = String::new();
            let mut lines = BufReader::new(stream.try_clone().unwrap());
            while !head.ends_with("\r\n\r\n") && lines.read_line(&mut head).unwrap_or(0) > 0 {}
            let path = head.split([' ', '?']).nth(1).unwrap_or("/").trim_start_matches('/').to_owned();
            let authorised = head.lines().any(|line| line.ends_with(AUTHORIZATION));
            let (status, body) = match std::fs::read(folder.join(path)) {
                _ if !authorised => ("401 Unauthorized\r\nWWW-Authenticate: Basic realm=\"git\"", Vec::new()),
                Ok(body) => ("200 OK", body),
                Err(_) => ("404 Not Found", Vec::new()),
            };
            let head =
                format!("HTTP/1.1 {status}\r\nConnection: close\r\nContent-Length: {}\r\n\r\n", body.len());
            let _ = stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(&body));
        }
    });
    port
}

#[test]
fn a_private_repository_is_fetched_with_the_credential_of_the_server() {
    let served = tempfile::tempdir().unwrap();
    let commit = repository(&served.path().join("web"));
    git(served.path(), &["clone", "-q", "--bare", "web", "acme/web.git"]);
    git(&served.path().join("acme/web.git"), &["update-server-info"]);
    let port = file_server(served.path().to_owned());
    let (host, path) = (format!("127.0.0.1:{port}"), "acme/web.git");
    let stage = Stage::with_repositories(&[(&host, path)]);
    let checkout = stage.path("workspace/web");
    let agent = stage.start(
        json!({ "repositories": [{ "url": format!("http://{host}/{path}"), "ref": "refs/heads/main", "commit": commit,
            "path": checkout, "credential": true }] }),
        &[],
    );
    stage.ready(&agent);
    assert_eq!(git(&checkout, &["rev-parse", "HEAD"]), commit);
    // Later too, by whoever works there, with nothing of it in the repository or beside it.
    assert!(
        agent
            .shell(&format!("git -C {} fetch origin && echo fetched", checkout.display()))
            .text()
            .contains("fetched")
    );
    let found = Command::new("grep").args(["-rl", PASSWORD]).arg(stage.dir.path()).output().unwrap();
    assert!(found.stdout.is_empty(), "{}", String::from_utf8_lossy(&found.stdout));
}

#[test]
fn git_gets_credentials_for_declared_repositories_and_keeps_none() {
    let stage = Stage::with_repositories(&[("git.example", "my%20org/web%2B.git")]);
    let agent = stage.start(
        json!({
            "source": "image",
            "boot": { "onSyncFailure": "warn" },
            "repositories": [{ "url": "https://git.example/my%20org/web%2B.git", "commit": "0".repeat(40),
                "path": stage.path("workspace/web"), "credential": true }],
            // Nothing is reached, and nothing outside this machine is asked.
            "git": { "hosts": ["nowhere.example"] },
        }),
        &[],
    );
    stage.ready(&agent);
    until(|| (stage.server.events("boot.completed").len() == 1).then_some(()));
    let fill = |path: &str| {
        let ask = format!(
            "printf 'protocol=https\\nhost=git.example\\npath={path}\\n\\n' | GIT_TERMINAL_PROMPT=0 git credential fill 2>&1"
        );
        agent.shell(&ask).text()
    };
    let given = fill("my org/web+.git");
    assert!(given.contains(&format!("password={PASSWORD}")), "{given}");
    let refused = fill("acme/other.git");
    assert!(!refused.contains(PASSWORD) && refused.contains("does not declare this repository"), "{refused}");
    assert_eq!(stage.server.disk(|disk| disk.credentials.len()), 1);
    // Neither in the environment of the box nor in any file of it.
    assert!(!agent.shell("env; git config --list").text().contains(PASSWORD));
    for folder in [stage.dir.path(), agent.dir.path()] {
        let found = Command::new("grep").args(["-rl", PASSWORD]).arg(folder).output().unwrap();
        assert!(found.stdout.is_empty(), "{}", String::from_utf8_lossy(&found.stdout));
    }
}
