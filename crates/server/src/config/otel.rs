//! `[otel]`: export of metrics and traces.

use super::kinds::{Flag, Maybe, Span, Text};
use super::reader::Section;
use super::rules;
use super::values::Endpoint;
use std::time::Duration;

#[derive(Clone, Debug, PartialEq)]
pub struct OtelConfig {
    pub enabled: bool,
    pub endpoint: Option<Endpoint>,
    pub service_name: String,
    pub export_interval: Duration,
    /// Ours: the reference exports metrics only.
    pub traces: bool,
}

impl Default for OtelConfig {
    fn default() -> Self {
        Self {
            enabled: false,
            endpoint: None,
            service_name: "opensandbox-server".to_owned(),
            export_interval: Duration::from_millis(60_000),
            traces: false,
        }
    }
}

impl OtelConfig {
    pub(super) fn keys(&mut self, section: &mut Section<'_, '_>) {
        section.key("enabled", Flag, &mut self.enabled, "Whether metrics are exported over OTLP/HTTP.");
        section.key(
            "endpoint",
            Maybe(rules::endpoint()),
            &mut self.endpoint,
            "Whole metrics URL; unset takes the standard `OTEL_EXPORTER_OTLP_*` variables.",
        );
        section.key("service_name", Text::any(), &mut self.service_name, "The resource's `service.name`.");
        section.key(
            "export_interval_millis",
            Span::milliseconds(1000),
            &mut self.export_interval,
            "Time between two exports of metrics.",
        );
        section.key(
            "traces",
            Flag,
            &mut self.traces,
            "Whether traces are exported too: beside the metrics when `endpoint` ends in `/v1/metrics`, else as the standard variables say.",
        );
    }
}
