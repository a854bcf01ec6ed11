//! Pushes from whoever reaches the server.

use std::convert::Infallible;

use axum::body::Body;
use bytes::Bytes;
use futures_util::{StreamExt, stream, stream::FuturesUnordered};
use serde_json::json;

use super::harness::Stage;

/// A body that begins and never ends.
fn endless() -> Body {
    let begun = stream::iter([Ok::<_, Infallible>(Bytes::from_static(b"{"))]);
    Body::from_stream(begun.chain(stream::pending()))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_push_that_nobody_signed_is_refused_before_its_body_is_read() {
    let stage = Stage::new().await;
    stage.commit(&[("README", "x")]);
    let asked = json!({"repository": {"url": stage.url()}, "enabled": false, "webhookSecret": "shh-shh-shh"});
    let made = stage.call("POST", "/v1/prebuilds", asked).await;
    let hook = format!("/v1/prebuilds/{}/webhook", made.json()["id"].as_str().unwrap());
    let unknown = "/v1/prebuilds/00000000-0000-4000-8000-000000000000/webhook";
    let shape = format!("sha256={}", "0".repeat(64));
    let refused: &[(&str, &[(&str, &str)])] = &[
        (&hook, &[]),
        (&hook, &[("x-hub-signature-256", "sha256=00")]),
        (&hook, &[("x-gitea-signature", &shape)]),
        (&hook, &[("x-gitlab-token", "wrong-wrong")]),
        (unknown, &[("x-hub-signature-256", &shape)]),
        ("/v1/prebuilds/nothing/webhook", &[("x-hub-signature-256", &shape)]),
    ];
    for (path, headers) in refused {
        let answer = stage.send_body("POST", path, headers, endless()).await;
        assert_eq!((answer.status, answer.code()), (401, "PREBUILD::UNSIGNED".into()), "{headers:?}");
    }
    // The token says it all.
    let told = stage.send_body("POST", &hook, &[("x-gitlab-token", "shh-shh-shh")], endless()).await;
    assert_eq!(told.status, 202, "{}", told.text);

    let signed: &[(&str, &str)] = &[("x-hub-signature-256", &shape)];
    let long = [signed[0], ("content-length", "5242881")];
    let answer = stage.send_body("POST", &hook, &long, endless()).await;
    assert_eq!((answer.status, answer.code()), (413, "GENERAL::BODY_TOO_LARGE".into()));
    let larger = "x".repeat((5 << 20) + 1);
    assert_eq!(stage.send("POST", &hook, signed, larger).await.status, 413);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn few_pushes_are_read_at_a_time() {
    let stage = Stage::new().await;
    stage.commit(&[("README", "x")]);
    let asked = json!({"repository": {"url": stage.url()}, "enabled": false, "webhookSecret": "shh-shh-shh"});
    let made = stage.call("POST", "/v1/prebuilds", asked).await;
    let hook = format!("/v1/prebuilds/{}/webhook", made.json()["id"].as_str().unwrap());
    let signed = format!("sha256={}", "0".repeat(64));
    let headers = [("x-hub-signature-256", signed.as_str())];
    let slow = || stage.send_body("POST", &hook, &headers, endless());
    // One of the nine has no place; the others hold theirs until their time is over.
    let mut many: FuturesUnordered<_> = (0..9).map(|_| slow()).collect();
    let answer = many.next().await.unwrap();
    assert_eq!(answer.status, 503, "{}", answer.text);
    assert_eq!(
        (answer.code(), answer.retry_after.as_deref()),
        ("IMAGE_BUILD::UNAVAILABLE".into(), Some("5"))
    );
}
