//! Packets that rules have reported: copies of their first bytes, and why.

use std::io;
use std::os::fd::{AsRawFd, RawFd};

use crate::message::{ACK, Message, attributes, family_header, find};
use crate::socket::Socket;

const SUBSYSTEM: u16 = (libc::NFNL_SUBSYS_ULOG as u16) << 8;
const PACKET: u16 = SUBSYSTEM;
const CONFIG: u16 = SUBSYSTEM | 1;

const CFG_CMD: u16 = 1;
const CFG_MODE: u16 = 2;
const CFG_TIMEOUT: u16 = 4;
const CFG_QTHRESH: u16 = 5;
const BIND: u8 = 1;
const COPY_PACKET: u8 = 2;

const PAYLOAD: u16 = 9;
const PREFIX: u16 = 10;

/// A packet that a rule has reported.
#[derive(Clone, Debug)]
pub struct Report {
    /// What the rule said.
    pub prefix: String,
    /// The packet's first bytes, from the IP header on.
    pub payload: Vec<u8>,
}

/// Listens to a group.
#[derive(Debug)]
pub struct Log {
    socket: Socket,
}

impl Log {
    /// Becomes the one listener of a group in this network namespace; of each packet, `bytes` are copied.
    pub fn open(group: u16, bytes: u32) -> io::Result<Self> {
        let mut socket = Socket::netfilter()?;
        let config = || Message::new(CONFIG, ACK, &family_header(libc::AF_UNSPEC as u8, group));
        let mut mode = bytes.to_be_bytes().to_vec();
        mode.extend_from_slice(&[COPY_PACKET, 0]);
        socket.request(config().attribute(CFG_CMD, &[BIND]))?;
        // At once, not when enough of them have gathered.
        socket
            .request(config().attribute(CFG_MODE, &mode).network(CFG_TIMEOUT, 1).network(CFG_QTHRESH, 1))?;
        socket.listen()?;
        Ok(Self { socket })
    }

    /// What was reported; [`io::ErrorKind::WouldBlock`] if nothing was.
    pub fn receive(&mut self) -> io::Result<Vec<Report>> {
        let messages = self.socket.receive()?;
        let reports = messages.iter().filter(|(kind, ..)| *kind == PACKET).map(|(.., body)| {
            let all = attributes(body, 4);
            let prefix = find(&all, PREFIX).unwrap_or_default();
            Report {
                prefix: String::from_utf8_lossy(prefix).trim_end_matches('\0').to_owned(),
                payload: find(&all, PAYLOAD).unwrap_or_default().to_vec(),
            }
        });
        Ok(reports.collect())
    }
}

impl AsRawFd for Log {
    fn as_raw_fd(&self) -> RawFd {
        self.socket.as_raw_fd()
    }
}
