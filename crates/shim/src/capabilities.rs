//! What root of a box may do inside it: Docker's default set, and nothing can add to it.
//!
//! The agent of a box with isolated sessions has CAP_SYS_ADMIN besides, over the box's own user namespace; it takes it
//! away from every process that it starts.

use std::io;

use rustix::thread::{
    CapabilitySet, CapabilitySets, clear_ambient_capability_set, remove_capability_from_bounding_set,
    set_capabilities,
};

/// Docker's default fourteen.
pub const ALLOWED: CapabilitySet = CapabilitySet::CHOWN
    .union(CapabilitySet::DAC_OVERRIDE)
    .union(CapabilitySet::FSETID)
    .union(CapabilitySet::FOWNER)
    .union(CapabilitySet::MKNOD)
    .union(CapabilitySet::NET_RAW)
    .union(CapabilitySet::SETGID)
    .union(CapabilitySet::SETUID)
    .union(CapabilitySet::SETFCAP)
    .union(CapabilitySet::SETPCAP)
    .union(CapabilitySet::NET_BIND_SERVICE)
    .union(CapabilitySet::SYS_CHROOT)
    .union(CapabilitySet::KILL)
    .union(CapabilitySet::AUDIT_WRITE);

pub const NONE: CapabilitySet = CapabilitySet::empty();
/// What making a session's namespaces and mounts takes.
pub const SESSIONS: CapabilitySet = CapabilitySet::SYS_ADMIN;

/// Leaves a box's root what it may do, and `more`.
pub fn restrict(more: CapabilitySet) -> io::Result<()> {
    restrict_to(ALLOWED | more)
}

/// Drops everything else for good. A program executed as root gets the bounding set, so that is what counts.
pub fn restrict_to(allowed: CapabilitySet) -> io::Result<()> {
    clear_ambient_capability_set()?;
    for bit in 0..64 {
        let one = CapabilitySet::from_bits_retain(1 << bit);
        if allowed.contains(one) {
            continue;
        }
        match remove_capability_from_bounding_set(one) {
            // The first number that this kernel does not know ends the list.
            Err(rustix::io::Errno::INVAL) => break,
            other => other?,
        }
    }
    let sets = CapabilitySets { effective: allowed, permitted: allowed, inheritable: CapabilitySet::empty() };
    Ok(set_capabilities(None, sets)?)
}
