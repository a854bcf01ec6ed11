//! Sandboxes whose time is over.

use std::time::Duration;

use sandglass_sandbox::Clock;
use sandglass_testkit::Fault;
use serde_json::{Value, json};

use super::{asked, events, gone, pass, ready, state};
use crate::workspaces::{Fate, Stage};

#[tokio::test(start_paused = true)]
async fn an_expiry_freezes_and_a_resume_gives_a_new_life() {
    let stage = Stage::new(Fate::Found).await;
    let policies = json!({"onExpire": "pause", "expireReserveSeconds": 100});
    let (id, _agent) = ready(&stage, asked(policies, Some(600))).await;
    pass(480).await;
    assert_eq!(state(&stage, &id).await, "Running");
    pass(30).await;
    assert_eq!(state(&stage, &id).await, "Paused");
    assert_eq!(events(&stage, &id, "sandbox.expiring").await[0]["action"], "pause");
    pass(5000).await;
    assert_eq!(state(&stage, &id).await, "Paused", "its expiry is not its end");
    let path = format!("/v1/sandboxes/{id}");
    assert_eq!(stage.service.call("POST", &format!("{path}/resume"), Value::Null).await.status, 202);
    stage.until(&id, "Running", "ready").await;
    pass(490).await;
    assert_eq!(state(&stage, &id).await, "Running");
    pass(20).await;
    assert_eq!(state(&stage, &id).await, "Paused");
    pass(500).await;
    // A renewal of what is frozen beyond its expiry holds.
    let at = stage.service.clock.now().checked_add(Duration::from_secs(5000)).unwrap().to_string();
    let renewed =
        stage.service.call("POST", &format!("{path}/renew-expiration"), json!({"expiresAt": at})).await;
    assert_eq!(renewed.status, 200, "{}", renewed.body);
    assert_eq!(stage.service.call("POST", &format!("{path}/resume"), Value::Null).await.status, 202);
    pass(4000).await;
    assert_eq!(state(&stage, &id).await, "Running");
    assert_eq!(stage.delete(&id).await, 204);
}

#[tokio::test(start_paused = true)]
async fn an_expiry_makes_a_snapshot_inside_its_reserve() {
    let mut stage = Stage::new(Fate::Found).await;
    let body = json!({"image": {"uri": "img"}, "entrypoint": ["x"], "resourceLimits": {}, "timeout": 600,
        "policies": {"onExpire": "snapshot", "expireReserveSeconds": 100}});
    let id = stage.create(body.clone()).await;
    pass(490).await;
    assert!(stage.service.runtime.artifacts().is_empty());
    // A server that dies in the middle of it.
    stage.service.runtime.inject("snapshot", Fault::Slow(Duration::from_secs(30)));
    pass(15).await;
    stage.service.restart().await;
    pass(60).await;
    let list = format!("/v1/snapshots?sandboxId={id}&name=onExpire&state=Ready");
    assert_eq!(stage.service.get(&list).await.body["items"].as_array().unwrap().len(), 1);
    assert_eq!(state(&stage, &id).await, "Running", "until its time is over");
    let took = gone(&stage, &id).await;
    assert!((25..=40).contains(&took), "{took}");
    assert_eq!(stage.service.get(&list).await.body["items"].as_array().unwrap().len(), 1, "it stays");
    // One that is renewed meanwhile lives on, and is copied again at its new expiry.
    let id = stage.create(body).await;
    pass(520).await;
    let at = stage.service.clock.now().checked_add(Duration::from_secs(1000)).unwrap().to_string();
    let path = format!("/v1/sandboxes/{id}/renew-expiration");
    assert_eq!(stage.service.call("POST", &path, json!({"expiresAt": at})).await.status, 200);
    pass(500).await;
    assert_eq!(state(&stage, &id).await, "Running");
    gone(&stage, &id).await;
    let list = format!("/v1/snapshots?sandboxId={id}&name=onExpire&state=Ready");
    assert_eq!(stage.service.get(&list).await.body["items"].as_array().unwrap().len(), 2);
}

#[tokio::test(start_paused = true)]
async fn a_snapshot_that_fails_is_told_and_keeps_nothing_alive() {
    let stage = Stage::new(Fate::Found).await;
    let policies = json!({"onExpire": "snapshot", "expireReserveSeconds": 100});
    let (id, _agent) = ready(&stage, asked(policies, Some(600))).await;
    for _ in 0..10 {
        stage.service.runtime.inject("snapshot", Fault::Refuse);
    }
    pass(550).await;
    let seen = stage.get(&id).await;
    assert!(seen["policies"]["lastFailure"].is_string(), "{seen}");
    let took = gone(&stage, &id).await;
    assert!(took <= 65, "{took}");
    let failed = events(&stage, &id, "sandbox.policy_failed").await;
    assert_eq!(failed.len(), 3);
    assert_eq!((&failed[2]["policy"], &failed[2]["attempt"]), (&json!("onExpire"), &json!(3)));
    assert_eq!(events(&stage, &id, "sandbox.terminated").await[0]["reason"], "ttl_expiry");
}

#[tokio::test(start_paused = true)]
async fn a_snapshot_that_began_in_time_is_let_end() {
    let stage = Stage::new(Fate::Found).await;
    let policies = json!({"onExpire": "snapshot", "expireReserveSeconds": 100});
    let (id, _agent) = ready(&stage, asked(policies, Some(600))).await;
    stage.service.runtime.inject("snapshot", Fault::Slow(Duration::from_secs(300)));
    pass(700).await;
    assert_eq!(state(&stage, &id).await, "Running");
    let took = gone(&stage, &id).await;
    assert!((90..=130).contains(&took), "{took}");
    let list = stage.service.get(&format!("/v1/snapshots?sandboxId={id}&state=Ready")).await.body;
    assert_eq!(list["items"].as_array().unwrap().len(), 1);
}

#[tokio::test(start_paused = true)]
async fn an_expiry_in_the_middle_of_a_pause_is_dealt_with_afterwards() {
    let stage = Stage::new(Fate::Found).await;
    let (id, _agent) = ready(&stage, asked(json!({}), Some(600))).await;
    pass(590).await;
    stage.service.runtime.inject("pause", Fault::Slow(Duration::from_secs(20)));
    let pausing = stage.service.call("POST", &format!("/v1/sandboxes/{id}/pause"), Value::Null).await;
    assert_eq!(pausing.status, 202, "it ended as it was asked for, although the time was over meanwhile");
    let took = gone(&stage, &id).await;
    assert!(took <= 15, "{took}");
    let told = stage.types(&id).await;
    assert!(told.contains(&"sandbox.terminated".to_owned()));
}

/// A renewal that races an expiry: it holds, or the sandbox goes, and never both.
#[tokio::test(start_paused = true)]
async fn a_renewal_and_an_expiry_never_both_happen() {
    let stage = Stage::new(Fate::Found).await;
    let mut outcomes = [0, 0];
    for round in 0..200_u64 {
        let action = ["terminate", "snapshot"][usize::try_from(round % 2).unwrap()];
        let body = json!({"image": {"uri": "img"}, "entrypoint": ["x"], "resourceLimits": {}, "timeout": 60,
            "policies": {"onExpire": action, "expireReserveSeconds": 1}});
        let id = stage.create(body).await;
        tokio::time::sleep(Duration::from_millis(59_900 + round)).await;
        let at = stage.service.clock.now().checked_add(Duration::from_secs(300)).unwrap().to_string();
        let path = format!("/v1/sandboxes/{id}/renew-expiration");
        let renewed = stage.service.call("POST", &path, json!({"expiresAt": at})).await.status;
        pass(30).await;
        let there = stage.service.get(&format!("/v1/sandboxes/{id}")).await.status == 200;
        assert_eq!(renewed == 200, there, "round {round}: {renewed}");
        outcomes[usize::from(there)] += 1;
        stage.delete(&id).await;
    }
    assert!(outcomes[0] > 0 && outcomes[1] > 0, "{outcomes:?}");
}

#[tokio::test(start_paused = true)]
async fn what_the_runtime_cannot_do_is_refused() {
    let stage = Stage::new(Fate::Found).await;
    let image = json!({"image": {"uri": "img"}, "entrypoint": ["x"], "resourceLimits": {},
        "policies": {"idleTimeoutSeconds": 60}});
    let refused = stage.service.call("POST", "/v1/sandboxes", image).await;
    assert_eq!(refused.code(), (400, "SANDBOX::UNSUPPORTED_POLICY"));
    assert!(stage.service.engine.index().is_empty());
}
