//! What the server asks of the agent in a build sandbox before its files become an image, and the lines that answer. Programs of the image
//! have no part in it: they may be missing, or not what their names say.
//!
//! Each is a command `[PROGRAM, WORD, …]` through the agent's own API.

use serde::{Deserialize, Serialize};

/// As whatever the agent starts finds the agent's binary.
pub const PROGRAM: &str = "/proc/self/exe";
pub const WORD: &str = "seal";
/// Prints the time of the box, in nanoseconds since 1970.
pub const CLOCK: &str = "clock";
/// Ends every process of the box but the agent, and returns when none is left.
pub const END: &str = "end";
/// Searches; one argument: the path of a [`Search`] in JSON, which is removed before anything else.
pub const SEARCH: &str = "search";
/// Paths with secrets in them that are named.
pub const SECRETS_MOST: usize = 20;
/// Files with tokens in them that are named.
pub const TOKENS_MOST: usize = 64;

/// What to look for.
#[derive(Clone, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Search {
    /// None may be left anywhere in what changed.
    pub values: Vec<String>,
    /// What changed later belongs to the build; of the box's clock, in nanoseconds since 1970.
    pub since: i64,
}

impl std::fmt::Debug for Search {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Search").field("values", &self.values.len()).finish_non_exhaustive()
    }
}

/// A line of the answer. Paths are as readable as they can be made, and end after a few hundred characters.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", tag = "found")]
pub enum Found {
    /// One of the values, in the content, the name, the target or an attribute.
    Secret { path: String },
    /// Tokens of these kinds, each once, by their words.
    Tokens { path: String, kinds: Vec<String> },
    /// What could not be looked into, and why.
    Unread { path: String, message: String },
    /// The search for tokens ended early: after this many seconds.
    TokensGivenUp { seconds: u64 },
    /// The last line. Without it the search did not end.
    Done { changed: u64 },
}
