//! What of a recipe runs once: its features and its setup, in the build sandbox, with the repository at its place.

use std::collections::BTreeMap;

use futures_util::future::{BoxFuture, FutureExt, join_all};
use sandglass_builds::{
    build::StepName,
    ports::{EngineError, Job},
};
use sandglass_repository::recipe::{Command as Asked, FeatureScript};

use super::{
    attempt::{Attempt, Workshop, user_failure},
    engine::{SandboxEngine, with_environment},
    inside::Command,
};

/// Runs a script, its path being `$0`, with bash where there is one, otherwise with the shell that is always there.
pub(crate) const SCRIPT: &str =
    "if command -v bash >/dev/null 2>&1; then exec bash -- \"$0\"; else exec /bin/sh -- \"$0\"; fi";

/// Where and as whom the commands of a recipe run.
struct Place {
    cwd: String,
    env: BTreeMap<String, String>,
    ids: Option<(u32, u32)>,
}

impl SandboxEngine {
    pub(super) async fn set_up(&self, job: &Job, attempt: &mut Attempt) -> Result<(), EngineError> {
        let mut workshop = self.workshop(job, attempt).await?;
        let workspace = job.plan.checkouts[0].path.clone();
        let recipe = attempt.recipe.clone();
        for feature in &recipe.features {
            // The image of an older commit has them: they are part of what all commits of a recipe share.
            if !attempt.from_parent {
                self.install(job, &workshop, &workspace, feature).await?;
            }
            with_environment(&mut workshop.config, &feature.container_env);
        }
        with_environment(&mut workshop.config, &recipe.container_env);
        if let Some(user) = &recipe.container_user {
            workshop.config.user.clone_from(user);
        }
        let user = recipe.remote_user.clone().unwrap_or_else(|| workshop.config.user.clone());
        let place = Place {
            cwd: workspace.clone(),
            env: environment(job, &workshop, &recipe.remote_env),
            ids: self.ids(job, &workshop, &user).await?,
        };
        workshop.config.working_dir = workspace;
        attempt.workshop = Some(workshop.clone());
        for step in &recipe.setup {
            job.log.write(StepName::Setup, format!("--- {} ---\n", step.name).as_bytes()).await;
            let code = self.command(job, &workshop, &step.command, &place).await?;
            if code != 0 {
                let message = format!("{} ended with {code}", step.name);
                return Err(user_failure(StepName::Setup, Some(code), message));
            }
        }
        Ok(())
    }

    /// Runs one command of the recipe; several with names run at the same time, and the first that failed is the answer.
    fn command<'a>(
        &'a self,
        job: &'a Job,
        workshop: &'a Workshop,
        asked: &'a Asked,
        place: &'a Place,
    ) -> BoxFuture<'a, Result<i32, EngineError>> {
        async move {
            let argv = match asked {
                Asked::Shell(text) => vec!["/bin/sh".to_owned(), "-c".to_owned(), text.clone()],
                Asked::Exec(words) => words.clone(),
                Asked::Script(path) => {
                    let script = format!("{}/{path}", place.cwd);
                    vec!["/bin/sh".to_owned(), "-c".to_owned(), SCRIPT.to_owned(), script]
                }
                Asked::Parallel(named) => {
                    let all = named.values().map(|asked| self.command(job, workshop, asked, place));
                    let codes: Vec<i32> = join_all(all).await.into_iter().collect::<Result<_, _>>()?;
                    return Ok(codes.into_iter().find(|code| *code != 0).unwrap_or(0));
                }
            };
            let command =
                Command { argv, cwd: Some(place.cwd.clone()), env: place.env.clone(), ids: place.ids };
            self.run_command(job, StepName::Setup, workshop, &command).await
        }
        .boxed()
    }

    /// Runs the script of a feature as root, in its own folder.
    async fn install(
        &self,
        job: &Job,
        workshop: &Workshop,
        workspace: &str,
        feature: &FeatureScript,
    ) -> Result<(), EngineError> {
        job.log.write(StepName::Setup, format!("--- feature {} ---\n", feature.id).as_bytes()).await;
        let folder = format!("{workspace}/{}", feature.folder);
        let mut env = environment(job, workshop, &BTreeMap::new());
        env.extend(feature.options.clone());
        let command = Command {
            argv: vec![
                "/bin/sh".to_owned(),
                "-c".to_owned(),
                SCRIPT.to_owned(),
                format!("{folder}/install.sh"),
            ],
            cwd: Some(folder),
            env,
            ids: Some((0, 0)),
        };
        match self.run_command(job, StepName::Setup, workshop, &command).await? {
            0 => Ok(()),
            code => {
                let message = format!("the feature {} ended with {code}", feature.id);
                Err(user_failure(StepName::Setup, Some(code), message))
            }
        }
    }
}

/// What the commands of a recipe find in their environment: the image's, the recipe's, and the build's secrets.
fn environment(
    job: &Job,
    workshop: &Workshop,
    remote: &BTreeMap<String, Option<String>>,
) -> BTreeMap<String, String> {
    let mut env: BTreeMap<String, String> = workshop.config.env.iter().cloned().collect();
    for (name, value) in remote {
        match value {
            Some(value) => {
                let filled = fill_in(value, &env);
                env.insert(name.clone(), filled);
            }
            None => drop(env.remove(name)),
        }
    }
    let secrets = job.confidential.secrets.iter();
    env.extend(secrets.map(|(name, secret)| (name.clone(), secret.expose().to_owned())));
    env
}

/// `${containerEnv:NAME}` as the container has it.
fn fill_in(value: &str, env: &BTreeMap<String, String>) -> String {
    let mut filled = String::new();
    let mut rest = value;
    while let Some((before, after)) = rest.split_once("${containerEnv:") {
        filled.push_str(before);
        match after.split_once('}') {
            Some((name, after)) => {
                filled.push_str(env.get(name).map_or("", String::as_str));
                rest = after;
            }
            None => {
                rest = &rest[before.len()..];
                break;
            }
        }
    }
    filled.push_str(rest);
    filled
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variables_of_the_container_are_filled_in() {
        let env = BTreeMap::from([("PATH".to_owned(), "/bin".to_owned())]);
        assert_eq!(fill_in("${containerEnv:PATH}:/x", &env), "/bin:/x");
        assert_eq!(fill_in("a${containerEnv:NONE}b", &env), "ab");
        assert_eq!(fill_in("a${containerEnv:PATH", &env), "a${containerEnv:PATH");
    }
}
