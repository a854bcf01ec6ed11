//! Literal replacement in one pass: what was inserted is never looked at again.

use std::borrow::Cow;

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

/// Pairs of what is looked for and what replaces it.
#[derive(Clone)]
pub(super) struct Replacer {
    /// The longest first, so that the longest of those that begin at one place is taken.
    pairs: Vec<(Vec<u8>, Vec<u8>)>,
    begins: [bool; 256],
}

impl Replacer {
    pub(super) fn new(pairs: impl IntoIterator<Item = (Vec<u8>, Vec<u8>)>) -> Self {
        let mut pairs: Vec<_> = pairs.into_iter().filter(|(from, _)| !from.is_empty()).collect();
        pairs.sort_by(|(a, _), (b, _)| b.len().cmp(&a.len()).then_with(|| a.cmp(b)));
        pairs.dedup_by(|(a, _), (b, _)| a == b);
        let mut begins = [false; 256];
        for (from, _) in &pairs {
            begins[usize::from(from[0])] = true;
        }
        Self { pairs, begins }
    }

    /// The text with its replacements, or nothing if there are none.
    pub(super) fn apply(&self, text: &[u8]) -> Option<Vec<u8>> {
        let mut output: Option<Vec<u8>> = None;
        let (mut at, mut kept) = (0, 0);
        while at < text.len() {
            let found = self.begins[usize::from(text[at])]
                .then(|| self.pairs.iter().find(|(from, _)| text[at..].starts_with(from)))
                .flatten();
            let Some((from, to)) = found else {
                at += 1;
                continue;
            };
            let output = output.get_or_insert_with(|| Vec::with_capacity(text.len() + to.len()));
            output.extend_from_slice(&text[kept..at]);
            output.extend_from_slice(to);
            at += from.len();
            kept = at;
        }
        let mut output = output?;
        output.extend_from_slice(&text[kept..]);
        Some(output)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn replacer(pairs: &[(&str, &str)]) -> Replacer {
        Replacer::new(pairs.iter().map(|(from, to)| (from.as_bytes().to_vec(), to.as_bytes().to_vec())))
    }

    #[test]
    fn the_longest_wins_and_insertions_are_not_looked_at() {
        let replacer = replacer(&[("AB", "1"), ("ABC", "AB"), ("X", "XX")]);
        assert_eq!(replacer.apply(b"ABCABX").unwrap(), b"AB1XX");
        assert_eq!(replacer.apply(b"nothing"), None);
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
            let replaced = replacer(&[("{{T}}", &value)]).apply(text.as_bytes());
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
