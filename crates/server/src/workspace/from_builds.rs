//! Images as the builds of this server make them.

use std::{collections::BTreeMap, convert::Infallible, time::Duration};

use async_trait::async_trait;
use sandglass_builds::build::BuildState;
use sandglass_repository::{
    RepositorySpec, Source, SpecError,
    recipe::{Command, Recipe, RecipeRequest, Step},
};
use sandglass_sandbox::{
    ImageBuildId, ImageId, SandboxId,
    lifecycle::boot::{Failure, Reason},
    source::{BuildMatch, BuildPolicy, CacheResult, FoundImage, ImageMatch, ImageNews},
    workspace::{self, Hook, OnFailure},
};
use tokio_util::sync::CancellationToken;
use tracing::warn;

use super::{
    heard::Heard,
    images::{Images, Wanted},
};
use crate::builds::{
    BuildError, Builds, Cause, CauseKind, Fit, Image, ImageFilter, ImageState, Located, Match, Order, Policy,
    Refusal, ResolveError, ResolveErrorKind, SCRIPT, Secret, Submitted, Want,
};

/// How many of the newest images of a repository are looked at for one that can be used.
const LOOKED_AT: u64 = 20;
/// How often it is looked whether another server has begun a build that is waited for, which only the store tells.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// The same for the steps of one that it has begun: there may be many who wait.
const LOOK_WHILE_BUILDING: Duration = Duration::from_secs(10);

/// See the module documentation.
#[derive(Clone)]
pub struct FromBuilds(pub Builds);

#[async_trait]
impl Images for FromBuilds {
    fn check(&self, repository: &RepositorySpec) -> Result<Source, SpecError> {
        self.0.check(repository)
    }

    fn longest_build(&self) -> Option<Duration> {
        Some(self.0.max_timeout())
    }

    async fn find(
        &self,
        wanted: Wanted<'_>,
        told: &(dyn Fn(ImageNews) + Send + Sync),
    ) -> Result<FoundImage, Failure> {
        let cancel = CancellationToken::new();
        let _cancelled = cancel.clone().drop_guard();
        let order = order(&wanted)?;
        let located = self.0.locate(&order, &cancel).await.map_err(|e| not_located(&e))?;
        let want = want(&wanted)?;
        let submitted = self.0.submit(&located, &want, wanted.sandbox).await;
        match submitted.map_err(|e| refused(&e))? {
            Submitted::Image { image, fit, .. } => {
                let found = match fit {
                    Fit::Exact => (CacheResult::Hit, ImageMatch::Exact),
                    Fit::Tagged => (CacheResult::Hit, ImageMatch::Tag),
                    Fit::Compatible => (CacheResult::Behind, ImageMatch::Compatible),
                };
                Ok(of_image(&located, &wanted, &image, found))
            }
            Submitted::Build { build, .. } => {
                let image = self.await_build(build.id, told).await?;
                Ok(of_image(&located, &wanted, &image, (CacheResult::Built, ImageMatch::Exact)))
            }
            Submitted::WithoutImage => without_image(&located, &wanted),
        }
    }

    async fn newest(&self, image: ImageId) -> Option<ImageId> {
        let store = self.0.store();
        let known = store.image(image).await.ok().flatten()?;
        let filter = ImageFilter {
            namespace: known.lineage.namespace,
            states: vec![ImageState::Ready],
            repository_key: Some(known.repository_key),
        };
        let (page, _) = store.images(&filter, 0, LOOKED_AT).await.ok()?;
        let usable = |image: &&Image| {
            image.usable()
                && image.lineage.runtime == known.lineage.runtime
                && image.platform == known.platform
        };
        page.iter().find(usable).map(|image| image.id)
    }

    async fn made(&self, image: ImageId, made: bool) {
        let done = if made { self.0.served(image).await } else { self.0.refused(image).await.map(drop) };
        if let Err(error) = done {
            warn!(%image, %error, "it could not be recorded how an image served");
        }
    }

    async fn release(
        &self,
        sandbox: SandboxId,
        build: Option<ImageBuildId>,
        image: Option<ImageId>,
    ) -> Result<(), String> {
        let ignored = |done: Result<(), BuildError>| match done {
            Ok(()) | Err(BuildError::NotFound | BuildError::ImageNotFound) => Ok(()),
            Err(error) => Err(error.to_string()),
        };
        if let Some(build) = build {
            ignored(self.0.leave(build, sandbox).await)?;
        }
        match image {
            Some(image) => ignored(self.0.release(image, sandbox).await),
            None => Ok(()),
        }
    }

    async fn release_absent(&self, present: &(dyn Fn(SandboxId) -> bool + Sync)) {
        if let Err(error) = self.0.release_absent(present).await {
            warn!(%error, "images stay held for sandboxes that are gone");
        }
    }
}

impl FromBuilds {
    async fn await_build(
        &self,
        build: ImageBuildId,
        told: &(dyn Fn(ImageNews) + Send + Sync),
    ) -> Result<Box<Image>, Failure> {
        let ended = self.0.wait(build);
        let heard = Heard::new(told);
        tokio::pin!(ended);
        let ended = tokio::select! {
            biased;
            ended = &mut ended => ended,
            never = self.watch(build, &heard) => match never {},
        };
        if let Ok(row) = self.0.driver().build(build).await {
            heard.steps(&row);
        }
        ended.map_err(|e| refused(&e))?.map_err(|cause| of_cause(&cause))
    }

    /// Tells what becomes of a build, for ever.
    async fn watch(&self, build: ImageBuildId, heard: &Heard<'_>) -> Infallible {
        loop {
            let Ok((row, mut changes)) = self.0.driver().subscribe(build).await else {
                tokio::time::sleep(LOOK_EVERY).await;
                continue;
            };
            heard.row(&row);
            let look = if row.state == BuildState::Queued { LOOK_EVERY } else { LOOK_WHILE_BUILDING };
            let again = tokio::time::sleep(look);
            tokio::pin!(again);
            loop {
                if let Some(row) = changes.borrow_and_update().clone() {
                    heard.row(&row);
                }
                tokio::select! {
                    Ok(()) = changes.changed() => {}
                    () = &mut again => break,
                }
            }
        }
    }
}

fn order(wanted: &Wanted<'_>) -> Result<Order, Failure> {
    let recipe = match &wanted.asked.image_build.recipe {
        serde_json::Value::Null => RecipeRequest::Auto,
        asked => serde_json::from_value(asked.clone())
            .map_err(|e| Failure::new(Reason::ImageBuildFailed, format!("imageBuild.recipe: {e}")))?,
    };
    let secrets =
        wanted.build_secrets.iter().map(|(name, value)| (name.clone(), Secret::new(value.as_str())));
    Ok(Order {
        namespace: wanted.namespace.map(str::to_owned),
        source: wanted.repository.clone(),
        recipe,
        secrets: secrets.collect(),
        platform: wanted.platform.map(str::to_owned),
    })
}

fn want(wanted: &Wanted<'_>) -> Result<Want, Failure> {
    let asked = &wanted.asked.image_build;
    let tag = asked.tag.as_deref().map(str::parse).transpose();
    let tag = tag.map_err(|_| Failure::new(Reason::ImageBuildFailed, "imageBuild.tag is not a tag"))?;
    Ok(Want {
        policy: match asked.policy {
            BuildPolicy::IfMissing => Policy::IfMissing,
            BuildPolicy::Always => Policy::Always,
            BuildPolicy::Never => Policy::Never,
            BuildPolicy::RequireCached => Policy::RequireCached,
        },
        fit: match asked.fit {
            BuildMatch::Compatible => Match::Compatible,
            BuildMatch::Exact => Match::Exact,
        },
        tag,
        timeout: asked.timeout_seconds.map(Duration::from_secs),
    })
}

fn of_image(
    located: &Located,
    wanted: &Wanted<'_>,
    image: &Image,
    (cache, fit): (CacheResult, ImageMatch),
) -> FoundImage {
    FoundImage {
        reference: image.reference.clone(),
        image: Some(image.id),
        build: Some(image.image_build_id),
        cache: Some(cache),
        fit: Some(fit),
        commits: commits(located),
        refs: refs(located),
        user: user(&located.recipe),
        source: workspace::Source::Image,
        setup: Vec::new(),
        start: hooks(&located.recipe, &located.recipe.start, wanted),
        env: environment(&located.recipe),
    }
}

/// The box starts from the recipe's base, and setup runs in it.
fn without_image(located: &Located, wanted: &Wanted<'_>) -> Result<FoundImage, Failure> {
    let reference = located.base_image.clone().ok_or_else(|| {
        let message = "the repository's Dockerfile has to be built, and the request forbids that";
        Failure::new(Reason::ImageNotCached, message)
    })?;
    let mut env = located.recipe.container_env.clone();
    env.extend(environment(&located.recipe));
    Ok(FoundImage {
        reference,
        image: None,
        build: None,
        cache: Some(CacheResult::Base),
        fit: None,
        commits: commits(located),
        refs: refs(located),
        user: user(&located.recipe),
        source: workspace::Source::Fresh,
        setup: hooks(&located.recipe, &located.recipe.setup, wanted),
        start: hooks(&located.recipe, &located.recipe.start, wanted),
        env,
    })
}

fn commits(located: &Located) -> BTreeMap<String, String> {
    located.members.iter().map(|member| (member.path.clone(), member.commit.clone())).collect()
}

fn refs(located: &Located) -> BTreeMap<String, String> {
    let named = located.members.iter();
    named.filter_map(|member| Some((member.path.clone(), member.full_name.clone()?))).collect()
}

/// Who works in the repositories.
fn user(recipe: &Recipe) -> Option<String> {
    recipe.remote_user.clone().or_else(|| recipe.container_user.clone())
}

fn environment(recipe: &Recipe) -> BTreeMap<String, String> {
    let given = recipe.remote_env.iter();
    given.filter_map(|(name, value)| Some((name.clone(), value.clone()?))).collect()
}

/// Steps of a recipe as hooks of the primary repository, each with its own name.
fn hooks(recipe: &Recipe, steps: &[Step], wanted: &Wanted<'_>) -> Vec<Hook> {
    let cwd = wanted.asked.repositories.first().map(|primary| primary.path.clone().into());
    let mut hooks: Vec<Hook> = Vec::new();
    for step in steps {
        for (label, command) in commands(&step.name, &step.command) {
            let taken = hooks.iter().filter(|hook| hook.label.starts_with(&label)).count();
            let label = if taken == 0 { label } else { format!("{label} {}", taken + 1) };
            hooks.push(Hook {
                label,
                command: workspace::Command {
                    command,
                    env: BTreeMap::new(),
                    cwd: cwd.clone(),
                    user: user(recipe),
                },
                timeout_seconds: None,
                cap_seconds: None,
                on_failure: OnFailure::Fail,
            });
        }
    }
    hooks
}

/// What of a step is run one after the other. What may run at the same time does not have to.
fn commands(label: &str, command: &Command) -> Vec<(String, Vec<String>)> {
    let words = |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect();
    match command {
        Command::Shell(text) => vec![(label.to_owned(), words(&["/bin/sh", "-c", text]))],
        Command::Exec(argv) => vec![(label.to_owned(), argv.clone())],
        Command::Script(path) => vec![(label.to_owned(), words(&["/bin/sh", "-c", SCRIPT, path]))],
        Command::Parallel(named) => {
            let each = named.iter().map(|(name, command)| commands(&format!("{label}.{name}"), command));
            each.flatten().collect()
        }
    }
}

fn not_located(error: &ResolveError) -> Failure {
    let reason = match error.kind {
        ResolveErrorKind::Unreachable => Reason::RepositoryUnreachable,
        ResolveErrorKind::AuthFailed => Reason::RepositoryAuthFailed,
        ResolveErrorKind::RefNotFound => Reason::RefNotFound,
        ResolveErrorKind::InvalidRecipe => Reason::ImageBuildFailed,
    };
    Failure {
        phase: Some("resolve".into()),
        output_tail: error.tail.clone().unwrap_or_default(),
        ..Failure::new(reason, error.message.clone())
    }
}

fn refused(error: &BuildError) -> Failure {
    match error {
        BuildError::Refused(Refusal::NotCached) => Failure::new(Reason::ImageNotCached, error.to_string()),
        BuildError::Refused(Refusal::QueueFull(_)) => Failure::new(Reason::QuotaExceeded, error.to_string()),
        BuildError::Refused(Refusal::FailedRecently { cause, .. }) => {
            Failure { message: error.to_string(), ..of_cause(cause) }
        }
        other => Failure::new(Reason::ImageBuildFailed, other.to_string()),
    }
}

fn of_cause(cause: &Cause) -> Failure {
    let reason = match cause.kind {
        CauseKind::TimedOut => Reason::ImageBuildTimeout,
        _ => Reason::ImageBuildFailed,
    };
    Failure {
        phase: cause.step.map(|step| step.word().to_owned()),
        exit_code: cause.exit_code,
        output_tail: cause.tail.clone(),
        ..Failure::new(reason, cause.message.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_run_one_after_the_other_under_names_of_their_own() {
        let parallel = Command::Parallel(BTreeMap::from([
            ("a".to_owned(), Command::Shell("echo $HOME".into())),
            ("b".to_owned(), Command::Exec(vec!["true".into()])),
        ]));
        let seen = commands("postCreateCommand", &parallel);
        assert_eq!(seen[0].0, "postCreateCommand.a");
        assert_eq!(seen[0].1, ["/bin/sh", "-c", "echo $HOME"]);
        assert_eq!(seen[1], ("postCreateCommand.b".to_owned(), vec!["true".to_owned()]));
        // As in a build: an image without bash runs it all the same.
        assert_eq!(commands("s", &Command::Script("x.sh".into()))[0].1, ["/bin/sh", "-c", SCRIPT, "x.sh"]);
    }

    #[test]
    fn a_builds_failure_keeps_its_step_code_and_tail() {
        let mut cause = Cause::new(CauseKind::UserFailure, "setup ended with 1");
        cause.exit_code = Some(1);
        cause.tail = "boom".into();
        let failure = of_cause(&cause);
        assert_eq!((failure.reason, failure.exit_code), (Reason::ImageBuildFailed, Some(1)));
        assert_eq!(failure.output_tail, "boom");
        assert_eq!(of_cause(&Cause::timed_out(Duration::from_secs(9))).reason, Reason::ImageBuildTimeout);
        let refusal = BuildError::Refused(Refusal::NotCached);
        assert_eq!(refused(&refusal).reason, Reason::ImageNotCached);
    }
}
