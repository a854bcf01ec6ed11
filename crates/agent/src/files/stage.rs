//! Writing a file so that its old content survives any failure: a temporary file beside it, then a rename.
//!
//! Invariant: until `commit`, the target is untouched; a stage that is dropped leaves nothing behind.

use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt, fchown};
use std::path::{Path, PathBuf};

use super::Scope;
use super::edit::create_parents;
use crate::http::reply::Failure;
use crate::init::default_mode;

const MAX_LINKS: usize = 40;

pub(super) struct Stage {
    file: Option<File>,
    temporary: PathBuf,
    target: PathBuf,
    committed: bool,
}

impl Stage {
    /// Prepares to write `path`; parents are created, symbolic links followed to what they mean.
    pub(super) fn create(scope: &Scope, path: &Path) -> Result<Self, Failure> {
        let target = follow_links(path)?;
        let parent = target.parent().unwrap_or(Path::new("/"));
        create_parents(scope, parent)?;
        let old = match target.symlink_metadata() {
            Ok(meta) if meta.is_file() => Some(meta),
            Ok(meta) if meta.is_dir() => {
                return Err(Failure::runtime(format!("open {}: is a directory", target.display())));
            }
            Ok(_) => return Err(Failure::runtime(format!("open {}: not a regular file", target.display()))),
            Err(_) => None,
        };
        let temporary = parent.join(format!(".execd-upload-{}", uuid::Uuid::new_v4().simple()));
        let file = OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(&temporary)
            .map_err(|e| Failure::io("create", &target, &e).as_runtime())?;
        let stage = Stage { file: Some(file), temporary, target, committed: false };
        stage.take_over(scope, old.as_ref()).map_err(|e| stage.failed(&e))?;
        Ok(stage)
    }

    /// An existing file keeps owner and mode; a new one belongs to the box's user.
    fn take_over(&self, scope: &Scope, old: Option<&fs::Metadata>) -> io::Result<()> {
        let Some(file) = &self.file else { return Ok(()) };
        let own = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
        let owner = old.map(|old| (old.uid(), old.gid())).or_else(|| scope.owner()).unwrap_or(own);
        if owner != own {
            fchown(file, Some(owner.0), Some(owner.1))?;
        }
        let mode = old.map_or_else(default_mode, |old| old.mode() & 0o7777);
        file.set_permissions(fs::Permissions::from_mode(mode))
    }

    pub(super) fn write(&mut self, bytes: &[u8]) -> Result<(), Failure> {
        let result = match &mut self.file {
            Some(file) => file.write_all(bytes),
            None => Ok(()),
        };
        result.map_err(|e| self.failed(&e))
    }

    /// Everything has been written: gives the descriptor back, so that a large form does not hold many.
    pub(super) fn close(&mut self) {
        self.file = None;
    }

    /// Puts the new content in place and returns where it went.
    pub(super) fn commit(mut self) -> Result<PathBuf, Failure> {
        self.close();
        match fs::rename(&self.temporary, &self.target) {
            Ok(()) => {
                self.committed = true;
                Ok(self.target.clone())
            }
            // A file mounted into the box, such as /etc/hosts, cannot be replaced, only rewritten.
            Err(error) if error.kind() == ErrorKind::ResourceBusy => {
                self.rewrite().map_err(|e| self.failed(&e))?;
                Ok(self.target.clone())
            }
            Err(error) => Err(self.failed(&error)),
        }
    }

    fn rewrite(&self) -> io::Result<()> {
        let mut from = File::open(&self.temporary)?;
        let mut to = OpenOptions::new().write(true).truncate(true).open(&self.target)?;
        io::copy(&mut from, &mut to).map(drop)
    }

    fn failed(&self, error: &io::Error) -> Failure {
        Failure::io("write", &self.target, error).as_runtime()
    }
}

impl Drop for Stage {
    fn drop(&mut self) {
        if !self.committed {
            // Best effort: the directory may be gone with everything in it.
            let _ = fs::remove_file(&self.temporary);
        }
    }
}

/// The file a path finally names, which need not exist.
fn follow_links(path: &Path) -> Result<PathBuf, Failure> {
    let mut path = path.to_owned();
    for _ in 0..MAX_LINKS {
        match path.symlink_metadata() {
            Ok(meta) if meta.file_type().is_symlink() => {
                let link = fs::read_link(&path).map_err(|e| Failure::io("open", &path, &e).as_runtime())?;
                path = path.parent().unwrap_or(Path::new("/")).join(link);
            }
            _ => return Ok(path),
        }
    }
    Err(Failure::runtime(format!("open {}: too many levels of symbolic links", path.display())))
}
