//! Pushes from whoever reaches the server.

use std::{convert::Infallible, time::Duration};

use axum::body::Body;
use bytes::Bytes;
use futures_util::{StreamExt, stream, stream::FuturesUnordered};
use serde_json::{Value, json};

use super::{harness::Stage, prebuilds::signature};

const SECRET: &str = "shh-shh-shh";
/// Of no prebuild.
const UNKNOWN: &str = "/v1/prebuilds/00000000-0000-4000-8000-000000000000/webhook";

/// A body that begins and never ends.
fn endless() -> Body {
    let begun = stream::iter([Ok::<_, Infallible>(Bytes::from_static(b"{"))]);
    Body::from_stream(begun.chain(stream::pending()))
}

/// Where pushes for a new prebuild go.
async fn hook(stage: &Stage, secret: Option<&str>) -> String {
    stage.commit(&[("README", "x")]);
    let mut asked = json!({"repository": {"url": stage.url()}, "enabled": false});
    if let Some(secret) = secret {
        asked["webhookSecret"] = Value::from(secret);
    }
    let made = stage.call("POST", "/v1/prebuilds", asked).await;
    assert_eq!(made.status, 201, "{}", made.text);
    format!("/v1/prebuilds/{}/webhook", made.json()["id"].as_str().unwrap())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_push_that_nobody_signed_is_refused_before_its_body_is_read() {
    let stage = Stage::new().await;
    let hook = hook(&stage, Some(SECRET)).await;
    let shape = format!("sha256={}", "0".repeat(64));
    let refused: &[(&str, &[(&str, &str)])] = &[
        (&hook, &[]),
        (&hook, &[("x-hub-signature-256", "sha256=00")]),
        (&hook, &[("x-gitea-signature", &shape)]),
        (&hook, &[("x-gitlab-token", "wrong-wrong")]),
        (UNKNOWN, &[("x-gitlab-token", "wrong-wrong")]),
        ("/v1/prebuilds/nothing/webhook", &[("x-hub-signature-256", &shape)]),
    ];
    for (path, headers) in refused {
        let answer = stage.send_body("POST", path, headers, endless()).await;
        assert_eq!((answer.status, answer.code()), (401, "PREBUILD::UNSIGNED".into()), "{headers:?}");
    }
    // The token says it all.
    let told = stage.send_body("POST", &hook, &[("x-gitlab-token", SECRET)], endless()).await;
    assert_eq!(told.status, 202, "{}", told.text);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn whoever_does_not_know_the_secret_cannot_tell_which_prebuilds_there_are() {
    let stage = Stage::new().await;
    let (with, without) = (hook(&stage, Some(SECRET)).await, hook(&stage, None).await);
    let shape = format!("sha256={}", "0".repeat(64));
    let signed = ("x-hub-signature-256", shape.as_str());
    let empty_key = signature("", "{}");
    for path in [with.as_str(), without.as_str(), UNKNOWN] {
        let wrong = stage.send("POST", path, &[signed], "{}".into()).await;
        assert_eq!((wrong.status, wrong.code()), (401, "PREBUILD::UNSIGNED".into()), "{path}");
        let keyless = [("x-hub-signature-256", empty_key.as_str())];
        assert_eq!(stage.send("POST", path, &keyless, "{}".into()).await.status, 401, "{path}");
        let long = [signed, ("content-length", "5242881")];
        let answer = stage.send_body("POST", path, &long, endless()).await;
        assert_eq!((answer.status, answer.code()), (413, "GENERAL::BODY_TOO_LARGE".into()), "{path}");
        let larger = "x".repeat((5 << 20) + 1);
        assert_eq!(stage.send("POST", path, &[signed], larger).await.status, 413, "{path}");
        // All of them are read.
        let only = [signed];
        let slow = stage.send_body("POST", path, &only, endless());
        assert!(tokio::time::timeout(Duration::from_millis(100), slow).await.is_err(), "{path}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn strangers_keep_no_host_out() {
    let stage = Stage::new().await;
    let hook = hook(&stage, Some(SECRET)).await;
    let shape = format!("sha256={}", "0".repeat(64));
    let headers = [("x-hub-signature-256", shape.as_str())];
    let paths = [hook.as_str(), UNKNOWN].into_iter().cycle();
    let mut slow: FuturesUnordered<_> =
        paths.take(64).map(|path| stage.send_body("POST", path, &headers, endless())).collect();
    let moment = Duration::from_millis(200);
    assert!(tokio::time::timeout(moment, slow.next()).await.is_err(), "each of them has a place");

    let body = "{\"ref\":\"refs/heads/main\"}";
    let code = signature(SECRET, body);
    let told = stage.send("POST", &hook, &[("x-hub-signature-256", &code)], body.into()).await;
    assert_eq!(told.status, 202, "{}", told.text);
    let answer = slow.next().await.unwrap();
    assert_eq!(
        (answer.status, answer.code(), answer.retry_after.as_deref()),
        (503, "IMAGE_BUILD::UNAVAILABLE".into(), Some("5"))
    );
    assert!(tokio::time::timeout(moment, slow.next()).await.is_err(), "one gave way, the others did not");
}
