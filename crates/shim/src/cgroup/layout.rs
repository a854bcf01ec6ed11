//! Which cgroup hierarchies this machine has, from the mount table.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// The controllers that boxes use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Controller {
    Cpu,
    Cpuacct,
    Memory,
    Pids,
    Freezer,
    Devices,
}

impl Controller {
    pub const ALL: [Self; 6] =
        [Self::Cpu, Self::Cpuacct, Self::Memory, Self::Pids, Self::Freezer, Self::Devices];

    pub fn name(self) -> &'static str {
        match self {
            Self::Cpu => "cpu",
            Self::Cpuacct => "cpuacct",
            Self::Memory => "memory",
            Self::Pids => "pids",
            Self::Freezer => "freezer",
            Self::Devices => "devices",
        }
    }
}

/// One v1 hierarchy; several controllers may share it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hierarchy {
    pub mount: PathBuf,
    pub controllers: Vec<Controller>,
}

/// How cgroups are set up here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Layout {
    V1 { hierarchies: Vec<Hierarchy> },
    V2 { mount: PathBuf, controllers: Vec<Controller> },
}

impl Layout {
    pub fn detect() -> io::Result<Self> {
        Self::parse(&fs::read_to_string("/proc/self/mountinfo")?, &|mount| {
            fs::read_to_string(mount.join("cgroup.controllers")).unwrap_or_default()
        })
        .ok_or_else(|| io::Error::new(io::ErrorKind::Unsupported, "no cgroup hierarchy is mounted"))
    }

    fn parse(mountinfo: &str, v2_controllers: &dyn Fn(&Path) -> String) -> Option<Self> {
        let mut hierarchies: Vec<Hierarchy> = Vec::new();
        let mut unified = None;
        for line in mountinfo.lines() {
            let Some((left, right)) = line.split_once(" - ") else { continue };
            let Some(mount) = left.split(' ').nth(4).map(PathBuf::from) else { continue };
            let mut right = right.split(' ');
            match right.next() {
                Some("cgroup") => {
                    let options: Vec<&str> = right.nth(1).unwrap_or_default().split(',').collect();
                    let controllers: Vec<Controller> =
                        Controller::ALL.into_iter().filter(|c| options.contains(&c.name())).collect();
                    let known = hierarchies.iter().any(|h| h.controllers == controllers);
                    if !controllers.is_empty() && !known {
                        hierarchies.push(Hierarchy { mount, controllers });
                    }
                }
                Some("cgroup2") => unified = unified.or(Some(mount)),
                _ => {}
            }
        }
        if !hierarchies.is_empty() {
            return Some(Self::V1 { hierarchies });
        }
        let mount = unified?;
        let offered = v2_controllers(&mount);
        let mut controllers: Vec<Controller> = Controller::ALL
            .into_iter()
            .filter(|c| offered.split_whitespace().any(|o| o == c.name()))
            .collect();
        // The core of v2 freezes and counts CPU time by itself.
        controllers.extend([Controller::Freezer, Controller::Cpuacct]);
        Some(Self::V2 { mount, controllers })
    }

    pub fn has(&self, controller: Controller) -> bool {
        match self {
            Self::V1 { hierarchies } => hierarchies.iter().any(|h| h.controllers.contains(&controller)),
            Self::V2 { controllers, .. } => controllers.contains(&controller),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HYBRID: &str = "30 1 0:26 / /sys/fs/cgroup rw - tmpfs tmpfs rw
31 30 0:27 / /sys/fs/cgroup/cpu,cpuacct rw,relatime - cgroup cgroup rw,cpu,cpuacct
32 30 0:28 / /sys/fs/cgroup/memory rw shared:9 - cgroup cgroup rw,memory
33 30 0:29 / /sys/fs/cgroup/systemd rw - cgroup cgroup rw,name=systemd
34 30 0:30 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw";

    #[test]
    fn a_hybrid_machine_counts_as_v1() {
        let layout = Layout::parse(HYBRID, &|_| "hugetlb".into()).unwrap();
        assert!(matches!(&layout, Layout::V1 { hierarchies } if hierarchies.len() == 2));
        assert!(layout.has(Controller::Cpuacct) && layout.has(Controller::Memory));
        assert!(!layout.has(Controller::Pids));
    }

    #[test]
    fn v2_freezes_without_a_controller() {
        let line = "30 1 0:26 / /sys/fs/cgroup rw shared:4 - cgroup2 cgroup2 rw,nsdelegate";
        let layout = Layout::parse(line, &|_| "cpuset cpu io memory pids".into()).unwrap();
        assert!(layout.has(Controller::Freezer) && layout.has(Controller::Pids));
        assert!(!layout.has(Controller::Devices));
    }

    #[test]
    fn a_machine_without_cgroups_is_noticed() {
        assert_eq!(Layout::parse("22 1 0:20 / /proc rw - proc proc rw", &|_| String::new()), None);
    }
}
