//! Output bytes to lines: the one place that knows what ends a line and how long one may get.
//!
//! `\n`, `\r` and `\r\n` end a line, a blank line is told apart from no line, and the last line needs no end.
//! Invariant: whatever the chunking of the input, the same bytes give the same lines up to [`MAX_LINE`], and no more
//! than that is held back.

/// A longer line is handed on in pieces, so that memory stays bounded and an event below the clients' 4 MiB.
pub const MAX_LINE: usize = 1 << 20;

/// The buffer that a stream may keep between lines.
const SMALL: usize = 8 << 10;

/// Cuts one stream into lines.
#[derive(Debug)]
pub struct LineSplitter {
    pending: Vec<u8>,
    /// A longer line is handed on in pieces.
    most: usize,
    /// The last byte seen was `\r`: a `\n` that follows belongs to it.
    after_cr: bool,
    /// A piece of the current line has been handed on already, so its end is not a blank line.
    continued: bool,
}

impl Default for LineSplitter {
    fn default() -> Self {
        LineSplitter { pending: Vec::new(), most: MAX_LINE, after_cr: false, continued: false }
    }
}

impl LineSplitter {
    /// From now on at most this many bytes are held back, where memory is short.
    pub fn hold_at_most(&mut self, most: usize) {
        self.most = most.clamp(16, MAX_LINE);
    }

    /// The memory that what is held back takes.
    pub fn held(&self) -> usize {
        self.pending.capacity()
    }

    /// Feeds bytes; `line` gets every complete line without its terminator (empty for a blank line).
    pub fn push(&mut self, mut bytes: &[u8], mut line: impl FnMut(&[u8])) {
        if self.after_cr && !bytes.is_empty() {
            self.after_cr = false;
            if bytes[0] == b'\n' {
                bytes = &bytes[1..];
            }
        }
        let mut start = 0;
        // Nearly all output has no `\r`: one search tells whether the slower two-needle search is needed.
        let has_cr = memchr::memchr(b'\r', bytes).is_some();
        while start < bytes.len() {
            let rest = &bytes[start..];
            let found =
                if has_cr { memchr::memchr2(b'\n', b'\r', rest) } else { memchr::memchr(b'\n', rest) };
            let Some(end) = found else {
                self.hold(rest, &mut line);
                return;
            };
            self.finish_line(&rest[..end], &mut line);
            start += end + 1;
            if rest[end] == b'\r' {
                match bytes.get(start) {
                    Some(b'\n') => start += 1,
                    Some(_) => {}
                    None => self.after_cr = true,
                }
            }
        }
    }

    /// The stream ended: an unterminated rest is a line too.
    pub fn finish(&mut self, mut line: impl FnMut(&[u8])) {
        if !self.pending.is_empty() {
            line(&self.pending);
            self.pending = Vec::new();
        }
    }

    fn finish_line(&mut self, tail: &[u8], line: &mut impl FnMut(&[u8])) {
        if self.pending.is_empty() && tail.len() <= self.most {
            if !(tail.is_empty() && self.continued) {
                line(tail);
            }
            self.continued = false;
            return;
        }
        self.hold(tail, line);
        if !self.pending.is_empty() {
            line(&self.pending);
            self.pending.clear();
            // One giant line must not pin its buffer for the life of a long command.
            self.pending.shrink_to(SMALL);
        }
        self.continued = false;
    }

    fn hold(&mut self, mut bytes: &[u8], line: &mut impl FnMut(&[u8])) {
        while self.pending.len() + bytes.len() > self.most {
            // Nothing of the new bytes when more than that was held before.
            let (head, tail) = bytes.split_at(self.most.saturating_sub(self.pending.len()));
            self.pending.extend_from_slice(head);
            let cut = char_boundary(&self.pending);
            line(&self.pending[..cut]);
            self.pending.drain(..cut);
            self.pending.shrink_to(SMALL.min(self.most));
            self.continued = true;
            bytes = tail;
        }
        self.pending.extend_from_slice(bytes);
    }
}

/// The longest prefix that does not end inside a UTF-8 sequence; all of it when the end is not UTF-8 anyway.
pub fn char_boundary(bytes: &[u8]) -> usize {
    let len = bytes.len();
    for back in 1..=3.min(len) {
        let byte = bytes[len - back];
        if byte & 0xc0 == 0x80 {
            continue;
        }
        let wanted = match byte {
            0xc2..=0xdf => 2,
            0xe0..=0xef => 3,
            0xf0..=0xf4 => 4,
            _ => 1,
        };
        return if wanted > back { len - back } else { len };
    }
    len
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn split(chunks: &[&[u8]]) -> Vec<Vec<u8>> {
        let mut splitter = LineSplitter::default();
        let mut lines = Vec::new();
        for chunk in chunks {
            splitter.push(chunk, |l| lines.push(l.to_vec()));
        }
        splitter.finish(|l| lines.push(l.to_vec()));
        lines
    }

    /// The rule written the slow way: the model the splitter is checked against.
    fn model(bytes: &[u8]) -> Vec<Vec<u8>> {
        let mut lines = Vec::new();
        let mut current = Vec::new();
        let mut i = 0;
        while i < bytes.len() {
            match bytes[i] {
                b'\n' => lines.push(std::mem::take(&mut current)),
                b'\r' => {
                    lines.push(std::mem::take(&mut current));
                    if bytes.get(i + 1) == Some(&b'\n') {
                        i += 1;
                    }
                }
                byte => current.push(byte),
            }
            i += 1;
        }
        if !current.is_empty() {
            lines.push(current);
        }
        lines
    }

    #[test]
    fn the_reference_example() {
        let lines = split(&[b"a\n\nb\n\n\nc\n"]);
        assert_eq!(lines, ["a", "", "b", "", "", "c"].map(|s| s.as_bytes().to_vec()));
    }

    #[test]
    fn a_long_line_comes_in_whole_characters_and_without_an_extra_blank() {
        let text = "é".repeat(MAX_LINE);
        let mut input = text.clone().into_bytes();
        input.insert(0, b'x');
        input.push(b'\n');
        let lines = split(&[&input]);
        assert!(lines.len() > 1);
        assert!(lines.iter().all(|l| std::str::from_utf8(l).is_ok() && l.len() <= MAX_LINE && !l.is_empty()));
        assert_eq!(lines.concat(), input[..input.len() - 1]);
        let exact = vec![b'a'; MAX_LINE + 1];
        assert_eq!(split(&[&exact[..MAX_LINE], &exact[MAX_LINE..], b"\nb"]).len(), 3);
    }

    #[test]
    fn a_lower_limit_gives_up_what_is_held() {
        let mut splitter = LineSplitter::default();
        let mut lines = Vec::new();
        splitter.push(&[b'a'; 100], |l| lines.push(l.to_vec()));
        splitter.hold_at_most(16);
        splitter.push("é".repeat(20).as_bytes(), |l| lines.push(l.to_vec()));
        splitter.push(b"\nb\n", |l| lines.push(l.to_vec()));
        assert_eq!(lines[0].len(), 100);
        assert!(lines.iter().all(|l| std::str::from_utf8(l).is_ok()), "{lines:?}");
        assert!(lines[1..].iter().all(|l| l.len() <= 16) && splitter.held() <= 64);
        assert_eq!(lines.concat(), ["a".repeat(100), "é".repeat(20), "b".into()].concat().into_bytes());
    }

    proptest! {
        #[test]
        fn chunking_never_changes_the_lines(
            bytes in proptest::collection::vec(prop_oneof![Just(b'\n'), Just(b'\r'), any::<u8>()], 0..200),
            cuts in proptest::collection::vec(0usize..200, 0..8),
        ) {
            let mut cuts: Vec<usize> = cuts.into_iter().map(|c| c.min(bytes.len())).collect();
            cuts.push(0);
            cuts.push(bytes.len());
            cuts.sort_unstable();
            let chunks: Vec<&[u8]> = cuts.windows(2).map(|w| &bytes[w[0]..w[1]]).collect();
            prop_assert_eq!(split(&chunks), model(&bytes));
        }
    }
}
