//! The driver against the fakes, and the properties of the decisions.

mod admission;
mod capture;
mod coalescing;
mod crash;
mod deadlines;
mod failures;
mod images;
mod leases;
mod log_reading;
mod logs;
mod prebuilds;
mod retention;
mod schedule;
mod states;

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use sandglass_sandbox::{Clock, ImageBuildId};

use crate::{
    Builds, Settings,
    build::{BuildState, Checkout, ImageBuild, Origin, Plan, Recipe, RecipeKind},
    image::{Image, ImageState},
    key::{BuildKey, RecipeKey},
    submission::{Confidential, Match, Policy, Resolved, Secret, Submission, Submitted},
    testing::{Faults, Surroundings},
};

pub(super) fn recipe_key(n: u8) -> RecipeKey {
    format!("{n:02x}").repeat(32).parse().unwrap()
}

/// Differs in the first twelve digits for each recipe and commit.
pub(super) fn build_key(recipe: u8, commit: u8) -> BuildKey {
    format!("{recipe:02x}{commit:02x}").repeat(16).parse().unwrap()
}

pub(super) fn resolved(recipe: u8, commit: u8) -> Resolved {
    Resolved {
        plan: Plan {
            repository_key: "github.com/acme/web".to_owned(),
            checkouts: vec![Checkout {
                url: "https://github.com/acme/web".to_owned(),
                reference: Some("main".to_owned()),
                commit: format!("{commit:02x}").repeat(20),
                path: "/workspace/web".to_owned(),
            }],
            recipe: Recipe {
                kind: RecipeKind::Hooks,
                details: serde_json::json!({ "setup": ".sandbox/setup.sh" }),
            },
            platform: "linux/amd64".to_owned(),
            agent_generation: 1,
            confidential: false,
            incremental: true,
        },
        key: build_key(recipe, commit),
        recipe_key: recipe_key(recipe),
        confidential: Confidential::default(),
    }
}

pub(super) fn with_secret(mut resolved: Resolved) -> Resolved {
    resolved.confidential.secrets.insert("NPM_TOKEN".to_owned(), Secret::new("hunter2"));
    resolved
}

/// What a request for the build itself asks for.
pub(super) fn explicit(recipe: u8, commit: u8) -> Submission {
    Submission {
        namespace: None,
        resolved: resolved(recipe, commit),
        policy: Policy::IfMissing,
        fit: Match::Exact,
        force: false,
        tag: None,
        origin: Origin::Explicit,
        waiter: None,
        timeout: Duration::from_secs(1800),
        metadata: BTreeMap::new(),
    }
}

/// What a sandbox asks for.
pub(super) fn sandbox(recipe: u8, commit: u8, waiter: &str) -> Submission {
    Submission {
        origin: Origin::Sandbox,
        waiter: Some(waiter.to_owned()),
        fit: Match::Compatible,
        ..explicit(recipe, commit)
    }
}

/// One server in its surroundings.
pub(super) struct Stage {
    pub(super) around: Surroundings,
    pub(super) faults: Arc<Faults>,
    pub(super) builds: Builds,
}

impl Stage {
    pub(super) async fn new() -> Self {
        Self::with(Surroundings::default(), 0, |_| {}).await
    }

    pub(super) async fn with(around: Surroundings, run: usize, tune: impl FnOnce(&mut Settings)) -> Self {
        let faults = Arc::new(Faults::default());
        let mut settings = around.settings(run);
        tune(&mut settings);
        let builds = Builds::start(around.ports(&faults), settings).await.unwrap();
        Self { around, faults, builds }
    }

    /// The server ends at once; another one goes on.
    pub(super) async fn restarted(self, run: usize) -> Self {
        self.faults.kill();
        drop(self.builds);
        Self::with(self.around, run, |_| {}).await
    }

    pub(super) async fn submit(&self, submission: Submission) -> ImageBuild {
        match self.builds.submit(submission).await.unwrap() {
            Submitted::Build { build, .. } => *build,
            other => panic!("no build: {other:?}"),
        }
    }

    /// Builds and answers the image.
    pub(super) async fn image(&self, submission: Submission) -> Image {
        let build = self.submit(submission).await;
        *self.builds.wait(build.id).await.unwrap().unwrap()
    }

    pub(super) fn row(&self, id: ImageBuildId) -> ImageBuild {
        self.around.tables.lock().unwrap().builds[&id].clone()
    }

    pub(super) fn image_row(&self, id: crate::ImageId) -> Image {
        self.around.tables.lock().unwrap().images[&id].clone()
    }

    /// Waits until the condition holds; time passes by itself when all wait.
    pub(super) async fn until(&self, what: &str, holds: impl Fn(&Surroundings) -> bool) {
        let tried = tokio::time::timeout(Duration::from_secs(7200), async {
            while !holds(&self.around) {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        });
        assert!(tried.await.is_ok(), "never: {what}");
    }

    pub(super) async fn until_state(&self, id: ImageBuildId, state: BuildState) {
        self.until(state.word(), |a| a.tables.lock().unwrap().builds[&id].state == state).await;
    }

    /// Waits until nothing is owed to the world.
    pub(super) async fn until_clean(&self) {
        self.until("nothing is owed", |a| {
            a.tables.lock().unwrap().builds.values().all(|b| b.state.terminal() && b.obligations.is_empty())
        })
        .await;
    }

    pub(super) fn captures(&self) -> usize {
        self.around.world.lock().unwrap().captures.len()
    }

    pub(super) fn artifacts(&self) -> usize {
        self.around.world.lock().unwrap().artifacts.len()
    }

    pub(super) fn workspaces(&self) -> usize {
        self.around.world.lock().unwrap().workspaces.len()
    }

    pub(super) fn live_images(&self) -> usize {
        let live = |image: &&Image| image.state != ImageState::Deleted;
        self.around.tables.lock().unwrap().images.values().filter(live).count()
    }

    pub(super) fn builds_made(&self) -> usize {
        self.around.tables.lock().unwrap().builds.len()
    }

    pub(super) fn now(&self) -> sandglass_sandbox::Timestamp {
        self.around.clock.now()
    }
}
