//! The consumer of the kernel's queue.

use std::io;
use std::sync::Arc;

use sandglass_netlink::conntrack;
use sandglass_netlink::queue::{Fate, Packet as Waiting, Queue};
use sandglass_netlink::socket::Socket;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use super::flows::{Flows, Word};
use super::packet::Packet;
use crate::audit::Audit;
use crate::firewall::{Firewall, MARK_NAMED, MARK_OPEN, MARK_REFUSE, QUEUE};
use crate::policy::Rules;

/// Packets that wait at a time, 64 KiB of the kernel's memory each at most; more are lost, and sent again.
const WAITING: u32 = 1024;
/// Packets after which other tasks of the worker have their turn.
const TURN: usize = 64;

/// Decides about the first packets of connections; while it does not run, they are dropped.
pub struct Inspector {
    queue: AsyncFd<Queue>,
    connections: Socket,
    flows: Flows,
    audit: Arc<dyn Audit>,
}

impl Inspector {
    /// Takes over the queue; to be called in the runtime that it will run in.
    pub fn open(firewall: &Firewall, rules: Arc<dyn Rules>, audit: Arc<dyn Audit>) -> io::Result<Self> {
        let queue = Queue::open(QUEUE, WAITING)?;
        // SAFETY: the descriptor is the queue's own, open as long as it lives, and never replaced.
        let queue = unsafe { AsyncFd::register_with_interest(queue, Interest::READABLE) }?;
        Ok(Self {
            queue,
            connections: Socket::netfilter()?,
            flows: Flows::new(rules, firewall.opened()),
            audit,
        })
    }

    /// Decides about packets as they come; ends only with an error.
    pub async fn run(mut self) -> io::Result<()> {
        let mut since = 0;
        loop {
            let mut ready = self.queue.readable_mut().await?;
            match ready.get_inner_mut().receive() {
                Ok(packets) => {
                    since += packets.len();
                    for packet in &packets {
                        self.decide(packet)?;
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => ready.clear_ready(),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
            if since >= TURN {
                since = 0;
                tokio::task::yield_now().await;
            }
        }
    }

    fn decide(&mut self, waiting: &Waiting) -> io::Result<()> {
        let usable = waiting.whole && Packet::is_intact(&waiting.payload);
        let packet = if usable { Packet::parse(&waiting.payload) } else { None };
        let (word, event) = packet.as_ref().map_or((Word::Drop, None), |packet| self.flows.judge(packet));
        let fate = match word {
            Word::Pass => Fate::Accept { mark: 0 },
            Word::Open => Fate::Accept { mark: MARK_OPEN },
            Word::OpenNamed => Fate::Accept { mark: MARK_NAMED },
            Word::Refuse => Fate::Accept { mark: MARK_REFUSE },
            Word::Drop => Fate::Drop,
        };
        match self.queue.get_mut().decide(waiting.id, fate) {
            // The packet is gone, with its interface or because the rules have changed.
            Err(error) if error.raw_os_error() == Some(libc::ENOENT) => {}
            other => other?,
        }
        if let (Word::Refuse, Some(packet)) = (word, packet) {
            // What is refused does not stay in the kernel's list until it has been idle for days.
            conntrack::forget_tuple(&mut self.connections, &packet.tuple)?;
        }
        if let Some(event) = event {
            self.audit.tell(event);
        }
        Ok(())
    }
}
