//! Which host name led to which connection, for as long as the connection may matter.
//!
//! Bound: 8,192 connections, the oldest are forgotten first; a name has at most 253 bytes. The kernel knows of each connection
//! whether it had a name, so one that is forgotten is not taken for one that never had any.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, PoisonError};

use sandglass_netlink::conntrack::Tuple;

const BOUND: usize = 8192;

/// Connections that the inspector has opened, with the name that each asked for; shared by clones.
#[derive(Clone, Debug, Default)]
pub struct Opened(Arc<Mutex<Hosts>>);

#[derive(Debug, Default)]
struct Hosts {
    of: HashMap<Tuple, Host>,
    order: VecDeque<(u64, Tuple)>,
    last: u64,
}

#[derive(Debug)]
struct Host {
    name: String,
    /// Its place in the order; an earlier one is that of an earlier connection between the same ends.
    number: u64,
}

impl Opened {
    pub(crate) fn remember(&self, tuple: Tuple, host: String) {
        let mut hosts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        hosts.last += 1;
        let number = hosts.last;
        hosts.of.insert(tuple, Host { name: host, number });
        hosts.order.push_back((number, tuple));
        if hosts.order.len() > BOUND
            && let Some((number, oldest)) = hosts.order.pop_front()
            && hosts.of.get(&oldest).is_some_and(|host| host.number == number)
        {
            hosts.of.remove(&oldest);
        }
    }

    /// Another connection between the same ends may follow.
    pub(crate) fn forget(&self, tuple: &Tuple) {
        // The place in the order stays, so that it stays a queue; it is worth one connection of the bound.
        self.0.lock().unwrap_or_else(PoisonError::into_inner).of.remove(tuple);
    }

    pub(crate) fn host(&self, tuple: &Tuple) -> Option<String> {
        let hosts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        hosts.of.get(tuple).map(|host| host.name.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tuple(port: u16) -> Tuple {
        Tuple {
            protocol: 6,
            source: [10, 0, 0, 1].into(),
            destination: [192, 0, 2, 1].into(),
            source_port: port,
            destination_port: 443,
        }
    }

    #[test]
    fn an_earlier_connection_between_the_same_ends_does_not_take_the_later_one_along() {
        let opened = Opened::default();
        opened.remember(tuple(1), "old.test".into());
        opened.forget(&tuple(1));
        opened.remember(tuple(1), "new.test".into());
        for port in 2..BOUND as u16 + 1 {
            opened.remember(tuple(port), "other.test".into());
        }
        assert_eq!(opened.host(&tuple(1)).as_deref(), Some("new.test"));
        opened.remember(tuple(9000), "other.test".into());
        assert_eq!(opened.host(&tuple(1)), None);
        assert_eq!(opened.0.lock().unwrap().of.len(), BOUND);
    }
}
