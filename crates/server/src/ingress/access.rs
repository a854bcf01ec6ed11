//! Who may use the proxy routes of a sandbox.
//!
//! Secrets are compared in constant time. Whether a sandbox exists is told only to those who could list it anyway.

use http::{HeaderMap, HeaderName};
use subtle::ConstantTimeEq;

use super::lookup::Target;
use super::refusal::Refusal;
use super::{AGENT_PORT, AGENT_TOKEN, API_KEY, ROUTE_TOKEN, SECURE_ACCESS};
use crate::tenants::{Denied, Keyring, Principal};

/// What the configuration says about access.
#[derive(Clone, Debug)]
pub struct AccessRules {
    pub keys: Keyring,
    /// `server.open_proxy`: proxy routes need no key, as in the reference. Not where there are tenants.
    pub open_proxy: bool,
}

/// On what grounds a request passes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Grounds {
    /// A key to which the sandbox belongs, which stands for every token of the sandbox.
    ServerKey,
    /// A token of this sandbox.
    Token,
    /// A link or cookie for what the request asks for.
    Visit,
    /// Nothing is asked for.
    Open,
}

/// What the key of a request says about its sender.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Caller {
    Known(Principal),
    /// No key, or one that is nobody's.
    Stranger,
    /// There is a key, and it cannot be told whose.
    Undecided,
}

impl AccessRules {
    /// Decides about one request. `target` is `None` when the sandbox does not exist.
    pub(super) async fn admit<'t>(
        &self,
        headers: &HeaderMap,
        target: Option<&'t Target>,
        port: u16,
    ) -> Result<(&'t Target, Grounds), Refusal> {
        let caller = self.caller(headers).await;
        self.decide(&caller, headers, target, port)
    }

    async fn caller(&self, headers: &HeaderMap) -> Caller {
        if !self.keys.is_required() {
            return Caller::Stranger;
        }
        match self.keys.admit(headers.get(API_KEY).map(|value| value.as_bytes())).await {
            Ok(principal) => Caller::Known(principal),
            Err(Denied::Missing | Denied::Unknown) => Caller::Stranger,
            Err(Denied::Unavailable) => Caller::Undecided,
        }
    }

    fn decide<'t>(
        &self,
        caller: &Caller,
        headers: &HeaderMap,
        target: Option<&'t Target>,
        port: u16,
    ) -> Result<(&'t Target, Grounds), Refusal> {
        let open = !self.keys.is_required() || (self.open_proxy && !self.keys.has_tenants());
        // For a key that does not cover the sandbox it does not exist, and a key that cannot be checked might have.
        let refused = |stranger: Refusal| match caller {
            Caller::Known(_) => Refusal::NotFound,
            Caller::Undecided => Refusal::TenantProvider,
            Caller::Stranger => stranger,
        };
        let Some(target) = target else {
            return Err(refused(if open { Refusal::NotFound } else { denied(headers, port) }));
        };
        if let Caller::Known(principal) = caller
            && principal.may_see(target.tenant.as_deref())
        {
            return Ok((target, Grounds::ServerKey));
        }
        let secure = presents(headers, &SECURE_ACCESS, &target.route_token);
        if target.secure_access && !secure {
            // Among tenants even that there is such a sandbox is told to nobody else.
            let told = if self.keys.has_tenants() { denied(headers, port) } else { Refusal::SecureAccess };
            return Err(refused(told));
        }
        let agent = port == AGENT_PORT && presents(headers, &AGENT_TOKEN, &target.agent_token);
        if secure || agent || presents(headers, &ROUTE_TOKEN, &target.route_token) {
            return Ok((target, Grounds::Token));
        }
        if open { Ok((target, Grounds::Open)) } else { Err(refused(denied(headers, port))) }
    }
}

/// An empty secret is presented by nobody.
pub(crate) fn presents(headers: &HeaderMap, name: &HeaderName, secret: &str) -> bool {
    let presented = headers.get(name).map_or(&b""[..], |value| value.as_bytes());
    !secret.is_empty() && bool::from(presented.ct_eq(secret.as_bytes()))
}

fn denied(headers: &HeaderMap, port: u16) -> Refusal {
    let agent = (port == AGENT_PORT).then_some(AGENT_TOKEN);
    let tried =
        [API_KEY, ROUTE_TOKEN, SECURE_ACCESS].into_iter().chain(agent).any(|name| headers.contains_key(name));
    if tried { Refusal::InvalidKey } else { Refusal::MissingKey }
}

#[cfg(test)]
mod tests {
    use std::{net::IpAddr, sync::Arc};

    use http::HeaderValue;

    use super::*;
    use crate::{
        ingress::Reach,
        tenants::{ProviderUnavailable, Tenant, TenantProvider},
    };

    const KEY: (&str, &str) = ("open-sandbox-api-key", "key");
    const BAD_KEY: (&str, &str) = ("open-sandbox-api-key", "kez");
    const AGENT: (&str, &str) = ("x-execd-access-token", "agent");
    const ROUTE: (&str, &str) = ("x-sandglass-access", "route");
    const SECURE: (&str, &str) = ("opensandbox-secure-access", "route");

    fn decide(
        rules: &AccessRules,
        caller: &Caller,
        target: Option<(bool, Option<&str>)>,
        port: u16,
        given: &[(&'static str, &str)],
    ) -> Result<Grounds, Refusal> {
        let headers: HeaderMap = given
            .iter()
            .map(|(name, value)| (HeaderName::from_static(name), HeaderValue::from_str(value).unwrap()))
            .collect();
        let target = target.map(|(secure_access, tenant)| Target {
            secure_access,
            tenant: tenant.map(str::to_owned),
            ..Target::at(Reach::Addressable(IpAddr::from([10, 0, 0, 2])))
        });
        rules.decide(caller, &headers, target.as_ref(), port).map(|(_, grounds)| grounds)
    }

    /// With the caller found out by the rules' own key.
    async fn admit(
        rules: &AccessRules,
        secure: Option<bool>,
        port: u16,
        given: &[(&'static str, &str)],
    ) -> Result<Grounds, Refusal> {
        let headers: HeaderMap = given
            .iter()
            .map(|(name, value)| (HeaderName::from_static(name), HeaderValue::from_str(value).unwrap()))
            .collect();
        let caller = rules.caller(&headers).await;
        decide(rules, &caller, secure.map(|secure| (secure, None)), port, given)
    }

    #[tokio::test]
    async fn the_table_of_admission() {
        use Grounds::{Open, ServerKey, Token};
        use Refusal::{InvalidKey, MissingKey, NotFound, SecureAccess};
        type Case = (Option<bool>, u16, &'static [(&'static str, &'static str)], Result<Grounds, Refusal>);

        let closed = AccessRules { keys: Keyring::single(Some("key")), open_proxy: false };
        let plain = Some(false);
        let guarded = Some(true);
        let cases: &[Case] = &[
            (plain, 8080, &[], Err(MissingKey)),
            (plain, 8080, &[KEY], Ok(ServerKey)),
            (plain, 8080, &[BAD_KEY], Err(InvalidKey)),
            (plain, 8080, &[ROUTE], Ok(Token)),
            (plain, 8080, &[SECURE], Ok(Token)),
            (plain, 8080, &[BAD_KEY, ROUTE], Ok(Token)),
            (plain, 8080, &[("x-sandglass-access", "")], Err(InvalidKey)),
            (plain, 8080, &[("x-sandglass-access", "agent")], Err(InvalidKey)),
            // The agent's token opens the agent and nothing else; elsewhere it is not even an attempt.
            (plain, 8080, &[AGENT], Err(MissingKey)),
            (plain, 44772, &[AGENT], Ok(Token)),
            (plain, 44772, &[ROUTE], Ok(Token)),
            (plain, 44772, &[("x-execd-access-token", "agen")], Err(InvalidKey)),
            (plain, 44772, &[("x-execd-access-token", "route")], Err(InvalidKey)),
            (guarded, 44772, &[AGENT], Err(SecureAccess)),
            (guarded, 44772, &[AGENT, SECURE], Ok(Token)),
            (guarded, 8080, &[ROUTE], Err(SecureAccess)),
            (guarded, 8080, &[], Err(SecureAccess)),
            (guarded, 8080, &[KEY], Ok(ServerKey)),
            (guarded, 8080, &[("opensandbox-secure-access", "no")], Err(SecureAccess)),
            (None, 8080, &[], Err(MissingKey)),
            (None, 8080, &[ROUTE], Err(InvalidKey)),
            (None, 44772, &[AGENT], Err(InvalidKey)),
            (None, 8080, &[KEY], Err(NotFound)),
        ];
        for (target, port, given, expected) in cases {
            assert_eq!(admit(&closed, *target, *port, given).await, *expected, "{target:?} {port} {given:?}");
        }

        let open_proxy = AccessRules { keys: Keyring::single(Some("key")), open_proxy: true };
        let no_key = AccessRules { keys: Keyring::single(None), open_proxy: false };
        let blank_key = AccessRules { keys: Keyring::single(Some(" ")), open_proxy: false };
        let cases: &[Case] = &[
            (plain, 8080, &[], Ok(Open)),
            (plain, 8080, &[BAD_KEY], Ok(Open)),
            (plain, 44772, &[AGENT], Ok(Token)),
            (guarded, 8080, &[], Err(SecureAccess)),
            (guarded, 8080, &[SECURE], Ok(Token)),
            (None, 8080, &[], Err(NotFound)),
        ];
        for rules in [open_proxy, no_key, blank_key] {
            for (target, port, given, expected) in cases {
                assert_eq!(
                    admit(&rules, *target, *port, given).await,
                    *expected,
                    "{rules:?} {target:?} {port} {given:?}"
                );
            }
        }
    }
    struct NoProvider;

    #[async_trait::async_trait]
    impl TenantProvider for NoProvider {
        async fn tenant(&self, _: &[u8]) -> Result<Option<Arc<Tenant>>, ProviderUnavailable> {
            Err(ProviderUnavailable)
        }
    }

    #[tokio::test]
    async fn tenants_reach_their_own_and_others_by_token_only() {
        use Caller::{Known, Stranger, Undecided};
        use Grounds::{ServerKey, Token};
        use Refusal::{InvalidKey, MissingKey, NotFound, TenantProvider as Down};
        type Case<'a> = (
            Caller,
            Option<(bool, Option<&'a str>)>,
            &'a [(&'static str, &'a str)],
            Result<Grounds, Refusal>,
        );

        let a = || {
            Known(Principal::of_tenant(Arc::new(Tenant {
                name: "a".to_owned(),
                namespace: "shared".to_owned(),
            })))
        };
        let (own, other, marked_by_none) =
            (Some((false, Some("a"))), Some((false, Some("b"))), Some((false, None)));
        let (own_guarded, other_guarded) = (Some((true, Some("a"))), Some((true, Some("b"))));
        let cases: Vec<Case<'_>> = vec![
            (a(), own, &[KEY], Ok(ServerKey)),
            (a(), own_guarded, &[KEY], Ok(ServerKey)),
            (a(), other, &[KEY], Err(NotFound)),
            (a(), other_guarded, &[KEY], Err(NotFound)),
            (a(), marked_by_none, &[KEY], Err(NotFound)),
            (a(), None, &[KEY], Err(NotFound)),
            (a(), other, &[KEY, ROUTE], Ok(Token)),
            (a(), other_guarded, &[KEY, ROUTE], Err(NotFound)),
            (a(), other_guarded, &[KEY, SECURE], Ok(Token)),
            (a(), other, &[KEY, ("x-sandglass-access", "no")], Err(NotFound)),
            (Stranger, own, &[], Err(MissingKey)),
            (Stranger, own, &[BAD_KEY], Err(InvalidKey)),
            (Stranger, own, &[ROUTE], Ok(Token)),
            (Stranger, own_guarded, &[], Err(MissingKey)),
            (Stranger, own_guarded, &[ROUTE], Err(InvalidKey)),
            (Stranger, own_guarded, &[SECURE], Ok(Token)),
            (Stranger, None, &[], Err(MissingKey)),
            (Stranger, None, &[BAD_KEY], Err(InvalidKey)),
            (Undecided, own, &[KEY], Err(Down)),
            (Undecided, own_guarded, &[KEY], Err(Down)),
            (Undecided, None, &[KEY], Err(Down)),
            (Undecided, own, &[KEY, ROUTE], Ok(Token)),
        ];
        // An open proxy is no excuse where there are tenants.
        for open_proxy in [false, true] {
            let rules = AccessRules { keys: Keyring::tenants(Arc::new(NoProvider)), open_proxy };
            for (caller, target, given, expected) in &cases {
                assert_eq!(
                    decide(&rules, caller, *target, 8080, given),
                    *expected,
                    "{caller:?} {target:?} {given:?}"
                );
            }
            assert_eq!(rules.caller(&HeaderMap::new()).await, Stranger);
            let headers = HeaderMap::from_iter([(API_KEY, HeaderValue::from_static("k"))]);
            assert_eq!(rules.caller(&headers).await, Undecided);
        }
    }
}
