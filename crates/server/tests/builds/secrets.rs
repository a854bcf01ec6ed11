//! Tokens that a build leaves behind.

use sandglass_sandbox::sealing::{END, Found, SEARCH};
use serde_json::json;

use super::harness::Stage;

async fn built(stage: &Stage) -> (serde_json::Value, String) {
    let asked =
        stage.call("POST", "/v1/image-builds", json!({"repository": {"url": stage.url()}})).await.json();
    let id = asked["id"].as_str().unwrap_or_else(|| panic!("{asked}")).to_owned();
    let built = stage.ended(&id).await;
    (built, stage.get(&format!("/v1/image-builds/{id}/logs")).await.text)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_token_that_the_setup_left_fails_the_build_unless_it_is_allowed() {
    let stage = Stage::new().await;
    let of = |path: &str, kinds: &[&str]| Found::Tokens {
        path: path.to_owned(),
        kinds: kinds.iter().map(|kind| (*kind).to_owned()).collect(),
    };
    stage
        .inside
        .found
        .lock()
        .unwrap()
        .extend([of("/root/.npmrc", &["npm-token"]), of("/tmp/x", &["url-password"])]);
    stage.commit(&[(".sandbox/setup.sh", "npm ci\n")]);
    let (failed, log) = built(&stage).await;
    let failure = &failed["failure"];
    assert_eq!(
        (&failed["status"]["state"], &failure["step"]),
        (&json!("Failed"), &json!("sanitize")),
        "{failed}"
    );
    let message = failure["message"].as_str().unwrap();
    assert!(
        message.contains("/root/.npmrc (npm token)") && message.contains("allowTokens: [npm-token]"),
        "{message}"
    );
    assert!(!message.contains("/tmp/"), "{message}");
    assert!(log.contains("/root/.npmrc (npm token)"), "{log}");
    assert!(stage.images.made().is_empty());

    // Another kind being allowed is not enough.
    stage.commit(&[(".sandbox.yml", "allowTokens: [private-key]\n")]);
    assert_eq!(built(&stage).await.0["status"]["state"], "Failed");
    stage.commit(&[(".sandbox.yml", "allowTokens: [private-key, npm-token]\n")]);
    let (built, log) = built(&stage).await;
    assert_eq!(built["status"]["state"], "Succeeded", "{built}\n{log}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_secret_that_is_found_fails_the_build_and_nothing_runs_after_the_search() {
    let stage = Stage::new().await;
    stage.commit(&[(".sandbox/setup.sh", "npm ci\n")]);
    stage.inside.found.lock().unwrap().push(Found::Secret { path: "/late".to_owned() });
    let (failed, log) = built(&stage).await;
    assert_eq!(failed["failure"]["step"], "sanitize", "{failed}");
    assert!(log.contains("a build secret is left in /late"), "{log}");
    let ran = stage.inside.ran.lock().unwrap().clone();
    let last: Vec<&str> = ran.iter().rev().take(2).map(|command| command.argv[2].as_str()).collect();
    assert_eq!(last, [SEARCH, END]);
}
