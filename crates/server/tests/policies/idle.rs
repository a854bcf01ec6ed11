//! Sandboxes that nobody uses.

use sandglass_bridge::wire::Activity;
use sandglass_sandbox::{SandboxId, ports::Store};
use sandglass_testkit::Fault;
use serde_json::{Value, json};

use super::{asked, events, gone, pass, ready, state};
use crate::workspaces::{Fate, Stage};

#[tokio::test(start_paused = true)]
async fn a_sandbox_that_nobody_uses_goes_and_every_use_prevents_it() {
    let stage = Stage::new(Fate::Found).await;
    let (id, agent) = ready(&stage, asked(json!({"idleTimeoutSeconds": 60}), None)).await;
    // A command that runs.
    agent.signs.set(|signs| signs.commands = 1);
    pass(500).await;
    assert_eq!(state(&stage, &id).await, "Running");
    // Requests through the proxy.
    agent.signs.set(|_| {});
    for _ in 0..10 {
        pass(50).await;
        stage.service.engine.used(id.parse().unwrap());
    }
    assert_eq!(state(&stage, &id).await, "Running");
    // A lease.
    let leased = stage
        .service
        .call("POST", &format!("/v1/sandboxes/{id}/activity"), json!({"leaseSeconds": 300}))
        .await;
    assert_eq!(leased.status, 200, "{}", leased.body);
    let seen = stage.get(&id).await["policies"].clone();
    assert_eq!(
        (&seen["idleAt"], &seen["leasedUntil"]),
        (&leased.body["idleAt"], &leased.body["leasedUntil"])
    );
    assert_eq!((&seen["idleTimeoutSeconds"], &seen["idleAction"]), (&json!(60), &json!("terminate")));
    pass(350).await;
    assert_eq!(state(&stage, &id).await, "Running");
    // Heartbeats alone are none.
    let took = gone(&stage, &id).await;
    assert!(took <= 15, "{took}");
    assert_eq!(events(&stage, &id, "sandbox.idle").await.len(), 1);
    assert_eq!(events(&stage, &id, "sandbox.terminated").await[0]["reason"], "idle_timeout");
    pass(5).await;
    stage.nothing_is_left(&id).await;
    assert!(stage.service.store.usages().await.unwrap().is_empty());
}

#[tokio::test(start_paused = true)]
async fn what_is_merely_open_counts_for_a_bounded_time() {
    let stage = Stage::new(Fate::Found).await;
    let policies = json!({"idleTimeoutSeconds": 60, "maxPresenceExtensionSeconds": 300});
    for open in [
        (|signs: &mut Activity| signs.ptys = 1) as fn(&mut Activity),
        |signs| signs.ssh_sessions = 2,
        |signs| signs.proxy_connections = 1,
    ] {
        let (id, agent) = ready(&stage, asked(policies.clone(), None)).await;
        agent.signs.set(open);
        let took = gone(&stage, &id).await;
        assert!((355..=380).contains(&took), "{took}");
    }
}

#[tokio::test(start_paused = true)]
async fn leases_are_bounded_and_for_what_runs() {
    let stage = Stage::new(Fate::Found).await;
    let (id, _agent) = ready(&stage, asked(json!({}), None)).await;
    let path = format!("/v1/sandboxes/{id}/activity");
    for wrong in [
        json!({}),
        json!({"leaseSeconds": 0}),
        json!({"leaseSeconds": 3601}),
        json!({"leaseSeconds": 1, "x": 1}),
    ] {
        assert_eq!(stage.service.call("POST", &path, wrong).await.status, 422);
    }
    let leased = stage.service.call("POST", &path, json!({"leaseSeconds": 60})).await;
    assert_eq!(
        (leased.status, &leased.body["idleAt"]),
        (200, &Value::Null),
        "without a policy it does not matter"
    );
    assert_eq!(
        stage.service.call("POST", &format!("/v1/sandboxes/{id}/pause"), Value::Null).await.status,
        202
    );
    assert_eq!(stage.service.call("POST", &path, json!({"leaseSeconds": 60})).await.status, 409);
    let other = SandboxId::random();
    let unknown = format!("/v1/sandboxes/{other}/activity");
    let none = stage.service.call("POST", &unknown, json!({"leaseSeconds": 60})).await;
    assert_eq!(none.status, 404);
}

#[tokio::test(start_paused = true)]
async fn an_idle_sandbox_is_frozen_and_its_clock_begins_again_when_it_runs() {
    let stage = Stage::new(Fate::Found).await;
    let (id, _agent) =
        ready(&stage, asked(json!({"idleTimeoutSeconds": 100, "idleAction": "pause"}), None)).await;
    // The first attempt fails, which is told.
    stage.service.runtime.inject("pause", Fault::Refuse);
    pass(95).await;
    assert_eq!(state(&stage, &id).await, "Running");
    pass(10).await;
    assert_eq!(state(&stage, &id).await, "Running");
    assert!(stage.get(&id).await["policies"]["lastFailure"].is_string());
    pass(20).await;
    assert_eq!(state(&stage, &id).await, "Paused");
    assert_eq!(events(&stage, &id, "sandbox.policy_failed").await[0]["policy"], "idleAction");
    pass(5000).await;
    assert_eq!(state(&stage, &id).await, "Paused");
    assert_eq!(
        stage.service.call("POST", &format!("/v1/sandboxes/{id}/resume"), Value::Null).await.status,
        202
    );
    pass(90).await;
    assert_eq!(state(&stage, &id).await, "Running");
    pass(30).await;
    assert_eq!(state(&stage, &id).await, "Paused");
}

#[tokio::test(start_paused = true)]
async fn an_idle_sandbox_is_copied_before_it_goes() {
    let stage = Stage::new(Fate::Found).await;
    let (id, _agent) =
        ready(&stage, asked(json!({"idleTimeoutSeconds": 60, "idleAction": "snapshot"}), None)).await;
    stage.service.runtime.inject("snapshot", Fault::Refuse);
    let took = gone(&stage, &id).await;
    assert!((60..=110).contains(&took), "{took}");
    let list =
        stage.service.get(&format!("/v1/snapshots?sandboxId={id}&name=idleAction&state=Ready")).await.body;
    assert_eq!(list["items"].as_array().unwrap().len(), 1, "{list}");
    assert_eq!(events(&stage, &id, "sandbox.policy_failed").await.len(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_restart_neither_resets_the_idle_clock_nor_concludes_from_its_own_absence() {
    let mut stage = Stage::new(Fate::Found).await;
    let policies = json!({"idleTimeoutSeconds": 300});
    let (idle, _one) = ready(&stage, asked(policies.clone(), None)).await;
    let (busy, two) = ready(&stage, asked(policies.clone(), None)).await;
    let (leased, _three) = ready(&stage, asked(policies, None)).await;
    pass(200).await;
    two.signs.set(|signs| signs.commands = 1);
    let path = format!("/v1/sandboxes/{leased}/activity");
    assert_eq!(stage.service.call("POST", &path, json!({"leaseSeconds": 3000})).await.status, 200);
    stage.service.restart().await;
    pass(80).await;
    for id in [&idle, &busy, &leased] {
        assert_eq!(state(&stage, id).await, "Running");
    }
    let took = gone(&stage, &idle).await;
    assert!(took <= 40, "{took}");
    pass(1000).await;
    for id in [&busy, &leased] {
        assert_eq!(state(&stage, id).await, "Running");
    }
}
