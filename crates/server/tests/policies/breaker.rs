//! Repositories whose sandboxes do not come up.

use sandglass_bridge::wire::FatalReport;
use sandglass_sandbox::lifecycle::boot::{Failure, Reason};
use serde_json::json;

use super::{Signs, asked, attach, pass, ready};
use crate::{
    service::Answer,
    workspaces::{Fate, Stage, agent_with},
};

/// A boot that fails.
async fn fails(stage: &Stage) {
    let id = stage.create(asked(json!({}), None)).await;
    stage.until(&id, "Pending", "agent_connecting").await;
    let bridge = agent_with(stage.dir.path(), &id, Signs::default());
    bridge.handle.fatal(FatalReport::bounded("start", Some(7), None, "no such table", ""));
    stage.until(&id, "Failed", "boot_failed").await;
    bridge.task.abort();
    assert_eq!(stage.delete(&id).await, 204);
}

async fn try_one(stage: &Stage) -> Answer {
    stage.service.call("POST", "/v1/sandboxes", asked(json!({}), None)).await
}

#[tokio::test(start_paused = true)]
async fn boots_that_fail_open_the_breaker_and_one_that_works_closes_it() {
    let mut stage = Stage::new(Fate::Found).await;
    // What its user gives up counts as nothing.
    for _ in 0..5 {
        let id = stage.create(asked(json!({}), None)).await;
        stage.until(&id, "Pending", "agent_connecting").await;
        assert_eq!(stage.delete(&id).await, 204);
    }
    for _ in 0..3 {
        fails(&stage).await;
    }
    let refused = try_one(&stage).await;
    assert_eq!(refused.code(), (429, "SPAWN::CIRCUIT_OPEN"));
    let after: u64 = refused.headers["retry-after"].to_str().unwrap().parse().unwrap();
    assert!((1..=60).contains(&after), "{after}");
    assert!(stage.service.engine.index().is_empty());
    // Another repository is another kind.
    let mut other = asked(json!({}), None);
    other["repository"]["url"] = json!("https://git.example.com/acme/other.git");
    let other = stage.create(other).await;
    assert_eq!(stage.delete(&other).await, 204);
    stage.service.restart().await;
    assert_eq!(try_one(&stage).await.status, 429, "a restart does not forget");
    pass(after + 1).await;
    // The probe, and nobody beside it.
    let probe = stage.create(asked(json!({}), None)).await;
    assert_eq!(try_one(&stage).await.status, 429);
    // A cancelled probe makes room for another.
    assert_eq!(stage.delete(&probe).await, 204);
    fails(&stage).await;
    let refused = try_one(&stage).await;
    assert_eq!(refused.status, 429);
    let after: u64 = refused.headers["retry-after"].to_str().unwrap().parse().unwrap();
    assert!((100..=120).contains(&after), "longer than the first time: {after}");
    pass(after + 1).await;
    let (_ready, _agent) = ready(&stage, asked(json!({}), None)).await;
    for _ in 0..3 {
        let id = stage.create(asked(json!({}), None)).await;
        assert_eq!(stage.delete(&id).await, 204);
    }
}

#[tokio::test(start_paused = true)]
async fn a_probe_whose_image_is_rejected_on_the_way_closes_the_breaker_all_the_same() {
    let stage = Stage::new(Fate::Found).await;
    for _ in 0..3 {
        fails(&stage).await;
    }
    let refused = try_one(&stage).await;
    assert_eq!(refused.status, 429);
    pass(refused.headers["retry-after"].to_str().unwrap().parse::<u64>().unwrap() + 1).await;
    stage.service.runtime.cannot_use("built:1");
    *stage.images.instead.lock().unwrap() = Some("built:2".into());
    let probe = stage.create(asked(json!({}), None)).await;
    stage.until_told(&probe, "image.rejected").await;
    stage.until(&probe, "Pending", "agent_connecting").await;
    let _agent = attach(&stage, &probe);
    stage.until(&probe, "Running", "ready").await;
    assert_eq!(try_one(&stage).await.status, 202, "the probe was good");
}

#[tokio::test(start_paused = true)]
async fn builds_that_fail_do_not_open_the_breaker() {
    let failure = Failure::new(Reason::ImageBuildFailed, "setup ended with 1");
    let stage = Stage::new(Fate::Fails(failure)).await;
    for _ in 0..5 {
        let id = stage.create(asked(json!({}), None)).await;
        stage.until(&id, "Failed", "image_build_failed").await;
        assert_eq!(stage.delete(&id).await, 204);
    }
}
