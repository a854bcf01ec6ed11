//! A transaction: changes of tables that take effect together or not at all.
//!
//! Invariant: the kernel switches from the old rules to the new ones between two packets. For sets this holds when a new
//! set gets a new name and the old one is deleted whole; elements that are taken out of a set that stays may be missed
//! by a packet which still goes through the old rules.

use std::io;
use std::net::IpAddr;
use std::time::Duration;

use super::attributes::*;
use super::rule::Rule;
use super::{INET, SUBSYSTEM};
use crate::message::{APPEND, CREATE, Message, family_header};
use crate::socket::Socket;

const BATCH_BEGIN: u16 = libc::NFNL_MSG_BATCH_BEGIN as u16;
const BATCH_END: u16 = libc::NFNL_MSG_BATCH_END as u16;

const INTERVAL: u32 = 4;
const TIMEOUT: u32 = 0x10;
/// Rules add elements, and expressions to them.
const EVAL: u32 = 0x20;
const INTERVAL_END: u32 = 1;

/// Elements in one message, whose attributes may take 64 KiB.
const CHUNK: usize = 500;

/// Where a chain hangs and what it does with what its rules do not decide about.
#[derive(Clone, Copy, Debug)]
pub struct Base {
    pub kind: ChainKind,
    pub hook: Hook,
    pub priority: i32,
    pub otherwise: Otherwise,
}

/// What the rules of a chain may do.
#[derive(Clone, Copy, Debug)]
pub enum ChainKind {
    Filter,
    /// Sees only the first packet of each connection.
    Nat,
}

/// A point on a packet's way.
#[derive(Clone, Copy, Debug)]
pub enum Hook {
    Prerouting,
    Input,
    Forward,
    Output,
    Postrouting,
}

/// The policy of a chain.
#[derive(Clone, Copy, Debug)]
pub enum Otherwise {
    Accept,
    Drop,
}

/// What the elements of a set are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Key {
    Ipv4,
    Ipv6,
    Port,
    /// An address and a port.
    Ipv4Port,
    Ipv6Port,
    /// The index of an interface.
    Interface,
}

/// How a set holds its elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Holding {
    /// Single values.
    Values,
    /// Ranges, which must not overlap.
    Ranges,
    /// Single values that may each vanish after a while.
    Expiring,
    /// Rules add values, each with a rate, and take them away when they are silent.
    Rates,
    /// Rules add values, each with its connections; those without are taken away.
    Connections,
}

/// A set to be made.
#[derive(Clone, Copy, Debug)]
pub struct Set<'a> {
    pub name: &'a str,
    pub key: Key,
    pub holding: Holding,
    /// More elements are refused.
    pub size: Option<u32>,
}

/// A member of a set.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Element {
    Address(IpAddr),
    /// Both ends belong to it.
    Range(IpAddr, IpAddr),
    Expiring(IpAddr, Duration),
    ExpiringPort(IpAddr, u16, Duration),
    Port(u16),
}

/// A transaction under construction; nothing happens before [`Batch::commit`].
#[derive(Debug)]
pub struct Batch {
    messages: Vec<Message>,
    sets: u32,
}

impl Default for Batch {
    fn default() -> Self {
        Self::new()
    }
}

impl Batch {
    pub fn new() -> Self {
        Self { messages: vec![marker(BATCH_BEGIN)], sets: 0 }
    }

    /// Bytes so far. What is committed at once has to fit into the socket's buffer, which without privilege over the
    /// machine is some 200 KB; one call for elements adds 40 KB at most for each 500 of them.
    pub fn length(&self) -> usize {
        self.messages.iter().map(|message| message.bytes().len()).sum()
    }

    /// Carries it out. The error is that of the first change that was refused; none was made then.
    pub fn commit(self, socket: &mut Socket) -> io::Result<()> {
        if self.messages.len() < 2 {
            return Ok(());
        }
        socket.transact(self.finished()).map_err(|(_, error)| error)
    }

    fn finished(mut self) -> Vec<Message> {
        // One answer for all: failures come without having been asked for, and those for thousands of changes would not fit
        // into what a socket may hold.
        if let Some(last) = self.messages.last_mut() {
            last.ask_for_answer();
        }
        self.messages.push(marker(BATCH_END));
        self.messages
    }

    /// Present is fine.
    pub fn add_table(&mut self, table: &str) {
        self.messages.push(message(libc::NFT_MSG_NEWTABLE, CREATE).string(TABLE_NAME, table));
    }

    /// With everything in it.
    pub fn delete_table(&mut self, table: &str) {
        self.messages.push(message(libc::NFT_MSG_DELTABLE, 0).string(TABLE_NAME, table));
    }

    /// An empty table, whatever was in it before.
    pub fn renew_table(&mut self, table: &str) {
        // Adding first makes the deletion succeed either way.
        self.add_table(table);
        self.delete_table(table);
        self.add_table(table);
    }

    /// A chain that hangs on a hook.
    pub fn add_base_chain(&mut self, table: &str, chain: &str, base: Base) {
        let kind = match base.kind {
            ChainKind::Filter => "filter",
            ChainKind::Nat => "nat",
        };
        let hook = match base.hook {
            Hook::Prerouting => libc::NF_INET_PRE_ROUTING,
            Hook::Input => libc::NF_INET_LOCAL_IN,
            Hook::Forward => libc::NF_INET_FORWARD,
            Hook::Output => libc::NF_INET_LOCAL_OUT,
            Hook::Postrouting => libc::NF_INET_POST_ROUTING,
        };
        let policy = match base.otherwise {
            Otherwise::Accept => libc::NF_ACCEPT,
            Otherwise::Drop => libc::NF_DROP,
        };
        let added = message(libc::NFT_MSG_NEWCHAIN, CREATE)
            .string(CHAIN_TABLE, table)
            .string(CHAIN_NAME, chain)
            .nest(CHAIN_HOOK, |nest| {
                nest.network(HOOK_HOOKNUM, hook as u32).network(HOOK_PRIORITY, base.priority as u32)
            })
            .network(CHAIN_POLICY, policy as u32)
            .string(CHAIN_TYPE, kind);
        self.messages.push(added);
    }

    /// A chain that rules go to.
    pub fn add_chain(&mut self, table: &str, chain: &str) {
        let added =
            message(libc::NFT_MSG_NEWCHAIN, CREATE).string(CHAIN_TABLE, table).string(CHAIN_NAME, chain);
        self.messages.push(added);
    }

    /// Takes all rules out of a chain.
    pub fn flush_chain(&mut self, table: &str, chain: &str) {
        let flush = message(libc::NFT_MSG_DELRULE, 0).string(RULE_TABLE, table).string(RULE_CHAIN, chain);
        self.messages.push(flush);
    }

    /// Behind those that the chain has.
    pub fn add_rule(&mut self, table: &str, chain: &str, rule: &Rule) {
        let added = message(libc::NFT_MSG_NEWRULE, CREATE | APPEND)
            .string(RULE_TABLE, table)
            .string(RULE_CHAIN, chain)
            .nest(RULE_EXPRESSIONS, |list| list.raw(rule.expressions()));
        self.messages.push(added);
    }

    pub fn add_set(&mut self, table: &str, set: &Set<'_>) {
        self.sets += 1;
        // The number of the type only tells `nft` how to print the elements.
        let (kind, length) = match set.key {
            Key::Ipv4 => (7, 4),
            Key::Ipv6 => (8, 16),
            Key::Port => (13, 2),
            // Six bits for each part; each part fills registers of four bytes.
            Key::Ipv4Port => (7 << 6 | 13, 8),
            Key::Ipv6Port => (8 << 6 | 13, 20),
            Key::Interface => (20, 4),
        };
        let flags = match set.holding {
            Holding::Values => 0,
            Holding::Ranges => INTERVAL,
            Holding::Expiring => TIMEOUT,
            Holding::Rates => TIMEOUT | EVAL,
            Holding::Connections => EVAL,
        };
        let mut added = message(libc::NFT_MSG_NEWSET, CREATE)
            .string(SET_TABLE, table)
            .string(SET_NAME, set.name)
            .network(SET_ID, self.sets)
            .network(SET_FLAGS, flags)
            .network(SET_KEY_TYPE, kind)
            .network(SET_KEY_LEN, length);
        if let Some(size) = set.size {
            added = added.nest(SET_DESC, |nest| nest.network(SET_DESC_SIZE, size));
        }
        self.messages.push(added);
    }

    /// With its elements; no rule may refer to it any more.
    pub fn delete_set(&mut self, table: &str, set: &str) {
        let deleted = message(libc::NFT_MSG_DELSET, 0).string(SET_TABLE, table).string(SET_NAME, set);
        self.messages.push(deleted);
    }

    /// Elements that are there already are fine.
    pub fn add_elements(&mut self, table: &str, set: &str, elements: &[Element]) {
        self.change_elements(message(libc::NFT_MSG_NEWSETELEM, CREATE), (table, set), elements);
    }

    /// Elements that are absent are an error.
    pub fn delete_elements(&mut self, table: &str, set: &str, elements: &[Element]) {
        self.change_elements(message(libc::NFT_MSG_DELSETELEM, 0), (table, set), elements);
    }

    fn change_elements(&mut self, start: Message, (table, set): (&str, &str), elements: &[Element]) {
        for chunk in elements.chunks(CHUNK) {
            let start = start.clone().string(ELEM_LIST_TABLE, table).string(ELEM_LIST_SET, set);
            let change = start.nest(ELEM_LIST_ELEMENTS, |list| chunk.iter().fold(list, encode));
            self.messages.push(change);
        }
    }
}

fn encode(list: Message, element: &Element) -> Message {
    let one = |list: Message, key: &[u8], more: &dyn Fn(Message) -> Message| {
        list.nest(LIST_ELEM, |one| more(one.nest(ELEM_KEY, |nest| nest.attribute(DATA_VALUE, key))))
    };
    match element {
        Element::Address(address) => one(list, &octets(*address), &|one| one),
        Element::Port(port) => one(list, &port.to_be_bytes(), &|one| one),
        Element::Expiring(address, after) => {
            one(list, &octets(*address), &|one| one.attribute(ELEM_TIMEOUT, &milliseconds(*after)))
        }
        Element::ExpiringPort(address, port, after) => {
            let mut key = octets(*address);
            key.extend_from_slice(&port.to_be_bytes());
            key.extend_from_slice(&[0; 2]);
            one(list, &key, &|one| one.attribute(ELEM_TIMEOUT, &milliseconds(*after)))
        }
        Element::Range(first, last) => {
            let list = one(list, &octets(*first), &|one| one);
            // The end is the first value behind the range; there is none behind the last of all.
            match successor(*last) {
                Some(end) => one(list, &octets(end), &|one| one.network(ELEM_FLAGS, INTERVAL_END)),
                None => list,
            }
        }
    }
}

/// Zero would mean for ever.
fn milliseconds(after: Duration) -> [u8; 8] {
    u64::try_from(after.as_millis()).unwrap_or(u64::MAX).max(1).to_be_bytes()
}

fn octets(address: IpAddr) -> Vec<u8> {
    match address {
        IpAddr::V4(address) => address.octets().to_vec(),
        IpAddr::V6(address) => address.octets().to_vec(),
    }
}

fn successor(address: IpAddr) -> Option<IpAddr> {
    match address {
        IpAddr::V4(address) => address.to_bits().checked_add(1).map(|bits| IpAddr::V4(bits.into())),
        IpAddr::V6(address) => address.to_bits().checked_add(1).map(|bits| IpAddr::V6(bits.into())),
    }
}

fn marker(kind: u16) -> Message {
    Message::new(kind, 0, &family_header(0, libc::NFNL_SUBSYS_NFTABLES as u16))
}

fn message(kind: libc::c_int, flags: u16) -> Message {
    Message::new(SUBSYSTEM | kind as u16, flags, &family_header(INET, 0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_last_change_is_acknowledged() {
        let mut batch = Batch::new();
        batch.renew_table("some");
        batch.add_chain("some", "chain");
        let messages = batch.finished();
        let asking: Vec<bool> = messages.iter().map(Message::wants_answer).collect();
        assert_eq!(asking, [false, false, false, false, true, false]);
    }
}
