//! Which headers change between the client and the sandbox.

use std::net::SocketAddr;

use axum::extract::{ConnectInfo, Request};
use http::header::HOST;
use http::{Extensions, HeaderMap, HeaderName, HeaderValue};
use sandglass_proxy::HeaderEdits;

use super::handler::By;
use crate::ingress::{
    ACCESS_RENEW, AGENT_PORT, AGENT_TOKEN, API_KEY, EGRESS_TOKEN, ROUTE_TOKEN, SECURE_ACCESS, Target, Way,
};
use crate::listener::Scheme;

/// Where a request is to go.
pub(super) const INGRESS_TO: HeaderName = HeaderName::from_static("opensandbox-ingress-to");
/// The same under its old name.
pub(super) const OLD_INGRESS_TO: HeaderName = HeaderName::from_static("open-sandbox-ingress");
const ROUTE_CREDENTIAL: HeaderName = HeaderName::from_static("x-fast-sandbox-route-credential");
const FORWARDED_FOR: HeaderName = HeaderName::from_static("x-forwarded-for");
const FORWARDED_HOST: HeaderName = HeaderName::from_static("x-forwarded-host");
const FORWARDED_PROTO: HeaderName = HeaderName::from_static("x-forwarded-proto");
const REAL_IP: HeaderName = HeaderName::from_static("x-real-ip");
const POWERED_BY: HeaderName = HeaderName::from_static("reverse-proxy-server-powerby");

/// The changes to a request. `Authorization` and `Cookie` belong to the sandbox and stay; the tokens of the agent and the enforcer go to these.
pub(super) fn request(
    request: &Request,
    target: &Target,
    (application, way): (SocketAddr, Way),
    by: By,
) -> HeaderEdits {
    let (headers, extensions) = (request.headers(), request.extensions());
    let mut set = Vec::with_capacity(5);
    let mut put = |name: HeaderName, value: &[u8]| {
        if let Ok(value) = HeaderValue::from_bytes(value) {
            set.push((name, value));
        }
    };
    let host = headers.get(HOST).map(HeaderValue::as_bytes);
    match host {
        // The program has a name of its own, which it compares with the origin of pages and makes addresses from.
        Some(host) if by == By::HostName => put(HOST, host),
        _ => put(HOST, application.to_string().as_bytes()),
    }
    if let Some(chain) = chain(headers, extensions) {
        put(FORWARDED_FOR, &chain);
    }
    if let Some(host) = host.filter(|_| !headers.contains_key(FORWARDED_HOST)) {
        put(FORWARDED_HOST, host);
    }
    if !headers.contains_key(FORWARDED_PROTO) {
        let scheme = if extensions.get() == Some(&Scheme::Https) { "https" } else { "http" };
        put(FORWARDED_PROTO, scheme.as_bytes());
    }
    let mut keeps_agent_token = application.port() == AGENT_PORT;
    if way == Way::Agent && !target.agent_token.is_empty() {
        put(AGENT_TOKEN, target.agent_token.as_bytes());
        keeps_agent_token = true;
    }
    let remove = removed(!way.leads_to_enforcer(target, application.port()), !keeps_agent_token);
    HeaderEdits { remove, set, ..HeaderEdits::default() }
}

/// What no program gets, and what only some get.
fn removed(egress_token: bool, agent_token: bool) -> &'static [HeaderName] {
    // In this order, so that each case is a part of it.
    static ALL: [HeaderName; 9] = [
        EGRESS_TOKEN,
        INGRESS_TO,
        OLD_INGRESS_TO,
        SECURE_ACCESS,
        ACCESS_RENEW,
        ROUTE_CREDENTIAL,
        // The reference passes these on; they open more than this sandbox, or are nobody's business inside.
        API_KEY,
        ROUTE_TOKEN,
        AGENT_TOKEN,
    ];
    match (egress_token, agent_token) {
        (true, true) => &ALL,
        (true, false) => &ALL[..8],
        (false, true) => &ALL[1..],
        (false, false) => &ALL[1..8],
    }
}

/// Who has forwarded the request so far, and then who sent it here.
fn chain(headers: &HeaderMap, extensions: &Extensions) -> Option<Vec<u8>> {
    let peer = extensions.get::<ConnectInfo<SocketAddr>>()?.0.ip().to_canonical().to_string();
    let mut chain: Vec<&[u8]> = headers.get_all(FORWARDED_FOR).iter().map(HeaderValue::as_bytes).collect();
    chain.push(peer.as_bytes());
    Some(chain.join(&b", "[..]))
}

/// Whom the access log names: the first that has forwarded the request, else the peer.
pub(super) fn client(headers: &HeaderMap, extensions: &Extensions) -> String {
    let text = |name: HeaderName| headers.get(name)?.to_str().ok()?.split(',').next().map(str::trim);
    let peer =
        || extensions.get::<ConnectInfo<SocketAddr>>().map(|info| info.0.ip().to_canonical().to_string());
    let named = [FORWARDED_FOR, REAL_IP].into_iter().find_map(|name| text(name).filter(|t| !t.is_empty()));
    named.map(str::to_owned).or_else(peer).unwrap_or_default()
}

/// What the gateway adds to an answer.
pub(super) fn response(headers: &mut HeaderMap) {
    headers.append(POWERED_BY, HeaderValue::from_static("OpenSandbox-ingress"));
}
