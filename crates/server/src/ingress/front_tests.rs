//! The proxy routes behind the listener that clients really meet: over HTTP/2, and for sandboxes that are asleep.

use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::Router;
use axum::body::Bytes;
use axum::extract::{Request, WebSocketUpgrade, ws};
use axum::routing::any;
use futures_util::{FutureExt, SinkExt, StreamExt};
use http_body_util::{BodyExt, Empty, Full, StreamBody, combinators::UnsyncBoxBody};
use hyper::body::{Frame, Incoming};
use hyper::client::conn::http2::{self, SendRequest};
use hyper::ext::Protocol;
use hyper_util::rt::{TokioExecutor, TokioIo};
use sandglass_proxy::{Forwarder, Limits};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::{Message, protocol::Role};
use tokio_util::sync::CancellationToken;

use super::*;
use crate::listener::{self, Serving, Transport};
use crate::tenants::Keyring;

type Sent = UnsyncBoxBody<Bytes, std::convert::Infallible>;

/// Guards against hanging; nothing is measured by it.
const PATIENCE: Duration = Duration::from_secs(30);

/// One sandbox, and what becomes of it when it is woken.
struct One {
    reach: Mutex<Option<Reach>>,
    wakes: bool,
    after: (Result<(), NotWoken>, Option<Reach>),
    woken: AtomicUsize,
    used: AtomicUsize,
}

struct Known(Arc<One>);

impl Lookup for Known {
    fn target(&self, id: &str) -> Option<Target> {
        let reach = (*self.0.reach.lock().unwrap())?;
        (id == "box").then(|| Target { wakes: self.0.wakes, ..Target::at(reach) })
    }

    fn used(&self, _: &str) {
        self.0.used.fetch_add(1, Relaxed);
    }

    fn wake(&self, _: &str) -> Waking {
        let one = self.0.clone();
        async move {
            one.woken.fetch_add(1, Relaxed);
            tokio::time::sleep(Duration::from_millis(50)).await;
            *one.reach.lock().unwrap() = one.after.1;
            one.after.0
        }
        .boxed()
    }
}

fn one(reach: Reach, wakes: bool, after: (Result<(), NotWoken>, Option<Reach>)) -> Arc<One> {
    let (woken, used) = Default::default();
    Arc::new(One { reach: Mutex::new(Some(reach)), wakes, after, woken, used })
}

fn front(one: &Arc<One>) -> SocketAddr {
    let access = AccessRules { keys: Keyring::single(None), open_proxy: false };
    let settings = IngressSettings { access, eip: None };
    let state = IngressState::new(Arc::new(Known(one.clone())), Forwarder::new(Limits::default()), settings);
    let router = Router::new().fallback(move |request: Request| proxy_handler(state.clone(), request));
    let socket = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = socket.local_addr().unwrap();
    let refuse = crate::http::malformed::answer;
    let serving = Serving {
        answers: Arc::new(router),
        refuse,
        transport: Transport::Plain,
        limits: listener::Limits::default(),
    };
    listener::spawn(socket, serving, CancellationToken::new()).unwrap();
    address
}

async fn client(front: SocketAddr) -> SendRequest<Sent> {
    let stream = TcpStream::connect(front).await.unwrap();
    let (sender, connection) =
        http2::Builder::new(TokioExecutor::new()).handshake(TokioIo::new(stream)).await.unwrap();
    tokio::spawn(connection);
    sender
}

async fn backend(address: IpAddr) -> (TcpListener, u16) {
    let listener = TcpListener::bind((address, 0)).await.unwrap();
    let port = listener.local_addr().unwrap().port();
    (listener, port)
}

async fn read_head(stream: &mut TcpStream) -> String {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(stream.read_u8().await.unwrap());
    }
    String::from_utf8(head).unwrap()
}

fn url(port: u16) -> String {
    format!("http://front.example/sandboxes/box/proxy/{port}/a%2Fb?c=%20")
}

fn empty() -> Sent {
    Empty::new().boxed_unsync()
}

async fn text(answer: http::Response<Incoming>) -> String {
    String::from_utf8_lossy(&answer.into_body().collect().await.unwrap().to_bytes()).into_owned()
}

/// A WebSocket program; plain requests are answered with a word.
async fn program(address: IpAddr) -> u16 {
    let (listener, port) = backend(address).await;
    let talk = |mut socket: ws::WebSocket| async move {
        while let Some(Ok(message)) = socket.recv().await {
            let _ = socket.send(message).await;
        }
    };
    let answer = move |upgrade: Result<WebSocketUpgrade, ws::rejection::WebSocketUpgradeRejection>| async move {
        match upgrade {
            Ok(upgrade) => upgrade.protocols(["chat"]).on_upgrade(talk),
            Err(_) => axum::response::IntoResponse::into_response("awake"),
        }
    };
    let app = Router::new().fallback(any(answer));
    tokio::spawn(async move { axum::serve(listener, app).await });
    port
}

#[tokio::test]
async fn programs_get_http_1_from_clients_that_speak_http_2() {
    let address = IpAddr::from([127, 77, 1, 1]);
    let (listener, port) = backend(address).await;
    let front = front(&one(Reach::Addressable(address), false, (Ok(()), None)));
    let request = http::Request::post(url(port))
        .header("cookie", "a=1")
        .header("cookie", "b=2")
        .body(Full::new(Bytes::from_static(b"hello")).boxed_unsync())
        .unwrap();
    let mut sender = client(front).await;
    let answer = sender.send_request(request);
    let served = async {
        let (mut stream, _) = listener.accept().await.unwrap();
        let head = read_head(&mut stream).await;
        let mut body = [0; 5];
        stream.read_exact(&mut body).await.unwrap();
        let reply = "HTTP/1.1 200 OK\r\nset-cookie: a=1\r\nset-cookie: b=2\r\ntransfer-encoding: chunked\r\ntrailer: x-sum\r\n\r\n\
            3\r\nabc\r\n0\r\nx-sum: 9\r\n\r\n";
        stream.write_all(reply.as_bytes()).await.unwrap();
        (head, body)
    };
    let (answer, (head, body)) = tokio::join!(answer, served);
    assert_eq!(&body, b"hello");
    assert!(head.starts_with("POST /a%2Fb?c=%20 HTTP/1.1\r\n"), "{head}");
    let head = head.to_ascii_lowercase();
    for line in [
        format!("host: 127.77.1.1:{port}"),
        "cookie: a=1; b=2".to_owned(),
        "x-forwarded-host: front.example".to_owned(),
        "x-forwarded-proto: http".to_owned(),
        "content-length: 5".to_owned(),
    ] {
        assert!(head.contains(&format!("\r\n{line}\r\n")), "{line} in {head}");
    }
    let answer = answer.unwrap();
    assert_eq!(answer.headers().get_all("set-cookie").iter().count(), 2);
    let answer = answer.into_body().collect().await.unwrap();
    assert_eq!(answer.trailers().unwrap()["x-sum"], "9");
    assert_eq!(answer.to_bytes(), "abc");
}

#[tokio::test]
async fn a_cancelled_stream_lets_go_of_the_connection_behind_it() {
    let address = IpAddr::from([127, 77, 1, 2]);
    let (listener, port) = backend(address).await;
    let front = front(&one(Reach::Addressable(address), false, (Ok(()), None)));
    let mut sender = client(front).await;
    let gone = async |stream: &mut TcpStream| {
        let mut rest = Vec::new();
        // An end or a reset, as long as it is over.
        let _ = tokio::time::timeout(PATIENCE, stream.read_to_end(&mut rest)).await.expect("let go of");
    };
    // While the program thinks.
    let asked = tokio::spawn(sender.send_request(http::Request::get(url(port)).body(empty()).unwrap()));
    let (mut stream, _) = listener.accept().await.unwrap();
    read_head(&mut stream).await;
    asked.abort();
    gone(&mut stream).await;
    // While the answer streams, silently.
    let asked = tokio::spawn(sender.send_request(http::Request::get(url(port)).body(empty()).unwrap()));
    let (mut stream, _) = listener.accept().await.unwrap();
    read_head(&mut stream).await;
    stream.write_all(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\na\r\n").await.unwrap();
    let mut body = asked.await.unwrap().unwrap().into_body();
    assert_eq!(body.frame().await.unwrap().unwrap().into_data().unwrap(), "a");
    drop(body);
    gone(&mut stream).await;
    // While the request is still being sent.
    let pieces = futures_util::stream::iter([Ok(Frame::data(Bytes::from_static(b"x")))]);
    let endless = StreamBody::new(pieces.chain(futures_util::stream::pending())).boxed_unsync();
    let asked = tokio::spawn(sender.send_request(http::Request::post(url(port)).body(endless).unwrap()));
    let (mut stream, _) = listener.accept().await.unwrap();
    read_head(&mut stream).await;
    asked.abort();
    gone(&mut stream).await;
    // The client's own connection is none the worse for it.
    let asked = tokio::spawn(sender.send_request(http::Request::get(url(port)).body(empty()).unwrap()));
    let (mut stream, _) = listener.accept().await.unwrap();
    read_head(&mut stream).await;
    stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok").await.unwrap();
    assert_eq!(text(asked.await.unwrap().unwrap()).await, "ok");
}

#[tokio::test]
async fn websockets_reach_programs_over_http_2_and_are_closed_with_a_word() {
    let address = IpAddr::from([127, 77, 1, 3]);
    let port = program(address).await;
    let front = front(&one(Reach::Addressable(address), false, (Ok(()), None)));
    let mut sender = client(front).await;
    sender.send_request(http::Request::get(url(port)).body(empty()).unwrap()).await.unwrap();
    let connect = |id: &str| {
        http::Request::connect(format!("http://front.example/sandboxes/{id}/proxy/{port}/ws"))
            .header("sec-websocket-version", "13")
            .header("sec-websocket-protocol", "chat")
            .extension(Protocol::from_static("websocket"))
            .body(empty())
            .unwrap()
    };
    let answer = sender.send_request(connect("box")).await.unwrap();
    assert_eq!(
        (answer.status().as_u16(), &answer.headers()["sec-websocket-protocol"] == "chat"),
        (200, true)
    );
    let stream = TokioIo::new(hyper::upgrade::on(answer).await.unwrap());
    let mut socket = WebSocketStream::from_raw_socket(stream, Role::Client, None).await;
    socket.send(Message::text("there")).await.unwrap();
    assert_eq!(socket.next().await.unwrap().unwrap(), Message::text("there"));

    let answer = sender.send_request(connect("other")).await.unwrap();
    let stream = TokioIo::new(hyper::upgrade::on(answer).await.unwrap());
    let mut socket = WebSocketStream::from_raw_socket(stream, Role::Client, None).await;
    let Some(Ok(Message::Close(Some(close)))) = socket.next().await else { panic!("no word") };
    assert_eq!((u16::from(close.code), close.reason.as_str()), (1011, "sandbox not found"));
}

#[tokio::test]
async fn a_sandbox_that_sleeps_is_woken_for_whoever_wants_it() {
    let address = IpAddr::from([127, 77, 1, 4]);
    let port = program(address).await;
    let (up, asleep) = (Some(Reach::Addressable(address)), Reach::Paused(address));
    let skip = ("opensandbox-access-renew", "skip");
    type Case = (
        bool,
        (Result<(), NotWoken>, Option<Reach>),
        Option<(&'static str, &'static str)>,
        (u16, &'static str, usize),
    );
    let cases: &[Case] = &[
        (true, (Ok(()), up), None, (200, "awake", 1)),
        (false, (Ok(()), up), None, (502, "BACKEND_CONNECTION_FAILED", 0)),
        // A probe leaves it asleep.
        (true, (Ok(()), up), Some(skip), (502, "BACKEND_CONNECTION_FAILED", 0)),
        (true, (Ok(()), up), Some(("opensandbox-access-renew", "no")), (200, "awake", 1)),
        (true, (Err(NotWoken::Failed), Some(asleep)), None, (502, "DOCKER::SANDBOX_RESUME_FAILED", 1)),
        (true, (Err(NotWoken::Later), Some(asleep)), None, (503, "GENERAL::UNAVAILABLE", 1)),
        (true, (Err(NotWoken::Gone), None), None, (404, "DOCKER::SANDBOX_NOT_FOUND", 1)),
        (true, (Ok(()), Some(Reach::Gone)), None, (502, "BACKEND_CONNECTION_FAILED", 1)),
    ];
    for (wakes, after, header, (status, word, woken)) in cases {
        let one = one(asleep, *wakes, *after);
        let mut request = http::Request::get(url(port));
        if let Some((name, value)) = header {
            request = request.header(*name, *value);
        }
        let mut sender = client(front(&one)).await;
        let answer = sender.send_request(request.body(empty()).unwrap()).await.unwrap();
        assert_eq!(answer.status().as_u16(), *status, "{wakes} {after:?} {header:?}");
        assert_eq!(answer.headers().contains_key("retry-after"), *status == 503);
        assert!(text(answer).await.contains(word), "{wakes} {after:?} {header:?}");
        assert_eq!(one.woken.load(Relaxed), *woken, "{wakes} {after:?} {header:?}");
    }
    // A WebSocket waits like any other request, and what could not be had is told by its close.
    let sleeper = one(asleep, true, (Ok(()), up));
    let front_of = front(&sleeper);
    let ws = format!("ws://{front_of}/sandboxes/box/proxy/{port}/ws");
    let stream = TcpStream::connect(front_of).await.unwrap();
    let (mut socket, _) = tokio_tungstenite::client_async(&ws, stream).await.unwrap();
    socket.send(Message::text("up")).await.unwrap();
    assert_eq!(socket.next().await.unwrap().unwrap(), Message::text("up"));
    assert_eq!((sleeper.woken.load(Relaxed), sleeper.used.load(Relaxed)), (1, 1));
    let front_of = front(&one(asleep, true, (Err(NotWoken::Failed), Some(asleep))));
    let ws = format!("ws://{front_of}/sandboxes/box/proxy/{port}/ws");
    let stream = TcpStream::connect(front_of).await.unwrap();
    let (mut socket, _) = tokio_tungstenite::client_async(&ws, stream).await.unwrap();
    let Some(Ok(Message::Close(Some(close)))) = socket.next().await else { panic!("no word") };
    assert_eq!(
        (u16::from(close.code), close.reason.as_str()),
        (1011, "sandbox is paused and could not be resumed")
    );
}

#[tokio::test]
async fn nobody_without_a_key_wakes_anything() {
    let address = IpAddr::from([127, 77, 1, 5]);
    let sleeper = one(Reach::Paused(address), true, (Ok(()), Some(Reach::Addressable(address))));
    let access = AccessRules { keys: Keyring::single(Some("server-key")), open_proxy: false };
    let settings = IngressSettings { access, eip: None };
    let lookup = Arc::new(Known(sleeper.clone()));
    let state = IngressState::new(lookup, Forwarder::new(Limits::default()), settings);
    let request = Request::builder().uri("/sandboxes/box/proxy/80/").body(axum::body::Body::empty()).unwrap();
    assert_eq!(proxy_handler(state, request).await.status(), 401);
    assert_eq!(sleeper.woken.load(Relaxed), 0);
}
