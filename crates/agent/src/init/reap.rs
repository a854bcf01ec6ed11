//! The single reaper: every child of this process is waited for here and nowhere else.
//!
//! A start on the runtime thread registers its pid before it yields, so no exit can be collected before somebody
//! listens for it. A start on another thread waits itself for a child that could not become the program, and fails badly
//! when somebody else has: while such starts go on, only known processes are collected, and orphans wait.
//! Invariant: nothing else in the process calls a wait function, except a start for its own failed child.

use std::collections::HashMap;
use std::io;
use std::sync::{Arc, Mutex, PoisonError};

use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{Notify, oneshot};

use super::signal_group;
use super::spawn::{Extras, Launch, LaunchError, Orphan, Program};

/// Exits collected in one go; a storm of them must not keep the thread from everything else.
const SWEEP: usize = 256;

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

#[derive(Default)]
struct Children {
    waiters: HashMap<i32, oneshot::Sender<Exit>>,
    /// Starts going on elsewhere.
    starting: usize,
}

#[derive(Clone, Default)]
pub struct Reaper {
    children: Arc<Mutex<Children>>,
    /// What was left alone while a start was going on can be collected.
    again: Arc<Notify>,
}

/// A start that is going on: as long as this lives, no unknown process is collected.
struct Starting(Reaper);

impl Starting {
    /// The started process; the receiver gets its exit, even one that has happened already.
    fn done(self, pid: i32) -> oneshot::Receiver<Exit> {
        let (tx, rx) = oneshot::channel();
        self.0.lock().waiters.insert(pid, tx);
        rx
    }
}

impl Drop for Starting {
    fn drop(&mut self) {
        self.0.lock().starting -= 1;
        self.0.again.notify_one();
    }
}

impl Reaper {
    /// Starts reaping on the current runtime, which must be single-threaded.
    pub fn start() -> io::Result<Self> {
        let reaper = Reaper::default();
        let mut children = signal(SignalKind::child())?;
        let task = reaper.clone();
        tokio::spawn(async move {
            loop {
                // Before the first signal, too: children may have ended before the handler was there.
                while task.sweep() == SWEEP {
                    tokio::task::yield_now().await;
                }
                tokio::select! {
                    signal = children.recv() => if signal.is_none() { return },
                    () = task.again.notified() => {}
                }
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
        self.lock().waiters.insert(pid, tx);
        Ok((pid, rx))
    }

    /// The exit of a process that this one did not start itself but is or becomes its parent. To be called before
    /// anything waits, or the exit may be gone.
    pub fn adopt(&self, pid: i32) -> oneshot::Receiver<Exit> {
        let (tx, rx) = oneshot::channel();
        self.lock().waiters.insert(pid, tx);
        rx
    }

    /// Signals the groups of all processes that were started here and run; false when none is left.
    pub fn signal_all(&self, number: i32) -> bool {
        // Not `any`: that would stop at the first group that is there.
        self.lock().waiters.keys().filter(|group| signal_group(**group, number)).count() > 0
    }

    /// As `spawn`, on another thread: whatever holds up the start holds up nothing else. To be awaited to the end,
    /// or the process goes on without anybody who knows of its exit.
    pub async fn spawn_aside(&self, program: Program) -> Result<(i32, oneshot::Receiver<Exit>), LaunchError> {
        let starting = self.starting();
        // The guard goes along: it must outlive the start, also when nobody waits for that any more.
        let start = move || program.start().map(|pid| (pid, starting.done(pid)));
        tokio::task::spawn_blocking(start).await.unwrap_or_else(|error| {
            Err(LaunchError::Other { program: "program".into(), source: io::Error::other(error) })
        })
    }

    fn starting(&self) -> Starting {
        self.lock().starting += 1;
        Starting(self.clone())
    }

    /// Collects what has ended, and says how many that were.
    fn sweep(&self) -> usize {
        // Starts begin on this thread, so none begins in the middle.
        let known: Option<Vec<i32>> = {
            let children = self.lock();
            (children.starting > 0).then(|| children.waiters.keys().copied().collect())
        };
        match known {
            Some(known) => known.into_iter().filter(|pid| self.collect(*pid)).count().min(SWEEP - 1),
            None => (0..SWEEP).take_while(|_| self.collect(-1)).count(),
        }
    }

    /// Collects that child, or any for -1; whether there was one that has ended.
    fn collect(&self, child: i32) -> bool {
        let mut status = 0;
        // SAFETY: `status` is a live local the kernel writes one int to; WNOHANG makes the call return at once.
        let pid = unsafe { libc::waitpid(child, &raw mut status, libc::WNOHANG) };
        if pid <= 0 {
            return false;
        }
        // Orphans of user processes have no waiter; collecting them is all there is to do.
        if let Some(waiter) = self.lock().waiters.remove(&pid) {
            let _ = waiter.send(Exit::from_wait_status(status));
        }
        true
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Children> {
        self.children.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
