//! Heads: the request's as it is written to the backend, the answer's as it is passed to the client.
//!
//! Invariants: headers keep their order, and their values keep their bytes; a length beside a transfer coding is never
//! believed; nothing a client names in `Connection` can remove a header that the caller set.

use std::fmt::Write;
use std::net::SocketAddr;

use bytes::{Buf, Bytes, BytesMut};
use http::header::{CONNECTION, CONTENT_LENGTH, EXPECT, HOST, TE, TRANSFER_ENCODING, UPGRADE};
use http::{Extensions, HeaderMap, HeaderName, HeaderValue, Method, StatusCode};
use hyper::ext::ReasonPhrase;

use crate::error::InvalidHead;
use crate::headers::{self, HeaderEdits, Named};

/// An answer's head is at most this long.
const HEAD_MOST: usize = 256 << 10;
/// Enough for nearly every head, without an allocation.
const FIELDS: usize = 64;
/// More fields than this are refused.
const FIELDS_MOST: usize = 1024;
/// Bytes of empty lines before an answer: what some programs leave behind their last one.
const EMPTY_MOST: usize = 16;

/// How the body of a message ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Framing {
    /// There is none.
    Empty,
    Length(u64),
    Chunked,
    /// With the connection.
    Close,
}

/// What a request's head is made from.
#[derive(Debug)]
pub(crate) struct Asked<'a> {
    pub(crate) method: &'a Method,
    /// Origin form.
    pub(crate) target: &'a str,
    pub(crate) headers: &'a HeaderMap,
    pub(crate) edits: &'a HeaderEdits,
    pub(crate) host: SocketAddr,
    pub(crate) framing: Framing,
    pub(crate) upgrade: Option<&'a HeaderValue>,
    pub(crate) expects_continue: bool,
    /// The client takes trailers, and so does this hop.
    pub(crate) takes_trailers: bool,
}

impl Asked<'_> {
    pub(crate) fn encode(&self) -> Bytes {
        let mut out = BytesMut::with_capacity(512);
        for part in [self.method.as_str(), " ", self.target, " HTTP/1.1\r\nhost: "] {
            out.extend_from_slice(part.as_bytes());
        }
        match self.edits.host() {
            Some(host) => out.extend_from_slice(host.as_bytes()),
            None => write!(out, "{}", self.host).expect("memory takes every text"),
        }
        out.extend_from_slice(b"\r\n");
        self.passed(&mut out);
        for (name, value) in self.edits.set.iter().filter(|(name, _)| *name != HOST) {
            field(&mut out, name, value.as_bytes());
        }
        match (self.upgrade, self.takes_trailers) {
            (Some(_), true) => field(&mut out, &CONNECTION, b"upgrade, te"),
            (Some(_), false) => field(&mut out, &CONNECTION, b"upgrade"),
            (None, true) => field(&mut out, &CONNECTION, b"te"),
            (None, false) => {}
        }
        if let Some(protocol) = self.upgrade {
            field(&mut out, &UPGRADE, protocol.as_bytes());
        }
        if self.takes_trailers {
            field(&mut out, &TE, b"trailers");
        }
        if self.expects_continue {
            field(&mut out, &EXPECT, b"100-continue");
        }
        match self.framing {
            Framing::Empty | Framing::Close => {}
            Framing::Length(length) => {
                write!(out, "content-length: {length}\r\n").expect("memory takes every text");
            }
            Framing::Chunked => field(&mut out, &TRANSFER_ENCODING, b"chunked"),
        }
        out.extend_from_slice(b"\r\n");
        out.freeze()
    }

    /// What the client sent and the caller keeps.
    fn passed(&self, out: &mut BytesMut) {
        let named = Named::by(headers::connection_of(self.headers));
        for (name, value) in self.headers {
            let gone = *name == HOST
                || *name == EXPECT
                || headers::belongs_to_hop(name)
                || named.contains(name)
                || !self.edits.keeps(name);
            if !gone {
                field(out, name, value.as_bytes());
            }
        }
    }
}

fn field(out: &mut BytesMut, name: &HeaderName, value: &[u8]) {
    out.extend_from_slice(name.as_str().as_bytes());
    out.extend_from_slice(b": ");
    out.extend_from_slice(value);
    out.extend_from_slice(b"\r\n");
}

/// An answer's head, as it is passed on.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: StatusCode,
    pub(crate) headers: HeaderMap,
    /// A reason of the backend's own words.
    pub(crate) extensions: Extensions,
    pub(crate) framing: Framing,
    /// Whether the connection may be used again after the body.
    pub(crate) keeps: bool,
    /// The protocol that a 101 changes to.
    pub(crate) upgrade: Option<HeaderValue>,
}

/// Reads the answer's head as it arrives.
#[derive(Debug, Default)]
pub(crate) struct Reader {
    /// How much of the unread bytes has been searched for the head's end.
    searched: usize,
    /// Bytes of empty lines before the head.
    empty: usize,
}

impl Reader {
    /// Takes a whole head off `unread`; `None` when more has to be read first.
    pub(crate) fn take(
        &mut self,
        unread: &mut BytesMut,
        to_head: bool,
        hide: &[HeaderName],
    ) -> Result<Option<Answer>, InvalidHead> {
        self.skip_empty(unread)?;
        let whole = ends(unread, self.searched.saturating_sub(3));
        if !whole && !begins_like_http(unread) {
            return Err(InvalidHead::Syntax(httparse::Error::Version));
        }
        if !whole {
            return self.more(unread);
        }
        let mut few = [httparse::EMPTY_HEADER; FIELDS];
        let parsed = match parse(unread, &mut few, to_head, hide) {
            Err(InvalidHead::Syntax(httparse::Error::TooManyHeaders)) => {
                parse(unread, &mut vec![httparse::EMPTY_HEADER; FIELDS_MOST], to_head, hide)
            }
            parsed => parsed,
        };
        let Some((answer, length)) = parsed? else {
            return self.more(unread);
        };
        unread.advance(length);
        *self = Self::default();
        Ok(Some(answer))
    }

    fn more(&mut self, unread: &BytesMut) -> Result<Option<Answer>, InvalidHead> {
        self.searched = unread.len();
        if unread.len() > HEAD_MOST { Err(InvalidHead::TooLarge) } else { Ok(None) }
    }

    /// Before anything is searched: lines without end would be searched again with each of them.
    fn skip_empty(&mut self, unread: &mut BytesMut) -> Result<(), InvalidHead> {
        if self.searched > 0 {
            return Ok(());
        }
        let empty = unread.iter().take_while(|byte| matches!(byte, b'\r' | b'\n')).count();
        unread.advance(empty);
        self.empty += empty;
        if self.empty > EMPTY_MOST { Err(InvalidHead::TooLarge) } else { Ok(()) }
    }
}

/// So that something else than HTTP is told at once, not after a time-out.
fn begins_like_http(bytes: &[u8]) -> bool {
    bytes.iter().zip(b"HTTP/1.").all(|(got, wanted)| got == wanted)
}

/// Whether an empty line begins at or after `from`.
fn ends(bytes: &[u8], from: usize) -> bool {
    let rest = &bytes[from.min(bytes.len())..];
    rest.iter().enumerate().any(|(at, byte)| {
        *byte == b'\n' && (rest[at + 1..].starts_with(b"\n") || rest[at + 1..].starts_with(b"\r\n"))
    })
}

fn parse<'b>(
    bytes: &'b [u8],
    fields: &mut [httparse::Header<'b>],
    to_head: bool,
    hide: &[HeaderName],
) -> Result<Option<(Answer, usize)>, InvalidHead> {
    let mut response = httparse::Response::new(fields);
    let length = match response.parse(bytes).map_err(InvalidHead::Syntax)? {
        httparse::Status::Complete(length) => length,
        httparse::Status::Partial => return Ok(None),
    };
    let status = response.code.and_then(|code| StatusCode::from_u16(code).ok());
    let status = status.ok_or(InvalidHead::Syntax(httparse::Error::Status))?;
    let modern = response.version == Some(1);
    let seen = Seen::of(response.headers, modern)?;
    let framing = seen.framing(status, to_head);
    let mut headers = HeaderMap::with_capacity(response.headers.len());
    for given in response.headers.iter() {
        let name = HeaderName::from_bytes(given.name.as_bytes())
            .map_err(|_| InvalidHead::Syntax(httparse::Error::HeaderName))?;
        let passed = if name == CONTENT_LENGTH {
            // All of them agree. Where there can be no body, a client may wait for one that is announced.
            !seen.coded && !lengthless(status) && !headers.contains_key(CONTENT_LENGTH)
        } else {
            !headers::belongs_to_hop(&name) && !seen.named.contains(&name) && !hide.contains(&name)
        };
        if passed {
            headers.append(name, value(given)?);
        }
    }
    let mut extensions = Extensions::new();
    if let Some(reason) = response.reason.filter(|reason| status.canonical_reason() != Some(reason))
        && let Ok(reason) = ReasonPhrase::try_from(reason.as_bytes())
    {
        extensions.insert(reason);
    }
    let keeps = seen.keeps && framing != Framing::Close;
    let upgrade = seen.upgrade;
    Ok(Some((Answer { status, headers, extensions, framing, keeps, upgrade }, length)))
}

/// Whether an answer has no length that could be told.
fn lengthless(status: StatusCode) -> bool {
    status.is_informational() || status == StatusCode::NO_CONTENT
}

fn value(given: &httparse::Header<'_>) -> Result<HeaderValue, InvalidHead> {
    HeaderValue::from_bytes(given.value).map_err(|_| InvalidHead::Syntax(httparse::Error::HeaderValue))
}

/// What the fields of one hop say.
#[derive(Debug)]
struct Seen {
    length: Option<u64>,
    coded: bool,
    keeps: bool,
    named: Named,
    upgrade: Option<HeaderValue>,
}

impl Seen {
    fn of(fields: &[httparse::Header<'_>], modern: bool) -> Result<Self, InvalidHead> {
        let is = |field: &httparse::Header<'_>, name: &str| field.name.eq_ignore_ascii_case(name);
        let connection = || fields.iter().filter(|field| is(field, "connection")).map(|field| field.value);
        let says = |token: &[u8]| headers::members(connection()).any(|name| name.eq_ignore_ascii_case(token));
        let mut seen = Self {
            length: None,
            coded: false,
            keeps: if modern { !says(b"close") } else { says(b"keep-alive") },
            named: Named::by(connection()),
            upgrade: None,
        };
        for field in fields {
            if is(field, "content-length") {
                let length = parse_length(field.value).ok_or(InvalidHead::Length)?;
                if seen.length.replace(length).is_some_and(|before| before != length) {
                    return Err(InvalidHead::Length);
                }
            } else if is(field, "transfer-encoding") {
                // None but this one is ever asked for; two of them would be two layers.
                if seen.coded || !field.value.trim_ascii().eq_ignore_ascii_case(b"chunked") {
                    return Err(InvalidHead::Coding);
                }
                seen.coded = true;
            } else if is(field, "upgrade") {
                seen.upgrade = Some(value(field)?);
            }
        }
        // A message that says it both ways, or in the wrong version, may have been meant for somebody else.
        seen.keeps &= !(seen.coded && (seen.length.is_some() || !modern));
        Ok(seen)
    }

    fn framing(&self, status: StatusCode, to_head: bool) -> Framing {
        let bodiless = to_head
            || status.is_informational()
            || matches!(status, StatusCode::NO_CONTENT | StatusCode::NOT_MODIFIED);
        match self.length {
            _ if bodiless => Framing::Empty,
            _ if self.coded => Framing::Chunked,
            Some(0) => Framing::Empty,
            Some(length) => Framing::Length(length),
            None => Framing::Close,
        }
    }
}

/// Digits and nothing else.
pub(crate) fn parse_length(text: &[u8]) -> Option<u64> {
    let digits = !text.is_empty() && text.iter().all(u8::is_ascii_digit);
    std::str::from_utf8(text).ok().filter(|_| digits)?.parse().ok()
}
