//! What changes the file system beside the bytes of files.

use std::fs::File;
use std::io;
use std::os::unix::fs::{PermissionsExt, chown, fchown, lchown};
use std::path::Path;

use rustix::fs::{AtFlags, CWD, RenameFlags, Timespec, Timestamps};

use super::wire::Attributes;

/// The bits that a peer can set.
pub(super) const PERMISSIONS: u32 = 0o7777;

pub(super) fn set_by_path(path: &Path, wish: &Attributes) -> io::Result<()> {
    if let Some(size) = wish.size {
        std::fs::OpenOptions::new().write(true).open(path)?.set_len(size)?;
    }
    if let Some(mode) = wish.permissions {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode & PERMISSIONS))?;
    }
    if let Some(times) = wish.times {
        rustix::fs::utimensat(CWD, path, &timestamps(times), AtFlags::empty())?;
    }
    if let Some((user, group)) = wish.owner {
        chown(path, Some(user), Some(group))?;
    }
    Ok(())
}

/// The link itself, which has no size to change and no permissions.
pub(super) fn set_by_link(path: &Path, wish: &Attributes) -> io::Result<()> {
    if wish.size.is_some() {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    if let Some(mode) = wish.permissions
        && !path.symlink_metadata()?.is_symlink()
    {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode & PERMISSIONS))?;
    }
    if let Some(times) = wish.times {
        rustix::fs::utimensat(CWD, path, &timestamps(times), AtFlags::SYMLINK_NOFOLLOW)?;
    }
    if let Some((user, group)) = wish.owner {
        lchown(path, Some(user), Some(group))?;
    }
    Ok(())
}

pub(super) fn set_by_file(file: &File, wish: &Attributes) -> io::Result<()> {
    if let Some(size) = wish.size {
        file.set_len(size)?;
    }
    if let Some(mode) = wish.permissions {
        file.set_permissions(std::fs::Permissions::from_mode(mode & PERMISSIONS))?;
    }
    if let Some(times) = wish.times {
        rustix::fs::futimens(file, &timestamps(times))?;
    }
    if let Some((user, group)) = wish.owner {
        fchown(file, Some(user), Some(group))?;
    }
    Ok(())
}

fn timestamps((accessed, changed): (u32, u32)) -> Timestamps {
    let at = |seconds: u32| Timespec { tv_sec: i64::from(seconds), tv_nsec: 0 };
    Timestamps { last_access: at(accessed), last_modification: at(changed) }
}

/// As version 3 has it: what is there already is not replaced.
pub(super) fn rename(from: &Path, to: &Path) -> io::Result<()> {
    match rustix::fs::renameat_with(CWD, from, CWD, to, RenameFlags::NOREPLACE) {
        // Not every file system has it.
        Err(rustix::io::Errno::INVAL | rustix::io::Errno::NOSYS) => {
            if to.symlink_metadata().is_ok() {
                return Err(io::ErrorKind::AlreadyExists.into());
            }
            std::fs::rename(from, to)
        }
        done => Ok(done?),
    }
}

/// The absolute path without links; its last part need not exist.
pub(super) fn real(path: &Path) -> io::Result<std::path::PathBuf> {
    match path.canonicalize() {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let name = path.file_name().ok_or(error)?;
            let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty());
            Ok(parent.unwrap_or(Path::new(".")).canonicalize()?.join(name))
        }
        done => done,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn renaming_does_not_replace() {
        let folder = tempfile::tempdir().unwrap();
        let (a, b, c) = (folder.path().join("a"), folder.path().join("b"), folder.path().join("c"));
        std::fs::write(&a, "a").unwrap();
        std::fs::write(&b, "b").unwrap();
        assert_eq!(rename(&a, &b).unwrap_err().kind(), io::ErrorKind::AlreadyExists);
        rename(&a, &c).unwrap();
        assert_eq!(std::fs::read_to_string(&c).unwrap(), "a");
    }

    #[test]
    fn a_real_path_may_end_in_something_new() {
        let folder = tempfile::tempdir().unwrap();
        let real_folder = folder.path().canonicalize().unwrap();
        assert_eq!(real(&folder.path().join("x/../new")).ok(), None);
        assert_eq!(real(&folder.path().join("./new")).unwrap(), real_folder.join("new"));
        assert_eq!(real(Path::new("/")).unwrap(), Path::new("/"));
    }
}
