//! Where the gates listen: out of reach of everybody but those whose packets are redirected.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use tokio::net::{TcpListener, TcpSocket, UdpSocket};

use crate::firewall::Placement;

const WAITING: u32 = 1024;

/// A listener for each family.
pub(super) fn streams(placement: &Placement, port: u16) -> io::Result<Vec<TcpListener>> {
    each(placement, port, |address, device| {
        let socket = if address.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
        socket.set_reuseaddr(true)?;
        socket.bind_device(device.map(str::as_bytes))?;
        socket.bind(address)?;
        socket.listen(WAITING)
    })
}

/// A socket for each family.
pub(super) fn packets(placement: &Placement, port: u16) -> io::Result<Vec<UdpSocket>> {
    each(placement, port, |address, device| {
        let socket = std::net::UdpSocket::bind(address)?;
        socket.set_nonblocking(true)?;
        let socket = UdpSocket::from_std(socket)?;
        socket.bind_device(device.map(str::as_bytes))?;
        Ok(socket)
    })
}

fn each<T>(
    placement: &Placement,
    port: u16,
    bind: impl Fn(SocketAddr, Option<&str>) -> io::Result<T>,
) -> io::Result<Vec<T>> {
    let at = |address: IpAddr| SocketAddr::new(address, port);
    match placement {
        // Redirected packets come for the interface's own address, whichever that is.
        Placement::Gateway { down, .. } => Ok(vec![bind(at(Ipv4Addr::UNSPECIFIED.into()), Some(down))?]),
        Placement::Shared { .. } => {
            let mut bound = vec![bind(at(Ipv4Addr::LOCALHOST.into()), None)?];
            match bind(at(Ipv6Addr::LOCALHOST.into()), None) {
                Ok(socket) => bound.push(socket),
                Err(error) if has_no_family(&error) => {}
                Err(error) => return Err(error),
            }
            Ok(bound)
        }
    }
}

/// Without IPv6 nothing can be sent by it either.
fn has_no_family(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EADDRNOTAVAIL | libc::EAFNOSUPPORT))
}
