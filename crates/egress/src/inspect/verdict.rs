//! What the rules say to the first bytes of a connection.

use sandglass_netlink::conntrack::Tuple;

use super::first::{First, Protocol};
use super::host::Host;
use crate::audit::{Event, Gate};
use crate::policy::{Action, Rules, Verdict};

pub(super) fn verdict(rules: &dyn Rules, first: &First) -> Verdict {
    let by_default = |action| Verdict { action, rule: "default".into() };
    match first {
        First::Named { host: Host::Name(name), .. } => rules.name(name),
        First::Named { host: Host::Address(address), .. } => {
            rules.address(*address).unwrap_or_else(|| by_default(rules.default_action()))
        }
        First::Unnamed { .. } => by_default(rules.default_action()),
        First::Foreign => by_default(Action::Allow),
        First::More | First::Broken(_) => by_default(Action::Deny),
    }
}

pub(super) fn denied(tuple: &Tuple, first: &First, verdict: Verdict) -> Event {
    Event::Denied {
        by: match protocol_of(first) {
            Some(Protocol::Tls) => Gate::Sni,
            Some(Protocol::Http | Protocol::Http2) => Gate::Http,
            None => Gate::Firewall,
        },
        host: host_of(first),
        address: Some(tuple.destination),
        port: Some(tuple.destination_port),
        rule: verdict.rule,
    }
}

pub(super) fn protocol_of(first: &First) -> Option<Protocol> {
    match first {
        First::Named { protocol, .. } | First::Unnamed { protocol, .. } | First::Broken(protocol) => {
            Some(*protocol)
        }
        First::More | First::Foreign => None,
    }
}

pub(super) fn host_of(first: &First) -> Option<String> {
    match first {
        First::Named { host: Host::Name(name), .. } => Some(name.clone()),
        First::Named { host: Host::Address(address), .. } => Some(address.to_string()),
        _ => None,
    }
}
