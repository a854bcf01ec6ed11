//! Changing the tree: delete, rename, permissions, directories.

use std::fs::{self, File, Permissions};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{DirBuilderExt, PermissionsExt, chown, fchown, lchown};
use std::path::Path;

use serde_json::Value;

use super::Scope;
use super::info::{missing_or, mode_from_decimal};
use crate::accounts::Accounts;
use crate::http::query::Object;
use crate::http::reply::{Failure, Outcome};

/// Mode and owner as requests spell them; all optional.
#[derive(Debug, Default)]
pub(super) struct Permission {
    mode: Option<u32>,
    owner: Option<u32>,
    group: Option<u32>,
}

impl Permission {
    /// Resolves names at once, so that a bad one fails before anything is changed.
    pub(super) fn parse(object: &Object, accounts: &Accounts) -> Result<Self, Failure> {
        let mode = match object.integer("mode")?.unwrap_or(0) {
            0 => None,
            mode => Some(
                mode_from_decimal(mode)
                    .ok_or_else(|| Failure::runtime(format!("invalid mode {mode}: digits must be octal")))?,
            ),
        };
        let owner = match object.string("owner")?.filter(|o| !o.is_empty()) {
            None => None,
            Some(name) => Some(
                accounts
                    .user_by_name(&name)
                    .map(|u| u.uid)
                    .or_else(|| name.parse().ok())
                    .ok_or_else(|| Failure::runtime(format!("user: unknown user {name}")))?,
            ),
        };
        let group = match object.string("group")?.filter(|g| !g.is_empty()) {
            None => None,
            Some(name) => Some(
                accounts
                    .group_by_name(&name)
                    .map(|g| g.gid)
                    .or_else(|| name.parse().ok())
                    .ok_or_else(|| Failure::runtime(format!("group: unknown group {name}")))?,
            ),
        };
        Ok(Permission { mode, owner, group })
    }

    pub(super) fn apply(&self, path: &Path) -> Result<(), Failure> {
        // Owner first: changing it clears the set-id bits of the mode.
        if self.owner.is_some() || self.group.is_some() {
            chown(path, self.owner, self.group).map_err(|e| no_owner(path, &e))?;
        }
        if let Some(mode) = self.mode {
            fs::set_permissions(path, Permissions::from_mode(mode)).map_err(|e| no_mode(path, &e))?;
        }
        Ok(())
    }

    /// The same for an open file, whose path may lead elsewhere by now.
    pub(super) fn apply_to(&self, file: &File, path: &Path) -> Result<(), Failure> {
        if self.owner.is_some() || self.group.is_some() {
            fchown(file, self.owner, self.group).map_err(|e| no_owner(path, &e))?;
        }
        if let Some(mode) = self.mode {
            file.set_permissions(Permissions::from_mode(mode)).map_err(|e| no_mode(path, &e))?;
        }
        Ok(())
    }
}

fn no_owner(path: &Path, error: &io::Error) -> Failure {
    Failure::io("change owner of", path, error).as_runtime()
}

fn no_mode(path: &Path, error: &io::Error) -> Failure {
    Failure::io("change mode of", path, error).as_runtime()
}

pub(super) async fn remove_files(scope: Scope, paths: Vec<String>) -> Outcome {
    let work = scope.clone();
    work.blocking_empty(move || {
        for raw in paths {
            let path = scope.path(&raw)?;
            match path.metadata() {
                Ok(meta) if meta.is_dir() => {
                    return Err(Failure::runtime(format!("{}: is a directory", path.display())));
                }
                Ok(_) => ignore_missing(fs::remove_file(&path), &path)?,
                Err(error) => ignore_missing(Err(error), &path)?,
            }
        }
        Ok(())
    })
    .await
}

pub(super) async fn remove_directories(scope: Scope, paths: Vec<String>) -> Outcome {
    let work = scope.clone();
    work.blocking_empty(move || {
        for raw in paths {
            let path = scope.path(&raw)?;
            if path == Path::new("/") {
                return Err(Failure::runtime("refusing to remove the root directory"));
            }
            let removed = match path.symlink_metadata() {
                Ok(meta) if meta.is_dir() => fs::remove_dir_all(&path),
                Ok(_) => fs::remove_file(&path),
                Err(error) => Err(error),
            };
            ignore_missing(removed, &path)?;
        }
        Ok(())
    })
    .await
}

fn ignore_missing(result: io::Result<()>, path: &Path) -> Result<(), Failure> {
    match result {
        Err(error) if !matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => {
            Err(Failure::io("remove", path, &error))
        }
        _ => Ok(()),
    }
}

pub(super) async fn rename(scope: Scope, body: Value) -> Outcome {
    let Value::Array(items) = body else {
        return Err(Failure::invalid("error parsing request, MAYBE invalid body format. expected an array"));
    };
    let work = scope.clone();
    work.blocking_empty(move || {
        for item in items {
            let item = Object::new(item)?;
            let field = |name: &str| {
                item.string(name)?.ok_or_else(|| Failure::invalid(format!("{name} is required")))
            };
            let (src, dest) = (scope.path(&field("src")?)?, scope.path(&field("dest")?)?);
            src.symlink_metadata().map_err(|e| missing_or(&src, &e))?;
            if let Some(parent) = dest.parent() {
                create_parents(&scope, parent)?;
            }
            rename_one(&src, &dest)?;
        }
        Ok(())
    })
    .await
}

fn rename_one(src: &Path, dest: &Path) -> Result<(), Failure> {
    use rustix::fs::{CWD, RenameFlags, renameat_with};
    let exists = || Failure::runtime(format!("destination path already exists: {}", dest.display()));
    let failed = |e: io::Error| Failure::io("move", src, &e).as_runtime();
    // The kernel refuses to overwrite, so nobody can slip in between a check and the move.
    match renameat_with(CWD, src, CWD, dest, RenameFlags::NOREPLACE) {
        Ok(()) => Ok(()),
        Err(rustix::io::Errno::EXIST) => Err(exists()),
        // A file system without that flag.
        Err(rustix::io::Errno::INVAL | rustix::io::Errno::NOSYS) => {
            if dest.symlink_metadata().is_ok() {
                return Err(exists());
            }
            fs::rename(src, dest).map_err(failed)
        }
        Err(error) => Err(failed(error.into())),
    }
}

/// The entries of a `{path: {...}}` body.
pub(super) fn entries(body: Value) -> Result<Vec<(String, Object)>, Failure> {
    let Value::Object(map) = body else {
        return Err(Failure::invalid("error parsing request, MAYBE invalid body format. expected an object"));
    };
    map.into_iter().map(|(path, value)| Ok((path, Object::new(value)?))).collect()
}

pub(super) async fn permissions(scope: Scope, body: Value) -> Outcome {
    let entries = entries(body)?;
    let work = scope.clone();
    work.blocking_empty(move || {
        let accounts = Accounts::load();
        for (raw, wanted) in entries {
            let path = scope.path(&raw)?;
            let permission = Permission::parse(&wanted, &accounts)?;
            path.metadata().map_err(|e| Failure::io("stat", &path, &e).as_runtime())?;
            permission.apply(&path)?;
        }
        Ok(())
    })
    .await
}

pub(super) async fn make_directories(scope: Scope, body: Value) -> Outcome {
    let entries = entries(body)?;
    let work = scope.clone();
    work.blocking_empty(move || {
        let accounts = Accounts::load();
        for (raw, wanted) in entries {
            let path = scope.path(&raw)?;
            let permission = Permission::parse(&wanted, &accounts)?;
            if create_parents(&scope, &path)? {
                permission.apply(&path)?;
            }
        }
        Ok(())
    })
    .await
}

/// `mkdir -p`, owned by the box's user; true when the last part was created by this call.
pub(super) fn create_parents(scope: &Scope, path: &Path) -> Result<bool, Failure> {
    let failed = |e: io::Error| Failure::io("create directory", path, &e).as_runtime();
    match path.metadata() {
        Ok(meta) if meta.is_dir() => return Ok(false),
        Ok(_) => return Err(failed(ErrorKind::NotADirectory.into())),
        Err(_) => {}
    }
    if let Some(parent) = path.parent() {
        create_parents(scope, parent)?;
    }
    match fs::DirBuilder::new().mode(0o777).create(path) {
        Ok(()) => {
            if let Some((uid, gid)) = scope.owner() {
                lchown(path, Some(uid), Some(gid)).map_err(failed)?;
            }
            Ok(true)
        }
        // Somebody else was faster, which is as good.
        Err(error) if error.kind() == ErrorKind::AlreadyExists && path.is_dir() => Ok(false),
        Err(error) => Err(failed(error)),
    }
}
