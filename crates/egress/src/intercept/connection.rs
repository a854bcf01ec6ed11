//! One redirected connection, from its first byte to its last.

use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use hyper::server::conn::{http1, http2};
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use rustls::ServerConfig;
use rustls::crypto::ring;
use rustls::server::{ClientHello, ResolvesServerCert};
use rustls::sign::CertifiedKey;
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use tokio_rustls::TlsAcceptor;

use crate::audit::Gate;
use crate::diagnostics;
use crate::inspect::first::Protocol as Spoken;
use crate::settings::Level;
use crate::vault::Scheme;

use super::exchange::{Memory, Session, answer, relay};
use super::hello::{self, Hello, Opening};
use super::judge::{Denied, Wanted};
use super::proxy;
use super::retry::{Greeting, greet};
use super::service::{Live, Shared};
use super::tunnel::{self, Replayed, Stream};
use super::upstream::{Failure, Protocol, Upstream};
use super::way;
use super::{CONNECTION, CONNECTION_WINDOW, MAX_HEAD, MAX_HEADERS, SEND_BUFFER, STREAM_WINDOW, WINDOWS};

/// For a request's head, and for how long a connection may be kept without one.
const HEAD: Duration = Duration::from_secs(90);
const HANDSHAKE: Duration = Duration::from_secs(10);
const PING: Duration = Duration::from_secs(60);
const STREAMS: u32 = 100;

/// For room, until others have given some back.
const WAIT: Duration = Duration::from_secs(20);

/// The record that a TLS client gets instead of an answer: a fatal alert.
const fn alert(reason: u8) -> [u8; 7] {
    [21, 3, 3, 0, 2, 2, reason]
}

const ACCESS_DENIED: u8 = 49;
const INTERNAL_ERROR: u8 = 80;

/// What a client without TLS gets when there is no room for its connection.
const BUSY: &[u8] = b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: text/plain; charset=utf-8\r\nContent-Length: 65\r\n\
    Retry-After: 1\r\nConnection: close\r\n\r\nthis sandbox has too many connections at a time; try again later\n";

pub(super) async fn handle(shared: Arc<Shared>, stream: TcpStream, live: Arc<Live>) {
    // Whoever connects to the interceptor itself wants to go nowhere.
    let destination = match (shared.way.destination(&stream), stream.local_addr()) {
        (Ok(destination), Ok(local)) if destination != local => destination,
        _ => return reset(stream),
    };
    if way::settle(&stream).is_err() {
        return;
    }
    live.goes_to(destination);
    let done = open(shared, stream, destination, live).await;
    // Either side may hang up at any time; that is the normal end.
    drop(done);
}

async fn plain(
    shared: Arc<Shared>,
    mut stream: TcpStream,
    ahead: Vec<u8>,
    destination: SocketAddr,
    live: Arc<Live>,
) -> io::Result<()> {
    let Some(share) = shared.room.connections.take(CONNECTION, WAIT).await else {
        diagnostics::tell(Level::Warn, "no room for another connection with HTTP");
        stream.write_all(BUSY).await?;
        return stream.shutdown().await;
    };
    let upstream = Ok(Upstream::plain(Arc::clone(&shared), destination));
    let session = Session {
        shared,
        scheme: Scheme::Http,
        name: None,
        destination,
        upstream,
        live,
        memory: Memory::default(),
        _share: share,
    };
    serve(session, Protocol::Http1, Replayed::new(ahead, stream)).await
}

/// The first bytes tell what it is, on every port.
async fn open(
    shared: Arc<Shared>,
    mut stream: TcpStream,
    destination: SocketAddr,
    live: Arc<Live>,
) -> io::Result<()> {
    let hello = match hello::read(&mut stream).await? {
        Opening::Hello(hello) => hello,
        // Without TLS nothing is lent on the port of TLS.
        Opening::Http(ahead) => return plain(shared, stream, ahead, destination, live).await,
        Opening::Foreign(ahead) => return nameless(&shared, stream, ahead, destination, &live).await,
        Opening::Broken(protocol) => {
            let (by, rule) = match protocol {
                Spoken::Tls => (Gate::Sni, "default (no TLS handshake that can be read)"),
                Spoken::Http | Spoken::Http2 => (Gate::Http, "default (no request that can be read)"),
            };
            tell(&shared, by, None, destination, &Denied::new(rule));
            reset(stream);
            return Ok(());
        }
    };
    let name = hello.name.as_deref();
    let wanted = Wanted { name, address: destination.ip().to_canonical(), port: destination.port() };
    live.wants(name);
    let judged = match hello.literal {
        Some(literal) if literal != wanted.address => {
            Err(Denied::new("default (the host is another address)"))
        }
        _ => shared.judge(&*shared.resolved, wanted),
    };
    if let Err(denied) = judged {
        tell(&shared, Gate::Sni, name, destination, &denied);
        return refuse(stream, ACCESS_DENIED).await;
    }
    let bound = match (name, shared.lent.now()) {
        (Some(name), Ok(Some(active))) => {
            destination.port() == Scheme::Https.port() && active.covers(Scheme::Https, name)
        }
        (Some(_), Err(_)) => true,
        _ => false,
    };
    if !bound {
        live.passes_undecrypted();
        return pass(&shared, stream, hello, destination).await;
    }
    intercept(shared, stream, hello, destination, live).await
}

/// Other protocols name nobody: they pass where no name is needed.
async fn nameless(
    shared: &Shared,
    stream: TcpStream,
    ahead: Vec<u8>,
    destination: SocketAddr,
    live: &Live,
) -> io::Result<()> {
    let wanted = Wanted { name: None, address: destination.ip().to_canonical(), port: destination.port() };
    live.wants(None);
    if let Err(denied) = shared.judge(&*shared.resolved, wanted) {
        tell(shared, Gate::Sni, None, destination, &denied);
        reset(stream);
        return Ok(());
    }
    live.passes_undecrypted();
    let mut upstream = proxy::reach(shared, destination, None).await?;
    upstream.write_all(&ahead).await?;
    drop(ahead);
    tunnel::join(stream, upstream).await;
    Ok(())
}

/// TLS that nothing is lent on.
async fn pass(
    shared: &Shared,
    mut stream: TcpStream,
    hello: Hello,
    destination: SocketAddr,
) -> io::Result<()> {
    let name = hello.name.clone();
    let mut upstream = proxy::reach(shared, destination, name.as_deref()).await?;
    match greet(&mut stream, &mut upstream, hello).await? {
        Greeting::Over => tunnel::join(stream, upstream).await,
        Greeting::Changed => {
            let denied = Denied::new("default (the second hello does not name the host of the first)");
            tell(shared, Gate::Sni, name.as_deref(), destination, &denied);
            reset(stream);
        }
    }
    Ok(())
}

async fn intercept(
    shared: Arc<Shared>,
    stream: TcpStream,
    hello: Hello,
    destination: SocketAddr,
    live: Arc<Live>,
) -> io::Result<()> {
    let Hello { bytes, name, protocols, .. } = hello;
    let name = name.expect("only a name has bindings");
    let offers: Vec<Vec<u8>> =
        protocols.iter().filter(|p| matches!(p.as_slice(), b"h2" | b"http/1.1")).cloned().collect();
    if offers.is_empty() && !protocols.is_empty() {
        let denied = Denied::new("default (no application protocol in which credentials can be lent)");
        tell(&shared, Gate::Sni, Some(&name), destination, &denied);
        return refuse(stream, ACCESS_DENIED).await;
    }
    let most = if offers.iter().any(|offer| offer == b"h2") { CONNECTION + WINDOWS } else { CONNECTION };
    let Some(mut share) = shared.room.connections.take(most, WAIT).await else {
        diagnostics::tell(Level::Warn, "no room for another intercepted connection");
        return refuse(stream, INTERNAL_ERROR).await;
    };
    let opened = match shared.lent.now() {
        Ok(_) => Upstream::verified(Arc::clone(&shared), destination, &name, offers.clone()).await,
        Err(_) => Err(Failure::Vault),
    };
    let (upstream, chosen) = match opened {
        Ok((upstream, chosen)) => (Ok(upstream), chosen.into_iter().collect()),
        // The client learns the reason in an answer instead of guessing it from a broken handshake.
        Err(failure) => (Err(failure), offers),
    };
    let key = shared.authority.certify(&name).map_err(io::Error::other)?;
    let acceptor = TlsAcceptor::from(Arc::new(server(key, chosen).map_err(io::Error::other)?));
    let accepted = tokio::time::timeout(HANDSHAKE, acceptor.accept(Replayed::new(bytes, stream))).await;
    let stream = accepted.map_err(|_| io::ErrorKind::TimedOut)??;
    let protocol =
        if stream.get_ref().1.alpn_protocol() == Some(b"h2") { Protocol::Http2 } else { Protocol::Http1 };
    if protocol == Protocol::Http1 {
        share.shrink(CONNECTION);
    }
    let session = Session {
        shared,
        scheme: Scheme::Https,
        name: Some(name),
        destination,
        upstream,
        live,
        memory: Memory::default(),
        _share: share,
    };
    serve(session, protocol, stream).await
}

async fn serve(session: Session, protocol: Protocol, stream: impl Stream + 'static) -> io::Result<()> {
    let session = Arc::new(session);
    let service = service_fn({
        let session = Arc::clone(&session);
        move |request| answer(Arc::clone(&session), request)
    });
    let io = TokioIo::new(stream);
    match protocol {
        Protocol::Http1 => {
            let mut builder = http1::Builder::new();
            builder
                .timer(TokioTimer::new())
                .header_read_timeout(HEAD)
                .max_buf_size(MAX_HEAD)
                .max_header_size(MAX_HEAD)
                .max_headers(MAX_HEADERS)
                .preserve_header_case(true)
                .auto_date_header(false);
            builder.serve_connection(io, service).with_upgrades().await.map_err(io::Error::other)?;
        }
        Protocol::Http2 => {
            let mut builder = http2::Builder::new(TokioExecutor::new());
            builder
                .timer(TokioTimer::new())
                .max_concurrent_streams(STREAMS)
                .initial_stream_window_size(STREAM_WINDOW)
                .initial_connection_window_size(CONNECTION_WINDOW)
                .max_send_buf_size(SEND_BUFFER)
                .max_header_list_size(u32::try_from(MAX_HEAD).expect("it is small"))
                .keep_alive_interval(PING)
                .auto_date_header(false);
            builder.serve_connection(io, service).await.map_err(io::Error::other)?;
        }
    }
    let pair = session.memory.upgraded.lock().unwrap_or_else(PoisonError::into_inner).take();
    if let Some(pair) = pair {
        relay(pair).await;
    }
    Ok(())
}

#[derive(Debug)]
struct Fixed(Arc<CertifiedKey>);

impl ResolvesServerCert for Fixed {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(Arc::clone(&self.0))
    }
}

fn server(key: Arc<CertifiedKey>, protocols: Vec<Vec<u8>>) -> Result<ServerConfig, rustls::Error> {
    let builder = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()?;
    let mut config = builder.with_no_client_auth().with_cert_resolver(Arc::new(Fixed(key)));
    config.alpn_protocols = protocols;
    Ok(config)
}

fn tell(shared: &Shared, by: Gate, name: Option<&str>, destination: SocketAddr, denied: &Denied) {
    let wanted = Wanted { name, address: destination.ip().to_canonical(), port: destination.port() };
    shared.audit.tell(wanted.event(by, denied));
}

/// Says so in TLS, then resets the connection: the client fails at once and knows why.
async fn refuse(mut stream: TcpStream, reason: u8) -> io::Result<()> {
    stream.write_all(&alert(reason)).await?;
    reset(stream);
    Ok(())
}

fn reset(stream: TcpStream) {
    // Without it the end is an orderly one, which is also an end.
    let _ = rustix::net::sockopt::set_socket_linger(&stream, Some(Duration::ZERO));
}
