//! Backends that misbehave, and clients that leave.

use std::time::Duration;

use sandglass_proxy::{Forwarder, Limits};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::harness::{
    PATIENCE, answering, backend, front, get, nowhere, quick_limits, read_head, talk, until,
};

#[tokio::test]
async fn nothing_listening_is_told_apart() {
    let answer = get(front(&Forwarder::new(Limits::default()), nowhere().await).await, "/").await;
    assert!(answer.starts_with("HTTP/1.1 503") && answer.ends_with("connection refused"), "{answer}");
}

#[tokio::test]
async fn a_body_that_is_cut_short_never_ends_cleanly() {
    let sized = b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nhalf" as &[u8];
    let chunked = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n4\r\nhalf\r\n" as &[u8];
    let mid_chunk = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n8\r\nhalf" as &[u8];
    for answer in [sized, chunked, mid_chunk] {
        let front = front(&Forwarder::new(Limits::default()), answering(answer).await).await;
        let got = get(front, "/").await;
        let (head, body) = got.split_once("\r\n\r\n").unwrap();
        assert!(head.starts_with("HTTP/1.1 200"), "{got}");
        if head.contains("content-length: 10") {
            assert!(body.len() < 10, "{got}");
        } else {
            assert!(head.contains("chunked") && !body.ends_with("0\r\n\r\n"), "{got}");
        }
    }
}

#[tokio::test]
async fn what_is_not_http_and_what_is_nothing_are_bad_answers() {
    for answer in [
        b"SSH-2.0-OpenSSH_9.6\r\n" as &[u8],
        b"HTTP/1.1 200 OK\r\ncontent-length: x\r\n\r\n",
        b"HTTP/1.1 2",
        b"",
    ] {
        let front = front(&Forwarder::new(Limits::default()), answering(answer).await).await;
        let got = get(front, "/").await;
        assert!(got.starts_with("HTTP/1.1 502"), "{answer:?}: {got}");
    }
}

#[tokio::test]
async fn what_two_readers_could_end_in_two_places_is_no_answer() {
    for answer in [
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ncontent-length: 3\r\n\r\nabc" as &[u8],
        b"HTTP/1.1 200 OK\r\ncontent-length: 2, 2\r\n\r\nab",
        b"HTTP/1.1 200 OK\r\ncontent-length: +2\r\n\r\nab",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding : chunked\r\n\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nx: a\r\n folded: b\r\ncontent-length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nx: a\rset-cookie: b\r\ncontent-length: 0\r\n\r\n",
        b"HTTP/1.1 200 O\rK\r\ncontent-length: 0\r\n\r\n",
        b"HTTP/2.0 200 OK\r\ncontent-length: 0\r\n\r\n",
    ] {
        let front = front(&Forwarder::new(Limits::default()), answering(answer).await).await;
        let got = get(front, "/").await;
        assert!(got.starts_with("HTTP/1.1 502"), "{}: {got}", answer.escape_ascii());
    }
}

#[tokio::test]
async fn endless_empty_lines_are_no_answer() {
    let (target, _) = backend(|mut stream| async move {
        read_head(&mut stream).await;
        while stream.write_all(&b"\r\n".repeat(500)).await.is_ok() {}
    })
    .await;
    let got = get(front(&Forwarder::new(Limits::default()), target).await, "/").await;
    assert!(got.starts_with("HTTP/1.1 502"), "{got}");

    let few = answering(b"\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok").await;
    let got = get(front(&Forwarder::new(Limits::default()), few).await, "/").await;
    assert!(got.ends_with("\r\n\r\nok"), "left over from an old program's last answer: {got}");
}

#[tokio::test]
async fn a_backend_that_never_answers_times_out() {
    let (target, _) = backend(|mut stream| async move {
        read_head(&mut stream).await;
        std::future::pending::<()>().await;
    })
    .await;
    let forwarder = Forwarder::new(quick_limits());
    let got = get(front(&forwarder, target).await, "/").await;
    assert!(got.starts_with("HTTP/1.1 504"), "{got}");
    until("nothing is in flight", || forwarder.counts().requests == 0).await;
}

#[tokio::test]
async fn a_client_that_sends_slowly_is_not_the_backends_fault() {
    let (target, _) = backend(|mut stream| async move {
        let mut got = read_head(&mut stream).await;
        while !got.ends_with(b"done") {
            stream.read_buf(&mut got).await.unwrap();
        }
        stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n").await.unwrap();
    })
    .await;
    let front = front(&Forwarder::new(quick_limits()), target).await;
    let mut client = TcpStream::connect(front).await.unwrap();
    client
        .write_all(b"POST / HTTP/1.1\r\nhost: f\r\nconnection: close\r\ncontent-length: 5\r\n\r\n-")
        .await
        .unwrap();
    // Longer than the backend may take for its answer.
    tokio::time::sleep(Duration::from_secs(2)).await;
    client.write_all(b"done").await.unwrap();
    let mut got = String::new();
    client.read_to_string(&mut got).await.unwrap();
    assert!(got.starts_with("HTTP/1.1 200"), "{got}");
}

#[tokio::test]
async fn a_client_that_leaves_closes_the_backend_connection() {
    let (closed, mut closes) = tokio::sync::mpsc::unbounded_channel();
    let (target, _) = backend(move |mut stream| {
        let closed = closed.clone();
        async move {
            read_head(&mut stream).await;
            let mut rest = Vec::new();
            let _ = stream.read_to_end(&mut rest).await;
            closed.send(()).unwrap();
        }
    })
    .await;
    let forwarder = Forwarder::new(Limits::default());
    let front = front(&forwarder, target).await;
    let requests =
        ["GET / HTTP/1.1\r\nhost: f\r\n\r\n", "POST / HTTP/1.1\r\nhost: f\r\ncontent-length: 9\r\n\r\nhal"];
    for request in requests {
        let mut client = TcpStream::connect(front).await.unwrap();
        client.write_all(request.as_bytes()).await.unwrap();
        until("the request is in flight", || forwarder.counts().requests == 1).await;
        tokio::time::sleep(Duration::from_millis(50)).await;
        drop(client);
        tokio::time::timeout(PATIENCE, closes.recv()).await.expect(request);
        until("nothing is in flight", || forwarder.counts().requests == 0).await;
    }
}

#[tokio::test]
async fn an_early_refusal_of_an_upload_reaches_the_client() {
    let (target, _) = backend(|mut stream| async move {
        read_head(&mut stream).await;
        stream
            .write_all(b"HTTP/1.1 413 Content Too Large\r\ncontent-length: 3\r\nconnection: close\r\n\r\nbig")
            .await
            .unwrap();
        stream.shutdown().await.unwrap();
        let mut rest = Vec::new();
        let _ = stream.read_to_end(&mut rest).await;
    })
    .await;
    let front = front(&Forwarder::new(Limits::default()), target).await;
    let answer = talk(
        front,
        b"POST / HTTP/1.1\r\nhost: f\r\nconnection: close\r\ncontent-length: 100000\r\n\r\nbegin",
    )
    .await;
    assert!(answer.starts_with("HTTP/1.1 413"), "{answer}");
}
