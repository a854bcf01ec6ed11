//! The subnet of one state directory's boxes: which one it is, and that no other server on this machine has it.
//!
//! Addresses and routes tell only of boxes that exist. A server without any is seen by a socket with an abstract name, bound for as long as
//! the server lives: such names belong to the network namespace, as routes do, and are gone with the process.
//! Invariant: a server that has boxes gets the subnet they are in, or does not start.

use std::{
    fs, io,
    net::Ipv4Addr,
    os::{
        linux::net::SocketAddrExt,
        unix::net::{SocketAddr, UnixListener},
    },
    thread,
    time::{Duration, Instant},
};

use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use sandglass_sandbox::ports::{RuntimeErrorKind, runtime::RuntimeError};
use sandglass_shim::host_network::{self, Subnet};

use super::network::{describe, failed};

/// What the names of all servers start with; the subnet follows.
const NAME: &str = "sandglass-subnet-";
/// How long a server that is ending may take to let go of its subnet. The state directory is free a little earlier than the name: the
/// kernel closes one after the other, and a program that is just being started has copies of both.
const PATIENCE: Duration = Duration::from_secs(2);
const PAUSE: Duration = Duration::from_millis(20);

/// A subnet that is no other server's until this is dropped.
#[derive(Debug)]
pub(super) struct Held {
    pub(super) subnet: Subnet,
    _name: Option<UnixListener>,
}

/// Who has the name of a subnet.
#[derive(Debug, PartialEq)]
enum Holder {
    Server(Option<i32>),
    /// Any user may bind any name, and must not be able to keep a server from its boxes by it.
    Stranger,
}

/// The subnet of a server without boxes: `saved`, the one it had, if that is still free, or else the first free candidate.
pub(super) fn choose(saved: Option<Subnet>, candidates: &[Subnet]) -> Result<Held, RuntimeError> {
    let mut had = None;
    if let Some(saved) = saved {
        had = await_claim(saved)?;
        // What another server's boxes have shows in the routes even while that server is down.
        if unrouted(saved)?
            && let Some(held) = had.take()
        {
            return Ok(held);
        }
    }
    for candidate in candidates {
        // Claimed first: of two servers that start at once, one would otherwise look before the other has it.
        if let Some(held) = claim(*candidate)?
            && unrouted(*candidate)?
        {
            return Ok(held);
        }
    }
    // A route to all private networks, of a VPN for example, does not keep a server from starting that has started before.
    had.ok_or_else(|| {
        failed("no free subnet among 10.201.0.0/16 to 10.254.0.0/16; set [embedded] subnet to one that nothing on this machine uses")
    })
}

/// `subnet` and no other: it is configured, or boxes have addresses in it.
///
/// # Errors
/// When another server that lives has it, or one that overlaps; `remedy` says what to do besides stopping that server.
pub(super) fn keep(subnet: Subnet, remedy: &str) -> Result<Held, RuntimeError> {
    if let Some(held) = await_claim(subnet)? {
        return Ok(held);
    }
    let mut names = overlapping(subnet)?;
    names.push(name(subnet));
    for name in names {
        if let Holder::Server(pid) = holder(&name) {
            let who = pid.map_or_else(String::new, |pid| format!(" (process {pid})"));
            let whose = name.trim_start_matches(NAME);
            return Err(RuntimeError::new(
                RuntimeErrorKind::Failed,
                "network",
                format!("another server on this machine{who} has the subnet {whose}; stop it, or {remedy}"),
            ));
        }
    }
    tracing::warn!(subnet = %text(subnet), "a program that is no server has bound the name that guards the subnet; going on without");
    Ok(Held { subnet, _name: None })
}

pub(super) fn candidates() -> Vec<Subnet> {
    (201..=254)
        .rev()
        .map(|second| Subnet { address: Ipv4Addr::new(10, second, 0, 0), prefix_len: 16 })
        .collect()
}

fn unrouted(subnet: Subnet) -> Result<bool, RuntimeError> {
    let free = host_network::pick_free_subnet(&[subnet]).map_err(|e| failed(describe(&e)))?;
    Ok(free.is_some())
}

fn await_claim(subnet: Subnet) -> Result<Option<Held>, RuntimeError> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let held = claim(subnet)?;
        if held.is_some() || Instant::now() >= deadline {
            return Ok(held);
        }
        thread::sleep(PAUSE);
    }
}

fn claim(subnet: Subnet) -> Result<Option<Held>, RuntimeError> {
    let socket = match SocketAddr::from_abstract_name(name(subnet)).and_then(|a| UnixListener::bind_addr(&a))
    {
        Ok(socket) => socket,
        Err(e) if e.kind() == io::ErrorKind::AddrInUse => return Ok(None),
        Err(e) => return Err(failed(format!("cannot hold the subnet {}: {e}", text(subnet)))),
    };
    // Bound before this: of two servers with overlapping subnets that start at once, one at least sees the other.
    let others = overlapping(subnet)?;
    let taken = others.iter().any(|name| holder(name) != Holder::Stranger);
    Ok((!taken).then_some(Held { subnet, _name: Some(socket) }))
}

/// The names in use whose subnets overlap `subnet`, without its own.
fn overlapping(subnet: Subnet) -> Result<Vec<String>, RuntimeError> {
    let table = fs::read("/proc/net/unix").map_err(|e| failed(format!("cannot read /proc/net/unix: {e}")))?;
    let mut found: Vec<String> = String::from_utf8_lossy(&table)
        .lines()
        .filter_map(|line| line.split_whitespace().last()?.strip_prefix('@'))
        .filter(|name| parsed(name).is_some_and(|other| other != subnet && other.overlaps(subnet)))
        .map(str::to_owned)
        .collect();
    // Connections that nobody accepts have the name as well.
    found.sort_unstable();
    found.dedup();
    Ok(found)
}

fn holder(name: &str) -> Holder {
    let ask = || {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        rustix::net::connect(&socket, &SocketAddrUnix::new_abstract_name(name.as_bytes())?)?;
        rustix::io::Result::Ok(rustix::net::sockopt::socket_peercred(&socket))
    };
    match ask() {
        Ok(Ok(peer)) if peer.uid == rustix::process::geteuid() => Holder::Server(Some(peer.pid.as_raw_pid())),
        // Its process has no number in this namespace of processes: a server in a container that shares the host's network.
        Ok(Err(_)) => Holder::Server(None),
        Ok(Ok(_)) | Err(_) => Holder::Stranger,
    }
}

fn text(subnet: Subnet) -> String {
    format!("{}/{}", subnet.address, subnet.prefix_len)
}

fn name(subnet: Subnet) -> String {
    format!("{NAME}{}", text(subnet))
}

fn parsed(name: &str) -> Option<Subnet> {
    let (address, len) = name.strip_prefix(NAME)?.split_once('/')?;
    Some(Subnet { address: address.parse().ok()?, prefix_len: len.parse().ok()? })
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;

    /// Subnets that no other test and no other process that runs these tests has: 240.0.0.0/4 is routed nowhere.
    fn fresh(prefix_len: u8) -> Subnet {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let n = NEXT.fetch_add(1, Ordering::Relaxed);
        assert!(n < 16, "the next process's subnets would be taken");
        let bits = 0xf000_0000 | ((std::process::id() & 0x3f_ffff) << 6) | (n << 2);
        Subnet { address: Ipv4Addr::from(bits), prefix_len }
    }

    #[test]
    fn two_servers_choose_different_subnets_and_an_ended_one_frees_its_own() {
        let candidates = [fresh(30), fresh(30)];
        let first = choose(None, &candidates).unwrap();
        let second = choose(None, &candidates).unwrap();
        assert_eq!([first.subnet, second.subnet], candidates);
        assert!(choose(None, &candidates).unwrap_err().to_string().contains("no free subnet"));
        drop(first);
        // It may wait: a program that another test is just starting has a copy of the socket for a moment.
        assert_eq!(choose(Some(candidates[0]), &candidates).unwrap().subnet, candidates[0]);
    }

    #[test]
    fn the_subnet_a_server_had_is_kept_unless_another_lives_in_it() {
        let (saved, other) = (fresh(30), fresh(30));
        let held = choose(Some(saved), &[other, saved]).unwrap();
        assert_eq!(held.subnet, saved);
        assert_eq!(choose(Some(saved), &[saved, other]).unwrap().subnet, other);
    }

    #[test]
    fn a_server_with_boxes_waits_for_the_one_before_it() {
        let subnet = fresh(30);
        let before = keep(subnet, "").unwrap();
        let ending = thread::spawn(move || {
            thread::sleep(PAUSE * 5);
            drop(before);
        });
        assert_eq!(keep(subnet, "").unwrap().subnet, subnet);
        ending.join().unwrap();
    }

    #[test]
    fn a_configured_subnet_that_another_server_has_or_overlaps_is_refused() {
        let subnet = fresh(30);
        let part = Subnet { prefix_len: 31, ..subnet };
        let _held = keep(subnet, "").unwrap();
        for wanted in [subnet, part] {
            let refused = keep(wanted, "set another").unwrap_err().to_string();
            let expected = format!("(process {}) has the subnet {}", std::process::id(), text(subnet));
            assert!(refused.contains(&expected) && refused.contains("set another"), "{refused}");
        }
        assert!(choose(None, &[part]).is_err());
    }

    #[test]
    fn a_name_that_no_server_has_bound_keeps_no_server_from_its_boxes() {
        let subnet = fresh(30);
        let squatter = rustix::net::socket(AddressFamily::UNIX, SocketType::STREAM, None).unwrap();
        let address = SocketAddrUnix::new_abstract_name(name(subnet).as_bytes()).unwrap();
        rustix::net::bind(&squatter, &address).unwrap();
        assert_eq!(keep(subnet, "").unwrap().subnet, subnet);
    }
}
