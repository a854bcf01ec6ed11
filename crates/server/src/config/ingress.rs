//! `[ingress]`: how sandboxes are reached from outside.

use super::choice::choice;
use super::values::Secret;

choice! {
    IngressMode { Direct = "direct", Gateway = "gateway" }
}

choice! {
    RouteMode { Wildcard = "wildcard", Header = "header", Uri = "uri" }
}

#[derive(Clone, Debug, PartialEq)]
pub struct IngressConfig {
    pub mode: IngressMode,
    /// Set exactly when the mode is `gateway`.
    pub gateway: Option<GatewayConfig>,
    pub secure_access: Option<SecureAccessConfig>,
}

impl Default for IngressConfig {
    fn default() -> Self {
        Self { mode: IngressMode::Direct, gateway: None, secure_access: None }
    }
}

#[derive(Clone, Debug, PartialEq)]
pub struct GatewayConfig {
    /// Host and optional port, without a scheme.
    pub address: String,
    pub route: RouteMode,
}

/// The signing keys of endpoint URLs. `active_key` is always among `keys`.
#[derive(Clone, Debug, PartialEq)]
pub struct SecureAccessConfig {
    pub active_key: char,
    pub keys: Vec<SecureAccessKey>,
}

#[derive(Clone, PartialEq, Eq)]
pub struct SecureAccessKey {
    pub id: char,
    /// Decoded from base64, at least one byte.
    pub key: Vec<u8>,
}

impl std::fmt::Debug for SecureAccessKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SecureAccessKey").field("id", &self.id).field("key", &Secret::default()).finish()
    }
}
