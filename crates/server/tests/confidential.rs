//! What of a sandbox's secrets is handed out, and what stays of them and of what a box says on the server.

use std::time::Duration;

use sandglass_bridge::{
    agent::{CredentialError, Notice},
    wire::{GitCredentialRequest, Refusal},
};
use sandglass_sandbox::ports::Store;
use serde_json::json;

use crate::workspaces::{Fate, Stage, asked, tell};

#[tokio::test(start_paused = true)]
async fn a_private_key_is_handed_out_to_the_boot_alone() {
    let mut stage = Stage::new(Fate::Found).await;
    let ssh = "ssh://git@git.example.com/acme/web.git";
    let pem = "-----BEGIN OPENSSH PRIVATE KEY-----\nhunter2\n-----END OPENSSH PRIVATE KEY-----\n";
    let key = json!({"privateKey": pem, "knownHosts": "git.example.com ssh-ed25519 AAAA"});
    let token = json!({"username": "bot", "token": "hunter2-token"});
    let additional = json!([{"url": "https://git.example.com/acme/docs.git", "credential": token}]);
    let id =
        stage.create(json!({"repository": {"url": ssh, "credential": key, "additional": additional}})).await;
    stage.until(&id, "Pending", "agent_connecting").await;
    let ask = |path: &str| GitCredentialRequest { host: "git.example.com".into(), path: path.into() };
    let attached = async |stage: &Stage| {
        let mut bridge = stage.agent(&id);
        while !matches!(bridge.notices.recv().await.unwrap(), Notice::Attached(_)) {}
        bridge
    };
    let bridge = attached(&stage).await;
    tell(&bridge, "boot.phase_started", &json!({"phase": "sync", "timeoutSeconds": 300}));
    // An agent that starts anew while it boots asks again, also another server.
    bridge.handle.git_credential(ask("acme/web.git")).await.unwrap();
    bridge.task.abort();
    let _ = bridge.task.await;
    stage.service.restart().await;
    let bridge = attached(&stage).await;
    let given = bridge.handle.git_credential(ask("acme/web.git")).await.unwrap();
    assert_eq!((given.password.reveal().trim(), given.known_hosts.is_some()), (pem.trim(), true));
    tell(&bridge, "boot.completed", &json!({"warnings": 0}));
    stage.until(&id, "Running", "ready").await;
    let refused = bridge.handle.git_credential(ask("acme/web.git")).await.unwrap_err();
    assert!(matches!(refused, CredentialError::Refused(Refusal::BootOver)), "{refused:?}");
    let given = bridge.handle.git_credential(ask("acme/docs.git")).await.unwrap();
    assert_eq!(given.password.reveal(), "hunter2-token", "a token serves git inside");
    bridge.task.abort();
}

#[tokio::test(start_paused = true)]
async fn output_of_what_was_never_declared_is_not_kept() {
    let stage = Stage::new(Fate::Found).await;
    let id = stage.create(asked()).await;
    stage.until(&id, "Pending", "agent_connecting").await;
    let bridge = stage.agent(&id);
    for source in
        ["service.app", "boot.setup.web/app", "boot.entrypoint", "service.made-up", "boot.setup.x", "x"]
    {
        bridge.handle.log(source, "output", 0, format!("of {source}\n").as_bytes());
    }
    // Sent in order: the last comes when all that is before it was taken.
    bridge.handle.log("boot.start.preStart", "output", 0, b"no such hook");
    bridge.handle.log("boot.sync", "output", 0, b"last\n");
    let read = async |name: &str| {
        let logs = format!("/v1/sandboxes/{id}/services/{name}/logs");
        let (status, body) = stage.service.pieces("GET", &logs, &[]).await;
        let bytes = axum::body::to_bytes(axum::body::Body::from_stream(body), 1 << 20).await.unwrap();
        (status, String::from_utf8_lossy(&bytes).into_owned())
    };
    let last = async {
        while read("boot.sync").await.0 != 200 {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(600), last).await.expect("the output was not taken");
    assert_eq!(read("app").await, (200, "of service.app\n".into()));
    assert_eq!(read("boot.setup.web%2Fapp").await, (200, "of boot.setup.web/app\n".into()));
    let kept = std::fs::read_dir(stage.files(&id).join("output")).unwrap().count();
    assert_eq!(kept, 4, "of the service, the hook and two phases");
    bridge.task.abort();
}

#[tokio::test(start_paused = true)]
async fn of_a_create_that_is_refused_no_secret_stays() {
    let stage = Stage::new(Fate::Building).await;
    let folder = stage.dir.path().join("workspaces");
    let kept = || std::fs::read_dir(&folder).map_or(0, Iterator::count);
    // The first write of a create is the create: the breaker of its kind knows of no failure.
    stage.service.store.refuse_writes(1);
    let refused = stage.service.call("POST", "/v1/sandboxes", asked()).await;
    assert_eq!(refused.status, 503, "{}", refused.body);
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(kept(), 0);
    assert!(stage.service.store.agents().await.unwrap().is_empty());
}

#[tokio::test(start_paused = true)]
async fn a_create_that_is_written_down_all_the_same_is_carried_out() {
    let stage = Stage::new(Fate::Found).await;
    stage.service.store.deny_creates(1);
    let id = stage.create(asked()).await;
    stage.until(&id, "Pending", "agent_connecting").await;
    assert_eq!(stage.delete(&id).await, 204);
    stage.nothing_is_left(&id).await;
}
