//! Which host name led to which connection, for as long as the connection may matter.
//!
//! Bound: 8,192 connections, the oldest are forgotten first; a name has at most 253 bytes.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, PoisonError};

use sandglass_netlink::conntrack::Tuple;

const BOUND: usize = 8192;

/// Connections that the inspector has opened, with the name that each asked for; shared by clones.
#[derive(Clone, Debug, Default)]
pub struct Opened(Arc<Mutex<Hosts>>);

#[derive(Debug, Default)]
struct Hosts {
    of: HashMap<Tuple, String>,
    order: VecDeque<Tuple>,
}

impl Opened {
    pub(crate) fn remember(&self, tuple: Tuple, host: String) {
        let mut hosts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if hosts.of.insert(tuple, host).is_none() {
            hosts.order.push_back(tuple);
        }
        if hosts.order.len() > BOUND
            && let Some(oldest) = hosts.order.pop_front()
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
        self.0.lock().unwrap_or_else(PoisonError::into_inner).of.get(tuple).cloned()
    }
}
