//! A TOML document as a tree that remembers where everything was written.
//!
//! The tree is our own because the sections need positions and lenient scalars at once. Messages of the TOML parser are
//! passed on without its excerpt of the source, which could show a secret.

use std::collections::BTreeMap;

use toml::de::{DeTable, DeValue};

/// Line and column, both from 1, the column in characters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Position {
    pub(super) line: usize,
    pub(super) column: usize,
}

/// A value and the position of its key (or of itself inside a list).
#[derive(Clone, Debug)]
pub(super) struct Node {
    pub(super) at: Position,
    pub(super) raw: Raw,
}

pub(super) type Table = BTreeMap<String, Node>;

#[derive(Clone, Debug)]
pub(super) enum Raw {
    Bool(bool),
    Int(i128),
    Float(f64),
    Text(String),
    /// Dates, and integers beyond any use: no key takes one.
    Other,
    List(Vec<Node>),
    Table(Table),
}

/// A complaint of the TOML parser.
#[derive(Debug)]
pub(super) struct SyntaxError {
    pub(super) at: Position,
    pub(super) message: String,
}

/// Parses a whole document, or reports every syntax error in it.
pub(super) fn parse(text: &str) -> Result<Table, Vec<SyntaxError>> {
    let lines = Lines::of(text);
    let (document, errors) = DeTable::parse_recoverable(text);
    if errors.is_empty() {
        return Ok(table(document.get_ref(), &lines));
    }
    let describe = |error: toml::de::Error| SyntaxError {
        at: lines.position(error.span().map_or(0, |span| span.start)),
        message: format!("not valid TOML: {}", error.message()),
    };
    Err(errors.into_iter().map(describe).collect())
}

/// Parses one value, as an environment variable may hold it (`["a", "b"]`, `{ a = "b" }`).
pub(super) fn parse_value(text: &str) -> Option<Raw> {
    let value = DeValue::parse(text).ok()?;
    Some(raw(value.get_ref(), &Lines::of(text)))
}

fn table(table: &DeTable<'_>, lines: &Lines<'_>) -> Table {
    let node = |(key, value): (&toml::Spanned<toml::de::DeString<'_>>, &toml::Spanned<DeValue<'_>>)| {
        let at = lines.position(key.span().start);
        (key.get_ref().to_string(), Node { at, raw: raw(value.get_ref(), lines) })
    };
    table.iter().map(node).collect()
}

fn raw(value: &DeValue<'_>, lines: &Lines<'_>) -> Raw {
    match value {
        DeValue::String(text) => Raw::Text(text.to_string()),
        DeValue::Integer(integer) => {
            i128::from_str_radix(integer.as_str(), integer.radix()).map_or(Raw::Other, Raw::Int)
        }
        DeValue::Float(float) => float.as_str().parse().map_or(Raw::Other, Raw::Float),
        DeValue::Boolean(flag) => Raw::Bool(*flag),
        DeValue::Datetime(_) => Raw::Other,
        DeValue::Array(items) => Raw::List(
            items
                .iter()
                .map(|item| Node { at: lines.position(item.span().start), raw: raw(item.get_ref(), lines) })
                .collect(),
        ),
        DeValue::Table(inner) => Raw::Table(table(inner, lines)),
    }
}

/// Byte offsets of line starts, to turn an offset into a position.
struct Lines<'a> {
    text: &'a str,
    starts: Vec<usize>,
}

impl<'a> Lines<'a> {
    fn of(text: &'a str) -> Self {
        let starts = std::iter::once(0).chain(text.match_indices('\n').map(|(at, _)| at + 1)).collect();
        Self { text, starts }
    }

    fn position(&self, offset: usize) -> Position {
        let line = self.starts.partition_point(|&start| start <= offset).max(1);
        let start = self.starts[line - 1];
        let column = self.text.get(start..offset).map_or(1, |before| before.chars().count() + 1);
        Position { line, column }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn positions_count_from_one_and_in_characters() {
        let table = parse("a = 1\n[b]\n  \"é\" = 1\nc.d = 2\n").unwrap();
        assert_eq!(table["a"].at, Position { line: 1, column: 1 });
        let Raw::Table(b) = &table["b"].raw else { panic!("b is a table") };
        assert_eq!(b["é"].at, Position { line: 3, column: 3 });
        assert_eq!(b["c"].at, Position { line: 4, column: 1 });
    }

    #[test]
    fn syntax_errors_are_all_reported_without_the_source_text() {
        let errors = parse("api_key = hunter2\nport = = 1\n").unwrap_err();
        assert!(errors.len() >= 2, "{errors:?}");
        assert!(errors.iter().all(|error| !error.message.contains("hunter2")), "{errors:?}");
    }
}
