//! Requests that turn their connection into something else: WebSocket and other HTTP/1.1 upgrades.

use http::header::{CONNECTION, HeaderMap, HeaderValue, UPGRADE};
use http::{Request, Response, StatusCode};
use http_body::Body;
use hyper::upgrade::OnUpgrade;
use tokio::net::TcpStream;
use tokio_util::sync::CancellationToken;

use bytes::Bytes;

use crate::BoxError;
use crate::body::{Length, ResponseBody};
use crate::drain::{Active, Kind};
use crate::error::{ConnectError, ForwardError, InvalidHead};
use crate::exchange::Exchange;
use crate::forward::{Lease, answer, respond};
use crate::headers::{HeaderEdits, connection_names, members};
use crate::pulse::Beat;
use crate::tunnel::{self, Reclaim};

/// The protocol that a request asks to change to. HTTP in another version (`h2c`) is not one of them, also not among
/// others: the client is answered in HTTP/1.1, as it has to expect, instead of getting a tunnel on which no rule for headers
/// holds.
#[must_use]
pub fn requested(headers: &HeaderMap) -> Option<&HeaderValue> {
    let protocol = headers.get(UPGRADE)?;
    let protocols = headers.get_all(UPGRADE).iter().map(HeaderValue::as_bytes);
    let wanted = connection_names(headers, "upgrade") && !members(protocols).any(is_http);
    wanted.then_some(protocol)
}

fn is_http(protocol: &[u8]) -> bool {
    let name = protocol.split(|byte| *byte == b'/').next().unwrap_or_default().trim_ascii();
    [&b"h2c"[..], b"h2", b"http"].iter().any(|http| name.eq_ignore_ascii_case(http))
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
    let Lease { connection, forwarder, active, pulse } = lease;
    let protocol = requested(request.headers()).cloned();
    let reclaim = request.extensions().get::<Reclaim>().copied();
    let client = (hyper::upgrade::on(&mut request), reclaim);
    let mut exchange = Exchange::new(connection, request, edits, protocol.as_ref());
    exchange.beat = Beat::of(pulse);
    let head = answer(&forwarder, &mut exchange).await?;
    if head.status != StatusCode::SWITCHING_PROTOCOLS {
        return Ok(respond(head, exchange, &forwarder, active));
    }
    if !exchange.is_sent() {
        // The rest of the request would be taken for the new protocol.
        return Err(ForwardError::InvalidResponse(InvalidHead::Early));
    }

    let relay = forwarder.drain.enter(Kind::Upgrade).ok_or(ConnectError::Draining)?;
    let (cut, beat) = (exchange.connection.cut.token.clone(), exchange.beat);
    let backend = exchange.connection.wire.into_parts();
    forwarder.pool.tasks.spawn(carry(client, backend, beat, cut, relay));
    let mut response = Response::new(ResponseBody::none(Length::Unsaid));
    *response.status_mut() = head.status;
    *response.headers_mut() = head.headers;
    *response.extensions_mut() = head.extensions;
    if let Some(protocol) = head.upgrade {
        response.headers_mut().insert(CONNECTION, HeaderValue::from_static("upgrade"));
        response.headers_mut().insert(UPGRADE, protocol);
    }
    drop(active);
    Ok(response)
}

/// Everything after the 101, of which the backend's connection has the beginning.
async fn carry(
    (client, reclaim): (OnUpgrade, Option<Reclaim>),
    backend: (TcpStream, Bytes),
    beat: Beat,
    cut: CancellationToken,
    relay: Active,
) {
    let both = async {
        let client = client.await.map_err(std::io::Error::other)?;
        tunnel::run(client, reclaim, backend, beat).await
    };
    tokio::select! {
        // Either side may hang up at any time; that is the normal end.
        ended = both => if let Err(error) = ended {
            tracing::debug!(%error, "upgraded connection ended");
        },
        () = cut.cancelled() => {}
    }
    drop(relay);
}
