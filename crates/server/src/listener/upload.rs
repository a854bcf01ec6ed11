//! The body of a request, from when its head is there until somebody has read it or nobody wants it.
//!
//! A connection that is closed with unread bytes in it is reset, and the reset destroys the answer on its way to the client. So the
//! rest is read and dropped for a bounded time, while the answer travels. The approach is the lingering close of HTTP servers (RFC 9112, 9.6).

use std::{
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    task::{Context, Poll},
    time::Duration,
};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use http_body_util::BodyExt;
use hyper::body::Incoming;
use tokio::time::{Instant, Sleep, sleep};

/// How long the rest of a body is read for. A client that is still sending after that loses the answer, not the server its time.
const LINGER: Duration = Duration::from_secs(5);

/// Why a body cannot be read to its end.
#[derive(Debug, thiserror::Error)]
pub(super) enum UploadError {
    #[error(transparent)]
    Client(#[from] hyper::Error),
    #[error("the request body did not arrive in time")]
    Silent,
}

/// What the body of a request and its answer tell each other.
#[derive(Debug, Default)]
pub(super) struct Progress {
    answered: AtomicBool,
    silent: AtomicBool,
}

impl Progress {
    /// The head of the answer is there; from now on the body may be silent for as long as it likes. Returns whether it was given up before.
    pub(super) fn answered(&self) -> bool {
        self.answered.store(true, Relaxed);
        self.silent.load(Relaxed)
    }
}

/// A request body that is read to its end even when its handler is not interested in it.
#[derive(Debug)]
pub(super) struct Upload {
    body: Option<Incoming>,
    /// The client waits to be told before it sends; not reading tells it to keep the body to itself.
    expects_continue: bool,
    touched: bool,
    progress: Arc<Progress>,
    patience: Duration,
    silence: Option<Pin<Box<Sleep>>>,
    /// Whether the time above is running.
    waiting: bool,
}

impl Upload {
    /// Wraps the body of the request whose head is given.
    pub(super) fn of(
        request: http::Request<Incoming>,
        patience: Duration,
    ) -> (http::Request<Self>, Arc<Progress>) {
        let expects_continue = request.headers().contains_key(http::header::EXPECT);
        let progress = Arc::<Progress>::default();
        let noted = progress.clone();
        let wrap = |body| Self {
            body: Some(body),
            expects_continue,
            touched: false,
            progress: noted,
            patience,
            silence: None,
            waiting: false,
        };
        (request.map(wrap), progress)
    }

    /// Nothing has come; whether that has been so for too long.
    fn poll_silence(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        if self.progress.answered.load(Relaxed) {
            self.silence = None;
            return Poll::Pending;
        }
        let patience = self.patience;
        let silence = self.silence.get_or_insert_with(|| Box::pin(sleep(patience)));
        if !std::mem::replace(&mut self.waiting, true) {
            // The timer is kept from one wait to the next: a new one for every piece would cost more than the piece.
            silence.as_mut().reset(Instant::now() + patience);
        }
        silence.as_mut().poll(cx)
    }
}

impl Body for Upload {
    type Data = Bytes;
    type Error = UploadError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, UploadError>>> {
        self.touched = true;
        let Some(body) = &mut self.body else { return Poll::Ready(None) };
        if let Poll::Ready(frame) = Pin::new(body).poll_frame(cx) {
            self.waiting = false;
            return Poll::Ready(frame.map(|frame| frame.map_err(Into::into)));
        }
        if self.poll_silence(cx).is_pending() {
            return Poll::Pending;
        }
        self.progress.silent.store(true, Relaxed);
        self.body = None;
        Poll::Ready(Some(Err(UploadError::Silent)))
    }

    fn is_end_stream(&self) -> bool {
        self.body.as_ref().is_none_or(Body::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        self.body.as_ref().map_or_else(|| SizeHint::with_exact(0), Body::size_hint)
    }
}

impl Drop for Upload {
    fn drop(&mut self) {
        let Some(mut body) = self.body.take().filter(|body| !body.is_end_stream()) else { return };
        if self.expects_continue && !self.touched {
            return;
        }
        let Ok(runtime) = tokio::runtime::Handle::try_current() else { return };
        // Ends with the connection, at the latest after the time above.
        runtime.spawn(async move {
            let rest = async { while let Some(Ok(_)) = body.frame().await {} };
            let _ = tokio::time::timeout(LINGER, rest).await;
        });
    }
}
