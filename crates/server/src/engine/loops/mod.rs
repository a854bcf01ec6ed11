//! The background loops. Each is idempotent, ends when the engine stops, and sleeps until something can have changed.
//!
//! | loop | wakes | does |
//! |---|---|---|
//! | `observe` | on every runtime event | merges facts into the index, pokes drivers, writes exits into the history |
//! | `expire` | at the next expiry, at least each second | commits removals |
//! | `policies` | when the next policy takes effect, at least each second | freezes, copies and removes what is idle or about to expire |
//! | `resync` | every 30 s | compares the index with a full list |
//! | `orphans` | every 15 s | removes half-made boxes that no create is working on |
//! | [`snapshots`](super::snapshots) | on a request, a restart, a runtime that came back | makes snapshots, finishes what was interrupted |
//! | `prune` | every hour | forgets old history and idempotency keys |

pub(super) mod expire;
pub(super) mod observe;
pub(super) mod orphans;
pub(super) mod policies;
pub(super) mod prune;
pub(super) mod resync;
