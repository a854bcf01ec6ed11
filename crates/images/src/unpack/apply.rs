//! Applies an archive's entries to a tree, in order and within limits.
//!
//! Invariant: memory does not grow with the archive. What must wait until the end (modes and times of directories) is
//! spooled to a file.

use std::ffi::CString;
use std::fs::File;
use std::io::{BufReader, BufWriter, Read, Seek as _, Write as _};
use std::path::Path;
use std::sync::atomic::AtomicBool;

use rustix::fs::FileType;
use serde::{Deserialize, Serialize};

use crate::compression::{decompress, read_error};
use crate::error::ImageError;
use crate::image::ImageDigest;
use crate::limits::UnpackLimits;
use crate::tar_reader::{Entry, EntryKind, Sparse, TarReader};
use crate::unpack::metered::Metered;
use crate::unpack::tree::{Place, Tree, TreePath, join};

const WHITEOUT: &[u8] = b".wh.";
const WHITEOUT_META: &[u8] = b".wh..wh.";
const WHITEOUT_OPAQUE: &[u8] = b".wh..wh..opq";
const CHUNK: usize = 128 << 10;

/// What is worth knowing about an unpacked layer.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct LayerFacts {
    /// Bytes of file content.
    pub(crate) size_bytes: u64,
    /// Entries that left something in the tree.
    pub(crate) entries: u64,
    /// The layer hides everything below it; overlayfs has no mark for the root itself.
    #[serde(default)]
    pub(crate) opaque_root: bool,
}

/// What an unpack needs besides its input.
pub(crate) struct Unpacking<'a> {
    /// An empty directory.
    pub(crate) target: &'a Path,
    /// A directory on the same file system for spooling.
    pub(crate) scratch: &'a Path,
    pub(crate) limits: &'a UnpackLimits,
    /// Bytes of input there are, for the ratio limit.
    pub(crate) compressed: u64,
    /// Makes the unpack stop soon.
    pub(crate) cancelled: &'a AtomicBool,
    /// The archive's digest is checked afterwards, so that its end marker may be missing as Docker allows.
    pub(crate) verified_later: bool,
}

/// Unpacks a compressed or plain archive, and returns the digest of its plain form.
pub(crate) fn unpack(
    input: impl std::io::BufRead + Send,
    job: &Unpacking<'_>,
) -> Result<(ImageDigest, LayerFacts), ImageError> {
    let plain = Metered::new(decompress(input)?, job.compressed, job.limits, job.cancelled);
    let mut reader = TarReader::new(BufReader::with_capacity(CHUNK, plain));
    let spool = tempfile::tempfile_in(job.scratch).map_err(|e| ImageError::io("making a spool file", e))?;
    let mut layer = Layer {
        tree: Tree::open(job.target)?,
        limits: job.limits,
        facts: LayerFacts::default(),
        seen: 0,
        content: 0,
        directories: BufWriter::new(spool),
        buffer: vec![0; CHUNK],
    };
    while let Some(entry) = reader.next_entry()? {
        layer.apply(&entry, &mut reader)?;
    }
    if !reader.ended() && (!job.verified_later || layer.seen == 0) {
        return Err(ImageError::corrupt("the archive has no end marker, so it may be cut short"));
    }
    let plain = reader.drain()?.into_inner();
    let facts = layer.finish()?;
    Ok((plain.digest(), facts))
}

struct Layer<'a> {
    tree: Tree,
    limits: &'a UnpackLimits,
    facts: LayerFacts,
    seen: u64,
    content: u64,
    directories: BufWriter<File>,
    buffer: Vec<u8>,
}

impl Layer<'_> {
    fn apply<R: Read>(&mut self, entry: &Entry, data: &mut TarReader<R>) -> Result<(), ImageError> {
        self.seen += 1;
        if self.seen > self.limits.max_entries {
            let limit = self.limits.max_entries;
            return Err(ImageError::TooLarge(format!("a layer has more than {limit} entries")));
        }
        if entry.kind == EntryKind::Ignored {
            return Ok(());
        }
        let path = TreePath::parse(&entry.path, self.limits.max_depth)?;
        let Some((parent, name)) = path.split() else {
            return self.apply_root(entry);
        };
        if parent.iter().any(|c| c.to_bytes().starts_with(WHITEOUT_META)) {
            // Bookkeeping of another union file system.
            return Ok(());
        }
        if let Some(hidden) = name.to_bytes().strip_prefix(WHITEOUT) {
            return self.apply_whiteout(parent, name.to_bytes(), hidden);
        }
        self.facts.entries += 1;
        let place = self.tree.place(parent, name)?;
        match entry.kind {
            EntryKind::Directory => {
                self.tree.ensure_directory(&place)?;
                self.spool_directory(path.components(), entry)?;
            }
            EntryKind::File => self.write_file(&place, entry, data)?,
            EntryKind::Symlink => self.tree.symlink(&entry.link, &place)?,
            EntryKind::HardLink => return self.apply_hard_link(&path, &place, entry),
            EntryKind::Fifo => self.tree.node(FileType::Fifo, (0, 0), &place)?,
            // Without privileges there are no devices; Docker's rootless mode leaves them out as well.
            EntryKind::Character | EntryKind::Block if !self.tree.privileged() => return Ok(()),
            EntryKind::Character => self.tree.node(FileType::CharacterDevice, entry.device, &place)?,
            EntryKind::Block => self.tree.node(FileType::BlockDevice, entry.device, &place)?,
            EntryKind::Ignored => return Ok(()),
        }
        self.tree.apply_metadata(&place, entry)
    }

    fn apply_root(&mut self, entry: &Entry) -> Result<(), ImageError> {
        if entry.kind != EntryKind::Directory {
            return Err(ImageError::corrupt("the root of a layer is not a directory"));
        }
        self.tree.apply_root_metadata(entry)?;
        self.spool_directory(&[], entry)
    }

    fn apply_whiteout(&mut self, parent: &[CString], name: &[u8], hidden: &[u8]) -> Result<(), ImageError> {
        if name == WHITEOUT_OPAQUE {
            self.facts.entries += 1;
            self.facts.opaque_root |= parent.is_empty();
            return self.tree.opaque(parent);
        }
        if name.starts_with(WHITEOUT_META) {
            return Ok(());
        }
        if matches!(hidden, b"" | b"." | b"..") {
            return Err(ImageError::corrupt("a whiteout for no file"));
        }
        self.facts.entries += 1;
        let hidden = CString::new(hidden).expect("a checked component has no zero byte");
        let place = self.tree.place(parent, &hidden)?;
        self.tree.whiteout(&place)
    }

    fn apply_hard_link(&mut self, path: &TreePath, place: &Place, entry: &Entry) -> Result<(), ImageError> {
        let target = TreePath::parse(&entry.link, self.limits.max_depth)?;
        if target == *path {
            return Ok(());
        }
        let missing = || ImageError::corrupt("a hard link to a file that is not in the layer");
        let from = self.tree.existing_place(&target)?.ok_or_else(missing)?;
        match from.stat()? {
            None => Err(missing()),
            Some(stat) if FileType::from_raw_mode(stat.st_mode) == FileType::Directory => {
                Err(ImageError::corrupt("a hard link to a directory"))
            }
            Some(_) => self.tree.hard_link(&from, place),
        }
    }

    fn write_file<R: Read>(
        &mut self,
        place: &Place,
        entry: &Entry,
        data: &mut TarReader<R>,
    ) -> Result<(), ImageError> {
        let logical = entry.sparse.as_ref().map_or(entry.size, |s| s.real_size);
        self.content = self.content.saturating_add(logical);
        if self.content > self.limits.max_bytes {
            let limit = self.limits.max_bytes;
            return Err(ImageError::TooLarge(format!("a layer holds more than {limit} bytes of files")));
        }
        self.facts.size_bytes += entry.size;
        let mut file = self.tree.create_file(place)?;
        match &entry.sparse {
            None => self.copy(&mut file, entry.size, data),
            Some(Sparse { parts, real_size }) => {
                for &(offset, length) in parts {
                    file.seek(std::io::SeekFrom::Start(offset)).map_err(write_failed)?;
                    self.copy(&mut file, length, data)?;
                }
                file.set_len(*real_size).map_err(write_failed)
            }
        }
    }

    fn copy<R: Read>(
        &mut self,
        file: &mut File,
        length: u64,
        data: &mut TarReader<R>,
    ) -> Result<(), ImageError> {
        let mut left = length;
        while left > 0 {
            let want = usize::try_from(left).map_or(CHUNK, |left| left.min(CHUNK));
            let n = data.read_data(&mut self.buffer[..want])?;
            if n == 0 {
                return Err(read_error(std::io::ErrorKind::UnexpectedEof.into()));
            }
            file.write_all(&self.buffer[..n]).map_err(write_failed)?;
            left -= n as u64;
        }
        Ok(())
    }

    fn spool_directory(&mut self, path: &[CString], entry: &Entry) -> Result<(), ImageError> {
        let path = join(path);
        let length = u32::try_from(path.len()).expect("a checked path is short");
        let mut record = Vec::with_capacity(20 + path.len());
        record.extend_from_slice(&length.to_le_bytes());
        record.extend_from_slice(&entry.mode.to_le_bytes());
        record.extend_from_slice(&entry.mtime.0.to_le_bytes());
        record.extend_from_slice(&entry.mtime.1.to_le_bytes());
        record.extend_from_slice(&path);
        self.directories.write_all(&record).map_err(write_failed)
    }

    /// Gives directories their modes and times, now that nothing is written into them any more.
    fn finish(self) -> Result<LayerFacts, ImageError> {
        let mut spool = self.directories.into_inner().map_err(|e| write_failed(e.into_error()))?;
        spool.rewind().map_err(write_failed)?;
        let mut spool = BufReader::new(spool);
        let mut head = [0; 20];
        let field = |head: &[u8; 20], at: usize| {
            u32::from_le_bytes(head[at..at + 4].try_into().expect("four bytes of a fixed array"))
        };
        loop {
            match spool.read_exact(&mut head) {
                Ok(()) => {}
                Err(e) if e.kind() == std::io::ErrorKind::UnexpectedEof => return Ok(self.facts),
                Err(e) => return Err(write_failed(e)),
            }
            let mut path = vec![0; field(&head, 0) as usize];
            spool.read_exact(&mut path).map_err(write_failed)?;
            let seconds = i64::from_le_bytes(head[8..16].try_into().expect("eight bytes of a fixed array"));
            let path = TreePath::parse(&path, usize::MAX)?;
            self.tree.finish_directory(path.components(), field(&head, 4), (seconds, field(&head, 16)))?;
        }
    }
}

fn write_failed(error: std::io::Error) -> ImageError {
    ImageError::io("writing a layer's files", error)
}
