//! Builds of hooks, from the request to the image or the failure.

use std::sync::Arc;

use futures_util::future::join_all;
use serde_json::{Value, json};
use tokio::sync::Semaphore;

use super::harness::Stage;

const HOOK: &[(&str, &str)] = &[(".sandbox/setup.sh", "#!/bin/sh\nnpm ci\n"), ("package.json", "{}")];

fn body(stage: &Stage) -> Value {
    json!({ "repository": { "url": stage.url() } })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn parallel_requests_for_one_key_are_one_build() {
    let stage = Stage::new().await;
    let commit = stage.commit(HOOK);
    let gate = Arc::new(Semaphore::new(0));
    *stage.inside.gate.lock().unwrap() = Some(gate.clone());
    let asked = join_all((0..12).map(|_| stage.call("POST", "/v1/image-builds", body(&stage)))).await;
    let accepted = asked.iter().filter(|answer| answer.status == 202).count();
    let joined = asked.iter().filter(|a| a.status == 200 && a.json()["deduplicated"] == true).count();
    assert_eq!((accepted, joined), (1, 11), "{:?}", asked.iter().map(|a| &a.text).collect::<Vec<_>>());
    let id = asked[0].json()["id"].as_str().unwrap().to_owned();
    assert!(asked.iter().all(|answer| answer.json()["id"] == id.as_str()));
    gate.add_permits(100);
    let built = stage.ended(&id).await;
    assert_eq!(built["status"]["state"], "Succeeded", "{built}");
    assert_eq!((&built["recipe"], &built["repository"]["commit"]), (&json!("hooks"), &json!(commit)));
    assert_eq!(stage.inside.times("setup.sh"), 1);
    assert_eq!(stage.images.made().len(), 1);
    // The sources went to their place, and the sandbox is gone.
    assert!(stage.inside.put.lock().unwrap().iter().any(|name| name == "workspace/web/package.json"));
    stage.when("the build sandbox is removed", |stage| stage.runtime.boxes().is_empty()).await;
    // Its name leads nobody else to it.
    let name = stage.images.made()[0].clone();
    for (name, namespace, foreign) in [
        (name.clone(), Some("b"), true),
        (format!("docker.io/library/{name}:latest"), Some("b"), true),
        (name.clone(), None, false),
        ("base".to_owned(), Some("b"), false),
    ] {
        assert_eq!(stage.builds.is_foreign(&name, namespace).await.unwrap(), foreign, "{name} {namespace:?}");
    }
    let again = stage.call("POST", "/v1/image-builds", body(&stage)).await;
    assert_eq!((again.status, &again.json()["cache"]["hit"]), (200, &json!(true)));
    assert_eq!(again.json()["imageId"], built["imageId"]);
    // Another commit is another build of the same recipe.
    stage.commit(&[("src/x", "y")]);
    let moved = stage.call("POST", "/v1/image-builds", body(&stage)).await.json();
    assert_eq!(moved["recipeKey"], built["recipeKey"]);
    assert_ne!(moved["key"], built["key"]);
    assert_eq!(stage.ended(moved["id"].as_str().unwrap()).await["status"]["state"], "Succeeded");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_failed_setup_is_told_remembered_and_its_log_stays() {
    let stage = Stage::new().await;
    stage.commit(HOOK);
    *stage.inside.hook.lock().unwrap() = (vec!["installing".into(), "no such package".into()], 3);
    let asked = stage.call("POST", "/v1/image-builds", body(&stage)).await;
    let id = asked.json()["id"].as_str().unwrap().to_owned();
    let failed = stage.ended(&id).await;
    assert_eq!(
        (&failed["status"]["state"], &failed["status"]["reason"]),
        (&json!("Failed"), &json!("user_failure"))
    );
    let failure = &failed["failure"];
    assert_eq!((&failure["step"], &failure["exitCode"]), (&json!("setup"), &json!(3)));
    assert!(failure["outputTail"].as_str().unwrap().contains("no such package"), "{failure}");
    assert_eq!((stage.inside.times("setup.sh"), stage.images.made().len()), (1, 0));

    let log = stage.get(&format!("/v1/image-builds/{id}/logs?step=setup")).await;
    assert_eq!((log.status, log.text.contains("installing\nno such package\n")), (200, true), "{}", log.text);
    let tail = stage.get(&format!("/v1/image-builds/{id}/logs?tail=1")).await.text;
    assert_eq!(tail, "no such package\n");
    let followed = format!("/v1/image-builds/{id}/logs?follow=true");
    let events = stage.send("GET", &followed, &[("accept", "text/event-stream")], String::new()).await.text;
    assert!(events.contains("event: output\n") && events.ends_with("event: end\ndata: {}\n\n"), "{events}");
    assert_eq!(stage.get(&format!("/v1/image-builds/{id}/logs?step=x")).await.status, 400);

    let refused = stage.call("POST", "/v1/image-builds", body(&stage)).await;
    assert_eq!((refused.status, refused.code()), (409, "IMAGE_BUILD::FAILED_RECENTLY".into()));
    assert!(refused.retry_after.unwrap().parse::<u64>().unwrap() <= 60);
    *stage.inside.hook.lock().unwrap() = (Vec::new(), 0);
    let mut forced = body(&stage);
    forced["force"] = json!(true);
    let forced = stage.call("POST", "/v1/image-builds", forced).await;
    assert_eq!(forced.status, 202, "{}", forced.text);
    assert_eq!(stage.ended(forced.json()["id"].as_str().unwrap()).await["status"]["state"], "Succeeded");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cancelled_build_ends_and_leaves_nothing() {
    let stage = Stage::new().await;
    stage.commit(HOOK);
    *stage.inside.gate.lock().unwrap() = Some(Arc::new(Semaphore::new(0)));
    let id =
        stage.call("POST", "/v1/image-builds", body(&stage)).await.json()["id"].as_str().unwrap().to_owned();
    stage.when("the setup runs", |stage| stage.inside.times("setup.sh") == 1).await;
    let path = format!("/v1/image-builds/{id}");
    assert_eq!(stage.call("DELETE", &path, Value::Null).await.status, 202);
    assert_eq!(stage.ended(&id).await["status"]["state"], "Cancelled");
    let again = stage.call("DELETE", &path, Value::Null).await;
    assert_eq!((again.status, again.code()), (409, "IMAGE_BUILD::TERMINAL".into()));
    stage.when("the build sandbox is removed", |stage| stage.runtime.boxes().is_empty()).await;
    assert!(stage.images.made().is_empty());
    let events = stage.get(&format!("{path}/events")).await.text;
    assert!(events.contains("event: image_build.changed\n") && events.contains("\"Cancelled\""), "{events}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_ends_in_the_middle_leaves_one_image_in_the_end() {
    let mut stage = Stage::new().await;
    stage.commit(HOOK);
    *stage.inside.gate.lock().unwrap() = Some(Arc::new(Semaphore::new(0)));
    let mut asked = body(&stage);
    asked["secrets"] = json!({ "NPM_TOKEN": "hunter2hunter2" });
    let id = stage.call("POST", "/v1/image-builds", asked).await.json()["id"].as_str().unwrap().to_owned();
    stage.when("the setup runs", |stage| stage.inside.times("setup.sh") == 1).await;
    *stage.inside.gate.lock().unwrap() = None;
    stage.restart().await;
    let built = stage.ended(&id).await;
    assert_eq!((&built["status"]["state"], &built["attempt"]), (&json!("Succeeded"), &json!(2)), "{built}");
    assert_eq!(stage.images.made().len(), 1);
    stage.when("the build sandboxes are removed", |stage| stage.runtime.boxes().is_empty()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_secret_reaches_the_setup_and_nothing_that_stays() {
    let stage = Stage::new().await;
    stage.commit(HOOK);
    let mut asked = body(&stage);
    asked["secrets"] = json!({ "NPM_TOKEN": "hunter2hunter2" });
    let answer = stage.call("POST", "/v1/image-builds", asked).await;
    assert!(!answer.text.contains("hunter2"), "{}", answer.text);
    let id = answer.json()["id"].as_str().unwrap().to_owned();
    let built = stage.ended(&id).await;
    assert_eq!(built["status"]["state"], "Succeeded", "{built}");
    let log = stage.get(&format!("/v1/image-builds/{id}/logs")).await.text;
    assert!(log.contains("logging in with ***"), "{log}");
    let ran = stage.inside.ran.lock().unwrap().clone();
    let seen = ran.iter().filter(|command| command.env.values().any(|v| v == "hunter2hunter2")).count();
    assert_eq!(seen, 1, "the setup alone");
    assert!(ran.iter().all(|command| command.argv.iter().all(|word| !word.contains("hunter2"))));
    let vault = stage.dir.path().join("builds/vault");
    stage.when("the vault forgets", |_| std::fs::read_dir(&vault).unwrap().next().is_none()).await;
    assert!(!stage.on_disk().contains("hunter2hunter2"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_image_that_was_not_searched_for_secrets_is_none() {
    let stage = Stage::new().await;
    stage.commit(HOOK);
    stage.inside.blind.store(true, std::sync::atomic::Ordering::Relaxed);
    let mut asked = body(&stage);
    asked["secrets"] = json!({ "NPM_TOKEN": "hunter2hunter2" });
    let id = stage.call("POST", "/v1/image-builds", asked).await.json()["id"].as_str().unwrap().to_owned();
    let built = stage.ended(&id).await;
    assert_eq!(
        (&built["status"]["state"], &built["failure"]["step"]),
        (&json!("Failed"), &json!("sanitize"))
    );
    assert!(built["failure"]["message"].as_str().unwrap().contains("did not come to its end"), "{built}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_wrong_with_a_request_is_said_before_anything_runs() {
    let stage = Stage::new().await;
    stage.commit(HOOK);
    let url = stage.url();
    for (asked, status, code) in [
        (json!({}), 400, "SANDBOX::INVALID_PARAMETER"),
        (json!({"repository": {"url": "https://evil.example/x.git"}}), 400, "REPOSITORY::HOST_NOT_ALLOWED"),
        (json!({"repository": {"url": "https://u:p@github.com/x.git"}}), 400, "REPOSITORY::INVALID_URL"),
        (json!({"repository": {"url": url, "ref": "--upload-pack=x"}}), 400, "REPOSITORY::INVALID_REF"),
        (json!({"repository": {"url": url, "path": "/etc"}}), 400, "REPOSITORY::INVALID_PATH"),
        (json!({"repository": {"url": url, "ref": "none"}}), 404, "REPOSITORY::REF_NOT_FOUND"),
        (
            json!({"repository": {"url": url}, "recipe": {"type": "dockerfile"}}),
            400,
            "REPOSITORY::INVALID_RECIPE",
        ),
        (json!({"repository": {"url": url}, "secrets": {"a-b": "x"}}), 400, "SANDBOX::INVALID_PARAMETER"),
        (json!({"repository": {"url": url}, "timeoutSeconds": 0}), 400, "SANDBOX::INVALID_PARAMETER"),
        (json!({"repository": {"url": url}, "platform": "linux/sparc"}), 400, "SANDBOX::INVALID_PARAMETER"),
        (json!({"repository": {"url": url}, "platform": "windows/amd64"}), 400, "SANDBOX::INVALID_PARAMETER"),
        (json!({"repository": {"url": url}, "tag": "/"}), 400, "SANDBOX::INVALID_PARAMETER"),
    ] {
        let answer = stage.call("POST", "/v1/image-builds", asked.clone()).await;
        assert_eq!((answer.status, answer.code().as_str()), (status, code), "{asked}: {}", answer.text);
    }
    let unknown = "/v1/image-builds/00000000-0000-4000-8000-000000000000";
    assert_eq!(stage.get(unknown).await.code(), "IMAGE_BUILD::NOT_FOUND");
    assert_eq!(stage.get("/v1/image-builds").await.json()["items"], json!([]));
    assert!(stage.inside.ran.lock().unwrap().is_empty());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sandboxes_of_builds_that_nobody_knows_any_more_are_removed() {
    let mut stage = Stage::new().await;
    stage.commit(HOOK);
    *stage.inside.gate.lock().unwrap() = Some(Arc::new(Semaphore::new(0)));
    stage.call("POST", "/v1/image-builds", body(&stage)).await;
    stage.when("the hook runs", |stage| stage.inside.times("setup.sh") == 1).await;
    assert_eq!(stage.runtime.boxes().len(), 1);
    stage.forget().await;
    assert!(stage.runtime.boxes().is_empty());
}
