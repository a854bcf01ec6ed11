//! Where to export to and how: `[otel]` first, then the standard variables of OpenTelemetry.
//!
//! A variable that cannot be understood is reported and left out: telemetry never keeps the server from starting.

use std::{str::FromStr, time::Duration};

use crate::{
    config::{Environment, OtelConfig},
    telemetry::traces::Sampler,
};

const DEFAULT_BASE: &str = "http://localhost:4318";

/// One signal's destination.
#[derive(Clone, PartialEq)]
pub struct Destination {
    pub url: String,
    /// May hold credentials.
    pub headers: Vec<(String, String)>,
    pub timeout: Duration,
    pub gzip: bool,
    /// A PEM file with the only authorities to trust.
    pub certificate: Option<String>,
}

impl std::fmt::Debug for Destination {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Destination").field("headers", &self.headers.len()).finish_non_exhaustive()
    }
}

/// How spans are collected.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Batching {
    pub delay: Duration,
    pub queue: usize,
    pub batch: usize,
}

/// What is exported and how.
#[derive(Debug, Clone, PartialEq)]
pub struct Settings {
    pub metrics: Option<(Destination, Duration)>,
    pub traces: Option<(Destination, Batching, Sampler)>,
    /// Attributes of the resource; `service.name` is the first.
    pub resource: Vec<(String, String)>,
}

impl Settings {
    /// Nothing is exported.
    pub fn off() -> Self {
        Self { metrics: None, traces: None, resource: Vec::new() }
    }

    /// Reads configuration and environment; the second value says what was left out.
    pub fn read(config: &OtelConfig, env: &dyn Environment) -> (Self, Vec<String>) {
        let mut variables = Variables { env, complaints: Vec::new() };
        let off = variables.text("OTEL_SDK_DISABLED").is_some_and(|v| v.eq_ignore_ascii_case("true"));
        if !config.enabled || off {
            return (Self::off(), variables.complaints);
        }
        let configured = config.endpoint.as_ref().map(|url| url.expose().to_owned());
        let metrics = variables.exports("METRICS").then(|| {
            let url = configured.clone().unwrap_or_else(|| variables.url("METRICS", "v1/metrics"));
            (variables.destination("METRICS", url), config.export_interval)
        });
        let traces = (config.traces && variables.exports("TRACES")).then(|| {
            // A collector that takes metrics at the usual path takes traces beside it.
            let beside = configured.as_deref().and_then(|url| url.strip_suffix("/v1/metrics"));
            let url = match beside.filter(|_| variables.text("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT").is_none())
            {
                Some(base) => format!("{base}/v1/traces"),
                None => variables.url("TRACES", "v1/traces"),
            };
            (variables.destination("TRACES", url), variables.batching(), variables.sampler())
        });
        let mut resource = vec![("service.name".to_owned(), config.service_name.clone())];
        resource.push(("service.version".to_owned(), env!("CARGO_PKG_VERSION").to_owned()));
        let more = variables.pairs("OTEL_RESOURCE_ATTRIBUTES");
        resource.extend(more.into_iter().filter(|(name, _)| !name.starts_with("service.name")));
        (Self { metrics, traces, resource }, variables.complaints)
    }
}

struct Variables<'e> {
    env: &'e dyn Environment,
    complaints: Vec<String>,
}

impl Variables<'_> {
    /// Blank is the same as not set.
    fn text(&self, name: &str) -> Option<String> {
        let text = self.env.get(name)?.into_string().ok()?;
        let text = text.trim();
        (!text.is_empty()).then(|| text.to_owned())
    }

    /// The variable of a signal, else the one for all of them.
    fn own(&self, signal: &str, what: &str) -> Option<String> {
        self.text(&format!("OTEL_EXPORTER_OTLP_{signal}_{what}"))
            .or_else(|| self.text(&format!("OTEL_EXPORTER_OTLP_{what}")))
    }

    fn complain(&mut self, name: &str, expected: &str) {
        // The value is left out: it may be a secret in the wrong place.
        self.complaints.push(format!("{name} is ignored: it is not {expected}"));
    }

    fn exports(&mut self, signal: &str) -> bool {
        let name = format!("OTEL_{signal}_EXPORTER");
        match self.text(&name).as_deref() {
            None | Some("otlp") => true,
            Some("none") => false,
            Some(_) => {
                self.complain(&name, "`otlp` or `none`");
                true
            }
        }
    }

    fn url(&mut self, signal: &str, path: &str) -> String {
        let own = format!("OTEL_EXPORTER_OTLP_{signal}_ENDPOINT");
        for (name, whole) in [(own.as_str(), true), ("OTEL_EXPORTER_OTLP_ENDPOINT", false)] {
            let Some(url) = self.text(name) else { continue };
            if reqwest::Url::parse(&url).is_ok_and(|url| matches!(url.scheme(), "http" | "https")) {
                return if whole { url } else { format!("{}/{path}", url.trim_end_matches('/')) };
            }
            self.complain(name, "an http(s) URL");
        }
        format!("{DEFAULT_BASE}/{path}")
    }

    fn destination(&mut self, signal: &str, url: String) -> Destination {
        if self.own(signal, "PROTOCOL").is_some_and(|protocol| protocol != "http/protobuf") {
            self.complain("OTEL_EXPORTER_OTLP_PROTOCOL", "`http/protobuf`, the one that is spoken");
        }
        let gzip = match self.own(signal, "COMPRESSION").as_deref() {
            None | Some("none") => false,
            Some("gzip") => true,
            Some(_) => {
                self.complain("OTEL_EXPORTER_OTLP_COMPRESSION", "`gzip` or `none`");
                false
            }
        };
        let mut headers = self.pairs("OTEL_EXPORTER_OTLP_HEADERS");
        for (name, value) in self.pairs(&format!("OTEL_EXPORTER_OTLP_{signal}_HEADERS")) {
            headers.retain(|(known, _)| !known.eq_ignore_ascii_case(&name));
            headers.push((name, value));
        }
        let own = format!("OTEL_EXPORTER_OTLP_{signal}_TIMEOUT");
        let timeout = self.milliseconds(&own, "OTEL_EXPORTER_OTLP_TIMEOUT", 10_000);
        Destination { url, headers, timeout, gzip, certificate: self.own(signal, "CERTIFICATE") }
    }

    fn milliseconds(&mut self, name: &str, otherwise: &str, default: u64) -> Duration {
        let name = if self.text(name).is_some() { name } else { otherwise };
        Duration::from_millis(self.number(name, default).max(1))
    }

    fn number<T: FromStr>(&mut self, name: &str, default: T) -> T {
        let Some(text) = self.text(name) else { return default };
        text.parse().unwrap_or_else(|_| {
            self.complain(name, "a number");
            default
        })
    }

    /// `a=b,c=d` with percent-encoded values.
    fn pairs(&mut self, name: &str) -> Vec<(String, String)> {
        let Some(text) = self.text(name) else { return Vec::new() };
        let mut pairs = Vec::new();
        for entry in text.split(',').map(str::trim).filter(|entry| !entry.is_empty()) {
            match entry.split_once('=') {
                Some((key, value)) if !key.trim().is_empty() => {
                    pairs.push((key.trim().to_owned(), decoded(value.trim())));
                }
                _ => self.complain(name, "of the form `a=b,c=d`"),
            }
        }
        pairs
    }

    fn batching(&mut self) -> Batching {
        let delay = self.milliseconds("OTEL_BSP_SCHEDULE_DELAY", "OTEL_BSP_SCHEDULE_DELAY", 5000);
        let queue = self.number("OTEL_BSP_MAX_QUEUE_SIZE", 2048_usize).clamp(1, 65_536);
        let batch = self.number("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", 512_usize).clamp(1, queue);
        Batching { delay, queue, batch }
    }

    fn sampler(&mut self) -> Sampler {
        let name = self.text("OTEL_TRACES_SAMPLER").unwrap_or_else(|| "parentbased_always_on".to_owned());
        let follow_parent = name.starts_with("parentbased_");
        let ratio = match name.trim_start_matches("parentbased_") {
            "always_on" => 1.0,
            "always_off" => 0.0,
            "traceidratio" => self.number("OTEL_TRACES_SAMPLER_ARG", 1.0_f64).clamp(0.0, 1.0),
            _ => {
                self.complain("OTEL_TRACES_SAMPLER", "a sampler that is known");
                return Sampler { follow_parent: true, ratio: 1.0 };
            }
        };
        Sampler { follow_parent, ratio }
    }
}

fn decoded(text: &str) -> String {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((first, after)) = rest.split_first() {
        let digit = |place: usize| after.get(place).and_then(|b| char::from(*b).to_digit(16));
        match (first, digit(0), digit(1)) {
            (b'%', Some(high), Some(low)) => {
                bytes.push((high * 16 + low) as u8);
                rest = &after[2..];
            }
            _ => {
                bytes.push(*first);
                rest = after;
            }
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    fn read(config: &OtelConfig, variables: &[(&str, &str)]) -> (Settings, Vec<String>) {
        let env: BTreeMap<String, String> =
            variables.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
        Settings::read(config, &env)
    }

    fn on() -> OtelConfig {
        OtelConfig { enabled: true, traces: true, ..OtelConfig::default() }
    }

    fn urls(config: &OtelConfig, variables: &[(&str, &str)]) -> [Option<String>; 2] {
        let (settings, complaints) = read(config, variables);
        assert_eq!(complaints, [""; 0]);
        [settings.metrics.map(|m| m.0.url), settings.traces.map(|t| t.0.url)]
    }

    #[test]
    fn nothing_is_exported_unless_it_is_asked_for() {
        let base = ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://c:1");
        assert_eq!(urls(&OtelConfig::default(), &[base]), [None, None]);
        assert_eq!(urls(&on(), &[base, ("OTEL_SDK_DISABLED", "true")]), [None, None]);
        let metrics_only = OtelConfig { traces: false, ..on() };
        assert_eq!(urls(&metrics_only, &[base]), [Some("http://c:1/v1/metrics".into()), None]);
        let traces_only = [base, ("OTEL_METRICS_EXPORTER", "none")];
        assert_eq!(urls(&on(), &traces_only), [None, Some("http://c:1/v1/traces".into())]);
    }

    #[test]
    fn the_endpoint_comes_from_the_file_or_the_variables() {
        let pair = |a: &str, b: &str| [Some(a.to_owned()), Some(b.to_owned())];
        let local = "http://localhost:4318";
        assert_eq!(urls(&on(), &[]), pair(&format!("{local}/v1/metrics"), &format!("{local}/v1/traces")));
        let own = [
            ("OTEL_EXPORTER_OTLP_ENDPOINT", "https://all/x/"),
            ("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", "http://m/here"),
        ];
        assert_eq!(urls(&on(), &own), pair("http://m/here", "https://all/x/v1/traces"));
    }

    #[test]
    fn headers_limits_and_samplers_are_read() {
        let (settings, complaints) = read(
            &on(),
            &[
                ("OTEL_EXPORTER_OTLP_HEADERS", "Authorization=Basic%20a%3D, x=1"),
                ("OTEL_EXPORTER_OTLP_TRACES_HEADERS", "X=2"),
                ("OTEL_EXPORTER_OTLP_TIMEOUT", "250"),
                ("OTEL_EXPORTER_OTLP_METRICS_COMPRESSION", "gzip"),
                ("OTEL_BSP_MAX_QUEUE_SIZE", "10"),
                ("OTEL_TRACES_SAMPLER", "traceidratio"),
                ("OTEL_TRACES_SAMPLER_ARG", "0.25"),
                ("OTEL_RESOURCE_ATTRIBUTES", "a=b,service.name=other"),
            ],
        );
        assert_eq!(complaints, [""; 0]);
        let ((metrics, _), (traces, batching, sampler)) =
            (settings.metrics.unwrap(), settings.traces.unwrap());
        assert_eq!(metrics.headers[0], ("Authorization".to_owned(), "Basic a=".to_owned()));
        assert_eq!(traces.headers[1], ("X".to_owned(), "2".to_owned()));
        assert_eq!((metrics.timeout, metrics.gzip, traces.gzip), (Duration::from_millis(250), true, false));
        assert_eq!((batching.queue, batching.batch), (10, 10));
        assert_eq!(sampler, Sampler { follow_parent: false, ratio: 0.25 });
        let names: Vec<&str> = settings.resource.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names, ["service.name", "service.version", "a"]);
        assert_eq!(settings.resource[0].1, "opensandbox-server");
        assert!(!format!("{metrics:?}").contains("Basic"));
    }

    #[test]
    fn what_cannot_be_understood_is_reported_and_left_out() {
        let (settings, complaints) = read(
            &on(),
            &[
                ("OTEL_EXPORTER_OTLP_ENDPOINT", "collector:4317"),
                ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc"),
                ("OTEL_BSP_SCHEDULE_DELAY", "soon"),
                ("OTEL_TRACES_SAMPLER", "dice"),
                ("OTEL_EXPORTER_OTLP_HEADERS", "secret"),
            ],
        );
        let (metrics, _) = settings.metrics.unwrap();
        assert_eq!(metrics.url, "http://localhost:4318/v1/metrics");
        for name in ["ENDPOINT", "PROTOCOL", "SCHEDULE_DELAY", "SAMPLER", "HEADERS"] {
            assert!(complaints.iter().any(|c| c.contains(name)), "{name} {complaints:?}");
        }
        assert!(!complaints.iter().any(|c| c.contains("secret")));
    }
}
