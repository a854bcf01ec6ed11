//! What a session is made of: the words between the agent and the process that becomes the session.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::envs::Env;

/// Scripts, orders and output pipes; in the session's own `/run`.
pub(super) const PIPES: &str = "/run/.execd";

/// Everything the session's first process needs to know. Checked by the agent before; carried in a memory file.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(super) struct Plan {
    /// Only try whether it can be done.
    pub probe: bool,
    /// Shallow ones first.
    pub workspaces: Vec<View>,
    /// Shown after the workspaces, in this order.
    pub binds: Vec<View>,
    /// An empty `/tmp` of its own instead of the box's.
    pub own_tmp: bool,
    pub own_network: bool,
    /// Makes the session's user the only one there is, in a user namespace.
    pub own_users: bool,
    pub uid: u32,
    pub gid: u32,
    pub env: Env,
    /// File of the shell and whether it is bash.
    pub shell: PathBuf,
    pub bash: bool,
    pub cwd: PathBuf,
    /// Hidden inside; what overlays of this session write goes below `upper`, if that file system can.
    pub upper_root: PathBuf,
    pub upper: PathBuf,
    pub upper_max_bytes: u64,
    /// Names of system calls that fail inside, when they are not the built-in ones.
    pub deny: Option<Vec<String>>,
    /// Capabilities that root of the session has.
    pub capabilities: u64,
}

/// A path of the box shown in the session.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct View {
    /// Free of symbolic links.
    pub source: PathBuf,
    pub target: PathBuf,
    pub access: Access,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Access {
    Write,
    Read,
    /// Writes stay in the session: on disk where possible.
    Overlay,
    /// The same in memory.
    Scratch,
}

impl Plan {
    /// Where files may be reached by the file routes.
    pub(super) fn roots(&self) -> Vec<PathBuf> {
        self.workspaces.iter().map(|view| view.target.clone()).collect()
    }

    /// Whether a target lies in a directory that is new in every session.
    pub(super) fn is_fresh(&self, target: &Path) -> bool {
        let fresh = ["/run", "/dev", "/proc"];
        fresh.iter().any(|at| target.starts_with(at)) || (self.own_tmp && target.starts_with("/tmp"))
    }
}
