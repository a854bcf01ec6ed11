//! Git for builds: where its files are, how its failures count, and how a source travels in a plan.

use std::{
    fs, io,
    os::unix::fs::DirBuilderExt,
    path::{Path, PathBuf},
};

use sandglass_builds::{
    ports::{ResolveError, ResolveErrorKind},
    submission::{Confidential, Secret},
};
use sandglass_repository::{
    Credential, Policy, Source,
    git::{FailureClass, Git, GitError, Settings},
    recipe::RecipeRequest,
};
use serde::{Deserialize, Serialize};

/// What an engine needs to know of a source beside its commits; `details` of a plan.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Details {
    pub(super) recipe: RecipeRequest,
    /// Full names of the refs, in the order of the checkouts; absent for commits.
    pub(super) full_names: Vec<Option<String>>,
    pub(super) depth: Option<u32>,
    pub(super) submodules: bool,
    pub(super) lfs: bool,
    /// The image to start from: the recipe's or the server's own. Absent for a Dockerfile.
    pub(super) base: Option<String>,
}

/// Opens git under a folder of the server's own. Blocking.
///
/// # Errors
/// When a folder cannot be made, or there is no file of `authorities` although one is named.
pub(super) fn open(
    folder: &Path,
    policy: Policy,
    repository_limit: u64,
    authorities: Option<PathBuf>,
) -> io::Result<Git> {
    if let Some(path) = &authorities {
        let unusable = |error: io::Error| {
            io::Error::new(error.kind(), format!("builds.git_authorities, {}: {error}", path.display()))
        };
        fs::File::open(path).map_err(unusable)?;
    }
    let (scratch, mirrors) = (folder.join("scratch"), folder.join("mirrors"));
    for place in [folder, &scratch, &mirrors] {
        fs::DirBuilder::new().recursive(true).mode(0o700).create(place)?;
    }
    let git = Git::new(Settings {
        program: PathBuf::from("git"),
        scratch,
        mirrors,
        policy,
        repository_limit,
        known_hosts: None,
        authorities,
        proxy: None,
    });
    git.sweep_scratch()?;
    Ok(git)
}

/// What of a git failure concerns whoever asked for the source.
pub(super) fn located_in_vain(error: &GitError) -> ResolveError {
    let kind = match error.class {
        FailureClass::AuthFailed => ResolveErrorKind::AuthFailed,
        FailureClass::RefNotFound => ResolveErrorKind::RefNotFound,
        _ => ResolveErrorKind::Unreachable,
    };
    let tail = Some(error.tail.clone()).filter(|tail| !tail.is_empty());
    ResolveError { kind, message: error.to_string(), tail }
}

/// The credentials of a source, by the addresses of their repositories.
pub(super) fn credentials(source: &Source) -> std::collections::BTreeMap<String, Secret> {
    let written = |credential: &Credential| match credential {
        Credential::Token { username, token } => {
            Some(serde_json::json!({ "username": username, "token": token.expose() }))
        }
        Credential::SshKey { private_key, known_hosts } => {
            Some(serde_json::json!({ "privateKey": private_key.expose(), "knownHosts": known_hosts }))
        }
        Credential::SecretRef { .. } => None,
    };
    let of = |member: &sandglass_repository::Member| {
        let written = written(member.credential.as_ref()?)?;
        Some((member.url.to_string(), Secret::new(written.to_string())))
    };
    source.members.iter().filter_map(of).collect()
}

/// The credential of one repository, read back.
pub(super) fn credential(confidential: &Confidential, url: &str) -> Option<Credential> {
    serde_json::from_str(confidential.credentials.get(url)?.expose()).ok()
}
