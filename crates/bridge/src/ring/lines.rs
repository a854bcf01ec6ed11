//! Events as the lines that are kept and sent.

use std::io;

use jiff::Timestamp;
use serde_json::value::to_raw_value;

use crate::wire::{Event, Gap};

/// An event as one line. Data that was written with line breaks is written anew.
pub(super) fn one_line(event: &Event) -> serde_json::Result<Vec<u8>> {
    let json = serde_json::to_vec(event)?;
    if !json.contains(&b'\n') {
        return Ok(json);
    }
    let data: serde_json::Value = serde_json::from_str(event.data.get())?;
    let event = Event { data: to_raw_value(&data)?, ..event.clone() };
    serde_json::to_vec(&event)
}

/// Refuses what is not the event that it should be.
pub(super) fn readable(seq: u64, json: Vec<u8>) -> io::Result<Vec<u8>> {
    let prefix = format!("{{\"seq\":{seq},");
    if json.starts_with(prefix.as_bytes()) && json.ends_with(b"}") && !json.contains(&b'\n') {
        Ok(json)
    } else {
        Err(io::ErrorKind::InvalidData.into())
    }
}

/// The event with another number.
pub(super) fn renumbered(from: u64, to: u64, json: Vec<u8>) -> io::Result<Vec<u8>> {
    if from == to {
        return Ok(json);
    }
    let mut event: Event = serde_json::from_slice(&json)?;
    event.seq = to;
    Ok(serde_json::to_vec(&event)?)
}

/// Appends a gap as a line.
pub(super) fn write_gap(body: &mut Vec<u8>, gap: Gap, time: Timestamp) {
    // Numbers, a time and fixed names cannot fail to be written.
    if let Ok(line) = serde_json::to_vec(&gap.into_event(time)) {
        body.extend_from_slice(&line);
        body.push(b'\n');
    }
}
