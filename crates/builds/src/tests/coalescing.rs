use futures_util::future::join_all;

use super::*;
use crate::{
    build::CauseKind,
    build::StepName,
    ports::{EngineError, UserFailure},
    submission::Joined,
};

#[tokio::test(start_paused = true)]
async fn a_hundred_sandboxes_of_one_key_share_one_build() {
    let stage = Stage::new().await;
    stage.around.world.lock().unwrap().step_takes = Duration::from_secs(5);
    let submitted =
        join_all((0..100).map(|n| stage.builds.submit(sandbox(1, 1, &format!("sandbox-{n}"))))).await;
    let mut began = 0;
    let mut ids = std::collections::BTreeSet::new();
    for submitted in submitted {
        let Submitted::Build { build, joined } = submitted.unwrap() else { panic!("an image from nowhere") };
        began += usize::from(joined == Joined::Began);
        ids.insert(build.id);
    }
    assert_eq!((began, ids.len()), (1, 1));
    let id = *ids.first().unwrap();
    assert_eq!(stage.row(id).waiters.len(), 100);

    let images = join_all((0..100).map(|_| stage.builds.wait(id))).await;
    let images: std::collections::BTreeSet<_> = images.into_iter().map(|i| i.unwrap().unwrap().id).collect();
    assert_eq!(images.len(), 1);
    // Whoever waited uses it from the moment there is one.
    let image = stage.image_row(*images.first().unwrap());
    assert_eq!((image.holders, stage.captures()), (100, 1));
}

#[tokio::test(start_paused = true)]
async fn all_who_wait_for_a_build_that_fails_get_the_same_cause() {
    let stage = Stage::new().await;
    {
        let mut world = stage.around.world.lock().unwrap();
        world.step_takes = Duration::from_secs(5);
        let failure = UserFailure {
            step: StepName::Setup,
            exit_code: Some(1),
            message: "`npm ci` ended with exit code 1".to_owned(),
        };
        world.step_errors.entry(StepName::Setup).or_default().push_back(EngineError::User(failure));
    }
    let submitted =
        join_all((0..100).map(|n| stage.builds.submit(sandbox(1, 1, &format!("sandbox-{n}"))))).await;
    let Ok(Submitted::Build { build, .. }) = &submitted[0] else { panic!("no build") };
    let ended = join_all((0..100).map(|_| stage.builds.wait(build.id))).await;
    let causes: Vec<_> = ended.into_iter().map(|ended| ended.unwrap().unwrap_err()).collect();
    assert!(causes.iter().all(|cause| cause == &causes[0]));
    assert_eq!(causes[0].kind, CauseKind::UserFailure);
    assert_eq!((causes[0].step, causes[0].exit_code), (Some(StepName::Setup), Some(1)));
    assert!(
        causes[0].tail.ends_with("the setup step failed: `npm ci` ended with exit code 1\n"),
        "{}",
        causes[0].tail
    );
    assert_eq!(stage.builds_made(), 1);
}

#[tokio::test(start_paused = true)]
async fn the_last_waiter_to_leave_ends_a_build_that_was_begun_for_waiters() {
    let stage = Stage::new().await;
    stage.around.world.lock().unwrap().step_takes = Duration::from_secs(600);
    let build = stage.submit(sandbox(1, 1, "a")).await;
    stage.submit(sandbox(1, 1, "b")).await;
    stage.until_state(build.id, BuildState::Running).await;

    stage.builds.leave(build.id, "a").await.unwrap();
    let row = stage.row(build.id);
    assert_eq!((row.waiters.len(), row.cancel), (1, None));
    // Leaving twice, or without having waited, changes nothing.
    stage.builds.leave(build.id, "a").await.unwrap();
    stage.builds.leave(build.id, "nobody").await.unwrap();
    assert_eq!(stage.row(build.id).cancel, None);

    stage.builds.leave(build.id, "b").await.unwrap();
    let cause = stage.builds.wait(build.id).await.unwrap().unwrap_err();
    assert_eq!(cause.kind, CauseKind::Cancelled);
    stage.until_clean().await;
    assert_eq!((stage.workspaces(), stage.artifacts()), (0, 0));
    // It failed by nobody's fault, so it can be asked for again at once.
    stage.submit(sandbox(1, 1, "c")).await;
}

#[tokio::test(start_paused = true)]
async fn a_build_that_was_asked_for_itself_survives_its_waiters() {
    let stage = Stage::new().await;
    stage.around.world.lock().unwrap().step_takes = Duration::from_secs(60);
    let build = stage.submit(sandbox(1, 1, "a")).await;
    // Asked for later, it is independent from then on.
    assert_eq!(stage.submit(explicit(1, 1)).await.id, build.id);
    stage.builds.leave(build.id, "a").await.unwrap();
    assert!(stage.builds.wait(build.id).await.unwrap().is_ok());
}

#[tokio::test(start_paused = true)]
async fn a_waiter_that_leaves_after_the_end_lets_go_of_the_image() {
    let stage = Stage::new().await;
    let build = stage.submit(sandbox(1, 1, "a")).await;
    let image = stage.builds.wait(build.id).await.unwrap().unwrap();
    assert_eq!(stage.image_row(image.id).holders, 1);
    stage.builds.leave(build.id, "a").await.unwrap();
    assert_eq!(stage.image_row(image.id).holders, 0);
}

#[tokio::test(start_paused = true)]
async fn who_comes_while_a_build_is_being_cancelled_gets_another() {
    let stage = Stage::new().await;
    stage.around.world.lock().unwrap().step_takes = Duration::from_secs(60);
    let first = stage.submit(sandbox(1, 1, "a")).await;
    stage.until_state(first.id, BuildState::Running).await;
    stage.builds.cancel(first.id).await.unwrap();
    let second = stage.submit(sandbox(1, 1, "b")).await;
    assert_ne!(first.id, second.id);
    assert_eq!(stage.row(first.id).state, BuildState::Cancelled);
    assert!(stage.builds.wait(second.id).await.unwrap().is_ok());
}

#[tokio::test(start_paused = true)]
async fn a_moved_commit_starts_from_the_older_image_and_builds_its_own_once() {
    let stage = Stage::new().await;
    let old = stage.image(explicit(1, 1)).await;
    stage.around.world.lock().unwrap().step_takes = Duration::from_secs(60);

    let mut refreshing = std::collections::BTreeSet::new();
    for waiter in ["a", "b", "c"] {
        match stage.builds.submit(sandbox(1, 2, waiter)).await.unwrap() {
            Submitted::Image { image, fit, refreshing: build } => {
                assert_eq!((image.id, fit), (old.id, crate::submission::Fit::Compatible));
                refreshing.extend(build);
            }
            other => panic!("{other:?}"),
        }
    }
    assert_eq!((refreshing.len(), stage.builds_made()), (1, 2));
    assert_eq!(
        stage.image_row(old.id).holders,
        3 + u64::from(stage.row(*refreshing.first().unwrap()).parent_image.is_some())
    );

    // Who wants exactly this commit waits for the build that is under way.
    let exact = Submission { fit: Match::Exact, ..sandbox(1, 2, "d") };
    let build = stage.submit(exact).await;
    assert_eq!(Some(&build.id), refreshing.first());
    let new = stage.builds.wait(build.id).await.unwrap().unwrap();
    assert_eq!(new.checkouts[0].commit, "02".repeat(20));
    assert_eq!(stage.image_row(old.id).state, ImageState::Superseded);
    // It started from the older image, and let go of it.
    let parents: Vec<_> = stage
        .around
        .world
        .lock()
        .unwrap()
        .ran
        .iter()
        .filter(|r| r.0 == build.id)
        .map(|r| r.3.clone())
        .collect();
    assert!(parents.iter().all(|parent| parent.as_deref() == Some(old.reference.as_str())));
    stage.until_clean().await;
    assert_eq!(stage.image_row(old.id).holders, 3);
}

#[tokio::test(start_paused = true)]
async fn tenants_do_not_share_builds_or_images() {
    let stage = Stage::new().await;
    let of = |tenant: &str| Submission { namespace: Some(tenant.to_owned()), ..explicit(1, 1) };
    let a = stage.image(of("a")).await;
    let b = stage.image(of("b")).await;
    assert_ne!(a.id, b.id);
    // Their names differ although their keys do not.
    assert_eq!(
        (a.artifact.as_str(), b.artifact.as_str()),
        ("osb-img-010101010101-1", "osb-img-010101010101-2")
    );
}

/// The image that the build's first step was told to start from.
fn started_from(stage: &Stage, build: ImageBuildId) -> Option<String> {
    let world = stage.around.world.lock().unwrap();
    world.ran.iter().find(|ran| ran.0 == build).and_then(|ran| ran.3.clone())
}

#[tokio::test(start_paused = true)]
async fn a_build_starts_from_an_older_image_only_if_it_gains_by_it() {
    let stage = Stage::new().await;
    stage.around.world.lock().unwrap().step_takes = Duration::from_secs(1);
    let first = stage.image(explicit(1, 1)).await;
    assert_eq!(first.increments, 0);
    // The same commit again is wanted because something is wrong with what there is.
    let again = stage.image(Submission { force: true, ..explicit(1, 1) }).await;
    assert_eq!((started_from(&stage, again.image_build_id), again.increments), (None, 0));
    let moved = stage.image(explicit(1, 2)).await;
    assert_eq!(started_from(&stage, moved.image_build_id), Some(again.reference));
    assert_eq!(moved.increments, 1);
    // What was refused once is not built upon.
    stage.builds.refused(moved.id).await.unwrap();
    let wary = stage.image(explicit(1, 3)).await;
    assert_eq!((started_from(&stage, wary.image_build_id), wary.increments), (None, 0));
    // What has another way to save work does not start from an image.
    let mut other = explicit(2, 1);
    other.resolved.plan.incremental = false;
    stage.image(other.clone()).await;
    other.resolved.key = super::build_key(2, 2);
    let other = stage.image(other).await;
    assert_eq!(started_from(&stage, other.image_build_id), None);
    // Layers do not pile up for ever.
    let mut increments = Vec::new();
    for commit in 4..23 {
        increments.push(stage.image(explicit(1, commit)).await.increments);
    }
    assert_eq!(increments.iter().max(), Some(&16));
    assert_eq!(&increments[15..], [16, 0, 1, 2]);
}
