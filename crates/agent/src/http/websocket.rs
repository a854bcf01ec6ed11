//! The handshake of a WebSocket (RFC 6455).

use http::header::{CONNECTION, HeaderValue, UPGRADE};
use http::{HeaderMap, Response, StatusCode};
use tokio_tungstenite::tungstenite::handshake::derive_accept_key;

use super::body::Body;
use super::reply::{Failure, Outcome};

/// The key of a handshake of version 13; none in any other request.
pub fn handshake_key(headers: &HeaderMap) -> Option<Vec<u8>> {
    let has = |name: &str, word: &str| {
        headers
            .get_all(name)
            .iter()
            .filter_map(|value| value.to_str().ok())
            .any(|value| value.split(',').any(|part| part.trim().eq_ignore_ascii_case(word)))
    };
    let proper =
        has("upgrade", "websocket") && has("connection", "upgrade") && has("sec-websocket-version", "13");
    headers.get("sec-websocket-key").filter(|_| proper).map(|key| key.as_bytes().to_vec())
}

/// The answer to a request without [`handshake_key`].
pub fn not_a_handshake() -> Failure {
    Failure::invalid("this route needs a WebSocket handshake of version 13")
}

/// The answer after which the connection is a WebSocket.
pub fn switch(key: &[u8]) -> Outcome {
    let mut reply = Response::new(Body::Empty);
    *reply.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
    let headers = reply.headers_mut();
    headers.insert(CONNECTION, HeaderValue::from_static("Upgrade"));
    headers.insert(UPGRADE, HeaderValue::from_static("websocket"));
    let accept = HeaderValue::try_from(derive_accept_key(key)).map_err(|_| Failure::runtime("handshake"))?;
    headers.insert("sec-websocket-accept", accept);
    Ok(reply)
}
