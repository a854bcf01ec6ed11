//! Why a specification is refused, before anything happens.

use std::fmt;

/// The stable code of a refusal, as it stands in the answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Code {
    InvalidUrl,
    InvalidRef,
    InvalidPath,
    HostNotAllowed,
    /// A field without a code of its own: depth, credential, number of repositories.
    InvalidParameter,
}

impl Code {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::InvalidUrl => "REPOSITORY::INVALID_URL",
            Self::InvalidRef => "REPOSITORY::INVALID_REF",
            Self::InvalidPath => "REPOSITORY::INVALID_PATH",
            Self::HostNotAllowed => "REPOSITORY::HOST_NOT_ALLOWED",
            Self::InvalidParameter => "SANDBOX::INVALID_PARAMETER",
        }
    }
}

impl fmt::Display for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// A refused field. The message says what is wrong with it and never repeats the value, which may hold a password.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{field}: {message}")]
pub struct SpecError {
    pub code: Code,
    /// The field as a path in the request: `repository.additional[1].url`.
    pub field: String,
    pub message: String,
}

impl SpecError {
    pub(crate) fn new(code: Code, message: impl Into<String>) -> Self {
        Self { code, field: String::new(), message: message.into() }
    }

    pub(crate) fn at(mut self, field: impl Into<String>) -> Self {
        self.field = field.into();
        self
    }
}
