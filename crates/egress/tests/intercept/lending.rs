//! Credentials reach the server that they are for and nobody else.

use http::{Request, StatusCode};
use http_body_util::BodyExt;
use hyper_util::rt::{TokioExecutor, TokioIo};

use crate::stack::{NAME, SECRET, Stack, ask, bearer, get, recorder, text};

const HTTPS: &str = "192.0.2.10:443";

#[tokio::test]
async fn a_credential_is_injected_and_never_seen_inside() {
    let mut stack = Stack::bound();
    let (seen, handler) = recorder();
    let tls = stack.identity(NAME, &[b"http/1.1"]);
    stack.serve(HTTPS, Some(tls), handler).await;
    let through = stack.intercept(HTTPS).await;

    let mut request = get(NAME, "/v1/things?q=1");
    request.headers_mut().append("authorization", "Bearer of-the-client".parse().unwrap());
    request.headers_mut().append("authorization", "Bearer another".parse().unwrap());
    request.headers_mut().insert("connection", "authorization".parse().unwrap());
    let answer = ask(stack.inside(through, &[b"http/1.1"]).await, request).await;

    assert_eq!(answer.status(), StatusCode::OK);
    assert_eq!(answer.headers()["x-echo"], "[REDACTED]");
    assert!(!format!("{answer:?}").contains(SECRET));
    let (got, _) = seen.last();
    assert_eq!(got.uri(), "/v1/things?q=1");
    assert_eq!(
        got.headers().get_all("authorization").iter().collect::<Vec<_>>(),
        [&format!("Bearer {SECRET}")]
    );
    let told = stack.told();
    assert_eq!(
        told,
        r#"[{"kind":"injected","binding":"api","host":"api.example.com","method":"GET","revision":1}]"#
    );
    assert!(!format!("{:?} {:?}", stack.vault.lock().unwrap(), stack.authority).contains(SECRET));
}

#[tokio::test]
async fn http2_is_spoken_on_both_sides() {
    let mut stack = Stack::bound();
    let (seen, handler) = recorder();
    let tls = stack.identity(NAME, &[b"h2", b"http/1.1"]);
    stack.serve(HTTPS, Some(tls), handler).await;
    let through = stack.intercept(HTTPS).await;

    let stream = stack.inside(through, &[b"h2", b"http/1.1"]).await;
    assert_eq!(stream.get_ref().1.alpn_protocol(), Some(&b"h2"[..]));
    let (mut sender, connection) =
        hyper::client::conn::http2::handshake(TokioExecutor::new(), TokioIo::new(stream)).await.unwrap();
    let driver = tokio::spawn(connection);
    for number in 0..3 {
        let request = Request::post(format!("https://{NAME}/v1/{number}")).body(text("body")).unwrap();
        let answer = sender.send_request(request).await.unwrap();
        assert_eq!(answer.headers()["x-echo"], "[REDACTED]");
        assert_eq!(answer.into_body().collect().await.unwrap().to_bytes(), "hello");
        assert_eq!(seen.header("authorization").unwrap(), format!("Bearer {SECRET}"));
        assert_eq!(seen.last().0.version(), http::Version::HTTP_2);
        assert_eq!(seen.last().1, "body");
    }
    let other = Request::get("https://other.example.com/").body(text("")).unwrap();
    assert_eq!(sender.send_request(other).await.unwrap().status(), StatusCode::MISDIRECTED_REQUEST);
    assert_eq!(seen.count(), 3);
    driver.abort();
}

#[tokio::test]
async fn only_what_the_binding_names_gets_it() {
    let mut stack = Stack::new();
    stack.write(
        http::Method::POST,
        &bearer(r#","methods":["GET"],"paths":["/v1/*","/exact"]"#),
        StatusCode::CREATED,
    );
    let (seen, handler) = recorder();
    let tls = stack.identity(NAME, &[]);
    stack.serve(HTTPS, Some(tls), handler).await;
    let through = stack.intercept(HTTPS).await;
    for (method, target, injected) in [
        ("GET", "/v1/x", true),
        ("GET", "/v1/a%2Fb", true),
        ("GET", "/exact?x=/v1/", true),
        ("GET", "/exact/", false),
        ("GET", "/v2/x", false),
        ("POST", "/v1/x", false),
        ("get", "/v1/x", false),
        ("GET", "//v1/x", false),
    ] {
        let request =
            Request::builder().method(method).uri(target).header("host", NAME).body(text("")).unwrap();
        let answer = ask(stack.inside(through, &[]).await, request).await;
        assert_eq!(answer.status(), StatusCode::OK, "{target}");
        assert_eq!(seen.header("authorization").is_some(), injected, "{method} {target}");
        assert_eq!(seen.last().0.uri(), target);
    }
}

#[tokio::test]
async fn paths_that_can_be_read_in_two_ways_are_refused() {
    let mut stack = Stack::new();
    stack.write(http::Method::POST, &bearer(r#","paths":["/v1/*"]"#), StatusCode::CREATED);
    let (seen, handler) = recorder();
    let tls = stack.identity(NAME, &[]);
    stack.serve(HTTPS, Some(tls), handler).await;
    let through = stack.intercept(HTTPS).await;
    for target in [
        "/v1/../admin",
        "/v1/%2e%2e/admin",
        "/v1/%252e%252e/x",
        "/v1/..%5cadmin",
        "/v1%2fx",
        "/%761/x",
        "/v1/..;/x",
        "/v1/%255c",
        "/v1/%c0%ae%c0%ae/admin",
        "/v1/%u002e%u002e/admin",
        "/v1/%ef%bc%8e%ef%bc%8e/admin",
        "/v1/..%20/admin",
        "/v1/..+/admin",
    ] {
        let answer = ask(stack.inside(through, &[]).await, get(NAME, target)).await;
        assert_eq!(answer.status(), StatusCode::FORBIDDEN, "{target}");
    }
    assert_eq!(seen.count(), 0);
    assert!(stack.told().contains(r#""by":"vault""#));
}

#[tokio::test]
async fn a_request_that_names_another_port_gets_nothing() {
    let mut stack = Stack::new();
    stack.write(http::Method::POST, &bearer(r#","paths":["/v1/*"]"#), StatusCode::CREATED);
    let (seen, handler) = recorder();
    let tls = stack.identity(NAME, &[]);
    stack.serve(HTTPS, Some(tls), handler).await;
    let through = stack.intercept(HTTPS).await;
    let ours = format!("{NAME}:443");
    let another = format!("{NAME}:8443");
    let answer = ask(stack.inside(through, &[]).await, get(&ours, "/v1/x")).await;
    assert_eq!(answer.status(), StatusCode::OK);
    assert!(seen.header("authorization").is_some());
    let answer = ask(stack.inside(through, &[]).await, get(&another, "/v1/x")).await;
    assert_eq!(answer.status(), StatusCode::MISDIRECTED_REQUEST);
    assert_eq!(seen.count(), 1);
    // Where nothing is lent it is the server's business.
    let answer = ask(stack.inside(through, &[]).await, get(&another, "/v2/x")).await;
    assert_eq!(answer.status(), StatusCode::OK);
    assert!(seen.header("authorization").is_none());
}

#[tokio::test]
async fn a_server_that_does_not_prove_the_name_gets_nothing() {
    let mut stack = Stack::bound();
    let (seen, handler) = recorder();
    let tls = stack.identity("evil.example.net", &[]);
    stack.serve(HTTPS, Some(tls), handler).await;
    let through = stack.intercept(HTTPS).await;
    let answer = ask(stack.inside(through, &[]).await, get(NAME, "/")).await;
    assert_eq!(answer.status(), StatusCode::BAD_GATEWAY);
    assert!(String::from_utf8_lossy(answer.body()).contains("certificate"));
    assert_eq!(seen.count(), 0);
}

#[tokio::test]
async fn a_request_for_another_host_than_the_handshake_is_misdirected() {
    let mut stack = Stack::bound();
    let (seen, handler) = recorder();
    let tls = stack.identity(NAME, &[]);
    stack.serve(HTTPS, Some(tls), handler).await;
    let through = stack.intercept(HTTPS).await;
    for host in ["other.example.com", "192.0.2.10"] {
        let answer = ask(stack.inside(through, &[]).await, get(host, "/")).await;
        assert_eq!(answer.status(), StatusCode::MISDIRECTED_REQUEST);
    }
    let answer = ask(stack.inside(through, &[]).await, get("API.example.com.:443", "/")).await;
    assert_eq!(answer.status(), StatusCode::OK);
    assert_eq!(seen.count(), 1);
}

#[tokio::test]
async fn without_a_readable_vault_nothing_leaves() {
    let mut stack = Stack::new();
    *stack.vault.lock().unwrap() = sandglass_egress::vault::Vault::new(crate::stack::conditions());
    let (seen, handler) = recorder();
    let tls = stack.identity(NAME, &[]);
    stack.serve(HTTPS, Some(tls), std::sync::Arc::clone(&handler)).await;
    stack.serve("192.0.2.10:80", None, handler).await;
    let through = stack.intercept(HTTPS).await;
    let answer = ask(stack.inside(through, &[]).await, get(NAME, "/")).await;
    assert_eq!(answer.status(), StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(answer.body(), "credential proxy unavailable\n");
    let through = stack.intercept("192.0.2.10:80").await;
    let answer = ask(tokio::net::TcpStream::connect(through).await.unwrap(), get(NAME, "/")).await;
    assert_eq!(answer.status(), StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(seen.count(), 0);
}

#[tokio::test]
async fn placeholders_are_replaced_where_they_may_be() {
    let mut stack = Stack::new();
    let value = r#"a b/\"&é"#;
    let vault = format!(
        r#"{{"credentials":[{{"name":"token","source":{{"value":"{value}"}}}},{{"name":"plain","source":{{"value":"{SECRET}"}}}}],
            "bindings":[{{"name":"api","match":{{"hosts":["{NAME}"]}},"auth":{{"type":"passthrough","substitutions":[
              {{"credential":"token","placeholder":"{{{{T}}}}","in":["path","query","body"]}},
              {{"credential":"plain","placeholder":"$PLAIN","in":["header"]}}]}}}}]}}"#
    );
    stack.write(http::Method::POST, &vault, StatusCode::CREATED);
    let (seen, handler) = recorder();
    let tls = stack.identity(NAME, &[]);
    stack.serve(HTTPS, Some(tls), handler).await;
    let through = stack.intercept(HTTPS).await;
    let cases = [
        ("application/json", r#"{"k":"{{T}}","p":"$PLAIN"}"#, "{\"k\":\"a b/\\\"&é\",\"p\":\"$PLAIN\"}"),
        (
            "application/x-www-form-urlencoded",
            "k=%7B%7BT%7D%7D&j={{T}}",
            "k=a+b%2F%22%26%C3%A9&j=a+b%2F%22%26%C3%A9",
        ),
        ("text/plain", "x {{T}}", "x a b/\"&é"),
        ("multipart/form-data; boundary=b", "x {{T}}", "x {{T}}"),
    ];
    for (kind, body, expected) in cases {
        let request = Request::post("/p/%7B%7BT%7D%7D?q={{T}}")
            .header("host", NAME)
            .header("content-type", kind)
            .header("x-key", "key=$PLAIN")
            .body(text(body))
            .unwrap();
        let answer = ask(stack.inside(through, &[]).await, request).await;
        assert_eq!(answer.status(), StatusCode::OK);
        assert_eq!(answer.headers()["x-target"], "/p/[REDACTED]?q=[REDACTED]");
        let (got, sent) = seen.last();
        assert_eq!(got.uri(), "/p/a%20b%2F%22%26%C3%A9?q=a%20b%2F%22%26%C3%A9");
        assert_eq!(got.headers()["x-key"], format!("key={SECRET}"));
        assert_eq!(String::from_utf8_lossy(&sent), expected);
        assert_eq!(got.headers()["content-length"], expected.len().to_string());
    }
}

#[tokio::test]
async fn long_bodies_pass_as_they_are() {
    let mut stack = Stack::new();
    let vault = format!(
        r#"{{"credentials":[{{"name":"token","source":{{"value":"{SECRET}"}}}}],
            "bindings":[{{"name":"api","match":{{"hosts":["{NAME}"]}},"auth":{{"type":"bearer","credential":"token",
              "substitutions":[{{"credential":"token","placeholder":"{{{{T}}}}","in":["body"]}}]}}}}]}}"#
    );
    stack.write(http::Method::POST, &vault, StatusCode::CREATED);
    let (seen, handler) = recorder();
    let tls = stack.identity(NAME, &[]);
    stack.serve(HTTPS, Some(tls), handler).await;
    let through = stack.intercept(HTTPS).await;
    for length in [(1 << 20) - 5, 1 << 20, 3 << 20] {
        let body = format!("{{{{T}}}}{}", "x".repeat(length));
        let request = Request::post("/").header("host", NAME).body(text(&body)).unwrap();
        let answer = ask(stack.inside(through, &[]).await, request).await;
        assert_eq!(answer.status(), StatusCode::OK);
        let (_, sent) = seen.last();
        let expected = if body.len() <= 1 << 20 { body.replace("{{T}}", SECRET) } else { body };
        assert_eq!(sent.len(), expected.len());
        assert!(sent == expected, "{length}");
        assert_eq!(seen.header("authorization").unwrap(), format!("Bearer {SECRET}"));
    }
}

#[tokio::test]
async fn a_closed_connection_is_made_again() {
    let mut stack = Stack::bound();
    let (seen, handler) = recorder();
    let closing: crate::stack::Handler = std::sync::Arc::new(move |request| {
        let answer = handler(request);
        Box::pin(async move {
            let mut answer = answer.await;
            answer.headers_mut().insert("connection", "close".parse().unwrap());
            answer
        })
    });
    let tls = stack.identity(NAME, &[]);
    stack.serve(HTTPS, Some(tls), closing).await;
    let through = stack.intercept(HTTPS).await;
    let stream = stack.inside(through, &[]).await;
    let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.unwrap();
    let driver = tokio::spawn(connection);
    for number in 1..=4 {
        sender.ready().await.unwrap();
        let request = Request::post("/").header("host", NAME).body(text("once")).unwrap();
        let answer = sender.send_request(request).await.unwrap();
        assert_eq!(answer.status(), StatusCode::OK);
        assert!(!answer.headers().contains_key("connection"));
        answer.into_body().collect().await.unwrap();
        assert_eq!(seen.count(), number);
    }
    driver.abort();
}

#[tokio::test]
async fn no_corner_of_an_answer_keeps_a_secret() {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let mut stack = Stack::bound();
    let tls = stack.identity(NAME, &[]);
    let listener = stack.listen(HTTPS).await;
    let answer = format!(
        "HTTP/1.1 103 Early {SECRET}\r\nLink: <{SECRET}>\r\n\r\n\
         HTTP/1.1 302 Found {SECRET}\r\nLocation: https://x/?t={SECRET}&b=Bearer%20{SECRET}\r\nSet-Cookie: a={SECRET}; Path=/\r\n\
         Set-Cookie: b=1\r\nX-{SECRET}: name\r\nConnection: x-hop\r\nX-Hop: {SECRET}\r\nTrailer: x-end\r\nTransfer-Encoding: chunked\r\n\r\n\
         2\r\nok\r\n0\r\nX-End: Bearer {SECRET}\r\n\r\n"
    );
    stack.own(tokio::spawn(async move {
        let mut stream = tls.accept(listener.accept().await.unwrap().0).await.unwrap();
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            stream.read_buf(&mut head).await.unwrap();
        }
        assert!(String::from_utf8(head).unwrap().contains(SECRET));
        stream.write_all(answer.as_bytes()).await.unwrap();
        stream.shutdown().await.unwrap();
    }));
    let through = stack.intercept(HTTPS).await;
    let mut stream = stack.inside(through, &[]).await;
    let request = format!("GET / HTTP/1.1\r\nHost: {NAME}\r\nTE: trailers\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut seen = Vec::new();
    let _ = stream.read_to_end(&mut seen).await;
    let seen = String::from_utf8(seen).unwrap().to_lowercase();
    assert!(
        seen.contains("location: https://x/?t=[redacted]&b=") && seen.contains("set-cookie: b=1"),
        "{seen}"
    );
    // A header's name is the one place where a value cannot be replaced; a server that puts it there has it anyway.
    assert!(!seen.replace(&format!("x-{SECRET}"), "").contains(SECRET), "{seen}");
}
