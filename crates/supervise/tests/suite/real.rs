//! Real processes, with the test as the parent that waits for all of them, orphans included, as the first process of a box does.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use rustix::process::{
    Pid, WaitOptions, getpid, kill_process_group, set_child_subreaper, test_kill_process_group, wait,
};
use sandglass_supervise::ports::{Exit, Program, Running, Signal, Spawn, SpawnError};
use tokio::sync::oneshot;

type Waiters = Mutex<HashMap<i32, oneshot::Sender<Exit>>>;

/// Starts real programs and remembers their groups.
#[derive(Clone, Default)]
pub struct RealSpawn {
    groups: Arc<Mutex<Vec<i32>>>,
}

impl RealSpawn {
    /// The group that was started last.
    pub fn last(&self) -> i32 {
        *self.groups.lock().unwrap().last().unwrap()
    }

    pub fn count(&self) -> usize {
        self.groups.lock().unwrap().len()
    }

    pub fn anybody_left(&self) -> bool {
        let groups = self.groups.lock().unwrap().clone();
        groups.into_iter().any(|group| self.signal(group, Signal::Probe))
    }
}

fn waiters() -> MutexGuard<'static, HashMap<i32, oneshot::Sender<Exit>>> {
    static WAITERS: OnceLock<Waiters> = OnceLock::new();
    let begin = || {
        set_child_subreaper(Some(getpid())).unwrap();
        std::thread::spawn(reap);
        Waiters::default()
    };
    WAITERS.get_or_init(begin).lock().unwrap_or_else(PoisonError::into_inner)
}

/// Only waits while nothing is being started, so that every exit finds whoever waits for it.
fn reap() {
    loop {
        let mut waiting = waiters();
        while let Ok(Some((pid, status))) = wait(WaitOptions::NOHANG) {
            let exit = match status.terminating_signal() {
                Some(number) => Exit::Signal(number),
                None => Exit::Code(status.exit_status().unwrap_or(255)),
            };
            if let Some(waiter) = waiting.remove(&pid.as_raw_nonzero().get()) {
                let _ = waiter.send(exit);
            }
        }
        drop(waiting);
        std::thread::sleep(Duration::from_millis(2));
    }
}

impl Spawn for RealSpawn {
    fn spawn(&self, program: &Program, stdout: OwnedFd, stderr: OwnedFd) -> Result<Running, SpawnError> {
        let mut command = Command::new(&program.argv[0]);
        command.args(&program.argv[1..]).envs(&program.env).process_group(0);
        command.stdin(Stdio::null()).stdout(Stdio::from(stdout)).stderr(Stdio::from(stderr));
        if let Some(cwd) = &program.cwd {
            command.current_dir(cwd);
        }
        let mut waiting = waiters();
        let child = command.spawn().map_err(|error| SpawnError {
            message: format!("exec {}: {error}", program.argv[0]),
            source: Some(error),
        })?;
        let group = i32::try_from(child.id()).unwrap();
        let (tell, exit) = oneshot::channel();
        waiting.insert(group, tell);
        drop(waiting);
        self.groups.lock().unwrap().push(group);
        Ok(Running { group, exit: Box::pin(async { exit.await.unwrap_or(Exit::Code(255)) }) })
    }

    fn variable(&self, name: &str) -> Option<String> {
        std::env::var(name).ok()
    }

    fn signal(&self, group: i32, signal: Signal) -> bool {
        let Some(group) = Pid::from_raw(group) else { return false };
        match signal {
            Signal::Probe => test_kill_process_group(group),
            Signal::Term => kill_process_group(group, rustix::process::Signal::TERM),
            Signal::Kill => kill_process_group(group, rustix::process::Signal::KILL),
        }
        .is_ok()
    }
}
