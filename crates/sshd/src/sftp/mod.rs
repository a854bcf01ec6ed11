//! The file transfer program behind the `sftp` subsystem: version 3 of the protocol with OpenSSH's extensions.
//!
//! It is a process of its own, started as the session's user like any other program of the session. So the kernel
//! checks every access as that user's, with all groups and limits, nothing in the server ever changes its identity,
//! and the end of the session ends it with everything it has open. Threads that change theirs would give the same
//! checks, but each request would need one, and what they block on would stay in the server.
//!
//! Requests are answered in order. A client that sends many at once has them all served before the answers are sent
//! together, so a transfer takes the time of its bytes and not of its round trips.

mod changes;
mod handles;
mod listing;
mod requests;
mod wire;

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::AsFd;

use self::requests::Requests;
use self::wire::Answers;

/// The longest packet that is accepted, without its length; what OpenSSH has.
const MAX_PACKET: usize = 256 << 10;
/// The most bytes of a file in one request or answer.
const MAX_PAYLOAD: usize = MAX_PACKET - 1024;
/// Answers are sent at the latest when there are this many bytes of them.
const FLUSH: usize = 256 << 10;

/// Serves one session as the user that the process runs as, until its input ends.
///
/// # Errors
///
/// When the input or output fails, or the input holds something else than packets of the protocol.
pub fn serve(mut input: impl Read, mut output: impl Write) -> io::Result<()> {
    let mut requests = Requests::new();
    let mut answers = Answers::default();
    let mut pending = Pending::default();
    while pending.fill(&mut input)? {
        while let Some(packet) = pending.next()? {
            requests.answer(packet, &mut answers).map_err(|_| io::Error::from(io::ErrorKind::InvalidData))?;
            if answers.bytes.len() >= FLUSH {
                output.write_all(&answers.bytes)?;
                answers.bytes.clear();
            }
        }
        output.write_all(&answers.bytes)?;
        output.flush()?;
        answers.bytes.clear();
    }
    Ok(())
}

/// [`serve`] on the standard input and output: what such a program's `main` does.
///
/// # Errors
///
/// As [`serve`].
pub fn serve_standard_streams() -> io::Result<()> {
    // Past the standard library's buffers, which look for ends of lines.
    let input = File::from(io::stdin().as_fd().try_clone_to_owned()?);
    serve(input, File::from(io::stdout().as_fd().try_clone_to_owned()?))
}

/// Bytes that were read, with whole packets at the front.
#[derive(Default)]
struct Pending {
    bytes: Vec<u8>,
    from: usize,
    until: usize,
}

impl Pending {
    /// Reads once; false at the end.
    fn fill(&mut self, input: &mut impl Read) -> io::Result<bool> {
        self.bytes.copy_within(self.from..self.until, 0);
        self.until -= self.from;
        self.from = 0;
        // There is always room, since a packet is taken out before there are two of the longest.
        self.bytes.resize(2 * (MAX_PACKET + 4), 0);
        loop {
            match input.read(&mut self.bytes[self.until..]) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
                Ok(count) => {
                    self.until += count;
                    return Ok(count > 0);
                }
            }
        }
    }

    fn next(&mut self) -> io::Result<Option<&[u8]>> {
        let waiting = &self.bytes[self.from..self.until];
        let Some((length, rest)) = waiting.split_first_chunk::<4>() else { return Ok(None) };
        let length = u32::from_be_bytes(*length) as usize;
        if length == 0 || length > MAX_PACKET {
            return Err(io::ErrorKind::InvalidData.into());
        }
        if rest.len() < length {
            return Ok(None);
        }
        let start = self.from + 4;
        self.from = start + length;
        Ok(Some(&self.bytes[start..self.from]))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn packet(kind: u8, rest: &[u8]) -> Vec<u8> {
        let length = u32::try_from(rest.len() + 1).unwrap();
        [&length.to_be_bytes()[..], &[kind], rest].concat()
    }

    #[test]
    fn the_first_answer_names_the_version() {
        let mut output = Vec::new();
        serve(&packet(wire::INIT, &[0, 0, 0, 3])[..], &mut output).unwrap();
        assert_eq!(output[4..9], [wire::VERSION, 0, 0, 0, 3]);
    }

    #[test]
    fn requests_may_arrive_in_any_pieces() {
        struct Trickle<'a>(&'a [u8]);
        impl Read for Trickle<'_> {
            fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
                let count = self.0.len().min(3);
                buffer[..count].copy_from_slice(&self.0[..count]);
                self.0 = &self.0[count..];
                Ok(count)
            }
        }
        let stat = packet(wire::STAT, b"\0\0\0\x07\0\0\0\x01/");
        let input = [packet(wire::INIT, &[0, 0, 0, 3]), stat.clone(), stat].concat();
        let (mut whole, mut pieces) = (Vec::new(), Vec::new());
        serve(&input[..], &mut whole).unwrap();
        serve(Trickle(&input), &mut pieces).unwrap();
        assert_eq!(whole, pieces);
        assert_eq!(whole.windows(5).filter(|part| part == &[wire::ATTRS, 0, 0, 0, 7]).count(), 2);
    }

    #[test]
    fn nonsense_ends_the_session() {
        for input in [&[0, 0, 0, 0][..], &[255; 8], b"\0\0\0\x01\x03"] {
            assert_eq!(serve(input, Vec::new()).unwrap_err().kind(), io::ErrorKind::InvalidData);
        }
    }

    #[test]
    fn a_handle_that_is_not_open_reaches_nothing() {
        let read = packet(wire::READ, b"\0\0\0\x07\0\0\0\x08\0\0\0\0\0\0\0\x01\0\0\0\0\0\0\0\0\0\0\0\x10");
        let mut output = Vec::new();
        serve(&read[..], &mut output).unwrap();
        assert_eq!(output[4..13], [wire::STATUS, 0, 0, 0, 7, 0, 0, 0, 4]);
    }
}
