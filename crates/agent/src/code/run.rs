//! What one run of code becomes: a kernel's messages in, events out.
//!
//! Decides nothing about kernels or clients. Invariant: only messages about this very run count, and the one terminal
//! event comes last.

use std::time::Instant;

use serde::Deserialize;
use serde_json::{Map, Value};

use super::frames::{self, Failing};
use super::message::{Channel, Message};
use crate::events::{self, Stamp};

pub(super) struct Run {
    id: String,
    started: Instant,
    begun: bool,
    counted: bool,
    count: Option<u64>,
    failing: Option<Failing>,
    replied: bool,
    idle: bool,
    leaves: bool,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct Stream {
    name: String,
    text: String,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct Data {
    data: Map<String, Value>,
    execution_count: Option<u64>,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct Reply {
    status: String,
    execution_count: Option<u64>,
    ename: String,
    evalue: String,
    traceback: Vec<String>,
    payload: Vec<Payload>,
    execution_state: String,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct Payload {
    source: String,
    data: Map<String, Value>,
    keepkernel: Option<bool>,
}

impl Run {
    /// A run whose request has this id.
    pub(super) fn new(id: String, started: Instant) -> Self {
        Run {
            id,
            started,
            begun: false,
            counted: false,
            count: None,
            failing: None,
            replied: false,
            idle: false,
            leaves: false,
        }
    }

    /// The kernel is executing: what interrupts it now, interrupts this.
    pub(super) fn has_begun(&self) -> bool {
        self.begun
    }

    pub(super) fn has_reply(&self) -> bool {
        self.replied
    }

    /// The kernel has said everything.
    pub(super) fn is_over(&self) -> bool {
        self.replied && self.idle
    }

    /// The code asked the kernel to end (`exit`), which it does a moment after its reply: until then it still takes code
    /// that it may not run any more.
    pub(super) fn ends_kernel(&self) -> bool {
        self.leaves
    }

    /// Turns a message into events.
    pub(super) fn take(&mut self, message: &Message, out: &mut Vec<u8>) {
        if message.parent != self.id {
            return;
        }
        let stamp = Stamp::now();
        if message.dropped > 0 {
            let note = format!("[output of {} bytes left out: it is too large]\n", message.dropped);
            frames::text(out, "stderr", &note, &stamp);
        }
        match (message.channel, message.kind.as_str()) {
            (Channel::Iopub, "status") => {
                self.idle |= parsed::<Reply>(message).execution_state == "idle";
            }
            (Channel::Iopub, "execute_input") => {
                self.begun = true;
                self.count = parsed::<Data>(message).execution_count;
            }
            (Channel::Iopub, kind) => {
                self.begun = true;
                self.output(kind, message, out, &stamp);
            }
            (Channel::Shell, "execute_reply") => self.reply(message, out, &stamp),
            (Channel::Shell, _) => {}
        }
    }

    fn output(&mut self, kind: &str, message: &Message, out: &mut Vec<u8>, stamp: &Stamp) {
        match kind {
            "stream" => {
                let stream: Stream = parsed(message);
                let name = if stream.name == "stderr" { "stderr" } else { "stdout" };
                frames::text(out, name, &stream.text, stamp);
            }
            "execute_result" => {
                let data: Data = parsed(message);
                self.count = data.execution_count.or(self.count);
                self.tell_count(out, stamp);
                show(out, &data.data, stamp);
            }
            // An update is the newest state of what was shown before: whoever shows the last result shows the right one.
            "display_data" | "update_display_data" => show(out, &parsed::<Data>(message).data, stamp),
            "error" => {
                let reply: Reply = parsed(message);
                self.fail(reply);
            }
            // Output that was sent cannot be unsent, and nothing here takes part in widgets.
            _ => {}
        }
    }

    fn reply(&mut self, message: &Message, out: &mut Vec<u8>, stamp: &Stamp) {
        let mut reply: Reply = parsed(message);
        self.replied = true;
        self.count = reply.execution_count.or(self.count);
        for payload in reply.payload.iter().filter(|payload| payload.source == "page") {
            show(out, &payload.data, stamp);
        }
        self.leaves |= reply
            .payload
            .iter()
            .any(|payload| payload.source == "ask_exit" && payload.keepkernel != Some(true));
        if reply.status == "ok" || self.failing.is_some() {
            return;
        }
        if reply.ename.is_empty() && reply.status.starts_with("abort") {
            "Aborted".clone_into(&mut reply.ename);
            "the execution was interrupted".clone_into(&mut reply.evalue);
        }
        self.fail(reply);
    }

    /// Kept until the end: output may follow an error, and nothing may follow the terminal event.
    fn fail(&mut self, reply: Reply) {
        let name = if reply.ename.is_empty() { "Error".to_owned() } else { reply.ename };
        self.failing = Some(Failing { name, value: reply.evalue, traceback: reply.traceback });
    }

    fn tell_count(&mut self, out: &mut Vec<u8>, stamp: &Stamp) {
        if let Some(count) = self.count.filter(|count| !self.counted && *count > 0) {
            frames::count(out, count, stamp);
            self.counted = true;
        }
    }

    /// The run was cut short by something other than its code.
    pub(super) fn cut(&mut self, name: &str, why: &str) {
        self.failing =
            Some(Failing { name: name.to_owned(), value: why.to_owned(), traceback: vec![why.to_owned()] });
    }

    pub(super) fn finish(mut self, out: &mut Vec<u8>) {
        let stamp = Stamp::now();
        self.tell_count(out, &stamp);
        match &self.failing {
            Some(failing) => {
                events::text_event(out, "status", b"error", &stamp);
                frames::error(out, failing, &stamp);
            }
            None => {
                let millis = u64::try_from(self.started.elapsed().as_millis()).unwrap_or(u64::MAX);
                events::complete(out, millis, &stamp);
            }
        }
    }
}

/// What a kernel sends is believed as far as it can be read.
fn parsed<'a, T: Deserialize<'a> + Default>(message: &'a Message) -> T {
    serde_json::from_slice(&message.content).unwrap_or_default()
}

fn show(out: &mut Vec<u8>, bundle: &Map<String, Value>, stamp: &Stamp) {
    for kind in frames::result(out, bundle, stamp) {
        let note = format!("[{kind} of a result left out: it is too large]\n");
        frames::text(out, "stderr", &note, stamp);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn message(channel: Channel, kind: &str, content: &Value) -> Message {
        let content = content.to_string().into_bytes();
        Message { channel, kind: kind.into(), parent: "run".into(), content, dropped: 0 }
    }

    fn events_of(messages: &[Message]) -> Vec<Value> {
        let (mut run, mut out) = (Run::new("run".into(), Instant::now()), Vec::new());
        for message in messages {
            run.take(message, &mut out);
        }
        assert!(run.is_over());
        run.finish(&mut out);
        let text = String::from_utf8(out).unwrap();
        text.split("\n\n").filter(|f| !f.is_empty()).map(|f| serde_json::from_str(f).unwrap()).collect()
    }

    fn kinds(events: &[Value]) -> Vec<&str> {
        events.iter().map(|event| event["type"].as_str().unwrap()).collect()
    }

    const IOPUB: Channel = Channel::Iopub;

    #[test]
    fn code_that_ends_its_kernel_is_known_from_the_reply() {
        for (payload, ends) in [
            (json!([{"source": "ask_exit", "keepkernel": null}]), true),
            (json!([{"source": "ask_exit", "keepkernel": false}]), true),
            (json!([{"source": "ask_exit"}]), true),
            (json!([{"source": "ask_exit", "keepkernel": true}]), false),
            (json!([{"source": "page", "data": {"text/plain": "help"}}]), false),
            (json!([]), false),
        ] {
            let mut run = Run::new("run".into(), Instant::now());
            let reply = json!({"status": "ok", "execution_count": 1, "payload": payload});
            run.take(&message(Channel::Shell, "execute_reply", &reply), &mut Vec::new());
            assert!(run.has_reply());
            assert_eq!(run.ends_kernel(), ends, "{payload}");
        }
    }

    #[test]
    fn everything_a_cell_can_say_becomes_events_in_order() {
        let mut stale = message(IOPUB, "stream", &json!({"name": "stdout", "text": "of another run"}));
        stale.parent = "before".into();
        let events = events_of(&[
            message(IOPUB, "status", &json!({"execution_state": "busy"})),
            message(IOPUB, "execute_input", &json!({"code": "x", "execution_count": 3})),
            stale,
            message(IOPUB, "stream", &json!({"name": "stdout", "text": "a\nb"})),
            message(IOPUB, "stream", &json!({"name": "stderr", "text": "c"})),
            message(IOPUB, "display_data", &json!({"data": {"image/png": "aa", "text/plain": "<Figure>"}})),
            message(IOPUB, "clear_output", &json!({"wait": true})),
            message(IOPUB, "execute_result", &json!({"data": {"text/plain": "4"}, "execution_count": 3})),
            message(Channel::Shell, "execute_reply", &json!({"status": "ok", "execution_count": 3})),
            message(IOPUB, "status", &json!({"execution_state": "idle"})),
        ]);
        assert_eq!(
            kinds(&events),
            ["stdout", "stderr", "result", "execution_count", "result", "execution_complete"]
        );
        assert_eq!(events[0]["text"], "a\nb");
        assert_eq!(events[2]["results"], json!({"image/png": "aa", "text": "<Figure>"}));
        assert_eq!(events[4]["results"]["text"], "4");
    }

    #[test]
    fn an_error_is_the_last_event_and_the_only_terminal_one() {
        let failed = json!({"status": "error", "ename": "NameError", "evalue": "no", "traceback": ["\u{1b}[31mt"],
            "execution_count": 1});
        let events = events_of(&[
            message(IOPUB, "error", &failed),
            message(IOPUB, "stream", &json!({"name": "stdout", "text": "late"})),
            message(IOPUB, "status", &json!({"execution_state": "idle"})),
            message(Channel::Shell, "execute_reply", &failed),
        ]);
        assert_eq!(kinds(&events), ["stdout", "execution_count", "status", "error"]);
        assert_eq!(
            events[3]["error"],
            json!({"ename": "NameError", "evalue": "no", "traceback": ["\u{1b}[31mt"]})
        );
    }

    #[test]
    fn a_reply_alone_may_carry_the_failure() {
        let idle = || message(IOPUB, "status", &json!({"execution_state": "idle"}));
        let aborted = message(Channel::Shell, "execute_reply", &json!({"status": "aborted"}));
        assert_eq!(events_of(&[aborted, idle()])[1]["error"]["ename"], "Aborted");
        let nameless = json!({"status": "error", "ename": "", "evalue": "7", "traceback": []});
        let events = events_of(&[message(Channel::Shell, "execute_reply", &nameless), idle()]);
        assert_eq!(
            (&events[1]["error"]["ename"], &events[1]["error"]["evalue"]),
            (&"Error".into(), &"7".into())
        );
    }

    #[test]
    fn output_that_was_too_large_is_owned_up_to() {
        let mut giant = message(IOPUB, "stream", &json!({}));
        (giant.content, giant.dropped) = (Vec::new(), 99);
        let events = events_of(&[
            giant,
            message(Channel::Shell, "execute_reply", &json!({"status": "ok"})),
            message(IOPUB, "status", &json!({"execution_state": "idle"})),
        ]);
        assert_eq!(kinds(&events), ["stderr", "execution_complete"]);
        assert!(events[0]["text"].as_str().unwrap().contains("99 bytes"));
    }
}
