//! Who may use the proxy routes of a sandbox.
//!
//! Secrets are compared in constant time. Whether a sandbox exists is told only to those who could list it anyway.

use std::fmt;

use http::{HeaderMap, HeaderName};
use subtle::ConstantTimeEq;

use super::lookup::Target;
use super::refusal::Refusal;
use super::{AGENT_PORT, AGENT_TOKEN, API_KEY, ROUTE_TOKEN, SECURE_ACCESS};

/// What the configuration says about access.
#[derive(Clone, Default)]
pub struct AccessRules {
    /// `None`: authentication is off.
    pub api_key: Option<String>,
    /// `server.open_proxy`: proxy routes need no key, as in the reference.
    pub open_proxy: bool,
}

impl fmt::Debug for AccessRules {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AccessRules")
            .field("has_api_key", &self.api_key.is_some())
            .field("open_proxy", &self.open_proxy)
            .finish()
    }
}

/// On what grounds a request passes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Grounds {
    /// The server's key, which stands for every token of every sandbox.
    ServerKey,
    /// A token of this sandbox.
    Token,
    /// Nothing is asked for.
    Open,
}

impl AccessRules {
    /// Decides about one request. `target` is `None` when the sandbox does not exist.
    pub(super) fn admit<'t>(
        &self,
        headers: &HeaderMap,
        target: Option<&'t Target>,
        port: u16,
    ) -> Result<(&'t Target, Grounds), Refusal> {
        let open = self.open_proxy || self.api_key.is_none();
        if self.api_key.as_deref().is_some_and(|key| presents(headers, &API_KEY, key)) {
            return target.map(|target| (target, Grounds::ServerKey)).ok_or(Refusal::NotFound);
        }
        let Some(target) = target else {
            return Err(if open { Refusal::NotFound } else { denied(headers, port) });
        };
        let secure = presents(headers, &SECURE_ACCESS, &target.route_token);
        if target.secure_access && !secure {
            return Err(Refusal::SecureAccess);
        }
        let agent = port == AGENT_PORT && presents(headers, &AGENT_TOKEN, &target.agent_token);
        if secure || agent || presents(headers, &ROUTE_TOKEN, &target.route_token) {
            return Ok((target, Grounds::Token));
        }
        if open { Ok((target, Grounds::Open)) } else { Err(denied(headers, port)) }
    }
}

/// An empty secret is presented by nobody.
fn presents(headers: &HeaderMap, name: &HeaderName, secret: &str) -> bool {
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
    use std::net::IpAddr;

    use http::HeaderValue;

    use super::*;
    use crate::ingress::Reach;

    const KEY: (&str, &str) = ("open-sandbox-api-key", "key");
    const BAD_KEY: (&str, &str) = ("open-sandbox-api-key", "kez");
    const AGENT: (&str, &str) = ("x-execd-access-token", "agent");
    const ROUTE: (&str, &str) = ("x-sandglass-access", "route");
    const SECURE: (&str, &str) = ("opensandbox-secure-access", "route");

    fn decide(
        rules: &AccessRules,
        secure: Option<bool>,
        port: u16,
        given: &[(&'static str, &str)],
    ) -> Result<Grounds, Refusal> {
        let headers: HeaderMap = given
            .iter()
            .map(|(name, value)| (HeaderName::from_static(name), HeaderValue::from_str(value).unwrap()))
            .collect();
        let target = secure.map(|secure_access| Target {
            reach: Reach::Addressable(IpAddr::from([10, 0, 0, 2])),
            agent_token: "agent".to_owned(),
            route_token: "route".to_owned(),
            secure_access,
        });
        rules.admit(&headers, target.as_ref(), port).map(|(_, grounds)| grounds)
    }

    #[test]
    fn the_table_of_admission() {
        use Grounds::{Open, ServerKey, Token};
        use Refusal::{InvalidKey, MissingKey, NotFound, SecureAccess};
        type Case = (Option<bool>, u16, &'static [(&'static str, &'static str)], Result<Grounds, Refusal>);

        let closed = AccessRules { api_key: Some("key".to_owned()), open_proxy: false };
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
            assert_eq!(decide(&closed, *target, *port, given), *expected, "{target:?} {port} {given:?}");
        }

        let open_proxy = AccessRules { api_key: Some("key".to_owned()), open_proxy: true };
        let no_key = AccessRules::default();
        let cases: &[Case] = &[
            (plain, 8080, &[], Ok(Open)),
            (plain, 8080, &[BAD_KEY], Ok(Open)),
            (plain, 44772, &[AGENT], Ok(Token)),
            (guarded, 8080, &[], Err(SecureAccess)),
            (guarded, 8080, &[SECURE], Ok(Token)),
            (None, 8080, &[], Err(NotFound)),
        ];
        for rules in [open_proxy, no_key] {
            for (target, port, given, expected) in cases {
                assert_eq!(
                    decide(&rules, *target, *port, given),
                    *expected,
                    "{rules:?} {target:?} {port} {given:?}"
                );
            }
        }
    }
}
