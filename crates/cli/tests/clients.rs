//! Everything around the commands: errors, lists, references, completions, closed streams.

#![expect(clippy::unwrap_used, reason = "a stub or helper that fails is a test that fails")]

mod stub;

use std::process::{Command, Stdio};

use serde_json::Value;
use stub::{ID, KEY, OTHER, Stub, program, stderr, stdout};

#[test]
fn a_server_that_is_not_there_is_explained() {
    let output = program(&["--url", "http://127.0.0.1:1", "ps"]).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr(&output).contains("http://127.0.0.1:1") && stderr(&output).contains("sandglass serve"));
    let output = program(&["--url", "http://127.0.0.1:1", "run", "x", "--", "true"]).output().unwrap();
    assert_eq!(output.status.code(), Some(125));
}

#[test]
fn an_error_shows_code_message_and_request() {
    let stub = Stub::start();
    let output = stub.run(&["run", "nosuch", "--", "true"]);
    assert_eq!(output.status.code(), Some(125));
    let text = stderr(&output);
    for part in ["there is no image nosuch", "IMAGE::NOT_FOUND", "404", "req-42"] {
        assert!(text.contains(part), "{part} in {text}");
    }
}

#[test]
fn the_key_is_sent_and_never_printed() {
    let stub = Stub::start();
    assert_eq!(stub.run(&["ps"]).status.code(), Some(0));
    for key in ["wrong-key-9", ""] {
        let output = stub.command(&["ps"]).env("SANDGLASS_API_KEY", key).output().unwrap();
        assert_eq!(output.status.code(), Some(1));
        assert!(stderr(&output).contains("SANDGLASS_API_KEY"));
        assert!(key.is_empty() || !stderr(&output).contains(key));
    }
    let output = stub.command(&["--help"]).output().unwrap();
    assert!(!stdout(&output).contains(KEY) && stdout(&output).contains("SANDGLASS_URL"));
    // Upstream's variables work as well.
    let domain = stub.url.trim_start_matches("http://").to_owned();
    let theirs = program(&["ps", "-q"])
        .env("OPEN_SANDBOX_DOMAIN", domain)
        .env("OPEN_SANDBOX_API_KEY", KEY)
        .output()
        .unwrap();
    assert_eq!(stdout(&theirs), format!("{ID}\n{OTHER}\n"));
}

#[test]
fn lists_are_tables_or_everything_as_json() {
    let stub = Stub::start();
    let table = stdout(&stub.run(&["ps"]));
    let mut lines = table.lines();
    assert!(lines.next().unwrap().starts_with("ID            IMAGE    COMMAND  STATE"), "{table}");
    assert!(lines.next().unwrap().contains("Running") && lines.next().unwrap().contains("Paused"));
    let listed: Value = serde_json::from_str(&stdout(&stub.run(&["ps", "-o", "json"]))).unwrap();
    assert_eq!(listed[0]["unknownField"], 7);
    let output = stub.run(&["ps", "--state", "Running", "--filter", "a b=c&d"]);
    assert_eq!(output.status.code(), Some(0));
    assert!(stub.was_asked("GET /v1/sandboxes?state=Running&metadata=a%2Bb%3Dc%2526d&page=1&pageSize=200"));
}

#[test]
fn references_may_be_short_when_they_are_unique() {
    let stub = Stub::start();
    for reference in ["111", "first", ID] {
        let output = stub.run(&["rm", reference]);
        assert_eq!((output.status.code(), stdout(&output)), (Some(0), format!("{ID}\n")), "{reference}");
    }
    let output = stub.run(&["rm", "11"]);
    assert!(stderr(&output).contains(ID) && stderr(&output).contains(OTHER), "{}", stderr(&output));
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(stub.run(&["rm", "zzz"]).status.code(), Some(1));
    assert_eq!(stub.run(&["rm", "-f", "zzz"]).status.code(), Some(0));
    let unknown = "00000000-0000-4000-8000-000000000000";
    assert_eq!(stub.run(&["rm", unknown]).status.code(), Some(1));
    assert_eq!(stub.run(&["rm", "-f", unknown]).status.code(), Some(0));
    assert_eq!(stub.run(&["rm", "--all"]).status.code(), Some(0));
}

#[test]
fn image_streams_end_in_success_only_when_they_say_so() {
    let stub = Stub::start();
    let output = stub.run(&["image", "pull", "x:1"]);
    assert_eq!((output.status.code(), stdout(&output).as_str()), (Some(0), "sha256:abc\n"));
    for (reference, reason) in [("cut", "ended before"), ("bad", "no (IMAGE::X)")] {
        let output = stub.run(&["image", "pull", reference]);
        assert_eq!((output.status.code(), output.stdout.len()), (Some(1), 0));
        assert!(stderr(&output).contains(reason), "{}", stderr(&output));
    }
}

#[test]
fn logs_keep_their_streams() {
    let stub = Stub::start();
    let at = "2030-01-01T00:00:00.000000001Z";
    stub.seen(|seen| seen.logs = vec![format!("{at} stdout out\n{at} stderr err\n")]);
    let output = stub.run(&["logs", "first", "--tail", "5", "--since", "10m"]);
    assert_eq!((stdout(&output).as_str(), stderr(&output).as_str()), ("out\n", "err\n"));
    assert!(stub.was_asked(&format!("GET /v1/sandboxes/{ID}/diagnostics/logs?tail=5&since=600s")));
}

#[test]
fn completions_exist_for_three_shells() {
    for shell in ["bash", "zsh", "fish"] {
        let output = program(&["completions", shell]).output().unwrap();
        assert_eq!(output.status.code(), Some(0));
        assert!(stdout(&output).contains("sandglass") && stdout(&output).contains("endpoint"));
    }
    let output = program(&["--version"]).output().unwrap();
    assert_eq!(stdout(&output), format!("sandglass {}\n", env!("CARGO_PKG_VERSION")));
}

#[test]
fn wrong_usage_of_run_cannot_be_mistaken_for_an_exit_code_of_the_command() {
    assert_eq!(program(&["run", "--nonsense"]).output().unwrap().status.code(), Some(125));
    assert_eq!(program(&["ps", "--nonsense"]).output().unwrap().status.code(), Some(2));
}

#[test]
fn closed_standard_streams_do_no_harm() {
    let stub = Stub::start();
    let shell = |script: &str| {
        Command::new("sh")
            .args(["-c", script, env!("CARGO_BIN_EXE_sandglass")])
            .env("SANDGLASS_URL", &stub.url)
            .env("SANDGLASS_API_KEY", KEY)
            .stdin(Stdio::null())
            .output()
            .unwrap()
    };
    assert_eq!(shell("\"$0\" ps >&-").status.code(), Some(0));
    assert_eq!(shell("\"$0\" run x -- seven >&- 2>&- <&-").status.code(), Some(7));
    let output = shell("(sleep 2; \"$0\" completions bash; echo $? >&2) | :");
    assert_eq!(stderr(&output), "141\n");
}
