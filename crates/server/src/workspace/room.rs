//! Who may be connected to the TCP listener for agents, which every box can reach.
//!
//! Does not read from connections: whoever does says when one has shown the token of a sandbox. Invariant: a connection that has shown
//! none can be put out for a newer one, and one that has counts against its sandbox alone; so no box keeps the agents of others out.

use std::{
    collections::{BTreeMap, HashMap},
    net::IpAddr,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use tokio_util::sync::CancellationToken;

/// How many connections there may be.
#[derive(Debug, Clone, Copy)]
pub(super) struct Bounds {
    /// That have not shown the token of a sandbox.
    pub(super) strangers: usize,
    /// Of one sandbox.
    pub(super) of_one: usize,
}

/// Everybody who is connected.
#[derive(Debug)]
pub(super) struct Room {
    bounds: Bounds,
    inside: Mutex<Inside>,
}

#[derive(Debug, Default)]
struct Inside {
    next: u64,
    /// In the order in which they came.
    strangers: BTreeMap<u64, Stranger>,
    known: HashMap<String, usize>,
}

#[derive(Debug)]
struct Stranger {
    from: IpAddr,
    out: CancellationToken,
}

/// The place of one connection; dropped, it is free.
#[derive(Debug)]
pub(super) struct Place {
    room: Arc<Room>,
    number: u64,
    out: CancellationToken,
    /// The sandbox whose token was shown.
    of: Mutex<Option<String>>,
}

impl Room {
    pub(super) fn new(bounds: Bounds) -> Arc<Self> {
        Arc::new(Self { bounds, inside: Mutex::default() })
    }

    fn inside(&self) -> MutexGuard<'_, Inside> {
        self.inside.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets a connection in. When there are too many strangers, the one that came first from the address with most of them goes.
    pub(super) fn enter(self: &Arc<Self>, from: IpAddr) -> Place {
        let mut inside = self.inside();
        if inside.strangers.len() >= self.bounds.strangers
            && let Some(number) = inside.least_welcome()
            && let Some(stranger) = inside.strangers.remove(&number)
        {
            stranger.out.cancel();
        }
        let (number, out) = (inside.next, CancellationToken::new());
        inside.next += 1;
        inside.strangers.insert(number, Stranger { from, out: out.clone() });
        Place { room: self.clone(), number, out, of: Mutex::default() }
    }
}

impl Inside {
    fn least_welcome(&self) -> Option<u64> {
        let mut by_address: HashMap<IpAddr, (usize, u64)> = HashMap::new();
        for (number, stranger) in &self.strangers {
            by_address.entry(stranger.from).or_insert((0, *number)).0 += 1;
        }
        let most = by_address.into_values().max_by_key(|(count, first)| (*count, u64::MAX - first));
        most.map(|(_, first)| first)
    }
}

impl Place {
    fn of(&self) -> MutexGuard<'_, Option<String>> {
        self.of.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The connection has shown the token of this sandbox. False when it cannot be one of that sandbox's, because these are as many as may be,
    /// or because it is another's already.
    pub(super) fn recognise(&self, sandbox: &str) -> bool {
        let mut of = self.of();
        if let Some(before) = of.as_deref() {
            return before == sandbox;
        }
        let mut inside = self.room.inside();
        let count = inside.known.get(sandbox).copied().unwrap_or(0);
        // One that was put out meanwhile has no place to change.
        if count >= self.room.bounds.of_one || inside.strangers.remove(&self.number).is_none() {
            return false;
        }
        inside.known.insert(sandbox.to_owned(), count + 1);
        *of = Some(sandbox.to_owned());
        true
    }

    pub(super) fn is_recognised(&self) -> bool {
        self.of().is_some()
    }

    /// Waits until the place is needed for another.
    pub(super) async fn put_out(&self) {
        self.out.cancelled().await;
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let of = self.of().take();
        let mut inside = self.room.inside();
        let Some(sandbox) = of else {
            inside.strangers.remove(&self.number);
            return;
        };
        if let Some(count) = inside.known.get_mut(&sandbox) {
            *count -= 1;
            if *count == 0 {
                inside.known.remove(&sandbox);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BOUNDS: Bounds = Bounds { strangers: 4, of_one: 2 };

    fn address(last: u8) -> IpAddr {
        IpAddr::from([10, 0, 0, last])
    }

    #[test]
    fn the_address_with_most_strangers_makes_room() {
        let room = Room::new(BOUNDS);
        let quiet = room.enter(address(1));
        let loud: Vec<Place> = (0..20).map(|_| room.enter(address(2))).collect();
        assert!(!quiet.out.is_cancelled());
        let inside: Vec<usize> = (0..20).filter(|at| !loud[*at].out.is_cancelled()).collect();
        assert_eq!(inside, [17, 18, 19], "the newest are let stay");
        drop((quiet, loud));
        assert!(room.inside().strangers.is_empty());
    }

    #[test]
    fn who_is_recognised_is_never_put_out() {
        let room = Room::new(BOUNDS);
        let agent = room.enter(address(1));
        assert!(!agent.is_recognised() && agent.recognise("a") && agent.is_recognised());
        let flood: Vec<Place> = (0..20).map(|_| room.enter(address(1))).collect();
        assert!(!agent.out.is_cancelled());
        let late = room.enter(address(1));
        assert!(late.recognise("b"), "the newest always has the time to say who it is");
        assert!(!flood[0].recognise("a"), "one that was put out cannot come back");
    }

    #[test]
    fn a_sandbox_has_so_many_and_others_have_theirs() {
        let room = Room::new(BOUNDS);
        let mut of_a: Vec<Place> = (0..3).map(|_| room.enter(address(1))).collect();
        let recognised: Vec<bool> = of_a.iter().map(|place| place.recognise("a")).collect();
        assert_eq!(recognised, [true, true, false]);
        assert!(!of_a[0].recognise("b"), "a connection stays with its sandbox");
        assert!(room.enter(address(1)).recognise("b"));
        of_a.remove(0);
        assert!(of_a[1].recognise("a"), "one that ended makes room");
        drop(of_a);
        assert!(room.inside().known.is_empty());
    }
}
