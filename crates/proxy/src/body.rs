//! The answer's body: pieces pass through as they arrive.
//!
//! Invariant: a body that was cut short is never presented as complete.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use http::header::{HeaderMap, HeaderName};
use http_body::{Body, Frame, SizeHint};

use crate::chunked::{Chunked, Piece};
use crate::drain::Active;
use crate::error::BodyError;
use crate::exchange::Exchange;
use crate::head::Framing;
use crate::headers;
use crate::pool::Pool;

/// A response body on its way to the client. Dropping it early closes the backend's connection.
#[derive(Debug)]
pub struct ResponseBody {
    state: State,
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

#[derive(Debug)]
enum State {
    /// All of it came with the head.
    Whole {
        body: Bytes,
        _active: Active,
    },
    Streaming(Box<Streaming>),
    /// Told with the next poll: whoever sends the body throws away what it has not sent when it hears of an error.
    Failing(BodyError),
    Ended,
}

/// What is needed until the answer is over.
#[derive(Debug)]
pub(crate) struct Source {
    pub(crate) exchange: Exchange,
    pub(crate) pool: Arc<Pool>,
    pub(crate) active: Active,
    /// Whether the connection may be used again afterwards.
    pub(crate) keeps: bool,
    /// For how long the rest of the request may make no progress once the answer is over.
    pub(crate) patience: Duration,
}

#[derive(Debug)]
struct Streaming {
    source: Source,
    decoder: Decoder,
}

#[derive(Debug)]
enum Decoder {
    Length(u64),
    Chunked(Chunked),
    Close,
}

impl Source {
    /// The answer is over: the connection goes back, or the rest of the request goes on without it.
    fn end(self) -> Active {
        let Self { mut exchange, pool, active, keeps, patience } = self;
        if exchange.is_sent() {
            if keeps {
                pool.keep(exchange.connection);
            }
        } else if keeps && exchange.is_sending() {
            // A client that has its answer may still be sending, and the backend may still want to know what.
            let tasks = pool.tasks.clone();
            tasks.spawn(async move {
                if exchange.send_rest(patience).await.is_ok() && exchange.is_sent() {
                    pool.keep(exchange.connection);
                }
            });
        }
        active
    }
}

impl ResponseBody {
    pub(crate) fn new(mut source: Source, framing: Framing, length: Length) -> Self {
        let unread = &mut source.exchange.connection.wire.unread;
        let decoder = match framing {
            Framing::Empty => {
                source.end();
                return Self::none(length);
            }
            Framing::Length(whole) if whole <= unread.len() as u64 => {
                let whole = unread.split_to(usize::try_from(whole).unwrap_or(unread.len())).freeze();
                let state = State::Whole { body: whole, _active: source.end() };
                return Self { state, length };
            }
            Framing::Length(left) => Decoder::Length(left),
            Framing::Chunked => Decoder::Chunked(Chunked::new()),
            Framing::Close => Decoder::Close,
        };
        Self { state: State::Streaming(Box::new(Streaming { source, decoder })), length }
    }

    pub(crate) fn none(length: Length) -> Self {
        Self { state: State::Ended, length }
    }

    fn end(&mut self) {
        if let State::Streaming(streaming) = std::mem::replace(&mut self.state, State::Ended) {
            streaming.source.end();
        }
    }
}

impl Streaming {
    fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Result<Piece, BodyError>> {
        let exchange = &mut self.source.exchange;
        if exchange.connection.cut.poll(cx) {
            return Poll::Ready(Err(BodyError::Cut));
        }
        if exchange.is_sending()
            && let Poll::Ready(Err(_)) = exchange.poll_send(cx)
        {
            return Poll::Ready(Err(BodyError::ClientGone));
        }
        let hide = exchange.hidden();
        let wire = &mut exchange.connection.wire;
        loop {
            match self.decoder.next(&mut wire.unread)? {
                Piece::More => {}
                Piece::Trailers(trailers) => return Poll::Ready(Ok(Piece::Trailers(passed(trailers, hide)))),
                piece => {
                    exchange.beat.moved();
                    return Poll::Ready(Ok(piece));
                }
            }
            match ready!(wire.poll_fill(cx)) {
                Ok(0) if matches!(self.decoder, Decoder::Close) => return Poll::Ready(Ok(Piece::End)),
                Ok(0) => return Poll::Ready(Err(BodyError::Backend(io::ErrorKind::UnexpectedEof.into()))),
                Ok(_) => {}
                Err(error) => return Poll::Ready(Err(BodyError::Backend(error))),
            }
        }
    }
}

/// Trailers may end up among the client's headers, so they must not say what a header may not.
fn passed(trailers: HeaderMap, hide: &[HeaderName]) -> HeaderMap {
    let mut kept = HeaderMap::with_capacity(trailers.len());
    let may = |name: &HeaderName| headers::may_trail(name) && !hide.contains(name);
    for (name, value) in trailers.iter().filter(|(name, _)| may(name)) {
        kept.append(name, value.clone());
    }
    kept
}

impl Decoder {
    fn next(&mut self, unread: &mut bytes::BytesMut) -> Result<Piece, BodyError> {
        let count = match self {
            Self::Chunked(chunked) => return Ok(chunked.next(unread)?),
            Self::Length(0) => return Ok(Piece::End),
            Self::Length(left) => usize::try_from(*left).map_or(unread.len(), |left| left.min(unread.len())),
            Self::Close => unread.len(),
        };
        if count == 0 {
            return Ok(Piece::More);
        }
        if let Self::Length(left) = self {
            *left -= count as u64;
        }
        Ok(Piece::Data(unread.split_to(count).freeze()))
    }
}

impl Body for ResponseBody {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        let next = match &mut self.state {
            State::Ended => return Poll::Ready(None),
            State::Failing(_) => {
                let State::Failing(error) = std::mem::replace(&mut self.state, State::Ended) else {
                    return Poll::Ready(None);
                };
                return Poll::Ready(Some(Err(error)));
            }
            State::Whole { body, .. } => {
                let whole = std::mem::take(body);
                self.state = State::Ended;
                return Poll::Ready(Some(Ok(Frame::data(whole))));
            }
            State::Streaming(streaming) => match ready!(streaming.poll_next(cx)) {
                Ok(Piece::Data(data)) if !matches!(streaming.decoder, Decoder::Length(0)) => {
                    return Poll::Ready(Some(Ok(Frame::data(data))));
                }
                next => next,
            },
        };
        match next {
            Ok(piece) => {
                self.end();
                Poll::Ready(match piece {
                    Piece::Data(data) => Some(Ok(Frame::data(data))),
                    Piece::Trailers(trailers) => Some(Ok(Frame::trailers(trailers))),
                    Piece::End | Piece::More => None,
                })
            }
            Err(error) => {
                self.state = State::Failing(error);
                cx.waker().wake_by_ref();
                Poll::Pending
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        matches!(self.state, State::Ended)
    }

    fn size_hint(&self) -> SizeHint {
        match &self.state {
            State::Whole { body, .. } => SizeHint::with_exact(body.len() as u64),
            State::Streaming(streaming) => match streaming.decoder {
                Decoder::Length(left) => SizeHint::with_exact(left),
                Decoder::Chunked(_) | Decoder::Close => SizeHint::default(),
            },
            State::Ended if self.length == Length::OfBody => SizeHint::with_exact(0),
            State::Failing(_) | State::Ended => SizeHint::default(),
        }
    }
}
