//! The tenants file: `[[tenants]]` with `name`, `namespace` and `api_keys`.
//!
//! Pure. Complaints name places, never what is written there, because that may be a key.

use std::{
    collections::{HashMap, HashSet},
    fmt,
    sync::Arc,
};

use toml::{Table as Toml, Value};

use super::{keyring::KeyDigest, principal::Tenant};

/// What is wrong with a tenants file.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TableError {
    #[error("it is not TOML from line {0} on")]
    Syntax(usize),
    #[error("it has no [[tenants]]")]
    Empty,
    #[error("tenant {tenant}: `{field}` must be {rule}")]
    Field { tenant: usize, field: &'static str, rule: &'static str },
    #[error("tenant {0} has the name of another one")]
    NameTaken(usize),
    #[error("tenant {0} has an API key of another one")]
    KeyTaken(usize),
}

/// All tenants by the digests of their keys.
#[derive(Default)]
pub(super) struct Table(Vec<(KeyDigest, Arc<Tenant>)>);

impl fmt::Debug for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Table({} keys)", self.0.len())
    }
}

impl Table {
    /// Reads a file's text. Unknown keys are left alone, as in the reference.
    pub(super) fn parse(text: &str) -> Result<Self, TableError> {
        let document: Toml = text.parse().map_err(|error: toml::de::Error| {
            let at = error.span().map_or(0, |span| span.start.min(text.len()));
            TableError::Syntax(text.as_bytes()[..at].iter().filter(|byte| **byte == b'\n').count() + 1)
        })?;
        let rows = match document.get("tenants") {
            Some(Value::Array(rows)) if !rows.is_empty() => rows,
            _ => return Err(TableError::Empty),
        };
        let (mut keys, mut names, mut owners) = (Vec::new(), HashSet::new(), HashMap::new());
        for (number, row) in (1..).zip(rows) {
            let row = Row { number, fields: row.as_table() };
            let name = row.word("name")?;
            if !names.insert(name.clone()) {
                return Err(TableError::NameTaken(number));
            }
            let tenant = Arc::new(Tenant { name, namespace: row.word("namespace")? });
            for key in row.keys()? {
                match owners.insert(key, number) {
                    None => keys.push((key, Arc::clone(&tenant))),
                    Some(owner) if owner == number => {}
                    Some(_) => return Err(TableError::KeyTaken(number)),
                }
            }
        }
        Ok(Self(keys))
    }

    /// Whose key it is. Takes the same time for every guess.
    pub(super) fn owner(&self, key: &[u8]) -> Option<Arc<Tenant>> {
        let given = KeyDigest::of(key);
        self.0
            .iter()
            .fold(None, |found, (digest, tenant)| if *digest == given { Some(tenant) } else { found })
            .cloned()
    }

    /// How many keys there are.
    pub(super) fn len(&self) -> usize {
        self.0.len()
    }
}

struct Row<'t> {
    number: usize,
    fields: Option<&'t Toml>,
}

impl<'t> Row<'t> {
    fn get(&self, field: &'static str) -> Option<&'t Value> {
        self.fields?.get(field)
    }

    fn wrong(&self, field: &'static str, rule: &'static str) -> TableError {
        TableError::Field { tenant: self.number, field, rule }
    }

    /// A name. Control characters are refused because names are written into labels and joined with other words.
    fn word(&self, field: &'static str) -> Result<String, TableError> {
        match self.get(field).and_then(Value::as_str).map(str::trim) {
            Some(word) if !word.is_empty() && !word.chars().any(char::is_control) => Ok(word.to_owned()),
            _ => Err(self.wrong(field, "a string that is not blank")),
        }
    }

    /// The keys, without the blanks around them, which no header carries.
    fn keys(&self) -> Result<Vec<KeyDigest>, TableError> {
        let digest = |value: &Value| {
            let key = value.as_str().map(str::trim).filter(|key| !key.is_empty())?;
            Some(KeyDigest::of(key.as_bytes()))
        };
        let listed = self.get("api_keys").and_then(Value::as_array).filter(|keys| !keys.is_empty());
        listed
            .and_then(|keys| keys.iter().map(digest).collect())
            .ok_or_else(|| self.wrong("api_keys", "a list of strings that are not blank"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TWO: &str = r#"
        [[tenants]]
        name = "a"
        namespace = "shared"
        api_keys = ["key-a", " key-a2 ", "key-a"]
        note = "unknown fields are left alone"
        [[tenants]]
        name = "b"
        namespace = "shared"
        api_keys = ["key-b"]
    "#;

    #[test]
    fn every_key_leads_to_its_tenant() {
        let table = Table::parse(TWO).unwrap();
        assert_eq!(table.len(), 3);
        for (key, name) in [("key-a", "a"), ("key-a2", "a"), ("key-b", "b")] {
            let tenant = table.owner(key.as_bytes()).unwrap();
            assert_eq!((tenant.name.as_str(), tenant.namespace.as_str()), (name, "shared"), "{key}");
        }
        for key in ["", "key", "key-a ", "KEY-A", "key-c"] {
            assert_eq!(table.owner(key.as_bytes()), None, "{key:?}");
        }
        assert_eq!(Table::default().owner(b""), None);
    }

    #[test]
    fn complaints_name_places_and_no_values() {
        let field = |tenant, field, rule| TableError::Field { tenant, field, rule };
        let (word, list) = ("a string that is not blank", "a list of strings that are not blank");
        let row = |rest: &str| {
            format!("[[tenants]]\nname = \"a\"\nnamespace = \"n\"\napi_keys = [\"hunter1\"]\n{rest}")
        };
        let keys = |keys: &str| format!("[[tenants]]\nname = \"a\"\nnamespace = \"n\"\napi_keys = {keys}");
        for (text, expected) in [
            (String::new(), TableError::Empty),
            ("tenants = []".to_owned(), TableError::Empty),
            ("tenants = \"hunter2\"".to_owned(), TableError::Empty),
            ("[tenants]\nname = \"a\"".to_owned(), TableError::Empty),
            ("a = 1\n\n[[tenants]\nhunter2".to_owned(), TableError::Syntax(3)),
            (keys("hunter2"), TableError::Syntax(4)),
            ("tenants = [\"hunter2\"]".to_owned(), field(1, "name", word)),
            ("[[tenants]]\nname = \" \"".to_owned(), field(1, "name", word)),
            ("[[tenants]]\nname = 7".to_owned(), field(1, "name", word)),
            ("[[tenants]]\nname = \"a\\u001fb\"".to_owned(), field(1, "name", word)),
            ("[[tenants]]\nname = \"a\"".to_owned(), field(1, "namespace", word)),
            ("[[tenants]]\nname = \"a\"\nnamespace = \"\"".to_owned(), field(1, "namespace", word)),
            ("[[tenants]]\nname = \"a\"\nnamespace = \"n\"".to_owned(), field(1, "api_keys", list)),
            (keys("[]"), field(1, "api_keys", list)),
            (keys("[\"hunter2\", \" \"]"), field(1, "api_keys", list)),
            (keys("[\"hunter2\", 22334455]"), field(1, "api_keys", list)),
            (keys("\"hunter2\""), field(1, "api_keys", list)),
            (row("[[tenants]]\nname = \"b\"\nnamespace = \"n\"\napi_keys = []"), field(2, "api_keys", list)),
            (
                row("[[tenants]]\nname = \"a\"\nnamespace = \"n\"\napi_keys = [\"x\"]"),
                TableError::NameTaken(2),
            ),
            (
                row("[[tenants]]\nname = \"b\"\nnamespace = \"n\"\napi_keys = [\"hunter1\"]"),
                TableError::KeyTaken(2),
            ),
        ] {
            let error = Table::parse(&text).unwrap_err();
            assert_eq!(error, expected, "{text}");
            let shown = format!("{error} {error:?}");
            assert!(!shown.contains("hunter") && !shown.contains("22334455"), "{shown}");
        }
    }
}
