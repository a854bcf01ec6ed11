//! What an egress enforcer says on its standard output, in the words of a box's history. Every runtime reads it, and tells it alike.

use serde::Deserialize;

/// Longer lines are none of the enforcer's.
const LONGEST_LINE: usize = 4096;
const LONGEST_MESSAGE: usize = 512;

#[derive(Deserialize)]
struct Line {
    event: Event,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", tag = "kind")]
enum Event {
    Denied {
        by: String,
        host: Option<String>,
        address: Option<String>,
        port: Option<u16>,
        #[serde(default)]
        rule: String,
    },
    Injected {
        binding: String,
        host: String,
        #[serde(default)]
        method: String,
        #[serde(default)]
        revision: u64,
    },
    Noted {
        what: String,
        #[serde(default)]
        detail: String,
    },
}

/// The kind and the message of the event that a line tells of; `None` for any other line.
pub(crate) fn event(line: &str) -> Option<(&'static str, String)> {
    if line.len() > LONGEST_LINE {
        return None;
    }
    let told: Line = serde_json::from_str(line.trim()).ok()?;
    let (kind, message) = match told.event {
        Event::Denied { by, host, address, port, rule } => {
            let port = port.map(|port| format!(" port {port}")).unwrap_or_default();
            let target = match (host, address) {
                (Some(host), Some(address)) => format!("{host} ({address}){port}"),
                (Some(one), None) | (None, Some(one)) => format!("{one}{port}"),
                (None, None) => format!("something{port}"),
            };
            ("egress.denied", format!("{by}: {target}, rule {rule}"))
        }
        Event::Injected { binding, host, method, revision } => {
            let message = format!("binding {binding}: {method} {host}, revision {revision}");
            ("egress.injected", message)
        }
        Event::Noted { what, detail } => ("egress.noted", format!("{what}: {detail}")),
    };
    Some((kind, printable(&message)))
}

/// Names come from inside the box.
fn printable(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { '?' } else { c }).take(LONGEST_MESSAGE).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_event_has_a_kind_and_says_rule_and_target() {
        let table = [
            (
                r#"{"event":{"kind":"denied","by":"dns","host":"evil.example","rule":"deny *.example"}}"#,
                "egress.denied",
                "dns: evil.example, rule deny *.example",
            ),
            (
                r#"{"event":{"kind":"denied","by":"firewall","address":"192.0.2.1","port":443,"rule":"default"}}"#,
                "egress.denied",
                "firewall: 192.0.2.1 port 443, rule default",
            ),
            (
                r#"{"event":{"kind":"denied","by":"sni","host":"a.example","address":"192.0.2.1","port":443,"rule":"default"}}"#,
                "egress.denied",
                "sni: a.example (192.0.2.1) port 443, rule default",
            ),
            (
                r#"{"event":{"kind":"injected","binding":"git","host":"h.example","method":"GET","revision":2}}"#,
                "egress.injected",
                "binding git: GET h.example, revision 2",
            ),
            (
                r#"{"event":{"kind":"noted","what":"policy-changed","detail":"3 rules"}}"#,
                "egress.noted",
                "policy-changed: 3 rules",
            ),
        ];
        for (line, kind, message) in table {
            assert_eq!(event(line), Some((kind, message.to_owned())));
        }
    }

    #[test]
    fn other_lines_are_no_events_and_names_cannot_write_lines_of_their_own() {
        for line in [r#"{"ready":true}"#, "", "hello", r#"{"event":{"kind":"other"}}"#, &"x".repeat(5000)] {
            assert_eq!(event(line), None);
        }
        let long = format!(r#"{{"event":{{"kind":"denied","by":"dns","host":"a\nb{}"}}}}"#, "c".repeat(900));
        let (_, message) = event(&long).unwrap();
        assert!(message.starts_with("dns: a?b") && message.chars().count() == LONGEST_MESSAGE);
    }
}
