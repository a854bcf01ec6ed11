//! Text that is never shown.

use std::fmt;

/// A value that prints nothing and compares in constant time only where that matters elsewhere.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(String);

impl Secret {
    #[must_use]
    pub fn new(value: impl Into<String>) -> Self {
        Self(value.into())
    }

    /// The value itself; whoever takes it answers for it.
    #[must_use]
    pub fn expose(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret")
    }
}

impl Drop for Secret {
    fn drop(&mut self) {
        // Best effort: the freed page of a core dump or a later allocation should not hold it.
        let bytes = std::mem::take(&mut self.0).into_bytes();
        let mut bytes = std::hint::black_box(bytes);
        bytes.fill(0);
        std::hint::black_box(&bytes);
    }
}

/// Reads and writes values for the state that survives a restart; nothing else may serialise a secret.
pub(super) mod exposed {
    use serde::{Deserialize, Deserializer, Serializer};

    use super::Secret;

    pub(in crate::vault) fn serialize<S: Serializer>(
        secret: &Secret,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(secret.expose())
    }

    pub(in crate::vault) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Secret, D::Error> {
        String::deserialize(deserializer).map(Secret::new)
    }
}
