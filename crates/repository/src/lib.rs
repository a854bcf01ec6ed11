//! Repositories as sources of sandboxes: how they are named, what they ask to be built, and how their files are got.
//!
//! Owns the grammar of addresses, refs and paths, the detection and reading of recipes, the cache keys, the redaction of secrets
//! in output, and the fenced `git` command. Does not own images, builds or sandboxes: it says what to build and hands over files.
//!
//! Invariant: what comes out of a repository is hostile. No file is read outside its checkout, no name reaches a program's options,
//! no secret reaches an argument, an environment, a configuration file, an error or debug output.

pub mod dockerfile;
mod error;
pub mod git;
mod host;
pub mod key;
mod path;
pub mod recipe;
pub mod redact;
mod reference;
mod secret;
mod spec;
mod url;

pub use error::{Code, SpecError};
pub use host::{HostAllowList, HostPattern};
pub use path::{WorkspacePath, WorkspaceRoot};
pub use reference::Reference;
pub use secret::Secret;
pub use spec::{
    ADDITIONAL_LIMIT, AdditionalSpec, Credential, DEPTH_LIMIT, Member, Policy, RepositorySpec, Source,
};
pub use url::{RepositoryUrl, Scheme};
