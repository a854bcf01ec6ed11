//! The grammar of the proxy routes, read from the bytes the client sent.
//!
//! Invariant: what follows the port is never decoded. A decoded `%3F` would become a query and a decoded `%2F` another path.

use http::uri::PathAndQuery;

use super::refusal::Refusal;

/// Under which prefix the API was called. Answers that name a URL repeat it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mount {
    Bare,
    V1,
}

impl Mount {
    #[must_use]
    pub fn prefix(self) -> &'static str {
        match self {
            Self::Bare => "",
            Self::V1 => "/v1",
        }
    }

    /// The mount of a path.
    #[must_use]
    pub fn of(path: &str) -> Self {
        if path == "/v1" || path.starts_with("/v1/") { Self::V1 } else { Self::Bare }
    }
}

/// A parsed proxy path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Route<'a> {
    pub(super) mount: Mount,
    pub(super) id: &'a str,
    pub(super) port: u16,
    /// What follows the port, as written: empty or starting with a slash.
    rest: &'a str,
}

impl<'a> Route<'a> {
    pub(super) fn parse(path: &'a str) -> Result<Self, Refusal> {
        let mount = Mount::of(path);
        let (id, rest) = path[mount.prefix().len()..]
            .strip_prefix("/sandboxes/")
            .and_then(|rest| rest.split_once('/'))
            .filter(|(id, _)| !id.is_empty())
            .ok_or(Refusal::NoRoute)?;
        let rest = rest.strip_prefix("proxy/").ok_or(Refusal::NoRoute)?;
        let (port, rest) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
        Ok(Self { mount, id, port: parse_port(port)?, rest })
    }

    /// The request target for the port itself.
    pub(super) fn direct(&self, query: Option<&str>) -> Result<PathAndQuery, Refusal> {
        target(if self.rest.is_empty() { "/" } else { self.rest }, query)
    }

    /// The request target for the agent's own proxy.
    pub(super) fn through_agent(&self, query: Option<&str>) -> Result<PathAndQuery, Refusal> {
        let rest = if self.rest.is_empty() { "/" } else { self.rest };
        target(&format!("/proxy/{}{rest}", self.port), query)
    }

    /// What follows the port, as written.
    pub(super) fn rest(&self) -> &'a str {
        self.rest
    }

    /// The path that leads here, without what follows the port.
    pub(super) fn own_path(&self) -> String {
        format!("/sandboxes/{}/proxy/{}", self.id, self.port)
    }
}

fn parse_port(text: &str) -> Result<u16, Refusal> {
    if text.is_empty() {
        return Err(Refusal::NoRoute);
    }
    let digits = text.strip_prefix('-').unwrap_or(text);
    if digits.is_empty() || !digits.bytes().all(|b| b.is_ascii_digit()) {
        return Err(Refusal::PortNotANumber);
    }
    text.parse::<u16>().ok().filter(|port| *port != 0).ok_or(Refusal::PortOutOfRange)
}

fn target(path: &str, query: Option<&str>) -> Result<PathAndQuery, Refusal> {
    let text = match query {
        Some(query) => format!("{path}?{query}"),
        None => path.to_owned(),
    };
    PathAndQuery::try_from(text).map_err(|_| Refusal::TargetMalformed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_taken_apart_without_decoding() {
        let cases = [
            ("/sandboxes/a/proxy/80", Mount::Bare, "a", 80, "/", "/proxy/80/"),
            ("/v1/sandboxes/a/proxy/80", Mount::V1, "a", 80, "/", "/proxy/80/"),
            ("/v1/sandboxes/a/proxy/80/", Mount::V1, "a", 80, "/", "/proxy/80/"),
            ("/v1/sandboxes/a/proxy/65535//x", Mount::V1, "a", 65535, "//x", "/proxy/65535//x"),
            ("/sandboxes/a%2Fb/proxy/1/c%2Fd", Mount::Bare, "a%2Fb", 1, "/c%2Fd", "/proxy/1/c%2Fd"),
            (
                "/sandboxes/a/proxy/8080/a%3Fc/d%25e/",
                Mount::Bare,
                "a",
                8080,
                "/a%3Fc/d%25e/",
                "/proxy/8080/a%3Fc/d%25e/",
            ),
            ("/sandboxes/a/proxy/8080/../../x", Mount::Bare, "a", 8080, "/../../x", "/proxy/8080/../../x"),
            ("/sandboxes/a/proxy/0080/x", Mount::Bare, "a", 80, "/x", "/proxy/80/x"),
        ];
        for (path, mount, id, port, direct, agent) in cases {
            let route = Route::parse(path).expect(path);
            assert_eq!((route.mount, route.id, route.port), (mount, id, port), "{path}");
            assert_eq!(route.direct(None).unwrap().as_str(), direct, "{path}");
            assert_eq!(route.through_agent(Some("q=%2F&&")).unwrap().as_str(), format!("{agent}?q=%2F&&"));
        }
        let route = Route::parse("/v1/sandboxes/a/proxy/80").unwrap();
        assert_eq!(route.direct(Some("")).unwrap().as_str(), "/?");
        assert_eq!(route.own_path(), "/sandboxes/a/proxy/80");
    }

    #[test]
    fn other_paths_are_refused() {
        let cases = [
            ("/", Refusal::NoRoute),
            ("/v1", Refusal::NoRoute),
            ("/v1x/sandboxes/a/proxy/80", Refusal::NoRoute),
            ("/v1/v1/sandboxes/a/proxy/80", Refusal::NoRoute),
            ("/sandboxes//proxy/80", Refusal::NoRoute),
            ("/sandboxes/a/b/proxy/80", Refusal::NoRoute),
            ("/sandboxes/a/proxy", Refusal::NoRoute),
            ("/sandboxes/a/proxy/", Refusal::NoRoute),
            ("/sandboxes/a/proxy//x", Refusal::NoRoute),
            ("/sandboxes/a/proxy/http/x", Refusal::PortNotANumber),
            ("/sandboxes/a/proxy/80a", Refusal::PortNotANumber),
            ("/sandboxes/a/proxy/%38%30", Refusal::PortNotANumber),
            ("/sandboxes/a/proxy/8080@evil", Refusal::PortNotANumber),
            ("/sandboxes/a/proxy/+80", Refusal::PortNotANumber),
            ("/sandboxes/a/proxy/0", Refusal::PortOutOfRange),
            ("/sandboxes/a/proxy/-1", Refusal::PortOutOfRange),
            ("/sandboxes/a/proxy/65536", Refusal::PortOutOfRange),
            ("/sandboxes/a/proxy/99999999999999999999", Refusal::PortOutOfRange),
        ];
        for (path, refusal) in cases {
            assert_eq!(Route::parse(path), Err(refusal), "{path}");
        }
    }
}
