//! What the head of an HTTP/1 request says about where the request ends, read strictly.
//!
//! The parser behind this is lenient where it can be; two lenient programs in a row are how requests are smuggled. Line ends have been
//! checked before (see [`super::inspector`]).

use http::uri::Authority;

use super::malformed::Malformed;

/// Longer targets than this are refused; the parser's own limit is higher.
pub(super) const MAX_TARGET: usize = 32 << 10;
/// More digits than this do not fit the number.
const MAX_LENGTH_DIGITS: usize = 18;

/// What follows a head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Body {
    Sized(u64),
    Chunked,
}

/// How to go on after a head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Framing {
    pub(super) body: Body,
    /// What follows the request may not be HTTP, depending on the answer.
    pub(super) upgrade: bool,
}

/// Reads a whole head, its empty line included.
pub(super) fn read(head: &[u8], max_fields: usize) -> Result<Framing, Malformed> {
    let mut lines = head.split(|b| *b == b'\n').map(|line| line.strip_suffix(b"\r").unwrap_or(line));
    let request = RequestLine::parse(lines.next().unwrap_or_default())?;
    let mut seen = Seen::default();
    for (count, line) in lines.take_while(|line| !line.is_empty()).enumerate() {
        if count >= max_fields {
            return Err(Malformed::HeadTooLarge);
        }
        let (name, value) = field(line)?;
        seen.note(name, value, request.minor)?;
    }
    seen.check_host(&request)?;
    seen.framing()
}

struct RequestLine<'a> {
    target: &'a [u8],
    /// HTTP/1.1 or HTTP/1.0.
    minor: u8,
}

impl<'a> RequestLine<'a> {
    fn parse(line: &'a [u8]) -> Result<Self, Malformed> {
        let mut words = line.split(|b| *b == b' ');
        let (Some(method), Some(target), Some(version), None) =
            (words.next(), words.next(), words.next(), words.next())
        else {
            return Err(Malformed::RequestLine);
        };
        let minor = match version {
            b"HTTP/1.1" => 1,
            b"HTTP/1.0" => 0,
            other if other.starts_with(b"HTTP/") => return Err(Malformed::Version),
            _ => return Err(Malformed::RequestLine),
        };
        // No registered method is longer than 17 letters.
        let named = !method.is_empty() && method.len() <= 32 && method.iter().all(|b| is_token(*b));
        if !named || target.is_empty() || !target.iter().all(|b| b.is_ascii_graphic()) {
            return Err(Malformed::RequestLine);
        }
        if target.len() > MAX_TARGET {
            return Err(Malformed::TargetTooLong);
        }
        match target[0] {
            _ if method == b"CONNECT" => Err(Malformed::Connect),
            b'/' => Ok(Self { target, minor }),
            b'*' if target.len() == 1 && method == b"OPTIONS" => Ok(Self { target, minor }),
            _ if absolute(target).is_some() => Ok(Self { target, minor }),
            _ => Err(Malformed::RequestLine),
        }
    }
}

/// The authority of a target in the absolute form.
fn absolute(target: &[u8]) -> Option<&[u8]> {
    let rest = [&b"http://"[..], b"https://"].into_iter().find_map(|scheme| {
        let (start, rest) = target.split_at_checked(scheme.len())?;
        start.eq_ignore_ascii_case(scheme).then_some(rest)
    })?;
    let end = rest.iter().position(|b| matches!(b, b'/' | b'?' | b'#')).unwrap_or(rest.len());
    Some(&rest[..end])
}

fn field(line: &[u8]) -> Result<(&[u8], &[u8]), Malformed> {
    let colon = line.iter().position(|b| *b == b':').ok_or(Malformed::Field)?;
    let (name, value) = (&line[..colon], line[colon + 1..].trim_ascii());
    // A folded line starts with a space, which no name contains; nor is there one before the colon.
    let readable = |b: &u8| *b == b'\t' || (*b >= b' ' && *b != 0x7f);
    if name.is_empty() || !name.iter().all(|b| is_token(*b)) || !value.iter().all(readable) {
        return Err(Malformed::Field);
    }
    Ok((name, value))
}

pub(super) fn is_token(b: u8) -> bool {
    b.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&b)
}

/// What was seen so far of the fields that matter here.
#[derive(Default)]
struct Seen<'a> {
    host: Option<&'a [u8]>,
    length: Option<u64>,
    chunked: bool,
    upgrade: bool,
}

impl<'a> Seen<'a> {
    fn note(&mut self, name: &[u8], value: &'a [u8], minor: u8) -> Result<(), Malformed> {
        if name.eq_ignore_ascii_case(b"host") {
            if self.host.replace(value).is_some() {
                return Err(Malformed::Host);
            }
        } else if name.eq_ignore_ascii_case(b"content-length") {
            let length = number(value).ok_or(Malformed::ContentLength)?;
            if self.length.replace(length).is_some_and(|before| before != length) {
                return Err(Malformed::ContentLength);
            }
        } else if name.eq_ignore_ascii_case(b"transfer-encoding") {
            if minor == 0 || std::mem::replace(&mut self.chunked, true) {
                return Err(Malformed::TransferEncoding);
            }
            coding(value)?;
        } else if name.eq_ignore_ascii_case(b"upgrade") {
            self.upgrade = minor == 1;
        }
        Ok(())
    }

    fn check_host(&self, request: &RequestLine<'_>) -> Result<(), Malformed> {
        if (self.host.is_none() && request.minor == 1) || !self.host.is_none_or(is_host) {
            return Err(Malformed::Host);
        }
        let Some(authority) = absolute(request.target) else { return Ok(()) };
        if self.host.is_some_and(|host| same_host(host, authority))
            || (self.host.is_none() && is_host(authority))
        {
            return Ok(());
        }
        Err(Malformed::TargetHost)
    }

    fn framing(&self) -> Result<Framing, Malformed> {
        let body = match (self.chunked, self.length) {
            (true, Some(_)) => return Err(Malformed::TwoLengths),
            (true, None) => Body::Chunked,
            (false, length) => Body::Sized(length.unwrap_or(0)),
        };
        Ok(Framing { body, upgrade: self.upgrade })
    }
}

fn number(digits: &[u8]) -> Option<u64> {
    let plain =
        !digits.is_empty() && digits.len() <= MAX_LENGTH_DIGITS && digits.iter().all(u8::is_ascii_digit);
    std::str::from_utf8(digits).ok().filter(|_| plain)?.parse().ok()
}

fn coding(value: &[u8]) -> Result<(), Malformed> {
    let mut codings = value.rsplit(|b| *b == b',').map(<[u8]>::trim_ascii);
    let last = codings.next().unwrap_or_default();
    let others = codings.map(|coding| coding.eq_ignore_ascii_case(b"chunked")).collect::<Vec<_>>();
    match (last.eq_ignore_ascii_case(b"chunked"), others.as_slice()) {
        (true, []) => Ok(()),
        (true, others) if !others.contains(&true) => Err(Malformed::TransferCoding),
        _ => Err(Malformed::TransferEncoding),
    }
}

/// Whether this is a name or an address with an optional port: nothing that could be read as a list, a path or credentials.
pub(super) fn is_host(host: &[u8]) -> bool {
    let Ok(text) = std::str::from_utf8(host) else { return false };
    // Old clients that do not know the name send it empty.
    if text.is_empty() || is_plain_name(host) {
        return true;
    }
    let Ok(authority) = text.parse::<Authority>() else { return false };
    let name = authority.host();
    let Some(port) = text.strip_prefix(name) else { return false };
    let numbered = port.is_empty() || authority.port_u16().is_some_and(|n| port == format!(":{n}"));
    !name.is_empty()
        && numbered
        && name.bytes().all(|b| b.is_ascii_alphanumeric() || b"-._~[]:%*".contains(&b))
}

/// Most names, without the work of taking them apart.
fn is_plain_name(host: &[u8]) -> bool {
    let (name, port) = match host.iter().position(|b| *b == b':') {
        Some(colon) => (&host[..colon], &host[colon + 1..]),
        None => (host, &b"1"[..]),
    };
    !name.is_empty()
        && name.iter().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'.'))
        && matches!(port, [b'1'..=b'9', rest @ ..] if rest.len() < 4 && rest.iter().all(u8::is_ascii_digit))
}

/// Whether both name the same host, the default port of plain HTTP being the same as none.
pub(super) fn same_host(one: &[u8], other: &[u8]) -> bool {
    let bare = |host: &'_ [u8]| {
        host.strip_suffix(b":80").or(host.strip_suffix(b":443")).unwrap_or(host).to_ascii_lowercase()
    };
    bare(one) == bare(other)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_are_names_or_addresses_with_a_port() {
        for host in [
            "a",
            "a.example:8080",
            "10.0.0.1:1",
            "[::1]",
            "[fe80::1%25eth0]:80",
            "xn--caf-dma.example",
            "a_b",
            "",
        ] {
            assert!(is_host(host.as_bytes()), "{host}");
        }
        for host in [
            "a b", "a,b", "a/b", "a?b", "a#b", "user@a", "a:b", "a:99999", ":80", "[::1", "a\\b", "\"",
            "<a>", "\u{e9}",
        ] {
            assert!(!is_host(host.as_bytes()), "{host}");
        }
        for (one, other, same) in [
            ("a", "A", true),
            ("a:80", "a", true),
            ("a:443", "A", true),
            ("a:8080", "a", false),
            ("a", "b", false),
            ("a.", "a", false),
        ] {
            assert_eq!(same_host(one.as_bytes(), other.as_bytes()), same, "{one} {other}");
        }
    }

    #[test]
    fn what_follows_a_head_is_what_it_says() {
        let read = |lines: &str| read(format!("POST / HTTP/1.1\r\nHost: a\r\n{lines}\r\n").as_bytes(), 4);
        let plain = |body| Ok(Framing { body, upgrade: false });
        assert_eq!(read(""), plain(Body::Sized(0)));
        assert_eq!(read("content-LENGTH:\t18 \r\n"), plain(Body::Sized(18)));
        assert_eq!(read("Transfer-Encoding: CHUNKED\r\n"), plain(Body::Chunked));
        assert_eq!(read("Upgrade: x\r\n"), Ok(Framing { body: Body::Sized(0), upgrade: true }));
        assert_eq!(read("A: b\r\nA: b\r\nA: b\r\nA: b\r\n"), Err(Malformed::HeadTooLarge));
    }
}
