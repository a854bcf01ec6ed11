//! Prebuilds of this server: what their source is, and who may push.

use std::{
    fs, io,
    os::unix::fs::{DirBuilderExt, OpenOptionsExt},
    path::PathBuf,
    sync::Arc,
};

use async_trait::async_trait;
use sandglass_builds::{
    PrebuildId,
    ports::{ResolveError, ResolveErrorKind, Resolver},
    prebuild::Prebuild,
    submission::Resolved,
};
use sandglass_repository::{Policy, RepositorySpec, recipe::RecipeRequest};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;
use tokio_util::sync::CancellationToken;

use super::{Builds, locate::Locator, plain_order};

/// A prebuild's source as its row keeps it: without credentials, which no row holds.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PrebuildSource {
    pub repository: RepositorySpec,
    #[serde(default)]
    pub recipe: RecipeRequest,
}

/// Finds out the commits and keys of prebuilds.
pub(super) struct PrebuildResolver {
    pub(super) locator: Arc<Locator>,
    pub(super) policy: Policy,
}

#[async_trait]
impl Resolver for PrebuildResolver {
    async fn resolve(&self, prebuild: &Prebuild) -> Result<Resolved, ResolveError> {
        let unusable = |message: String| ResolveError { kind: ResolveErrorKind::InvalidRecipe, message };
        let source: PrebuildSource =
            serde_json::from_value(prebuild.source.clone()).map_err(|error| unusable(error.to_string()))?;
        // Again: what is allowed may have been changed since.
        let checked =
            source.repository.validate(&self.policy).map_err(|error| unusable(error.to_string()))?;
        let order = plain_order(prebuild.namespace.clone(), checked, source.recipe);
        let located = self.locator.locate(&order, &CancellationToken::new()).await?;
        Ok(located.resolved)
    }
}

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

/// The secrets that pushes are signed with: one file of mode 0600 a prebuild.
#[derive(Debug, Clone)]
pub(super) struct WebhookSecrets(PathBuf);

impl WebhookSecrets {
    /// Blocking.
    pub(super) fn open(folder: PathBuf) -> io::Result<Self> {
        fs::DirBuilder::new().recursive(true).mode(0o700).create(&folder)?;
        Ok(Self(folder))
    }

    fn put(&self, id: PrebuildId, secret: &str) -> io::Result<()> {
        let path = self.0.join(id.to_string());
        let fresh = path.with_extension("new");
        let mut file =
            fs::OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&fresh)?;
        io::Write::write_all(&mut file, secret.as_bytes())?;
        file.sync_all()?;
        fs::rename(fresh, path)
    }

    fn get(&self, id: PrebuildId) -> io::Result<Option<String>> {
        match fs::read_to_string(self.0.join(id.to_string())) {
            Ok(secret) => Ok(Some(secret)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn forget(&self, id: PrebuildId) -> io::Result<()> {
        match fs::remove_file(self.0.join(id.to_string())) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
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

    /// Whether the push is from somebody who knows the prebuild's secret. Blocking.
    ///
    /// # Errors
    /// When the secret cannot be read.
    pub fn signed(&self, id: PrebuildId, webhook: &Webhook<'_>, body: &[u8]) -> io::Result<bool> {
        Ok(self.inner.webhooks.get(id)?.is_some_and(|secret| verifies(&secret, webhook, body)))
    }
}

fn verifies(secret: &str, webhook: &Webhook<'_>, body: &[u8]) -> bool {
    let hex: String = hmac_sha256(secret.as_bytes(), body).iter().map(|byte| format!("{byte:02x}")).collect();
    let (given, expected) = match webhook {
        Webhook::Prefixed(text) => (text.strip_prefix("sha256=").unwrap_or_default(), hex.as_str()),
        Webhook::Bare(text) => (*text, hex.as_str()),
        Webhook::Token(text) => (*text, secret),
    };
    given.as_bytes().ct_eq(expected.as_bytes()).into()
}

/// HMAC by RFC 2104.
fn hmac_sha256(key: &[u8], message: &[u8]) -> [u8; 32] {
    const BLOCK: usize = 64;
    let mut block = [0_u8; BLOCK];
    if key.len() > BLOCK {
        block[..32].copy_from_slice(&Sha256::digest(key));
    } else {
        block[..key.len()].copy_from_slice(key);
    }
    let padded = |byte: u8| block.map(|b| b ^ byte);
    let inner = Sha256::new().chain_update(padded(0x36)).chain_update(message).finalize();
    Sha256::new().chain_update(padded(0x5c)).chain_update(inner).finalize().into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signatures_are_those_of_the_hosts() {
        // The example of GitHub's documentation.
        let (secret, body) = ("It's a Secret to Everybody", b"Hello, World!");
        let hex = "757107ea0eb2509fc211221cce984b8a37570b6d7586c22c46f4379c8b043e17";
        let signed = format!("sha256={hex}");
        assert!(verifies(secret, &Webhook::Prefixed(&signed), body));
        assert!(verifies(secret, &Webhook::Bare(hex), body));
        assert!(verifies(secret, &Webhook::Token(secret), body));
        for wrong in [Webhook::Prefixed(hex), Webhook::Bare(&signed), Webhook::Bare(""), Webhook::Token("")] {
            assert!(!verifies(secret, &wrong, body), "{wrong:?}");
        }
        assert!(!verifies(secret, &Webhook::Bare(hex), b"Hello, World"));
    }
}
