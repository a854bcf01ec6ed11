//! The processes of a session: the agent's own binary, executed again.
//!
//! ```text
//! agent ── holder (box's pid namespace; serves the file routes with the session's identity)
//!            └── init (PID 1 of the session; mounts, then reaps and runs the shell) ── shell ── user code
//! ```
//!
//! Descriptors: 0 is the line to the agent of init, 1 that of the holder, 2 the plan.
//! Invariant: whoever dies takes everything below along, so killing the holder ends the session.

mod files;
mod init;
mod mounts;
mod shell;

use std::fs::File;
use std::io::{self, Read, Seek};
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::process::ExitCode;

use rustix::fs::{Mode, OFlags};
use rustix::process::{Signal, set_parent_process_death_signal};
use rustix::stdio;
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use super::plan::Plan;
use super::wire::{self, Report};
use crate::kernel::{self, Side};

/// What `execd` must be called with to end up here.
pub const WORD: &str = "isolate";

const HOST_NAME: &[u8] = b"sandbox";

/// An error with the step that it happened in.
fn during(step: &'static str) -> impl Fn(io::Error) -> io::Error {
    move |error| io::Error::new(error.kind(), format!("{step}: {error}"))
}

/// Becomes a session; returns when it is over.
pub fn run() -> ExitCode {
    let Ok(lines) = take_lines() else { return ExitCode::FAILURE };
    let (control, files, plan) = lines;
    crate::init::set_default_mode(0o644);
    crate::init::prepare_process();
    match become_session(&control, files, plan) {
        Ok(code) => code,
        Err(error) => {
            fail(control.as_fd(), &error);
            ExitCode::FAILURE
        }
    }
}

fn fail(control: std::os::fd::BorrowedFd<'_>, error: &io::Error) {
    let report = Report::Failed { reason: error.to_string() };
    // Without an agent there is nobody to tell.
    let _ = serde_json::to_vec(&report).map(|text| wire::put(control, &text, None));
}

/// The three descriptors, with `/dev/null` or nothing in their places.
fn take_lines() -> io::Result<(OwnedFd, OwnedFd, Plan)> {
    let above = |fd: std::os::fd::BorrowedFd<'_>| rustix::io::fcntl_dupfd_cloexec(fd, 10);
    let (control, files) = (above(stdio::stdin())?, above(stdio::stdout())?);
    let mut plan = File::from(above(stdio::stderr())?);
    plan.rewind()?;
    let mut text = Vec::new();
    plan.read_to_end(&mut text)?;
    let plan = serde_json::from_slice(&text)?;
    let null = match rustix::fs::open("/dev/null", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()) {
        Ok(null) => null,
        Err(_) => rustix::pipe::pipe()?.0,
    };
    stdio::dup2_stdin(&null)?;
    stdio::dup2_stdout(&null)?;
    stdio::dup2_stderr(&null)?;
    Ok((control, files, plan))
}

fn become_session(control: &OwnedFd, files: OwnedFd, plan: Plan) -> io::Result<ExitCode> {
    set_parent_process_death_signal(Some(Signal::KILL))?;
    rustix::process::setsid().map_err(io::Error::from).map_err(during("setsid"))?;
    // Where the change of roots finds it.
    rustix::process::chdir("/")?;
    let mut spaces = libc::CLONE_NEWNS | libc::CLONE_NEWUTS | libc::CLONE_NEWIPC | libc::CLONE_NEWCGROUP;
    if plan.own_network {
        spaces |= libc::CLONE_NEWNET;
    }
    kernel::unshare(spaces).map_err(during("namespaces"))?;
    mounts::make_private().map_err(during("mounts"))?;
    let processes = File::open("/proc/self/ns/pid").map_err(during("/proc"))?;
    kernel::unshare(libc::CLONE_NEWPID).map_err(during("process namespace"))?;
    match kernel::fork().map_err(during("fork"))? {
        Side::Child => {
            drop(files);
            let code = match prepare_init(&plan) {
                Ok(()) => init::run(control, &plan),
                Err(error) => Err(error),
            };
            if let Err(error) = code {
                fail(control.as_fd(), &error);
            }
            kernel::exit_now(0)
        }
        Side::Parent(init) => {
            // The holder stays where it was; a process between the two could not have threads.
            move_into_link_name_space(processes.as_fd(), Some(LinkNameSpaceType::ProcessID))?;
            Ok(files::hold(files, &plan, init))
        }
    }
}

/// Everything that needs the agent's rights; they are given up at its end.
fn prepare_init(plan: &Plan) -> io::Result<()> {
    set_parent_process_death_signal(Some(Signal::KILL))?;
    rustix::process::setsid().map_err(io::Error::from).map_err(during("setsid"))?;
    rustix::system::sethostname(HOST_NAME).map_err(io::Error::from).map_err(during("hostname"))?;
    if plan.own_network {
        // Needs a right that not every box has; without it the session has no loopback either.
        let _ = open_loopback();
    }
    mounts::assemble(plan)?;
    if plan.own_users {
        map_user(plan).map_err(during("user namespace"))?;
        set_parent_process_death_signal(Some(Signal::KILL))?;
    }
    Ok(())
}

fn open_loopback() -> io::Result<()> {
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};
    let socket = socket_with(AddressFamily::INET, SocketType::DGRAM, SocketFlags::CLOEXEC, None)?;
    kernel::open_loopback(socket.as_fd())
}

/// The one user of the session, who is the agent's outside: it needs nobody's permission and gives no rights over
/// anything that was mounted before.
fn map_user(plan: &Plan) -> io::Result<()> {
    let (uid, gid) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
    kernel::unshare(libc::CLONE_NEWUSER)?;
    let write = |name: &str, text: String| std::fs::write(Path::new("/proc/self").join(name), text);
    write("setgroups", "deny".into())?;
    write("uid_map", format!("{} {uid} 1", plan.uid))?;
    write("gid_map", format!("{} {gid} 1", plan.gid))
}
