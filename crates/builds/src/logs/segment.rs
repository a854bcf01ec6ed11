//! The files of a log: each begins at the offset that its name says, and is a sequence of records.
//!
//! A record is a header (length and checksum, 4 bytes each, little-endian; time in Unix milliseconds, 8; step, 1) and the output. The checksum
//! covers everything after itself, so that a record that a crash cut short is recognised.

use std::{
    fs::File,
    io::{self, BufReader, Read, Seek, SeekFrom},
    path::{Path, PathBuf},
};

use sandglass_sandbox::Timestamp;

use crate::build::StepName;

pub(super) const HEADER: usize = 17;
/// Output in one record at most.
pub(super) const RECORD: usize = 64 * 1024;

/// A part of a log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Piece {
    Output {
        offset: u64,
        step: StepName,
        at: Timestamp,
        bytes: Vec<u8>,
    },
    /// What was written from `from` until before `to` is not kept.
    Elided {
        from: u64,
        to: u64,
    },
}

impl Piece {
    /// Where the next piece begins.
    pub fn end(&self) -> u64 {
        match self {
            Self::Output { offset, bytes, .. } => offset + bytes.len() as u64,
            Self::Elided { to, .. } => *to,
        }
    }

    /// The piece as it is shown: the output, or a line that says how much is missing.
    pub fn text(&self) -> Vec<u8> {
        match self {
            Self::Output { bytes, .. } => bytes.clone(),
            Self::Elided { from, to } => format!("\n[... {} bytes elided ...]\n", to - from).into_bytes(),
        }
    }
}

/// One record, encoded.
pub(super) fn encode(step: StepName, at: Timestamp, output: &[u8]) -> Vec<u8> {
    let mut body = Vec::with_capacity(HEADER + output.len());
    body.extend_from_slice(&(output.len() as u32).to_le_bytes());
    body.extend_from_slice(&[0; 4]);
    body.extend_from_slice(&at.as_millis().to_le_bytes());
    body.push(number(step));
    body.extend_from_slice(output);
    let sum = checksum(&body[..4], &body[8..]);
    body[4..8].copy_from_slice(&sum.to_le_bytes());
    body
}

/// The step's number in records: its place in [`StepName::ALL`], which is therefore only ever added to at the end.
fn number(step: StepName) -> u8 {
    StepName::ALL.iter().position(|s| *s == step).and_then(|at| u8::try_from(at).ok()).unwrap_or(u8::MAX)
}

/// FNV-1a over the length and everything after the checksum: for accidents, not for adversaries.
fn checksum(length: &[u8], rest: &[u8]) -> u32 {
    length
        .iter()
        .chain(rest)
        .fold(0x811c_9dc5, |sum, byte| (sum ^ u32::from(*byte)).wrapping_mul(0x0100_0193))
}

struct Record {
    at: Timestamp,
    step: StepName,
    output: Vec<u8>,
}

/// The next record; `None` at the end, or where a crash cut it.
fn read_record(file: &mut impl Read) -> io::Result<Option<Record>> {
    let mut header = [0; HEADER];
    if !filled(file, &mut header)? {
        return Ok(None);
    }
    let word = |at: usize| u32::from_le_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]]);
    let length = word(0) as usize;
    if length > RECORD {
        return Ok(None);
    }
    let mut output = vec![0; length];
    if !filled(file, &mut output)? {
        return Ok(None);
    }
    let mut sum = checksum(&header[..4], &header[8..]);
    sum = output.iter().fold(sum, |sum, byte| (sum ^ u32::from(*byte)).wrapping_mul(0x0100_0193));
    let step = StepName::ALL.get(usize::from(header[16])).copied();
    let Some(step) = step.filter(|_| sum == word(4)) else { return Ok(None) };
    let mut millis = [0; 8];
    millis.copy_from_slice(&header[8..16]);
    Ok(Some(Record { at: Timestamp::clamped(i64::from_le_bytes(millis)), step, output }))
}

fn filled(file: &mut impl Read, buffer: &mut [u8]) -> io::Result<bool> {
    match file.read_exact(buffer) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(false),
        Err(error) => Err(error),
    }
}

pub(super) fn path(folder: &Path, start: u64) -> PathBuf {
    folder.join(format!("{start:020}.log"))
}

/// Where the files of the log begin, in order; none when there is no folder.
pub(super) fn starts(folder: &Path) -> io::Result<Vec<u64>> {
    let entries = match std::fs::read_dir(folder) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(error),
    };
    let mut starts = Vec::new();
    for entry in entries {
        let name = entry?.file_name();
        let start: Option<u64> =
            name.to_str().and_then(|name| name.strip_suffix(".log")).and_then(|n| n.parse().ok());
        starts.extend(start);
    }
    starts.sort_unstable();
    Ok(starts)
}

/// Bytes of output and of file up to the last whole record.
pub(super) fn measure(folder: &Path, start: u64) -> io::Result<(u64, u64)> {
    let mut file = BufReader::new(File::open(path(folder, start))?);
    let (mut output, mut length) = (0, 0);
    while let Some(record) = read_record(&mut file)? {
        output += record.output.len() as u64;
        length += (HEADER + record.output.len()) as u64;
    }
    Ok((output, length))
}

/// Where the log ends.
pub(super) fn end(folder: &Path) -> io::Result<u64> {
    match starts(folder)?.last() {
        Some(start) => Ok(start + measure(folder, *start)?.0),
        None => Ok(0),
    }
}

/// The piece at the offset, which is before `end`; `None` when nothing of it is there.
pub(super) fn piece_at(folder: &Path, offset: u64, end: u64) -> io::Result<Option<Piece>> {
    let starts = starts(folder)?;
    let next = starts.iter().copied().find(|start| *start > offset);
    let within = starts.iter().copied().rfind(|start| *start <= offset);
    if let Some(start) = within {
        match piece_within(folder, start, offset, end) {
            // Left out since the folder was read: look at what is there now.
            Err(error) if error.kind() == io::ErrorKind::NotFound => return piece_at(folder, offset, end),
            Err(error) => return Err(error),
            Ok(Some(piece)) => return Ok(Some(piece)),
            Ok(None) => {}
        }
    }
    let to = next.unwrap_or(end);
    Ok((offset < to).then_some(Piece::Elided { from: offset, to }))
}

fn piece_within(folder: &Path, start: u64, offset: u64, end: u64) -> io::Result<Option<Piece>> {
    let mut file = BufReader::new(File::open(path(folder, start))?);
    let mut at = start;
    loop {
        // Records before the offset are passed over unread.
        let mut header = [0; HEADER];
        if at >= end || !filled(&mut file, &mut header)? {
            return Ok(None);
        }
        let length = u64::from(u32::from_le_bytes([header[0], header[1], header[2], header[3]]));
        if length > RECORD as u64 {
            return Ok(None);
        }
        if at + length <= offset {
            file.seek_relative(i64::try_from(length).map_err(io::Error::other)?)?;
            at += length;
            continue;
        }
        file.seek(SeekFrom::Current(-(HEADER as i64)))?;
        let Some(record) = read_record(&mut file)? else { return Ok(None) };
        let skip = usize::try_from(offset - at).map_err(io::Error::other)?;
        let bytes = record.output[skip..].to_vec();
        return Ok(Some(Piece::Output { offset, step: record.step, at: record.at, bytes }));
    }
}
