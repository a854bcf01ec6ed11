//! Keeping secrets out of what is captured: output passes here before anybody cuts it into lines.
//!
//! Invariant: a secret that comes in several pieces is found as one that comes in one.

use std::fmt;

/// What a secret is shown as.
const MASK: &[u8] = b"***";
/// Shorter ones are not looked for: they would be found everywhere, and tell nobody anything.
pub const MIN_SECRET: usize = 4;

/// Makes a stream filter for each output.
pub trait Filter: Send + Sync + 'static {
    fn stream(&self) -> Box<dyn FilterStream>;

    /// One text as a whole.
    fn once(&self, bytes: &[u8]) -> Vec<u8> {
        let mut stream = self.stream();
        let mut out = Vec::with_capacity(bytes.len());
        stream.push(bytes, &mut out);
        stream.finish(&mut out);
        out
    }
}

/// A text of our own that may quote something.
pub(crate) fn clean(filter: &dyn Filter, text: &str) -> String {
    String::from_utf8_lossy(&filter.once(text.as_bytes())).into_owned()
}

/// The filter of one output.
pub trait FilterStream: Send {
    /// Takes bytes and appends what may be seen; it may hold back the beginning of what could become a secret.
    fn push(&mut self, bytes: &[u8], out: &mut Vec<u8>);

    /// The output is over.
    fn finish(&mut self, out: &mut Vec<u8>);
}

/// Lets everything through.
#[derive(Debug, Clone, Copy, Default)]
pub struct Unfiltered;

impl Filter for Unfiltered {
    fn stream(&self) -> Box<dyn FilterStream> {
        Box::new(Unfiltered)
    }
}

impl FilterStream for Unfiltered {
    fn push(&mut self, bytes: &[u8], out: &mut Vec<u8>) {
        out.extend_from_slice(bytes);
    }

    fn finish(&mut self, _: &mut Vec<u8>) {}
}

/// Masks known values.
#[derive(Clone, Default)]
pub struct KnownSecrets {
    /// The longest first, so that a secret which begins with another one goes as a whole.
    secrets: std::sync::Arc<[Vec<u8>]>,
}

impl KnownSecrets {
    /// Values below [`MIN_SECRET`] bytes are left out.
    pub fn new(secrets: impl IntoIterator<Item = impl Into<Vec<u8>>>) -> Self {
        let mut secrets: Vec<Vec<u8>> = secrets
            .into_iter()
            .map(Into::into)
            .filter(|secret: &Vec<u8>| secret.len() >= MIN_SECRET)
            .collect();
        secrets.sort_by(|a, b| b.len().cmp(&a.len()).then_with(|| a.cmp(b)));
        secrets.dedup();
        KnownSecrets { secrets: secrets.into() }
    }
}

impl fmt::Debug for KnownSecrets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "KnownSecrets({})", self.secrets.len())
    }
}

impl Filter for KnownSecrets {
    fn stream(&self) -> Box<dyn FilterStream> {
        let mut first = [false; 256];
        for secret in self.secrets.iter() {
            first[usize::from(secret[0])] = true;
        }
        Box::new(Masking { secrets: std::sync::Arc::clone(&self.secrets), first, held: Vec::new() })
    }
}

struct Masking {
    secrets: std::sync::Arc<[Vec<u8>]>,
    /// Bytes that a secret may begin with.
    first: [bool; 256],
    /// What may be the beginning of a secret.
    held: Vec<u8>,
}

impl Masking {
    /// Passes on what is decided, and returns where the undecided rest begins.
    fn scan(&self, bytes: &[u8], last: End, out: &mut Vec<u8>) -> usize {
        let mut at = 0;
        let mut plain = 0;
        while at < bytes.len() {
            if !self.first[usize::from(bytes[at])] {
                at += 1;
                continue;
            }
            let rest = &bytes[at..];
            // A longer secret that may still come is waited for before a shorter one is masked.
            if last == End::MoreMayCome
                && self.secrets.iter().any(|secret| secret.len() > rest.len() && secret.starts_with(rest))
            {
                break;
            }
            match self.secrets.iter().find(|secret| rest.starts_with(secret)) {
                Some(secret) => {
                    out.extend_from_slice(&bytes[plain..at]);
                    out.extend_from_slice(MASK);
                    at += secret.len();
                    plain = at;
                }
                None => at += 1,
            }
        }
        out.extend_from_slice(&bytes[plain..at]);
        at
    }
}

#[derive(PartialEq, Eq, Clone, Copy)]
enum End {
    MoreMayCome,
    Reached,
}

impl FilterStream for Masking {
    fn push(&mut self, bytes: &[u8], out: &mut Vec<u8>) {
        if self.held.is_empty() {
            let decided = self.scan(bytes, End::MoreMayCome, out);
            self.held.extend_from_slice(&bytes[decided..]);
            return;
        }
        let mut held = std::mem::take(&mut self.held);
        held.extend_from_slice(bytes);
        let decided = self.scan(&held, End::MoreMayCome, out);
        held.drain(..decided);
        self.held = held;
    }

    fn finish(&mut self, out: &mut Vec<u8>) {
        let held = std::mem::take(&mut self.held);
        self.scan(&held, End::Reached, out);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn text(filter: &KnownSecrets, chunks: &[&str]) -> String {
        let mut stream = filter.stream();
        let mut out = Vec::new();
        for chunk in chunks {
            stream.push(chunk.as_bytes(), &mut out);
        }
        stream.finish(&mut out);
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn a_secret_in_pieces_is_masked() {
        let filter = KnownSecrets::new(["hunter22", "hunt", "abc"]);
        assert_eq!(text(&filter, &["a hun", "ter", "22 b"]), "a *** b");
        assert_eq!(text(&filter, &["a hunter2", "1 b"]), "a ***er21 b");
        assert_eq!(text(&filter, &["the end: hunter2"]), "the end: ***er2");
        assert_eq!(text(&filter, &["abc"]), "abc");
        assert_eq!(format!("{filter:?}"), "KnownSecrets(2)");
    }

    proptest! {
        #[test]
        fn pieces_change_nothing(
            text in "[ab]{0,60}",
            cuts in proptest::collection::vec(0usize..60, 0..6),
        ) {
            let filter = KnownSecrets::new(["abab", "ababb", "bbbb", "aabba"]);
            let whole = filter.once(text.as_bytes());
            let mut cuts: Vec<usize> = cuts.into_iter().map(|cut| cut.min(text.len())).collect();
            cuts.extend([0, text.len()]);
            cuts.sort_unstable();
            let mut stream = filter.stream();
            let mut out = Vec::new();
            for cut in cuts.windows(2) {
                stream.push(&text.as_bytes()[cut[0]..cut[1]], &mut out);
            }
            stream.finish(&mut out);
            prop_assert_eq!(&out, &whole);
            for secret in ["abab", "ababb", "bbbb", "aabba"] {
                prop_assert!(!String::from_utf8(out.clone()).unwrap().contains(secret));
            }
        }
    }
}
