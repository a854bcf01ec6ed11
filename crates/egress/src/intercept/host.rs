//! The host that a request is for: one, and said once.

use std::net::IpAddr;

use http::header::HOST;
use http::uri::Authority;
use http::{Method, Request, Version};

use crate::vault::Scheme;

/// Why a request is not one that can be judged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum Unclear {
    #[error("the request names more than one host")]
    Conflict,
    #[error("the host of the request is not valid")]
    Invalid,
    #[error("the request is for another scheme than the connection")]
    Scheme,
    #[error("this kind of request is not passed on")]
    Method,
}

/// What a request says it is for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Said {
    /// In lower case, without a trailing dot.
    pub(super) host: String,
    pub(super) port: Option<u16>,
}

/// The host and port; none if an old client named none.
pub(super) fn of<B>(request: &Request<B>, scheme: Scheme) -> Result<Option<Said>, Unclear> {
    if request.method() == Method::CONNECT {
        return Err(Unclear::Method);
    }
    let headers = request.headers();
    if let Some(said) = request.uri().scheme_str() {
        let expected = match scheme {
            Scheme::Https => "https",
            Scheme::Http => "http",
        };
        if !said.eq_ignore_ascii_case(expected) {
            return Err(Unclear::Scheme);
        }
    }
    let mut hosts = headers.get_all(HOST).iter();
    let header = match (hosts.next(), hosts.next()) {
        (Some(_), Some(_)) => return Err(Unclear::Conflict),
        (header, _) => header,
    };
    let header = header.map(|value| value.to_str().map_err(|_| Unclear::Invalid)).transpose()?;
    let header = header.map(parse).transpose()?;
    let target = request.uri().authority().map(normal).transpose()?;
    match (target, header) {
        (Some(target), Some(header)) if target != header => Err(Unclear::Conflict),
        (Some(said), _) | (None, Some(said)) => Ok(Some(said)),
        (None, None) if request.version() <= Version::HTTP_10 => Ok(None),
        (None, None) => Err(Unclear::Invalid),
    }
}

fn parse(text: &str) -> Result<Said, Unclear> {
    let authority: Authority = text.trim().parse().map_err(|_| Unclear::Invalid)?;
    normal(&authority)
}

fn normal(authority: &Authority) -> Result<Said, Unclear> {
    if authority.as_str().contains('@') {
        return Err(Unclear::Invalid);
    }
    let port = authority.port_u16();
    if port.is_none()
        && authority.as_str().ends_with(|c: char| c.is_ascii_digit() || c == ':')
        && authority.host().len() < authority.as_str().len()
    {
        return Err(Unclear::Invalid);
    }
    let host = authority.host();
    if let Some(address) = literal(host) {
        return Ok(Said { host: address.to_string(), port });
    }
    let host = host.strip_suffix('.').unwrap_or(host).to_ascii_lowercase();
    let valid = !host.is_empty()
        && host.len() <= 253
        && host.split('.').all(|label| {
            matches!(label.len(), 1..=63)
                && label.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_'))
        });
    if valid { Ok(Said { host, port }) } else { Err(Unclear::Invalid) }
}

/// The address that a host is, if it is no name.
pub(super) fn literal(host: &str) -> Option<IpAddr> {
    let bare = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
    bare.parse::<IpAddr>().ok().map(|address| address.to_canonical())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(target: &str, hosts: &[&str]) -> Request<()> {
        let mut builder = Request::builder().uri(target);
        for host in hosts {
            builder = builder.header(HOST, *host);
        }
        builder.body(()).unwrap()
    }

    #[test]
    fn one_host_is_found_and_two_are_refused() {
        type Expected = Result<Option<(&'static str, Option<u16>)>, Unclear>;
        type Case = (&'static str, &'static [&'static str], Expected);
        let cases: &[Case] = &[
            ("/", &["Example.COM."], Ok(Some(("example.com", None)))),
            ("/", &["example.com:8080"], Ok(Some(("example.com", Some(8080))))),
            ("/", &["[2001:db8::1]:80"], Ok(Some(("2001:db8::1", Some(80))))),
            ("/", &["[::ffff:192.0.2.1]"], Ok(Some(("192.0.2.1", None)))),
            ("/", &["a_b.example.com"], Ok(Some(("a_b.example.com", None)))),
            ("http://example.com/x", &["example.com"], Ok(Some(("example.com", None)))),
            ("http://example.com/x", &["other.com"], Err(Unclear::Conflict)),
            ("http://example.com/x", &["example.com:81"], Err(Unclear::Conflict)),
            ("https://example.com/x", &["example.com"], Err(Unclear::Scheme)),
            ("/", &["a.com", "a.com"], Err(Unclear::Conflict)),
            ("/", &["a.com, b.com"], Err(Unclear::Invalid)),
            ("/", &["user@a.com"], Err(Unclear::Invalid)),
            ("/", &["a.com:"], Err(Unclear::Invalid)),
            ("/", &["a.com:99999"], Err(Unclear::Invalid)),
            ("/", &["a..com"], Err(Unclear::Invalid)),
            ("/", &[""], Err(Unclear::Invalid)),
            ("/", &["a.com/b"], Err(Unclear::Invalid)),
            ("/", &[], Err(Unclear::Invalid)),
        ];
        for (target, hosts, expected) in cases {
            let found = of(&request(target, hosts), Scheme::Http);
            let expected = expected.map(|said| said.map(|(host, port)| Said { host: host.to_owned(), port }));
            assert_eq!(found, expected, "{target} {hosts:?}");
        }
    }

    #[test]
    fn tunnels_are_refused_and_old_clients_name_no_host() {
        let tunnel = Request::builder().method("CONNECT").uri("a.com:443").body(()).unwrap();
        assert_eq!(of(&tunnel, Scheme::Http), Err(Unclear::Method));
        let old = Request::builder().version(Version::HTTP_10).uri("/").body(()).unwrap();
        assert_eq!(of(&old, Scheme::Http), Ok(None));
    }
}
