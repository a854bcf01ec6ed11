//! Scoped route tokens: a route that carries its own proof and does not expire.
//!
//! `f1.<namespace>.<sandbox>.<port>.<key id>.<mac>`, names and MAC in base64url without padding.

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;

use crate::keys::{Key, Keys, key_id};
use crate::mac;
use crate::route::strict_port;

const MAC_BYTES: usize = 16;

/// What a token is about.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Scope {
    pub namespace: String,
    pub sandbox: String,
    pub port: u16,
    key: char,
    mac: Vec<u8>,
}

/// Why a token opens nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ScopeError {
    #[error("the route token is malformed")]
    Malformed,
    #[error("the route token is made with an unknown key")]
    UnknownKey,
    #[error("the route token is wrong")]
    Mismatch,
}

impl Scope {
    /// Whether a text is meant to be a token.
    #[must_use]
    pub fn looks_like(text: &str) -> bool {
        text.starts_with("f1.")
    }

    /// Makes a token; `None` when a name is empty or has control characters, or the port is 0.
    #[must_use]
    pub fn mint(key: &Key, namespace: &str, sandbox: &str, port: u16) -> Option<Self> {
        let (namespace, sandbox) = (named(namespace)?, named(sandbox)?);
        let mac = expected(&key.secret, &namespace, &sandbox, port);
        (port != 0).then_some(Self { namespace, sandbox, port, key: key.id, mac })
    }

    /// Reads a token without believing it.
    ///
    /// # Errors
    /// When it is none.
    pub fn parse(text: &str) -> Result<Self, ScopeError> {
        let fields: Vec<&str> = text.split('.').collect();
        let ["f1", namespace, sandbox, port, key, mac] = fields[..] else {
            return Err(ScopeError::Malformed);
        };
        let name = |field: &str| named(&String::from_utf8(URL_SAFE_NO_PAD.decode(field).ok()?).ok()?);
        let read = || {
            let mac = URL_SAFE_NO_PAD.decode(mac).ok().filter(|mac| mac.len() == MAC_BYTES)?;
            let (namespace, sandbox) = (name(namespace)?, name(sandbox)?);
            Some(Self { namespace, sandbox, port: strict_port(port)?, key: key_id(key)?, mac })
        };
        read().ok_or(ScopeError::Malformed)
    }

    /// Whether one of these keys made it.
    ///
    /// # Errors
    /// When none did.
    pub fn verify(&self, keys: &Keys) -> Result<(), ScopeError> {
        let key = keys.find(self.key).ok_or(ScopeError::UnknownKey)?;
        let expected = expected(&key.secret, &self.namespace, &self.sandbox, self.port);
        if mac::same(&expected, &self.mac) { Ok(()) } else { Err(ScopeError::Mismatch) }
    }
}

impl std::fmt::Display for Scope {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let [namespace, sandbox, mac] = [self.namespace.as_bytes(), self.sandbox.as_bytes(), &self.mac]
            .map(|b| URL_SAFE_NO_PAD.encode(b));
        write!(f, "f1.{namespace}.{sandbox}.{}.{}.{mac}", self.port, self.key)
    }
}

fn named(name: &str) -> Option<String> {
    (!name.is_empty() && !name.chars().any(char::is_control)).then(|| name.to_owned())
}

fn expected(secret: &[u8], namespace: &str, sandbox: &str, port: u16) -> Vec<u8> {
    let message = format!("opensandbox-fsb-route-v1\n{namespace}\n{sandbox}\n{port}\n");
    mac::hmac(secret, message.as_bytes())[..MAC_BYTES].to_vec()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_published_vectors() {
        for (keys, namespace, sandbox, token) in [
            (
                "a=AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=",
                "opensandbox",
                "fsb-1234",
                "f1.b3BlbnNhbmRib3g.ZnNiLTEyMzQ.8080.a.SEgB3fdIhv3H0BRcFYm6Wg",
            ),
            (
                "a=c2VjcmV0LWJ5dGVzLTAwMDE=",
                "default",
                "fsb-1",
                "f1.ZGVmYXVsdA.ZnNiLTE.8080.a.4MbOJekc5dADw0ju4KamWA",
            ),
        ] {
            let keys = Keys::parse(keys).unwrap();
            let minted = Scope::mint(keys.find('a').unwrap(), namespace, sandbox, 8080).unwrap();
            assert_eq!(minted.to_string(), token);
            let read = Scope::parse(token).unwrap();
            assert_eq!((&read, read.verify(&keys)), (&minted, Ok(())));
            assert_eq!(read.verify(&Keys::default()), Err(ScopeError::UnknownKey));
            let other = Scope { port: 8081, ..read };
            assert_eq!(other.verify(&keys), Err(ScopeError::Mismatch));
        }
    }

    #[test]
    fn what_is_no_token() {
        let good = "f1.ZGVmYXVsdA.ZnNiLTE.8080.a.4MbOJekc5dADw0ju4KamWA";
        assert!(Scope::parse(good).is_ok());
        for (from, to) in [
            ("f1", "f2"),
            ("ZGVmYXVsdA", ""),
            ("ZGVmYXVsdA", "ZGVmYXVsdA=="),
            // Not canonical: the last bits are not zero.
            ("ZGVmYXVsdA", "ZGVmYXVsdB"),
            ("ZnNiLTE", "AA"),
            ("ZnNiLTE", "_w"),
            ("8080", "08080"),
            ("8080", "0"),
            ("8080", "65536"),
            (".a.", ".A."),
            (".a.", ".ab."),
            ("4MbOJekc5dADw0ju4KamWA", "4MbOJekc5dADw0ju4Kam"),
            ("WA", "WA.x"),
        ] {
            let wrong = good.replacen(from, to, 1);
            assert_eq!(Scope::parse(&wrong), Err(ScopeError::Malformed), "{wrong}");
        }
        let key = Key { id: 'a', secret: vec![1] };
        for (namespace, sandbox, port) in
            [("", "a", 1), ("a", "", 1), ("a\n", "b", 1), ("a", "b\u{7f}", 1), ("a", "b", 0)]
        {
            assert_eq!(Scope::mint(&key, namespace, sandbox, port), None);
        }
    }
}
