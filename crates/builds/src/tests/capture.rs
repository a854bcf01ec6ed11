use super::*;
use crate::{
    build::CauseKind,
    key::ArtifactName,
    ports::{Artifact, EngineError},
    testing::Fault,
};

#[tokio::test(start_paused = true)]
async fn a_capture_whose_answer_was_lost_is_found_by_name_and_not_repeated() {
    let stage = Stage::new().await;
    stage.faults.on("capture:after", 1, Fault::Fail);
    let image = stage.image(explicit(1, 1)).await;
    assert_eq!((stage.captures(), stage.artifacts()), (1, 1));
    assert_eq!(image.artifact, ArtifactName::new(&build_key(1, 1), 1));
}

#[tokio::test(start_paused = true)]
async fn a_capture_that_never_shows_fails_the_build_and_is_not_repeated() {
    let stage = Stage::new().await;
    let lost = EngineError::Ambiguous("the answer was lost".to_owned());
    stage.around.world.lock().unwrap().capture_errors.push_back(lost);
    let build = stage.submit(explicit(1, 1)).await;
    let cause = stage.builds.wait(build.id).await.unwrap().unwrap_err();
    assert_eq!(cause.kind, CauseKind::CaptureLost);
    assert_eq!((stage.captures(), stage.artifacts(), stage.row(build.id).attempt), (1, 0, 1));
    // It does not stick: the next request builds.
    stage.image(explicit(1, 1)).await;
}

/// A build whose server ended in the moment of its capture, and the image that the next server made of it.
async fn ended_before_capture() -> (Stage, ImageBuild, Image) {
    let stage = Stage::new().await;
    stage.faults.on("capture:before", 1, Fault::Crash);
    let build = stage.submit(explicit(1, 1)).await;
    stage.faults.crash().await;
    let stage = stage.restarted(1).await;
    let image = *stage.builds.wait(build.id).await.unwrap().unwrap();
    (stage, build, image)
}

#[tokio::test(start_paused = true)]
async fn a_server_that_ends_in_the_moment_of_a_capture_costs_another_attempt_and_not_the_build() {
    let (stage, build, image) = ended_before_capture().await;
    // Never under the same name: the first capture might come to an end yet.
    assert_eq!(image.artifact, ArtifactName::new(&build_key(1, 1), 2));
    let row = stage.row(build.id);
    assert_eq!((row.attempt, row.interruptions, stage.artifacts()), (2, 1, 1));
    let log = stage.around.logs.text(build.id);
    assert!(log.contains("ended before the image was captured"), "{log}");
    stage.until_clean().await;
    assert_eq!(stage.workspaces(), 0);
}

#[tokio::test(start_paused = true)]
async fn what_an_engine_captures_after_its_server_ended_is_removed() {
    let (stage, build, image) = ended_before_capture().await;
    let name = ArtifactName::new(&build_key(1, 1), 1);
    let late = Artifact {
        name: name.clone(),
        made_by: Some((build.id, 1)),
        reference: name.to_string(),
        digest: None,
        size_bytes: 1,
    };
    stage.around.world.lock().unwrap().artifacts.insert(name, late);
    stage.until_clean().await;
    let left: Vec<_> = stage.around.world.lock().unwrap().artifacts.keys().cloned().collect();
    assert_eq!(left, [image.artifact]);
}

#[tokio::test(start_paused = true)]
async fn an_artifact_that_comes_after_its_build_was_given_up_is_removed() {
    let stage = Stage::new().await;
    let lost = EngineError::Ambiguous("the answer was lost".to_owned());
    stage.around.world.lock().unwrap().capture_errors.push_back(lost);
    let build = stage.submit(explicit(1, 1)).await;
    assert!(stage.builds.wait(build.id).await.unwrap().is_err());
    tokio::time::sleep(Duration::from_secs(300)).await;
    let name = stage.row(build.id).artifact.unwrap();
    let late = Artifact {
        name: name.clone(),
        made_by: Some((build.id, 1)),
        reference: name.to_string(),
        digest: None,
        size_bytes: 1,
    };
    stage.around.world.lock().unwrap().artifacts.insert(name, late);
    stage.until("the late artifact is gone", |a| a.world.lock().unwrap().artifacts.is_empty()).await;
    stage.until_clean().await;
}

#[tokio::test(start_paused = true)]
async fn a_name_that_others_took_is_left_to_them() {
    let stage = Stage::new().await;
    let taken = ArtifactName::new(&build_key(1, 1), 1);
    let foreign = Artifact {
        name: taken.clone(),
        made_by: None,
        reference: "somebody's".to_owned(),
        digest: None,
        size_bytes: 1,
    };
    stage.around.world.lock().unwrap().artifacts.insert(taken.clone(), foreign);
    let image = stage.image(explicit(1, 1)).await;
    assert_eq!(image.artifact, ArtifactName::new(&build_key(1, 1), 2));
    stage.until_clean().await;
    assert!(stage.around.world.lock().unwrap().artifacts.contains_key(&taken));
}

#[tokio::test(start_paused = true)]
async fn a_capture_that_surely_was_not_done_is_tried_again_under_the_same_name() {
    let stage = Stage::new().await;
    stage.around.world.lock().unwrap().capture_errors.push_back(EngineError::transient("429"));
    let image = stage.image(explicit(1, 1)).await;
    assert_eq!((stage.captures(), stage.artifacts()), (2, 1));
    assert_eq!(image.artifact, ArtifactName::new(&build_key(1, 1), 1));
}

#[tokio::test(start_paused = true)]
async fn a_build_that_is_cancelled_during_its_capture_leaves_no_artifact() {
    let stage = Stage::new().await;
    {
        let mut world = stage.around.world.lock().unwrap();
        world.capture_takes = Duration::from_secs(5);
        // It is captured in spite of being cancelled, within the grace.
        world.deaf = true;
    }
    let build = stage.submit(explicit(1, 1)).await;
    stage.until_state(build.id, BuildState::Finalizing).await;
    stage.builds.cancel(build.id).await.unwrap();
    let cause = stage.builds.wait(build.id).await.unwrap().unwrap_err();
    assert_eq!(cause.kind, CauseKind::Cancelled);
    stage.until_clean().await;
    assert_eq!((stage.artifacts(), stage.live_images(), stage.workspaces()), (0, 0, 0));
}
