//! A WebSocket that is a TCP connection to the port of a service.
//!
//! Binary messages are the bytes; an empty one says that its sender has no more of them. Neither side is read from before the other
//! has taken what came: at most one message and one buffer are held.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::stream::SplitSink;
use futures_util::{SinkExt as _, Stream, StreamExt as _};
use http::{Request, StatusCode};
use hyper::body::Incoming;
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::sync::{Semaphore, watch};
use tokio::time::{Instant, MissedTickBehavior, interval_at, timeout};
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::protocol::frame::coding::CloseCode;
use tokio_tungstenite::tungstenite::protocol::{CloseFrame, Role, WebSocketConfig};
use tokio_tungstenite::tungstenite::{Error, Message, error::CapacityError};

use super::Workspace;
use crate::http::reply::{Code, Failure, Outcome};
use crate::http::router::{Agent, drain};
use crate::http::websocket;

/// Of one message from the client.
const MOST_IN: usize = 1 << 20;
/// Of one message to it.
const MOST_OUT: usize = 64 << 10;
/// At the same time; each holds a message and a buffer at most.
const MOST_TUNNELS: usize = 256;
const CONNECT: Duration = Duration::from_secs(5);
const PING_EVERY: Duration = Duration::from_secs(30);
/// A client that says nothing for so long, not even to pings, is gone.
const SILENCE: Duration = Duration::from_secs(90);
/// For the last words.
const GOODBYE: Duration = Duration::from_secs(2);

static PLACES: Semaphore = Semaphore::const_new(MOST_TUNNELS);

/// Answers the handshake once the port has accepted, or says why it is not answered.
pub(super) async fn accept(
    agent: &Arc<Agent>,
    workspace: &Workspace,
    name: &str,
    mut request: Request<Incoming>,
) -> Outcome {
    let key = websocket::handshake_key(request.headers());
    let found = workspace.services.snapshot(name);
    let port = found.as_ref().and_then(|service| service.port);
    let (key, port) = match (key, found, port) {
        (Some(key), Some(_), Some(port)) => (key, port),
        (key, found, _) => {
            drain(request.into_body()).await;
            return Err(match (key, found) {
                (_, None) => {
                    let message = format!("there is no service \"{name}\"");
                    Failure::new(StatusCode::NOT_FOUND, Code::NotFound, message)
                }
                (None, _) => websocket::not_a_handshake(),
                _ => Failure::invalid(format!("the service \"{name}\" has no port")),
            });
        }
    };
    let place = PLACES.try_acquire().map_err(|_| Failure::unavailable("too many tunnels into this box"))?;
    let port = connect(port).await.map_err(|error| {
        let message = format!("nothing accepts connections on port {port} of \"{name}\": {error}");
        Failure::new(StatusCode::BAD_GATEWAY, Code::ServiceUnavailable, message)
    })?;
    let held = agent.proxied.hold();
    let upgrade = hyper::upgrade::on(&mut request);
    tokio::spawn(async move {
        if let Ok(upgraded) = upgrade.await {
            carry(TokioIo::new(upgraded), port).await;
        }
        drop((place, held));
    });
    websocket::switch(&key)
}

/// Services listen on either loopback, or on every address.
async fn connect(port: u16) -> io::Result<TcpStream> {
    let to = |ip: IpAddr| timeout(CONNECT, TcpStream::connect(SocketAddr::new(ip, port)));
    let stream = match to(Ipv4Addr::LOCALHOST.into()).await? {
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
            match to(Ipv6Addr::LOCALHOST.into()).await? {
                Err(_) => return Err(error),
                stream => stream?,
            }
        }
        stream => stream?,
    };
    // Keystrokes are small and somebody waits for each of them.
    stream.set_nodelay(true)?;
    Ok(stream)
}

/// How it ended.
#[derive(Debug, PartialEq, Eq)]
enum End {
    /// The client is gone, or has said good-bye.
    Left,
    Close(CloseCode, String),
}

impl End {
    fn broken(doing: &str, error: &io::Error) -> Self {
        Self::Close(CloseCode::Error, format!("the port {doing}: {}", crate::http::reply::plain(error)))
    }
}

async fn carry<C, P>(client: C, port: P)
where
    C: AsyncRead + AsyncWrite + Unpin,
    P: AsyncRead + AsyncWrite,
{
    let config = WebSocketConfig::default()
        .read_buffer_size(MOST_OUT)
        .write_buffer_size(0)
        .max_message_size(Some(MOST_IN))
        .max_frame_size(Some(MOST_IN));
    let socket = WebSocketStream::from_raw_socket(client, Role::Server, Some(config)).await;
    let (mut sink, mut stream) = socket.split();
    let (reader, writer) = tokio::io::split(port);
    let (tell, told) = watch::channel(false);
    // Boxed: the two and their buffers are large.
    let inward = Box::pin(inward(&mut stream, writer, tell));
    let outward = Box::pin(outward(&mut sink, reader, told));
    let end = tokio::select! {
        end = inward => end,
        end = outward => end,
    };
    if let End::Close(code, reason) = end {
        let frame = CloseFrame { code, reason: reason.chars().take(100).collect::<String>().into() };
        // Closing on what was not read would lose the last words.
        let _ = timeout(GOODBYE, async {
            if sink.send(Message::Close(Some(frame))).await.is_ok() {
                while let Some(Ok(_)) = stream.next().await {}
            }
        })
        .await;
    }
}

/// From the client to the port. Returns when there is nobody left to read from; `ended` tells that the client has no more to send.
async fn inward<S>(stream: &mut S, mut port: impl AsyncWrite + Unpin, ended: watch::Sender<bool>) -> End
where
    S: Stream<Item = Result<Message, Error>> + Unpin,
{
    loop {
        let message = match timeout(SILENCE, stream.next()).await {
            Ok(Some(Ok(message))) => message,
            Ok(Some(Err(Error::Capacity(CapacityError::MessageTooLong { .. })))) => {
                return End::Close(CloseCode::Size, format!("a message is larger than {MOST_IN} bytes"));
            }
            _ => return End::Left,
        };
        let done = match message {
            Message::Binary(_) if *ended.borrow() => {
                return End::Close(CloseCode::Protocol, "more bytes came after the last".into());
            }
            Message::Binary(bytes) if bytes.is_empty() => {
                let done = port.shutdown().await;
                ended.send_replace(true);
                done
            }
            Message::Binary(bytes) => port.write_all(&bytes).await,
            Message::Close(_) => {
                let _ = port.shutdown().await;
                return End::Left;
            }
            Message::Text(_) => return End::Close(CloseCode::Unsupported, "messages are binary".into()),
            Message::Ping(_) | Message::Pong(_) | Message::Frame(_) => Ok(()),
        };
        if let Err(error) = done {
            return End::broken("takes no more", &error);
        }
    }
}

/// From the port to the client, with pings in between. Returns when both directions have ended.
async fn outward<C>(
    sink: &mut SplitSink<WebSocketStream<C>, Message>,
    mut port: impl AsyncRead + Unpin,
    mut ended: watch::Receiver<bool>,
) -> End
where
    C: AsyncRead + AsyncWrite + Unpin,
{
    let mut pings = interval_at(Instant::now() + PING_EVERY, PING_EVERY);
    pings.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut buffer = vec![0; MOST_OUT];
    let mut open = true;
    loop {
        let message = tokio::select! {
            read = port.read(&mut buffer), if open => match read {
                Ok(count) => {
                    // Nothing is the end, and an empty message says so.
                    open = count > 0;
                    Message::Binary(Bytes::copy_from_slice(&buffer[..count]))
                }
                Err(error) => return End::broken("broke the connection", &error),
            },
            _ = ended.wait_for(|ended| *ended), if !open => {
                return End::Close(CloseCode::Normal, String::new());
            }
            _ = pings.tick() => Message::Ping(Bytes::new()),
        };
        if sink.send(message).await.is_err() {
            return End::Left;
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{DuplexStream, duplex};

    use super::*;

    /// A client and the other end of the port. Both hold little, so that what is not taken is not read either.
    async fn tunnel() -> (WebSocketStream<DuplexStream>, DuplexStream) {
        let (client, server) = duplex(4 << 10);
        let (port, service) = duplex(4 << 10);
        tokio::spawn(carry(server, port));
        (WebSocketStream::from_raw_socket(client, Role::Client, None).await, service)
    }

    fn bytes(text: &str) -> Message {
        Message::binary(Bytes::copy_from_slice(text.as_bytes()))
    }

    async fn closed(client: &mut WebSocketStream<DuplexStream>) -> CloseCode {
        match client.next().await {
            Some(Ok(Message::Close(Some(frame)))) => frame.code,
            other => panic!("{other:?}"),
        }
    }

    #[tokio::test]
    async fn each_direction_ends_by_itself() {
        let (mut client, mut service) = tunnel().await;
        client.send(bytes("ask")).await.unwrap();
        client.send(bytes("")).await.unwrap();
        let mut asked = String::new();
        service.read_to_string(&mut asked).await.unwrap();
        assert_eq!(asked, "ask");
        service.write_all(b"late answer").await.unwrap();
        assert_eq!(client.next().await.unwrap().unwrap(), bytes("late answer"));
        service.shutdown().await.unwrap();
        assert_eq!(client.next().await.unwrap().unwrap(), bytes(""));
        assert_eq!(closed(&mut client).await, CloseCode::Normal);
    }

    #[tokio::test]
    async fn a_port_that_ends_first_still_takes_the_rest() {
        let (mut client, mut service) = tunnel().await;
        service.shutdown().await.unwrap();
        assert_eq!(client.next().await.unwrap().unwrap(), bytes(""));
        client.send(bytes("rest")).await.unwrap();
        client.send(bytes("")).await.unwrap();
        let mut rest = String::new();
        service.read_to_string(&mut rest).await.unwrap();
        assert_eq!(rest, "rest");
        assert_eq!(closed(&mut client).await, CloseCode::Normal);
    }

    #[tokio::test(start_paused = true)]
    async fn nothing_is_read_that_nobody_takes() {
        let (mut client, mut service) = tunnel().await;
        let message = Message::binary(vec![7; 64 << 10]);
        let mut sent = 0;
        // What the pipes and one message hold is taken; the rest waits, and time passes once all do.
        while let Ok(done) = timeout(Duration::from_millis(200), client.send(message.clone())).await {
            done.unwrap();
            sent += 1;
            assert!(sent < 8, "it reads on without an end");
        }
        let mut taken = vec![0; 64 << 10];
        service.read_exact(&mut taken).await.unwrap();
        assert!(taken.iter().all(|byte| *byte == 7));
    }

    #[tokio::test]
    async fn what_is_no_stream_is_said_with_its_code() {
        let (mut client, _service) = tunnel().await;
        client.send(Message::text("hello")).await.unwrap();
        assert_eq!(closed(&mut client).await, CloseCode::Unsupported);
        let (mut client, _service) = tunnel().await;
        client.send(bytes("")).await.unwrap();
        client.send(bytes("more")).await.unwrap();
        assert_eq!(closed(&mut client).await, CloseCode::Protocol);
        let (mut client, service) = tunnel().await;
        drop(service);
        assert_eq!(client.next().await.unwrap().unwrap(), bytes(""));
        client.send(bytes("nobody")).await.unwrap();
        assert_eq!(closed(&mut client).await, CloseCode::Error);
    }

    #[tokio::test]
    async fn a_client_that_leaves_ends_the_stream() {
        let (client, mut service) = tunnel().await;
        drop(client);
        assert_eq!(service.read(&mut [0; 1]).await.unwrap(), 0);
    }
}
