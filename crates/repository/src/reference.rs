//! What of a repository is asked for: a branch, a tag, a commit, or what the remote calls its head.

use std::fmt;

use crate::error::{Code, SpecError};

/// Bytes of a ref; file systems that keep refs as files end here.
const REF_LIMIT: usize = 244;

/// A checked ref.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Reference {
    /// The remote's default branch.
    Head,
    /// A full ref: `refs/heads/main`, `refs/tags/v1`, `refs/pull/7/head`.
    Full(String),
    /// A complete object id, in lower case.
    Commit(String),
    /// A short name. The remote decides whether it is a branch, a tag or, when hexadecimal, the beginning of a commit; in this order.
    Name(String),
}

impl Reference {
    /// # Errors
    /// [`Code::InvalidRef`]: the text is no name by git's rules, or could be read as an option or a range.
    pub fn parse(text: &str) -> Result<Self, SpecError> {
        check(text).map_err(|message| SpecError::new(Code::InvalidRef, message))?;
        Ok(if text == "HEAD" {
            Self::Head
        } else if is_object_id(text) {
            Self::Commit(text.to_ascii_lowercase())
        } else if text.starts_with("refs/") {
            Self::Full(text.to_owned())
        } else {
            Self::Name(text.to_owned())
        })
    }

    /// The lower-case beginning of a commit, if the name could be one.
    pub fn abbreviated_commit(&self) -> Option<String> {
        match self {
            Self::Name(name)
                if (7..40).contains(&name.len()) && name.bytes().all(|byte| byte.is_ascii_hexdigit()) =>
            {
                Some(name.to_ascii_lowercase())
            }
            _ => None,
        }
    }
}

impl fmt::Display for Reference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Head => "HEAD",
            Self::Full(text) | Self::Commit(text) | Self::Name(text) => text,
        })
    }
}

/// A SHA-1 or SHA-256 object id.
pub(crate) fn is_object_id(text: &str) -> bool {
    matches!(text.len(), 40 | 64) && text.bytes().all(|byte| byte.is_ascii_hexdigit())
}

/// The rules of `git check-ref-format --allow-onelevel`, and no leading dash.
fn check(text: &str) -> Result<(), String> {
    if text.is_empty() {
        return Err("the ref is empty".into());
    }
    if text.len() > REF_LIMIT {
        return Err(format!("the ref is longer than {REF_LIMIT} bytes"));
    }
    if text.starts_with('-') {
        return Err("the ref starts with a dash".into());
    }
    if text.bytes().any(|byte| byte < b' ' || byte == 0x7f) {
        return Err("the ref holds a control character".into());
    }
    if let Some(bad) = text.chars().find(|c| " ~^:?*[\\".contains(*c)) {
        return Err(format!("the ref holds `{bad}`"));
    }
    for sequence in ["..", "@{", "//"] {
        if text.contains(sequence) {
            return Err(format!("the ref holds `{sequence}`"));
        }
    }
    if text == "@" || text == "refs" || text.starts_with('/') || text.ends_with('/') || text.ends_with('.') {
        return Err("the ref is `@` or `refs`, or starts or ends with a slash or dot".into());
    }
    for component in text.split('/') {
        if component.starts_with('.') || component.ends_with(".lock") {
            return Err("a component of the ref starts with a dot or ends with `.lock`".into());
        }
    }
    Ok(())
}
