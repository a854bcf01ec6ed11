//! What messages are signed with.
//!
//! The scheme is that of Standard Webhooks: HMAC-SHA256 over `<id>.<timestamp>.<body>`, base64, marked `v1`; so that receivers verify
//! with the libraries that exist.

use std::fmt;

use base64::{Engine as _, engine::general_purpose::STANDARD};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use uuid::Uuid;

/// By which a secret is recognised.
const PREFIX: &str = "whsec_";
/// Bytes of a secret.
const BYTES: std::ops::RangeInclusive<usize> = 24..=64;

/// The text is no secret.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("a signing secret is whsec_ and the base64 of 24 to 64 bytes")]
pub struct SecretError;

/// A shared secret in its text form. Never printed.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct SigningSecret(String);

impl fmt::Debug for SigningSecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SigningSecret(***)")
    }
}

impl TryFrom<String> for SigningSecret {
    type Error = SecretError;

    fn try_from(text: String) -> Result<Self, SecretError> {
        let key = text.strip_prefix(PREFIX).and_then(|body| STANDARD.decode(body).ok());
        if key.is_some_and(|key| BYTES.contains(&key.len())) { Ok(Self(text)) } else { Err(SecretError) }
    }
}

impl From<SigningSecret> for String {
    fn from(secret: SigningSecret) -> Self {
        secret.0
    }
}

impl SigningSecret {
    /// A fresh one. Two random ids: 244 bits.
    pub fn random() -> Self {
        let key = [Uuid::new_v4().into_bytes(), Uuid::new_v4().into_bytes()].concat();
        Self(format!("{PREFIX}{}", STANDARD.encode(key)))
    }

    /// The text, for the one answer that shows it.
    pub fn expose(&self) -> &str {
        &self.0
    }

    /// The signature of a message, as the header `webhook-signature` carries it.
    pub fn sign(&self, id: &str, timestamp: i64, body: &str) -> String {
        let key = self.0.strip_prefix(PREFIX).and_then(|text| STANDARD.decode(text).ok()).unwrap_or_default();
        let signed = hmac_sha256(&key, format!("{id}.{timestamp}.{body}").as_bytes());
        format!("v1,{}", STANDARD.encode(signed))
    }
}

/// HMAC by RFC 2104.
pub fn hmac_sha256(key: &[u8], message: &[u8]) -> [u8; 32] {
    let mut hmac = HmacSha256::new(key);
    hmac.update(message);
    hmac.finish()
}

/// HMAC by RFC 2104 of a message that comes in pieces, so that nobody has to hold all of it.
#[derive(Clone)]
pub struct HmacSha256 {
    inner: Sha256,
    outer: Sha256,
}

impl fmt::Debug for HmacSha256 {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("HmacSha256(***)")
    }
}

impl HmacSha256 {
    /// With a key of any length.
    pub fn new(key: &[u8]) -> Self {
        const BLOCK: usize = 64;
        let mut block = [0_u8; BLOCK];
        if key.len() > BLOCK {
            block[..32].copy_from_slice(&Sha256::digest(key));
        } else {
            block[..key.len()].copy_from_slice(key);
        }
        let padded = |byte: u8| Sha256::new().chain_update(block.map(|b| b ^ byte));
        Self { inner: padded(0x36), outer: padded(0x5c) }
    }

    /// The next piece of the message.
    pub fn update(&mut self, piece: &[u8]) {
        self.inner.update(piece);
    }

    /// The code of everything that came.
    pub fn finish(self) -> [u8; 32] {
        self.outer.chain_update(self.inner.finalize()).finalize().into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_signature_is_that_of_the_specification() {
        // The example of the reference libraries.
        let secret = SigningSecret::try_from("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw".to_owned()).unwrap();
        let signature = secret.sign("msg_p5jXN8AQM9LWM0D4loKWxJek", 1_614_265_330, r#"{"test": 2432232314}"#);
        assert_eq!(signature, "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=");
    }

    #[test]
    fn a_secret_has_one_form_and_is_not_printed() {
        let fresh = SigningSecret::random();
        assert_eq!(SigningSecret::try_from(fresh.expose().to_owned()), Ok(fresh.clone()));
        assert_ne!(fresh, SigningSecret::random());
        assert_eq!(format!("{fresh:?}"), "SigningSecret(***)");
        for bad in ["", "whsec_", "whsec_c2hvcnQ=", "MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw", "whsec_%%%"] {
            assert_eq!(SigningSecret::try_from(bad.to_owned()), Err(SecretError), "{bad}");
        }
    }

    #[test]
    fn a_message_may_come_in_pieces() {
        for key in [&b"k"[..], &[7; 100]] {
            let mut pieces = HmacSha256::new(key);
            for piece in [&b"Hello"[..], b"", b", World!"] {
                pieces.update(piece);
            }
            assert_eq!(pieces.finish(), hmac_sha256(key, b"Hello, World!"));
        }
    }
}
