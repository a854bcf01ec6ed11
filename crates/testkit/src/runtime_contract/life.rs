//! Being made, seen, changed and removed.

use std::{
    collections::{BTreeMap, BTreeSet, HashSet},
    time::Duration,
};

use futures_util::{StreamExt, future::join_all};
use sandglass_sandbox::{
    Clock, SandboxId, SystemClock, Timestamp,
    ports::{
        Runtime, RuntimeErrorKind,
        runtime::{Condition, Observation, RuntimeEvent},
    },
    spec::{MutableFacts, Secrets},
};
use tokio::time::timeout;

use super::{IDLE, PATIENCE, Subject, plan, removed, started, started_as, try_start};

async fn listed(runtime: &dyn Runtime, id: SandboxId) -> Observation {
    let all = runtime.list().await.expect("list");
    all.into_iter().find(|o| o.id == id).expect("it is listed")
}

fn later_facts() -> MutableFacts {
    MutableFacts {
        expires_at: Some(Timestamp::clamped(SystemClock.now().as_millis() + 3_600_000)),
        metadata: BTreeMap::from([("c".into(), "d".into()), ("com.docker.x".into(), "ü \"q\"".into())]),
    }
}

pub(super) async fn a_started_box_is_running_with_the_facts_it_was_given(subject: &Subject) {
    let id = SandboxId::random();
    let plan = plan(subject, IDLE);
    let seen = try_start(subject, id, &plan).await.expect("start");
    assert_eq!(seen.condition, Condition::Running);
    let listed = listed(&*subject.runtime, id).await;
    for seen in [&seen, &listed] {
        assert_eq!(seen.spec, plan.spec);
        assert_eq!(seen.facts, plan.facts);
        assert_eq!(seen.created_at, plan.created_at);
        assert_eq!((seen.agent_token.as_str(), seen.route_token.as_str()), ("agent-token", "route-token"));
        assert_eq!(seen.entrypoint, IDLE);
        assert!(seen.started_at.is_some() && seen.address.is_some());
    }
    removed(subject, id).await;
}

pub(super) async fn starting_again_is_success_and_makes_no_second_box(subject: &Subject) {
    let first = started(subject, IDLE).await;
    let again = try_start(subject, first.id, &plan(subject, IDLE)).await.expect("start again");
    assert_eq!((again.created_at, again.address), (first.created_at, first.address));
    assert_eq!(subject.runtime.list().await.expect("list").len(), 1);
    removed(subject, first.id).await;
}

pub(super) async fn removing_an_absent_box_is_success(subject: &Subject) {
    removed(subject, SandboxId::random()).await;
}

pub(super) async fn a_removed_box_is_gone_from_everywhere(subject: &Subject) {
    let seen = started(subject, IDLE).await;
    removed(subject, seen.id).await;
    assert!(subject.runtime.inspect(seen.id).await.expect("inspect").is_none());
    assert!(subject.runtime.list().await.expect("list").iter().all(|o| o.id != seen.id));
}

pub(super) async fn pausing_and_resuming_are_idempotent(subject: &Subject) {
    let id = started(subject, IDLE).await.id;
    for _ in 0..2 {
        assert_eq!(subject.runtime.pause(id).await.expect("pause").condition, Condition::Paused);
    }
    for _ in 0..2 {
        assert_eq!(subject.runtime.resume(id).await.expect("resume").condition, Condition::Running);
    }
    removed(subject, id).await;
}

pub(super) async fn what_needs_a_box_says_not_found_without_one(subject: &Subject) {
    let id = SandboxId::random();
    let facts = MutableFacts::default();
    let kinds = [
        subject.runtime.pause(id).await.expect_err("pause").kind,
        subject.runtime.resume(id).await.expect_err("resume").kind,
        subject.runtime.update_facts(id, &facts).await.expect_err("update").kind,
    ];
    assert_eq!(kinds, [RuntimeErrorKind::NotFound; 3]);
    assert!(subject.runtime.inspect(id).await.expect("inspect").is_none());
}

pub(super) async fn changed_facts_are_what_the_list_shows(subject: &Subject) {
    let id = started(subject, IDLE).await.id;
    for facts in [later_facts(), MutableFacts::default(), plan(subject, IDLE).facts] {
        assert_eq!(subject.runtime.update_facts(id, &facts).await.expect("update").facts, facts);
        assert_eq!(listed(&*subject.runtime, id).await.facts, facts);
    }
    removed(subject, id).await;
}

pub(super) async fn a_paused_box_can_be_changed_and_removed(subject: &Subject) {
    let id = started(subject, IDLE).await.id;
    subject.runtime.pause(id).await.expect("pause");
    let facts = later_facts();
    let seen = subject.runtime.update_facts(id, &facts).await.expect("update");
    assert_eq!((seen.facts, seen.condition), (facts, Condition::Paused));
    removed(subject, id).await;
    assert!(subject.runtime.inspect(id).await.expect("inspect").is_none());
}

pub(super) async fn removing_twice_at_once_is_success(subject: &Subject) {
    let id = started(subject, IDLE).await.id;
    tokio::join!(removed(subject, id), removed(subject, id), removed(subject, id));
}

async fn at_once(subject: &Subject, count: usize) {
    let seen = join_all((0..count).map(|_| started(subject, IDLE))).await;
    let ids: HashSet<_> = seen.iter().map(|o| o.id).collect();
    assert_eq!(ids.len(), count);
    if subject.runs_processes {
        let addresses: HashSet<_> = seen.iter().map(|o| o.address).collect();
        assert_eq!(addresses.len(), count);
    }
    assert_eq!(subject.runtime.list().await.expect("list").len(), count);
    join_all(ids.into_iter().map(|id| removed(subject, id))).await;
}

pub(super) async fn boxes_started_at_once_do_not_share_anything(subject: &Subject) {
    at_once(subject, 8).await;
}

pub(super) async fn twenty_boxes_start_at_once(subject: &Subject) {
    at_once(subject, 20).await;
}

/// Whichever came first: what `start` answered is so, and a removal afterwards leaves nothing.
pub(super) async fn removing_while_starting_leaves_one_truth(subject: &Subject) {
    for delay in [0, 5, 10, 15, 20, 30, 40, 60, 150] {
        let (id, plan) = (SandboxId::random(), plan(subject, IDLE));
        let remove = async {
            tokio::time::sleep(Duration::from_millis(delay)).await;
            removed(subject, id).await;
        };
        let (started, ()) = tokio::join!(try_start(subject, id, &plan), remove);
        if started.is_err() {
            assert!(
                subject.runtime.inspect(id).await.expect("inspect").is_none(),
                "a failed start left a box"
            );
        }
        removed(subject, id).await;
        assert!(subject.runtime.inspect(id).await.expect("inspect").is_none());
        try_start(subject, id, &plan).await.expect("the id can be used again");
        removed(subject, id).await;
    }
}

pub(super) async fn a_list_after_many_changes_is_exact(subject: &Subject) {
    let ids: Vec<SandboxId> =
        join_all((0..9).map(|_| started(subject, IDLE))).await.into_iter().map(|o| o.id).collect();
    join_all(ids[..3].iter().map(|id| removed(subject, *id))).await;
    let can_pause = subject.runtime.capabilities().pause;
    if can_pause {
        for id in &ids[3..6] {
            subject.runtime.pause(*id).await.expect("pause");
        }
    }
    let all = subject.runtime.list().await.expect("list");
    let seen: BTreeMap<SandboxId, Condition> = all.into_iter().map(|o| (o.id, o.condition)).collect();
    assert_eq!(seen.keys().copied().collect::<BTreeSet<_>>(), ids[3..].iter().copied().collect());
    for (place, id) in ids.iter().enumerate().skip(3) {
        let paused = can_pause && place < 6;
        assert_eq!(seen[id], if paused { Condition::Paused } else { Condition::Running });
    }
    join_all(ids[3..].iter().map(|id| removed(subject, *id))).await;
}

pub(super) async fn inspect_and_list_agree(subject: &Subject) {
    let id = started(subject, IDLE).await.id;
    subject.runtime.update_facts(id, &later_facts()).await.expect("update");
    let one = subject.runtime.inspect(id).await.expect("inspect").expect("it is there");
    let two = listed(&*subject.runtime, id).await;
    assert_eq!((&one.spec, &one.facts, &one.entrypoint), (&two.spec, &two.facts, &two.entrypoint));
    assert_eq!(
        (&one.condition, one.created_at, one.started_at),
        (&two.condition, two.created_at, two.started_at)
    );
    assert_eq!((one.address, one.exposure, one.since), (two.address, two.exposure, two.since));
    assert_eq!((&one.agent_token, &one.route_token), (&two.agent_token, &two.route_token));
    removed(subject, id).await;
}

pub(super) async fn later_observations_have_higher_revisions(subject: &Subject) {
    let first = started(subject, IDLE).await;
    let facts = later_facts();
    let second = subject.runtime.update_facts(first.id, &facts).await.expect("update");
    let third = subject.runtime.inspect(first.id).await.expect("inspect").expect("it is there");
    assert!(first.revision < second.revision && second.revision <= third.revision);
    removed(subject, first.id).await;
}

pub(super) async fn changes_are_told(subject: &Subject) {
    let mut told = subject.runtime.watch();
    let id = started(subject, IDLE).await.id;
    if subject.runtime.capabilities().pause {
        subject.runtime.pause(id).await.expect("pause");
    }
    let facts = MutableFacts::default();
    subject.runtime.update_facts(id, &facts).await.expect("update");
    removed(subject, id).await;
    let wait = async {
        while let Some(event) = told.next().await {
            if matches!(event, RuntimeEvent::Removed(gone) if gone == id) {
                return;
            }
        }
        panic!("the watch ended");
    };
    timeout(PATIENCE, wait).await.expect("the removal was not told");
}

pub(super) async fn a_second_watch_supersedes_the_first(subject: &Subject) {
    let mut first = subject.runtime.watch();
    let mut second = subject.runtime.watch();
    let id = started(subject, IDLE).await.id;
    removed(subject, id).await;
    let ends = async { while first.next().await.is_some() {} };
    timeout(PATIENCE, ends).await.expect("the first watch goes on");
    let told = async {
        while let Some(event) = second.next().await {
            if matches!(event, RuntimeEvent::Removed(gone) if gone == id) {
                return;
            }
        }
        panic!("the second watch ended");
    };
    timeout(PATIENCE, told).await.expect("the second watch is told nothing");
}

pub(super) async fn what_can_be_done_is_admitted_and_preparing_twice_is_cheap(subject: &Subject) {
    let spec = plan(subject, IDLE).spec;
    subject.runtime.admit(&spec).await.expect("admit");
    for _ in 0..2 {
        subject.runtime.prepare(&spec, &Secrets::default(), &|_| {}).await.expect("prepare");
    }
    assert!(subject.runtime.list().await.expect("list").is_empty(), "asking made something");
}

pub(super) async fn a_description_holds_no_token(subject: &Subject) {
    let id = started(subject, IDLE).await.id;
    let facts = subject.runtime.describe(id).await.expect("describe");
    for (key, value) in facts {
        assert!(!value.contains("agent-token") && !value.contains("route-token"), "{key}: {value}");
    }
    removed(subject, id).await;
}

pub(super) async fn facts_survive_a_restart(subject: &Subject) {
    let Some(restarted) = &subject.restarted else { return };
    let changed = started(subject, IDLE).await;
    let facts = later_facts();
    subject.runtime.update_facts(changed.id, &facts).await.expect("update");
    let same = started_as(subject, &plan(subject, IDLE)).await;
    let runtime = restarted().await;
    for (before, facts) in [(&changed, &facts), (&same, &same.facts)] {
        let after = listed(&*runtime, before.id).await;
        assert_eq!((&after.facts, &after.spec, after.created_at), (facts, &before.spec, before.created_at));
        assert_eq!((&after.condition, after.started_at), (&before.condition, before.started_at));
        assert_eq!((after.address, after.exposure), (before.address, before.exposure));
        assert_eq!((&after.agent_token, &after.route_token), (&before.agent_token, &before.route_token));
        assert_eq!(after.entrypoint, before.entrypoint);
        let again = runtime.start(before.id, &plan(subject, IDLE), &Secrets::default()).await.expect("start");
        assert_eq!(again.created_at, before.created_at, "a restarted server made it again");
    }
    for id in [changed.id, same.id] {
        runtime.remove(id, Duration::ZERO).await.expect("remove");
    }
}

pub(super) async fn what_was_removed_stays_removed_after_a_restart(subject: &Subject) {
    let Some(restarted) = &subject.restarted else { return };
    let id = started(subject, IDLE).await.id;
    subject.runtime.update_facts(id, &later_facts()).await.expect("update");
    removed(subject, id).await;
    let runtime = restarted().await;
    assert!(runtime.list().await.expect("list").is_empty());
    let plan = plan(subject, IDLE);
    let seen = runtime.start(id, &plan, &Secrets::default()).await.expect("start");
    assert_eq!(seen.facts, plan.facts, "facts of the box before it came back");
    runtime.remove(id, Duration::ZERO).await.expect("remove");
}
