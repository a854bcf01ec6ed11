//! What the API takes: lenient about `null` and missing members, strict about unknown ones.

use serde::Deserialize;
use serde::de::{DeserializeOwned, Deserializer};

use super::secret::Secret;

/// `null` means the same as absence, as the published clients assume.
fn or_default<'de, D, T>(deserializer: D) -> Result<T, D::Error>
where
    D: Deserializer<'de>,
    T: Deserialize<'de> + Default,
{
    Option::<T>::deserialize(deserializer).map(Option::unwrap_or_default)
}

fn secret<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Secret, D::Error> {
    or_default::<D, String>(deserializer).map(Secret::new)
}

fn no_secret() -> Secret {
    Secret::new("")
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct Create {
    #[serde(deserialize_with = "or_default")]
    pub(super) credentials: Vec<Credential>,
    #[serde(deserialize_with = "or_default")]
    pub(super) bindings: Vec<Binding>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default, rename_all = "camelCase")]
pub(super) struct Patch {
    pub(super) expected_revision: Option<i64>,
    #[serde(deserialize_with = "or_default")]
    pub(super) credentials: Mutations<Credential>,
    #[serde(deserialize_with = "or_default")]
    pub(super) bindings: Mutations<Binding>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, default, bound = "T: Deserialize<'de>")]
pub(super) struct Mutations<T> {
    #[serde(deserialize_with = "or_default")]
    pub(super) add: Vec<T>,
    #[serde(deserialize_with = "or_default")]
    pub(super) replace: Vec<T>,
    #[serde(deserialize_with = "or_default")]
    pub(super) delete: Vec<String>,
}

impl<T> Default for Mutations<T> {
    fn default() -> Self {
        Self { add: Vec::new(), replace: Vec::new(), delete: Vec::new() }
    }
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct Credential {
    #[serde(deserialize_with = "or_default")]
    pub(super) name: String,
    #[serde(deserialize_with = "or_default")]
    pub(super) source: Source,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Source {
    #[serde(default, rename = "type", deserialize_with = "or_default")]
    pub(super) kind: String,
    #[serde(default = "no_secret", deserialize_with = "secret")]
    pub(super) value: Secret,
}

impl Default for Source {
    fn default() -> Self {
        Self { kind: String::new(), value: no_secret() }
    }
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct Binding {
    #[serde(deserialize_with = "or_default")]
    pub(super) name: String,
    #[serde(rename = "match", deserialize_with = "or_default")]
    pub(super) matches: Match,
    #[serde(deserialize_with = "or_default")]
    pub(super) auth: Auth,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct Match {
    #[serde(deserialize_with = "or_default")]
    pub(super) schemes: Vec<String>,
    #[serde(deserialize_with = "or_default")]
    pub(super) ports: Vec<i64>,
    #[serde(deserialize_with = "or_default")]
    pub(super) hosts: Vec<String>,
    #[serde(deserialize_with = "or_default")]
    pub(super) methods: Vec<String>,
    #[serde(deserialize_with = "or_default")]
    pub(super) paths: Vec<String>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct Auth {
    #[serde(rename = "type", deserialize_with = "or_default")]
    pub(super) kind: String,
    #[serde(deserialize_with = "or_default")]
    pub(super) credential: String,
    #[serde(deserialize_with = "or_default")]
    pub(super) name: String,
    #[serde(deserialize_with = "or_default")]
    pub(super) headers: Vec<Header>,
    #[serde(deserialize_with = "or_default")]
    pub(super) substitutions: Vec<Substitution>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct Header {
    #[serde(deserialize_with = "or_default")]
    pub(super) name: String,
    #[serde(deserialize_with = "or_default")]
    pub(super) credential: String,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct Substitution {
    #[serde(deserialize_with = "or_default")]
    pub(super) credential: String,
    #[serde(deserialize_with = "or_default")]
    pub(super) placeholder: String,
    #[serde(rename = "in", deserialize_with = "or_default")]
    pub(super) surfaces: Vec<String>,
}

/// Reads a body; the error is a text that repeats nothing of it but the name of an unknown member.
pub(super) fn read<T: DeserializeOwned>(body: &[u8]) -> Result<T, String> {
    serde_json::from_slice(body).map_err(|error| {
        if error.is_eof() && body.trim_ascii().is_empty() {
            return "EOF".to_owned();
        }
        let said = error.to_string();
        let place = format!("line {}, column {}", error.line(), error.column());
        if let Some(rest) = said.strip_prefix("unknown field `") {
            let name: String = rest.chars().take_while(|c| *c != '`').take(64).collect();
            return format!("json: unknown field {name:?}");
        }
        // What was found would be part of the message, and may be a secret in the wrong place; what was expected is ours.
        match said.rsplit_once(", expected ") {
            Some((_, expected)) if error.is_data() => {
                let expected = expected.split(" at line ").next().unwrap_or_default();
                format!("json: expected {expected} at {place}")
            }
            _ => format!("json: malformed at {place}"),
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_members_are_named_and_nothing_else_is_repeated() {
        let cases: &[(&str, &str)] = &[
            (r#"{"credentials":[],"extra":"hunter2"}"#, r#"json: unknown field "extra""#),
            (r#"{"credentials":"hunter2"}"#, "json: expected a sequence at line 1, column 24"),
            (
                r#"{"credentials":"hunter2, expected hunter2"}"#,
                "json: expected a sequence at line 1, column 42",
            ),
            (
                r#"{"credentials":[{"name":"a","source":{"value":17}}]}"#,
                "json: expected a string at line 1, column 48",
            ),
            (r#"{"credentials":[{"source":{"value":"hunter2""#, "json: malformed at line 1, column 44"),
            ("", "EOF"),
        ];
        for (body, expected) in cases {
            let error = read::<Create>(body.as_bytes()).unwrap_err();
            assert_eq!(&error, expected, "{body}");
        }
        let found = read::<Create>(br#"{"a":1}{"b":2}"#).unwrap_err();
        assert!(!found.contains("hunter2"));
    }

    #[test]
    fn null_is_absence() {
        let create: Create =
            read(br#"{"credentials":null,"bindings":[{"name":"b","match":{"hosts":null},"auth":null}]}"#)
                .unwrap();
        assert!(create.credentials.is_empty());
        assert_eq!(create.bindings[0].name, "b");
    }

    #[test]
    fn a_request_prints_no_secret() {
        let create: Create = read(br#"{"credentials":[{"name":"a","source":{"value":"hunter2"}}]}"#).unwrap();
        assert!(!format!("{create:?}").contains("hunter2"));
    }
}
