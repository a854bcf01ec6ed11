//! From a request to a plan: which directories of the box a session may have, and as whom it runs.
//!
//! Looks at the disk, so it runs off the runtime thread.
//! Invariant: every source in a plan is free of symbolic links and lies below what the configuration allows.

use std::ffi::OsString;
use std::fs;
use std::io;
use std::os::unix::fs::lchown;
use std::path::{Path, PathBuf};

use http::StatusCode;
use rustix::thread::{CapabilitySet, capabilities};

use super::environment;
use super::plan::{Access, PIPES, Plan, View};
use super::request::{CreateRequest, Profile, refused};
use crate::accounts::Accounts;
use crate::envs;
use crate::hardening::Config;
use crate::http::reply::{Code, Failure, plain};
use crate::http::router::Agent;
use crate::init::spawn::locate_shell;

/// What `request` asks for, as far as it is allowed; workspaces that are missing are made.
pub(super) fn plan(
    agent: &Agent,
    config: &Config,
    request: &CreateRequest,
    id: &str,
) -> Result<Plan, Failure> {
    let (uid, gid) = identity(agent, request)?;
    let allowed = Allowed::of(config)?;
    let mut workspaces = Vec::new();
    for wanted in &request.workspaces {
        let source = allowed.check(&wanted.path)?;
        not_its_own(&source)?;
        make(&source, uid, gid)?;
        workspaces.push(View { target: source.clone(), source, access: wanted.access });
    }
    let cwd = workspaces.first().map_or_else(|| "/".into(), |view| view.target.clone());
    // Shallow ones first, so that a nested one is on top of what it is in.
    workspaces.sort_by_key(|view| view.target.components().count());
    let env = environment_of(agent, request, uid, &cwd);
    let (shell, bash) = shell(agent)?;
    Ok(Plan {
        probe: false,
        workspaces,
        binds: binds(request, &allowed)?,
        own_tmp: request.profile == Profile::Strict,
        own_network: !request.share_net,
        own_users: request.own_users,
        uid,
        gid,
        env,
        shell,
        bash,
        cwd,
        upper_root: config.upper_root.clone(),
        upper: config.upper_root.join(id),
        upper_max_bytes: config.upper_max_bytes,
        deny: config.denied().map(<[String]>::to_vec),
        capabilities: config.of_sessions().map_err(|e| Failure::runtime(e.to_string()))?,
    })
}

fn binds(request: &CreateRequest, allowed: &Allowed) -> Result<Vec<View>, Failure> {
    let extra = request.extra_writable.iter().map(|path| (path, path, Access::Write));
    let binds = request.binds.iter().map(|bind| {
        let access = if bind.readonly { Access::Read } else { Access::Write };
        (&bind.source, &bind.dest, access)
    });
    extra
        .chain(binds)
        .map(|(source, target, access)| {
            let source = allowed.check(source)?;
            if !source.exists() {
                return Err(refused(format!("{} does not exist", source.display())));
            }
            not_its_own(target)?;
            Ok(View { source, target: target.clone(), access })
        })
        .collect()
}

fn identity(agent: &Agent, request: &CreateRequest) -> Result<(u32, u32), Failure> {
    let own = &agent.identity;
    let (uid, gid) = match (request.uid, request.gid) {
        (None, gid) => (own.uid, gid.unwrap_or(own.gid)),
        (Some(uid), Some(gid)) => (uid, gid),
        // The group of the account; a user without one is alone in its group.
        (Some(uid), None) => (uid, Accounts::load().user_by_uid(uid).map_or(uid, |user| user.gid)),
    };
    if !request.own_users && !may_switch() && (uid, gid) != own_ids() {
        let message = "uid and gid cannot be switched: the agent lacks CAP_SETUID and CAP_SETGID";
        return Err(Failure::new(StatusCode::SERVICE_UNAVAILABLE, Code::NotSupported, message));
    }
    Ok((uid, gid))
}

fn own_ids() -> (u32, u32) {
    (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw())
}

pub(super) fn may_switch() -> bool {
    let needed = CapabilitySet::SETUID | CapabilitySet::SETGID;
    capabilities(None).is_ok_and(|own| own.effective.contains(needed))
}

fn environment_of(agent: &Agent, request: &CreateRequest, uid: u32, cwd: &Path) -> envs::Env {
    let mut env = envs::for_shells(&agent.env, &agent.env_file);
    if uid != agent.identity.uid
        && let Some(user) = Accounts::load().user_by_uid(uid)
    {
        env.insert("HOME".into(), user.home.clone());
    }
    let mut env = environment::filter(env, &request.passthrough);
    env.entry("PATH".into()).or_insert_with(|| envs::DEFAULT_PATH.into());
    env.insert("PWD".into(), cwd.to_string_lossy().into_owned());
    env
}

fn shell(agent: &Agent) -> Result<(PathBuf, bool), Failure> {
    locate_shell(envs::search_path(&agent.env))
        .map(|(name, file)| (file, name == "bash"))
        .ok_or_else(|| Failure::runtime("no shell (bash or sh) in this image"))
}

/// The directories that sessions may have parts of, with their links resolved.
struct Allowed(Vec<PathBuf>);

impl Allowed {
    fn of(config: &Config) -> Result<Self, Failure> {
        if config.allowed_writable.is_empty() {
            return Err(refused("allowed_writable is empty: no directory may be given to a session"));
        }
        Ok(Allowed(config.allowed_writable.iter().filter_map(|path| resolve(path).ok()).collect()))
    }

    fn check(&self, path: &Path) -> Result<PathBuf, Failure> {
        let resolved = resolve(path).map_err(|e| refused(format!("{}: {}", path.display(), plain(&e))))?;
        if self.0.iter().any(|allowed| resolved.starts_with(allowed)) {
            return Ok(resolved);
        }
        Err(refused(format!("{} is not in allowed_writable", path.display())))
    }
}

/// Follows the links of what exists of a path; the rest, which does not, is kept.
fn resolve(path: &Path) -> io::Result<PathBuf> {
    let mut missing: Vec<OsString> = Vec::new();
    let mut existing = path;
    loop {
        match existing.canonicalize() {
            Ok(mut resolved) => {
                resolved.extend(missing.iter().rev());
                return Ok(resolved);
            }
            // A dangling link must not be taken for a name that is free.
            Err(error) if error.kind() == io::ErrorKind::NotFound && existing.symlink_metadata().is_err() => {
            }
            Err(error) => return Err(error),
        }
        missing.extend(existing.file_name().map(OsString::from));
        existing = existing.parent().unwrap_or(Path::new("/"));
    }
}

/// Over these a session could not live, or what is mounted would not show.
fn not_its_own(target: &Path) -> Result<(), Failure> {
    let resolved = resolve(target).map_err(|e| refused(format!("{}: {}", target.display(), plain(&e))))?;
    let taken = |path: &Path| {
        Path::new(PIPES).starts_with(path) || path.starts_with(PIPES) || path.starts_with("/proc")
    };
    if taken(target) || taken(&resolved) {
        return Err(refused(format!("{} is the session's own", target.display())));
    }
    Ok(())
}

/// `mkdir -p`; the last directory belongs to the session's user.
fn make(path: &Path, uid: u32, gid: u32) -> Result<(), Failure> {
    if path.is_dir() {
        return Ok(());
    }
    let made = fs::create_dir_all(path).and_then(|()| lchown(path, Some(uid), Some(gid)));
    made.map_err(|e| refused(format!("workspace {} cannot be made: {}", path.display(), plain(&e))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_are_followed_before_a_path_is_allowed() {
        let dir = tempfile::tempdir().unwrap();
        let (inside, outside) = (dir.path().join("in"), dir.path().join("out"));
        fs::create_dir(&inside).unwrap();
        fs::create_dir(&outside).unwrap();
        std::os::unix::fs::symlink(&outside, inside.join("link")).unwrap();
        std::os::unix::fs::symlink("/nonexistent", inside.join("dangling")).unwrap();
        let config = Config { allowed_writable: vec![inside.clone()], ..Config::default() };
        let allowed = Allowed::of(&config).unwrap();
        let real = inside.canonicalize().unwrap();
        assert_eq!(allowed.check(&inside.join("new/x")).unwrap(), real.join("new/x"));
        assert!(allowed.check(&inside.join("link")).is_err());
        assert!(allowed.check(&inside.join("link/new")).is_err());
        assert!(allowed.check(&inside.join("dangling/x")).is_err());
        assert!(allowed.check(&outside).is_err());
        assert!(allowed.check(&dir.path().join("in2")).is_err());
        let nothing = Config { allowed_writable: Vec::new(), ..Config::default() };
        assert!(Allowed::of(&nothing).is_err());
    }
}
