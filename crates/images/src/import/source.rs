//! Where an import's blobs are: a directory, or offsets in a tar file.
//!
//! Nothing is extracted: an uncompressed archive is read in place, a compressed one is first decompressed into the
//! workspace. Invariant: a name from a manifest never leads out of the source.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io::{self, BufReader, Read, Seek as _, SeekFrom};
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

use rustix::fs::{Mode, OFlags, ResolveFlags};
use rustix::io::Errno;

use crate::compression::{Compression, decompress, read_error};
use crate::error::ImageError;
use crate::layers::LayerArchive;
use crate::limits::UnpackLimits;
use crate::lock::Workspace;
use crate::tar_reader::{EntryKind, TarReader};
use crate::unpack::Metered;

/// An archive with more members than this holds files, not images.
const MAX_MEMBERS: usize = 20_000;
/// What a root file system has at its top and an image archive has not.
const ROOT_NAMES: &[&str] = &[
    "bin", "boot", "dev", "etc", "home", "lib", "lib64", "opt", "proc", "root", "sbin", "sys", "tmp", "usr",
    "var",
];

/// What a path turned out to hold.
pub(super) enum Contents {
    RootFilesystem,
    Images(Source),
}

pub(super) enum Source {
    Directory(PathBuf),
    Archive { path: PathBuf, members: HashMap<String, Member> },
}

#[derive(Clone, Debug)]
pub(super) enum Member {
    Data { offset: u64, length: u64 },
    Link(String),
}

/// Looks at what is at `path`.
pub(super) fn open(
    path: &Path,
    workspace: &Workspace,
    limits: &UnpackLimits,
) -> Result<Contents, ImageError> {
    let meta = fs::metadata(path).map_err(|e| match e.kind() {
        io::ErrorKind::NotFound => ImageError::NotFound {
            reference: path.display().to_string(),
            place: "on this machine".to_owned(),
        },
        _ => ImageError::io(format!("reading {}", path.display()), e),
    })?;
    if meta.is_dir() {
        if ["index.json", "manifest.json"].iter().any(|name| path.join(name).is_file()) {
            return Ok(Contents::Images(Source::Directory(path.to_owned())));
        }
        let shown = path.display();
        return Err(ImageError::Unsupported(format!(
            "directory {shown}: it has no index.json or manifest.json"
        )));
    }
    let file = File::open(path).map_err(|e| ImageError::io(format!("reading {}", path.display()), e))?;
    let mut head = Vec::new();
    (&file).take(8).read_to_end(&mut head).map_err(read_error)?;
    (&file).rewind().map_err(read_error)?;
    if Compression::detect(&head)? == Compression::Plain {
        return scan_plain(path, file);
    }
    let never = AtomicBool::new(false);
    let metered = || -> Result<_, ImageError> {
        let input = File::open(path).map_err(read_error)?;
        let plain = decompress(BufReader::with_capacity(256 << 10, input))?;
        Ok(Metered::new(plain, meta.len(), limits, &never))
    };
    if scan(TarReader::new(BufReader::new(metered()?)))?.is_none() {
        return Ok(Contents::RootFilesystem);
    }
    let plain_path = workspace.path().join("archive.tar");
    let mut plain =
        File::create_new(&plain_path).map_err(|e| ImageError::io("decompressing an archive", e))?;
    let mut input = metered()?;
    let mut buffer = vec![0; 256 << 10];
    loop {
        let n = input.read(&mut buffer).map_err(read_error)?;
        if n == 0 {
            break;
        }
        io::Write::write_all(&mut plain, &buffer[..n])
            .map_err(|e| ImageError::io("decompressing an archive", e))?;
    }
    plain.rewind().map_err(read_error)?;
    scan_plain(&plain_path, File::open(&plain_path).map_err(read_error)?)
}

fn scan_plain(path: &Path, file: File) -> Result<Contents, ImageError> {
    let reader = TarReader::with_skip(BufReader::new(file), |input, count| {
        let count = i64::try_from(count).map_err(|_| io::Error::from(io::ErrorKind::InvalidData))?;
        input.seek_relative(count)
    });
    Ok(match scan(reader)? {
        Some(members) => Contents::Images(Source::Archive { path: path.to_owned(), members }),
        None => Contents::RootFilesystem,
    })
}

/// Lists an image archive's members; nothing when it is a root file system.
fn scan<R: Read>(mut reader: TarReader<R>) -> Result<Option<HashMap<String, Member>>, ImageError> {
    let mut members = HashMap::new();
    while let Some(entry) = reader.next_entry()? {
        let Some(name) = String::from_utf8(entry.path).ok().and_then(|name| normal(&name)) else { continue };
        let top = name.split('/').next().unwrap_or(&name);
        if ROOT_NAMES.contains(&top) || members.len() >= MAX_MEMBERS {
            return Ok(None);
        }
        let link = || String::from_utf8_lossy(&entry.link).into_owned();
        match entry.kind {
            EntryKind::File => {
                members.insert(name, Member::Data { offset: reader.position(), length: entry.size });
            }
            EntryKind::HardLink => {
                members.insert(name, Member::Link(link()));
            }
            EntryKind::Symlink => {
                // Old versions of Docker save a layer once and link to it, relative to the link.
                let parent = name.rsplit_once('/').map_or("", |(parent, _)| parent);
                let target = format!("{parent}/{}", link());
                members.insert(name, Member::Link(target));
            }
            _ => {}
        }
    }
    let is_image = members.contains_key("manifest.json")
        || (members.contains_key("index.json") && members.contains_key("oci-layout"));
    Ok(is_image.then_some(members))
}

/// Resolves `.` and `..` by name; nothing when the path leads out.
fn normal(path: &str) -> Option<String> {
    let mut parts: Vec<&str> = Vec::new();
    for part in path.split('/') {
        match part {
            "" | "." => {}
            ".." => drop(parts.pop()?),
            _ => parts.push(part),
        }
    }
    (!parts.is_empty()).then(|| parts.join("/"))
}

impl Source {
    /// Opens a blob; nothing if there is none of that name.
    pub(super) fn open_blob(&self, name: &str) -> Result<Option<LayerArchive>, ImageError> {
        match self {
            Self::Directory(root) => open_beneath(root, name),
            Self::Archive { path, members } => {
                let Some((offset, length)) = follow(members, name) else {
                    return Ok(None);
                };
                let mut file = File::open(path).map_err(read_error)?;
                file.seek(SeekFrom::Start(offset)).map_err(read_error)?;
                Ok(Some(LayerArchive { data: Box::new(file.take(length)), length }))
            }
        }
    }
}

fn follow(members: &HashMap<String, Member>, name: &str) -> Option<(u64, u64)> {
    let mut name = normal(name)?;
    for _ in 0..8 {
        match members.get(&name)? {
            Member::Data { offset, length } => return Some((*offset, *length)),
            Member::Link(target) => name = normal(target)?,
        }
    }
    None
}

fn open_beneath(root: &Path, name: &str) -> Result<Option<LayerArchive>, ImageError> {
    let failed = |e: Errno| ImageError::io(format!("reading {}", root.display()), e);
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK;
    let dir = rustix::fs::open(root, flags | OFlags::DIRECTORY, Mode::empty()).map_err(failed)?;
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS;
    let file = match rustix::fs::openat2(&dir, name, flags, Mode::empty(), resolve) {
        Ok(fd) => File::from(fd),
        Err(Errno::NOENT | Errno::NOTDIR) => return Ok(None),
        Err(Errno::XDEV | Errno::LOOP | Errno::NAMETOOLONG | Errno::INVAL) => {
            return Err(ImageError::corrupt("a manifest names a file outside the layout"));
        }
        Err(e) => return Err(failed(e)),
    };
    let meta = file.metadata().map_err(read_error)?;
    if !meta.is_file() {
        return Err(ImageError::corrupt("a manifest names something that is not a file"));
    }
    Ok(Some(LayerArchive { data: Box::new(file), length: meta.len() }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_do_not_lead_out() {
        assert_eq!(normal("./a/../b").as_deref(), Some("b"));
        assert_eq!(normal("a/../../b"), None);
        assert_eq!(normal("./"), None);
        let members = HashMap::from([
            ("a".to_owned(), Member::Link("b/x/../../c".to_owned())),
            ("c".to_owned(), Member::Data { offset: 1, length: 2 }),
            ("loop".to_owned(), Member::Link("loop".to_owned())),
        ]);
        assert_eq!(follow(&members, "a"), Some((1, 2)));
        assert_eq!(follow(&members, "loop"), None);
    }
}
