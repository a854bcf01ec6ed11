//! The last pass over a build sandbox: what must not become part of an image goes, and an image with a secret in it does not come to be.

use sandglass_builds::{
    build::StepName,
    ports::{EngineError, Job},
};
use sandglass_repository::redact::VALUE_MIN;

use super::{
    attempt::{Attempt, OWN, Workshop, of_disk, user_failure},
    engine::SandboxEngine,
    inside::InsideError,
    redaction,
};

/// A folder in memory that every sandbox has, so that values never touch what is captured.
const IN_MEMORY: &str = "/dev/shm";
/// Files that keep what somebody typed, or how to log in.
const TRACES: &str = "for home in /root /home/*; do rm -f \"$home/.bash_history\" \"$home/.ash_history\" \
    \"$home/.sh_history\" \"$home/.zsh_history\" \"$home/.git-credentials\" \"$home/.netrc\" 2>/dev/null; done; true";
/// Files that changed since the build began and hold one of the values; their names alone.
const SEARCH: &str =
    "find / -xdev -type f -newer \"$0/began\" -exec grep -lF -f \"$1\" {} + 2>/dev/null | head -n 20; true";

impl SandboxEngine {
    pub(super) async fn sanitise(&self, job: &Job, attempt: &mut Attempt) -> Result<(), EngineError> {
        let workshop = self.workshop(job, attempt).await?;
        self.quietly(job, &workshop, &["/bin/sh", "-c", TRACES]).await?;
        let found = self.secrets_left(job, attempt, &workshop).await?;
        if !found.is_empty() {
            let message = format!("a build secret is left in {}", found.join(", "));
            job.log.write(StepName::Sanitize, format!("{message}\n").as_bytes()).await;
            return Err(user_failure(StepName::Sanitize, None, message));
        }
        self.quietly(job, &workshop, &["rm", "-rf", OWN]).await?;
        Ok(())
    }

    /// Files with one of the build's secrets in them.
    async fn secrets_left(
        &self,
        job: &Job,
        attempt: &Attempt,
        workshop: &Workshop,
    ) -> Result<Vec<String>, EngineError> {
        let values = redaction::values(&job.confidential);
        // Line by line, as the search goes; short ones are found everywhere.
        let lines: Vec<&str> = values
            .iter()
            .flat_map(|value| value.lines())
            .filter(|line| line.trim().len() >= VALUE_MIN)
            .collect();
        if lines.is_empty() {
            return Ok(Vec::new());
        }
        let file = tempfile::NamedTempFile::new_in(attempt.scratch.path());
        let file = file.map_err(of_disk("write down what to look for"))?;
        std::fs::write(file.path(), lines.join("\n") + "\n")
            .map_err(of_disk("write down what to look for"))?;
        let there = format!("{IN_MEMORY}/.sandglass-{}", job.build);
        let put = self.inside.put(&workshop.door, file.path(), &there, 0o600).await;
        put.map_err(|error: InsideError| EngineError::transient(error.to_string()))?;
        let found = self.quietly(job, workshop, &["/bin/sh", "-c", SEARCH, OWN, &there]).await;
        self.quietly(job, workshop, &["rm", "-f", &there]).await?;
        found
    }
}
