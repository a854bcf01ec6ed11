//! Files on their way into a build sandbox, as one archive.

use std::{
    fs::{self, File},
    io::{self, BufWriter, Write},
    os::unix::fs::{MetadataExt, PermissionsExt},
    path::{Path, PathBuf},
};

use tempfile::NamedTempFile;

/// Who owns the files there, and which permissions they have.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Dress {
    /// As on the disk when absent.
    pub(super) ids: Option<(u32, u32)>,
    /// Instead of those on the disk.
    pub(super) mode: Option<u32>,
}

/// An archive that is being written. Paths in it are absolute, without their leading slash.
pub(super) struct Archive {
    builder: tar::Builder<BufWriter<NamedTempFile>>,
}

impl Archive {
    pub(super) fn begin(scratch: &Path) -> io::Result<Self> {
        let file = NamedTempFile::new_in(scratch)?;
        let mut builder = tar::Builder::new(BufWriter::with_capacity(256 << 10, file));
        builder.follow_symlinks(false);
        Ok(Self { builder })
    }

    /// A file, link or folder with all that is in it, as `target`. Nothing is followed. `keep` says what of it, by the path below `source`.
    pub(super) fn add(
        &mut self,
        source: &Path,
        target: &Path,
        dress: Dress,
        keep: &dyn Fn(&Path) -> bool,
    ) -> io::Result<()> {
        self.entry(source, target, Path::new(""), dress, keep)
    }

    fn entry(
        &mut self,
        source: &Path,
        target: &Path,
        below: &Path,
        dress: Dress,
        keep: &dyn Fn(&Path) -> bool,
    ) -> io::Result<()> {
        let meta = fs::symlink_metadata(source)?;
        let target = target.strip_prefix("/").unwrap_or(target);
        let mut header = tar::Header::new_gnu();
        let (uid, gid) = dress.ids.unwrap_or((meta.uid(), meta.gid()));
        header.set_uid(u64::from(uid));
        header.set_gid(u64::from(gid));
        header.set_mtime(u64::try_from(meta.mtime()).unwrap_or(0));
        header.set_mode(dress.mode.unwrap_or(meta.permissions().mode() & 0o7777));
        header.set_size(0);
        if meta.is_symlink() {
            header.set_entry_type(tar::EntryType::Symlink);
            return self.builder.append_link(&mut header, target, fs::read_link(source)?);
        }
        if meta.is_dir() {
            if !target.as_os_str().is_empty() {
                header.set_entry_type(tar::EntryType::Directory);
                self.builder.append_data(&mut header, target, io::empty())?;
            }
            let mut names: Vec<PathBuf> = fs::read_dir(source)?
                .map(|entry| entry.map(|e| PathBuf::from(e.file_name())))
                .collect::<io::Result<_>>()?;
            names.sort();
            for name in names {
                let inside = below.join(&name);
                if keep(&inside) {
                    self.entry(&source.join(&name), &target.join(&name), &inside, dress, keep)?;
                }
            }
            return Ok(());
        }
        if meta.is_file() {
            let file = File::open(source)?;
            header.set_entry_type(tar::EntryType::Regular);
            header.set_size(meta.len());
            return self.builder.append_data(&mut header, target, io::Read::take(file, meta.len()));
        }
        Ok(())
    }

    /// A file of this text.
    pub(super) fn text(&mut self, target: &Path, text: &str, dress: Dress) -> io::Result<()> {
        let mut header = tar::Header::new_gnu();
        let (uid, gid) = dress.ids.unwrap_or((0, 0));
        header.set_uid(u64::from(uid));
        header.set_gid(u64::from(gid));
        header.set_mode(dress.mode.unwrap_or(0o644));
        header.set_mtime(0);
        header.set_size(text.len() as u64);
        let target = target.strip_prefix("/").unwrap_or(target);
        self.builder.append_data(&mut header, target, text.as_bytes())
    }

    pub(super) fn finish(self) -> io::Result<NamedTempFile> {
        let mut out = self.builder.into_inner()?;
        out.flush()?;
        out.into_inner().map_err(|error| error.into_error())
    }
}

/// Fails when what an archive unpacks to is larger than `most` bytes, however small it is itself: holes are told in a few bytes, and every
/// entry takes room. Nothing is unpacked.
pub(super) fn bounded(archive: File, most: u64) -> io::Result<()> {
    let mut left = most;
    for entry in tar::Archive::new(archive).entries_with_seek()? {
        let room = entry?.size().saturating_add(ENTRY);
        left = left
            .checked_sub(room)
            .ok_or_else(|| io::Error::other(format!("it unpacks to more than {} MiB", most >> 20)))?;
    }
    Ok(())
}

/// Bytes that an entry takes at least.
const ENTRY: u64 = 4096;

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::bounded;

    #[test]
    fn an_archive_is_as_large_as_what_it_unpacks_to() {
        let dir = tempfile::tempdir().unwrap();
        let run = |line: &str| {
            assert!(Command::new("sh").args(["-c", line]).current_dir(&dir).status().unwrap().success())
        };
        run(
            "truncate -s 1T big; tar -S -cf sparse.tar big; head -c 100000 /dev/zero > plain; tar -cf plain.tar plain",
        );
        run("mkdir many; for n in $(seq 50); do : > many/$n; done; tar -cf many.tar many");
        let check = |name: &str, most| bounded(std::fs::File::open(dir.path().join(name)).unwrap(), most);
        assert!(std::fs::metadata(dir.path().join("sparse.tar")).unwrap().len() < 1 << 20);
        let refused = check("sparse.tar", 16 << 30).unwrap_err();
        assert_eq!(refused.to_string(), "it unpacks to more than 16384 MiB");
        assert!(check("plain.tar", 1 << 20).is_ok() && check("plain.tar", 100_000).is_err());
        assert!(check("many.tar", 1 << 20).is_ok() && check("many.tar", 200_000).is_err());
    }
}
