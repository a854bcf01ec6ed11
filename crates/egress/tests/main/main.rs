//! Firewall and inspector in namespaces of their own. Needs root, `ip`, and a kernel with nf_tables and NFQUEUE.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on should stop where it is")]

mod attacks;
mod changes;
mod limits;
mod measure;
mod placements;
mod stage;
