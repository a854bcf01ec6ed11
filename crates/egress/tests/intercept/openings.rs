//! How connections begin where everything is allowed that is not denied: whatever could name a denied host is read, or refused.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use http::StatusCode;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::stack::{NAME, Stack, ask, get, recorder};

const PLACE: &str = "192.0.2.10:443";
const DENIED: &str = "denied.example.com";

/// Nothing is lent, everything is allowed but one name; the server says what it gets.
async fn open() -> (Stack, std::net::SocketAddr) {
    let mut stack = Stack::bound();
    stack.world.open.store(true, Ordering::Relaxed);
    stack.world.denied.lock().unwrap().insert(DENIED.to_owned());
    let listener = stack.listen(PLACE).await;
    stack.own(tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            tokio::spawn(async move {
                let (mut read, mut write) = stream.split();
                tokio::io::copy(&mut read, &mut write).await
            });
        }
    }));
    let through = stack.intercept(PLACE).await;
    (stack, through)
}

/// What comes back until the end; nothing if the connection is reset at once.
async fn told(through: std::net::SocketAddr, bytes: &[u8]) -> String {
    let mut stream = TcpStream::connect(through).await.unwrap();
    stream.write_all(bytes).await.unwrap();
    stream.shutdown().await.unwrap_or_default();
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer).await;
    String::from_utf8_lossy(&answer).into_owned()
}

#[tokio::test]
async fn requests_are_read_whatever_their_method_and_however_they_begin() {
    let (_stack, through) = open().await;
    for beginning in [
        "\r\n\r\nGET / HTTP/1.1",
        "PROPFIND /a HTTP/1.1",
        "XYZZY-XYZZY-XYZZY-XYZZY-XYZZY-XYZZY-XYZZY / HTTP/1.1",
    ] {
        let answer = told(through, format!("{beginning}\r\nHost: {DENIED}\r\n\r\n").as_bytes()).await;
        assert!(answer.starts_with("HTTP/1.1 403 Forbidden"), "{beginning:?}: {answer}");
    }
}

#[tokio::test]
async fn what_servers_may_read_in_ways_of_their_own_is_refused() {
    let (stack, through) = open().await;
    let host = format!("\r\nHost: {DENIED}\r\n\r\n");
    let cases = [
        (&b"\x15\x03\x03\x00\x02\x01\x00\x16\x03\x01"[..], "sni"),
        (b"\x14\x03\x03\x00\x01\x01\x16\x03\x01", "sni"),
        (b"\x80\x2e\x01\x03\x01\x00\x15", "sni"),
        (b"GET\x0b/\x0bHTTP/1.1", "http"),
        (b" GET / HTTP/1.1", "http"),
        (b"GET / HTTP/1.1 ", "http"),
        (b"GET /", "http"),
    ];
    for (number, (beginning, by)) in cases.iter().enumerate() {
        let answer = told(through, &[beginning, host.as_bytes()].concat()).await;
        assert_eq!(answer, "", "{beginning:?}");
        let told = stack.told();
        assert_eq!(told.matches("that can be read").count(), number + 1, "{told}");
        assert!(told.rsplit("kind").next().unwrap().contains(&format!(r#""by":"{by}""#)), "{told}");
    }
}

#[tokio::test]
async fn protocols_without_names_pass() {
    let (stack, through) = open().await;
    for banner in ["SSH-2.0-OpenSSH_9.2\r\n", "\0\0\0\u{8}\u{4}", "QUIT\r\n"] {
        assert_eq!(told(through, banner.as_bytes()).await, banner);
    }
    assert_eq!(stack.told(), "[]");
}

#[tokio::test]
async fn a_request_may_have_a_longer_head_than_is_looked_at() {
    let mut stack = Stack::new();
    let (seen, handler) = recorder();
    stack.serve(PLACE, None, Arc::clone(&handler)).await;
    let through = stack.intercept(PLACE).await;
    let mut request = get(NAME, "/");
    for number in 0..6 {
        let name = http::HeaderName::try_from(format!("x-long-{number}")).unwrap();
        request.headers_mut().insert(name, "y".repeat(8 << 10).parse().unwrap());
    }
    let answer = ask(TcpStream::connect(through).await.unwrap(), request).await;
    assert_eq!(answer.status(), StatusCode::OK);
    assert_eq!(seen.count(), 1);
}

#[tokio::test]
async fn a_hello_for_an_address_counts_for_that_address_only() {
    let (stack, through) = open().await;
    let own = hello("192.0.2.10");
    let mut stream = TcpStream::connect(through).await.unwrap();
    stream.write_all(&own).await.unwrap();
    let mut answer = vec![0; own.len()];
    stream.read_exact(&mut answer).await.unwrap();
    assert_eq!(answer, own);
    drop(stream);
    let mut stream = TcpStream::connect(through).await.unwrap();
    stream.write_all(&hello("192.0.2.77")).await.unwrap();
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer).await;
    assert_eq!(answer, [21, 3, 3, 0, 2, 2, 49]);
    assert!(stack.told().contains("the host is another address"));
}

/// A hello that says this name, which may be an address: clients of a library would not say one.
fn hello(name: &str) -> Vec<u8> {
    let length = name.len() as u8;
    let list = [&[0, length + 3, 0, 0, length][..], name.as_bytes()].concat();
    let sni = [&[0, 0, 0, list.len() as u8][..], &list].concat();
    let more = b"\x00\x0d\x00\x04\x00\x02\x04\x03\x00\x0a\x00\x04\x00\x02\x00\x1d";
    let extensions = [&sni[..], more].concat();
    let mut body = vec![3, 3];
    body.extend([7; 32]);
    body.extend([0, 0, 2, 0xc0, 0x2b, 1, 0, 0, extensions.len() as u8]);
    body.extend(extensions);
    let mut record = vec![22, 3, 1, 0, body.len() as u8 + 4, 1, 0, 0, body.len() as u8];
    record.extend(body);
    record
}

/// A server's hello that asks for another one of the client's.
fn retry() -> Vec<u8> {
    let random = "cf21ad74e59a6111be1d8c021e65b891c2a211167abb8c5e079e09e2c8a8339c";
    let random = (0..32).map(|at| u8::from_str_radix(&random[2 * at..2 * at + 2], 16).unwrap());
    [&[22, 3, 3, 0, 60, 2, 0, 0, 56, 3, 3][..], &random.collect::<Vec<_>>(), &[0; 22]].concat()
}

#[tokio::test]
async fn a_second_hello_is_passed_on_only_if_it_names_the_same_host() {
    let mut stack = Stack::new();
    let listener = stack.listen(PLACE).await;
    let first = hello(NAME);
    let length = first.len();
    let seen = Arc::new(std::sync::Mutex::new(Vec::new()));
    let notes = Arc::clone(&seen);
    stack.own(tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            stream.read_exact(&mut vec![0; length]).await.unwrap();
            for part in retry().chunks(44) {
                stream.write_all(part).await.unwrap();
                tokio::task::yield_now().await;
            }
            let mut rest = Vec::new();
            let _ = stream.read_to_end(&mut rest).await;
            notes.lock().unwrap().push(rest);
        }
    }));
    let through = stack.intercept(PLACE).await;
    let changed = [20, 3, 3, 0, 1, 1];
    for (again, passes) in [
        (hello(NAME), true),
        (hello(DENIED), false),
        ([&changed[..], &hello(NAME)].concat(), true),
        ([&changed[..], &hello(DENIED)].concat(), false),
    ] {
        for ahead in [false, true] {
            let before = seen.lock().unwrap().len();
            let mut stream = TcpStream::connect(through).await.unwrap();
            if ahead {
                stream.write_all(&[&first[..], &again].concat()).await.unwrap();
            } else {
                stream.write_all(&first).await.unwrap();
            }
            if !ahead {
                let mut answer = vec![0; retry().len()];
                stream.read_exact(&mut answer).await.unwrap();
                assert_eq!(answer, retry());
                stream.write_all(&again).await.unwrap();
            }
            let _ = stream.shutdown().await;
            let _ = stream.read_to_end(&mut Vec::new()).await;
            while seen.lock().unwrap().len() == before {
                tokio::task::yield_now().await;
            }
            let rest = seen.lock().unwrap().last().cloned().unwrap();
            assert_eq!(rest, if passes { again.clone() } else { Vec::new() });
        }
    }
    assert_eq!(stack.told().matches("the second hello").count(), 4);
}
