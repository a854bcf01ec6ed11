//! Bytes move when they arrive, and only as fast as the reader reads.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use sandglass_proxy::{Forwarder, Limits};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::mpsc;

use crate::harness::{PATIENCE, backend, front, listen, read_head, until};

const MEGABYTE: usize = 1 << 20;

#[tokio::test]
async fn each_event_arrives_before_the_next_is_sent() {
    let (next, events) = mpsc::unbounded_channel::<&'static str>();
    let events = Arc::new(tokio::sync::Mutex::new(events));
    let (target, _) = backend(move |mut stream| {
        let events = Arc::clone(&events);
        async move {
            read_head(&mut stream).await;
            stream
                .write_all(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
                .await
                .unwrap();
            while let Some(event) = events.lock().await.recv().await {
                stream.write_all(format!("{:x}\r\n{event}\r\n", event.len()).as_bytes()).await.unwrap();
            }
            stream.write_all(b"0\r\n\r\n").await.unwrap();
        }
    })
    .await;
    let front = front(&Forwarder::new(Limits::default()), target).await;
    let mut client = TcpStream::connect(front).await.unwrap();
    client
        .write_all(b"POST /command HTTP/1.1\r\nhost: f\r\nconnection: close\r\ncontent-length: 0\r\n\r\n")
        .await
        .unwrap();
    let head = String::from_utf8(read_head(&mut client).await).unwrap();
    assert!(head.contains("text/event-stream"), "the head comes before any event: {head}");

    for event in ["{\"a\":1}\n\n", "{\"b\":2}\n\n", "{\"c\":3}\n\n"] {
        next.send(event).unwrap();
        let wanted = format!("{:x}\r\n{event}\r\n", event.len());
        let mut got = vec![0; wanted.len()];
        tokio::time::timeout(PATIENCE, client.read_exact(&mut got)).await.unwrap().unwrap();
        assert_eq!(String::from_utf8(got).unwrap(), wanted);
    }
    drop(next);
    let mut rest = String::new();
    client.read_to_string(&mut rest).await.unwrap();
    assert_eq!(rest, "0\r\n\r\n");
}

#[tokio::test]
async fn the_answer_may_begin_while_the_request_is_still_being_sent() {
    let (target, _) = backend(|mut stream| async move {
        read_head(&mut stream).await;
        stream.write_all(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nhi\r\n").await.unwrap();
        let mut rest = Vec::new();
        let _ = stream.read_buf(&mut rest).await;
        stream.write_all(b"3\r\nbye\r\n0\r\n\r\n").await.unwrap();
    })
    .await;
    let front = front(&Forwarder::new(Limits::default()), target).await;
    let mut client = TcpStream::connect(front).await.unwrap();
    client
        .write_all(b"POST / HTTP/1.1\r\nhost: f\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n1\r\na\r\n")
        .await
        .unwrap();
    let mut got = Vec::new();
    while !got.ends_with(b"hi\r\n") {
        assert_ne!(client.read_buf(&mut got).await.unwrap(), 0);
    }
    client.write_all(b"1\r\nb\r\n0\r\n\r\n").await.unwrap();
    client.read_to_end(&mut got).await.unwrap();
    assert!(got.ends_with(b"0\r\n\r\n"), "{}", String::from_utf8_lossy(&got));
}

/// High-water mark of this process.
fn peak_memory() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmHWM:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<usize>().unwrap() * 1024
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hundred_megabytes_pass_both_ways_in_little_memory() {
    const TOTAL: usize = 100 * MEGABYTE;
    let (target, _) = backend(|mut stream| async move {
        let head = read_head(&mut stream).await;
        let body_start = head.windows(4).position(|w| w == b"\r\n\r\n").unwrap() + 4;
        let mut got = head.len() - body_start;
        let mut buffer = vec![0; 256 * 1024];
        stream
            .write_all(format!("HTTP/1.1 200 OK\r\ncontent-length: {TOTAL}\r\n\r\n").as_bytes())
            .await
            .unwrap();
        // Echo: both directions are busy at once.
        stream.write_all(&head[body_start..]).await.unwrap();
        while got < TOTAL {
            let n = stream.read(&mut buffer).await.unwrap();
            assert_ne!(n, 0, "upload ended at {got}");
            got += n;
            stream.write_all(&buffer[..n]).await.unwrap();
        }
    })
    .await;
    let before = peak_memory();
    let front = front(&Forwarder::new(Limits::default()), target).await;
    let client = TcpStream::connect(front).await.unwrap();
    let (mut reader, mut writer) = client.into_split();
    let sender = tokio::spawn(async move {
        writer
            .write_all(
                format!("PUT / HTTP/1.1\r\nhost: f\r\nconnection: close\r\ncontent-length: {TOTAL}\r\n\r\n")
                    .as_bytes(),
            )
            .await
            .unwrap();
        let chunk: Vec<u8> = (0..MEGABYTE).map(|i| (i % 251) as u8).collect();
        for _ in 0..TOTAL / MEGABYTE {
            writer.write_all(&chunk).await.unwrap();
        }
        writer
    });
    let mut head = Vec::new();
    while !head.windows(4).any(|w| w == b"\r\n\r\n") {
        reader.read_buf(&mut head).await.unwrap();
    }
    let start = head.windows(4).position(|w| w == b"\r\n\r\n").unwrap() + 4;
    let mut offset = 0;
    let mut check = |bytes: &[u8]| {
        for byte in bytes {
            assert_eq!(usize::from(*byte), (offset % MEGABYTE) % 251);
            offset += 1;
        }
    };
    check(&head[start..]);
    let mut buffer = vec![0; 256 * 1024];
    loop {
        let n = reader.read(&mut buffer).await.unwrap();
        if n == 0 {
            break;
        }
        check(&buffer[..n]);
    }
    assert_eq!(offset, TOTAL);
    sender.await.unwrap();
    let grown = peak_memory().saturating_sub(before);
    assert!(grown < 48 * MEGABYTE, "memory grew by {} MB", grown / MEGABYTE);
}

/// The counter's value once it has not moved for a while.
async fn plateau(counter: &AtomicUsize) -> usize {
    let mut last = counter.load(Ordering::SeqCst);
    loop {
        tokio::time::sleep(Duration::from_millis(300)).await;
        let now = counter.load(Ordering::SeqCst);
        if now == last && now > 0 {
            return now;
        }
        last = now;
    }
}

#[tokio::test]
async fn a_slow_reader_slows_the_backend() {
    let written = Arc::new(AtomicUsize::new(0));
    let counter = Arc::clone(&written);
    let (target, _) = backend(move |mut stream| {
        let counter = Arc::clone(&counter);
        async move {
            read_head(&mut stream).await;
            stream.write_all(b"HTTP/1.1 200 OK\r\n\r\n").await.unwrap();
            let chunk = vec![7; 64 * 1024];
            while stream.write_all(&chunk).await.is_ok() {
                counter.fetch_add(chunk.len(), Ordering::SeqCst);
            }
            counter.store(usize::MAX, Ordering::SeqCst);
        }
    })
    .await;
    let forwarder = Forwarder::new(Limits::default());
    let front = front(&forwarder, target).await;
    let mut client = TcpStream::connect(front).await.unwrap();
    client.write_all(b"GET / HTTP/1.1\r\nhost: f\r\n\r\n").await.unwrap();
    let held = plateau(&written).await;
    assert!(held < 32 * MEGABYTE, "{} MB in flight", held / MEGABYTE);

    let mut read = 0;
    let mut buffer = vec![0; 256 * 1024];
    while read < 4 * held {
        read += client.read(&mut buffer).await.unwrap();
    }
    // A client that leaves lets go of the backend.
    drop(client);
    until("the backend noticed", || written.load(Ordering::SeqCst) == usize::MAX).await;
    until("nothing is in flight", || forwarder.counts().requests == 0).await;
}

#[tokio::test]
async fn a_slow_backend_slows_the_upload() {
    let (listener, target) = listen().await;
    let front = front(&Forwarder::new(Limits::default()), target).await;
    let sent = Arc::new(AtomicUsize::new(0));
    let counter = Arc::clone(&sent);
    let upload = tokio::spawn(async move {
        let mut client = TcpStream::connect(front).await.unwrap();
        client.write_all(b"POST / HTTP/1.1\r\nhost: f\r\ncontent-length: 1000000000\r\n\r\n").await.unwrap();
        let chunk = vec![7; 64 * 1024];
        while client.write_all(&chunk).await.is_ok() {
            counter.fetch_add(chunk.len(), Ordering::SeqCst);
        }
    });
    let (_held, _) = listener.accept().await.unwrap();
    let held = plateau(&sent).await;
    assert!(held < 32 * MEGABYTE, "{} MB in flight", held / MEGABYTE);
    upload.abort();
}
