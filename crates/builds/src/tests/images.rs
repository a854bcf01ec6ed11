use super::*;
use crate::{
    decide::removal::Insistence,
    driver::BuildError,
    ports::EngineError,
    submission::{Fit, Refusal},
};

#[tokio::test(start_paused = true)]
async fn an_image_that_is_refused_twice_is_not_used_again() {
    let stage = Stage::new().await;
    let bad = stage.image(explicit(1, 1)).await;
    assert_eq!(stage.builds.refused(bad.id).await.unwrap().state, ImageState::Ready);
    assert_eq!(stage.builds.refused(bad.id).await.unwrap().state, ImageState::Quarantined);
    // The next sandbox gets another one built.
    let build = stage.submit(sandbox(1, 1, "a")).await;
    let good = stage.builds.wait(build.id).await.unwrap().unwrap();
    assert_ne!(good.id, bad.id);
    // Unused, it goes.
    stage
        .until("the bad one is gone", |a| {
            a.tables.lock().unwrap().images[&bad.id].state == ImageState::Deleted
        })
        .await;
    assert_eq!(stage.artifacts(), 1);
}

#[tokio::test(start_paused = true)]
async fn an_image_whose_artifact_somebody_removed_is_built_again() {
    let stage = Stage::new().await;
    let lost = stage.image(sandbox(1, 1, "a")).await;
    stage.around.world.lock().unwrap().artifacts.clear();
    let build = stage.submit(sandbox(1, 1, "b")).await;
    let again = stage.builds.wait(build.id).await.unwrap().unwrap();
    assert_ne!(again.id, lost.id);
    // Who has it keeps it; nobody else begins to use it.
    assert!(stage.image_row(lost.id).blocked);
    stage.builds.release(lost.id, "a").await.unwrap();
    stage
        .until("the lost one is forgotten", |a| {
            a.tables.lock().unwrap().images[&lost.id].state == ImageState::Deleted
        })
        .await;
    assert_eq!(stage.artifacts(), 1);
}

#[tokio::test(start_paused = true)]
async fn an_image_that_served_meanwhile_is_forgiven() {
    let stage = Stage::new().await;
    let image = stage.image(explicit(1, 1)).await;
    stage.builds.refused(image.id).await.unwrap();
    stage.builds.served(image.id).await.unwrap();
    assert_eq!(stage.builds.refused(image.id).await.unwrap().restore_failures, 1);
}

#[tokio::test(start_paused = true)]
async fn an_image_in_use_is_kept_unless_forced_and_then_goes_with_its_last_user() {
    let stage = Stage::new().await;
    let image = stage.image(sandbox(1, 1, "a")).await;
    let kept = stage.builds.delete_image(image.id, Insistence::IfUnused).await;
    assert!(matches!(kept, Err(BuildError::InUse(1))), "{kept:?}");

    let blocked = stage.builds.delete_image(image.id, Insistence::Force).await.unwrap();
    assert!(blocked.blocked && blocked.state == ImageState::Ready);
    // Nobody begins to use it, and it stays for who does.
    assert!(matches!(stage.builds.acquire(image.id, "b").await, Err(BuildError::Unusable(_))));
    let never = Submission { policy: Policy::RequireCached, ..sandbox(1, 1, "b") };
    assert!(matches!(stage.builds.submit(never).await, Err(BuildError::Refused(Refusal::NotCached))));
    tokio::time::sleep(Duration::from_secs(600)).await;
    assert_eq!(stage.artifacts(), 1);

    stage.builds.release(image.id, "a").await.unwrap();
    stage.until("it is gone", |a| a.world.lock().unwrap().artifacts.is_empty()).await;
    stage
        .until("and known to be", |a| a.tables.lock().unwrap().images[&image.id].state == ImageState::Deleted)
        .await;
}

#[tokio::test(start_paused = true)]
async fn a_removal_is_tried_until_the_engine_says_that_nothing_is_there() {
    let stage = Stage::new().await;
    let image = stage.image(explicit(1, 1)).await;
    stage.around.world.lock().unwrap().failing_removals.extend([
        Some(EngineError::Conflict("a container uses it".to_owned())),
        // Said to be removed, and is not.
        None,
        Some(EngineError::transient("the engine restarts")),
    ]);
    stage.builds.delete_image(image.id, Insistence::IfUnused).await.unwrap();
    assert_eq!(stage.image_row(image.id).state, ImageState::Deleting);
    stage
        .until("it is gone", |a| a.tables.lock().unwrap().images[&image.id].state == ImageState::Deleted)
        .await;
    assert_eq!((stage.artifacts(), stage.image_row(image.id).removal.tries), (0, 3));
}

#[tokio::test(start_paused = true)]
async fn retention_keeps_what_is_newest_referenced_tagged_or_among_the_last_used() {
    let stage = Stage::new().await;
    let mut images = Vec::new();
    for commit in 1..=6 {
        let mut submission = explicit(1, commit);
        if commit == 1 {
            submission.tag = Some("stable".parse().unwrap());
        }
        if commit == 2 {
            submission.waiter = Some("sandbox".to_owned());
        }
        images.push(stage.image(submission).await.id);
        tokio::time::sleep(Duration::from_secs(60)).await;
    }
    let state = |a: &Surroundings, n: usize| a.tables.lock().unwrap().images[&images[n]].state;
    stage.until("what is too much is gone", |a| state(a, 2) == ImageState::Deleted).await;
    tokio::time::sleep(Duration::from_secs(60)).await;
    let states: Vec<_> = (0..6).map(|n| state(&stage.around, n)).collect();
    use ImageState::{Deleted, Ready, Superseded};
    assert_eq!(states, [Superseded, Superseded, Deleted, Superseded, Superseded, Ready]);
    assert_eq!(stage.artifacts(), 5);
}

#[tokio::test(start_paused = true)]
async fn a_tag_goes_before_the_recipe_and_moves_to_what_is_built() {
    let stage = Stage::new().await;
    let latest = || Some("latest".parse().unwrap());
    let first = stage.image(Submission { tag: latest(), ..explicit(1, 1) }).await;
    // Another recipe, and the same name: what the name says is used.
    let by_name = stage.builds.submit(Submission { tag: latest(), ..sandbox(2, 1, "a") }).await.unwrap();
    let Submitted::Image { image, fit, .. } = by_name else { panic!("{by_name:?}") };
    assert_eq!((image.id, fit), (first.id, Fit::Tagged));
    // Exactly this commit: the name's image does not fit, so another is built and named.
    let second = stage.image(Submission { tag: latest(), ..explicit(2, 1) }).await;
    assert!(stage.image_row(first.id).tags.is_empty());
    assert_eq!(stage.image_row(second.id).tags, [latest().unwrap()]);
    stage.builds.move_tag(None, "github.com/acme/web", latest().unwrap(), first.id).await.unwrap();
    assert_eq!(stage.image_row(first.id).tags, [latest().unwrap()]);
    let elsewhere =
        stage.builds.move_tag(Some("tenant"), "github.com/acme/web", latest().unwrap(), first.id).await;
    assert!(matches!(elsewhere, Err(BuildError::ImageNotFound)));
}

#[tokio::test(start_paused = true)]
async fn holders_that_are_gone_are_released() {
    let stage = Stage::new().await;
    let image = stage.image(sandbox(1, 1, "gone")).await;
    stage.builds.acquire(image.id, "there").await.unwrap();
    stage.around.world.lock().unwrap().step_takes = Duration::from_secs(600);
    let waited = stage.submit(sandbox(2, 1, "gone")).await;
    stage.builds.release_absent(|holder| holder == "there").await.unwrap();
    assert_eq!(stage.image_row(image.id).holders, 1);
    assert!(stage.builds.wait(waited.id).await.unwrap().is_err());
}

#[tokio::test(start_paused = true)]
async fn ended_builds_and_removed_images_are_forgotten_after_a_while() {
    let hour = Duration::from_secs(3600);
    let stage = Stage::with(Surroundings::default(), 0, |s| s.rules.ended_kept = hour).await;
    let image = stage.image(explicit(1, 1)).await;
    let failed = stage.submit(explicit(2, 1)).await;
    stage.builds.cancel(failed.id).await.ok();
    let _ = stage.builds.wait(failed.id).await.unwrap();
    tokio::time::sleep(Duration::from_secs(3000)).await;
    assert_eq!(stage.builds_made(), 2);
    tokio::time::sleep(Duration::from_secs(1200)).await;
    // The build of an image that is there is kept with it.
    assert!(
        !stage.around.tables.lock().unwrap().builds.contains_key(&failed.id)
            || stage.row(failed.id).image.is_some()
    );
    assert!(stage.around.tables.lock().unwrap().builds.contains_key(&image.image_build_id));
    stage.builds.delete_image(image.id, Insistence::IfUnused).await.unwrap();
    tokio::time::sleep(Duration::from_secs(5000)).await;
    let tables = stage.around.tables.lock().unwrap();
    assert!(!tables.images.contains_key(&image.id) && !tables.builds.contains_key(&image.image_build_id));
}
