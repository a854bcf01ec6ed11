//! Shapes of single values that more than one section uses: addresses, URLs, names.

use std::net::{IpAddr, Ipv4Addr};

use http::Uri;

use super::kinds::{Parsed, TableOf, Text};
use super::values::{Endpoint, Ipv4Subnet, Quantity, SubnetChoice, without_userinfo};

/// `http://host…` or `https://host…`.
fn http_uri(text: &str) -> Option<Uri> {
    let uri: Uri = text.trim().parse().ok()?;
    let web = matches!(uri.scheme_str(), Some("http" | "https"));
    let authority = uri.authority()?;
    let host_port = authority.as_str().rsplit_once('@').map_or(authority.as_str(), |(_, rest)| rest);
    let port = match host_port.rsplit_once(']') {
        Some((_, rest)) => rest.strip_prefix(':'),
        None => host_port.rsplit_once(':').map(|(_, port)| port),
    };
    let port_fits = port.is_none_or(|port| port.parse::<u16>().is_ok_and(|port| port > 0));
    (web && !authority.host().is_empty() && port_fits).then_some(uri)
}

fn is_http_url(text: &str) -> bool {
    http_uri(text).is_some()
}

/// An URL that is nothing but scheme, host and port.
pub(super) fn is_bare_proxy_url(text: &str) -> bool {
    let bare = |uri: &Uri| {
        let authority = uri.authority().map_or("", |authority| authority.as_str());
        !authority.contains('@') && matches!(uri.path(), "" | "/")
    };
    !text.contains(['?', '#']) && http_uri(text).as_ref().is_some_and(bare)
}

/// `host` or `host:port`, no scheme, no path.
pub(super) fn is_host_port(text: &str) -> bool {
    let (host, port) = match text.rsplit_once(':') {
        Some((host, port)) if !host.ends_with(':') && (!host.contains(':') || host.ends_with(']')) => {
            (host, Some(port))
        }
        _ => (text, None),
    };
    let address = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
    port.is_none_or(|port| port.parse::<u16>().is_ok_and(|port| port > 0))
        && (is_hostname(host) || address.parse::<IpAddr>().is_ok())
}

/// An address to bind: `0.0.0.0:28888`, `[::]:28888`, `localhost:28888`.
pub(super) fn listen_address() -> Text {
    Text::that("an address and a port (`\"0.0.0.0:28888\"`)", |text| {
        let port = text.rsplit_once(':').is_some_and(|(_, port)| port.parse::<u16>().is_ok());
        port && is_host_port(text)
    })
}

/// Dotted labels of letters, digits and hyphens that do not begin with a hyphen.
pub(super) fn is_hostname(text: &str) -> bool {
    let label = |label: &str| {
        (1..=63).contains(&label.len())
            && !label.starts_with('-')
            && label.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-')
    };
    text.len() <= 253 && text.split('.').all(label)
}

/// `*.example.com`, at least two labels after the star.
pub(super) fn is_wildcard_domain(text: &str) -> bool {
    text.strip_prefix("*.").is_some_and(|rest| rest.contains('.') && is_hostname(rest))
}

/// A DNS-1123 subdomain: the name of a Kubernetes object.
pub(super) fn is_subdomain(text: &str) -> bool {
    is_hostname(text)
        && text.split('.').all(|label| !label.ends_with('-'))
        && !text.bytes().any(|b| b.is_ascii_uppercase())
}

/// A path on a machine that may be another one, so it is never looked at.
pub(super) fn is_remote_absolute_path(text: &str) -> bool {
    let text = text.trim();
    text.starts_with('/') && !text.contains([':', '\0'])
}

/// `src:dst` or `src:dst:mode`, `dst` absolute.
pub(super) fn is_bind(text: &str) -> bool {
    let parts: Vec<&str> = text.split(':').collect();
    (2..=3).contains(&parts.len()) && parts.iter().all(|part| !part.is_empty()) && parts[1].starts_with('/')
}

pub(super) fn is_variable_name(text: &str) -> bool {
    !text.is_empty() && !text.contains(['=', '\0'])
}

/// `cpu`, `memory`, `ephemeral-storage`, `hugepages-*`, or a name qualified by a domain.
fn is_resource_name(text: &str) -> bool {
    let name = |text: &str| {
        let edge = |b: u8| b.is_ascii_alphanumeric();
        let inner = |b: u8| edge(b) || matches!(b, b'-' | b'_' | b'.');
        (1..=63).contains(&text.len())
            && text.bytes().all(inner)
            && text.bytes().next().is_some_and(edge)
            && text.bytes().last().is_some_and(edge)
    };
    match text.split_once('/') {
        Some((domain, rest)) => is_subdomain(domain) && name(rest),
        None => {
            matches!(text, "cpu" | "memory" | "ephemeral-storage")
                || (text.starts_with("hugepages-") && name(text))
        }
    }
}

pub(super) fn quantity() -> Parsed<Quantity> {
    Parsed {
        expects: "a Kubernetes quantity of at least 0 (`\"250m\"`, `\"1Gi\"`)",
        parse: Quantity::parse,
        print: |quantity| quantity.as_str().to_owned(),
    }
}

pub(super) fn resources() -> TableOf<Parsed<Quantity>> {
    TableOf { names: is_resource_name, values: quantity() }
}

/// An http(s) URL that may carry credentials.
pub(super) fn endpoint() -> Parsed<Endpoint> {
    Parsed {
        expects: "an http(s) URL with a host",
        parse: |text| is_http_url(text).then(|| Endpoint::new(text)),
        print: |endpoint| without_userinfo(endpoint.expose()),
    }
}

pub(super) fn ip_address() -> Parsed<IpAddr> {
    Parsed { expects: "an IP address", parse: |text| text.parse().ok(), print: IpAddr::to_string }
}

/// Blank is every interface, as in the reference.
pub(super) fn publish_address() -> Parsed<Ipv4Addr> {
    Parsed {
        expects: "an IPv4 address",
        parse: |text| if text.is_empty() { Some(Ipv4Addr::UNSPECIFIED) } else { text.parse().ok() },
        print: Ipv4Addr::to_string,
    }
}

pub(super) fn subnet() -> Parsed<SubnetChoice> {
    Parsed {
        expects: "\"auto\" or an IPv4 network from /16 to /24 (`\"10.88.0.0/16\"`)",
        parse: |text| {
            if text.eq_ignore_ascii_case("auto") {
                return Some(SubnetChoice::Auto);
            }
            Ipv4Subnet::parse(text).filter(|net| (16..=24).contains(&net.prefix())).map(SubnetChoice::Fixed)
        },
        print: |choice| match choice {
            SubnetChoice::Auto => "auto".to_owned(),
            SubnetChoice::Fixed(subnet) => subnet.to_string(),
        },
    }
}

pub(super) fn key_letter() -> Parsed<char> {
    Parsed { expects: "one of 0-9a-z", parse: super::kinds::key_id, print: char::to_string }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_and_hosts_are_told_apart() {
        for good in ["http://proxy.example.com:3128", "https://[::1]:8080/", "http://10.0.0.1"] {
            assert!(is_bare_proxy_url(good), "{good}");
        }
        for bad in [
            "proxy:3128",
            "ftp://proxy",
            "http://u:p@proxy",
            "http://proxy/x",
            "http://proxy?x",
            "http://proxy#x",
            "http://proxy:0",
            "http://proxy:99999",
            "http://",
            "http://a b",
        ] {
            assert!(!is_bare_proxy_url(bad), "{bad}");
        }
        for good in ["localhost:5000", "registry.example.com", "10.0.0.1:5000", "[::1]:5000", "::1"] {
            assert!(is_host_port(good), "{good}");
        }
        for bad in ["", "http://x", "host/path", "host:", "host:0", "host:x", "-host", "a b"] {
            assert!(!is_host_port(bad), "{bad}");
        }
        assert!(is_wildcard_domain("*.example.com"));
        for bad in ["*.com", "example.com", "*.*.example.com", "x.*.com"] {
            assert!(!is_wildcard_domain(bad), "{bad}");
        }
        assert!(is_subdomain("corp-proxy-ca") && !is_subdomain("Corp") && !is_subdomain("a-"));
    }

    #[test]
    fn binds_and_resource_names() {
        assert!(is_bind("/a:/b") && is_bind("volume:/b:ro"));
        assert!(!is_bind("/a") && !is_bind("/a:b") && !is_bind("/a:/b:ro:x") && !is_bind(":/b"));
        assert!(
            is_resource_name("cpu")
                && is_resource_name("nvidia.com/gpu")
                && is_resource_name("hugepages-2Mi")
        );
        assert!(!is_resource_name("gpu") && !is_resource_name("") && !is_resource_name("a/b/c"));
    }
}
