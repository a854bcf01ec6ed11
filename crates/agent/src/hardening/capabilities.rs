//! Capabilities of user processes: names, and how a new process gets rid of them.

use std::io;

use rustix::thread::{
    CapabilitySet, CapabilitySets, capabilities, configure_capability_in_ambient_set,
    remove_capability_from_bounding_set, set_capabilities, set_keep_capabilities,
};

use super::report::Layer;

/// In the kernel's order.
const NAMES: [&str; 41] = [
    "chown",
    "dac_override",
    "dac_read_search",
    "fowner",
    "fsetid",
    "kill",
    "setgid",
    "setuid",
    "setpcap",
    "linux_immutable",
    "net_bind_service",
    "net_broadcast",
    "net_admin",
    "net_raw",
    "ipc_lock",
    "ipc_owner",
    "sys_module",
    "sys_rawio",
    "sys_chroot",
    "sys_ptrace",
    "sys_pacct",
    "sys_admin",
    "sys_boot",
    "sys_nice",
    "sys_resource",
    "sys_time",
    "sys_tty_config",
    "mknod",
    "lease",
    "audit_write",
    "audit_control",
    "setfcap",
    "mac_override",
    "mac_admin",
    "syslog",
    "wake_alarm",
    "block_suspend",
    "audit_read",
    "perfmon",
    "bpf",
    "checkpoint_restore",
];

pub const SYS_ADMIN: u64 = CapabilitySet::SYS_ADMIN.bits();

/// What root of an isolated session may do: manage files, users and processes of its own; nothing about the kernel,
/// devices or networks.
pub const SESSION: u64 = CapabilitySet::CHOWN
    .union(CapabilitySet::DAC_OVERRIDE)
    .union(CapabilitySet::FOWNER)
    .union(CapabilitySet::FSETID)
    .union(CapabilitySet::KILL)
    .union(CapabilitySet::SETGID)
    .union(CapabilitySet::SETUID)
    .union(CapabilitySet::NET_BIND_SERVICE)
    .bits();

/// What becomes of a new process's capabilities.
#[derive(Debug, Default, Clone, Copy)]
pub enum Capabilities {
    #[default]
    Untouched,
    Without(u64),
    Only(u64),
}

impl Capabilities {
    fn dropped(self) -> u64 {
        match self {
            Capabilities::Untouched => 0,
            Capabilities::Without(these) => these,
            Capabilities::Only(these) => !these,
        }
    }

    /// Cuts the bounding set, while there is still the right to; only makes system calls.
    pub fn bound(self) -> io::Result<()> {
        let dropped = self.dropped();
        for bit in (0..64).filter(|bit| dropped & (1 << bit) != 0) {
            match remove_capability_from_bounding_set(CapabilitySet::from_bits_retain(1 << bit)) {
                // The first number that this kernel does not know ends the list; without the right, the set stays.
                Err(rustix::io::Errno::INVAL | rustix::io::Errno::PERM) => break,
                other => other?,
            }
        }
        if matches!(self, Capabilities::Only(keep) if keep != 0) {
            set_keep_capabilities(true)?;
        }
        Ok(())
    }

    /// Reduces the process itself; what is kept stays across exec also for a user other than root.
    pub fn apply(self) -> io::Result<()> {
        let own = capabilities(None)?;
        let keep = match self {
            Capabilities::Untouched => return Ok(()),
            Capabilities::Without(these) => {
                let rest = CapabilitySet::from_bits_retain(!these);
                let sets = CapabilitySets {
                    effective: own.effective & rest,
                    permitted: own.permitted & rest,
                    inheritable: own.inheritable & rest,
                };
                return Ok(set_capabilities(None, sets)?);
            }
            Capabilities::Only(these) => CapabilitySet::from_bits_retain(these) & own.permitted,
        };
        set_capabilities(None, CapabilitySets { effective: keep, permitted: keep, inheritable: keep })?;
        for bit in (0..64).filter(|bit| keep.bits() & (1 << bit) != 0) {
            configure_capability_in_ambient_set(CapabilitySet::from_bits_retain(1 << bit), true)?;
        }
        Ok(())
    }
}

/// Gives up every capability of this process but these.
pub fn keep_only(keep: u64) -> io::Result<()> {
    let keep = CapabilitySet::from_bits_retain(keep) & capabilities(None)?.permitted;
    Ok(set_capabilities(
        None,
        CapabilitySets { effective: keep, permitted: keep, inheritable: CapabilitySet::empty() },
    )?)
}

/// What the init of a session needs to start shells and to manage files and processes of the session's user.
pub fn keep_for_init(session: u64) -> io::Result<()> {
    let needed = CapabilitySet::SETPCAP
        | CapabilitySet::SETUID
        | CapabilitySet::SETGID
        | CapabilitySet::KILL
        | CapabilitySet::CHOWN
        | CapabilitySet::DAC_OVERRIDE
        | CapabilitySet::FOWNER;
    keep_only(session | needed.bits())
}

/// The bit of a name, with or without `CAP_`, in any case.
pub fn bit(name: &str) -> Option<u64> {
    let name = name.to_ascii_lowercase();
    let name = name.strip_prefix("cap_").unwrap_or(&name);
    NAMES.iter().position(|known| *known == name).map(|at| 1 << at)
}

/// How much of it this process can do.
pub fn state(keep: u64) -> Layer {
    let kept = keep.count_ones();
    match capabilities(None) {
        Ok(own) if own.effective.contains(CapabilitySet::SETPCAP) => {
            Layer::active(&format!("user processes keep {kept} capabilities; the bounding set is the same"))
        }
        Ok(_) => Layer::degraded(
            "without CAP_SETPCAP the bounding set stays; capabilities of processes are dropped all the same",
        ),
        Err(error) => Layer::unsupported(&format!("capabilities cannot be read: {error}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_found_in_any_spelling() {
        assert_eq!(bit("CAP_NET_RAW"), Some(CapabilitySet::NET_RAW.bits()));
        assert_eq!(bit("net_raw"), Some(0x2000));
        assert_eq!(bit("CHECKPOINT_RESTORE"), Some(CapabilitySet::CHECKPOINT_RESTORE.bits()));
        assert_eq!(bit("CAP_EVERYTHING"), None);
    }

    #[test]
    fn a_session_gets_nothing_that_reaches_the_kernel() {
        for never in ["sys_admin", "sys_ptrace", "net_admin", "net_raw", "mknod", "sys_chroot", "bpf"] {
            assert_eq!(SESSION & bit(never).unwrap(), 0, "{never}");
        }
    }
}
