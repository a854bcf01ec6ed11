//! Who may have a push looked at: so many at a time, and the one that has waited longest gives way.
//!
//! Does not read pushes and knows no prebuilds: strangers who make ids up have the same places as hosts whose prebuilds are there. Invariant: a
//! new push always gets a place, and nobody loses one to an address that has more than its share while all are taken.

use std::{
    collections::{BTreeMap, HashMap},
    net::{IpAddr, Ipv6Addr},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use tokio_util::sync::CancellationToken;

/// Pushes that are looked at at a time, of whichever prebuilds.
const MOST: usize = 64;
/// Of one address, when others need places. Few hosts tell of as many pushes in the time that one takes.
const SHARE: usize = 8;
/// What one customer of a network provider has at least.
const SITE: Ipv6Addr = Ipv6Addr::new(0xffff, 0xffff, 0xffff, 0xffff, 0, 0, 0, 0);

/// All places.
#[derive(Debug, Clone, Default)]
pub struct PushPlaces(Arc<Mutex<Taken>>);

#[derive(Debug, Default)]
struct Taken {
    next: u64,
    /// In the order in which they were taken.
    by_number: BTreeMap<u64, Taker>,
}

#[derive(Debug)]
struct Taker {
    from: Option<IpAddr>,
    out: CancellationToken,
}

/// The right to have one push looked at; dropped, it is free.
#[derive(Debug)]
pub struct PushPlace {
    of: PushPlaces,
    number: u64,
    out: CancellationToken,
}

impl PushPlaces {
    fn taken(&self) -> MutexGuard<'_, Taken> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a place, another's if need be.
    pub fn take(&self, from: Option<IpAddr>) -> PushPlace {
        let mut taken = self.taken();
        if taken.by_number.len() >= MOST
            && let Some(number) = taken.gives_way()
            && let Some(taker) = taken.by_number.remove(&number)
        {
            taker.out.cancel();
        }
        let (number, out) = (taken.next, CancellationToken::new());
        taken.next += 1;
        taken.by_number.insert(number, Taker { from: from.map(site), out: out.clone() });
        PushPlace { of: self.clone(), number, out }
    }
}

impl Taken {
    /// The first that came from an address with more than its share, or else the first of all.
    fn gives_way(&self) -> Option<u64> {
        let mut counts: HashMap<Option<IpAddr>, usize> = HashMap::new();
        for taker in self.by_number.values() {
            *counts.entry(taker.from).or_default() += 1;
        }
        let greedy = self.by_number.iter().find(|(_, taker)| counts[&taker.from] > SHARE);
        greedy.or_else(|| self.by_number.first_key_value()).map(|(number, _)| *number)
    }
}

/// What counts as one address.
fn site(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(address) => IpAddr::V6(address & SITE),
        address @ IpAddr::V4(_) => address,
    }
}

impl PushPlace {
    /// Waits until the place is needed for another push.
    pub async fn put_out(&self) {
        self.out.cancelled().await;
    }
}

impl Drop for PushPlace {
    fn drop(&mut self) {
        self.of.taken().by_number.remove(&self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(last: u8) -> Option<IpAddr> {
        Some(IpAddr::from([10, 0, 0, last]))
    }

    fn places_of(places: &PushPlaces, from: impl Fn(u8) -> Option<IpAddr>) -> Vec<PushPlace> {
        (0..64).map(|number| places.take(from(number))).collect()
    }

    fn out(held: &[PushPlace]) -> Vec<usize> {
        let lost = held.iter().enumerate().filter(|(_, place)| place.out.is_cancelled());
        lost.map(|(number, _)| number).collect()
    }

    #[test]
    fn the_one_that_has_waited_longest_gives_way() {
        let places = PushPlaces::default();
        // Behind a proxy all have one address, and in a crowd everybody has another.
        let crowds: [fn(u8) -> Option<IpAddr>; 3] = [|_| address(1), address, |_| None];
        for from in crowds {
            let mut held = places_of(&places, from);
            assert_eq!(out(&held), [0; 0]);
            let late = [places.take(address(200)), places.take(address(201))];
            assert_eq!((out(&held), out(&late)), (vec![0, 1], vec![]));
            assert_eq!(places.taken().by_number.len(), MOST);
            // Who was put out has no place to give back.
            held.drain(..2);
            assert_eq!(places.taken().by_number.len(), MOST);
            held.pop();
            let _room = places.take(address(202));
            assert_eq!(out(&held), [0; 0], "a place that is free is taken first");
        }
        assert!(places.taken().by_number.is_empty(), "nothing stays of what ended");
    }

    #[test]
    fn an_address_with_more_than_its_share_gives_way_to_itself() {
        let places = PushPlaces::default();
        let early = places.take(address(1));
        let greedy: Vec<PushPlace> = (0..200).map(|_| places.take(address(2))).collect();
        assert!(!early.out.is_cancelled());
        assert_eq!(out(&greedy), (0..200 - (MOST - 1)).collect::<Vec<_>>());
        let other: Vec<PushPlace> = (0..SHARE).map(|_| places.take(address(3))).collect();
        assert!(!early.out.is_cancelled() && out(&other).is_empty());
    }

    #[test]
    fn addresses_of_one_customer_are_one() {
        let of = |text: &str| site(text.parse().unwrap());
        assert_eq!(of("2001:db8:0:1::1"), of("2001:db8:0:1:ffff::2"));
        assert_ne!(of("2001:db8:0:1::1"), of("2001:db8:0:2::1"));
        assert_eq!(of("::ffff:10.0.0.1"), of("10.0.0.1"));
        assert_ne!(of("10.0.0.1"), of("10.0.0.2"));
    }
}
