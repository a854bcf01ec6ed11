//! Which headers change between the client and the sandbox, in both directions.

use std::net::{IpAddr, SocketAddr};

use axum::extract::ConnectInfo;
use http::header::{FORWARDED, HOST, LOCATION, SERVER};
use http::{Extensions, HeaderMap, HeaderName, HeaderValue};
use sandglass_proxy::HeaderEdits;

use super::access::Grounds;
use super::carrier::Way;
use super::endpoints::without_scheme;
use super::lookup::Target;
use super::route::{Mount, Route};
use super::{ACCESS_RENEW, AGENT_PORT, AGENT_TOKEN, API_KEY, EGRESS_TOKEN, ROUTE_TOKEN, SECURE_ACCESS};
use crate::listener::Scheme;

const FORWARDED_FOR: HeaderName = HeaderName::from_static("x-forwarded-for");
const FORWARDED_HOST: HeaderName = HeaderName::from_static("x-forwarded-host");
const FORWARDED_PROTO: HeaderName = HeaderName::from_static("x-forwarded-proto");
const REAL_IP: HeaderName = HeaderName::from_static("x-real-ip");
const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// The changes to a request. `Authorization` and `Cookie` belong to the application and stay.
pub(super) fn request(
    headers: &HeaderMap,
    observed: &Observed,
    (target, grounds): (&Target, Grounds),
    (application, way): (SocketAddr, Way),
) -> HeaderEdits {
    let mut set = Vec::with_capacity(5);
    let mut put = |name: HeaderName, value: &str| {
        if let Ok(value) = HeaderValue::from_str(value) {
            set.push((name, value));
        }
    };
    put(HOST, &application.to_string());
    put(FORWARDED_PROTO, observed.scheme);
    if let Some(client) = observed.client {
        put(FORWARDED_FOR, &client.to_string());
    }
    let to_agent_itself = application.port() == AGENT_PORT;
    // An agent without a token was made by another server and asks for none.
    let mut keeps_agent_token = to_agent_itself;
    let vouched =
        way == Way::Agent || (to_agent_itself && matches!(grounds, Grounds::ServerKey | Grounds::Visit));
    if vouched && !target.agent_token.is_empty() {
        put(AGENT_TOKEN, &target.agent_token);
        keeps_agent_token = true;
    }
    if let Some(host) = headers.get(HOST) {
        set.push((FORWARDED_HOST, host.clone()));
    }
    let remove = removed(!way.leads_to_enforcer(target, application.port()), !keeps_agent_token);
    HeaderEdits { remove, remove_prefixes: &["x-forwarded-"], set, hide: &OWN_WORDS }
}

/// What no application gets, and what only some get.
fn removed(egress_token: bool, agent_token: bool) -> &'static [HeaderName] {
    // In this order, so that each case is a part of it.
    static ALL: [HeaderName; 8] =
        [EGRESS_TOKEN, API_KEY, SECURE_ACCESS, ROUTE_TOKEN, ACCESS_RENEW, FORWARDED, REAL_IP, AGENT_TOKEN];
    match (egress_token, agent_token) {
        (true, true) => &ALL,
        (true, false) => &ALL[..7],
        (false, true) => &ALL[1..],
        (false, false) => &ALL[1..7],
    }
}

/// How the client reached the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Observed {
    pub(crate) scheme: &'static str,
    pub(crate) client: Option<IpAddr>,
}

impl Observed {
    /// A proxy in front is believed only when it runs on this machine.
    pub(crate) fn of(headers: &HeaderMap, extensions: &Extensions) -> Self {
        let peer = extensions.get::<ConnectInfo<SocketAddr>>().map(|info| info.0.ip().to_canonical());
        let own = if extensions.get() == Some(&Scheme::Https) { "https" } else { "http" };
        if !peer.is_some_and(|peer| peer.is_loopback()) {
            return Self { scheme: own, client: peer };
        }
        let scheme = match headers.get(FORWARDED_PROTO).map(HeaderValue::as_bytes) {
            Some(b"https" | b"wss") => "https",
            Some(b"http" | b"ws") => "http",
            _ => own,
        };
        Self { scheme, client: nearest_untrusted(headers).or(peer) }
    }
}

/// The last address of `X-Forwarded-For` that is not this machine; entries before it may be invented by the client.
fn nearest_untrusted(headers: &HeaderMap) -> Option<IpAddr> {
    let mut addresses = headers.get_all(FORWARDED_FOR).iter().filter_map(|value| value.to_str().ok());
    let all: Vec<IpAddr> = addresses
        .by_ref()
        .flat_map(|list| list.split(','))
        .filter_map(|entry| entry.trim().parse().ok())
        .collect();
    all.iter().rev().find(|address| !address.is_loopback()).or(all.first()).copied()
}

/// What only the server itself says in a response: names of programs and ids.
pub(super) static OWN_WORDS: [HeaderName; 2] = [SERVER, REQUEST_ID];

/// The changes to a response: redirects stay within the sandbox's route.
pub(super) fn response(headers: &mut HeaderMap, route: &Route<'_>, eip: Option<&str>) {
    let Some(location) = headers.get(LOCATION).map(HeaderValue::as_bytes) else { return };
    if location.first() != Some(&b'/') || location.get(1) == Some(&b'/') {
        return;
    }
    let mut rewritten = outer_prefix(route.mount, eip).into_bytes();
    rewritten.extend_from_slice(route.own_path().as_bytes());
    rewritten.extend_from_slice(location);
    if let Ok(value) = HeaderValue::from_bytes(&rewritten) {
        headers.insert(LOCATION, value);
    }
}

/// What stands before the paths of the API as clients see them.
pub(super) fn outer_prefix(mount: Mount, eip: Option<&str>) -> String {
    match eip.map(|eip| without_scheme(eip).split_once('/').map_or("", |(_, path)| path)) {
        Some("") => String::new(),
        Some(path) => format!("/{path}"),
        None => mount.prefix().to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ingress::{Mapped, Reach};

    fn headers(lines: &[(&'static str, &str)]) -> HeaderMap {
        lines.iter().map(|(n, v)| (HeaderName::from_static(n), HeaderValue::from_str(v).unwrap())).collect()
    }

    fn target() -> Target {
        Target::at(Reach::Addressable(IpAddr::from([10, 0, 0, 2])))
    }

    fn agent_token(port: u16, grounds: Grounds, way: Way) -> (bool, Option<String>) {
        let observed = Observed { scheme: "http", client: None };
        let application = SocketAddr::from(([10, 0, 0, 2], port));
        let edits = request(&HeaderMap::new(), &observed, (&target(), grounds), (application, way));
        let set = edits.set.iter().find(|(name, _)| *name == AGENT_TOKEN);
        (edits.remove.contains(&AGENT_TOKEN), set.map(|(_, value)| value.to_str().unwrap().to_owned()))
    }

    #[test]
    fn the_agents_token_goes_to_the_agent_only() {
        use Grounds::{Open, ServerKey, Token};
        let own = Some("agent".to_owned());
        assert_eq!(agent_token(44772, ServerKey, Way::Direct), (false, own.clone()));
        assert_eq!(
            agent_token(44772, Token, Way::Direct),
            (false, None),
            "what the client sent is checked there"
        );
        assert_eq!(agent_token(44772, Open, Way::Direct), (false, None));
        for grounds in [ServerKey, Token, Open] {
            assert_eq!(agent_token(8080, grounds, Way::Direct), (true, None));
            assert_eq!(agent_token(8080, grounds, Way::Agent), (false, own.clone()));
        }
    }

    #[test]
    fn the_enforcers_token_goes_to_the_enforcer_only() {
        let published = |egress| Some(Mapped { agent: 1, http: 2, egress });
        for (port, way, mapped, passes) in [
            (18080, Way::Direct, None, true),
            (18080, Way::Direct, published(Some(3)), true),
            // As other servers publish it.
            (18080, Way::Agent, published(None), true),
            // It was away, and something else listens inside.
            (18080, Way::Agent, None, false),
            (8080, Way::Direct, None, false),
            (44772, Way::Direct, None, false),
            (3000, Way::Agent, published(None), false),
        ] {
            let observed = Observed { scheme: "http", client: None };
            let application = SocketAddr::from(([10, 0, 0, 2], port));
            let target = Target { mapped, ..target() };
            let edits = request(&HeaderMap::new(), &observed, (&target, Grounds::Token), (application, way));
            assert_eq!(!edits.remove.contains(&EGRESS_TOKEN), passes, "{port} {way:?} {mapped:?}");
        }
    }

    #[test]
    fn forwarding_headers_are_the_servers_own() {
        let given =
            headers(&[("host", "api:8080"), ("x-forwarded-for", "6.6.6.6"), ("x-forwarded-proto", "https")]);
        let seen = |peer: Option<[u8; 4]>| {
            let mut extensions = Extensions::new();
            if let Some(peer) = peer {
                extensions.insert(ConnectInfo(SocketAddr::from((peer, 5))));
            }
            Observed::of(&given, &extensions)
        };
        assert_eq!(seen(None), Observed { scheme: "http", client: None });
        assert_eq!(
            seen(Some([8, 8, 8, 8])),
            Observed { scheme: "http", client: Some(IpAddr::from([8, 8, 8, 8])) }
        );
        assert_eq!(
            seen(Some([127, 0, 0, 1])),
            Observed { scheme: "https", client: Some(IpAddr::from([6, 6, 6, 6])) }
        );

        let application = SocketAddr::from(([10, 0, 0, 2], 80));
        let edits = request(
            &given,
            &seen(Some([8, 8, 8, 8])),
            (&target(), Grounds::Token),
            (application, Way::Direct),
        );
        let mut set: Vec<_> = edits.set.iter().map(|(n, v)| (n.as_str(), v.to_str().unwrap())).collect();
        set.sort_unstable();
        assert_eq!(
            set,
            [
                ("host", "10.0.0.2:80"),
                ("x-forwarded-for", "8.8.8.8"),
                ("x-forwarded-host", "api:8080"),
                ("x-forwarded-proto", "http")
            ]
        );
        for name in ["authorization", "cookie", "open-sandbox-client-ip"] {
            assert!(!edits.remove.iter().any(|removed| removed == name), "{name}");
        }
    }

    #[test]
    fn the_nearest_stranger_is_the_client() {
        let cases: &[(&str, Option<[u8; 4]>)] = &[
            ("1.1.1.1", Some([1, 1, 1, 1])),
            ("9.9.9.9, 1.1.1.1, 127.0.0.1", Some([1, 1, 1, 1])),
            ("127.0.0.1", Some([127, 0, 0, 1])),
            ("unknown", None),
            ("", None),
        ];
        for (list, client) in cases {
            assert_eq!(
                nearest_untrusted(&headers(&[("x-forwarded-for", list)])),
                client.map(IpAddr::from),
                "{list}"
            );
        }
    }

    #[test]
    fn redirects_stay_within_the_route() {
        let cases = [
            ("/login?next=%2F", "/v1/sandboxes/a/proxy/80", None, "/v1/sandboxes/a/proxy/80/login?next=%2F"),
            ("/", "/sandboxes/a/proxy/80/x", None, "/sandboxes/a/proxy/80/"),
            ("//other/x", "/v1/sandboxes/a/proxy/80", None, "//other/x"),
            ("http://other/x", "/v1/sandboxes/a/proxy/80", None, "http://other/x"),
            ("relative", "/v1/sandboxes/a/proxy/80", None, "relative"),
            ("", "/v1/sandboxes/a/proxy/80", None, ""),
            ("/x", "/v1/sandboxes/a/proxy/80", Some("https://gw.example/"), "/sandboxes/a/proxy/80/x"),
            ("/x", "/v1/sandboxes/a/proxy/80", Some("gw.example/base/"), "/base/sandboxes/a/proxy/80/x"),
        ];
        for (location, path, eip, expected) in cases {
            let mut given = headers(&[("location", location), ("etag", "x")]);
            response(&mut given, &Route::parse(path).unwrap(), eip);
            assert_eq!(given["location"], expected, "{location} under {path}, {eip:?}");
            assert_eq!(given.len(), 2);
        }
    }
}
