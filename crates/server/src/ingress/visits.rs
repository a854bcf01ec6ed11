//! Visits by browser: a link opens a port of a sandbox once, is exchanged for a cookie, and the cookie opens it from then on.
//!
//! Owns how link and cookie are written in requests and answers; what they say and prove is `sandglass_ingress::Visit`'s. Invariant: the
//! program behind the port sees neither of the two.

use axum::body::Body;
use axum::response::Response;
use http::header::{CACHE_CONTROL, COOKIE, LOCATION, REFERRER_POLICY, SET_COOKIE};
use http::{HeaderMap, HeaderValue, Method, StatusCode};
use sandglass_ingress::{Moment, Pass, Visit, Visited};

use super::AGENT_PORT;
use super::edits::{Observed, outer_prefix};
use super::lookup::Target;
use super::route::Route;

/// The parameter of a link and the cookie.
const NAME: &str = "sandglass-access";
/// How long a link is good, in seconds.
const LINK_LASTS: u64 = 300;
/// How long a cookie is good, in seconds: a long day at work.
pub(super) const COOKIE_LASTS: u64 = 12 * 3600;

/// What opens a port of a sandbox to a browser for a short time.
#[derive(Clone, PartialEq, Eq)]
pub struct Invitation {
    /// To be appended to the path, begins with a slash.
    pub path_and_query: String,
    /// Unix seconds.
    pub expires: u64,
}

/// Opens something, so it stays out of logs.
impl std::fmt::Debug for Invitation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Invitation").field("expires", &self.expires).finish_non_exhaustive()
    }
}

/// Invites to a port; to the agent's, to its terminals alone. `None` for a sandbox that has no token of its own.
#[must_use]
pub fn invite(target: &Target, id: &str, port: u16, now: u64) -> Option<Invitation> {
    let below = below(port);
    let expires = now.saturating_add(LINK_LASTS);
    let visited = Visited { sandbox: id, port, below };
    let link = Visit::mint(&target.route_token, Pass::Link, visited, expires)?;
    let slash = if below.is_empty() { "/" } else { below };
    Some(Invitation { path_and_query: format!("{slash}?{NAME}={link}"), expires })
}

/// Of the agent, visitors see nothing but terminals.
fn below(port: u16) -> &'static str {
    if port == AGENT_PORT { "/pty" } else { "" }
}

/// What a request brings along.
pub(super) struct Brought<'r> {
    route: &'r Route<'r>,
    link: Option<&'r str>,
    headers: &'r HeaderMap,
}

/// On what ground a visitor is let in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Shown {
    Link,
    Cookie,
}

impl<'r> Brought<'r> {
    pub(super) fn of(route: &'r Route<'r>, query: Option<&'r str>, headers: &'r HeaderMap) -> Self {
        Self { route, link: query.and_then(|query| parameters(query).find_map(link_of)), headers }
    }

    pub(super) fn has_link(&self) -> bool {
        self.link.is_some()
    }

    /// The link decides before a cookie: it may be for a longer stay.
    pub(super) fn opens(&self, target: &Target) -> Option<Shown> {
        let below = below(self.route.port);
        let rest = self.route.rest();
        if !rest.strip_prefix(below).is_some_and(|rest| rest.is_empty() || rest.starts_with('/')) {
            return None;
        }
        let visited = Visited { sandbox: self.route.id, port: self.route.port, below };
        let opens = |text: &str, pass| {
            let now = Moment::now().wall;
            Visit::parse(text).is_some_and(|visit| visit.opens(&target.route_token, pass, visited, now))
        };
        if self.link.is_some_and(|link| opens(link, Pass::Link)) {
            return Some(Shown::Link);
        }
        cookies(self.headers)
            .filter_map(|(name, value)| (name == NAME).then_some(value))
            .any(|value| opens(value, Pass::Cookie))
            .then_some(Shown::Cookie)
    }
}

/// What a browser that navigates to a link is answered: the cookie, and the same address without the link.
pub(super) fn exchanged(
    route: &Route<'_>,
    query: Option<&str>,
    target: &Target,
    observed: &Observed,
    eip: Option<&str>,
) -> Option<Response> {
    let visited = Visited { sandbox: route.id, port: route.port, below: below(route.port) };
    let expires = Moment::now().wall.saturating_add(COOKIE_LASTS);
    let visit = Visit::mint(&target.route_token, Pass::Cookie, visited, expires)?;
    let secure = if observed.scheme == "https" { "; Secure" } else { "" };
    let own = format!("{}{}", outer_prefix(route.mount, eip), route.own_path());
    let path = format!("{own}{}", visited.below);
    let cookie =
        format!("{NAME}={visit}; Path={path}; Max-Age={COOKIE_LASTS}; HttpOnly; SameSite=Lax{secure}");
    let rest = if route.rest().is_empty() { "/" } else { route.rest() };
    let location = match query.and_then(without_link) {
        Some(query) => format!("{own}{rest}?{query}"),
        None => format!("{own}{rest}"),
    };
    let mut response = Response::new(Body::empty());
    *response.status_mut() = StatusCode::SEE_OTHER;
    let headers = response.headers_mut();
    headers.insert(SET_COOKIE, HeaderValue::try_from(cookie).ok()?);
    headers.insert(LOCATION, HeaderValue::try_from(location).ok()?);
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    headers.insert(REFERRER_POLICY, HeaderValue::from_static("no-referrer"));
    Some(response)
}

/// Whether a browser navigates, and so follows to where it is sent.
pub(super) fn navigates(method: &Method, upgrade: bool) -> bool {
    !upgrade && matches!(*method, Method::GET | Method::HEAD)
}

/// A query without links; `None` when nothing is left of it.
pub(super) fn without_link(query: &str) -> Option<String> {
    let left: Vec<&str> = parameters(query).filter(|parameter| link_of(parameter).is_none()).collect();
    (!left.is_empty() && left != [""]).then(|| left.join("&"))
}

/// Takes cookies of visits away from what the program behind the port is shown.
pub(super) fn hide_cookies(headers: &mut HeaderMap) {
    if !cookies(headers).any(|(name, _)| name == NAME) {
        return;
    }
    let left: Vec<String> = headers
        .get_all(COOKIE)
        .iter()
        .filter_map(|line| line.to_str().ok())
        .filter_map(|line| {
            let others = line.split(';').map(str::trim).filter(|cookie| split(cookie).0 != NAME);
            let others: Vec<&str> = others.filter(|cookie| !cookie.is_empty()).collect();
            (!others.is_empty()).then(|| others.join("; "))
        })
        .collect();
    headers.remove(COOKIE);
    for line in left {
        if let Ok(line) = HeaderValue::try_from(line) {
            headers.append(COOKIE, line);
        }
    }
}

fn parameters(query: &str) -> impl Iterator<Item = &str> {
    query.split('&')
}

fn link_of(parameter: &str) -> Option<&str> {
    parameter.strip_prefix(NAME)?.strip_prefix('=')
}

fn cookies(headers: &HeaderMap) -> impl Iterator<Item = (&str, &str)> {
    let lines = headers.get_all(COOKIE).iter().filter_map(|line| line.to_str().ok());
    lines.flat_map(|line| line.split(';')).map(|cookie| split(cookie.trim()))
}

fn split(cookie: &str) -> (&str, &str) {
    cookie.split_once('=').unwrap_or((cookie, ""))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_link_leaves_a_query() {
        for (query, left) in [
            ("sandglass-access=x.y", None),
            ("folder=/a&sandglass-access=x.y", Some("folder=/a")),
            ("sandglass-access=x.y&q=%2F&&z", Some("q=%2F&&z")),
            ("sandglass-accessible=1", Some("sandglass-accessible=1")),
        ] {
            assert_eq!(without_link(query).as_deref(), left, "{query}");
        }
    }

    #[test]
    fn only_the_own_cookie_leaves_the_headers() {
        let hidden = |lines: &[&'static str]| {
            let mut headers = HeaderMap::new();
            for line in lines {
                headers.append(COOKIE, HeaderValue::from_static(line));
            }
            hide_cookies(&mut headers);
            headers.get_all(COOKIE).iter().map(|v| v.to_str().unwrap().to_owned()).collect::<Vec<_>>()
        };
        assert_eq!(hidden(&["a=1;b=2"]), ["a=1;b=2"], "what needs no change is not touched");
        assert_eq!(hidden(&["a=1; sandglass-access=x.y; b=2"]), ["a=1; b=2"]);
        assert_eq!(hidden(&["sandglass-access=x.y", "b=\"2=3\""]), ["b=\"2=3\""]);
        assert!(hidden(&["sandglass-access=x.y;sandglass-access=z"]).is_empty());
    }
}
