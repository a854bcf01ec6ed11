//! `--name=value` between an instruction and its arguments.

use std::time::Duration;

use super::DockerfileError;

/// The flags of one instruction. Each is taken by the one who knows it; what is left is an error.
pub(super) struct Flags {
    keyword: &'static str,
    line: usize,
    flags: Vec<(String, Option<String>)>,
}

impl Flags {
    /// Splits the flags off the arguments.
    pub(super) fn split<'a>(
        keyword: &'static str,
        line: usize,
        arguments: &'a str,
        escape: char,
    ) -> (Self, &'a str) {
        let mut rest = arguments.trim_start();
        let mut flags = Vec::new();
        while let Some(after) = rest.strip_prefix("--") {
            let end = end_of_word(after, escape);
            let (flag, next) = after.split_at(end);
            rest = next.trim_start();
            if flag.is_empty() {
                break;
            }
            let (name, value) = match flag.split_once('=') {
                Some((name, value)) => (name, Some(value)),
                None => (flag, None),
            };
            flags.push((name.to_ascii_lowercase(), value.map(|value| unquote(value, escape))));
        }
        (Self { keyword, line, flags }, rest)
    }

    pub(super) fn error(&self, message: impl std::fmt::Display) -> DockerfileError {
        DockerfileError::new(self.line, format!("{}: {message}", self.keyword))
    }

    /// Every value of a flag that may be given several times.
    pub(super) fn take_all(&mut self, name: &str) -> Result<Vec<String>, DockerfileError> {
        let (taken, left) = std::mem::take(&mut self.flags).into_iter().partition(|(flag, _)| flag == name);
        self.flags = left;
        let taken: Vec<(String, Option<String>)> = taken;
        taken
            .into_iter()
            .map(|(_, value)| {
                value
                    .filter(|value| !value.is_empty())
                    .ok_or_else(|| self.error(format!("--{name} has no value")))
            })
            .collect()
    }

    /// The value of a flag that may be given once.
    pub(super) fn take(&mut self, name: &str) -> Result<Option<String>, DockerfileError> {
        let mut values = self.take_all(name)?;
        if values.len() > 1 {
            return Err(self.error(format!("--{name} is given twice")));
        }
        Ok(values.pop())
    }

    /// A flag that stands alone or has `true` or `false`.
    pub(super) fn take_switch(&mut self, name: &str) -> Result<Option<bool>, DockerfileError> {
        let Some(index) = self.flags.iter().position(|(flag, _)| flag == name) else { return Ok(None) };
        let (_, value) = self.flags.remove(index);
        match value.as_deref() {
            None | Some("true" | "1") => Ok(Some(true)),
            Some("false" | "0") => Ok(Some(false)),
            Some(_) => Err(self.error(format!("--{name} is neither true nor false"))),
        }
    }

    pub(super) fn take_duration(&mut self, name: &str) -> Result<Option<Duration>, DockerfileError> {
        let Some(text) = self.take(name)? else { return Ok(None) };
        duration(&text)
            .map(Some)
            .ok_or_else(|| self.error(format!("--{name} is not a duration like 30s or 1m30s")))
    }

    /// # Errors
    /// A flag that nobody took.
    pub(super) fn finish(self) -> Result<(), DockerfileError> {
        match self.flags.first() {
            None => Ok(()),
            Some((name, _)) => Err(self.error(format!("the flag --{name} is not known"))),
        }
    }
}

fn end_of_word(text: &str, escape: char) -> usize {
    let mut quote = None;
    let mut chars = text.char_indices();
    while let Some((at, c)) = chars.next() {
        match (quote, c) {
            (_, c) if c == escape => {
                chars.next();
            }
            (None, '"' | '\'') => quote = Some(c),
            (Some(open), c) if open == c => quote = None,
            (None, c) if c.is_whitespace() => return at,
            _ => {}
        }
    }
    text.len()
}

fn unquote(text: &str, escape: char) -> String {
    let mut out = String::new();
    let mut quote = None;
    let mut chars = text.chars();
    while let Some(c) = chars.next() {
        match (quote, c) {
            (_, c) if c == escape => out.extend(chars.next()),
            (None, '"' | '\'') => quote = Some(c),
            (Some(open), c) if open == c => quote = None,
            (_, c) => out.push(c),
        }
    }
    out
}

/// `1h2m3.5s`, `300ms`, `0`.
fn duration(text: &str) -> Option<Duration> {
    if text == "0" {
        return Some(Duration::ZERO);
    }
    let mut rest = text;
    let mut total = Duration::ZERO;
    while !rest.is_empty() {
        let digits = rest.find(|c: char| !c.is_ascii_digit() && c != '.')?;
        let number: f64 = rest[..digits].parse().ok()?;
        let after = &rest[digits..];
        let (unit, seconds) =
            [("ms", 0.001), ("us", 1e-6), ("ns", 1e-9), ("h", 3600.0), ("m", 60.0), ("s", 1.0)]
                .into_iter()
                .find(|(unit, _)| after.starts_with(unit))?;
        total = total.checked_add(Duration::try_from_secs_f64(number * seconds).ok()?)?;
        rest = &after[unit.len()..];
    }
    (!text.is_empty()).then_some(total)
}
