//! The single reaper: every child of this process is waited for here and nowhere else.
//!
//! Spawning and reaping happen on the one runtime thread, and a spawn registers its pid before it yields, so no
//! exit can be collected before somebody listens for it.
//! Invariant: nothing else in the process calls a wait function.

use std::collections::HashMap;
use std::io;
use std::sync::{Arc, Mutex, PoisonError};

use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::oneshot;

use super::signal_group;
use super::spawn::{Extras, Launch, LaunchError, Orphan};

/// How a process ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Exit {
    Code(i32),
    Signal { number: i32, core_dumped: bool },
}

impl Exit {
    fn from_wait_status(status: i32) -> Self {
        if libc::WIFSIGNALED(status) {
            Exit::Signal { number: libc::WTERMSIG(status), core_dumped: libc::WCOREDUMP(status) }
        } else {
            Exit::Code(libc::WEXITSTATUS(status))
        }
    }

    /// The status a shell would report.
    pub fn shell_code(self) -> i32 {
        match self {
            Exit::Code(code) => code,
            Exit::Signal { number, .. } => 128 + number,
        }
    }
}

type Waiters = HashMap<i32, oneshot::Sender<Exit>>;

#[derive(Clone, Default)]
pub struct Reaper {
    waiters: Arc<Mutex<Waiters>>,
}

impl Reaper {
    /// Starts reaping on the current runtime, which must be single-threaded.
    pub fn start() -> io::Result<Self> {
        let reaper = Reaper::default();
        let mut children = signal(SignalKind::child())?;
        let task = reaper.clone();
        tokio::spawn(async move {
            // Children may have ended before the handler was there.
            task.sweep();
            while children.recv().await.is_some() {
                task.sweep();
            }
        });
        Ok(reaper)
    }

    /// Starts a process; the receiver gets its exit.
    pub fn spawn(&self, launch: Launch<'_>) -> Result<(i32, oneshot::Receiver<Exit>), LaunchError> {
        self.spawn_with(launch, Extras::default())
    }

    /// Starts a process that is of no use without the agent, and dies with it.
    pub fn spawn_dependent(&self, launch: Launch<'_>) -> Result<(i32, oneshot::Receiver<Exit>), LaunchError> {
        self.spawn_with(launch, Extras { orphan: Orphan::Dies, ..Extras::default() })
    }

    pub fn spawn_with(
        &self,
        launch: Launch<'_>,
        extras: Extras,
    ) -> Result<(i32, oneshot::Receiver<Exit>), LaunchError> {
        let pid = launch.start_with(extras)?;
        let (tx, rx) = oneshot::channel();
        self.lock().insert(pid, tx);
        Ok((pid, rx))
    }

    /// The exit of a process that this one did not start itself but is or becomes its parent. To be called before
    /// anything waits, or the exit may be gone.
    pub fn adopt(&self, pid: i32) -> oneshot::Receiver<Exit> {
        let (tx, rx) = oneshot::channel();
        self.lock().insert(pid, tx);
        rx
    }

    /// Signals the groups of all processes that were started here and run; false when none is left.
    pub fn signal_all(&self, number: i32) -> bool {
        // Not `any`: that would stop at the first group that is there.
        self.lock().keys().filter(|group| signal_group(**group, number)).count() > 0
    }

    fn sweep(&self) {
        loop {
            let mut status = 0;
            // SAFETY: `status` is a live local the kernel writes one int to; WNOHANG makes the call return at once.
            let pid = unsafe { libc::waitpid(-1, &raw mut status, libc::WNOHANG) };
            if pid <= 0 {
                return;
            }
            // Orphans of user processes have no waiter; collecting them is all there is to do.
            if let Some(waiter) = self.lock().remove(&pid) {
                let _ = waiter.send(Exit::from_wait_status(status));
            }
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Waiters> {
        self.waiters.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
