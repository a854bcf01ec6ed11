//! `/proxy/{port}/{path}`: plain HTTP to a port of the box itself.
//!
//! Streams both ways and copies upgraded connections; holds no pool, because loopback connects cost nothing.
//! Invariant: the agent's own token never reaches the target.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use http::header::{CONNECTION, HeaderName, HeaderValue, UPGRADE};
use http::{HeaderMap, Request, Response, StatusCode, Uri};
use hyper::body::Incoming;
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;
use tokio::time::timeout;

use crate::activity::Held;
use crate::http::body::Body;
use crate::http::reply::{self, Code, Failure, Reply};
use crate::http::router::TOKEN_HEADER;

const CONNECT_TIMEOUT: Duration = Duration::from_secs(600);
/// Headers that belong to one connection, not to the request.
const HOP_BY_HOP: [&str; 6] =
    ["keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection", "te", "trailer"];

/// For `/proxy/<own port>/x`, the URI `x` itself.
pub fn own_port_target(uri: &Uri, own: u16) -> Option<Uri> {
    let (port, target) = split(uri)?;
    (port.parse::<u16>().ok()? == own).then(|| target.parse().ok())?
}

/// The port text and the origin-form target with its query.
fn split(uri: &Uri) -> Option<(&str, String)> {
    let rest = uri.path().strip_prefix("/proxy/")?;
    let (port, path) = rest.split_once('/').unwrap_or((rest, ""));
    let query = uri.query().map(|q| format!("?{q}")).unwrap_or_default();
    Some((port, format!("/{path}{query}")))
}

/// `held` is let go when the connection to the port ends.
pub async fn forward(mut request: Request<Incoming>, peer: SocketAddr, held: Held) -> Reply {
    let Some((port, target)) = split(request.uri()).filter(|(port, _)| !port.is_empty()) else {
        return reply::text(StatusCode::BAD_REQUEST, "port is required");
    };
    let numeric = port.bytes().all(|b| b.is_ascii_digit());
    let Some(port) = port.parse::<u16>().ok().filter(|p| numeric && *p != 0) else {
        return Failure::new(
            StatusCode::BAD_REQUEST,
            Code::InvalidRequestBody,
            format!("port {port:?} is not a number from 1 to 65535"),
        )
        .into_reply();
    };
    let Ok(target) = target.parse::<Uri>() else {
        return Failure::invalid("the path behind the port is not a valid request target").into_reply();
    };
    *request.uri_mut() = target;
    *request.version_mut() = http::Version::HTTP_11;
    match exchange(request, port, peer, held).await {
        Ok(reply) => reply,
        Err(_) => reply::text(StatusCode::BAD_GATEWAY, "Bad Gateway"),
    }
}

async fn exchange(
    mut request: Request<Incoming>,
    port: u16,
    peer: SocketAddr,
    held: Held,
) -> Result<Reply, Box<dyn std::error::Error + Send + Sync>> {
    let upgrade = request.headers().get(UPGRADE).cloned();
    let client = upgrade.is_some().then(|| hyper::upgrade::on(&mut request));
    clean_request(request.headers_mut(), peer, upgrade.as_ref());

    let stream = timeout(CONNECT_TIMEOUT, TcpStream::connect((Ipv4Addr::LOCALHOST, port))).await??;
    let _ = stream.set_nodelay(true);
    let (mut sender, connection) =
        http1::Builder::new().preserve_header_case(true).handshake(TokioIo::new(stream)).await?;
    let held = Arc::new(held);
    let connected = Arc::clone(&held);
    tokio::spawn(async move {
        // Its error is also that of the exchange.
        let _ = connection.with_upgrades().await;
        drop(connected);
    });
    let mut response = sender.send_request(request).await?;

    if response.status() == StatusCode::SWITCHING_PROTOCOLS {
        let server = hyper::upgrade::on(&mut response);
        if let Some(client) = client {
            tokio::spawn(async move {
                let _held = held;
                if let (Ok(client), Ok(server)) = tokio::join!(client, server) {
                    let (mut client, mut server) = (TokioIo::new(client), TokioIo::new(server));
                    // Either side may hang up at any time; that is the normal end.
                    let _ = tokio::io::copy_bidirectional(&mut client, &mut server).await;
                }
            });
        }
        let (parts, _) = response.into_parts();
        return Ok(Response::from_parts(parts, Body::Empty));
    }
    remove_hop_by_hop(response.headers_mut());
    Ok(response.map(Body::Passed))
}

fn clean_request(headers: &mut HeaderMap, peer: SocketAddr, upgrade: Option<&HeaderValue>) {
    remove_hop_by_hop(headers);
    headers.remove(TOKEN_HEADER);
    if let Some(upgrade) = upgrade {
        headers.insert(CONNECTION, HeaderValue::from_static("Upgrade"));
        headers.insert(UPGRADE, upgrade.clone());
    }
    let text = |name: &str| headers.get(name).and_then(|v| v.to_str().ok()).map(str::to_owned);
    let client = text("x-forwarded-for")
        .and_then(|list| list.split(',').next().map(|first| first.trim().to_owned()))
        .filter(|first| !first.is_empty())
        .or_else(|| text("x-real-ip"))
        .unwrap_or_else(|| peer.ip().to_string());
    if let Ok(client) = HeaderValue::try_from(client) {
        headers.insert(HeaderName::from_static("x-forwarded-for"), client);
    }
    headers.insert(HeaderName::from_static("x-forwarded-proto"), HeaderValue::from_static("http"));
    headers.remove("x-forwarded-host");
}

pub(crate) fn remove_hop_by_hop(headers: &mut HeaderMap) {
    let named: Vec<String> = headers
        .get_all(CONNECTION)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(',').map(|name| name.trim().to_ascii_lowercase()))
        .collect();
    for name in named.iter().map(String::as_str).chain(HOP_BY_HOP) {
        headers.remove(name);
    }
    headers.remove(CONNECTION);
    headers.remove(UPGRADE);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_own_port_is_unwrapped_and_others_are_not() {
        let own = |uri: &str| own_port_target(&uri.parse().unwrap(), 44772).map(|u| u.to_string());
        assert_eq!(own("/proxy/44772/files/info?path=%2Fa"), Some("/files/info?path=%2Fa".into()));
        assert_eq!(own("/proxy/44772"), Some("/".into()));
        assert_eq!(own("/proxy/8080/x"), None);
        assert_eq!(own("/proxy/44772@evil/x"), None);
    }
}
