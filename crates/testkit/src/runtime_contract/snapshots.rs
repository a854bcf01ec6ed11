//! Saving boxes and making others from what was saved.

use sandglass_sandbox::{
    SandboxId, SnapshotId,
    ports::{
        RuntimeErrorKind,
        runtime::{Condition, StartPlan},
    },
    spec::{Entrypoint, MutableFacts},
};

use super::{IDLE, Subject, plan, removed, said, started, started_as, started_saying};

/// A plan for a box restored from the snapshot.
fn restoring(subject: &Subject, snapshot: SnapshotId, script: &str) -> StartPlan {
    let mut plan = plan(subject, &["sh", "-c", script]);
    plan.spec.image = subject.runtime.snapshot_image(snapshot);
    plan.spec.snapshot = Some(snapshot);
    plan.spec.env.clear();
    plan.facts = MutableFacts::default();
    plan.agent_token = "another".into();
    plan.route_token = "one".into();
    plan
}

async fn taken(subject: &Subject, id: SandboxId) -> SnapshotId {
    let snapshot = SnapshotId::random();
    subject.runtime.snapshot(id, snapshot).await.expect("snapshot");
    snapshot
}

async fn dropped(subject: &Subject, snapshot: SnapshotId) {
    subject.runtime.remove_snapshot(snapshot).await.expect("remove the snapshot");
    assert!(!subject.runtime.has_snapshot(snapshot).await.expect("has"));
}

pub(super) async fn a_snapshot_can_be_taken_twice_and_is_there(subject: &Subject) {
    let id = started(subject, IDLE).await.id;
    let snapshot = SnapshotId::random();
    assert!(!subject.runtime.has_snapshot(snapshot).await.expect("has"));
    for _ in 0..2 {
        subject.runtime.snapshot(id, snapshot).await.expect("snapshot");
        assert!(subject.runtime.has_snapshot(snapshot).await.expect("has"));
    }
    removed(subject, id).await;
    // It is still a success, although the box is not there any more.
    subject.runtime.snapshot(id, snapshot).await.expect("snapshot");
    dropped(subject, snapshot).await;
}

pub(super) async fn a_snapshot_of_no_box_is_not_found(subject: &Subject) {
    let (id, snapshot) = (SandboxId::random(), SnapshotId::random());
    let failed = subject.runtime.snapshot(id, snapshot).await.expect_err("snapshot");
    assert_eq!(failed.kind, RuntimeErrorKind::NotFound, "{failed}");
    assert!(!subject.runtime.has_snapshot(snapshot).await.expect("has"));
}

pub(super) async fn a_snapshot_in_use_cannot_be_removed(subject: &Subject) {
    let source = started(subject, IDLE).await.id;
    let snapshot = taken(subject, source).await;
    let restored = started_as(subject, &restoring(subject, snapshot, "sleep 1000")).await.id;
    let refused = subject.runtime.remove_snapshot(snapshot).await.expect_err("remove");
    assert_eq!(refused.kind, RuntimeErrorKind::InUse, "{refused}");
    assert!(subject.runtime.has_snapshot(snapshot).await.expect("has"), "a refused removal took it away");
    removed(subject, restored).await;
    dropped(subject, snapshot).await;
    removed(subject, source).await;
}

pub(super) async fn an_absent_snapshot_can_be_removed(subject: &Subject) {
    dropped(subject, SnapshotId::random()).await;
}

pub(super) async fn a_box_restored_from_a_snapshot_has_its_files_and_nothing_else_of_it(subject: &Subject) {
    let source = started_saying(subject, "echo kept > /kept; echo ready").await.id;
    said(subject, source, "ready").await;
    let snapshot = taken(subject, source).await;
    let plan = restoring(subject, snapshot, "cat /kept; env; echo complete; sleep 1000");
    let restored = started_as(subject, &plan).await;
    let lines = said(subject, restored.id, "complete").await;
    assert!(lines.iter().any(|line| line == "kept"), "{lines:?}");
    assert!(lines.iter().all(|line| !line.contains("agent-token")), "{lines:?}");
    assert!(lines.iter().any(|line| *line == format!("OPENSANDBOX_ID={}", restored.id)), "{lines:?}");
    let all = subject.runtime.list().await.expect("list");
    assert_eq!(all.len(), 2, "the copy is taken for its source");
    let listed = all.iter().find(|o| o.id == restored.id).expect("it is listed");
    for seen in [&restored, listed] {
        assert_eq!((&seen.spec, &seen.facts), (&plan.spec, &plan.facts));
        assert_eq!((seen.agent_token.as_str(), seen.route_token.as_str()), ("another", "one"));
    }
    for id in [source, restored.id] {
        removed(subject, id).await;
    }
    dropped(subject, snapshot).await;
}

pub(super) async fn a_snapshot_runs_what_its_source_ran_if_nothing_else_is_asked_for(subject: &Subject) {
    let source = started_saying(subject, "echo I am $OPENSANDBOX_ID").await;
    said(subject, source.id, &format!("I am {}", source.id)).await;
    let snapshot = taken(subject, source.id).await;
    removed(subject, source.id).await;
    let mut plan = restoring(subject, snapshot, "");
    plan.spec.entrypoint = Entrypoint::Image;
    let restored = started_as(subject, &plan).await;
    assert_eq!(restored.entrypoint, source.entrypoint);
    said(subject, restored.id, &format!("I am {}", restored.id)).await;
    removed(subject, restored.id).await;
    dropped(subject, snapshot).await;
}

pub(super) async fn a_snapshot_outlives_its_source(subject: &Subject) {
    let source = started_saying(subject, "echo kept > /kept; echo ready").await.id;
    said(subject, source, "ready").await;
    let first = taken(subject, source).await;
    removed(subject, source).await;
    let middle =
        started_as(subject, &restoring(subject, first, "echo more >> /kept; echo ready; sleep 1000"))
            .await
            .id;
    said(subject, middle, "ready").await;
    let second = taken(subject, middle).await;
    removed(subject, middle).await;
    // A snapshot of what was made from a snapshot does not need that one any more.
    dropped(subject, first).await;
    let last = started_as(subject, &restoring(subject, second, "cat /kept; sleep 1000")).await.id;
    assert_eq!(said(subject, last, "more").await, ["kept", "more"]);
    removed(subject, last).await;
    dropped(subject, second).await;
}

pub(super) async fn a_snapshot_is_taken_of_a_box_that_goes_on(subject: &Subject) {
    let id = started(subject, IDLE).await.id;
    let (snapshot, other) = tokio::join!(taken(subject, id), taken(subject, id));
    let seen = subject.runtime.inspect(id).await.expect("inspect").expect("it is there");
    assert_eq!(seen.condition, Condition::Running);
    for snapshot in [snapshot, other] {
        dropped(subject, snapshot).await;
    }
    removed(subject, id).await;
}
