//! What lasts: events, uploads, upgraded connections.

use std::convert::Infallible;
use std::sync::Arc;

use bytes::Bytes;
use futures_util::StreamExt;
use http::header::{CONNECTION, UPGRADE};
use http::{Request, Response, StatusCode};
use http_body::Frame;
use http_body_util::{BodyExt, StreamBody};
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::sync::mpsc;

use crate::stack::{Handler, NAME, SECRET, Stack, get, text};

const HTTPS: &str = "192.0.2.10:443";

#[tokio::test]
async fn events_arrive_as_they_are_sent() {
    let mut stack = Stack::bound();
    let (events, receiver) = mpsc::channel::<Bytes>(1);
    let receiver = Arc::new(tokio::sync::Mutex::new(Some(receiver)));
    let handler: Handler = Arc::new(move |_| {
        let receiver = Arc::clone(&receiver);
        Box::pin(async move {
            let receiver = receiver.lock().await.take().expect("one request");
            let stream = futures_util::stream::unfold(receiver, |mut receiver| async {
                receiver.recv().await.map(|event| (Ok(Frame::data(event)), receiver))
            });
            let body = StreamBody::new(stream).boxed_unsync();
            Response::builder().header("content-type", "text/event-stream").body(body).unwrap()
        })
    });
    let tls = stack.identity(NAME, &[]);
    stack.serve(HTTPS, Some(tls), handler).await;
    let through = stack.intercept(HTTPS).await;
    let stream = stack.inside(through, &[]).await;
    let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.unwrap();
    let driver = tokio::spawn(connection);
    let mut body = sender.send_request(get(NAME, "/events")).await.unwrap().into_body().into_data_stream();
    for number in 0..5 {
        let event = Bytes::from(format!("data: {number}\n\n"));
        events.send(event.clone()).await.unwrap();
        // The next is sent only after this one has come through.
        assert_eq!(body.next().await.unwrap().unwrap(), event);
    }
    drop(events);
    assert!(body.next().await.is_none());
    driver.abort();
}

#[tokio::test]
async fn an_upload_arrives_as_it_is_sent() {
    let mut stack = Stack::bound();
    let (arrived, mut arrivals) = mpsc::channel::<Bytes>(1);
    let handler: Handler = Arc::new(move |request| {
        let arrived = arrived.clone();
        Box::pin(async move {
            let mut body = request.into_body().into_data_stream();
            while let Some(Ok(data)) = body.next().await {
                arrived.send(data).await.unwrap();
            }
            Response::new(text("done"))
        })
    });
    let tls = stack.identity(NAME, &[]);
    stack.serve(HTTPS, Some(tls), handler).await;
    let through = stack.intercept(HTTPS).await;
    let stream = stack.inside(through, &[]).await;
    let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.unwrap();
    let driver = tokio::spawn(connection);
    let (chunks, receiver) = mpsc::channel::<Bytes>(1);
    let stream = futures_util::stream::unfold(receiver, |mut receiver| async {
        receiver.recv().await.map(|chunk| (Ok::<_, Infallible>(Frame::data(chunk)), receiver))
    });
    let body = StreamBody::new(stream).map_err(|never| match never {}).boxed_unsync();
    let request = Request::put("/upload").header("host", NAME).body(body).unwrap();
    let answer = tokio::spawn(async move { sender.send_request(request).await.unwrap().status() });
    for number in 0..5 {
        let chunk = Bytes::from(format!("chunk {number}"));
        chunks.send(chunk.clone()).await.unwrap();
        assert_eq!(arrivals.recv().await.unwrap(), chunk);
    }
    drop(chunks);
    assert_eq!(answer.await.unwrap(), StatusCode::OK);
    driver.abort();
}

#[tokio::test]
async fn an_upgraded_connection_is_a_pipe_and_its_request_got_the_credential() {
    let mut stack = Stack::bound();
    let handler: Handler = Arc::new(|mut request| {
        Box::pin(async move {
            assert_eq!(request.headers()["authorization"], format!("Bearer {SECRET}"));
            assert_eq!(request.headers()[UPGRADE], "websocket");
            let upgrade = hyper::upgrade::on(&mut request);
            tokio::spawn(async move {
                let mut pipe = TokioIo::new(upgrade.await.unwrap());
                pipe.write_all(b"first").await.unwrap();
                let mut buffer = [0; 64];
                while let Ok(length @ 1..) = pipe.read(&mut buffer).await {
                    pipe.write_all(&buffer[..length]).await.unwrap();
                }
            });
            let response = Response::builder().status(StatusCode::SWITCHING_PROTOCOLS);
            response
                .header(CONNECTION, "Upgrade")
                .header(UPGRADE, "websocket")
                .header("x-echo", SECRET)
                .body(text(""))
                .unwrap()
        })
    });
    let tls = stack.identity(NAME, &[b"http/1.1"]);
    stack.serve(HTTPS, Some(tls), handler).await;
    let through = stack.intercept(HTTPS).await;
    let mut stream = stack.inside(through, &[b"http/1.1"]).await;
    let head =
        format!("GET /ws HTTP/1.1\r\nHost: {NAME}\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n");
    stream.write_all(head.as_bytes()).await.unwrap();
    let mut answer = Vec::new();
    while !answer.ends_with(b"first") {
        assert!(stream.read_buf(&mut answer).await.unwrap() > 0, "{}", String::from_utf8_lossy(&answer));
    }
    let answer = String::from_utf8(answer).unwrap().to_lowercase();
    assert!(
        answer.starts_with("http/1.1 101")
            && answer.contains("upgrade: websocket")
            && answer.contains("x-echo: [redacted]"),
        "{answer}"
    );
    for message in ["one", "two"] {
        stream.write_all(message.as_bytes()).await.unwrap();
        let mut echo = vec![0; message.len()];
        stream.read_exact(&mut echo).await.unwrap();
        assert_eq!(echo, message.as_bytes());
    }
}

#[tokio::test]
async fn no_other_protocol_is_changed_to() {
    let mut stack = Stack::bound();
    let listener = stack.listen(HTTPS).await;
    let tls = stack.identity(NAME, &[b"http/1.1"]);
    let heads = Arc::new(std::sync::Mutex::new(Vec::new()));
    let seen = Arc::clone(&heads);
    // A server that changes whatever it was asked for.
    stack.own(tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let mut stream = tls.accept(stream).await.unwrap();
            let mut head = Vec::new();
            while !head.ends_with(b"\r\n\r\n") {
                head.push(stream.read_u8().await.unwrap());
            }
            seen.lock().unwrap().push(String::from_utf8(head).unwrap().to_lowercase());
            let changed = b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n";
            let _ = stream.write_all(changed).await;
        }
    }));
    let through = stack.intercept(HTTPS).await;
    for (method, protocols, asked) in [
        ("GET", "h2c", false),
        ("GET", "x, h2c", false),
        ("GET", "websocket, h2c", false),
        ("POST", "websocket", false),
        ("GET", "websocket", true),
    ] {
        let mut stream = stack.inside(through, &[b"http/1.1"]).await;
        let head = format!(
            "{method} / HTTP/1.1\r\nHost: {NAME}\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: {protocols}\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n\r\n"
        );
        stream.write_all(head.as_bytes()).await.unwrap();
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer).await;
        let answer = String::from_utf8(answer).unwrap();
        assert!(answer.starts_with("HTTP/1.1 502"), "{protocols}: {answer}");
        let head = heads.lock().unwrap().pop().unwrap();
        assert_eq!(head.contains("upgrade"), asked, "{head}");
        assert!(!head.contains("http2-settings") && !head.contains("h2c"), "{head}");
    }
}
