//! The body of an export: OTLP's JSON form.

use serde_json::{Map, Value, json};

use super::instruments::{BOUNDS, Recorded, Series};
use super::system::System;
use crate::metrics::Usage;

const METER: &str = "opensandbox/execd";
/// From the first moment on: nothing is ever reset.
const CUMULATIVE: u8 = 2;

/// When a measurement began and ended, in nanoseconds of Unix time.
#[derive(Debug, Clone, Copy)]
pub(super) struct Span {
    pub(super) start: u128,
    pub(super) now: u128,
}

/// Everything that is known at one moment.
pub(super) struct Snapshot<'a> {
    pub(super) recorded: &'a Recorded,
    pub(super) system: System,
    pub(super) usage: Usage,
    pub(super) span: Span,
    /// What every data point carries.
    pub(super) shared: &'a [(String, String)],
}

pub(super) fn encode(snapshot: &Snapshot<'_>) -> Value {
    let mut metrics = Vec::new();
    let durations = [
        ("execd.http.request.duration", &snapshot.recorded.requests),
        ("execd.execution.duration", &snapshot.recorded.executions),
        ("execd.filesystem.operations.duration", &snapshot.recorded.file_operations),
    ];
    for (name, series) in durations {
        if !series.is_empty() {
            metrics.push(snapshot.histogram(name, series));
        }
    }
    let system = &snapshot.system;
    let gauge = |name, unit, points| json!({ "name": name, "unit": unit, "gauge": { "dataPoints": points } });
    let one = |value| vec![snapshot.point(&[], value)];
    metrics.push(gauge("execd.system.process.count", "{process}", one(integer(system.processes))));
    metrics.push(gauge("execd.system.cpu.usage", "%", one(("asDouble", snapshot.usage.cpu_used_pct.into()))));
    metrics.push(gauge("execd.system.memory.usage_bytes", "By", one(integer(snapshot.usage.memory_used))));
    let directions = [("in", system.received), ("out", system.sent)]
        .map(|(direction, bytes)| snapshot.point(&[("direction", direction)], integer(bytes)));
    metrics.push(json!({
        "name": "execd.system.network.io.bytes", "unit": "By",
        "sum": { "aggregationTemporality": CUMULATIVE, "isMonotonic": true, "dataPoints": directions },
    }));
    let protocols = [("tcp", system.tcp), ("udp", system.udp)]
        .map(|(protocol, count)| snapshot.point(&[("protocol", protocol)], integer(count)));
    metrics.push(gauge("execd.system.network.connections.active", "{connection}", protocols.to_vec()));
    let resource = attributes(&[("service.name", "opensandbox-execd")], &[]);
    json!({ "resourceMetrics": [{
        "resource": { "attributes": resource },
        "scopeMetrics": [{
            "scope": { "name": METER, "version": env!("CARGO_PKG_VERSION") },
            "metrics": metrics,
        }],
    }] })
}

/// Integers of 64 bits are strings in this form.
fn integer(value: u64) -> (&'static str, Value) {
    ("asInt", value.to_string().into())
}

fn attributes(own: &[(&str, &str)], shared: &[(String, String)]) -> Value {
    let shared = shared.iter().map(|(key, value)| (key.as_str(), value.as_str()));
    shared
        .chain(own.iter().copied())
        .map(|(key, value)| json!({ "key": key, "value": { "stringValue": value } }))
        .collect()
}

impl Snapshot<'_> {
    fn base(&self, own: &[(&str, &str)]) -> Map<String, Value> {
        let mut point = Map::new();
        point.insert("attributes".into(), attributes(own, self.shared));
        point.insert("startTimeUnixNano".into(), self.span.start.to_string().into());
        point.insert("timeUnixNano".into(), self.span.now.to_string().into());
        point
    }

    fn point(&self, own: &[(&str, &str)], (key, value): (&str, Value)) -> Value {
        let mut point = self.base(own);
        point.insert(key.into(), value);
        point.into()
    }

    fn histogram(&self, name: &str, series: &Series) -> Value {
        let points: Vec<Value> = series
            .iter()
            .map(|(own, histogram)| {
                let mut point = self.base(own);
                let buckets: Vec<String> = histogram.buckets.iter().map(u64::to_string).collect();
                point.insert("count".into(), histogram.count.to_string().into());
                point.insert("sum".into(), histogram.sum.into());
                point.insert("min".into(), histogram.min.into());
                point.insert("max".into(), histogram.max.into());
                point.insert("bucketCounts".into(), buckets.into());
                point.insert("explicitBounds".into(), BOUNDS.to_vec().into());
                point.into()
            })
            .collect();
        let data = json!({ "aggregationTemporality": CUMULATIVE, "dataPoints": points });
        json!({ "name": name, "unit": "ms", "histogram": data })
    }
}
