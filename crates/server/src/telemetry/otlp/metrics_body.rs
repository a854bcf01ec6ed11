//! `ExportMetricsServiceRequest` from the families of the registry. Everything is cumulative since the process began.

use std::time::SystemTime;

use super::{
    nanoseconds,
    wire::{Any, Message, attribute, scope},
};
use crate::telemetry::metrics::{Distribution, Family, Label, Labels, Points};

/// The meter of the documented metrics.
const DOCUMENTED: &str = "opensandbox.server";
/// The meter of our own.
const OWN: &str = "sandglass";
const CUMULATIVE: u64 = 2;

/// When the numbers began and when they were read.
#[derive(Debug, Clone, Copy)]
pub(super) struct Span {
    pub(super) since: SystemTime,
    pub(super) at: SystemTime,
}

/// The request's body.
pub(super) fn body(resource: &Message, families: &[Family], span: Span) -> Vec<u8> {
    let of = |own: bool| {
        let chosen = families.iter().filter(move |family| family.name.starts_with(OWN) == own);
        let filled = chosen.filter(|family| !is_empty(family)).map(move |family| metric(family, span));
        let name = if own { OWN } else { DOCUMENTED };
        Message::new().message(1, &scope(name)).messages(2, filled)
    };
    let resource_metrics = Message::new().message(1, resource).messages(2, [of(false), of(true)]);
    Message::new().message(1, &resource_metrics).into_bytes()
}

fn is_empty(family: &Family) -> bool {
    match &family.points {
        Points::Counter(points) => points.is_empty(),
        Points::Gauge(points) => points.is_empty(),
        Points::Histogram { points, .. } => points.is_empty(),
    }
}

fn metric(family: &Family, span: Span) -> Message {
    let metric = Message::new().text(1, family.name).text(2, family.about).text(3, family.unit);
    match &family.points {
        Points::Gauge(points) => {
            let points = points.iter().map(|(labels, value)| number(labels, *value, span));
            metric.message(5, &Message::new().messages(1, points))
        }
        Points::Counter(points) => {
            let points = points
                .iter()
                .map(|(labels, value)| number(labels, i64::try_from(*value).unwrap_or(i64::MAX), span));
            let sum = Message::new().messages(1, points).number(2, CUMULATIVE).number(3, 1);
            metric.message(7, &sum)
        }
        Points::Histogram { bounds, points } => {
            let points = points.iter().map(|(labels, read)| histogram(labels, bounds, read, span));
            metric.message(9, &Message::new().messages(1, points).number(2, CUMULATIVE))
        }
    }
}

fn attributes(labels: &Labels) -> impl Iterator<Item = Message> + '_ {
    labels.iter().map(|(name, label)| {
        let value = match label {
            Label::Text(text) => Any::Text(text),
            Label::Int(number) => Any::Int(*number),
            Label::Flag(flag) => Any::Flag(*flag),
        };
        attribute(name, value)
    })
}

fn number(labels: &Labels, value: i64, span: Span) -> Message {
    Message::new()
        .fixed(2, nanoseconds(span.since))
        .fixed(3, nanoseconds(span.at))
        .signed_fixed(6, value)
        .messages(7, attributes(labels))
}

fn histogram(labels: &Labels, bounds: &[u32], read: &Distribution, span: Span) -> Message {
    Message::new()
        .fixed(2, nanoseconds(span.since))
        .fixed(3, nanoseconds(span.at))
        .fixed(4, read.count())
        .double(5, read.sum_ms)
        .packed_fixed(6, &read.buckets)
        .packed_doubles(7, bounds.iter().copied().map(f64::from))
        .messages(9, attributes(labels))
}
