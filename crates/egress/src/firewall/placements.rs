//! The rules of each placement: what is for this program, what comes in, and where a packet from the box starts.

use std::net::{IpAddr, Ipv6Addr};

use sandglass_netlink::nft::batch::{Base, ChainKind, Hook, Otherwise};
use sandglass_netlink::nft::rule::{Field, Reject, Rule, STATUS_DESTINATION_REWRITTEN, state};

use super::plan::Placement;
use super::rules::{
    ICMP, ICMPV6, Placed, Ruleset, TCP, UDP, accept, drop, go, let_through, not_let_through, opens, settle,
    without_options,
};

/// Chains that hang on a hook.
pub(super) fn base_chains(placement: &Placement) -> Vec<(&'static str, Base)> {
    let filter = |hook, priority, otherwise| Base { kind: ChainKind::Filter, hook, priority, otherwise };
    // Before those of a container engine.
    let divert = |hook| Base { kind: ChainKind::Nat, hook, priority: -101, otherwise: Otherwise::Accept };
    match placement {
        Placement::Gateway { .. } => vec![
            ("early", filter(Hook::Prerouting, -300, Otherwise::Accept)),
            ("divert", divert(Hook::Prerouting)),
            ("input", filter(Hook::Input, 0, Otherwise::Drop)),
            ("forward", filter(Hook::Forward, 0, Otherwise::Drop)),
            ("settle", filter(Hook::Forward, 1, Otherwise::Accept)),
            ("output", filter(Hook::Output, 0, Otherwise::Drop)),
            (
                "leave",
                Base {
                    kind: ChainKind::Nat,
                    hook: Hook::Postrouting,
                    priority: 100,
                    otherwise: Otherwise::Accept,
                },
            ),
        ],
        Placement::Shared { .. } => vec![
            ("divert", divert(Hook::Output)),
            ("input", filter(Hook::Input, 0, Otherwise::Drop)),
            ("settle_input", filter(Hook::Input, 1, Otherwise::Accept)),
            ("output", filter(Hook::Output, 0, Otherwise::Drop)),
            ("settle", filter(Hook::Output, 1, Otherwise::Accept)),
        ],
    }
}

impl Ruleset<'_> {
    /// The rules of base chains.
    pub fn placed(&self) -> Vec<Placed> {
        match self.placement {
            Placement::Gateway { down, up, own, boxed } => {
                let boxed = boxed.octets();
                let mut rules = early(down, up, boxed);
                rules.extend(self.gateway_local(down, up));
                rules.extend(self.gateway_forward(down, up, boxed));
                let control = Rule::new().from_interface(up).ipv4().is(Field::IPV4_DESTINATION, &boxed);
                let control = control.protocol(TCP).destination_port(self.ports.control);
                rules.push(("divert", control.rewrite_destination(IpAddr::V4(*own), self.ports.control)));
                let from_box = Rule::new().from_interface(down);
                rules.extend(self.divert_excess(&from_box));
                rules.extend(self.divert_dns(&from_box));
                rules.extend(self.divert_gate(&from_box));
                // The host sees one address.
                let ours = Rule::new().to_interface(up).ipv4().is(Field::IPV4_SOURCE, &own.octets());
                rules.push(("leave", ours.rewrite_source(IpAddr::V4(boxed.into()))));
                rules
            }
            Placement::Shared { mark } => {
                let mut rules = self.shared_output(*mark);
                rules.extend(self.shared_input());
                rules.push(("divert", accept(Rule::new().is(Field::Mark, &mark.to_ne_bytes()))));
                rules.extend(self.divert_excess(&Rule::new().not_to_interface("lo")));
                rules.extend(self.divert_dns(&Rule::new()));
                rules.push(("divert", accept(Rule::new().to_interface("lo"))));
                rules.extend(self.divert_gate(&Rule::new()));
                rules
            }
        }
    }

    /// What is for this program, and what it sends.
    fn gateway_local(&self, down: &str, up: &str) -> Vec<Placed> {
        let rewritten = |interface: &str| {
            Rule::new()
                .from_interface(interface)
                .has_any(Field::ConnectionStatus, STATUS_DESTINATION_REWRITTEN)
        };
        let known = Rule::new().from_interface(up).state(state::ESTABLISHED | state::RELATED);
        let control = rewritten(up).protocol(TCP).destination_port(self.ports.control);
        let mut rules = vec![
            ("input", accept(Rule::new().from_interface("lo"))),
            ("input", drop(Rule::new().state(state::INVALID))),
            ("input", accept(known)),
            ("input", accept(control)),
            ("input", drop(Rule::new().from_interface(up))),
        ];
        // Only what was sent here on its way to elsewhere; whoever talks to the gates directly is nobody's client.
        for (protocol, port) in [(UDP, self.ports.dns), (TCP, self.ports.dns), (TCP, self.ports.gate)] {
            rules.push(("input", accept(rewritten(down).protocol(protocol).destination_port(port))));
        }
        rules.push(("input", self.refuse_or_drop(Rule::new().from_interface(down))));
        rules.push(("input", drop(Rule::new())));
        rules.push(("output", drop(Rule::new().ipv6())));
        rules.push(("output", accept(Rule::new())));
        rules
    }

    fn gateway_forward(&self, down: &str, up: &str, boxed: [u8; 4]) -> Vec<Placed> {
        let inward = Rule::new().from_interface(up).to_interface(down);
        let mut rules =
            Vec::from(not_let_through(&Rule::new().from_interface(down)).map(|rule| ("forward", rule)));
        rules.push(("forward", let_through()));
        rules.extend(self.inbound("forward", &inward));
        let fresh = || inward.clone().ipv4().is(Field::IPV4_DESTINATION, &boxed).state(state::NEW);
        rules.push(("forward", accept(opens(fresh()))));
        rules.push(("forward", accept(fresh().protocol(ICMP).is(Field::ICMP_TYPE, &[8]))));
        rules.push(("forward", go(Rule::new().from_interface(down).to_interface(up), "egress")));
        rules.push(("forward", drop(Rule::new())));
        rules.extend(settle("settle"));
        rules
    }

    fn shared_output(&self, mark: u32) -> Vec<Placed> {
        let rewritten = || Rule::new().has_any(Field::ConnectionStatus, STATUS_DESTINATION_REWRITTEN);
        let loopback6 = Ipv6Addr::LOCALHOST.octets();
        // A direct connection to the gate has no destination that could be judged.
        let direct = Rule::new().to_interface("lo").protocol(TCP).destination_port(self.ports.gate);
        let mut rules = vec![
            ("output", accept(Rule::new().is(Field::Mark, &mark.to_ne_bytes()))),
            ("output", without_options(Rule::new())),
        ];
        rules.extend(not_let_through(&Rule::new()).map(|rule| ("output", rule)));
        rules.extend([
            ("output", let_through()),
            ("output", accept(rewritten().ipv4().is(Field::Network { offset: 16, length: 1 }, &[127]))),
            ("output", accept(rewritten().ipv6().is(Field::IPV6_DESTINATION, &loopback6))),
            ("output", direct.state(state::NEW).reject(Reject::TcpReset)),
            ("output", accept(Rule::new().to_interface("lo"))),
            ("output", go(Rule::new(), "egress")),
        ]);
        rules.extend(settle("settle"));
        rules
    }

    fn shared_input(&self) -> Vec<Placed> {
        let mut rules = vec![("input", let_through()), ("input", accept(Rule::new().from_interface("lo")))];
        rules.extend(self.inbound("input", &Rule::new()));
        rules.push(("input", accept(opens(Rule::new().state(state::NEW)))));
        rules.push(("input", accept(Rule::new().ipv4().protocol(ICMP).is(Field::ICMP_TYPE, &[8]))));
        // Echo requests, and what neighbours and routers say.
        for kind in [128, 134, 135, 136] {
            rules.push(("input", accept(Rule::new().protocol(ICMPV6).is(Field::ICMP_TYPE, &[kind]))));
        }
        rules.push(("input", drop(Rule::new())));
        rules.extend(settle("settle_input"));
        rules
    }
}

/// Before anything is made of a packet: who may speak, and to whom.
fn early(down: &str, up: &str, boxed: [u8; 4]) -> Vec<Placed> {
    let from = |interface: &str| Rule::new().from_interface(interface);
    vec![
        ("early", drop(from(down).ipv6())),
        ("early", drop(from(up).ipv6())),
        ("early", drop(from(down).ipv4().is_not(Field::IPV4_SOURCE, &boxed))),
        ("early", drop(from(down).ipv4().is(Field::IPV4_DESTINATION, &boxed))),
        ("early", without_options(from(down))),
        ("early", drop(from(up).ipv4().is_not(Field::IPV4_DESTINATION, &boxed))),
        // Marks are the inspector's.
        ("early", from(down).set_mark(0)),
        ("early", from(up).set_mark(0)),
    ]
}
