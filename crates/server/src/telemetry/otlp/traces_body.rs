//! `ExportTraceServiceRequest` from spans that have ended.

use super::{
    nanoseconds,
    wire::{Any, Message, attribute, scope},
};
use crate::telemetry::traces::{Attribute, Ended};

const SCOPE: &str = "opensandbox.server";
const STATUS_ERROR: u64 = 2;

/// The request's body.
pub(super) fn body(resource: &Message, spans: &[Ended]) -> Vec<u8> {
    let scope_spans = Message::new().message(1, &scope(SCOPE)).messages(2, spans.iter().map(span));
    let resource_spans = Message::new().message(1, resource).message(2, &scope_spans);
    Message::new().message(1, &resource_spans).into_bytes()
}

fn span(ended: &Ended) -> Message {
    let mut span = Message::new().bytes(1, &ended.context.trace_id).bytes(2, &ended.context.span_id);
    if let Some(parent) = &ended.parent {
        span = span.bytes(4, parent);
    }
    span = span
        .text(5, &ended.name)
        .number(6, ended.kind as u64)
        .fixed(7, nanoseconds(ended.started))
        .fixed(8, nanoseconds(ended.ended))
        .messages(9, ended.attributes.iter().map(|(name, value)| attribute(name, any(value))))
        .short(16, u32::from(ended.context.flags()));
    if let Some(message) = &ended.failure {
        span = span.message(15, &Message::new().text(2, message).number(3, STATUS_ERROR));
    }
    span
}

fn any(value: &Attribute) -> Any<'_> {
    match value {
        Attribute::Text(text) => Any::Text(text),
        Attribute::Int(number) => Any::Int(*number),
    }
}
