//! What the kernel's rules refused, as they report it: limited there, told to the audit here.

use std::io;
use std::sync::Arc;

use sandglass_netlink::log::{Log, Report};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use crate::audit::{Audit, Event, Gate};
use crate::inspect::packet::Packet;
use crate::policy::{Action, Rules};

/// Enough for the headers.
pub(super) const COPIED: u32 = 128;

/// The reports of refused packets; needs the runtime of tokio.
#[derive(Debug)]
pub struct Denials {
    log: Option<AsyncFd<Log>>,
}

impl Denials {
    /// Without a group the kernel cannot report, and nothing ever arrives.
    pub(super) fn open(group: Option<u16>) -> io::Result<Self> {
        let Some(group) = group else {
            return Ok(Self { log: None });
        };
        // SAFETY: the descriptor is the log's own, open as long as it lives, and never replaced.
        let log = unsafe { AsyncFd::register_with_interest(Log::open(group, COPIED)?, Interest::READABLE) };
        Ok(Self { log: Some(log?) })
    }

    /// Tells the audit of what is refused; ends only with an error.
    pub async fn run(mut self, rules: Arc<dyn Rules>, audit: Arc<dyn Audit>) -> io::Result<()> {
        let Some(log) = &mut self.log else {
            return std::future::pending().await;
        };
        loop {
            let mut ready = log.readable_mut().await?;
            match ready.get_inner_mut().receive() {
                Ok(reports) => {
                    reports
                        .iter()
                        .filter_map(|report| event(report, &*rules))
                        .for_each(|event| audit.tell(event));
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => ready.clear_ready(),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }
}

fn event(report: &Report, rules: &dyn Rules) -> Option<Event> {
    let packet = Packet::parse(&report.payload)?;
    let denied = rules.address(packet.tuple.destination).filter(|verdict| verdict.action == Action::Deny);
    let port = packet.tuple.destination_port;
    Some(Event::Denied {
        by: Gate::Firewall,
        host: None,
        address: Some(packet.tuple.destination),
        port: (port != 0).then_some(port),
        rule: denied.map_or_else(|| report.prefix.clone(), |verdict| verdict.rule),
    })
}
