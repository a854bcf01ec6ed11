//! The events that only runs of code have: results, counters, errors with a traceback, raw text.
//!
//! Invariant: as for every event, one line below the 4 MiB at which clients stop reading.

use serde_json::{Map, Value};

use crate::events::{self, Stamp};
use crate::lines::char_boundary;

/// Escaping makes six bytes of one at worst.
const MAX_TEXT: usize = 640 << 10;
/// Of the representations of one result together, as they are sent.
const MAX_RESULT: usize = 3 << 20;

/// Text as the kernel wrote it, line ends and all; in several events when it is long.
pub(super) fn text(out: &mut Vec<u8>, kind: &str, text: &str, stamp: &Stamp) {
    let mut rest = text.as_bytes();
    while !rest.is_empty() {
        let (piece, tail) = rest.split_at(char_boundary(&rest[..rest.len().min(MAX_TEXT)]));
        events::text_event(out, kind, piece, stamp);
        rest = tail;
    }
}

pub(super) fn count(out: &mut Vec<u8>, count: u64, stamp: &Stamp) {
    out.extend_from_slice(format!(r#"{{"type":"execution_count","execution_count":{count}"#).as_bytes());
    close(out, stamp);
}

/// A result in all its representations; returns the names of those that were left out because they are too large.
pub(super) fn result(out: &mut Vec<u8>, bundle: &Map<String, Value>, stamp: &Stamp) -> Vec<String> {
    let mut entries: Vec<(&str, Vec<u8>)> = bundle
        .iter()
        .map(|(kind, data)| {
            let mut json = Vec::new();
            value(&mut json, data);
            (if kind == "text/plain" { "text" } else { kind.as_str() }, json)
        })
        .collect();
    // The smallest first, so that one giant does not cost the others.
    entries.sort_by_key(|(_, json)| json.len());
    let (mut room, mut omitted, mut kept) = (MAX_RESULT, Vec::new(), 0);
    let begun = out.len();
    out.extend_from_slice(br#"{"type":"result""#);
    stamped(out, stamp);
    out.extend_from_slice(br#","results":{"#);
    for (kind, json) in entries {
        if json.len() > room {
            omitted.push(kind.to_owned());
            continue;
        }
        room -= json.len();
        if kept > 0 {
            out.push(b',');
        }
        kept += 1;
        string(out, kind);
        out.push(b':');
        out.extend_from_slice(&json);
    }
    out.extend_from_slice(b"}}\n\n");
    if kept == 0 {
        out.truncate(begun);
    }
    omitted
}

/// How code failed.
#[derive(Debug, Clone, Default)]
pub(super) struct Failing {
    pub name: String,
    pub value: String,
    pub traceback: Vec<String>,
}

pub(super) fn error(out: &mut Vec<u8>, failing: &Failing, stamp: &Stamp) {
    let cut = |text: &str| text[..text.floor_char_boundary(MAX_TEXT / 4)].to_owned();
    out.extend_from_slice(br#"{"type":"error""#);
    stamped(out, stamp);
    out.extend_from_slice(br#","error":{"ename":"#);
    string(out, &cut(&failing.name));
    out.extend_from_slice(br#","evalue":"#);
    string(out, &cut(&failing.value));
    out.extend_from_slice(br#","traceback":["#);
    let mut room = MAX_TEXT / 2;
    for (at, line) in failing.traceback.iter().enumerate() {
        let line = &line[..line.floor_char_boundary(room)];
        room -= line.len();
        if at > 0 {
            out.push(b',');
        }
        string(out, line);
        if room == 0 {
            break;
        }
    }
    out.extend_from_slice(b"]}}\n\n");
}

fn stamped(out: &mut Vec<u8>, stamp: &Stamp) {
    out.extend_from_slice(br#","timestamp":"#);
    out.extend_from_slice(stamp.as_str().as_bytes());
}

fn close(out: &mut Vec<u8>, stamp: &Stamp) {
    stamped(out, stamp);
    out.extend_from_slice(b"}\n\n");
}

fn string(out: &mut Vec<u8>, text: &str) {
    out.push(b'"');
    events::escape(out, text.as_bytes());
    out.push(b'"');
}

/// JSON with the escaping of events; as deep as the parser lets anything be.
fn value(out: &mut Vec<u8>, data: &Value) {
    match data {
        Value::String(text) => string(out, text),
        Value::Array(items) => {
            out.push(b'[');
            for (at, item) in items.iter().enumerate() {
                if at > 0 {
                    out.push(b',');
                }
                value(out, item);
            }
            out.push(b']');
        }
        Value::Object(map) => {
            out.push(b'{');
            for (at, (key, item)) in map.iter().enumerate() {
                if at > 0 {
                    out.push(b',');
                }
                string(out, key);
                out.push(b':');
                value(out, item);
            }
            out.push(b'}');
        }
        plain => out.extend_from_slice(plain.to_string().as_bytes()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn parsed(out: &[u8]) -> Value {
        assert!(out.ends_with(b"}\n\n") && !out[..out.len() - 2].contains(&b'\n'));
        serde_json::from_slice(out).unwrap()
    }

    #[test]
    fn results_keep_their_kinds_and_lose_what_no_client_could_read() {
        let bundle = json!({
            "text/plain": "<Figure>\u{2028}",
            "image/png": "x".repeat(MAX_RESULT),
            "application/json": {"a": [1, 2.5, null, true, "<b>"]},
        });
        let mut out = Vec::new();
        let omitted = result(&mut out, bundle.as_object().unwrap(), &Stamp::now());
        assert_eq!(omitted, ["image/png"]);
        let event = parsed(&out);
        assert_eq!(event["results"]["text"], "<Figure>\u{2028}");
        assert_eq!(event["results"]["application/json"], bundle["application/json"]);
        let mut none = Vec::new();
        let only = json!({"text/html": "x".repeat(MAX_RESULT)});
        assert_eq!(result(&mut none, only.as_object().unwrap(), &Stamp::now()), ["text/html"]);
        assert!(none.is_empty());
    }

    #[test]
    fn long_text_and_long_tracebacks_stay_below_the_limit() {
        let mut out = Vec::new();
        text(&mut out, "stdout", &"\u{1}é".repeat(MAX_TEXT), &Stamp::now());
        let giant = "\u{1}".repeat(MAX_TEXT * 2);
        let failing =
            Failing { name: giant.clone(), value: giant.clone(), traceback: vec![giant.clone(), giant] };
        error(&mut out, &failing, &Stamp::now());
        assert!(out.split(|byte| *byte == b'\n').all(|line| line.len() < 4 << 20));
        let whole: String = String::from_utf8(out)
            .unwrap()
            .split("\n\n")
            .filter(|f| !f.is_empty())
            .map(|f| serde_json::from_str::<Value>(f).unwrap()["text"].as_str().unwrap_or("").to_owned())
            .collect();
        assert_eq!(whole, "\u{1}é".repeat(MAX_TEXT));
    }
}
