//! What is counted between two exports: durations by their attributes.
//!
//! Memory: at most [`MAX_SERIES`] series an instrument; what would be one more is counted in a series of its own.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use http::{Method, StatusCode};

/// Upper bounds in milliseconds, those that OpenTelemetry uses when nobody says otherwise.
pub(super) const BOUNDS: [f64; 15] =
    [0.0, 5.0, 10.0, 25.0, 50.0, 75.0, 100.0, 250.0, 500.0, 750.0, 1000.0, 2500.0, 5000.0, 7500.0, 10_000.0];
const MAX_SERIES: usize = 256;

/// Every route that is told apart; the ones that are not known count together.
const ROUTES: [&str; 60] = [
    "/ping",
    "/ready",
    "/internal/init",
    "/command",
    "/command/status/:id",
    "/command/:id/logs",
    "/session",
    "/session/:id",
    "/session/:id/run",
    "/code",
    "/code/context",
    "/code/contexts",
    "/code/contexts/:id",
    "/files",
    "/files/info",
    "/files/mv",
    "/files/permissions",
    "/files/search",
    "/files/replace",
    "/files/upload",
    "/files/download",
    "/directories",
    "/directories/list",
    "/v1/filesystem/:uid/:gid/files",
    "/v1/filesystem/:uid/:gid/files/info",
    "/v1/filesystem/:uid/:gid/files/mv",
    "/v1/filesystem/:uid/:gid/files/permissions",
    "/v1/filesystem/:uid/:gid/files/search",
    "/v1/filesystem/:uid/:gid/files/replace",
    "/v1/filesystem/:uid/:gid/files/upload",
    "/v1/filesystem/:uid/:gid/files/download",
    "/v1/filesystem/:uid/:gid/directories",
    "/v1/filesystem/:uid/:gid/directories/list",
    "/metrics",
    "/metrics/watch",
    "/pty",
    "/pty/:id",
    "/pty/:id/ws",
    "/v1/isolated/capabilities",
    "/v1/isolated/run",
    "/v1/isolated/session",
    "/v1/isolated/sessions",
    "/v1/isolated/session/:id",
    "/v1/isolated/session/:id/run",
    "/v1/isolated/session/:id/diff",
    "/v1/isolated/session/:id/commit",
    "/v1/isolated/session/:id/run/:run",
    "/v1/isolated/session/:id/run/:run/logs",
    "/v1/isolated/session/:id/files",
    "/v1/isolated/session/:id/files/:what",
    "/v1/isolated/session/:id/directories",
    "/v1/isolated/session/:id/directories/:what",
    "/v1/isolated/:a",
    "/v1/isolated/:a/:b",
    "/v1/isolated/:a/:b/:c",
    "/v1/isolated/:a/:b/:c/:d",
    "/v1/workspace/:what",
    "/v1/workspace/:what/:name",
    "/v1/workspace/:what/:name/:verb",
    "/proxy/:port",
];

/// The template that a path follows.
pub fn route_of(path: &str) -> &'static str {
    if path.starts_with("/proxy/") {
        return "/proxy/:port";
    }
    let fits = |template: &&&str| {
        let (mut path, mut template) = (path.split('/'), template.split('/'));
        loop {
            match (path.next(), template.next()) {
                (None, None) => return true,
                (Some(_), Some(part)) if part.starts_with(':') => {}
                (Some(given), Some(part)) if given == part => {}
                _ => return false,
            }
        }
    };
    ROUTES.iter().find(fits).copied().unwrap_or("unmatched")
}

/// Attribute names and values of one series.
pub(super) type Attributes = Vec<(&'static str, &'static str)>;

#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Histogram {
    pub(super) count: u64,
    pub(super) sum: f64,
    pub(super) min: f64,
    pub(super) max: f64,
    pub(super) buckets: [u64; BOUNDS.len() + 1],
}

impl Histogram {
    fn record(&mut self, value: f64) {
        self.min = if self.count == 0 { value } else { self.min.min(value) };
        self.max = self.max.max(value);
        self.count += 1;
        self.sum += value;
        self.buckets[BOUNDS.iter().take_while(|bound| value > **bound).count()] += 1;
    }
}

pub(super) type Series = BTreeMap<Attributes, Histogram>;

/// The instruments by name.
#[derive(Debug, Default)]
pub(super) struct Recorded {
    pub(super) requests: Series,
    pub(super) executions: Series,
    pub(super) file_operations: Series,
}

/// Takes measurements; where no endpoint is configured there is nothing behind it.
#[derive(Debug, Clone, Default)]
pub struct Telemetry(pub(super) Option<Arc<Mutex<Recorded>>>);

impl Telemetry {
    /// Whether anybody gets to see what is measured.
    pub fn is_on(&self) -> bool {
        self.0.is_some()
    }

    /// A request, up to the beginning of its answer.
    pub fn request(&self, method: &Method, route: &'static str, status: StatusCode, took: Duration) {
        let method = match *method {
            Method::GET => "GET",
            Method::POST => "POST",
            Method::PUT => "PUT",
            Method::PATCH => "PATCH",
            Method::DELETE => "DELETE",
            Method::HEAD => "HEAD",
            Method::OPTIONS => "OPTIONS",
            _ => "_OTHER",
        };
        let attributes =
            vec![("http_method", method), ("http_route", route), ("http_status_code", status_text(status))];
        self.record(|recorded| &mut recorded.requests, attributes, took);
    }

    /// An execution: `run_code`, `run_command` or `run_in_session`.
    pub fn execution(&self, operation: &'static str, outcome: Outcome, took: Duration) {
        let attributes = vec![("operation", operation), ("result", outcome.text())];
        self.record(|recorded| &mut recorded.executions, attributes, took);
    }

    /// One of the file routes.
    pub fn file_operation(&self, operation: &'static str, outcome: Outcome, took: Duration) {
        let attributes = vec![("operation", operation), ("result", outcome.text())];
        self.record(|recorded| &mut recorded.file_operations, attributes, took);
    }

    fn record(
        &self,
        instrument: impl FnOnce(&mut Recorded) -> &mut Series,
        attributes: Attributes,
        took: Duration,
    ) {
        let Some(recorded) = &self.0 else { return };
        let mut recorded = recorded.lock().unwrap_or_else(PoisonError::into_inner);
        let series = instrument(&mut recorded);
        let full = series.len() >= MAX_SERIES && !series.contains_key(&attributes);
        let attributes = if full { vec![("otel.metric.overflow", "true")] } else { attributes };
        series.entry(attributes).or_default().record(took.as_secs_f64() * 1e3);
    }
}

/// How something that was measured went.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    Success,
    Failure,
}

impl Outcome {
    fn text(self) -> &'static str {
        match self {
            Outcome::Success => "success",
            Outcome::Failure => "failure",
        }
    }
}

impl<T, E> From<&Result<T, E>> for Outcome {
    fn from(result: &Result<T, E>) -> Self {
        if result.is_ok() { Outcome::Success } else { Outcome::Failure }
    }
}

/// The statuses that answers have; anything else, which the port proxy may pass on, by its class.
fn status_text(status: StatusCode) -> &'static str {
    match status.as_u16() {
        101 => "101",
        200 => "200",
        201 => "201",
        202 => "202",
        204 => "204",
        206 => "206",
        301 => "301",
        304 => "304",
        307 => "307",
        400 => "400",
        401 => "401",
        404 => "404",
        409 => "409",
        412 => "412",
        416 => "416",
        500 => "500",
        501 => "501",
        502 => "502",
        503 => "503",
        other => match other / 100 {
            1 => "1xx",
            2 => "2xx",
            3 => "3xx",
            4 => "4xx",
            _ => "5xx",
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn routes_are_templates() {
        assert_eq!(route_of("/command"), "/command");
        assert_eq!(route_of("/command/status/abc"), "/command/status/:id");
        assert_eq!(route_of("/v1/filesystem/1/2/files/info"), "/v1/filesystem/:uid/:gid/files/info");
        assert_eq!(route_of("/proxy/8080/a/b/c"), "/proxy/:port");
        assert_eq!(route_of("/nope/x"), "unmatched");
        assert_eq!(route_of(""), "unmatched");
    }

    #[test]
    fn durations_fall_into_buckets_and_series_are_few() {
        let telemetry = Telemetry(Some(Arc::default()));
        for millis in [0, 5, 6, 20_000] {
            telemetry.execution("run_command", Outcome::Success, Duration::from_millis(millis));
        }
        let recorded = telemetry.0.as_ref().unwrap().lock().unwrap();
        let histogram = recorded.executions.values().next().unwrap();
        assert_eq!((histogram.count, histogram.min, histogram.max), (4, 0.0, 20_000.0));
        assert_eq!(histogram.buckets[..3], [1, 1, 1]);
        assert_eq!(histogram.buckets[15], 1);
        drop(recorded);
        for status in 100..600 {
            for method in [Method::GET, Method::POST, Method::PUT, Method::HEAD, Method::DELETE] {
                for route in ROUTES {
                    let status = StatusCode::from_u16(status).unwrap();
                    telemetry.request(&method, route, status, Duration::ZERO);
                }
            }
        }
        assert_eq!(telemetry.0.unwrap().lock().unwrap().requests.len(), MAX_SERIES + 1);
    }
}
