//! From a spec to a running agent.
//!
//! The shim and the box's first process work side by side, because most of the time goes into waiting for the kernel:
//!
//! ```text
//! shim   directories, cgroup, own mount namespace, clone3, id maps, ─►overlay, volumes ─►veth ──► waits for exec
//! child                                            enters cgroup, loopback, listener     ─►mounts, pivot ─►eth0, caps, seccomp, exec
//! ```
//!
//! With an egress policy the links and the enforcer come before the overlay, so that the enforcer starts meanwhile; the
//! box gets its interface when it enforces.
//!
//! Owned here: the order of steps. Not here: undoing them, which is [`crate::remains`]'s, from whatever was recorded.
//! Invariant: a resource is recorded in `Remains` as soon as it is ours, before the next step that may fail.

mod child;
mod etc;
mod mounts;
mod overlay;
mod rootfs;
mod sync;

use std::collections::BTreeMap;
use std::fmt::Display;
use std::fs::{self, File};
use std::io::{self, Seek, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::time::Instant;

use rustix::fs::MemfdFlags;
use rustix::mount::{MountPropagationFlags, OpenTreeFlags, mount_change, open_tree};
use rustix::pipe::{PipeFlags, pipe_with};

use crate::cgroup::{Cgroup, Entry};
use crate::directory::{BoxDir, start_ticks};
use crate::egress::{Enforcer, Told};
use crate::host::Host;
use crate::kernel::mounts::{NOSUID, RDONLY, Reach, set_attributes};
use crate::kernel::process::{Side, clone_child, unshare};
use crate::network::link;
use crate::remains::{Init, Remains};
use crate::spec::BoxSpec;
use sync::Sync;

/// Why a create failed, and in which phase.
#[derive(Debug)]
pub struct Failure {
    pub phase: String,
    pub message: String,
}

impl Failure {
    pub fn new(phase: &str, message: impl Display) -> Self {
        Self { phase: phase.into(), message: message.to_string() }
    }
}

/// Names the phase of an error.
trait During<T> {
    fn during(self, phase: &str) -> Result<T, Failure>;
}

impl<T, E: Display> During<T> for Result<T, E> {
    fn during(self, phase: &str) -> Result<T, Failure> {
        self.map_err(|error| Failure::new(phase, error))
    }
}

/// The shim's ends of what connects it to the agent.
pub struct Launched {
    pub stdout: OwnedFd,
    pub stderr: OwnedFd,
    pub status: OwnedFd,
    pub egress: Option<Enforced>,
}

/// An enforcer that enforces, and what it has said on the way.
pub struct Enforced {
    pub enforcer: Enforcer,
    pub told: Vec<Told>,
}

/// Microseconds since the start of the shim at the end of each step.
#[derive(Debug)]
pub struct Timings {
    start: Instant,
    pub marks: BTreeMap<String, u64>,
}

impl Timings {
    pub fn start() -> Self {
        Self { start: Instant::now(), marks: BTreeMap::new() }
    }

    pub fn mark(&mut self, step: &str) {
        self.marks.insert(step.into(), self.start.elapsed().as_micros() as u64);
    }
}

/// What the child needs; it gets a copy of all by the fork.
struct Plan<'a> {
    host: &'a Host,
    dir: &'a BoxDir,
    spec: &'a BoxSpec,
    tasks: Vec<OwnedFd>,
    cgroup_views: Vec<(OwnedFd, &'static str)>,
    stdout: OwnedFd,
    stderr: OwnedFd,
    status: OwnedFd,
    boot: OwnedFd,
    start: Instant,
}

/// Starts the box. Returns when the agent was executed, not when it answers.
pub fn launch(
    host: &Host,
    dir: &BoxDir,
    spec: &BoxSpec,
    remains: &mut Remains,
    timings: &mut Timings,
) -> Result<Launched, Failure> {
    let cgroup = Cgroup::create(&host.cgroups, &spec.id, &spec.limits).during("cgroup")?;
    let entry = cgroup.entry().during("cgroup");
    let visible = cgroup.visible();
    remains.cgroup = Some(cgroup);
    injected(spec, "cgroup")?;
    timings.mark("cgroup");

    private_mounts().during("rootfs")?;
    let (stdout, stdout_far) = pipe_with(PipeFlags::CLOEXEC).during("process")?;
    let (stderr, stderr_far) = pipe_with(PipeFlags::CLOEXEC).during("process")?;
    let (status, status_far) = pipe_with(PipeFlags::CLOEXEC).during("process")?;
    let (sync, far_sync) = Sync::pair().during("process")?;
    let (tasks, directory) = match entry? {
        Entry::Tasks(tasks) => (tasks, None),
        Entry::Directory(directory) => (Vec::new(), Some(directory)),
    };
    let views = visible.iter().map(|(path, name)| Ok((cgroup_view(path)?, *name)));
    let plan = Plan {
        host,
        dir,
        spec,
        tasks,
        cgroup_views: views.collect::<io::Result<_>>().during("cgroup")?,
        stdout: stdout_far,
        stderr: stderr_far,
        status: status_far,
        boot: boot_config(spec).during("process")?,
        start: timings.start,
    };
    timings.mark("prepare");
    let namespaces = libc::CLONE_NEWUSER
        | libc::CLONE_NEWPID
        | libc::CLONE_NEWUTS
        | libc::CLONE_NEWIPC
        | libc::CLONE_NEWNET;
    let cloned = match clone_child(namespaces, directory.as_ref().map(AsFd::as_fd)).during("process")? {
        Side::Child => {
            drop(sync);
            child::run(plan, far_sync)
        }
        Side::Parent(cloned) => cloned,
    };
    drop((far_sync, plan));
    let pid = cloned.pid.as_raw_nonzero().get();
    remains.init = Some(Init { pid, start_ticks: start_ticks(pid), pidfd: cloned.pidfd });
    timings.mark("clone");
    injected(spec, "process")?;
    match beside_child((host, dir, spec), &sync, remains, timings) {
        Ok(egress) => Ok(Launched { stdout, stderr, status, egress }),
        // The child's own reason is the better one, when it has one.
        Err(failure) => Err(sync.reason().unwrap_or(failure)),
    }
}

/// What the shim does while the child does its half.
fn beside_child(
    (host, dir, spec): (&Host, &BoxDir, &BoxSpec),
    sync: &Sync,
    remains: &mut Remains,
    timings: &mut Timings,
) -> Result<Option<Enforced>, Failure> {
    let pid = remains.init.as_ref().map_or(0, |init| init.pid);
    map_ids(spec, pid).during("process")?;
    sync.tell(sync::Step::Mapped).during("process")?;
    let userns = File::open(format!("/proc/{pid}/ns/user")).during("process")?;
    timings.mark("maps");
    let enforcer = match &spec.egress {
        Some(_) => {
            sync.until_ready(timings)?;
            let enforcer = Enforcer::make(host, dir, spec, remains, timings)?;
            injected(spec, "egress")?;
            Some(enforcer)
        }
        None => None,
    };
    rootfs::build(dir, spec, userns.as_fd(), remains).during("rootfs")?;
    injected(spec, "rootfs")?;
    sync.tell(sync::Step::Rooted).during("process")?;
    timings.mark("rootfs");
    let egress = match (enforcer, &spec.network) {
        (Some(mut enforcer), _) => {
            let told = enforcer.await_ready(spec, remains)?;
            timings.mark("egress-ready");
            sync.tell(sync::Step::Linked).during("process")?;
            Some(Enforced { enforcer, told })
        }
        (None, Some(network)) => {
            sync.until_ready(timings)?;
            link::attach(network, pid).during("network")?;
            // Not before: a name that was taken belongs to somebody else, who must keep it.
            remains.host_interface = Some(network.host_interface.clone());
            sync.tell(sync::Step::Linked).during("process")?;
            timings.mark("veth");
            link::open_host_side(network).during("network")?;
            None
        }
        (None, None) => None,
    };
    if spec.network.is_some() {
        injected(spec, "network")?;
    }
    timings.mark("network");
    sync.until_exec(timings)?;
    timings.mark("exec");
    injected(spec, "exec")?;
    Ok(egress)
}

/// Fails on purpose when a test asked for it; only in builds with debug assertions.
fn injected(spec: &BoxSpec, phase: &str) -> Result<(), Failure> {
    let asked = cfg!(debug_assertions) && spec.about.get("failAt").is_some_and(|at| at == phase);
    if asked { Err(Failure::new(phase, "injected failure")) } else { Ok(()) }
}

/// A mount namespace for the shim: what it mounts shows nowhere else, what the host unmounts vanishes here too.
fn private_mounts() -> io::Result<()> {
    unshare(libc::CLONE_NEWNS)?;
    Ok(mount_change("/", MountPropagationFlags::DOWNSTREAM | MountPropagationFlags::REC)?)
}

fn cgroup_view(path: &std::path::Path) -> io::Result<OwnedFd> {
    let view =
        open_tree(rustix::fs::CWD, path, OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC)?;
    set_attributes(view.as_fd(), RDONLY | NOSUID, None, Reach::This)?;
    Ok(view)
}

fn map_ids(spec: &BoxSpec, pid: i32) -> io::Result<()> {
    let map = format!("0 {} {}\n", spec.ids.base, spec.ids.count);
    fs::write(format!("/proc/{pid}/uid_map"), &map)?;
    fs::write(format!("/proc/{pid}/gid_map"), &map)
}

/// What the agent reads from descriptor 3.
fn boot_config(spec: &BoxSpec) -> io::Result<OwnedFd> {
    let process = &spec.process;
    let mut config = serde_json::json!({
        "sandboxId": spec.id,
        "accessToken": spec.access_token,
        "entrypoint": process.entrypoint,
        "env": process.env,
        "cwd": process.cwd,
        "user": process.user,
        "listenFd": child::LISTEN_FD,
        "statusFd": child::STATUS_FD,
        "cpuMillis": spec.limits.cpu_millis,
        "memoryBytes": spec.limits.memory_bytes,
        "isolation": process.isolation,
    });
    if !process.lifecycle.is_null() {
        config["lifecycle"] = process.lifecycle.clone();
    }
    if process.standby {
        config["standby"] = true.into();
    }
    let mut file = File::from(rustix::fs::memfd_create("boot", MemfdFlags::CLOEXEC)?);
    file.write_all(&serde_json::to_vec(&config)?)?;
    file.rewind()?;
    Ok(file.into())
}
