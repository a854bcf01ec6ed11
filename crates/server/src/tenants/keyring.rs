//! Which keys open the API, and for whom.

use std::{
    fmt,
    hash::{Hash, Hasher},
    sync::Arc,
};

use async_trait::async_trait;
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;

use super::principal::{Principal, Tenant};

/// A key, hashed so that comparing takes the same time for every guess of every length.
#[derive(Clone, Copy, Eq)]
pub struct KeyDigest([u8; 32]);

impl KeyDigest {
    /// The digest of a key as it was sent.
    pub fn of(key: &[u8]) -> Self {
        Self(Sha256::digest(key).into())
    }
}

impl PartialEq for KeyDigest {
    fn eq(&self, other: &Self) -> bool {
        self.0.ct_eq(&other.0).into()
    }
}

impl Hash for KeyDigest {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.0.hash(state);
    }
}

impl fmt::Debug for KeyDigest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("KeyDigest(***)")
    }
}

/// The provider could not be asked and nothing recent enough is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the tenant provider cannot be asked at the moment")]
pub struct ProviderUnavailable;

/// Where tenants are looked up.
#[async_trait]
pub trait TenantProvider: Send + Sync + 'static {
    /// Whose key it is; `None` when nobody's.
    async fn tenant(&self, key: &[u8]) -> Result<Option<Arc<Tenant>>, ProviderUnavailable>;
}

/// Why a request does not pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Denied {
    /// No key was sent.
    Missing,
    /// The key is nobody's.
    Unknown,
    /// It cannot be told at the moment.
    Unavailable,
}

/// Every key that the server accepts. Cheap to clone.
#[derive(Clone)]
pub struct Keyring(Keys);

#[derive(Clone)]
enum Keys {
    Off,
    One(KeyDigest),
    Tenants(Arc<dyn TenantProvider>),
}

impl fmt::Debug for Keyring {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.0 {
            Keys::Off => "Keyring(off)",
            Keys::One(_) => "Keyring(one key)",
            Keys::Tenants(_) => "Keyring(tenants)",
        })
    }
}

impl Keyring {
    /// The keyring of a server without tenants. `None` or blank: authentication is off; whether that may be is decided
    /// before the server starts.
    pub fn single(key: Option<&str>) -> Self {
        let key = key.filter(|key| !key.trim().is_empty());
        Self(key.map_or(Keys::Off, |key| Keys::One(KeyDigest::of(key.as_bytes()))))
    }

    /// The keyring of a server with tenants.
    pub fn tenants(provider: Arc<dyn TenantProvider>) -> Self {
        Self(Keys::Tenants(provider))
    }

    /// Whether callers need a key at all.
    pub fn is_required(&self) -> bool {
        !matches!(self.0, Keys::Off)
    }

    /// Whether callers are tenants.
    pub fn has_tenants(&self) -> bool {
        matches!(self.0, Keys::Tenants(_))
    }

    /// Who calls with this key.
    ///
    /// # Errors
    /// When the request may not pass.
    pub async fn admit(&self, given: Option<&[u8]>) -> Result<Principal, Denied> {
        let given = match (&self.0, given) {
            (Keys::Off, _) => return Ok(Principal::operator()),
            (_, None) => return Err(Denied::Missing),
            (_, Some(given)) => given,
        };
        match &self.0 {
            Keys::One(key) if *key == KeyDigest::of(given) => Ok(Principal::operator()),
            Keys::Tenants(provider) => match provider.tenant(given).await {
                Ok(Some(tenant)) => Ok(Principal::of_tenant(tenant)),
                Ok(None) => Err(Denied::Unknown),
                Err(ProviderUnavailable) => Err(Denied::Unavailable),
            },
            Keys::Off | Keys::One(_) => Err(Denied::Unknown),
        }
    }
}

/// A caller with the key it came with, for what lasts longer than a request.
#[derive(Clone)]
pub struct Caller {
    keys: Keyring,
    given: Option<Vec<u8>>,
    principal: Principal,
}

/// The key stays out of logs.
impl fmt::Debug for Caller {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Caller").field("principal", &self.principal).finish_non_exhaustive()
    }
}

impl Caller {
    pub fn new(keys: Keyring, given: Option<&[u8]>, principal: Principal) -> Self {
        Self { keys, given: given.map(<[u8]>::to_vec), principal }
    }

    /// Whether the key still opens what it opened. A provider that cannot be asked takes nothing away.
    pub async fn is_still_admitted(&self) -> bool {
        match self.keys.admit(self.given.as_deref()).await {
            Ok(principal) => principal == self.principal,
            Err(Denied::Unavailable) => true,
            Err(Denied::Missing | Denied::Unknown) => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn only_the_key_passes() {
        let keys = Keyring::single(Some("secret"));
        assert_eq!(keys.admit(None).await, Err(Denied::Missing));
        for wrong in ["", "secre", "secret ", "Secret", "secretsecret"] {
            assert_eq!(keys.admit(Some(wrong.as_bytes())).await, Err(Denied::Unknown), "{wrong}");
        }
        assert_eq!(keys.admit(Some(b"secret")).await, Ok(Principal::operator()));
        for off in [None, Some(""), Some(" \t")] {
            let keys = Keyring::single(off);
            assert!(!keys.is_required(), "{off:?}");
            for given in [None, Some(&b"anything"[..])] {
                assert_eq!(keys.admit(given).await, Ok(Principal::operator()));
            }
        }
    }

    struct Fixed(Result<Option<Arc<Tenant>>, ProviderUnavailable>);

    #[async_trait]
    impl TenantProvider for Fixed {
        async fn tenant(&self, _: &[u8]) -> Result<Option<Arc<Tenant>>, ProviderUnavailable> {
            self.0.clone()
        }
    }

    #[tokio::test]
    async fn a_provider_decides_about_every_key_that_was_sent() {
        let tenant = Arc::new(Tenant { name: "a".to_owned(), namespace: "n".to_owned() });
        let cases = [
            (Ok(Some(tenant.clone())), Ok(Principal::of_tenant(tenant))),
            (Ok(None), Err(Denied::Unknown)),
            (Err(ProviderUnavailable), Err(Denied::Unavailable)),
        ];
        for (provided, expected) in cases {
            let keys = Keyring::tenants(Arc::new(Fixed(provided)));
            assert!(keys.is_required() && keys.has_tenants());
            assert_eq!(keys.admit(Some(b"k")).await, expected);
            assert_eq!(keys.admit(None).await, Err(Denied::Missing));
        }
    }

    #[test]
    fn nothing_prints_a_key() {
        let shown = format!("{:?} {:?}", Keyring::single(Some("hunter2")), KeyDigest::of(b"hunter2"));
        assert_eq!(shown, "Keyring(one key) KeyDigest(***)");
    }
}
