//! Requests that turn their connection into something else: WebSocket and other HTTP/1.1 upgrades.
//!
//! Bytes after the 101 are copied, not understood. The invariant: a relay ends when either side fails, when the target is
//! forgotten or when the forwarder is drained.

use bytes::Bytes;
use http::header::{CONNECTION, HeaderMap, HeaderValue, UPGRADE};
use http::{Method, Request, Response, StatusCode};
use http_body::Body;
use hyper::upgrade::OnUpgrade;
use hyper_util::rt::TokioIo;
use tokio_util::sync::CancellationToken;

use crate::BoxError;
use crate::body::{ResponseBody, Upload};
use crate::drain::{Active, Kind};
use crate::error::{ConnectError, ForwardError};
use crate::forward::{Lease, finish, length_of, prepare, send};
use crate::headers::{HeaderEdits, connection_names};

/// The protocol that a request asks to change to. `h2c` is not one of them: the client is answered in HTTP/1.1, as it has
/// to expect, instead of getting a tunnel on which no rule for headers holds.
#[must_use]
pub fn requested(headers: &HeaderMap) -> Option<&HeaderValue> {
    let protocol = headers.get(UPGRADE)?;
    let wanted = connection_names(headers, "upgrade") && !protocol.as_bytes().eq_ignore_ascii_case(b"h2c");
    wanted.then_some(protocol)
}

pub(crate) async fn forward<B>(
    lease: Lease,
    mut request: Request<B>,
    edits: HeaderEdits,
) -> Result<Response<ResponseBody>, ForwardError>
where
    B: Body<Data = Bytes> + Send + 'static,
    B::Error: Into<BoxError>,
{
    let Lease { connection, forwarder, active } = lease;
    let protocol = requested(request.headers()).cloned();
    let client = hyper::upgrade::on(&mut request);
    let head = request.method() == Method::HEAD;
    let upload = Upload::new();
    let mut request = prepare(request, edits, connection.target, &upload);
    if let Some(protocol) = protocol {
        mark(request.headers_mut(), protocol);
    }

    let cut = connection.cut.clone();
    let (mut response, connection) =
        send(&forwarder, connection, request, &upload).await.map_err(|failure| failure.error)?;
    if response.status() != StatusCode::SWITCHING_PROTOCOLS {
        forwarder.pool.give_back(connection);
        return Ok(finish(response, |status, body| {
            ResponseBody::new(body, cut, active, length_of(head, status))
        }));
    }

    let relay = forwarder.drain.enter(Kind::Upgrade).ok_or(ConnectError::Draining)?;
    let backend = hyper::upgrade::on(&mut response);
    let agreed = response.headers().get(UPGRADE).cloned();
    let buffer = forwarder.limits.relay_buffer;
    forwarder.pool.tasks.spawn(copy(client, backend, buffer, cut.clone(), relay));
    let mut response =
        finish(response, |status, body| ResponseBody::new(body, cut, active, length_of(head, status)));
    if let Some(protocol) = agreed {
        mark(response.headers_mut(), protocol);
    }
    Ok(response)
}

fn mark(headers: &mut HeaderMap, protocol: HeaderValue) {
    headers.insert(CONNECTION, HeaderValue::from_static("upgrade"));
    headers.insert(UPGRADE, protocol);
}

async fn copy(client: OnUpgrade, backend: OnUpgrade, buffer: usize, cut: CancellationToken, relay: Active) {
    let pipe = async {
        let (client, backend) = tokio::try_join!(client, backend)?;
        let (mut client, mut backend) = (TokioIo::new(client), TokioIo::new(backend));
        tokio::io::copy_bidirectional_with_sizes(&mut client, &mut backend, buffer, buffer).await?;
        Ok::<_, BoxError>(())
    };
    tokio::select! {
        // Either side may hang up at any time; that is the normal end.
        ended = pipe => if let Err(error) = ended {
            tracing::debug!(%error, "upgraded connection ended");
        },
        () = cut.cancelled() => {}
    }
    drop(relay);
}
