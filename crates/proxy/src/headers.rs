//! Header rules as data: which headers belong to one hop, and the edits a caller asks for.

use http::header::{
    CONNECTION, CONTENT_LENGTH, EXPECT, HeaderMap, HeaderName, HeaderValue, PROXY_AUTHENTICATE,
    PROXY_AUTHORIZATION, TE, TRAILER, TRANSFER_ENCODING, UPGRADE,
};

/// Headers that describe one connection and never travel further.
const HOP_BY_HOP: [HeaderName; 9] = [
    CONNECTION,
    HeaderName::from_static("keep-alive"),
    HeaderName::from_static("proxy-connection"),
    PROXY_AUTHENTICATE,
    PROXY_AUTHORIZATION,
    TE,
    TRAILER,
    TRANSFER_ENCODING,
    UPGRADE,
];

/// What a caller changes in the headers of a request: first the removals, then the new values.
#[derive(Clone, Debug, Default)]
pub struct HeaderEdits {
    pub remove: Vec<HeaderName>,
    /// Every header whose lower-case name starts with one of these goes.
    pub remove_prefixes: &'static [&'static str],
    /// Each replaces all values of its name.
    pub set: Vec<(HeaderName, HeaderValue)>,
}

impl HeaderEdits {
    pub(crate) fn apply(self, headers: &mut HeaderMap) {
        for name in &self.remove {
            headers.remove(name);
        }
        if !self.remove_prefixes.is_empty() {
            let matches =
                |name: &&HeaderName| self.remove_prefixes.iter().any(|p| name.as_str().starts_with(p));
            for name in headers.keys().filter(matches).cloned().collect::<Vec<_>>() {
                headers.remove(name);
            }
        }
        for (name, value) in self.set {
            headers.insert(name, value);
        }
    }
}

/// Removes the fixed hop-by-hop headers and those that `Connection` names.
pub(crate) fn strip_hop_by_hop(headers: &mut HeaderMap) {
    if headers.contains_key(CONNECTION) {
        for name in named_by_connection(headers) {
            headers.remove(name);
        }
    }
    for name in &HOP_BY_HOP {
        headers.remove(name);
    }
}

fn named_by_connection(headers: &HeaderMap) -> Vec<HeaderName> {
    headers
        .get_all(CONNECTION)
        .iter()
        .flat_map(|value| value.as_bytes().split(|b| *b == b','))
        .filter_map(|name| HeaderName::from_bytes(name.trim_ascii()).ok())
        .collect()
}

/// Whether `Connection` names this token.
pub(crate) fn connection_names(headers: &HeaderMap, token: &str) -> bool {
    headers
        .get_all(CONNECTION)
        .iter()
        .flat_map(|value| value.as_bytes().split(|b| *b == b','))
        .any(|name| name.trim_ascii().eq_ignore_ascii_case(token.as_bytes()))
}

/// What a request loses on every hop. `Expect` is among it: this side has already told the client to continue.
pub(crate) fn clean_request(headers: &mut HeaderMap, edits: HeaderEdits) {
    strip_hop_by_hop(headers);
    headers.remove(EXPECT);
    edits.apply(headers);
}

/// States how the body is delimited. Explicitly, because the client side assumes that a GET of unknown length is empty.
pub(crate) fn frame_request(headers: &mut HeaderMap, has_body: bool) {
    if has_body && !headers.contains_key(CONTENT_LENGTH) {
        headers.insert(TRANSFER_ENCODING, HeaderValue::from_static("chunked"));
    }
}

/// What a response loses on every hop. A length beside a transfer coding was never the body's length, so that it must
/// not become it on the next connection.
pub(crate) fn clean_response(headers: &mut HeaderMap) {
    if headers.contains_key(TRANSFER_ENCODING) {
        headers.remove(CONTENT_LENGTH);
    } else if headers.get_all(CONTENT_LENGTH).iter().nth(1).is_some()
        && let Some(first) = headers.get(CONTENT_LENGTH).cloned()
    {
        // The parser has checked that all of them agree.
        headers.insert(CONTENT_LENGTH, first);
    }
    strip_hop_by_hop(headers);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn map(lines: &[(&str, &str)]) -> HeaderMap {
        lines
            .iter()
            .map(|(n, v)| (n.parse::<HeaderName>().unwrap(), HeaderValue::from_str(v).unwrap()))
            .collect()
    }

    fn names(headers: &HeaderMap) -> Vec<String> {
        let mut names: Vec<_> = headers.keys().map(|n| n.as_str().to_owned()).collect();
        names.sort();
        names
    }

    #[test]
    fn hop_by_hop_headers_and_those_named_by_connection_go() {
        type Lines = &'static [(&'static str, &'static str)];
        let cases: &[(Lines, &[&str])] = &[
            (&[("connection", "close"), ("a", "1")], &["a"]),
            (
                &[("connection", "X-One, x-two"), ("x-one", "1"), ("X-Two", "2"), ("x-three", "3")],
                &["x-three"],
            ),
            (&[("connection", "x-one"), ("connection", ",x-two,,"), ("x-one", "1"), ("x-two", "2")], &[]),
            (
                &[
                    ("keep-alive", "timeout=5"),
                    ("proxy-connection", "keep-alive"),
                    ("proxy-authorization", "Basic x"),
                    ("proxy-authenticate", "Basic"),
                    ("te", "trailers"),
                    ("trailer", "x"),
                    ("transfer-encoding", "chunked"),
                    ("upgrade", "websocket"),
                    ("cookie", "a=b"),
                    ("authorization", "Bearer x"),
                ],
                &["authorization", "cookie"],
            ),
        ];
        for (given, left) in cases {
            let mut headers = map(given);
            strip_hop_by_hop(&mut headers);
            assert_eq!(names(&headers), *left, "{given:?}");
        }
    }

    #[test]
    fn connection_cannot_remove_what_the_caller_sets() {
        let mut headers =
            map(&[("connection", "x-forwarded-for, host"), ("x-forwarded-for", "6.6.6.6"), ("host", "a")]);
        let edits = HeaderEdits {
            remove_prefixes: &["x-forwarded-"],
            set: vec![
                (HeaderName::from_static("x-forwarded-for"), HeaderValue::from_static("10.0.0.1")),
                (http::header::HOST, HeaderValue::from_static("b")),
            ],
            ..HeaderEdits::default()
        };
        clean_request(&mut headers, edits);
        assert_eq!(headers["x-forwarded-for"], "10.0.0.1");
        assert_eq!(headers["host"], "b");
        assert!(!headers.contains_key(CONNECTION));
    }

    #[test]
    fn a_length_beside_a_transfer_coding_is_not_passed_on() {
        let mut headers = map(&[("content-length", "3"), ("transfer-encoding", "chunked")]);
        clean_response(&mut headers);
        assert!(headers.is_empty());

        let mut headers = map(&[("content-length", "3"), ("content-length", "3")]);
        clean_response(&mut headers);
        assert_eq!(headers.get_all(CONTENT_LENGTH).iter().count(), 1);

        let mut headers = map(&[("content-length", "0")]);
        clean_response(&mut headers);
        assert_eq!(headers["content-length"], "0");
    }

    #[test]
    fn repeated_headers_keep_their_order() {
        let mut headers =
            map(&[("x-a", "1"), ("set-cookie", "a=1"), ("connection", "x-a"), ("set-cookie", "b=2")]);
        clean_response(&mut headers);
        assert_eq!(headers.get_all("set-cookie").iter().collect::<Vec<_>>(), ["a=1", "b=2"]);
    }
}
