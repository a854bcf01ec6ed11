//! Whether a connection or a request may go where it wants to.

use std::net::IpAddr;

use crate::audit::{Event, Gate};
use crate::policy::{Action, Resolved, Rules};

/// What somebody wants to reach: a name at an address.
#[derive(Clone, Copy, Debug)]
pub(super) struct Wanted<'a> {
    pub(super) name: Option<&'a str>,
    pub(super) address: IpAddr,
    pub(super) port: u16,
}

/// What decides where a connection that was let through ends up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Via {
    /// The address that was judged.
    Address,
    /// The upstream proxy's own answer for the name.
    Proxy,
}

/// A denial; says the rule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Denied {
    pub(super) rule: String,
}

impl Denied {
    pub(super) fn new(rule: &str) -> Self {
        Self { rule: rule.to_owned() }
    }
}

impl Wanted<'_> {
    pub(super) fn event(&self, by: Gate, denied: &Denied) -> Event {
        Event::Denied {
            by,
            host: self.name.map(str::to_owned),
            address: Some(self.address),
            port: Some(self.port),
            rule: denied.rule.clone(),
        }
    }
}

/// Rules for addresses hold behind a proxy too: a name is given to it only if an answer that was let through has led from this name to the
/// address that is judged here. Where the proxy's resolver knows another address for it than ours, the proxy's own rules decide; a name that
/// only the proxy could resolve has led nowhere, and is refused.
pub(super) fn judge(
    rules: &dyn Rules,
    resolved: &dyn Resolved,
    wanted: Wanted<'_>,
    via: Via,
) -> Result<(), Denied> {
    by_rules(rules, resolved, wanted)?;
    match (via, wanted.name) {
        (Via::Proxy, Some(name)) if !resolved.leads_to(name, wanted.address) => Err(Denied::new(
            "default (the name has not led to this address, and the upstream proxy decides by name)",
        )),
        _ => Ok(()),
    }
}

fn by_rules(rules: &dyn Rules, resolved: &dyn Resolved, wanted: Wanted<'_>) -> Result<(), Denied> {
    let address = rules.address(wanted.address);
    let named = wanted.name.map(|name| rules.name(name));
    if let Some(verdict) = &address
        && verdict.action == Action::Deny
    {
        return Err(Denied { rule: verdict.rule.clone() });
    }
    if let Some(verdict) = &named
        && verdict.action == Action::Deny
    {
        // An allowed address is as good as an allowed name, but not better than a denied one.
        if address.is_some() && verdict.rule == "default" {
            return Ok(());
        }
        return Err(Denied { rule: verdict.rule.clone() });
    }
    if address.is_some() {
        return Ok(());
    }
    if special(wanted.address) {
        return Err(Denied::new("default (a local address needs a rule of its own)"));
    }
    match wanted.name {
        // Whoever may go anywhere needs no name for it.
        _ if rules.default_action() == Action::Allow => Ok(()),
        None => Err(Denied::new("default (no host name)")),
        Some(name) if resolved.leads_to(name, wanted.address) => Ok(()),
        Some(_) => Err(Denied::new("default (the name has not led to this address)")),
    }
}

/// Addresses of the machine or its link: no name is a reason to go there.
fn special(address: IpAddr) -> bool {
    match address.to_canonical() {
        IpAddr::V4(v4) => {
            v4.is_loopback()
                || v4.is_link_local()
                || v4.is_unspecified()
                || v4.is_multicast()
                || v4.is_broadcast()
        }
        IpAddr::V6(v6) => {
            v6.is_loopback() || v6.is_unicast_link_local() || v6.is_unspecified() || v6.is_multicast()
        }
    }
}

#[cfg(test)]
mod tests {
    use ipnet::IpNet;

    use super::*;
    use crate::policy::Verdict;

    struct Fixed(Action);

    impl Rules for Fixed {
        fn name(&self, name: &str) -> Verdict {
            let (action, rule) = match name {
                "good.example.com" => (Action::Allow, "allow good.example.com"),
                "bad.example.com" => (Action::Deny, "deny bad.example.com"),
                _ => (self.0, "default"),
            };
            Verdict { action, rule: rule.to_owned() }
        }

        fn address(&self, address: IpAddr) -> Option<Verdict> {
            let (action, rule) = match address.to_string().as_str() {
                "192.0.2.1" => (Action::Allow, "allow 192.0.2.1"),
                "192.0.2.2" => (Action::Deny, "deny 192.0.2.2"),
                _ => return None,
            };
            Some(Verdict { action, rule: rule.to_owned() })
        }

        fn default_action(&self) -> Action {
            self.0
        }

        fn networks(&self) -> Vec<(Action, IpNet)> {
            Vec::new()
        }
    }

    impl Resolved for Fixed {
        fn leads_to(&self, name: &str, address: IpAddr) -> bool {
            name == "good.example.com" && address.to_string() == "192.0.2.3"
        }
    }

    #[test]
    fn names_and_addresses_decide_together() {
        type Case = (Action, Option<&'static str>, &'static str, Result<(), &'static str>);
        let cases: &[Case] = &[
            (Action::Deny, Some("good.example.com"), "192.0.2.3", Ok(())),
            (
                Action::Deny,
                Some("good.example.com"),
                "192.0.2.4",
                Err("default (the name has not led to this address)"),
            ),
            (Action::Deny, Some("good.example.com"), "192.0.2.2", Err("deny 192.0.2.2")),
            (
                Action::Deny,
                Some("good.example.com"),
                "169.254.169.254",
                Err("default (a local address needs a rule of its own)"),
            ),
            (Action::Deny, Some("other.example.com"), "192.0.2.3", Err("default")),
            (Action::Deny, Some("other.example.com"), "192.0.2.1", Ok(())),
            (Action::Deny, Some("bad.example.com"), "192.0.2.1", Err("deny bad.example.com")),
            (Action::Deny, None, "192.0.2.1", Ok(())),
            (Action::Deny, None, "192.0.2.3", Err("default (no host name)")),
            (Action::Allow, None, "192.0.2.3", Ok(())),
            (Action::Allow, Some("other.example.com"), "192.0.2.3", Ok(())),
            (Action::Allow, Some("bad.example.com"), "192.0.2.3", Err("deny bad.example.com")),
            (Action::Allow, None, "127.0.0.1", Err("default (a local address needs a rule of its own)")),
            (Action::Allow, None, "192.0.2.2", Err("deny 192.0.2.2")),
        ];
        for (default, name, address, expected) in cases {
            let rules = Fixed(*default);
            let wanted = Wanted { name: *name, address: address.parse().unwrap(), port: 443 };
            let found = judge(&rules, &rules, wanted, Via::Address);
            assert_eq!(
                found,
                expected.map_err(|rule| Denied { rule: rule.to_owned() }),
                "{name:?} {address}"
            );
        }
    }
    #[test]
    fn behind_a_proxy_a_name_stands_for_addresses_that_it_has_led_to() {
        let rule = "default (the name has not led to this address, and the upstream proxy decides by name)";
        type Case = (Action, Option<&'static str>, &'static str, Result<(), &'static str>);
        let cases: &[Case] = &[
            (Action::Allow, Some("good.example.com"), "192.0.2.3", Ok(())),
            (Action::Allow, Some("good.example.com"), "192.0.2.4", Err(rule)),
            (Action::Allow, Some("other.example.com"), "192.0.2.1", Err(rule)),
            (Action::Deny, Some("good.example.com"), "192.0.2.3", Ok(())),
            (Action::Deny, Some("other.example.com"), "192.0.2.1", Err(rule)),
            (Action::Deny, Some("good.example.com"), "192.0.2.1", Err(rule)),
            (Action::Allow, None, "192.0.2.3", Ok(())),
            (Action::Deny, None, "192.0.2.1", Ok(())),
            (Action::Allow, Some("good.example.com"), "192.0.2.2", Err("deny 192.0.2.2")),
        ];
        for (default, name, address, expected) in cases {
            let rules = Fixed(*default);
            let wanted = Wanted { name: *name, address: address.parse().unwrap(), port: 443 };
            let found = judge(&rules, &rules, wanted, Via::Proxy);
            assert_eq!(found, expected.map_err(Denied::new), "{name:?} {address}");
        }
    }
}
