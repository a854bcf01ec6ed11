//! One attempt of a build: its checkouts on this machine, and its sandboxes.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use sandglass_builds::{
    build::StepName,
    ports::{EngineError, Job, UserFailure},
};
use sandglass_repository::recipe::Recipe;
use sandglass_sandbox::{
    ImageBuildId, SandboxId,
    ports::{
        RuntimeErrorKind,
        captures::RunConfig,
        runtime::{RuntimeError, StartPlan},
    },
    spec::{Entrypoint, MutableFacts, Secrets, Spec},
};
use sha2::{Digest, Sha256};
use tempfile::NamedTempFile;

use super::{
    engine::SandboxEngine,
    inside::{Command, Door, InsideError},
};

/// What a build sandbox bears, so that it is found again.
pub(super) const ROLE: (&str, &str) = ("role", "build");
pub(super) const BUILD: &str = "image-build";
pub(super) const ATTEMPT: &str = "attempt";
/// Where a build keeps what is not part of the image.
pub(super) const OWN: &str = "/tmp/.sandglass-build";

/// See the module documentation.
pub(super) struct Attempt {
    /// The checkouts, in the order of the plan.
    pub(super) folders: Vec<PathBuf>,
    pub(super) recipe: Recipe,
    pub(super) workshop: Option<Workshop>,
    /// Gone when dropped.
    pub(super) scratch: tempfile::TempDir,
}

/// A sandbox in which something is built.
#[derive(Debug, Clone)]
pub(super) struct Workshop {
    pub(super) id: SandboxId,
    pub(super) door: Door,
    /// How what is built in it is run.
    pub(super) config: RunConfig,
}

/// The name of an attempt's `number`-th sandbox, known before it exists.
pub(super) fn sandbox_id(build: ImageBuildId, attempt: u32, number: usize) -> SandboxId {
    let digest = Sha256::digest(format!("build sandbox {build} {attempt} {number}"));
    let hex: String = digest[..16].iter().map(|byte| format!("{byte:02x}")).collect();
    let text = format!("{}-{}-{}-{}-{}", &hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..]);
    // Every text of this form is an id.
    text.parse().unwrap_or_else(|_| SandboxId::random())
}

pub(super) fn of_runtime(error: RuntimeError) -> EngineError {
    match error.kind {
        RuntimeErrorKind::Invalid => EngineError::Rejected(error.to_string()),
        RuntimeErrorKind::NotFound => EngineError::NotFound(error.to_string()),
        RuntimeErrorKind::InUse | RuntimeErrorKind::Exists => EngineError::Conflict(error.to_string()),
        RuntimeErrorKind::ImagePull
        | RuntimeErrorKind::Unavailable
        | RuntimeErrorKind::Exhausted
        | RuntimeErrorKind::Failed => EngineError::transient(error.to_string()),
    }
}

pub(super) fn of_disk(what: &str) -> impl Fn(std::io::Error) -> EngineError + '_ {
    move |error| EngineError::transient(format!("cannot {what}: {error}"))
}

fn of_inside(error: InsideError) -> EngineError {
    EngineError::transient(error.to_string())
}

/// A step of the user's that failed.
pub(super) fn user_failure(
    step: StepName,
    exit_code: Option<i32>,
    message: impl Into<String>,
) -> EngineError {
    EngineError::User(UserFailure { step, exit_code, message: message.into() })
}

impl SandboxEngine {
    /// Makes a build sandbox of the image, or finds the one that was made.
    pub(super) async fn open(&self, job: &Job, number: usize, image: &str) -> Result<Workshop, EngineError> {
        let id = sandbox_id(job.build, job.attempt, number);
        let mut spec = Spec::new(image, Entrypoint::AgentOnly);
        spec.limits = self.settings.limits;
        let progress = |_| {};
        self.uncancelled(job, async {
            self.runtime.prepare(&spec, &Secrets::default(), &progress).await.map_err(of_runtime)
        })
        .await?;
        let local = self.captures.find(image).await.map_err(of_runtime)?;
        let local =
            local.ok_or_else(|| EngineError::transient(format!("the image {image} is gone again")))?;
        let now = self.clock.now();
        let metadata = [
            (ROLE.0.to_owned(), ROLE.1.to_owned()),
            (BUILD.to_owned(), job.build.to_string()),
            (ATTEMPT.to_owned(), job.attempt.to_string()),
        ];
        let plan = StartPlan {
            spec,
            // It ends by itself if nobody ends it.
            facts: MutableFacts {
                expires_at: now.checked_add(self.settings.lifetime),
                metadata: BTreeMap::from(metadata),
            },
            created_at: now,
            agent_token: token(),
            route_token: token(),
        };
        let observed = self
            .uncancelled(job, async {
                self.runtime.start(id, &plan, &Secrets::default()).await.map_err(of_runtime)
            })
            .await?;
        let door = Door::of(&observed)
            .ok_or_else(|| EngineError::Rejected("build sandboxes have no address here".into()))?;
        let workshop = Workshop { id, door, config: local.config };
        self.quietly(job, &workshop, &["mkdir", "-p", OWN]).await?;
        // What is changed from now on is newer.
        self.quietly(job, &workshop, &["touch", &format!("{OWN}/began")]).await?;
        Ok(workshop)
    }

    /// The call, unless the build has to end before.
    pub(super) async fn uncancelled<T>(
        &self,
        job: &Job,
        call: impl Future<Output = Result<T, EngineError>>,
    ) -> Result<T, EngineError> {
        tokio::select! {
            done = call => done,
            () = job.cancelled.cancelled() => Err(EngineError::Cancelled),
        }
    }

    /// Runs a command whose output goes into the log; its exit code.
    pub(super) async fn run_command(
        &self,
        job: &Job,
        step: StepName,
        workshop: &Workshop,
        command: &Command,
    ) -> Result<i32, EngineError> {
        let (tell, mut lines) = tokio::sync::mpsc::unbounded_channel::<String>();
        let log = job.log.clone();
        let writing = async move {
            while let Some(line) = lines.recv().await {
                log.write(step, line.as_bytes()).await;
            }
        };
        let mut output = move |line: &str| {
            let _ = tell.send(format!("{line}\n"));
        };
        let running = async {
            let code = self.inside.run(&workshop.door, command, &mut output).await;
            // The writer ends with the last sender.
            drop(output);
            code
        };
        let (code, ()) = self.uncancelled(job, async { Ok(tokio::join!(running, writing)) }).await?;
        code.map_err(of_inside)
    }

    /// Runs a command of our own that has to succeed, without the log.
    pub(super) async fn quietly(
        &self,
        job: &Job,
        workshop: &Workshop,
        argv: &[&str],
    ) -> Result<Vec<String>, EngineError> {
        let command = Command {
            argv: argv.iter().map(|word| (*word).to_owned()).collect(),
            ids: Some((0, 0)),
            ..Command::default()
        };
        let mut lines = Vec::new();
        let ran = self
            .uncancelled(job, async {
                let mut output = |line: &str| lines.push(line.to_owned());
                self.inside.run(&workshop.door, &command, &mut output).await.map_err(of_inside)
            })
            .await?;
        match ran {
            0 => Ok(lines),
            code => {
                let program = argv.first().unwrap_or(&"");
                let said = lines.last().map_or("", String::as_str);
                let message = format!("`{program}` in the build sandbox ended with {code}: {said}");
                Err(EngineError::Rejected(message))
            }
        }
    }

    /// Unpacks an archive of absolute paths.
    pub(super) async fn unpack(
        &self,
        job: &Job,
        workshop: &Workshop,
        archive: NamedTempFile,
    ) -> Result<(), EngineError> {
        let there = format!("{OWN}/files.tar");
        self.uncancelled(job, async {
            self.inside.put(&workshop.door, archive.path(), &there, 0o600).await.map_err(of_inside)
        })
        .await?;
        self.quietly(job, workshop, &["tar", "-xpf", &there, "-C", "/"]).await?;
        self.quietly(job, workshop, &["rm", "-f", &there]).await?;
        Ok(())
    }

    /// User and group of a name in the sandbox; of `user`, `user:group`, or numbers.
    pub(super) async fn ids(
        &self,
        job: &Job,
        workshop: &Workshop,
        user: &str,
    ) -> Result<Option<(u32, u32)>, EngineError> {
        if user.is_empty() {
            return Ok(None);
        }
        let (name, group) = user.split_once(':').map_or((user, None), |(name, group)| (name, Some(group)));
        let number = |text: &str| text.trim().parse::<u32>().ok();
        let asked = |lines: Vec<String>| lines.first().and_then(|line| number(line));
        let unknown = || EngineError::Rejected(format!("there is no user {user} in the image"));
        let uid = match number(name) {
            Some(uid) => uid,
            None => asked(self.quietly(job, workshop, &["id", "-u", name]).await?).ok_or_else(unknown)?,
        };
        let gid = match group {
            Some(group) => match number(group) {
                Some(gid) => gid,
                None => {
                    let script = "awk -F: -v g=\"$0\" '$1 == g {print $3}' /etc/group";
                    asked(self.quietly(job, workshop, &["sh", "-c", script, group]).await?)
                        .ok_or_else(unknown)?
                }
            },
            None if number(name).is_some() => 0,
            None => asked(self.quietly(job, workshop, &["id", "-g", name]).await?).ok_or_else(unknown)?,
        };
        Ok(Some((uid, gid)))
    }

    /// Removes every sandbox of the attempt, also those that another server made.
    pub(super) async fn remove_sandboxes(
        &self,
        build: ImageBuildId,
        attempt: u32,
    ) -> Result<(), EngineError> {
        // One that is being made is in no list.
        let first = sandbox_id(build, attempt, 0);
        self.runtime.remove(first, std::time::Duration::ZERO).await.map_err(of_runtime)?;
        let (build, attempt) = (build.to_string(), attempt.to_string());
        for observed in self.runtime.list().await.map_err(of_runtime)? {
            let has = |name: &str, value: &str| observed.facts.metadata.get(name).is_some_and(|v| v == value);
            if has(ROLE.0, ROLE.1) && has(BUILD, &build) && has(ATTEMPT, &attempt) {
                self.runtime.remove(observed.id, std::time::Duration::ZERO).await.map_err(of_runtime)?;
            }
        }
        Ok(())
    }
}

/// What only this server has to know.
fn token() -> String {
    // Two random ids: 244 bits.
    format!("{}{}", uuid::Uuid::new_v4().simple(), uuid::Uuid::new_v4().simple())
}

/// The folder of a checkout on this machine.
pub(super) fn folder(scratch: &Path, number: usize) -> PathBuf {
    scratch.join(format!("checkout-{number}"))
}
