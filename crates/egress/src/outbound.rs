//! Our own connections to the outside: never held up by our own rules, and never through an address that a name must not lead to.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, AsRawFd};
use std::sync::Arc;
use std::time::Duration;

use rustls::crypto::ring;
use tokio::net::{TcpSocket, TcpStream, UdpSocket};
use tokio::time::timeout;

use crate::dns::upstream::Upstreams;

const TIME_TO_CONNECT: Duration = Duration::from_secs(5);

/// Below the kernel's usual range for clients, which begins at 32768.
const FIRST_OWN: u16 = 16_384;
const LAST_OWN: u16 = 32_767;

/// Ports that are tried before the kernel chooses one.
const TRIES: usize = 16;

/// How our packets are told from the sandbox's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mark {
    None,
    Set(u32),
}

impl Mark {
    fn put(self, socket: &impl AsFd) -> io::Result<()> {
        let Self::Set(mark) = self else { return Ok(()) };
        // SAFETY: the pointer is to a value of the given size that lives longer than the call.
        let done = unsafe {
            libc::setsockopt(
                socket.as_fd().as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_MARK,
                (&raw const mark).cast(),
                size_of::<u32>() as libc::socklen_t,
            )
        };
        if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }

    /// A connection to this address.
    pub async fn tcp(self, address: SocketAddr) -> io::Result<TcpStream> {
        let socket = if address.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
        self.put(&socket)?;
        timeout(TIME_TO_CONNECT, socket.connect(address)).await?
    }

    /// A socket of a random port that takes packets from this address only.
    pub async fn udp(self, address: SocketAddr) -> io::Result<UdpSocket> {
        let any: IpAddr = if address.is_ipv4() { [0; 4].into() } else { [0; 16].into() };
        let socket = own_port(any).await?;
        self.put(&socket)?;
        socket.connect(address).await?;
        Ok(socket)
    }
}

/// Where both share an address, the kernel takes a question of ours and one of the sandbox's between the same ports for one connection, and
/// treats the second like the first. So ours are not from the range that the kernel gives to clients.
async fn own_port(address: IpAddr) -> io::Result<UdpSocket> {
    for _ in 0..TRIES {
        let mut bytes = [0; 2];
        ring::default_provider()
            .secure_random
            .fill(&mut bytes)
            .map_err(|_| io::Error::other("no random numbers"))?;
        let port = FIRST_OWN + u16::from_ne_bytes(bytes) % (LAST_OWN - FIRST_OWN + 1);
        match UdpSocket::bind((address, port)).await {
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => {}
            other => return other,
        }
    }
    UdpSocket::bind((address, 0)).await
}

/// Connects to hosts by name.
#[derive(Clone)]
pub struct Outbound {
    pub mark: Mark,
    pub upstreams: Arc<Upstreams>,
}

impl Outbound {
    /// Tries the host's addresses one after the other.
    pub async fn connect(&self, host: &str, port: u16) -> io::Result<TcpStream> {
        let mut last = io::Error::new(io::ErrorKind::NotFound, format!("{host} has no address"));
        for address in self.addresses(host).await? {
            match self.mark.tcp(SocketAddr::new(address, port)).await {
                Ok(stream) => return Ok(stream),
                Err(error) => last = error,
            }
        }
        Err(last)
    }

    async fn addresses(&self, host: &str) -> io::Result<Vec<IpAddr>> {
        match host.trim_start_matches('[').trim_end_matches(']').parse() {
            Ok(address) => Ok(vec![address]),
            Err(_) => self.upstreams.addresses(host).await,
        }
    }
}
