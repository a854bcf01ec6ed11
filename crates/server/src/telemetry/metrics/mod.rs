//! What the server counts and measures: one registry, read by the page for Prometheus and by the OTLP export.
//!
//! Owns the numbers that only grow. What can be read off the engine at any time (how many sandboxes are there) is not
//! stored here but looked at when somebody asks: [`Metrics::families`].
//!
//! Invariant: recording never waits for a reader, and the number of series is bounded whatever clients send.

mod creates;
mod family;
pub mod prometheus;
mod requests;
mod sharded;
mod stages;

use std::{
    collections::BTreeMap,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
};

pub use creates::{Creates, Sdk};
pub use family::{Family, Label, Labels, Points};
pub use requests::{Requests, RouteName, method_name, port_route_of, route_of};
pub use sharded::{Counter, Distribution, Histogram};
pub use stages::CreateStages;

use crate::{engine::Engine, listener::Looked};
use sandglass_sandbox::{lifecycle::state::State, ports::StoreError};

/// Different phases of failed creates told apart.
const PHASES: usize = 64;

/// How a request to a port of a sandbox went.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Proxied {
    /// The program's own answer was passed on.
    Answered,
    /// The server refused: no such sandbox, no access, not running.
    Refused,
    /// The program could not be reached or broke off.
    Unreachable,
}

/// Where the wish to extend a sandbox's life came from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RenewSource {
    Proxy,
    Redis,
}

/// What became of the wish.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RenewOutcome {
    Renewed,
    /// The sandbox lives long enough as it is.
    Enough,
    /// It is gone, not running, has no expiry, or was not created with the extension.
    Ineligible,
    Failed,
    /// Another attempt is under way or was successful just before.
    TooSoon,
    /// More attempts are waiting than may.
    Crowded,
    /// A message that is not one.
    Invalid,
    /// A message that is too old.
    Stale,
}

const RENEW_SOURCES: [(RenewSource, &str); 2] =
    [(RenewSource::Proxy, "proxy"), (RenewSource::Redis, "redis")];
const RENEW_OUTCOMES: [(RenewOutcome, &str); 8] = [
    (RenewOutcome::Renewed, "renewed"),
    (RenewOutcome::Enough, "enough"),
    (RenewOutcome::Ineligible, "ineligible"),
    (RenewOutcome::Failed, "failed"),
    (RenewOutcome::TooSoon, "too_soon"),
    (RenewOutcome::Crowded, "crowded"),
    (RenewOutcome::Invalid, "invalid"),
    (RenewOutcome::Stale, "stale"),
];
const PROXIED: [(Proxied, &str); 3] =
    [(Proxied::Answered, "answered"), (Proxied::Refused, "refused"), (Proxied::Unreachable, "unreachable")];

/// What is exported over OTLP.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Signal {
    Metrics,
    Traces,
}

/// What became of an export.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Export {
    Sent,
    Failed,
    /// Spans that found the queue full or could not be sent.
    Dropped,
}

/// See the module documentation.
#[derive(Debug, Default)]
pub struct Metrics {
    pub requests: Requests,
    pub creates: Creates,
    pub stages: CreateStages,
    proxied: [[Counter; 3]; 2],
    renewals: [[AtomicU64; 8]; 2],
    exports: [[AtomicU64; 3]; 2],
    store_errors: [AtomicU64; 2],
    /// By `""` (success) or the phase that failed.
    create_outcomes: Mutex<BTreeMap<String, u64>>,
    /// Consumers of renew messages that are connected; `None` until there are any.
    redis_consumers: Mutex<Option<i64>>,
    certificate: Mutex<Certificate>,
}

/// What became of the certificate of the listener.
#[derive(Debug, Default)]
struct Certificate {
    replaced: u64,
    unusable: u64,
    /// `None` without TLS.
    last: Option<Looked>,
}

impl Metrics {
    /// Counts one request to a port of a sandbox.
    pub fn count_proxied(&self, upgrade: bool, outcome: Proxied) {
        self.proxied[usize::from(upgrade)][outcome as usize].count();
    }

    /// Counts what became of a wish to extend a life.
    pub fn count_renewal(&self, source: RenewSource, outcome: RenewOutcome) {
        self.renewals[source as usize][outcome as usize].fetch_add(1, Relaxed);
    }

    /// How often that has happened.
    pub fn renewals(&self, source: RenewSource, outcome: RenewOutcome) -> u64 {
        self.renewals[source as usize][outcome as usize].load(Relaxed)
    }

    /// Counts exports, and for [`Export::Dropped`] spans.
    pub fn count_export(&self, signal: Signal, outcome: Export, several: u64) {
        self.exports[signal as usize][outcome as usize].fetch_add(several, Relaxed);
    }

    /// How many there were.
    pub fn exports(&self, signal: Signal, outcome: Export) -> u64 {
        self.exports[signal as usize][outcome as usize].load(Relaxed)
    }

    /// Counts an error of the store.
    pub fn count_store_error(&self, error: &StoreError) {
        let kind = match error {
            StoreError::Unavailable(_) => 0,
            StoreError::Corrupt(_) => 1,
        };
        self.store_errors[kind].fetch_add(1, Relaxed);
    }

    /// Counts a create that came to an end: `None` when the sandbox runs, else the phase in which it failed.
    pub fn count_create(&self, failed_phase: Option<&str>) {
        let mut outcomes = self.create_outcomes.lock().unwrap_or_else(PoisonError::into_inner);
        let phase = failed_phase.unwrap_or("");
        // Phases come from backends; they are words of a short list, but nothing makes sure of it.
        let phase = if outcomes.len() < PHASES || outcomes.contains_key(phase) { phase } else { "other" };
        *outcomes.entry(phase.to_owned()).or_default() += 1;
    }

    /// Notes that consumers of renew messages have connected (1) or lost their connection (-1); 0 makes the gauge appear.
    pub fn change_redis_consumers(&self, by: i64) {
        let mut consumers = self.redis_consumers.lock().unwrap_or_else(PoisonError::into_inner);
        *consumers = Some(consumers.unwrap_or(0) + by);
    }

    /// Consumers of renew messages that are connected.
    pub fn redis_consumers(&self) -> Option<i64> {
        *self.redis_consumers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes what a look at the certificate's files found; the first one is that there is a certificate.
    pub fn certificate_looked(&self, looked: Looked) {
        let mut certificate = self.certificate.lock().unwrap_or_else(PoisonError::into_inner);
        match looked {
            Looked::Unchanged => return,
            Looked::Replaced if certificate.last.is_none() => {}
            Looked::Replaced => certificate.replaced += 1,
            Looked::Unusable => certificate.unusable += 1,
        }
        certificate.last = Some(looked);
    }

    /// Whether the certificate that serves is the one in the files; `None` without TLS.
    pub fn certificate_is_current(&self) -> Option<bool> {
        let certificate = self.certificate.lock().unwrap_or_else(PoisonError::into_inner);
        certificate.last.map(|last| last != Looked::Unusable)
    }

    fn certificate_families(&self) -> Vec<Family> {
        let Some(current) = self.certificate_is_current() else { return Vec::new() };
        let certificate = self.certificate.lock().unwrap_or_else(PoisonError::into_inner);
        let outcome = |word: &'static str, count| (vec![("outcome", word.into())], count);
        vec![
            Family::counter(
                "sandglass.tls.certificates",
                "Changes of the certificate's files; `unusable` ones were not taken.",
                vec![outcome("replaced", certificate.replaced), outcome("unusable", certificate.unusable)],
            ),
            Family::gauge(
                "sandglass.tls.certificate.current",
                "Whether the certificate that serves is the one in the files.",
                vec![(vec![], i64::from(current))],
            ),
        ]
    }

    /// Everything, at this moment. The first two families are the documented ones; the engine's gauges are left out when it is gone.
    pub fn families(&self, engine: Option<&Engine>) -> Vec<Family> {
        let mut families = vec![self.requests.family(), self.creates.family()];
        families.extend(engine.map(gauges).into_iter().flatten());
        families.extend(self.stages.families());
        families.extend([
            self.create_family(),
            Family::counter(
                "sandglass.proxy.requests",
                "Requests to ports of sandboxes; `upgrade` are WebSockets and their like.",
                table(["kind", "outcome"], &["http", "upgrade"], &PROXIED, |k, o| self.proxied[k][o].value()),
            ),
            Family::counter(
                "sandglass.renewals",
                "Wishes to extend the life of a sandbox that is in use, by what became of them.",
                table(["source", "outcome"], &RENEW_SOURCES.map(|s| s.1), &RENEW_OUTCOMES, |s, o| {
                    self.renewals[s][o].load(Relaxed)
                }),
            ),
            Family::counter(
                "sandglass.store.errors",
                "Calls of the store that failed.",
                ["unavailable", "corrupt"]
                    .into_iter()
                    .zip(&self.store_errors)
                    .map(|(kind, count)| (vec![("kind", kind.into())], count.load(Relaxed)))
                    .collect(),
            ),
            Family::counter(
                "sandglass.otlp.exports",
                "Exports over OTLP; for `dropped` the number of spans.",
                table(["signal", "outcome"], &["metrics", "traces"], &EXPORTS, |s, o| {
                    self.exports[s][o].load(Relaxed)
                }),
            ),
        ]);
        families.extend(self.redis_consumers().map(|connected| {
            let about = "Consumers of renew messages that are connected.";
            Family::gauge("sandglass.renew.redis.consumers", about, vec![(vec![], connected)])
        }));
        families.extend(self.certificate_families());
        let version = vec![("version", env!("CARGO_PKG_VERSION").into())];
        families.push(Family::gauge("sandglass.build.info", "The version that runs.", vec![(version, 1)]));
        families
    }

    fn create_family(&self) -> Family {
        let outcomes = self.create_outcomes.lock().unwrap_or_else(PoisonError::into_inner);
        let point = |(phase, count): (&String, &u64)| {
            let outcome = if phase.is_empty() { "running" } else { "failed" };
            (vec![("outcome", outcome.into()), ("phase", phase.clone().into())], *count)
        };
        let about = "Creates that came to an end; `phase` is where a failed one stopped.";
        Family::counter("sandglass.creates", about, outcomes.iter().map(point).collect())
    }
}

const EXPORTS: [(Export, &str); 3] =
    [(Export::Sent, "sent"), (Export::Failed, "failed"), (Export::Dropped, "dropped")];

/// A counter with two attributes whose values are all known.
fn table<T>(
    names: [&'static str; 2],
    rows: &[&'static str],
    columns: &[(T, &'static str)],
    value: impl Fn(usize, usize) -> u64,
) -> Vec<(Labels, u64)> {
    let mut points = Vec::with_capacity(rows.len() * columns.len());
    for (r, row) in rows.iter().enumerate() {
        for (c, (_, column)) in columns.iter().enumerate() {
            points.push((vec![(names[0], (*row).into()), (names[1], (*column).into())], value(r, c)));
        }
    }
    points
}

fn gauges(engine: &Engine) -> [Family; 3] {
    let census = engine.index().census();
    let count = |state: State| {
        let there = census.get(state.word()).copied().unwrap_or(0);
        (vec![("state", state.word().into())], i64::try_from(there).unwrap_or(i64::MAX))
    };
    let open = i64::try_from(engine.index().open_intents()).unwrap_or(i64::MAX);
    let runtime = vec![("runtime", engine.runtime().name().into())];
    [
        Family::gauge("sandglass.sandboxes", "Sandboxes by state.", State::ALL.map(count).to_vec()),
        Family::gauge("sandglass.intents.open", "Operations under way.", vec![(vec![], open)]),
        Family::gauge(
            "sandglass.runtime.reachable",
            "Whether the runtime answers.",
            vec![(runtime, i64::from(engine.reachable().is_ok()))],
        ),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_follow_their_enumerations() {
        assert!(RENEW_OUTCOMES.iter().enumerate().all(|(place, (outcome, _))| *outcome as usize == place));
        assert!(RENEW_SOURCES.iter().enumerate().all(|(place, (source, _))| *source as usize == place));
        assert!(PROXIED.iter().enumerate().all(|(place, (outcome, _))| *outcome as usize == place));
        assert!(EXPORTS.iter().enumerate().all(|(place, (outcome, _))| *outcome as usize == place));
    }

    #[test]
    fn what_was_counted_is_on_the_page() {
        let metrics = Metrics::default();
        metrics.count_create(None);
        metrics.count_create(Some("image"));
        metrics.count_create(Some("image"));
        metrics.count_proxied(true, Proxied::Unreachable);
        metrics.count_renewal(RenewSource::Redis, RenewOutcome::Stale);
        metrics.count_store_error(&StoreError::Corrupt("x".into()));
        metrics.count_export(Signal::Traces, Export::Dropped, 5);
        metrics.change_redis_consumers(2);
        let page = prometheus::page(&metrics.families(None));
        for line in [
            "sandglass_creates_total{outcome=\"running\",phase=\"\"} 1",
            "sandglass_creates_total{outcome=\"failed\",phase=\"image\"} 2",
            "sandglass_proxy_requests_total{kind=\"upgrade\",outcome=\"unreachable\"} 1",
            "sandglass_proxy_requests_total{kind=\"http\",outcome=\"answered\"} 0",
            "sandglass_renewals_total{source=\"redis\",outcome=\"stale\"} 1",
            "sandglass_store_errors_total{kind=\"corrupt\"} 1",
            "sandglass_otlp_exports_total{signal=\"traces\",outcome=\"dropped\"} 5",
            "sandglass_renew_redis_consumers 2",
            concat!("sandglass_build_info{version=\"", env!("CARGO_PKG_VERSION"), "\"} 1"),
        ] {
            assert!(page.lines().any(|l| l == line), "{line}\n{page}");
        }
        assert!(!page.contains("sandglass_sandboxes"));
    }

    #[test]
    fn backends_cannot_make_up_phases_without_end() {
        let metrics = Metrics::default();
        for n in 0..1000 {
            metrics.count_create(Some(&n.to_string()));
        }
        assert_eq!(metrics.create_outcomes.lock().unwrap().len(), PHASES + 1);
    }
}
