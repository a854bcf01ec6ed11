//! One terminal: its shell, what the shell wrote, and who is connected to it.
//!
//! The shell is read as long as anybody keeps up; with every reader half a ring behind it waits, for no longer than a
//! reader may take for one frame. So the only reader misses nothing, and a slow one among several misses old bytes.
//! Invariant: an exit is recorded after everything that the shell wrote.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{Notify, Semaphore, watch};
use tokio::time::Instant;

use super::ring::{CAPACITY, Origin, Ring};
use super::shell::{self, Following, Handle, Mode, Source};
use crate::http::router::Agent;
use crate::init::reap::Exit;
use crate::init::stop;

/// How far the fastest reader may be behind before the shell has to wait.
const AHEAD: u64 = CAPACITY as u64 / 2;
const READ: usize = 32 << 10;
/// How long output that is still on its way, or from processes left behind, is waited for after the shell's end.
const IDLE_GRACE: Duration = Duration::from_millis(100);
const BUSY_GRACE: Duration = Duration::from_secs(1);
/// Watching costs a connection only; this keeps one terminal from taking all of them.
const MAX_VIEWERS: usize = 16;

pub(super) struct Terminal {
    pub id: String,
    cwd: PathBuf,
    command: Option<String>,
    state: Mutex<State>,
    /// Sent whenever there is something new for the connected.
    pub changed: watch::Sender<()>,
    /// A reader has come forward.
    caught_up: Notify,
    /// The one place of who may type.
    pub holder: Arc<Semaphore>,
    pub viewers: Arc<Semaphore>,
    /// Counts takeovers; who holds the place leaves when it changes.
    pub evictions: watch::Sender<u64>,
}

#[derive(Default)]
struct State {
    ring: Ring,
    shell: Option<Handle>,
    /// Counts the shells started.
    epoch: u64,
    ended: Option<(u64, i32)>,
    /// Kernel sessions of shells, with what they left running.
    sessions: Vec<i32>,
    readers: HashMap<u64, u64>,
    next_reader: u64,
    deleted: bool,
}

/// A connected reader's view; what it holds back is told by its offset.
pub(super) struct Reader {
    terminal: Arc<Terminal>,
    key: u64,
    pub at: u64,
    epoch: u64,
    pub mode: Mode,
}

/// What a reader is to be shown next.
pub(super) enum Next {
    Output { origin: Origin, from: u64, bytes: Vec<u8>, gap: bool },
    Exit(i32),
    Nothing,
}

impl Terminal {
    pub(super) fn new(id: String, cwd: PathBuf, command: Option<String>) -> Self {
        Terminal {
            id,
            cwd,
            command,
            state: Mutex::default(),
            changed: watch::Sender::new(()),
            caught_up: Notify::new(),
            holder: Arc::new(Semaphore::new(1)),
            viewers: Arc::new(Semaphore::new(MAX_VIEWERS)),
            evictions: watch::Sender::new(0),
        }
    }

    pub(super) fn running(&self) -> bool {
        self.lock().shell.is_some()
    }

    pub(super) fn offset(&self) -> u64 {
        self.lock().ring.end()
    }

    pub(super) fn shell(&self) -> Option<Handle> {
        self.lock().shell.clone()
    }

    /// Starts a shell unless one runs.
    pub(super) async fn ensure_shell(self: &Arc<Self>, agent: &Arc<Agent>, mode: Mode) -> Result<(), String> {
        let former = {
            let state = self.lock();
            if state.shell.is_some() {
                return Ok(());
            }
            state.sessions.clone()
        };
        let left = if former.is_empty() { former } else { stop::inhabited(&former).await };
        let mut state = self.lock();
        if state.deleted {
            return Err("the terminal was deleted".into());
        }
        if state.shell.is_some() {
            return Ok(());
        }
        let cwd = if self.cwd.is_dir() { &self.cwd } else { &agent.cwd };
        let (handle, following) = shell::start(agent, cwd, self.command.as_deref(), mode)?;
        state.sessions = left;
        state.sessions.push(handle.pid);
        state.epoch += 1;
        state.shell = Some(handle.clone());
        drop(state);
        tokio::spawn(Arc::clone(self).follow(following));
        Ok(())
    }

    /// Moves the shell's output into the ring until it has ended.
    async fn follow(self: Arc<Self>, following: Following) {
        let Following { mut exit, mut sources } = following;
        let mut buffer = vec![0; READ];
        let ended = loop {
            tokio::select! {
                exit = &mut exit => break exit,
                read = read_any(&mut sources, &mut buffer) => {
                    let Some((origin, count)) = read else { break (&mut exit).await };
                    self.append(origin, &buffer[..count]);
                    tokio::select! {
                        () = self.room() => {}
                        exit = &mut exit => break exit,
                    }
                }
            }
        };
        let mut limit = Instant::now() + BUSY_GRACE;
        while Instant::now() < limit {
            let read = tokio::time::timeout(IDLE_GRACE, read_any(&mut sources, &mut buffer)).await;
            let Ok(Some((origin, count))) = read else { break };
            self.append(origin, &buffer[..count]);
            // What readers take their time for is no output that is late.
            let paused = Instant::now();
            self.room().await;
            limit += paused.elapsed();
        }
        let code = match ended {
            Ok(Exit::Code(code)) => code,
            Ok(Exit::Signal { .. }) | Err(_) => -1,
        };
        {
            let mut state = self.lock();
            state.shell = None;
            state.ended = Some((state.epoch, code));
        }
        self.changed.send_replace(());
        // Nobody is to die of writing to a shell that has gone.
        for source in sources.into_iter().flatten() {
            if let Source::Pipe(_, pipe) = source {
                tokio::spawn(crate::command::pipes::discard(pipe));
            }
        }
    }

    fn append(&self, origin: Origin, bytes: &[u8]) {
        self.lock().ring.append(origin, bytes);
        self.changed.send_replace(());
    }

    /// Waits while every reader is far behind.
    async fn room(&self) {
        loop {
            let far_behind = {
                let state = self.lock();
                let end = state.ring.end();
                !state.readers.is_empty() && state.readers.values().all(|at| end.saturating_sub(*at) > AHEAD)
            };
            if !far_behind {
                return;
            }
            self.caught_up.notified().await;
        }
    }

    /// Connects a reader that begins at an offset; none when no shell runs.
    pub(super) fn attach(self: &Arc<Self>, since: u64) -> Option<Reader> {
        let mut state = self.lock();
        let mode = state.shell.as_ref()?.mode;
        let at = since.clamp(state.ring.start(), state.ring.end());
        let key = state.next_reader;
        state.next_reader += 1;
        state.readers.insert(key, at);
        Some(Reader { terminal: Arc::clone(self), key, at, epoch: state.epoch, mode })
    }

    /// Kills the shell and everything it left; connections are told by its exit.
    pub(super) async fn destroy(&self) {
        let sessions = {
            let mut state = self.lock();
            state.deleted = true;
            std::mem::take(&mut state.sessions)
        };
        if !sessions.is_empty() {
            stop::kill_all(&sessions).await;
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Reads whichever has something; none when all have ended.
async fn read_any(sources: &mut [Option<Source>; 2], buffer: &mut [u8]) -> Option<(Origin, usize)> {
    loop {
        let (first, second) = match &*sources {
            [None, None] => return None,
            [Some(only), None] | [None, Some(only)] => {
                let read = only.read(buffer).await;
                if read.1 > 0 {
                    return Some(read);
                }
                *sources = [None, None];
                continue;
            }
            [Some(first), Some(second)] => (first, second),
        };
        let mut other = [0; 4096];
        let (at, (origin, count)) = tokio::select! {
            read = first.read(buffer) => (0, read),
            read = second.read(&mut other) => (1, read),
        };
        if count > 0 {
            if at == 1 {
                buffer[..count].copy_from_slice(&other[..count]);
            }
            return Some((origin, count));
        }
        sources[at] = None;
    }
}

impl Reader {
    /// At most this many bytes of what the reader has not been shown, or the shell's end after the last of them.
    pub(super) fn next(&mut self, most: usize) -> Next {
        let mut state = self.terminal.lock();
        if self.at < state.ring.end() {
            let from = self.at.max(state.ring.start());
            let (origin, until) = state.ring.origin(from);
            let most = most.min(usize::try_from(until - from).unwrap_or(usize::MAX));
            let gap = from != self.at;
            let (from, bytes) = state.ring.read(from, most);
            self.at = from + bytes.len() as u64;
            state.readers.insert(self.key, self.at);
            self.terminal.caught_up.notify_one();
            return Next::Output { origin, from, bytes, gap };
        }
        match state.ended {
            Some((epoch, code)) if epoch >= self.epoch => Next::Exit(code),
            _ => Next::Nothing,
        }
    }

    /// What is kept from the reader's offset on, in one piece of at most this many bytes.
    pub(super) fn catch_up(&mut self, until: u64, most: usize) -> Option<(u64, Vec<u8>)> {
        let mut state = self.terminal.lock();
        let from = self.at.max(state.ring.start());
        let left = usize::try_from(until.saturating_sub(from)).unwrap_or(usize::MAX);
        if left == 0 {
            return None;
        }
        let (from, bytes) = state.ring.read(from, left.min(most));
        self.at = from + bytes.len() as u64;
        state.readers.insert(self.key, self.at);
        self.terminal.caught_up.notify_one();
        Some((from, bytes))
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        self.terminal.lock().readers.remove(&self.key);
        self.terminal.caught_up.notify_one();
    }
}
