//! One request on one connection: what is sent, and the answer's head. Driven by whoever waits for it; there is no task in between,
//! because waking one costs more than everything that is done here.
//!
//! Invariant: sending and reading go on at the same time. An answer that comes before the request is out is an answer.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http::header::{CONTENT_LENGTH, EXPECT, HeaderMap, HeaderName, HeaderValue};
use http::{Method, Request, Version};
use http_body::Body;
use http_body_util::BodyExt;
use http_body_util::combinators::UnsyncBoxBody;
use tokio::time::Instant;

use crate::BoxError;
use crate::error::{ForwardError, InvalidHead};
use crate::head::{Answer, Asked, Framing, Reader, parse_length};
use crate::headers::{self, HeaderEdits};
use crate::pool::Connection;
use crate::pulse::Beat;

/// This much of a request is collected before it is written, as long as the client has it ready.
const BATCH: usize = 64 << 10;
/// How long a backend may take to say `100 Continue` before it gets the body anyway: not every one knows how to say it.
const CONTINUE: Duration = Duration::from_secs(1);

/// A request body on its way to the backend.
struct Upload {
    body: UnsyncBoxBody<Bytes, BoxError>,
    framing: Framing,
    /// The backend has not yet said that it wants the body.
    held: bool,
}

/// Who is being waited for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Waiting {
    ForBackend,
    ForClient,
}

/// A request and the connection that it is sent on.
pub(crate) struct Exchange {
    pub(crate) connection: Connection,
    pub(crate) beat: Beat,
    head: Bytes,
    edits: HeaderEdits,
    upload: Option<Upload>,
    /// The answer has no body whatever its head says.
    to_head: bool,
    upgrade: bool,
    /// Nothing is lost when it is sent again.
    repeatable: bool,
    /// It has a body that a simple program does not read, and takes for its next request.
    surprising: bool,
    touched: bool,
    waiting: Waiting,
    moved: Instant,
    reader: Reader,
    /// Writing failed. What the backend said before may still be there to be read.
    lost: Option<io::Error>,
}

impl std::fmt::Debug for Exchange {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Exchange").field("connection", &self.connection).finish_non_exhaustive()
    }
}

/// Why there is no answer.
#[derive(Debug)]
pub(crate) enum Failure {
    /// The backend closed the connection without a word.
    Closed(io::Error),
    Other(ForwardError),
}

impl From<Failure> for ForwardError {
    fn from(failure: Failure) -> Self {
        match failure {
            Failure::Closed(error) => Self::Dropped(error),
            Failure::Other(error) => error,
        }
    }
}

impl Exchange {
    /// The request's URI is the origin form to be sent; its bytes are not changed.
    pub(crate) fn new<B>(
        connection: Connection,
        request: Request<B>,
        edits: HeaderEdits,
        upgrade: Option<&HeaderValue>,
    ) -> Self
    where
        B: Body<Data = Bytes> + Send + 'static,
        B::Error: Into<BoxError>,
    {
        let (parts, body) = request.into_parts();
        let framing = framing(&parts.headers, &body);
        let has_body = !body.is_end_stream();
        let expects_continue =
            has_body && parts.version >= Version::HTTP_11 && expects_continue(&parts.headers);
        let target = parts.uri.path_and_query().map_or("/", |target| target.as_str());
        let asked = Asked {
            method: &parts.method,
            target,
            headers: &parts.headers,
            edits: &edits,
            host: connection.target,
            framing,
            upgrade,
            expects_continue,
            takes_trailers: parts.version >= Version::HTTP_11 && headers::takes_trailers(&parts.headers),
        };
        let head = asked.encode();
        let body = || body.map_err(Into::into).boxed_unsync();
        let upload = has_body.then(|| Upload { body: body(), framing, held: expects_continue });
        let mut exchange = Self {
            connection,
            beat: Beat::default(),
            head,
            edits,
            repeatable: parts.method.is_safe() && upload.is_none(),
            surprising: upload.is_some() && !expects_body(&parts.method),
            upload,
            to_head: parts.method == Method::HEAD,
            upgrade: upgrade.is_some(),
            touched: false,
            waiting: Waiting::ForBackend,
            moved: Instant::now(),
            reader: Reader::default(),
            lost: None,
        };
        exchange.begin();
        exchange
    }

    fn begin(&mut self) {
        self.connection.wire.begin();
        self.connection.wire.queue(self.head.clone());
        self.moved = Instant::now();
    }

    /// The same on another connection.
    pub(crate) fn again(&mut self, connection: Connection) {
        self.connection = connection;
        self.reader = Reader::default();
        self.lost = None;
        self.begin();
    }

    /// Whether the backend cannot have acted on it, or it does not matter.
    pub(crate) fn may_repeat(&self) -> bool {
        self.connection.reused && (self.repeatable || (!self.touched && self.connection.wire.written() == 0))
    }

    /// Whether the answer has no body whatever its head says.
    pub(crate) fn is_to_head(&self) -> bool {
        self.to_head
    }

    /// Whether the backend is sure to know where the request ended.
    pub(crate) fn may_be_followed(&self) -> bool {
        !self.surprising
    }

    /// Headers of the answer that are not passed on.
    pub(crate) fn hidden(&self) -> &'static [HeaderName] {
        self.edits.hide
    }

    /// Whether the backend has the whole request.
    pub(crate) fn is_sent(&self) -> bool {
        self.lost.is_none() && self.upload.is_none() && self.connection.wire.queued() == 0
    }

    /// Whether some of the request is still to be sent, and somebody takes it.
    pub(crate) fn is_sending(&self) -> bool {
        let held = self.upload.as_ref().is_some_and(|upload| upload.held);
        self.lost.is_none() && !held && !self.is_sent()
    }

    /// Sends the request and waits for the answer's head, for at most `limit` in which the backend does nothing.
    pub(crate) async fn answer(&mut self, limit: Duration) -> Result<Answer, Failure> {
        let first = if self.upload.as_ref().is_some_and(|upload| upload.held) { CONTINUE } else { limit };
        let mut late = self.moved + first;
        std::future::poll_fn(move |cx| {
            loop {
                if let Poll::Ready(answered) = self.poll_answer(cx) {
                    return Poll::Ready(answered);
                }
                if self.connection.alarm.poll(cx, late).is_pending() {
                    return Poll::Pending;
                }
                match self.overdue(limit) {
                    Some(next) => late = next,
                    None => return Poll::Ready(Err(Failure::Other(ForwardError::Timeout))),
                }
            }
        })
        .await
    }

    /// When to look again; `None` when it took too long.
    fn overdue(&mut self, limit: Duration) -> Option<Instant> {
        let now = Instant::now();
        if let Some(upload) = &mut self.upload
            && std::mem::take(&mut upload.held)
        {
            return Some(now + limit);
        }
        // A clock reading per piece is cheap; a timer per piece would not be.
        match self.moved + limit {
            deadline if deadline > now => Some(deadline),
            _ if self.waiting == Waiting::ForClient => Some(now + limit),
            _ => None,
        }
    }

    fn poll_answer(&mut self, cx: &mut Context<'_>) -> Poll<Result<Answer, Failure>> {
        if self.connection.cut.poll(cx) {
            return Poll::Ready(Err(Failure::Other(crate::ConnectError::Removed.into())));
        }
        if let Poll::Ready(Err(error)) = self.poll_send(cx) {
            return Poll::Ready(Err(Failure::Other(error)));
        }
        loop {
            match self.reader.take(&mut self.connection.wire.unread, self.to_head, self.edits.hide) {
                Err(error) => return Poll::Ready(Err(Failure::Other(ForwardError::InvalidResponse(error)))),
                Ok(Some(answer)) => match self.heard(answer) {
                    Some(heard) => return Poll::Ready(heard),
                    // It may have been what the body was held for.
                    None => {
                        if let Poll::Ready(Err(error)) = self.poll_send(cx) {
                            return Poll::Ready(Err(Failure::Other(error)));
                        }
                        continue;
                    }
                },
                Ok(None) => {}
            }
            match self.connection.wire.poll_fill(cx) {
                Poll::Pending => return Poll::Pending,
                Poll::Ready(Ok(0)) => {
                    return Poll::Ready(Err(self.closed(io::ErrorKind::UnexpectedEof.into())));
                }
                Poll::Ready(Ok(_)) => self.moved = Instant::now(),
                Poll::Ready(Err(error)) => return Poll::Ready(Err(self.closed(error))),
            }
        }
    }

    /// The final answer; `None` for one that only says that there will be one.
    fn heard(&mut self, answer: Answer) -> Option<Result<Answer, Failure>> {
        match answer.status.as_u16() {
            101 if !self.upgrade => {
                Some(Err(Failure::Other(ForwardError::InvalidResponse(InvalidHead::Upgrade))))
            }
            101 | 200.. => Some(Ok(answer)),
            100 => {
                if let Some(upload) = &mut self.upload {
                    upload.held = false;
                }
                None
            }
            // The client's connection has no way to pass it on.
            _ => None,
        }
    }

    fn closed(&mut self, error: io::Error) -> Failure {
        let error = self.lost.take().unwrap_or(error);
        if self.connection.wire.unread.is_empty() {
            return Failure::Closed(error);
        }
        // Half a head.
        Failure::Other(ForwardError::Dropped(error))
    }

    /// Sends what there is to send. An error is the client's; the backend's are found when its answer is read.
    pub(crate) fn poll_send(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), ForwardError>> {
        loop {
            if self.lost.is_some() {
                return Poll::Ready(Ok(()));
            }
            let client = self.poll_client(cx);
            if let Poll::Ready(Err(error)) = client {
                return Poll::Ready(Err(error));
            }
            if self.connection.wire.queued() == 0 {
                return client;
            }
            self.waiting = Waiting::ForBackend;
            match self.connection.wire.poll_flush(cx) {
                Poll::Pending => return Poll::Pending,
                Poll::Ready(Ok(())) => self.moved = Instant::now(),
                Poll::Ready(Err(error)) => self.lost = Some(error),
            }
            if self.upload.is_none() {
                return Poll::Ready(Ok(()));
            }
        }
    }

    /// Takes from the client what it has ready. Ready when that was all.
    fn poll_client(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), ForwardError>> {
        while let Some(upload) = &mut self.upload {
            if upload.held {
                return Poll::Pending;
            }
            if self.connection.wire.queued() >= BATCH {
                return Poll::Pending;
            }
            self.touched = true;
            match Pin::new(&mut upload.body).poll_frame(cx) {
                Poll::Pending => {
                    self.waiting = Waiting::ForClient;
                    return Poll::Pending;
                }
                Poll::Ready(Some(Ok(frame))) => {
                    self.beat.moved();
                    let wire = &mut self.connection.wire;
                    let ended = match frame.into_data() {
                        Ok(data) => !upload.framing.put(data, |bytes| wire.queue(bytes)),
                        Err(frame) => {
                            let trailers = frame.into_trailers().unwrap_or_default();
                            finish_upload(upload.framing, &trailers, &self.edits, |bytes| wire.queue(bytes))
                        }
                    };
                    if ended {
                        self.upload = None;
                    }
                }
                Poll::Ready(None) => {
                    let framing = upload.framing;
                    self.upload = None;
                    // Less than was announced: nobody may take it for the whole.
                    if matches!(framing, Framing::Length(1..)) {
                        return Poll::Ready(Err(ForwardError::ClientGone));
                    }
                    let wire = &mut self.connection.wire;
                    finish_upload(framing, &HeaderMap::new(), &self.edits, |bytes| wire.queue(bytes));
                }
                Poll::Ready(Some(Err(_))) => return Poll::Ready(Err(ForwardError::ClientGone)),
            }
        }
        self.waiting = Waiting::ForBackend;
        Poll::Ready(Ok(()))
    }

    /// Sends the rest of a request that was answered already; for at most `limit` in which nobody does anything.
    pub(crate) async fn send_rest(&mut self, limit: Duration) -> Result<(), ForwardError> {
        let mut late = Instant::now() + limit;
        std::future::poll_fn(|cx| {
            loop {
                if self.connection.cut.poll(cx) {
                    return Poll::Ready(Err(crate::ConnectError::Removed.into()));
                }
                if let Poll::Ready(sent) = self.poll_send(cx) {
                    return Poll::Ready(sent);
                }
                // It has said everything, so this is its end.
                if self.connection.wire.poll_fill(cx).is_ready() {
                    return Poll::Ready(Err(ForwardError::Dropped(io::ErrorKind::ConnectionAborted.into())));
                }
                if self.connection.alarm.poll(cx, late).is_pending() {
                    return Poll::Pending;
                }
                match self.moved + limit {
                    deadline if deadline > Instant::now() => late = deadline,
                    _ => return Poll::Ready(Err(ForwardError::Timeout)),
                }
            }
        })
        .await
    }
}

impl Framing {
    /// Queues a piece of the body; false when it was the last.
    fn put(&mut self, data: Bytes, mut queue: impl FnMut(Bytes)) -> bool {
        match self {
            Self::Length(left) => {
                let data = match usize::try_from(*left) {
                    Ok(left) if left < data.len() => data.slice(..left),
                    _ => data,
                };
                *left -= data.len() as u64;
                queue(data);
                *left > 0
            }
            // An empty chunk would be the end.
            Self::Chunked if data.is_empty() => true,
            Self::Chunked => {
                queue(Bytes::from(format!("{:x}\r\n", data.len())));
                queue(data);
                queue(Bytes::from_static(b"\r\n"));
                true
            }
            Self::Empty | Self::Close => false,
        }
    }
}

/// Queues the end of a body; always true.
fn finish_upload(
    framing: Framing,
    trailers: &HeaderMap,
    edits: &HeaderEdits,
    mut queue: impl FnMut(Bytes),
) -> bool {
    if framing == Framing::Chunked {
        let mut end = BytesMut::from(&b"0\r\n"[..]);
        // A backend may treat them as headers, so they must not say what a header may not.
        let passed = |name: &HeaderName| headers::may_trail(name) && edits.keeps(name);
        for (name, value) in trailers.iter().filter(|(name, _)| passed(name)) {
            for part in [name.as_str().as_bytes(), b": ", value.as_bytes(), b"\r\n"] {
                end.extend_from_slice(part);
            }
        }
        end.extend_from_slice(b"\r\n");
        queue(end.freeze());
    }
    true
}

/// Methods whose bodies every program reads that knows them.
fn expects_body(method: &Method) -> bool {
    !matches!(*method, Method::GET | Method::HEAD | Method::DELETE | Method::OPTIONS | Method::TRACE)
}

fn expects_continue(headers: &HeaderMap) -> bool {
    headers.get(EXPECT).is_some_and(|value| value.as_bytes().eq_ignore_ascii_case(b"100-continue"))
}

/// How the request's body is delimited: as the client did, or by the length that its source knows.
fn framing<B: Body>(headers: &HeaderMap, body: &B) -> Framing {
    let told = headers.get(CONTENT_LENGTH).and_then(|value| parse_length(value.as_bytes()));
    match told.or_else(|| body.size_hint().exact()) {
        Some(0) if told.is_some() => Framing::Length(0),
        // A length that no body comes up to would make the next request on the connection the body of this one.
        _ if body.is_end_stream() => Framing::Empty,
        Some(length) => Framing::Length(length),
        None => Framing::Chunked,
    }
}
