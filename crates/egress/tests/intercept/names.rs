//! TLS connections: which names pass, and how the others are told.

use http::StatusCode;
use sandglass_egress::intercept::UpstreamProxy;
use sandglass_egress::policy::Action;
use sandglass_egress::vault::Secret;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::stack::{NAME, SECRET, SERVER, Stack, ask, get, recorder};

const HTTPS: &str = "192.0.2.10:443";

#[tokio::test]
async fn names_without_a_binding_pass_undecrypted() {
    let mut stack = Stack::new();
    let (seen, handler) = recorder();
    let tls = stack.identity(NAME, &[b"http/1.1"]);
    stack.serve(HTTPS, Some(tls), handler).await;
    let through = stack.intercept(HTTPS).await;
    let stream = stack.handshake(through, NAME, &stack.public_ca, &[b"http/1.1"]).await.unwrap();
    let answer = ask(stream, get(NAME, "/")).await;
    assert_eq!(answer.status(), StatusCode::OK);
    assert_eq!(answer.headers()["x-target"], "/");
    assert_eq!(seen.count(), 1);
    assert_eq!(stack.told(), "[]");
}

#[tokio::test]
async fn servers_may_ask_for_another_hello() {
    for mut stack in [Stack::new(), Stack::bound()] {
        let (seen, handler) = recorder();
        let mut means = rustls::crypto::ring::default_provider();
        // Clients offer a key for another group first.
        means.kx_groups = vec![rustls::crypto::ring::kx_group::SECP384R1];
        let tls = stack.identity_by(means, NAME, &[b"http/1.1"]);
        stack.serve(HTTPS, Some(tls), handler).await;
        let through = stack.intercept(HTTPS).await;
        let bound = stack.vault.lock().unwrap().revision().is_some();
        let authority = if bound { stack.authority.certificate() } else { &stack.public_ca };
        let stream = stack.handshake(through, NAME, authority, &[b"http/1.1"]).await.unwrap();
        assert_eq!(ask(stream, get(NAME, "/")).await.status(), StatusCode::OK);
        assert_eq!(seen.header("authorization").is_some(), bound);
    }
}

#[tokio::test]
async fn a_denied_name_gets_an_alert_and_an_event() {
    let mut stack = Stack::bound();
    let through = stack.intercept(HTTPS).await;
    let error =
        stack.handshake(through, "other.example.com", stack.authority.certificate(), &[]).await.unwrap_err();
    assert!(error.to_string().contains("AccessDenied"), "{error}");
    let expected = r#"[{"kind":"denied","by":"sni","host":"other.example.com","address":"192.0.2.10","port":443,"rule":"default"}]"#;
    assert_eq!(stack.told(), expected);
}

#[tokio::test]
async fn an_allowed_name_at_an_address_of_another_is_denied() {
    let mut stack = Stack::bound();
    let through = stack.intercept("192.0.2.66:443").await;
    assert!(stack.handshake(through, NAME, stack.authority.certificate(), &[]).await.is_err());
    assert!(stack.told().contains("the name has not led to this address"));
}

#[tokio::test]
async fn without_a_name_the_address_needs_a_rule() {
    let mut stack = Stack::bound();
    let (_, handler) = recorder();
    let tls = stack.identity(SERVER, &[]);
    stack.serve(HTTPS, Some(tls), handler).await;
    let through = stack.intercept(HTTPS).await;
    assert!(stack.handshake(through, SERVER, &stack.public_ca, &[]).await.is_err());
    assert!(stack.told().contains("default (no host name)"));
    stack.world.addresses.lock().unwrap().insert(SERVER.parse().unwrap(), Action::Allow);
    let stream = stack.handshake(through, SERVER, &stack.public_ca, &[]).await.unwrap();
    assert_eq!(ask(stream, get(SERVER, "/")).await.status(), StatusCode::OK);
}

/// Writes bytes and reads what comes, until the end or until nothing more is needed.
async fn raw(through: std::net::SocketAddr, bytes: &[u8], enough: &[u8]) -> Vec<u8> {
    let mut stream = TcpStream::connect(through).await.unwrap();
    stream.write_all(bytes).await.unwrap();
    let mut answer = Vec::new();
    while !answer.ends_with(enough) || enough.is_empty() {
        if !matches!(stream.read_buf(&mut answer).await, Ok(1..)) {
            break;
        }
    }
    answer
}

#[tokio::test]
async fn other_protocols_pass_where_no_name_is_needed() {
    let mut stack = Stack::bound();
    let listener = stack.listen(HTTPS).await;
    stack.own(tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            tokio::spawn(async move {
                let (mut read, mut write) = stream.split();
                tokio::io::copy(&mut read, &mut write).await
            });
        }
    }));
    let through = stack.intercept(HTTPS).await;
    let banner = b"SSH-2.0-OpenSSH_9.2\r\n";
    assert_eq!(raw(through, banner, b"").await, b"");
    assert!(stack.told().contains("default (no host name)"));
    stack.world.addresses.lock().unwrap().insert(SERVER.parse().unwrap(), Action::Allow);
    assert_eq!(raw(through, banner, banner).await, banner);
    // What begins as TLS has to be TLS: its name could be one that only the server can read.
    assert_eq!(raw(through, b"\x16\x03\x01\x00\x04\x01\x00\x00\x00", b"").await, b"");
    assert!(stack.told().contains("no TLS handshake"));
}

#[tokio::test]
async fn plain_http_is_judged_on_the_port_of_tls_too_and_gets_nothing() {
    let mut stack = Stack::new();
    stack.write(
        http::Method::POST,
        &crate::stack::bearer(r#","schemes":["http","https"]"#),
        StatusCode::CREATED,
    );
    let (seen, handler) = recorder();
    stack.serve(HTTPS, None, handler).await;
    let through = stack.intercept(HTTPS).await;
    let answer = ask(TcpStream::connect(through).await.unwrap(), get("other.example.com", "/")).await;
    assert_eq!(answer.status(), StatusCode::FORBIDDEN);
    let answer = ask(TcpStream::connect(through).await.unwrap(), get(NAME, "/")).await;
    assert_eq!(answer.status(), StatusCode::OK);
    assert_eq!((seen.count(), seen.header("authorization")), (1, None));
}

#[tokio::test]
async fn a_change_of_the_rules_ends_what_they_no_longer_allow() {
    let mut stack = Stack::new();
    let (_, handler) = recorder();
    let tls = stack.identity(NAME, &[]);
    stack.serve(HTTPS, Some(tls), handler).await;
    let through = stack.intercept(HTTPS).await;
    let mut stream = stack.handshake(through, NAME, &stack.public_ca, &[]).await.unwrap();
    assert_eq!(stack.interceptors[0].recheck(), 0);
    stack.world.led.lock().unwrap().clear();
    assert_eq!(stack.interceptors[0].recheck(), 0);
    stack.world.names.lock().unwrap().clear();
    assert_eq!(stack.interceptors[0].recheck(), 1);
    let mut rest = Vec::new();
    assert!(stream.read_to_end(&mut rest).await.is_err() || rest.is_empty());
    while stack.interceptors[0].connections() > 0 {
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn connections_of_every_listener_are_judged_anew() {
    let mut stack = Stack::new();
    let (_, handler) = recorder();
    let tls = stack.identity(NAME, &[]);
    stack.serve(HTTPS, Some(tls), handler).await;
    let first = stack.intercept(HTTPS).await;
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let second = listener.local_addr().unwrap();
    let same = stack.interceptors[0].clone();
    stack.own(tokio::spawn(async move { same.serve(listener).await }));
    let mut held = Vec::new();
    for through in [first, second, first, second] {
        held.push(stack.handshake(through, NAME, &stack.public_ca, &[]).await.unwrap());
    }
    assert_eq!(stack.interceptors[0].connections(), 4);
    stack.world.names.lock().unwrap().clear();
    assert_eq!(stack.interceptors[0].recheck(), 4);
}

#[tokio::test]
async fn a_new_binding_ends_the_connections_it_cannot_lend_on() {
    let mut stack = Stack::new();
    let (_, handler) = recorder();
    let tls = stack.identity(NAME, &[]);
    stack.serve(HTTPS, Some(tls), handler).await;
    let through = stack.intercept(HTTPS).await;
    let _passed = stack.handshake(through, NAME, &stack.public_ca, &[]).await.unwrap();
    assert_eq!(stack.interceptors[0].recheck(), 0);
    stack.write(http::Method::POST, &crate::stack::bearer(""), StatusCode::CREATED);
    let _lent = stack.inside(through, &[]).await;
    assert_eq!(stack.interceptors[0].recheck(), 1);
}

/// A proxy that takes one CONNECT per connection and says what it was asked.
async fn proxy(stack: &mut Stack, target: String) -> std::sync::Arc<std::sync::Mutex<Vec<String>>> {
    let listener = stack.listen("192.0.2.99:3128").await;
    let asked = std::sync::Arc::new(std::sync::Mutex::new(Vec::new()));
    let notes = std::sync::Arc::clone(&asked);
    stack.own(tokio::spawn(async move {
        while let Ok((mut client, _)) = listener.accept().await {
            let mut head = Vec::new();
            while !head.ends_with(b"\r\n\r\n") {
                head.push(client.read_u8().await.unwrap());
            }
            notes.lock().unwrap().push(String::from_utf8(head).unwrap());
            client.write_all(b"HTTP/1.1 200 Connection established\r\nVia: x\r\n\r\n").await.unwrap();
            let mut server = TcpStream::connect(&target).await.unwrap();
            tokio::spawn(async move { tokio::io::copy_bidirectional(&mut client, &mut server).await });
        }
    }));
    asked
}

#[tokio::test]
async fn an_upstream_proxy_is_asked_for_the_name() {
    let mut stack = Stack::bound();
    let (seen, handler) = recorder();
    let tls = stack.identity(NAME, &[]);
    stack.serve("192.0.2.11:443", Some(tls), handler).await;
    let real = stack.real("192.0.2.11:443");
    let asked = proxy(&mut stack, real).await;
    stack.proxy = Some(
        UpstreamProxy::parse("http://proxy.example.net:3128", Some(Secret::new("Basic cHJveHk="))).unwrap(),
    );
    let through = stack.intercept(HTTPS).await;
    let answer = ask(stack.inside(through, &[]).await, get(NAME, "/")).await;
    assert_eq!(answer.status(), StatusCode::OK);
    assert_eq!(seen.header("authorization").unwrap(), format!("Bearer {SECRET}"));
    let asked = asked.lock().unwrap().concat();
    assert_eq!(
        asked,
        "CONNECT api.example.com:443 HTTP/1.1\r\nHost: api.example.com:443\r\nProxy-Authorization: Basic cHJveHk=\r\n\r\n"
    );
}

#[tokio::test]
async fn an_upstream_proxy_is_not_asked_for_names_that_have_not_led_to_the_address() {
    let mut stack = Stack::new();
    stack.world.open.store(true, std::sync::atomic::Ordering::Relaxed);
    let asked = proxy(&mut stack, "192.0.2.1:9".to_owned()).await;
    stack.proxy = Some(UpstreamProxy::parse("http://proxy.example.net:3128", None).unwrap());
    let through = stack.intercept(HTTPS).await;
    let other = "internal.example.com";
    let error = stack.handshake(through, other, stack.authority.certificate(), &[]).await.unwrap_err();
    assert!(error.to_string().contains("AccessDenied"), "{error}");
    let through = stack.intercept("192.0.2.10:80").await;
    let answer = ask(TcpStream::connect(through).await.unwrap(), get(other, "/")).await;
    assert_eq!(answer.status(), StatusCode::FORBIDDEN);
    assert!(asked.lock().unwrap().is_empty());
    assert_eq!(stack.told().matches("the upstream proxy decides by name").count(), 2);
}
