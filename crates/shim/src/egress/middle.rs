//! The namespace between box and host: made, connected, and told to forward.
//!
//! It belongs to a user namespace of its own, of which the program's user is root: that is what gives the program power
//! over this one network and over nothing else. Both live as long as somebody holds them, which is the shim.
//! Invariant: the shim is in the host's network namespace whenever a function of this file has returned.

use std::fs::{self, File};
use std::io;
use std::net::Ipv4Addr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::pipe::{PipeFlags, pipe_with};
use rustix::process::{WaitId, WaitIdOptions, waitid};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use sandglass_netlink::route::{self, End, Namespace};
use sandglass_netlink::socket::Socket;

use crate::kernel::process::{Side, clone_child, exit_now};
use crate::network::link::{self, INSIDE, NEAR_MAC, far_mac, interface_index, named, sysctl, without_ipv6};
use crate::spec::NetworkSpec;

/// The interface to the host.
pub const UP: &str = "up";
/// The interface to the box.
pub const DOWN: &str = "down";
/// The program's own address. It is translated to the box's on the way to the host, which knows only that one.
pub const OWN: Ipv4Addr = Ipv4Addr::new(169, 254, 1, 3);
/// What the middle sends to: the host's end, which carries no address.
const NEXT: Ipv4Addr = Ipv4Addr::new(169, 254, 1, 2);

/// Handles that keep the namespaces alive.
#[derive(Debug)]
pub struct Middle {
    pub user: OwnedFd,
    pub net: OwnedFd,
}

impl Middle {
    /// Makes both namespaces; `user` of the host is the only one that exists in the new user namespace, as its root.
    pub fn make(user: u32) -> io::Result<Self> {
        let (hold, release) = pipe_with(PipeFlags::CLOEXEC)?;
        match clone_child(libc::CLONE_NEWUSER | libc::CLONE_NEWNET, None)? {
            Side::Child => {
                drop(release);
                // Holds the namespaces until the shim has handles of its own, or is gone.
                let _ = rustix::io::read(&hold, &mut [0; 1]);
                exit_now(0)
            }
            Side::Parent(holder) => {
                let made = Self::of(holder.pid.as_raw_nonzero().get(), user);
                drop(release);
                let _ = waitid(WaitId::PidFd(holder.pidfd.as_fd()), WaitIdOptions::EXITED);
                made
            }
        }
    }

    fn of(pid: i32, user: u32) -> io::Result<Self> {
        let map = format!("0 {user} 1\n");
        fs::write(format!("/proc/{pid}/uid_map"), &map)?;
        fs::write(format!("/proc/{pid}/gid_map"), &map)?;
        let open = |name: &str| File::open(format!("/proc/{pid}/ns/{name}")).map(OwnedFd::from);
        Ok(Self { user: open("user")?, net: open("net")? })
    }

    /// Lays the link to the host. Afterwards the host interface exists and is ours to remove.
    pub fn join_host(&self, spec: &NetworkSpec) -> io::Result<()> {
        let near = End { name: &spec.host_interface, mac: NEAR_MAC };
        // The host must not see a difference, so the middle's end has the Ethernet address that the box's would have.
        let far = End { name: UP, mac: far_mac(spec.address) };
        Socket::route()?
            .request(route::add_veth(&near, &far, Namespace::Open(self.net.as_fd()), spec.mtu))
            .map_err(named("create the veth pair to the host"))
    }

    /// Lays the link to the box and sets both up. The box's end is left to the box.
    pub fn join_box(&self, spec: &NetworkSpec, init_pid: i32) -> io::Result<()> {
        self.inside(|| {
            without_ipv6("all")?;
            without_ipv6("default")?;
            // The box speaks for its own address only, and nobody on the other side does.
            sysctl("ipv4/conf/all/rp_filter", "1")?;
            let mut netlink = Socket::route()?;
            let near = End { name: DOWN, mac: NEAR_MAC };
            let far = End { name: INSIDE, mac: far_mac(spec.address) };
            netlink
                .request(route::add_veth(&near, &far, Namespace::Of(init_pid), spec.mtu))
                .map_err(named("create the veth pair to the box"))?;
            let (up, down) = (interface_index(UP)?, interface_index(DOWN)?);
            netlink
                .transact(vec![
                    route::link_up(link::LOOPBACK),
                    route::link_up(down),
                    route::add_address(down, spec.gateway),
                    route::add_neighbour(down, spec.address, far_mac(spec.address)),
                    route::add_host_route(down, spec.address),
                    route::link_up(up),
                    route::add_address(up, OWN),
                    route::add_neighbour(up, NEXT, NEAR_MAC),
                    route::add_default_route_from(up, NEXT, OWN),
                ])
                .map_err(|(_, error)| named("set up the links of the egress namespace")(error))
        })
    }

    /// Lets packets through, as far as the rules do.
    pub fn forward(&self) -> io::Result<()> {
        self.inside(|| sysctl("ipv4/ip_forward", "1"))
    }

    fn inside<T>(&self, act: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
        let here = File::open("/proc/self/ns/net")?;
        enter(self.net.as_fd(), LinkNameSpaceType::Network)?;
        let done = act();
        if let Err(error) = enter(here.as_fd(), LinkNameSpaceType::Network) {
            // A shim in the wrong namespace would do harm with every later call.
            eprintln!("cannot leave the egress namespace: {error}");
            exit_now(3);
        }
        done
    }
}

/// Moves this process, which has one thread.
pub fn enter(namespace: BorrowedFd<'_>, kind: LinkNameSpaceType) -> io::Result<()> {
    Ok(move_into_link_name_space(namespace, Some(kind))?)
}
