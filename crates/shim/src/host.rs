//! What is the same for every box of this machine; found out once, by the zygote, and inherited by its shims.

use std::fs;
use std::io;

use seccompiler::BpfProgram;

use crate::cgroup::Layout;
use crate::{directory, seccomp};

#[derive(Debug)]
pub struct Host {
    pub cgroups: Layout,
    pub seccomp: BpfProgram,
    pub boot_id: String,
    /// Whether the server runs with an out-of-memory score of its own, which boxes must not inherit.
    pub oom_score_adjusted: bool,
}

impl Host {
    pub fn detect() -> io::Result<Self> {
        let score = fs::read_to_string("/proc/self/oom_score_adj").unwrap_or_default();
        Ok(Self {
            cgroups: Layout::detect()?,
            seccomp: seccomp::compile(seccomp::Extent::Usual)?,
            boot_id: directory::boot_id(),
            oom_score_adjusted: !matches!(score.trim(), "" | "0"),
        })
    }
}
