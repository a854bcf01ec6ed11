//! Prebuilds over HTTP, and signed pushes.

use std::time::Duration;

use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use super::harness::Stage;

/// HMAC, for keys of at most a block.
pub fn signature(secret: &str, body: &str) -> String {
    let pad = |byte: u8| -> Vec<u8> {
        (0..64).map(|at| secret.as_bytes().get(at).copied().unwrap_or(0) ^ byte).collect()
    };
    let inner = Sha256::new().chain_update(pad(0x36)).chain_update(body).finalize();
    let outer = Sha256::new().chain_update(pad(0x5c)).chain_update(inner).finalize();
    format!("sha256={}", outer.iter().map(|byte| format!("{byte:02x}")).collect::<String>())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_push_that_is_signed_builds_the_new_commit() {
    let stage = Stage::new().await;
    stage.commit(&[("README", "x")]);
    let asked = json!({"repository": {"url": stage.url()}, "ref": "main", "tag": "latest", "webhookSecret": "shh-shh-shh"});
    let made = stage.call("POST", "/v1/prebuilds", asked.clone()).await;
    assert_eq!(made.status, 201, "{}", made.text);
    assert!(!made.text.contains("shh"), "{}", made.text);
    let id = made.json()["id"].as_str().unwrap().to_owned();
    let path = format!("/v1/prebuilds/{id}");
    stage.when("the first look builds", |stage| stage.images.made().len() == 1).await;
    stage.until(&path, |prebuild| prebuild["seenAt"].is_string()).await;

    stage.commit(&[("README", "y")]);
    let hook = format!("{path}/webhook");
    let body = "{\"ref\":\"refs/heads/main\"}";
    for headers in [&[][..], &[("x-hub-signature-256", "sha256=00")], &[("x-gitlab-token", "wrong-wrong")]] {
        let refused = stage.send("POST", &hook, headers, body.into()).await;
        assert_eq!((refused.status, refused.code()), (401, "PREBUILD::UNSIGNED".into()));
    }
    let signed = signature("shh-shh-shh", body);
    let told = stage.send("POST", &hook, &[("x-hub-signature-256", &signed)], body.into()).await;
    assert_eq!(told.status, 202, "{}", told.text);
    stage.when("the push builds", |stage| stage.images.made().len() == 2).await;
    let unknown = "/v1/prebuilds/00000000-0000-4000-8000-000000000000/webhook";
    assert_eq!(stage.send("POST", unknown, &[("x-gitlab-token", "x")], String::new()).await.status, 401);

    let mut changed = asked;
    changed["enabled"] = json!(false);
    changed["pollSeconds"] = json!(300);
    let changed = stage.call("PUT", &path, changed).await;
    assert_eq!((changed.status, &changed.json()["enabled"]), (200, &json!(false)), "{}", changed.text);
    assert_eq!(stage.get("/v1/prebuilds").await.json()["items"].as_array().unwrap().len(), 1);
    assert_eq!(stage.call("POST", &format!("{path}/trigger"), Value::Null).await.status, 202);
    assert_eq!(stage.call("DELETE", &path, Value::Null).await.status, 204);
    assert_eq!(stage.get(&path).await.code(), "PREBUILD::NOT_FOUND");
}

/// Longer than the interval with its jitter.
const INTERVAL: Duration = Duration::from_secs(67);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_remote_that_is_looked_at_on_schedule_is_built_when_its_ref_moved() {
    let mut stage = Stage::new().await;
    stage.commit(&[("README", "1")]);
    let asked = json!({"repository": {"url": stage.url()}, "ref": "main", "pollSeconds": 60});
    let made = stage.call("POST", "/v1/prebuilds", asked).await;
    assert_eq!(made.status, 201, "{}", made.text);
    let path = format!("/v1/prebuilds/{}", made.json()["id"].as_str().unwrap());
    let first = stage.until(&path, |prebuild| prebuild["seenAt"].is_string()).await;
    stage.ended(first["imageBuildId"].as_str().unwrap()).await;

    // Nobody tells of this one.
    let commit = stage.commit(&[("README", "2")]);
    stage.clock.advance(INTERVAL);
    let moved = stage.until(&path, |prebuild| prebuild["imageBuildId"] != first["imageBuildId"]).await;
    let build = stage.ended(moved["imageBuildId"].as_str().unwrap()).await;
    assert_eq!(
        (&build["status"]["state"], &build["repository"]["commit"]),
        (&json!("Succeeded"), &json!(commit)),
        "{build}"
    );

    // A look that finds nothing new builds nothing.
    stage.clock.advance(INTERVAL);
    let same = stage.until(&path, |prebuild| prebuild["seenAt"] != moved["seenAt"]).await;
    assert_eq!(same["imageBuildId"], moved["imageBuildId"]);

    // One that fails neither builds nor disables, and the next server goes on with the schedule.
    let (there, away) = (stage.repository(), stage.dir.path().join("away"));
    std::fs::rename(&there, &away).unwrap();
    stage.clock.advance(INTERVAL);
    let unread = stage.until(&path, |prebuild| prebuild["lastError"].is_string()).await;
    assert_eq!((&unread["enabled"], &unread["imageBuildId"]), (&json!(true), &moved["imageBuildId"]));
    std::fs::rename(&away, &there).unwrap();
    stage.restart().await;
    let commit = stage.commit(&[("README", "3")]);
    stage.clock.advance(INTERVAL);
    let last = stage.until(&path, |prebuild| prebuild["imageBuildId"] != moved["imageBuildId"]).await;
    assert!(last["lastError"].is_null(), "{last}");
    let build = stage.ended(last["imageBuildId"].as_str().unwrap()).await;
    assert_eq!(build["repository"]["commit"], commit.as_str());
    let page = stage.get("/v1/image-builds").await.json();
    assert_eq!(page["items"].as_array().unwrap().len(), 3, "one for each commit");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_prebuild_cannot_keep_is_refused() {
    let stage = Stage::new().await;
    let url = "https://github.com/acme/web.git";
    for asked in [
        json!({"repository": {"url": url, "credential": {"token": "abcdefgh"}}}),
        json!({"repository": {"url": url}, "pollSeconds": 1}),
        json!({"repository": {"url": url}, "pollSeconds": 30 * 86_400 + 1}),
        json!({"repository": {"url": url}, "pollSeconds": u64::MAX}),
        json!({"repository": {"url": url}, "timeoutSeconds": u64::MAX}),
        json!({"repository": {"url": url}, "webhookSecret": "short"}),
        json!({"repository": {"url": url}, "unknown": 1}),
    ] {
        let answer = stage.call("POST", "/v1/prebuilds", asked.clone()).await;
        assert_eq!((answer.status, answer.code().as_str()), (400, "SANDBOX::INVALID_PARAMETER"), "{asked}");
    }
}
