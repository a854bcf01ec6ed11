//! The sets that a generation of rules looks into. They are complete before a rule names them, so that they may be loaded in
//! as many transactions as it takes and the rules are swapped by one that is always small.

use std::collections::HashMap;
use std::io;
use std::net::IpAddr;
use std::time::Instant;

use sandglass_netlink::nft::batch::{Batch, Element, Holding, Key, Set};
use sandglass_netlink::socket::Socket;

use super::kernel::{ADMITTED, TABLE};
use super::plan::{Doh, Plan};
use super::ranges::merged;
use super::rules::{FAMILIES, Group, Ip, intercepted};
use crate::policy::Action;

/// Bytes after which a transaction is carried out, less than half of what a socket takes anywhere.
const TRANSACTION: usize = 64 << 10;
/// Elements between two looks at how long it has become.
pub(super) const SOME: usize = 500;

/// A set and everything that is in it.
#[derive(Debug)]
pub(super) struct Loaded {
    pub name: String,
    key: Key,
    holding: Holding,
    size: Option<u32>,
    members: Vec<Element>,
}

/// The sets of a plan under the names of a generation.
pub(super) fn of(plan: &Plan, admitted: &HashMap<IpAddr, Instant>, generation: u64) -> Vec<Loaded> {
    let mut sets = Vec::new();
    for family in FAMILIES {
        for group in Group::of(plan) {
            let (holding, size) = match group {
                // Those that have expired count until the kernel has tidied up.
                Group::Dynamic => (Holding::Expiring, Some(4 * ADMITTED as u32)),
                Group::Exempt => (Holding::Values, None),
                Group::Allow | Group::Deny | Group::Doh => (Holding::Ranges, None),
            };
            sets.push(Loaded {
                name: group.set(family, generation),
                key: if family == Ip::V4 { Key::Ipv4 } else { Key::Ipv6 },
                holding,
                size,
                members: members(plan, admitted, (group, family)),
            });
        }
    }
    let ports = plan.intercept.iter().map(|port| Element::Port(*port)).collect();
    sets.push(Loaded {
        name: intercepted(generation),
        key: Key::Port,
        holding: Holding::Values,
        size: None,
        members: ports,
    });
    sets
}

/// Makes them. After an error any of them may be there, in part.
pub(super) fn load(socket: &mut Socket, sets: &[Loaded]) -> io::Result<()> {
    let mut batch = Batch::new();
    for set in sets {
        let Loaded { name, key, holding, size, members } = set;
        batch.add_set(TABLE, &Set { name, key: *key, holding: *holding, size: *size });
        for some in members.chunks(SOME) {
            batch.add_elements(TABLE, name, some);
            if batch.length() > TRANSACTION {
                std::mem::take(&mut batch).commit(socket)?;
            }
        }
    }
    batch.commit(socket)
}

/// Takes sets away that no rule names, and returns those that are still there.
pub(super) fn unload(socket: &mut Socket, names: Vec<String>) -> Vec<String> {
    let mut unload = |names: &[String]| {
        let mut batch = Batch::new();
        names.iter().for_each(|name| batch.delete_set(TABLE, name));
        batch.commit(socket)
    };
    if unload(&names).is_ok() {
        return Vec::new();
    }
    // Some of them may never have come to be.
    let is_left = |name: &String| {
        unload(std::slice::from_ref(name)).is_err_and(|error| error.raw_os_error() != Some(libc::ENOENT))
    };
    names.into_iter().filter(is_left).collect()
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
        Group::Dynamic => expiring(admitted.iter(), family, Instant::now()),
    }
}

/// Those of a family that are not over yet.
pub(super) fn expiring<'a>(
    admitted: impl Iterator<Item = (&'a IpAddr, &'a Instant)>,
    family: Ip,
    now: Instant,
) -> Vec<Element> {
    let wanted = admitted.filter(|(address, until)| address.is_ipv4() == (family == Ip::V4) && **until > now);
    wanted.map(|(address, until)| Element::Expiring(*address, *until - now)).collect()
}
