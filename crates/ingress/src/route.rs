//! How routes are written: as one label of a host name or a header, or as the first segments of a path.
//!
//! Invariant: what follows the route in a path is passed on as it was written, never decoded.

use crate::base36::{self, Expiry};
use crate::keys::{Key, key_id};
use crate::scope::{Scope, ScopeError};
use crate::signature::{Generation, Signed};

/// The longest label of a host name.
pub const LABEL_LIMIT: usize = 63;

/// What a route brings to show that it may be used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Proof {
    None,
    Signed(Signed),
    /// To be verified; names the same sandbox and port as the route.
    Scoped(Scope),
}

/// A port of a sandbox.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Route {
    pub id: String,
    pub port: u16,
    pub proof: Proof,
}

/// Why there is no route.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RouteError {
    #[error("the route is not of the form <sandbox id>-<port> or <sandbox id>/<port>")]
    Malformed,
    #[error(transparent)]
    Scope(#[from] ScopeError),
}

/// Why a route cannot be written as a host name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LabelError {
    #[error("the host name of this route would have a label of more than 63 characters")]
    TooLong,
    #[error("the expiry is too late for a host name")]
    TooLate,
}

impl Route {
    #[must_use]
    pub fn plain(id: impl Into<String>, port: u16) -> Self {
        Self { id: id.into(), port, proof: Proof::None }
    }

    /// Signs a route.
    #[must_use]
    pub fn signed(key: &Key, generation: Generation, (id, port): (&str, u16), expires: Expiry) -> Self {
        let signed = Signed::mint(key, generation, (id, port), expires);
        Self { id: id.to_owned(), port, proof: Proof::Signed(signed) }
    }

    /// From the text of a route header.
    ///
    /// # Errors
    /// When it is no route.
    pub fn from_header(text: &str) -> Result<Self, RouteError> {
        if Scope::looks_like(text) { Ok(Self::scoped(Scope::parse(text)?)) } else { Self::from_host(text) }
    }

    /// From a host name, of which the first label is the route. A scheme in front does not matter.
    ///
    /// # Errors
    /// When it is no route.
    pub fn from_host(text: &str) -> Result<Self, RouteError> {
        let text = text.strip_prefix("http://").unwrap_or(text);
        let text = text.strip_prefix("https://").unwrap_or(text);
        let label = text.split('.').next().unwrap_or_default();
        Self::from_label(label).ok_or(RouteError::Malformed)
    }

    fn from_label(label: &str) -> Option<Self> {
        let Some((id, last)) = label.rsplit_once('-') else { return unpacked(label) };
        if let Some(signed) = signed_label(label) {
            return Some(signed);
        }
        // Ids have dashes too, so whatever is before the port is the id.
        let port = last.bytes().all(|b| b.is_ascii_digit()).then(|| last.parse().ok())??;
        (!id.is_empty() && !id.starts_with('-') && port != 0).then(|| Self::plain(id, port))
    }

    fn scoped(scope: Scope) -> Self {
        Self { id: scope.sandbox.clone(), port: scope.port, proof: Proof::Scoped(scope) }
    }

    /// As a header has it, and a host name where it fits.
    #[must_use]
    pub fn label(&self) -> String {
        self.joined("-")
    }

    /// As a path has it, without slashes at the ends.
    #[must_use]
    pub fn path(&self) -> String {
        self.joined("/")
    }

    fn joined(&self, by: &str) -> String {
        let Self { id, port, proof } = self;
        match proof {
            Proof::None => format!("{id}{by}{port}"),
            Proof::Signed(signed) => {
                format!("{id}{by}{port}{by}{}{by}{}", signed.expires().as_str(), signed.signature())
            }
            Proof::Scoped(scope) => scope.to_string(),
        }
    }

    /// The label as a host name's, if it fits.
    ///
    /// # Errors
    /// When it does not.
    pub fn host_label(&self) -> Result<String, LabelError> {
        Some(self.label()).filter(|label| label.len() <= LABEL_LIMIT).ok_or(LabelError::TooLong)
    }

    /// A signed route as a host name's label: the signature of the full generation does not fit beside an id as it is usually written, so
    /// id (a UUID), port, expiry and 128 bits of signature are packed.
    ///
    /// # Errors
    /// When the id is no UUID or the expiry is thousands of years away.
    pub fn packed(key: &Key, (id, port): (&str, u16), expires: Expiry) -> Result<String, LabelError> {
        let number = uuid_number(id).ok_or(LabelError::TooLong)?;
        let second = base36::padded(expires.seconds().into(), EXPIRY).ok_or(LabelError::TooLate)?;
        let signature = Signed::packed(key, (id, port), expires).signature();
        let fits = "fixed widths hold every value";
        let id = base36::padded(number, ID).expect(fits);
        let port = base36::padded(port.into(), PORT).expect(fits);
        Ok(format!("{id}{port}{second}{signature}"))
    }
}

/// Widths of a packed label, in digits.
const ID: usize = 25;
const PORT: usize = 4;
const EXPIRY: usize = 7;
const MAC: usize = 25;
const PACKED: usize = ID + PORT + EXPIRY + MAC + 1;

fn unpacked(label: &str) -> Option<Route> {
    if label.len() != PACKED || !label.is_ascii() {
        return None;
    }
    let (id, rest) = label.split_at(ID);
    let (port, rest) = rest.split_at(PORT);
    let (expires, rest) = rest.split_at(EXPIRY);
    let (mac, key) = rest.split_at(MAC);
    base36::decode(mac)?;
    let id = uuid_text(base36::decode(id)?);
    let port = u16::try_from(base36::decode(port)?).ok().filter(|port| *port != 0)?;
    let expires = Expiry::at(u64::try_from(base36::decode(expires)?).ok()?);
    Some(Route { id, port, proof: Proof::Signed(Signed::from_packed(expires, mac, key_id(key)?)) })
}

/// The number that a UUID stands for, if it is written as [`uuid_text`] writes it.
fn uuid_number(text: &str) -> Option<u128> {
    let digits: String = text.chars().filter(|c| *c != '-').collect();
    let number = u128::from_str_radix(&digits, 16).ok()?;
    (uuid_text(number) == text).then_some(number)
}

fn uuid_text(number: u128) -> String {
    let digits = format!("{number:032x}");
    [(0, 8), (8, 12), (12, 16), (16, 20), (20, 32)].map(|(from, to)| &digits[from..to]).join("-")
}

/// Four parts or more, of which the last three are port, expiry and signature.
fn signed_label(label: &str) -> Option<Route> {
    let mut parts = label.rsplitn(4, '-');
    let (signature, expires, port) = (parts.next()?, parts.next()?, parts.next()?);
    let id = parts.next().filter(|id| !id.is_empty() && !id.starts_with('-'))?;
    let port = strict_port(port)?;
    let signed = Signed::parse(expires, signature).ok()?;
    Some(Route { id: id.to_owned(), port, proof: Proof::Signed(signed) })
}

/// 1 to 65535 without sign and leading zero.
pub(crate) fn strict_port(text: &str) -> Option<u16> {
    let digits = text.bytes().all(|b| b.is_ascii_digit()) && !text.starts_with('0');
    text.parse().ok().filter(|_| digits)
}

/// A route at the beginning of a path, and what follows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PathRoute<'a> {
    pub route: Route,
    /// Begins with a slash; as it was written.
    pub rest: &'a str,
    path: &'a str,
}

impl<'a> PathRoute<'a> {
    /// Reads the path of a request target.
    ///
    /// # Errors
    /// When it does not begin with a route.
    pub fn parse(path: &'a str) -> Result<Self, RouteError> {
        let inner = path.strip_prefix('/').unwrap_or(path);
        if Scope::looks_like(inner) {
            let (token, rest) = segment(inner);
            return Ok(Self { route: Route::scoped(Scope::parse(token)?), rest: or_root(rest), path });
        }
        let signed = || {
            let (id, rest) = segment(inner);
            let (port, rest) = segment(rest.strip_prefix('/')?);
            let (expires, rest) = segment(rest.strip_prefix('/')?);
            let (signature, rest) = segment(rest.strip_prefix('/')?);
            let port = strict_port(port).filter(|_| !id.is_empty())?;
            let signed = Signed::parse(expires, signature).ok()?;
            let route = Route { id: id.to_owned(), port, proof: Proof::Signed(signed) };
            Some(Self { route, rest: or_root(rest), path })
        };
        signed().or_else(|| Self::plain(path)).ok_or(RouteError::Malformed)
    }

    fn plain(path: &'a str) -> Option<Self> {
        let (id, rest) = segment(path.strip_prefix('/').unwrap_or(path));
        let (port, rest) = segment(rest.strip_prefix('/')?);
        let port = strict_port(port).filter(|_| !id.is_empty())?;
        Some(Self { route: Route::plain(id, port), rest: or_root(rest), path })
    }

    /// The same path without a signature in it: what looked like one belongs to the application when the sandbox asks for none.
    #[must_use]
    pub fn unsigned(self) -> Self {
        match self.route.proof {
            Proof::Signed(_) => Self::plain(self.path).unwrap_or(self),
            Proof::None | Proof::Scoped(_) => self,
        }
    }
}

/// The text before the first slash, and the rest with it.
fn segment(text: &str) -> (&str, &str) {
    text.split_at(text.find('/').unwrap_or(text.len()))
}

fn or_root(rest: &str) -> &str {
    if rest.is_empty() { "/" } else { rest }
}

#[cfg(test)]
#[path = "route_tests.rs"]
mod tests;
