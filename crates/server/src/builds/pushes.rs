//! Pushes that code hosts tell prebuilds of: whether who sent one knows the prebuild's secret.
//!
//! Anybody reaches this without a key. Invariant: what a push costs before its signature is known is what the hash of its body keeps, and a
//! prebuild without a secret, or that is not there, is told from others by nobody who does not know the secret.

use std::{
    fs, io,
    net::IpAddr,
    os::unix::fs::{DirBuilderExt, OpenOptionsExt},
    path::PathBuf,
};

use sandglass_builds::PrebuildId;
use sandglass_webhooks::HmacSha256;
use subtle::ConstantTimeEq;

use super::{
    Builds,
    push_places::{PushPlace, PushPlaces},
};

/// Hexadecimal digits of a signature.
const DIGITS: usize = 64;

/// How a push was signed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Webhook<'a> {
    /// `sha256=<hex>` over the body, as GitHub and Gitea send it (`X-Hub-Signature-256`).
    Prefixed(&'a str),
    /// `<hex>` over the body (`X-Gitea-Signature`).
    Bare(&'a str),
    /// The secret itself (`X-Gitlab-Token`).
    Token(&'a str),
}

/// What is known of a push before its body is read.
#[derive(Debug)]
pub enum Pushed {
    /// Whoever sent it does not know the secret.
    Unsigned,
    /// It is from somebody who knows the secret; the body does not matter.
    Signed,
    /// The body tells.
    Open(Box<Push>),
}

/// A push whose body is being read; nothing of it is kept.
#[derive(Debug)]
pub struct Push {
    hmac: HmacSha256,
    given: String,
    /// Without one the body is hashed all the same, for nothing.
    has_secret: bool,
}

impl Push {
    /// The next piece of the body.
    pub fn update(&mut self, piece: &[u8]) {
        self.hmac.update(piece);
    }

    /// Whether the body was signed with the prebuild's secret.
    pub fn signed(self) -> bool {
        let code: String = self.hmac.finish().iter().map(|byte| format!("{byte:02x}")).collect();
        let same: bool = self.given.as_bytes().ct_eq(code.as_bytes()).into();
        same && self.has_secret
    }
}

/// The secrets that pushes are signed with: one file of mode 0600 a prebuild.
#[derive(Debug, Clone)]
pub(super) struct WebhookSecrets {
    folder: PathBuf,
    places: PushPlaces,
}

impl WebhookSecrets {
    /// Blocking.
    pub(super) fn open(folder: PathBuf) -> io::Result<Self> {
        fs::DirBuilder::new().recursive(true).mode(0o700).create(&folder)?;
        Ok(Self { folder, places: PushPlaces::default() })
    }

    fn put(&self, id: PrebuildId, secret: &str) -> io::Result<()> {
        let path = self.folder.join(id.to_string());
        let fresh = path.with_extension("new");
        let mut file =
            fs::OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&fresh)?;
        io::Write::write_all(&mut file, secret.as_bytes())?;
        file.sync_all()?;
        fs::rename(fresh, path)
    }

    fn get(&self, id: PrebuildId) -> io::Result<Option<String>> {
        match fs::read_to_string(self.folder.join(id.to_string())) {
            Ok(secret) => Ok(Some(secret)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn forget(&self, id: PrebuildId) -> io::Result<()> {
        match fs::remove_file(self.folder.join(id.to_string())) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }

    fn open_push(&self, id: PrebuildId, webhook: &Webhook<'_>) -> io::Result<Pushed> {
        let secret = self.get(id)?;
        let has_secret = secret.is_some();
        let secret = secret.unwrap_or_default();
        let given = match webhook {
            Webhook::Token(token) => {
                let same: bool = token.as_bytes().ct_eq(secret.as_bytes()).into();
                return Ok(if same && has_secret { Pushed::Signed } else { Pushed::Unsigned });
            }
            Webhook::Prefixed(text) => text.strip_prefix("sha256=").unwrap_or_default(),
            Webhook::Bare(text) => text,
        };
        if given.len() != DIGITS || !given.bytes().all(|byte| byte.is_ascii_hexdigit()) {
            return Ok(Pushed::Unsigned);
        }
        let hmac = HmacSha256::new(secret.as_bytes());
        Ok(Pushed::Open(Box::new(Push { hmac, given: given.to_ascii_lowercase(), has_secret })))
    }
}

impl Builds {
    /// Keeps the secret of a prebuild's webhook; without one every push is refused. Blocking.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn set_webhook_secret(&self, id: PrebuildId, secret: Option<&str>) -> io::Result<()> {
        match secret {
            Some(secret) => self.inner.webhooks.put(id, secret),
            None => self.inner.webhooks.forget(id),
        }
    }

    /// A place for a push from this address, before anything is looked up for it.
    pub fn place_for_push(&self, from: Option<IpAddr>) -> PushPlace {
        self.inner.webhooks.places.take(from)
    }

    /// Whether a push may be from somebody who knows the prebuild's secret; the same for prebuilds that are not there. Blocking.
    ///
    /// # Errors
    /// When the secret cannot be read.
    pub fn open_push(&self, id: PrebuildId, webhook: &Webhook<'_>) -> io::Result<Pushed> {
        self.inner.webhooks.open_push(id, webhook)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECRET: &str = "It's a Secret to Everybody";
    // The example of GitHub's documentation: of "Hello, World!".
    const HEX: &str = "757107ea0eb2509fc211221cce984b8a37570b6d7586c22c46f4379c8b043e17";

    fn stage() -> (tempfile::TempDir, WebhookSecrets, PrebuildId) {
        let folder = tempfile::tempdir().unwrap();
        let secrets = WebhookSecrets::open(folder.path().join("webhooks")).unwrap();
        let id = PrebuildId::random();
        secrets.put(id, SECRET).unwrap();
        (folder, secrets, id)
    }

    fn verifies(secrets: &WebhookSecrets, id: PrebuildId, webhook: &Webhook<'_>, body: &[&[u8]]) -> bool {
        match secrets.open_push(id, webhook).unwrap() {
            Pushed::Open(mut push) => {
                body.iter().for_each(|piece| push.update(piece));
                push.signed()
            }
            Pushed::Signed => true,
            Pushed::Unsigned => false,
        }
    }

    #[test]
    fn signatures_are_those_of_the_hosts() {
        let (_folder, secrets, id) = stage();
        let body: &[&[u8]] = &[b"Hello, ", b"World!"];
        let signed = format!("sha256={HEX}");
        assert!(verifies(&secrets, id, &Webhook::Prefixed(&signed), body));
        assert!(verifies(&secrets, id, &Webhook::Bare(HEX), body));
        assert!(verifies(&secrets, id, &Webhook::Token(SECRET), body));
        assert!(!verifies(&secrets, id, &Webhook::Bare(HEX), &[b"Hello, World"]));
        assert!(!verifies(&secrets, PrebuildId::random(), &Webhook::Token(SECRET), body));
    }

    #[test]
    fn what_cannot_be_a_signature_is_refused_before_the_body_is_read() {
        let (_folder, secrets, id) = stage();
        let signed = format!("sha256={HEX}");
        for wrong in [
            Webhook::Prefixed(HEX),
            Webhook::Prefixed("sha256=00"),
            Webhook::Bare(&signed),
            Webhook::Bare(""),
            Webhook::Bare(&"x".repeat(64)),
            Webhook::Token(""),
            Webhook::Token("It's"),
        ] {
            assert!(matches!(secrets.open_push(id, &wrong), Ok(Pushed::Unsigned)), "{wrong:?}");
        }
    }

    #[test]
    fn a_prebuild_without_a_secret_looks_like_any_other_and_takes_nothing() {
        let (_folder, secrets, id) = stage();
        let without = PrebuildId::random();
        for signature in [HEX.to_owned(), "0".repeat(64)] {
            for id in [id, without] {
                let opened = secrets.open_push(id, &Webhook::Bare(&signature)).unwrap();
                assert!(matches!(opened, Pushed::Open(_)), "{signature}");
            }
        }
        // What is hashed for nothing has a key that everybody knows.
        let code = sandglass_webhooks::hmac_sha256(b"", b"{}");
        let known: String = code.iter().map(|byte| format!("{byte:02x}")).collect();
        assert!(!verifies(&secrets, without, &Webhook::Bare(&known), &[b"{}"]));
        assert!(!verifies(&secrets, without, &Webhook::Token(""), &[]));
        secrets.forget(id).unwrap();
        assert!(!verifies(&secrets, id, &Webhook::Bare(HEX), &[b"Hello, World!"]));
    }
}
