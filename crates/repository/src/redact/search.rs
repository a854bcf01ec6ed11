//! Known values in files of any length, for the last look at what is about to be kept.

use std::io::{self, Read};

use super::{
    forms::encoded,
    stream::{Redactor, VALUE_MIN},
};

const CHUNK: usize = 256 * 1024;

/// Values to look for, in every form of [`Redactor`]; encoded ones also where a program broke them into lines or groups, as `base64` and `od`
/// do.
#[derive(Debug, Clone)]
pub struct Needles {
    whole: Redactor,
    encoded: Redactor,
}

impl Needles {
    /// Values shorter than [`VALUE_MIN`] bytes are not looked for: they are everywhere.
    pub fn new<'a>(values: impl IntoIterator<Item = &'a str> + Clone) -> Self {
        let long = values.clone().into_iter().filter(|value| value.trim().len() >= VALUE_MIN);
        // Whoever encodes a line of a file may take its end along or not.
        let encoded = long.flat_map(|value| encoded(value).into_iter().chain(encoded(value.trim())));
        Self { encoded: Redactor::of(encoded.collect()), whole: Redactor::new(values) }
    }

    /// Whether there is nothing to look for.
    pub fn is_empty(&self) -> bool {
        self.whole.longest() == 0
    }

    /// Whether any of them occurs in a short text.
    pub fn occur_in(&self, text: &[u8]) -> bool {
        self.whole.occurs_in(text)
    }

    /// Whether any of them occurs in the stream. Memory is bounded by the longest form.
    ///
    /// # Errors
    /// Reading failed.
    pub fn occur_in_stream(&self, mut input: impl Read) -> io::Result<bool> {
        if self.is_empty() {
            return Ok(false);
        }
        // Of the stream, and of the stream without what stands between groups.
        let (mut window, mut dense) = (Vec::with_capacity(2 * CHUNK), Vec::with_capacity(2 * CHUNK));
        loop {
            let before = window.len();
            input.by_ref().take(CHUNK as u64).read_to_end(&mut window)?;
            let fresh = &window[before..];
            let ended = fresh.len() < CHUNK;
            dense.extend(fresh.iter().filter(|byte| !matches!(byte, b'\n' | b'\r' | b'\t' | b' ')));
            if self.whole.occurs_in(&window) || self.encoded.occurs_in(&dense) {
                return Ok(true);
            }
            if ended {
                return Ok(false);
            }
            keep_end(&mut window, &self.whole);
            keep_end(&mut dense, &self.encoded);
        }
    }
}

/// What may go on to one of them.
fn keep_end(bytes: &mut Vec<u8>, sought: &Redactor) {
    let cut = bytes.len().saturating_sub(sought.longest().saturating_sub(1));
    bytes.drain(..cut);
}
