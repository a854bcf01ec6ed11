//! Memory for large pieces, which all connections of a process share.
//!
//! A fast stream is cheaper in large pieces; a reader that is slow keeps the piece that it was given. So large ones are lent, up to a bound, and
//! who finds none left goes on with small ones.

use std::sync::atomic::{AtomicUsize, Ordering};

/// What all connections together may have beyond [`FREE`] each.
const SHARED: usize = 64 << 20;
/// What each may have without asking.
pub(crate) const FREE: usize = 64 << 10;

static LENT: AtomicUsize = AtomicUsize::new(0);

/// How much one connection reads at a time; what it has beyond [`FREE`] is given back when it shrinks or is dropped.
#[derive(Debug)]
pub(crate) struct Room {
    size: usize,
    lent: &'static AtomicUsize,
}

impl Room {
    pub(crate) fn new(size: usize) -> Self {
        Self::of(size, &LENT)
    }

    fn of(size: usize, lent: &'static AtomicUsize) -> Self {
        Self { size: size.min(FREE), lent }
    }

    pub(crate) fn size(&self) -> usize {
        self.size
    }

    /// As much of `wanted` as there is.
    pub(crate) fn grow(&mut self, wanted: usize) {
        let more = beyond(wanted).saturating_sub(beyond(self.size));
        let enough = |lent: usize| lent.checked_add(more).filter(|lent| *lent <= SHARED);
        let order = Ordering::Relaxed;
        let granted = more == 0 || self.lent.fetch_update(order, order, enough).is_ok();
        let size = if granted { wanted } else { FREE };
        self.size = size.max(self.size);
    }

    pub(crate) fn shrink(&mut self, wanted: usize) {
        let less = beyond(self.size).saturating_sub(beyond(wanted));
        self.lent.fetch_sub(less, Ordering::Relaxed);
        self.size = wanted.min(self.size);
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        self.shrink(0);
    }
}

fn beyond(size: usize) -> usize {
    size.saturating_sub(FREE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_lent_is_bounded_and_comes_back() {
        static OWN: AtomicUsize = AtomicUsize::new(0);
        let large = 1 << 20;
        let mut rooms: Vec<Room> = (0..100).map(|_| Room::of(8 << 10, &OWN)).collect();
        for room in &mut rooms {
            room.grow(large);
        }
        let fast = SHARED / (large - FREE);
        assert_eq!(rooms.iter().filter(|room| room.size() == large).count(), fast);
        assert_eq!(rooms.iter().filter(|room| room.size() == FREE).count(), 100 - fast);
        assert!(OWN.load(Ordering::Relaxed) <= SHARED);
        rooms[0].shrink(FREE / 2);
        assert_eq!(rooms[0].size(), FREE / 2);
        rooms[99].grow(large);
        assert_eq!(rooms[99].size(), large);
        drop(rooms);
        assert_eq!(OWN.load(Ordering::Relaxed), 0);
    }
}
