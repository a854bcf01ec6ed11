//! Refusals for WebSocket clients: the handshake is accepted and the connection closed with a code, because browsers
//! and the published clients cannot see why a handshake failed.

use std::time::Duration;

use axum::extract::FromRequestParts;
use axum::extract::ws::{CloseFrame, Message, WebSocket, WebSocketUpgrade};
use axum::response::{IntoResponse, Response};
use http::request::Parts;
use http::{HeaderMap, Request, Uri, Version};
use hyper::upgrade::OnUpgrade;

use super::refusal::Refusal;

/// How long a client may take to answer the close frame.
const GOODBYE: Duration = Duration::from_secs(5);

/// What is needed to accept a handshake after its request has gone to the backend.
pub(super) struct Handshake {
    headers: HeaderMap,
    upgrade: OnUpgrade,
}

/// How the connection is closed.
pub(super) enum Close {
    Refused(Refusal),
    /// The backend did not accept the handshake. Its answer cannot be shown.
    ByBackend,
}

impl Handshake {
    /// `None` unless the request is a WebSocket handshake.
    pub(super) fn of<B>(request: &Request<B>) -> Option<Self> {
        let protocol = sandglass_proxy::requested_upgrade(request.headers())?;
        if !protocol.as_bytes().eq_ignore_ascii_case(b"websocket") {
            return None;
        }
        let upgrade = request.extensions().get::<OnUpgrade>()?.clone();
        Some(Self { headers: request.headers().clone(), upgrade })
    }

    /// Accepts and closes. A handshake that is itself wrong gets the plain answer.
    pub(super) async fn close(self, close: Close) -> Response {
        let (code, reason, fallback) = match close {
            Close::Refused(refusal) => (refusal.close_code(), refusal.to_string(), refusal),
            Close::ByBackend => (1008, String::new(), Refusal::BadResponse),
        };
        let mut parts = self.into_parts();
        match WebSocketUpgrade::from_request_parts(&mut parts, &()).await {
            Ok(handshake) => handshake.on_upgrade(move |socket| say_goodbye(socket, code, reason)),
            Err(_) => fallback.into_response(),
        }
    }

    fn into_parts(self) -> Parts {
        let (mut parts, ()) = Request::new(()).into_parts();
        parts.uri = Uri::from_static("/");
        parts.version = Version::HTTP_11;
        parts.headers = self.headers;
        parts.extensions.insert(self.upgrade);
        parts
    }
}

async fn say_goodbye(mut socket: WebSocket, code: u16, reason: String) {
    let farewell = async {
        if socket.send(Message::Close(Some(CloseFrame { code, reason: reason.into() }))).await.is_ok() {
            while let Some(Ok(_)) = socket.recv().await {}
        }
    };
    // Whether the client heard it makes no difference here.
    let _ = tokio::time::timeout(GOODBYE, farewell).await;
}
