//! One file of a log: records one after the other, each with its stream, its time and its bytes.
//!
//! Invariant: the file is never longer than its last whole record; what a crash left behind it is cut off when it is opened.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use sandglass_sandbox::Timestamp;

use super::store::Frame;
use crate::tail::Stream;

const MAGIC: u8 = 0xa7;
/// Magic, stream, two zeros, length, milliseconds since the epoch.
pub(super) const HEADER: usize = 16;
/// Longer output becomes several records, so that a reader of few bytes does not read many.
pub(super) const MAX_RECORD: usize = 32 << 10;
/// Bytes of a file between two entries of its index.
const INDEX_STEP: u64 = 16 << 10;
/// A longer file was not written here.
const MAX_FILE: u64 = 64 << 20;

/// What is known of a file without reading it.
#[derive(Debug)]
pub(super) struct Segment {
    pub(super) path: PathBuf,
    /// The offsets it has: from the first up to, not including, the second.
    pub(super) start: u64,
    pub(super) end: u64,
    /// Of the file.
    pub(super) size: u64,
    /// Some records: offset, and place in the file. In order, and the first record is in it.
    index: Vec<(u64, u64)>,
}

#[derive(Clone, Copy)]
struct Header {
    stream: Stream,
    len: usize,
    time: Timestamp,
}

impl Header {
    fn encode(self) -> [u8; HEADER] {
        let mut bytes = [0; HEADER];
        bytes[0] = MAGIC;
        bytes[1] = match self.stream {
            Stream::Stdout => 1,
            Stream::Stderr => 2,
        };
        bytes[4..8].copy_from_slice(&u32::try_from(self.len).unwrap_or(u32::MAX).to_le_bytes());
        bytes[8..].copy_from_slice(&self.time.as_millis().to_le_bytes());
        bytes
    }

    fn decode(bytes: &[u8]) -> Option<Header> {
        let bytes: &[u8; HEADER] = bytes.get(..HEADER)?.try_into().ok()?;
        let stream = match bytes[1] {
            1 => Stream::Stdout,
            2 => Stream::Stderr,
            _ => return None,
        };
        let len = usize::try_from(u32::from_le_bytes(bytes[4..8].try_into().ok()?)).ok()?;
        let time = Timestamp::clamped(i64::from_le_bytes(bytes[8..].try_into().ok()?));
        (bytes[0] == MAGIC && (1..=MAX_RECORD).contains(&len)).then_some(Header { stream, len, time })
    }
}

impl Segment {
    /// A new file for what comes at that offset.
    pub(super) fn create(folder: &Path, start: u64) -> io::Result<(Segment, File)> {
        let path = folder.join(format!("{start:016x}.log"));
        let file = OpenOptions::new().append(true).create(true).truncate(false).mode(0o600).open(&path)?;
        file.set_len(0)?;
        Ok((Segment { path, start, end: start, size: 0, index: Vec::new() }, file))
    }

    /// The first offset that a file's name tells.
    pub(super) fn start_in(name: &str) -> Option<u64> {
        let digits = name.strip_suffix(".log").filter(|digits| digits.len() == 16)?;
        u64::from_str_radix(digits, 16).ok()
    }

    /// Reads a file that is there, and cuts off what is no whole record.
    pub(super) fn recover(path: PathBuf, start: u64) -> io::Result<Segment> {
        let mut bytes = Vec::new();
        File::open(&path)?.take(MAX_FILE).read_to_end(&mut bytes)?;
        let mut segment = Segment { path, start, end: start, size: 0, index: Vec::new() };
        let mut rest = bytes.as_slice();
        while let Some(header) = Header::decode(rest) {
            let Some(after) = rest.get(HEADER + header.len..) else { break };
            segment.grow(header.len);
            rest = after;
        }
        if !rest.is_empty() {
            OpenOptions::new().write(true).open(&segment.path)?.set_len(segment.size)?;
        }
        Ok(segment)
    }

    /// Opens the file for more.
    pub(super) fn reopen(&self) -> io::Result<File> {
        OpenOptions::new().append(true).open(&self.path)
    }

    /// Adds one record of at most [`MAX_RECORD`] bytes.
    pub(super) fn append(
        &mut self,
        file: &mut File,
        stream: Stream,
        bytes: &[u8],
        time: Timestamp,
    ) -> io::Result<()> {
        let mut record = Vec::with_capacity(HEADER + bytes.len());
        record.extend_from_slice(&Header { stream, len: bytes.len(), time }.encode());
        record.extend_from_slice(bytes);
        if let Err(error) = file.write_all(&record) {
            // Half a record would hide all that follow it.
            let _ = file.set_len(self.size);
            return Err(error);
        }
        self.grow(bytes.len());
        Ok(())
    }

    fn grow(&mut self, len: usize) {
        if self.index.last().is_none_or(|(_, place)| self.size >= place + INDEX_STEP) {
            self.index.push((self.end, self.size));
        }
        self.end += len as u64;
        self.size += (HEADER + len) as u64;
    }

    /// The frames from an offset within this file, of at most `most` bytes unless the first one is longer.
    pub(super) fn read(&self, source: &str, from: u64, most: usize) -> io::Result<Vec<Frame>> {
        let entry = self.index.partition_point(|(offset, _)| *offset <= from).checked_sub(1);
        let Some((mut offset, mut place)) = entry.and_then(|entry| self.index.get(entry)).copied() else {
            return Ok(Vec::new());
        };
        let file = File::open(&self.path)?;
        let mut frames = Vec::new();
        let mut taken = 0;
        while place < self.size && taken < most {
            let mut head = [0; HEADER];
            file.read_exact_at(&mut head, place)?;
            let header = Header::decode(&head).ok_or_else(|| io::Error::other("no record at its place"))?;
            let end = offset + header.len as u64;
            if end > from {
                let skip = usize::try_from(from.saturating_sub(offset)).unwrap_or(0);
                let mut data = vec![0; header.len - skip];
                if taken > 0 && taken + data.len() > most {
                    break;
                }
                file.read_exact_at(&mut data, place + (HEADER + skip) as u64)?;
                taken += data.len();
                frames.push(Frame {
                    source: source.to_owned(),
                    stream: header.stream,
                    offset: offset + skip as u64,
                    time: header.time,
                    data,
                });
            }
            offset = end;
            place += (HEADER + header.len) as u64;
        }
        Ok(frames)
    }
}
