//! The log of one source: its files in the order of their offsets, the last of which grows.

use std::collections::VecDeque;
use std::fs::{self, DirBuilder, File};
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use sandglass_sandbox::Timestamp;

use super::segment::{HEADER, MAX_RECORD, Segment};
use super::store::{Extent, Frame};
use crate::tail::Stream;

pub(super) struct SourceLog {
    folder: PathBuf,
    segments: VecDeque<Segment>,
    /// The last file, while it takes more.
    active: Option<File>,
    end: u64,
    size: u64,
}

impl SourceLog {
    /// Takes up what is in a folder, or begins with nothing.
    pub(super) fn open(folder: PathBuf) -> io::Result<SourceLog> {
        DirBuilder::new().recursive(true).mode(0o700).create(&folder)?;
        let mut starts: Vec<(u64, PathBuf)> = fs::read_dir(&folder)?
            .flatten()
            .filter_map(|entry| Some((Segment::start_in(entry.file_name().to_str()?)?, entry.path())))
            .collect();
        starts.sort();
        let mut log = SourceLog { folder, segments: VecDeque::new(), active: None, end: 0, size: 0 };
        for (start, path) in starts {
            // Offsets only rise; a file that would go back is none of ours.
            if start < log.end {
                let _ = fs::remove_file(path);
                continue;
            }
            // One that cannot be read is a gap, and its offsets are not given out again.
            let Ok(segment) = Segment::recover(path, start) else {
                log.end = start;
                continue;
            };
            log.end = segment.end;
            log.size += segment.size;
            log.segments.push_back(segment);
        }
        log.active = log.segments.back().and_then(|segment| segment.reopen().ok());
        Ok(log)
    }

    pub(super) fn extent(&self) -> Extent {
        let kept = self.segments.iter().find(|segment| segment.end > segment.start);
        Extent { oldest: kept.map_or(self.end, |segment| segment.start), end: self.end }
    }

    /// Bytes on the disk.
    pub(super) fn size(&self) -> u64 {
        self.size
    }

    /// Adds output; a file takes at most `most` bytes. What cannot be written is lost, and the offsets move on.
    pub(super) fn append(&mut self, stream: Stream, bytes: &[u8], time: Timestamp, most: u64) {
        for piece in bytes.chunks(MAX_RECORD) {
            if self.write(stream, piece, time, most).is_err() {
                self.active = None;
            }
            self.end += piece.len() as u64;
        }
    }

    fn write(&mut self, stream: Stream, piece: &[u8], time: Timestamp, most: u64) -> io::Result<()> {
        let fits =
            |segment: &Segment| segment.size == 0 || segment.size + (HEADER + piece.len()) as u64 <= most;
        if self.active.is_none() || !self.segments.back().is_some_and(fits) {
            let (segment, file) = Segment::create(&self.folder, self.end)?;
            self.segments.push_back(segment);
            self.active = Some(file);
        }
        let (Some(file), Some(segment)) = (&mut self.active, self.segments.back_mut()) else {
            return Err(io::Error::other("no file to write to"));
        };
        segment.append(file, stream, piece, time)?;
        self.size += (HEADER + piece.len()) as u64;
        Ok(())
    }

    /// Gives up the oldest file; never the one that grows.
    pub(super) fn drop_oldest(&mut self) -> bool {
        if !self.has_old() {
            return false;
        }
        let Some(segment) = self.segments.pop_front() else { return false };
        self.size -= segment.size;
        let _ = fs::remove_file(&segment.path);
        true
    }

    pub(super) fn has_old(&self) -> bool {
        self.segments.len() > 1
    }

    /// Frames from an offset on, or from the oldest byte after it that is kept.
    pub(super) fn read(&self, source: &str, from: u64, most: usize) -> io::Result<Vec<Frame>> {
        for segment in self.segments.iter().filter(|segment| segment.end > from.max(segment.start)) {
            let frames = segment.read(source, from.max(segment.start), most)?;
            if !frames.is_empty() {
                return Ok(frames);
            }
        }
        Ok(Vec::new())
    }
}

/// The folder of a source: its name, with everything that is no plain character escaped.
pub(super) fn folder_of(root: &Path, source: &str) -> PathBuf {
    let mut name = String::with_capacity(source.len());
    for (at, byte) in source.bytes().enumerate() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'_' => name.push(char::from(byte)),
            b'.' if at > 0 => name.push('.'),
            _ => name.push_str(&format!("%{byte:02x}")),
        }
    }
    root.join(name)
}

/// The source whose folder has that name.
pub(super) fn source_in(name: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(name.len());
    let mut rest = name.bytes();
    while let Some(byte) = rest.next() {
        if byte == b'%' {
            let digits = [rest.next()?, rest.next()?];
            bytes.push(u8::from_str_radix(std::str::from_utf8(&digits).ok()?, 16).ok()?);
        } else {
            bytes.push(byte);
        }
    }
    String::from_utf8(bytes).ok()
}
