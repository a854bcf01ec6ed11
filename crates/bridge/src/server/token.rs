//! Agent tokens at rest.

use std::fmt;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;

/// SHA-256 of a token. Enough for tokens of 256 random bits, which cannot be guessed from it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct TokenHash([u8; 32]);

impl TokenHash {
    pub fn of(token: &str) -> Self {
        Self(Sha256::digest(token.as_bytes()).into())
    }

    /// Compares in constant time.
    pub fn is(&self, other: &Self) -> bool {
        self.0.ct_eq(&other.0).into()
    }
}

impl fmt::Debug for TokenHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "TokenHash({:02x}{:02x}…)", self.0[0], self.0[1])
    }
}

impl From<TokenHash> for String {
    fn from(hash: TokenHash) -> String {
        hash.0.iter().map(|byte| format!("{byte:02x}")).collect()
    }
}

impl TryFrom<String> for TokenHash {
    type Error = &'static str;

    fn try_from(text: String) -> Result<Self, &'static str> {
        const WRONG: &str = "a token hash is 64 hexadecimal digits";
        let mut bytes = [0; 32];
        if text.len() != 64 || !text.is_ascii() {
            return Err(WRONG);
        }
        for (index, byte) in bytes.iter_mut().enumerate() {
            *byte = u8::from_str_radix(&text[2 * index..2 * index + 2], 16).map_err(|_| WRONG)?;
        }
        Ok(Self(bytes))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hash_is_written_as_hexadecimal_and_shown_in_part() {
        let hash = TokenHash::of("abc");
        let text = String::from(hash);
        assert_eq!(text, "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
        assert!(TokenHash::try_from(text.clone()).unwrap().is(&hash));
        assert!(!TokenHash::of("abd").is(&hash));
        assert!(!format!("{hash:?}").contains(&text[8..]));
        for bad in ["", "zz", &"g".repeat(64), &"é".repeat(32)] {
            assert!(TokenHash::try_from(bad.to_owned()).is_err());
        }
    }
}
