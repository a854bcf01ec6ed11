//! Tests of what is read from first bytes.

use std::sync::Arc;

use proptest::prelude::*;

use super::first::{First, LIMIT, Protocol, begins_request, read, read_again};
use super::host::Host;
use super::tls::{self, Reply};

/// A real client's first message.
pub(super) fn hello(name: Option<&str>) -> Vec<u8> {
    let config =
        rustls::ClientConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()));
    let config = config.with_safe_default_protocol_versions().unwrap();
    let mut config = config.with_root_certificates(rustls::RootCertStore::empty()).with_no_client_auth();
    config.enable_sni = name.is_some();
    let name = name.unwrap_or("unused.example").to_owned().try_into().unwrap();
    let mut connection = rustls::ClientConnection::new(Arc::new(config), name).unwrap();
    let mut bytes = Vec::new();
    connection.write_tls(&mut bytes).unwrap();
    bytes
}

/// The same message in records of so many bytes each.
fn in_records(hello: &[u8], size: usize) -> Vec<u8> {
    let mut bytes = Vec::new();
    for piece in hello[5..].chunks(size) {
        bytes.extend_from_slice(&[22, 3, 1]);
        bytes.extend_from_slice(&(piece.len() as u16).to_be_bytes());
        bytes.extend_from_slice(piece);
    }
    bytes
}

/// A hello with these extensions, in one record.
fn with_extensions(extensions: &[(u16, &[u8])]) -> Vec<u8> {
    let mut list = Vec::new();
    for (kind, value) in extensions {
        list.extend_from_slice(&kind.to_be_bytes());
        list.extend_from_slice(&(value.len() as u16).to_be_bytes());
        list.extend_from_slice(value);
    }
    let mut body = vec![3, 3];
    body.extend_from_slice(&[7; 32]);
    body.extend_from_slice(&[0, 0, 2, 0x13, 1, 1, 0]);
    body.extend_from_slice(&(list.len() as u16).to_be_bytes());
    body.extend_from_slice(&list);
    record(&body)
}

fn record(body: &[u8]) -> Vec<u8> {
    let mut bytes = vec![22, 3, 1];
    bytes.extend_from_slice(&(body.len() as u16 + 4).to_be_bytes());
    bytes.extend_from_slice(&[1, 0]);
    bytes.extend_from_slice(&(body.len() as u16).to_be_bytes());
    bytes.extend_from_slice(body);
    bytes
}

fn server_name(name: &[u8]) -> Vec<u8> {
    let mut value = ((name.len() + 3) as u16).to_be_bytes().to_vec();
    value.push(0);
    value.extend_from_slice(&(name.len() as u16).to_be_bytes());
    value.extend_from_slice(name);
    value
}

fn named(name: &str, protocol: Protocol, length: usize) -> First {
    First::Named { protocol, host: Host::Name(name.into()), length }
}

#[test]
fn server_names_are_found_however_the_hello_is_cut_into_records() {
    let whole = hello(Some("good.example"));
    assert_eq!(read(&whole), named("good.example", Protocol::Tls, whole.len()));
    for size in [1, 3, 50, 500] {
        let bytes = in_records(&whole, size);
        assert_eq!(read(&bytes), named("good.example", Protocol::Tls, bytes.len()), "{size}");
    }
    assert!(matches!(read(&hello(None)), First::Unnamed { protocol: Protocol::Tls, .. }));
    let old = record(&[&[3, 3][..], &[7; 32], &[0, 0, 2, 0x13, 1, 1, 0]].concat());
    assert!(matches!(read(&old), First::Unnamed { protocol: Protocol::Tls, .. }));
}

#[test]
fn hellos_that_servers_may_read_differently_are_broken() {
    let name = server_name(b"good.example");
    let other = server_name(b"evil.example");
    let outer_and_inner = with_extensions(&[(0xfe0d, &[0; 40]), (0, &name)]);
    assert!(matches!(read(&outer_and_inner), First::Named { .. }), "the outer name counts");
    let mut two_in_one = [&[0, 30][..], &name[2..], &other[2..]].concat();
    two_in_one[1] = (two_in_one.len() - 2) as u8;
    let mut longer = with_extensions(&[(0, &name)]);
    longer[4] += 1;
    longer[8] += 1;
    longer.push(0);
    let mut wrong_version = with_extensions(&[(0, &name)]);
    wrong_version[1] = 2;
    for broken in [
        with_extensions(&[(0, &name), (0, &other)]),
        with_extensions(&[(0, &two_in_one)]),
        with_extensions(&[(0, &[])]),
        with_extensions(&[(0, &server_name(b""))]),
        with_extensions(&[(0, &server_name(b"good.example\0.evil.example"))]),
        longer,
        wrong_version,
        [&[22, 3, 1, 0, 0][..], &with_extensions(&[(0, &name)])].concat(),
        [&[20, 3, 1, 0, 1, 1][..], &with_extensions(&[(0, &name)])].concat(),
        vec![22, 3, 1, 0, 4, 2, 0, 0, 0],
        vec![22, 3, 1, 0xff, 0xff],
        vec![22, 3, 1, 0, 4, 1, 0xff, 0, 0],
        vec![0x80, 0x2e, 1, 3, 1, 0, 0x15, 0, 0, 0, 0x10],
    ] {
        assert_eq!(read(&broken), First::Broken(Protocol::Tls), "{broken:?}");
    }
}

#[test]
fn hosts_of_requests_are_found() {
    let host = |request: &str| read(request.as_bytes());
    let head = "\r\nGET /a?b=c HTTP/1.1\r\nUser-Agent: x\r\nhost:  Good.Example:8080 \r\n\r\n";
    assert_eq!(host(&format!("{head}body")), named("good.example", Protocol::Http, head.len()));
    let absolute = "GET http://good.example/ HTTP/1.1\nHost: good.example\n\n";
    assert_eq!(host(absolute), named("good.example", Protocol::Http, absolute.len()));
    let tunnel = "CONNECT evil.example:443 HTTP/1.1\r\nHost: evil.example:443\r\n\r\n";
    assert_eq!(host(tunnel), named("evil.example", Protocol::Http, tunnel.len()));
    assert!(matches!(host("GET / HTTP/1.0\r\n\r\n"), First::Unnamed { protocol: Protocol::Http, .. }));
    assert!(matches!(
        host("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
        First::Unnamed { protocol: Protocol::Http2, .. }
    ));
    let literal = host("GET / HTTP/1.1\r\nHost: 192.0.2.1\r\n\r\n");
    assert!(matches!(literal, First::Named { host: Host::Address(_), .. }));
}

#[test]
fn requests_that_servers_may_read_differently_are_broken() {
    for request in [
        "GET / HTTP/1.1\r\nHost: good.example\r\nHost: evil.example\r\n\r\n",
        "GET http://evil.example/ HTTP/1.1\r\nHost: good.example\r\n\r\n",
        "GET http://evil.example/ HTTP/1.1\r\n\r\n",
        "GET good.example@evil.example HTTP/1.1\r\nHost: good.example\r\n\r\n",
        "GET / HTTP/1.1\r\nHost : good.example\r\n\r\n",
        "GET / HTTP/1.1\r\nX: y\r\n Host: evil.example\r\nHost: good.example\r\n\r\n",
        "GET / HTTP/1.1\r\nX: y\rHost: evil.example\r\nHost: good.example\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: good.example, evil.example\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: good.example\0\r\n\r\n",
        "GET  / HTTP/1.1\r\nHost: good.example\r\n\r\n",
        "GET / http/1.1\r\nHost: good.example\r\n\r\n",
        "GET / HTTP/3.0\r\nHost: good.example\r\n\r\n",
        " GET / HTTP/1.1\r\nHost: good.example\r\n\r\n",
        "GET\t/ HTTP/1.1\r\nHost: good.example\r\n\r\n",
        "GET /\r\n",
        "GET\r\n",
        "GET\u{b}/\u{b}HTTP/1.1\r\nHost: evil.example\r\n\r\n",
        "PROPFIND\u{c}/ HTTP/1.1\r\nHost: evil.example\r\n\r\n",
        "\u{b}GET / HTTP/1.1\r\nHost: evil.example\r\n\r\n",
        "\u{a0}GET / HTTP/1.1\r\nHost: evil.example\r\n\r\n",
        "\u{feff}GET / HTTP/1.1\r\nHost: evil.example\r\n\r\n",
        "@ / HTTP/1.1\r\nHost: evil.example\r\n\r\n",
        "G@T / http/1.1\r\nHost: evil.example\r\n\r\n",
        "x\rGET / HTTP/1.1\r\nHost: evil.example\r\n\r\n",
        "GET / HTTP/1.1\0\r\nHost: evil.example\r\n\r\n",
    ] {
        assert_eq!(read(request.as_bytes()), First::Broken(Protocol::Http), "{request:?}");
    }
    let long_word = format!("{} / HTTP/1.1\r\nHost: good.example\r\n\r\n", "X".repeat(40));
    assert!(matches!(read(long_word.as_bytes()), First::Named { .. }));
    assert_eq!(read(&[b'X'; 9000]), First::Broken(Protocol::Http));
    assert_eq!(read(&[0xff; 9000]), First::Broken(Protocol::Http));
    let endless = format!("GET / HTTP/1.1\r\nX: {}", "y".repeat(LIMIT));
    assert_eq!(read(endless.as_bytes()), First::Broken(Protocol::Http));
}

#[test]
fn a_request_line_tells_a_request_whatever_follows() {
    for request in [
        "\r\n\nGET / HTTP/1.1\r\n",
        "PROPFIND /a HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        "PRI * HTTP/2.0\r\n",
    ] {
        assert!(begins_request(request.as_bytes()), "{request:?}");
    }
    for other in
        ["", "GET / HTTP/1.1", "GET / HTTP/1.1 \r\n", "GET /\r\n", "SSH-2.0-x\r\n", "\u{16}\u{3}\u{1}"]
    {
        assert!(!begins_request(other.as_bytes()), "{other:?}");
    }
}

#[test]
fn nobody_speaks_for_a_proxy() {
    let (text, binary) = (b"PROXY TCP4 192.0.2.9 192.0.2.1 1 443\r\n", b"\r\n\r\n\0\r\nQUIT\n\x21\x11");
    for (said, from) in [(&text[..], 6), (binary, 12)] {
        for length in 1..said.len() {
            let expected = if length < from { First::More } else { First::Broken(Protocol::Http) };
            assert_eq!(read(&said[..length]), expected, "{length} of {said:?}");
        }
    }
    assert_eq!(read(b"PROXYING along\r\n"), First::Foreign);
    assert_eq!(read(b"\r\n\r\n\0\r\nQUIET"), First::Foreign);
}

#[test]
fn protocols_without_names_are_foreign() {
    for bytes in [
        &b"SSH-2.0-OpenSSH_9.6 Debian\r\n"[..],
        b"EHLO client.example\r\n",
        b"*1\r\n$4\r\nPING\r\n",
        b"get some:key\r\n",
        b"PING\r\n",
        b"\0\0\0\x08\x04\xd2\x16\x2f",
        b"\xff\xff\xff\x04\xff",
        b"\xff\xff\xff\r\n",
        b"AMQP\0\0\x09\x01",
        b"QUIT\r\n",
        b"(hello)\n",
    ] {
        assert_eq!(read(bytes), First::Foreign, "{bytes:?}");
    }
    assert_eq!(read(b""), First::More);
    assert_eq!(read(b"GE"), First::More);
    assert_eq!(read(&[b'a'; 40]), First::More);
    assert_eq!(read(b"@ / HTT"), First::More);
    assert_eq!(read(b"GET / HTTP/1.1\r\nHost: good.example\r\n"), First::More);
}

/// A server's hello with this random number, or the one that asks for another hello.
pub(super) fn server_hello(random: Option<[u8; 32]>) -> Vec<u8> {
    let retry = "cf21ad74e59a6111be1d8c021e65b891c2a211167abb8c5e079e09e2c8a8339c";
    let retry = (0..32).map(|at| u8::from_str_radix(&retry[2 * at..2 * at + 2], 16).unwrap());
    let random = random.map_or_else(|| retry.collect(), |random| random.to_vec());
    [&[22, 3, 3, 0, 60, 2, 0, 0, 56, 3, 3][..], &random, &[0; 22]].concat()
}

#[test]
fn a_server_that_asks_for_another_hello_is_recognised() {
    let (retry, last) = (server_hello(None), server_hello(Some([5; 32])));
    for length in 0..tls::ANSWER {
        assert_eq!(tls::reply(&retry[..length]), Reply::More, "{length}");
    }
    assert_eq!(tls::reply(&retry), Reply::Retry);
    assert_eq!(tls::reply(&last), Reply::Final);
    assert_eq!(tls::reply(&[21, 3, 3, 0, 2]), Reply::Final);
    assert_eq!(tls::reply(b"HTTP/1.1 400"), Reply::Final);
    let mut pieces = last.clone();
    pieces[4] = 3;
    assert_eq!(tls::reply(&pieces), Reply::Retry);
}

#[test]
fn a_second_hello_names_the_host_of_the_first() {
    let first = read(&hello(Some("good.example")));
    let early = [&[20, 3, 3, 0, 1, 1, 23, 3, 3, 1, 0][..], &[9; 256]].concat();
    let again = [&early[..], &hello(Some("good.example"))].concat();
    assert_eq!(read_again(&first, &again), named("good.example", Protocol::Tls, again.len()));
    for length in 0..again.len() {
        assert_eq!(read_again(&first, &again[..length]), First::More, "{length}");
    }
    for other in [Some("evil.example"), None] {
        let again = [&early[..], &hello(other)].concat();
        assert_eq!(read_again(&first, &again), First::Broken(Protocol::Tls), "{other:?}");
    }
    let nobody = read(&hello(None));
    assert!(matches!(read_again(&nobody, &hello(None)), First::Unnamed { .. }));
    assert_eq!(read_again(&nobody, &hello(Some("good.example"))), First::Broken(Protocol::Tls));
    let endless: Vec<u8> = early.iter().copied().cycle().take(2 * LIMIT).collect();
    assert_eq!(read_again(&first, &endless), First::Broken(Protocol::Tls));
    assert_eq!(read_again(&first, b"GET / HTTP/1.1\r\n"), First::Broken(Protocol::Tls));
}

/// Bytes that are nearly something.
fn anything() -> impl Strategy<Value = Vec<u8>> {
    let samples = prop_oneof![
        Just(hello(Some("good.example"))),
        Just(in_records(&hello(Some("good.example")), 60)),
        Just(with_extensions(&[(10, &[1; 9]), (0, &server_name(b"good.example")), (43, &[2, 3, 4])])),
        Just(b"\r\nPOST /x HTTP/1.1\r\nHost: good.example\r\nContent-Length: 1\r\n\r\nx".to_vec()),
        Just(b"GET http://good.example/ HTTP/1.1\r\nHost: good.example\r\n\r\n".to_vec()),
        Just(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec()),
        Just(vec![0x80, 0x2e, 1, 3, 1]),
        proptest::collection::vec(any::<u8>(), 0..200),
        "[A-Z]{0,5}[ \t\r\n]{0,3}[ -~\r\n]{0,60}".prop_map(String::into_bytes),
        "[ -~\x00\x0b\u{a0}]{0,5}(GET)?[\x0b \x00]{0,2}/ ?[hH]TTP/1.1\r?\n".prop_map(String::into_bytes),
    ];
    let changes = proptest::collection::vec((any::<proptest::sample::Index>(), any::<u8>()), 0..4);
    (samples, changes).prop_map(|(mut bytes, changes)| {
        for (at, value) in changes {
            if !bytes.is_empty() {
                let at = at.index(bytes.len());
                bytes[at] = value;
            }
        }
        bytes
    })
}

proptest! {
    #[test]
    fn how_bytes_arrive_changes_nothing(bytes in anything()) {
        let whole = read(&bytes);
        for length in 0..=bytes.len() {
            let part = read(&bytes[..length]);
            if part == First::More {
                continue;
            }
            // A foreign protocol has no length of its own.
            prop_assert_eq!(&part, &whole, "after {} bytes", length);
            if let First::Named { length: needed, .. } | First::Unnamed { length: needed, .. } = part {
                prop_assert!(needed <= length);
            }
        }
    }
}
