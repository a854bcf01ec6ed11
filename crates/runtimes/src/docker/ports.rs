//! Which host ports belong to which box.
//!
//! A port is taken under one lock, tried by binding it, and stays taken until the box is gone, so that two creates never get the same one
//! and a create does not get the port of a box whose container is stopped. Other programs may still take a port in between: the caller
//! retries then.

use std::{
    collections::{BTreeSet, HashMap},
    io,
    net::{Ipv4Addr, TcpListener},
    ops::RangeInclusive,
    sync::{Mutex, MutexGuard, PoisonError},
};

use sandglass_sandbox::{
    SandboxId,
    ports::{RuntimeErrorKind, runtime::RuntimeError},
};

pub(super) struct Ports {
    range: RangeInclusive<u16>,
    address: Ipv4Addr,
    taken: Mutex<HashMap<u16, SandboxId>>,
    /// Whether the ports of the boxes that were there before this process are known.
    seeded: tokio::sync::OnceCell<()>,
}

impl Ports {
    pub(super) fn new(range: RangeInclusive<u16>, address: Ipv4Addr) -> Self {
        Self { range, address, taken: Mutex::default(), seeded: tokio::sync::OnceCell::new() }
    }

    fn taken(&self) -> MutexGuard<'_, HashMap<u16, SandboxId>> {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn seeded(&self) -> &tokio::sync::OnceCell<()> {
        &self.seeded
    }

    /// Takes `count` different ports for a box.
    pub(super) fn reserve(&self, id: SandboxId, count: usize) -> Result<Reservation<'_>, RuntimeError> {
        let taken = self.reserve_with(id, count, |port| self.is_free(port))?;
        Ok(Reservation { ports: self, taken, kept: false })
    }

    fn reserve_with(
        &self,
        id: SandboxId,
        count: usize,
        is_free: impl Fn(u16) -> bool,
    ) -> Result<Vec<u16>, RuntimeError> {
        let mut taken = self.taken();
        let width = u32::from(*self.range.end()).saturating_sub(u32::from(*self.range.start())) + 1;
        // Anywhere at first, then onwards: spread out, and every port is tried before giving up.
        let begin = random_below(width);
        let candidates = (0..width)
            .filter_map(|step| u16::try_from(u32::from(*self.range.start()) + (begin + step) % width).ok());
        let found: Vec<u16> =
            candidates.filter(|port| !taken.contains_key(port) && is_free(*port)).take(count).collect();
        if found.len() < count {
            let message = format!(
                "no free host port is left in {}-{}; remove sandboxes or widen [docker] port_range_min/port_range_max",
                self.range.start(),
                self.range.end()
            );
            return Err(RuntimeError::new(RuntimeErrorKind::Exhausted, "ports", message));
        }
        taken.extend(found.iter().map(|port| (*port, id)));
        Ok(found)
    }

    /// Gives all ports of a box back. None is fine.
    pub(super) fn release(&self, id: SandboxId) {
        self.taken().retain(|_, owner| *owner != id);
    }

    #[cfg(test)]
    pub(super) fn taken_by(&self, id: SandboxId) -> Vec<u16> {
        self.taken().iter().filter(|(_, owner)| **owner == id).map(|(port, _)| *port).collect()
    }

    /// Takes over what the engine knows. What belongs to boxes that are being made is kept.
    pub(super) fn reseed(
        &self,
        existing: impl IntoIterator<Item = (u16, SandboxId)>,
        being_made: &BTreeSet<SandboxId>,
    ) {
        let mut taken = self.taken();
        taken.retain(|_, owner| being_made.contains(owner));
        for (port, owner) in existing {
            taken.entry(port).or_insert(owner);
        }
    }

    fn is_free(&self, port: u16) -> bool {
        match TcpListener::bind((self.address, port)) {
            Ok(_) => true,
            // An address of another machine or of the engine's own virtual one: the port is tried on ours.
            Err(e) if e.kind() == io::ErrorKind::AddrNotAvailable => {
                TcpListener::bind((Ipv4Addr::UNSPECIFIED, port)).is_ok()
            }
            Err(_) => false,
        }
    }
}

fn random_below(bound: u32) -> u32 {
    let random = uuid::Uuid::new_v4().as_u128();
    u32::try_from(random % u128::from(bound.max(1))).unwrap_or(0)
}

/// Ports that were just taken. Dropped, they are given back, unless the box came to be.
pub(super) struct Reservation<'a> {
    ports: &'a Ports,
    taken: Vec<u16>,
    kept: bool,
}

impl Reservation<'_> {
    pub(super) fn ports(&self) -> &[u16] {
        &self.taken
    }

    /// They stay taken until the box is gone.
    pub(super) fn keep(mut self) {
        self.kept = true;
    }
}

impl Drop for Reservation<'_> {
    fn drop(&mut self) {
        if !self.kept {
            let mut taken = self.ports.taken();
            for port in &self.taken {
                taken.remove(port);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{collections::HashSet, sync::Arc, thread, time::Duration};

    use super::*;

    #[test]
    fn two_hundred_creates_at_once_share_no_port() {
        let ports = Arc::new(Ports::new(40000..=40399, Ipv4Addr::LOCALHOST));
        let creates: Vec<_> = (0..200)
            .map(|_| {
                let ports = ports.clone();
                std::thread::spawn(move || ports.reserve_with(SandboxId::random(), 2, |_| true))
            })
            .collect();
        let all: Vec<u16> = creates.into_iter().flat_map(|c| c.join().unwrap().unwrap()).collect();
        assert_eq!((all.len(), all.iter().collect::<HashSet<_>>().len()), (400, 400));
        let full = ports.reserve_with(SandboxId::random(), 1, |_| true).unwrap_err();
        assert_eq!((full.kind, full.phase.as_str()), (RuntimeErrorKind::Exhausted, "ports"));
        assert!(full.message.contains("40000-40399"), "{}", full.message);
    }

    #[test]
    fn a_port_in_use_is_passed_over_and_a_failed_create_keeps_none() {
        let other = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let used = other.local_addr().unwrap().port();
        let ports = Ports::new(used..=used, Ipv4Addr::LOCALHOST);
        let id = SandboxId::random();
        assert!(ports.reserve(id, 1).is_err());
        assert!(ports.taken().is_empty());
        drop(other);
        // A closed socket lives on for a moment in a child that another test starts just then.
        let reserved = || {
            let mut tries = (0..6000).map(|_| ports.reserve(id, 1));
            tries.find_map(|tried| tried.map_err(|_| thread::sleep(Duration::from_millis(10))).ok()).unwrap()
        };
        let reservation = reserved();
        assert_eq!(reservation.ports(), [used]);
        drop(reservation);
        assert!(ports.taken().is_empty());
        reserved().keep();
        assert!(ports.reserve(id, 1).is_err());
        ports.release(id);
        reserved();
    }

    #[test]
    fn an_address_of_another_machine_is_tried_on_this_one() {
        let ports = Ports::new(1..=1, Ipv4Addr::new(192, 0, 2, 1));
        let other = TcpListener::bind((Ipv4Addr::UNSPECIFIED, 0)).unwrap();
        assert!(!ports.is_free(other.local_addr().unwrap().port()));
    }

    #[test]
    fn reseeding_forgets_what_is_gone_and_keeps_what_is_being_made() {
        let ports = Ports::new(100..=200, Ipv4Addr::LOCALHOST);
        let [gone, making, there] = [(); 3].map(|()| SandboxId::random());
        ports.reserve_with(gone, 1, |_| true).unwrap();
        let mine = ports.reserve_with(making, 1, |_| true).unwrap()[0];
        ports.reseed([(150, there), (mine, there)], &BTreeSet::from([making]));
        let taken = ports.taken();
        assert!(taken.values().all(|owner| *owner != gone));
        assert_eq!(taken.get(&mine), Some(&making));
    }
}
