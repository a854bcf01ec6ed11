//! The instructions of a Dockerfile that change files: `RUN`, and the last step of `COPY`.

use std::collections::BTreeMap;

use sandglass_builds::{
    build::StepName,
    ports::{EngineError, Job},
};
use sandglass_repository::dockerfile::{Copy, Mount, Run, Script, SecretMount};

use super::{
    archive::Dress,
    attempt::{Attempt, OWN, Workshop, user_failure},
    copy::{CopyError, Ground, Wanted, pack},
    dockerfile::{StageState, below, failed},
    engine::SandboxEngine,
    inside::Command,
};

impl SandboxEngine {
    pub(super) async fn run_instruction(
        &self,
        job: &Job,
        attempt: &Attempt,
        state: &StageState,
        run: &Run,
        line: usize,
    ) -> Result<(), EngineError> {
        let workshop = &state.workshop;
        let mut env = state.variables.run_environment();
        let mut links = Vec::new();
        for mount in &run.mounts {
            if let Mount::Secret(secret) = mount {
                links.extend(self.mount_secret(job, attempt, workshop, (secret, &mut env), line).await?);
            }
        }
        let argv = match run.script() {
            Script::Exec(words) => words,
            Script::Shell(text) => state.shell.iter().cloned().chain([text]).collect(),
            Script::Program(text) => {
                let program = format!("{OWN}/program");
                self.put_text(job, attempt, workshop, (&text, &program, 0o755)).await?;
                vec![program]
            }
        };
        let cwd = match workshop.config.working_dir.as_str() {
            "" => "/".to_owned(),
            path => path.to_owned(),
        };
        let ids = self.ids(job, workshop, &workshop.config.user).await?;
        let command = Command { argv, cwd: Some(cwd), env, ids };
        let code = self.run_command(job, StepName::Build, workshop, &command).await?;
        for (target, hidden) in links {
            self.quietly(job, workshop, &["rm", "-f", &target, &hidden]).await?;
        }
        match code {
            0 => Ok(()),
            code => {
                Err(user_failure(StepName::Build, Some(code), format!("line {line}: RUN ended with {code}")))
            }
        }
    }

    /// Shows a secret to one `RUN`: as a variable, or as a file that lies in memory with a link at its place. Where the link and the file are.
    async fn mount_secret(
        &self,
        job: &Job,
        attempt: &Attempt,
        workshop: &Workshop,
        (secret, env): (&SecretMount, &mut BTreeMap<String, String>),
        line: usize,
    ) -> Result<Option<(String, String)>, EngineError> {
        let Some(value) = job.confidential.secrets.get(&secret.id) else {
            return match secret.required {
                true => Err(failed(format!("line {line}: the secret {} was not given", secret.id))),
                false => Ok(None),
            };
        };
        if let Some(name) = &secret.env {
            env.insert(name.clone(), value.expose().to_owned());
            if secret.target.is_none() {
                return Ok(None);
            }
        }
        let target = secret.target.clone().unwrap_or_else(|| format!("/run/secrets/{}", secret.id));
        let target = below(&workshop.config.working_dir, &target);
        let hidden = format!("/dev/shm/.sandglass-secret-{}", uuid::Uuid::new_v4().simple());
        self.put_text(job, attempt, workshop, (value.expose(), &hidden, secret.mode)).await?;
        let owner = format!("{}:{}", secret.uid, secret.gid);
        self.quietly(job, workshop, &["chown", &owner, &hidden]).await?;
        let parent = target.rsplit_once('/').map_or("/", |(parent, _)| parent);
        if !parent.is_empty() {
            self.quietly(job, workshop, &["mkdir", "-p", parent]).await?;
        }
        self.quietly(job, workshop, &["ln", "-sf", &hidden, &target]).await?;
        Ok(Some((target, hidden)))
    }

    async fn put_text(
        &self,
        job: &Job,
        attempt: &Attempt,
        workshop: &Workshop,
        (text, target, mode): (&str, &str, u32),
    ) -> Result<(), EngineError> {
        let written = tempfile::NamedTempFile::new_in(attempt.scratch.path())
            .and_then(|file| std::fs::write(file.path(), text).map(|()| file));
        let file =
            written.map_err(|error| EngineError::transient(format!("cannot write a file: {error}")))?;
        self.uncancelled(job, async {
            let put = self.inside.put(&workshop.door, file.path(), target, mode).await;
            put.map_err(|error| EngineError::transient(error.to_string()))
        })
        .await
    }

    pub(super) async fn copy(
        &self,
        job: &Job,
        attempt: &Attempt,
        (state, line): (&StageState, usize),
        ground: &Ground,
        copy: &Copy,
    ) -> Result<(), EngineError> {
        let workshop = &state.workshop;
        let refused = |error: &dyn std::fmt::Display| failed(format!("line {line}: COPY: {error}"));
        let mut destination = below(&workshop.config.working_dir, &copy.destination);
        if copy.destination == "." || copy.destination.ends_with("/.") {
            destination.truncate(destination.trim_end_matches('.').len());
        }
        let there = "if [ -d \"$0\" ]; then echo yes; fi";
        let is_folder =
            !self.quietly(job, workshop, &["/bin/sh", "-c", there, &destination]).await?.is_empty();
        let mode = match copy.chmod.as_deref().map(|mode| u32::from_str_radix(mode, 8)) {
            None => None,
            Some(Ok(mode)) => Some(mode),
            Some(Err(_)) => return Err(refused(&"--chmod is not a number in octal digits")),
        };
        let ids = match &copy.chown {
            Some(owner) => self.ids(job, workshop, owner).await?,
            // What comes from another stage keeps its owner.
            None if copy.from.is_some() => None,
            None => Some((0, 0)),
        };
        let dress = Dress { ids, mode };
        let (root, ignore) = (ground.root.clone(), ground.ignore.clone());
        let (copy, scratch) = (copy.clone(), attempt.scratch.path().to_owned());
        let packed = tokio::task::spawn_blocking(move || {
            let wanted = Wanted { copy: &copy, destination, is_folder, dress };
            pack(&Ground { root, ignore }, &wanted, &scratch)
        });
        let packed = packed.await.map_err(|error| EngineError::transient(error.to_string()))?;
        let archive = packed.map_err(|error| match error {
            CopyError::Asked(message) => refused(&message),
            CopyError::Disk(error) => EngineError::transient(format!("cannot pack files: {error}")),
        })?;
        self.unpack(job, workshop, archive).await
    }
}
