//! The table in the kernel.
//!
//! Invariants: the table exists from [`Firewall::open`] on and is never taken away, so what a worker leaves behind when
//! it dies is closed for everything new that it has not admitted; a change takes effect between two packets.
//! Bounds: 16,384 admitted addresses and 8,192 cut connections.

use std::collections::HashMap;
use std::fs;
use std::io;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use sandglass_netlink::conntrack::{self, Tuple};
use sandglass_netlink::nft::batch::{Batch, Element, Holding, Key, Set};
use sandglass_netlink::nft::rule::{QueueBy, Rule};
use sandglass_netlink::socket::Socket;

use super::denials::{COPIED, Denials};
use super::opened::Opened;
use super::placements::base_chains;
use super::plan::{Doh, Placement, Plan, Ports};
use super::ranges::merged;
use super::rules::{CHAINS, FAMILIES, GROUP, Group, Ip, OPEN, PENDING, QUEUE, Ruleset, TCP, Tools};
use crate::policy::Action;

const TABLE: &str = "sandglass-egress";
const ADMITTED: u32 = 16_384;
const CUT: u32 = 8192;
/// How long the far end of a connection that was cut cannot take it up again.
const CUT_FOR: Duration = Duration::from_secs(24 * 60 * 60);

/// A connection of the box that was let through, or is being inspected.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Connection {
    /// One of `IPPROTO_*`.
    pub protocol: u8,
    pub address: IpAddr,
    /// Zero where the protocol has no ports.
    pub port: u16,
    /// The name that it asked for, if it was inspected, asked for one, and that is remembered.
    pub host: Option<String>,
}

/// The kernel's rules for one box.
#[derive(Debug)]
pub struct Firewall {
    socket: Socket,
    placement: Placement,
    ports: Ports,
    tools: Tools,
    generation: u64,
    applied: bool,
    /// Admitted addresses and when each leaves the set.
    admitted: HashMap<IpAddr, Instant>,
    opened: Opened,
}

impl Firewall {
    /// Puts the closed table in place of whatever this program has left behind. Connections that were let through
    /// before go on; nothing else leaves, and packets are lost rather than refused until [`Firewall::apply`].
    pub fn open(placement: Placement, ports: Ports) -> io::Result<Self> {
        let mut socket = Socket::netfilter().map_err(named("open a netlink socket"))?;
        // Something closed comes before finding out what the kernel has.
        let tools = Tools { queue: QueueBy::Expression, log: None };
        let mut batch = Batch::new();
        batch.renew_table(TABLE);
        for (chain, base) in base_chains(&placement) {
            batch.add_base_chain(TABLE, chain, base);
        }
        for chain in CHAINS {
            batch.add_chain(TABLE, chain);
        }
        for family in FAMILIES {
            let key = if family == Ip::V4 { Key::Ipv4Port } else { Key::Ipv6Port };
            let name = family.cut();
            batch.add_set(TABLE, &Set { name: &name, key, holding: Holding::Expiring, size: Some(CUT) });
        }
        let closed = Ruleset { placement: &placement, ports, tools, generation: 0, plan: None };
        for (chain, rule) in closed.rules() {
            batch.add_rule(TABLE, chain, &rule);
        }
        batch.commit(&mut socket).map_err(named("install the closed table"))?;
        if let Placement::Gateway { .. } = placement {
            let path = "/proc/sys/net/ipv4/ip_forward";
            fs::write(path, "1").map_err(named("turn on forwarding"))?;
        }
        let tools = find_out(&mut socket)?;
        Ok(Self {
            socket,
            placement,
            ports,
            tools,
            generation: 0,
            applied: false,
            admitted: HashMap::new(),
            opened: Opened::default(),
        })
    }

    /// Makes a plan effective in one transaction: rules, networks and admitted addresses. If it fails, what was in force
    /// before still is. Admitted addresses that the plan does not name are not admitted any more.
    pub fn apply(&mut self, plan: &Plan) -> io::Result<()> {
        let generation = self.generation + 1;
        let now = Instant::now();
        let mut admitted = HashMap::new();
        for (address, during) in &plan.dynamic {
            if self.carries(*address) && admitted.len() < ADMITTED as usize {
                let until = admitted.entry(*address).or_insert(now);
                *until = (*until).max(now + *during);
            }
        }
        let mut batch = Batch::new();
        for (chain, _) in base_chains(&self.placement) {
            batch.flush_chain(TABLE, chain);
        }
        for chain in CHAINS {
            batch.flush_chain(TABLE, chain);
        }
        for family in FAMILIES {
            for group in Group::ALL {
                add_set(&mut batch, (group, family, generation), members(plan, &admitted, (group, family)));
            }
        }
        let (placement, ports, tools) = (&self.placement, self.ports, self.tools);
        for (chain, rule) in (Ruleset { placement, ports, tools, generation, plan: Some(plan) }).rules() {
            batch.add_rule(TABLE, chain, &rule);
        }
        if self.applied {
            for family in FAMILIES {
                Group::ALL.iter().for_each(|g| batch.delete_set(TABLE, &g.set(family, self.generation)));
            }
        }
        batch.commit(&mut self.socket).map_err(named("install the rules"))?;
        self.generation = generation;
        self.applied = true;
        self.admitted = admitted;
        Ok(())
    }

    /// Lets the addresses of an allowed name be reached for a while; the later of two ends counts. Precedes the answer
    /// that tells of them. An error means that the answer must not be given.
    pub fn admit(&mut self, addresses: &[(IpAddr, Duration)]) -> io::Result<()> {
        if !self.applied {
            return Err(io::Error::other("no policy is in force yet"));
        }
        let now = Instant::now();
        self.admitted.retain(|_, until| *until > now);
        let mut longer: HashMap<IpAddr, Instant> = HashMap::new();
        for (address, during) in addresses {
            let until = now + *during;
            let known = longer.get(address).or_else(|| self.admitted.get(address));
            if self.carries(*address) && known.is_none_or(|known| *known < until) {
                longer.insert(*address, until);
            }
        }
        if longer.is_empty() {
            return Ok(());
        }
        if self.admitted.len() + longer.len() > ADMITTED as usize {
            return Err(io::Error::other(format!("{ADMITTED} addresses are admitted already")));
        }
        let mut batch = Batch::new();
        for family in FAMILIES {
            let set = Group::Dynamic.set(family, self.generation);
            let new: Vec<Element> = expiring(&longer, family, now);
            // Kernels differ in whether adding what is there changes its end; taking it away needs it to be there.
            batch.add_elements(TABLE, &set, &new);
            batch.delete_elements(TABLE, &set, &new);
            batch.add_elements(TABLE, &set, &new);
        }
        batch.commit(&mut self.socket).map_err(named("admit addresses"))?;
        self.admitted.extend(longer);
        Ok(())
    }

    /// Ends connections that may not stay, and says how many. Follows [`Firewall::apply`]; what a gate has taken over is
    /// the gate's to end. The box's next packet is reset; the far end cannot take the connection up again either.
    pub fn cut(&mut self, may_stay: &dyn Fn(&Connection) -> bool) -> io::Result<usize> {
        let all = conntrack::connections(&mut self.socket).map_err(named("list connections"))?;
        let ours = all.iter().filter(|connection| connection.mark & (OPEN | PENDING) != 0);
        let ended: Vec<_> = ours
            .filter(|connection| {
                let tuple = &connection.original;
                !may_stay(&Connection {
                    protocol: tuple.protocol,
                    address: tuple.destination,
                    port: tuple.destination_port,
                    host: self.opened.host(tuple),
                })
            })
            .collect();
        self.keep_out(ended.iter().map(|connection| &connection.original))?;
        for connection in &ended {
            conntrack::forget(&mut self.socket, connection).map_err(named("end a connection"))?;
            self.opened.forget(&connection.original);
        }
        Ok(ended.len())
    }

    /// The reports of what the rules refuse; to be called in the runtime that they will be read in.
    pub fn denials(&self) -> io::Result<Denials> {
        Denials::open(self.tools.log).map_err(named("listen to the rules"))
    }

    /// What the inspector tells [`Firewall::cut`].
    pub(crate) fn opened(&self) -> Opened {
        self.opened.clone()
    }

    /// The far ends of these connections cannot make new ones out of them.
    fn keep_out<'a>(&mut self, tuples: impl Iterator<Item = &'a Tuple> + Clone) -> io::Result<()> {
        for family in FAMILIES {
            let of_family = tuples
                .clone()
                .filter(|tuple| tuple.protocol == TCP && tuple.destination.is_ipv4() == (family == Ip::V4));
            let ends = of_family
                .map(|tuple| Element::ExpiringPort(tuple.destination, tuple.destination_port, CUT_FOR));
            for some in ends.collect::<Vec<_>>().chunks(500) {
                let mut batch = Batch::new();
                batch.add_elements(TABLE, &family.cut(), some);
                match batch.commit(&mut self.socket) {
                    // The set is full: the connections are cut nevertheless.
                    Err(error) if error.raw_os_error() == Some(libc::ENFILE) => {}
                    other => other.map_err(named("keep connections from coming back"))?,
                }
            }
        }
        Ok(())
    }

    fn carries(&self, address: IpAddr) -> bool {
        match self.placement {
            Placement::Gateway { .. } => address.is_ipv4(),
            Placement::Shared { .. } => true,
        }
    }
}

/// Tries what kernels differ in, in tables that never come to be.
fn find_out(socket: &mut Socket) -> io::Result<Tools> {
    let mut accepts = |rule: Rule| {
        let probe = "sandglass-egress-probe";
        let mut batch = Batch::new();
        batch.renew_table(probe);
        batch.add_chain(probe, "probe");
        batch.add_rule(probe, "probe", &rule);
        batch.delete_table(probe);
        batch.commit(socket)
    };
    let by_expression = accepts(Rule::new().queue(QUEUE, QueueBy::Expression));
    let queue = match by_expression {
        Ok(()) => QueueBy::Expression,
        Err(_) => {
            let by_target = accepts(Rule::new().queue(QUEUE, QueueBy::Target));
            by_target.map_err(named(
                "queue packets: the kernel has neither nft_queue nor xt_NFQUEUE with nft_compat",
            ))?;
            QueueBy::Target
        }
    };
    let log = accepts(Rule::new().log(GROUP, "default", COPIED)).is_ok().then_some(GROUP);
    Ok(Tools { queue, log })
}

fn add_set(batch: &mut Batch, (group, family, generation): (Group, Ip, u64), members: Vec<Element>) {
    let name = group.set(family, generation);
    let key = if family == Ip::V4 { Key::Ipv4 } else { Key::Ipv6 };
    let (holding, size) = match group {
        // Those that have expired count until the kernel has tidied up.
        Group::Dynamic => (Holding::Expiring, Some(4 * ADMITTED)),
        Group::Exempt => (Holding::Values, None),
        _ => (Holding::Ranges, None),
    };
    batch.add_set(TABLE, &Set { name: &name, key, holding, size });
    batch.add_elements(TABLE, &name, &members);
}

fn members(plan: &Plan, admitted: &HashMap<IpAddr, Instant>, (group, family): (Group, Ip)) -> Vec<Element> {
    let ruled = |wanted: Action| {
        merged(
            plan.networks.iter().filter(|(action, _)| *action == wanted).map(|(_, network)| network),
            family,
        )
    };
    let of_family = |address: &&IpAddr| address.is_ipv4() == (family == Ip::V4);
    match group {
        Group::Allow => ruled(Action::Allow),
        Group::Deny => ruled(Action::Deny),
        Group::Doh => match &plan.doh {
            Doh::Refuse(list) => merged(list.iter(), family),
            Doh::Pass | Doh::RefuseEverywhere => Vec::new(),
        },
        Group::Exempt => {
            plan.dns_exempt.iter().filter(of_family).map(|address| Element::Address(*address)).collect()
        }
        Group::Dynamic => expiring(admitted, family, Instant::now()),
    }
}

fn expiring(admitted: &HashMap<IpAddr, Instant>, family: Ip, now: Instant) -> Vec<Element> {
    let wanted =
        admitted.iter().filter(|(address, until)| address.is_ipv4() == (family == Ip::V4) && **until > now);
    wanted.map(|(address, until)| Element::Expiring(*address, *until - now)).collect()
}

fn named(step: &'static str) -> impl Fn(io::Error) -> io::Error {
    move |error| io::Error::new(error.kind(), format!("cannot {step}: {error}"))
}
