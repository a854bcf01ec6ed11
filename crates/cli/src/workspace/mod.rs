//! Sandboxes that are made from repositories, as the command line sees them: what to fetch, the build's log, the boot, and ways in.

pub mod addresses;
pub mod boot;
pub mod build;
pub mod git;
pub mod journal;
pub mod keys;
pub mod progress;
pub mod recipe;
pub mod ssh;
pub mod tunnel;
