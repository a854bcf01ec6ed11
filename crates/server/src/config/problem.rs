//! What is wrong with a configuration, and where each value came from.
//!
//! No text in here ever contains a value that the operator wrote: it may be a secret in the wrong place.

use std::fmt;
use std::path::Path;
use std::sync::Arc;

/// Where an effective value came from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origin {
    Default,
    File { path: Arc<Path>, line: usize, column: usize },
    Env { name: String },
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Default => f.write_str("default"),
            Self::File { path, line, column } => write!(f, "{}:{line}:{column}", path.display()),
            Self::Env { name } => write!(f, "env {name}"),
        }
    }
}

/// One thing that keeps the server from starting.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// Dotted key (`server.port`), or a section, or empty when the whole file is meant.
    pub key: String,
    pub origin: Origin,
    pub message: String,
}

/// Something to know that keeps nothing from starting. Same shape as a [`Problem`], different weight.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Warning(pub Problem);

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.origin != Origin::Default {
            write!(f, "{}: ", self.origin)?;
        }
        if !self.key.is_empty() {
            write!(f, "{}: ", self.key)?;
        }
        f.write_str(&self.message)
    }
}

impl fmt::Display for Warning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Every problem that was found; never empty.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConfigErrors {
    problems: Vec<Problem>,
}

impl ConfigErrors {
    pub(super) fn new(problems: Vec<Problem>) -> Self {
        debug_assert!(!problems.is_empty(), "an error needs a problem");
        Self { problems }
    }

    #[must_use]
    pub fn problems(&self) -> &[Problem] {
        &self.problems
    }
}

impl fmt::Display for ConfigErrors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.problems.as_slice() {
            [only] => only.fmt(f),
            several => {
                write!(f, "{} problems in the configuration", several.len())?;
                several.iter().try_for_each(|problem| write!(f, "\n  {problem}"))
            }
        }
    }
}

impl std::error::Error for ConfigErrors {}
