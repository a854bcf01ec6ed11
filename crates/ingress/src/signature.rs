//! Signatures that open one port of one sandbox until an instant.
//!
//! Two generations. The *short* one is the published one: 32 bits of a hash, understood by every gateway, guessable by whoever may try
//! often enough. The *full* one is ours: HMAC-SHA256, 256 bits of it where there is room. In a host name there is not, so that there it is
//! 128 bits and the whole route is packed ([`crate::Route::packed`]).

use sha2::{Digest, Sha256};

use crate::base36::{self, Expiry};
use crate::keys::{Key, Keys, key_id};
use crate::mac;

/// Which signatures are made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Generation {
    Full,
    /// For gateways that know no other.
    Short,
}

/// How a signature is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Form {
    /// 8 hexadecimal digits.
    Short,
    /// 64 hexadecimal digits.
    Full,
    /// 25 digits in base 36.
    Packed,
}

/// An expiry and the signature over it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Signed {
    expires: Expiry,
    form: Form,
    mac: String,
    key: char,
}

/// Which part is not even of the right shape.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Malformed {
    #[error("the signature is malformed")]
    Signature,
    #[error("the expiry is malformed")]
    Expiry,
}

/// Why a signature opens nothing, in the order in which it is found out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unverified {
    #[error("the route has expired")]
    Expired,
    #[error("the route is signed with an unknown key")]
    UnknownKey,
    #[error("the signature is wrong")]
    Mismatch,
}

impl Signed {
    /// Signs a route in the form that stands in headers and paths.
    #[must_use]
    pub fn mint(key: &Key, generation: Generation, (id, port): (&str, u16), expires: Expiry) -> Self {
        let form = match generation {
            Generation::Full => Form::Full,
            Generation::Short => Form::Short,
        };
        Self::of(key, form, (id, port), expires)
    }

    pub(crate) fn packed(key: &Key, route: (&str, u16), expires: Expiry) -> Self {
        Self::of(key, Form::Packed, route, expires)
    }

    fn of(key: &Key, form: Form, (id, port): (&str, u16), expires: Expiry) -> Self {
        let mac = expected(form, &key.secret, (id, port), &expires);
        Self { expires, form, mac, key: key.id }
    }

    /// The two segments of a route.
    ///
    /// # Errors
    /// When one of them has another shape; the signature is looked at first.
    pub fn parse(expires: &str, signature: &str) -> Result<Self, Malformed> {
        let form = match signature.len() {
            9 => Form::Short,
            65 => Form::Full,
            _ => return Err(Malformed::Signature),
        };
        // A signature of another alphabet may have characters of several bytes.
        let (mac, key) = signature.split_at_checked(signature.len() - 1).ok_or(Malformed::Signature)?;
        let hexadecimal = mac.bytes().all(|b| b.is_ascii_digit() || matches!(b, b'a'..=b'f'));
        let key = key_id(key).filter(|_| hexadecimal).ok_or(Malformed::Signature)?;
        let expires = Expiry::parse(expires).ok_or(Malformed::Expiry)?;
        Ok(Self { expires, form, mac: mac.to_owned(), key })
    }

    pub(crate) fn from_packed(expires: Expiry, mac: &str, key: char) -> Self {
        Self { expires, form: Form::Packed, mac: mac.to_owned(), key }
    }

    /// Whether it belongs to a generation that can be found by trying.
    #[must_use]
    pub fn is_guessable(&self) -> bool {
        self.form == Form::Short
    }

    #[must_use]
    pub fn expires(&self) -> &Expiry {
        &self.expires
    }

    /// The segment after the expiry.
    #[must_use]
    pub fn signature(&self) -> String {
        format!("{}{}", self.mac, self.key)
    }

    /// Whether the route is open at `now`, in Unix seconds.
    ///
    /// # Errors
    /// When it is not.
    pub fn verify(&self, keys: &Keys, route: (&str, u16), now: u64) -> Result<(), Unverified> {
        if self.expires.is_over(now) {
            return Err(Unverified::Expired);
        }
        let key = keys.find(self.key).ok_or(Unverified::UnknownKey)?;
        let expected = expected(self.form, &key.secret, route, &self.expires);
        if mac::same(expected.as_bytes(), self.mac.as_bytes()) { Ok(()) } else { Err(Unverified::Mismatch) }
    }
}

fn expected(form: Form, secret: &[u8], (id, port): (&str, u16), expires: &Expiry) -> String {
    let about = |tag: &str| format!("{tag}\n{id}\n{port}\n{}\n", expires.as_str()).into_bytes();
    match form {
        Form::Short => {
            let canonical = about("v1\nshort");
            let mut hash = Sha256::new();
            for part in [secret, &canonical] {
                // Secrets and routes are far shorter than this.
                hash.update(u32::try_from(part.len()).unwrap_or(u32::MAX).to_be_bytes());
                hash.update(part);
            }
            mac::hex(&hash.finalize()[..4])
        }
        Form::Full => mac::hex(&mac::hmac(secret, &about("v2\nfull"))),
        Form::Packed => {
            let whole = mac::hmac(secret, &about("v2\nhost"));
            let first = whole.iter().take(16).fold(0_u128, |number, byte| number << 8 | u128::from(*byte));
            base36::padded(first, 25).expect("25 digits hold 128 bits")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(id: char, base64: &str) -> Key {
        Keys::parse(&format!("{id}={base64}")).unwrap().find(id).unwrap().clone()
    }

    #[test]
    fn the_published_vectors_of_the_short_generation() {
        const ASCII: &str = "c2VjcmV0LWJ5dGVzLTAwMDE=";
        let uuid = "0f8fad5b-d9cb-469f-a165-70867728950e";
        for (secret, id, sandbox, port, expires, b36, signature) in [
            (
                "dGVzdC1zZWNyZXQta2V5LTAxMjM0NTY3ODk=",
                'k',
                "sbx-1234",
                8080,
                1_893_456_000,
                "vbbc00",
                "ad9e3286k",
            ),
            (
                "AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=",
                'a',
                uuid,
                44772,
                4_102_444_800,
                "1vuhmo0",
                "528fb6b7a",
            ),
            ("eA==", '0', "s", 1, 0, "0", "c8f2424f0"),
            (ASCII, 'k', "my-sandbox", 8080, 2_000_000_000, "x2qxvk", "84e9b82fk"),
            (ASCII, 'a', "0f04bd3a-82ce-431d-8ec7-0a4b0ca245d3", 44772, 1_900_000_000, "vf7lds", "7db4478da"),
        ] {
            let key = key(id, secret);
            let signed = Signed::mint(&key, Generation::Short, (sandbox, port), Expiry::at(expires));
            assert_eq!(
                (signed.expires().as_str(), signed.signature().as_str()),
                (b36, signature),
                "{sandbox}"
            );
            let keys = Keys::new([key]);
            let read = Signed::parse(b36, signature).unwrap();
            assert_eq!(read.verify(&keys, (sandbox, port), expires), Ok(()), "the last second counts");
            assert_eq!(read.verify(&keys, (sandbox, port), expires + 1), Err(Unverified::Expired));
            assert_eq!(read.verify(&keys, (sandbox, port + 1), expires), Err(Unverified::Mismatch));
        }
    }

    #[test]
    fn the_full_generation_is_an_hmac_of_the_whole_route() {
        let key = key('a', "AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=");
        let keys = Keys::new([key.clone()]);
        let signed = Signed::mint(&key, Generation::Full, ("box", 80), Expiry::at(99));
        let message = b"v2\nfull\nbox\n80\n2r\n";
        assert_eq!(signed.signature(), format!("{}a", mac::hex(&mac::hmac(&key.secret, message))));
        let read = Signed::parse("2r", &signed.signature()).unwrap();
        assert_eq!(read, signed);
        assert_eq!(read.verify(&keys, ("box", 80), 99), Ok(()));
        for other in [("boy", 80), ("box", 81)] {
            assert_eq!(read.verify(&keys, other, 99), Err(Unverified::Mismatch));
        }
        assert_eq!(read.verify(&Keys::default(), ("box", 80), 99), Err(Unverified::UnknownKey));
        let longer = Signed::parse("2s", &signed.signature()).unwrap();
        assert_eq!(longer.verify(&keys, ("box", 80), 99), Err(Unverified::Mismatch));
        assert!(!signed.is_guessable());
    }

    #[test]
    fn shapes() {
        for (expires, signature, wrong) in [
            ("1", "abcdef12", Malformed::Signature),
            ("1", "abcdef1234", Malformed::Signature),
            ("1", "ABCDEF12k", Malformed::Signature),
            ("1", "abcdefg2k", Malformed::Signature),
            ("1", "abcdef12K", Malformed::Signature),
            ("1", "abcdef1é", Malformed::Signature),
            ("1", "", Malformed::Signature),
            ("01", "x", Malformed::Signature),
            ("01", "abcdef12k", Malformed::Expiry),
            ("", "abcdef12k", Malformed::Expiry),
        ] {
            assert_eq!(Signed::parse(expires, signature), Err(wrong), "{expires} {signature}");
        }
        assert!(Signed::parse("0", "abcdef12k").unwrap().is_guessable());
    }
}
