//! Identifiers: 1 to 128 characters of `A–Z a–z 0–9 . _ -`, so that they go into paths, headers and file names unescaped.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use super::limits::MAX_ID_CHARS;

/// An identifier that breaks the grammar.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{what} must be 1 to {MAX_ID_CHARS} characters of letters, digits, '.', '_' and '-'")]
pub struct InvalidId {
    what: &'static str,
}

fn is_valid(text: &str) -> bool {
    (1..=MAX_ID_CHARS).contains(&text.len())
        && text.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-'))
}

macro_rules! identifier {
    ($(#[$doc:meta])* $name:ident, $what:literal) => {
        $(#[$doc])*
        #[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(try_from = "String", into = "String")]
        pub struct $name(String);

        impl $name {
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl TryFrom<String> for $name {
            type Error = InvalidId;

            fn try_from(text: String) -> Result<Self, InvalidId> {
                if is_valid(&text) { Ok(Self(text)) } else { Err(InvalidId { what: $what }) }
            }
        }

        impl FromStr for $name {
            type Err = InvalidId;

            fn from_str(text: &str) -> Result<Self, InvalidId> {
                Self::try_from(text.to_owned())
            }
        }

        impl From<$name> for String {
            fn from(id: $name) -> String {
                id.0
            }
        }

        impl std::borrow::Borrow<str> for $name {
            fn borrow(&self) -> &str {
                &self.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }
    };
}

identifier!(
    /// The sandbox that the agent lives in.
    SandboxId, "a sandbox id"
);
identifier!(
    /// One boot of a box: the life of one sequence of events. A restarted agent that finds its ring is the same boot.
    BootId, "a boot id"
);
identifier!(
    /// One attachment. Opaque to the agent.
    LeaseId, "a lease id"
);
identifier!(
    /// One command. Opaque to the agent, never used twice.
    CommandId, "a command id"
);

/// Names that the server gives: a number in one life of the server, so that two lives never give the same name.
macro_rules! numbered {
    ($($name:ident),*) => {
        $(impl $name {
            pub(crate) fn numbered(incarnation: u64, number: u64) -> Self {
                Self(format!("{incarnation:x}-{number}"))
            }
        })*
    };
}

numbered!(LeaseId, CommandId);

/// The number of a name that was given in this life of the server.
pub(crate) fn number_of(name: &str, incarnation: u64) -> Option<u64> {
    let (life, number) = name.split_once('-')?;
    let ours = u64::from_str_radix(life, 16).ok()? == incarnation;
    if ours { number.parse().ok() } else { None }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn identifiers_hold_nothing_that_a_path_or_a_header_could_stumble_over() {
        for good in ["a", "0f.e_D-9", &"x".repeat(128)] {
            assert_eq!(good.parse::<BootId>().unwrap().as_str(), good);
        }
        for bad in ["", "a/b", "a b", "é", "a\n", "%41", &"x".repeat(129)] {
            assert!(bad.parse::<BootId>().is_err(), "{bad:?}");
            assert!(serde_json::from_value::<CommandId>(bad.into()).is_err(), "{bad:?}");
        }
    }
}
