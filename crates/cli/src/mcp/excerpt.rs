//! The beginning and the end of an output whose length nobody knows.
//!
//! Bound: memory is the limit, however much is pushed. Half of it keeps what came first, half what came last, since a
//! command's output tells its subject at the beginning and its failure at the end.

use std::collections::VecDeque;

use rmcp::schemars::{self, JsonSchema};
use serde::Serialize;

/// Text of at most so many bytes, and how much there was.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, JsonSchema)]
pub struct Shown {
    /// The text; bytes that are not UTF-8 are shown as U+FFFD. When `truncated`, a line in the middle says how much is missing
    pub text: String,
    /// Bytes that were written
    pub bytes: u64,
    /// Whether something was left out
    pub truncated: bool,
}

/// Collects output.
#[derive(Debug)]
pub struct Excerpt {
    half: usize,
    head: Vec<u8>,
    tail: VecDeque<u8>,
    total: u64,
}

impl Excerpt {
    /// Keeps at most `limit` bytes.
    pub fn new(limit: usize) -> Self {
        Self { half: limit / 2, head: Vec::new(), tail: VecDeque::new(), total: 0 }
    }

    /// Appends output.
    pub fn push(&mut self, bytes: &[u8]) {
        self.total += bytes.len() as u64;
        let first = bytes.len().min(self.half - self.head.len());
        self.head.extend_from_slice(&bytes[..first]);
        let rest = &bytes[first..];
        let rest = &rest[rest.len().saturating_sub(self.half)..];
        let excess = (self.tail.len() + rest.len()).saturating_sub(self.half);
        self.tail.drain(..excess);
        self.tail.extend(rest);
    }

    /// What is kept.
    pub fn finish(self) -> Shown {
        let tail: Vec<u8> = self.tail.into();
        let kept = (self.head.len() + tail.len()) as u64;
        if kept == self.total {
            let whole = [self.head, tail].concat();
            let text = String::from_utf8_lossy(&whole).into_owned();
            return Shown { text, bytes: self.total, truncated: false };
        }
        let (head, tail) = (without_cut_end(&self.head), without_cut_start(&tail));
        let missing = self.total - (head.len() + tail.len()) as u64;
        let text = format!(
            "{}\n[... {missing} of {} bytes left out ...]\n{}",
            String::from_utf8_lossy(head),
            self.total,
            String::from_utf8_lossy(tail)
        );
        Shown { text, bytes: self.total, truncated: true }
    }
}

/// Without the first bytes of a character whose last ones are missing.
pub fn without_cut_end(bytes: &[u8]) -> &[u8] {
    for back in 1..=bytes.len().min(3) {
        let at = bytes.len() - back;
        let width = match bytes[at] {
            0xc0..=0xdf => 2,
            0xe0..=0xef => 3,
            0xf0..=0xf7 => 4,
            0x80..=0xbf => continue,
            _ => 1,
        };
        return if width > back { &bytes[..at] } else { bytes };
    }
    bytes
}

/// Without the last bytes of a character whose first ones are missing.
fn without_cut_start(bytes: &[u8]) -> &[u8] {
    let stray = bytes.iter().take(3).take_while(|byte| matches!(byte, 0x80..=0xbf)).count();
    &bytes[stray..]
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn shown(chunks: &[&[u8]], limit: usize) -> Shown {
        let mut excerpt = Excerpt::new(limit);
        for chunk in chunks {
            excerpt.push(chunk);
        }
        excerpt.finish()
    }

    #[test]
    fn short_output_is_whole() {
        let all = shown(&[b"one\n", "tw\u{f6}\n".as_bytes()], 64);
        assert_eq!(all, Shown { text: "one\ntw\u{f6}\n".into(), bytes: 9, truncated: false });
        assert_eq!(shown(&[], 64).text, "");
    }

    #[test]
    fn long_output_keeps_both_ends_and_says_so() {
        let cut = shown(&[b"abcdefgh", b"ijklmnop"], 8);
        assert_eq!(cut.text, "abcd\n[... 8 of 16 bytes left out ...]\nmnop");
        assert!(cut.truncated && cut.bytes == 16);
    }

    #[test]
    fn characters_are_not_cut_in_two() {
        let text = "\u{20ac}".repeat(10);
        let cut = shown(&[text.as_bytes()], 8);
        assert_eq!(cut.text, "\u{20ac}\n[... 24 of 30 bytes left out ...]\n\u{20ac}");
    }

    proptest! {
        #[test]
        fn chunking_does_not_matter_and_memory_is_bounded(
            bytes in proptest::collection::vec(any::<u8>(), 0..300), size in 1usize..40, limit in 2usize..64
        ) {
            let mut chunked = Excerpt::new(limit);
            for chunk in bytes.chunks(size) {
                chunked.push(chunk);
                prop_assert!(chunked.head.len() + chunked.tail.len() <= limit);
            }
            prop_assert_eq!(chunked.finish(), shown(&[&bytes], limit));
        }

        #[test]
        fn a_text_cut_anywhere_ends_with_a_whole_character(text in "\\PC{1,20}", at in 0usize..60) {
            let bytes = text.as_bytes();
            let cut = without_cut_end(&bytes[..at.min(bytes.len())]);
            prop_assert!(std::str::from_utf8(cut).is_ok());
        }
    }
}
