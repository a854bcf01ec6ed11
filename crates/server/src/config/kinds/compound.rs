//! Lists and tables of other kinds, and the key ring of secure access.

use std::collections::BTreeMap;

use base64::Engine as _;
use base64::alphabet::STANDARD;
use base64::engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig};
use serde_json::Value;

use super::{Context, Kind, REDACTED, Shape};
use crate::config::document::Raw;
use crate::config::ingress::SecureAccessKey;

/// A list of one kind.
pub(in crate::config) struct ListOf<K>(pub(in crate::config) K);

impl<K: Kind> Kind for ListOf<K> {
    type Value = Vec<K::Value>;

    fn expects(&self) -> String {
        format!("a list, each entry {}", self.0.expects())
    }

    fn read(&self, raw: &Raw, context: &Context) -> Result<Self::Value, String> {
        let Raw::List(items) = raw else { return self.mismatch() };
        let read = |(index, item): (usize, &crate::config::document::Node)| {
            self.0.read(&item.raw, context).map_err(|message| format!("entry {}: {message}", index + 1))
        };
        items.iter().enumerate().map(read).collect()
    }

    fn show(&self, value: &Self::Value) -> Value {
        value.iter().map(|item| self.0.show(item)).collect()
    }

    fn shape(&self) -> Shape {
        Shape::List
    }
}

/// A table with free names and values of one kind.
pub(in crate::config) struct TableOf<K> {
    pub(in crate::config) names: fn(&str) -> bool,
    pub(in crate::config) values: K,
}

impl<K: Kind> Kind for TableOf<K> {
    type Value = BTreeMap<String, K::Value>;

    fn expects(&self) -> String {
        format!("a table, each value {}", self.values.expects())
    }

    fn read(&self, raw: &Raw, context: &Context) -> Result<Self::Value, String> {
        let Raw::Table(table) = raw else { return self.mismatch() };
        let mut values = BTreeMap::new();
        for (name, node) in table {
            if !(self.names)(name) {
                return Err("a name in this table is not allowed".to_owned());
            }
            let value = self.values.read(&node.raw, context);
            let value = value.map_err(|message| format!("{name} (line {}): {message}", node.at.line))?;
            values.insert(name.clone(), value);
        }
        Ok(values)
    }

    fn show(&self, value: &Self::Value) -> Value {
        value.iter().map(|(name, value)| (name.clone(), self.values.show(value))).collect()
    }

    fn shape(&self) -> Shape {
        Shape::Table
    }
}

/// The signing keys: a list of `{ key_id, key }`, or `id=base64,id=base64` in the environment.
pub(in crate::config) struct SecureKeys;

/// Padding is optional, as for the reference and the gateway.
const BASE64: GeneralPurpose = GeneralPurpose::new(
    &STANDARD,
    GeneralPurposeConfig::new()
        .with_decode_padding_mode(DecodePaddingMode::Indifferent)
        .with_decode_allow_trailing_bits(true),
);

pub(in crate::config) fn key_id(text: &str) -> Option<char> {
    let mut letters = text.chars();
    let id = letters.next().filter(|letter| letter.is_ascii_digit() || letter.is_ascii_lowercase())?;
    letters.next().is_none().then_some(id)
}

fn secure_key(id: &str, key: &str) -> Option<SecureAccessKey> {
    let key = BASE64.decode(key.trim()).ok().filter(|bytes| !bytes.is_empty())?;
    Some(SecureAccessKey { id: key_id(id)?, key })
}

impl SecureKeys {
    fn entry(raw: &Raw) -> Option<SecureAccessKey> {
        let Raw::Table(table) = raw else { return None };
        let text = |name: &str| match &table.get(name)?.raw {
            Raw::Text(text) => Some(text.as_str()),
            _ => None,
        };
        if table.len() != 2 {
            return None;
        }
        secure_key(text("key_id")?, text("key")?)
    }
}

impl Kind for SecureKeys {
    type Value = Vec<SecureAccessKey>;

    fn expects(&self) -> String {
        "a list of { key_id = one of 0-9a-z, key = base64 of at least one byte }, each id once (secret)"
            .to_owned()
    }

    fn read(&self, raw: &Raw, _: &Context) -> Result<Self::Value, String> {
        let keys: Option<Vec<SecureAccessKey>> = match raw {
            Raw::List(items) => items.iter().map(|item| Self::entry(&item.raw)).collect(),
            Raw::Text(text) => text
                .split(',')
                .map(|pair| pair.trim().split_once('=').and_then(|(id, key)| secure_key(id, key)))
                .collect(),
            _ => None,
        };
        let distinct = |keys: &Vec<SecureAccessKey>| {
            let ids: std::collections::BTreeSet<char> = keys.iter().map(|key| key.id).collect();
            !keys.is_empty() && ids.len() == keys.len()
        };
        keys.filter(distinct).map_or_else(|| self.mismatch(), Ok)
    }

    fn show(&self, value: &Self::Value) -> Value {
        if value.is_empty() {
            return Value::Null;
        }
        value.iter().map(|key| (key.id.to_string(), Value::from(REDACTED))).collect()
    }

    fn shape(&self) -> Shape {
        Shape::Own
    }
}
