//! Reading forwards in batches, and looking for the last lines from the end.
//!
//! Invariant: what is read from the disk is proportional to what is given. A batch begins where the one before it ended, not at the beginning of
//! its file; the folder is listed once a file.

use std::io;

use super::{
    files::Files,
    segment::{HEADER, Header, Piece, RECORD, Record},
};

/// Bytes of file in a batch, unless one record is more: headers count, so that short lines do not make many pieces.
const BATCH: u64 = 64 * 1024;

/// Where a record begins: the file, the offset in the log, and the position in the file.
#[derive(Debug, Clone, Copy)]
pub(super) struct Place {
    start: u64,
    offset: u64,
    position: u64,
}

impl Place {
    fn beginning(start: u64) -> Self {
        Self { start, offset: start, position: 0 }
    }

    fn pass(&mut self, length: usize) {
        self.offset += length as u64;
        self.position += (HEADER + length) as u64;
    }
}

/// Pieces that follow each other, and where to go on. `place` is none when that has to be found.
#[derive(Debug, Default)]
pub(super) struct Batch {
    pub(super) pieces: Vec<Piece>,
    pub(super) place: Option<Place>,
}

/// The pieces at the offset, which is before `end`; none when nothing is there. `place` is where the batch before it ended.
pub(super) fn batch(files: &Files, place: Option<Place>, offset: u64, end: u64) -> io::Result<Batch> {
    if let Some(place) = place
        && let Some(batch) = batch_within(files, place, offset, end)?
        && !batch.pieces.is_empty()
    {
        return Ok(batch);
    }
    loop {
        let starts = files.starts()?;
        let next = starts.iter().copied().find(|start| *start > offset);
        let within = starts.iter().copied().rfind(|start| *start <= offset);
        if let Some(start) = within {
            match batch_within(files, Place::beginning(start), offset, end)? {
                // Left out since the folder was read: look at what is there now.
                None => continue,
                Some(batch) if !batch.pieces.is_empty() => return Ok(batch),
                Some(_) => {}
            }
        }
        let to = next.unwrap_or(end);
        let pieces = if offset < to { vec![Piece::Elided { from: offset, to }] } else { Vec::new() };
        return Ok(Batch { pieces, place: None });
    }
}

/// The pieces of one file; `None` when it was left out.
fn batch_within(files: &Files, mut place: Place, offset: u64, end: u64) -> io::Result<Option<Batch>> {
    let Some(mut file) = files.open(place.start, place.position)? else { return Ok(None) };
    let mut pieces = Vec::new();
    let mut from = None;
    while place.offset < end && from.is_none_or(|from| place.position - from < BATCH) {
        let Some(header) = Header::read(&mut file)? else { break };
        // Records before the offset are passed over unread.
        if place.offset + header.length as u64 <= offset {
            file.seek_relative(i64::try_from(header.length).map_err(io::Error::other)?)?;
            place.pass(header.length);
            continue;
        }
        let Some(record) = header.record(&mut file)? else { break };
        from.get_or_insert(place.position);
        let skip = usize::try_from(offset.saturating_sub(place.offset)).map_err(io::Error::other)?;
        add(&mut pieces, record, place.offset, skip);
        place.pass(header.length);
    }
    Ok(Some(Batch { pieces, place: Some(place) }))
}

/// Adds a record without the part that is skipped. What one step said in one instant is one piece: many tools print a line at a time, and
/// nothing that a piece says is lost.
fn add(pieces: &mut Vec<Piece>, record: Record, begins: u64, skip: usize) {
    let output = &record.output[skip..];
    if let Some(Piece::Output { step, at, bytes, .. }) = pieces.last_mut()
        && (*step, *at) == (record.step, record.at)
        && bytes.len() + output.len() <= RECORD
    {
        bytes.extend_from_slice(output);
        return;
    }
    let (offset, bytes) = (begins + skip as u64, output.to_vec());
    pieces.push(Piece::Output { offset, step: record.step, at: record.at, bytes });
}

/// The offset at which the last `lines` lines before `end` begin. Reads files from the last one, and none before the one with that offset.
pub(super) fn tail_offset(files: &Files, end: u64, lines: usize) -> io::Result<u64> {
    if lines == 0 {
        return Ok(end);
    }
    let mut found = 0;
    for start in files.starts()?.into_iter().rev().filter(|start| *start < end) {
        let output = output(files, start, end)?;
        for (at, _) in output.iter().enumerate().rev().filter(|(_, byte)| **byte == b'\n') {
            let begins = start + at as u64 + 1;
            // No line begins at the end.
            if begins < end {
                found += 1;
            }
            if found == lines {
                return Ok(begins);
            }
        }
    }
    Ok(0)
}

/// The output in one file, which is an eighth of a window at most, or a mebibyte; nothing when it was left out.
fn output(files: &Files, start: u64, end: u64) -> io::Result<Vec<u8>> {
    let mut output = Vec::new();
    let Some(mut file) = files.open(start, 0)? else { return Ok(output) };
    while start + (output.len() as u64) < end {
        let Some(record) = Record::read(&mut file)? else { break };
        output.extend_from_slice(&record.output);
    }
    Ok(output)
}
