//! Names that are content or point at it: keys, tags, and the names of artifacts.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Serialize};

/// The text is not of the form that the type requires.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("not a {0}")]
pub struct InvalidName(&'static str);

macro_rules! digest {
    ($(#[$doc:meta])* $name:ident, $what:literal) => {
        $(#[$doc])*
        #[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
        #[serde(try_from = "String", into = "String")]
        pub struct $name(String);

        impl $name {
            /// The 64 lower-case hexadecimal digits.
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl FromStr for $name {
            type Err = InvalidName;

            fn from_str(text: &str) -> Result<Self, InvalidName> {
                Self::try_from(text.to_owned())
            }
        }

        impl TryFrom<String> for $name {
            type Error = InvalidName;

            fn try_from(text: String) -> Result<Self, InvalidName> {
                let hex = |b: u8| b.is_ascii_digit() || (b'a'..=b'f').contains(&b);
                if text.len() == 64 && text.bytes().all(hex) { Ok(Self(text)) } else { Err(InvalidName($what)) }
            }
        }

        impl From<$name> for String {
            fn from(name: $name) -> String {
                name.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }
    };
}

digest!(
    /// SHA-256 of everything a build depends on but the commits.
    RecipeKey,
    "recipe key of 64 lower-case hexadecimal digits"
);

digest!(
    /// SHA-256 of everything a build depends on, the commits included: equal keys, equal images.
    BuildKey,
    "build key of 64 lower-case hexadecimal digits"
);

/// A movable name of an image within one repository: up to 128 characters of `A-Z a-z 0-9 _ . -`, the first a letter, digit or `_`.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct TagName(String);

impl TagName {
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl TryFrom<String> for TagName {
    type Error = InvalidName;

    fn try_from(text: String) -> Result<Self, InvalidName> {
        let word = |b: u8| b.is_ascii_alphanumeric() || b == b'_';
        let first = text.bytes().next().is_some_and(word);
        let rest = text.bytes().all(|b| word(b) || b == b'.' || b == b'-');
        if first && rest && text.len() <= 128 {
            Ok(Self(text))
        } else {
            Err(InvalidName("tag of up to 128 letters, digits, `_`, `.` and `-`"))
        }
    }
}

impl FromStr for TagName {
    type Err = InvalidName;

    fn from_str(text: &str) -> Result<Self, InvalidName> {
        Self::try_from(text.to_owned())
    }
}

impl From<TagName> for String {
    fn from(tag: TagName) -> String {
        tag.0
    }
}

impl fmt::Display for TagName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// The name under which an engine keeps what one attempt made: `osb-img-{first 12 digits of the key}-{ordinal}`.
///
/// It is known before the artifact exists, so that after a crash or a lost answer the name tells whether it does. The ordinal is used once per
/// engine and key digits, also by later builds of the key: an artifact of old is never taken for a new one.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct ArtifactName(String);

impl ArtifactName {
    /// The name of the `ordinal`-th artifact of a key.
    pub fn new(key: &BuildKey, ordinal: u64) -> Self {
        Self(format!("osb-img-{}-{ordinal}", &key.as_str()[..12]))
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for ArtifactName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_64_lower_case_digits() {
        let good = "0a".repeat(32);
        assert_eq!(good.parse::<BuildKey>().map(|k| k.to_string()), Ok(good.clone()));
        for bad in [good.to_uppercase(), good[1..].to_owned(), format!("{}/", &good[1..])] {
            assert!(bad.parse::<RecipeKey>().is_err(), "{bad}");
        }
    }

    #[test]
    fn artifact_names_carry_twelve_digits_and_the_ordinal() {
        let key: BuildKey = "0123456789abcdef".repeat(4).parse().unwrap();
        assert_eq!(ArtifactName::new(&key, 7).as_str(), "osb-img-0123456789ab-7");
    }

    #[test]
    fn tags_are_words() {
        for good in ["latest", "v1.2-rc_3", "_x", &"a".repeat(128)] {
            assert!(good.parse::<TagName>().is_ok(), "{good}");
        }
        for bad in ["", ".x", "-x", "a/b", "a b", "ä", &"a".repeat(129)] {
            assert!(bad.parse::<TagName>().is_err(), "{bad}");
        }
    }
}
