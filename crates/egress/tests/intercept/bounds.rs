//! What one sandbox can make the interceptor hold, and for how long.

use std::sync::Arc;

use bytes::Bytes;
use futures_util::StreamExt;
use http::{Method, Request, Response, StatusCode};
use http_body::Frame;
use http_body_util::{BodyExt, StreamBody};
use hyper_util::rt::{TokioExecutor, TokioIo};
use sandglass_egress::intercept::Room;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::stack::{Handler, NAME, SECRET, Stack, ask, get, recorder, text};

const HTTP: &str = "192.0.2.10:80";
const HTTPS: &str = "192.0.2.10:443";

/// A request for the sandbox's host on a connection that is kept, up to the end of what is expected.
async fn begin(through: std::net::SocketAddr, expected: &[u8]) -> TcpStream {
    let mut stream = TcpStream::connect(through).await.unwrap();
    stream.write_all(format!("GET / HTTP/1.1\r\nHost: {NAME}\r\n\r\n").as_bytes()).await.unwrap();
    let mut answer = Vec::new();
    while !answer.ends_with(expected) {
        assert!(stream.read_buf(&mut answer).await.unwrap() > 0, "{}", String::from_utf8_lossy(&answer));
    }
    stream
}

/// Begins an answer and never ends it.
fn endless() -> Handler {
    Arc::new(|_| {
        Box::pin(async {
            let first = futures_util::stream::iter([Ok(Frame::data(Bytes::from_static(b"first")))]);
            Response::new(StreamBody::new(first.chain(futures_util::stream::pending())).boxed_unsync())
        })
    })
}

/// Time stands still while anything is left to do, and jumps to the next deadline when nothing is.
#[tokio::test(start_paused = true)]
async fn connections_without_room_wait_and_are_told() {
    let mut stack = Stack::new();
    stack.room = Room::of(2 * (128 << 10), 1 << 20);
    let (seen, handler) = recorder();
    stack.serve(HTTP, None, handler).await;
    let through = stack.intercept(HTTP).await;
    let first = begin(through, b"hello").await;
    let _second = begin(through, b"hello").await;
    let answer = ask(TcpStream::connect(through).await.unwrap(), get(NAME, "/")).await;
    assert_eq!(answer.status(), StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(answer.headers()["retry-after"], "1");
    assert_eq!(answer.body(), "this sandbox has too many connections at a time; try again later\n");
    let waiting = tokio::spawn(async move { begin(through, b"hello").await });
    drop(first);
    waiting.await.unwrap();
    assert_eq!(seen.count(), 3);
}

#[tokio::test(start_paused = true)]
async fn intercepted_connections_without_room_end_with_an_alert() {
    let mut stack = Stack::bound();
    stack.room = Room::of(128 << 10, 1 << 20);
    let (seen, handler) = recorder();
    let tls = stack.identity(NAME, &[]);
    stack.serve(HTTPS, Some(tls), handler).await;
    let through = stack.intercept(HTTPS).await;
    let _first = stack.inside(through, &[]).await;
    let error = stack.handshake(through, NAME, stack.authority.certificate(), &[]).await.unwrap_err();
    assert!(error.to_string().contains("InternalError"), "{error}");
    assert_eq!(seen.count(), 0);
}

#[tokio::test(start_paused = true)]
async fn requests_without_room_wait_and_are_told() {
    let mut stack = Stack::new();
    stack.room = Room::of(1 << 20, 192 << 10);
    stack.serve(HTTP, None, endless()).await;
    let through = stack.intercept(HTTP).await;
    let first = begin(through, b"first\r\n").await;
    let answer = ask(TcpStream::connect(through).await.unwrap(), get(NAME, "/")).await;
    assert_eq!(answer.status(), StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(answer.body(), "this sandbox has too many requests at a time; try again later\n");
    drop(first);
    begin(through, b"first\r\n").await;
}

#[tokio::test]
async fn streams_without_room_are_told_at_once() {
    let mut stack = Stack::bound();
    stack.room = Room::of(2 << 20, 192 << 10);
    let tls = stack.identity(NAME, &[b"h2"]);
    stack.serve(HTTPS, Some(tls), endless()).await;
    let through = stack.intercept(HTTPS).await;
    let stream = stack.inside(through, &[b"h2"]).await;
    let (mut sender, connection) =
        hyper::client::conn::http2::handshake(TokioExecutor::new(), TokioIo::new(stream)).await.unwrap();
    let driver = tokio::spawn(connection);
    let request = || Request::get(format!("https://{NAME}/")).body(text("")).unwrap();
    let first = sender.send_request(request()).await.unwrap();
    assert_eq!(first.status(), StatusCode::OK);
    assert_eq!(sender.send_request(request()).await.unwrap().status(), StatusCode::SERVICE_UNAVAILABLE);
    drop(first);
    while sender.send_request(request()).await.unwrap().status() != StatusCode::OK {
        tokio::task::yield_now().await;
    }
    driver.abort();
}

/// A vault that replaces `{{T}}` in bodies, and a connection to a server that notes them.
async fn replacing(value: &str) -> (Stack, crate::stack::Seen, std::net::SocketAddr) {
    let mut stack = Stack::new();
    let vault = format!(
        r#"{{"credentials":[{{"name":"token","source":{{"value":"{value}"}}}}],
            "bindings":[{{"name":"api","match":{{"hosts":["{NAME}"]}},"auth":{{"type":"passthrough",
              "substitutions":[{{"credential":"token","placeholder":"{{{{T}}}}","in":["path","header","body"]}}]}}}}]}}"#
    );
    stack.write(Method::POST, &vault, StatusCode::CREATED);
    let (seen, handler) = recorder();
    let tls = stack.identity(NAME, &[]);
    stack.serve(HTTPS, Some(tls), handler).await;
    let through = stack.intercept(HTTPS).await;
    (stack, seen, through)
}

#[tokio::test(start_paused = true)]
async fn a_body_that_is_held_has_its_time() {
    let (stack, seen, through) = replacing(SECRET).await;
    // As many as may be held, so that none of them keeps its place.
    for _ in 0..9 {
        let mut stream = stack.inside(through, &[]).await;
        let head =
            format!("POST / HTTP/1.1\r\nHost: {NAME}\r\nContent-Length: 50\r\n\r\n{{{{T}}}} and no more");
        stream.write_all(head.as_bytes()).await.unwrap();
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer).await;
        let answer = String::from_utf8(answer).unwrap();
        assert!(answer.starts_with("HTTP/1.1 408") && answer.contains("did not arrive in time"), "{answer}");
    }
    assert_eq!(seen.count(), 0);
}

#[tokio::test]
async fn a_request_does_not_grow_beyond_measure() {
    let (stack, seen, through) = replacing(&"v".repeat(4000)).await;
    let post = |target: &str, header: &str, body: &str| {
        let request = Request::post(target).header("host", NAME).header("x-key", header);
        request.body(text(body)).unwrap()
    };
    for (target, header, body, expected) in [
        ("/".to_owned(), "", "{{T}}".repeat(500), StatusCode::OK),
        ("/".to_owned(), "", "{{T}}".repeat(600), StatusCode::PAYLOAD_TOO_LARGE),
        (format!("/{}", "{{T}}".repeat(17)), "", String::new(), StatusCode::PAYLOAD_TOO_LARGE),
    ] {
        let answer = ask(stack.inside(through, &[]).await, post(&target, header, &body)).await;
        assert_eq!(answer.status(), expected, "{}", body.len());
    }
    assert_eq!(seen.last().1.len(), 500 * 4000);
    let mut request = post("/", "{{T}}", "");
    for number in 0..20 {
        let name = http::HeaderName::try_from(format!("x-{number}")).unwrap();
        request.headers_mut().insert(name, "{{T}}".parse().unwrap());
    }
    let answer = ask(stack.inside(through, &[]).await, request).await;
    assert_eq!(answer.status(), StatusCode::PAYLOAD_TOO_LARGE);
    assert!(!String::from_utf8_lossy(answer.body()).contains("vvv"));
    assert_eq!(seen.count(), 1);
}
