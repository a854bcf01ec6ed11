//! One request on a proxy route, from its arrival to the answer's head.

use std::borrow::Cow;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::extract::{OriginalUri, Request};
use axum::response::{IntoResponse, Response};
use http::header::SEC_WEBSOCKET_KEY;
use http::{HeaderMap, Method, StatusCode, Uri};
use sandglass_proxy::{Counts, Forwarder, Pulse, ResponseBody, requested_upgrade};

use super::ACCESS_RENEW;
use super::access::{AccessRules, Grounds};
use super::carrier::{Carrier, Ride, Way};
use super::edits::{self, Observed};
use super::lookup::{Lookup, Reach, Target};
use super::refusal::Refusal;
use super::route::Route;
use super::visits::{self, Brought, Shown};
use super::wake::Wakes;
use super::ways::Need;
use super::websocket::{Close, Handshake};
use crate::telemetry::metrics::Proxied;

/// How often use that lasts is told anew: well within the shortest life that a renewal gives. In tests, whenever bytes move.
pub(crate) const USE_LASTS: Duration = Duration::from_secs(if cfg!(test) { 0 } else { 20 });

/// What the configuration says about the ingress.
#[derive(Clone, Debug)]
pub struct IngressSettings {
    pub access: AccessRules,
    /// `server.eip`.
    pub eip: Option<String>,
}

/// Everything the proxy routes need. Clones share it.
#[derive(Clone)]
pub struct IngressState {
    shared: Arc<Shared>,
}

struct Shared {
    lookup: Arc<dyn Lookup>,
    carrier: Carrier,
    settings: IngressSettings,
    wakes: Wakes,
}

impl std::fmt::Debug for IngressState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("IngressState").field("carrier", &self.shared.carrier).finish_non_exhaustive()
    }
}

impl IngressState {
    pub fn new(lookup: Arc<dyn Lookup>, forwarder: Forwarder, settings: IngressSettings) -> Self {
        let carrier = Carrier::new(forwarder);
        Self { shared: Arc::new(Shared { lookup, carrier, settings, wakes: Wakes::default() }) }
    }

    pub(super) fn used(&self, id: &str) {
        self.shared.lookup.used(id);
    }

    pub(super) async fn connect(
        &self,
        target: &Target,
        application: SocketAddr,
        need: Need,
    ) -> Result<Ride<'_>, Refusal> {
        self.shared.carrier.connect(target, application, need).await
    }

    /// Where to, once the sandbox is awake; it counts as used from then on, for as long as bytes move.
    pub(super) async fn awake(
        &self,
        id: &str,
        target: &Target,
        headers: &HeaderMap,
    ) -> Result<(Target, Option<Pulse>), Refusal> {
        let shared = &self.shared;
        let target = match wants_awake(target, headers) {
            true => shared.wakes.awake(&*shared.lookup, id).await?,
            false => target.clone(),
        };
        if skips_renewal(headers) {
            return Ok((target, None));
        }
        shared.lookup.used(id);
        let pulse = target.renews.then(|| shared.pulse(id));
        Ok((target, pulse))
    }

    /// Takes no further requests, and lets those under way and upgraded connections end for so long. Returns what was cut.
    pub async fn drain(&self, grace: Duration) -> Counts {
        self.shared.carrier.drain(grace).await
    }

    /// Cuts what goes to a removed sandbox. To be called before its address can be given to another.
    pub fn forget(&self, address: IpAddr) {
        self.shared.carrier.forget(address);
    }
}

/// Answers any method on both proxy routes of both mounts.
///
/// The peer's address is taken from `ConnectInfo<SocketAddr>` where the server provides it.
pub async fn proxy_handler(state: IngressState, request: Request) -> Response {
    answer(&state, request).await
}

/// The same without a share of what answers.
pub async fn answer(state: &IngressState, request: Request) -> Response {
    let handshake = Handshake::of(&request);
    let uri =
        request.extensions().get::<OriginalUri>().map_or_else(|| request.uri().clone(), |uri| uri.0.clone());
    let refusal = match state.shared.relay(&uri, request).await {
        Ok(response) if handshake.is_some() && response.status() != StatusCode::SWITCHING_PROTOCOLS => None,
        Ok(response) => return marked(response, Proxied::Answered),
        Err(refusal) => Some(refusal),
    };
    let outcome = refusal.map_or(Proxied::Answered, Refusal::outcome);
    marked(refused(handshake, refusal).await, outcome)
}

/// For whoever counts answers.
fn marked(mut response: Response, outcome: Proxied) -> Response {
    response.extensions_mut().insert(outcome);
    response
}

async fn refused(handshake: Option<Handshake>, refusal: Option<Refusal>) -> Response {
    match (handshake, refusal) {
        // A path that is no route has no WebSocket behind it that could be closed.
        (_, Some(refusal @ (Refusal::NoRoute | Refusal::PortNotANumber | Refusal::Method))) => {
            refusal.into_response()
        }
        (Some(handshake), Some(refusal)) => handshake.close(Close::Refused(refusal)).await,
        (Some(handshake), None) => handshake.close(Close::ByBackend).await,
        (None, refusal) => refusal.unwrap_or(Refusal::BadResponse).into_response(),
    }
}

/// A backend would wait for a WebSocket client that cannot be one.
fn whole_handshake(headers: &HeaderMap) -> bool {
    let protocol = requested_upgrade(headers).map_or(&b""[..], |protocol| protocol.as_bytes());
    !protocol.eq_ignore_ascii_case(b"websocket") || headers.contains_key(SEC_WEBSOCKET_KEY)
}

impl Shared {
    async fn relay(&self, uri: &Uri, mut request: Request) -> Result<Response, Refusal> {
        let route = Route::parse(uri.path())?;
        if matches!(*request.method(), Method::CONNECT | Method::TRACE) {
            return Err(Refusal::Method);
        }
        let target = self.lookup.target(route.id);
        let brought = Brought::of(&route, uri.query(), request.headers());
        let (has_link, shown) =
            (brought.has_link(), target.as_ref().and_then(|target| brought.opens(target)));
        let admitted = match (&target, shown) {
            (Some(target), Some(_)) => Ok((target, Grounds::Visit)),
            (target, _) => self.settings.access.admit(request.headers(), target.as_ref(), route.port).await,
        };
        let (target, grounds) = admitted.map_err(|refusal| match refusal {
            Refusal::MissingKey | Refusal::InvalidKey | Refusal::SecureAccess if has_link => Refusal::Link,
            // Whether it is another tenant's or does not exist makes no difference here either.
            Refusal::NotFound if !self.lookup.complete() => Refusal::Unknown,
            refusal => refusal,
        })?;
        if !whole_handshake(request.headers()) {
            return Err(Refusal::Handshake);
        }
        let upgrade = requested_upgrade(request.headers()).is_some();
        if shown == Some(Shown::Link) && visits::navigates(request.method(), upgrade) {
            let observed = Observed::of(request.headers(), request.extensions());
            let eip = self.settings.eip.as_deref();
            return visits::exchanged(&route, uri.query(), target, &observed, eip).ok_or(Refusal::Link);
        }
        visits::hide_cookies(request.headers_mut());
        let query = uri.query().and_then(|query| match has_link {
            true => visits::without_link(query).map(Cow::Owned),
            false => Some(Cow::Borrowed(query)),
        });
        let woken;
        let target = if wants_awake(target, request.headers()) {
            woken = self.wakes.awake(&*self.lookup, route.id).await?;
            &woken
        } else {
            target
        };
        let pulse = if skips_renewal(request.headers()) {
            None
        } else {
            self.lookup.used(route.id);
            target.renews.then(|| self.pulse(route.id))
        };
        let application = SocketAddr::new(address(target.reach)?, route.port);
        let at = (application, pulse);
        let response = self.exchange((&route, query.as_deref()), (target, grounds), at, request).await?;
        Ok(response.map(Body::new))
    }

    /// Use that lasts, such as a terminal's.
    fn pulse(&self, id: &str) -> Pulse {
        let (lookup, id) = (self.lookup.clone(), id.to_owned());
        Pulse::new(USE_LASTS, move || lookup.lasts(&id))
    }

    async fn exchange(
        &self,
        (route, query): (&Route<'_>, Option<&str>),
        (target, grounds): (&Target, Grounds),
        (application, pulse): (SocketAddr, Option<Pulse>),
        request: Request,
    ) -> Result<Response<ResponseBody>, Refusal> {
        let need = if requested_upgrade(request.headers()).is_some() { Need::Own } else { Need::Shared };
        let ride = self.carrier.connect(target, application, need).await?;
        let observed = Observed::of(request.headers(), request.extensions());
        let edits =
            edits::request(request.headers(), &observed, (target, grounds), (application, ride.way()));
        let to = match ride.way() {
            Way::Direct => route.direct(query)?,
            Way::Agent => route.through_agent(query)?,
        };
        let mut response = ride.exchange(request, to, edits, pulse).await?;
        edits::response(response.headers_mut(), route, self.settings.eip.as_deref());
        Ok(response)
    }
}

pub(super) fn address(reach: Reach) -> Result<IpAddr, Refusal> {
    match reach {
        Reach::Addressable(address) => Ok(address),
        Reach::Paused(_) => Err(Refusal::Paused),
        Reach::Starting(_) => Err(Refusal::Starting),
        Reach::Nowhere => Err(Refusal::Unmapped),
        Reach::Gone => Err(Refusal::Ended),
    }
}

/// Whether a request resumes its sandbox. One that does not count as use of it, such as a probe's, leaves it asleep.
pub(crate) fn wants_awake(target: &Target, headers: &HeaderMap) -> bool {
    target.wakes && matches!(target.reach, Reach::Paused(_)) && !skips_renewal(headers)
}

/// Whether a request asks not to count as use of its sandbox.
pub(crate) fn skips_renewal(headers: &HeaderMap) -> bool {
    headers.get(ACCESS_RENEW).is_some_and(|value| value == "skip")
}
