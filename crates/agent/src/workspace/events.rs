//! What supervision reports, on its way to the server.

use std::sync::Arc;

use sandglass_bridge::ring::Draft;
use sandglass_bridge::wire::{Class, FatalReport};
use sandglass_supervise::report::{Event, Events, Failure, Report};
use serde_json::Value;

use super::link::Link;
use crate::journal::{self, Level};

pub(super) struct ToServer {
    link: Arc<Link>,
}

impl ToServer {
    pub(super) fn new(link: Arc<Link>) -> Self {
        ToServer { link }
    }
}

impl Events for ToServer {
    fn emit(&self, report: Report) {
        let (class, key) = match &report.event {
            Event::PhaseProgress { step, .. } => (Class::Progress, Some(format!("boot.{step}"))),
            _ => (Class::State, None),
        };
        if let Event::BootFailed(failure) | Event::RequiredServiceFailed(failure) = &report.event {
            journal::note(Level::Error, &format!("workspace: {}", failure.message));
            self.link.fatal(fatal(failure));
        }
        let written = serde_json::to_value(&report.event).ok();
        let Some(Value::Object(mut written)) = written else { return };
        let Some(Value::String(kind)) = written.remove("type") else { return };
        let data = written.remove("data").unwrap_or_default();
        let time = jiff::Timestamp::from_millisecond(report.at.as_millis()).unwrap_or_default();
        let Ok(mut draft) = Draft::new(class, time, &kind, &data) else { return };
        draft.key = key;
        self.link.emit(draft);
    }
}

fn fatal(failure: &Failure) -> FatalReport {
    let Failure { reason, cause, step, exit_code, signal, message, output_tail } = failure;
    let report = FatalReport::bounded(&step.to_string(), *exit_code, *signal, message, output_tail);
    // It may arrive before the event that says the same.
    report.because_of(cause.as_deref().unwrap_or(reason.word()))
}
