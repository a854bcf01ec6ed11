//! `config show`: every effective value and where it came from, secrets hidden.

use std::fmt::Write as _;

use serde_json::{Value, json};

use super::load::Loaded;
use super::problem::Origin;

/// How to print.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// Aligned columns for people.
    Table,
    /// An object for programs.
    Json,
}

/// Every key with its effective value and origin.
#[must_use]
pub fn render(loaded: &Loaded, format: Format) -> String {
    match format {
        Format::Table => table(loaded),
        Format::Json => json(loaded),
    }
}

/// `null` is "not set", everything else is printed as it could be written in the file.
pub(super) fn literal(value: &Value) -> String {
    match value {
        Value::Null => "(unset)".to_owned(),
        Value::String(text) if text == super::kinds::REDACTED => text.clone(),
        Value::Object(fields) if fields.is_empty() => "{}".to_owned(),
        Value::Object(fields) => {
            let fields: Vec<String> = fields
                .iter()
                .map(|(name, value)| format!("{} = {}", name_of(name), literal(value)))
                .collect();
            format!("{{ {} }}", fields.join(", "))
        }
        Value::Array(items) => format!("[{}]", items.iter().map(literal).collect::<Vec<_>>().join(", ")),
        other => other.to_string(),
    }
}

fn name_of(name: &str) -> String {
    let bare = !name.is_empty() && name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_' || b == b'-');
    if bare { name.to_owned() } else { Value::from(name).to_string() }
}

fn table(loaded: &Loaded) -> String {
    let rows: Vec<[String; 3]> = loaded
        .entries
        .iter()
        .map(|entry| [entry.key.clone(), literal(&entry.value), entry.origin.to_string()])
        .collect();
    let widest = |column: usize| {
        // A long list must not push every origin off the screen.
        rows.iter().map(|row| row[column].chars().count()).filter(|width| *width <= 60).max().unwrap_or(0)
    };
    let (keys, values) = (widest(0), widest(1));
    let mut text = match &loaded.path {
        Some(path) => format!("# file: {}\n", path.display()),
        None => "# file: none\n".to_owned(),
    };
    for [key, value, origin] in &rows {
        let _infallible = writeln!(text, "{key:keys$}  {value:values$}  {origin}");
    }
    text
}

fn json(loaded: &Loaded) -> String {
    let settings: serde_json::Map<String, Value> = loaded
        .entries
        .iter()
        .map(|entry| {
            let setting =
                json!({ "value": entry.value, "default": entry.default, "origin": origin(&entry.origin) });
            (entry.key.clone(), setting)
        })
        .collect();
    let warnings: Vec<String> = loaded.warnings.iter().map(ToString::to_string).collect();
    let document = json!({ "file": loaded.path, "settings": settings, "warnings": warnings });
    format!("{document:#}\n")
}

fn origin(origin: &Origin) -> Value {
    match origin {
        Origin::Default => json!({ "kind": "default" }),
        Origin::File { path, line, column } => {
            json!({ "kind": "file", "path": path, "line": line, "column": column })
        }
        Origin::Env { name } => json!({ "kind": "env", "name": name }),
    }
}
