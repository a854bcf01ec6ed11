//! From the shim to a running program, in two steps: a stepping stone that enters the namespaces, and its child.
//!
//! The first process of a new PID namespace cannot be the one that enters the user namespace, so the stepping stone does
//! and starts the program as its own sibling, which makes the program a child of the shim. The program's process is then
//! root of the small user namespace with one capability left: to administer the network of the middle. It has no
//! descriptors but its three, a file system of a handful of entries, a PID namespace of its own, the boxes' system-call
//! filter, and dies with the shim.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::panic::AssertUnwindSafe;
use std::process::Command;

use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, recv, send, socketpair};
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::process::{
    PidfdFlags, Resource, Rlimit, Signal, WaitId, WaitIdOptions, getrlimit, pidfd_open,
    set_parent_process_death_signal, setrlimit, waitid,
};
use rustix::thread::{
    CapabilitySet, Gid, LinkNameSpaceType, Uid, set_no_new_privs, set_thread_groups, set_thread_res_gid,
    set_thread_res_uid,
};
use seccompiler::BpfProgram;

use super::middle::{self, DOWN, Middle, OWN, UP};
use super::view::{self, AUTHORITY, PROGRAM, STATE, View};
use crate::capabilities::restrict_to;
use crate::cgroup::{Cgroup, Entry};
use crate::directory::{BoxDir, start_ticks};
use crate::kernel::process::{
    Side, clone_child, clone_sibling, close_on_exec_from, exit_now, fresh_session_keyring, lift, place,
    reset_signals, unshare,
};
use crate::remains::Init;
use crate::seccomp;
use crate::spec::{BoxSpec, EgressSpec};

const NAMESPACES: libc::c_int =
    libc::CLONE_NEWNS | libc::CLONE_NEWPID | libc::CLONE_NEWIPC | libc::CLONE_NEWUTS | libc::CLONE_NEWCGROUP;
/// Each connection that is looked into takes two.
const DESCRIPTORS: u64 = 65_536;
const LONGEST_REASON: usize = 1024;

/// A program that was executed.
#[derive(Debug)]
pub struct Started {
    pub process: Init,
    pub stdout: OwnedFd,
    pub stderr: OwnedFd,
}

/// What starting takes; the same for every start of one box.
pub struct Ground<'a> {
    pub dir: &'a BoxDir,
    pub spec: &'a BoxSpec,
    pub egress: &'a EgressSpec,
    pub middle: &'a Middle,
    pub cgroup: &'a Cgroup,
    pub seccomp: &'a BpfProgram,
}

/// What the two new processes need; they get a copy by the fork.
struct Plan<'a> {
    ground: &'a Ground<'a>,
    view: View,
    tasks: Vec<OwnedFd>,
    ends: [OwnedFd; 3],
    /// The number of the program's process, then a reason if it cannot be executed; its end means that it was.
    report: OwnedFd,
}

/// Starts the program. Returns when it was executed, not when it enforces.
pub fn start(ground: &Ground<'_>) -> io::Result<Started> {
    let (stdout, far_stdout) = pipe_with(PipeFlags::CLOEXEC)?;
    let (stderr, far_stderr) = pipe_with(PipeFlags::CLOEXEC)?;
    let (reports, report) =
        socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
    let (tasks, directory) = match ground.cgroup.entry()? {
        Entry::Tasks(tasks) => (tasks, None),
        Entry::Directory(directory) => (Vec::new(), Some(directory)),
    };
    let null = File::options().read(true).write(true).open("/dev/null")?;
    let view = View::prepare(ground.dir, ground.egress)?;
    let plan = Plan { ground, view, tasks, ends: [null.into(), far_stdout, far_stderr], report };
    match clone_child(0, directory.as_ref().map(AsFd::as_fd))? {
        Side::Child => {
            drop(reports);
            guarded(&plan, step)
        }
        Side::Parent(stone) => {
            drop(plan);
            let outcome = listen(&reports);
            let _ = waitid(WaitId::PidFd(stone.pidfd.as_fd()), WaitIdOptions::EXITED);
            Ok(Started { process: outcome?, stdout, stderr })
        }
    }
}

/// The program's process, once it was executed.
fn listen(reports: &OwnedFd) -> io::Result<Init> {
    let mut packet = [0; LONGEST_REASON];
    let length = receive(reports, &mut packet)?;
    let pid = match packet[..length].first_chunk::<4>() {
        Some(bytes) if length == 4 => i32::from_ne_bytes(*bytes),
        _ => return Err(reason(&packet[..length])),
    };
    let known = rustix::process::Pid::from_raw(pid).ok_or(io::ErrorKind::InvalidData)?;
    // Our own child, which nobody else reaps: the number is still its own.
    let process = Init { pid, start_ticks: start_ticks(pid), pidfd: pidfd_open(known, PidfdFlags::empty())? };
    match receive(reports, &mut packet)? {
        0 => Ok(process),
        length => {
            process.await_end();
            Err(reason(&packet[..length]))
        }
    }
}

fn receive(reports: &OwnedFd, packet: &mut [u8]) -> io::Result<usize> {
    loop {
        match recv(reports, &mut *packet, RecvFlags::empty()) {
            Err(rustix::io::Errno::INTR) => {}
            other => return Ok(other.map(|(length, _)| length)?),
        }
    }
}

fn reason(packet: &[u8]) -> io::Error {
    if packet.is_empty() {
        return io::Error::other("the process died before the program was executed");
    }
    io::Error::other(String::from_utf8_lossy(packet).into_owned())
}

/// Never returns into the shim's code, of which this process is a copy.
fn guarded(plan: &Plan<'_>, act: fn(&Plan<'_>) -> io::Result<()>) -> ! {
    let outcome = std::panic::catch_unwind(AssertUnwindSafe(|| act(plan)));
    let text = match outcome {
        Ok(Ok(())) => exit_now(0),
        Ok(Err(error)) => error.to_string(),
        Err(_) => "a panic before the program was executed".into(),
    };
    let length = text.len().min(LONGEST_REASON);
    let _ = send(&plan.report, &text.as_bytes()[..length], SendFlags::NOSIGNAL);
    exit_now(127)
}

/// The stepping stone.
fn step(plan: &Plan<'_>) -> io::Result<()> {
    set_parent_process_death_signal(Some(Signal::KILL))?;
    reset_signals();
    rustix::process::setsid()?;
    for tasks in &plan.tasks {
        File::from(tasks.try_clone()?).write_all(b"0")?;
    }
    // As the host's root, to whom alone the way there is open.
    rustix::process::chdir(view::home(plan.ground.dir))?;
    middle::enter(plan.ground.middle.user.as_fd(), LinkNameSpaceType::User)
        .map_err(named("enter the user namespace"))?;
    middle::enter(plan.ground.middle.net.as_fd(), LinkNameSpaceType::Network)
        .map_err(named("enter the network namespace"))?;
    unshare(NAMESPACES).map_err(named("make namespaces"))?;
    match clone_sibling()? {
        Side::Child => guarded(plan, become_program),
        Side::Parent(pid) => {
            send(&plan.report, &pid.as_raw_nonzero().get().to_ne_bytes(), SendFlags::NOSIGNAL)?;
            Ok(())
        }
    }
}

/// The program's process until it is the program.
fn become_program(plan: &Plan<'_>) -> io::Result<()> {
    let (uid, gid) = (Uid::from_raw(0), Gid::from_raw(0));
    set_thread_res_gid(gid, gid, gid)?;
    set_thread_groups(&[])?;
    set_thread_res_uid(uid, uid, uid)?;
    plan.view.enter().map_err(named("set up the file system"))?;
    rustix::system::sethostname(b"egress")?;
    restrict()?;
    let ends = plan.ends.iter().map(|fd| lift(fd.as_fd())).collect::<io::Result<Vec<_>>>()?;
    for (target, fd) in ends.iter().enumerate() {
        place(fd.as_fd(), target as i32)?;
    }
    close_on_exec_from(3)?;
    // Changing ids cleared what the fork had cleared already. The shim may have died in between.
    set_parent_process_death_signal(Some(Signal::KILL))?;
    still_wanted(&plan.report)?;
    seccomp::apply(plan.ground.seccomp)?;
    let error = Command::new(PROGRAM).env_clear().envs(environment(plan.ground)).exec();
    Err(io::Error::new(error.kind(), format!("cannot execute the program: {error}")))
}

fn restrict() -> io::Result<()> {
    fresh_session_keyring()?;
    let most = getrlimit(Resource::Nofile).maximum.map_or(DESCRIPTORS, |hard| hard.min(DESCRIPTORS));
    setrlimit(Resource::Nofile, Rlimit { current: Some(most), maximum: Some(most) })?;
    // Its memory holds what must not come to lie in a file.
    setrlimit(Resource::Core, Rlimit { current: Some(0), maximum: Some(0) })?;
    set_no_new_privs(true)?;
    restrict_to(CapabilitySet::NET_ADMIN)
}

/// Where it is placed comes last and so wins over anything that was asked for.
fn environment(ground: &Ground<'_>) -> Vec<(String, String)> {
    let boxed = ground.spec.network.as_ref().map(|network| network.address.to_string());
    let placed = [
        ("SANDGLASS_EGRESS_PLACEMENT", "gateway".to_owned()),
        ("SANDGLASS_EGRESS_UP", UP.to_owned()),
        ("SANDGLASS_EGRESS_DOWN", DOWN.to_owned()),
        ("SANDGLASS_EGRESS_OWN", OWN.to_string()),
        ("SANDGLASS_EGRESS_BOX", boxed.unwrap_or_default()),
        ("SANDGLASS_EGRESS_CA_DIR", AUTHORITY.to_owned()),
        ("OPENSANDBOX_EGRESS_POLICY_FILE", format!("{STATE}/policy.json")),
    ];
    let placed = placed.map(|(name, value)| (name.to_owned(), value));
    ground.egress.env.iter().cloned().chain(placed).collect()
}

fn still_wanted(report: &OwnedFd) -> io::Result<()> {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    match poll(&mut [PollFd::new(report, PollFlags::RDHUP)], Some(&now))? {
        0 => Ok(()),
        _ => Err(io::Error::other("the shim is gone")),
    }
}

fn named(step: &'static str) -> impl Fn(io::Error) -> io::Error {
    move |error| io::Error::new(error.kind(), format!("cannot {step}: {error}"))
}
