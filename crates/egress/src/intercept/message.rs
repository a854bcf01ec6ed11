//! Heads and bodies on their way through.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::{Bytes, BytesMut};
use http::header::{
    CONNECTION, CONTENT_LENGTH, CONTENT_TYPE, EXPECT, HeaderMap, HeaderName, HeaderValue, PROXY_AUTHENTICATE,
    PROXY_AUTHORIZATION, TE, TRAILER, TRANSFER_ENCODING, UPGRADE,
};
use http::{Response, StatusCode, Version};
use http_body::{Frame, SizeHint};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use tokio::sync::OwnedSemaphorePermit;

use crate::vault::Active;

use super::room::Share;

pub(super) type BoxError = Box<dyn std::error::Error + Send + Sync>;
pub(super) type Body = UnsyncBoxBody<Bytes, BoxError>;

const WEBSOCKET: &str = "websocket";

/// Bytes of a held body that are sent at a time.
const PIECE: usize = 16 << 10;

/// Headers that describe one connection and never travel further.
const HOP_BY_HOP: [HeaderName; 10] = [
    CONNECTION,
    // Means something beside `Upgrade: h2c` only, to a server that would take it without being asked by `Connection`.
    HeaderName::from_static("http2-settings"),
    HeaderName::from_static("keep-alive"),
    HeaderName::from_static("proxy-connection"),
    PROXY_AUTHENTICATE,
    PROXY_AUTHORIZATION,
    TE,
    TRAILER,
    TRANSFER_ENCODING,
    UPGRADE,
];

/// The answer to what is not passed on; the connection ends with it where it can.
pub(super) fn refusal(version: Version, status: StatusCode, text: &str) -> Response<Body> {
    let body = Full::new(Bytes::from(format!("{text}\n"))).map_err(|never| match never {}).boxed_unsync();
    let mut response = Response::new(body);
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("text/plain; charset=utf-8"));
    if version < Version::HTTP_2 {
        response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
    }
    response
}

/// What a connection may change to: the one protocol whose first message is still a request like any other. What else is offered, or
/// offered beside it, is no upgrade: on HTTP/2 in the clear no rule for headers would hold.
pub(super) fn upgrade(headers: &HeaderMap) -> Option<HeaderValue> {
    let mut protocols = headers.get_all(UPGRADE).iter();
    let (Some(protocol), None) = (protocols.next(), protocols.next()) else { return None };
    let wanted = named_by_connection(headers).any(|name| name == UPGRADE);
    (wanted && protocol.as_bytes().trim_ascii().eq_ignore_ascii_case(WEBSOCKET.as_bytes()))
        .then(|| HeaderValue::from_static(WEBSOCKET))
}

/// Takes off what is for one connection; an upgrade stays if one is given.
pub(super) fn strip(headers: &mut HeaderMap, upgrade: Option<HeaderValue>) {
    let named: Vec<HeaderName> = named_by_connection(headers).collect();
    for name in named.iter().chain(&HOP_BY_HOP) {
        headers.remove(name);
    }
    if let Some(protocol) = upgrade {
        headers.insert(CONNECTION, HeaderValue::from_static("upgrade"));
        headers.insert(UPGRADE, protocol);
    }
}

/// The same for a request: this side has already told the client to continue.
pub(super) fn strip_request(headers: &mut HeaderMap, upgrade: Option<HeaderValue>) {
    strip(headers, upgrade);
    headers.remove(EXPECT);
}

/// The same for an answer, where a length beside a transfer coding was never the body's.
pub(super) fn strip_response(headers: &mut HeaderMap, upgrade: Option<HeaderValue>) {
    if headers.contains_key(TRANSFER_ENCODING) {
        headers.remove(CONTENT_LENGTH);
    }
    strip(headers, upgrade);
}

/// Whether the client says that it reads trailers, which HTTP/2 servers want to hear again.
pub(super) fn takes_trailers(headers: &HeaderMap) -> bool {
    let mut values = headers.get_all(TE).iter().flat_map(|value| value.as_bytes().split(|b| *b == b','));
    values.any(|coding| coding.trim_ascii().eq_ignore_ascii_case(b"trailers"))
}

fn named_by_connection(headers: &HeaderMap) -> impl Iterator<Item = HeaderName> + '_ {
    let values = headers.get_all(CONNECTION).iter().flat_map(|value| value.as_bytes().split(|b| *b == b','));
    values.filter_map(|name| HeaderName::from_bytes(name.trim_ascii()).ok())
}

/// A request's body of which the beginning, or all of it, was held. As long as it is not sent it counts as such.
pub(super) struct Held {
    pub(super) ahead: Bytes,
    rest: Option<Incoming>,
    trailers: Option<HeaderMap>,
    _permit: OwnedSemaphorePermit,
}

impl Held {
    /// Reads until the end or until there are more than `limit` bytes.
    pub(super) async fn read(
        mut body: Incoming,
        limit: usize,
        permit: OwnedSemaphorePermit,
    ) -> Result<Self, hyper::Error> {
        let (mut ahead, mut trailers) = (BytesMut::new(), None);
        while let Some(frame) = body.frame().await.transpose()? {
            match frame.into_data() {
                Ok(data) => ahead.extend_from_slice(&data),
                Err(frame) => trailers = frame.into_trailers().ok(),
            }
            if ahead.len() > limit {
                return Ok(Self { ahead: ahead.freeze(), rest: Some(body), trailers: None, _permit: permit });
            }
        }
        Ok(Self { ahead: ahead.freeze(), rest: None, trailers, _permit: permit })
    }

    /// Whether there is nothing beyond what is held.
    pub(super) const fn whole(&self) -> bool {
        self.rest.is_none()
    }
}

impl http_body::Body for Held {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        if !self.ahead.is_empty() {
            // In pieces, so that those who send it hold a few of them, and the rest counts until it is sent.
            let length = self.ahead.len().min(PIECE);
            return Poll::Ready(Some(Ok(Frame::data(self.ahead.split_to(length)))));
        }
        if let Some(rest) = &mut self.rest {
            return Pin::new(rest).poll_frame(cx).map_err(Into::into);
        }
        Poll::Ready(self.trailers.take().map(|trailers| Ok(Frame::trailers(trailers))))
    }

    fn is_end_stream(&self) -> bool {
        self.ahead.is_empty()
            && self.trailers.is_none()
            && self.rest.as_ref().is_none_or(http_body::Body::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        let ahead = u64::try_from(self.ahead.len()).unwrap_or(u64::MAX);
        match &self.rest {
            None => SizeHint::with_exact(ahead),
            Some(rest) => match rest.size_hint().exact() {
                Some(left) => SizeHint::with_exact(ahead.saturating_add(left)),
                None => SizeHint::default(),
            },
        }
    }
}

/// An answer's body on its way to the client: untouched but for its trailers.
pub(super) struct Passed {
    inner: Incoming,
    /// There is no body whatever the head says, and no header may be derived from that.
    bodiless: bool,
    active: Option<Arc<Active>>,
    /// Of the whole exchange, which ends with this.
    _share: Share,
}

impl Passed {
    pub(super) const fn new(
        inner: Incoming,
        bodiless: bool,
        active: Option<Arc<Active>>,
        share: Share,
    ) -> Self {
        Self { inner, bodiless, active, _share: share }
    }
}

impl http_body::Body for Passed {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let Some(frame) = ready!(Pin::new(&mut self.inner).poll_frame(cx)) else { return Poll::Ready(None) };
        Poll::Ready(Some(match frame {
            Ok(mut frame) => {
                if let (Some(trailers), Some(active)) = (frame.trailers_mut(), &self.active) {
                    active.redactor.headers(trailers);
                }
                Ok(frame)
            }
            Err(error) => Err(error.into()),
        }))
    }

    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        if self.bodiless { SizeHint::default() } else { self.inner.size_hint() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_for_one_connection_travels_further() {
        let mut headers = HeaderMap::new();
        for (name, value) in [
            ("connection", "close, X-Secret"),
            ("x-secret", "1"),
            ("te", "trailers"),
            ("transfer-encoding", "chunked"),
            ("upgrade", "websocket"),
            ("proxy-authorization", "Basic x"),
            ("expect", "100-continue"),
            ("authorization", "Bearer x"),
        ] {
            headers.append(HeaderName::from_static(name), HeaderValue::from_static(value));
        }
        assert_eq!(upgrade(&headers), None);
        strip_request(&mut headers, None);
        assert_eq!(headers.keys().map(HeaderName::as_str).collect::<Vec<_>>(), ["authorization"]);
    }

    #[test]
    fn an_upgrade_is_kept_when_it_is_one() {
        let mut headers = HeaderMap::new();
        headers.insert(CONNECTION, HeaderValue::from_static("keep-alive, Upgrade"));
        headers.insert(UPGRADE, HeaderValue::from_static("websocket"));
        let protocol = upgrade(&headers);
        strip_request(&mut headers, protocol);
        assert_eq!(headers[UPGRADE], "websocket");
        assert_eq!(headers[CONNECTION], "upgrade");
        assert_eq!(upgrade(&headers).unwrap(), "websocket");
    }

    #[test]
    fn other_protocols_and_lists_of_them_are_no_upgrade() {
        let cases: &[(&[&str], &str)] = &[
            (&["h2c"], "Upgrade"),
            (&["H2C"], "upgrade"),
            (&["x, h2c"], "Upgrade, HTTP2-Settings"),
            (&["websocket, h2c"], "Upgrade, HTTP2-Settings"),
            (&["h2c", "websocket"], "Upgrade"),
            (&["websocket", "h2c"], "Upgrade"),
            (&["TLS/1.0"], "Upgrade"),
            (&["websocket/13"], "Upgrade"),
            (&["websocket"], "keep-alive"),
            (&[], "Upgrade"),
        ];
        for (protocols, connection) in cases {
            let mut headers = HeaderMap::new();
            headers.insert(CONNECTION, HeaderValue::from_static(connection));
            headers.insert("http2-settings", HeaderValue::from_static("AAMAAABkAAQAAP__"));
            headers.insert("x-kept", HeaderValue::from_static("1"));
            for protocol in *protocols {
                headers.append(UPGRADE, HeaderValue::from_static(protocol));
            }
            let protocol = upgrade(&headers);
            assert_eq!(protocol, None, "{protocols:?}");
            strip_request(&mut headers, protocol);
            assert_eq!(
                headers.keys().map(HeaderName::as_str).collect::<Vec<_>>(),
                ["x-kept"],
                "{protocols:?}"
            );
        }
    }
}
