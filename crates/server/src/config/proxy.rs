//! `[proxy]`: how the server reaches sandboxes on behalf of clients.

use super::kinds::Flag;
use super::reader::Section;

#[derive(Clone, Debug, PartialEq)]
pub struct ProxyConfig {
    pub resolve_internal: bool,
}

impl Default for ProxyConfig {
    fn default() -> Self {
        Self { resolve_internal: true }
    }
}

impl ProxyConfig {
    pub(super) fn keys(&mut self, section: &mut Section<'_, '_>) {
        section.key(
            "resolve_internal",
            Flag,
            &mut self.resolve_internal,
            "Whether the proxy goes to the container's own address; otherwise to its port on the host.",
        );
    }
}
