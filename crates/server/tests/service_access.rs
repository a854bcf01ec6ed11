//! Being let into services, over the whole router: certificates for SSH, links for browsers, and who is refused.

use std::{os::unix::fs::PermissionsExt, time::Duration};

use base64::{Engine as _, engine::general_purpose::STANDARD};
use sandglass_bridge::agent::Bridge;
use sandglass_sandbox::{Clock, workspace};
use serde_json::{Value, json};

use crate::{
    service::Answer,
    workspaces::{Fate, Stage, URL, tell},
};

const USER_KEY: &str =
    "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIGPKSUTyz1HwHReFVvD5obVsALAgJRNarH4TRpNePnAS ann@example";

fn change(name: &str, to: &str, error: Option<&str>) -> Value {
    json!({"name": name, "kind": "custom", "from": "Starting", "to": to, "required": false, "restartCount": 0, "error": error})
}

/// A sandbox that runs, with services of every kind.
async fn running(stage: &Stage) -> (String, Bridge) {
    let services = json!([
        {"name": "ssh"},
        {"name": "code-server"},
        {"name": "terminal"},
        {"name": "app", "command": ["npm", "start"], "port": 3000},
        {"name": "worker", "command": ["sleep", "1d"]},
    ]);
    let id = stage.create(json!({"repository": {"url": URL}, "services": services, "timeout": 600})).await;
    stage.until(&id, "Pending", "agent_connecting").await;
    let early = access(stage, &id, "app", Value::Null).await;
    assert_eq!(early.code(), (409, "SANDBOX::INVALID_STATE"));
    let bridge = stage.agent(&id);
    for name in ["ssh", "code-server", "terminal", "app", "worker"] {
        tell(&bridge, "service.state_changed", &change(name, "Ready", None));
    }
    tell(&bridge, "boot.completed", &json!({"warnings": 0}));
    stage.until(&id, "Running", "ready").await;
    (id, bridge)
}

async fn access(stage: &Stage, id: &str, name: &str, body: Value) -> Answer {
    stage.service.call("POST", &format!("/v1/sandboxes/{id}/services/{name}/access"), body).await
}

/// The blob of a public key or certificate.
fn blob(line: &str) -> Vec<u8> {
    STANDARD.decode(line.split(' ').nth(1).unwrap()).unwrap()
}

fn holds(haystack: &[u8], needle: &[u8]) -> bool {
    haystack.windows(needle.len()).any(|window| window == needle)
}

#[tokio::test(start_paused = true)]
async fn a_key_is_certified_by_the_authority_of_its_sandbox() {
    let mut stage = Stage::new(Fate::Found).await;
    let (id, bridge) = running(&stage).await;
    let document = std::fs::read_to_string(stage.files(&id).join("workspace.json")).unwrap();
    let document: workspace::Workspace = serde_json::from_str(&document).unwrap();
    let workspace::Kind::Ssh(ssh) = &document.services[0].kind else { panic!("{document:?}") };
    let [authority] = &ssh.certificate_authorities[..] else { panic!("{ssh:?}") };
    let private = stage.files(&id).join("ssh_user_ca");
    assert_eq!(std::fs::metadata(&private).unwrap().permissions().mode() & 0o777, 0o600);

    let before = access(&stage, &id, "ssh", json!({"publicKey": USER_KEY})).await;
    assert_eq!(before.status, 200, "{}", before.body);
    assert_eq!(before.headers["cache-control"], "no-store");
    assert_eq!(before.body["endpoint"]["endpoint"], format!("h/v1/sandboxes/{id}/services/ssh/tunnel"));
    assert_eq!(before.body["credential"]["type"], "sshCertificate");
    assert!(before.body["credential"].get("hostKey").is_none(), "it has not told its key yet");
    let expires = stage.service.clock.now().checked_add(Duration::from_secs(300)).unwrap();
    let told: jiff::Timestamp = before.body["expiresAt"].as_str().unwrap().parse().unwrap();
    assert_eq!(told.as_second(), expires.as_millis() / 1000);

    let key = json!({"fingerprint": "SHA256:abc", "publicKey": "ssh-ed25519 AAAAHOST"});
    tell(&bridge, "service.host_key", &json!({"name": "ssh", "hostKey": key}));
    let shown = stage.until_seen(&id, |seen| seen["services"][0]["hostKey"] == key).await;
    // Another server signs with the same authority and knows the key of the server in the box.
    stage.service.restart().await;
    stage.until(&id, "Running", "ready").await;
    let after = access(&stage, &id, "ssh", json!({"publicKey": USER_KEY})).await;
    assert_eq!(after.body["credential"]["hostKey"], key);
    for answer in [&before, &after] {
        let line = answer.body["credential"]["certificate"].as_str().unwrap();
        assert!(line.starts_with("ssh-ed25519-cert-v01@openssh.com "), "{line}");
        let certificate = blob(line);
        // The key and the authority are named by their last 32 bytes.
        for part in [&blob(USER_KEY)[19..], &blob(authority)[19..], id.as_bytes()] {
            assert!(holds(&certificate, part));
        }
    }
    let secret = STANDARD.encode(std::fs::read(private).unwrap());
    let secret = secret.trim_end_matches('=');
    for seen in [&before.body, &after.body, &shown] {
        assert!(!seen.to_string().contains(&secret[..40]));
    }
    bridge.task.abort();
}

#[tokio::test(start_paused = true)]
async fn browsers_get_a_link_to_what_has_a_port() {
    let stage = Stage::new(Fate::Found).await;
    let (id, bridge) = running(&stage).await;
    for (name, path) in [
        ("code-server", format!("/v1/sandboxes/{id}/proxy/8443/")),
        ("app", format!("/v1/sandboxes/{id}/proxy/3000/")),
        ("terminal", format!("/v1/sandboxes/{id}/proxy/44772/pty")),
    ] {
        let answer = access(&stage, &id, name, json!({})).await;
        assert_eq!((answer.status, &answer.headers["cache-control"]), (200, &"no-store".parse().unwrap()));
        assert_eq!(answer.body["endpoint"], json!({"endpoint": format!("h{path}")}), "{name}");
        let url = answer.body["credential"]["url"].as_str().unwrap();
        assert!(url.starts_with(&format!("http://h{path}?sandglass-access=")), "{url}");
    }
    bridge.task.abort();
}

#[tokio::test(start_paused = true)]
async fn nobody_is_let_into_what_is_not_there() {
    let stage = Stage::new(Fate::Found).await;
    let (id, bridge) = running(&stage).await;
    for (name, body, status, code) in [
        ("none", Value::Null, 404, "SERVICE::NOT_FOUND"),
        ("ssh", Value::Null, 400, "SANDBOX::INVALID_PARAMETER"),
        ("ssh", json!({"publicKey": "ssh-rsa AAAA"}), 400, "SANDBOX::INVALID_PARAMETER"),
        ("app", json!({"publicKey": USER_KEY}), 400, "SANDBOX::INVALID_PARAMETER"),
        ("worker", Value::Null, 400, "SANDBOX::INVALID_PARAMETER"),
        ("bridge", Value::Null, 400, "SANDBOX::INVALID_PARAMETER"),
    ] {
        assert_eq!(access(&stage, &id, name, body).await.code(), (status, code), "{name}");
    }
    let tunnel = |name: &str| format!("/v1/sandboxes/{id}/services/{name}/tunnel");
    assert_eq!(stage.service.get(&tunnel("none")).await.code(), (404, "SERVICE::NOT_FOUND"));
    assert_eq!(stage.service.get(&tunnel("worker")).await.status, 400);
    assert_eq!(stage.service.get(&tunnel("ssh")).await.status, 400, "this is no handshake");
    let missing = "code-server is not installed: add it";
    tell(&bridge, "service.state_changed", &change("code-server", "Failed", Some(missing)));
    stage.until_seen(&id, |seen| seen["services"][1]["state"] == "Failed").await;
    let refused = access(&stage, &id, "code-server", Value::Null).await;
    assert_eq!(refused.code(), (409, "SANDBOX::INVALID_STATE"));
    assert!(refused.body["message"].as_str().unwrap().contains(missing), "{}", refused.body);
    let plain = stage.service.create().await;
    assert_eq!(access(&stage, &plain, "ssh", Value::Null).await.status, 404);
    bridge.task.abort();
}
