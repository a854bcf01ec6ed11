//! Typed identifiers. `FromStr` is the only way in, `Display` the only way out.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Serialize};
use uuid::Uuid;

/// The text is not an identifier this server could have issued, so nothing can exist under it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("not an identifier of this server")]
pub struct InvalidId;

macro_rules! uuid_id {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
        #[serde(transparent)]
        pub struct $name(Uuid);

        impl $name {
            /// A fresh random (version 4) identifier.
            pub fn random() -> Self {
                Self(Uuid::new_v4())
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.as_hyphenated().fmt(f)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Display::fmt(self, f)
            }
        }

        impl FromStr for $name {
            type Err = InvalidId;

            /// Accepts exactly the canonical spelling (36 lower-case characters with hyphens), so that one
            /// sandbox has one name in URLs, logs and on disk.
            fn from_str(text: &str) -> Result<Self, InvalidId> {
                let id = Uuid::try_parse(text).map_err(|_| InvalidId)?;
                let mut canonical = [0; uuid::fmt::Hyphenated::LENGTH];
                if id.as_hyphenated().encode_lower(&mut canonical) == text { Ok(Self(id)) } else { Err(InvalidId) }
            }
        }
    };
}

uuid_id!(
    /// A sandbox. On the wire: a hyphenated UUID, opaque to clients.
    SandboxId
);

uuid_id!(
    /// A snapshot. On the wire: a hyphenated UUID, opaque to clients.
    SnapshotId
);

uuid_id!(
    /// A build of an image from a repository. On the wire: a hyphenated UUID, opaque to clients.
    ImageBuildId
);

uuid_id!(
    /// An image that a build made. On the wire: a hyphenated UUID, opaque to clients.
    ImageId
);

uuid_id!(
    /// A standing order that keeps a repository's image fresh. On the wire: a hyphenated UUID, opaque to clients.
    PrebuildId
);

uuid_id!(
    /// A subscription of a receiver to events. On the wire: a hyphenated UUID, opaque to clients.
    WebhookId
);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_canonical_spelling_is_accepted() {
        let id = SandboxId::random();
        assert_eq!(id.to_string().parse::<SandboxId>(), Ok(id));
        for bad in ["", "..", "../../etc", &id.to_string().to_uppercase(), &id.to_string().replace('-', "")] {
            if bad != id.to_string() {
                assert_eq!(bad.parse::<SandboxId>(), Err(InvalidId), "{bad}");
            }
        }
    }
}
