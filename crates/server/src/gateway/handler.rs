//! One request through the gateway, from its arrival to the answer's head.

use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;

use axum::body::Body;
use axum::extract::Request;
use axum::response::{IntoResponse, Response};
use futures_util::future::BoxFuture;
use http::header::{CONTENT_TYPE, HOST, SEC_WEBSOCKET_KEY};
use http::uri::PathAndQuery;
use http::{HeaderMap, HeaderName, HeaderValue, Method, Uri};
use sandglass_ingress::{Denied, Door, Moment, PathRoute, Presented, Proof, Route, RouteError};
use sandglass_proxy::{Pulse, requested_upgrade};
use tokio::sync::Semaphore;
use tokio::time::timeout;

use super::audit::{Audit, Routed};
use super::directory::{Directory, Used};
use super::edits::{self, INGRESS_TO, OLD_INGRESS_TO};
use super::refused::{Refused, Upgrade};
use crate::ingress::{
    AGENT_PORT, AGENT_TOKEN, Carrier, Need, Park, ROUTE_TOKEN, Reach, SECURE_ACCESS, Target, USE_LASTS,
    Wakes, Way, presents, skips_renewal, wants_awake,
};
use crate::listener::{Answers, whole_head};
use crate::telemetry::logs::ACCESS_TARGET;

/// Where the route stands in a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RouteFrom {
    /// A header, else the host name.
    HeaderOrHost,
    Path,
    /// Nowhere: a mode that nobody knows.
    Nowhere,
}

/// What a gateway is told.
#[derive(Debug)]
pub struct GatewaySettings {
    pub route: RouteFrom,
    pub door: Door,
    /// `None`: paused sandboxes stay paused.
    pub park: Option<Park>,
    pub audit: Option<Audit>,
}

/// A gateway. Clones share it.
#[derive(Clone)]
pub struct Gateway(Arc<Shared>);

struct Shared {
    directory: Arc<dyn Directory>,
    carrier: Carrier,
    settings: GatewaySettings,
    wakes: Option<Wakes>,
    /// Requests that wait a moment for a sandbox that is not known yet.
    curious: Semaphore,
}

const CURIOUS: usize = 256;

impl fmt::Debug for Gateway {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Gateway").field(&self.0.settings).finish()
    }
}

/// What answers on a gateway's listener: its health on one path, everything else from sandboxes.
impl Answers for Gateway {
    fn answer(&self, request: Request) -> BoxFuture<'_, Response> {
        Box::pin(async move {
            let bodiless = request.method() == Method::HEAD;
            let mut response = if request.uri().path() == "/status.ok" {
                ([(CONTENT_TYPE, "text/plain; charset=utf-8")], "OK").into_response()
            } else {
                self.0.relay(request).await.unwrap_or_else(IntoResponse::into_response)
            };
            whole_head(&mut response, bodiless);
            response
        })
    }
}

/// What a request asks for, after the route was read.
struct Asked<'a> {
    route: Route,
    /// The path to be passed on, where it differs from the request's own.
    rest: Option<&'a str>,
    /// Where the route stands. A name that it stands in is the application's own.
    by: By,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum By {
    HostName,
    Header,
    Path,
}

/// What a request shows to be let through, beside its route.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Shown<'h> {
    Nothing,
    /// Meant to be the sandbox's; not compared yet.
    Token(&'h [u8]),
    /// The agent's own and right, on the way to the agent.
    AgentToken,
}

impl<'h> Shown<'h> {
    fn of(headers: &'h HeaderMap, target: &Target, port: u16) -> Self {
        let token = |name| headers.get(name).map(|value: &HeaderValue| value.as_bytes());
        if target.secure_access {
            return token(SECURE_ACCESS).map_or(Self::Nothing, Self::Token);
        }
        if port == AGENT_PORT && presents(headers, &AGENT_TOKEN, &target.agent_token) {
            return Self::AgentToken;
        }
        token(ROUTE_TOKEN).or_else(|| token(SECURE_ACCESS)).map_or(Self::Nothing, Self::Token)
    }
}

impl Gateway {
    pub fn new(directory: Arc<dyn Directory>, carrier: Carrier, settings: GatewaySettings) -> Self {
        let wakes = settings.park.map(Wakes::new);
        Self(Arc::new(Shared { directory, carrier, settings, wakes, curious: Semaphore::new(CURIOUS) }))
    }
}

impl Shared {
    async fn relay(&self, request: Request) -> Result<Response, Refused> {
        if matches!(*request.method(), Method::CONNECT | Method::TRACE) {
            return Err(Refused::Method);
        }
        let uri = request.uri().clone();
        let asked = self.read(&uri, request.headers())?;
        let target = self.find(&asked.route.id).await.ok_or(Refused::NotFound)?;
        self.ready(&target)?;
        let shown = Shown::of(request.headers(), &target, asked.route.port);
        let asked = match asked {
            Asked { rest: Some(_), .. }
                if !target.secure_access && (target.open || shown != Shown::Nothing) =>
            {
                unsigned(&uri)?
            }
            asked => asked,
        };
        self.admit(&asked.route, &target, shown)?;
        let upgrade = upgrade(request.headers())?;
        let target = match &self.wakes {
            Some(wakes) if wants_awake(&target, request.headers()) => {
                wakes.awake(&*self.directory, &asked.route.id).await.map_err(Refused::of_wake)?
            }
            _ => target,
        };
        if let Reach::Paused(_) = target.reach {
            return Err(Refused::Paused);
        }
        let Reach::Addressable(address) = target.reach else { return Err(Refused::NotReady) };
        let application = SocketAddr::new(address, asked.route.port);
        self.note(&asked, &target, application, &request);
        let counts = !skips_renewal(request.headers()) && self.directory.counts(target.renews);
        let pulse = counts.then(|| self.pulse(&asked, target.renews));
        self.carry((&asked, &uri), &target, (application, upgrade, pulse), request).await
    }

    /// Use that lasts, such as a terminal's.
    fn pulse(&self, asked: &Asked<'_>, renews: bool) -> Pulse {
        let (directory, port) = (self.directory.clone(), asked.route.port);
        let (id, path) = (asked.route.id.clone(), asked.rest.map(str::to_owned));
        Pulse::new(USE_LASTS, move || {
            directory.told(Used { id: &id, port, path: path.as_deref(), renews, lasts: true });
        })
    }

    fn read<'u>(&self, uri: &'u Uri, headers: &HeaderMap) -> Result<Asked<'u>, Refused> {
        match self.settings.route {
            RouteFrom::Nowhere => Err(Refused::Mode),
            RouteFrom::Path => {
                let PathRoute { route, rest, .. } = PathRoute::parse(uri.path())?;
                Ok(Asked { route, rest: Some(rest), by: By::Path })
            }
            RouteFrom::HeaderOrHost => {
                let (route, by) = named(headers)?;
                Ok(Asked { route, rest: None, by })
            }
        }
    }

    /// What was made a moment ago may be known here a moment later.
    async fn find(&self, id: &str) -> Option<Target> {
        let mut changes = self.directory.changes();
        if let Some(target) = self.directory.target(id) {
            return Some(target);
        }
        let lag = self.directory.lag();
        if lag.is_zero() {
            return None;
        }
        // No text of another form becomes a sandbox.
        id.parse::<sandglass_sandbox::SandboxId>().ok()?;
        let _place = self.curious.try_acquire().ok()?;
        let appeared = async {
            loop {
                changes.borrow_and_update();
                if let Some(target) = self.directory.target(id) {
                    return Some(target);
                }
                changes.changed().await.ok()?;
            }
        };
        timeout(lag, appeared).await.ok()?
    }

    fn ready(&self, target: &Target) -> Result<(), Refused> {
        match target.reach {
            Reach::Addressable(_) => Ok(()),
            Reach::Paused(_) if target.wakes && self.wakes.is_some() => Ok(()),
            Reach::Paused(_) => Err(Refused::Paused),
            Reach::Starting(_) | Reach::Nowhere | Reach::Gone => Err(Refused::NotReady),
        }
    }

    fn admit(&self, route: &Route, target: &Target, shown: Shown<'_>) -> Result<(), Refused> {
        let scoped = matches!(route.proof, Proof::Scoped(_));
        if shown == Shown::AgentToken && !scoped {
            return Ok(());
        }
        let secret = (target.secure_access || !target.open).then_some(target.route_token.as_str());
        if secret.is_some_and(|secret| secret.trim().is_empty()) && !scoped {
            // It asks for what nobody has.
            return Err(Denied::Missing.into());
        }
        let token = if let Shown::Token(token) = shown { Some(token) } else { None };
        Ok(self.settings.door.admit(secret, Presented { token, route }, Moment::now())?)
    }

    /// Tells whoever wants to know that the request was let through.
    fn note(&self, asked: &Asked<'_>, target: &Target, application: SocketAddr, request: &Request) {
        let Route { id, port, .. } = &asked.route;
        let path = asked.rest.unwrap_or(request.uri().path());
        tracing::info!(
            target: ACCESS_TARGET,
            upstream = %application,
            sandbox = %id,
            client = edits::client(request.headers(), request.extensions()),
            method = %request.method(),
            path,
            "routed"
        );
        if !skips_renewal(request.headers()) {
            let renews = target.renews;
            self.directory.told(Used { id, port: *port, path: asked.rest, renews, lasts: false });
        }
        if let Some(audit) = &self.settings.audit {
            audit.routed(Routed { id, path, method: request.method(), target: application });
        }
    }

    async fn carry(
        &self,
        (asked, uri): (&Asked<'_>, &Uri),
        target: &Target,
        (application, upgrade, pulse): (SocketAddr, Upgrade, Option<Pulse>),
        request: Request,
    ) -> Result<Response, Refused> {
        let need = if upgrade == Upgrade::Asked { Need::Own } else { Need::Shared };
        let failed = |refusal| Refused::of_exchange(refusal, upgrade);
        let ride = self.carrier.connect(target, application, need).await.map_err(failed)?;
        let way = ride.way();
        let edits = edits::request(&request, target, (application, way), asked.by);
        let path = asked.rest.unwrap_or(uri.path());
        let to = passed_on(path, uri.query(), (way, application.port()))?;
        let mut response = ride.exchange(request, to, edits, pulse).await.map_err(failed)?;
        edits::response(response.headers_mut());
        Ok(response.map(Body::new))
    }
}

/// The route in a header, else in the host name. One that cannot be read is not looked for elsewhere.
fn named(headers: &HeaderMap) -> Result<(Route, By), Refused> {
    for name in [INGRESS_TO, OLD_INGRESS_TO] {
        let text = text(headers, &name)?;
        if !text.is_empty() {
            return Ok((Route::from_header(text)?, By::Header));
        }
    }
    let host = Some(text(headers, &HOST)?).filter(|host| !host.is_empty()).ok_or(Refused::NoRoute)?;
    Ok((Route::from_host(host)?, By::HostName))
}

/// The one text that a field has, however often it is there; empty when it is not.
fn text<'h>(headers: &'h HeaderMap, name: &HeaderName) -> Result<&'h str, Refused> {
    let mut values = headers.get_all(name).iter();
    let Some(first) = values.next() else { return Ok("") };
    let text = first.to_str().ok().filter(|_| values.all(|other| other == first));
    text.ok_or(Refused::Route(RouteError::Malformed))
}

/// The path of a sandbox that asks for no signature: what looks like one is the application's.
fn unsigned(uri: &Uri) -> Result<Asked<'_>, Refused> {
    let PathRoute { route, rest, .. } = PathRoute::parse(uri.path())?.unsigned();
    Ok(Asked { route, rest: Some(rest), by: By::Path })
}

fn upgrade(headers: &HeaderMap) -> Result<Upgrade, Refused> {
    let Some(protocol) = requested_upgrade(headers) else { return Ok(Upgrade::No) };
    let websocket = protocol.as_bytes().eq_ignore_ascii_case(b"websocket");
    if websocket && !headers.contains_key(SEC_WEBSOCKET_KEY) {
        // A backend would wait for a client that cannot be one.
        return Err(Refused::Malformed);
    }
    Ok(Upgrade::Asked)
}

/// The request target for whoever takes the request.
fn passed_on(path: &str, query: Option<&str>, (way, port): (Way, u16)) -> Result<PathAndQuery, Refused> {
    let mut text = match way {
        Way::Direct => path.to_owned(),
        // `*` would be part of the port.
        Way::Agent if !path.starts_with('/') => return Err(Refused::Malformed),
        Way::Agent => format!("/proxy/{port}{path}"),
    };
    if let Some(query) = query {
        text.push('?');
        text.push_str(query);
    }
    PathAndQuery::try_from(text).map_err(|_| Refused::Malformed)
}
