//! The one response body type: nothing, one buffer, a bounded stream, or another server's body passed through.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http_body::{Frame, SizeHint};
use hyper::body::Incoming;
use tokio::sync::mpsc;

pub type BodyError = Box<dyn std::error::Error + Send + Sync>;
pub type ChunkSender = mpsc::Sender<io::Result<Bytes>>;

pub enum Body {
    Empty,
    Full(Bytes),
    Stream { chunks: mpsc::Receiver<io::Result<Bytes>>, length: Option<u64> },
    Passed(Incoming),
}

impl Body {
    /// A body fed through a channel of `depth` chunks; the feeder waits when the client does not read.
    pub fn channel(depth: usize, length: Option<u64>) -> (ChunkSender, Body) {
        let (tx, chunks) = mpsc::channel(depth);
        (tx, Body::Stream { chunks, length })
    }
}

impl From<String> for Body {
    fn from(text: String) -> Self {
        if text.is_empty() { Body::Empty } else { Body::Full(text.into()) }
    }
}

impl http_body::Body for Body {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        match &mut *self {
            Body::Empty => Poll::Ready(None),
            Body::Full(bytes) => {
                let bytes = std::mem::take(bytes);
                *self = Body::Empty;
                Poll::Ready(Some(Ok(Frame::data(bytes))))
            }
            Body::Stream { chunks, .. } => {
                let chunk = ready!(chunks.poll_recv(cx));
                Poll::Ready(chunk.map(|c| c.map(Frame::data).map_err(Into::into)))
            }
            Body::Passed(incoming) => {
                Pin::new(incoming).poll_frame(cx).map(|f| f.map(|f| f.map_err(Into::into)))
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Body::Empty => true,
            Body::Full(_) => false,
            Body::Stream { length, .. } => *length == Some(0),
            Body::Passed(incoming) => incoming.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Body::Empty => SizeHint::with_exact(0),
            Body::Full(bytes) => SizeHint::with_exact(bytes.len() as u64),
            Body::Stream { length: Some(length), .. } => SizeHint::with_exact(*length),
            Body::Stream { length: None, .. } => SizeHint::default(),
            Body::Passed(incoming) => incoming.size_hint(),
        }
    }
}
