//! `store migrate`, from file to file; the engines have their tests in the server.

#![expect(clippy::unwrap_used, reason = "a helper that fails is a test that fails")]

use std::process::{Command, Output};

use sandglass_server::{config::StoreConfig, store::SqlStore};

fn run(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_sandglass"))
        .args(arguments)
        .env_remove("OPENSANDBOX_STORE_POSTGRESQL_DSN")
        .output()
        .unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

/// A store with nothing in it.
async fn empty(path: &std::path::Path) -> SqlStore {
    SqlStore::open(&StoreConfig { path: path.into(), ..StoreConfig::default() }).await.unwrap()
}

#[tokio::test]
async fn a_store_is_counted_and_moved() {
    let dir = tempfile::tempdir().unwrap();
    let (from, to) = (dir.path().join("a.db"), dir.path().join("b.db"));
    let source = empty(&from).await;
    let arguments = [
        "-o",
        "json",
        "store",
        "migrate",
        "--from",
        &format!("sqlite:{}", from.display()),
        "--to",
        &format!("sqlite:{}", to.display()),
        "--dry-run",
    ];
    let output = run(&arguments);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let answer: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(answer["dryRun"], true);
    assert_eq!(
        answer["tables"][0],
        serde_json::json!({"table": "intents", "total": 0, "migrated": 0, "skipped": 0})
    );
    assert!(!to.exists());
    assert_eq!(run(&arguments[..8]).status.code(), Some(0));
    let target = empty(&to).await;
    let output = run(&arguments[2..8]);
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stderr).contains("a server is using the target"), "{}", text(&output.stderr));
    drop((source, target));
}

#[test]
fn what_cannot_be_moved_is_said() {
    for (from, says) in [
        ("sqlite:/nowhere/a.db", "there is no file /nowhere/a.db"),
        ("postgres", "OPENSANDBOX_STORE_POSTGRESQL_DSN is not set"),
        ("postgres://u:hunter2@127.0.0.1:1/db", "PostgreSQL at 127.0.0.1:1"),
        ("mysql://h/db", "a store is written sqlite:PATH"),
    ] {
        let output = run(&["store", "migrate", "--from", from, "--to", "sqlite:/nowhere/b.db"]);
        assert_eq!(output.status.code(), Some(1));
        let message = text(&output.stderr);
        assert!(message.contains(says) && !message.contains("hunter2"), "{message}");
    }
}
