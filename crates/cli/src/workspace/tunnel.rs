//! A byte stream to the port of a service, through the server: the other end of `GET …/services/{name}/tunnel`.
//!
//! A WebSocket whose binary messages are the bytes; an empty one says that its sender has no more of them.

use anyhow::{Context as _, Result, bail, ensure};
use bytes::Bytes;
use futures_util::{SinkExt as _, StreamExt as _};
use reqwest::{Method, StatusCode, Upgraded};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio_tungstenite::{
    WebSocketStream,
    tungstenite::{
        Error, Message,
        handshake::{client::generate_key, derive_accept_key},
        protocol::{CloseFrame, Role, WebSocketConfig, frame::coding::CloseCode},
    },
};

use crate::client::{Client, transport};

/// Bytes of one message to the server.
const PIECE: usize = 64 << 10;
/// Bytes of one message from it that are taken.
const LONGEST: usize = 1 << 20;

/// An open tunnel.
#[derive(Debug)]
pub struct Tunnel(WebSocketStream<Upgraded>);

impl Tunnel {
    /// Opens it.
    ///
    /// # Errors
    /// When the server refuses, for example because the service is not running.
    pub async fn open(client: &Client, id: &str, service: &str) -> Result<Self> {
        let key = generate_key();
        let request = client
            .request(Method::GET, &["sandboxes", id, "services", service, "tunnel"])?
            .header("connection", "Upgrade")
            .header("upgrade", "websocket")
            .header("sec-websocket-version", "13")
            .header("sec-websocket-key", &key);
        // Also in its success this answer is none of the kind that `send` takes.
        let base = client.profile().base();
        let response = request.send().await.map_err(|error| transport(base, &error))?;
        if response.status() != StatusCode::SWITCHING_PROTOCOLS {
            let answer =
                crate::client::accepted(response).await.map_err(crate::client::ClientError::Refused)?;
            bail!("the server answered {} instead of opening a tunnel", answer.status());
        }
        let accepted = response.headers().get("sec-websocket-accept");
        let expected = derive_accept_key(key.as_bytes());
        ensure!(
            accepted.is_some_and(|value| value.as_bytes() == expected.as_bytes()),
            "something between here and the server answered the handshake"
        );
        let upgraded = response.upgrade().await.map_err(|error| transport(base, &error))?;
        let config = WebSocketConfig::default().max_message_size(Some(LONGEST)).max_frame_size(Some(LONGEST));
        Ok(Self(WebSocketStream::from_raw_socket(upgraded, Role::Client, Some(config)).await))
    }

    /// Copies both ways until the other side has ended the stream.
    ///
    /// # Errors
    /// When the connection broke, or the local reader is gone.
    pub async fn carry(
        self,
        mut input: impl AsyncRead + Unpin,
        mut output: impl AsyncWrite + Unpin,
    ) -> Result<()> {
        let (mut sink, mut messages) = self.0.split();
        let up = async {
            let mut buffer = vec![0; PIECE];
            loop {
                let read = input.read(&mut buffer).await.context("cannot read standard input")?;
                let piece = Bytes::copy_from_slice(&buffer[..read]);
                match sink.send(Message::Binary(piece)).await {
                    Ok(()) if read > 0 => {}
                    // What became of the connection is told by the other direction.
                    Ok(()) | Err(_) => return Ok::<_, anyhow::Error>(()),
                }
            }
        };
        let down = async {
            while let Some(message) = messages.next().await {
                match message {
                    // Its end of the stream; what we still send goes on.
                    Ok(Message::Binary(bytes)) if bytes.is_empty() => {}
                    Ok(Message::Binary(bytes)) => {
                        output.write_all(&bytes).await.context("cannot write to standard output")?;
                        output.flush().await.context("cannot write to standard output")?;
                    }
                    Ok(Message::Close(frame)) => return ended(frame),
                    Ok(_) => {}
                    Err(Error::ConnectionClosed | Error::AlreadyClosed) => return Ok(()),
                    Err(error) => bail!("the tunnel broke: {error}"),
                }
            }
            bail!("the tunnel ended before the stream did")
        };
        tokio::pin!(up, down);
        tokio::select! {
            sent = &mut up => sent?,
            received = &mut down => return received,
        }
        down.await
    }
}

fn ended(frame: Option<CloseFrame>) -> Result<()> {
    match frame {
        Some(frame) if frame.code != CloseCode::Normal => bail!("the tunnel was closed: {}", frame.reason),
        _ => Ok(()),
    }
}
