//! Reading Dockerfiles: into typed instructions, with the line of each, and with what of them an engine cannot do.
//!
//! Reads the language of BuildKit's first-party front end (`docker/dockerfile:1`), here-documents at any place of a line included, which is
//! where the published readers stop. Does not build: values stay as written until
//! [`Variables`] expands them one instruction at a time, because they depend on the base image's environment.
//!
//! Invariant: nothing is dropped. An instruction, flag or option that is not understood is an error with its line.

mod certain;
mod flags;
mod ignore;
mod instruction;
mod lines;
mod mount;
mod read;
mod support;
mod variables;
mod words;

pub use ignore::IgnoreFile;
pub use instruction::{
    AddOptions, ArgDeclaration, CommandLine, Copy, CopySource, Healthcheck, Heredoc, Instruction, Located,
    NetworkMode, Run, Script,
};
pub use mount::{CacheMount, Mount, SecretMount, Sharing};
pub use support::{Feature, SANDBOX_ENGINE, Use};
pub use variables::Variables;

/// Bytes of a Dockerfile.
pub const SIZE_LIMIT: usize = 1024 * 1024;

/// A read Dockerfile. It has at least one stage.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Dockerfile {
    /// `# syntax=`: the front end that is asked for.
    pub syntax: Option<String>,
    /// `\` unless `# escape=` says `` ` ``.
    pub escape: char,
    /// `ARG` before the first `FROM`, in order.
    pub global_args: Vec<ArgDeclaration>,
    pub stages: Vec<Stage>,
}

/// One `FROM` and what follows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stage {
    /// In lower case.
    pub name: Option<String>,
    /// Image or earlier stage, as written; may hold variables.
    pub image: String,
    pub platform: Option<String>,
    /// The line of its `FROM`, from 1.
    pub line: usize,
    pub instructions: Vec<Located>,
}

/// Why a Dockerfile cannot be read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("line {line}: {message}")]
pub struct DockerfileError {
    /// From 1; 0 for the file as a whole.
    pub line: usize,
    pub message: String,
}

impl DockerfileError {
    fn new(line: usize, message: impl Into<String>) -> Self {
        Self { line, message: message.into() }
    }
}

impl Dockerfile {
    /// # Errors
    /// The first thing that is not Dockerfile, with its line.
    pub fn parse(text: &str) -> Result<Self, DockerfileError> {
        read::read(text)
    }

    /// The stage that a build of `target` ends with; the last one when no target is named.
    pub fn target(&self, target: Option<&str>) -> Option<&Stage> {
        match target {
            None => self.stages.last(),
            Some(target) => self.stage_index(target).and_then(|index| self.stages.get(index)),
        }
    }

    /// The stage that `COPY --from` and mounts mean in the stage of this number: an earlier one. `None` is an image.
    pub fn earlier_stage(&self, name: &str, before: usize) -> Option<usize> {
        self.stage_index(name).filter(|index| *index < before)
    }

    /// The stage that the `FROM` of the stage of this number means: an earlier one by its name. `None` is an image, also for a number.
    pub fn earlier_stage_named(&self, name: &str, before: usize) -> Option<usize> {
        let name = name.to_ascii_lowercase();
        self.stages[..before.min(self.stages.len())]
            .iter()
            .rposition(|stage| stage.name.as_deref() == Some(name.as_str()))
    }

    /// A stage by its name, or by its number.
    pub fn stage_index(&self, name: &str) -> Option<usize> {
        let name = name.to_ascii_lowercase();
        let named = self.stages.iter().rposition(|stage| stage.name.as_deref() == Some(name.as_str()));
        named.or_else(|| name.parse().ok().filter(|index| *index < self.stages.len()))
    }
}
