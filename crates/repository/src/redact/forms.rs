//! The forms in which a secret turns up in output.

use base64::engine::general_purpose::{STANDARD_NO_PAD, URL_SAFE_NO_PAD};
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};

use super::stream::VALUE_MIN;

/// What `encodeURIComponent` leaves alone.
const COMPONENT: &AsciiSet = &NON_ALPHANUMERIC
    .remove(b'-')
    .remove(b'_')
    .remove(b'.')
    .remove(b'~')
    .remove(b'!')
    .remove(b'*')
    .remove(b'\'')
    .remove(b'(')
    .remove(b')');
/// What stays readable by RFC 3986.
const UNRESERVED: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'_').remove(b'.').remove(b'~');

/// Every form of a value that a filter looks for: itself, its long lines, percent-encoded, as a JSON string, in hexadecimal digits, and in
/// base64 at each of the three places where it can begin inside a longer text (`user:token` of HTTP's Basic scheme).
pub(super) fn forms(value: &str) -> Vec<Vec<u8>> {
    let mut forms = vec![value.as_bytes().to_vec()];
    let trimmed = value.trim();
    forms.push(trimmed.as_bytes().to_vec());
    if trimmed.contains('\n') {
        // A key printed by a program that indents or prefixes its lines.
        forms.extend(
            trimmed
                .lines()
                .map(str::trim)
                .filter(|line| line.len() >= 16)
                .map(|line| line.as_bytes().to_vec()),
        );
    }
    for set in [COMPONENT, UNRESERVED] {
        let encoded = utf8_percent_encode(value, set).to_string();
        forms.push(lower_escapes(&encoded));
        forms.push(encoded.into_bytes());
    }
    if let Ok(quoted) = serde_json::to_string(value) {
        forms.push(quoted.as_bytes()[1..quoted.len() - 1].to_vec());
    }
    forms.extend(encoded(value));
    forms.retain(|form| form.len() >= VALUE_MIN);
    forms.sort();
    forms.dedup();
    forms
}

/// The forms that programs break into lines or groups: hexadecimal digits and base64.
pub(super) fn encoded(value: &str) -> Vec<Vec<u8>> {
    let digits: String = value.bytes().map(|byte| format!("{byte:02x}")).collect();
    let mut forms = vec![digits.to_ascii_uppercase().into_bytes(), digits.into_bytes()];
    for offset in 0..3 {
        forms.push(base64_core(&STANDARD_NO_PAD, value.as_bytes(), offset));
        forms.push(base64_core(&URL_SAFE_NO_PAD, value.as_bytes(), offset));
    }
    forms.retain(|form| form.len() >= VALUE_MIN);
    forms
}

/// The characters that depend on the value alone when `offset` unknown bytes stand before it and unknown ones may follow.
fn base64_core(engine: &impl base64::Engine, value: &[u8], offset: usize) -> Vec<u8> {
    let mut padded = vec![0; offset];
    padded.extend_from_slice(value);
    let encoded = engine.encode(&padded).into_bytes();
    let start = [0, 2, 3][offset];
    let whole = padded.len() * 8 / 6;
    encoded.get(start..whole.min(encoded.len())).unwrap_or_default().to_vec()
}

fn lower_escapes(encoded: &str) -> Vec<u8> {
    let mut out = encoded.as_bytes().to_vec();
    let mut at = 0;
    while at + 2 < out.len() {
        if out[at] == b'%' {
            out[at + 1..at + 3].make_ascii_lowercase();
        }
        at += 1;
    }
    out
}
