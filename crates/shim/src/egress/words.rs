//! What the program says on its standard output: one line of JSON each, bounded in length and rate.
//!
//! The box decides what it asks for, so it decides what these lines contain and how many come.
//! Invariant: at most [`LONGEST`] bytes are kept, and no more than [`BURST`] events at once or [`RATE`] a second in the
//! long run come out; what is left out is counted and told.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Instant;

use serde_json::{Value, json};

/// Longer lines are passed over.
const LONGEST: usize = 8 << 10;
/// Longer words in an event, and longer messages, are cut.
const LONGEST_WORD: usize = 300;
const LONGEST_MESSAGE: usize = 512;
const BURST: f64 = 50.0;
const RATE: f64 = 1.0;
/// Read in one turn of the loop.
const READS_A_TURN: usize = 8;

/// Something that the program said.
#[derive(Debug, PartialEq)]
pub enum Told {
    /// Everything is enforced.
    Ready,
    Event(Event),
}

/// What an enforcer tells of, in the words of a box's history.
#[derive(Debug, PartialEq)]
pub struct Event {
    /// `egress.denied`, `egress.injected` or `egress.noted`.
    pub kind: &'static str,
    /// One line of at most 512 characters; control characters, which a box could bring in by names, show as `?`.
    pub message: String,
    /// The event's own fields, each as bounded as the message.
    pub data: Value,
}

impl Event {
    /// From a line of an enforcer's output; `None` for any other line, and for one of more than 8 KiB.
    #[must_use]
    pub fn of_line(line: &str) -> Option<Self> {
        if line.len() > LONGEST {
            return None;
        }
        serde_json::from_str::<Value>(line.trim()).ok()?.get("event").and_then(read)
    }
}

/// The pipe, what has come of a line, and what may still be told.
#[derive(Debug)]
pub struct Words {
    pipe: Option<OwnedFd>,
    heard: Vec<u8>,
    /// The rest of a line that was too long is passed over.
    overlong: bool,
    budget: f64,
    counted_at: Instant,
    left_out: u64,
}

impl Words {
    pub fn new() -> Self {
        Self {
            pipe: None,
            heard: Vec::new(),
            overlong: false,
            budget: BURST,
            counted_at: Instant::now(),
            left_out: 0,
        }
    }

    /// Listens to a program that was just started.
    pub fn listen(&mut self, pipe: OwnedFd) -> io::Result<()> {
        rustix::io::ioctl_fionbio(&pipe, true)?;
        self.heard.clear();
        self.overlong = false;
        self.pipe = Some(pipe);
        Ok(())
    }

    /// What to poll; nothing after the end.
    pub fn readable(&self) -> Option<BorrowedFd<'_>> {
        self.pipe.as_ref().map(AsFd::as_fd)
    }

    /// Takes what is there, within a turn's share.
    pub fn hear(&mut self) -> Vec<Told> {
        let mut told = Vec::new();
        for _ in 0..READS_A_TURN {
            let mut chunk = [0; 4096];
            let Some(pipe) = &self.pipe else { break };
            match rustix::io::read(pipe, &mut chunk) {
                Ok(0) => self.pipe = None,
                Ok(length) => self.take(&chunk[..length], &mut told),
                Err(rustix::io::Errno::INTR) => {}
                Err(rustix::io::Errno::AGAIN) => break,
                Err(_) => self.pipe = None,
            }
        }
        told
    }

    fn take(&mut self, bytes: &[u8], told: &mut Vec<Told>) {
        for piece in bytes.split_inclusive(|byte| *byte == b'\n') {
            let ends = piece.ends_with(b"\n");
            if self.heard.len() + piece.len() > LONGEST {
                self.overlong = true;
                self.heard.clear();
            } else if !self.overlong {
                self.heard.extend_from_slice(piece);
            }
            if ends {
                if !std::mem::take(&mut self.overlong) {
                    self.line(told);
                }
                self.heard.clear();
            }
        }
    }

    fn line(&mut self, told: &mut Vec<Told>) {
        let Ok(line) = serde_json::from_slice::<Value>(&self.heard) else { return };
        if line.get("ready") == Some(&Value::Bool(true)) {
            told.push(Told::Ready);
        }
        let Some(event) = line.get("event").and_then(read) else { return };
        if !self.may_tell() {
            self.left_out += 1;
            return;
        }
        if self.left_out > 0 {
            let count = std::mem::take(&mut self.left_out);
            told.push(noted("left-out", &format!("{count} events came too fast and were left out")));
        }
        told.push(Told::Event(event));
    }

    fn may_tell(&mut self) -> bool {
        let now = Instant::now();
        let earned = now.duration_since(self.counted_at).as_secs_f64() * RATE;
        self.budget = (self.budget + earned).min(BURST);
        self.counted_at = now;
        let may = self.budget >= 1.0;
        if may {
            self.budget -= 1.0;
        }
        may
    }
}

/// An event of our own about the program.
pub fn noted(what: &str, detail: &str) -> Told {
    Told::Event(Event {
        kind: "egress.noted",
        message: format!("{what}: {detail}"),
        data: json!({ "kind": "noted", "what": what, "detail": detail }),
    })
}

/// An event of the program's with its words cut to a bearable length.
fn read(event: &Value) -> Option<Event> {
    let fields = event.as_object()?;
    let word = |name: &str| fields.get(name).map(shown).unwrap_or_default();
    let (kind, message) = match event.get("kind")?.as_str()? {
        "denied" => {
            let port = fields.get("port").map(|port| format!(" port {}", shown(port))).unwrap_or_default();
            let target = match (word("host"), word("address")) {
                (host, address) if address.is_empty() => host,
                (host, address) if host.is_empty() => address,
                (host, address) => format!("{host} ({address})"),
            };
            ("egress.denied", format!("{}: {target}{port}, rule {}", word("by"), word("rule")))
        }
        "injected" => {
            let of = format!("binding {}: {} {}", word("binding"), word("method"), word("host"));
            ("egress.injected", format!("{of}, revision {}", word("revision")))
        }
        "noted" => ("egress.noted", format!("{}: {}", word("what"), word("detail"))),
        _ => return None,
    };
    let data = fields.iter().map(|(name, value)| {
        let value = if value.is_number() { value.clone() } else { Value::from(shown(value)) };
        (name.clone(), value)
    });
    let message = message.chars().take(LONGEST_MESSAGE).collect();
    Some(Event { kind, message, data: Value::Object(data.collect()) })
}

/// A value as text of one line.
fn shown(value: &Value) -> String {
    let text = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
    text.chars().map(|c| if c.is_control() { '?' } else { c }).take(LONGEST_WORD).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hear(text: &str) -> Vec<Told> {
        let mut told = Vec::new();
        Words::new().take(text.as_bytes(), &mut told);
        told
    }

    fn message(told: &Told) -> &str {
        match told {
            Told::Event(event) => &event.message,
            Told::Ready => "ready",
        }
    }

    #[test]
    fn lines_become_events_whatever_their_pieces() {
        let text = concat!(
            "{\"ready\":true}\n",
            r#"{"event":{"kind":"denied","by":"sni","host":"a.example","port":443,"rule":"default"}}"#,
            "\n",
            r#"{"event":{"kind":"denied","by":"firewall","address":"192.0.2.1","rule":"deny 192.0.2.0/24"}}"#,
            "\n",
            r#"{"event":{"kind":"injected","binding":"git","host":"a.example","method":"GET","revision":3}}"#,
            "\n",
            r#"{"event":{"kind":"noted","what":"policy-changed","detail":"2 rules\nand more"}}"#,
            "\nnonsense\n{\"event\":{\"kind\":\"other\"}}\n{\"event\":"
        );
        let expected = [
            "ready",
            "sni: a.example port 443, rule default",
            "firewall: 192.0.2.1, rule deny 192.0.2.0/24",
            "binding git: GET a.example, revision 3",
            "policy-changed: 2 rules?and more",
        ];
        let told = hear(text);
        assert_eq!(told.iter().map(message).collect::<Vec<_>>(), expected);
        let Told::Event(event) = &told[3] else { panic!("{told:?}") };
        assert_eq!((event.kind, &event.data["revision"]), ("egress.injected", &json!(3)));
        let (mut words, mut bytewise) = (Words::new(), Vec::new());
        for byte in text.as_bytes() {
            words.take(&[*byte], &mut bytewise);
        }
        assert_eq!(bytewise, told);
    }

    #[test]
    fn a_line_alone_is_an_event_or_nothing() {
        let line = r#"{"event":{"kind":"denied","by":"sni","host":"a.example","address":"192.0.2.1","port":443,"rule":"default"}}"#;
        let event = Event::of_line(line).unwrap();
        assert_eq!(
            (event.kind, &*event.message),
            ("egress.denied", "sni: a.example (192.0.2.1) port 443, rule default")
        );
        for line in [r#"{"ready":true}"#, "", "hello", r#"{"event":{"kind":"other"}}"#, &"x".repeat(10_000)] {
            assert_eq!(Event::of_line(line), None);
        }
        let long = "c".repeat(900);
        let line =
            format!(r#"{{"event":{{"kind":"denied","by":"dns","host":"a\nb{long}","rule":"{long}"}}}}"#);
        let message = Event::of_line(&line).unwrap().message;
        assert!(message.starts_with("dns: a?b") && message.chars().count() == LONGEST_MESSAGE);
    }

    #[test]
    fn neither_long_lines_nor_many_do_harm() {
        let long = format!("{{\"event\":\"{}\"}}\n{{\"ready\":true}}\n", "x".repeat(100_000));
        assert_eq!(hear(&long), [Told::Ready]);
        let host = "h".repeat(1000);
        let one = format!(r#"{{"event":{{"kind":"denied","by":"dns","host":"{host}","rule":"default"}}}}"#);
        assert!(message(&hear(&format!("{one}\n"))[0]).len() < 400);
        let mut words = Words::new();
        let mut told = Vec::new();
        for _ in 0..10_000 {
            words.take(format!("{one}\n").as_bytes(), &mut told);
        }
        // A few more than the burst, when this takes long.
        assert!((50..500).contains(&told.len()), "{}", told.len());
        assert!(words.left_out > 0);
        words.budget = 2.0;
        told.clear();
        words.take(format!("{one}\n").as_bytes(), &mut told);
        assert!(message(&told[0]).starts_with("left-out: "), "{told:?}");
        assert_eq!((told.len(), words.left_out), (2, 0));
    }
}
