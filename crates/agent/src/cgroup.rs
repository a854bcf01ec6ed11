//! What the control group of the agent, which is the box's, may use and has used. Version 1 and 2, with a namespace of its
//! own or with the machine's tree in view.
//!
//! Invariant: a group that cannot be seen has no numbers; it is never an error.

use std::fs;
use std::path::{Path, PathBuf};

/// Version 1 spells "no limit" as a huge number.
const UNLIMITED: u64 = 1 << 60;
/// Deeper than any group there is; ends a walk up that would not end by itself.
const MAX_DEPTH: usize = 32;

/// Where the group's files are.
#[derive(Debug, Clone)]
pub(crate) struct Cgroup {
    mount: PathBuf,
    /// The text of /proc/self/cgroup.
    own: String,
}

impl Cgroup {
    pub(crate) fn of_agent() -> Self {
        Cgroup {
            mount: "/sys/fs/cgroup".into(),
            own: fs::read_to_string("/proc/self/cgroup").unwrap_or_default(),
        }
    }

    /// How many processors the group may use.
    pub(crate) fn cpu_limit(&self) -> Option<f64> {
        let unified = |dir: &Path| {
            let text = text(&dir.join("cpu.max"))?;
            let mut words = text.split_whitespace();
            quota(words.next()?.parse().ok()?, words.next()?.parse().ok()?)
        };
        let old = |dir: &Path| {
            let of = |name: &str| text(&dir.join(name))?.trim().parse().ok();
            quota(of("cpu.cfs_quota_us")?, of("cpu.cfs_period_us")?)
        };
        let limits = match self.unified() {
            Some(dirs) => self.each(&dirs, unified),
            None => self.each(&self.controller("cpu")?, old),
        };
        limits.into_iter().reduce(f64::min)
    }

    /// Bytes of memory that the group may use.
    pub(crate) fn memory_limit(&self) -> Option<u64> {
        let limited = |limit: &u64| *limit > 0 && *limit < UNLIMITED;
        let limits = match self.unified() {
            Some(dirs) => self.each(&dirs, |dir| number(&dir.join("memory.max")).filter(limited)),
            None => self.each(&self.controller("memory")?, |dir| {
                number(&dir.join("memory.limit_in_bytes")).filter(limited)
            }),
        };
        limits.into_iter().min()
    }

    /// Processor time used since the group exists, in microseconds.
    pub(crate) fn cpu_micros(&self) -> Option<u64> {
        match self.unified() {
            Some(dirs) => keyed(&dirs.own.join("cpu.stat"), "usage_usec"),
            None => {
                let nanos = number(&self.controller("cpuacct")?.own.join("cpuacct.usage"))?;
                Some(nanos / 1000)
            }
        }
    }

    /// Memory in use, without the part of the page cache that is given up first.
    pub(crate) fn memory_used(&self) -> Option<u64> {
        let (dir, used, cache) = match self.unified() {
            Some(dirs) => (dirs.own, "memory.current", "inactive_file"),
            None => (self.controller("memory")?.own, "memory.usage_in_bytes", "total_inactive_file"),
        };
        let cache = keyed(&dir.join("memory.stat"), cache).unwrap_or(0);
        Some(number(&dir.join(used))?.saturating_sub(cache))
    }

    fn unified(&self) -> Option<Dirs> {
        self.mount.join("cgroup.controllers").exists().then(|| self.below(self.mount.clone(), ""))
    }

    fn controller(&self, name: &str) -> Option<Dirs> {
        let joined = [name, "cpu,cpuacct"].map(|dir| self.mount.join(dir));
        let mount = joined.into_iter().find(|dir| dir.is_dir())?;
        Some(self.below(mount, name))
    }

    /// A group's own directory where the tree is in view; otherwise what is mounted is the group.
    fn below(&self, mount: PathBuf, controller: &str) -> Dirs {
        let path = self.own.lines().find_map(|line| {
            let mut fields = line.splitn(3, ':').skip(1);
            let (controllers, path) = (fields.next()?, fields.next()?);
            controllers.split(',').any(|c| c == controller).then_some(path)
        });
        let own = path.map(|path| mount.join(path.trim_start_matches('/'))).filter(|dir| dir.is_dir());
        // A path that leads out of the namespace names nothing that is mounted here.
        let own = own.filter(|dir| !dir.components().any(|c| c == std::path::Component::ParentDir));
        Dirs { own: own.unwrap_or_else(|| mount.clone()), mount }
    }

    /// A value of the group and of every one above it: the tightest counts.
    fn each<T>(&self, dirs: &Dirs, value: impl Fn(&Path) -> Option<T>) -> Vec<T> {
        let up = dirs.own.ancestors().take_while(|dir| dir.starts_with(&dirs.mount));
        up.take(MAX_DEPTH).filter_map(value).collect()
    }
}

struct Dirs {
    own: PathBuf,
    mount: PathBuf,
}

fn quota(quota: f64, period: f64) -> Option<f64> {
    (quota > 0.0 && period > 0.0).then_some(quota / period)
}

pub(crate) fn text(path: &Path) -> Option<String> {
    fs::read_to_string(path).ok()
}

pub(crate) fn number(path: &Path) -> Option<u64> {
    text(path)?.trim().parse().ok()
}

/// The number after a word at the start of a line.
pub(crate) fn keyed(path: &Path, key: &str) -> Option<u64> {
    let text = text(path)?;
    let line = text.lines().find(|line| line.split([' ', ':']).next() == Some(key))?;
    line.split_whitespace().nth(1)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tree(own: &str, files: &[(&str, &str)]) -> (tempfile::TempDir, Cgroup) {
        let dir = tempfile::tempdir().unwrap();
        for (name, content) in files {
            let path = dir.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, content).unwrap();
        }
        let cgroup = Cgroup { mount: dir.path().into(), own: own.into() };
        (dir, cgroup)
    }

    #[test]
    fn version_two_in_its_namespace() {
        let (_dir, cgroup) = tree(
            "0::/\n",
            &[
                ("cgroup.controllers", "cpu memory"),
                ("cpu.max", "150000 100000\n"),
                ("cpu.stat", "usage_usec 4200\nuser_usec 1\n"),
                ("memory.max", "1048576\n"),
                ("memory.current", "5000"),
                ("memory.stat", "anon 1\ninactive_file 1000\n"),
            ],
        );
        assert_eq!((cgroup.cpu_limit(), cgroup.memory_limit()), (Some(1.5), Some(1 << 20)));
        assert_eq!((cgroup.cpu_micros(), cgroup.memory_used()), (Some(4200), Some(4000)));
    }

    #[test]
    fn version_two_with_the_whole_tree_in_view() {
        let (_dir, cgroup) = tree(
            "0::/a/b\n",
            &[
                ("cgroup.controllers", ""),
                ("cpu.stat", "usage_usec 9\n"),
                ("a/cpu.max", "50000 100000\n"),
                ("a/memory.max", "max\n"),
                ("a/b/cpu.max", "max 100000\n"),
                ("a/b/cpu.stat", "usage_usec 7\n"),
                ("a/b/memory.max", "77\n"),
            ],
        );
        assert_eq!((cgroup.cpu_limit(), cgroup.memory_limit()), (Some(0.5), Some(77)));
        assert_eq!((cgroup.cpu_micros(), cgroup.memory_used()), (Some(7), None));
    }

    #[test]
    fn version_one() {
        let own = "5:memory:/docker/x\n4:cpu,cpuacct:/docker/x\n0::/y\n";
        let (_dir, cgroup) = tree(
            own,
            &[
                ("cpu,cpuacct/cpu.cfs_quota_us", "200000\n"),
                ("cpu,cpuacct/cpu.cfs_period_us", "100000\n"),
                ("cpu,cpuacct/cpuacct.usage", "8000000\n"),
                ("memory/memory.limit_in_bytes", "9223372036854771712\n"),
                ("memory/memory.usage_in_bytes", "900\n"),
                ("memory/memory.stat", "cache 1\ntotal_inactive_file 100\n"),
                ("memory/docker/x/memory.limit_in_bytes", "4096\n"),
                ("memory/docker/x/memory.usage_in_bytes", "50\n"),
            ],
        );
        assert_eq!((cgroup.cpu_limit(), cgroup.memory_limit()), (Some(2.0), Some(4096)));
        assert_eq!((cgroup.cpu_micros(), cgroup.memory_used()), (Some(8000), Some(50)));
    }

    #[test]
    fn without_any() {
        for own in ["", "0::/../..\n", "nonsense"] {
            let (_dir, cgroup) = tree(own, &[]);
            assert_eq!((cgroup.cpu_limit(), cgroup.memory_limit()), (None, None));
            assert_eq!((cgroup.cpu_micros(), cgroup.memory_used()), (None, None));
        }
        let (_dir, unlimited) =
            tree("0::/\n", &[("cgroup.controllers", ""), ("cpu.max", "max 100000\n"), ("memory.max", "max")]);
        assert_eq!((unlimited.cpu_limit(), unlimited.memory_limit()), (None, None));
    }
}
