//! The nftables table that keeps boxes apart from the host and from each other.
//!
//! Invariant: the whole table is replaced in one transaction, so there is no moment without rules.

use std::io;
use std::net::Ipv4Addr;

use sandglass_netlink::nft::batch::{Base, Batch, ChainKind, Hook, Otherwise};
use sandglass_netlink::nft::list;
use sandglass_netlink::nft::rule::{Field, Rule, Verdict, state};
use sandglass_netlink::socket::Socket;

/// Puts the table for boxes whose host interfaces start with `prefix` in place.
pub fn install(prefix: &str, subnet: (Ipv4Addr, u8)) -> io::Result<()> {
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
    batch.commit(&mut Socket::netfilter()?)
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
