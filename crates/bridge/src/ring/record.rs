//! How records stand in a segment: length, checksum, content. What is not whole is not there.

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::wire::{BootId, Class};

/// Bytes in front of a record's content.
pub(super) const PREFIX: usize = 4 + SUM;
const SUM: usize = 8;
/// No record is larger; a length beyond it is damage.
const MOST: usize = 1024 * 1024;

/// First record of every segment.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Header {
    pub boot: BootId,
    /// The newest acknowledged event when the segment began: what is missing after it was dropped.
    pub acked: u64,
    /// The next number when the segment began.
    pub next: u64,
    /// Everything in earlier segments is obsolete.
    pub alone: bool,
}

#[derive(Debug, PartialEq, Eq)]
pub(super) enum Record<'a> {
    Header(Header),
    Event { seq: u64, class: Class, key: Option<&'a str>, json: &'a [u8] },
}

pub(super) fn header(header: &Header) -> Result<Vec<u8>, serde_json::Error> {
    let mut content = vec![b'H'];
    serde_json::to_writer(&mut content, header)?;
    Ok(sealed(&content))
}

/// The record of an event, and where in it the event's JSON begins.
pub(super) fn event(seq: u64, class: Class, key: Option<&str>, json: &[u8]) -> (Vec<u8>, usize) {
    let key = key.unwrap_or_default().as_bytes();
    let mut content = Vec::with_capacity(12 + key.len() + json.len());
    content.push(b'E');
    content.push(match class {
        Class::State => b's',
        Class::Progress => b'p',
        Class::Output => b'o',
    });
    content.extend_from_slice(&seq.to_le_bytes());
    content.extend_from_slice(&(key.len() as u16).to_le_bytes());
    content.extend_from_slice(key);
    let at = PREFIX + content.len();
    content.extend_from_slice(json);
    (sealed(&content), at)
}

fn sealed(content: &[u8]) -> Vec<u8> {
    let mut record = Vec::with_capacity(PREFIX + content.len());
    record.extend_from_slice(&(content.len() as u32).to_le_bytes());
    record.extend_from_slice(&Sha256::digest(content)[..SUM]);
    record.extend_from_slice(content);
    record
}

/// The record at the start of `bytes` and its length, or `None` where the bytes are cut or damaged.
pub(super) fn first(bytes: &[u8]) -> Option<(Record<'_>, usize)> {
    let (length, rest) = bytes.split_first_chunk::<4>()?;
    let (sum, rest) = rest.split_first_chunk::<SUM>()?;
    let length = u32::from_le_bytes(*length) as usize;
    let content = rest.get(..length).filter(|_| length <= MOST)?;
    if Sha256::digest(content)[..SUM] != *sum {
        return None;
    }
    Some((parse(content)?, PREFIX + length))
}

fn parse(content: &[u8]) -> Option<Record<'_>> {
    let (kind, rest) = content.split_first()?;
    if *kind == b'H' {
        return Some(Record::Header(serde_json::from_slice(rest).ok()?));
    }
    let (class, rest) = rest.split_first()?;
    let (seq, rest) = rest.split_first_chunk::<8>()?;
    let (key_length, rest) = rest.split_first_chunk::<2>()?;
    let (key, json) = rest.split_at_checked(usize::from(u16::from_le_bytes(*key_length)))?;
    let key = std::str::from_utf8(key).ok()?;
    let class = match class {
        b's' => Class::State,
        b'p' => Class::Progress,
        b'o' => Class::Output,
        _ => return None,
    };
    let known = *kind == b'E';
    known.then_some(Record::Event {
        seq: u64::from_le_bytes(*seq),
        class,
        key: (!key.is_empty()).then_some(key),
        json,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_is_whole_or_not_there() {
        let (mut bytes, at) = event(7, Class::Progress, Some("sync"), b"{}");
        let whole = Record::Event { seq: 7, class: Class::Progress, key: Some("sync"), json: b"{}" };
        assert_eq!(first(&bytes), Some((whole, bytes.len())));
        assert_eq!(&bytes[at..], b"{}");
        for cut in 0..bytes.len() {
            assert_eq!(first(&bytes[..cut]), None, "cut at {cut}");
        }
        for at in 0..bytes.len() {
            bytes[at] ^= 0x10;
            assert_eq!(first(&bytes), None, "damaged at {at}");
            bytes[at] ^= 0x10;
        }
    }
}
