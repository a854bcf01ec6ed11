//! The first message of a TLS connection, and the server name in it.
//!
//! Invariant: what is returned for the first bytes of a message stays so however many follow.

use super::first::{First, LIMIT, Protocol};
use super::host::Host;

const HANDSHAKE: u8 = 22;
const CLIENT_HELLO: u8 = 1;
const SERVER_NAME: u16 = 0;
const HOST_NAME: u8 = 0;
const RECORD_HEADER: usize = 5;
const RECORD: usize = 1 << 14;
const CHANGE_CIPHER_SPEC: u8 = 20;
const APPLICATION_DATA: u8 = 23;
/// What encryption may add to a record.
const EXPANSION: usize = 256;
const SERVER_HELLO: u8 = 2;
/// The random number of a server's hello that asks for another one of the client's (RFC 8446, 4.1.3).
const RETRY: [u8; 32] = [
    0xcf, 0x21, 0xad, 0x74, 0xe5, 0x9a, 0x61, 0x11, 0xbe, 0x1d, 0x8c, 0x02, 0x1e, 0x65, 0xb8, 0x91, 0xc2,
    0xa2, 0x11, 0x16, 0x7a, 0xbb, 0x8c, 0x5e, 0x07, 0x9e, 0x09, 0xe2, 0xc8, 0xa8, 0x33, 0x9c,
];
/// Bytes of a server's answer up to the end of its random number: record, message, version.
pub const ANSWER: usize = RECORD_HEADER + 4 + 2 + 32;

/// What a server answers a hello with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reply {
    /// It takes more bytes to say.
    More,
    /// The client is to say hello again, and could say another name.
    Retry,
    /// The client's hello was its last.
    Final,
}

/// Reads the first bytes of what a server sends; [`ANSWER`] of them are enough.
pub fn reply(bytes: &[u8]) -> Reply {
    match bytes {
        [] => Reply::More,
        [HANDSHAKE, ..] if bytes.len() < ANSWER => Reply::More,
        [HANDSHAKE, _, _, high, low, SERVER_HELLO, ..] => {
            // One in pieces could be anything; no server sends such.
            let in_pieces = usize::from(u16::from_be_bytes([*high, *low])) < ANSWER - RECORD_HEADER;
            if in_pieces || bytes[ANSWER - RETRY.len()..ANSWER] == RETRY {
                Reply::Retry
            } else {
                Reply::Final
            }
        }
        _ => Reply::Final,
    }
}

/// Reads the hello that follows when the server has asked for it, behind early data which such a server does not read.
pub fn read_again(bytes: &[u8]) -> First {
    let mut rest = bytes;
    while let [CHANGE_CIPHER_SPEC | APPLICATION_DATA, ..] = rest {
        let Some(header) = rest.first_chunk::<RECORD_HEADER>() else {
            return First::More;
        };
        let length = usize::from(u16::from_be_bytes([header[3], header[4]]));
        if header[1] != 3 || length > RECORD + EXPANSION {
            return First::Broken(Protocol::Tls);
        }
        match rest.get(RECORD_HEADER + length..) {
            Some(behind) => rest = behind,
            None => return First::More,
        }
    }
    let skipped = bytes.len() - rest.len();
    read(rest).behind(skipped)
}

/// Whether the bytes begin as a record does; nothing if it takes another byte to say. Of a handshake, some servers do not
/// look at the version.
pub fn begins(bytes: &[u8]) -> Option<bool> {
    match bytes {
        [HANDSHAKE, ..] => Some(true),
        [20..=24] => None,
        [20..=24, major, ..] => Some(*major == 3),
        _ => Some(false),
    }
}

/// A hello in the format before TLS, which carries no name.
pub fn begins_as_version_2(bytes: &[u8]) -> bool {
    matches!(bytes, [length, _, CLIENT_HELLO, 0 | 3, ..] if length & 0x80 != 0)
}

/// Reads the hello, which may be spread over several records.
pub fn read(bytes: &[u8]) -> First {
    let broken = First::Broken(Protocol::Tls);
    let mut message: Vec<u8> = Vec::new();
    let mut rest = bytes;
    let mut used = 0;
    loop {
        match rest.first() {
            None => return First::More,
            Some(&HANDSHAKE) => {}
            Some(_) => return broken,
        }
        if rest.get(1).is_some_and(|major| *major != 3) {
            return broken;
        }
        let Some(header) = rest.first_chunk::<RECORD_HEADER>() else {
            return First::More;
        };
        let length = usize::from(u16::from_be_bytes([header[3], header[4]]));
        if length == 0 || length > RECORD {
            return broken;
        }
        let here = &rest[RECORD_HEADER..];
        message.extend_from_slice(&here[..length.min(here.len())]);
        match wanted(&message) {
            Wanted::Unknown => {}
            Wanted::Never => return broken,
            Wanted::Bytes(whole) if message.len() >= whole => {
                // The connection may pass only with the whole record, whatever else is in it.
                if here.len() < length {
                    return First::More;
                }
                return finished(&message[4..whole], used + RECORD_HEADER + length);
            }
            Wanted::Bytes(_) => {}
        }
        if here.len() < length {
            return First::More;
        }
        used += RECORD_HEADER + length;
        rest = &here[length..];
    }
}

enum Wanted {
    Unknown,
    Never,
    Bytes(usize),
}

/// How long the message will be, from its first bytes.
fn wanted(message: &[u8]) -> Wanted {
    match message {
        [] => Wanted::Unknown,
        [kind, ..] if *kind != CLIENT_HELLO => Wanted::Never,
        [_, a, b, c, ..] => match u32::from_be_bytes([0, *a, *b, *c]) as usize + 4 {
            whole if whole > LIMIT => Wanted::Never,
            whole => Wanted::Bytes(whole),
        },
        _ => Wanted::Unknown,
    }
}

fn finished(hello: &[u8], length: usize) -> First {
    match server_name(hello) {
        Some(Name::Given(host)) => First::Named { protocol: Protocol::Tls, host, length },
        Some(Name::Absent) => First::Unnamed { protocol: Protocol::Tls, length },
        None => First::Broken(Protocol::Tls),
    }
}

enum Name {
    Given(Host),
    Absent,
}

/// Nothing if it is not exactly what the standard describes. With an encrypted inner hello, the name is the outer one's.
fn server_name(hello: &[u8]) -> Option<Name> {
    let mut reader = Reader(hello);
    reader.take(2 + 32)?;
    let session = reader.short()?;
    reader.take(usize::from(session))?;
    let suites = reader.long()?;
    reader.take(usize::from(suites)).filter(|suites| suites.len() >= 2 && suites.len() % 2 == 0)?;
    let methods = reader.short()?;
    reader.take(usize::from(methods)).filter(|methods| !methods.is_empty())?;
    if reader.0.is_empty() {
        return Some(Name::Absent);
    }
    let length = reader.long()?;
    let mut extensions = Reader(reader.take(usize::from(length))?);
    if session > 32 || !reader.0.is_empty() {
        return None;
    }
    let mut found = Name::Absent;
    while !extensions.0.is_empty() {
        let kind = extensions.long()?;
        let length = extensions.long()?;
        let value = extensions.take(usize::from(length))?;
        if kind == SERVER_NAME {
            if matches!(found, Name::Given(_)) {
                return None;
            }
            found = Name::Given(only_name(value)?);
        }
    }
    Some(found)
}

/// The list may hold several kinds of names, of which one was ever defined.
fn only_name(list: &[u8]) -> Option<Host> {
    let mut reader = Reader(list);
    let length = reader.long()?;
    let kind = reader.short()?;
    let size = reader.long()?;
    let name = reader.take(usize::from(size))?;
    let alone = reader.0.is_empty() && usize::from(length) == list.len() - 2 && kind == HOST_NAME;
    if alone { Host::parse(name) } else { None }
}

/// What is left of a message.
struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, count: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(count)?;
        self.0 = rest;
        Some(taken)
    }

    fn short(&mut self) -> Option<u8> {
        self.take(1).map(|one| one[0])
    }

    fn long(&mut self) -> Option<u16> {
        self.take(2).map(|two| u16::from_be_bytes([two[0], two[1]]))
    }
}
