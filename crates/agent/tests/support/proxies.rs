//! `/proxy/{port}` as clients use it: streams without delay, empty answers with their length, bodies both ways.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::mpsc;

use serde_json::json;

use crate::support::{Agent, PATIENCE, chunked, form, parse};

/// Serves one connection: reads a head, then does what it is told.
fn server(serve: impl FnOnce(TcpStream, String) + Send + 'static) -> (u16, std::thread::JoinHandle<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let thread = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let head = read_until(&mut stream, b"\r\n\r\n");
        serve(stream, String::from_utf8(head).unwrap());
    });
    (port, thread)
}

fn read_until(stream: &mut TcpStream, end: &[u8]) -> Vec<u8> {
    let mut seen = Vec::new();
    while !seen.ends_with(end) {
        let mut byte = [0];
        stream.read_exact(&mut byte).unwrap();
        seen.push(byte[0]);
    }
    seen
}

#[test]
fn an_event_stream_arrives_event_by_event() {
    let agent = Agent::start();
    let (go, went) = mpsc::channel();
    let (port, thread) = server(move |mut stream, _| {
        stream
            .write_all(
                b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n",
            )
            .unwrap();
        for n in 0..3 {
            // The next is sent when the one before has arrived at the other end.
            let event = format!("data: {n}\n\n");
            write!(stream, "{:x}\r\n{event}\r\n", event.len()).unwrap();
            went.recv_timeout(PATIENCE).unwrap();
        }
        stream.write_all(b"0\r\n\r\n").unwrap();
    });
    let mut stream = agent.connect();
    write!(stream, "GET /proxy/{port}/events HTTP/1.1\r\nHost: b\r\nAccept: text/event-stream\r\n\r\n")
        .unwrap();
    let head = String::from_utf8(read_until(&mut stream, b"\r\n\r\n")).unwrap().to_ascii_lowercase();
    assert!(head.contains("content-type: text/event-stream\r\n"), "{head}");
    for n in 0..3 {
        read_until(&mut stream, format!("data: {n}\n\n\r\n").as_bytes());
        go.send(()).unwrap();
    }
    read_until(&mut stream, b"0\r\n\r\n");
    thread.join().unwrap();
}

#[test]
fn empty_answers_keep_their_length() {
    let agent = Agent::start();
    for (answer, status, length) in [
        ("HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", 200, Some("0")),
        ("HTTP/1.1 204 No Content\r\n\r\n", 204, None),
        ("HTTP/1.1 304 Not Modified\r\nETag: \"a\"\r\n\r\n", 304, None),
    ] {
        let (port, thread) = server(move |mut stream, _| stream.write_all(answer.as_bytes()).unwrap());
        let got = agent.get(&format!("/proxy/{port}/x"));
        assert_eq!(
            (got.status, got.header("content-length"), got.body.len()),
            (status, length, 0),
            "{}",
            got.head
        );
        assert!(!got.head.to_ascii_lowercase().contains("chunked"), "{}", got.head);
        thread.join().unwrap();
    }
    let (port, thread) = server(|mut stream, head| {
        assert!(head.starts_with("HEAD /file?a=b HTTP/1.1\r\n"), "{head}");
        stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 12345\r\n\r\n").unwrap();
    });
    let mut stream = agent.connect();
    write!(stream, "HEAD /proxy/{port}/file?a=b HTTP/1.1\r\nHost: b\r\nConnection: close\r\n\r\n").unwrap();
    let mut raw = Vec::new();
    stream.read_to_end(&mut raw).unwrap();
    assert_eq!(parse(&raw).header("content-length"), Some("12345"));
    thread.join().unwrap();
}

#[test]
fn the_own_port_serves_the_same_bytes() {
    let agent = Agent::start();
    let own = format!("/proxy/{}", agent.port);
    let stream = agent.post(&format!("{own}/command"), &json!({ "command": "printf 'a\\n\\nb'; exit 3" }));
    assert_eq!(stream.golden(), agent.shell("printf 'a\\n\\nb'; exit 3").golden());
    let path = agent.path("up").display().to_string();
    let metadata = json!({ "path": path }).to_string();
    let (kind, body) =
        form(&[("metadata", Some("metadata"), metadata.as_bytes()), ("file", Some("f"), &[7; 100_000])]);
    let headers = [("Content-Type", kind.as_str()), ("Transfer-Encoding", "chunked")];
    let uploaded = agent.send("POST", &format!("{own}/files/upload"), &headers, &chunked(&body, 1000));
    assert_eq!((uploaded.status, uploaded.header("content-length")), (200, Some("0")), "{}", uploaded.text());
    let part =
        agent.send("GET", &format!("{own}/files/download?path={path}"), &[("Range", "bytes=5-9")], b"");
    assert_eq!(
        (part.status, part.header("content-range"), &part.body[..]),
        (206, Some("bytes 5-9/100000"), &[7; 5][..])
    );
    let gone = agent.delete(&format!("{own}/files?path={path}"));
    assert_eq!((gone.status, gone.header("content-length")), (200, Some("0")));
}

#[test]
fn a_target_that_breaks_off_breaks_the_answer_off() {
    let agent = Agent::start();
    let (port, thread) = server(|mut stream, _| {
        stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf").unwrap();
    });
    let got = agent.get(&format!("/proxy/{port}/x"));
    assert_eq!((got.status, got.header("content-length"), got.text().as_str()), (200, Some("100"), "half"));
    thread.join().unwrap();
    let (port, thread) = server(|mut stream, _| stream.write_all(b"this is no HTTP\r\n\r\n").unwrap());
    let got = agent.get(&format!("/proxy/{port}/x"));
    assert_eq!((got.status, got.text().as_str()), (502, "Bad Gateway"));
    thread.join().unwrap();
}

#[test]
fn the_client_is_named_by_the_first_address_that_is_known() {
    let agent = Agent::start();
    for (given, named) in [
        (vec![("X-Forwarded-For", "1.2.3.4, 5.6.7.8"), ("X-Real-IP", "9.9.9.9")], "1.2.3.4"),
        (vec![("X-Real-IP", "9.9.9.9")], "9.9.9.9"),
        (vec![], "127.0.0.1"),
    ] {
        let (port, thread) = server(move |mut stream, head| {
            let head = head.to_ascii_lowercase();
            assert_eq!(head.matches("x-forwarded-for:").count(), 1);
            assert!(head.contains(&format!("x-forwarded-for: {named}\r\n")), "{head}");
            assert!(
                head.contains("host: box\r\n") && head.contains("opensandbox-egress-auth: kept\r\n"),
                "{head}"
            );
            stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n").unwrap();
        });
        let headers: Vec<_> = given.into_iter().chain([("OPENSANDBOX-EGRESS-AUTH", "kept")]).collect();
        assert_eq!(agent.send("GET", &format!("/proxy/{port}/policy"), &headers, b"").status, 200);
        thread.join().unwrap();
    }
}
