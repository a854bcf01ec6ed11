//! Export of metrics and traces over OTLP/HTTP in protobuf.
//!
//! Own code rather than the OpenTelemetry crates: two requests are all that is spoken, and a writer for them is smaller than what a
//! second HTTP stack would cost. Owns two tasks and their queue; does not own what is measured.
//!
//! Invariant: no request ever waits for a collector. What cannot be sent is counted and dropped; the last export at the end is bounded by
//! the time that the server has to stop.

mod metrics_body;
mod sender;
mod settings;
#[cfg(test)]
mod tests;
mod traces_body;
mod wire;

use std::{
    sync::Arc,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use tokio::{sync::mpsc, task::JoinHandle, time::Instant};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

pub use sender::DestinationError;
pub use settings::{Batching, Destination, Settings};

use super::{
    metrics::{Export, Family, Metrics, Signal},
    traces::{Ended, Tracer},
};
use sender::Sender;
use wire::{Any, Message, attribute};

/// How often a batch of spans is tried before it is dropped.
const ATTEMPTS: u32 = 3;
/// Pause after a failed attempt, doubled each time.
const RETRY: Duration = Duration::from_millis(500);

fn nanoseconds(at: SystemTime) -> u64 {
    at.duration_since(UNIX_EPOCH).ok().and_then(|d| u64::try_from(d.as_nanos()).ok()).unwrap_or(0)
}

/// Reads all families at one moment.
pub type Gather = Box<dyn Fn() -> Vec<Family> + Send + Sync>;

/// The running export.
#[derive(Debug)]
pub struct Exporter {
    tracer: Tracer,
    stop: CancellationToken,
    tasks: Vec<JoinHandle<()>>,
}

impl Exporter {
    /// Starts what the settings ask for. A destination that cannot be used is reported and left out.
    pub fn start(settings: Settings, metrics: &Arc<Metrics>, gather: Gather) -> Self {
        let stop = CancellationToken::new();
        let resource = settings.resource.iter().map(|(name, value)| attribute(name, Any::Text(value)));
        let resource = Message::new().messages(1, resource);
        let mut exporter = Self { tracer: Tracer::off(), stop: stop.clone(), tasks: Vec::new() };
        let outlet = |signal, destination: &Destination| match Sender::new(destination) {
            Ok(sender) => Some(Outlet { signal, sender, metrics: metrics.clone(), failing: false }),
            Err(error) => {
                let error: &(dyn std::error::Error + 'static) = &error;
                warn!(?signal, error, "nothing is exported over OTLP");
                None
            }
        };
        if let Some((destination, interval)) = &settings.metrics
            && let Some(outlet) = outlet(Signal::Metrics, destination)
        {
            let task = export_metrics(outlet, *interval, resource.clone(), gather, stop.clone());
            exporter.tasks.push(tokio::spawn(task));
        }
        if let Some((destination, batching, sampler)) = &settings.traces
            && let Some(outlet) = outlet(Signal::Traces, destination)
        {
            let (queue, ended) = mpsc::channel(batching.queue);
            exporter.tracer = Tracer::new(queue, *sampler, metrics.clone());
            exporter.tasks.push(tokio::spawn(export_traces(outlet, *batching, resource, ended, stop)));
        }
        exporter
    }

    /// Makes the spans that are exported; makes none when traces are off.
    pub fn tracer(&self) -> &Tracer {
        &self.tracer
    }

    /// Sends what is left, for at most `limit`.
    pub async fn stop(self, limit: Duration) {
        self.stop.cancel();
        let end = Instant::now() + limit;
        for mut task in self.tasks {
            if tokio::time::timeout_at(end, &mut task).await.is_err() {
                warn!("the collector is too slow: the last telemetry is dropped");
                task.abort();
            }
        }
    }
}

/// One signal's way out: sends, counts, and tells of the first failure and of the recovery.
struct Outlet {
    signal: Signal,
    sender: Sender,
    metrics: Arc<Metrics>,
    failing: bool,
}

impl Outlet {
    async fn send(&mut self, body: Vec<u8>) -> Result<(), sender::SendError> {
        let sent = self.sender.send(body).await;
        let outcome = if sent.is_ok() { Export::Sent } else { Export::Failed };
        self.metrics.count_export(self.signal, outcome, 1);
        match &sent {
            Ok(()) if self.failing => info!(signal = ?self.signal, "the collector takes exports again"),
            Err(error) if !self.failing => {
                let error: &(dyn std::error::Error + 'static) = error;
                warn!(signal = ?self.signal, error, "an export failed; the next failures are only counted");
            }
            _ => {}
        }
        self.failing = sent.is_err();
        sent
    }
}

async fn export_metrics(
    mut outlet: Outlet,
    interval: Duration,
    resource: Message,
    gather: Gather,
    stop: CancellationToken,
) {
    let since = SystemTime::now();
    let mut ticks = tokio::time::interval_at(Instant::now() + interval, interval);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        let last = tokio::select! {
            _ = ticks.tick() => false,
            () = stop.cancelled() => true,
        };
        let span = metrics_body::Span { since, at: SystemTime::now() };
        let body = metrics_body::body(&resource, &gather(), span);
        // The numbers are cumulative, so the next export makes up for a failed one.
        let sent = outlet.send(body);
        if last {
            let _counted = sent.await;
            return;
        }
        tokio::select! {
            _counted = sent => {}
            // An export that hangs must not use up the time of the last one.
            () = stop.cancelled() => {}
        }
    }
}

async fn export_traces(
    mut outlet: Outlet,
    batching: Batching,
    resource: Message,
    mut ended: mpsc::Receiver<Ended>,
    stop: CancellationToken,
) {
    let mut batch = Vec::with_capacity(batching.batch);
    loop {
        let last = collect(&mut batch, batching, &mut ended, &stop).await;
        if !batch.is_empty() {
            let body = traces_body::body(&resource, &batch);
            if !deliver(&mut outlet, body, &stop).await {
                outlet.metrics.count_export(Signal::Traces, Export::Dropped, batch.len() as u64);
            }
            batch.clear();
        }
        if last && ended.is_empty() {
            return;
        }
    }
}

/// Fills the batch; returns whether the end has come.
async fn collect(
    batch: &mut Vec<Ended>,
    batching: Batching,
    ended: &mut mpsc::Receiver<Ended>,
    stop: &CancellationToken,
) -> bool {
    let delay = tokio::time::sleep(batching.delay);
    tokio::pin!(delay);
    loop {
        let room = batching.batch - batch.len();
        if room == 0 {
            return false;
        }
        tokio::select! {
            biased;
            () = stop.cancelled() => {
                while batch.len() < batching.batch && let Ok(span) = ended.try_recv() {
                    batch.push(span);
                }
                return true;
            }
            got = ended.recv_many(batch, room) => if got == 0 { return true },
            () = &mut delay => return false,
        }
    }
}

async fn deliver(outlet: &mut Outlet, body: Vec<u8>, stop: &CancellationToken) -> bool {
    let mut pause = RETRY;
    for attempt in 1..=ATTEMPTS {
        match outlet.send(body.clone()).await {
            Ok(()) => return true,
            Err(error) if attempt == ATTEMPTS || !error.passing() => return false,
            Err(_) => {}
        }
        tokio::select! {
            () = tokio::time::sleep(pause) => {}
            // There is no time left for pauses; the rest is tried once.
            () = stop.cancelled() => return outlet.send(body).await.is_ok(),
        }
        pause *= 2;
    }
    false
}
