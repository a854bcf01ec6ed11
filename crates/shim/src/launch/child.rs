//! The box's first process between clone and exec.
//!
//! It starts as the host's root without any rights on the host, which is enough to walk into the state directory, and
//! becomes root of the box before it makes anything. Ends in exec or `_exit`, never returns.
//! Invariant: nothing that was opened outside stays open across exec but descriptors 0 to 5.

use std::fs::{self, File};
use std::io::{self, Write};
use std::net::{Ipv4Addr, SocketAddrV4};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::panic::AssertUnwindSafe;
use std::process::Command;

use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, listen, socket_with, sockopt};
use rustix::process::{
    Resource, Rlimit, Signal, getrlimit, set_parent_process_death_signal, setrlimit, umask,
};
use rustix::thread::{Gid, Uid, set_thread_groups, set_thread_res_gid, set_thread_res_uid};

use super::etc::AGENT;
use super::sync::{Step, Sync};
use super::{During, Failure, Plan, mounts};
use crate::kernel::process::{
    close_on_exec_from, exit_now, fresh_session_keyring, lift, place, reset_signals, unshare,
};
use crate::network::link;
use crate::{capabilities, seccomp};

pub const BOOT_FD: i32 = 3;
pub const LISTEN_FD: i32 = 4;
pub const STATUS_FD: i32 = 5;

/// Connections that may wait for the agent.
const BACKLOG: i32 = 4096;

/// The agent's own environment; the programs it starts get theirs from the boot configuration.
const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Runs the child's half of a create.
pub fn run(plan: Plan<'_>, sync: Sync) -> ! {
    // A panic must not unwind into the shim's code, of which this process is a copy.
    let outcome = std::panic::catch_unwind(AssertUnwindSafe(|| become_agent(&plan, &sync)));
    let failure = match outcome {
        Ok(Err(failure)) => failure,
        Ok(Ok(never)) => match never {},
        Err(_) => Failure::new("process", "the box's first process panicked before exec"),
    };
    sync.report_failure(&failure);
    exit_now(127)
}

fn become_agent(plan: &Plan<'_>, sync: &Sync) -> Result<std::convert::Infallible, Failure> {
    let listener = before_rootfs(plan, sync)?;
    sync.await_step(Step::Rooted).during("process")?;
    enter_root(plan)?;
    sync.report_time("enter", plan.start);
    mounts::assemble(plan).during("rootfs")?;
    rustix::system::sethostname(plan.spec.hostname.as_bytes()).during("process")?;
    sync.report_time("mounts", plan.start);
    if let Some(network) = &plan.spec.network {
        sync.await_step(Step::Linked).during("process")?;
        link::open_box_side(network).during("network")?;
        sync.report_time("network", plan.start);
    }
    restrict(plan)?;
    sync.report_time("restrict", plan.start);
    let sync_fd = arrange_descriptors(plan, &listener, sync).during("process")?;
    // Set again: changing ids cleared it. The shim may have died in between, which only the socket tells.
    set_parent_process_death_signal(Some(Signal::KILL)).during("process")?;
    still_wanted(&sync_fd)?;
    if plan.spec.process.isolation {
        // Rare enough not to be compiled beforehand.
        seccomp::compile(seccomp::Extent::Sessions).and_then(|program| seccomp::apply(&program))
    } else {
        seccomp::apply(&plan.host.seccomp)
    }
    .during("security")?;
    let error = Command::new(format!("/{AGENT}"))
        .arg0("execd")
        .args(["--init", "--boot-fd", &BOOT_FD.to_string()])
        .env_clear()
        .env("PATH", PATH)
        .exec();
    Err(Failure::new("process", format!("cannot execute the agent: {error}")))
}

/// What can be done while the shim still builds the root.
fn before_rootfs(plan: &Plan<'_>, sync: &Sync) -> Result<OwnedFd, Failure> {
    set_parent_process_death_signal(Some(Signal::KILL)).during("process")?;
    reset_signals();
    // The shim's group is not the box's.
    rustix::process::setsid().during("process")?;
    for tasks in &plan.tasks {
        let mut tasks = File::from(tasks.try_clone().during("cgroup")?);
        tasks.write_all(b"0").during("cgroup")?;
    }
    sync.report_time("cgroup", plan.start);
    link::open_loopback().during("network")?;
    sync.report_ready().during("process")?;
    let listener = listen_on(plan.spec.process.agent_port).during("network")?;
    sync.report_time("listen", plan.start);
    sync.await_step(Step::Mapped).during("process")?;
    if plan.host.oom_score_adjusted {
        // Lowering may be refused; then the box is a likelier victim than it should be, which harms only the box.
        let _ = fs::write("/proc/self/oom_score_adj", "0");
    }
    Ok(listener)
}

fn listen_on(port: u16) -> io::Result<OwnedFd> {
    let socket = socket_with(AddressFamily::INET, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    sockopt::set_socket_reuseaddr(&socket, true)?;
    bind(&socket, &SocketAddrV4::new(Ipv4Addr::UNSPECIFIED, port))?;
    listen(&socket, BACKLOG)?;
    Ok(socket)
}

/// Mount and cgroup namespace, then the identity of the box's root.
fn enter_root(plan: &Plan<'_>) -> Result<(), Failure> {
    // Before the ids change: the state directory is open to the host's root only. The working directory moves
    // along into the new namespace.
    rustix::process::chdir(plan.dir.root()).during("rootfs")?;
    unshare(libc::CLONE_NEWNS | libc::CLONE_NEWCGROUP).during("rootfs")?;
    let (uid, gid) = (Uid::from_raw(0), Gid::from_raw(0));
    set_thread_res_gid(gid, gid, gid).during("process")?;
    set_thread_groups(&[]).during("process")?;
    set_thread_res_uid(uid, uid, uid).during("process")?;
    umask(rustix::fs::Mode::from_raw_mode(0o022));
    Ok(())
}

fn restrict(plan: &Plan<'_>) -> Result<(), Failure> {
    fresh_session_keyring().during("security")?;
    let nofile = getrlimit(Resource::Nofile);
    // Raising needs a right that the server may lack; then the host's own limit is the limit.
    let most = nofile.maximum.map_or(plan.spec.limits.nofile, |hard| hard.min(plan.spec.limits.nofile));
    setrlimit(Resource::Nofile, Rlimit { current: Some(most), maximum: Some(most) }).during("process")?;
    setrlimit(Resource::Core, Rlimit { current: Some(0), maximum: Some(0) }).during("process")?;
    rustix::thread::set_no_new_privs(true).during("security")?;
    let sessions = if plan.spec.process.isolation { capabilities::SESSIONS } else { capabilities::NONE };
    capabilities::restrict(sessions).during("security")
}

/// Puts 0 to 5 in place and marks the rest to be closed; returns the socket to the shim, which had to move.
fn arrange_descriptors(plan: &Plan<'_>, listener: &OwnedFd, sync: &Sync) -> io::Result<OwnedFd> {
    let sync = lift(sync.fd.as_fd())?;
    // The box's own, so that not even a handle of the host's file system is left.
    let null = lift(File::open("/dev/null")?.as_fd())?;
    let ends = [
        null.as_fd(),
        plan.stdout.as_fd(),
        plan.stderr.as_fd(),
        plan.boot.as_fd(),
        listener.as_fd(),
        plan.status.as_fd(),
    ];
    let lifted = ends.into_iter().map(lift).collect::<io::Result<Vec<_>>>()?;
    for (target, fd) in lifted.iter().enumerate() {
        place(fd.as_fd(), target as i32)?;
    }
    close_on_exec_from(STATUS_FD + 1)?;
    Ok(sync)
}

fn still_wanted(sync: &OwnedFd) -> Result<(), Failure> {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let mut fds = [PollFd::new(sync, PollFlags::RDHUP)];
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    match poll(&mut fds, Some(&now)).during("process")? {
        0 => Ok(()),
        _ => Err(Failure::new("process", "the shim is gone")),
    }
}
