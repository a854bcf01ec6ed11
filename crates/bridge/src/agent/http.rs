//! HTTP/1 over a Unix socket or TCP. Connections of finished calls are kept for the next ones.

use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use futures_util::StreamExt;
use http::header::{ACCEPT, AUTHORIZATION, CONTENT_TYPE, HOST, HeaderValue};
use http_body_util::{BodyExt, BodyStream, Full};
use hyper::body::Incoming;
use hyper::client::conn::http1::{self, SendRequest};
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpStream, UnixStream};
use tokio::time::timeout;

use crate::wire::limits::{MAX_LOGS_BODY_BYTES, MAX_MESSAGE_BYTES};
use crate::wire::paths::{GENERATION_HEADER, LAST_EVENT_ID, LEASE_HEADER, SANDBOX_HEADER, STREAM};
use crate::wire::{SandboxId, Secret};

use super::transport::{Answer, Chunks, Request, Transport, TransportError};

/// From connecting to the last byte of the answer; of a stream, to its head.
const CALL_TIMEOUT: Duration = Duration::from_secs(30);
/// Idle connections that are kept: one for each kind of call that is frequent.
const KEPT: usize = 4;
/// The largest answer is a page of acknowledged logs.
const MOST_ANSWER: usize = MAX_LOGS_BODY_BYTES;
const _: () = assert!(MOST_ANSWER >= MAX_MESSAGE_BYTES);

/// Where the server listens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Address {
    Unix(PathBuf),
    /// A literal address: names are resolved by whoever configures the agent, which cannot do it itself.
    Tcp(SocketAddr),
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("a server address is unix:/absolute/path or http://ADDRESS:PORT with a literal address, not {0:?}")]
pub struct InvalidAddress(String);

impl FromStr for Address {
    type Err = InvalidAddress;

    fn from_str(text: &str) -> Result<Self, InvalidAddress> {
        let invalid = || InvalidAddress(text.to_owned());
        if let Some(path) = text.strip_prefix("unix:") {
            return if path.starts_with('/') { Ok(Address::Unix(path.into())) } else { Err(invalid()) };
        }
        let rest = text.strip_prefix("http://").ok_or_else(invalid)?;
        rest.strip_suffix('/').unwrap_or(rest).parse().map(Address::Tcp).map_err(|_| invalid())
    }
}

/// Calls over HTTP/1.
#[derive(Clone)]
pub struct HttpTransport {
    shared: Arc<Shared>,
}

struct Shared {
    address: Address,
    host: HeaderValue,
    sandbox: HeaderValue,
    generation: HeaderValue,
    authorization: HeaderValue,
    idle: Mutex<Vec<SendRequest<Full<Bytes>>>>,
}

impl HttpTransport {
    /// Speaks for one generation of a sandbox. Fails if the token cannot stand in a header.
    pub fn new(
        address: Address,
        sandbox: &SandboxId,
        generation: u64,
        token: &Secret<String>,
    ) -> Result<Self, TransportError> {
        let header = |text: &str| HeaderValue::from_str(text).map_err(http::Error::from);
        let mut authorization = header(&format!("Bearer {}", token.reveal()))?;
        authorization.set_sensitive(true);
        let host = match &address {
            Address::Unix(_) => HeaderValue::from_static("sandglass"),
            Address::Tcp(socket) => header(&socket.to_string())?,
        };
        let shared = Shared {
            address,
            host,
            sandbox: header(sandbox.as_str())?,
            generation: HeaderValue::from(generation),
            authorization,
            idle: Mutex::default(),
        };
        Ok(Self { shared: Arc::new(shared) })
    }

    async fn send(
        &self,
        request: Request,
    ) -> Result<(http::Response<Incoming>, SendRequest<Full<Bytes>>), TransportError> {
        // The server may close a kept connection in the moment it is used again. Every call may be repeated, so that is no failure.
        while let Some(mut sender) = self.shared.take() {
            if sender.ready().await.is_ok()
                && let Ok(response) = sender.send_request(self.shared.written(request.clone())?).await
            {
                return Ok((response, sender));
            }
        }
        let mut sender = self.connect().await?;
        let response =
            sender.send_request(self.shared.written(request)?).await.map_err(TransportError::Broken)?;
        Ok((response, sender))
    }

    async fn connect(&self) -> Result<SendRequest<Full<Bytes>>, TransportError> {
        match &self.shared.address {
            Address::Unix(path) => {
                handshake(UnixStream::connect(path).await.map_err(TransportError::Connect)?).await
            }
            Address::Tcp(address) => {
                let stream = TcpStream::connect(address).await.map_err(TransportError::Connect)?;
                // Small requests that somebody waits for; a socket that cannot do it still works.
                let _ = stream.set_nodelay(true);
                handshake(stream).await
            }
        }
    }
}

impl Shared {
    fn take(&self) -> Option<SendRequest<Full<Bytes>>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner).pop()
    }

    fn give_back(&self, sender: SendRequest<Full<Bytes>>) {
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        if idle.len() < KEPT {
            idle.push(sender);
        }
    }

    fn written(&self, request: Request) -> Result<http::Request<Full<Bytes>>, http::Error> {
        let is_stream = request.path == STREAM;
        let mut builder = http::Request::builder()
            .method(request.method)
            .uri(request.path)
            .header(HOST, &self.host)
            .header(AUTHORIZATION, &self.authorization)
            .header(SANDBOX_HEADER, &self.sandbox)
            .header(GENERATION_HEADER, &self.generation);
        if let Some(lease) = &request.lease {
            builder = builder.header(LEASE_HEADER, lease.as_str());
        }
        if let Some(position) = &request.last_event_id {
            builder = builder.header(LAST_EVENT_ID, position);
        }
        if is_stream {
            builder = builder.header(ACCEPT, "text/event-stream");
        }
        if !request.body.is_empty() {
            builder = builder.header(CONTENT_TYPE, "application/json");
        }
        builder.body(Full::new(request.body))
    }
}

async fn handshake<S>(stream: S) -> Result<SendRequest<Full<Bytes>>, TransportError>
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let (sender, connection) =
        http1::handshake(TokioIo::new(stream)).await.map_err(TransportError::Broken)?;
    // Ends with the connection; its error is also that of the call.
    tokio::spawn(connection);
    Ok(sender)
}

async fn whole(response: http::Response<Incoming>) -> Result<Answer, TransportError> {
    let status = response.status().as_u16();
    let mut body = BytesMut::new();
    let mut incoming = response.into_body();
    while let Some(frame) = incoming.frame().await {
        if let Ok(data) = frame.map_err(TransportError::Broken)?.into_data() {
            if body.len() + data.len() > MOST_ANSWER {
                return Err(TransportError::TooLarge);
            }
            body.extend_from_slice(&data);
        }
    }
    Ok(Answer { status, body: body.freeze() })
}

impl Transport for HttpTransport {
    async fn call(&self, request: Request) -> Result<Answer, TransportError> {
        let exchange = async {
            let (response, sender) = self.send(request).await?;
            let answer = whole(response).await?;
            self.shared.give_back(sender);
            Ok(answer)
        };
        timeout(CALL_TIMEOUT, exchange).await.map_err(|_| TransportError::Timeout)?
    }

    async fn open(&self, request: Request) -> Result<Result<Chunks, Answer>, TransportError> {
        let head = async {
            let (response, sender) = self.send(request).await?;
            if response.status() != http::StatusCode::OK {
                return Ok::<_, TransportError>(Err(whole(response).await?));
            }
            Ok(Ok((response, sender)))
        };
        let opened: Result<_, Answer> =
            timeout(CALL_TIMEOUT, head).await.map_err(|_| TransportError::Timeout)??;
        Ok(opened.map(|(response, sender)| -> Chunks {
            let chunks = BodyStream::new(response.into_body()).filter_map(move |frame| {
                // Without its sender the connection would end.
                let _ = &sender;
                let chunk = match frame {
                    Ok(frame) => frame.into_data().ok().map(Ok),
                    Err(error) => Some(Err(io::Error::other(error))),
                };
                std::future::ready(chunk)
            });
            Box::pin(chunks)
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_sockets_or_literal() {
        assert_eq!("unix:/run/a.sock".parse(), Ok(Address::Unix("/run/a.sock".into())));
        assert_eq!("http://10.0.0.1:8080/".parse(), Ok(Address::Tcp("10.0.0.1:8080".parse().unwrap())));
        assert_eq!("http://[::1]:80".parse(), Ok(Address::Tcp("[::1]:80".parse().unwrap())));
        for bad in ["", "unix:a.sock", "http://server:80", "https://10.0.0.1:443", "10.0.0.1:80"] {
            assert!(bad.parse::<Address>().is_err(), "{bad}");
        }
    }
}
