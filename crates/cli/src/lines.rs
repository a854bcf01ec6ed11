//! Cutting a byte stream that arrives in arbitrary chunks into lines.
//!
//! Shared by the event stream, the image progress stream and log following. Invariant: every byte is looked at once,
//! however finely the stream is chunked, and a line without end is refused instead of buffered.

use thiserror::Error;

/// Far above the 4 MiB that the agent promises as the longest event.
const LONGEST_LINE: usize = 64 << 20;

/// The peer sent a line that no well-behaved peer sends.
#[derive(Debug, Error)]
#[error("received a line of more than {} MiB", LONGEST_LINE >> 20)]
pub struct LineTooLong;

/// Splits chunks at `\n`.
#[derive(Debug, Default)]
pub struct LineSplitter {
    buffer: Vec<u8>,
    start: usize,
    scanned: usize,
}

impl LineSplitter {
    /// Appends received bytes.
    pub fn push(&mut self, chunk: &[u8]) -> Result<(), LineTooLong> {
        self.buffer.drain(..self.start);
        self.scanned -= self.start;
        self.start = 0;
        self.buffer.extend_from_slice(chunk);
        if self.scanned > LONGEST_LINE { Err(LineTooLong) } else { Ok(()) }
    }

    /// The next complete line without its terminator (`\n` or `\r\n`).
    pub fn next_line(&mut self) -> Option<&[u8]> {
        let Some(at) = self.buffer[self.scanned..].iter().position(|&byte| byte == b'\n') else {
            self.scanned = self.buffer.len();
            return None;
        };
        let (from, end) = (self.start, self.scanned + at);
        self.start = end + 1;
        self.scanned = self.start;
        Some(without_return(&self.buffer[from..end]))
    }

    /// What is left after the last terminator once the stream has ended; empty when nothing is.
    pub fn finish(&mut self) -> &[u8] {
        let from = std::mem::replace(&mut self.start, self.buffer.len());
        self.scanned = self.start;
        without_return(&self.buffer[from..])
    }
}

fn without_return(line: &[u8]) -> &[u8] {
    line.strip_suffix(b"\r").unwrap_or(line)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn split(text: &[u8], size: usize) -> (Vec<Vec<u8>>, Vec<u8>) {
        let mut splitter = LineSplitter::default();
        let mut lines = Vec::new();
        for chunk in text.chunks(size) {
            splitter.push(chunk).unwrap();
            while let Some(line) = splitter.next_line() {
                lines.push(line.to_vec());
            }
        }
        (lines, splitter.finish().to_vec())
    }

    #[test]
    fn chunking_does_not_matter() {
        let text = b"one\n\ntwo\r\nthree \xff\n\rrest";
        for size in 1..=text.len() {
            let (lines, rest) = split(text, size);
            assert_eq!(lines, [&b"one"[..], b"", b"two", b"three \xff"]);
            assert_eq!(rest, b"\rrest");
        }
    }

    #[test]
    fn a_line_of_several_mebibytes_in_small_chunks_is_cheap() {
        let mut text = vec![b'x'; 8 << 20];
        text.push(b'\n');
        let (lines, rest) = split(&text, 1400);
        assert_eq!((lines.len(), lines[0].len(), rest.len()), (1, 8 << 20, 0));
    }
}
