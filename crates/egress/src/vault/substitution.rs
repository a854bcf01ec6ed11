//! Literal replacement in one pass: what was inserted is never looked at again.

use std::borrow::Cow;

use aho_corasick::{AhoCorasick, AhoCorasickKind, MatchKind, PatternID};
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};

/// Everything but what RFC 3986 calls unreserved.
const STRICT: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_').remove(b'~');

/// How text has to be written to stay one value where it is put.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Encoding {
    Raw,
    Percent,
    Form,
    Json,
}

impl Encoding {
    pub(super) fn of(self, text: &str) -> Cow<'_, str> {
        match self {
            Self::Raw => Cow::Borrowed(text),
            Self::Percent => utf8_percent_encode(text, STRICT).into(),
            Self::Form => match utf8_percent_encode(text, STRICT).into() {
                Cow::Owned(encoded) if text.contains(' ') => {
                    let encoded: String = encoded;
                    Cow::Owned(encoded.replace("%20", "+"))
                }
                encoded => encoded,
            },
            Self::Json => {
                let quoted = serde_json::to_string(text).expect("text always serialises");
                Cow::Owned(quoted[1..quoted.len() - 1].to_owned())
            }
        }
    }
}

/// What a body is, as far as it matters to what is put into it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BodyKind {
    Json,
    Form,
    Text,
}

impl BodyKind {
    /// The kind by `Content-Type` and `Content-Encoding`; nothing for what is not to be touched.
    #[must_use]
    pub fn of(content_type: Option<&[u8]>, content_encoding: Option<&[u8]>) -> Option<Self> {
        if content_encoding.is_some_and(|encoding| !encoding.trim_ascii().eq_ignore_ascii_case(b"identity")) {
            return None;
        }
        let essence = content_type.unwrap_or_default().split(|b| *b == b';').next().unwrap_or_default();
        let essence = essence.trim_ascii().to_ascii_lowercase();
        if essence.starts_with(b"multipart/") {
            return None;
        }
        Some(match essence.as_slice() {
            b"application/json" => Self::Json,
            b"application/x-www-form-urlencoded" => Self::Form,
            other if other.ends_with(b"+json") => Self::Json,
            _ => Self::Text,
        })
    }

    pub(super) const fn encoding(self) -> Encoding {
        match self {
            Self::Json => Encoding::Json,
            Self::Form => Encoding::Form,
            Self::Text => Encoding::Raw,
        }
    }
}

/// What a text would become is longer than its place allows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the text is too long once its placeholders are replaced")]
pub struct Overlong;

/// Pairs of what is looked for and what replaces it.
#[derive(Clone)]
pub(super) struct Replacer {
    finder: AhoCorasick,
    /// In the order of the finder's patterns.
    replacements: Vec<Vec<u8>>,
}

impl Replacer {
    /// Of those that begin at one place the longest is taken; of equal ones the first. Takes some ten bytes for each byte that is looked for.
    pub(super) fn new(pairs: impl IntoIterator<Item = (Vec<u8>, Vec<u8>)>) -> Self {
        let mut pairs: Vec<_> = pairs.into_iter().filter(|(from, _)| !from.is_empty()).collect();
        pairs.sort_by(|(a, _), (b, _)| a.cmp(b));
        pairs.dedup_by(|(a, _), (b, _)| a == b);
        let (patterns, replacements): (Vec<_>, Vec<_>) = pairs.into_iter().unzip();
        // The faster kind takes up to a kibibyte for each byte.
        let mut builder = AhoCorasick::builder();
        builder.match_kind(MatchKind::LeftmostLongest).kind(Some(AhoCorasickKind::ContiguousNFA));
        let finder = builder.build(&patterns).expect("a vault holds fewer patterns than a finder can take");
        patterns.into_iter().for_each(wipe);
        Self { finder, replacements }
    }

    /// The text with its replacements, or nothing if there are none. Takes time in proportion to what goes in and comes out.
    pub(super) fn apply(&self, text: &[u8], longest: usize) -> Result<Option<Vec<u8>>, Overlong> {
        let replacement = |pattern: PatternID| self.replacements[pattern.as_usize()].as_slice();
        let (mut length, mut any) = (text.len(), false);
        // First only counted: what grew on the way would be copied, and leave parts of values behind.
        for found in self.finder.find_iter(text) {
            length = length - found.len() + replacement(found.pattern()).len();
            any = true;
        }
        if !any {
            return Ok(None);
        }
        if length > longest {
            return Err(Overlong);
        }
        let mut output = Vec::with_capacity(length);
        let mut kept = 0;
        for found in self.finder.find_iter(text) {
            output.extend_from_slice(&text[kept..found.start()]);
            output.extend_from_slice(replacement(found.pattern()));
            kept = found.end();
        }
        output.extend_from_slice(&text[kept..]);
        Ok(Some(output))
    }
}

fn wipe(mut pattern: Vec<u8>) {
    pattern.fill(0);
    std::hint::black_box(&pattern);
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn replacer(pairs: &[(&str, &str)]) -> Replacer {
        Replacer::new(pairs.iter().map(|(from, to)| (from.as_bytes().to_vec(), to.as_bytes().to_vec())))
    }

    fn applied(replacer: &Replacer, text: &[u8]) -> Option<Vec<u8>> {
        replacer.apply(text, 1 << 20).unwrap()
    }

    #[test]
    fn what_comes_out_is_bounded() {
        let replacer = replacer(&[("X", "yyyy")]);
        assert_eq!(replacer.apply(b"aXb", 6), Ok(Some(b"ayyyyb".to_vec())));
        assert_eq!(replacer.apply(b"aXb", 5), Err(Overlong));
        assert_eq!(replacer.apply(b"aXX", 8), Err(Overlong));
        assert_eq!(replacer.apply(b"nothing", 0), Ok(None));
        assert_eq!(replacer.apply(&[b'X'; 1 << 20], 1 << 20), Err(Overlong));
    }

    #[test]
    fn a_finder_takes_some_ten_bytes_for_each_that_it_looks_for() {
        let pairs = (0_u64..4096).map(|number| {
            let text = format!("{:064x}", number.wrapping_mul(0x9e37_79b9_7f4a_7c15)).repeat(2);
            (text.into_bytes(), Vec::new())
        });
        let finder = Replacer::new(pairs).finder;
        assert!(finder.memory_usage() < 16 * 4096 * 128, "{}", finder.memory_usage());
    }

    /// Each place of the text is the beginning of every pattern: looking at them one by one would take minutes.
    #[test]
    fn texts_that_nearly_match_everywhere_take_no_longer() {
        let patterns: Vec<String> =
            (0..256).map(|length| format!("{}b", "a".repeat(1024 + length))).collect();
        let replacer = Replacer::new(patterns.iter().map(|p| (p.as_bytes().to_vec(), b"x".to_vec())));
        assert_eq!(applied(&replacer, &[b'a'; 1 << 20]), None);
        let text = format!("{}b", "a".repeat(5000));
        assert_eq!(applied(&replacer, text.as_bytes()).unwrap().len(), 5000 - 1279 + 1);
    }

    #[test]
    fn the_longest_wins_and_insertions_are_not_looked_at() {
        let replacer = replacer(&[("AB", "1"), ("ABC", "AB"), ("X", "XX")]);
        assert_eq!(applied(&replacer, b"ABCABX").unwrap(), b"AB1XX");
        assert_eq!(applied(&replacer, b"nothing"), None);
    }

    #[test]
    fn each_surface_has_its_encoding() {
        let value = "a b/\"&\u{e9}";
        assert_eq!(Encoding::Percent.of(value), "a%20b%2F%22%26%C3%A9");
        assert_eq!(Encoding::Form.of(value), "a+b%2F%22%26%C3%A9");
        assert_eq!(Encoding::Json.of(value), "a b/\\\"&\u{e9}");
        assert_eq!(Encoding::Raw.of(value), value);
    }

    #[test]
    fn bodies_that_cannot_be_read_are_left_alone() {
        let cases: &[(Option<&str>, Option<&str>, Option<BodyKind>)] = &[
            (Some("application/json; charset=utf-8"), None, Some(BodyKind::Json)),
            (Some("application/vnd.api+JSON"), Some("identity"), Some(BodyKind::Json)),
            (Some("application/x-www-form-urlencoded"), None, Some(BodyKind::Form)),
            (Some("text/plain"), None, Some(BodyKind::Text)),
            (None, None, Some(BodyKind::Text)),
            (Some("application/json"), Some("gzip"), None),
            (Some("Multipart/form-data; boundary=x"), None, None),
        ];
        for (kind, encoding, expected) in cases {
            assert_eq!(BodyKind::of(kind.map(str::as_bytes), encoding.map(str::as_bytes)), *expected);
        }
    }

    proptest! {
        #[test]
        fn one_pass_equals_splitting_at_the_placeholder(parts in proptest::collection::vec("[a-z/&=]{0,6}", 1..6), value in ".{1,12}") {
            let text = parts.join("{{T}}");
            let replaced = applied(&replacer(&[("{{T}}", &value)]), text.as_bytes());
            let expected = parts.join(&value);
            if parts.len() == 1 {
                prop_assert!(replaced.is_none());
            } else {
                prop_assert_eq!(replaced.unwrap(), expected.into_bytes());
            }
        }

        #[test]
        fn encodings_are_reversible_and_closed(value in ".{0,24}") {
            let percent = Encoding::Percent.of(&value).into_owned();
            prop_assert!(percent.bytes().all(|b| b.is_ascii_alphanumeric() || b"-._~%".contains(&b)));
            let decoded = percent_encoding::percent_decode_str(&percent).decode_utf8().unwrap().into_owned();
            prop_assert_eq!(&decoded, &value);
            let form = Encoding::Form.of(&value).replace('+', " ");
            let form = percent_encoding::percent_decode_str(&form).decode_utf8().unwrap().into_owned();
            prop_assert_eq!(&form, &value);
            let json: String = serde_json::from_str(&format!("\"{}\"", Encoding::Json.of(&value))).unwrap();
            prop_assert_eq!(&json, &value);
        }
    }
}
