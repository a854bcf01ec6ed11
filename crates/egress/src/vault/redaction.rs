//! Takes what the vault has lent out of what comes back.

use std::fmt;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use http::header::{
    CONNECTION, CONTENT_LENGTH, HeaderMap, HeaderName, HeaderValue, SEC_WEBSOCKET_ACCEPT, TRANSFER_ENCODING,
    UPGRADE,
};

use super::substitution::{Encoding, Replacer};

const REDACTED: &[u8] = b"[REDACTED]";

/// Bytes of the shortest text that is taken out. What is shorter is found everywhere by chance; the vault takes no such value.
pub(super) const SHORTEST: usize = 4;

/// Headers that describe the message; a change would break it, and none of them repeats what a request said.
const KEPT: [HeaderName; 4] = [CONNECTION, CONTENT_LENGTH, TRANSFER_ENCODING, UPGRADE];

/// Replaces secrets and placeholders by `[REDACTED]`.
#[derive(Clone)]
pub struct Redactor(Replacer);

impl fmt::Debug for Redactor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Redactor")
    }
}

impl Redactor {
    /// For these texts and every form in which a request has carried them.
    pub(super) fn new<'a>(texts: impl IntoIterator<Item = &'a str>) -> Self {
        let patterns = texts.into_iter().flat_map(forms);
        Self(Replacer::new(patterns.map(|pattern| (pattern.into_bytes(), REDACTED.to_vec()))))
    }

    /// The value without secrets, or nothing if it has none.
    #[must_use]
    pub fn value(&self, value: &[u8]) -> Option<HeaderValue> {
        // Nothing grows to more than three times its length by this.
        let redacted = self.0.apply(value, usize::MAX).ok().flatten()?;
        Some(HeaderValue::from_bytes(&redacted).unwrap_or(HeaderValue::from_static("[REDACTED]")))
    }

    /// Redacts every header in place.
    pub fn headers(&self, headers: &mut HeaderMap) {
        self.others(headers, &[]);
    }

    /// The same for an answer that changes the protocol, where a WebSocket's client checks the server's word.
    pub fn handshake(&self, headers: &mut HeaderMap) {
        self.others(headers, &[SEC_WEBSOCKET_ACCEPT]);
    }

    fn others(&self, headers: &mut HeaderMap, kept: &[HeaderName]) {
        for (name, value) in headers.iter_mut() {
            if !KEPT.contains(name)
                && !kept.contains(name)
                && let Some(redacted) = self.value(value.as_bytes())
            {
                *value = redacted;
            }
        }
    }
}

/// How a text may be written, as far as it is looked for.
pub(super) fn forms(text: &str) -> Vec<String> {
    let mut forms: Vec<String> = [Encoding::Raw, Encoding::Percent, Encoding::Form, Encoding::Json]
        .map(|encoding| encoding.of(text).into_owned())
        .into();
    forms.push(STANDARD.encode(text));
    forms.retain(|form| form.len() >= SHORTEST);
    forms.sort_unstable();
    forms.dedup();
    forms
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_written_form_is_redacted_and_framing_is_not() {
        let redactor = Redactor::new(["s3 cret/1", "1234"]);
        let mut headers = HeaderMap::new();
        headers.insert("x-raw", HeaderValue::from_static("a s3 cret/1 b"));
        headers.insert("location", HeaderValue::from_static("/x?k=s3%20cret%2F1&f=s3+cret%2F1"));
        headers.insert("x-basic", HeaderValue::from_str(&STANDARD.encode("s3 cret/1")).unwrap());
        headers.insert("content-length", HeaderValue::from_static("1234"));
        redactor.headers(&mut headers);
        assert_eq!(headers["x-raw"], "a [REDACTED] b");
        assert_eq!(headers["location"], "/x?k=[REDACTED]&f=[REDACTED]");
        assert_eq!(headers["x-basic"], "[REDACTED]");
        assert_eq!(headers["content-length"], "1234");
    }

    #[test]
    fn a_websocket_s_accept_is_kept_in_a_handshake_only() {
        let redactor = Redactor::new(["s3cret"]);
        let mut headers = HeaderMap::new();
        headers.insert("sec-websocket-accept", HeaderValue::from_static("s3cret"));
        headers.insert("x-raw", HeaderValue::from_static("s3cret"));
        redactor.handshake(&mut headers);
        assert_eq!(
            (&headers["sec-websocket-accept"], &headers["x-raw"]),
            (&"s3cret".parse().unwrap(), &"[REDACTED]".parse().unwrap())
        );
        redactor.headers(&mut headers);
        assert_eq!(headers["sec-websocket-accept"], "[REDACTED]");
    }
}
