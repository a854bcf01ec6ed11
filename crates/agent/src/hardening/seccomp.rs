//! System calls that user processes are refused: a list of names compiled to filters.

use std::io;

use seccompiler::{BpfProgram, TargetArch, compile_from_json};
use serde_json::json;

use super::config::ConfigError;
use super::report::Layer;

/// What changes the kernel, its mounts and namespaces, or reaches keys; programs do without.
const BUILT_IN: &[&str] = &[
    "acct",
    "add_key",
    "bpf",
    "clock_settime",
    "delete_module",
    "finit_module",
    "fsconfig",
    "fsmount",
    "fsopen",
    "fspick",
    "init_module",
    "io_uring_enter",
    "io_uring_register",
    "io_uring_setup",
    "kexec_file_load",
    "kexec_load",
    "keyctl",
    "mount",
    "mount_setattr",
    "move_mount",
    "open_by_handle_at",
    "open_tree",
    "perf_event_open",
    "pivot_root",
    "quotactl",
    "reboot",
    "request_key",
    "setns",
    "settimeofday",
    "swapoff",
    "swapon",
    "syslog",
    "umount2",
    "unshare",
    "userfaultfd",
    "vhangup",
];

/// New namespaces by way of `clone`.
const NEW_NAMESPACES: u64 = 0x7E02_0000;

/// Filters for a list, or for the built-in one.
pub fn compile(deny: Option<&[String]>) -> Result<Vec<BpfProgram>, ConfigError> {
    match deny {
        Some([]) => Ok(Vec::new()),
        Some(names) => {
            let rules = names.iter().map(|name| json!({ "syscall": name })).collect();
            Ok(vec![filter(rules, libc::EPERM)?])
        }
        None => {
            let mut rules: Vec<_> = BUILT_IN.iter().map(|name| json!({ "syscall": name })).collect();
            // One rule for each bit, because a mask matches only as a whole.
            for bit in (0..64).filter(|bit| NEW_NAMESPACES & (1 << bit) != 0) {
                let value: u64 = 1 << bit;
                let condition =
                    json!({ "index": 0, "type": "qword", "op": { "masked_eq": value }, "val": value });
                rules.push(json!({ "syscall": "clone", "args": [condition] }));
            }
            // Its flags are in memory, where no filter sees them; C libraries then take `clone`.
            let newer = filter(vec![json!({ "syscall": "clone3" })], libc::ENOSYS)?;
            Ok(vec![filter(rules, libc::EPERM)?, newer])
        }
    }
}

fn filter(rules: Vec<serde_json::Value>, error: i32) -> Result<BpfProgram, ConfigError> {
    let failed = |reason: String| ConfigError::Seccomp(reason);
    let text = json!({ "user": {
        "mismatch_action": "allow",
        "match_action": { "errno": error },
        "filter": rules,
    }});
    let target = TargetArch::try_from(std::env::consts::ARCH).map_err(|e| failed(e.to_string()))?;
    let mut programs =
        compile_from_json(text.to_string().as_bytes(), target).map_err(|e| failed(e.to_string()))?;
    programs.remove("user").ok_or_else(|| failed("no filter was made".into()))
}

/// Whether this kernel can do it.
pub fn state(deny: Option<&[String]>) -> Layer {
    let count = deny.map_or(BUILT_IN.len(), <[String]>::len);
    match refuses_with_errors() {
        Ok(()) if count > 0 => Layer::active(&format!("{count} system calls fail in user processes")),
        Ok(()) => Layer::degraded("the list of denied system calls is empty"),
        Err(error) => Layer::unsupported(&format!("this kernel has no filters: {error}")),
    }
}

fn refuses_with_errors() -> io::Result<()> {
    let action: u32 = libc::SECCOMP_RET_ERRNO;
    // SAFETY: reads one number that lives through the call.
    let result =
        unsafe { libc::syscall(libc::SYS_seccomp, libc::SECCOMP_GET_ACTION_AVAIL, 0, &raw const action) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_compile_and_unknown_names_do_not() {
        assert_eq!(compile(None).unwrap().len(), 2);
        assert_eq!(compile(Some(&["mkdirat".into(), "mkdir".into()])).unwrap().len(), 1);
        assert!(compile(Some(&[])).unwrap().is_empty());
        assert!(compile(Some(&["mkdirr".into()])).is_err());
    }
}
