//! Requests of HTTP/2 connections, turned into what the rest of the program knows: a Host field, one Cookie field, and WebSockets that
//! ask for an upgrade (RFC 8441).

use std::{
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use axum::{
    body::Body,
    response::{IntoResponse, Response},
};
use base64::{Engine as _, engine::general_purpose::STANDARD};
use bytes::Bytes;
use http::{
    HeaderMap, HeaderValue, Method, Request, StatusCode, Uri, Version,
    header::{
        CONNECTION, CONTENT_LENGTH, COOKIE, HOST, SEC_WEBSOCKET_ACCEPT, SEC_WEBSOCKET_KEY,
        SEC_WEBSOCKET_VERSION, UPGRADE,
    },
};
use http_body::{Frame, SizeHint};
use hyper::ext::Protocol;
use tokio::sync::watch;

use super::{
    head::{MAX_TARGET, is_host, same_host},
    malformed::Malformed,
    settings::Limits,
};

/// What has to be done to the answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Exchange {
    Plain,
    /// The client waits for 200 where HTTP/1.1 says 101.
    WebSocket,
}

impl Exchange {
    /// Makes the request one like any other, or says what is wrong with it.
    pub(super) fn admit<B>(request: &mut Request<B>, limits: &Limits) -> Result<Self, Malformed> {
        if request.headers().len() > limits.head_fields {
            return Err(Malformed::HeadTooLarge);
        }
        if request.method() == Method::CONNECT && request.extensions().get::<Protocol>().is_none() {
            return Err(Malformed::Connect);
        }
        name_host(request)?;
        one_length(request.headers())?;
        join_cookies(request.headers_mut());
        if request.method() != Method::CONNECT {
            return Ok(Self::Plain);
        }
        let protocol = request.extensions_mut().remove::<Protocol>();
        if protocol.is_none_or(|protocol| protocol.as_str() != "websocket") {
            return Err(Malformed::Protocol);
        }
        ask_for_upgrade(request);
        Ok(Self::WebSocket)
    }

    pub(super) fn answer(self, mut response: Response) -> Response {
        if self == Self::Plain {
            return response;
        }
        if response.status() == StatusCode::SWITCHING_PROTOCOLS {
            *response.status_mut() = StatusCode::OK;
            for name in [CONNECTION, UPGRADE, SEC_WEBSOCKET_ACCEPT] {
                response.headers_mut().remove(name);
            }
        } else if response.status().is_success() {
            // To this client a success is a WebSocket, which there is none.
            return StatusCode::BAD_GATEWAY.into_response();
        }
        response
    }
}

/// The authority becomes the Host, and the target its path.
fn name_host<B>(request: &mut Request<B>) -> Result<(), Malformed> {
    let mut hosts = request.headers().get_all(HOST).iter();
    let (host, second) = (hosts.next().cloned(), hosts.next());
    let authority = request.uri().authority();
    let named = match (authority, &host) {
        (Some(authority), None) => HeaderValue::from_str(authority.as_str()).map_err(|_| Malformed::Host)?,
        (Some(authority), Some(host)) if !same_host(authority.as_str().as_bytes(), host.as_bytes()) => {
            return Err(Malformed::TargetHost);
        }
        (_, Some(host)) => host.clone(),
        (None, None) => return Err(Malformed::Host),
    };
    if second.is_some() || !is_host(named.as_bytes()) {
        return Err(Malformed::Host);
    }
    request.headers_mut().insert(HOST, named);
    let path = request.uri().path_and_query().cloned().ok_or(Malformed::RequestLine)?;
    // What a request line of HTTP/1 may say, because it may become one.
    let target = path.as_str();
    let origin = target.starts_with('/') || (target == "*" && request.method() == Method::OPTIONS);
    if !origin || !target.bytes().all(|b| b.is_ascii_graphic()) {
        return Err(Malformed::RequestLine);
    }
    if target.len() > MAX_TARGET {
        return Err(Malformed::TargetTooLong);
    }
    *request.uri_mut() = Uri::from(path);
    Ok(())
}

/// The library compares the first with the data.
fn one_length(headers: &HeaderMap) -> Result<(), Malformed> {
    let mut lengths = headers.get_all(CONTENT_LENGTH).iter();
    match (lengths.next(), lengths.next()) {
        (Some(length), None) if !length.as_bytes().iter().all(u8::is_ascii_digit) => {
            Err(Malformed::ContentLength)
        }
        (_, Some(_)) => Err(Malformed::ContentLength),
        _ => Ok(()),
    }
}

/// HTTP/2 clients may send every cookie in a field of its own; HTTP/1.1 programs expect one field.
fn join_cookies(headers: &mut HeaderMap) {
    let cookies: Vec<&[u8]> = headers.get_all(COOKIE).iter().map(HeaderValue::as_bytes).collect();
    if cookies.len() > 1
        && let Ok(joined) = HeaderValue::from_bytes(&cookies.join(&b"; "[..]))
    {
        headers.insert(COOKIE, joined);
    }
}

fn ask_for_upgrade<B>(request: &mut Request<B>) {
    *request.method_mut() = Method::GET;
    *request.version_mut() = Version::HTTP_11;
    let headers = request.headers_mut();
    headers.insert(CONNECTION, HeaderValue::from_static("upgrade"));
    headers.insert(UPGRADE, HeaderValue::from_static("websocket"));
    headers.entry(SEC_WEBSOCKET_VERSION).or_insert(HeaderValue::from_static("13"));
    // HTTP/2 clients send none, and HTTP/1.1 programs insist on one.
    let key = STANDARD.encode(uuid::Uuid::new_v4().as_bytes());
    headers.insert(SEC_WEBSOCKET_KEY, HeaderValue::try_from(key).expect("base64 is a header value"));
}

/// How many requests of one connection are being worked on.
#[derive(Clone, Debug, Default)]
pub(super) struct Activity(watch::Sender<usize>);

/// One of them.
#[derive(Debug)]
pub(super) struct Busy(watch::Sender<usize>);

impl Activity {
    pub(super) fn begin(&self) -> Busy {
        self.0.send_modify(|requests| *requests += 1);
        Busy(self.0.clone())
    }

    /// Returns when there has been none for so long.
    pub(super) fn idle(&self, patience: Duration) -> impl Future<Output = ()> + use<> {
        let mut requests = self.0.subscribe();
        async move {
            loop {
                if requests.wait_for(|requests| *requests == 0).await.is_err() {
                    return;
                }
                if tokio::time::timeout(patience, requests.changed()).await.is_err() {
                    return;
                }
            }
        }
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        self.0.send_modify(|requests| *requests -= 1);
    }
}

impl Busy {
    pub(super) fn until_end_of(self, body: Body) -> Counted {
        Counted { body, _busy: self }
    }
}

/// The body of an answer that counts until it has ended.
#[derive(Debug)]
pub(super) struct Counted {
    body: Body,
    _busy: Busy,
}

impl http_body::Body for Counted {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
