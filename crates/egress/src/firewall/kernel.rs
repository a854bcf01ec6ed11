//! The table in the kernel.
//!
//! Invariants: the table exists from [`Firewall::open`] on and is never taken away, so what a worker leaves behind when
//! it dies is closed for everything new that it has not admitted; a change takes effect between two packets.
//! Bounds: 8,192 admitted addresses, those that would expire first go first; 8,192 cut connections. No transaction is longer
//! than some 100 KB, whatever the plan has in it: more than twice that is refused in a user namespace.

use std::collections::HashMap;
use std::fs;
use std::io;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use sandglass_netlink::nft::batch::{Batch, Holding, Key, Set};
use sandglass_netlink::nft::meter::Meter;
use sandglass_netlink::nft::rule::{QueueBy, Rule};
use sandglass_netlink::socket::Socket;

use super::denials::{COPIED, Denials};
use super::opened::Opened;
use super::placements::base_chains;
use super::plan::{Placement, Plan, Ports};
use super::rules::{CHAINS, FAMILIES, GROUP, Group, Ip, QUEUE, Ruleset, TCP, Tools};
use super::sets::{self, SOME, expiring};
use crate::inspect::packet::MULTIPATH;
use crate::policy::Action;

pub(super) const TABLE: &str = "sandglass-egress";
pub(super) const ADMITTED: usize = 8192;
const CUT: u32 = 8192;

/// The kernel's rules for one box.
#[derive(Debug)]
pub struct Firewall {
    pub(super) socket: Socket,
    pub(super) listing: Option<Socket>,
    placement: Placement,
    ports: Ports,
    tools: Tools,
    /// Of the last attempt to apply a plan.
    generation: u64,
    in_force: Option<InForce>,
    /// Sets that no rule names and that could not be taken away.
    left: Vec<String>,
    /// Admitted addresses and when each leaves the set.
    admitted: HashMap<IpAddr, Instant>,
    pub(super) opened: Opened,
}

/// The plan that the rules were made from, as far as it is needed later.
#[derive(Debug)]
struct InForce {
    generation: u64,
    default: Action,
    sets: Vec<String>,
}

impl Firewall {
    /// Puts the closed table in place of whatever this program has left behind. Connections that were let through
    /// before go on; nothing else leaves, and packets are lost rather than refused until [`Firewall::apply`].
    pub fn open(placement: Placement, ports: Ports) -> io::Result<Self> {
        let mut socket = Socket::netfilter().map_err(named("open a netlink socket"))?;
        // Something closed comes before finding out what the kernel has.
        let tools = Tools { queue: QueueBy::Expression, log: None, strip: false, count: false };
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
            listing: None,
            placement,
            ports,
            tools,
            generation: 0,
            in_force: None,
            left: Vec::new(),
            admitted: HashMap::new(),
            opened: Opened::default(),
        })
    }

    /// Makes a plan effective between two packets: rules, networks and admitted addresses. If it fails, what was in force
    /// before still is. Admitted addresses that the plan does not name are not admitted any more; of more than there is
    /// room for, the first ones are taken.
    pub fn apply(&mut self, plan: &Plan) -> io::Result<()> {
        let left = sets::unload(&mut self.socket, std::mem::take(&mut self.left));
        // A name that nothing which has failed has used.
        self.generation += 1;
        let admitted = self.admissible(plan);
        let loaded = sets::of(plan, &admitted, self.generation);
        let loading = sets::load(&mut self.socket, &loaded).map_err(named("load the addresses"));
        let names = loaded.into_iter().map(|set| set.name).collect();
        if let Err(error) = loading.and_then(|()| self.swap(plan)) {
            self.left = left;
            self.left.append(&mut sets::unload(&mut self.socket, names));
            return Err(error);
        }
        let now = InForce { generation: self.generation, default: plan.default, sets: names };
        let before = self.in_force.replace(now);
        self.admitted = admitted;
        // Afterwards, because it takes the longer the more there was.
        self.left = left;
        self.left.extend(before.map_or_else(Vec::new, |before| sets::unload(&mut self.socket, before.sets)));
        Ok(())
    }

    fn admissible(&self, plan: &Plan) -> HashMap<IpAddr, Instant> {
        let now = Instant::now();
        let mut admitted = HashMap::new();
        for (address, during) in &plan.dynamic {
            let has_room = admitted.len() < ADMITTED || admitted.contains_key(address);
            if self.carries(*address) && has_room {
                let until = admitted.entry(*address).or_insert(now);
                *until = (*until).max(now + *during);
            }
        }
        admitted
    }

    /// Puts the rules of the newest generation in place of the present ones.
    fn swap(&mut self, plan: &Plan) -> io::Result<()> {
        let mut batch = Batch::new();
        for (chain, _) in base_chains(&self.placement) {
            batch.flush_chain(TABLE, chain);
        }
        for chain in CHAINS {
            batch.flush_chain(TABLE, chain);
        }
        let (placement, ports, tools, generation) =
            (&self.placement, self.ports, self.tools, self.generation);
        for (chain, rule) in (Ruleset { placement, ports, tools, generation, plan: Some(plan) }).rules() {
            batch.add_rule(TABLE, chain, &rule);
        }
        batch.commit(&mut self.socket).map_err(named("install the rules"))
    }

    /// Lets the addresses of an allowed name be reached for a while; the later of two ends counts. Precedes the answer
    /// that tells of them. An error means that the answer must not be given. Where everything passes by default there is
    /// nothing to do.
    pub fn admit(&mut self, addresses: &[(IpAddr, Duration)]) -> io::Result<()> {
        let (generation, default) = match &self.in_force {
            Some(InForce { generation, default, .. }) => (*generation, *default),
            None => return Err(io::Error::other("no policy is in force yet")),
        };
        if default == Action::Allow {
            return Ok(());
        }
        let now = Instant::now();
        self.admitted.retain(|_, until| *until > now);
        let mut longer: HashMap<IpAddr, Instant> = HashMap::new();
        for (address, during) in addresses.iter().take(ADMITTED) {
            let until = now + *during;
            let known = longer.get(address).or_else(|| self.admitted.get(address));
            if self.carries(*address) && known.is_none_or(|known| *known < until) {
                longer.insert(*address, until);
            }
        }
        let gone = self.making_room_for(&longer);
        for family in FAMILIES {
            let set = Group::Dynamic.set(family, generation);
            let of_gone = gone.iter().map(|(address, until)| (address, until));
            for some in expiring(longer.iter(), family, now).chunks(SOME) {
                self.change(|batch| {
                    // Kernels differ in whether adding what is there changes its end; taking it away needs it to be there.
                    batch.add_elements(TABLE, &set, some);
                    batch.delete_elements(TABLE, &set, some);
                    batch.add_elements(TABLE, &set, some);
                })?;
            }
            for some in expiring(of_gone, family, now).chunks(SOME) {
                self.change(|batch| {
                    // It may have expired by itself.
                    batch.add_elements(TABLE, &set, some);
                    batch.delete_elements(TABLE, &set, some);
                })?;
            }
        }
        gone.iter().for_each(|(address, _)| _ = self.admitted.remove(address));
        self.admitted.extend(longer);
        Ok(())
    }

    /// Admitted addresses that have to go for new ones: those that would expire first.
    fn making_room_for(&self, new: &HashMap<IpAddr, Instant>) -> Vec<(IpAddr, Instant)> {
        let fresh = new.keys().filter(|address| !self.admitted.contains_key(address)).count();
        let excess = (self.admitted.len() + fresh).saturating_sub(ADMITTED);
        if excess == 0 {
            return Vec::new();
        }
        let others = self.admitted.iter().filter(|(address, _)| !new.contains_key(address));
        let mut others: Vec<_> = others.map(|(address, until)| (*address, *until)).collect();
        others.sort_unstable_by_key(|(_, until)| *until);
        others.truncate(excess);
        others
    }

    fn change(&mut self, fill: impl FnOnce(&mut Batch)) -> io::Result<()> {
        let mut batch = Batch::new();
        fill(&mut batch);
        batch.commit(&mut self.socket).map_err(named("admit addresses"))
    }

    /// The reports of what the rules refuse; to be called in the runtime that they will be read in.
    pub fn denials(&self) -> io::Result<Denials> {
        Denials::open(self.tools.log).map_err(named("listen to the rules"))
    }

    /// What the inspector tells [`Firewall::cut`].
    pub(crate) fn opened(&self) -> Opened {
        self.opened.clone()
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
    let strip = accepts(Rule::new().protocol(TCP).strip_tcp_option(MULTIPATH)).is_ok();
    let count = accepts(Meter::OF_ONE_SANDBOX.into_iter().fold(Rule::new(), Rule::over)).is_ok();
    Ok(Tools { queue, log, strip, count })
}

pub(super) fn named(step: &'static str) -> impl Fn(io::Error) -> io::Error {
    move |error| io::Error::new(error.kind(), format!("cannot {step}: {error}"))
}
