//! What must hold for any bytes. The fuzzer's targets and the test that replays their corpora share these functions.

use std::path::Path;

use bytes::Bytes;
use sandglass_agent::code::zmtp::{self, Decoder, Role};
use sandglass_agent::envs::{self, Env};
use sandglass_agent::events::{self, Stamp};
use sandglass_agent::files::multipart::{BadForm, Event, Head, MAX_HEAD, Parser};
use sandglass_agent::files::range::{self, Wanted};
use sandglass_agent::http::query::{Object, Query, decode, first_json};
use sandglass_agent::lines::LineSplitter;
use sandglass_agent::telemetry::route_of;

/// A property of any bytes.
pub type Property = fn(&[u8]);

/// Every property by the name of its target and its corpus.
pub const ALL: [(&str, Property); 6] = [
    ("range", range),
    ("multipart", multipart),
    ("stream", stream),
    ("query", query),
    ("envs", envs),
    ("kernel", kernel),
];

/// A kernel's side of a connection, after a proper greeting and as it is.
pub fn kernel(data: &[u8]) {
    let messages = |input: &[u8], size: usize| {
        let (mut decoder, mut found) = (Decoder::default(), Vec::new());
        let done =
            input.chunks(size).try_for_each(|chunk| decoder.push(chunk, |message| found.push(message)));
        (found, done)
    };
    let greeted = [&zmtp::opening(Role::Dealer), data].concat();
    for input in [data, &greeted] {
        let whole = messages(input, usize::MAX);
        assert_eq!(messages(input, 1), whole);
        let kept: usize = whole.0.iter().flat_map(|message| &message.parts).map(Vec::len).sum();
        assert!(kept <= input.len() && kept <= zmtp::MAX_MESSAGE * whole.0.len());
    }
}

/// The first eight bytes are the size of the file, the rest is the header.
pub fn range(data: &[u8]) {
    let Some((size, text)) = data.split_first_chunk::<8>() else { return };
    let size = u64::from_le_bytes(*size);
    let text = String::from_utf8_lossy(text);
    match range::parse(&text, size) {
        Wanted::Part { from, len } => {
            assert!(len > 0 && from < size && len <= size - from, "{from} {len} of {size}");
        }
        Wanted::All => panic!("a header asks for something"),
        Wanted::Malformed | Wanted::Beyond => {}
    }
    // How a header is spelled does not depend on the file.
    let malformed = |size| range::parse(&text, size) == Wanted::Malformed;
    assert_eq!(malformed(size), malformed(0));
}

type Parts = Result<Vec<(Head, Vec<u8>)>, BadForm>;

fn parts(data: &[u8], mut size: impl FnMut() -> usize) -> Parts {
    let mut parser = Parser::new("multipart/form-data; boundary=B")?;
    let mut done = Vec::new();
    let mut open: Option<(Head, Vec<u8>)> = None;
    let mut rest = data;
    while !rest.is_empty() {
        let (chunk, after) = rest.split_at(size().clamp(1, rest.len()));
        rest = after;
        parser.push(Bytes::copy_from_slice(chunk));
        while let Some(event) = parser.next()? {
            match event {
                Event::Begin(head) => assert!(open.replace((head, Vec::new())).is_none(), "a part in a part"),
                Event::Data(bytes) => {
                    assert!(!bytes.is_empty());
                    open.as_mut().expect("data belongs to a part").1.extend_from_slice(&bytes);
                }
                Event::End => done.push(open.take().expect("only a part that has begun ends")),
            }
        }
    }
    parser.finish().map(|()| done)
}

/// The first byte says how the rest, a form, is cut.
pub fn multipart(data: &[u8]) {
    // The header of the request, which a client writes as well.
    let _ = Parser::new(&String::from_utf8_lossy(data));
    let _ = Parser::new(&format!("multipart/form-data; {}", String::from_utf8_lossy(data)));
    let Some((seed, form)) = data.split_first() else { return };
    let whole = parts(form, || usize::MAX);
    assert_eq!(parts(form, || 1), whole);
    let mut state = usize::from(*seed);
    let cut = parts(form, || {
        state = (state * 1_103_515_245 + 12_345) % (1 << 31);
        1 + state % 7
    });
    assert_eq!(cut, whole);
    let content: usize = whole.iter().flatten().map(|(_, content)| content.len()).sum();
    assert!(content <= form.len());
    for (head, content) in whole.into_iter().flatten() {
        // Bytes that are no text take three for one.
        assert!(head.name.len() <= 3 * MAX_HEAD);
        if head.name == "metadata" {
            let _ = first_json(&content).and_then(Object::new).and_then(|object| object.string("path"));
        }
    }
}

fn frames(chunks: &[&[u8]]) -> (Vec<u8>, Vec<Vec<u8>>) {
    let (mut out, mut lines, stamp) = (Vec::new(), Vec::new(), Stamp::now());
    let mut splitter = LineSplitter::default();
    let mut line = |text: &[u8]| {
        events::line(&mut out, "stdout", text, &stamp);
        lines.push(text.to_vec());
    };
    for chunk in chunks {
        splitter.push(chunk, &mut line);
    }
    splitter.finish(&mut line);
    (out, lines)
}

/// The first byte says where the rest, the output of a program, is cut in two.
pub fn stream(data: &[u8]) {
    let Some((at, output)) = data.split_first() else { return };
    let (head, tail) = output.split_at(usize::from(*at).min(output.len()));
    let (bytes, lines) = frames(&[output]);
    assert_eq!(frames(&[head, tail]).1, lines);
    let text = std::str::from_utf8(&bytes).expect("a stream is text");
    let mut texts = Vec::new();
    for frame in text.split_terminator("\n\n") {
        assert!(!frame.contains(['\n', '\r', '\u{85}', '\u{2028}', '\u{2029}']), "{frame:?}");
        let value: serde_json::Value = serde_json::from_str(frame).expect("a frame is JSON");
        assert_eq!(value["type"], "stdout");
        assert!(value["timestamp"].is_u64());
        texts.push(value["text"].as_str().expect("text is a string").to_owned());
    }
    assert_eq!(texts.len(), lines.len());
    for (text, line) in texts.iter().zip(&lines) {
        match std::str::from_utf8(line) {
            Ok("") => assert_eq!(text, "\n"),
            Ok(line) => assert_eq!(text, line),
            Err(_) => assert!(text.contains('\u{fffd}')),
        }
    }
    let mut error = Vec::new();
    events::error(&mut error, &String::from_utf8_lossy(output), "x", &Stamp::now());
    let error: serde_json::Value = serde_json::from_slice(&error).expect("an error is JSON");
    assert_eq!(error["error"]["evalue"].as_str(), Some(&*String::from_utf8_lossy(output)));
}

/// A request target and, as bytes, a body.
pub fn query(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    let (path, raw) = text.split_once('?').unwrap_or((&text, ""));
    let _ = route_of(path);
    let query = Query::parse(Some(raw));
    for pair in raw.split('&').filter(|pair| !pair.is_empty()) {
        let name = decode(pair.split('=').next().unwrap_or(""), true);
        let first = query.get(&name).expect("a name that is there is found");
        assert_eq!(query.all(&name).next(), Some(first));
        assert_eq!(query.required(&name).is_ok(), !first.is_empty());
    }
    // What is encoded completely decodes to what it was.
    let encoded: String = text.bytes().map(|byte| format!("%{byte:02x}")).collect();
    assert_eq!(decode(&encoded, true), text);
    if let Ok(object) = first_json(data).and_then(Object::new) {
        let _ = (object.string("path"), object.integer("mode"), object.flag("background"));
    }
}

/// The file of persistent variables, and a path that uses them.
pub fn envs(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    let daemon = Env::from([("HOME".to_owned(), "/root".to_owned())]);
    let env = envs::parse(&text, &daemon);
    for (name, value) in &env {
        assert!(!name.is_empty() && !name.contains(['=', '\0', '\n']), "{name:?}");
        assert!(!value.contains('\0'));
    }
    if let Ok(path) = envs::expand_path(&text, &env, "/root") {
        let clean = envs::clean(Path::new("/work"), &path);
        assert!(clean.is_absolute());
        assert_eq!(envs::clean(Path::new("/"), &clean.to_string_lossy()), clean);
    }
}
