//! A server that ends, or whose calls fail, at every point of a build: afterwards there is exactly one artifact, or none and a clean failure.

use std::collections::BTreeSet;

use proptest::prelude::*;

use super::*;
use crate::{
    build::CauseKind,
    decide::removal::Insistence,
    driver::BuildError,
    testing::{Fault, Faults},
};

/// Starts a server with a fault; `None` when it crashed while it started.
async fn start(around: &Surroundings, run: usize, faults: &Arc<Faults>) -> Option<Builds> {
    let starting = async {
        loop {
            if let Ok(builds) = Builds::start(around.ports(faults), around.settings(run)).await {
                return builds;
            }
        }
    };
    tokio::select! {
        builds = starting => Some(builds),
        () = faults.crash() => None,
    }
}

/// Where the build that is disturbed starts from an older image, and needs secrets.
async fn with_older_image() -> Surroundings {
    let around = Surroundings::default();
    let stage = Stage::with(around.clone(), 100, |_| {}).await;
    stage.image(explicit(1, 2)).await;
    stage.until_clean().await;
    stage.builds.shut().await;
    around.world.lock().unwrap().captures.clear();
    around
}

/// A server that is asked for an image, asks again if the answer is lost, and waits for the end; until it crashed.
async fn serve(around: &Surroundings, run: usize, faults: Arc<Faults>) {
    let Some(builds) = start(around, run, &faults).await else { return };
    let served = async {
        loop {
            let resolved = with_secret(resolved(1, 1));
            match builds.submit(Submission { resolved, fit: Match::Exact, ..sandbox(1, 1, "waiter") }).await {
                Ok(Submitted::Build { build, .. }) => {
                    while builds.wait(build.id).await.is_err() {}
                    break;
                }
                Ok(Submitted::WithoutImage) => panic!("an image was asked for"),
                Ok(Submitted::Image { .. }) | Err(BuildError::Refused(_)) => break,
                Err(_) => {}
            }
        }
        // What is left is cleared after the end; a late artifact is waited for a quarter of an hour.
        for _ in 0..1000 {
            if around
                .tables
                .lock()
                .unwrap()
                .builds
                .values()
                .all(|b| b.state.terminal() && b.obligations.is_empty())
            {
                break;
            }
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
    };
    tokio::select! {
        () = served => {}
        () = faults.crash() => {}
    }
}

/// What has to be true when no server fails any more.
fn check(around: &Surroundings, what: &str) {
    let of_key = |key: &BuildKey| *key == build_key(1, 1);
    let (tables, world) = (around.tables.lock().unwrap(), around.world.lock().unwrap());
    let images: BTreeSet<_> = tables.images.values().map(|image| image.artifact.clone()).collect();
    let artifacts: BTreeSet<_> = world.artifacts.keys().cloned().collect();
    assert_eq!(images, artifacts, "{what}: every artifact is an image's, and every image has one");
    let made = tables.images.values().filter(|image| of_key(&image.key)).count();
    assert!(made <= 1, "{what}: {artifacts:?}");
    assert!(world.workspaces.is_empty(), "{what}: {:?}", world.workspaces);
    assert!(tables.builds.values().all(|b| b.state.terminal() && b.obligations.is_empty()), "{what}");
    for build in tables.builds.values() {
        let succeeded = build.state == BuildState::Succeeded;
        assert_eq!(succeeded, build.image.is_some(), "{what}");
        if !succeeded {
            let kind = build.cause.as_ref().unwrap().kind;
            let clean = matches!(
                kind,
                CauseKind::CaptureLost
                    | CauseKind::Unavailable
                    | CauseKind::Interrupted
                    | CauseKind::Cancelled
            );
            assert!(clean, "{what}: {:?}", build.cause);
        }
        let captured: BTreeSet<_> = world.captures.iter().collect();
        assert_eq!(captured.len(), world.captures.len(), "{what}: no name was captured twice");
    }
    let held = tables.holders.iter().all(|(_, holder)| holder == "waiter");
    assert!(held, "{what}: {:?}", tables.holders);
}

async fn points() -> usize {
    let around = with_older_image().await;
    let faults = Arc::new(Faults::default());
    let builds = start(&around, 0, &faults).await.unwrap();
    let request = Submission { fit: Match::Exact, ..sandbox(1, 1, "waiter") };
    let Submitted::Build { build, .. } = builds.submit(request).await.unwrap() else { panic!("no build") };
    builds.wait(build.id).await.unwrap().unwrap();
    tokio::time::sleep(Duration::from_secs(1)).await;
    faults.passed()
}

#[tokio::test(start_paused = true)]
async fn a_server_that_ends_at_any_point_leaves_one_artifact_or_none_and_a_clean_failure() {
    let points = points().await;
    assert!(points > 60, "{points}");
    for at in 0..points {
        let around = with_older_image().await;
        let faults = Arc::new(Faults::at(at, Fault::Crash));
        serve(&around, 0, faults.clone()).await;
        serve(&around, 1, Arc::new(Faults::default())).await;
        check(&around, &format!("crash at {at}, {:?}", faults.name(at)));
    }
}

#[tokio::test(start_paused = true)]
async fn a_call_that_fails_at_any_point_leaves_one_artifact_or_none_and_a_clean_failure() {
    let points = points().await;
    for at in 0..points {
        let around = with_older_image().await;
        let faults = Arc::new(Faults::at(at, Fault::Fail));
        serve(&around, 0, faults.clone()).await;
        check(&around, &format!("failure at {at}, {:?}", faults.name(at)));
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, ..ProptestConfig::default() })]

    #[test]
    fn servers_that_end_again_and_again_leave_one_artifact_or_none(
        runs in prop::collection::vec((0_usize..160, any::<bool>()), 1..6)
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build().unwrap();
        runtime.block_on(async {
            let around = with_older_image().await;
            for (run, (at, crash)) in runs.iter().enumerate() {
                let fault = if *crash { Fault::Crash } else { Fault::Fail };
                serve(&around, run, Arc::new(Faults::at(*at, fault))).await;
            }
            serve(&around, runs.len(), Arc::new(Faults::default())).await;
            check(&around, &format!("{runs:?}"));
        });
    }
}

#[tokio::test(start_paused = true)]
async fn a_waiter_that_leaves_at_any_point_leaves_an_image_that_nobody_holds_or_nothing() {
    let (mut cancelled, mut made) = (0, 0);
    for at in 0..points().await {
        let around = with_older_image().await;
        let faults = Arc::new(Faults::default());
        let builds = start(&around, 0, &faults).await.unwrap();
        let request = Submission { fit: Match::Exact, ..sandbox(1, 1, "waiter") };
        let Submitted::Build { build, .. } = builds.submit(request).await.unwrap() else {
            panic!("no build")
        };
        let ended = || around.tables.lock().unwrap().builds[&build.id].state.terminal();
        while faults.passed() < at && !ended() {
            tokio::task::yield_now().await;
        }
        builds.leave(build.id, "waiter").await.unwrap();
        match builds.wait(build.id).await.unwrap() {
            Ok(_) => made += 1,
            Err(cause) => {
                assert_eq!(cause.kind, CauseKind::Cancelled);
                cancelled += 1;
            }
        }
        let clean = |b: &ImageBuild| b.state.terminal() && b.obligations.is_empty();
        while !around.tables.lock().unwrap().builds.values().all(clean) {
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
        check(&around, &format!("left at {at}, {:?}", faults.name(at)));
        assert!(around.tables.lock().unwrap().holders.is_empty());
    }
    assert!(cancelled > 20 && made > 0, "{cancelled} {made}");
}

#[tokio::test(start_paused = true)]
async fn a_server_that_ends_at_any_point_of_a_removal_leaves_nothing() {
    let mut at = 0;
    loop {
        let around = with_older_image().await;
        let id = *around.tables.lock().unwrap().images.keys().next().unwrap();
        let faults = Arc::new(Faults::at(at, Fault::Crash));
        if let Some(builds) = start(&around, 0, &faults).await {
            let removed = async {
                builds.delete_image(id, Insistence::IfUnused).await.unwrap();
                tokio::time::sleep(Duration::from_secs(1)).await;
            };
            tokio::select! {
                () = removed => break,
                () = faults.crash() => {}
            }
        }
        let stage = Stage::with(around, 1, |_| {}).await;
        stage.builds.delete_image(id, Insistence::IfUnused).await.unwrap();
        stage
            .until("it is gone", |a| a.tables.lock().unwrap().images[&id].state == ImageState::Deleted)
            .await;
        assert_eq!(stage.artifacts(), 0, "crash at {at}, {:?}", faults.name(at));
        at += 1;
    }
    assert!(at > 15, "{at}");
}

#[tokio::test(start_paused = true)]
async fn a_build_whose_secrets_ended_with_their_server_fails_cleanly() {
    let mut stage = Stage::new().await;
    stage.around.world.lock().unwrap().step_takes = Duration::from_secs(60);
    let build = stage.submit(Submission { resolved: with_secret(resolved(1, 1)), ..explicit(1, 1) }).await;
    stage.until_state(build.id, BuildState::Running).await;
    stage.around.vault = Arc::default();
    let stage = stage.restarted(1).await;
    let cause = stage.builds.wait(build.id).await.unwrap().unwrap_err();
    assert_eq!(cause.kind, CauseKind::SecretsLost);
    stage.until_clean().await;
    assert_eq!(stage.workspaces(), 0);
}

#[tokio::test(start_paused = true)]
async fn a_build_that_ends_its_server_every_time_is_given_up() {
    let mut stage = Stage::new().await;
    stage.around.world.lock().unwrap().step_takes = Duration::from_secs(60);
    let build = stage.submit(explicit(1, 1)).await;
    for run in 1..=4 {
        let attempt = u32::try_from(run).unwrap();
        stage
            .until("its next attempt", |a| a.tables.lock().unwrap().builds[&build.id].attempt == attempt)
            .await;
        stage = stage.restarted(run).await;
    }
    let cause = stage.builds.wait(build.id).await.unwrap().unwrap_err();
    assert_eq!((cause.kind, stage.row(build.id).attempt), (CauseKind::Interrupted, 4));
    stage.until_clean().await;
    assert_eq!(stage.workspaces(), 0);
}
