//! Two servers on one store.

use super::*;
use crate::driver::Takeover;

async fn server(around: &Surroundings, run: usize) -> Stage {
    Stage::with(around.clone(), run, |settings| settings.takeover = Takeover::WhenExpired).await
}

#[tokio::test(start_paused = true)]
async fn a_build_of_a_server_that_is_alive_is_left_to_it() {
    let around = Surroundings::default();
    let first = server(&around, 0).await;
    around.world.lock().unwrap().step_takes = Duration::from_secs(300);
    let build = first.submit(explicit(1, 1)).await;
    first.until_state(build.id, BuildState::Running).await;
    let second = server(&around, 1).await;
    // The second one learns of the end although it does not work on it.
    assert!(second.builds.wait(build.id).await.unwrap().is_ok());
    assert_eq!((second.row(build.id).attempt, second.captures()), (1, 1));
}

#[tokio::test(start_paused = true)]
async fn a_build_of_a_server_that_is_gone_is_taken_over_when_its_lease_ran_out() {
    let around = Surroundings::default();
    let first = server(&around, 0).await;
    around.world.lock().unwrap().step_takes = Duration::from_secs(300);
    let build = first.submit(explicit(1, 1)).await;
    first.until_state(build.id, BuildState::Running).await;
    first.faults.kill();
    let gone = first.now();
    let second = server(&around, 1).await;
    second.until("taken over", |a| a.tables.lock().unwrap().builds[&build.id].attempt == 2).await;
    let after = gone.until(second.now());
    assert!(after >= Duration::from_secs(40) && after <= Duration::from_secs(90), "{after:?}");
    assert!(second.builds.wait(build.id).await.unwrap().is_ok());
    assert_eq!((second.artifacts(), second.row(build.id).last_fence), (1, 2));
    second.until_clean().await;
    assert_eq!(second.workspaces(), 0);
}

#[tokio::test(start_paused = true)]
async fn an_owner_that_was_taken_for_dead_stops_and_writes_nothing() {
    let around = Surroundings::default();
    let first = server(&around, 0).await;
    around.world.lock().unwrap().step_takes = Duration::from_secs(300);
    let build = first.submit(explicit(1, 1)).await;
    first.until_state(build.id, BuildState::Running).await;
    // Another server, sure to be alone, takes it over although the first one is alive.
    let second = Stage::with(around.clone(), 1, |_| {}).await;
    assert!(second.builds.wait(build.id).await.unwrap().is_ok());
    assert_eq!((second.captures(), second.artifacts(), second.live_images()), (1, 1, 1));
    assert_eq!(second.row(build.id).attempt, 2);
    first.until_clean().await;
    assert_eq!(first.workspaces(), 0);
}

#[tokio::test(start_paused = true)]
async fn a_server_that_is_shut_leaves_its_builds_to_the_next() {
    let stage = Stage::new().await;
    stage.around.world.lock().unwrap().step_takes = Duration::from_secs(300);
    let build = stage.submit(explicit(1, 1)).await;
    stage.until_state(build.id, BuildState::Running).await;
    stage.builds.shut().await;
    assert!(stage.builds.submit(explicit(2, 1)).await.is_err());
    let stage = Stage::with(stage.around, 1, |_| {}).await;
    assert!(stage.builds.wait(build.id).await.unwrap().is_ok());
}
