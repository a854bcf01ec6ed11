//! Connections: reuse, what ends them, and shutting down.

use std::sync::atomic::Ordering;
use std::time::Duration;

use sandglass_proxy::{ConnectError, Counts, Forwarder, Limits};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::harness::{PATIENCE, backend, front, get, read_head, talk, until};

const OK: &[u8] = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok";

async fn keeping_alive(mut stream: TcpStream) {
    while !read_head(&mut stream).await.is_empty() {
        stream.write_all(OK).await.unwrap();
    }
}

#[tokio::test]
async fn sequential_requests_share_a_connection() {
    let (target, connections) = backend(keeping_alive).await;
    let front = front(&Forwarder::new(Limits::default()), target).await;
    for _ in 0..20 {
        assert!(get(front, "/").await.ends_with("ok"));
        // The connection is free again a moment after the client has the last byte.
        tokio::task::yield_now().await;
    }
    let used = connections.load(Ordering::SeqCst);
    assert!(used <= 3, "{used} connections");
}

#[tokio::test]
async fn unused_connections_are_closed_in_time() {
    let (closed, mut closes) = tokio::sync::mpsc::unbounded_channel();
    let (target, _) = backend(move |stream| {
        let closed = closed.clone();
        async move {
            keeping_alive(stream).await;
            closed.send(()).unwrap();
        }
    })
    .await;
    let limits = Limits { idle: Duration::from_millis(50), ..Limits::default() };
    let front = front(&Forwarder::new(limits), target).await;
    get(front, "/").await;
    tokio::time::timeout(PATIENCE, closes.recv()).await.unwrap();
}

#[tokio::test]
async fn a_kept_connection_that_the_backend_closed_is_replaced_unseen() {
    // Answers once, waits for the next request and hangs up on it: the race between an idle close and a new request.
    let (target, connections) = backend(|mut stream| async move {
        read_head(&mut stream).await;
        stream.write_all(OK).await.unwrap();
        read_head(&mut stream).await;
    })
    .await;
    let front = front(&Forwarder::new(Limits::default()), target).await;
    assert!(get(front, "/1").await.ends_with("ok"));
    until("the connection is kept", || connections.load(Ordering::SeqCst) == 1).await;
    assert!(get(front, "/2").await.ends_with("ok"), "a GET is sent again");
    assert_eq!(connections.load(Ordering::SeqCst), 2);

    let answer =
        talk(front, b"POST / HTTP/1.1\r\nhost: f\r\nconnection: close\r\ncontent-length: 1\r\n\r\nx").await;
    assert!(answer.starts_with("HTTP/1.1 502"), "a POST may have been acted on: {answer}");
}

#[tokio::test]
async fn forgetting_an_address_cuts_what_is_in_flight() {
    let (target, connections) = backend(|mut stream| async move {
        read_head(&mut stream).await;
        stream.write_all(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nhi\r\n").await.unwrap();
        std::future::pending::<()>().await;
    })
    .await;
    let forwarder = Forwarder::new(Limits::default());
    let front = front(&forwarder, target).await;
    let mut client = TcpStream::connect(front).await.unwrap();
    client.write_all(b"GET / HTTP/1.1\r\nhost: f\r\n\r\n").await.unwrap();
    let mut got = Vec::new();
    while !got.ends_with(b"hi\r\n") {
        client.read_buf(&mut got).await.unwrap();
    }
    forwarder.forget(target.ip());
    let _ = client.read_to_end(&mut got).await;
    assert!(!got.ends_with(b"0\r\n\r\n"), "the body must not look complete");
    until("nothing is in flight", || forwarder.counts() == Counts::default()).await;

    // The address works again for whoever has it next.
    let lease = forwarder.connect(target).await.unwrap();
    drop(lease);
    until("a new connection was made", || connections.load(Ordering::SeqCst) == 2).await;
}

#[tokio::test]
async fn draining_waits_for_what_is_in_flight_and_then_cuts() {
    let (target, _) = backend(|mut stream| async move {
        let head = read_head(&mut stream).await;
        if head.starts_with(b"GET /forever") {
            std::future::pending::<()>().await;
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
        stream.write_all(OK).await.unwrap();
    })
    .await;
    let forwarder = Forwarder::new(Limits::default());
    let front = front(&forwarder, target).await;
    let ends = tokio::spawn(async move { get(front, "/").await });
    let hangs = tokio::spawn(async move { get(front, "/forever").await });
    until("both are in flight", || forwarder.counts().requests == 2).await;

    let cut = forwarder.drain(Duration::from_secs(3)).await;
    assert_eq!(cut, Counts { requests: 1, upgrades: 0 });
    assert!(ends.await.unwrap().ends_with("ok"));
    assert!(hangs.await.unwrap().starts_with("HTTP/1.1 503"));
    assert!(matches!(forwarder.connect(target).await, Err(ConnectError::Draining)));
}

#[tokio::test]
async fn a_connection_is_used_again_only_after_a_whole_exchange() {
    // What it says beyond the answer, and what it does not wait for, would otherwise belong to the next client.
    for (request, answer) in [
        (
            "HEAD / HTTP/1.1\r\nhost: f\r\n\r\n",
            &b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nHTTP/1.1 200 OK\r\n"[..],
        ),
        ("GET / HTTP/1.1\r\nhost: f\r\n\r\n", b"HTTP/1.1 204 No Content\r\ncontent-length: 2\r\n\r\nno"),
        (
            "GET / HTTP/1.1\r\nhost: f\r\n\r\n",
            b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nokHTTP/1.1 500 No\r\n\r\n",
        ),
        ("GET / HTTP/1.1\r\nhost: f\r\n\r\n", b"HTTP/1.0 200 OK\r\ncontent-length: 2\r\n\r\nok"),
        (
            "GET / HTTP/1.1\r\nhost: f\r\n\r\n",
            b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        ),
        ("POST / HTTP/1.1\r\nhost: f\r\nexpect: 100-continue\r\ncontent-length: 9\r\n\r\n", OK),
    ] {
        let (target, connections) = backend(move |mut stream| async move {
            while !read_head(&mut stream).await.is_empty() {
                if stream.write_all(answer).await.is_err() {
                    return;
                }
            }
        })
        .await;
        let front = front(&Forwarder::new(Limits::default()), target).await;
        for made in 1..=2 {
            let mut client = TcpStream::connect(front).await.unwrap();
            client.write_all(request.as_bytes()).await.unwrap();
            assert!(!read_head(&mut client).await.is_empty());
            drop(client);
            tokio::time::sleep(Duration::from_millis(20)).await;
            assert_eq!(connections.load(Ordering::SeqCst), made, "{request} {}", answer.escape_ascii());
        }
    }
}

#[tokio::test]
async fn a_body_that_a_program_does_not_expect_is_nobodys_next_request() {
    // Reads heads and nothing else, as simple programs do that answer to GET.
    let (target, connections) = backend(|mut stream| async move {
        let mut unread = Vec::new();
        loop {
            while let Some(end) = unread.windows(4).position(|four| four == b"\r\n\r\n") {
                let head: Vec<u8> = unread.drain(..end + 4).collect();
                let line = String::from_utf8_lossy(&head).lines().next().unwrap_or_default().to_owned();
                let answer = format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n{line}", line.len());
                if stream.write_all(answer.as_bytes()).await.is_err() {
                    return;
                }
            }
            if stream.read_buf(&mut unread).await.unwrap_or(0) == 0 {
                return;
            }
        }
    })
    .await;
    let front = front(&Forwarder::new(Limits::default()), target).await;
    for method in ["GET", "DELETE", "OPTIONS"] {
        let body = "GET /stolen HTTP/1.1\r\nx: ";
        let asks = format!(
            "{method} /odd HTTP/1.1\r\nhost: f\r\nconnection: close\r\ncontent-length: {}\r\n\r\n{body}",
            body.len()
        );
        let answer = talk(front, asks.as_bytes()).await;
        assert!(answer.ends_with(&format!("{method} /odd HTTP/1.1")), "{answer}");
        let answer = get(front, "/mine").await;
        assert!(answer.ends_with("GET /mine HTTP/1.1"), "{answer}");
    }
    assert!(connections.load(Ordering::SeqCst) > 1);
}
