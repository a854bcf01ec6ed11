//! What a loan does to a request.

use http::header::{
    CONNECTION, CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_TYPE, HOST, HeaderName, PROXY_AUTHENTICATE,
    PROXY_AUTHORIZATION, TE, TRAILER, TRANSFER_ENCODING, UPGRADE,
};
use http::request::Parts;
use http::uri::PathAndQuery;

use crate::vault::{Active, BodyKind, Loan, Overlong, Selection, Surface, Target};

use super::MAX_HEAD;

/// Headers in which nothing is replaced: they describe the message or name its receiver.
const KEPT: [HeaderName; 10] = [
    CONNECTION,
    CONTENT_LENGTH,
    HOST,
    HeaderName::from_static("keep-alive"),
    PROXY_AUTHENTICATE,
    PROXY_AUTHORIZATION,
    TE,
    TRAILER,
    TRANSFER_ENCODING,
    UPGRADE,
];

/// What was done, and what remains to be done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Done {
    /// The request has got something that it did not bring.
    pub(super) lent: bool,
    /// Placeholders in a body of this kind are still to be replaced.
    pub(super) body: Option<BodyKind>,
}

/// Why a request does not get what a binding has for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Unfit {
    /// It would not be the one that the credentials are for.
    Changed,
    /// Its head would be longer than [`MAX_HEAD`].
    Overlong,
}

impl From<Overlong> for Unfit {
    fn from(Overlong: Overlong) -> Self {
        Self::Overlong
    }
}

/// Replaces placeholders in the head, then sets the headers, which nothing is replaced in.
pub(super) fn head(
    active: &Active,
    loan: &Loan,
    target: Target<'_>,
    parts: &mut Parts,
) -> Result<Done, Unfit> {
    let path = loan.in_target(Surface::Path, parts.uri.path(), MAX_HEAD)?;
    let query = parts.uri.query().map(|query| loan.in_target(Surface::Query, query, MAX_HEAD));
    let query = query.transpose()?.flatten();
    let mut lent = path.is_some() || query.is_some() || !loan.injections.is_empty();
    if path.is_some() || query.is_some() {
        let path = path.as_deref().unwrap_or(parts.uri.path());
        let still = active.select(Target { path, ..target });
        if !matches!(still, Selection::One(same) if same.name == loan.name) {
            return Err(Unfit::Changed);
        }
        let query = query.as_deref().or(parts.uri.query());
        let whole = query.map_or_else(|| path.to_owned(), |query| format!("{path}?{query}"));
        let whole = PathAndQuery::try_from(whole).map_err(|_| Unfit::Changed)?;
        let mut uri = std::mem::take(&mut parts.uri).into_parts();
        uri.path_and_query = Some(whole);
        parts.uri = uri.try_into().map_err(|_| Unfit::Changed)?;
    }
    if loan.replaces(Surface::Header) {
        let mut room = MAX_HEAD;
        for (name, value) in &mut parts.headers {
            if !KEPT.contains(name)
                && let Some(replaced) = loan.in_header(value, room)?
            {
                room -= replaced.len();
                *value = replaced;
                lent = true;
            }
        }
    }
    for injection in &loan.injections {
        parts.headers.remove(&injection.name);
    }
    for injection in &loan.injections {
        parts.headers.insert(injection.name.clone(), injection.value.clone());
    }
    let value = |name| parts.headers.get(name).map(|value| value.as_bytes());
    let kind = BodyKind::of(value(CONTENT_TYPE), value(CONTENT_ENCODING));
    Ok(Done { lent, body: kind.filter(|_| loan.replaces(Surface::Body)) })
}
