//! What a sandbox could leave on the machine, looked up in the kernel's own lists.

use std::{
    fs,
    path::{Path, PathBuf},
};

use serde_json::Value;

const CGROUPS: &str = "/sys/fs/cgroup";
/// Deeper than any hierarchy in use.
const DEEPEST: usize = 16;

/// What to look for once everything should be gone.
#[derive(Debug)]
pub struct Traces {
    state: PathBuf,
    ids: Vec<String>,
    /// Beginning of the names of our network interfaces.
    prefix: Option<String>,
    /// Network namespaces as the kernel names them: `net:[4026531840]`.
    namespaces: Vec<String>,
}

impl Traces {
    pub fn new(state: &Path) -> Self {
        let network = read_json(&state.join("network.json"));
        let prefix = network.as_ref().and_then(|file| file.get("prefix")?.as_str().map(str::to_owned));
        Self { state: state.to_owned(), ids: Vec::new(), prefix, namespaces: Vec::new() }
    }

    /// A sandbox that exists or existed.
    pub fn remember(&mut self, id: &str) {
        if !self.ids.iter().any(|known| known == id) {
            self.ids.push(id.to_owned());
        }
    }

    /// Notes what only a running sandbox tells.
    pub fn look_inside(&mut self, id: &str) {
        let state = read_json(&self.state.join("sandboxes").join(id).join("state.json"));
        let pid = state.as_ref().and_then(|file| file.get("initPid")?.as_i64());
        let link = pid.and_then(|pid| fs::read_link(format!("/proc/{pid}/ns/net")).ok());
        self.namespaces.extend(link.map(|name| name.to_string_lossy().into_owned()));
    }

    /// What is there now.
    pub fn found(&self) -> Vec<String> {
        let mut found = self.processes();
        found.extend(self.mounts());
        self.cgroups(Path::new(CGROUPS), DEEPEST, &mut found);
        found.extend(self.interfaces());
        found.extend(self.directories());
        found
    }

    fn processes(&self) -> Vec<String> {
        let bin = self.state.join("bin");
        let mut found = Vec::new();
        for entry in entries(Path::new("/proc")) {
            let name = entry.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
            if !name.bytes().all(|byte| byte.is_ascii_digit()) {
                continue;
            }
            let cgroup = fs::read_to_string(entry.join("cgroup")).unwrap_or_default();
            let ours = fs::read_link(entry.join("exe")).is_ok_and(|program| program.starts_with(&bin))
                || self.ids.iter().any(|id| cgroup.contains(id.as_str()));
            if ours {
                let command =
                    fs::read_to_string(entry.join("cmdline")).unwrap_or_default().replace('\0', " ");
                found.push(format!("process {name} ({})", command.trim_end()));
            }
            let namespace = fs::read_link(entry.join("ns/net"));
            if namespace
                .is_ok_and(|net| self.namespaces.iter().any(|known| net.as_os_str() == known.as_str()))
            {
                found.push(format!("network namespace of process {name}"));
            }
        }
        found
    }

    /// Mounts below the state directory, and namespaces that a mount keeps alive.
    fn mounts(&self) -> Vec<String> {
        let state = self.state.to_string_lossy();
        let list = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
        list.lines()
            .filter(|line| {
                line.contains(state.as_ref())
                    || self.namespaces.iter().any(|name| line.contains(name.as_str()))
            })
            .map(|line| format!("mount {}", line.split(' ').nth(4).unwrap_or_default()))
            .collect()
    }

    fn cgroups(&self, directory: &Path, depth: usize, found: &mut Vec<String>) {
        for entry in entries(directory) {
            let is_directory = fs::symlink_metadata(&entry).is_ok_and(|found| found.is_dir());
            if !is_directory || depth == 0 {
                continue;
            }
            let name = entry.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
            if self.ids.iter().any(|id| name.contains(id.as_str())) {
                found.push(format!("cgroup {}", entry.display()));
            }
            self.cgroups(&entry, depth - 1, found);
        }
    }

    fn interfaces(&self) -> Vec<String> {
        let Some(prefix) = &self.prefix else { return Vec::new() };
        entries(Path::new("/sys/class/net"))
            .filter_map(|path| path.file_name().map(|name| name.to_string_lossy().into_owned()))
            .filter(|name| name.starts_with(prefix.as_str()))
            .map(|name| format!("network interface {name}"))
            .collect()
    }

    fn directories(&self) -> Vec<String> {
        entries(&self.state.join("sandboxes")).map(|path| format!("directory {}", path.display())).collect()
    }
}

fn entries(directory: &Path) -> impl Iterator<Item = PathBuf> {
    fs::read_dir(directory).into_iter().flatten().filter_map(|entry| entry.ok().map(|entry| entry.path()))
}

fn read_json(path: &Path) -> Option<Value> {
    serde_json::from_slice(&fs::read(path).ok()?).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn directories_of_sandboxes_are_found() {
        let state = tempfile::tempdir().unwrap();
        fs::write(state.path().join("network.json"), r#"{"prefix":"sgnone-"}"#).unwrap();
        let mut traces = Traces::new(state.path());
        traces.remember("7b0c6f0e-0000-4000-8000-000000000000");
        assert_eq!(traces.prefix.as_deref(), Some("sgnone-"));
        assert_eq!(traces.found(), Vec::<String>::new());
        let left = state.path().join("sandboxes/7b0c6f0e");
        fs::create_dir_all(&left).unwrap();
        assert_eq!(traces.found(), [format!("directory {}", left.display())]);
    }
}
