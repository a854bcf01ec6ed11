//! What can go wrong with images, sorted by what a caller can do about it.
//!
//! Invariant: no variant carries a credential, a token or a signed address. Text that came from a registry is
//! shortened and scrubbed before it gets in here.

use std::io;

use thiserror::Error;

/// What a caller can do about an [`ImageError`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ImageErrorKind {
    /// The reference is not one that can name an image.
    InvalidReference,
    /// Neither the store nor the registry has it.
    NotFound,
    /// The registry wants other credentials.
    Unauthorized,
    /// The registry could not be reached, or kept failing.
    Unreachable,
    /// The archive, manifest or configuration is damaged or hostile.
    Corrupt,
    /// The disk is full.
    NoSpace,
    /// A size, count or ratio limit was passed.
    TooLarge,
    /// Well-formed, but nothing this store can use.
    Unsupported,
    /// Something still uses it.
    InUse,
    /// The file system failed in another way.
    Io,
}

/// A failed image operation.
#[derive(Debug, Error)]
pub enum ImageError {
    /// The text does not name an image.
    #[error("invalid image reference {reference:?}: {reason}")]
    InvalidReference {
        /// What was given.
        reference: String,
        /// Which rule it breaks.
        reason: String,
    },
    /// Nothing has this name.
    #[error("image {reference} not found {place}")]
    NotFound {
        /// What was looked for.
        reference: String,
        /// Where it was looked for: "in the store" or "in registry x".
        place: String,
    },
    /// The registry refused.
    #[error("registry {registry} refused access to {repository}: {reason}")]
    Unauthorized {
        /// Host and port of the registry.
        registry: String,
        /// The repository asked for.
        repository: String,
        /// What may be wrong.
        reason: String,
    },
    /// No answer, or only failures.
    #[error("registry {registry} cannot be reached: {reason}")]
    Unreachable {
        /// Host and port of the registry.
        registry: String,
        /// The last failure.
        reason: String,
    },
    /// Damaged or hostile input.
    #[error("damaged or hostile image data: {0}")]
    Corrupt(String),
    /// The disk is full.
    #[error("no space left for image data while {during}")]
    NoSpace {
        /// What was being written.
        during: String,
    },
    /// A limit was passed.
    #[error("image data is too large: {0}")]
    TooLarge(String),
    /// Valid, but of no use here.
    #[error("unsupported image: {0}")]
    Unsupported(String),
    /// Something still uses the image.
    #[error("image {reference} is in use by a sandbox")]
    InUse {
        /// The image that was to be removed.
        reference: String,
    },
    /// Another file system failure.
    #[error("failed {during}")]
    Io {
        /// What was being done, as "reading x".
        during: String,
        /// The failure.
        #[source]
        source: io::Error,
    },
}

impl ImageError {
    /// Returns the class of the error, which is what callers should branch on.
    pub fn kind(&self) -> ImageErrorKind {
        match self {
            Self::InvalidReference { .. } => ImageErrorKind::InvalidReference,
            Self::NotFound { .. } => ImageErrorKind::NotFound,
            Self::Unauthorized { .. } => ImageErrorKind::Unauthorized,
            Self::Unreachable { .. } => ImageErrorKind::Unreachable,
            Self::Corrupt(_) => ImageErrorKind::Corrupt,
            Self::NoSpace { .. } => ImageErrorKind::NoSpace,
            Self::TooLarge(_) => ImageErrorKind::TooLarge,
            Self::Unsupported(_) => ImageErrorKind::Unsupported,
            Self::InUse { .. } => ImageErrorKind::InUse,
            Self::Io { .. } => ImageErrorKind::Io,
        }
    }

    /// Wraps a file system failure; a full disk or quota becomes [`ImageErrorKind::NoSpace`].
    pub(crate) fn io(during: impl Into<String>, source: impl Into<io::Error>) -> Self {
        let (during, source) = (during.into(), source.into());
        match source.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => Self::NoSpace { during },
            _ => Self::Io { during, source },
        }
    }

    pub(crate) fn corrupt(message: impl Into<String>) -> Self {
        Self::Corrupt(message.into())
    }
}
