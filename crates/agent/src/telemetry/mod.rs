//! Measurements sent to a collector over OTLP/HTTP, only where an endpoint is configured.

mod exporter;
mod instruments;
mod otlp;
mod system;

pub use exporter::Settings;
pub use instruments::{Outcome, Telemetry, route_of};
