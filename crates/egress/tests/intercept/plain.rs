//! Plain HTTP: each request of a connection is judged.

use http::{Method, StatusCode};
use sandglass_egress::policy::Action;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::stack::{NAME, SECRET, SERVER, Seen, Stack, ask, bearer, get, recorder};

const HTTP: &str = "192.0.2.10:80";

async fn stack() -> (Stack, Seen, std::net::SocketAddr) {
    let mut stack = Stack::new();
    let (seen, handler) = recorder();
    stack.serve(HTTP, None, handler).await;
    let through = stack.intercept(HTTP).await;
    (stack, seen, through)
}

/// Writes bytes, reads until the end.
async fn raw(through: std::net::SocketAddr, bytes: &str) -> String {
    let mut stream = TcpStream::connect(through).await.unwrap();
    stream.write_all(bytes.as_bytes()).await.unwrap();
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer).await;
    String::from_utf8_lossy(&answer).into_owned()
}

#[tokio::test]
async fn an_allowed_host_passes_and_another_is_told_why_not() {
    let (stack, seen, through) = stack().await;
    let answer = ask(TcpStream::connect(through).await.unwrap(), get(NAME, "/a%2Fb?c=d")).await;
    assert_eq!(answer.status(), StatusCode::OK);
    assert_eq!(seen.last().0.uri(), "/a%2Fb?c=d");
    let answer = ask(TcpStream::connect(through).await.unwrap(), get("other.example.com", "/")).await;
    assert_eq!(answer.status(), StatusCode::FORBIDDEN);
    assert_eq!(answer.body(), "\"other.example.com\" is denied by this sandbox's egress policy (default)\n");
    assert_eq!(seen.count(), 1);
    let expected = r#"[{"kind":"denied","by":"http","host":"other.example.com","address":"192.0.2.10","port":80,"rule":"default"}]"#;
    assert_eq!(stack.told(), expected);
}

#[tokio::test]
async fn every_request_of_a_connection_is_judged() {
    let (_stack, seen, through) = stack().await;
    let both = format!(
        "GET /1 HTTP/1.1\r\nHost: {NAME}\r\n\r\nGET /2 HTTP/1.1\r\nHost: other.example.com\r\n\r\nGET /3 HTTP/1.1\r\nHost: {NAME}\r\n\r\n"
    );
    let answer = raw(through, &both).await;
    assert!(answer.starts_with("HTTP/1.1 200 OK\r\n"), "{answer}");
    assert_eq!(answer.matches("HTTP/1.1 403 Forbidden").count(), 1, "{answer}");
    assert_eq!(answer.matches("HTTP/1.1").count(), 2, "{answer}");
    assert_eq!(seen.count(), 1);
}

#[tokio::test]
async fn a_connection_outlives_the_answer_of_the_resolver() {
    let (stack, seen, through) = stack().await;
    let mut stream = TcpStream::connect(through).await.unwrap();
    let request = format!("GET / HTTP/1.1\r\nHost: {NAME}\r\n\r\n");
    for number in 1..=2 {
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut answer = Vec::new();
        while !answer.ends_with(b"hello") {
            stream.read_buf(&mut answer).await.unwrap();
        }
        assert_eq!(seen.count(), number);
        stack.world.led.lock().unwrap().clear();
    }
    assert!(raw(through, &request).await.starts_with("HTTP/1.1 403"));
}

#[tokio::test]
async fn shapes_that_two_servers_would_read_differently_are_refused() {
    let (_stack, seen, through) = stack().await;
    let cases = [
        format!("GET http://other.example.com/ HTTP/1.1\r\nHost: {NAME}\r\n\r\n"),
        format!("GET http://{NAME}/ HTTP/1.1\r\nHost: other.example.com\r\n\r\n"),
        format!("GET / HTTP/1.1\r\nHost: {NAME}\r\nHost: {NAME}\r\n\r\n"),
        format!("GET / HTTP/1.1\r\nHost: {NAME}\r\nHost: other.example.com\r\n\r\n"),
        format!("GET / HTTP/1.1\r\nHost: {NAME}@other.example.com\r\n\r\n"),
        "GET / HTTP/1.1\r\n\r\n".to_owned(),
        "GET / HTTP/1.0\r\n\r\n".to_owned(),
        format!("CONNECT {NAME}:80 HTTP/1.1\r\nHost: {NAME}\r\n\r\n"),
        format!("POST / HTTP/1.1\r\nHost: {NAME}\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello"),
        format!("POST / HTTP/1.1\r\nHost: {NAME}\r\nTransfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n"),
        format!("POST / HTTP/1.1\r\nHost: {NAME}\r\nTransfer-Encoding : chunked\r\n\r\n0\r\n\r\n"),
        format!("GET / HTTP/1.1\r\nHost: {NAME}\r\nX: a\r\n b\r\n\r\n"),
        format!("GET / HTTP/1.1\r\n Host: {NAME}\r\n\r\n"),
        format!("GET / HTTP/1.1\r\nHost: {NAME}\r\nA: {}\r\n\r\n", "x".repeat(100_000)),
        "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_owned(),
    ];
    for case in cases {
        let answer =
            raw(through, &format!("{case}GET /next HTTP/1.1\r\nHost: {NAME}\r\nConnection: close\r\n\r\n"))
                .await;
        let status = answer.split(' ').nth(1).unwrap_or("none");
        assert!(status == "none" || status.starts_with('4'), "{case}: {answer}");
    }
    assert_eq!(seen.count(), 0);
}

#[tokio::test]
async fn of_two_lengths_one_is_passed_on_and_the_connection_ends() {
    let (_stack, seen, through) = stack().await;
    for lengths in [
        "Transfer-Encoding: chunked\r\nContent-Length: 50",
        "Content-Length: 50\r\nTransfer-Encoding: chunked",
    ] {
        let before = seen.count();
        let hidden = format!("GET /hidden HTTP/1.1\r\nHost: {NAME}\r\n\r\n");
        let answer = raw(
            through,
            &format!("POST / HTTP/1.1\r\nHost: {NAME}\r\n{lengths}\r\n\r\n3\r\nabc\r\n0\r\n\r\n{hidden}"),
        )
        .await;
        assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
        assert_eq!(seen.count(), before + 1);
        let (got, body) = seen.last();
        assert_eq!(body, "abc");
        assert!(!got.headers().contains_key("content-length"));
    }
}

#[tokio::test]
async fn the_target_may_name_the_host_itself() {
    let (_stack, seen, through) = stack().await;
    let answer =
        raw(through, &format!("GET http://{NAME}/x?y HTTP/1.1\r\nHost: {NAME}\r\nConnection: close\r\n\r\n"))
            .await;
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    assert_eq!(seen.last().0.uri(), "/x?y");
    assert_eq!(seen.header("host").unwrap(), NAME);
}

#[tokio::test]
async fn an_allowed_address_needs_no_name() {
    let (stack, seen, through) = stack().await;
    assert!(
        raw(through, &format!("GET / HTTP/1.1\r\nHost: {SERVER}\r\nConnection: close\r\n\r\n"))
            .await
            .starts_with("HTTP/1.1 403")
    );
    stack.world.addresses.lock().unwrap().insert(SERVER.parse().unwrap(), Action::Allow);
    assert!(
        raw(through, &format!("GET / HTTP/1.1\r\nHost: {SERVER}\r\nConnection: close\r\n\r\n"))
            .await
            .starts_with("HTTP/1.1 200")
    );
    assert!(raw(through, "GET / HTTP/1.0\r\n\r\n").await.starts_with("HTTP/1.0 200"));
    assert_eq!(seen.header("host").unwrap(), SERVER);
    assert!(
        raw(through, "GET / HTTP/1.1\r\nHost: 192.0.2.77\r\nConnection: close\r\n\r\n")
            .await
            .starts_with("HTTP/1.1 403")
    );
}

/// A request and its answer on a connection that is kept.
async fn kept(through: std::net::SocketAddr, request: &str) -> TcpStream {
    let mut stream = TcpStream::connect(through).await.unwrap();
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut answer = Vec::new();
    while !answer.ends_with(b"hello") {
        assert!(stream.read_buf(&mut answer).await.unwrap() > 0);
    }
    assert!(answer.starts_with(b"HTTP/1.") && answer[8..].starts_with(b" 200"));
    stream
}

#[tokio::test]
async fn connections_to_an_address_end_when_it_is_not_allowed_any_more() {
    let (stack, _seen, through) = stack().await;
    let address = SERVER.parse().unwrap();
    stack.world.addresses.lock().unwrap().insert(address, Action::Allow);
    let literal = format!("GET / HTTP/1.1\r\nHost: {SERVER}\r\n\r\n");
    let _one = kept(through, &literal).await;
    let _two = kept(through, "GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n").await;
    let named = kept(through, &format!("GET / HTTP/1.1\r\nHost: {NAME}\r\n\r\n")).await;
    let silent = TcpStream::connect(through).await.unwrap();
    while stack.interceptors[0].connections() < 4 {
        tokio::task::yield_now().await;
    }
    assert_eq!(stack.interceptors[0].recheck(), 0);
    stack.world.addresses.lock().unwrap().remove(&address);
    assert_eq!(stack.interceptors[0].recheck(), 2, "the name is still allowed there");
    while stack.interceptors[0].connections() > 2 {
        tokio::task::yield_now().await;
    }
    stack.world.addresses.lock().unwrap().insert(address, Action::Deny);
    assert_eq!(stack.interceptors[0].recheck(), 1);
    drop((named, silent));
}

#[tokio::test]
async fn nameless_connections_end_when_their_address_is_denied() {
    let mut stack = Stack::new();
    let listener = stack.listen(HTTP).await;
    stack.own(tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        let (mut read, mut write) = stream.split();
        let _ = tokio::io::copy(&mut read, &mut write).await;
    }));
    let through = stack.intercept(HTTP).await;
    stack.world.open.store(true, std::sync::atomic::Ordering::Relaxed);
    let mut stream = TcpStream::connect(through).await.unwrap();
    stream.write_all(b"EHLO\r\n").await.unwrap();
    stream.read_exact(&mut [0; 6]).await.unwrap();
    assert_eq!(stack.interceptors[0].recheck(), 0);
    stack.world.open.store(false, std::sync::atomic::Ordering::Relaxed);
    assert_eq!(stack.interceptors[0].recheck(), 1);
}

#[tokio::test]
async fn plain_bindings_need_a_name_that_has_led_there() {
    let (stack, seen, through) = stack().await;
    stack.write(Method::POST, &bearer(r#","schemes":["http"]"#), StatusCode::CREATED);
    let request = format!("GET / HTTP/1.1\r\nHost: {NAME}\r\nConnection: close\r\n\r\n");
    assert!(raw(through, &request).await.starts_with("HTTP/1.1 200"));
    assert_eq!(seen.header("authorization").unwrap(), format!("Bearer {SECRET}"));
    // The sandbox's owner allows an address, which is no reason to send it a credential for a name.
    stack.world.led.lock().unwrap().clear();
    stack.world.addresses.lock().unwrap().insert(SERVER.parse().unwrap(), Action::Allow);
    let answer = raw(through, &request).await;
    assert!(answer.starts_with("HTTP/1.1 403") && answer.contains("withheld"), "{answer}");
    assert_eq!(seen.count(), 1);
}

/// Time stands still while anything is left to do, and jumps to the next deadline when nothing is.
#[tokio::test(start_paused = true)]
async fn who_says_nothing_is_not_waited_for() {
    let mut stack = Stack::bound();
    for (destination, beginning) in [
        ("192.0.2.10:80", ""),
        ("192.0.2.10:80", "GET / HTTP/1.1\r\nHost: "),
        ("192.0.2.10:443", ""),
        ("192.0.2.10:443", "\u{16}\u{3}\u{1}"),
        ("192.0.2.10:8080", ""),
    ] {
        let through = stack.intercept(destination).await;
        raw(through, beginning).await;
    }
}
