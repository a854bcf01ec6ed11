//! Everything of a box that outlives its processes unless somebody removes it, and its removal.
//!
//! Used in three situations with the same code: a create that failed half-way, a box that ended, a box whose shim was
//! killed (from another process, see `teardown.rs`).
//! Invariant: [`Remains::clear`] is idempotent, tries every step even when one fails, and reports the first failure.

use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::mount::{UnmountFlags, unmount};
use rustix::process::{
    PidfdFlags, Signal, WaitId, WaitIdOptions, WaitIdStatus, pidfd_open, pidfd_send_signal, waitid,
};

use crate::cgroup::Cgroup;
use crate::network::link;

const DIES_WITHIN: Timespec = Timespec { tv_sec: 10, tv_nsec: 0 };

/// The first process of a PID namespace: the box's, or its enforcer's.
#[derive(Debug)]
pub struct Init {
    pub pid: i32,
    pub start_ticks: Option<u64>,
    pub pidfd: OwnedFd,
}

impl Init {
    pub fn signal(&self, signal: Signal) -> io::Result<()> {
        Ok(pidfd_send_signal(&self.pidfd, signal)?)
    }

    /// How it ended; `None` while it runs. Works once.
    pub fn reap(&self) -> io::Result<Option<WaitIdStatus>> {
        use std::os::fd::AsFd;
        Ok(waitid(WaitId::PidFd(self.pidfd.as_fd()), WaitIdOptions::EXITED | WaitIdOptions::NOHANG)?)
    }

    /// Whether it has ended, reaped or not.
    pub fn has_ended(&self) -> bool {
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        poll(&mut [PollFd::new(&self.pidfd, PollFlags::IN)], Some(&now)).is_ok_and(|ready| ready > 0)
    }

    /// Waits for its end, but not for ever: a process in an uninterruptible call does not even die of SIGKILL.
    pub fn await_end(&self) {
        let mut fds = [PollFd::new(&self.pidfd, PollFlags::IN)];
        let _ = poll(&mut fds, Some(&DIES_WITHIN));
        // Already reaped, or nobody of ours, is fine.
        let _ = self.reap();
    }

    /// A handle to a process that is not our child, if it still is the one that was recorded.
    pub fn find(pid: i32, start_ticks: u64) -> Option<Self> {
        let handle = pidfd_open(rustix::process::Pid::from_raw(pid)?, PidfdFlags::empty()).ok()?;
        (crate::directory::start_ticks(pid) == Some(start_ticks)).then_some(Self {
            pid,
            start_ticks: Some(start_ticks),
            pidfd: handle,
        })
    }
}

/// What there is to remove.
#[derive(Debug, Default)]
pub struct Remains {
    pub cgroup: Option<Cgroup>,
    pub init: Option<Init>,
    pub host_interface: Option<String>,
    pub mounted_root: Option<PathBuf>,
    pub egress_program: Option<Init>,
    pub egress_cgroup: Option<Cgroup>,
}

/// The step that failed, and why.
pub type Stuck = (&'static str, io::Error);

impl Remains {
    /// Kills, unmounts, removes. What is gone is forgotten, so that a second call tries only the rest.
    pub fn clear(&mut self) -> Result<(), Stuck> {
        let mut first: Option<Stuck> = None;
        let mut failed = |step, error| {
            first.get_or_insert((step, error));
        };
        if let Some(init) = &self.init {
            let _ = self.cgroup.as_ref().map(|cgroup| cgroup.set_frozen(crate::cgroup::Frozen::No));
            // With it the kernel kills the whole pid namespace.
            let _ = init.signal(Signal::KILL);
            init.await_end();
        }
        self.init = None;
        if let Some(cgroup) = &self.cgroup
            && let Err(error) = cgroup.kill()
        {
            failed("kill the processes", error);
        }
        // After the box: as long as anything of it runs, what it sends is looked at.
        if let Some(program) = self.egress_program.take() {
            let _ = program.signal(Signal::KILL);
            program.await_end();
        }
        if let Some(cgroup) = &self.egress_cgroup
            && let Err(error) = cgroup.kill()
        {
            failed("kill the egress enforcer", error);
        }
        if let Some(interface) = &self.host_interface {
            match link::detach(interface) {
                Ok(()) => self.host_interface = None,
                Err(error) => failed("remove the network interface", error),
            }
        }
        if let Some(root) = self.mounted_root.take() {
            // The merged root, then the layers that it covers; "invalid" means that nothing is mounted any more.
            loop {
                match unmount(&root, UnmountFlags::DETACH) {
                    Ok(()) => {}
                    Err(Errno::INVAL | Errno::NOENT) => break,
                    Err(error) => {
                        failed("unmount the root file system", error.into());
                        break;
                    }
                }
            }
        }
        if let Some(cgroup) = &self.cgroup {
            match cgroup.remove() {
                Ok(()) => self.cgroup = None,
                Err(error) => failed("remove the control group", error),
            }
        }
        if let Some(cgroup) = &self.egress_cgroup {
            match cgroup.remove() {
                Ok(()) => self.egress_cgroup = None,
                Err(error) => failed("remove the egress enforcer's control group", error),
            }
        }
        first.map_or(Ok(()), Err)
    }
}
