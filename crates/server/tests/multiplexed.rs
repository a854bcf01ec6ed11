//! HTTP/2 connections to the listener, with and without TLS.

use std::{sync::Arc, time::Duration};

use axum::body::Bytes;
use futures_util::{SinkExt, StreamExt};
use http::{HeaderMap, Method, Request, StatusCode};
use http_body_util::{BodyExt, Empty, Full, StreamBody};
use hyper::{body::Frame, client::conn::http2, ext::Protocol};
use hyper_util::rt::{TokioExecutor, TokioIo};
use rcgen::{CertifiedKey, generate_simple_self_signed};
use rustls::{ClientConfig, RootCertStore, pki_types::ServerName};
use sandglass_server::listener::{Certificates, Limits, Looked, Transport};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::TcpStream,
    task::JoinHandle,
};
use tokio_rustls::{TlsConnector, client::TlsStream};
use tokio_tungstenite::{WebSocketStream, tungstenite::Message, tungstenite::protocol::Role};

use super::listener::Door;

type Sent = http_body_util::combinators::UnsyncBoxBody<Bytes, std::convert::Infallible>;

/// Guards against hanging; nothing is measured by it.
const PATIENCE: Duration = Duration::from_secs(60);

fn limits() -> Limits {
    Limits { connections: 100, drain: PATIENCE, ..Limits::default() }
}

fn empty() -> Sent {
    Empty::new().boxed_unsync()
}

struct Client {
    sender: http2::SendRequest<Sent>,
    connection: JoinHandle<hyper::Result<()>>,
}

impl Client {
    async fn over(stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static) -> Self {
        let (sender, connection) =
            http2::Builder::new(TokioExecutor::new()).handshake(TokioIo::new(stream)).await.unwrap();
        Self { sender, connection: tokio::spawn(connection) }
    }

    async fn of(door: &Door) -> Self {
        Self::over(TcpStream::connect(door.address).await.unwrap()).await
    }

    async fn ask(
        &mut self,
        request: http::request::Builder,
        body: Sent,
    ) -> hyper::Result<(StatusCode, HeaderMap, String)> {
        let answer = self.sender.send_request(request.body(body).unwrap()).await?;
        let (parts, body) = answer.into_parts();
        let text = String::from_utf8(body.collect().await?.to_bytes().to_vec()).unwrap();
        Ok((parts.status, parts.headers, text))
    }

    async fn get(&mut self, uri: &str) -> hyper::Result<(StatusCode, HeaderMap, String)> {
        self.ask(Request::get(uri), empty()).await
    }
}

#[tokio::test]
async fn requests_become_ones_like_any_other() {
    let door = Door::open(limits(), Transport::Plain).await;
    let mut client = Client::of(&door).await;
    let request = Request::post("http://api.example:8080/x%2F?y=1")
        .header("cookie", "a=1")
        .header("cookie", "b=2")
        .header("te", "trailers");
    let (status, _, text) =
        client.ask(request, Full::new(Bytes::from_static(b"abc")).boxed_unsync()).await.unwrap();
    assert_eq!(status, 200);
    for expected in
        ["POST /x%2F?y=1 Some(Http) ", "host=api.example:8080", "cookie=a=1; b=2", "te=trailers", "b\"abc\""]
    {
        assert!(text.contains(expected), "{expected} in {text}");
    }
    assert_eq!(text.matches("cookie=").count(), 1);
    // Many at once on one connection.
    let mut all = tokio::task::JoinSet::new();
    for n in 0..100 {
        let mut sender = client.sender.clone();
        all.spawn(async move {
            let request = Request::get(format!("http://a/{n}")).body(empty()).unwrap();
            let answer = sender.send_request(request).await.unwrap().into_body().collect().await.unwrap();
            assert!(String::from_utf8_lossy(&answer.to_bytes()).contains(&format!("GET /{n} ")));
        });
    }
    while let Some(done) = all.join_next().await {
        done.unwrap();
    }
    // A host that is another than the authority, a field too many, a length that is none: that request and no other.
    let long = format!("http://a/{}", "x".repeat(33 << 10));
    let many = (0..200).fold(Request::get("http://a/"), |request, n| request.header(format!("x-{n}"), "y"));
    for (request, refused) in [
        (Request::get("http://a/").header("host", "b"), 400),
        (Request::get("http://a/").header("host", "A"), 200),
        (Request::get("http://user@a/"), 400),
        (Request::get(http::Uri::try_from("http://a/\u{e9}").unwrap()), 400),
        (Request::get(long), 414),
        (Request::connect("a:80"), 405),
        (many, 431),
    ] {
        let (status, headers, _) = client.ask(request, empty()).await.unwrap();
        assert_eq!(status, refused);
        assert!(!headers.contains_key("connection"));
    }
    assert_eq!(client.get("http://a/still").await.unwrap().0, 200);
}

#[tokio::test]
async fn a_websocket_opens_on_a_stream_of_its_own() {
    let door = Door::open(limits(), Transport::Plain).await;
    let mut client = Client::of(&door).await;
    // The server has to have said that it can before a client may ask.
    client.get("http://a/").await.unwrap();
    let mut sockets = Vec::new();
    for _ in 0..3 {
        let request = Request::builder()
            .method(Method::CONNECT)
            .uri("http://a/ws")
            .header("sec-websocket-version", "13")
            .extension(Protocol::from_static("websocket"));
        let answer = client.sender.send_request(request.body(empty()).unwrap()).await.unwrap();
        assert_eq!(answer.status(), 200);
        assert!(!answer.headers().contains_key("sec-websocket-accept"));
        let upgraded = hyper::upgrade::on(answer).await.unwrap();
        sockets.push(WebSocketStream::from_raw_socket(TokioIo::new(upgraded), Role::Client, None).await);
    }
    for (n, socket) in sockets.iter_mut().enumerate() {
        socket.send(Message::text(format!("hello {n}"))).await.unwrap();
        assert_eq!(socket.next().await.unwrap().unwrap(), Message::text(format!("hello {n}")));
    }
    // What is no WebSocket is not taken for one.
    for (path, protocol, status) in [
        ("http://a/echo", "websocket", 502),
        ("http://a/ws", "other", 501),
        ("http://a/early", "websocket", 507),
    ] {
        let request = Request::connect(path).extension(Protocol::from(protocol));
        assert_eq!(client.ask(request, empty()).await.unwrap().0, status, "{path} {protocol}");
    }
}

#[tokio::test]
async fn a_stop_tells_clients_to_go_and_lets_streams_end() {
    let door = Door::open(limits(), Transport::Plain).await;
    let mut client = Client::of(&door).await;
    let (pieces, body) = tokio::sync::mpsc::channel::<Bytes>(1);
    let body = tokio_stream::wrappers::ReceiverStream::new(body);
    let body = StreamBody::new(body.map(|piece| Ok(Frame::data(piece)))).boxed_unsync();
    let request = Request::post("http://a/both-ways").body(body).unwrap();
    let answer = client.sender.send_request(request);
    let (answer, sent) = tokio::join!(answer, pieces.send(Bytes::from_static(b"one ")));
    sent.unwrap();
    let mut answer = answer.unwrap().into_body();
    assert_eq!(answer.frame().await.unwrap().unwrap().into_data().unwrap(), "one ");

    door.stop.cancel();
    // GOAWAY: no further requests on this connection.
    while client.sender.ready().await.is_ok() {
        if client.get("http://a/").await.is_err() {
            break;
        }
    }
    pieces.send(Bytes::from_static(b"two")).await.unwrap();
    drop(pieces);
    assert_eq!(answer.collect().await.unwrap().to_bytes(), "two");
    tokio::time::timeout(PATIENCE, door.task).await.expect("everything has ended").unwrap();
    tokio::time::timeout(PATIENCE, client.connection).await.unwrap().unwrap().unwrap();
}

#[tokio::test]
async fn an_unused_connection_is_told_to_go_away() {
    let door =
        Door::open(Limits { keep_alive: Duration::from_millis(10), ..limits() }, Transport::Plain).await;
    let client = Client::of(&door).await;
    tokio::time::timeout(PATIENCE, client.connection).await.expect("closed").unwrap().unwrap();
}

#[tokio::test]
async fn a_silent_body_is_given_up_without_the_connection() {
    let door =
        Door::open(Limits { body_silence: Duration::from_millis(200), ..limits() }, Transport::Plain).await;
    let mut client = Client::of(&door).await;
    let body = StreamBody::new(futures_util::stream::pending()).boxed_unsync();
    assert_eq!(client.ask(Request::post("http://a/"), body).await.unwrap().0, 408);
    assert_eq!(client.get("http://a/").await.unwrap().0, 200);
}

struct Pair {
    dir: tempfile::TempDir,
}

impl Pair {
    fn new() -> Self {
        let pair = Self { dir: tempfile::tempdir().unwrap() };
        pair.renew("one.example");
        pair
    }

    /// Another certificate in the same files; returned in DER form.
    fn renew(&self, name: &str) -> Vec<u8> {
        let CertifiedKey { cert, signing_key } = generate_simple_self_signed([name.to_owned()]).unwrap();
        std::fs::write(self.cert(), cert.pem()).unwrap();
        std::fs::write(self.key(), signing_key.serialize_pem()).unwrap();
        cert.der().to_vec()
    }

    fn cert(&self) -> std::path::PathBuf {
        self.dir.path().join("cert.pem")
    }

    fn key(&self) -> std::path::PathBuf {
        self.dir.path().join("key.pem")
    }

    async fn connect(
        &self,
        door: &Door,
        name: &'static str,
        alpn: &[&str],
    ) -> std::io::Result<TlsStream<TcpStream>> {
        let mut roots = RootCertStore::empty();
        let pem = std::fs::read(self.cert()).unwrap();
        use rustls::pki_types::{CertificateDer, pem::PemObject};
        roots.add(CertificateDer::from_pem_slice(&pem).unwrap()).unwrap();
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let mut config = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(roots)
            .with_no_client_auth();
        config.alpn_protocols = alpn.iter().map(|name| name.as_bytes().to_vec()).collect();
        let stream = TcpStream::connect(door.address).await?;
        TlsConnector::from(Arc::new(config)).connect(ServerName::try_from(name).unwrap(), stream).await
    }
}

#[tokio::test]
async fn tls_speaks_what_was_agreed_and_certificates_are_replaced_under_it() {
    let pair = Pair::new();
    let certificates = Certificates::open(&pair.cert(), &pair.key()).unwrap();
    let door = Door::open(limits(), Transport::Tls(certificates.clone())).await;
    let stream = pair.connect(&door, "one.example", &["h2", "http/1.1"]).await.unwrap();
    assert_eq!(stream.get_ref().1.alpn_protocol(), Some(&b"h2"[..]));
    let mut old = Client::over(stream).await;
    assert!(old.get("https://one.example/").await.unwrap().2.contains("GET / Some(Https)"));

    assert_eq!(certificates.look(), Looked::Unchanged);
    let good = (std::fs::read(pair.cert()).unwrap(), std::fs::read(pair.key()).unwrap());
    // Half of a replacement, and things that are no certificates at all.
    pair.renew("two.example");
    let new = (std::fs::read(pair.cert()).unwrap(), std::fs::read(pair.key()).unwrap());
    for (cert, key) in [(&new.0, &good.1), (&new.0, &b"nonsense".to_vec()), (&b"nonsense".to_vec(), &good.1)]
    {
        std::fs::write(pair.cert(), cert).unwrap();
        std::fs::write(pair.key(), key).unwrap();
        assert_eq!(certificates.look(), Looked::Unusable);
        assert_eq!(certificates.look(), Looked::Unchanged, "said once");
    }
    std::fs::remove_file(pair.key()).unwrap();
    assert_eq!(certificates.look(), Looked::Unusable);
    std::fs::write(pair.cert(), &good.0).unwrap();
    pair.connect(&door, "one.example", &[]).await.expect("the old one still serves");

    std::fs::write(pair.cert(), &new.0).unwrap();
    std::fs::write(pair.key(), &new.1).unwrap();
    assert_eq!(certificates.look(), Looked::Replaced);
    let mut fresh = Client::over(pair.connect(&door, "two.example", &["h2"]).await.unwrap()).await;
    assert_eq!(fresh.get("https://two.example/").await.unwrap().0, 200);
    assert_eq!(old.get("https://one.example/").await.unwrap().0, 200, "open connections stay");

    // Plain HTTP on the same port is no conversation.
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let mut plain = TcpStream::connect(door.address).await.unwrap();
    plain.write_all(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n").await.unwrap();
    let mut answer = Vec::new();
    let _ = tokio::time::timeout(PATIENCE, plain.read_to_end(&mut answer)).await.expect("closed");
    assert!(!answer.starts_with(b"HTTP"));
}

#[test]
fn what_cannot_serve_is_said_at_once_and_without_the_key() {
    let pair = Pair::new();
    let nowhere = pair.dir.path().join("nowhere");
    std::fs::write(pair.dir.path().join("empty"), "").unwrap();
    let empty = pair.dir.path().join("empty");
    let other = Pair::new();
    for (cert, key, word) in [
        (nowhere.clone(), pair.key(), "cannot read"),
        (pair.cert(), nowhere, "cannot read"),
        (empty.clone(), pair.key(), "no certificate"),
        (pair.cert(), empty, "no private key"),
        (pair.cert(), other.key(), "does not belong"),
        (pair.key(), pair.key(), "no certificate"),
    ] {
        let message = Certificates::open(&cert, &key).unwrap_err().to_string();
        assert!(message.contains(word), "{message}");
        assert!(!message.contains("PRIVATE KEY"));
    }
    use std::os::unix::fs::PermissionsExt;
    for (mode, exposed) in [(0o600, false), (0o640, false), (0o660, true), (0o644, true)] {
        std::fs::set_permissions(pair.key(), std::fs::Permissions::from_mode(mode)).unwrap();
        assert_eq!(Certificates::exposed(&pair.key()), exposed, "{mode:o}");
    }
}
