//! The proxy routes between real sockets on loopback: the "sandboxes" are addresses in 127.0.0.0/8.

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::Router;
use axum::extract::{Request, WebSocketUpgrade, ws::Message};
use axum::response::{IntoResponse, Response};
use axum::routing::any;
use http::{HeaderMap, StatusCode};
use sandglass_proxy::{Forwarder, Limits};
use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use super::*;
use crate::tenants::Keyring;

/// Sandboxes by id, and which of them were used.
#[derive(Default)]
pub(super) struct Known {
    pub(super) targets: HashMap<&'static str, Target>,
    pub(super) used: Mutex<Vec<String>>,
}

impl Lookup for Known {
    fn target(&self, id: &str) -> Option<Target> {
        self.targets.get(id).cloned()
    }

    fn used(&self, id: &str) {
        self.used.lock().unwrap().push(id.to_owned());
    }
}

fn at(reach: Reach) -> Target {
    Target {
        agent_token: "agent-token".to_owned(),
        route_token: "route-token".to_owned(),
        ..Target::at(reach)
    }
}

pub(super) async fn serve(address: (IpAddr, u16), app: Router) -> SocketAddr {
    let listener = TcpListener::bind(address).await.unwrap();
    let address = listener.local_addr().unwrap();
    let service = app.into_make_service_with_connect_info::<SocketAddr>();
    tokio::spawn(async move { axum::serve(listener, service).await.unwrap() });
    address
}

/// Answers what it was asked, and a marker for who answered.
pub(super) fn mirror(who: &'static str) -> Router {
    Router::new().fallback(move |request: Request| async move {
        let headers: Vec<String> = request
            .headers()
            .iter()
            .map(|(n, v)| format!("{n}: {}", String::from_utf8_lossy(v.as_bytes())))
            .collect();
        let target = request.uri().to_string();
        if target.ends_with("/nothing-inside") {
            return (StatusCode::BAD_GATEWAY, "Bad Gateway").into_response();
        }
        let reply = [("server", who), ("x-request-id", "theirs"), ("location", "/next")];
        (reply, format!("{who} {} {target}\n{}", request.method(), headers.join("\n"))).into_response()
    })
}

pub(super) struct Stage {
    pub(super) known: Arc<Known>,
    pub(super) api: SocketAddr,
    pub(super) forwarder: Forwarder,
}

/// A server whose sandboxes are at `address`.
pub(super) async fn stage(address: IpAddr, settings: IngressSettings) -> Stage {
    let running = at(Reach::Addressable(address));
    let targets = HashMap::from([
        ("guarded", Target { secure_access: true, ..running.clone() }),
        ("renewed", Target { renews: true, ..running.clone() }),
        ("running", running),
        ("paused", at(Reach::Paused(address))),
        ("starting", at(Reach::Starting(None))),
        ("gone", at(Reach::Gone)),
    ]);
    let known = Arc::new(Known { targets, ..Known::default() });
    let forwarder = Forwarder::new(Limits { response_head: Duration::from_secs(2), ..Limits::default() });
    let state = IngressState::new(Arc::clone(&known) as Arc<dyn Lookup>, forwarder.clone(), settings);
    let handler = move |request: Request| proxy_handler(state.clone(), request);
    let app = Router::new()
        .route("/sandboxes/{id}/proxy/{port}", any(handler.clone()))
        .route("/sandboxes/{id}/proxy/{port}/{*rest}", any(handler.clone()))
        .nest("/v1", Router::new().fallback(handler));
    let api = serve((IpAddr::from([127, 0, 0, 1]), 0), app).await;
    Stage { known, api, forwarder }
}

pub(super) fn closed() -> IngressSettings {
    let access = AccessRules { keys: Keyring::single(Some("server-key")), open_proxy: false };
    IngressSettings { access, eip: None }
}

pub(super) async fn ask(api: SocketAddr, line: &str, headers: &str) -> String {
    let mut stream = TcpStream::connect(api).await.unwrap();
    let request = format!("{line} HTTP/1.1\r\nHost: api.local\r\nConnection: close\r\n{headers}\r\n");
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).await.unwrap();
    String::from_utf8_lossy(&answer).into_owned()
}

fn status_and_code(answer: &str) -> (u16, String) {
    let status = answer.split(' ').nth(1).unwrap().parse().unwrap();
    let body = answer.split_once("\r\n\r\n").unwrap().1;
    let code = serde_json::from_str::<Value>(body).map(|body| body["code"].as_str().unwrap().to_owned());
    (status, code.unwrap_or_default())
}

const KEY: &str = "OPEN-SANDBOX-API-KEY: server-key\r\n";

#[tokio::test]
async fn a_request_reaches_the_port_as_it_was_sent() {
    let address = IpAddr::from([127, 77, 0, 1]);
    let app = serve((address, 0), mirror("app")).await;
    let stage = stage(address, closed()).await;
    let headers = format!(
        "{KEY}X-Sandglass-Access: route-token\r\nOpenSandbox-Secure-Access: route-token\r\nX-EXECD-ACCESS-TOKEN: agent-token\r\n\
         Authorization: Bearer mine\r\nCookie: a=1\r\nX-Forwarded-Prefix: /evil\r\nForwarded: for=6.6.6.6\r\nX-Real-IP: 6.6.6.6\r\n\
         X-Request-ID: ours\r\nOPENSANDBOX-EGRESS-AUTH: egress\r\nX-Forwarded-For: 8.8.8.8\r\n"
    );
    let path = format!("/v1/sandboxes/running/proxy/{}//a%2Fb/a%3Fc?q=%20&q", app.port());
    let answer = ask(stage.api, &format!("GET {path}"), &headers).await;
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    let mut lines: Vec<_> = body.lines().collect();
    lines.sort_unstable();
    let host = format!("host: {app}");
    assert_eq!(
        lines,
        [
            "app GET //a%2Fb/a%3Fc?q=%20&q",
            "authorization: Bearer mine",
            "cookie: a=1",
            host.as_str(),
            // Loopback is a trusted peer.
            "x-forwarded-for: 8.8.8.8",
            "x-forwarded-host: api.local",
            "x-forwarded-proto: http",
            "x-request-id: ours",
        ]
    );
    assert!(!head.contains("server: app") && !head.contains("theirs"), "{head}");
    let location = format!("location: /v1/sandboxes/running/proxy/{}/next\r\n", app.port());
    assert!(head.contains(&location), "{head}");
    assert_eq!(*stage.known.used.lock().unwrap(), ["running"]);

    let bare = format!("HEAD /sandboxes/running/proxy/{}", app.port());
    let answer = ask(stage.api, &bare, &format!("{KEY}OpenSandbox-Access-Renew: skip\r\n")).await;
    assert!(answer.starts_with("HTTP/1.1 200") && answer.ends_with("\r\n\r\n"), "{answer}");
    assert_eq!(stage.known.used.lock().unwrap().len(), 1, "a skipped renewal");
}

#[tokio::test]
async fn programs_that_listen_inside_only_are_reached_through_the_agent() {
    let address = IpAddr::from([127, 77, 0, 2]);
    serve((address, AGENT_PORT), mirror("agent")).await;
    let stage = stage(address, closed()).await;
    for _ in 0..2 {
        let answer = ask(stage.api, "POST /v1/sandboxes/running/proxy/9/x%2Fy?z", KEY).await;
        assert!(answer.contains("agent POST /proxy/9/x%2Fy?z\n"), "{answer}");
        assert!(answer.contains("x-execd-access-token: agent-token"), "{answer}");
        assert!(answer.contains("host: 127.77.0.2:9\n"), "{answer}");
        assert!(answer.contains("location: /v1/sandboxes/running/proxy/9/next\r\n"), "{answer}");
    }
    let answer = ask(stage.api, "GET /v1/sandboxes/running/proxy/9/nothing-inside", KEY).await;
    assert_eq!(status_and_code(&answer), (502, "BACKEND_CONNECTION_FAILED".to_owned()));

    // The agent itself: its token is added for the holder of the key, and only then.
    let answer = ask(stage.api, "GET /v1/sandboxes/running/proxy/44772/ping", KEY).await;
    assert!(
        answer.contains("agent GET /ping\n") && answer.contains("x-execd-access-token: agent-token"),
        "{answer}"
    );
    let answer =
        ask(stage.api, "GET /v1/sandboxes/running/proxy/44772/ping", "X-Sandglass-Access: route-token\r\n")
            .await;
    assert!(answer.contains("agent GET /ping\n") && !answer.contains("agent-token"), "{answer}");
}

#[tokio::test]
async fn refusals_carry_their_status_and_code() {
    let address = IpAddr::from([127, 77, 0, 3]);
    let silent = TcpListener::bind((address, 0)).await.unwrap();
    let silent_port = silent.local_addr().unwrap().port();
    let noise = TcpListener::bind((address, 0)).await.unwrap();
    let noise_port = noise.local_addr().unwrap().port();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = noise.accept().await {
            let _ = stream.write_all(b"noise\r\n\r\n").await;
        }
    });
    let stage = stage(address, closed()).await;
    let token = "X-Sandglass-Access: route-token\r\n";
    let (slow, noisy) = (format!("running/proxy/{silent_port}"), format!("running/proxy/{noise_port}"));
    let cases = [
        ("running/proxy/9", "", 401, "MISSING_API_KEY"),
        ("running/proxy/9", "OPEN-SANDBOX-API-KEY: no\r\n", 401, "INVALID_API_KEY"),
        ("guarded/proxy/9", token, 401, "MISSING_OR_INVALID_SECURE_ACCESS"),
        ("unknown/proxy/9", "", 401, "MISSING_API_KEY"),
        ("unknown/proxy/9", KEY, 404, "DOCKER::SANDBOX_NOT_FOUND"),
        ("paused/proxy/9", token, 502, "BACKEND_CONNECTION_FAILED"),
        ("starting/proxy/9", token, 502, "BACKEND_CONNECTION_FAILED"),
        ("gone/proxy/9", token, 502, "BACKEND_CONNECTION_FAILED"),
        ("running/proxy/9", token, 502, "BACKEND_CONNECTION_FAILED"),
        (&slow, token, 504, "BACKEND_TIMEOUT"),
        (&noisy, token, 502, "BACKEND_RESPONSE_FAILED"),
        ("running/proxy/70000", token, 400, "DOCKER::INVALID_PORT"),
        ("running/proxy/http", token, 422, "GENERAL::VALIDATION_ERROR"),
    ];
    for (path, headers, status, code) in cases {
        let answer = ask(stage.api, &format!("GET /v1/sandboxes/{path}"), headers).await;
        assert_eq!(status_and_code(&answer), (status, code.to_owned()), "{path} {headers}");
    }
    let answer = ask(stage.api, "GET /v1/sandboxes/paused/proxy/9", KEY).await;
    assert!(answer.contains("sandbox is paused"), "{answer}");
    let answer = ask(stage.api, "TRACE /v1/sandboxes/running/proxy/9", KEY).await;
    assert!(answer.starts_with("HTTP/1.1 405") && answer.contains("allow: GET"), "{answer}");
    let keyless = format!("{KEY}Connection: Upgrade\r\nUpgrade: WebSocket\r\n");
    let answer = ask(stage.api, "GET /v1/sandboxes/running/proxy/9", &keyless).await;
    assert_eq!(status_and_code(&answer).0, 400, "{answer}");
    stage.forwarder.drain(Duration::ZERO).await;
    let answer = ask(stage.api, "GET /v1/sandboxes/running/proxy/9", KEY).await;
    assert_eq!(status_and_code(&answer).0, 503);
}

/// Sends a WebSocket handshake; returns the head of the answer and the bytes of the first frame.
pub(super) async fn handshake(api: SocketAddr, path: &str, headers: &str) -> (String, Vec<u8>, TcpStream) {
    let mut stream = TcpStream::connect(api).await.unwrap();
    let request = format!(
        "GET {path} HTTP/1.1\r\nHost: api.local\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n\
         Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n{headers}\r\n"
    );
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut got = Vec::new();
    let head_end = loop {
        if let Some(end) = got.windows(4).position(|w| w == b"\r\n\r\n") {
            break end + 4;
        }
        assert_ne!(stream.read_buf(&mut got).await.unwrap(), 0, "{}", String::from_utf8_lossy(&got));
    };
    let mut frame = got.split_off(head_end);
    let head = String::from_utf8(got).unwrap();
    if head.starts_with("HTTP/1.1 101") {
        while frame.len() < 2 || frame.len() < 2 + usize::from(frame[1]) {
            assert_ne!(stream.read_buf(&mut frame).await.unwrap(), 0);
        }
    }
    (head, frame, stream)
}

#[tokio::test]
async fn websockets_are_relayed_and_refused_with_close_codes() {
    let address = IpAddr::from([127, 77, 0, 4]);
    async fn greet(handshake: WebSocketUpgrade, headers: HeaderMap) -> Response {
        let cookie = headers["cookie"].to_str().unwrap().to_owned();
        handshake.on_upgrade(|mut socket| async move {
            socket.send(Message::text(format!("hi {cookie}"))).await.unwrap();
            while let Some(Ok(message)) = socket.recv().await {
                let _ = socket.send(message).await;
            }
        })
    }
    let router = Router::new().route("/ws", any(greet)).route("/no", any(|| async { StatusCode::FORBIDDEN }));
    let port = serve((address, 0), router).await.port();
    let stage = stage(address, closed()).await;
    let token = "X-Sandglass-Access: route-token\r\nCookie: a=1\r\n";

    let (head, frame, mut stream) =
        handshake(stage.api, &format!("/v1/sandboxes/running/proxy/{port}/ws"), token).await;
    assert!(head.starts_with("HTTP/1.1 101"), "{head}");
    assert_eq!(frame, b"\x81\x06hi a=1");
    assert_eq!(stage.forwarder.counts().upgrades, 1);
    // A masked text frame with a zero mask comes back unmasked.
    stream.write_all(b"\x81\x82\0\0\0\0ok").await.unwrap();
    let mut echo = [0; 4];
    stream.read_exact(&mut echo).await.unwrap();
    assert_eq!(&echo, b"\x81\x02ok");
    let used = || std::mem::take(&mut *stage.known.used.lock().unwrap());
    assert_eq!(used(), ["running"], "its life is not extended, so that nobody has to know for how long");
    for (headers, lasts) in
        [(format!("{token}OpenSandbox-Access-Renew: skip\r\n"), false), (token.to_owned(), true)]
    {
        let path = format!("/v1/sandboxes/renewed/proxy/{port}/ws");
        let (_, _, mut stream) = handshake(stage.api, &path, &headers).await;
        stream.write_all(b"\x81\x82\0\0\0\0ok").await.unwrap();
        stream.read_exact(&mut echo).await.unwrap();
        let used = used();
        assert!((used.len() > 1) == lasts && used.iter().all(|id| id == "renewed"), "{headers}: {used:?}");
    }

    let cases = [
        (format!("/v1/sandboxes/running/proxy/{port}/ws"), "", 1008),
        (format!("/v1/sandboxes/guarded/proxy/{port}/ws"), token, 1008),
        (format!("/v1/sandboxes/running/proxy/{port}/no"), token, 1008),
        ("/v1/sandboxes/unknown/proxy/9/ws".to_owned(), KEY, 1011),
        ("/v1/sandboxes/paused/proxy/9/ws".to_owned(), token, 1011),
        ("/v1/sandboxes/running/proxy/9/ws".to_owned(), token, 1011),
    ];
    for (path, headers, code) in cases {
        let (head, frame, _stream) = handshake(stage.api, &path, headers).await;
        assert!(head.starts_with("HTTP/1.1 101"), "{path}: {head}");
        assert_eq!(frame[0], 0x88, "{path}: a close frame");
        assert_eq!(u16::from_be_bytes([frame[2], frame[3]]), code, "{path}");
    }
    let (head, _, _) = handshake(stage.api, "/v1/sandboxes/running/proxy/http/ws", token).await;
    assert!(head.starts_with("HTTP/1.1 422"), "{head}");
}

#[tokio::test]
async fn an_address_that_changes_hands_is_forgotten() {
    let address = IpAddr::from([127, 77, 0, 5]);
    let app = serve((address, 0), mirror("app")).await;
    let known = Arc::new(Known {
        targets: HashMap::from([("a", at(Reach::Addressable(address)))]),
        ..Known::default()
    });
    let forwarder = Forwarder::new(Limits::default());
    let state = IngressState::new(known, forwarder, closed());
    let request = || {
        let uri = format!("/sandboxes/a/proxy/{}/x", app.port());
        Request::builder().uri(uri).header(API_KEY, "server-key").body(axum::body::Body::empty()).unwrap()
    };
    let response = proxy_handler(state.clone(), request()).await;
    assert_eq!(response.status(), StatusCode::OK);
    state.forget(address);
    let body = axum::body::to_bytes(response.into_body(), 1 << 20).await;
    // Either it had all arrived or it is an error; it is never a shorter body that looks whole.
    assert!(body.is_err() || body.is_ok_and(|body| body.starts_with(b"app GET /x\n")));
    assert_eq!(proxy_handler(state, request()).await.status(), StatusCode::OK);
}

/// A sandbox that is reached through ports of the host: its agent's, its port 8080 and its enforcer's.
async fn published(address: IpAddr, egress: bool) -> Target {
    let agent = serve((address, 0), mirror("agent")).await.port();
    let http = serve((address, 0), mirror("http")).await.port();
    let enforcer = serve((address, 0), mirror("enforcer")).await.port();
    let mapped = Mapped { agent, http, egress: egress.then_some(enforcer) };
    let egress_token = Some("egress-token".to_owned());
    Target { mapped: Some(mapped), egress_token, ..at(Reach::Addressable(address)) }
}

#[tokio::test]
async fn published_ports_lead_to_the_agent_and_to_port_8080() {
    let address = IpAddr::from([127, 77, 0, 6]);
    let target = published(address, true).await;
    let broken = Target { mapped: Some(Mapped { agent: 0, http: 0, egress: None }), ..target.clone() };
    let nowhere = at(Reach::Nowhere);
    let targets = HashMap::from([("published", target), ("broken", broken), ("nowhere", nowhere)]);
    let known = Arc::new(Known { targets, ..Known::default() });
    let state = IngressState::new(known, Forwarder::new(Limits::default()), closed());
    let ask = async |path: &str| {
        let request = Request::builder().uri(path.to_owned()).header(API_KEY, "server-key");
        let response = proxy_handler(state.clone(), request.body(axum::body::Body::empty()).unwrap()).await;
        let status = response.status().as_u16();
        let body = axum::body::to_bytes(response.into_body(), 1 << 20).await.unwrap();
        (status, String::from_utf8_lossy(&body).into_owned())
    };
    for (path, said, with_token) in [
        ("/sandboxes/published/proxy/8080/a?b", "http GET /a?b\n", false),
        ("/sandboxes/published/proxy/44772/ping", "agent GET /ping\n", true),
        ("/sandboxes/published/proxy/3000/x", "agent GET /proxy/3000/x\n", true),
        ("/sandboxes/published/proxy/18080/healthz", "enforcer GET /healthz\n", false),
    ] {
        let (status, body) = ask(path).await;
        assert!(status == 200 && body.starts_with(said), "{path}: {status} {body}");
        assert_eq!(body.contains("x-execd-access-token: agent-token"), with_token, "{path}: {body}");
    }
    for path in ["/sandboxes/broken/proxy/8080/", "/sandboxes/nowhere/proxy/3000/"] {
        let (status, body) = ask(path).await;
        assert!(status == 500 && body.contains("NETWORK_MODE_ENDPOINT_UNAVAILABLE"), "{path}: {body}");
    }
}

#[tokio::test]
async fn policies_are_the_enforcers_business() {
    for (last, egress, way) in [(7, true, "enforcer"), (8, false, "agent")] {
        let target = published(IpAddr::from([127, 77, 0, last]), egress).await;
        let known = Arc::new(Known::default());
        let lookup = Arc::clone(&known) as Arc<dyn Lookup>;
        let state = IngressState::new(lookup, Forwarder::new(Limits::default()), closed());
        let asked = PolicyRequest { method: http::Method::PATCH, query: Some("a=b"), body: "[]".into() };
        let answer = state.policy("x", &target, asked.clone()).await.unwrap();
        assert!(!answer.headers().contains_key("server") && !answer.headers().contains_key("x-request-id"));
        let body = axum::body::to_bytes(axum::body::Body::new(answer.into_body()), 1 << 20).await.unwrap();
        let body = String::from_utf8_lossy(&body);
        let path = if egress { "/policy?a=b" } else { "/proxy/18080/policy?a=b" };
        assert!(body.starts_with(&format!("{way} PATCH {path}\n")), "{body}");
        assert!(body.contains("opensandbox-egress-auth: egress-token"), "{body}");
        assert!(body.contains("content-type: application/json"), "{body}");
        assert_eq!(body.contains("x-execd-access-token: agent-token"), !egress, "{body}");
        assert_eq!(*known.used.lock().unwrap(), ["x"]);

        for (target, refusal) in [
            (Target { egress_token: None, ..target.clone() }, Refusal::NoEnforcer),
            (Target { egress_token: Some(String::new()), ..target.clone() }, Refusal::NoEnforcer),
            (Target { reach: Reach::Paused([127, 0, 0, 1].into()), ..target.clone() }, Refusal::Paused),
        ] {
            assert_eq!(state.policy("x", &target, asked.clone()).await.unwrap_err(), refusal);
        }
    }
}

#[tokio::test]
async fn what_is_for_an_enforcer_that_is_away_goes_to_nobody_else() {
    let address = IpAddr::from([127, 77, 0, 9]);
    serve((address, AGENT_PORT), mirror("agent")).await;
    let with = Target { egress_token: Some("egress-token".to_owned()), ..at(Reach::Addressable(address)) };
    let without = at(Reach::Addressable(address));
    let targets = HashMap::from([("with", with.clone()), ("without", without)]);
    let known = Arc::new(Known { targets, ..Known::default() });
    let state = IngressState::new(known, Forwarder::new(Limits::default()), closed());
    for (id, status) in [("with", 502), ("without", 200)] {
        let path = format!("/sandboxes/{id}/proxy/18080/credential-vault");
        let request = Request::builder().method("POST").uri(path).header(API_KEY, "server-key");
        let answer = proxy_handler(state.clone(), request.body(axum::body::Body::empty()).unwrap()).await;
        assert_eq!(answer.status().as_u16(), status, "{id}");
    }
    let asked = PolicyRequest { method: http::Method::GET, query: None, body: "".into() };
    assert_eq!(state.policy("with", &with, asked).await.unwrap_err(), Refusal::Unreachable);
}

/// Knows nothing, because its runtime is away.
struct Blind;

impl Lookup for Blind {
    fn target(&self, _id: &str) -> Option<Target> {
        None
    }

    fn complete(&self) -> bool {
        false
    }
}

#[tokio::test]
async fn what_is_not_known_is_not_denied_while_the_runtime_is_away() {
    let state = IngressState::new(Arc::new(Blind), Forwarder::new(Limits::default()), closed());
    for (key, status) in [("server-key", 503), ("wrong", 401)] {
        let request = Request::builder().uri("/sandboxes/x/proxy/80/").header(API_KEY, key);
        let answer = proxy_handler(state.clone(), request.body(axum::body::Body::empty()).unwrap()).await;
        assert_eq!(answer.status().as_u16(), status);
    }
}
