//! `[proxy]`: how the server reaches sandboxes on behalf of clients.

#[derive(Clone, Debug, PartialEq)]
pub struct ProxyConfig {
    pub resolve_internal: bool,
}

impl Default for ProxyConfig {
    fn default() -> Self {
        Self { resolve_internal: true }
    }
}
