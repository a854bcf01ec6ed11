//! One request and its answer.

use std::convert::Infallible;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use http::header::{CONTENT_LENGTH, HOST, HeaderValue, TE, TRANSFER_ENCODING};
use http::{Method, Request, Response, StatusCode, Uri, Version};
use http_body::Body as _;
use http_body_util::BodyExt;
use hyper::body::Incoming;
use hyper::ext::ReasonPhrase;
use hyper::upgrade::OnUpgrade;
use hyper_util::rt::TokioIo;

use crate::audit::{Event, Gate};
use crate::policy::Resolved;
use crate::vault::{Active, Overlong, Scheme, Selection, Target};

use super::host::{self, Said};
use super::judge::{Denied, Wanted};
use super::message::{self, Body, Held, Passed, refusal};
use super::rewrite::{self, Unfit};
use super::room::Share;
use super::service::{Live, Shared};
use super::tunnel;
use super::upstream::{Failure, Protocol, Upstream};
use super::{EXCHANGE, MAX_BODY, MAX_REPLACED};

/// For room, until others have given some back.
const ROOM: Duration = Duration::from_secs(20);
/// For a body that is held, from its first byte to its last: a mebibyte at most.
const BODY: Duration = Duration::from_secs(60);

/// Both sides of an upgraded connection, to be joined when the client's has been answered.
pub(super) type Upgraded = (OnUpgrade, OnUpgrade);

/// One intercepted connection.
pub(super) struct Session {
    pub(super) shared: Arc<Shared>,
    pub(super) scheme: Scheme,
    /// The name that the client expects and the server has proved.
    pub(super) name: Option<String>,
    pub(super) destination: SocketAddr,
    pub(super) upstream: Result<Upstream, Failure>,
    pub(super) live: Arc<Live>,
    pub(super) memory: Memory,
    pub(super) _share: Share,
}

/// What one connection remembers.
#[derive(Default)]
pub(super) struct Memory {
    pub(super) upgraded: Mutex<Option<Upgraded>>,
    /// The last name that has led to the destination: an answer may expire while the connection is used.
    led: Mutex<Option<String>>,
}

impl Resolved for Session {
    fn leads_to(&self, name: &str, address: IpAddr) -> bool {
        let mut led = self.memory.led.lock().unwrap_or_else(PoisonError::into_inner);
        if self.name.as_deref() == Some(name) || led.as_deref() == Some(name) {
            return true;
        }
        let leads = self.shared.resolved.leads_to(name, address);
        if leads {
            *led = Some(name.to_owned());
        }
        leads
    }
}

/// Why a request is not passed on.
struct Refused {
    status: StatusCode,
    text: String,
}

impl Refused {
    fn new(status: StatusCode, text: impl Into<String>) -> Self {
        Self { status, text: text.into() }
    }

    fn busy(text: &str) -> Self {
        Self::new(StatusCode::SERVICE_UNAVAILABLE, text)
    }
}

/// Answers a request, from the server or instead of it.
pub(super) async fn answer(
    session: Arc<Session>,
    request: Request<Incoming>,
) -> Result<Response<Body>, Infallible> {
    let version = request.version();
    Ok(match exchange(&session, request).await {
        Ok(response) => response,
        Err(refused) => refusal(version, refused.status, &refused.text),
    })
}

async fn exchange(session: &Session, mut request: Request<Incoming>) -> Result<Response<Body>, Refused> {
    let said = admit(session, &request)?;
    let host = said.as_ref().map(|said| said.host.clone());
    let active = session
        .shared
        .lent
        .now()
        .map_err(|error| Refused::new(StatusCode::SERVICE_UNAVAILABLE, error.to_string()))?;
    let upstream = match &session.upstream {
        Ok(upstream) => upstream,
        Err(failure) => return Err(failed(host.as_deref(), failure)),
    };
    // The heads of those who wait count as well: on HTTP/2 there may be many of them on one connection, so that nobody waits there.
    let wait = if request.version() == Version::HTTP_2 { Duration::ZERO } else { ROOM };
    let Some(share) = session.shared.room.exchanges.take(EXCHANGE, wait).await else {
        return Err(Refused::busy("this sandbox has too many requests at a time; try again later"));
    };
    let protocol = message::upgrade(request.headers()).filter(|_| {
        upstream.protocol() == Protocol::Http1
            && request.version() == Version::HTTP_11
            && *request.method() == Method::GET
    });
    let client = protocol.is_some().then(|| hyper::upgrade::on(&mut request));
    let bodiless = *request.method() == Method::HEAD;
    let trailers = message::takes_trailers(request.headers());
    message::strip_request(request.headers_mut(), protocol);
    let request = lend(session, active.as_deref(), said.as_ref(), request).await?;
    let mut request = framed(session, upstream.protocol(), request);
    if trailers && upstream.protocol() == Protocol::Http2 {
        request.headers_mut().insert(TE, HeaderValue::from_static("trailers"));
    }
    let sent = upstream.send(host.as_deref(), request).await;
    let mut response = sent.map_err(|failure| failed(host.as_deref(), &failure))?;
    if response.status() == StatusCode::SWITCHING_PROTOCOLS {
        let Some(client) = client.filter(|_| message::upgrade(response.headers()).is_some()) else {
            let text = "the server changed to a protocol that it was not asked for";
            return Err(Refused::new(StatusCode::BAD_GATEWAY, text));
        };
        let pair = (client, hyper::upgrade::on(&mut response));
        *session.memory.upgraded.lock().unwrap_or_else(PoisonError::into_inner) = Some(pair);
    }
    Ok(passed(response, bodiless, active, share))
}

/// The host of the request, if it may go to it.
fn admit(session: &Session, request: &Request<Incoming>) -> Result<Option<Said>, Refused> {
    let (address, port) = (session.destination.ip().to_canonical(), session.destination.port());
    let said = host::of(request, session.scheme).map_err(|unclear| {
        let denied = Denied { rule: format!("default ({unclear})") };
        let wanted = Wanted { name: session.name.as_deref(), address, port };
        session.shared.audit.tell(wanted.event(Gate::Http, &denied));
        Refused::new(StatusCode::BAD_REQUEST, unclear.to_string())
    })?;
    let found = said.as_ref().map(|said| said.host.clone());
    if session.name.is_some() && found != session.name {
        let shown = found.unwrap_or_default();
        session.shared.audit.tell(Event::Denied {
            by: Gate::Http,
            host: Some(shown.clone()),
            address: Some(address),
            port: Some(port),
            rule: "default (the host is not the one of the TLS connection)".to_owned(),
        });
        return Err(Refused::new(
            StatusCode::MISDIRECTED_REQUEST,
            format!("{shown:?} is not the host of this connection"),
        ));
    }
    let literal = found.as_deref().and_then(host::literal);
    let name = found.clone().filter(|_| literal.is_none());
    let wanted = Wanted { name: name.as_deref(), address, port };
    session.live.wants(name.as_deref());
    let elsewhere = literal.filter(|literal| *literal != address);
    let judged = match elsewhere {
        Some(_) => Err(Denied::new("default (the host is another address)")),
        None => session.shared.judge(session, wanted),
    };
    if let Err(denied) = judged {
        let host = found.clone().unwrap_or_else(|| address.to_string());
        let wanted = Wanted { name: Some(&host), ..wanted };
        session.shared.audit.tell(wanted.event(Gate::Http, &denied));
        let text = format!("{host:?} is denied by this sandbox's egress policy ({})", denied.rule);
        return Err(Refused::new(StatusCode::FORBIDDEN, text));
    }
    Ok(said)
}

fn failed(host: Option<&str>, failure: &Failure) -> Refused {
    match failure {
        Failure::Vault => Refused::new(StatusCode::SERVICE_UNAVAILABLE, failure.to_string()),
        failure => {
            Refused::new(StatusCode::BAD_GATEWAY, format!("{:?}: {failure}", host.unwrap_or("the server")))
        }
    }
}

/// Gives the request what a binding has for it.
async fn lend(
    session: &Session,
    active: Option<&Active>,
    said: Option<&Said>,
    request: Request<Incoming>,
) -> Result<Request<Body>, Refused> {
    let (mut parts, body) = request.into_parts();
    let as_it_is =
        |parts, body: Incoming| Ok(Request::from_parts(parts, body.map_err(Into::into).boxed_unsync()));
    let (Some(active), Some(Said { host, port })) = (active, said) else { return as_it_is(parts, body) };
    // Without TLS nobody proves anything; what the resolver has seen is the next best.
    let proven = session.leads_to(host, session.destination.ip().to_canonical());
    let (method, path) = (parts.method.clone(), parts.uri.path().to_owned());
    let target = Target {
        scheme: session.scheme,
        host,
        port: session.destination.port(),
        method: method.as_str(),
        path: &path,
    };
    let selection = active.select(target);
    // Servers that stand for several others go by what is written there.
    if !matches!(selection, Selection::None) && port.is_some_and(|port| port != target.port) {
        let withheld = withheld(session, host, "credential withheld: the request is for another port");
        return Err(Refused { status: StatusCode::MISDIRECTED_REQUEST, ..withheld });
    }
    let loan = match selection {
        Selection::One(loan) if proven => loan,
        Selection::None => return as_it_is(parts, body),
        Selection::Ambiguous => return Err(withheld(session, host, "credential binding ambiguous")),
        Selection::Misleading => {
            return Err(withheld(session, host, "credential binding ambiguous for this path"));
        }
        Selection::One(_) => {
            return Err(withheld(session, host, "credential withheld: the name has not led to this address"));
        }
    };
    let mut done = rewrite::head(active, loan, target, &mut parts).map_err(|unfit| match unfit {
        Unfit::Changed => withheld(session, host, "credential binding ambiguous after substitution"),
        Unfit::Overlong => too_long(Overlong),
    })?;
    let body = match done.body {
        Some(kind) if !body.is_end_stream() && body.size_hint().lower() <= MAX_BODY as u64 => {
            let mut held = hold(session, body).await?;
            let replaced = held.whole().then(|| loan.in_body(kind, &held.ahead, MAX_REPLACED));
            if let Some(replaced) = replaced.transpose().map_err(too_long)?.flatten() {
                parts.headers.remove(CONTENT_LENGTH);
                held.ahead = replaced.into();
                done.lent = true;
            }
            held.boxed_unsync()
        }
        _ => body.map_err(Into::into).boxed_unsync(),
    };
    if done.lent {
        session.shared.audit.tell(Event::Injected {
            binding: loan.name.clone(),
            host: host.clone(),
            method: method.as_str().to_owned(),
            revision: active.revision,
        });
    }
    Ok(Request::from_parts(parts, body))
}

fn too_long(overlong: Overlong) -> Refused {
    Refused::new(StatusCode::PAYLOAD_TOO_LARGE, overlong.to_string())
}

fn withheld(session: &Session, host: &str, text: &str) -> Refused {
    session.shared.audit.tell(Event::Denied {
        by: Gate::Vault,
        host: Some(host.to_owned()),
        address: Some(session.destination.ip()),
        port: Some(session.destination.port()),
        rule: text.to_owned(),
    });
    Refused::new(StatusCode::FORBIDDEN, text)
}

/// The body, or its beginning if it is long.
async fn hold(session: &Session, body: Incoming) -> Result<Held, Refused> {
    let place = tokio::time::timeout(ROOM, Arc::clone(&session.shared.held).acquire_owned()).await;
    let Ok(Ok(permit)) = place else {
        return Err(Refused::busy(
            "this sandbox sends too many bodies with placeholders at a time; try again later",
        ));
    };
    match tokio::time::timeout(BODY, Held::read(body, MAX_BODY, permit)).await {
        Ok(Ok(held)) => Ok(held),
        Ok(Err(_)) => Err(Refused::new(StatusCode::BAD_REQUEST, "the request's body ended early")),
        Err(_) => Err(Refused::new(
            StatusCode::REQUEST_TIMEOUT,
            "the request's body, which has to be whole before placeholders in it are replaced, did not arrive in time",
        )),
    }
}

/// The request in the form of the connection that it is sent on.
fn framed(session: &Session, protocol: Protocol, request: Request<Body>) -> Request<Body> {
    let (mut parts, body) = request.into_parts();
    match protocol {
        Protocol::Http2 => {
            parts.version = Version::HTTP_2;
            parts.extensions.clear();
            if parts.uri.authority().is_none()
                && let Some(whole) = named(&parts)
            {
                parts.uri = whole;
            }
            parts.headers.remove(HOST);
        }
        Protocol::Http1 => {
            parts.version = Version::HTTP_11;
            if !parts.headers.contains_key(HOST) {
                let host = parts
                    .uri
                    .authority()
                    .map_or_else(|| session.destination.ip().to_string(), ToString::to_string);
                parts.headers.extend(HeaderValue::try_from(host).map(|host| (HOST, host)));
            }
            let target = parts.uri.path_and_query().map_or("/", |target| target.as_str());
            parts.uri = Uri::try_from(target).unwrap_or_default();
            // The client side assumes that a GET of unknown length is empty.
            if !body.is_end_stream()
                && !parts.headers.contains_key(CONTENT_LENGTH)
                && body.size_hint().exact().is_none()
            {
                parts.headers.insert(TRANSFER_ENCODING, HeaderValue::from_static("chunked"));
            }
        }
    }
    Request::from_parts(parts, body)
}

/// The target with the host that an HTTP/2 client has put into a header.
fn named(parts: &http::request::Parts) -> Option<Uri> {
    let host = parts.headers.get(HOST)?.to_str().ok()?;
    let target = parts.uri.path_and_query().map_or("/", |target| target.as_str());
    Uri::builder().scheme("https").authority(host).path_and_query(target).build().ok()
}

/// The answer as the client gets it.
fn passed(
    response: Response<Incoming>,
    head: bool,
    active: Option<Arc<Active>>,
    share: Share,
) -> Response<Body> {
    let (mut parts, body) = response.into_parts();
    let upgrade =
        message::upgrade(&parts.headers).filter(|_| parts.status == StatusCode::SWITCHING_PROTOCOLS);
    message::strip_response(&mut parts.headers, upgrade);
    if let Some(active) = &active {
        match parts.status {
            StatusCode::SWITCHING_PROTOCOLS => active.redactor.handshake(&mut parts.headers),
            _ => active.redactor.headers(&mut parts.headers),
        }
        let reason = parts.extensions.get::<ReasonPhrase>();
        if reason.is_some_and(|reason| active.redactor.value(reason.as_bytes()).is_some()) {
            parts.extensions.remove::<ReasonPhrase>();
        }
    }
    let bodiless = head || matches!(parts.status, StatusCode::NO_CONTENT | StatusCode::NOT_MODIFIED);
    Response::from_parts(parts, Passed::new(body, bodiless, active, share).boxed_unsync())
}

/// Joins the two sides once the client's answer has been written.
pub(super) async fn relay((client, server): Upgraded) {
    if let Ok((client, server)) = tokio::try_join!(client, server) {
        tunnel::join(TokioIo::new(client), TokioIo::new(server)).await;
    }
}
