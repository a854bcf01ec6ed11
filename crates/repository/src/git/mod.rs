//! The `git` command behind a fence.
//!
//! Owns how git is run (nothing of the system's or the user's configuration, no hooks, no prompts, few protocols, a process group
//! with a deadline), how credentials reach it (files of mode 0600 in a private folder, read by a helper that answers for one host
//! alone), and the three things it is run for: resolving a ref, keeping a mirror, checking out a commit.
//!
//! Invariant: no secret in an argument, an environment, a configuration or an error; no byte of a repository decides what is run.

mod access;
mod checkout;
mod failure;
mod fence;
mod fetch;
mod housekeeping;
mod lfs;
mod mirror;
mod process;
mod progress;
mod quota;
mod resolve;
mod submodules;

use std::path::PathBuf;

use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

pub use checkout::{CheckedOut, Checkout, Present, stands_at};
pub use failure::{FailureClass, GitError};
pub use mirror::Mirror;
pub use progress::Progress;
pub use resolve::{Resolved, ResolvedKind};

use crate::secret::Secret;
use crate::spec::{Credential, Policy};
use crate::url::RepositoryUrl;

/// What a deployment sets.
#[derive(Debug, Clone)]
pub struct Settings {
    /// The program, found in `PATH` unless absolute.
    pub program: PathBuf,
    /// A folder for credential files, best in memory. Each call has a folder of its own in it, of mode 0700, that is gone when the call
    /// is. The path may hold letters, digits and `/._-` alone, because it becomes part of a shell command.
    pub scratch: PathBuf,
    /// Where mirrors are kept. Nobody else may write there.
    pub mirrors: PathBuf,
    /// Schemes and hosts. The addresses of submodules and of stores for large files are held to them too.
    pub policy: Policy,
    /// Bytes that one repository may take: what is downloaded of it; and a new checkout, its submodules and large files included, in which
    /// an entry counts as 4 KiB at least.
    pub repository_limit: u64,
    /// Lines of `known_hosts` for ssh, where the credential brings none.
    pub known_hosts: Option<String>,
    /// A file of authorities for https in PEM form, instead of the system's.
    pub authorities: Option<PathBuf>,
    /// `http://host:port` of a proxy for https.
    pub proxy: Option<String>,
}

/// Runs git. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Git {
    pub(crate) settings: std::sync::Arc<Settings>,
}

impl Git {
    pub fn new(settings: Settings) -> Self {
        Self { settings: std::sync::Arc::new(settings) }
    }
}

/// A repository with what it takes to read it.
#[derive(Debug, Clone, Copy)]
pub struct Remote<'a> {
    pub url: &'a RepositoryUrl,
    pub credential: Option<&'a Credential>,
}

impl Remote<'_> {
    pub(crate) fn secrets(&self) -> Vec<&str> {
        match self.credential {
            Some(
                Credential::Token { token: secret, .. } | Credential::SshKey { private_key: secret, .. },
            ) => {
                vec![Secret::expose(secret)]
            }
            _ => Vec::new(),
        }
    }
}

/// How long a call may take, who may end it, and who is told how far it is.
#[derive(Clone, Copy)]
pub struct Control<'a> {
    pub deadline: Instant,
    pub cancel: &'a CancellationToken,
    /// Called from the task that runs the call, several times a second; must not block.
    pub progress: &'a (dyn Fn(&Progress) + Send + Sync),
}
