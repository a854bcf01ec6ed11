//! The commands of this agent's life: who runs, who ended how, and what may be forgotten.
//!
//! Invariant: a running command is never forgotten, and a pid is only signalled while its process is not reaped.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use jiff::Timestamp;
use tokio::sync::oneshot;

use super::log::Log;
use crate::init::reap::Exit;
use crate::init::signal_group;
use crate::lines::char_boundary;

/// Ended foreground commands remembered for status requests.
const KEEP_FOREGROUND: usize = 1024;
/// Ended background commands remembered; each holds a descriptor and its output.
const KEEP_BACKGROUND: usize = 256;
/// All that ended commands of a kind may take with their texts and with output that is held in memory.
const KEEP_BYTES: usize = 32 << 20;
/// What status repeats of a longer text. The kernel takes no argument that is longer than this.
const MAX_CONTENT: usize = 128 << 10;

/// How a command ended, as status and events report it.
#[derive(Debug, Clone)]
pub(crate) struct End {
    pub code: i32,
    /// Empty for success.
    pub error: String,
}

impl From<Exit> for End {
    fn from(exit: Exit) -> Self {
        match exit {
            Exit::Code(0) => End { code: 0, error: String::new() },
            Exit::Code(code) => End { code, error: format!("exit status {code}") },
            Exit::Signal { number, core_dumped } => {
                let dumped = if core_dumped { " (core dumped)" } else { "" };
                End { code: -1, error: format!("signal: {}{dumped}", signal_name(number)) }
            }
        }
    }
}

/// The names Go gives signals, which is what clients have always been shown.
fn signal_name(number: i32) -> String {
    let name = match number {
        libc::SIGHUP => "hangup",
        libc::SIGINT => "interrupt",
        libc::SIGQUIT => "quit",
        libc::SIGILL => "illegal instruction",
        libc::SIGTRAP => "trace/breakpoint trap",
        libc::SIGABRT => "aborted",
        libc::SIGBUS => "bus error",
        libc::SIGFPE => "floating point exception",
        libc::SIGKILL => "killed",
        libc::SIGUSR1 => "user defined signal 1",
        libc::SIGSEGV => "segmentation fault",
        libc::SIGUSR2 => "user defined signal 2",
        libc::SIGPIPE => "broken pipe",
        libc::SIGALRM => "alarm clock",
        libc::SIGTERM => "terminated",
        libc::SIGXCPU => "CPU time limit exceeded",
        libc::SIGXFSZ => "file size limit exceeded",
        libc::SIGSYS => "bad system call",
        _ => return format!("signal {number}"),
    };
    name.to_owned()
}

#[derive(Debug, Clone)]
pub(super) enum State {
    Starting,
    Running(i32),
    Ended(End, Timestamp),
}

impl State {
    pub(super) fn is_running(&self) -> bool {
        !matches!(self, State::Ended(..))
    }

    pub(super) fn ended(self) -> Option<(End, Timestamp)> {
        match self {
            State::Ended(end, at) => Some((end, at)),
            _ => None,
        }
    }
}

pub(super) struct Command {
    pub id: String,
    pub content: String,
    pub started_at: Timestamp,
    /// Present for background commands.
    pub log: Option<Arc<Log>>,
    state: Mutex<State>,
}

impl Command {
    pub(super) fn new(content: &str, log: Option<Arc<Log>>) -> Arc<Self> {
        let content =
            content[..char_boundary(&content.as_bytes()[..content.len().min(MAX_CONTENT)])].to_owned();
        let id = uuid::Uuid::new_v4().simple().to_string();
        Arc::new(Command {
            id,
            content,
            started_at: Timestamp::now(),
            log,
            state: Mutex::new(State::Starting),
        })
    }

    pub(super) fn state(&self) -> State {
        self.lock().clone()
    }

    pub(super) fn running_pid(&self) -> Option<i32> {
        match *self.lock() {
            State::Running(pid) => Some(pid),
            _ => None,
        }
    }

    pub(super) fn set_running(&self, pid: i32) {
        *self.lock() = State::Running(pid);
    }

    pub(super) fn set_ended(&self, end: End) {
        // A clock that was set back must not make a command end before it began.
        *self.lock() = State::Ended(end, Timestamp::now().max(self.started_at));
    }

    /// Memory that remembering this command takes.
    fn bytes(&self) -> usize {
        self.content.len() + self.log.as_ref().map_or(0, |log| log.memory())
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Follows a started command to its end: records it, enforces the timeout, and tells the receiver.
pub(super) fn watch(
    command: &Arc<Command>,
    exit: oneshot::Receiver<Exit>,
    timeout: Option<Duration>,
) -> oneshot::Receiver<End> {
    let (tx, rx) = oneshot::channel();
    let command = Arc::clone(command);
    tokio::spawn(async move {
        let mut exit = exit;
        let exited = match timeout {
            None => (&mut exit).await,
            Some(limit) => match tokio::time::timeout(limit, &mut exit).await {
                Ok(exited) => exited,
                Err(_) => {
                    if let Some(group) = command.running_pid() {
                        signal_group(group, libc::SIGKILL);
                    }
                    (&mut exit).await
                }
            },
        };
        let end =
            exited.map_or_else(|_| End { code: -1, error: "lost track of the process".into() }, End::from);
        command.set_ended(end.clone());
        // A background command has nobody waiting.
        let _ = tx.send(end);
    });
    rx
}

#[derive(Default)]
pub struct Commands {
    table: Mutex<Table>,
}

#[derive(Default)]
struct Table {
    by_id: HashMap<String, Arc<Command>>,
    /// Oldest first, one queue a kind.
    foreground: VecDeque<Arc<Command>>,
    background: VecDeque<Arc<Command>>,
}

impl Table {
    fn forget(&mut self) {
        for (queue, keep) in
            [(&mut self.foreground, KEEP_FOREGROUND), (&mut self.background, KEEP_BACKGROUND)]
        {
            let mut excess = queue.len().saturating_sub(keep);
            let mut heavy = queue.iter().map(|c| c.bytes()).sum::<usize>().saturating_sub(KEEP_BYTES);
            if excess == 0 && heavy == 0 {
                continue;
            }
            queue.retain(|command| {
                if (excess == 0 && heavy == 0) || command.state().is_running() {
                    return true;
                }
                excess = excess.saturating_sub(1);
                heavy = heavy.saturating_sub(command.bytes());
                self.by_id.remove(&command.id);
                false
            });
        }
    }
}

impl Commands {
    pub(super) fn add(&self, command: &Arc<Command>) {
        let mut table = self.lock();
        table.by_id.insert(command.id.clone(), Arc::clone(command));
        match command.log {
            None => table.foreground.push_back(Arc::clone(command)),
            Some(_) => table.background.push_back(Arc::clone(command)),
        }
        table.forget();
    }

    pub(super) fn get(&self, id: &str) -> Option<Arc<Command>> {
        self.lock().by_id.get(id).map(Arc::clone)
    }

    /// Passes a signal on to running foreground commands; false when there is none.
    pub fn forward_to_foreground(&self, number: i32) -> bool {
        let table = self.lock();
        let running = table.foreground.iter().filter_map(|c| c.running_pid());
        // Not `any`: that would stop at the first group that is there.
        running.filter(|group| signal_group(*group, number)).count() > 0
    }

    /// How many run now.
    pub fn running(&self) -> usize {
        let table = self.lock();
        table.by_id.values().filter(|command| command.state().is_running()).count()
    }

    fn lock(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
