//! Pushes that code hosts tell prebuilds of: who may, and how many at a time.
//!
//! Anybody reaches this without a key. Invariant: what a push costs before its signature is known is one place and what the hash of its body keeps.

use std::{
    collections::BTreeMap,
    fs, io,
    os::unix::fs::{DirBuilderExt, OpenOptionsExt},
    path::PathBuf,
    sync::{Arc, Mutex, PoisonError},
};

use sandglass_builds::PrebuildId;
use sandglass_webhooks::HmacSha256;
use subtle::ConstantTimeEq;

use super::Builds;

/// Bodies of one prebuild that are read at a time, so that nobody who knows one id keeps the others' hosts out.
const MOST_OF_ONE: usize = 8;
/// Bodies of all prebuilds that are read at a time.
const MOST: usize = 64;
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
    /// Whoever sent it does not know the secret, or there is none.
    Unsigned,
    /// It is from somebody who knows the secret; the body does not matter.
    Signed,
    /// The body tells.
    Open(Box<Push>),
    /// As many bodies as may are being read already.
    Busy,
}

/// A push whose body is being read; nothing of it is kept.
#[derive(Debug)]
pub struct Push {
    hmac: HmacSha256,
    given: String,
    _place: Place,
}

impl Push {
    /// The next piece of the body.
    pub fn update(&mut self, piece: &[u8]) {
        self.hmac.update(piece);
    }

    /// Whether the body was signed with the prebuild's secret.
    pub fn signed(self) -> bool {
        let code: String = self.hmac.finish().iter().map(|byte| format!("{byte:02x}")).collect();
        self.given.as_bytes().ct_eq(code.as_bytes()).into()
    }
}

/// How many bodies are being read, by prebuild.
#[derive(Debug, Clone, Default)]
pub(super) struct Places(Arc<Mutex<BTreeMap<PrebuildId, usize>>>);

/// The right to read one body.
#[derive(Debug)]
struct Place {
    of: Places,
    id: PrebuildId,
}

impl Places {
    fn take(&self, id: PrebuildId) -> Option<Place> {
        let mut taken = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if taken.values().sum::<usize>() >= MOST {
            return None;
        }
        let of_one = taken.entry(id).or_default();
        if *of_one >= MOST_OF_ONE {
            return None;
        }
        *of_one += 1;
        Some(Place { of: self.clone(), id })
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut taken = self.of.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(of_one) = taken.get_mut(&self.id) {
            *of_one -= 1;
            if *of_one == 0 {
                taken.remove(&self.id);
            }
        }
    }
}

/// The secrets that pushes are signed with: one file of mode 0600 a prebuild.
#[derive(Debug, Clone)]
pub(super) struct WebhookSecrets {
    folder: PathBuf,
    places: Places,
}

impl WebhookSecrets {
    /// Blocking.
    pub(super) fn open(folder: PathBuf) -> io::Result<Self> {
        fs::DirBuilder::new().recursive(true).mode(0o700).create(&folder)?;
        Ok(Self { folder, places: Places::default() })
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
        let Some(secret) = self.get(id)? else { return Ok(Pushed::Unsigned) };
        let given = match webhook {
            Webhook::Token(token) => {
                let same: bool = token.as_bytes().ct_eq(secret.as_bytes()).into();
                return Ok(if same { Pushed::Signed } else { Pushed::Unsigned });
            }
            Webhook::Prefixed(text) => text.strip_prefix("sha256=").unwrap_or_default(),
            Webhook::Bare(text) => text,
        };
        if given.len() != DIGITS || !given.bytes().all(|byte| byte.is_ascii_hexdigit()) {
            return Ok(Pushed::Unsigned);
        }
        let Some(place) = self.places.take(id) else { return Ok(Pushed::Busy) };
        let hmac = HmacSha256::new(secret.as_bytes());
        let push = Push { hmac, given: given.to_ascii_lowercase(), _place: place };
        Ok(Pushed::Open(Box::new(push)))
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

    /// Whether a push may be from somebody who knows the prebuild's secret. Blocking.
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
            Pushed::Busy => panic!("nothing else is being read"),
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
        let without = PrebuildId::random();
        assert!(matches!(secrets.open_push(without, &Webhook::Bare(HEX)), Ok(Pushed::Unsigned)));
    }

    #[test]
    fn few_bodies_are_read_at_a_time_and_one_prebuild_leaves_room_for_others() {
        let (_folder, secrets, id) = stage();
        let other = PrebuildId::random();
        secrets.put(other, SECRET).unwrap();
        let open = |id| secrets.open_push(id, &Webhook::Bare(HEX)).unwrap();
        let mut held: Vec<Pushed> = (0..MOST_OF_ONE).map(|_| open(id)).collect();
        assert!(held.iter().all(|push| matches!(push, Pushed::Open(_))));
        assert!(matches!(open(id), Pushed::Busy));
        assert!(matches!(open(other), Pushed::Open(_)));
        held.pop();
        assert!(matches!(open(id), Pushed::Open(_)), "a body that was read makes room");
        drop(held);
        assert!(secrets.places.0.lock().unwrap().is_empty(), "nothing stays of what ended");

        let all: Vec<Pushed> = (0..MOST / MOST_OF_ONE)
            .flat_map(|_| {
                let id = PrebuildId::random();
                secrets.put(id, SECRET).unwrap();
                (0..MOST_OF_ONE).map(move |_| id)
            })
            .map(open)
            .collect();
        assert!(all.iter().all(|push| matches!(push, Pushed::Open(_))));
        assert!(matches!(open(id), Pushed::Busy));
    }
}
