//! `[otel]`: metrics export.

use std::time::Duration;

#[derive(Clone, Debug, PartialEq)]
pub struct OtelConfig {
    pub enabled: bool,
    pub endpoint: Option<String>,
    pub service_name: String,
    pub export_interval: Duration,
}

impl Default for OtelConfig {
    fn default() -> Self {
        Self {
            enabled: false,
            endpoint: None,
            service_name: "opensandbox-server".to_owned(),
            export_interval: Duration::from_millis(60_000),
        }
    }
}
