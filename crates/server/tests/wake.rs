//! Requests to paused sandboxes that were created to be woken, through the whole service and engine.

use std::time::Duration;

use axum::{Router, response::IntoResponse};
use sandglass_testkit::Fault;
use serde_json::{Value, json};

use super::service::{Answer, Service};

/// A program in "the sandbox", whose address is this machine's own.
async fn program() -> u16 {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let app = Router::new().fallback(|| async { axum::Json("awake").into_response() });
    tokio::spawn(async move { axum::serve(listener, app).await });
    port
}

async fn create(service: &Service, more: Value) -> String {
    let mut body = json!({"image": {"uri": "img"}, "entrypoint": ["sleep", "1d"], "resourceLimits": {}});
    body.as_object_mut().unwrap().append(&mut more.as_object().unwrap().clone());
    let made = service.call("POST", "/v1/sandboxes", body).await;
    assert_eq!(made.status, 202, "{}", made.body);
    made.body["id"].as_str().unwrap().to_owned()
}

async fn ask(service: &Service, id: &str, port: u16) -> Answer {
    service.get(&format!("/v1/sandboxes/{id}/proxy/{port}/")).await
}

async fn state(service: &Service, id: &str) -> String {
    let seen = service.get(&format!("/v1/sandboxes/{id}")).await;
    seen.body["status"]["state"].as_str().unwrap_or("none").to_owned()
}

#[tokio::test]
async fn the_field_and_the_extension_are_the_same_and_others_sleep_on() {
    let (service, port) = (Service::new().await, program().await);
    for (more, wakes) in [
        (json!({"wakeOnAccess": true}), true),
        (json!({"wake_on_access": "yes"}), true),
        (json!({"extensions": {"access.wake": "true"}}), true),
        (json!({"extensions": {"access.wake": "true"}, "wakeOnAccess": false}), false),
        (json!({"extensions": {"access.wake": "false"}}), false),
        (json!({}), false),
    ] {
        let id = create(&service, more.clone()).await;
        assert_eq!(ask(&service, &id, port).await.body, "awake");
        service.engine.pause(&id).await.unwrap();
        let answer = ask(&service, &id, port).await;
        if wakes {
            assert_eq!((answer.status, answer.body), (200, json!("awake")), "{more}");
        } else {
            assert_eq!(answer.code(), (502, "BACKEND_CONNECTION_FAILED"), "{more}");
        }
        assert_eq!(state(&service, &id).await, if wakes { "Running" } else { "Paused" }, "{more}");
    }
    let bad = json!({"image": {"uri": "i"}, "entrypoint": ["x"], "resourceLimits": {}, "extensions": {"access.wake": "1"}});
    assert_eq!(service.call("POST", "/sandboxes", bad).await.code(), (400, "SANDBOX::INVALID_PARAMETER"));
}

#[tokio::test]
async fn a_pause_or_a_resume_under_way_is_waited_for() {
    let (service, port) = (Service::new().await, program().await);
    let id = create(&service, json!({"wakeOnAccess": true})).await;
    let slow = || Fault::Slow(Duration::from_millis(200));
    service.runtime.inject("pause", slow());
    let (paused, answer) = tokio::join!(service.engine.pause(&id), async {
        while state(&service, &id).await != "Pausing" {
            tokio::task::yield_now().await;
        }
        ask(&service, &id, port).await
    });
    paused.unwrap();
    assert_eq!(answer.status, 200);
    service.engine.pause(&id).await.unwrap();
    service.runtime.inject("resume", slow());
    let (resumed, answer) = tokio::join!(service.engine.resume(&id), ask(&service, &id, port));
    resumed.unwrap();
    assert_eq!((answer.status, state(&service, &id).await.as_str()), (200, "Running"));
}

#[tokio::test]
async fn what_goes_wrong_is_told() {
    let (service, port) = (Service::new().await, program().await);
    let id = create(&service, json!({"wakeOnAccess": true})).await;
    service.engine.pause(&id).await.unwrap();
    service.runtime.inject("resume", Fault::Refuse);
    assert_eq!(ask(&service, &id, port).await.code(), (502, "DOCKER::SANDBOX_RESUME_FAILED"));
    assert_eq!(state(&service, &id).await, "Paused");
    // Deleted while somebody waits.
    service.runtime.inject("resume", Fault::Slow(Duration::from_millis(300)));
    let (answer, deleted) = tokio::join!(ask(&service, &id, port), async {
        while state(&service, &id).await != "Resuming" {
            tokio::task::yield_now().await;
        }
        service.engine.delete(&id).await
    });
    deleted.unwrap();
    assert_eq!(answer.code(), (404, "DOCKER::SANDBOX_NOT_FOUND"));
}
