use super::*;
use crate::{
    build::{CauseKind, Priority, StepName},
    driver::BuildError,
    submission::Refusal,
    testing::Fault,
};

#[tokio::test(start_paused = true)]
async fn a_build_that_takes_too_long_is_ended_and_its_workspace_removed() {
    let stage = Stage::new().await;
    {
        let mut world = stage.around.world.lock().unwrap();
        world.step_takes = Duration::from_secs(3600);
        // It does not even let go when told to; the workspace is removed all the same.
        world.deaf = true;
    }
    let build = stage.submit(Submission { timeout: Duration::from_secs(120), ..explicit(1, 1) }).await;
    let cause = stage.builds.wait(build.id).await.unwrap().unwrap_err();
    assert_eq!((cause.kind, cause.step), (CauseKind::TimedOut, Some(StepName::Clone)));
    assert!(cause.message.contains("120 s"), "{cause}");
    let row = stage.row(build.id);
    assert_eq!(row.state, BuildState::TimedOut);
    let took = row.started_at.unwrap().until(row.finished_at.unwrap());
    assert!(took >= Duration::from_secs(120) && took <= Duration::from_secs(131), "{took:?}");
    stage.until_clean().await;
    let world = stage.around.world.lock().unwrap();
    assert!(world.workspaces.is_empty() && world.discarded.contains(&(build.id, 1)));
}

#[tokio::test(start_paused = true)]
async fn the_workspace_of_a_build_past_its_deadline_goes_although_nothing_can_be_written() {
    let stage = Stage::new().await;
    stage.around.world.lock().unwrap().step_takes = Duration::from_secs(3600);
    let build = stage.submit(Submission { timeout: Duration::from_secs(50), ..explicit(1, 1) }).await;
    stage.until_state(build.id, BuildState::Running).await;
    stage.faults.on("commit:before", usize::MAX, Fault::Fail);
    stage.until("the workspace is gone", |a| a.world.lock().unwrap().workspaces.is_empty()).await;
    assert_eq!(stage.row(build.id).state, BuildState::Running);
    // The next server finds one more, and still nothing can be written.
    stage.around.world.lock().unwrap().workspaces.insert((build.id, 1));
    stage.faults.kill();
    let faults = Arc::new(Faults::default());
    faults.on("commit:before", usize::MAX, Fault::Fail);
    let _builds = Builds::start(stage.around.ports(&faults), stage.around.settings(1)).await.unwrap();
    stage.until("the other workspace is gone", |a| a.world.lock().unwrap().workspaces.is_empty()).await;
}

#[tokio::test(start_paused = true)]
async fn one_budget_covers_all_attempts() {
    let stage = Stage::new().await;
    {
        let mut world = stage.around.world.lock().unwrap();
        world.step_takes = Duration::from_secs(50);
        let error = crate::ports::EngineError::transient("503");
        world.step_errors.entry(StepName::Clone).or_default().extend([error.clone(), error]);
    }
    let build = stage.submit(Submission { timeout: Duration::from_secs(120), ..explicit(1, 1) }).await;
    let cause = stage.builds.wait(build.id).await.unwrap().unwrap_err();
    assert_eq!(cause.kind, CauseKind::TimedOut);
    let row = stage.row(build.id);
    let took = row.started_at.unwrap().until(row.finished_at.unwrap());
    assert!(took >= Duration::from_secs(120) && took < Duration::from_secs(122), "{took:?}");
}

#[tokio::test(start_paused = true)]
async fn a_timeout_is_remembered() {
    let stage = Stage::new().await;
    stage.around.world.lock().unwrap().step_takes = Duration::from_secs(3600);
    let build = stage.submit(Submission { timeout: Duration::from_secs(60), ..explicit(1, 1) }).await;
    assert!(stage.builds.wait(build.id).await.unwrap().is_err());
    let again = stage.builds.submit(explicit(1, 1)).await;
    assert!(matches!(again, Err(BuildError::Refused(Refusal::FailedRecently { .. }))), "{again:?}");
}

#[tokio::test(start_paused = true)]
async fn a_build_that_does_not_get_its_turn_ends_and_is_not_remembered() {
    let stage = Stage::with(Surroundings::default(), 0, |s| s.rules.per_host = 1).await;
    stage.around.world.lock().unwrap().step_takes = Duration::from_secs(7200);
    let first = Submission { timeout: Duration::from_secs(7200), ..explicit(1, 1) };
    let first = stage.submit(first).await;
    stage.until_state(first.id, BuildState::Running).await;
    let second = stage.submit(explicit(2, 1)).await;
    let cause = stage.builds.wait(second.id).await.unwrap().unwrap_err();
    assert_eq!(cause.kind, CauseKind::TimedOut);
    assert!(cause.message.contains("turn"), "{cause}");
    let row = stage.row(second.id);
    assert_eq!(row.queued_at.until(row.finished_at.unwrap()).as_secs(), 45 * 60);
    stage.submit(explicit(2, 1)).await;
}

#[tokio::test(start_paused = true)]
async fn a_waiting_build_is_cancelled_at_once_and_an_ended_one_not_at_all() {
    let stage = Stage::with(Surroundings::default(), 0, |s| s.rules.per_host = 1).await;
    stage.around.world.lock().unwrap().step_takes = Duration::from_secs(60);
    let first = stage.submit(explicit(1, 1)).await;
    stage.until_state(first.id, BuildState::Running).await;
    let second = stage.submit(explicit(2, 1)).await;
    assert_eq!(stage.builds.cancel(second.id).await.unwrap().state, BuildState::Cancelled);
    assert!(matches!(stage.builds.cancel(second.id).await, Err(BuildError::Terminal(_))));
    assert!(matches!(stage.builds.cancel(ImageBuildId::random()).await, Err(BuildError::NotFound)));
}

#[tokio::test(start_paused = true)]
async fn who_waits_at_a_screen_goes_before_prebuilds() {
    let stage = Stage::with(Surroundings::default(), 0, |s| s.rules.per_host = 1).await;
    stage.around.world.lock().unwrap().step_takes = Duration::from_secs(10);
    let running = stage.submit(explicit(1, 1)).await;
    stage.until_state(running.id, BuildState::Running).await;
    let prebuild = crate::PrebuildId::random();
    let late = stage.submit(Submission { origin: Origin::Prebuild(prebuild), ..explicit(2, 1) }).await;
    let joined = stage.submit(Submission { origin: Origin::Prebuild(prebuild), ..explicit(3, 1) }).await;
    tokio::time::sleep(Duration::from_millis(1)).await;
    let early = stage.submit(sandbox(4, 1, "a")).await;
    // Somebody waits for it now, so it is no less urgent than others.
    assert_eq!(stage.submit(sandbox(3, 1, "b")).await.priority, Priority::Interactive);
    for id in [running.id, late.id, joined.id, early.id] {
        stage.builds.wait(id).await.unwrap().unwrap();
    }
    let begun = |id| stage.row(id).started_at.unwrap();
    assert!(begun(joined.id) < begun(early.id) && begun(early.id) < begun(late.id));
}

#[tokio::test(start_paused = true)]
async fn more_builds_than_may_wait_are_refused() {
    let stage = Stage::with(Surroundings::default(), 0, |s| (s.rules.per_host, s.rules.queue) = (1, 2)).await;
    stage.around.world.lock().unwrap().step_takes = Duration::from_secs(600);
    let first = stage.submit(explicit(1, 1)).await;
    stage.until_state(first.id, BuildState::Running).await;
    stage.submit(explicit(2, 1)).await;
    stage.submit(explicit(3, 1)).await;
    let refused = stage.builds.submit(explicit(4, 1)).await;
    assert!(matches!(refused, Err(BuildError::Refused(Refusal::QueueFull(2)))), "{refused:?}");
    // Who only joins is not one more.
    stage.submit(sandbox(3, 1, "a")).await;
}
