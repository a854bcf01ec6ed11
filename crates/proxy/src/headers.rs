//! Header rules as data: which headers belong to one hop, and the edits a caller asks for.

use http::header::{
    CONNECTION, CONTENT_LENGTH, HOST, HeaderMap, HeaderName, HeaderValue, PROXY_AUTHENTICATE,
    PROXY_AUTHORIZATION, TE, TRANSFER_ENCODING, UPGRADE,
};

/// Headers that describe one connection and never travel further. `Trailer` is none of them: it announces what follows
/// the body, which travels.
const HOP_BY_HOP: [HeaderName; 8] = [
    CONNECTION,
    HeaderName::from_static("keep-alive"),
    HeaderName::from_static("proxy-connection"),
    PROXY_AUTHENTICATE,
    PROXY_AUTHORIZATION,
    TE,
    TRANSFER_ENCODING,
    UPGRADE,
];

/// What a caller changes in the headers: first the removals, then the new values.
#[derive(Clone, Debug, Default)]
pub struct HeaderEdits {
    /// Not passed to the backend.
    pub remove: &'static [HeaderName],
    /// Every header whose lower-case name starts with one of these is not passed to the backend either.
    pub remove_prefixes: &'static [&'static str],
    /// Each replaces all values of its name.
    pub set: Vec<(HeaderName, HeaderValue)>,
    /// Headers of the answer that are not passed to the client.
    pub hide: &'static [HeaderName],
}

impl HeaderEdits {
    /// Whether the value that the client sent is passed on.
    pub(crate) fn keeps(&self, name: &HeaderName) -> bool {
        !self.remove.contains(name)
            && !self.set.iter().any(|(set, _)| set == name)
            && !self.remove_prefixes.iter().any(|prefix| name.as_str().starts_with(prefix))
    }

    pub(crate) fn host(&self) -> Option<&HeaderValue> {
        self.set.iter().find(|(name, _)| *name == HOST).map(|(_, value)| value)
    }
}

/// Whether a header says something about one connection, or about where one message ends.
pub(crate) fn belongs_to_hop(name: &HeaderName) -> bool {
    *name == CONTENT_LENGTH || HOP_BY_HOP.contains(name)
}

/// The members of a list that may span several fields, as they were written.
pub(crate) fn members<'v>(values: impl Iterator<Item = &'v [u8]>) -> impl Iterator<Item = &'v [u8]> {
    values
        .flat_map(|value| value.split(|byte| *byte == b','))
        .map(<[u8]>::trim_ascii)
        .filter(|name| !name.is_empty())
}

/// Headers that `Connection` makes part of this hop, beyond what is so anyway.
#[derive(Debug, Default)]
pub(crate) struct Named(Vec<HeaderName>);

impl Named {
    pub(crate) fn by<'v>(connection: impl Iterator<Item = &'v [u8]>) -> Self {
        // Nearly always one of these, which then costs nothing.
        const USUAL: [&[u8]; 3] = [b"keep-alive", b"close", b"upgrade"];
        let names = members(connection)
            .filter(|name| !USUAL.iter().any(|usual| name.eq_ignore_ascii_case(usual)))
            .filter_map(|name| HeaderName::from_bytes(name).ok());
        Self(names.collect())
    }

    pub(crate) fn contains(&self, name: &HeaderName) -> bool {
        self.0.contains(name)
    }
}

/// The values of `Connection`.
pub(crate) fn connection_of(headers: &HeaderMap) -> impl Iterator<Item = &[u8]> {
    headers.get_all(CONNECTION).iter().map(HeaderValue::as_bytes)
}

/// Whether `Connection` names this token.
pub(crate) fn connection_names(headers: &HeaderMap, token: &str) -> bool {
    members(connection_of(headers)).any(|name| name.eq_ignore_ascii_case(token.as_bytes()))
}

/// Whether whoever sent these takes trailers. Told to the next hop anew, because `TE` belongs to one.
pub(crate) fn takes_trailers(headers: &HeaderMap) -> bool {
    let codings = headers.get_all(TE).iter().map(HeaderValue::as_bytes);
    members(codings).any(|coding| coding.eq_ignore_ascii_case(b"trailers"))
}

/// Whether a field may follow a body: nothing that frames, routes or belongs to one hop may.
pub(crate) fn may_trail(name: &HeaderName) -> bool {
    !belongs_to_hop(name) && *name != HOST
}
