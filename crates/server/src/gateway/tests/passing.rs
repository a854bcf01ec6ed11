//! Where requests go and what becomes of them on the way.

use super::*;

#[tokio::test]
async fn routes_stand_in_a_header_or_in_the_host_name() {
    let stage = Stage::new(1, RouteFrom::HeaderOrHost).await;
    let port = stage.port;
    let label = |id: &str| format!("{id}-{port}");
    for headers in [
        format!("Host: h\r\nOpenSandbox-Ingress-To: {}\r\n", label("box")),
        format!("Host: h\r\nOPEN-SANDBOX-INGRESS: {}\r\n", label("box")),
        format!("Host: {}.example.com:28888\r\n", label("box")),
        format!("Host: {}\r\n", label("box-with-dashes")),
        // The new header goes first, and an empty one is none.
        format!("Host: h\r\nOpenSandbox-Ingress-To: {}\r\nOPEN-SANDBOX-INGRESS: over-1\r\n", label("box")),
        format!("Host: h\r\nOpenSandbox-Ingress-To: \r\nOPEN-SANDBOX-INGRESS: {}\r\n", label("box")),
    ] {
        let seen = stage.ask("GET /a%2Fb//c?q=%20&&", &headers).await;
        assert_eq!(
            (seen.status, seen.body.lines().next()),
            (200, Some("GET /a%2Fb//c?q=%20&&")),
            "{headers}"
        );
    }
    for (headers, host) in [
        (
            format!("Host: {}.Example.com:28888\r\n", label("box")),
            format!("{}.Example.com:28888", label("box")),
        ),
        // Only a name in which the route stands is the program's own.
        (format!("Host: gw\r\nOpenSandbox-Ingress-To: {}\r\n", label("box")), format!("127.78.0.1:{port}")),
    ] {
        let seen = stage.ask("GET /", &headers).await;
        assert_eq!(seen.got("host"), Some(host.as_str()), "{headers}");
        let forwarded = headers.split(['\r', ' ']).nth(1);
        assert_eq!((seen.got("x-forwarded-host"), seen.got("x-forwarded-proto")), (forwarded, Some("http")));
    }
    let twice =
        format!("Host: h\r\nOpenSandbox-Ingress-To: {0}\r\nOpenSandbox-Ingress-To: {0}\r\n", label("box"));
    assert_eq!(stage.ask("GET /", &twice).await.status, 200);
    for (headers, status) in [
        // Another program may have read the other one.
        (
            &*format!(
                "Host: h\r\nOpenSandbox-Ingress-To: {}\r\nOpenSandbox-Ingress-To: over-1\r\n",
                label("box")
            ),
            400,
        ),
        (&format!("Host: {}.x\r\nOpenSandbox-Ingress-To: \u{e9}\r\n", label("box")), 400),
        ("Host: nothing\r\n", 400),
        ("Host: box-0.example.com\r\n", 400),
        (&format!("Host: box-{port}:28888\r\n"), 400),
        ("Host: unknown-80.x\r\n", 404),
        ("Host: starting-80.x\r\n", 503),
        ("Host: nowhere-80.x\r\n", 503),
        ("Host: over-80.x\r\n", 503),
        ("Host: paused-80.x\r\n", 503),
        ("Host: box-1.x\r\n", 502),
    ] {
        let seen = stage.ask("GET /", headers).await;
        assert_eq!((seen.status, seen.is_ours()), (status, true), "{headers}: {seen:?}");
        assert_eq!(seen.head.contains("retry-after: 1"), status == 503, "{headers}");
    }
    let seen = stage.ask("GET /", "Host: box-1.x\r\n").await;
    assert!(seen.body.contains("BACKEND_CONNECTION_FAILED"), "{seen:?}");
    stage.stop.cancel();
    stage.door.close(Duration::from_secs(10)).await;
}

#[tokio::test]
async fn routes_stand_in_the_path() {
    let stage = Stage::new(2, RouteFrom::Path).await;
    let port = stage.port;
    for (path, arrives) in [
        (format!("/box/{port}"), "/"),
        (format!("/box/{port}/"), "/"),
        (format!("/box/{port}//a%2Fb/%E4%BD%A0?q"), "//a%2Fb/%E4%BD%A0?q"),
        // Of a sandbox that asks for no signature, even what looks like one is the application's.
        (format!("/box/{port}/1/abcdef12k/x?y"), "/1/abcdef12k/x?y"),
    ] {
        let seen = stage.ask(&format!("POST {path}"), "Host: over-1.x\r\nContent-Length: 0\r\n").await;
        let line = format!("POST {arrives}");
        assert_eq!((seen.status, seen.body.lines().next()), (200, Some(line.as_str())), "{path}");
    }
    let route = signed(Generation::Short, UUID, port);
    let seen = stage.ask(&format!("GET /{}/x%2Fy?z", route.path()), "Host: h\r\n").await;
    assert_eq!((seen.status, seen.body.lines().next()), (200, Some("GET /x%2Fy?z")));
    for (path, status) in
        [("/", 400), ("/box", 400), ("/box/x/y", 400), ("/unknown/80/", 404), ("/f1.x/80", 401)]
    {
        let seen = stage.ask(&format!("GET {path}"), &format!("Host: box-{port}.x\r\n")).await;
        assert_eq!((seen.status, seen.is_ours()), (status, true), "{path}: {seen:?}");
    }
    let used: Vec<_> = stage.known.used.lock().unwrap().drain(..).collect();
    assert_eq!(used.len(), 5);
    assert_eq!(used[2], ("box".to_owned(), port, Some("//a%2Fb/%E4%BD%A0".to_owned())), "without the query");
}

#[tokio::test]
async fn health_is_told_in_every_mode_and_an_unknown_mode_refuses_the_rest() {
    for (last, route) in [(3, RouteFrom::HeaderOrHost), (4, RouteFrom::Path), (5, RouteFrom::Nowhere)] {
        let stage = Stage::new(last, route).await;
        for line in ["GET /status.ok", "POST /status.ok", "GET /status.ok?x"] {
            let headers = format!("Host: box-{}.x\r\nContent-Length: 0\r\n", stage.port);
            let seen = stage.ask(line, &headers).await;
            assert_eq!((seen.status, seen.body.as_str()), (200, "OK"), "{route:?} {line}");
        }
        assert!(stage.known.used.lock().unwrap().is_empty());
        if route == RouteFrom::Nowhere {
            assert_eq!(stage.to(&format!("box-{}", stage.port), "").await.status, 400);
        }
    }
}

#[tokio::test]
async fn headers_are_passed_on_as_published() {
    let stage = Stage::new(6, RouteFrom::HeaderOrHost).await;
    let route = format!("box-{}", stage.port);
    let seen = stage
        .to(
            &route,
            "Authorization: Bearer mine\r\nCookie: a=1\r\nCookie: b=2\r\nX-EXECD-ACCESS-TOKEN: agent-token\r\n\
             OPENSANDBOX-EGRESS-AUTH: egress\r\nOPEN-SANDBOX-API-KEY: server-key\r\nX-Sandglass-Access: route\r\n\
             OpenSandbox-Secure-Access: x\r\nOPEN-SANDBOX-INGRESS: x\r\nOpenSandbox-Access-Renew: later\r\n\
             X-Fast-Sandbox-Route-Credential: x\r\nX-Forwarded-For: 8.8.8.8\r\nX-Forwarded-For: 9.9.9.9\r\n\
             X-Custom: one\r\nX-Custom: two\r\nTE: trailers\r\nKeep-Alive: 1\r\n",
        )
        .await;
    assert_eq!(seen.got("authorization"), Some("Bearer mine"));
    assert_eq!(seen.got("host"), Some(format!("127.78.0.6:{}", stage.port).as_str()));
    assert_eq!(seen.got("x-forwarded-for"), Some("8.8.8.8, 9.9.9.9, 127.0.0.1"));
    assert_eq!((seen.got("x-forwarded-host"), seen.got("x-forwarded-proto")), (Some("h"), Some("http")));
    assert_eq!(seen.body.matches("x-custom: ").count(), 2);
    for gone in [
        "open-sandbox-api-key",
        "x-sandglass-access",
        "opensandbox-secure-access",
        "opensandbox-ingress-to",
        "open-sandbox-ingress",
        "opensandbox-access-renew",
        "x-fast-sandbox-route-credential",
        // The agent's token is for the agent, the enforcer's for the enforcer.
        "x-execd-access-token",
        "opensandbox-egress-auth",
        "keep-alive",
        "user-agent",
        "accept-encoding",
    ] {
        assert_eq!(seen.got(gone), None, "{gone}");
    }
    assert_eq!(seen.got("te"), Some("trailers"));
    assert_eq!(seen.head.matches("set-cookie: ").count(), 2);
    assert!(seen.head.contains("location: /next") && seen.head.contains("server: app"), "{}", seen.head);
    assert!(seen.head.contains("reverse-proxy-server-powerby: opensandbox-ingress"));
    assert_eq!(stage.known.used.lock().unwrap().len(), 1, "only the exact word skips the renewal");

    let given = stage.to(&route, "X-Forwarded-Host: public\r\nX-Forwarded-Proto: https\r\n").await;
    assert_eq!(
        (given.got("x-forwarded-host"), given.got("x-forwarded-proto")),
        (Some("public"), Some("https"))
    );
    let skipped = stage.to(&route, "OpenSandbox-Access-Renew: skip\r\n").await;
    assert_eq!((skipped.status, stage.known.used.lock().unwrap().len()), (200, 2));
    let teapot = stage.ask("GET /teapot", &format!("Host: {route}.x\r\n")).await;
    assert_eq!((teapot.status, teapot.is_ours()), (418, false));
    assert_eq!(stage.ask("TRACE /", &format!("Host: {route}.x\r\n")).await.status, 405);
}

/// Sends an upgrade and returns the answer's head and the open connection.
async fn upgrade(gateway: SocketAddr, headers: &str) -> (String, TcpStream) {
    let mut stream = TcpStream::connect(gateway).await.unwrap();
    let request = format!(
        "GET /ws HTTP/1.1\r\n{headers}Connection: keep-alive, Upgrade\r\nUpgrade: websocket\r\n\
         Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
    );
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(stream.read_u8().await.unwrap());
    }
    (String::from_utf8(head).unwrap(), stream)
}

#[tokio::test]
async fn websockets_are_tunnelled_and_their_refusals_relayed() {
    use axum::extract::ws::{Message, WebSocketUpgrade};
    use axum::routing::any;

    let stage = Stage::new(7, RouteFrom::HeaderOrHost).await;
    async fn greet(handshake: WebSocketUpgrade, headers: http::HeaderMap) -> axum::response::Response {
        let token = headers.get("x-custom").unwrap().to_str().unwrap().to_owned();
        handshake.on_upgrade(|mut socket| async move {
            socket.send(Message::text(token)).await.unwrap();
        })
    }
    let app = Router::new().route("/ws", any(greet));
    let port = serve(IpAddr::from([127, 78, 0, 7]), app).await.port();
    let (head, mut stream) =
        upgrade(stage.gateway, &format!("Host: box-{port}.x\r\nX-Custom: hello\r\n")).await;
    assert!(head.starts_with("HTTP/1.1 101"), "{head}");
    let mut frame = [0; 7];
    stream.read_exact(&mut frame).await.unwrap();
    assert_eq!(&frame, b"\x81\x05hello");

    assert_eq!(stage.known.used.lock().unwrap().len(), 1);
    stage.known.change("box", |target| target.renews = true);
    for (headers, lasts) in [("OpenSandbox-Access-Renew: skip\r\n", false), ("", true)] {
        stage.known.used.lock().unwrap().clear();
        let asks = format!("Host: box-{port}.x\r\nX-Custom: hello\r\n{headers}");
        let (_, mut stream) = upgrade(stage.gateway, &asks).await;
        stream.read_exact(&mut frame).await.unwrap();
        let mut rest = Vec::new();
        stream.write_all(b"\x88\x80\0\0\0\0").await.unwrap();
        let _ = stream.read_to_end(&mut rest).await;
        let used = stage.known.used.lock().unwrap().clone();
        assert!(
            (used.len() > 1) == lasts && used.iter().all(|(id, at, _)| id == "box" && *at == port),
            "{used:?}"
        );
    }
    let (head, _) = upgrade(stage.gateway, &format!("Host: box-{}.x\r\n", stage.port)).await;
    assert!(head.starts_with("HTTP/1.1 200"), "the program's own answer: {head}");
    for (host, status) in [("box-1.x", 503), ("unknown-80.x", 404), ("paused-1.x", 503), ("guarded-1.x", 401)]
    {
        let (head, _) = upgrade(stage.gateway, &format!("Host: {host}\r\n")).await;
        assert!(head.starts_with(&format!("HTTP/1.1 {status}")), "{host}: {head}");
    }
    let keyless = "Connection: upgrade\r\nUpgrade: websocket\r\n";
    assert_eq!(stage.to(&format!("box-{port}"), keyless).await.status, 400);
}

#[tokio::test]
async fn published_ports_are_gone_through_the_agent_with_its_token() {
    let stage = Stage::new(8, RouteFrom::HeaderOrHost).await;
    let published = crate::ingress::Mapped { agent: stage.port, http: stage.port, egress: None };
    stage.known.change("box", |target| target.mapped = Some(published));
    let seen = stage.to("box-3000", "X-EXECD-ACCESS-TOKEN: theirs\r\n").await;
    assert_eq!(seen.body.lines().next(), Some("GET /proxy/3000/x"));
    assert_eq!(seen.got("x-execd-access-token"), Some("agent-token"));
    let seen = stage.ask("OPTIONS *", "Host: h\r\nOpenSandbox-Ingress-To: box-3000\r\n").await;
    assert_eq!((seen.status, seen.is_ours()), (400, true), "it would become another port");
    let seen = stage.to("box-8080", "X-EXECD-ACCESS-TOKEN: theirs\r\n").await;
    assert_eq!((seen.body.lines().next(), seen.got("x-execd-access-token")), (Some("GET /x"), None));
    // The enforcer is asked with what the client brings, and nobody else is.
    let enforced = crate::ingress::Mapped { egress: Some(stage.port), ..published };
    stage.known.change("box", |target| target.mapped = Some(enforced));
    let seen = stage.to("box-18080", "OPENSANDBOX-EGRESS-AUTH: egress\r\n").await;
    assert_eq!(
        (seen.body.lines().next(), seen.got("opensandbox-egress-auth")),
        (Some("GET /x"), Some("egress"))
    );
    // The agent itself is asked with what the client brings.
    let seen = stage.to("box-44772", "X-EXECD-ACCESS-TOKEN: theirs\r\n").await;
    assert_eq!(
        (seen.body.lines().next(), seen.got("x-execd-access-token")),
        (Some("GET /x"), Some("theirs"))
    );
}

#[tokio::test]
async fn a_sandbox_that_appears_a_moment_later_is_found() {
    let stage = Stage::new(9, RouteFrom::HeaderOrHost).await;
    let id = "11111111-2222-4333-8444-555555555555";
    let route = format!("{id}-{}", stage.port);
    let appears = || stage.known.set(id, target(Reach::Addressable(IpAddr::from([127, 78, 0, 9]))));
    assert_eq!(stage.to(&route, "").await_after(appears).await.status, 200);
}

trait AwaitAfter: Future + Sized {
    /// Does something once the future has begun, and waits for it.
    async fn await_after(self, then: impl FnOnce()) -> Self::Output {
        let mut this = std::pin::pin!(self);
        let begun = futures_util::poll!(this.as_mut());
        if let std::task::Poll::Ready(output) = begun {
            return output;
        }
        then();
        this.await
    }
}

impl<F: Future> AwaitAfter for F {}

#[tokio::test]
async fn a_tunnel_has_what_was_sent_early_and_ends_with_the_gateway() {
    let stage = Stage::new(10, RouteFrom::HeaderOrHost).await;
    let echo = TcpListener::bind("127.78.0.10:0").await.unwrap();
    let port = echo.local_addr().unwrap().port();
    tokio::spawn(async move {
        let (mut stream, _) = echo.accept().await.unwrap();
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            head.push(stream.read_u8().await.unwrap());
        }
        let agreed =
            b"HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: echo\r\n\r\nhello ";
        stream.write_all(agreed).await.unwrap();
        let (mut from, mut to) = stream.split();
        let _ = tokio::io::copy(&mut from, &mut to).await;
    });
    let mut client = TcpStream::connect(stage.gateway).await.unwrap();
    let asks =
        format!("GET / HTTP/1.1\r\nHost: box-{port}.x\r\nConnection: upgrade\r\nUpgrade: echo\r\n\r\nearly");
    client.write_all(asks.as_bytes()).await.unwrap();
    let mut got = Vec::new();
    while !got.ends_with(b"hello early") {
        assert_ne!(client.read_buf(&mut got).await.unwrap(), 0, "{}", got.escape_ascii());
    }
    let big: Vec<u8> = (0..4 << 20).map(|at: u32| at.to_le_bytes()[1]).collect();
    let (mut from, mut to) = client.split();
    let mut back = vec![0; big.len()];
    let (sent, read) = tokio::join!(to.write_all(&big), from.read_exact(&mut back));
    assert!(sent.is_ok() && read.is_ok() && back == big);

    stage.stop.cancel();
    stage.door.close(Duration::from_millis(50)).await;
    let mut rest = Vec::new();
    let _ = client.read_to_end(&mut rest).await;
    assert!(rest.is_empty(), "it is cut");
}
