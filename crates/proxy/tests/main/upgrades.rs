//! Connections that stop being HTTP.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use sandglass_proxy::{Counts, Forwarder, Limits, Pulse};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::harness::{answering, backend, capturing, front, read_head, until, watched};

const ASK: &[u8] = b"GET /ws?x=%2F HTTP/1.1\r\nHost: f\r\nConnection: keep-alive, Upgrade\r\nUpgrade: websocket\r\n\
    Sec-WebSocket-Key: abc\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Protocol: one, two\r\nOrigin: http://o\r\n\r\n";

async fn echoing() -> SocketAddr {
    backend(|mut stream| async move {
        read_head(&mut stream).await;
        // The first bytes of the new protocol come with the head.
        stream
            .write_all(
                b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\
                  Sec-WebSocket-Protocol: two\r\n\r\nhello",
            )
            .await
            .unwrap();
        let (mut reader, mut writer) = stream.split();
        let _ = tokio::io::copy(&mut reader, &mut writer).await;
    })
    .await
    .0
}

async fn connect(front: SocketAddr) -> (TcpStream, String) {
    let mut client = TcpStream::connect(front).await.unwrap();
    client.write_all(ASK).await.unwrap();
    let mut head = Vec::new();
    while !head.ends_with(b"hello") {
        assert_ne!(client.read_buf(&mut head).await.unwrap(), 0, "{}", String::from_utf8_lossy(&head));
    }
    (client, String::from_utf8(head).unwrap())
}

#[tokio::test]
async fn bytes_flow_both_ways_after_the_upgrade() {
    let forwarder = Forwarder::new(Limits::default());
    let front = front(&forwarder, echoing().await).await;
    let (mut client, head) = connect(front).await;
    assert!(head.starts_with("HTTP/1.1 101"), "{head}");
    for line in ["connection: upgrade", "upgrade: websocket", "sec-websocket-protocol: two"] {
        assert!(head.contains(&format!("{line}\r\n")), "{line} in {head}");
    }
    assert!(!head.contains("content-length"), "{head}");
    until("one upgrade is counted", || forwarder.counts() == Counts { requests: 0, upgrades: 1 }).await;

    for message in [&b"\x81\x05first"[..], &[0; 200_000][..]] {
        let (mut reader, mut writer) = client.split();
        let mut got = vec![1; message.len()];
        let (sent, received) = tokio::join!(writer.write_all(message), reader.read_exact(&mut got));
        sent.unwrap();
        received.unwrap();
        assert!(got == message);
    }
    // Half a close passes through: the echo still answers what was sent before.
    client.write_all(b"last").await.unwrap();
    client.shutdown().await.unwrap();
    let mut rest = String::new();
    client.read_to_string(&mut rest).await.unwrap();
    assert_eq!(rest, "last");
    until("none is counted", || forwarder.counts() == Counts::default()).await;
}

#[tokio::test]
async fn the_backend_gets_the_whole_question() {
    let (target, mut requests) = capturing().await;
    let front = front(&Forwarder::new(Limits::default()), target).await;
    let mut client = TcpStream::connect(front).await.unwrap();
    client.write_all(ASK).await.unwrap();
    let seen = requests.recv().await.unwrap();
    assert!(seen.starts_with("GET /ws?x=%2F HTTP/1.1\r\n"), "{seen}");
    for line in [
        "connection: upgrade",
        "upgrade: websocket",
        "sec-websocket-key: abc",
        "origin: http://o",
        "sec-websocket-protocol: one, two",
    ] {
        assert!(seen.contains(&format!("{line}\r\n")), "{line} in {seen}");
    }
    // It answered 204, which is an answer like any other.
    let answer = String::from_utf8(read_head(&mut client).await).unwrap();
    assert!(answer.starts_with("HTTP/1.1 204"), "{answer}");
}

#[tokio::test]
async fn a_refused_upgrade_is_an_ordinary_answer() {
    let target = answering(b"HTTP/1.1 403 Forbidden\r\ncontent-length: 2\r\n\r\nno").await;
    let front = front(&Forwarder::new(Limits::default()), target).await;
    let mut client = TcpStream::connect(front).await.unwrap();
    client.write_all(ASK).await.unwrap();
    let mut got = read_head(&mut client).await;
    while !got.ends_with(b"no") {
        client.read_buf(&mut got).await.unwrap();
    }
    assert!(got.starts_with(b"HTTP/1.1 403"));
}

#[tokio::test]
async fn http_in_another_version_is_not_tunnelled() {
    for upgrade in
        ["Upgrade: h2c", "Upgrade: websocket, H2C", "Upgrade: foo\r\nUpgrade: h2c", "Upgrade: HTTP/2.0, foo"]
    {
        let (target, mut requests) = capturing().await;
        let front = front(&Forwarder::new(Limits::default()), target).await;
        let mut client = TcpStream::connect(front).await.unwrap();
        let asks = format!(
            "GET / HTTP/1.1\r\nHost: f\r\nConnection: Upgrade, HTTP2-Settings\r\n{upgrade}\r\nHTTP2-Settings: AAA\r\n\r\n"
        );
        client.write_all(asks.as_bytes()).await.unwrap();
        let seen = requests.recv().await.unwrap().to_lowercase();
        assert!(!seen.contains("upgrade") && !seen.contains("http2-settings"), "{seen}");
    }
}

#[tokio::test]
async fn a_protocol_does_not_change_within_a_request() {
    let (target, _) = backend(|mut stream| async move {
        read_head(&mut stream).await;
        stream
            .write_all(b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n")
            .await
            .unwrap();
        read_head(&mut stream).await;
    })
    .await;
    let front = front(&Forwarder::new(Limits::default()), target).await;
    let mut client = TcpStream::connect(front).await.unwrap();
    client
        .write_all(
            b"POST / HTTP/1.1\r\nHost: f\r\nConnection: upgrade\r\nUpgrade: x\r\nContent-Length: 5\r\n\r\nab",
        )
        .await
        .unwrap();
    let answer = String::from_utf8(read_head(&mut client).await).unwrap();
    assert!(answer.starts_with("HTTP/1.1 502"), "{answer}");
}

#[tokio::test]
async fn a_dead_side_and_a_drain_end_the_relay() {
    let forwarder = Forwarder::new(Limits::default());
    let target = echoing().await;
    let front = front(&forwarder, target).await;
    let (client, _) = connect(front).await;
    until("one upgrade is counted", || forwarder.counts().upgrades == 1).await;
    drop(client);
    until("none is counted", || forwarder.counts().upgrades == 0).await;

    let (mut forgotten, _) = connect(front).await;
    forwarder.forget(target.ip());
    let mut rest = Vec::new();
    let _ = forgotten.read_to_end(&mut rest).await;

    let (mut drained, _) = connect(front).await;
    let cut = forwarder.drain(Duration::from_millis(50)).await;
    assert_eq!(cut, Counts { requests: 0, upgrades: 1 });
    let _ = drained.read_to_end(&mut rest).await;
    assert!(rest.is_empty());
}

#[tokio::test]
async fn somebody_is_told_for_as_long_as_bytes_move() {
    let told = Arc::new(AtomicUsize::new(0));
    let counted = || told.load(Ordering::SeqCst);
    let pulse = |every| {
        let told = Arc::clone(&told);
        Pulse::new(every, move || {
            told.fetch_add(1, Ordering::SeqCst);
        })
    };
    let (forwarder, target) = (Forwarder::new(Limits::default()), echoing().await);
    let front = watched(&forwarder, target, Some(pulse(Duration::ZERO))).await;
    let (mut client, _) = connect(front).await;
    for _ in 0..3 {
        let before = counted();
        client.write_all(b"ping").await.unwrap();
        client.read_exact(&mut [0; 4]).await.unwrap();
        until("both ways were told", || counted() >= before + 2).await;
    }
    drop(client);
    until("none is counted", || forwarder.counts() == Counts::default()).await;

    // An answer that streams, and a request that does.
    let (target, _) = backend(|mut stream| async move {
        read_head(&mut stream).await;
        stream.write_all(b"HTTP/1.1 200 OK\r\n\r\n").await.unwrap();
        let mut piece = [0; 64];
        while let Ok(count @ 1..) = stream.read(&mut piece).await {
            stream.write_all(&piece[..count]).await.unwrap();
        }
    })
    .await;
    let front = watched(&forwarder, target, Some(pulse(Duration::ZERO))).await;
    let mut client = TcpStream::connect(front).await.unwrap();
    client.write_all(b"POST / HTTP/1.1\r\nhost: f\r\ncontent-length: 1000\r\n\r\n").await.unwrap();
    read_head(&mut client).await;
    for _ in 0..3 {
        let before = counted();
        client.write_all(b"piece").await.unwrap();
        client.read_exact(&mut [0; 5]).await.unwrap();
        until("both ways were told", || counted() >= before + 2).await;
    }
    let before = counted();
    let rarely = watched(&forwarder, echoing().await, Some(pulse(Duration::from_secs(3600)))).await;
    let (mut client, _) = connect(rarely).await;
    client.write_all(b"ping").await.unwrap();
    client.read_exact(&mut [0; 4]).await.unwrap();
    assert_eq!(counted(), before);
}
