//! The listener over real sockets, byte by byte: what HTTP/1.1 clients may send, how long they may take, and how it ends.

use std::{
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    time::Duration,
};

use axum::{
    Router,
    body::{Body, Bytes, to_bytes},
    extract::{Request, State, WebSocketUpgrade, ws::WebSocket},
    response::{IntoResponse, Response},
    routing::{any, get},
};
use futures_util::{SinkExt, StreamExt, TryStreamExt, stream};
use http::{StatusCode, header};
use sandglass_server::{
    http::malformed,
    listener::{self, Limits, Scheme, Serving, Transport},
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    task::JoinHandle,
};
use tokio_util::sync::CancellationToken;

/// Guards against hanging; nothing is measured by it.
const PATIENCE: Duration = Duration::from_secs(60);

/// A listener with a small application behind it.
pub struct Door {
    pub address: SocketAddr,
    pub stop: CancellationToken,
    pub task: JoinHandle<()>,
    /// Requests that got through.
    pub served: Arc<AtomicUsize>,
}

/// Says what it was asked.
async fn echo(State(served): State<Arc<AtomicUsize>>, request: Request) -> Response {
    served.fetch_add(1, Relaxed);
    let (parts, body) = request.into_parts();
    let scheme = parts.extensions.get::<Scheme>().copied();
    let headers: Vec<_> =
        parts.headers.iter().map(|(name, value)| format!("{name}={}", value.to_str().unwrap())).collect();
    match to_bytes(body, usize::MAX).await {
        Ok(body) => {
            let body = if body.len() > 100 { format!("{} bytes", body.len()) } else { format!("{body:?}") };
            format!("{} {} {scheme:?} {} {body}", parts.method, parts.uri, headers.join(" ")).into_response()
        }
        Err(_) => StatusCode::IM_A_TEAPOT.into_response(),
    }
}

async fn talk(mut socket: WebSocket) {
    while let Some(Ok(message)) = socket.recv().await {
        if socket.send(message).await.is_err() {
            return;
        }
    }
}

pub fn application(served: Arc<AtomicUsize>) -> Router {
    let silent = || async {
        let events = stream::iter([Ok::<_, std::io::Error>(Bytes::from_static(b"data: 1\n\n"))]);
        Response::new(Body::from_stream(events.chain(stream::pending())))
    };
    // What comes in goes out, and the answer begins before the request has ended.
    let both_ways =
        |request: Request| async { Response::new(Body::from_stream(request.into_body().into_data_stream())) };
    Router::new()
        .route("/silent", get(silent))
        .route("/both-ways", any(both_ways))
        .route("/early", any(|| async { (StatusCode::INSUFFICIENT_STORAGE, "full") }))
        .route("/ws", any(|upgrade: WebSocketUpgrade| async { upgrade.on_upgrade(talk) }))
        .fallback(echo)
        .with_state(served)
}

impl Door {
    pub async fn open(limits: Limits, transport: Transport) -> Self {
        let served = Arc::<AtomicUsize>::default();
        let socket = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = socket.local_addr().unwrap();
        let stop = CancellationToken::new();
        let router = application(served.clone());
        let answers = Arc::new(router);
        let serving = Serving { answers, refuse: malformed::answer, transport, limits };
        let task = listener::spawn(socket, serving, stop.clone()).unwrap();
        Self { address, stop, task, served }
    }

    async fn plain(limits: Limits) -> Self {
        Self::open(limits, Transport::Plain).await
    }

    async fn connect(&self) -> TcpStream {
        TcpStream::connect(self.address).await.unwrap()
    }

    /// Everything that comes back until the server closes.
    async fn say(&self, bytes: &[u8]) -> String {
        let mut stream = self.connect().await;
        stream.write_all(bytes).await.unwrap();
        rest(&mut stream).await
    }
}

async fn rest(stream: &mut TcpStream) -> String {
    let mut all = Vec::new();
    tokio::time::timeout(PATIENCE, stream.read_to_end(&mut all)).await.expect("the server closes").unwrap();
    String::from_utf8(all).unwrap()
}

/// Reads until this text has come.
async fn until(stream: &mut TcpStream, text: &str) -> String {
    let mut all = String::new();
    let mut piece = [0; 1024];
    while !all.contains(text) {
        let read = tokio::time::timeout(PATIENCE, stream.read(&mut piece)).await.expect(text).unwrap();
        assert_ne!(read, 0, "closed after {all:?}, before {text:?}");
        all.push_str(std::str::from_utf8(&piece[..read]).unwrap());
    }
    all
}

fn statuses(answers: &str) -> Vec<u16> {
    answers.match_indices("HTTP/1.1 ").map(|(at, _)| answers[at + 9..at + 12].parse().unwrap()).collect()
}

fn patient() -> Limits {
    Limits {
        keep_alive: PATIENCE,
        head: PATIENCE,
        body_silence: PATIENCE,
        connections: 100,
        ..Limits::default()
    }
}

const GOOD: &str = "GET /next HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n";

/// What is sent, and the status of the only answer.
const REFUSED: &[(&str, u16)] = &[
    // Two lengths.
    ("POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
    ("POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\nContent-Length: 4\r\n\r\n0\r\n\r\n", 400),
    ("POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 4\r\nContent-Length: 5\r\n\r\nabcde", 400),
    ("POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 4, 4\r\n\r\nabcd", 400),
    ("POST / HTTP/1.1\r\nHost: a\r\nContent-Length: +4\r\n\r\nabcd", 400),
    ("POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 0x4\r\n\r\nabcd", 400),
    ("POST / HTTP/1.1\r\nHost: a\r\nContent-Length:\r\n\r\nabcd", 400),
    ("POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 99999999999999999999\r\n\r\n", 400),
    // Codings.
    ("POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: xchunked\r\n\r\n0\r\n\r\n", 400),
    ("POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: \x0bchunked\r\n\r\n0\r\n\r\n", 400),
    ("POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked, identity\r\n\r\n", 400),
    ("POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked, chunked\r\n\r\n", 400),
    (
        "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        400,
    ),
    ("POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n", 400),
    ("POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", 501),
    ("POST / HTTP/1.0\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
    // Lines.
    ("GET / HTTP/1.1\nHost: a\n\n", 400),
    ("GET / HTTP/1.1\r\nHost: a\nX: y\r\n\r\n", 400),
    ("GET / HTTP/1.1\r\nHost: a\r\n\n", 400),
    ("GET / HTTP/1.1\r\nHost: a\r\nX: y\rZ: 1\r\n\r\n", 400),
    ("GET / HTTP/1.1\r\nHost: a\r\nX: y\r\n folded\r\n\r\n", 400),
    ("GET / HTTP/1.1\r\nHost: a\r\n X: y\r\n\r\n", 400),
    ("GET / HTTP/1.1\r\nHost: a\r\nContent-Length : 5\r\n\r\nabcde", 400),
    ("GET / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding\t: chunked\r\n\r\n", 400),
    ("GET / HTTP/1.1\r\nHost: a\r\nno colon\r\n\r\n", 400),
    ("GET / HTTP/1.1\r\nHost: a\r\n: y\r\n\r\n", 400),
    ("GET / HTTP/1.1\r\nHost: a\r\nX: a\0b\r\n\r\n", 400),
    // Hosts.
    ("GET / HTTP/1.1\r\n\r\n", 400),
    ("GET / HTTP/1.1\r\nHost: a\r\nHost: a\r\n\r\n", 400),
    ("GET / HTTP/1.1\r\nHost: a\r\nhost: b\r\n\r\n", 400),
    ("GET / HTTP/1.1\r\nHost: a b\r\n\r\n", 400),
    ("GET / HTTP/1.1\r\nHost: a, b\r\n\r\n", 400),
    ("GET / HTTP/1.1\r\nHost: a/b\r\n\r\n", 400),
    ("GET / HTTP/1.1\r\nHost: user@a\r\n\r\n", 400),
    ("GET / HTTP/1.1\r\nHost: a:b\r\n\r\n", 400),
    ("GET http://b/ HTTP/1.1\r\nHost: a\r\n\r\n", 400),
    ("GET http://a@b/ HTTP/1.1\r\nHost: a\r\n\r\n", 400),
    ("GET http://a:81/ HTTP/1.1\r\nHost: a\r\n\r\n", 400),
    // Request lines.
    ("GET  / HTTP/1.1\r\nHost: a\r\n\r\n", 400),
    ("GET / x HTTP/1.1\r\nHost: a\r\n\r\n", 400),
    ("GET\t/ HTTP/1.1\r\nHost: a\r\n\r\n", 400),
    ("GET /\x7f HTTP/1.1\r\nHost: a\r\n\r\n", 400),
    ("G(T / HTTP/1.1\r\nHost: a\r\n\r\n", 400),
    ("GET x HTTP/1.1\r\nHost: a\r\n\r\n", 400),
    ("GET ftp://a/ HTTP/1.1\r\nHost: a\r\n\r\n", 400),
    ("GET /\r\n\r\n", 400),
    ("hello\r\n", 400),
    ("GET / HTTP/2.0\r\nHost: a\r\n\r\n", 505),
    ("GET / HTTP/1.2\r\nHost: a\r\n\r\n", 505),
    ("CONNECT a:80 HTTP/1.1\r\nHost: a:80\r\n\r\n", 405),
];

#[tokio::test]
async fn requests_with_two_meanings_are_refused_and_nothing_after_them_is_served() {
    let door = Door::plain(patient()).await;
    let long = format!("GET /{} HTTP/1.1\r\nHost: a\r\n\r\n", "x".repeat(33 << 10));
    let endless = format!("GET /{}", "x".repeat(70 << 10));
    let large = format!("GET / HTTP/1.1\r\nHost: a\r\nX: {}\r\n\r\n", "x".repeat(66 << 10));
    let many = format!("GET / HTTP/1.1\r\nHost: a\r\n{}\r\n", "X: y\r\n".repeat(200));
    let dynamic = [(&*long, 414), (&*endless, 414), (&*large, 431), (&*many, 431)];
    for (bytes, status) in REFUSED.iter().chain(&dynamic) {
        let shown = bytes.chars().take(120).collect::<String>().escape_debug().to_string();
        // `hello` and its like are over with their first line, when no more comes.
        let bytes = if *bytes == "hello\r\n" { format!("{bytes}\r\n") } else { (*bytes).to_owned() };
        let answer = door.say(format!("{bytes}{GOOD}").as_bytes()).await;
        assert_eq!(statuses(&answer), [*status], "{shown}: {answer}");
        assert!(answer.contains("connection: close\r\n") && answer.contains("x-request-id: "), "{answer}");
        assert!(answer.contains("\"code\":\"GENERAL::MALFORMED_REQUEST\""), "{shown}: {answer}");
        assert_eq!(door.served.load(Relaxed), 0, "{shown}");
    }
    // In its turn, after what came before it.
    let answer = door.say(b"GET /1 HTTP/1.1\r\nHost: a\r\n\r\nGET /2 HTTP/1.1\nHost: a\r\n\r\n").await;
    assert_eq!(statuses(&answer), [200, 400]);
    assert!(answer.find("GET /1").unwrap() < answer.find("MALFORMED").unwrap());
}

#[tokio::test]
async fn what_is_in_order_gets_through_in_whatever_pieces() {
    let door = Door::plain(patient()).await;
    let conversation = "\r\nGET /1?q HTTP/1.1\r\nHost: a:80\r\n\r\n\
        POST /2 HTTP/1.1\r\nHost:\r\nContent-Length: 3\r\nContent-Length: 3\r\n\r\nabc\
        POST /3 HTTP/1.1\r\nHost: [::1]:8080\r\ntransfer-encoding: Chunked\r\n\r\n3;x=\"y\"\r\na\nb\r\n0\r\nt: 1\r\n\r\n\
        GET http://A/4 HTTP/1.1\r\nHost: a\r\n\r\n\
        OPTIONS * HTTP/1.1\r\nHost: a\r\n\r\n\
        GET /6 HTTP/1.1\r\nHost: a\r\nUpgrade: h2c\r\nConnection: Upgrade\r\n\r\n\
        GET /7 HTTP/1.1\r\nHost: a\r\nX: \u{e9}\tz\r\nConnection: close\r\n\r\n";
    for piece in [1, 7, 64, 10_000] {
        let mut stream = door.connect().await;
        stream.set_nodelay(true).unwrap();
        for bytes in conversation.replace('\u{e9}', "e").as_bytes().chunks(piece) {
            stream.write_all(bytes).await.unwrap();
            tokio::task::yield_now().await;
        }
        let answers = rest(&mut stream).await;
        assert_eq!(statuses(&answers), [200; 7], "{piece}: {answers}");
        for expected in [
            "GET /1?q Some(Http) host=a:80 b\"\"",
            "POST /2 Some(Http) host= content-length=3 b\"abc\"",
            "b\"a\\nb\"",
            "/4 Some(Http) host=a b\"\"",
            "OPTIONS *",
            "GET /6",
            "GET /7",
        ] {
            assert!(answers.contains(expected), "{piece}: {expected} in {answers}");
        }
    }
    assert_eq!(door.served.load(Relaxed), 28);
}

#[tokio::test]
async fn a_body_that_breaks_the_rules_is_refused_however_far_it_got() {
    let door = Door::plain(patient()).await;
    let head = "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n";
    for body in [
        "x\r\n",
        "3\nabc\r\n0\r\n\r\n",
        "3\r\nabcd\r\n0\r\n\r\n",
        "3\r\nabc\r\n0\r\n\n",
        "3 ;\n\r\n",
        "-1\r\n",
    ] {
        let answer = door.say(format!("{head}{body}{GOOD}").as_bytes()).await;
        assert_eq!(statuses(&answer), [400], "{body:?}: {answer}");
        let mut stream = door.connect().await;
        stream.write_all(format!("{head}5\r\nhello\r\n").as_bytes()).await.unwrap();
        while door.served.load(Relaxed) % 2 == 1 {
            tokio::task::yield_now().await;
        }
        stream.write_all(format!("{body}{GOOD}").as_bytes()).await.unwrap();
        assert_eq!(statuses(&rest(&mut stream).await), [400], "{body:?}");
    }
}

#[tokio::test]
async fn slow_heads_and_silent_bodies_are_ended_and_others_get_their_place() {
    let short = Duration::from_millis(300);
    let limits = Limits { head: short, body_silence: short, connections: 1, ..patient() };
    let door = Door::plain(limits).await;
    for (slow, status) in [
        ("GET / HTTP/1.1\r\nHost:", 408),
        ("G", 408),
        ("POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\n\r\nab", 408),
        ("POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nab", 408),
    ] {
        let mut stream = door.connect().await;
        stream.write_all(slow.as_bytes()).await.unwrap();
        let (answer, next) = tokio::join!(rest(&mut stream), door.say(GOOD.as_bytes()));
        assert_eq!((statuses(&answer), statuses(&next)), (vec![status], vec![200]), "{slow:?}: {answer}");
    }
    // Two heads in one, so that the second is begun while the first is answered.
    let answer = door.say(b"GET /1 HTTP/1.1\r\nHost: a\r\n\r\nGET /2 HTT").await;
    assert_eq!(statuses(&answer), [200, 408]);
}

#[tokio::test]
async fn bytes_that_drip_do_not_move_the_deadline_of_a_head() {
    let door = Door::plain(Limits { head: Duration::from_millis(500), ..patient() }).await;
    let stream = door.connect().await;
    let (mut from, mut to) = stream.into_split();
    let dripping = tokio::spawn(async move {
        let _ = to.write_all(b"GET / HTTP/1.1\r\nHost: a\r\n").await;
        while to.write_all(b"X: y\r\n").await.is_ok() {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    });
    let mut answer = Vec::new();
    let _ = tokio::time::timeout(PATIENCE, from.read_to_end(&mut answer)).await.expect("the server closes");
    assert_eq!(statuses(&String::from_utf8(answer).unwrap()), [408]);
    dripping.await.unwrap();
}

#[tokio::test]
async fn silence_is_nobodys_business_once_there_is_an_answer() {
    let short = Duration::from_millis(200);
    let limits = Limits { keep_alive: short, head: short, body_silence: short, ..patient() };
    let door = Door::plain(limits).await;
    let mut events = door.connect().await;
    events.write_all(b"GET /silent HTTP/1.1\r\nHost: a\r\n\r\n").await.unwrap();
    until(&mut events, "data: 1").await;
    let mut both = door.connect().await;
    both.write_all(b"POST /both-ways HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n")
        .await
        .unwrap();
    until(&mut both, "a").await;
    let url = format!("ws://{}/ws", door.address);
    let (mut socket, _) = tokio_tungstenite::client_async(url, door.connect().await).await.unwrap();
    // Longer than everything above and the margin of the keep-alive.
    tokio::time::sleep(Duration::from_secs(7)).await;
    // Bytes that no head could hold.
    let text = tokio_tungstenite::tungstenite::Message::text("\n\r\n\n\r\0");
    socket.send(text.clone()).await.unwrap();
    assert_eq!(socket.next().await.unwrap().unwrap(), text);
    both.write_all(b"5\r\nhello\r\n0\r\n\r\n").await.unwrap();
    until(&mut both, "hello").await;
    let mut more = [0];
    assert!(tokio::time::timeout(short, events.read(&mut more)).await.is_err(), "still open, still silent");
}

#[tokio::test]
async fn an_upgrade_that_is_not_granted_leaves_the_rules_in_place() {
    let door = Door::plain(patient()).await;
    let asks = "GET /no HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n";
    let answer = door.say(format!("{asks}GET /2 HTTP/1.1\nHost: a\n\n").as_bytes()).await;
    assert_eq!(statuses(&answer), [200, 400], "{answer}");
    let answer = door.say(format!("{asks}{asks}{GOOD}").as_bytes()).await;
    assert_eq!(statuses(&answer), [200, 200, 200], "{answer}");
}

#[tokio::test]
async fn an_answer_that_comes_before_the_end_of_an_upload_arrives() {
    let door = Door::plain(patient()).await;
    // More than the sockets' buffers hold, so that an unread rest would reset the connection.
    const BODY: usize = 64 << 20;
    let mut client = door.connect().await;
    let head =
        format!("POST /early HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {BODY}\r\n\r\n");
    client.write_all(head.as_bytes()).await.unwrap();
    for _ in 0..BODY >> 16 {
        client.write_all(&[0; 1 << 16]).await.unwrap();
    }
    let answer = rest(&mut client).await;
    assert!(answer.starts_with("HTTP/1.1 507") && answer.ends_with("full"), "{answer}");
}

#[tokio::test]
async fn a_client_that_waits_to_be_told_is_told() {
    let door = Door::plain(patient()).await;
    let mut client = door.connect().await;
    let head = "HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nContent-Length: 3\r\n\r\n";
    client.write_all(format!("PUT / {head}").as_bytes()).await.unwrap();
    until(&mut client, "HTTP/1.1 100 Continue\r\n\r\n").await;
    client.write_all(b"abc").await.unwrap();
    until(&mut client, "b\"abc\"").await;
    // Refused without a word about going on; nothing was sent, so nothing has to be read.
    client.write_all(format!("PUT /early {head}").as_bytes()).await.unwrap();
    assert_eq!(statuses(&rest(&mut client).await), [507]);
}

#[tokio::test]
async fn a_stop_lets_what_is_under_way_end() {
    let door = Door::plain(Limits { drain: PATIENCE, ..patient() }).await;
    let mut idle = door.connect().await;
    idle.write_all(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n").await.unwrap();
    until(&mut idle, "host=a").await;
    let mut fresh = door.connect().await;
    let url = format!("ws://{}/ws", door.address);
    let (mut socket, _) = tokio_tungstenite::client_async(url, door.connect().await).await.unwrap();
    let mut both = door.connect().await;
    both.write_all(b"POST /both-ways HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n")
        .await
        .unwrap();
    until(&mut both, "a").await;

    door.stop.cancel();
    assert_eq!((rest(&mut idle).await, rest(&mut fresh).await), Default::default());
    while TcpStream::connect(door.address).await.is_ok() {
        tokio::task::yield_now().await;
    }
    let hello = tokio_tungstenite::tungstenite::Message::text("still here");
    socket.send(hello.clone()).await.unwrap();
    assert_eq!(socket.next().await.unwrap().unwrap(), hello);
    both.write_all(b"3\r\nend\r\n0\r\n\r\n").await.unwrap();
    assert!(rest(&mut both).await.contains("end"));
    assert!(!door.task.is_finished());
    socket.close(None).await.unwrap();
    while socket.try_next().await.is_ok_and(|message| message.is_some()) {}
    drop(socket);
    tokio::time::timeout(PATIENCE, door.task).await.expect("everything has ended").unwrap();
}

#[tokio::test]
async fn a_stop_cuts_what_does_not_end() {
    let door = Door::plain(Limits { drain: Duration::from_millis(200), ..patient() }).await;
    let mut events = door.connect().await;
    events.write_all(b"GET /silent HTTP/1.1\r\nHost: a\r\n\r\n").await.unwrap();
    until(&mut events, "data: 1").await;
    let url = format!("ws://{}/ws", door.address);
    let (mut socket, _) = tokio_tungstenite::client_async(url, door.connect().await).await.unwrap();
    door.stop.cancel();
    tokio::time::timeout(PATIENCE, door.task).await.expect("cut").unwrap();
    rest(&mut events).await;
    assert!(socket.next().await.is_none_or(|message| message.is_err()));
}

#[tokio::test]
async fn upgraded_connections_hold_their_places() {
    let door = Door::plain(Limits { connections: 1, ..patient() }).await;
    let url = format!("ws://{}/ws", door.address);
    let (socket, _) = tokio_tungstenite::client_async(url, door.connect().await).await.unwrap();
    let mut waiting = door.connect().await;
    waiting.write_all(GOOD.as_bytes()).await.unwrap();
    let mut piece = [0];
    assert!(tokio::time::timeout(Duration::from_millis(300), waiting.read(&mut piece)).await.is_err());
    drop(socket);
    assert_eq!(statuses(&rest(&mut waiting).await), [200]);
}

#[tokio::test]
async fn redirects_go_to_the_same_place() {
    let socket = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = socket.local_addr().unwrap();
    let stop = CancellationToken::new();
    let serving = Serving {
        answers: Arc::new(listener::redirects(8443)),
        refuse: malformed::answer,
        transport: Transport::Plain,
        limits: patient(),
    };
    let task = listener::spawn(socket, serving, stop.clone()).unwrap();
    for (host, status, location) in [
        ("api.example:8080", 308, Some("https://api.example:8443/v1/x?y=%2F")),
        ("api.example/evil", 400, None),
        ("", 400, None),
    ] {
        let mut stream = TcpStream::connect(address).await.unwrap();
        let request = format!("POST /v1/x?y=%2F HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).await.unwrap();
        let answer = rest(&mut stream).await;
        assert_eq!(statuses(&answer), [status], "{host}");
        let found = answer.lines().find_map(|line| line.strip_prefix(&format!("{}: ", header::LOCATION)));
        assert_eq!(found, location, "{host}");
    }
    stop.cancel();
    task.await.unwrap();
}
