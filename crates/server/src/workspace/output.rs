//! What the services and hooks of a sandbox wrote, as its agent sends it on.
//!
//! ```text
//!   <state_dir>/workspaces/<id>/output/<source>/<offset of the first byte>
//! ```
//!
//! Kept until the sandbox is forgotten, so it outlives the box. Of each source the end is kept, at least [`PIECE`] bytes and at most twice as
//! many. Invariant: a byte lies at the offset that the agent gave it; what is lost in between is a gap and never a wrong place.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, Read, Seek, SeekFrom, Write},
    os::unix::fs::{DirBuilderExt, OpenOptionsExt},
    path::{Path, PathBuf},
};

use sandglass_bridge::server::LogPiece;
use sha2::{Digest, Sha256};

/// Bytes of a file, after which the next one is begun.
const PIECE: u64 = 1 << 20;
/// Files of a source.
const PIECES: usize = 2;
/// Offsets from here on are nobody's.
const FARTHEST: u64 = 1 << 60;
/// The most bytes that are read at once.
const MOST: u64 = 1 << 20;

/// A part of the output of one source.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Output {
    /// Where the text begins; later than what was asked for when that is not kept any more.
    pub offset: u64,
    /// Where to read on.
    pub next: u64,
    pub text: Vec<u8>,
}

/// The output of one sandbox.
#[derive(Debug)]
pub(super) struct Outputs(PathBuf);

impl Outputs {
    /// Under a folder of the sandbox's own.
    pub(super) fn of(folder: &Path) -> Self {
        Self(folder.join("output"))
    }

    /// Blocking.
    pub(super) fn append(&self, pieces: &[LogPiece]) -> io::Result<()> {
        pieces.iter().try_for_each(|piece| self.append_one(piece))
    }

    fn append_one(&self, piece: &LogPiece) -> io::Result<()> {
        // No source writes so much; whoever says so would make everything after it old.
        if piece.offset >= FARTHEST {
            return Ok(());
        }
        let folder = self.0.join(file_name(&piece.source));
        fs::DirBuilder::new().recursive(true).mode(0o700).create(&folder)?;
        let mut starts = starts(&folder)?;
        let last = match starts.last() {
            None => None,
            Some(start) => Some((*start, fs::metadata(folder.join(start.to_string()))?.len())),
        };
        // A server that was killed may have written what it did not confirm; then it comes again.
        let end = last.map_or(0, |(start, length)| start + length);
        let known = usize::try_from(end.saturating_sub(piece.offset)).unwrap_or(usize::MAX);
        let Some(fresh) = piece.bytes.get(known..).filter(|bytes| !bytes.is_empty()) else { return Ok(()) };
        let offset = piece.offset.max(end);
        let start = match last {
            Some((start, length)) if offset == end && length < PIECE => start,
            _ => offset,
        };
        let path = folder.join(start.to_string());
        let mut file = OpenOptions::new().append(true).create(true).mode(0o600).open(path)?;
        file.write_all(fresh)?;
        if !starts.contains(&start) {
            starts.push(start);
        }
        let old = starts.len().saturating_sub(PIECES);
        starts[..old].iter().try_for_each(|start| fs::remove_file(folder.join(start.to_string())))
    }

    /// What there is from an offset on, one file's at most. `None` when the source never wrote anything. Blocking.
    pub(super) fn read(&self, source: &str, from: u64) -> io::Result<Option<Output>> {
        let folder = self.0.join(file_name(source));
        let mut output = Output { offset: from, next: from, text: Vec::new() };
        let starts = starts(&folder)?;
        if starts.is_empty() {
            return Ok(None);
        }
        for start in starts {
            let Some(mut file) = open(&folder.join(start.to_string()))? else { continue };
            let end = start + file.metadata()?.len();
            if end <= from {
                continue;
            }
            output.offset = from.max(start);
            file.seek(SeekFrom::Start(output.offset - start))?;
            file.take(MOST).read_to_end(&mut output.text)?;
            output.next = output.offset + output.text.len() as u64;
            break;
        }
        Ok(Some(output))
    }

    /// The last lines. Blocking.
    pub(super) fn tail(&self, source: &str, lines: usize) -> io::Result<Option<Output>> {
        let mut from = 0;
        let mut whole = Output::default();
        let mut any = false;
        while let Some(part) = self.read(source, from)? {
            any = true;
            if part.text.is_empty() {
                break;
            }
            if part.offset != whole.next {
                whole = Output { offset: part.offset, ..Output::default() };
            }
            whole.text.extend_from_slice(&part.text);
            (whole.next, from) = (part.next, part.next);
        }
        let body = whole.text.strip_suffix(b"\n").unwrap_or(&whole.text);
        let breaks = body.iter().enumerate().rev().filter(|(_, byte)| **byte == b'\n');
        let cut = match lines {
            0 => whole.text.len(),
            lines => breaks.map(|(at, _)| at + 1).nth(lines - 1).unwrap_or(0),
        };
        whole.text.drain(..cut);
        whole.offset += cut as u64;
        Ok(any.then_some(whole))
    }
}

fn open(path: &Path) -> io::Result<Option<File>> {
    match File::open(path) {
        Ok(file) => Ok(Some(file)),
        // It made room for newer ones meanwhile.
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// Where the files of a source begin, in order.
fn starts(folder: &Path) -> io::Result<Vec<u64>> {
    let entries = match fs::read_dir(folder) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(error),
    };
    let mut starts = Vec::new();
    for entry in entries {
        starts.extend(entry?.file_name().to_str().and_then(|name| name.parse::<u64>().ok()));
    }
    starts.sort_unstable();
    Ok(starts)
}

/// A name of an agent's choice as that of a folder.
fn file_name(source: &str) -> String {
    let plain = |b: u8| b.is_ascii_alphanumeric() || b"_-".contains(&b);
    if !source.is_empty() && source.len() <= 64 && source.bytes().all(plain) {
        return source.to_owned();
    }
    let digest = Sha256::digest(source.as_bytes());
    let hex: String = digest[..16].iter().map(|byte| format!("{byte:02x}")).collect();
    // No name of the other kind has a dot.
    format!("{hex}.")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn piece(source: &str, offset: u64, text: &[u8]) -> LogPiece {
        LogPiece { source: source.into(), stream: "output".into(), offset, lost: 0, bytes: text.to_vec() }
    }

    #[test]
    fn bytes_lie_where_the_agent_counted_them() {
        let dir = tempfile::tempdir().unwrap();
        let outputs = Outputs::of(dir.path());
        assert_eq!(outputs.read("web", 0).unwrap(), None);
        outputs.append(&[piece("web", 0, b"one\ntwo\n"), piece("../x", 0, b"no way out")]).unwrap();
        outputs.append(&[piece("web", 8, b"three\n")]).unwrap();
        let read = |from| outputs.read("web", from).unwrap().unwrap();
        assert_eq!(read(4), Output { offset: 4, next: 14, text: b"two\nthree\n".to_vec() });
        assert_eq!(read(14), Output { offset: 14, next: 14, text: Vec::new() });
        // Ten bytes were lost on the way.
        outputs.append(&[piece("web", 24, b"four\n")]).unwrap();
        assert_eq!(read(14), Output { offset: 24, next: 29, text: b"four\n".to_vec() });
        let tail = |lines| outputs.tail("web", lines).unwrap().unwrap();
        assert_eq!((tail(1).offset, tail(1).text), (24, b"four\n".to_vec()));
        assert_eq!(outputs.read("../x", 0).unwrap().unwrap().text, b"no way out");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1, "nothing is beside it");
        outputs.append(&[piece("web", 24, b"four\nfive\n"), piece("web", 0, b"one\n")]).unwrap();
        assert_eq!(read(24).text, b"four\nfive\n");
    }

    #[test]
    fn the_end_of_a_long_output_is_kept() {
        let dir = tempfile::tempdir().unwrap();
        let outputs = Outputs::of(dir.path());
        let line = [b'x'; 1 << 16];
        for number in 0..64_u64 {
            outputs.append(&[piece("web", number << 16, &line)]).unwrap();
        }
        let first = outputs.read("web", 0).unwrap().unwrap();
        assert_eq!(first.offset, 2 << 20);
        let last = outputs.read("web", first.next).unwrap().unwrap();
        assert_eq!((last.offset, last.next), (3 << 20, 4 << 20));
        assert_eq!(outputs.tail("web", 0).unwrap().unwrap().text, b"");
    }
}
