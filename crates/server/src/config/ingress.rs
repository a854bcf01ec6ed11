//! `[ingress]`: how sandboxes are reached from outside.

use super::choice::choice;
use super::kinds::{Flag, Maybe, SecretText, SecureKeys, Text, Words};
use super::reader::Section;
use super::rules;
use super::values::Secret;

choice! {
    IngressMode { Direct = "direct", Gateway = "gateway" }
}

choice! {
    RouteMode { Wildcard = "wildcard", Header = "header", Uri = "uri" }
}

choice! {
    /// Which signatures are made, and the weakest that the gateway of this server accepts.
    SignatureChoice {
        /// HMAC-SHA256. Known to our gateway only.
        Full = "full",
        /// 32 bits, as every gateway knows them.
        Short = "short",
    }
}

#[derive(Clone, Debug, PartialEq)]
pub struct IngressConfig {
    pub mode: IngressMode,
    /// Set exactly when the mode is `gateway`.
    pub gateway: Option<GatewayConfig>,
    pub secure_access: Option<SecureAccessConfig>,
    /// Ours: where this server itself is the gateway.
    pub listen: Option<String>,
    /// Ours: what a gateway elsewhere shows instead of the API key.
    pub key: Option<Secret>,
    /// Ours: gateways let everybody through, as in the reference. Not where there are tenants.
    pub open_gateway: bool,
}

impl Default for IngressConfig {
    fn default() -> Self {
        Self {
            mode: IngressMode::Direct,
            gateway: None,
            secure_access: None,
            listen: None,
            key: None,
            open_gateway: false,
        }
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
    pub signature: SignatureChoice,
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

impl IngressConfig {
    pub(super) fn keys(&mut self, section: &mut Section<'_, '_>) {
        section.key(
            "mode",
            Words::new(),
            &mut self.mode,
            "Whether clients come directly or through a gateway.",
        );
        section.optional_table(
            "gateway",
            "The gateway; given exactly when `ingress.mode` is `gateway`.",
            &mut self.gateway,
            GatewayConfig { address: String::new(), route: RouteMode::Wildcard },
            GatewayConfig::keys,
        );
        section.optional_table(
            "secure_access",
            "Signing of endpoint addresses. Needs `ingress.mode = \"gateway\"`. From the environment it is taken as a \
             whole or not at all.",
            &mut self.secure_access,
            SecureAccessConfig { active_key: '0', keys: Vec::new(), signature: SignatureChoice::Full },
            SecureAccessConfig::keys,
        );
        section.key(
            "listen",
            Maybe(rules::listen_address()),
            &mut self.listen,
            "Address and port on which this server itself is the gateway (`\"0.0.0.0:28888\"`). Unset: the gateway is `sandglass ingress`, or \
             another program.",
        );
        section.key(
            "key",
            Maybe(SecretText::line()),
            &mut self.key,
            "Key with which `sandglass ingress` may follow the sandboxes, renew and wake them, and nothing else. Unset: it needs the API key.",
        );
        section.key(
            "open_gateway",
            Flag,
            &mut self.open_gateway,
            "Restores the gateway of the reference: every port of every sandbox that was created without `secureAccess` is open to whoever \
             reaches the gateway. Otherwise it asks for the token in the endpoint's `headers`, or a signed route.",
        );
    }
}

impl GatewayConfig {
    fn keys(&mut self, section: &mut Section<'_, '_>) {
        section.required(
            "address",
            Text::non_empty().rewritten(|address| address.trim().to_owned()),
            &mut self.address,
            "Host and optional port, without a scheme; `*.domain` for the route mode `wildcard`.",
        );
        section.table(
            "route",
            "How the gateway tells sandboxes apart.",
            &mut self.route,
            |route, section| {
                section.required("mode", Words::new(), route, "By host name, by header or by path.");
            },
        );
    }
}

impl SecureAccessConfig {
    fn keys(&mut self, section: &mut Section<'_, '_>) {
        section.required(
            "active_key",
            rules::key_letter(),
            &mut self.active_key,
            "Id of the key that signs.",
        );
        section.required(
            "keys",
            SecureKeys,
            &mut self.keys,
            "Keys that are accepted. In the environment `id=base64,id=base64`.",
        );
        section.key(
            "signature",
            Words::new(),
            &mut self.signature,
            "`full` for the gateway of this program, `short` (32 bits) for gateways that know no other.",
        );
    }
}
