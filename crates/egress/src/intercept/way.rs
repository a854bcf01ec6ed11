//! The way in and out: where a redirected connection wanted to go, and how this process gets there itself.

use std::future::Future;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsRawFd, RawFd};
use std::pin::Pin;
use std::time::Duration;

use tokio::net::{TcpSocket, TcpStream};

/// A future of a trait object.
pub type Pending<T> = Pin<Box<dyn Future<Output = io::Result<T>> + Send>>;

/// What the interceptor needs from the kernel and the resolver.
pub trait Way: Send + Sync {
    /// Where this connection went before it was redirected.
    fn destination(&self, stream: &TcpStream) -> io::Result<SocketAddr>;

    /// A connection of this process' own, which is not redirected.
    fn connect(&self, address: SocketAddr) -> Pending<TcpStream>;

    /// Addresses of a name, for the configured proxy only.
    fn resolve(&self, name: &str) -> Pending<Vec<IpAddr>>;
}

/// The kernel's connection tracking, sockets with a mark, and the system's resolver.
#[derive(Clone, Copy, Debug, Default)]
pub struct Kernel {
    /// Tells this process' packets from the sandbox's where both share a network.
    pub mark: Option<u32>,
}

const SO_ORIGINAL_DST: libc::c_int = 80;
const CONNECT: Duration = Duration::from_secs(10);

impl Way for Kernel {
    fn destination(&self, stream: &TcpStream) -> io::Result<SocketAddr> {
        match stream.local_addr()? {
            SocketAddr::V4(_) => original_v4(stream.as_raw_fd()),
            SocketAddr::V6(_) => original_v6(stream.as_raw_fd()),
        }
    }

    fn connect(&self, address: SocketAddr) -> Pending<TcpStream> {
        let mark = self.mark;
        Box::pin(async move {
            let socket = if address.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
            if let Some(mark) = mark {
                set_mark(socket.as_raw_fd(), mark)?;
            }
            let stream = tokio::time::timeout(CONNECT, socket.connect(address))
                .await
                .map_err(|_| io::ErrorKind::TimedOut)??;
            settle(&stream)?;
            Ok(stream)
        })
    }

    fn resolve(&self, name: &str) -> Pending<Vec<IpAddr>> {
        let name = name.to_owned();
        Box::pin(async move {
            Ok(tokio::net::lookup_host((name, 0)).await?.map(|address| address.ip()).collect())
        })
    }
}

/// Sends small pieces at once and notices a peer that is gone.
pub(super) fn settle(stream: &TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    rustix::net::sockopt::set_socket_keepalive(stream, true)?;
    rustix::net::sockopt::set_tcp_keepidle(stream, Duration::from_secs(60))?;
    rustix::net::sockopt::set_tcp_keepintvl(stream, Duration::from_secs(30))?;
    Ok(())
}

fn set_mark(socket: RawFd, mark: u32) -> io::Result<()> {
    let size = libc::socklen_t::try_from(size_of::<u32>()).expect("four fits");
    // SAFETY: the descriptor is open for the length of the call and the value lives on this stack.
    let done =
        unsafe { libc::setsockopt(socket, libc::SOL_SOCKET, libc::SO_MARK, (&raw const mark).cast(), size) };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

fn original_v4(socket: RawFd) -> io::Result<SocketAddr> {
    let mut address = libc::sockaddr_in {
        sin_family: 0,
        sin_port: 0,
        sin_addr: libc::in_addr { s_addr: 0 },
        sin_zero: [0; 8],
    };
    let mut size = libc::socklen_t::try_from(size_of_val(&address)).expect("an address is small");
    // SAFETY: the kernel writes at most `size` bytes of a `sockaddr_in` into one.
    let done = unsafe {
        libc::getsockopt(socket, libc::SOL_IP, SO_ORIGINAL_DST, (&raw mut address).cast(), &raw mut size)
    };
    if done != 0 {
        return Err(io::Error::last_os_error());
    }
    let ip = Ipv4Addr::from(u32::from_be(address.sin_addr.s_addr));
    Ok(SocketAddr::from((ip, u16::from_be(address.sin_port))))
}

fn original_v6(socket: RawFd) -> io::Result<SocketAddr> {
    let mut address = libc::sockaddr_in6 {
        sin6_family: 0,
        sin6_port: 0,
        sin6_flowinfo: 0,
        sin6_addr: libc::in6_addr { s6_addr: [0; 16] },
        sin6_scope_id: 0,
    };
    let mut size = libc::socklen_t::try_from(size_of_val(&address)).expect("an address is small");
    // SAFETY: the kernel writes at most `size` bytes of a `sockaddr_in6` into one.
    let done = unsafe {
        libc::getsockopt(socket, libc::SOL_IPV6, SO_ORIGINAL_DST, (&raw mut address).cast(), &raw mut size)
    };
    if done != 0 {
        return Err(io::Error::last_os_error());
    }
    let ip = Ipv6Addr::from(address.sin6_addr.s6_addr).to_canonical();
    Ok(SocketAddr::from((ip, u16::from_be(address.sin6_port))))
}
