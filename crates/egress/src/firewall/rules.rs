//! The rules that both placements have in common.
//!
//! Invariants: every chain on a packet's way out ends with a decision; a connection that was let through is known by its
//! mark and stays so until it is forgotten; one that is still being inspected goes through the queue in both directions;
//! what has no mark is judged anew, packet by packet. A TCP packet of a connection that the kernel does not know is
//! never the beginning of one, so a connection that was forgotten does not come back, from neither side.

use sandglass_netlink::nft::meter::Meter;
use sandglass_netlink::nft::rule::{Checksum, Field, QueueBy, Reject, Rule, Verdict, state};

use super::denials::COPIED;
use super::plan::{Doh, NameGate, Placement, Plan, Ports};
use crate::inspect::packet::MULTIPATH;
use crate::policy::Action;

/// The queue that the inspector has open.
pub(crate) const QUEUE: u16 = 18;
/// The group that refused packets are reported to.
pub(super) const GROUP: u16 = 18;
/// The inspector's word on a packet: open its connection, refuse it, open its connection, which asked for a host by name.
pub(crate) const MARK_OPEN: u32 = 0x5347_0001;
pub(crate) const MARK_REFUSE: u32 = 0x5347_0002;
pub(crate) const MARK_NAMED: u32 = 0x5347_0003;

/// Bits of a connection's mark: it was let through, or it is being inspected.
const OPEN: u32 = 1;
const PENDING: u32 = 2;
/// Either of both, so that the kernel can pick out those that a change of the rules may end.
pub(super) const FOLLOWED: u32 = 4;
/// It was let through for the name that it asked for.
pub(super) const NAMED: u32 = 8;
/// It was let through because of its address's names, and what it carries is not inspected.
const UNREAD: u32 = 16;

/// Reports of refused packets in a second, and in a first burst.
const REPORTS: (u32, u32) = (20, 50);

pub(super) const TCP: u8 = libc::IPPROTO_TCP as u8;
pub(super) const UDP: u8 = libc::IPPROTO_UDP as u8;
pub(super) const ICMP: u8 = libc::IPPROTO_ICMP as u8;
pub(super) const ICMPV6: u8 = libc::IPPROTO_ICMPV6 as u8;
const IGMP: u8 = libc::IPPROTO_IGMP as u8;
const FIN_SYN_RST_ACK: u8 = 0x17;
const SYN: u8 = 0x02;

/// What this kernel has.
#[derive(Clone, Copy, Debug)]
pub(super) struct Tools {
    pub queue: QueueBy,
    /// Absent where the kernel cannot report packets.
    pub log: Option<u16>,
    /// Whether it can take options out of TCP packets.
    pub strip: bool,
    /// Whether it can count connections.
    pub count: bool,
}

/// Sets of addresses of both families.
#[derive(Clone, Copy, Debug)]
pub(super) enum Group {
    Allow,
    Deny,
    Doh,
    Exempt,
    Dynamic,
}

impl Group {
    /// Those that the rules of a plan look into.
    pub fn of(plan: &Plan) -> impl Iterator<Item = Self> {
        let all = [Self::Allow, Self::Deny, Self::Doh, Self::Exempt, Self::Dynamic];
        // Where everything passes by default nobody asks which addresses names have led to.
        let has = |group: &Self| !(matches!(group, Self::Dynamic) && plan.default == Action::Allow);
        all.into_iter().filter(has)
    }

    /// A name that no earlier generation has used, so that old rules find old sets.
    pub fn set(self, family: Ip, generation: u64) -> String {
        let stem = match self {
            Self::Allow => "allow",
            Self::Deny => "deny",
            Self::Doh => "doh",
            Self::Exempt => "exempt",
            Self::Dynamic => "dynamic",
        };
        format!("{stem}{}_{generation}", family.digit())
    }
}

/// The set of ports whose connections are intercepted.
pub(super) fn intercepted(generation: u64) -> String {
    format!("intercept_{generation}")
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ip {
    V4,
    V6,
}

impl Ip {
    pub fn digit(self) -> u8 {
        match self {
            Self::V4 => 4,
            Self::V6 => 6,
        }
    }

    pub fn only(self, rule: Rule) -> Rule {
        match self {
            Self::V4 => rule.ipv4(),
            Self::V6 => rule.ipv6(),
        }
    }

    pub fn destination(self) -> Field {
        match self {
            Self::V4 => Field::IPV4_DESTINATION,
            Self::V6 => Field::IPV6_DESTINATION,
        }
    }

    pub fn source(self) -> Field {
        match self {
            Self::V4 => Field::IPV4_SOURCE,
            Self::V6 => Field::IPV6_SOURCE,
        }
    }

    /// Remote ends of connections that were cut.
    pub fn cut(self) -> String {
        format!("cut{}", self.digit())
    }
}

pub(super) const FAMILIES: [Ip; 2] = [Ip::V4, Ip::V6];

/// Chains that others go to.
pub(super) const CHAINS: [&str; 9] =
    ["egress", "named", "open", "open_unread", "refuse", "refuse_dns", "refuse_quic", "reject", "lose"];

/// A rule and its chain.
pub(super) type Placed = (&'static str, Rule);

/// What the rules depend on.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ruleset<'a> {
    pub placement: &'a Placement,
    pub ports: Ports,
    pub tools: Tools,
    pub generation: u64,
    /// Without one, nothing new passes.
    pub plan: Option<&'a Plan>,
}

impl Ruleset<'_> {
    /// All rules, in order.
    pub fn rules(&self) -> Vec<Placed> {
        let mut rules = self.placed();
        rules.extend(self.egress());
        rules.extend(self.named());
        rules.extend(self.ends());
        rules
    }

    /// First packets of more connections than one sandbox may have are lost, which TCP tries again. The count begins anew with
    /// each policy; what the host counts does not.
    pub fn divert_excess(&self, start: &Rule) -> Vec<Placed> {
        if self.plan.is_none() || !self.tools.count {
            return Vec::new();
        }
        Meter::OF_ONE_SANDBOX.map(|meter| ("divert", go(start.clone().over(meter), "lose"))).into()
    }

    /// First packets that ask for names go to the DNS gate.
    pub fn divert_dns(&self, start: &Rule) -> Vec<Placed> {
        let mut rules = Vec::new();
        if self.plan.is_some() {
            for protocol in [UDP, TCP] {
                let asks = start.clone().protocol(protocol).destination_port(53);
                rules.extend(self.members(&asks, Group::Exempt).map(|rule| ("divert", accept(rule))));
                rules.push(("divert", asks.redirect(self.ports.dns)));
            }
        }
        rules
    }

    /// First packets of connections to intercepted ports go to the gate, if the address may be reached at all: what may
    /// not is refused by the rules behind.
    pub fn divert_gate(&self, start: &Rule) -> Vec<Placed> {
        let Some(plan) = self.plan else {
            return Vec::new();
        };
        let mut rules = Vec::new();
        let mut add = |rule| rules.push(("divert", rule));
        self.members(start, Group::Deny).into_iter().for_each(|rule| add(accept(rule)));
        let to = |port: u16| start.clone().protocol(TCP).destination_port(port);
        let by_name = plan.names == NameGate::On;
        if !plan.intercept.is_empty() {
            // A set, so that the rules are as many for a thousand ports as for one.
            let ports = intercepted(self.generation);
            let to_any = start.clone().protocol(TCP).in_set(Field::DESTINATION_PORT, &ports);
            match plan.default {
                Action::Allow => add(to_any.redirect(self.ports.gate)),
                Action::Deny => {
                    let allowed = self.members(&to_any, Group::Allow);
                    let named = self.members(&to_any, Group::Dynamic);
                    allowed.into_iter().chain(named).for_each(|rule| add(rule.redirect(self.ports.gate)));
                }
            }
        }
        self.members(start, Group::Allow).into_iter().for_each(|rule| add(accept(rule)));
        for port in plan.named_http.iter().filter(|_| by_name) {
            match plan.default {
                Action::Allow => add(to(*port).redirect(self.ports.gate)),
                Action::Deny => self
                    .members(&to(*port), Group::Dynamic)
                    .into_iter()
                    .for_each(|rule| add(rule.redirect(self.ports.gate))),
            }
        }
        rules
    }

    /// What comes in and is no new connection; then, what must not become one.
    pub fn inbound(&self, chain: &'static str, start: &Rule) -> Vec<Placed> {
        let start = || start.clone();
        let mut rules = vec![(chain, drop(start().state(state::INVALID)))];
        if self.plan.is_some() {
            // The other side's acknowledgement is what the inspector believes.
            let pending = start().protocol(TCP).answering().has_any(Field::ConnectionMark, PENDING);
            rules.push((chain, pending.queue(QUEUE, self.tools.queue)));
        }
        rules.push((chain, accept(start().state(state::ESTABLISHED | state::RELATED))));
        for family in FAMILIES {
            let ends = [family.source(), Field::SOURCE_PORT];
            let again = family.only(start()).protocol(TCP).in_set_of(&ends, &family.cut());
            rules.push((chain, drop(again)));
        }
        rules
    }

    /// Everything from the box to elsewhere.
    fn egress(&self) -> Vec<Placed> {
        let mut rules: Vec<Placed> = Vec::new();
        let mut add = |rule: Rule| rules.push(("egress", rule));
        // No options: some of them name another destination.
        add(drop(Rule::new().ipv4().is_not_masked(Field::Network { offset: 0, length: 1 }, &[0x0f], &[5])));
        add(drop(Rule::new().state(state::INVALID)));
        add(accept(Rule::new().state(state::ESTABLISHED).answering()));
        for protocol in [ICMP, ICMPV6] {
            add(accept(Rule::new().protocol(protocol).state(state::RELATED)));
        }
        let Some(plan) = self.plan else {
            add(drop(Rule::new()));
            return rules;
        };
        let unknown = Rule::new().protocol(TCP).state(state::NEW);
        add(unknown.is_not_masked(Field::TCP_FLAGS, &[FIN_SYN_RST_ACK], &[SYN]).reject(Reject::TcpReset));
        // The kernel's own talk with its neighbours.
        add(drop(Rule::new().protocol(IGMP)));
        for kind in [133, 135, 136] {
            add(accept(Rule::new().protocol(ICMPV6).is(Field::ICMP_TYPE, &[kind])));
        }
        add(drop(Rule::new().protocol(ICMPV6).is(Field::ICMP_TYPE, &[143])));
        self.members(&Rule::new(), Group::Deny).into_iter().for_each(|rule| add(refuse(rule)));
        self.special(plan).into_iter().for_each(&mut add);
        self.members(&Rule::new(), Group::Allow).into_iter().for_each(|rule| add(go(rule, "open")));
        match (plan.default, plan.names) {
            (Action::Deny, NameGate::Off) => add(refuse(Rule::new())),
            (Action::Allow, NameGate::Off) => add(go(Rule::new(), "open")),
            (Action::Allow, NameGate::On) => add(go(Rule::new(), "named")),
            (Action::Deny, NameGate::On) => {
                self.members(&Rule::new(), Group::Dynamic)
                    .into_iter()
                    .for_each(|rule| add(go(rule, "named")));
                // The address may have expired while its first bytes were being inspected.
                let begun = Rule::new().state(state::ESTABLISHED).has_any(Field::ConnectionMark, PENDING);
                add(go(begun, "named"));
                add(refuse(Rule::new()));
            }
        }
        rules
    }

    /// Ports with rules of their own, which come before what is allowed.
    fn special(&self, plan: &Plan) -> Vec<Rule> {
        let to = |protocol, port| Rule::new().protocol(protocol).destination_port(port);
        let hidden = |rule| go(rule, "refuse_dns");
        let mut rules = vec![hidden(to(TCP, 853)), hidden(to(UDP, 853))];
        for protocol in [TCP, UDP] {
            match &plan.doh {
                Doh::Pass => {}
                Doh::Refuse(_) => rules.extend(self.members(&to(protocol, 443), Group::Doh).map(hidden)),
                Doh::RefuseEverywhere => rules.push(hidden(to(protocol, 443))),
            }
        }
        if plan.intercept.contains(&443) {
            rules.push(go(to(UDP, 443), "refuse_quic"));
        }
        for protocol in [UDP, TCP] {
            let asks = self.members(&to(protocol, 53), Group::Exempt);
            rules.extend(asks.map(|rule| go(rule, "open")));
        }
        // All other questions were sent to the DNS gate with their first packet, unless the kernel took them for more of a
        // question of ours.
        rules.extend([UDP, TCP].map(|protocol| hidden(to(protocol, 53))));
        rules
    }

    /// To addresses that may be reached for their name's sake only.
    fn named(&self) -> Vec<Placed> {
        let Some(plan) = self.plan else {
            return Vec::new();
        };
        let mut rules: Vec<Placed> = Vec::new();
        let mut add = |rule: Rule| rules.push(("named", rule));
        // What is inspected arrives: no packet runs out of hops between here and the server. Two bytes, because the
        // checksum is made of such; the other one, the protocol, stays.
        let hops = (8, 2);
        add(Rule::new().ipv4().protocol(TCP).write(hops, &[0xff, 0], &[64, 0], Checksum::Ipv4Header));
        add(Rule::new().ipv6().protocol(TCP).write((7, 1), &[0xff], &[64], Checksum::None));
        if self.tools.strip {
            // Over several ways at once, bytes arrive in another order than on any of them. Without the option the two sides
            // agree on ordinary TCP; where it cannot be taken out, the inspector refuses the beginning.
            add(opens(Rule::new()).strip_tcp_option(MULTIPATH));
        }
        let inspected = Rule::new().protocol(TCP).set_connection_mark(PENDING | FOLLOWED);
        add(inspected.queue(QUEUE, self.tools.queue));
        // QUIC would carry a name that is not looked at: on its port, and wherever a connection of it begins.
        add(go(Rule::new().protocol(UDP).destination_port(443), "refuse_quic"));
        begins_quic(&Rule::new()).into_iter().for_each(|rule| add(go(rule, "refuse_quic")));
        add(go(Rule::new().protocol(UDP), "open_unread"));
        match plan.default {
            Action::Allow => add(go(Rule::new(), "open")),
            Action::Deny => {
                for (protocol, echo) in [(ICMP, 8), (ICMPV6, 128)] {
                    add(go(Rule::new().protocol(protocol).is(Field::ICMP_TYPE, &[echo]), "open"));
                }
                add(refuse(Rule::new()));
            }
        }
        rules
    }

    fn ends(&self) -> Vec<Placed> {
        let mut rules = vec![
            ("open", accept(Rule::new().set_connection_mark(OPEN | FOLLOWED))),
            ("open_unread", accept(Rule::new().set_connection_mark(OPEN | FOLLOWED | UNREAD))),
        ];
        // The reports name what decided, unless it was a rule about the address.
        for (chain, reason) in
            [("refuse", "default"), ("refuse_dns", "encrypted DNS"), ("refuse_quic", "QUIC hides names")]
        {
            if let Some(group) = self.tools.log {
                let (each_second, burst) = REPORTS;
                rules.push((chain, Rule::new().at_most(each_second, burst).log(group, reason, COPIED)));
            }
            rules.push((chain, go(Rule::new(), "reject")));
        }
        if let Some(group) = self.tools.log {
            let (each_second, burst) = REPORTS;
            let report = Rule::new().at_most(each_second, burst).log(group, "too many connections", COPIED);
            rules.push(("lose", report));
        }
        rules.push(("lose", drop(Rule::new())));
        rules.push(("reject", Rule::new().protocol(TCP).reject(Reject::TcpReset)));
        rules.push(("reject", Rule::new().reject(Reject::Prohibited)));
        rules
    }

    /// `start` for destinations in a group of sets.
    fn members(&self, start: &Rule, group: Group) -> [Rule; 2] {
        FAMILIES.map(|family| {
            let set = group.set(family, self.generation);
            family.only(start.clone()).in_set(family.destination(), &set)
        })
    }

    /// Before there is a plan, packets are lost rather than refused, so that whoever waits for an answer asks again.
    pub fn refuse_or_drop(&self, rule: Rule) -> Rule {
        if self.plan.is_some() { refuse(rule) } else { drop(rule) }
    }
}

/// What follows from the inspector's word.
pub(super) fn settle(chain: &'static str) -> [Placed; 3] {
    let said = |mark: u32| Rule::new().is(Field::Mark, &mark.to_ne_bytes());
    let opens = |mark, bits| (chain, accept(said(mark).set_connection_mark(bits).set_mark(0)));
    [
        opens(MARK_OPEN, OPEN | FOLLOWED),
        opens(MARK_NAMED, OPEN | FOLLOWED | NAMED),
        (chain, said(MARK_REFUSE).set_mark(0).reject(Reject::TcpReset)),
    ]
}

/// Most packets belong to connections that were decided about long ago.
pub(super) fn let_through() -> Rule {
    accept(Rule::new().state(state::ESTABLISHED).has_any(Field::ConnectionMark, OPEN))
}

/// Packets of the box for which [`let_through`] is too generous: what was let through for its address's names may be anything
/// but QUIC, which hides the name that it asks for, and may begin with any packet. Where a rule allows the address it passes.
pub(super) fn not_let_through(from_box: &Rule) -> [Rule; 2] {
    begins_quic(&from_box.clone().protocol(UDP).has_any(Field::ConnectionMark, UNREAD))
        .map(|rule| go(rule, "refuse_quic"))
}

/// The first packets of both versions of QUIC.
fn begins_quic(start: &Rule) -> [Rule; 2] {
    [[0, 0, 0, 1], [0x6b, 0x33, 0x43, 0xcf]].map(|version| {
        let mut value = vec![0xc0];
        value.extend_from_slice(&version);
        let first = Field::Transport { offset: 8, length: 5 };
        start.clone().protocol(UDP).is_masked(first, &[0xc0, 0xff, 0xff, 0xff, 0xff], &value)
    })
}

/// IPv4 with options is lost: some of them name another destination.
pub(super) fn without_options(rule: Rule) -> Rule {
    drop(rule.ipv4().is_not_masked(Field::Network { offset: 0, length: 1 }, &[0x0f], &[5]))
}

/// The first packet of a TCP connection and no other.
pub(super) fn opens(rule: Rule) -> Rule {
    rule.protocol(TCP).is_masked(Field::TCP_FLAGS, &[FIN_SYN_RST_ACK], &[SYN])
}

pub(super) fn accept(rule: Rule) -> Rule {
    rule.verdict(Verdict::Accept)
}

pub(super) fn drop(rule: Rule) -> Rule {
    rule.verdict(Verdict::Drop)
}

pub(super) fn go(rule: Rule, chain: &str) -> Rule {
    rule.verdict(Verdict::Goto(chain))
}

fn refuse(rule: Rule) -> Rule {
    go(rule, "refuse")
}
