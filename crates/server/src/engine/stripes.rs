//! A fixed number of locks or counters shared by any number of things: a shared one only costs a short wait.

use std::hash::{BuildHasher, BuildHasherDefault, DefaultHasher, Hash};

/// The stripe of this id; always the same one. There must be at least one.
pub(super) fn of<T>(stripes: &[T], id: impl Hash) -> &T {
    let hash = BuildHasherDefault::<DefaultHasher>::default().hash_one(id);
    &stripes[usize::try_from(hash).unwrap_or(usize::MAX) % stripes.len()]
}
