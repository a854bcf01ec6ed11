//! What others do to boxes, and what a killed server leaves.

use futures_util::{StreamExt, stream::BoxStream};
use sandglass_sandbox::{
    SandboxId,
    ports::runtime::{Condition, RuntimeEvent},
};
use tokio::time::timeout;

use super::{Hands, IDLE, PATIENCE, Subject, plan, removed, started, try_start};

fn hands(subject: &Subject) -> &dyn Hands {
    subject.hands.as_deref().expect("only run with hands")
}

async fn told(events: &mut BoxStream<'static, RuntimeEvent>, what: impl Fn(&RuntimeEvent) -> bool) {
    let wait = async {
        while let Some(event) = events.next().await {
            if what(&event) {
                return;
            }
        }
        panic!("the watch ended");
    };
    timeout(PATIENCE, wait).await.expect("it was not told");
}

fn shows(event: &RuntimeEvent, id: SandboxId, condition: impl Fn(&Condition) -> bool) -> bool {
    matches!(event, RuntimeEvent::Observed(seen) if seen.id == id && condition(&seen.condition))
}

pub(super) async fn a_box_killed_behind_our_back_is_told_as_ended(subject: &Subject) {
    let mut events = subject.runtime.watch();
    let id = started(subject, IDLE).await.id;
    hands(subject).kill(id).await;
    told(&mut events, |event| {
        shows(event, id, |c| matches!(c, Condition::Exited(exit) if exit.code != Some(0)))
    })
    .await;
    let seen = subject.runtime.inspect(id).await.expect("inspect").expect("it is there");
    assert!(matches!(seen.condition, Condition::Exited(_)), "{seen:?}");
    removed(subject, id).await;
}

pub(super) async fn a_box_paused_behind_our_back_is_told_as_paused(subject: &Subject) {
    let mut events = subject.runtime.watch();
    let id = started(subject, IDLE).await.id;
    hands(subject).pause(id).await;
    told(&mut events, |event| shows(event, id, |c| *c == Condition::Paused)).await;
    let all = subject.runtime.list().await.expect("list");
    assert_eq!(all.iter().find(|o| o.id == id).expect("listed").condition, Condition::Paused);
    assert_eq!(subject.runtime.resume(id).await.expect("resume").condition, Condition::Running);
    removed(subject, id).await;
}

pub(super) async fn a_box_removed_behind_our_back_is_told_as_gone(subject: &Subject) {
    let mut events = subject.runtime.watch();
    let id = started(subject, IDLE).await.id;
    hands(subject).remove(id).await;
    told(&mut events, |event| matches!(event, RuntimeEvent::Removed(gone) if *gone == id)).await;
    assert!(subject.runtime.inspect(id).await.expect("inspect").is_none());
    assert!(subject.runtime.list().await.expect("list").iter().all(|o| o.id != id));
    try_start(subject, id, &plan(subject, IDLE)).await.expect("its place is free again");
    removed(subject, id).await;
}

pub(super) async fn a_start_that_was_interrupted_is_made_anew(subject: &Subject) {
    let id = SandboxId::random();
    hands(subject).interrupt_a_start(id, &subject.image).await;
    let plan = plan(subject, IDLE);
    let seen = try_start(subject, id, &plan).await.expect("start");
    assert_eq!((&seen.condition, &seen.spec, &seen.facts), (&Condition::Running, &plan.spec, &plan.facts));
    assert_eq!(subject.runtime.list().await.expect("list").len(), 1);
    removed(subject, id).await;
    // Or it is removed as it is.
    hands(subject).interrupt_a_start(id, &subject.image).await;
    removed(subject, id).await;
    assert!(subject.runtime.inspect(id).await.expect("inspect").is_none());
}
