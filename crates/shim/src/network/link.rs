//! A box's interface: a veth pair that is routed, not bridged.
//!
//! The host has a route to the box's one address over the near end; the box has a default route over the far end,
//! through a gateway address that nobody carries. Both ends know each other's Ethernet address, so nothing is asked.

use std::fs;
use std::io;
use std::net::Ipv4Addr;

use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};
use sandglass_netlink::route::{self, End, Mac, Namespace};
use sandglass_netlink::socket::Socket;

use crate::spec::NetworkSpec;

/// Name of the interface inside.
pub const INSIDE: &str = "eth0";

/// The index of `lo` in every network namespace.
pub const LOOPBACK: u32 = 1;

/// The near end's address, the same for every box: only the box at the other end ever sees it.
pub const NEAR_MAC: Mac = [0x0a, 0x58, 0xa9, 0xfe, 0x01, 0x01];

/// Makes the pair, its far end in the network namespace of `init_pid`, and the host's half of the set-up.
pub fn attach(spec: &NetworkSpec, init_pid: i32) -> io::Result<()> {
    let mut netlink = Socket::route()?;
    let near = End { name: &spec.host_interface, mac: NEAR_MAC };
    let far = End { name: INSIDE, mac: far_mac(spec.address) };
    netlink
        .request(route::add_veth(&near, &far, Namespace::Of(init_pid), spec.mtu))
        .map_err(named("create the veth pair"))
}

/// The host's half, which the box does not wait for.
pub fn open_host_side(spec: &NetworkSpec) -> io::Result<()> {
    let name = &spec.host_interface;
    sysctl(&format!("ipv4/conf/{name}/rp_filter"), "1")?;
    without_ipv6(name)?;
    let index = interface_index(name)?;
    Socket::route()?
        .transact(vec![
            route::link_up(index),
            route::add_host_route(index, spec.address),
            route::add_neighbour(index, spec.address, far_mac(spec.address)),
        ])
        .map_err(|(_, error)| named("set up the host's end of the veth pair")(error))
}

/// Runs in the box's namespace, before its interface exists: loopback, and no IPv6 on anything that comes later.
pub fn open_loopback() -> io::Result<()> {
    without_ipv6("default")?;
    Socket::route()?.request(route::link_up(LOOPBACK)).map_err(named("bring up loopback"))
}

/// Runs in the box's namespace, once its interface exists.
pub fn open_box_side(spec: &NetworkSpec) -> io::Result<()> {
    let index = interface_index(INSIDE)?;
    Socket::route()?
        .transact(vec![
            route::link_up(index),
            route::add_address(index, spec.address),
            route::add_neighbour(index, spec.gateway, NEAR_MAC),
            route::add_default_route(index, spec.gateway),
        ])
        .map_err(|(_, error)| named("set up the box's end of the veth pair")(error))
}

/// Takes the pair away; absent is fine. The route goes with it.
pub fn detach(host_interface: &str) -> io::Result<()> {
    match Socket::route()?.request(route::delete_link(host_interface)) {
        Err(error) if error.raw_os_error() == Some(libc::ENODEV) => Ok(()),
        other => other.map_err(named("delete the veth pair")),
    }
}

/// The far end's address, from that of the box.
pub fn far_mac(address: Ipv4Addr) -> Mac {
    let [a, b, c, d] = address.octets();
    [0x0a, 0x58, a, b, c, d]
}

pub fn interface_index(name: &str) -> io::Result<u32> {
    let socket = socket_with(AddressFamily::INET, SocketType::DGRAM, SocketFlags::CLOEXEC, None)?;
    Ok(rustix::net::netdevice::name_to_index(socket, name)?)
}

/// Turns IPv6 off for an interface, `default` or `all`. Absent where the kernel has none, which is as good.
pub fn without_ipv6(interface: &str) -> io::Result<()> {
    match sysctl(&format!("ipv6/conf/{interface}/disable_ipv6"), "1") {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

pub fn sysctl(name: &str, value: &str) -> io::Result<()> {
    let path = format!("/proc/sys/net/{name}");
    fs::write(&path, value).map_err(|error| io::Error::new(error.kind(), format!("{path}: {error}")))
}

pub fn named(step: &'static str) -> impl Fn(io::Error) -> io::Error {
    move |error| io::Error::new(error.kind(), format!("cannot {step}: {error}"))
}
