//! What a key accepts: each kind reads a raw value, says what it expects, and shows a value again.
//!
//! Error texts name what is expected, never what was found (see `problem.rs`).

mod compound;
mod number;
mod text;

pub(super) use compound::{ListOf, SecureKeys, TableOf, key_id};
pub(super) use number::{Cap, Flag, Float, Int, Size, Span};
pub(super) use text::{FilePath, Maybe, Parsed, SecretText, Text, Words, expand_home};

use std::path::PathBuf;

use serde_json::Value;

use super::document::Raw;

/// How an environment variable's text is to be understood.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Shape {
    Scalar,
    /// `a,b` or a TOML array.
    List,
    /// `a=b,c=d` or a TOML inline table.
    Table,
    /// The kind itself understands the text.
    Own,
}

/// What reading a value may depend on.
#[derive(Clone, Debug, Default)]
pub(super) struct Context {
    pub(super) home: Option<PathBuf>,
}

pub(super) trait Kind {
    type Value;

    /// Completes the sentence "expected …".
    fn expects(&self) -> String;

    fn read(&self, raw: &Raw, context: &Context) -> Result<Self::Value, String>;

    /// The value as `config show` prints it: `null` for unset, `"***"` for a secret.
    fn show(&self, value: &Self::Value) -> Value;

    /// Completes a default value with what is only known at run time.
    fn complete(&self, _value: &mut Self::Value, _context: &Context) {}

    fn shape(&self) -> Shape {
        Shape::Scalar
    }

    fn mismatch<T>(&self) -> Result<T, String> {
        Err(format!("expected {}", self.expects()))
    }
}

/// What stands in for a secret wherever it could be printed.
pub(super) const REDACTED: &str = "***";

/// The word most like `given`, when one is like it at all.
pub(super) fn nearest<'a>(given: &str, words: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let given = given.to_lowercase();
    words
        .into_iter()
        .map(|word| (likeness(&given, &word.to_lowercase()), word))
        .filter(|(likeness, _)| *likeness >= 0.75)
        .max_by(|left, right| left.0.total_cmp(&right.0))
        .map(|(_, word)| word)
}

/// From 0 to 1. One slip of a finger counts as near even in words too short for the general measure (`dns`, `dsn`).
fn likeness(left: &str, right: &str) -> f64 {
    let one_slip = left.len() > 2 && strsim::damerau_levenshtein(left, right) == 1;
    strsim::jaro_winkler(left, right).max(if one_slip { 0.9 } else { 0.0 })
}
