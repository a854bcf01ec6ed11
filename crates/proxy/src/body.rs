//! The two bodies of an exchange: chunks pass through untouched, what happened to them is noted.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use http_body_util::BodyExt;
use http_body_util::combinators::UnsyncBoxBody;
use hyper::body::Incoming;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::BoxError;
use crate::drain::Active;

const BACKEND_TO_TAKE: u8 = 0;
const CLIENT_TO_SEND: u8 = 1;
const CLIENT_FAILED: u8 = 2;

/// Who is being waited for while a request is sent, and since when.
#[derive(Debug)]
pub(crate) struct Upload {
    began: Instant,
    moved_ms: AtomicU64,
    waiting: AtomicU8,
}

impl Upload {
    pub(crate) fn new() -> Arc<Self> {
        Arc::new(Self {
            began: Instant::now(),
            moved_ms: AtomicU64::new(0),
            waiting: AtomicU8::new(BACKEND_TO_TAKE),
        })
    }

    fn note(&self, waiting: u8) {
        // A clock reading per chunk is cheap; a timer per chunk would not be.
        let now = u64::try_from(self.began.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.moved_ms.store(now, Ordering::Relaxed);
        self.waiting.store(waiting, Ordering::Relaxed);
    }

    pub(crate) fn client_failed(&self) -> bool {
        self.waiting.load(Ordering::Relaxed) == CLIENT_FAILED
    }

    /// Returns when the backend has neither taken nor sent anything for `limit`.
    pub(crate) async fn stalled(&self, limit: Duration) {
        loop {
            let moved = self.began + Duration::from_millis(self.moved_ms.load(Ordering::Relaxed));
            let deadline = moved + limit;
            if Instant::now() >= deadline {
                if self.waiting.load(Ordering::Relaxed) != CLIENT_TO_SEND {
                    return;
                }
                tokio::time::sleep(limit).await;
            } else {
                tokio::time::sleep_until(deadline).await;
            }
        }
    }
}

/// A request body on its way to the backend.
#[derive(Debug)]
pub(crate) struct RequestBody {
    inner: UnsyncBoxBody<Bytes, BoxError>,
    upload: Arc<Upload>,
}

impl RequestBody {
    pub(crate) fn new<B>(body: B, upload: Arc<Upload>) -> Self
    where
        B: Body<Data = Bytes> + Send + 'static,
        B::Error: Into<BoxError>,
    {
        Self { inner: body.map_err(Into::into).boxed_unsync(), upload }
    }

    pub(crate) fn empty(upload: Arc<Upload>) -> Self {
        Self::new(http_body_util::Empty::new(), upload)
    }
}

impl Body for RequestBody {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let polled = Pin::new(&mut self.inner).poll_frame(cx);
        self.upload.note(match &polled {
            Poll::Pending => CLIENT_TO_SEND,
            Poll::Ready(Some(Err(_))) => CLIENT_FAILED,
            Poll::Ready(_) => BACKEND_TO_TAKE,
        });
        polled
    }

    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}

/// Why a response body ended before its end.
#[derive(Debug, thiserror::Error)]
pub enum BodyError {
    #[error("the backend dropped the connection within the body: {0}")]
    Backend(#[source] hyper::Error),
    /// The target was forgotten or the forwarder shut down.
    #[error("the connection to the backend was cut")]
    Cut,
}

/// A response body on its way to the client. Dropping it early closes the backend's connection.
#[derive(Debug)]
pub struct ResponseBody {
    inner: Incoming,
    cut: CancellationToken,
    active: Option<Active>,
    length: Length,
}

/// Whether an empty body says anything about `Content-Length`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Length {
    /// The body's own length is the answer's length.
    OfBody,
    /// HEAD, 1xx, 204, 304: there is no body whatever the header says, and no header may be derived from that.
    Unsaid,
}

impl ResponseBody {
    pub(crate) fn new(inner: Incoming, cut: CancellationToken, active: Active, length: Length) -> Self {
        let active = (!inner.is_end_stream()).then_some(active);
        Self { inner, cut, active, length }
    }
}

impl Body for ResponseBody {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        let next = match ready!(Pin::new(&mut self.inner).poll_frame(cx)) {
            Some(Ok(frame)) => return Poll::Ready(Some(Ok(frame))),
            Some(Err(error)) => Some(Err(BodyError::Backend(error))),
            // A connection that was dropped on this side ends its body as if it were complete.
            None if self.cut.is_cancelled() && self.active.is_some() => Some(Err(BodyError::Cut)),
            None => None,
        };
        self.active = None;
        Poll::Ready(next)
    }

    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        match self.length {
            Length::OfBody => self.inner.size_hint(),
            Length::Unsaid => SizeHint::default(),
        }
    }
}
