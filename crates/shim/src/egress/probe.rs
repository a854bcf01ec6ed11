//! Can this kernel enforce egress policies? Each kind of rule is tried in a network namespace that nobody else uses.

use std::io;
use std::os::fd::AsFd;

use rustix::thread::LinkNameSpaceType;
use sandglass_netlink::conntrack;
use sandglass_netlink::nft::batch::{Base, Batch, ChainKind, Hook, Otherwise};
use sandglass_netlink::nft::rule::{QueueBy, Reject, Rule};
use sandglass_netlink::socket::Socket;

use super::middle::{Middle, OWN, enter};

const TABLE: &str = "probe";
/// `nobody`, for the moment that the namespace exists.
const USER: u32 = 65_534;

/// What is there, or what is missing.
pub fn probe() -> Result<String, String> {
    match in_middle(missing) {
        Ok(missing) if missing.is_empty() => Ok("available".into()),
        Ok(missing) => Err(format!("the kernel lacks {}", missing.join(", "))),
        Err(error) => Err(error.to_string()),
    }
}

/// Does something in a namespace like those between box and host, which ends with it.
pub fn in_middle<T: Send>(act: impl FnOnce() -> io::Result<T> + Send) -> io::Result<T> {
    let without = |error| io::Error::other(format!("no namespace for the enforcer: {error}"));
    let middle = Middle::make(USER).map_err(without)?;
    let inside = || {
        enter(middle.net.as_fd(), LinkNameSpaceType::Network)?;
        act()
    };
    // A thread of its own, because it stays in the namespace that it enters.
    let done = std::thread::scope(|scope| scope.spawn(inside).join());
    done.unwrap_or_else(|_| Err(io::Error::other("the probe ended early")))
}

fn missing() -> io::Result<Vec<&'static str>> {
    let mut socket = Socket::netfilter()?;
    let tcp = || Rule::new().ipv4().protocol(libc::IPPROTO_TCP as u8);
    let ways = [
        ("redirection (nft_redir)", Hook::Prerouting, vec![tcp().redirect(1)]),
        ("address translation (nft_nat)", Hook::Postrouting, vec![tcp().rewrite_source(OWN.into())]),
        ("marks of connections (nft_ct)", Hook::Forward, vec![tcp().set_connection_mark(1).state(2)]),
        ("refusal (nft_reject)", Hook::Forward, vec![tcp().reject(Reject::TcpReset)]),
        (
            "queues (nft_queue, or xt_NFQUEUE and nft_compat)",
            Hook::Forward,
            vec![tcp().queue(1, QueueBy::Expression), tcp().queue(1, QueueBy::Target)],
        ),
    ];
    let mut missing = Vec::new();
    for (name, hook, rules) in ways {
        if !rules.iter().any(|rule| accepted(&mut socket, hook, rule)) {
            missing.push(name);
        }
    }
    if conntrack::connections(&mut socket).is_err() {
        missing.push("lists of connections (nf_conntrack_netlink)");
    }
    Ok(missing)
}

fn accepted(socket: &mut Socket, hook: Hook, rule: &Rule) -> bool {
    let kind = match hook {
        Hook::Prerouting | Hook::Postrouting => ChainKind::Nat,
        Hook::Input | Hook::Forward | Hook::Output => ChainKind::Filter,
    };
    let mut batch = Batch::new();
    batch.renew_table(TABLE);
    batch.add_base_chain(TABLE, "probe", Base { kind, hook, priority: 0, otherwise: Otherwise::Accept });
    batch.add_rule(TABLE, "probe", rule);
    batch.commit(socket).is_ok()
}
