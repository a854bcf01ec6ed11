//! The first bytes of each connection, put together as the server will see them, and the decision about it.
//!
//! Invariants: bytes count in order and once, so that whoever sends different bytes for the same place gets the later ones
//! dropped; a connection is opened only when the server has acknowledged the bytes that decided, so that bytes which the
//! server does not take (wrong checksum, old timestamp, a window of their own) decide nothing; a connection over several
//! ways at once (MPTCP) does not begin, because no subflow shows the order in which its bytes are read; a TLS connection is opened
//! only when the server's answer shows that it does not ask for a second hello, or when that one names the same host.
//! Bounds: 2,048 connections at a time, the oldest go first, and after a quarter of an hour without a packet; 16 KiB of each
//! and 8 MiB of all of them; 1,024 that were opened lately.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use sandglass_netlink::conntrack::Tuple;

use super::first::{self, First, LIMIT, Protocol};
use super::packet::{ACK, FIN, MULTIPATH, Packet, RST, SYN, Segment, URG};
use super::postgres;
use super::server::Server;
use super::tls::Reply;
use super::verdict::{denied, host_of, protocol_of, verdict};
use crate::audit::Event;
use crate::firewall::Opened;
use crate::policy::{Action, Rules, Verdict};

const CONNECTIONS: usize = 2048;
const HELD: usize = 8 << 20;
const STRAGGLING: usize = 1024;
/// A connection that is silent for so long is given up: whoever has not said by now what it is for has to begin again.
const SILENT: Duration = Duration::from_secs(15 * 60);
/// Time between two looks for such connections.
const ROUND: Duration = Duration::from_secs(60);
/// After so long another beginning is another connection between the same ends: as long as a system keeps them apart.
const APART: Duration = Duration::from_secs(60);

/// What becomes of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Word {
    /// This packet goes on; the next one is asked about.
    Pass,
    /// The connection goes on and is not asked about any more.
    Open,
    /// The same; it has asked for a host.
    OpenNamed,
    /// Whoever sent it gets a reset.
    Refuse,
    /// It is lost, and will be sent again.
    Drop,
}

/// A connection that nothing has been decided about, or whose decision the server has not seen.
#[derive(Debug)]
struct Flow {
    /// Whether the server has accepted the connection.
    answered: bool,
    /// Sequence number of the first byte.
    start: u32,
    /// From the first byte on, without gaps; what decided, once that is known.
    bytes: Vec<u8>,
    /// What they are, once they may pass.
    decided: Option<First>,
    /// How many of them decided.
    needed: usize,
    retry: Retry,
    server: Server,
    age: u64,
    /// When its last packet came.
    heard: Instant,
}

/// Whether a client may still say another name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Retry {
    /// The server has not answered yet.
    Unknown,
    /// The next hello has to be read too.
    Asked,
    Settled,
}

impl Flow {
    /// Whether what the client sends has to be looked at.
    fn is_open_to_names(&self) -> bool {
        self.decided.is_none() || self.retry != Retry::Settled
    }
}

/// Connections that are being inspected.
pub struct Flows {
    rules: Arc<dyn Rules>,
    opened: Opened,
    flows: HashMap<Tuple, Flow>,
    held: usize,
    age: u64,
    /// When silent connections were last looked for.
    looked: Option<Instant>,
    stragglers: Stragglers,
}

/// Connections that were opened lately: some of their packets may have been waiting by then.
#[derive(Debug, Default)]
struct Stragglers {
    of: HashMap<Tuple, Word>,
    order: VecDeque<Tuple>,
}

impl Stragglers {
    fn add(&mut self, tuple: Tuple, word: Word) {
        if self.of.insert(tuple, word).is_none() {
            self.order.push_back(tuple);
        }
        if self.order.len() > STRAGGLING
            && let Some(oldest) = self.order.pop_front()
        {
            self.of.remove(&oldest);
        }
    }
}

impl Flows {
    pub fn new(rules: Arc<dyn Rules>, opened: Opened) -> Self {
        let (flows, stragglers) = (HashMap::new(), Stragglers::default());
        Self { rules, opened, flows, held: 0, age: 0, looked: None, stragglers }
    }

    /// Decides about a packet that comes now, and says what to tell if that is a denial.
    pub fn judge(&mut self, packet: &Packet<'_>) -> (Word, Option<Event>) {
        self.judge_at(packet, Instant::now())
    }

    /// The same for a packet of another time; times do not go back.
    pub fn judge_at(&mut self, packet: &Packet<'_>, now: Instant) -> (Word, Option<Event>) {
        self.give_up_silent(now);
        let Some(segment) = packet.tcp else {
            return (Word::Drop, None);
        };
        let there = packet.tuple;
        let back = reversed(&there);
        let begins = segment.flags & (SYN | ACK | RST | FIN) == SYN;
        if begins && self.flows.get(&there).is_some_and(|flow| now - flow.heard >= APART) {
            self.remove(&there);
        }
        for tuple in [&there, &back] {
            if let Some(flow) = self.flows.get_mut(tuple) {
                flow.heard = now;
            }
        }
        if self.flows.contains_key(&there) {
            self.sent(there, &segment)
        } else if self.flows.contains_key(&back) {
            self.answered(back, &segment)
        } else if begins {
            self.begin(there, &segment, now)
        } else if let Some(word) = self.stragglers.of.get(&there).or_else(|| self.stragglers.of.get(&back)) {
            // Said again, in case that the kernel's rules overtook the first time.
            (*word, None)
        } else {
            // Begun before this program was, or evicted: nobody knows what was in it.
            (Word::Refuse, None)
        }
    }

    fn give_up_silent(&mut self, now: Instant) {
        if self.looked.is_some_and(|looked| now - looked < ROUND) {
            return;
        }
        self.looked = Some(now);
        let held = &mut self.held;
        self.flows.retain(|_, flow| {
            let stays = now - flow.heard < SILENT;
            *held -= if stays { 0 } else { flow.bytes.len() };
            stays
        });
    }

    fn begin(&mut self, tuple: Tuple, segment: &Segment<'_>, now: Instant) -> (Word, Option<Event>) {
        if segment.has_option(MULTIPATH) {
            let rule = "default (MPTCP hides the order of what is said)".to_owned();
            let event = denied(&tuple, &First::Foreign, Verdict { action: Action::Deny, rule });
            return (Word::Refuse, Some(event));
        }
        // A client whose early data are lost sends it again the ordinary way.
        if !segment.bytes.is_empty() {
            return (Word::Drop, None);
        }
        if self.flows.len() >= CONNECTIONS
            && let Some(oldest) = self.flows.iter().min_by_key(|(_, flow)| flow.age).map(|(tuple, _)| *tuple)
        {
            self.remove(&oldest);
        }
        self.opened.forget(&tuple);
        self.stragglers.of.remove(&tuple);
        self.age += 1;
        let start = segment.sequence.wrapping_add(1);
        let flow = Flow {
            answered: false,
            start,
            bytes: Vec::new(),
            decided: None,
            needed: 0,
            retry: Retry::Unknown,
            server: Server::default(),
            age: self.age,
            heard: now,
        };
        self.flows.insert(tuple, flow);
        (Word::Pass, None)
    }

    /// From the client.
    fn sent(&mut self, tuple: Tuple, segment: &Segment<'_>) -> (Word, Option<Event>) {
        let Some(flow) = self.flows.get_mut(&tuple) else {
            return (Word::Drop, None);
        };
        let has = |flag: u8| segment.flags & flag != 0;
        if has(RST) {
            self.remove(&tuple);
            return (Word::Pass, None);
        }
        if has(SYN) {
            // Once the server has answered, another beginning would be one that the server ignores.
            let usual = segment.bytes.is_empty() && !segment.has_option(MULTIPATH);
            let again = !flow.answered && !has(ACK | FIN) && usual;
            if again {
                flow.start = segment.sequence.wrapping_add(1);
            }
            return (if again { Word::Pass } else { Word::Drop }, None);
        }
        if !flow.answered {
            return (Word::Drop, None);
        }
        if has(URG) {
            // Servers differ in whether such a byte is part of the stream.
            self.remove(&tuple);
            return (Word::Refuse, None);
        }
        let word = self.carried(&tuple, segment);
        let (unfinished, retried) = self.flows.get(&tuple).map_or((false, false), |flow| {
            let unfinished = flow.decided.is_none() && !flow.bytes.is_empty();
            (unfinished, flow.decided.is_some() && flow.retry == Retry::Asked)
        });
        match word {
            Ok(()) if unfinished => self.decide(&tuple, segment),
            Ok(()) if retried => self.decide_again(&tuple),
            Ok(()) => (Word::Pass, None),
            Err(word) => (word, None),
        }
    }

    /// Takes in what a segment carries; an error is the word on what does not fit.
    fn carried(&mut self, tuple: &Tuple, segment: &Segment<'_>) -> Result<(), Word> {
        let flow = self.flows.get_mut(tuple).ok_or(Word::Drop)?;
        if segment.bytes.is_empty() {
            return Ok(());
        }
        let offset = segment.sequence.wrapping_sub(flow.start) as i32;
        let offset = usize::try_from(offset).map_err(|_| Word::Drop)?;
        if flow.is_open_to_names() && offset > flow.bytes.len() {
            return Err(Word::Drop);
        }
        let known = flow.bytes.get(offset..).unwrap_or_default();
        let overlap = known.len().min(segment.bytes.len());
        if known[..overlap] != segment.bytes[..overlap] {
            return Err(Word::Drop);
        }
        if flow.is_open_to_names() {
            let room = (flow.needed + LIMIT).saturating_sub(flow.bytes.len());
            let new = &segment.bytes[overlap..];
            // Behind a hello nothing passes that was not looked at; it is sent again when the server has answered.
            if flow.decided.is_some() && flow.retry == Retry::Unknown && new.len() > room {
                return Err(Word::Drop);
            }
            let new = &new[..new.len().min(room)];
            if self.held + new.len() > HELD {
                return Err(Word::Drop);
            }
            flow.bytes.extend_from_slice(new);
            self.held += new.len();
        }
        Ok(())
    }

    fn decide(&mut self, tuple: &Tuple, segment: &Segment<'_>) -> (Word, Option<Event>) {
        let Some(flow) = self.flows.get_mut(tuple) else {
            return (Word::Drop, None);
        };
        let first = match postgres::questions(&flow.bytes) {
            None => First::More,
            Some(questions) => {
                flow.server.answers(questions);
                let rest = postgres::behind(&flow.bytes, questions);
                first::read(rest).behind(flow.bytes.len() - rest.len())
            }
        };
        // No more of them are held.
        let first = if first == First::More && flow.bytes.len() >= LIMIT {
            First::Broken(Protocol::Tls)
        } else {
            first
        };
        let length = match &first {
            First::More if segment.flags & FIN == 0 => return (Word::Pass, None),
            First::Named { length, .. } | First::Unnamed { length, .. } => *length,
            First::More | First::Foreign | First::Broken(_) => flow.bytes.len(),
        };
        let verdict = verdict(&*self.rules, &first);
        if verdict.action == Action::Allow {
            flow.needed = length;
            if protocol_of(&first) != Some(Protocol::Tls) {
                self.held -= flow.bytes.len() - length;
                flow.bytes.truncate(length);
                flow.retry = Retry::Settled;
            }
            flow.decided = Some(first);
            return (Word::Pass, None);
        }
        self.remove(tuple);
        (Word::Refuse, Some(denied(tuple, &first, verdict)))
    }

    /// The same for the hello that the server has asked for.
    fn decide_again(&mut self, tuple: &Tuple) -> (Word, Option<Event>) {
        let Some(flow) = self.flows.get_mut(tuple) else {
            return (Word::Drop, None);
        };
        let Some(first) = &flow.decided else {
            return (Word::Pass, None);
        };
        match first::read_again(first, &flow.bytes[flow.needed..]) {
            First::More => (Word::Pass, None),
            First::Named { length, .. } | First::Unnamed { length, .. } => {
                flow.needed += length;
                flow.retry = Retry::Settled;
                (Word::Pass, None)
            }
            other => {
                let rule = "default (the second hello does not name the host of the first)".to_owned();
                let event = denied(tuple, &other, Verdict { action: Action::Deny, rule });
                self.remove(tuple);
                (Word::Refuse, Some(event))
            }
        }
    }

    /// From the server.
    fn answered(&mut self, tuple: Tuple, segment: &Segment<'_>) -> (Word, Option<Event>) {
        let Some(flow) = self.flows.get_mut(&tuple) else {
            return (Word::Drop, None);
        };
        let has = |flag: u8| segment.flags & flag != 0;
        if has(RST) {
            self.remove(&tuple);
            return (Word::Pass, None);
        }
        if has(SYN) {
            let fits = has(ACK) && segment.acknowledged == flow.start;
            if fits && !flow.answered {
                flow.answered = true;
                flow.server = Server::new(segment.sequence.wrapping_add(1));
            }
            return (if fits { Word::Pass } else { Word::Drop }, None);
        }
        if flow.answered && flow.retry != Retry::Settled && !flow.server.takes(segment) {
            return (Word::Drop, None);
        }
        if flow.decided.is_some() && flow.retry == Retry::Unknown {
            match flow.server.reply() {
                Reply::More => {}
                Reply::Final => flow.retry = Retry::Settled,
                Reply::Retry => {
                    flow.retry = Retry::Asked;
                    return self.decide_again(&tuple);
                }
            }
        }
        (self.acknowledged(&tuple, segment), None)
    }

    /// Opens the connection if the server has taken what decided.
    fn acknowledged(&mut self, tuple: &Tuple, segment: &Segment<'_>) -> Word {
        let Some(flow) = self.flows.get(tuple) else {
            return Word::Drop;
        };
        let end = flow.start.wrapping_add(flow.needed as u32);
        let arrived = segment.flags & ACK != 0 && segment.acknowledged.wrapping_sub(end) as i32 >= 0;
        let (may, host) = match &flow.decided {
            // Asked again, because the rules may have changed in between.
            Some(first) if flow.answered && arrived && flow.retry == Retry::Settled => {
                (verdict(&*self.rules, first).action == Action::Allow, host_of(first))
            }
            // The server speaks first: no protocol in which the client names a host.
            None if flow.answered && flow.bytes.is_empty() && flow.server.has_spoken() => (true, None),
            _ => return Word::Pass,
        };
        self.remove(tuple);
        if !may {
            return Word::Refuse;
        }
        let word = if host.is_some() { Word::OpenNamed } else { Word::Open };
        self.stragglers.add(*tuple, word);
        if let Some(host) = host {
            self.opened.remember(*tuple, host);
        }
        word
    }

    /// Connections and bytes held.
    #[cfg(test)]
    pub fn sizes(&self) -> (usize, usize) {
        let held = self.flows.values().map(|flow| flow.bytes.len()).sum();
        assert_eq!(self.held, held);
        (self.flows.len(), held)
    }

    fn remove(&mut self, tuple: &Tuple) {
        if let Some(flow) = self.flows.remove(tuple) {
            self.held -= flow.bytes.len();
        }
    }
}

fn reversed(tuple: &Tuple) -> Tuple {
    Tuple {
        protocol: tuple.protocol,
        source: tuple.destination,
        destination: tuple.source,
        source_port: tuple.destination_port,
        destination_port: tuple.source_port,
    }
}
