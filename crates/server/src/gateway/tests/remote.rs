//! A gateway that runs alone: what it learns from a server, and what it tells.

use std::collections::HashSet;

use axum::body::Body;
use axum::extract::State;
use axum::http::HeaderMap;
use axum::routing::{get, post};
use futures_util::stream;
use sandglass_api::ingress::{IngressLine, IngressSandbox, IngressState};
use sandglass_sandbox::Timestamp;
use tokio::sync::{broadcast, mpsc};
use tokio_util::task::TaskTracker;

use super::super::feed::{FeedError, Server};
use super::*;
use crate::config::Secret;

fn sandbox(id: &str, last: u8) -> IngressSandbox {
    IngressSandbox {
        id: id.to_owned(),
        state: IngressState::Up,
        address: Some(IpAddr::from([127, 78, 1, last])),
        ports: None,
        agent_token: "agent".to_owned(),
        secure_access: None,
        route_token: String::new(),
        open: true,
        wakes: false,
        renews: true,
        expires_at: None,
    }
}

fn put(sandbox: IngressSandbox) -> IngressLine {
    IngressLine::Put { sandbox }
}

#[test]
fn what_opens_a_sandbox_is_what_the_server_says() {
    let mirror = Mirror::new(carrier(), None);
    let open = sandbox("open", 1);
    let closed = IngressSandbox { open: false, route_token: "route".to_owned(), ..sandbox("closed", 2) };
    let secure = IngressSandbox { secure_access: Some("secure".to_owned()), ..sandbox("secure", 3) };
    // As a server tells it that says neither.
    let unsaid = IngressSandbox { open: false, ..sandbox("unsaid", 4) };
    for (sandbox, expected) in [
        (open, (true, false, "")),
        (closed, (false, false, "route")),
        (secure, (true, true, "secure")),
        (unsaid, (false, false, "")),
    ] {
        let id = sandbox.id.clone();
        mirror.take(put(sandbox), &mut HashSet::new());
        let target = mirror.find(&id, Timestamp::clamped(1_000)).unwrap();
        assert_eq!((target.open, target.secure_access, target.route_token.as_str()), expected, "{id}");
    }
}

#[test]
fn the_copy_holds_what_the_last_whole_list_told_and_what_came_after() {
    let mirror = Mirror::new(carrier(), None);
    let now = Timestamp::clamped(1_000);
    let known = |id: &str| mirror.find(id, now).is_some();
    let mut told = HashSet::new();
    mirror.take(put(sandbox("a", 1)), &mut told);
    mirror.take(put(sandbox("b", 2)), &mut told);
    mirror.take(IngressLine::Whole, &mut told);
    assert!(known("a") && known("b") && !known("c"));
    mirror.take(IngressLine::Gone { id: "a".to_owned() }, &mut told);
    assert!(!known("a"));
    // Another stream: until it has told everything, what was known is known.
    mirror.lost();
    let mut told = HashSet::new();
    mirror.take(put(sandbox("c", 3)), &mut told);
    assert!(known("b") && known("c"));
    mirror.take(IngressLine::Whole, &mut told);
    assert!(!known("b") && known("c"));

    let expiring = IngressSandbox { expires_at: Some(now.into()), ..sandbox("d", 4) };
    mirror.take(put(expiring), &mut told);
    assert!(known("d"), "whether it is over is the server's word");
    mirror.lost();
    assert!(!known("d") && known("c"), "while the server is away it is the clock's");
}

#[test]
fn the_copy_says_how_sandboxes_are_reached() {
    let published_on = IpAddr::from([192, 0, 2, 7]);
    let mirror = Mirror::new(carrier(), Some(published_on));
    let ports = sandglass_api::ingress::IngressPorts { agent: 1, http: 2, egress: None };
    let own = IpAddr::from([127, 78, 1, 1]);
    for (state, ports, reach) in [
        (IngressState::Up, None, Reach::Addressable(own)),
        (IngressState::Up, Some(ports), Reach::Addressable(published_on)),
        (IngressState::Paused, None, Reach::Paused(own)),
        (IngressState::Starting, None, Reach::Starting(Some(own))),
        (IngressState::Unreachable, None, Reach::Nowhere),
        (IngressState::Over, None, Reach::Gone),
    ] {
        mirror.take(put(IngressSandbox { state, ports, ..sandbox("a", 1) }), &mut HashSet::new());
        let found = mirror.find("a", Timestamp::clamped(0)).unwrap();
        assert_eq!((found.reach, found.mapped.is_some()), (reach, ports.is_some()), "{state:?}");
    }
}

/// A server that says what a test tells it to.
#[derive(Clone)]
struct Script {
    lines: broadcast::Sender<String>,
    asked: mpsc::UnboundedSender<String>,
}

async fn scripted() -> (Script, mpsc::UnboundedReceiver<String>, Server) {
    let (asked, asks) = mpsc::unbounded_channel();
    let script = Script { lines: broadcast::Sender::new(64), asked };
    let app = Router::new()
        .route("/v1/ingress/sandboxes", get(follow))
        .route("/v1/ingress/uses", post(told))
        .route("/v1/ingress/sandboxes/{id}/wake", post(told))
        .with_state(script.clone());
    let address = serve(IpAddr::from([127, 0, 0, 1]), app).await;
    let base = format!("http://{address}/").parse().unwrap();
    (script, asks, Server::new(base, Secret::new("key")).unwrap())
}

async fn follow(State(script): State<Script>, headers: HeaderMap) -> axum::response::Response {
    let heard = script.lines.subscribe();
    let _ = script.asked.send("follow".to_owned());
    if headers["open-sandbox-api-key"] != "key" {
        return StatusCode::UNAUTHORIZED.into_response();
    }
    let lines = stream::unfold(heard, |mut heard| async {
        let line = heard.recv().await.ok().filter(|line| line != "end")?;
        Some((Ok::<_, std::convert::Infallible>(line + "\n"), heard))
    });
    Body::from_stream(lines).into_response()
}

async fn told(State(script): State<Script>, request: Request) -> StatusCode {
    let path = request.uri().path().to_owned();
    let body = axum::body::to_bytes(request.into_body(), 1 << 20).await.unwrap();
    let _ = script.asked.send(format!("{path} {}", String::from_utf8_lossy(&body)));
    StatusCode::NO_CONTENT
}

fn text(line: &IngressLine) -> String {
    serde_json::to_string(line).unwrap()
}

#[tokio::test]
async fn a_server_is_followed_again_after_it_was_away() {
    let (script, mut asks, server) = scripted().await;
    let mirror = Arc::new(Mirror::new(carrier(), None));
    let stop = CancellationToken::new();
    let following = {
        let (server, mirror, stop) = (server.clone(), mirror.clone(), stop.clone());
        tokio::spawn(async move { server.follow(&mirror, &stop).await })
    };
    let mut changes = mirror.changes();
    let mut now_known = async |id: &str, expected: bool| {
        let known = || mirror.find(id, Timestamp::clamped(0)).is_some();
        while known() != expected {
            changes.changed().await.unwrap();
        }
    };
    assert_eq!(asks.recv().await.unwrap(), "follow");
    script.lines.send(text(&put(sandbox("a", 9)))).unwrap();
    script.lines.send(text(&IngressLine::Whole)).unwrap();
    mirror.wait_whole().await;
    now_known("a", true).await;
    script.lines.send("end".to_owned()).unwrap();
    assert_eq!(asks.recv().await.unwrap(), "follow", "it comes back");
    now_known("a", true).await;
    script.lines.send(text(&put(sandbox("b", 9)))).unwrap();
    script.lines.send(text(&IngressLine::Whole)).unwrap();
    now_known("a", false).await;
    // Nonsense is as good as an end.
    script.lines.send("{".to_owned()).unwrap();
    assert_eq!(asks.recv().await.unwrap(), "follow");
    now_known("b", true).await;
    stop.cancel();
    assert!(following.await.unwrap().is_ok());

    server.wake("b").await.unwrap();
    assert_eq!(asks.recv().await.unwrap(), "/v1/ingress/sandboxes/b/wake ");
}

#[tokio::test]
async fn a_key_that_is_refused_ends_the_start() {
    let (_script, _asks, server) = scripted().await;
    let base = server.base().clone();
    let server = Server::new(base, Secret::new("wrong")).unwrap();
    let mirror = Mirror::new(carrier(), None);
    let refused = server.follow(&mirror, &CancellationToken::new()).await;
    assert!(matches!(refused, Err(FeedError::Key)), "{refused:?}");
    assert!(!format!("{server:?}").contains("wrong"));
}

fn used(id: &str, renews: bool) -> Used<'_> {
    Used { id, port: 80, path: Some("/x"), renews, lasts: false }
}

#[tokio::test]
async fn uses_are_told_to_the_server_for_those_who_live_on_by_it() {
    let (_script, mut asks, server) = scripted().await;
    let tasks = TaskTracker::new();
    let settings = IntentSettings { redis: None, interval: Duration::from_secs(3600) };
    let intents = Intents::start(settings, &server, &tasks);
    intents.used(used("mortal", false));
    intents.used(used("a", true));
    intents.used(used("a", true));
    intents.used(used("b", true));
    drop(intents);
    tasks.close();
    tasks.wait().await;
    let mut told = [asks.recv().await.unwrap(), asks.recv().await.unwrap()];
    told.sort_unstable();
    assert_eq!(told, [r#"/v1/ingress/uses {"sandboxes":["a"]}"#, r#"/v1/ingress/uses {"sandboxes":["b"]}"#]);
    assert!(asks.try_recv().is_err());
}

#[tokio::test]
async fn uses_are_told_to_redis_for_everybody() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let dsn = format!("redis://{}/0", listener.local_addr().unwrap());
    let (_script, _asks, server) = scripted().await;
    let tasks = TaskTracker::new();
    let redis = RedisList {
        address: crate::renewal::RedisAddress::parse(&dsn).unwrap(),
        key: "list".to_owned(),
        longest: 10,
    };
    let settings = IntentSettings { redis: Some(redis), interval: Duration::ZERO };
    let intents = Intents::start(settings, &server, &tasks);
    intents.used(used("mortal", false));
    let (mut stream, _) = listener.accept().await.unwrap();
    let mut got = Vec::new();
    while !got.ends_with(b"$1\r\n9\r\n") {
        got.push(stream.read_u8().await.unwrap());
    }
    let got = String::from_utf8(got).unwrap();
    assert!(got.starts_with("*3\r\n$5\r\nLPUSH\r\n$4\r\nlist\r\n"), "{got}");
    assert!(got.contains(r#"{"sandbox_id":"mortal","observed_at":"2"#), "{got}");
    assert!(got.contains(r#"Z","port":80,"request_uri":"/x"}"#), "{got}");
    assert!(got.contains("*4\r\n$5\r\nLTRIM\r\n$4\r\nlist\r\n$1\r\n0\r\n"), "{got}");
    stream.write_all(b":1\r\n+OK\r\n").await.unwrap();
    drop(intents);
    tasks.close();
    tasks.wait().await;
}

#[tokio::test]
async fn a_webhook_is_told_of_what_was_let_through() {
    let (sender, mut messages) = mpsc::unbounded_channel();
    let hook = Router::new().fallback(move |body: axum::Json<serde_json::Value>| async move {
        let _ = sender.send(body.0);
    });
    let address = serve(IpAddr::from([127, 0, 0, 1]), hook).await;
    let tasks = TaskTracker::new();
    let url = format!("http://{address}/hook").parse().unwrap();
    let audit =
        Audit::start(AuditSettings { url, queue: 8, timeout: Duration::from_secs(60) }, &tasks).unwrap();
    let audited = |s| GatewaySettings { audit: Some(audit), ..s };
    let stage = Stage::with(60, RouteFrom::Path, audited).await;
    stage.ask("GET /unknown/80/x", "Host: h\r\n").await;
    stage.ask(&format!("PUT /box/{}/y?secret", stage.port), "Host: h\r\nContent-Length: 0\r\n").await;
    let mut told = messages.recv().await.unwrap();
    let at = told.as_object_mut().unwrap().remove("request_time").unwrap();
    assert!(at.as_str().unwrap().ends_with('Z'));
    let target = format!("127.78.0.60:{}", stage.port);
    assert_eq!(
        told,
        serde_json::json!({"sandbox_id": "box", "uri": "/y", "method": "PUT", "target": target})
    );
}
