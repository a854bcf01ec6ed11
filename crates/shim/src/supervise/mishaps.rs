//! Out-of-memory kills and refused forks, as events: at most one of a kind each second, with the count.

use std::fs::File;
use std::io::{Read, Seek};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use rustix::event::PollFlags;
use serde_json::json;

use super::Shim;
use crate::cgroup::{Cgroup, Mishaps, Watches};

/// A fork bomb makes thousands a second.
const QUIET: Duration = Duration::from_secs(1);

/// The v1 notice comes before the kill is counted.
const LOOK_AGAIN: Duration = Duration::from_millis(20);
const LOOKS: u8 = 50;

pub struct Watch {
    watches: Watches,
    files: Vec<File>,
    at_start: Mishaps,
    told: Mishaps,
    not_before: Option<Instant>,
    looks_left: u8,
}

impl Watch {
    /// Without notifications the counters are still read at the end.
    pub fn new(cgroup: &Cgroup) -> Self {
        let mut watches = cgroup.watches().unwrap_or_default();
        let files = watches.files.drain(..).map(File::from).collect();
        Self {
            watches,
            files,
            at_start: Mishaps::default(),
            told: Mishaps::default(),
            not_before: None,
            looks_left: 0,
        }
    }

    /// A fresh group starts at zero, so everything counted happened to this box.
    pub fn at_start(&self) -> Mishaps {
        self.at_start
    }

    /// What to poll; nothing while the last event is fresh.
    pub fn interest(&self) -> Vec<(BorrowedFd<'_>, PollFlags)> {
        if self.not_before.is_some() {
            return Vec::new();
        }
        let oom = self.watches.oom_eventfd.iter().map(|fd| (fd.as_fd(), PollFlags::IN));
        oom.chain(self.files.iter().map(|file| (file.as_fd(), PollFlags::PRI))).collect()
    }

    pub fn retry_at(&self) -> Option<Instant> {
        self.not_before
    }

    /// Reads the sources dry, which is how they are told that the change was seen.
    fn acknowledge(&mut self) {
        if let Some(event) = &self.watches.oom_eventfd
            && rustix::io::read(event, &mut [0; 8]).is_ok()
        {
            self.looks_left = LOOKS;
        }
        for file in &mut self.files {
            let _ = file.rewind();
            let _ = file.read(&mut [0; 512]);
        }
    }
}

impl Shim {
    /// Looks at the counters and tells what has been added.
    pub(super) fn report_mishaps(&mut self) {
        let (Some(watch), Some(cgroup)) = (&mut self.watch, &self.remains.cgroup) else { return };
        watch.acknowledge();
        let now = cgroup.mishaps();
        let before = std::mem::replace(&mut watch.told, now);
        let kills = now.oom_kills.saturating_sub(before.oom_kills);
        let forks = now.forks_refused.saturating_sub(before.forks_refused);
        watch.not_before = if kills + forks > 0 {
            watch.looks_left = 0;
            Some(Instant::now() + QUIET)
        } else if watch.looks_left > 0 {
            watch.looks_left -= 1;
            Some(Instant::now() + LOOK_AGAIN)
        } else {
            None
        };
        if kills > 0 {
            let data = json!({ "count": kills, "total": now.oom_kills });
            self.event("oom-kill", "the kernel killed a process at the memory limit", data);
        }
        if forks > 0 {
            let data = json!({ "count": forks, "total": now.forks_refused, "limit": self.spec.limits.pids });
            self.event("pids-limit", "no process could be started at the process limit", data);
        }
    }
}
