//! Metadata keys and values: label rules.

use std::collections::BTreeMap;

use crate::http::error::{ApiError, ApiResult, Code};

/// Keys under this prefix are the system's.
const RESERVED: &str = "opensandbox.io/";
const MAX_NAME: usize = 63;
const MAX_PREFIX: usize = 253;
/// Keys and values together: they are kept with the sandbox, in memory and in every list that shows it.
const MAX_BYTES: usize = 64 << 10;

fn word(text: &str, max: usize) -> bool {
    let bytes = text.as_bytes();
    !bytes.is_empty()
        && bytes.len() <= max
        && bytes[0].is_ascii_alphanumeric()
        && bytes[bytes.len() - 1].is_ascii_alphanumeric()
        && bytes.iter().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.'))
}

fn subdomain(text: &str) -> bool {
    text.len() <= MAX_PREFIX
        && text.split('.').all(|label| {
            let bytes = label.as_bytes();
            let edge = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit();
            bytes.first().is_some_and(|b| edge(*b))
                && bytes.last().is_some_and(|b| edge(*b))
                && bytes.iter().all(|b| edge(*b) || *b == b'-')
        })
}

fn valid_key(key: &str) -> bool {
    match key.split_once('/') {
        Some((prefix, name)) => subdomain(prefix) && word(name, MAX_NAME),
        None => word(key, MAX_NAME),
    }
}

fn check_pair(key: &str, value: &str) -> ApiResult<()> {
    let refused = |why: String| Err(ApiError::new(Code::InvalidMetadataLabel, why));
    let shown: String = key.chars().take(80).collect();
    if !valid_key(key) {
        return refused(format!(
            "metadata key {shown:?} is not a label key: [prefix/]name, name of 1 to 63 alphanumerics, '-', '_' and '.'"
        ));
    }
    if !value.is_empty() && !word(value, MAX_NAME) {
        return refused(format!(
            "the value of metadata key {shown:?} is not a label value: at most 63 alphanumerics, '-', '_' and '.'"
        ));
    }
    Ok(())
}

fn check_size(bytes: usize) -> ApiResult<()> {
    if bytes > MAX_BYTES {
        let message = format!("the metadata has {bytes} bytes; at most {MAX_BYTES} are kept");
        return Err(ApiError::new(Code::InvalidMetadataLabel, message));
    }
    Ok(())
}

/// The metadata of a create.
pub fn check(metadata: &BTreeMap<String, String>) -> ApiResult<()> {
    check_size(metadata.iter().map(|(key, value)| key.len() + value.len()).sum())?;
    if let Some(key) = metadata.keys().find(|k| k.starts_with(RESERVED)) {
        let shown: String = key.chars().take(80).collect();
        return Err(ApiError::new(Code::InvalidMetadataLabel, format!("metadata key {shown:?} is reserved")));
    }
    metadata.iter().try_for_each(|(key, value)| check_pair(key, value))
}

/// A patch: reserved keys first, also when they are to be deleted; then the rules for what is set.
pub fn check_patch(patch: &BTreeMap<String, Option<String>>) -> ApiResult<()> {
    if let Some(key) = patch.keys().find(|k| k.starts_with(RESERVED)) {
        let shown: String = key.chars().take(80).collect();
        return Err(ApiError::new(
            Code::ReservedMetadataLabel,
            format!("metadata key {shown:?} is reserved"),
        ));
    }
    check_size(patch.iter().map(|(key, value)| key.len() + value.as_ref().map_or(0, String::len)).sum())?;
    patch
        .iter()
        .filter_map(|(key, value)| Some((key, value.as_ref()?)))
        .try_for_each(|(key, value)| check_pair(key, value))
}

#[cfg(test)]
mod tests {
    #[test]
    fn what_is_kept_is_bounded() {
        let many = |count: usize| (0..count).map(|n| (format!("key{n:05}"), "x".repeat(63))).collect();
        assert!(super::check(&many(900)).is_ok());
        let refused = super::check(&many(1000)).unwrap_err();
        assert_eq!(refused.code, "SANDBOX::INVALID_METADATA_LABEL");
        let patch = many(1000).into_iter().map(|(key, value)| (key, Some(value))).collect();
        assert!(super::check_patch(&patch).is_err());
    }

    use super::*;

    fn code(key: &str, value: &str) -> Option<&'static str> {
        check(&BTreeMap::from([(key.into(), value.into())])).err().map(|e| e.code)
    }

    #[test]
    fn label_rules() {
        for (key, value) in [("a", ""), ("a.b/c_d", "x-y"), ("A1", "Z"), (&"k".repeat(63), &"v".repeat(63))] {
            assert_eq!(code(key, value), None, "{key}={value}");
        }
        for (key, value) in [
            ("", ""),
            ("-a", ""),
            ("a/", ""),
            ("A.b/c", ""),
            ("a/b/c", ""),
            ("ä", ""),
            ("a", "b c"),
            ("a", "-"),
            (&"k".repeat(64), ""),
            ("a", &"v".repeat(64)),
            ("opensandbox.io/x", "y"),
        ] {
            assert_eq!(code(key, value), Some("SANDBOX::INVALID_METADATA_LABEL"), "{key}={value}");
        }
    }

    #[test]
    fn a_patch_may_delete_what_could_not_be_set() {
        let patch = |key: &str, value: Option<&str>| {
            check_patch(&BTreeMap::from([(key.to_owned(), value.map(str::to_owned))])).err().map(|e| e.code)
        };
        assert_eq!(patch("not a key", None), None);
        assert_eq!(patch("not a key", Some("x")), Some("SANDBOX::INVALID_METADATA_LABEL"));
        assert_eq!(patch("opensandbox.io/id", None), Some("INVALID_METADATA_LABEL"));
    }
}
