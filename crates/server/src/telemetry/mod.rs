//! What the server says about itself: logs, metrics, traces.

mod counted_store;
pub mod current;
pub mod ids;
pub mod logs;
pub mod metrics;
pub mod otlp;
mod rotation;
pub mod traces;

use std::{future::Future, sync::Arc};

pub use counted_store::CountedStore;
use metrics::Metrics;
use traces::Tracer;

/// Where to count and trace. Clones share it; the default counts and traces nothing.
#[derive(Debug, Clone, Default)]
pub struct Telemetry {
    pub metrics: Arc<Metrics>,
    pub tracer: Tracer,
}

/// The future for a task that is about to be spawned: what it logs and traces belongs to the current request.
pub fn belonging<F: Future>(future: F) -> impl Future<Output = F::Output> {
    current::inherit(traces::inherit(future))
}
