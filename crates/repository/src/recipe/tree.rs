//! Reading a checkout that nobody vouches for: no link leads out of it, and no file is larger than is read.

use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Component, Path, PathBuf};

use rustix::fs::{CWD, Mode, OFlags, ResolveFlags, openat2};
use rustix::io::Errno;

use super::RecipeError;
use crate::key::stream_digest;

/// Bytes of a file that is read as text.
const TEXT_LIMIT: u64 = 1024 * 1024;
/// Bytes of a file that is digested: lock files, and what a Dockerfile copies by name.
const DIGEST_LIMIT: u64 = 512 * 1024 * 1024;

/// A checked-out repository. Paths are relative to it, with slashes.
#[derive(Debug, Clone)]
pub struct Tree {
    folder: PathBuf,
}

impl Tree {
    /// # Errors
    /// The folder is not there.
    pub fn open(folder: &Path) -> Result<Self, RecipeError> {
        let folder = fs::canonicalize(folder)
            .map_err(|error| RecipeError::invalid("", format!("cannot open the checkout: {error}")))?;
        Ok(Self { folder })
    }

    /// The file's text, `None` when there is no such file.
    pub(crate) fn read(&self, path: &str) -> Result<Option<String>, RecipeError> {
        let Some(bytes) = self.text_bytes(path)? else { return Ok(None) };
        String::from_utf8(bytes).map(Some).map_err(|_| RecipeError::invalid(path, "the file is not UTF-8"))
    }

    /// Like [`Tree::read`], for a file that another one names.
    pub(crate) fn read_named(&self, path: &str, named_by: &str) -> Result<String, RecipeError> {
        self.read(path)?.ok_or_else(|| {
            RecipeError::invalid(named_by, format!("the file {path} that it names is not in the repository"))
        })
    }

    /// SHA-256 of a regular file, `None` when the path is none.
    pub(crate) fn digest(&self, path: &str) -> Result<Option<String>, RecipeError> {
        let Some(file) = self.open_file(path)? else { return Ok(None) };
        let unreadable = |error: io::Error| RecipeError::invalid(path, format!("cannot read: {error}"));
        if file.metadata().map_err(unreadable)?.len() > DIGEST_LIMIT {
            return Err(RecipeError::invalid(
                path,
                format!("the file is larger than {} MiB", DIGEST_LIMIT >> 20),
            ));
        }
        stream_digest(file.take(DIGEST_LIMIT)).map(Some).map_err(unreadable)
    }

    pub(crate) fn is_file(&self, path: &str) -> Result<bool, RecipeError> {
        Ok(self.open_file(path)?.is_some())
    }

    /// Regular files below a folder, sorted; links in it are not followed.
    pub(crate) fn files_below(&self, folder: &str, limit: usize) -> Result<Vec<String>, RecipeError> {
        let mut waiting = vec![folder.to_owned()];
        let mut files = Vec::new();
        while let Some(path) = waiting.pop() {
            let unreadable =
                |error: io::Error| RecipeError::invalid(&path, format!("cannot read the folder: {error}"));
            // Only entered by names that the walk itself found not to be links; the first is opened under the same rule as files.
            self.open_beneath(&path)?;
            for entry in fs::read_dir(self.folder.join(&path)).map_err(unreadable)? {
                let entry = entry.map_err(unreadable)?;
                let name = entry.file_name();
                let name = name
                    .to_str()
                    .ok_or_else(|| RecipeError::invalid(&path, "a name in the folder is not UTF-8"))?;
                let kind = entry.file_type().map_err(unreadable)?;
                let child = format!("{path}/{name}");
                if kind.is_dir() {
                    waiting.push(child);
                } else if kind.is_file() {
                    files.push(child);
                } else {
                    return Err(RecipeError::invalid(&child, "the folder may hold files and folders alone"));
                }
            }
            if files.len() > limit {
                return Err(RecipeError::invalid(
                    folder,
                    format!("the folder holds more than {limit} files"),
                ));
            }
        }
        files.sort();
        Ok(files)
    }

    fn text_bytes(&self, path: &str) -> Result<Option<Vec<u8>>, RecipeError> {
        let Some(file) = self.open_file(path)? else { return Ok(None) };
        let mut bytes = Vec::new();
        file.take(TEXT_LIMIT + 1)
            .read_to_end(&mut bytes)
            .map_err(|error| RecipeError::invalid(path, format!("cannot read: {error}")))?;
        if bytes.len() as u64 > TEXT_LIMIT {
            return Err(RecipeError::invalid(
                path,
                format!("the file is larger than {} MiB", TEXT_LIMIT >> 20),
            ));
        }
        Ok(Some(bytes))
    }

    fn open_file(&self, path: &str) -> Result<Option<File>, RecipeError> {
        let Some(file) = self.open_beneath(path)? else { return Ok(None) };
        let metadata = file
            .metadata()
            .map_err(|error| RecipeError::invalid(path, format!("cannot look at: {error}")))?;
        Ok(metadata.is_file().then_some(file))
    }

    fn open_beneath(&self, path: &str) -> Result<Option<File>, RecipeError> {
        let unreadable = |error: io::Error| RecipeError::invalid(path, format!("cannot open: {error}"));
        let root = File::open(&self.folder).map_err(unreadable)?;
        let relative = if path.is_empty() { "." } else { path };
        // Not blocking, because the path may be a pipe.
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
        match openat2(
            &root,
            relative,
            flags,
            Mode::empty(),
            ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS,
        ) {
            Ok(file) => Ok(Some(File::from(file))),
            Err(Errno::NOENT | Errno::NOTDIR | Errno::NXIO) => Ok(None),
            Err(Errno::XDEV | Errno::LOOP) => Err(RecipeError::escape(path)),
            Err(Errno::NOSYS | Errno::PERM) => self.open_resolved(path),
            Err(error) => Err(unreadable(error.into())),
        }
    }

    /// The same on kernels and in containers without the call above: resolved first, then opened. A link that is exchanged in between
    /// could get through, but nobody works in the checkout while it is read.
    fn open_resolved(&self, path: &str) -> Result<Option<File>, RecipeError> {
        let resolved = match fs::canonicalize(self.folder.join(path)) {
            Ok(resolved) => resolved,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(RecipeError::invalid(path, format!("cannot open: {error}"))),
        };
        if !resolved.starts_with(&self.folder) {
            return Err(RecipeError::escape(path));
        }
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::NOFOLLOW;
        let file = rustix::fs::openat(CWD, &resolved, flags, Mode::empty());
        file.map(|file| Some(File::from(file)))
            .map_err(|error| RecipeError::invalid(path, format!("cannot open: {error}")))
    }
}

/// Joins a path that a file in `folder` names, without leaving the repository. The result has no `.`, no `..` and no slash at either
/// end; it is empty for the repository's own folder.
pub(crate) fn join(folder: &str, path: &str, named_by: &str) -> Result<String, RecipeError> {
    let mut components: Vec<&str> = folder.split('/').filter(|component| !component.is_empty()).collect();
    if path.contains('\0') || path.contains('\\') {
        return Err(RecipeError::invalid(
            named_by,
            format!("the path {path:?} holds a character that paths do not have"),
        ));
    }
    for component in Path::new(path).components() {
        match component {
            Component::CurDir => {}
            Component::Normal(name) => components.push(name.to_str().unwrap_or_default()),
            Component::ParentDir => {
                components.pop().ok_or_else(|| RecipeError::escape(named_by))?;
            }
            Component::RootDir | Component::Prefix(_) => {
                return Err(RecipeError::invalid(named_by, format!("the path {path:?} is absolute")));
            }
        }
    }
    Ok(components.join("/"))
}

/// The folder of a path, empty for the repository's own.
pub(crate) fn parent(path: &str) -> &str {
    path.rsplit_once('/').map_or("", |(folder, _)| folder)
}
