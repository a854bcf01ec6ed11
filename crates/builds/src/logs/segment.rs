//! What is in the files of a log: a sequence of records.
//!
//! A record is a header (length and checksum, 4 bytes each, little-endian; time in Unix milliseconds, 8; step, 1) and the output. The checksum
//! covers everything after itself, so that a record that a crash cut short is recognised.

use std::io::{self, Read};

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
    length.iter().chain(rest).fold(0x811c_9dc5, mixed)
}

fn mixed(sum: u32, byte: &u8) -> u32 {
    (sum ^ u32::from(*byte)).wrapping_mul(0x0100_0193)
}

/// What stands before the output of a record.
pub(super) struct Header {
    pub(super) length: usize,
    raw: [u8; HEADER],
}

impl Header {
    /// The next header; `None` at the end, or where there is none.
    pub(super) fn read(file: &mut impl Read) -> io::Result<Option<Self>> {
        let mut raw = [0; HEADER];
        if !filled(file, &mut raw)? {
            return Ok(None);
        }
        let length = u32::from_le_bytes([raw[0], raw[1], raw[2], raw[3]]) as usize;
        Ok((length <= RECORD).then_some(Self { length, raw }))
    }

    /// The record that the header begins; `None` where a crash cut it.
    pub(super) fn record(&self, file: &mut impl Read) -> io::Result<Option<Record>> {
        let mut output = vec![0; self.length];
        if !filled(file, &mut output)? {
            return Ok(None);
        }
        let raw = &self.raw;
        let sum = output.iter().fold(checksum(&raw[..4], &raw[8..]), mixed);
        let step = StepName::ALL.get(usize::from(raw[16])).copied();
        let Some(step) = step.filter(|_| raw[4..8] == sum.to_le_bytes()) else { return Ok(None) };
        let mut millis = [0; 8];
        millis.copy_from_slice(&raw[8..16]);
        Ok(Some(Record { at: Timestamp::clamped(i64::from_le_bytes(millis)), step, output }))
    }
}

pub(super) struct Record {
    pub(super) at: Timestamp,
    pub(super) step: StepName,
    pub(super) output: Vec<u8>,
}

impl Record {
    /// The next record; `None` at the end, or where a crash cut it.
    pub(super) fn read(file: &mut impl Read) -> io::Result<Option<Self>> {
        match Header::read(file)? {
            Some(header) => header.record(file),
            None => Ok(None),
        }
    }
}

fn filled(file: &mut impl Read, buffer: &mut [u8]) -> io::Result<bool> {
    match file.read_exact(buffer) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(false),
        Err(error) => Err(error),
    }
}
