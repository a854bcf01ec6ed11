//! Which addresses were given out for which names, and until when they are open.
//!
//! Expired entries are remembered while there is room: a connection outlives the entry that let it through, and when the policy changes
//! they tell what it was opened for. If there was no room, that is remembered. Survives the worker.

use std::collections::{BTreeSet, HashMap};
use std::io;
use std::net::IpAddr;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::state::Kept;

/// Pairs of name and address; those that expire first are forgotten first. With names of the greatest length some three megabytes.
const MOST: usize = 8192;

/// Addresses of one answer that are used; no service has more.
pub const MOST_PER_ANSWER: usize = 32;

/// The log is written anew beyond this, which is more than a full table takes.
const LONGEST_LOG: u64 = 8 << 20;

/// The line of the log that says that something was forgotten.
const FORGOT: &[u8] = b"forgot";

/// Milliseconds since the machine started: the same clock for each worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Moment(u64);

impl Moment {
    pub fn now() -> Self {
        let time = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
        Self(time.tv_sec as u64 * 1000 + time.tv_nsec as u64 / 1_000_000)
    }

    pub fn plus(self, time: Duration) -> Self {
        Self(self.0 + u64::try_from(time.as_millis()).unwrap_or(u64::MAX / 2))
    }

    /// How long it is from the other moment to this one; nothing if this one is earlier.
    pub fn since(self, earlier: Self) -> Duration {
        Duration::from_millis(self.0.saturating_sub(earlier.0))
    }
}

#[derive(Debug, Serialize, Deserialize)]
struct Entry {
    name: String,
    addresses: Vec<IpAddr>,
    until: Moment,
}

/// The table.
#[derive(Debug)]
pub struct Resolved {
    names: HashMap<String, HashMap<IpAddr, Moment>>,
    /// The same by age, to know what goes first.
    order: BTreeSet<(Moment, String, IpAddr)>,
    forgot: bool,
    kept: Kept,
}

impl Resolved {
    /// What an earlier worker knew; nothing if it cannot be read.
    pub fn restore(kept: Kept) -> io::Result<Self> {
        let mut table = Self { names: HashMap::new(), order: BTreeSet::new(), forgot: false, kept };
        let log = table.kept.read()?;
        for line in log.split(|byte| *byte == b'\n') {
            if line == FORGOT {
                table.forgot = true;
            } else if let Ok(entry) = serde_json::from_slice(line) {
                table.insert(entry);
            }
        }
        Ok(table)
    }

    /// Notes that the name led to these addresses, open until then.
    pub fn record(&mut self, name: &str, addresses: &[IpAddr], until: Moment) -> io::Result<()> {
        let entry = Entry { name: name.to_owned(), addresses: addresses.to_vec(), until };
        let mut line = serde_json::to_vec(&entry)?;
        line.push(b'\n');
        let knew_all = !self.forgot;
        self.insert(entry);
        if self.forgot && knew_all {
            line.extend_from_slice(FORGOT);
            line.push(b'\n');
        }
        match self.kept.append(&line) {
            Ok(length) if length <= LONGEST_LOG => Ok(()),
            _ => self.rewrite(),
        }
    }

    fn insert(&mut self, entry: Entry) {
        for address in entry.addresses {
            let held = self.names.entry(entry.name.clone()).or_default();
            let until = held.get(&address).map_or(entry.until, |old| entry.until.max(*old));
            if let Some(old) = held.insert(address, until) {
                self.order.remove(&(old, entry.name.clone(), address));
            }
            self.order.insert((until, entry.name.clone(), address));
            if self.order.len() > MOST
                && let Some((_, name, address)) = self.order.pop_first()
            {
                self.forget_pair(&name, address);
                self.forgot = true;
            }
        }
    }

    /// Whether pairs were forgotten for want of room, so that an address that is not known may have had names, and one that is known
    /// others.
    pub fn has_forgotten(&self) -> bool {
        self.forgot
    }

    /// Nothing depends any more on what was forgotten until now.
    pub fn start_over(&mut self) -> io::Result<()> {
        if !std::mem::take(&mut self.forgot) {
            return Ok(());
        }
        self.rewrite()
    }

    fn forget_pair(&mut self, name: &str, address: IpAddr) {
        if let Some(held) = self.names.get_mut(name) {
            held.remove(&address);
            if held.is_empty() {
                self.names.remove(name);
            }
        }
    }

    /// Forgets every pair that fails the test.
    pub fn retain(&mut self, keep: impl Fn(&str, IpAddr) -> bool) -> io::Result<()> {
        let gone: Vec<_> = self.order.extract_if(.., |(_, name, address)| !keep(name, *address)).collect();
        if gone.is_empty() {
            return Ok(());
        }
        for (_, name, address) in gone {
            self.forget_pair(&name, address);
        }
        self.rewrite()
    }

    fn rewrite(&self) -> io::Result<()> {
        let mut log = Vec::new();
        if self.forgot {
            log.extend_from_slice(FORGOT);
            log.push(b'\n');
        }
        for (until, name, address) in &self.order {
            let entry = Entry { name: name.clone(), addresses: vec![*address], until: *until };
            serde_json::to_writer(&mut log, &entry)?;
            log.push(b'\n');
        }
        self.kept.replace(&log)
    }

    /// Pairs that are open now, with the time that is left.
    pub fn open(&self, now: Moment) -> impl Iterator<Item = (&str, IpAddr, Duration)> {
        let live = self.order.iter().rev().take_while(move |(until, ..)| *until > now);
        live.map(move |(until, name, address)| (name.as_str(), *address, until.since(now)))
    }

    /// Every name known for each address, expired ones too.
    pub fn by_address(&self) -> HashMap<IpAddr, Vec<&str>> {
        let mut found: HashMap<IpAddr, Vec<&str>> = HashMap::new();
        for (_, name, address) in &self.order {
            found.entry(*address).or_default().push(name);
        }
        found
    }

    /// Whether an answer for this name held this address and is still good.
    pub fn leads_to(&self, name: &str, address: IpAddr, now: Moment) -> bool {
        self.names.get(name).and_then(|held| held.get(&address)).is_some_and(|until| *until > now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state::{Section, State};

    fn address(last: u8) -> IpAddr {
        [192, 0, 2, last].into()
    }

    #[test]
    fn what_was_recorded_is_known_to_the_next_worker() {
        let state = State::create().unwrap();
        let mut table = Resolved::restore(state.section(Section::Names)).unwrap();
        table.record("a.test", &[address(1), address(2)], Moment(100)).unwrap();
        table.record("b.test", &[address(2)], Moment(50)).unwrap();
        table.record("a.test", &[address(1)], Moment(40)).unwrap();
        let next = Resolved::restore(state.section(Section::Names)).unwrap();
        assert_eq!(next.order, table.order);
        assert_eq!(next.open(Moment(60)).count(), 2);
        assert_eq!(next.by_address()[&address(2)].len(), 2);
        assert!(next.leads_to("a.test", address(1), Moment(99)));
        assert!(!next.leads_to("b.test", address(2), Moment(50)));
        table.retain(|name, _| name != "a.test").unwrap();
        let after = Resolved::restore(state.section(Section::Names)).unwrap();
        assert_eq!(after.by_address().len(), 1);
    }

    #[test]
    fn the_oldest_goes_when_there_is_no_room() {
        let state = State::create().unwrap();
        let mut table = Resolved::restore(state.section(Section::Names)).unwrap();
        for number in 0..MOST + 10 {
            table.record(&format!("{number}.test"), &[address(1)], Moment(number as u64 + 1)).unwrap();
        }
        assert_eq!((table.order.len(), table.names.len()), (MOST, MOST));
        assert!(!table.leads_to("9.test", address(1), Moment(0)));
        assert!(table.leads_to("10.test", address(1), Moment(0)));
        assert!(table.has_forgotten());
        let mut next = Resolved::restore(state.section(Section::Names)).unwrap();
        assert!(next.has_forgotten());
        next.start_over().unwrap();
        let last = Resolved::restore(state.section(Section::Names)).unwrap();
        assert!(!last.has_forgotten());
        assert_eq!(last.order, table.order);
    }

    #[test]
    fn a_log_that_is_too_long_is_written_anew() {
        let kept = State::create().unwrap().section(Section::Names);
        let mut table = Resolved::restore(kept.clone()).unwrap();
        kept.append(&vec![b'\n'; LONGEST_LOG as usize]).unwrap();
        table.record("a.test", &[address(1)], Moment(5)).unwrap();
        assert!(kept.read().unwrap().len() < 100);
    }
}
