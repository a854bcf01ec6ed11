//! Strings, words, paths, secrets, and values that are parsed from a string.

use std::marker::PhantomData;
use std::path::{Path, PathBuf};

use serde_json::Value;

use super::{Context, Kind, REDACTED, Shape, nearest};
use crate::config::choice::Choice;
use crate::config::document::Raw;
use crate::config::values::{Secret, without_userinfo};

/// A string with a rule about its content.
pub(in crate::config) struct Text {
    expects: &'static str,
    accepts: fn(&str) -> bool,
    rewrite: fn(&str) -> String,
}

impl Text {
    pub(in crate::config) fn any() -> Self {
        Self::that("a string", |_| true)
    }

    pub(in crate::config) fn non_empty() -> Self {
        Self::that("a string that is not empty", |text| !text.trim().is_empty())
    }

    pub(in crate::config) fn that(expects: &'static str, accepts: fn(&str) -> bool) -> Self {
        Self { expects, accepts, rewrite: str::to_owned }
    }

    pub(in crate::config) fn rewritten(self, rewrite: fn(&str) -> String) -> Self {
        Self { rewrite, ..self }
    }
}

impl Kind for Text {
    type Value = String;

    fn expects(&self) -> String {
        self.expects.to_owned()
    }

    fn read(&self, raw: &Raw, _: &Context) -> Result<String, String> {
        match raw {
            Raw::Text(text) if (self.accepts)(text) => Ok((self.rewrite)(text)),
            _ => self.mismatch(),
        }
    }

    fn show(&self, value: &String) -> Value {
        Value::from(without_userinfo(value))
    }
}

/// A secret string.
pub(in crate::config) struct SecretText {
    one_line: bool,
}

impl SecretText {
    /// For what ends up in a header.
    pub(in crate::config) fn line() -> Self {
        Self { one_line: true }
    }

    /// For anything, such as a certificate in an environment variable.
    pub(in crate::config) fn any() -> Self {
        Self { one_line: false }
    }
}

impl Kind for SecretText {
    type Value = Secret;

    fn expects(&self) -> String {
        if self.one_line { "a string on one line (secret)" } else { "a string (secret)" }.to_owned()
    }

    fn read(&self, raw: &Raw, _: &Context) -> Result<Secret, String> {
        match raw {
            Raw::Text(text) if !(self.one_line && text.contains(['\r', '\n', '\0'])) => Ok(Secret::new(text)),
            _ => self.mismatch(),
        }
    }

    fn show(&self, _: &Secret) -> Value {
        Value::from(REDACTED)
    }
}

/// One of an enum's words.
pub(in crate::config) struct Words<T>(PhantomData<T>);

impl<T: Choice> Words<T> {
    pub(in crate::config) fn new() -> Self {
        Self(PhantomData)
    }
}

impl<T: Choice> Kind for Words<T> {
    type Value = T;

    fn expects(&self) -> String {
        let words: Vec<String> = T::WORDS.iter().map(|(word, _)| format!("\"{word}\"")).collect();
        format!("one of {}", words.join(", "))
    }

    fn read(&self, raw: &Raw, _: &Context) -> Result<T, String> {
        let Raw::Text(text) = raw else { return self.mismatch() };
        let text = text.trim();
        let is = |word: &str| word == text || (T::ANY_CASE && word.eq_ignore_ascii_case(text));
        if let Some((_, variant)) = T::WORDS.iter().find(|(word, _)| is(word)) {
            return Ok(*variant);
        }
        match nearest(text, T::WORDS.iter().map(|(word, _)| *word)) {
            Some(word) => Err(format!("expected {}; did you mean \"{word}\"?", self.expects())),
            None => self.mismatch(),
        }
    }

    fn show(&self, value: &T) -> Value {
        Value::from(value.word())
    }
}

/// A path; a leading `~` is the home directory.
pub(in crate::config) struct FilePath {
    absolute: bool,
}

impl FilePath {
    pub(in crate::config) fn any() -> Self {
        Self { absolute: false }
    }

    pub(in crate::config) fn absolute() -> Self {
        Self { absolute: true }
    }
}

/// `None` when there is a `~` and no home.
pub(in crate::config) fn expand_home(path: &Path, home: Option<&Path>) -> Option<PathBuf> {
    match path.strip_prefix("~") {
        Ok(rest) if rest.as_os_str().is_empty() => home.map(Path::to_path_buf),
        Ok(rest) => home.map(|home| home.join(rest)),
        Err(_) => Some(path.to_path_buf()),
    }
}

impl Kind for FilePath {
    type Value = PathBuf;

    fn expects(&self) -> String {
        if self.absolute { "an absolute path" } else { "a path" }.to_owned()
    }

    fn read(&self, raw: &Raw, context: &Context) -> Result<PathBuf, String> {
        let Raw::Text(text) = raw else { return self.mismatch() };
        if text.trim().is_empty() || text.contains('\0') {
            return self.mismatch();
        }
        let Some(path) = expand_home(Path::new(text), context.home.as_deref()) else {
            return Err(
                "the path starts with `~` but there is no home directory (HOME is not set)".to_owned()
            );
        };
        if self.absolute && !path.is_absolute() { self.mismatch() } else { Ok(path) }
    }

    fn show(&self, value: &PathBuf) -> Value {
        Value::from(value.to_string_lossy())
    }

    fn complete(&self, value: &mut PathBuf, context: &Context) {
        if let Some(path) = expand_home(value, context.home.as_deref()) {
            *value = path;
        }
    }
}

/// A value with a textual form of its own. Plain integers count as text, so that `cpu = 1` works.
pub(in crate::config) struct Parsed<T> {
    pub(in crate::config) expects: &'static str,
    pub(in crate::config) parse: fn(&str) -> Option<T>,
    pub(in crate::config) print: fn(&T) -> String,
}

impl<T> Kind for Parsed<T> {
    type Value = T;

    fn expects(&self) -> String {
        self.expects.to_owned()
    }

    fn read(&self, raw: &Raw, _: &Context) -> Result<T, String> {
        let value = match raw {
            Raw::Text(text) => (self.parse)(text.trim()),
            Raw::Int(value) => (self.parse)(&value.to_string()),
            _ => None,
        };
        value.map_or_else(|| self.mismatch(), Ok)
    }

    fn show(&self, value: &T) -> Value {
        Value::from((self.print)(value))
    }
}

/// A value that may be left out; a blank string leaves it out too.
pub(in crate::config) struct Maybe<K>(pub(in crate::config) K);

impl<K: Kind> Kind for Maybe<K> {
    type Value = Option<K::Value>;

    fn expects(&self) -> String {
        self.0.expects()
    }

    fn read(&self, raw: &Raw, context: &Context) -> Result<Self::Value, String> {
        match raw {
            Raw::Text(text) if text.trim().is_empty() => Ok(None),
            raw => self.0.read(raw, context).map(Some),
        }
    }

    fn show(&self, value: &Self::Value) -> Value {
        value.as_ref().map_or(Value::Null, |value| self.0.show(value))
    }

    fn complete(&self, value: &mut Self::Value, context: &Context) {
        if let Some(value) = value {
            self.0.complete(value, context);
        }
    }

    fn shape(&self) -> Shape {
        self.0.shape()
    }
}
