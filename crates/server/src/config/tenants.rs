//! `[tenants]`: its presence makes the server multi-tenant.

use std::path::PathBuf;
use std::time::Duration;

use super::choice::choice;
use super::kinds::{FilePath, Maybe, SecretText, Span, Text, Words};
use super::reader::Section;
use super::rules;
use super::values::{Endpoint, Secret};

choice! {
    TenantProvider { File = "file", Http = "http" }
}

#[derive(Clone, Debug, PartialEq)]
pub struct TenantsConfig {
    pub provider: TenantProvider,
    /// The tenants file. Set only through the environment, as upstream.
    pub file: PathBuf,
    pub endpoint: Option<Endpoint>,
    pub max_stale: Duration,
    pub timeout: Duration,
    pub auth_header: Option<String>,
    pub auth_token: Option<Secret>,
}

impl Default for TenantsConfig {
    fn default() -> Self {
        Self {
            provider: TenantProvider::File,
            file: PathBuf::from("~/.opensandbox/tenants.toml"),
            endpoint: None,
            max_stale: Duration::from_secs(300),
            timeout: Duration::from_secs(5),
            auth_header: None,
            auth_token: None,
        }
    }
}

impl TenantsConfig {
    pub(super) fn keys(&mut self, section: &mut Section<'_, '_>) {
        section.key(
            "provider",
            Words::new(),
            &mut self.provider,
            "Where tenants and their keys are looked up.",
        );
        section.key("file", FilePath::any(), &mut self.file, "The tenants file of the provider `file`.");
        section.key(
            "endpoint",
            Maybe(rules::endpoint()),
            &mut self.endpoint,
            "The URL of the provider `http`, which requires it.",
        );
        section.key(
            "max_stale_seconds",
            Span::fractional_seconds(0),
            &mut self.max_stale,
            "How long an answer is still used when the provider is down.",
        );
        section.key(
            "timeout_seconds",
            Span::positive_seconds(),
            &mut self.timeout,
            "How long the provider may take to answer.",
        );
        section.key(
            "auth_header",
            Maybe(Text::any()),
            &mut self.auth_header,
            "Name of a further header sent to the provider.",
        );
        section.key(
            "auth_token",
            Maybe(SecretText::line()),
            &mut self.auth_token,
            "Value of that header; both or neither.",
        );
    }
}
