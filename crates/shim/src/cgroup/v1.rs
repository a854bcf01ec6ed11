//! Control groups version 1: one directory in each hierarchy.

use std::fs::{self, File};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, eventfd};

use super::layout::{Controller, Hierarchy, Layout};
use super::{Frozen, Mishaps, PARENT, Watches, keyed, make_group, missing, number, set};
use crate::protocol::Usage;
use crate::spec::Limits;

/// null, zero, full, random, urandom, tty, ptmx, terminals. Everything else is denied, also by the user namespace.
const DEVICES: [&str; 8] =
    ["c 1:3 rw", "c 1:5 rw", "c 1:7 rw", "c 1:8 rw", "c 1:9 rw", "c 5:0 rw", "c 5:2 rw", "c 136:* rw"];

const PERIOD_US: u64 = 100_000;

#[derive(Debug)]
pub struct Groups {
    groups: Vec<(Vec<Controller>, PathBuf)>,
}

impl Groups {
    pub fn new(hierarchies: &[Hierarchy], id: &str) -> Self {
        let place = |h: &Hierarchy| (h.controllers.clone(), h.mount.join(PARENT).join(id));
        Self { groups: hierarchies.iter().map(place).collect() }
    }

    pub fn create(&self, layout: &Layout, limits: &Limits) -> io::Result<()> {
        for (_, dir) in &self.groups {
            make_group(dir)?;
        }
        if let Some(millis) = limits.cpu_millis {
            let dir = self.need("cpu", Controller::Cpu)?;
            set(dir, "cpu.cfs_period_us", &PERIOD_US.to_string())?;
            set(dir, "cpu.cfs_quota_us", &(millis * PERIOD_US / 1000).max(1000).to_string())?;
        }
        if let Some(bytes) = limits.memory_bytes {
            let dir = self.need("memory", Controller::Memory)?;
            set(dir, "memory.limit_in_bytes", &bytes.to_string())?;
            // Absent when the kernel does not account swap; then there is nothing to limit it with.
            if dir.join("memory.memsw.limit_in_bytes").exists() {
                let total = bytes.saturating_add(limits.swap_bytes.unwrap_or(0));
                set(dir, "memory.memsw.limit_in_bytes", &total.to_string())?;
            }
        }
        set(self.need("process", Controller::Pids)?, "pids.max", &limits.pids.to_string())?;
        if layout.has(Controller::Devices) {
            let dir = self.need("device", Controller::Devices)?;
            set(dir, "devices.deny", "a")?;
            DEVICES.iter().try_for_each(|rule| set(dir, "devices.allow", rule))?;
        }
        Ok(())
    }

    pub fn tasks(&self) -> io::Result<Vec<OwnedFd>> {
        let open = |(_, dir): &(_, PathBuf)| Ok(File::options().write(true).open(dir.join("tasks"))?.into());
        self.groups.iter().map(open).collect()
    }

    pub fn directories(&self) -> Vec<&Path> {
        self.groups.iter().map(|(_, dir)| dir.as_path()).collect()
    }

    pub fn visible(&self) -> Vec<(PathBuf, &'static str)> {
        [Controller::Memory, Controller::Cpu, Controller::Cpuacct, Controller::Pids]
            .into_iter()
            .filter_map(|controller| Some((self.find(controller)?.to_owned(), controller.name())))
            .collect()
    }

    pub fn set_frozen(&self, wanted: Frozen) -> io::Result<()> {
        let Some(dir) = self.find(Controller::Freezer) else {
            return match wanted {
                Frozen::No => Ok(()),
                Frozen::Yes => Err(missing("pause, which is a freezer", Controller::Freezer)),
            };
        };
        let state = if wanted == Frozen::Yes { "FROZEN" } else { "THAWED" };
        let deadline = Instant::now() + Duration::from_secs(5);
        set(dir, "freezer.state", state)?;
        // A group that forks meanwhile stays "FREEZING" until asked again.
        while fs::read_to_string(dir.join("freezer.state"))?.trim() != state {
            if Instant::now() > deadline {
                let _ = set(dir, "freezer.state", "THAWED");
                return Err(io::Error::new(io::ErrorKind::TimedOut, "some process does not freeze"));
            }
            std::thread::sleep(Duration::from_micros(100));
            set(dir, "freezer.state", state)?;
        }
        Ok(())
    }

    pub fn usage(&self) -> Usage {
        let read = |controller, file| number(self.find(controller)?, file);
        Usage {
            memory_bytes: read(Controller::Memory, "memory.usage_in_bytes"),
            cpu_usec: read(Controller::Cpuacct, "cpuacct.usage").map(|nanos| nanos / 1000),
            pids: read(Controller::Pids, "pids.current"),
        }
    }

    pub fn mishaps(&self) -> Mishaps {
        let read = |controller, file, key| keyed(self.find(controller)?, file, key);
        Mishaps {
            oom_kills: read(Controller::Memory, "memory.oom_control", "oom_kill").unwrap_or(0),
            forks_refused: read(Controller::Pids, "pids.events", "max").unwrap_or(0),
        }
    }

    pub fn watches(&self) -> io::Result<Watches> {
        let mut watches = Watches::default();
        if let Some(dir) = self.find(Controller::Memory) {
            let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
            let control = File::open(dir.join("memory.oom_control"))?;
            set(dir, "cgroup.event_control", &format!("{} {}", event.as_raw_fd(), control.as_raw_fd()))?;
            watches.oom_eventfd = Some(event);
        }
        if let Some(dir) = self.find(Controller::Pids)
            && let Ok(file) = File::open(dir.join("pids.events"))
        {
            watches.files.push(file.into());
        }
        Ok(watches)
    }

    fn find(&self, controller: Controller) -> Option<&Path> {
        self.groups.iter().find(|(all, _)| all.contains(&controller)).map(|(_, dir)| dir.as_path())
    }

    fn need(&self, what: &str, controller: Controller) -> io::Result<&Path> {
        self.find(controller).ok_or_else(|| missing(what, controller))
    }
}
