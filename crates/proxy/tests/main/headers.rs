//! What each side sees of the other's head.

use std::sync::atomic::Ordering;

use sandglass_proxy::{Forwarder, Limits};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::harness::{answering, backend, capturing, front, get, read_head, talk};

async fn seen(request: &str) -> String {
    let (target, mut requests) = capturing().await;
    let front = front(&Forwarder::new(Limits::default()), target).await;
    let answer = talk(front, request.as_bytes()).await;
    assert!(answer.starts_with("HTTP/1.1 204"), "{answer}");
    requests.recv().await.unwrap().replace(&target.to_string(), "TARGET")
}

async fn answered(answer: &'static str) -> String {
    let target = answering(answer.as_bytes()).await;
    get(front(&Forwarder::new(Limits::default()), target).await, "/").await
}

#[tokio::test]
async fn the_path_and_query_arrive_as_they_were_written() {
    for target in ["/a%2Fb//c/%E4%BD%A0/a%3Fc?x=%20+&x=2&&=%zz", "//x", "/.././a", "/?", "/a?b?c"] {
        let seen = seen(&format!("GET {target} HTTP/1.1\r\nhost: f\r\nconnection: close\r\n\r\n")).await;
        assert!(seen.starts_with(&format!("GET {target} HTTP/1.1\r\n")), "{seen}");
    }
}

#[tokio::test]
async fn nothing_is_added_and_only_hop_headers_go() {
    let seen = seen(
        "GET / HTTP/1.1\r\nHost: f\r\nConnection: close, X-Gone\r\nX-Gone: 1\r\nTE: gzip;q=0.5, Trailers\r\nAuthorization: b\r\n\
         Cookie: a=1\r\nCookie: b=2\r\nX-Twice: 1\r\nX-Twice: 2\r\n\r\n",
    )
    .await;
    let mut lines: Vec<_> = seen.trim_end().lines().collect();
    lines.sort_unstable();
    assert_eq!(
        lines,
        [
            "GET / HTTP/1.1",
            "authorization: b",
            "connection: te",
            "cookie: a=1",
            "cookie: b=2",
            "host: TARGET",
            "te: trailers",
            "x-twice: 1",
            "x-twice: 2",
        ]
    );
}

#[tokio::test]
async fn a_get_with_a_zero_length_or_a_body_is_passed_on() {
    let empty = seen("GET / HTTP/1.1\r\nhost: f\r\nconnection: close\r\ncontent-length: 0\r\n\r\n").await;
    assert!(empty.contains("content-length: 0\r\n"), "{empty}");
    assert!(!empty.contains("chunked"), "{empty}");

    let sized = seen("GET / HTTP/1.1\r\nhost: f\r\nconnection: close\r\ncontent-length: 3\r\n\r\nabc").await;
    assert!(sized.contains("content-length: 3\r\n") && sized.ends_with("\r\n\r\nabc"), "{sized}");

    let chunked =
        seen("GET / HTTP/1.1\r\nhost: f\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n")
            .await;
    assert!(chunked.contains("transfer-encoding: chunked\r\n"), "{chunked}");
    assert!(chunked.ends_with("3\r\nabc\r\n0\r\n\r\n"), "{chunked}");
}

#[tokio::test]
async fn a_chunked_upload_stays_chunked_and_its_trailers_come_last() {
    let seen = seen(
        "POST /u HTTP/1.1\r\nhost: f\r\nconnection: close\r\ntransfer-encoding: chunked\r\ntrailer: x-sum\r\n\r\n\
         5\r\nhello\r\n6;ext=1\r\n world\r\n0\r\nx-sum: 1\r\nhost: evil\r\ncontent-length: 7\r\n\r\n",
    )
    .await;
    assert!(!seen.contains("content-length") && !seen.contains("evil"), "{seen}");
    assert!(seen.contains("hello") && seen.contains(" world"), "{seen}");
    assert!(seen.ends_with("0\r\nx-sum: 1\r\n\r\n"), "{seen}");
}

#[tokio::test]
async fn trailers_of_an_answer_reach_a_client_that_takes_them() {
    let target = answering(
        b"HTTP/1.1 200 OK\r\ntrailer: x-sum\r\ntransfer-encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\nx-sum: 1\r\n\r\n",
    )
    .await;
    let front = front(&Forwarder::new(Limits::default()), target).await;
    let head = "GET / HTTP/1.1\r\nhost: f\r\nconnection: close\r\n";
    let takes = talk(front, format!("{head}te: trailers\r\n\r\n").as_bytes()).await;
    assert!(takes.ends_with("2\r\nhi\r\n0\r\nx-sum: 1\r\n\r\n"), "{takes}");
    let leaves = talk(front, format!("{head}\r\n").as_bytes()).await;
    assert!(leaves.ends_with("2\r\nhi\r\n0\r\n\r\n"), "{leaves}");
}

#[tokio::test]
async fn headers_keep_their_order_and_reasons_their_words() {
    let seen = seen("GET / HTTP/1.1\r\nx-b: 1\r\nhost: f\r\nte: trailers\r\nconnection: close\r\nx-a: 2\r\nx-c: 3\r\n\r\n").await;
    let lines = "x-b: 1\r\nx-a: 2\r\nx-c: 3\r\nconnection: te\r\nte: trailers\r\n";
    assert_eq!(seen, format!("GET / HTTP/1.1\r\nhost: TARGET\r\n{lines}\r\n"));
    let answer = answered(
        "HTTP/1.1 299 As You Like\r\nx-b: 1\r\nkeep-alive: 1\r\ncontent-length: 0\r\nx-a: 2\r\ndate: x\r\nconnection: close\r\n\r\n",
    )
    .await;
    let line = "HTTP/1.1 299 As You Like\r\nx-b: 1\r\nx-a: 2\r\ndate: x\r\n";
    assert!(answer.starts_with(line), "{answer}");
}

#[tokio::test]
async fn a_body_that_waits_to_be_asked_for_is_asked_for_by_the_backend() {
    let (target, _) = backend(|mut stream| async move {
        let head = read_head(&mut stream).await;
        let head = String::from_utf8(head).unwrap();
        assert!(head.contains("expect: 100-continue\r\n") && head.ends_with("\r\n\r\n"), "{head}");
        if head.starts_with("POST /no") {
            stream.write_all(b"HTTP/1.1 417 Expectation Failed\r\ncontent-length: 0\r\n\r\n").await.unwrap();
        } else {
            stream.write_all(b"HTTP/1.1 100 Continue\r\n\r\n").await.unwrap();
            let mut body = [0; 3];
            stream.read_exact(&mut body).await.unwrap();
            stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\n").await.unwrap();
            stream.write_all(&body).await.unwrap();
        }
    })
    .await;
    let front = front(&Forwarder::new(Limits::default()), target).await;
    for (path, first) in [("/no", "HTTP/1.1 417"), ("/yes", "HTTP/1.1 100")] {
        let mut client = TcpStream::connect(front).await.unwrap();
        let head =
            format!("POST {path} HTTP/1.1\r\nhost: f\r\nexpect: 100-continue\r\ncontent-length: 3\r\n\r\n");
        client.write_all(head.as_bytes()).await.unwrap();
        let got = String::from_utf8(read_head(&mut client).await).unwrap();
        assert!(got.starts_with(first), "{got}");
        if path == "/yes" {
            client.write_all(b"abc").await.unwrap();
            let mut got = read_head(&mut client).await;
            while !got.ends_with(b"abc") {
                assert_ne!(client.read_buf(&mut got).await.unwrap(), 0);
            }
            assert!(got.starts_with(b"HTTP/1.1 200"));
        }
    }
}

#[tokio::test]
async fn two_ways_to_delimit_a_request_never_reach_the_backend() {
    let both = "content-length: 3\r\ntransfer-encoding: chunked\r\n";
    let swapped = "transfer-encoding: chunked\r\ncontent-length: 3\r\n";
    for lengths in [both, swapped] {
        let seen = seen(&format!(
            "POST / HTTP/1.1\r\nhost: f\r\nconnection: close\r\n{lengths}\r\n5\r\nhello\r\n0\r\n\r\n"
        ))
        .await;
        assert!(!seen.contains("content-length"), "{seen}");
        assert!(seen.contains("transfer-encoding: chunked"), "{seen}");
        assert!(seen.ends_with("5\r\nhello\r\n0\r\n\r\n"), "{seen}");
    }
}

#[tokio::test]
async fn ambiguous_requests_are_refused_before_they_are_forwarded() {
    let (target, connections) = backend(|_| async {}).await;
    let front = front(&Forwarder::new(Limits::default()), target).await;
    let cases = [
        "content-length: 3\r\ncontent-length: 4\r\n\r\nabcd",
        "content-length: +3\r\n\r\nabc",
        "content-length: 3, 3\r\n\r\nabc",
        "content-length: -1\r\n\r\n",
        "transfer-encoding: gzip\r\n\r\nabc",
        "transfer-encoding: chunked, gzip\r\n\r\n0\r\n\r\n",
        "transfer-encoding : chunked\r\n\r\n0\r\n\r\n",
        "x: a\r\n\tfolded: b\r\nbad header\r\n\r\n",
        "x: a\0b\r\n\r\n",
    ];
    for case in cases {
        let answer =
            talk(front, format!("POST / HTTP/1.1\r\nhost: f\r\nconnection: close\r\n{case}").as_bytes())
                .await;
        assert!(answer.starts_with("HTTP/1.1 400") || answer.is_empty(), "{case:?}: {answer}");
    }
    let old = talk(front, b"POST / HTTP/1.0\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n").await;
    assert!(old.starts_with("HTTP/1.0 400") || old.starts_with("HTTP/1.1 400"), "{old}");
    assert_eq!(connections.load(Ordering::SeqCst), 0, "none of them caused a connection");
}

#[tokio::test]
async fn an_empty_answer_keeps_its_zero_length() {
    let answer = answered("HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n").await;
    assert!(answer.contains("\r\ncontent-length: 0\r\n"), "{answer}");
    assert!(!answer.contains("transfer-encoding"), "{answer}");
}

#[tokio::test]
async fn answers_without_bodies_keep_what_they_say_about_length() {
    let target = answering(b"HTTP/1.1 200 OK\r\ncontent-length: 1234\r\n\r\n").await;
    let front = front(&Forwarder::new(Limits::default()), target).await;
    let answer = talk(front, b"HEAD / HTTP/1.1\r\nhost: f\r\nconnection: close\r\n\r\n").await;
    assert!(answer.contains("content-length: 1234\r\n"), "{answer}");

    for answer in ["HTTP/1.1 204 No Content\r\n\r\n", "HTTP/1.1 204 No Content\r\ncontent-length: 5\r\n\r\n"]
    {
        let answer = answered(answer).await;
        assert!(!answer.contains("content-length"), "{answer}");
    }
    let answer = answered("HTTP/1.1 304 Not Modified\r\netag: \"x\"\r\n\r\n").await;
    assert!(!answer.contains("content-length") && answer.contains("etag: \"x\""), "{answer}");
}

#[tokio::test]
async fn repeated_answer_headers_stay_in_order() {
    let answer = answered(
        "HTTP/1.1 302 Found\r\nSet-Cookie: a=1\r\nLocation: /x\r\nSet-Cookie: b=2\r\nConnection: X-Hop\r\nX-Hop: 1\r\n\
         Date: Thu, 01 Jan 1970 00:00:00 GMT\r\nContent-Encoding: gzip\r\nContent-Length: 3\r\n\r\n\x1f\x1e\x1d",
    )
    .await;
    let (a, b) = (answer.find("set-cookie: a=1").unwrap(), answer.find("set-cookie: b=2").unwrap());
    assert!(a < b && answer.contains("location: /x\r\n") && !answer.contains("x-hop"), "{answer}");
    assert_eq!(answer.matches("date: ").count(), 1, "{answer}");
    assert!(
        answer.contains("content-encoding: gzip") && answer.ends_with("\r\n\r\n\x1f\x1e\x1d"),
        "{answer}"
    );
}

#[tokio::test]
async fn codings_that_only_one_hop_knows_are_not_asked_for() {
    for line in ["TE: gzip", "TE: deflate;q=0.5, gzip", "X-TE: trailers"] {
        let seen =
            seen(&format!("GET / HTTP/1.1\r\nHost: f\r\nConnection: close, TE\r\n{line}\r\n\r\n")).await;
        assert!(!seen.to_lowercase().contains("\r\nte:") && !seen.contains("connection"), "{seen}");
    }
}

#[tokio::test]
async fn early_hints_are_not_the_answer() {
    let answer = answered(
        "HTTP/1.1 102 Processing\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: </a>; rel=preload\r\n\r\n\
         HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok",
    )
    .await;
    assert!(answer.starts_with("HTTP/1.1 200 OK\r\n") && answer.ends_with("\r\n\r\nok"), "{answer}");
    assert!(!answer.contains("link"), "{answer}");
}

#[tokio::test]
async fn an_answer_with_two_lengths_is_delimited_once() {
    let answer = answered(
        "HTTP/1.1 200 OK\r\ncontent-length: 3\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
    )
    .await;
    assert!(!answer.contains("content-length"), "{answer}");
    assert!(answer.ends_with("5\r\nhello\r\n0\r\n\r\n"), "{answer}");
}

#[tokio::test]
async fn an_old_backend_is_answered_in_the_current_version() {
    let answer = answered("HTTP/1.0 200 OK\r\n\r\nto the end").await;
    assert!(answer.starts_with("HTTP/1.1 200 OK\r\n"), "{answer}");
    assert!(answer.contains("to the end"), "{answer}");
}
