//! What becomes of the rest of an upload that was answered before it was read.
//!
//! A connection that is closed with unread bytes in it is reset, and the reset destroys the answer on its way to the client. So the
//! rest is read and dropped for a bounded time, while the answer travels. The approach is the lingering close of HTTP servers (RFC 9112, 9.6).

use std::{
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use http_body_util::BodyExt;
use hyper::body::Incoming;

/// How long the rest of a body is read for. A client that is still sending after that loses the answer, not the server its time.
const LINGER: Duration = Duration::from_secs(5);

/// A request body that is read to its end even when its handler is not interested in it.
#[derive(Debug)]
pub struct Lingering {
    body: Option<Incoming>,
    /// The client waits to be told before it sends; not reading tells it to keep the body to itself.
    expects_continue: bool,
    touched: bool,
}

impl Lingering {
    /// Wraps the body of the request whose head is given.
    pub fn of(request: http::Request<Incoming>) -> http::Request<Self> {
        let expects_continue = request.headers().contains_key(http::header::EXPECT);
        request.map(|body| Self { body: Some(body), expects_continue, touched: false })
    }
}

impl Body for Lingering {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        self.touched = true;
        match &mut self.body {
            Some(body) => Pin::new(body).poll_frame(cx),
            None => Poll::Ready(None),
        }
    }

    fn is_end_stream(&self) -> bool {
        self.body.as_ref().is_none_or(Body::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        self.body.as_ref().map_or_else(|| SizeHint::with_exact(0), Body::size_hint)
    }
}

impl Drop for Lingering {
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
