use super::*;
use crate::{
    build::{CauseKind, StepName, StepState},
    driver::BuildError,
    ports::{EngineError, UserFailure},
    submission::Refusal,
};

fn fail(stage: &Stage, step: StepName, error: EngineError, times: usize) {
    let mut world = stage.around.world.lock().unwrap();
    let errors = world.step_errors.entry(step).or_default();
    errors.extend(std::iter::repeat_n(error, times));
}

fn user_failure() -> EngineError {
    EngineError::User(UserFailure { step: StepName::Setup, exit_code: Some(7), message: "exit 7".to_owned() })
}

#[tokio::test(start_paused = true)]
async fn a_registry_that_answers_503_twice_is_tried_a_third_time() {
    let stage = Stage::new().await;
    fail(&stage, StepName::Clone, EngineError::transient("503 from the registry"), 2);
    let build = stage.submit(explicit(1, 1)).await;
    assert!(stage.builds.wait(build.id).await.unwrap().is_ok());
    let row = stage.row(build.id);
    assert_eq!((row.attempt, row.transient_failures), (3, 2));
    let log = stage.around.logs.text(build.id);
    for (attempt, wait) in [(1, 2), (2, 4)] {
        let why = format!("attempt {attempt} failed: 503 from the registry; trying again in {wait} s\n");
        assert!(log.contains(&why), "{log}");
    }
    assert!(!log.contains("attempt 3 failed"), "{log}");
    assert!(log.contains("--- attempt 2 ---") && log.contains("--- attempt 3 ---"), "{log}");
    stage.until_clean().await;
    assert_eq!((stage.workspaces(), stage.artifacts()), (0, 1));
}

#[tokio::test(start_paused = true)]
async fn why_something_is_tried_again_is_told_without_secrets() {
    let stage = Stage::new().await;
    fail(&stage, StepName::Setup, EngineError::transient("hunter2 was not heard"), 1);
    let build = stage.submit(Submission { resolved: with_secret(resolved(1, 1)), ..explicit(1, 1) }).await;
    assert!(stage.builds.wait(build.id).await.unwrap().is_ok());
    let log = stage.around.logs.text(build.id);
    assert!(log.contains("attempt 1 failed: *** was not heard; trying again in 2 s"), "{log}");
    assert!(!log.contains("hunter2"), "{log}");
}

#[tokio::test(start_paused = true)]
async fn the_third_failure_of_a_registry_is_final() {
    let stage = Stage::new().await;
    fail(&stage, StepName::Clone, EngineError::transient("503 from the registry"), 3);
    let build = stage.submit(explicit(1, 1)).await;
    let cause = stage.builds.wait(build.id).await.unwrap().unwrap_err();
    assert_eq!((cause.kind, cause.step), (CauseKind::Unavailable, Some(StepName::Clone)));
    assert!(cause.message.contains("503 from the registry"), "{cause}");
    assert_eq!(stage.row(build.id).attempt, 3);
}

#[tokio::test(start_paused = true)]
async fn retries_wait_as_long_as_the_engine_asks() {
    let stage = Stage::new().await;
    let asked = EngineError::Transient {
        retry_after: Some(Duration::from_secs(90)),
        message: "429 from the registry".to_owned(),
    };
    fail(&stage, StepName::Clone, asked, 1);
    let before = stage.now();
    let build = stage.submit(explicit(1, 1)).await;
    assert!(stage.builds.wait(build.id).await.unwrap().is_ok());
    assert!(before.until(stage.now()) >= Duration::from_secs(90));
}

#[tokio::test(start_paused = true)]
async fn a_user_failure_is_final_and_remembered_ever_longer() {
    let stage = Stage::new().await;
    fail(&stage, StepName::Setup, user_failure(), 100);
    let mut last = None;
    for wait in [60, 120, 240, 480, 900, 900] {
        let build = stage.submit(explicit(1, 1)).await;
        let cause = stage.builds.wait(build.id).await.unwrap().unwrap_err();
        assert_eq!((cause.kind, cause.exit_code), (CauseKind::UserFailure, Some(7)));
        let row = stage.row(build.id);
        assert_eq!(row.attempt, 1, "a user's failure is not tried again");
        let setup = row.steps.iter().find(|s| s.name == StepName::Setup).unwrap();
        assert_eq!((setup.state, setup.exit_code), (StepState::Failed, Some(7)));
        assert_eq!(row.steps.last().unwrap().state, StepState::Skipped);

        let Err(BuildError::Refused(Refusal::FailedRecently { build: of, cause: same, until })) =
            stage.builds.submit(explicit(1, 1)).await
        else {
            panic!("not remembered")
        };
        assert_eq!((of, *same), (build.id, cause));
        assert_eq!(row.finished_at.unwrap().until(until), Duration::from_secs(wait));
        tokio::time::sleep(stage.now().until(until)).await;
        last = Some(build.id);
    }
    assert!(last.is_some());
    // Another commit is another key.
    fail(&stage, StepName::Setup, user_failure(), 0);
    stage.around.world.lock().unwrap().step_errors.clear();
    stage.image(explicit(1, 2)).await;
}

#[tokio::test(start_paused = true)]
async fn force_builds_although_the_last_build_just_failed() {
    let stage = Stage::new().await;
    fail(&stage, StepName::Setup, user_failure(), 1);
    let build = stage.submit(explicit(1, 1)).await;
    assert!(stage.builds.wait(build.id).await.unwrap().is_err());
    assert!(matches!(stage.builds.submit(explicit(1, 1)).await, Err(BuildError::Refused(_))));
    let first = stage.image(Submission { force: true, ..explicit(1, 1) }).await;
    // And although there is an image; the new one takes its place.
    let second = stage.image(Submission { force: true, ..explicit(1, 1) }).await;
    assert_eq!(stage.image_row(first.id).state, ImageState::Superseded);
    assert_eq!(stage.image_row(second.id).state, ImageState::Ready);
}

#[tokio::test(start_paused = true)]
async fn an_engine_that_refuses_for_good_is_not_asked_again() {
    let stage = Stage::new().await;
    fail(&stage, StepName::Build, EngineError::transient("never asked"), 1);
    fail(&stage, StepName::Export, EngineError::Rejected("no space for layers of that size".to_owned()), 1);
    let build = stage.submit(explicit(1, 1)).await;
    let cause = stage.builds.wait(build.id).await.unwrap().unwrap_err();
    assert_eq!((cause.kind, cause.step), (CauseKind::Rejected, Some(StepName::Export)));
    assert_eq!(stage.row(build.id).attempt, 1);
}

#[tokio::test(start_paused = true)]
async fn secrets_reach_the_engine_and_no_log_and_are_forgotten() {
    let stage = Stage::new().await;
    let build = stage.submit(Submission { resolved: with_secret(resolved(1, 1)), ..explicit(1, 1) }).await;
    assert!(!format!("{build:?}").contains("hunter2"));
    assert!(!serde_json::to_string(&build).unwrap().contains("hunter2"));
    assert!(stage.builds.wait(build.id).await.unwrap().is_ok());
    let log = stage.around.logs.text(build.id);
    assert!(log.contains("uses ***") && !log.contains("hunter2"), "{log}");
    stage.until_clean().await;
    let kept = crate::ports::Vault::get(&*stage.around.vault, build.id).await.unwrap();
    assert_eq!(kept, None);
}
