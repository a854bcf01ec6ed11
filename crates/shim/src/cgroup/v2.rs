//! Control groups version 2: one directory.
//!
//! There is no device controller file in v2 and we load no BPF program: the user namespace forbids making device
//! nodes, and the box's `/dev` holds only harmless ones.

use std::fs::{self, File};
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::layout::{Controller, Layout};
use super::{Frozen, Mishaps, PARENT, Watches, keyed, make_group, missing, number, set};
use crate::protocol::Usage;
use crate::spec::Limits;

#[derive(Debug)]
pub struct Group {
    mount: PathBuf,
    dir: PathBuf,
}

impl Group {
    pub fn new(mount: &Path, id: &str) -> Self {
        Self { mount: mount.to_owned(), dir: mount.join(PARENT).join(id) }
    }

    pub fn path(&self) -> &Path {
        &self.dir
    }

    pub fn create(&self, layout: &Layout, limits: &Limits) -> io::Result<()> {
        let mut wanted = vec![(Controller::Pids, "process")];
        wanted.extend(limits.cpu_millis.map(|_| (Controller::Cpu, "cpu")));
        wanted.extend(limits.memory_bytes.map(|_| (Controller::Memory, "memory")));
        for (controller, what) in &wanted {
            if !layout.has(*controller) {
                return Err(missing(what, *controller));
            }
        }
        make_group(&self.dir)?;
        self.delegate(layout)?;
        if let Some(millis) = limits.cpu_millis {
            set(&self.dir, "cpu.max", &format!("{} 100000", (millis * 100).max(1000)))?;
        }
        if let Some(bytes) = limits.memory_bytes {
            set(&self.dir, "memory.max", &bytes.to_string())?;
            if self.dir.join("memory.swap.max").exists() {
                set(&self.dir, "memory.swap.max", &limits.swap_bytes.unwrap_or(0).to_string())?;
            }
        }
        set(&self.dir, "pids.max", &limits.pids.to_string())
    }

    /// Turns the controllers on from the mount down to our parent; already on is the usual case.
    fn delegate(&self, layout: &Layout) -> io::Result<()> {
        let wanted: Vec<&str> = [Controller::Cpu, Controller::Memory, Controller::Pids]
            .into_iter()
            .filter(|controller| layout.has(*controller))
            .map(Controller::name)
            .collect();
        for dir in [self.mount.clone(), self.mount.join(PARENT)] {
            let on = fs::read_to_string(dir.join("cgroup.subtree_control")).unwrap_or_default();
            for name in wanted.iter().filter(|name| !on.split_whitespace().any(|o| o == **name)) {
                set(&dir, "cgroup.subtree_control", &format!("+{name}"))?;
            }
        }
        Ok(())
    }

    pub fn open(&self) -> io::Result<OwnedFd> {
        Ok(File::open(&self.dir)?.into())
    }

    pub fn set_frozen(&self, wanted: Frozen) -> io::Result<()> {
        let value = if wanted == Frozen::Yes { "1" } else { "0" };
        set(&self.dir, "cgroup.freeze", value)?;
        let deadline = Instant::now() + Duration::from_secs(5);
        while keyed(&self.dir, "cgroup.events", "frozen") != value.parse().ok() {
            if Instant::now() > deadline {
                let _ = set(&self.dir, "cgroup.freeze", "0");
                return Err(io::Error::new(io::ErrorKind::TimedOut, "some process does not freeze"));
            }
            std::thread::sleep(Duration::from_micros(100));
        }
        Ok(())
    }

    /// Best effort: kernels before 5.14 have no such file, and the caller kills one by one as well.
    pub fn kill(&self) {
        let _ = set(&self.dir, "cgroup.kill", "1");
    }

    pub fn usage(&self) -> Usage {
        Usage {
            memory_bytes: number(&self.dir, "memory.current"),
            cpu_usec: keyed(&self.dir, "cpu.stat", "usage_usec"),
            pids: number(&self.dir, "pids.current"),
        }
    }

    pub fn mishaps(&self) -> Mishaps {
        Mishaps {
            oom_kills: keyed(&self.dir, "memory.events", "oom_kill").unwrap_or(0),
            forks_refused: keyed(&self.dir, "pids.events", "max").unwrap_or(0),
        }
    }

    pub fn watches(&self) -> io::Result<Watches> {
        let open = |name| File::open(self.dir.join(name)).ok().map(OwnedFd::from);
        let files = ["memory.events", "pids.events"].into_iter().filter_map(open).collect();
        Ok(Watches { oom_eventfd: None, files })
    }
}
