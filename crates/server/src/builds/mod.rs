//! Image builds in the server: from a repository to an image that a sandbox is made of.
//!
//! Owns what the orchestration of `sandglass-builds` needs of this server (git, the runtime, disk and database behind its ports) and the one
//! handle, [`Builds`], that the create path and the HTTP edge use. Does not own the decisions about builds, nor sandboxes.
//!
//! The way of a sandbox that starts from a repository:
//!
//! 1. [`Builds::check`] while the request is answered: grammar, schemes, hosts, paths.
//! 2. [`Builds::locate`] in the background: commits, recipe and keys. Its failures are the reasons `repository_unreachable`,
//!    `repository_auth_failed`, `ref_not_found` and `image_build_failed` (an unreadable recipe), see [`reason`].
//! 3. [`Builds::submit`] with the sandbox as waiter: an image, which is held for the sandbox from then on; a build to wait for; or neither.
//! 4. [`Builds::wait`] when it is a build. The image is held for every sandbox that waited when the build succeeds.
//! 5. [`Builds::served`] or [`Builds::refused`] when the sandbox could or could not be made of the image.
//! 6. [`Builds::leave`] when the sandbox goes while it waits, [`Builds::release`] when it goes later. Both are idempotent.
//!
//! After a restart [`Builds::release_absent`] is told which sandboxes there are.

mod archive;
mod attempt;
mod by_engine;
mod chain;
mod copy;
mod dockerfile;
mod engine;
mod git;
mod increment;
pub mod inside;
mod instructions;
mod layers;
mod locate;
mod orders;
mod ownership;
mod prebuilds;
mod push_places;
mod pushes;
mod redaction;
mod sanitise;
mod set_up;
mod start;
mod told;
mod vault;

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use sandglass_builds::logs::DiskLogs;
pub use sandglass_builds::{
    build::{BuildState, Cause, CauseKind, ImageBuild, Origin},
    decide::removal::Insistence,
    driver::{BuildError, Ended},
    image::{Image, ImageState},
    key::TagName,
    logs::{Follower, Piece, Until},
    ports::{BuildFilter, BuildStore, ImageFilter, LogError, ResolveError, ResolveErrorKind},
    prebuild::Prebuild,
    submission::{Fit, Joined, Match, Policy, Refusal, Secret, Submitted},
};
use sandglass_repository::{
    Source,
    recipe::{Recipe, RecipeRequest},
};

pub use orders::{Order, Want, reason};
pub use prebuilds::PrebuildSource;
pub use push_places::{PushPlace, PushPlaces};
pub use pushes::{Push, Pushed, Webhook};
pub(crate) use set_up::SCRIPT;
pub(crate) use start::check_platform;
pub use start::{Parts, StartError};

/// The builds of this server. Cheap to clone.
#[derive(Clone)]
pub struct Builds {
    inner: Arc<Inner>,
}

impl std::fmt::Debug for Builds {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Builds")
    }
}

struct Inner {
    driver: sandglass_builds::Builds,
    store: Arc<dyn BuildStore>,
    logs: Arc<DiskLogs>,
    locator: Arc<locate::Locator>,
    policy: sandglass_repository::Policy,
    timeout: Duration,
    max_timeout: Duration,
    /// Secrets of webhooks, one file a prebuild.
    webhooks: pushes::WebhookSecrets,
}

/// One repository whose commit is known.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LocatedMember {
    /// Without credentials.
    pub url: String,
    /// Absolute path in the sandbox.
    pub path: String,
    /// What was asked for; `None`: the remote's HEAD.
    pub reference: Option<String>,
    /// The full commit it stands for.
    pub commit: String,
    /// Of the ref: `refs/heads/main`; absent for commits.
    pub full_name: Option<String>,
}

/// A source whose commits, recipe and keys are known.
#[derive(Debug, Clone)]
pub struct Located {
    /// The primary repository first.
    pub members: Vec<LocatedMember>,
    /// With what runs at every boot: `start`, `remote_env`, `remote_user`.
    pub recipe: Arc<Recipe>,
    /// What a sandbox starts from when there is no image of the repository: the recipe's base, or the server's own. `None` when only a build
    /// makes one, which is so for a Dockerfile.
    pub base_image: Option<String>,
    pub resolved: sandglass_builds::submission::Resolved,
    namespace: Option<String>,
}

impl Builds {
    /// The rows, for lists.
    pub fn store(&self) -> &Arc<dyn BuildStore> {
        &self.inner.store
    }

    /// The logs.
    pub fn logs(&self) -> &Arc<DiskLogs> {
        &self.inner.logs
    }

    /// The orchestration, for what this handle adds nothing to.
    pub fn driver(&self) -> &sandglass_builds::Builds {
        &self.inner.driver
    }

    /// How long a build may take when nobody says.
    pub fn default_timeout(&self) -> Duration {
        self.inner.timeout
    }

    /// The longest time that a request may give a build.
    pub fn max_timeout(&self) -> Duration {
        self.inner.max_timeout
    }

    /// Stops working and returns when nothing runs any more. Builds that were under way are begun again by the next server.
    pub async fn shut(&self) {
        self.inner.driver.shut().await;
    }
}

/// An order without secrets, as prebuilds keep it.
fn plain_order(namespace: Option<String>, source: Source, recipe: RecipeRequest) -> Order {
    Order { namespace, source, recipe, secrets: BTreeMap::new(), platform: None }
}
