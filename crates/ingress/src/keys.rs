//! The keys that sign routes.

use std::fmt;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;

/// One signing key.
#[derive(Clone, PartialEq, Eq)]
pub struct Key {
    /// `0`–`9` or `a`–`z`.
    pub id: char,
    pub secret: Vec<u8>,
}

/// The secret stays out of logs.
impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Key({})", self.id)
    }
}

/// Every key that verifies. Several, so that keys can be changed while routes signed with the old one are in use.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Keys(Vec<Key>);

/// Why a list of keys is none. Says where, never what.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum KeyListError {
    #[error("entry {0} of the key list is not of the form id=base64")]
    Form(usize),
    #[error("entry {0} of the key list has an id that is not one of 0-9a-z")]
    Id(usize),
    #[error("entry {0} of the key list is not standard base64 with padding")]
    Base64(usize),
    #[error("entry {0} of the key list has an empty secret")]
    Empty(usize),
}

impl Keys {
    /// Of keys with the same id the last one counts.
    #[must_use]
    pub fn new(keys: impl IntoIterator<Item = Key>) -> Self {
        let mut ring: Vec<Key> = Vec::new();
        for key in keys {
            ring.retain(|known| known.id != key.id);
            ring.push(key);
        }
        Self(ring)
    }

    /// `id=base64,id=base64`; spaces around entries and empty entries do not matter.
    ///
    /// # Errors
    /// When an entry is not a key.
    pub fn parse(list: &str) -> Result<Self, KeyListError> {
        let mut keys = Vec::new();
        for (index, entry) in
            list.split(',').map(str::trim).enumerate().filter(|(_, entry)| !entry.is_empty())
        {
            let position = index + 1;
            // Only the first: the rest is padding.
            let (id, secret) = entry.split_once('=').ok_or(KeyListError::Form(position))?;
            let id = key_id(id).ok_or(KeyListError::Id(position))?;
            let secret = STANDARD.decode(secret).map_err(|_| KeyListError::Base64(position))?;
            if secret.is_empty() {
                return Err(KeyListError::Empty(position));
            }
            keys.push(Key { id, secret });
        }
        Ok(Self::new(keys))
    }

    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    #[must_use]
    pub fn find(&self, id: char) -> Option<&Key> {
        self.0.iter().find(|key| key.id == id)
    }
}

/// The one character that names a key.
pub(crate) fn key_id(text: &str) -> Option<char> {
    let mut letters = text.chars();
    let id = letters.next().filter(|letter| letter.is_ascii_digit() || letter.is_ascii_lowercase())?;
    letters.next().is_none().then_some(id)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_read() {
        let keys = Keys::parse(" a=eA== , ,k=AAECAw==,a=eQ==").unwrap();
        assert_eq!(keys.find('a').unwrap().secret, b"y", "the last one counts");
        assert_eq!(keys.find('k').unwrap().secret, [0, 1, 2, 3]);
        assert!(keys.find('b').is_none());
        for empty in ["", " ", ",, ,"] {
            assert!(Keys::parse(empty).unwrap().is_empty());
        }
        assert!(!format!("{keys:?}").contains("121"), "{keys:?}");
    }

    #[test]
    fn what_is_no_list() {
        for (list, error) in [
            ("a", KeyListError::Form(1)),
            ("a=eA==,b", KeyListError::Form(2)),
            ("A=eA==", KeyListError::Id(1)),
            ("ab=eA==", KeyListError::Id(1)),
            ("=eA==", KeyListError::Id(1)),
            ("a =eA==", KeyListError::Id(1)),
            ("a=eA", KeyListError::Base64(1)),
            ("a=_-8=", KeyListError::Base64(1)),
            ("a=", KeyListError::Empty(1)),
        ] {
            assert_eq!(Keys::parse(list), Err(error), "{list}");
        }
    }
}
