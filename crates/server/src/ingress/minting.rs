//! How routes through a gateway are written and signed for clients.

use std::fmt;

use sandglass_ingress::{Expiry, Generation, Key, LabelError, Route};

use super::refusal::Refusal;
use crate::config::{IngressConfig, RouteMode, SecureAccessConfig, SignatureChoice};

/// What the configuration says about the gateway's routes.
#[derive(Clone, PartialEq, Eq)]
pub struct Minting {
    /// As configured, without the star of a wildcard.
    address: String,
    mode: RouteMode,
    signer: Option<(Key, Generation)>,
}

/// Keys stay out of logs.
impl fmt::Debug for Minting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Minting")
            .field("address", &self.address)
            .field("mode", &self.mode)
            .finish_non_exhaustive()
    }
}

/// A route for clients.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Minted {
    pub(super) endpoint: String,
    /// The route header, where the endpoint does not say the route.
    pub(super) header: Option<String>,
}

impl From<SignatureChoice> for Generation {
    fn from(choice: SignatureChoice) -> Self {
        match choice {
            SignatureChoice::Full => Self::Full,
            SignatureChoice::Short => Self::Short,
        }
    }
}

impl Minting {
    /// `None` where clients come directly.
    #[must_use]
    pub fn of(config: &IngressConfig) -> Option<Self> {
        let gateway = config.gateway.as_ref()?;
        let signer = |access: &SecureAccessConfig| {
            let active = access.keys.iter().find(|key| key.id == access.active_key)?;
            Some((Key { id: active.id, secret: active.key.clone() }, access.signature.into()))
        };
        let signer = config.secure_access.as_ref().and_then(signer);
        Some(Self::new(&gateway.address, gateway.route, signer))
    }

    pub(super) fn new(address: &str, mode: RouteMode, signer: Option<(Key, Generation)>) -> Self {
        let address = address.strip_prefix("*.").unwrap_or(address).trim_end_matches('/').to_owned();
        Self { address, mode, signer }
    }

    pub(super) fn signs(&self) -> bool {
        self.signer.is_some()
    }

    /// Whether what it signs is whole in the address, so that a browser needs nothing else.
    pub(crate) fn signs_addresses(&self) -> bool {
        self.signs() && self.mode != RouteMode::Header
    }

    /// A route to a port, signed when it is to expire.
    pub(super) fn mint(&self, route: (&str, u16), expires: Option<u64>) -> Result<Minted, Refusal> {
        let Some(expires) = expires else {
            let plain = Route::plain(route.0, route.1);
            let label = || plain.host_label().map_err(Refusal::from);
            return self.written(&plain, label);
        };
        let (key, generation) = self.signer.as_ref().ok_or(Refusal::ExpiresUnsigned)?;
        let expires = Expiry::at(expires);
        let signed = Route::signed(key, *generation, route, expires.clone());
        let label = || match generation {
            Generation::Short => signed.host_label(),
            Generation::Full => Route::packed(key, route, expires),
        };
        self.written(&signed, || label().map_err(Refusal::from))
    }

    fn written(
        &self,
        route: &Route,
        host_label: impl FnOnce() -> Result<String, Refusal>,
    ) -> Result<Minted, Refusal> {
        let address = &self.address;
        let (endpoint, header) = match self.mode {
            RouteMode::Wildcard => (format!("{}.{address}", host_label()?), None),
            RouteMode::Uri => (format!("{address}/{}", route.path()), None),
            RouteMode::Header => (address.clone(), Some(route.label())),
        };
        Ok(Minted { endpoint, header })
    }
}

impl From<LabelError> for Refusal {
    fn from(error: LabelError) -> Self {
        match error {
            LabelError::TooLong => Self::LabelTooLong,
            LabelError::TooLate => Self::ExpiresTooLate,
        }
    }
}

#[cfg(test)]
mod tests {
    use sandglass_ingress::{LABEL_LIMIT, Proof};

    use super::*;

    const UUID: &str = "0f8fad5b-d9cb-469f-a165-70867728950e";

    fn minting(mode: RouteMode, generation: Generation) -> Minting {
        let key = Key { id: 'a', secret: vec![7; 32] };
        let address = if mode == RouteMode::Wildcard { "*.example.com" } else { "gw:1/" };
        Minting::new(address, mode, Some((key, generation)))
    }

    #[test]
    fn signed_routes_of_both_generations_are_read_by_the_gateway() {
        for generation in [Generation::Full, Generation::Short] {
            let mint = |mode| minting(mode, generation).mint((UUID, 44772), Some(4_102_444_800)).unwrap();
            let wildcard = mint(RouteMode::Wildcard);
            let label = wildcard.endpoint.strip_suffix(".example.com").unwrap();
            assert!(label.len() <= LABEL_LIMIT, "{label}");
            let header = mint(RouteMode::Header);
            assert_eq!(header.endpoint, "gw:1");
            let uri = mint(RouteMode::Uri);
            let path = uri.endpoint.strip_prefix("gw:1").unwrap();
            let in_path = sandglass_ingress::PathRoute::parse(path).unwrap().route;
            for route in [
                Route::from_host(&wildcard.endpoint).unwrap(),
                Route::from_header(&header.header.unwrap()).unwrap(),
                in_path,
            ] {
                assert_eq!((route.id.as_str(), route.port), (UUID, 44772));
                assert!(
                    matches!(&route.proof, Proof::Signed(signed) if signed.expires().seconds() == 4_102_444_800)
                );
            }
        }
    }

    #[test]
    fn what_does_not_fit_a_host_name_is_said() {
        let mint = |generation, id: &str, expires| {
            minting(RouteMode::Wildcard, generation).mint((id, 44772), expires).err()
        };
        let long = "a".repeat(60);
        assert_eq!(mint(Generation::Full, &long, None), Some(Refusal::LabelTooLong));
        assert_eq!(mint(Generation::Full, "my-sandbox", Some(9)), Some(Refusal::LabelTooLong));
        assert_eq!(mint(Generation::Short, &"a".repeat(46), Some(9)), Some(Refusal::LabelTooLong));
        assert_eq!(mint(Generation::Full, UUID, Some(u64::MAX)), Some(Refusal::ExpiresTooLate));
        assert_eq!(mint(Generation::Short, UUID, Some(u64::MAX)), Some(Refusal::LabelTooLong));
    }
}
