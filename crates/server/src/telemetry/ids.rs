//! Random ids without a system call for each.
//!
//! Each thread asks the system once and goes on with a hash of what it got and a counter: nobody can tell one id from others, and two
//! threads never give the same.

use std::cell::RefCell;

use sha2::{Digest as _, Sha256};
use uuid::Uuid;

struct Source {
    seed: [u8; 32],
    count: u64,
    /// The second half of the last digest.
    left: Option<[u8; 16]>,
}

impl Source {
    fn new() -> Self {
        let mut seed = [0; 32];
        let (first, second) = seed.split_at_mut(16);
        first.copy_from_slice(Uuid::new_v4().as_bytes());
        second.copy_from_slice(Uuid::new_v4().as_bytes());
        Self { seed, count: 0, left: None }
    }

    fn next(&mut self) -> [u8; 16] {
        if let Some(bytes) = self.left.take() {
            return bytes;
        }
        self.count += 1;
        let digest: [u8; 32] =
            Sha256::new().chain_update(self.seed).chain_update(self.count.to_le_bytes()).finalize().into();
        let (mut now, mut later) = ([0; 16], [0; 16]);
        now.copy_from_slice(&digest[..16]);
        later.copy_from_slice(&digest[16..]);
        self.left = Some(later);
        now
    }
}

thread_local! {
    static SOURCE: RefCell<Source> = RefCell::new(Source::new());
}

/// Sixteen random bytes: unique and not to be guessed, but no secret.
pub fn random() -> [u8; 16] {
    SOURCE.with_borrow_mut(Source::next)
}

/// A random UUID (version 4).
pub fn uuid() -> Uuid {
    uuid::Builder::from_random_bytes(random()).into_uuid()
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn ids_differ_on_one_thread_and_between_threads() {
        let some = || (0..1000).map(|_| uuid()).collect::<Vec<_>>();
        let threads: Vec<_> = (0..4).map(|_| std::thread::spawn(some)).collect();
        let ids: HashSet<Uuid> = threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect();
        assert_eq!(ids.len(), 4000);
        assert!(ids.iter().all(|id| id.get_version_num() == 4));
    }
}
