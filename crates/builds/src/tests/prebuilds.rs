use proptest::prelude::*;
use sandglass_sandbox::{PrebuildId, Timestamp};

use super::*;
use crate::{
    build::{CauseKind, StepName},
    decide::{Rules, prebuild as decide},
    ports::{EngineError, UserFailure},
    prebuild::{Prebuild, Schedule},
};

fn prebuild(poll_seconds: Option<u64>) -> Prebuild {
    Prebuild {
        id: PrebuildId::random(),
        version: 1,
        namespace: None,
        source: serde_json::json!({ "url": "https://github.com/acme/web", "ref": "main" }),
        poll_seconds,
        enabled: true,
        keep: None,
        tag: Some("latest".parse().unwrap()),
        timeout_seconds: 1800,
        schedule: Schedule::default(),
        seen: None,
        last_error: None,
        created_at: Timestamp::clamped(1_800_000_000_000),
    }
}

async fn pass(seconds: u64) {
    tokio::time::sleep(Duration::from_secs(seconds)).await;
}

#[tokio::test(start_paused = true)]
async fn a_poll_builds_each_new_commit_once() {
    let stage = Stage::new().await;
    stage.around.resolver.set(Some(resolved(1, 1)));
    stage.builds.add_prebuild(prebuild(Some(60))).await.unwrap();
    pass(600).await;
    assert_eq!(stage.builds_made(), 1);
    let looks = stage.around.resolver.looks();
    assert!((9..=12).contains(&looks), "{looks}");
    stage.around.resolver.set(Some(resolved(1, 2)));
    pass(600).await;
    assert_eq!(stage.builds_made(), 2);
    let newest = stage.around.tables.lock().unwrap().tags.values().next().unwrap().image;
    assert_eq!(stage.image_row(newest).key, build_key(1, 2));
}

#[tokio::test(start_paused = true)]
async fn pushes_shortly_after_each_other_are_one_look() {
    let stage = Stage::new().await;
    stage.around.resolver.set(Some(resolved(1, 1)));
    let id = stage.builds.add_prebuild(prebuild(None)).await.unwrap().id;
    pass(60).await;
    assert_eq!((stage.builds_made(), stage.around.resolver.looks()), (1, 1));
    stage.around.resolver.set(Some(resolved(1, 2)));
    for _ in 0..20 {
        stage.builds.pushed(id).await.unwrap();
    }
    pass(60).await;
    assert_eq!((stage.builds_made(), stage.around.resolver.looks()), (2, 2));
}

#[tokio::test(start_paused = true)]
async fn a_remote_that_cannot_be_read_neither_builds_nor_disables() {
    let stage = Stage::new().await;
    stage.around.resolver.set(Some(resolved(1, 1)));
    let id = stage.builds.add_prebuild(prebuild(Some(60))).await.unwrap().id;
    pass(30).await;
    stage.around.resolver.set(None);
    pass(600).await;
    let row = || stage.around.tables.lock().unwrap().prebuilds[&id].clone();
    assert_eq!(stage.builds_made(), 1);
    assert!(row().enabled && row().last_error.as_deref() == Some("the remote cannot be reached"));
    assert_eq!(row().seen.unwrap().key, build_key(1, 1));
    stage.around.resolver.set(Some(resolved(1, 2)));
    pass(120).await;
    assert_eq!((stage.builds_made(), row().last_error), (2, None));
}

#[tokio::test(start_paused = true)]
async fn a_commit_whose_build_failed_waits_for_another_or_for_somebody_who_asks() {
    let hour = Duration::from_secs(3600);
    let stage = Stage::with(Surroundings::default(), 0, |s| s.rules.ended_kept = hour).await;
    let failure = UserFailure { step: StepName::Setup, exit_code: Some(1), message: "exit 1".to_owned() };
    let failure = EngineError::User(failure);
    stage.around.world.lock().unwrap().step_errors.entry(StepName::Setup).or_default().extend([failure]);
    stage.around.resolver.set(Some(resolved(1, 1)));
    let id = stage.builds.add_prebuild(prebuild(Some(60))).await.unwrap().id;
    pass(3 * 3600).await;
    assert_eq!((stage.builds_made(), stage.live_images()), (1, 0));
    stage.builds.trigger(id).await.unwrap();
    pass(30).await;
    // The failed one, which nothing points at any more, is old enough to be forgotten.
    assert_eq!((stage.builds_made(), stage.live_images()), (1, 1));
}

#[tokio::test(start_paused = true)]
async fn a_disabled_prebuild_looks_only_when_asked() {
    let stage = Stage::new().await;
    stage.around.resolver.set(Some(resolved(1, 1)));
    let id = stage.builds.add_prebuild(Prebuild { enabled: false, ..prebuild(Some(60)) }).await.unwrap().id;
    stage.builds.pushed(id).await.unwrap();
    pass(600).await;
    assert_eq!(stage.around.resolver.looks(), 0);
    stage.builds.trigger(id).await.unwrap();
    pass(30).await;
    assert_eq!((stage.around.resolver.looks(), stage.builds_made()), (1, 1));
}

#[tokio::test(start_paused = true)]
async fn a_newer_commit_takes_the_place_of_one_that_nobody_waits_for() {
    let stage = Stage::new().await;
    stage.around.world.lock().unwrap().step_takes = Duration::from_secs(600);
    stage.around.resolver.set(Some(resolved(1, 1)));
    let id = stage.builds.add_prebuild(prebuild(None)).await.unwrap().id;
    pass(10).await;
    let old = stage.around.tables.lock().unwrap().builds.values().next().unwrap().clone();
    stage.around.resolver.set(Some(resolved(1, 2)));
    stage.builds.pushed(id).await.unwrap();
    pass(10).await;
    assert_eq!(stage.row(old.id).state, BuildState::Superseded);
    assert_eq!(stage.row(old.id).cause.unwrap().kind, CauseKind::Superseded);
    assert_eq!(stage.builds_made(), 2);
}

#[tokio::test(start_paused = true)]
async fn a_look_that_was_cut_off_is_made_again() {
    let stage = Stage::new().await;
    stage.around.resolver.set(Some(resolved(1, 1)));
    let id = stage.builds.add_prebuild(prebuild(None)).await.unwrap().id;
    pass(30).await;
    stage.around.resolver.set(Some(resolved(1, 2)));
    stage.builds.pushed(id).await.unwrap();
    let stage = stage.restarted(1).await;
    pass(300).await;
    assert_eq!(stage.builds_made(), 2);
}

#[tokio::test(start_paused = true)]
async fn an_edited_prebuild_looks_at_once_and_a_removed_one_not_at_all() {
    let stage = Stage::new().await;
    stage.around.resolver.set(Some(resolved(1, 1)));
    let id = stage.builds.add_prebuild(prebuild(Some(100_000))).await.unwrap().id;
    pass(30).await;
    stage.builds.edit_prebuild(id, |p| Prebuild { keep: Some(5), ..p.clone() }).await.unwrap();
    pass(30).await;
    assert_eq!(stage.around.resolver.looks(), 1);
    stage.builds.edit_prebuild(id, |p| Prebuild { poll_seconds: Some(60), ..p.clone() }).await.unwrap();
    pass(30).await;
    assert_eq!(stage.around.resolver.looks(), 2);
    stage.builds.remove_prebuild(id).await.unwrap();
    pass(600).await;
    assert_eq!(stage.around.resolver.looks(), 2);
}

#[tokio::test(start_paused = true)]
async fn a_name_that_somebody_moved_stays_moved_until_the_next_commit() {
    let stage = Stage::new().await;
    stage.around.resolver.set(Some(resolved(1, 1)));
    stage.builds.add_prebuild(prebuild(Some(60))).await.unwrap();
    pass(100).await;
    stage.around.resolver.set(Some(resolved(1, 2)));
    pass(100).await;
    let of_commit = |n| {
        stage.around.tables.lock().unwrap().images.values().find(|i| i.key == build_key(1, n)).unwrap().id
    };
    let (old, latest) = (of_commit(1), "latest".parse::<crate::key::TagName>().unwrap());
    stage.builds.move_tag(None, "github.com/acme/web", latest.clone(), old).await.unwrap();
    pass(300).await;
    assert_eq!(stage.image_row(old).tags, std::slice::from_ref(&latest));
    stage.around.resolver.set(Some(resolved(1, 3)));
    pass(100).await;
    assert_eq!(stage.image_row(of_commit(3)).tags, [latest]);
}

#[test]
fn a_push_during_a_look_is_not_answered_by_it() {
    let (rules, at) = (Rules::default(), |s: i64| Timestamp::clamped(1_800_000_000_000 + s * 1000));
    let row = decide::pushed(&prebuild(None), at(0));
    assert_eq!(decide::due_at(&row, &rules), Some(at(2)));
    let (row, look) = decide::look_began(&row, Duration::from_secs(120), at(2));
    assert_eq!(decide::due_at(&row, &rules), Some(at(122)));
    let row = decide::pushed(&row, at(3));
    let row = decide::look_ended(&row, look, &rules, 0, at(5));
    assert_eq!(decide::due_at(&row, &rules), Some(at(7)));
    let (row, look) = decide::look_began(&row, Duration::from_secs(120), at(7));
    let row = decide::look_ended(&row, look, &rules, 0, at(8));
    assert_eq!(decide::due_at(&row, &rules), None);
}

proptest! {
    #[test]
    fn polls_are_spread_around_their_interval(seconds in 1_u64..100_000, chance in 0_u32..1000) {
        let (rules, now) = (Rules::default(), Timestamp::clamped(1_800_000_000_000));
        let row = prebuild(Some(seconds));
        let (row, look) = decide::look_began(&row, Duration::from_secs(1), now);
        let next = decide::look_ended(&row, look, &rules, chance, now).schedule.next_poll_at.unwrap();
        let wait = now.until(next).as_millis() as u64;
        prop_assert!(wait >= seconds * 900 - 1 && wait <= seconds * 1100, "{wait}");
    }
}

#[test]
fn an_interval_beyond_all_time_is_a_late_look() {
    let row = prebuild(Some(u64::MAX));
    let now = Timestamp::clamped(1_800_000_000_000);
    let (row, look) = decide::look_began(&row, Duration::from_secs(60), now);
    let next = decide::look_ended(&row, look, &Rules::default(), 999, now);
    assert!(next.schedule.next_poll_at.is_some_and(|at| at > now));
}
