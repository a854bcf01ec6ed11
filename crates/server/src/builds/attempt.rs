//! One attempt of a build: its checkouts on this machine, and its sandboxes.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    sync::atomic::AtomicUsize,
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
    sealing,
    spec::{Entrypoint, MutableFacts, Secrets, Spec},
};
use sha2::{Digest, Sha256};
use tempfile::NamedTempFile;
use tracing::{info, warn};

use super::{
    engine::SandboxEngine,
    inside::{Command, Door, InsideError},
    told,
};

/// What a build sandbox bears, so that it is found again.
pub(super) const ROLE: (&str, &str) = ("role", "build");
pub(super) const BUILD: &str = "image-build";
pub(super) const ATTEMPT: &str = "attempt";
/// Whose build it is, where several servers share an engine.
pub(super) const BUILDER: &str = "builder";
/// Where a build keeps what is not part of the image.
pub(super) const OWN: &str = "/tmp/.sandglass-build";

/// How variables begin that tell the agent, or the start script before it, what to do.
const STEERING: &[&str] = &["BOOTSTRAP_", "EXECD_", "OPENSANDBOX_", "OPEN_SANDBOX_"];

/// Bytes that a command of our own may answer with.
const ANSWER_MOST: usize = 1 << 20;

/// See the module documentation.
pub(super) struct Attempt {
    /// The checkouts, in the order of the plan.
    pub(super) folders: Vec<PathBuf>,
    pub(super) recipe: Recipe,
    pub(super) workshop: Option<Workshop>,
    /// Whether the workshop was made of an older commit's image.
    pub(super) from_parent: bool,
    /// Sandboxes beside those of stages.
    pub(super) more: AtomicUsize,
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
    /// How large the image is that it was made of.
    pub(super) image_bytes: u64,
    /// What changed since then is of the build: by the sandbox's clock, in nanoseconds since 1970.
    pub(super) began: i64,
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
        spec.env = unsaid(&local.config.env);
        let now = self.clock.now();
        let metadata = [
            (ROLE.0.to_owned(), ROLE.1.to_owned()),
            (BUILD.to_owned(), job.build.to_string()),
            (ATTEMPT.to_owned(), job.attempt.to_string()),
            (BUILDER.to_owned(), self.settings.builder.clone()),
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
            delivery: Vec::new(),
            root_agent: true,
        };
        let observed = self
            .uncancelled(job, async {
                self.runtime.start(id, &plan, &Secrets::default()).await.map_err(of_runtime)
            })
            .await?;
        let door = Door::of(&observed, self.settings.host)
            .ok_or_else(|| EngineError::Rejected("build sandboxes have no address here".into()))?;
        let mut workshop =
            Workshop { id, door, config: local.config, image_bytes: local.size_bytes, began: 0 };
        let clock = [sealing::PROGRAM, sealing::WORD, sealing::CLOCK];
        let now = self.quietly(job, &workshop, &clock).await?;
        let now = now.first().and_then(|line| line.trim().parse().ok());
        workshop.began =
            now.ok_or_else(|| EngineError::transient("the build sandbox does not tell its time"))?;
        self.begin(job, &workshop).await?;
        Ok(workshop)
    }

    /// Makes the folder of the build's own.
    pub(super) async fn begin(&self, job: &Job, workshop: &Workshop) -> Result<(), EngineError> {
        self.quietly(job, workshop, &["mkdir", "-p", OWN]).await.map(drop)
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
        let (told, writing) = told::into_log(&job.log, step);
        let mut output = move |line: &str| told.line(line);
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
        let (mut lines, mut room) = (Vec::new(), Some(ANSWER_MOST));
        let ran = self
            .uncancelled(job, async {
                let mut output = |line: &str| {
                    // A line costs its header too.
                    room = room.and_then(|room: usize| room.checked_sub(line.len() + 24));
                    if room.is_some() {
                        lines.push(line.to_owned());
                    }
                };
                self.inside.run(&workshop.door, &command, &mut output).await.map_err(of_inside)
            })
            .await?;
        match ran {
            _ if room.is_none() => {
                let program = argv.first().unwrap_or(&"");
                let message =
                    format!("`{program}` in the build sandbox wrote more than {} KiB", ANSWER_MOST >> 10);
                Err(EngineError::Rejected(message))
            }
            0 => Ok(lines),
            code => {
                let program = argv.first().unwrap_or(&"");
                let said: String = lines.last().map_or("", String::as_str).chars().take(500).collect();
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

    /// Removes this server's sandboxes whose builds nobody knows any more. What cannot be removed ends by itself.
    pub(super) async fn remove_forgotten(&self, is_known: impl Fn(&str) -> bool) {
        let all = match self.runtime.list().await {
            Ok(all) => all,
            Err(error) => return warn!(%error, "it is not known which build sandboxes there are"),
        };
        for observed in all {
            let of = |name: &str| observed.facts.metadata.get(name).map(String::as_str);
            let ours = of(ROLE.0) == Some(ROLE.1) && of(BUILDER) == Some(self.settings.builder.as_str());
            if !ours || of(BUILD).is_none_or(&is_known) {
                continue;
            }
            info!(sandbox = %observed.id, "a build sandbox that no build knows is removed");
            if let Err(error) = self.runtime.remove(observed.id, std::time::Duration::ZERO).await {
                warn!(sandbox = %observed.id, %error, "it could not be removed");
            }
        }
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

/// The name of a server among those that share an engine: of its own salt, which nobody else has.
pub(super) fn builder(salt: &[u8]) -> String {
    Sha256::digest([b"builder ", salt].concat())[..8].iter().map(|byte| format!("{byte:02x}")).collect()
}

/// What an image tells the agent by its environment is meant for sandboxes of it, not for the one in which a build goes on: there it says
/// nothing. The image that comes of it keeps what it says.
fn unsaid(env: &[(String, String)]) -> Vec<(String, String)> {
    let steers = |name: &str| STEERING.iter().any(|prefix| name.starts_with(prefix));
    env.iter().filter(|(name, _)| steers(name)).map(|(name, _)| (name.clone(), String::new())).collect()
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

#[cfg(test)]
mod tests {
    use super::unsaid;

    #[test]
    fn only_what_steers_the_agent_is_unsaid() {
        let pairs =
            [("PATH", "/bin"), ("BOOTSTRAP_CMD", "exit 3"), ("EXECD_CLONE3_COMPAT", "x"), ("MY_EXECD_", "1")];
        let env: Vec<_> = pairs.map(|(name, value)| (name.to_owned(), value.to_owned())).into();
        let names: Vec<_> = unsaid(&env).into_iter().collect();
        let blank = |name: &str| (name.to_owned(), String::new());
        assert_eq!(names, [blank("BOOTSTRAP_CMD"), blank("EXECD_CLONE3_COMPAT")]);
    }
}
