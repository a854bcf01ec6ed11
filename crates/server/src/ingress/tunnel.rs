//! A WebSocket through the agent to the port of one of its services.
//!
//! The bytes of the connection are passed as they are: the agent speaks WebSocket, this only leads to it.

use std::net::SocketAddr;

use axum::extract::Request;
use axum::response::Response;
use http::header::{AUTHORIZATION, COOKIE, SEC_WEBSOCKET_KEY};
use http::uri::PathAndQuery;
use sandglass_proxy::{ResponseBody, requested_upgrade};

use super::AGENT_PORT;
use super::access::Grounds;
use super::edits::{self, Observed};
use super::lookup::Target;
use super::refusal::Refusal;
use super::relay::{IngressState, address};
use super::ways::Need;

/// A service of a sandbox, both of which are known and may be reached by whoever asks.
#[derive(Clone, Copy, Debug)]
pub struct Tunnelled<'a> {
    pub sandbox: &'a str,
    /// Lower-case letters, digits and hyphens.
    pub service: &'a str,
}

impl IngressState {
    /// Passes a handshake on to the agent and returns its answer; with 101, the connection follows.
    ///
    /// # Errors
    /// When the request is no handshake, or the agent cannot be reached.
    pub async fn tunnel(
        &self,
        Tunnelled { sandbox, service }: Tunnelled<'_>,
        target: &Target,
        mut request: Request,
    ) -> Result<Response<ResponseBody>, Refusal> {
        let headers = request.headers();
        let websocket = requested_upgrade(headers)
            .is_some_and(|protocol| protocol.as_bytes().eq_ignore_ascii_case(b"websocket"));
        if !websocket || !headers.contains_key(SEC_WEBSOCKET_KEY) {
            return Err(Refusal::Handshake);
        }
        let (target, pulse) = self.awake(sandbox, target, headers).await?;
        let application = SocketAddr::new(address(target.reach)?, AGENT_PORT);
        let ride = self.connect(&target, application, Need::Own).await?;
        let observed = Observed::of(request.headers(), request.extensions());
        let by = (&target, Grounds::ServerKey);
        let edits = edits::request(request.headers(), &observed, by, (application, ride.way()));
        // The server's key may have come as either.
        request.headers_mut().remove(AUTHORIZATION);
        request.headers_mut().remove(COOKIE);
        let path = format!("/v1/workspace/services/{service}/tunnel");
        let to = PathAndQuery::try_from(path).map_err(|_| Refusal::TargetMalformed)?;
        ride.exchange(request, to, edits, pulse).await
    }
}
