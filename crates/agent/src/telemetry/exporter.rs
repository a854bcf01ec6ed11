//! Sends what was measured every so often, plain HTTP, one attempt each time.
//!
//! Nothing waits for it and nothing is queued: an export that fails is made up for by the next, because all numbers
//! count from the start. Memory: one body, and 64 KiB of an answer.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use http::header::{CONTENT_TYPE, HOST, HeaderValue};
use http::{Request, Uri};
use http_body_util::{BodyExt as _, Full, Limited};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;
use tokio::task::JoinHandle;
use tokio::time::timeout;

use super::instruments::{Recorded, Telemetry};
use super::otlp::{self, Snapshot, Span};
use super::system::System;
use crate::envs::Env;
use crate::metrics::Meter;
use crate::resolver::resolve;

const INTERVAL: Duration = Duration::from_secs(60);
const SHORTEST: Duration = Duration::from_millis(100);
const PATIENCE: Duration = Duration::from_secs(10);
const MAX_ANSWER: usize = 64 << 10;
/// More extra attributes than this would be a mistake.
const MAX_EXTRA: usize = 64;

/// Where measurements go, as the environment says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Settings {
    endpoint: Uri,
    interval: Duration,
    attributes: Vec<(String, String)>,
}

#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum BadEndpoint {
    #[error("{0:?} is not an address of a collector")]
    Malformed(String),
    #[error("measurements can only be sent over plain http, not to {0:?}")]
    NotHttp(String),
}

impl Settings {
    /// `None` when no endpoint is configured, which is the usual case.
    pub fn from_env(env: &Env) -> Result<Option<Self>, BadEndpoint> {
        let text = |name: &str| env.get(name).map(|v| v.trim()).filter(|v| !v.is_empty());
        let endpoint =
            match (text("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT"), text("OTEL_EXPORTER_OTLP_ENDPOINT")) {
                (Some(whole), _) => whole.to_owned(),
                (None, Some(base)) => format!("{}/v1/metrics", base.trim_end_matches('/')),
                (None, None) => return Ok(None),
            };
        let uri: Uri = endpoint.parse().map_err(|_| BadEndpoint::Malformed(endpoint.clone()))?;
        match uri.scheme_str() {
            Some("http") => {}
            Some(_) => return Err(BadEndpoint::NotHttp(endpoint)),
            None => return Err(BadEndpoint::Malformed(endpoint)),
        }
        let interval = text("OTEL_METRIC_EXPORT_INTERVAL").and_then(|millis| millis.parse().ok());
        let mut attributes: Vec<(String, String)> = Vec::new();
        if let Some(id) = text("OPENSANDBOX_ID") {
            attributes.push(("sandbox_id".into(), id.into()));
        }
        let extra = text("OPENSANDBOX_EXECD_METRICS_EXTRA_ATTRS").unwrap_or("");
        let pairs = extra.split(',').filter_map(|pair| pair.split_once('='));
        let pairs = pairs.map(|(key, value)| (key.trim().to_owned(), value.trim().to_owned()));
        attributes.extend(pairs.filter(|(key, _)| !key.is_empty()).take(MAX_EXTRA));
        Ok(Some(Settings {
            endpoint: uri,
            interval: interval.map_or(INTERVAL, Duration::from_millis).max(SHORTEST),
            attributes,
        }))
    }

    /// Begins to measure and to send; the task goes on until it is aborted.
    pub fn start(self, meter: Meter) -> (Telemetry, JoinHandle<()>) {
        let recorded = Arc::new(Mutex::new(Recorded::default()));
        let telemetry = Telemetry(Some(Arc::clone(&recorded)));
        let task = tokio::spawn(async move {
            let start = unix_nanos();
            loop {
                tokio::time::sleep(self.interval).await;
                let span = Span { start, now: unix_nanos() };
                if let Some(body) = self.body(&recorded, &meter, span).await {
                    // The next one tells everything that this one would have told.
                    let _ = timeout(PATIENCE, self.send(body)).await;
                }
            }
        });
        (telemetry, task)
    }

    async fn body(&self, recorded: &Mutex<Recorded>, meter: &Meter, span: Span) -> Option<Bytes> {
        let usage = meter.usage().await;
        let system = tokio::task::spawn_blocking(System::read).await.ok()?;
        let recorded = recorded.lock().unwrap_or_else(PoisonError::into_inner);
        let snapshot = Snapshot { recorded: &recorded, system, usage, span, shared: &self.attributes };
        serde_json::to_vec(&otlp::encode(&snapshot)).ok().map(Bytes::from)
    }

    async fn send(&self, body: Bytes) -> Option<()> {
        let authority = self.endpoint.authority()?;
        let address = resolve(authority.host()).await?;
        let port = authority.port_u16().unwrap_or(80);
        let stream = TcpStream::connect(SocketAddr::new(address, port)).await.ok()?;
        let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await.ok()?;
        let path = self.endpoint.path_and_query().map_or("/", |p| p.as_str());
        let request = Request::post(path)
            .header(HOST, authority.as_str())
            .header(CONTENT_TYPE, HeaderValue::from_static("application/json"))
            .body(Full::new(body))
            .ok()?;
        let exchange = async {
            let answer = sender.send_request(request).await.ok()?;
            Limited::new(answer.into_body(), MAX_ANSWER).collect().await.ok().map(drop)
        };
        // The connection lives as long as the exchange: whichever ends first ends both.
        tokio::select! {
            done = exchange => done,
            _ = connection => None,
        }
    }
}

fn unix_nanos() -> u128 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_nanos())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(pairs: &[(&str, &str)]) -> Result<Option<Settings>, BadEndpoint> {
        Settings::from_env(&pairs.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect())
    }

    #[test]
    fn endpoints() {
        assert_eq!(settings(&[("OTEL_EXPORTER_OTLP_ENDPOINT", " ")]), Ok(None));
        let of = |pairs: &[(&str, &str)]| settings(pairs).unwrap().unwrap().endpoint.to_string();
        assert_eq!(of(&[("OTEL_EXPORTER_OTLP_ENDPOINT", "http://c:4318/")]), "http://c:4318/v1/metrics");
        let both = [
            ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://c:4318"),
            ("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", "http://d/x"),
        ];
        assert_eq!(of(&both), "http://d/x");
        for bad in ["c:4318", "https://c", "", "http://"] {
            let name = "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT";
            assert_eq!(settings(&[(name, bad)]).is_err(), !bad.is_empty(), "{bad}");
        }
    }

    #[test]
    fn attributes_of_every_point() {
        let settings = settings(&[
            ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://c"),
            ("OPENSANDBOX_ID", "s1"),
            ("OPENSANDBOX_EXECD_METRICS_EXTRA_ATTRS", "a=1, b = x=y ,=z,broken"),
            ("OTEL_METRIC_EXPORT_INTERVAL", "1"),
        ]);
        let settings = settings.unwrap().unwrap();
        let expected = [("sandbox_id", "s1"), ("a", "1"), ("b", "x=y")];
        assert_eq!(settings.attributes, expected.map(|(k, v)| (k.to_owned(), v.to_owned())));
        assert_eq!(settings.interval, SHORTEST);
    }
}
