//! The nftables table that keeps boxes apart from the host and from each other.
//!
//! Invariant: the whole table is replaced in one transaction, so there is no moment without rules.

use std::io;
use std::net::Ipv4Addr;

use sandglass_netlink::nft::batch::{Base, Batch, ChainKind, Holding, Hook, Key, Otherwise, Set};
use sandglass_netlink::nft::list;
use sandglass_netlink::nft::meter::Meter;
use sandglass_netlink::nft::rule::{Field, Rule, Verdict, state};
use sandglass_netlink::socket::Socket;

/// Boxes that are counted at a time; more are not limited.
const COUNTED: u32 = 65_535;

/// What the kernel offers beyond what no box could do without.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Limits {
    /// New and open connections of each box are limited.
    Kept,
    /// The kernel cannot count connections.
    Missing,
}

/// Puts the table for boxes whose host interfaces start with `prefix` in place.
pub fn install(prefix: &str, subnet: (Ipv4Addr, u8)) -> io::Result<Limits> {
    let mut socket = Socket::netfilter()?;
    let with_limits = table(prefix, subnet, Limits::Kept).commit(&mut socket);
    if with_limits.is_ok() {
        return Ok(Limits::Kept);
    }
    table(prefix, subnet, Limits::Missing).commit(&mut socket)?;
    Ok(Limits::Missing)
}

/// Whether the kernel can keep one box from filling the table of connections. To be called in a namespace of nobody's.
pub fn probe_limits() -> io::Result<()> {
    let mut batch = table("probe", (Ipv4Addr::new(192, 0, 2, 0), 24), Limits::Kept);
    batch.delete_table("probe");
    batch.commit(&mut Socket::netfilter()?)
}

fn table(prefix: &str, subnet: (Ipv4Addr, u8), limits: Limits) -> Batch {
    let table = prefix;
    let link_local = (Ipv4Addr::new(169, 254, 0, 0), 16);
    // Comparing fewer bytes than an interface name has is how `name*` is written.
    let from = || Rule::new().is(Field::InputInterface, prefix.as_bytes());
    let to = || Rule::new().is(Field::OutputInterface, prefix.as_bytes());
    let reply = |rule: Rule| rule.state(state::ESTABLISHED | state::RELATED).verdict(Verdict::Accept);
    let drop = |rule: Rule| rule.verdict(Verdict::Drop);
    let rules = [
        // Nobody speaks for an address that is not a box's, and no box asks the cloud's metadata service.
        ("forward", drop(from().is(Field::OutputInterface, prefix.as_bytes()))),
        ("forward", drop(outside(from().ipv4(), Field::IPV4_SOURCE, subnet))),
        ("forward", drop(inside(from().ipv4(), Field::IPV4_DESTINATION, link_local))),
        ("forward", from().verdict(Verdict::Accept)),
        ("forward", reply(to())),
        ("forward", drop(to())),
        ("input", reply(from())),
        ("input", drop(from())),
        (
            "postrouting",
            inside(Rule::new().ipv4(), Field::IPV4_SOURCE, subnet)
                .is_not(Field::OutputInterface, prefix.as_bytes())
                .masquerade(),
        ),
    ];
    let base = |kind, hook, priority| Base { kind, hook, priority, otherwise: Otherwise::Accept };
    let mut batch = Batch::new();
    batch.renew_table(table);
    batch.add_base_chain(table, "forward", base(ChainKind::Filter, Hook::Forward, 0));
    batch.add_base_chain(table, "input", base(ChainKind::Filter, Hook::Input, 0));
    batch.add_base_chain(table, "postrouting", base(ChainKind::Nat, Hook::Postrouting, 100));
    for (chain, rule) in &rules {
        batch.add_rule(table, chain, rule);
    }
    if limits == Limits::Kept {
        limit(&mut batch, table, from());
    }
    batch
}

/// Loses what is too much of one box, which TCP tries again. By the link, which a box cannot choose as it can an address, and of
/// which the next box with the same address has another.
fn limit(batch: &mut Batch, table: &str, from_box: Rule) {
    // Of this kind, because such a chain sees the first packet of each connection and no other.
    let chain = "prerouting";
    let first =
        Base { kind: ChainKind::Nat, hook: Hook::Prerouting, priority: -110, otherwise: Otherwise::Accept };
    batch.add_base_chain(table, chain, first);
    for meter in Meter::OF_ONE_SANDBOX {
        let (name, holding) = match meter {
            Meter::Rate { .. } => ("rates", Holding::Rates),
            Meter::Connections(_) => ("connections", Holding::Connections),
        };
        batch.add_set(table, &Set { name, key: Key::Interface, holding, size: Some(COUNTED) });
        let over = from_box.clone().over_for_each(Field::InputInterfaceIndex, name, meter);
        batch.add_rule(table, chain, &over.counted().verdict(Verdict::Drop));
    }
}

/// Removes the table; absent is fine.
pub fn uninstall(prefix: &str) -> io::Result<()> {
    let mut batch = Batch::new();
    // Adding first makes the deletion succeed either way.
    batch.add_table(prefix);
    batch.delete_table(prefix);
    batch.commit(&mut Socket::netfilter()?)
}

/// Whether the kernel offers nf_tables at all.
pub fn probe() -> io::Result<()> {
    list::probe()
}

/// Tables with a forward chain that drops what it does not know, as `table NAME chain NAME`.
pub fn foreign_forward_drops() -> io::Result<Vec<String>> {
    let forward = libc::NF_INET_FORWARD as u32;
    let chains = list::base_chains()?;
    let drops = chains.iter().filter(|chain| chain.drops && chain.hook == forward);
    Ok(drops.map(|chain| format!("table {} chain {}", chain.table, chain.name)).collect())
}

fn inside(rule: Rule, field: Field, (address, length): (Ipv4Addr, u8)) -> Rule {
    let mask = mask(length);
    rule.is_masked(field, &mask.to_be_bytes(), &(address.to_bits() & mask).to_be_bytes())
}

fn outside(rule: Rule, field: Field, (address, length): (Ipv4Addr, u8)) -> Rule {
    let mask = mask(length);
    rule.is_not_masked(field, &mask.to_be_bytes(), &(address.to_bits() & mask).to_be_bytes())
}

fn mask(length: u8) -> u32 {
    u32::MAX.checked_shl(32 - u32::from(length)).unwrap_or(0)
}
