//! The last leg to a port of a sandbox, whoever has let the request through.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::header::{CONTENT_LENGTH, CONTENT_TYPE};
use http::uri::PathAndQuery;
use http::{Request, Response, StatusCode, Uri};
use http_body::Body;
use sandglass_proxy::{BoxError, Counts, Forwarder, HeaderEdits, Lease, Pulse, ResponseBody};

use super::EGRESS_PORT;
use super::lookup::Target;
use super::refusal::Refusal;
use super::ways::{self, Need, Ways};

/// Which process takes the request in the sandbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// Whatever listens on the port.
    Direct,
    /// The agent, which connects to the port from inside.
    Agent,
}

impl Way {
    /// Whether it may lead to the sandbox's enforcer. The agent is gone through to one only where ports are published and none is its
    /// own; otherwise what listens inside is a program of the sandbox, which a token that lifts its policy must not reach.
    pub(crate) fn leads_to_enforcer(self, target: &Target, port: u16) -> bool {
        port == EGRESS_PORT
            && (self == Self::Direct || target.mapped.is_some_and(|ports| ports.egress.is_none()))
    }
}

/// Connects to sandboxes. Clones share the connections.
#[derive(Clone, Debug)]
pub struct Carrier {
    forwarder: Forwarder,
    ways: Arc<Ways>,
}

/// A connection that is ready for exactly one request.
#[derive(Debug)]
pub(crate) struct Ride<'c> {
    carrier: &'c Carrier,
    lease: Lease,
    way: Way,
    need: Need,
    application: SocketAddr,
}

impl Carrier {
    #[must_use]
    pub fn new(forwarder: Forwarder) -> Self {
        Self { forwarder, ways: Arc::default() }
    }

    /// To the port itself, or to whatever leads to it.
    pub(crate) async fn connect(
        &self,
        target: &Target,
        application: SocketAddr,
        need: Need,
    ) -> Result<Ride<'_>, Refusal> {
        let (lease, way) = match target.mapped {
            // What the enforcer is told must never reach a program of the sandbox that listens while it is away.
            None if application.port() == EGRESS_PORT && target.egress_token.is_some() => {
                (ways::open(&self.forwarder, application, need).await?, Way::Direct)
            }
            None => self.ways.connect(&self.forwarder, application, need).await?,
            Some(mapped) => {
                let (port, way) = mapped.door(application.port());
                if port == 0 {
                    return Err(Refusal::Unmapped);
                }
                let door = SocketAddr::new(application.ip(), port);
                (ways::open(&self.forwarder, door, need).await?, way)
            }
        };
        Ok(Ride { carrier: self, lease, way, need, application })
    }

    /// Cuts what goes to a removed sandbox. To be called before its address can be given to another.
    pub fn forget(&self, address: IpAddr) {
        self.ways.forget(address);
        self.forwarder.forget(address);
    }

    /// Takes no further requests, and lets those under way and upgraded connections end for so long. Returns what was cut.
    pub async fn drain(&self, grace: Duration) -> Counts {
        self.forwarder.drain(grace).await
    }
}

impl Ride<'_> {
    pub(crate) fn way(&self) -> Way {
        self.way
    }

    /// Sends the request to this target and returns the answer's head with its body still to come. Whoever is behind `pulse` is told for
    /// as long as bytes move.
    pub(crate) async fn exchange<B>(
        self,
        mut request: Request<B>,
        to: PathAndQuery,
        edits: HeaderEdits,
        pulse: Option<Pulse>,
    ) -> Result<Response<ResponseBody>, Refusal>
    where
        B: Body<Data = Bytes> + Send + 'static,
        B::Error: Into<BoxError>,
    {
        *request.uri_mut() = Uri::from(to);
        let lease = self.lease.watched(pulse);
        let response = match self.need {
            Need::Own => lease.upgrade(request, edits).await?,
            Need::Shared => lease.forward(request, edits).await?,
        };
        if self.way == Way::Agent && nothing_inside(&response) {
            self.carrier.ways.forget_port(self.application);
            return Err(Refusal::Unreachable);
        }
        Ok(response)
    }
}

/// The agent's own word for a port on which nothing listens: a 502 with the text `Bad Gateway`.
fn nothing_inside<B>(response: &Response<B>) -> bool {
    let headers = response.headers();
    response.status() == StatusCode::BAD_GATEWAY
        && headers.get(CONTENT_LENGTH).is_some_and(|length| length == "11")
        && headers.get(CONTENT_TYPE).is_some_and(|kind| kind.as_bytes().starts_with(b"text/plain"))
}
