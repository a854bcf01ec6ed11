//! `up`, `build`, `ssh`, `code` and what others show of sandboxes that are made from repositories, against a stub.

#![expect(clippy::unwrap_used, reason = "a stub or helper that fails is a test that fails")]

mod stub;

use std::{
    io::Write,
    path::Path,
    process::{Command, Output, Stdio},
    time::{Duration, Instant},
};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use stub::{ID, Stub, stderr, stdout};

const BUILD: &str = "33333333-2222-4333-8444-555555555555";
const IMAGE: &str = "44444444-2222-4333-8444-555555555555";

fn pending(reason: &str) -> Value {
    json!({ "status": { "state": "Pending", "reason": reason }, "source": { "type": "repository", "imageBuildId": BUILD } })
}

fn ready(services: Value) -> Value {
    json!({ "status": { "state": "Running", "reason": "ready" }, "source": { "type": "repository" }, "services": services })
}

fn event(seq: u64, kind: &str, data: Value) -> String {
    let event = json!({ "seq": seq, "type": kind, "time": "2030-01-01T00:00:00Z", "data": data });
    format!("id: {seq}\nevent: {kind}\ndata: {event}\n\n")
}

fn log(offset: u64, step: &str, text: &str) -> String {
    format!(
        "id: {offset}\nevent: output\ndata: {}\n\n",
        json!({ "offset": offset, "step": step, "text": text })
    )
}

/// A home of its own, so that nobody's keys are sent.
fn at_home(stub: &Stub, home: &Path, arguments: &[&str]) -> Command {
    let mut command = stub.command(arguments);
    command.env("HOME", home);
    command
}

fn up(stub: &Stub, more: &[&str]) -> Output {
    let home = tempfile::tempdir().unwrap();
    let mut arguments = vec!["up", "https://h/a/b.git#main"];
    arguments.extend(more);
    at_home(stub, home.path(), &arguments).output().unwrap()
}

#[test]
fn up_tells_stages_and_log_and_prints_the_ways_in() {
    let stub = Stub::start();
    let services = json!([
        { "name": "ssh", "state": "Ready", "port": 2222 },
        { "name": "code-server", "state": "Ready", "port": 8443 },
        { "name": "web", "state": "Failed", "port": 3000, "lastError": "exit code 1" },
    ]);
    stub.seen(|seen| {
        seen.looks = vec![
            pending("image_resolving"),
            pending("image_building"),
            pending("image_building"),
            pending("booting"),
            ready(services),
        ];
        // The first connection breaks between the two events.
        seen.events = vec![
            event(1, "boot.phase_started", json!({ "phase": "sync" })),
            event(2, "boot.phase_finished", json!({ "phase": "sync", "outcome": "done", "durationMs": 250 }))
                + &event(3, "boot.completed", json!({ "warnings": 0 })),
        ];
        seen.build_log = vec![
            log(9, "setup", "installing\ndo")
                + &log(12, "setup", "ne\n")
                + "id: 12\nevent: end\ndata: {}\n\n",
        ];
    });
    let output = up(&stub, &["--port", "9000", "--name", "mine"]);
    let told = stderr(&output);
    assert_eq!(output.status.code(), Some(0), "{told}");
    for expected in [
        "from https://h/a/b.git (main)",
        "setup │ installing\n",
        "setup │ done\n",
        "  sync        0.25s\n",
        "  ready ",
    ] {
        assert!(told.contains(expected), "{expected} in {told}");
    }
    let shown = stdout(&output);
    for expected in [
        format!("Id:    {ID}\n"),
        format!("SSH:   sandglass ssh {ID}\n"),
        format!("IDE:   http://h/{ID}/code-server?signature=s\n"),
        format!("App:   {}/v1/sandboxes/{ID}/proxy/3000  web  (failed: exit code 1)\n", stub.url),
        format!("App:   {}/v1/sandboxes/{ID}/proxy/9000  9000\n", stub.url),
        format!("Stop:  sandglass rm {ID}\n"),
    ] {
        assert!(shown.contains(&expected), "{expected} in {shown}");
    }
    assert!(
        stub.seen(|seen| seen.requests.contains(&"events after 1".to_owned())),
        "the stream was taken up where it broke"
    );
    let body = stub.seen(|seen| seen.bodies[0].clone());
    assert_eq!(body["repository"], json!({ "url": "https://h/a/b.git", "ref": "main" }));
    assert_eq!(body["metadata"], json!({ "name": "mine" }));
    assert!(!stub.was_asked("DELETE"));
}

#[test]
fn up_as_json_is_the_sandbox_with_its_addresses() {
    let stub = Stub::start();
    stub.seen(|seen| seen.looks = vec![ready(json!([{ "name": "ssh", "state": "Ready", "port": 2222 }]))]);
    let output = up(&stub, &["-o", "json"]);
    let shown: Value = serde_json::from_str(&stdout(&output)).unwrap();
    assert_eq!(
        shown["addresses"],
        json!([{ "kind": "ssh", "name": "ssh", "address": format!("sandglass ssh {ID}") }])
    );
    assert_eq!(shown["id"], ID);
    let output = up(&stub, &["--detach"]);
    assert_eq!(stdout(&output), format!("{ID}\n"));
}

#[test]
fn a_failure_says_phase_exit_code_and_last_words_and_the_sandbox_stays() {
    let stub = Stub::start();
    let failed = json!({
        "status": { "state": "Failed", "reason": "boot_failed", "message": "the boot failed" },
        "lastFailure": { "reason": "boot_failed", "phase": "setup", "exitCode": 3, "message": "`npm ci` failed", "outputTail": "no such package\n" },
    });
    stub.seen(|seen| seen.looks = vec![pending("booting"), failed]);
    let output = up(&stub, &[]);
    let told = stderr(&output);
    assert_eq!((output.status.code(), stdout(&output).as_str()), (Some(1), ""), "{told}");
    assert!(told.contains("│ no such package\n"), "{told}");
    assert!(told.contains("`npm ci` failed (boot_failed, phase setup, exit code 3)"), "{told}");
    assert!(told.contains(&format!("sandglass rm {ID}")) && !stub.was_asked("DELETE"), "{told}");
}

#[test]
fn ctrl_c_on_the_way_removes_the_sandbox() {
    let stub = Stub::start();
    stub.seen(|seen| seen.looks = vec![pending("image_resolving")]);
    let home = tempfile::tempdir().unwrap();
    let child = at_home(&stub, home.path(), &["up", "https://h/a"]).stderr(Stdio::piped()).spawn().unwrap();
    let begun = Instant::now();
    while !stub.was_asked(&format!("GET /v1/sandboxes/{ID}")) {
        assert!(begun.elapsed() < Duration::from_secs(60));
        std::thread::sleep(Duration::from_millis(10));
    }
    kill_process(Pid::from_child(&child), Signal::INT).unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130), "{}", stderr(&output));
    assert!(stub.was_asked(&format!("DELETE /v1/sandboxes/{ID}")));
}

#[test]
fn secrets_are_read_from_the_environment_and_shown_nowhere() {
    let stub = Stub::start();
    stub.seen(|seen| seen.looks = vec![ready(json!([]))]);
    let home = tempfile::tempdir().unwrap();
    let arguments = ["up", "https://h/a", "--secret", "NPM_TOKEN", "--token", "GIT_TOKEN"];
    let mut command = at_home(&stub, home.path(), &arguments);
    let output = command.env("NPM_TOKEN", "hush-1").env("GIT_TOKEN", "hush-2").output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let body = stub.seen(|seen| seen.bodies[0].clone());
    assert_eq!(
        (&body["imageBuild"]["secrets"]["NPM_TOKEN"], &body["repository"]["credential"]["token"]),
        (&json!("hush-1"), &json!("hush-2"))
    );
    assert!(!format!("{}{}", stdout(&output), stderr(&output)).contains("hush"));
    let output = up(&stub, &["--secret", "NOWHERE"]);
    assert!(output.status.code() == Some(1) && stderr(&output).contains("NOWHERE"));
}

#[test]
fn a_build_is_ordered_followed_and_judged() {
    let stub = Stub::start();
    let output = stub.run(&["build", "https://h/a/b", "--recipe", "hooks", "--tag", "latest"]);
    assert_eq!((output.status.code(), stdout(&output)), (Some(0), format!("{BUILD}\n")));
    let body = stub.seen(|seen| seen.bodies[0].clone());
    assert_eq!(
        body,
        json!({ "repository": { "url": "https://h/a/b" }, "recipe": { "type": "hooks" }, "tag": "latest" })
    );
    stub.seen(|seen| {
        seen.build = json!({ "status": { "state": "Succeeded" }, "imageId": IMAGE });
        // The connection breaks within a line.
        seen.build_log =
            vec![log(4, "setup", "half"), log(9, "setup", " done\n") + "id: 9\nevent: end\ndata: {}\n\n"];
    });
    let output = stub.run(&["build", "https://h/a/b", "--follow"]);
    assert_eq!(
        (output.status.code(), stdout(&output)),
        (Some(0), format!("{IMAGE}\n")),
        "{}",
        stderr(&output)
    );
    assert!(stderr(&output).contains("setup │ half done\n"), "{}", stderr(&output));
    stub.seen(|seen| {
        seen.build = json!({ "status": { "state": "Failed", "reason": "setup_failed" },
                             "failure": { "step": "setup", "exitCode": 2, "message": "the setup failed" } });
        seen.build_log = vec!["id: 0\nevent: end\ndata: {}\n\n".to_owned()];
    });
    let output = stub.run(&["build", "logs", "3333", "--follow"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(
        stderr(&output).contains("the setup failed (setup_failed, step setup, exit code 2)"),
        "{}",
        stderr(&output)
    );
}

#[test]
fn builds_and_their_images_are_listed_and_removed() {
    let stub = Stub::start();
    let table = stdout(&stub.run(&["build", "ls"]));
    assert!(
        table.contains("https://h/a/b") && table.contains("0123456789ab") && table.contains("Running"),
        "{table}"
    );
    assert_eq!(stdout(&stub.run(&["build", "ls", "-q"])), format!("{BUILD}\n"));
    assert_eq!(stdout(&stub.run(&["build", "logs", "333", "--tail", "5"])), "plain log\n");
    assert!(stub.was_asked(&format!("GET /v1/image-builds/{BUILD}/logs?tail=5")));
    assert_eq!(stdout(&stub.run(&["build", "cancel", "3"])), format!("{BUILD}\n"));
    assert!(stub.was_asked(&format!("DELETE /v1/image-builds/{BUILD}")));
    let table = stdout(&stub.run(&["build", "images"]));
    assert!(table.contains("latest") && table.contains("2.00 KiB"), "{table}");
    assert_eq!(stdout(&stub.run(&["build", "rm", "--force", "444"])), format!("{IMAGE}\n"));
    assert!(stub.was_asked(&format!("DELETE /v1/images/{IMAGE}?force=true")));
    assert_eq!(stub.run(&["build", "cancel", "zzz"]).status.code(), Some(1));
}

#[test]
fn the_proxy_carries_bytes_both_ways_until_the_end() {
    let stub = Stub::start();
    let start = |service: &str| {
        stub.command(&["ssh", "--proxy", "--service", service, "--", ID])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap()
    };
    let mut child = start("ssh");
    let sent = "abc-".repeat(100_000);
    let mut input = child.stdin.take().unwrap();
    let text = sent.clone();
    let writer = std::thread::spawn(move || input.write_all(text.as_bytes()).unwrap());
    let output = child.wait_with_output().unwrap();
    writer.join().unwrap();
    assert_eq!(
        (output.status.code(), stdout(&output) == sent.to_uppercase()),
        (Some(0), true),
        "{}",
        stderr(&output)
    );
    let mut child = start("broken");
    child.stdin.as_mut().unwrap().write_all(b"x").unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(255));
    assert!(stderr(&output).contains("the port was closed"), "{}", stderr(&output));
    let output = start("nothing").wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(255));
    assert!(stderr(&output).contains("SERVICE::NOT_FOUND"), "{}", stderr(&output));
}

#[test]
fn ssh_gets_a_certificate_and_the_host_key_and_runs_the_systems_own() {
    let stub = Stub::start();
    let dir = tempfile::tempdir().unwrap();
    let bin = dir.path().join("bin");
    std::fs::create_dir(&bin).unwrap();
    let fake = bin.join("ssh");
    std::fs::write(&fake, "#!/bin/sh\nprintf '%s\\n' \"$@\"\nexit 7\n").unwrap();
    std::fs::set_permissions(&fake, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let path = format!("{}:{}", bin.display(), std::env::var("PATH").unwrap());
    let run = |arguments: &[&str]| at_home(&stub, dir.path(), arguments).env("PATH", &path).output().unwrap();
    let output = run(&["ssh", "-l", "node", "-L", "1:h:2", "first", "ls", "-la"]);
    assert_eq!(output.status.code(), Some(7), "{}", stderr(&output));
    let words = stdout(&output);
    for expected in [
        "User=node\n",
        "StrictHostKeyChecking=yes\n",
        &format!("HostKeyAlias={ID}\n"),
        "-L\n1:h:2\n",
        &format!("--\n{ID}\nls\n-la\n"),
    ] {
        assert!(words.contains(expected), "{expected} in {words}");
    }
    let folder = dir.path().join(".local/state/sandglass/ssh");
    let read = |name: &str| std::fs::read_to_string(folder.join(name)).unwrap();
    assert_eq!(read(&format!("{ID}.known_hosts")), format!("{ID} ssh-ed25519 AAAAhost\n"));
    assert_eq!(read(&format!("{ID}-cert.pub")), "ssh-ed25519-cert-v01@openssh.com AAAAcert\n");
    let key = stub.seen(|seen| seen.bodies[0]["publicKey"].as_str().unwrap().to_owned());
    assert!(key.starts_with("ssh-ed25519 AAAA"), "{key}");
    let block = stdout(&run(&["ssh-config", "first"]));
    assert!(
        block.starts_with("Match originalhost first exec \"") && block.contains("\nHost first\n"),
        "{block}"
    );
    // OpenSSH reads it, and gets a certificate by it.
    let file = dir.path().join("config");
    std::fs::write(&file, &block).unwrap();
    let read_back = Command::new("ssh")
        .args(["-G", "-F", file.to_str().unwrap(), "first"])
        .env("SANDGLASS_API_KEY", stub::KEY)
        .env("HOME", dir.path())
        .output()
        .unwrap();
    let settings = stdout(&read_back);
    assert!(
        settings.contains(&format!("hostkeyalias {ID}\n"))
            && settings.contains("stricthostkeychecking true\n"),
        "{settings}{}",
        stderr(&read_back)
    );
    assert_eq!(stub.seen(|seen| seen.bodies.len()), 2, "the block's own call");
}

#[test]
fn the_editor_is_switched_on_and_its_address_printed() {
    let stub = Stub::start();
    let editor = |state: &str| ready(json!([{ "name": "code-server", "state": state, "port": 8443 }]));
    stub.seen(|seen| {
        seen.looks = vec![editor("Disabled"), editor("Disabled"), editor("Starting"), editor("Ready")]
    });
    let output = stub.run(&["code", "first"]);
    assert_eq!(
        (output.status.code(), stdout(&output)),
        (Some(0), format!("http://h/{ID}/code-server?signature=s\n")),
        "{}",
        stderr(&output)
    );
    assert_eq!(stub.seen(|seen| seen.bodies.clone()), [json!({ "enabled": true }), json!({})]);
    stub.seen(|seen| seen.looks = vec![ready(json!([]))]);
    assert!(stderr(&stub.run(&["code", "first"])).contains("--service code-server"));
}

#[test]
fn the_output_of_services_is_read_to_its_end() {
    let stub = Stub::start();
    let services = json!([{ "name": "web", "state": "Ready" }]);
    stub.seen(|seen| seen.looks = vec![ready(services.clone())]);
    assert_eq!(stdout(&stub.run(&["logs", "first", "--service", "web"])), "one\ntwo\n");
    assert_eq!(stdout(&stub.run(&["logs", "first", "--service", "web", "--tail", "1"])), "two\n");
    let output = stub.run(&["logs", "first", "--service", "db"]);
    let told = stderr(&output);
    assert!(output.status.code() == Some(1) && told.contains("there is no output of db (web)"), "{told}");
    stub.seen(|seen| {
        let over = json!({ "status": { "state": "Terminated", "reason": "user_delete" } });
        seen.looks = vec![ready(services), over];
    });
    let output = stub.run(&["logs", "first", "--service", "web", "--follow"]);
    assert_eq!((output.status.code(), stdout(&output).as_str()), (Some(0), "one\ntwo\n"));
}
