//! ZeroMQ's wire protocol, version 3.0 without security, as far as a client of a Jupyter kernel needs it.
//!
//! Bytes in, frames out; the connection is elsewhere. Invariant: whatever the peer sends and however it is cut into
//! pieces, at most [`MAX_MESSAGE`] bytes and [`MAX_PARTS`] parts of one message are held.

/// What is kept of one message. Parts that do not fit are read past and counted.
pub const MAX_MESSAGE: usize = 16 << 20;
const MAX_PARTS: usize = 64;
const GREETING: usize = 64;

const MORE: u8 = 1;
const LONG: u8 = 2;
const COMMAND: u8 = 4;

/// Which of the patterns the connection follows, as told to the peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    Dealer,
    Subscriber,
}

/// A message of several parts; the parts that were too large are empty and their bytes counted.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Multipart {
    pub parts: Vec<Vec<u8>>,
    pub dropped: u64,
}

#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum ZmtpError {
    #[error("the peer does not speak ZMTP 3")]
    Greeting,
    #[error("the peer wants a security mechanism")]
    Mechanism,
    #[error("the peer sent a damaged frame")]
    Frame,
}

/// A subscription to everything: an empty prefix.
pub const SUBSCRIPTION: &[u8] = &[1];

/// Everything a client says before its first message. That one must wait for the peer's introduction: a publisher hangs
/// up when all comes at once.
pub fn opening(role: Role) -> Vec<u8> {
    let mut out = vec![0; GREETING];
    (out[0], out[9], out[10]) = (0xff, 0x7f, 3);
    out[12..16].copy_from_slice(b"NULL");
    let name: &[u8] = match role {
        Role::Dealer => b"DEALER",
        Role::Subscriber => b"SUB",
    };
    let mut ready = b"\x05READY\x0bSocket-Type\0\0\0".to_vec();
    ready.push(name.len() as u8);
    ready.extend_from_slice(name);
    frame(&mut out, COMMAND, &ready);
    out
}

/// Appends one message.
pub fn encode(out: &mut Vec<u8>, parts: &[&[u8]]) {
    for (at, part) in parts.iter().enumerate() {
        frame(out, if at + 1 < parts.len() { MORE } else { 0 }, part);
    }
}

fn frame(out: &mut Vec<u8>, flags: u8, body: &[u8]) {
    match u8::try_from(body.len()) {
        Ok(length) => out.extend_from_slice(&[flags, length]),
        Err(_) => {
            out.push(flags | LONG);
            out.extend_from_slice(&(body.len() as u64).to_be_bytes());
        }
    }
    out.extend_from_slice(body);
}

#[derive(Debug, Default)]
enum State {
    #[default]
    Greeting,
    /// Flags and length: two bytes, or nine.
    Header,
    Body {
        flags: u8,
        left: u64,
    },
    /// The rest of a part that is not kept.
    Skip {
        flags: u8,
        left: u64,
    },
}

/// Takes the peer's bytes apart.
#[derive(Debug, Default)]
pub struct Decoder {
    state: State,
    head: Vec<u8>,
    part: Vec<u8>,
    message: Multipart,
    held: usize,
    ready: bool,
}

impl Decoder {
    /// The peer has introduced itself.
    pub fn is_ready(&self) -> bool {
        self.ready
    }

    /// Feeds bytes; `sink` gets every complete message. After an error the connection is of no use.
    pub fn push(&mut self, mut bytes: &[u8], mut sink: impl FnMut(Multipart)) -> Result<(), ZmtpError> {
        while !bytes.is_empty() {
            match &mut self.state {
                State::Greeting => {
                    take(&mut self.head, GREETING, &mut bytes);
                    if self.head.len() == GREETING {
                        check_greeting(&self.head)?;
                        self.head.clear();
                        self.state = State::Header;
                    }
                }
                State::Header => self.header(&mut bytes, &mut sink)?,
                State::Body { flags, left } => {
                    let piece = bytes.len().min(usize::try_from(*left).unwrap_or(usize::MAX));
                    self.part.extend_from_slice(&bytes[..piece]);
                    bytes = &bytes[piece..];
                    *left -= piece as u64;
                    if *left == 0 {
                        let flags = *flags;
                        self.end_of_part(flags, &mut sink);
                    }
                }
                State::Skip { flags, left } => {
                    let piece = bytes.len().min(usize::try_from(*left).unwrap_or(usize::MAX));
                    bytes = &bytes[piece..];
                    *left -= piece as u64;
                    if *left == 0 {
                        let flags = *flags;
                        self.end_of_part(flags, &mut sink);
                    }
                }
            }
        }
        Ok(())
    }

    fn header(&mut self, bytes: &mut &[u8], sink: &mut impl FnMut(Multipart)) -> Result<(), ZmtpError> {
        take(&mut self.head, 1, bytes);
        let flags = self.head[0];
        if flags & !(MORE | LONG | COMMAND) != 0 || flags & (MORE | COMMAND) == MORE | COMMAND {
            return Err(ZmtpError::Frame);
        }
        let size = if flags & LONG == 0 { 2 } else { 9 };
        take(&mut self.head, size, bytes);
        if self.head.len() < size {
            return Ok(());
        }
        let length = self.head[1..].iter().fold(0_u64, |sum, byte| sum << 8 | u64::from(*byte));
        self.head.clear();
        if length > i64::MAX as u64 {
            return Err(ZmtpError::Frame);
        }
        let fits = usize::try_from(length).is_ok_and(|length| length <= MAX_MESSAGE - self.held);
        if fits && self.message.parts.len() < MAX_PARTS {
            self.state = State::Body { flags, left: length };
        } else {
            self.message.dropped += length;
            self.state = State::Skip { flags, left: length };
        }
        if length == 0 {
            self.end_of_part(flags, sink);
        }
        Ok(())
    }

    fn end_of_part(&mut self, flags: u8, sink: &mut impl FnMut(Multipart)) {
        self.state = State::Header;
        let part = std::mem::take(&mut self.part);
        if flags & COMMAND != 0 {
            // After READY there is nothing that a client of version 3.0 must answer.
            self.ready |= part.starts_with(b"\x05READY");
            return;
        }
        self.held += part.len();
        if self.message.parts.len() < MAX_PARTS {
            self.message.parts.push(part);
        }
        if flags & MORE == 0 {
            self.held = 0;
            sink(std::mem::take(&mut self.message));
        }
    }
}

/// Moves bytes until `held` has `size` of them.
fn take(held: &mut Vec<u8>, size: usize, bytes: &mut &[u8]) {
    let piece = size.saturating_sub(held.len()).min(bytes.len());
    held.extend_from_slice(&bytes[..piece]);
    *bytes = &bytes[piece..];
}

fn check_greeting(greeting: &[u8]) -> Result<(), ZmtpError> {
    if greeting[0] != 0xff || greeting[9] & 1 == 0 || greeting[10] < 3 {
        return Err(ZmtpError::Greeting);
    }
    if greeting[12..32].iter().ne(b"NULL".iter().chain(&[0; 16])) {
        return Err(ZmtpError::Mechanism);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn decode(chunks: &[&[u8]]) -> (Vec<Multipart>, Result<(), ZmtpError>, Decoder) {
        let (mut decoder, mut found) = (Decoder::default(), Vec::new());
        for chunk in chunks {
            if let Err(error) = decoder.push(chunk, |message| found.push(message)) {
                return (found, Err(error), decoder);
            }
        }
        (found, Ok(()), decoder)
    }

    #[test]
    fn what_we_say_is_what_we_understand() {
        let mut bytes = opening(Role::Dealer);
        encode(&mut bytes, &[b"one", b"", &[7; 300]]);
        let (found, done, decoder) = decode(&[&bytes]);
        assert_eq!((done, decoder.is_ready()), (Ok(()), true));
        assert_eq!(found, [Multipart { parts: vec![b"one".to_vec(), vec![], vec![7; 300]], dropped: 0 }]);
        assert!(opening(Role::Subscriber).ends_with(b"\0\0\0\x03SUB"));
    }

    #[test]
    fn a_message_that_is_too_large_is_read_past_and_counted() {
        let mut bytes = opening(Role::Dealer);
        let big = vec![1; MAX_MESSAGE + 1];
        encode(&mut bytes, &[b"head", &big, b"tail"]);
        encode(&mut bytes, &[b"next"]);
        let (found, done, decoder) = decode(&[&bytes]);
        assert_eq!(done, Ok(()));
        assert_eq!(found[0].parts, [b"head".to_vec(), vec![], b"tail".to_vec()]);
        assert_eq!(found[0].dropped, MAX_MESSAGE as u64 + 1);
        assert_eq!(found[1], Multipart { parts: vec![b"next".to_vec()], dropped: 0 });
        assert!(decoder.part.capacity() < MAX_MESSAGE);
    }

    #[test]
    fn strangers_are_refused() {
        let refused = |bytes: &[u8]| decode(&[bytes]).1.unwrap_err();
        assert_eq!(refused(&[b'H'; 64]), ZmtpError::Greeting);
        let mut greeting = opening(Role::Dealer)[..GREETING].to_vec();
        greeting[12..17].copy_from_slice(b"CURVE");
        assert_eq!(refused(&greeting), ZmtpError::Mechanism);
        let mut bytes = opening(Role::Dealer);
        bytes.push(0x80);
        assert_eq!(refused(&bytes), ZmtpError::Frame);
        bytes.pop();
        bytes.extend_from_slice(&[LONG, 0xff, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(refused(&bytes), ZmtpError::Frame);
    }

    proptest! {
        #[test]
        fn chunking_never_changes_the_messages(
            messages in proptest::collection::vec(
                proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..300), 1..5), 0..5),
            size in 1usize..200,
        ) {
            let mut bytes = opening(Role::Subscriber);
            for parts in &messages {
                encode(&mut bytes, &parts.iter().map(Vec::as_slice).collect::<Vec<_>>());
            }
            let (found, done, _) = decode(&bytes.chunks(size).collect::<Vec<_>>());
            prop_assert_eq!(done, Ok(()));
            prop_assert_eq!(found.into_iter().map(|m| m.parts).collect::<Vec<_>>(), messages);
        }

        #[test]
        fn no_bytes_make_it_hold_more_than_it_was_given(
            bytes in proptest::collection::vec(any::<u8>(), 0..2000),
            flags in proptest::collection::vec((0u8..8, any::<u8>()), 0..50),
        ) {
            let mut input = opening(Role::Dealer);
            input.extend(flags.iter().flat_map(|(flags, length)| [*flags, *length]));
            input.extend(&bytes);
            let (found, _, decoder) = decode(&[&input]);
            let kept: usize = found.iter().flat_map(|m| &m.parts).map(Vec::len).sum();
            prop_assert!(kept + decoder.part.len() <= input.len(), "invented bytes");
            prop_assert!(found.iter().all(|m| m.parts.len() <= MAX_PARTS), "too many parts");
        }
    }
}
