//! A filter over bytes that come in pieces of any size.
//!
//! It works before lines are split: a secret may hold line breaks, and a pipe may cut it anywhere. Only bytes that could be the
//! beginning of a secret are held back, so that output appears as it is written.

use std::sync::Arc;

use aho_corasick::{AhoCorasick, MatchKind};

use super::forms::forms;

/// Shorter values are not looked for: they would blot out half of every log. They are reported by [`Redactor::too_short`].
pub const VALUE_MIN: usize = 6;

const REPLACEMENT: &[u8] = b"***";

/// What to look for. Cheap to clone.
#[derive(Clone)]
pub struct Redactor {
    /// Absent when there is nothing to look for.
    automaton: Option<Arc<AhoCorasick>>,
    /// Sorted, to find out quickly whether some text begins one of them.
    patterns: Arc<Vec<Vec<u8>>>,
    too_short: usize,
}

impl std::fmt::Debug for Redactor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Redactor").field("patterns", &self.patterns.len()).finish_non_exhaustive()
    }
}

impl Redactor {
    /// A filter for these values and the forms they are written in.
    pub fn new<'a>(values: impl IntoIterator<Item = &'a str>) -> Self {
        let mut patterns = Vec::new();
        let mut too_short = 0;
        for value in values {
            if value.trim().len() < VALUE_MIN {
                too_short += usize::from(!value.is_empty());
                continue;
            }
            patterns.extend(forms(value));
        }
        Self { too_short, ..Self::of(patterns) }
    }

    /// A filter for exactly these.
    pub(super) fn of(mut patterns: Vec<Vec<u8>>) -> Self {
        patterns.sort();
        patterns.dedup();
        let automaton = AhoCorasick::builder().match_kind(MatchKind::LeftmostLongest).build(&patterns);
        // Building fails only beyond the automaton's state limit of 2^31; secrets are bounded far below it.
        let automaton =
            (!patterns.is_empty()).then(|| automaton.expect("secrets fit an automaton")).map(Arc::new);
        Self { automaton, patterns: Arc::new(patterns), too_short: 0 }
    }

    /// How many values were too short to look for.
    pub fn too_short(&self) -> usize {
        self.too_short
    }

    /// Filters a whole text.
    pub fn redact(&self, text: &[u8]) -> Vec<u8> {
        let mut stream = self.stream();
        let mut out = stream.push(text);
        out.extend(stream.finish());
        out
    }

    /// Whether any of the values occurs, in any form.
    pub fn occurs_in(&self, text: &[u8]) -> bool {
        self.automaton.as_ref().is_some_and(|automaton| automaton.is_match(text))
    }

    /// Bytes of the longest form of any value; 0 when there is nothing to look for.
    pub(super) fn longest(&self) -> usize {
        self.patterns.iter().map(Vec::len).max().unwrap_or(0)
    }

    /// A filter for one stream.
    pub fn stream(&self) -> RedactStream {
        RedactStream { redactor: self.clone(), held: Vec::new() }
    }

    /// Where the earliest tail begins that may still grow into a secret.
    fn undecided(&self, text: &[u8], from: usize) -> usize {
        let longest = self.longest();
        let first = from.max(text.len().saturating_sub(longest.saturating_sub(1)));
        (first..text.len()).find(|start| self.begins_a_pattern(&text[*start..])).unwrap_or(text.len())
    }

    fn begins_a_pattern(&self, tail: &[u8]) -> bool {
        // The longer ones that begin with the tail sort directly after it.
        let next = self.patterns.partition_point(|pattern| pattern.as_slice() <= tail);
        self.patterns.get(next).is_some_and(|pattern| pattern.starts_with(tail))
    }
}

/// One stream under the filter. What it still holds at the end comes from [`RedactStream::finish`].
#[derive(Debug)]
pub struct RedactStream {
    redactor: Redactor,
    held: Vec<u8>,
}

impl RedactStream {
    /// Takes more bytes and gives what is certain to hold no secret.
    #[must_use]
    pub fn push(&mut self, bytes: &[u8]) -> Vec<u8> {
        if self.redactor.automaton.is_none() {
            return bytes.to_vec();
        }
        self.held.extend_from_slice(bytes);
        self.drain(false)
    }

    /// The rest. A beginning of a secret that never went on is given as it is.
    #[must_use]
    pub fn finish(mut self) -> Vec<u8> {
        self.drain(true)
    }

    fn drain(&mut self, ended: bool) -> Vec<u8> {
        let Some(automaton) = &self.redactor.automaton else {
            return std::mem::take(&mut self.held);
        };
        let text = &self.held;
        let undecided = |from| if ended { text.len() } else { self.redactor.undecided(text, from) };
        let mut out = Vec::with_capacity(text.len());
        let mut done = 0;
        let mut limit = undecided(0);
        for found in automaton.find_iter(text) {
            // A match from `limit` on may become a longer one.
            if found.start() >= limit {
                break;
            }
            out.extend_from_slice(&text[done..found.start()]);
            out.extend_from_slice(REPLACEMENT);
            done = found.end();
            if done > limit {
                limit = undecided(done);
            }
        }
        if limit > done {
            out.extend_from_slice(&text[done..limit]);
            done = limit;
        }
        self.held.drain(..done);
        out
    }
}
