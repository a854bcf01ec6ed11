//! One session as the agent sees it: its holder process, the line to its init, and the runs that are in it.
//!
//! Owns starting, watching and ending the session's processes. Not here: what happens inside (`inside`), and what
//! clients are told (`runs`).
//! Invariant: whoever waits for a run hears of its end, also when the session dies under it.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Seek, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use jiff::Timestamp;
use rustix::fs::MemfdFlags;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use serde_json::{Map, Value};
use tokio::sync::{Semaphore, oneshot, watch};
use tokio::time::Instant;

use super::inside;
use super::plan::Plan;
use super::runs::Background;
use super::wire::{Channel, Connection, How, Order, Report};
use crate::init::reap::{Exit, Reaper};

/// Mounting and starting takes milliseconds; this is for machines that stand still.
const START: Duration = Duration::from_secs(20);
/// How long the kernel may take to take a session apart.
const END: Duration = Duration::from_secs(10);
/// How long a session that died by itself is still shown.
const SHOW_DEAD: Duration = Duration::from_secs(60);

/// How a run ended.
#[derive(Debug, Clone)]
pub(super) struct Ended {
    pub code: i32,
    /// Set when it did not end by itself.
    pub reason: Option<String>,
}

impl Ended {
    fn with_the_session() -> Self {
        Ended { code: -1, reason: Some("session terminated".into()) }
    }
}

/// What is known about a run as it happens; each is told at most once.
pub(super) struct Events {
    pub output: oneshot::Receiver<OwnedFd>,
    pub away: oneshot::Receiver<()>,
    pub ended: oneshot::Receiver<Ended>,
}

impl Events {
    pub(super) async fn end(ended: &mut oneshot::Receiver<Ended>) -> Ended {
        ended.await.unwrap_or_else(|_| Ended::with_the_session())
    }
}

struct Waiting {
    output: Option<oneshot::Sender<OwnedFd>>,
    away: Option<oneshot::Sender<()>>,
    ended: oneshot::Sender<Ended>,
}

#[derive(Debug, Clone, Copy)]
struct Clock {
    last_run: Timestamp,
    idle_since: Instant,
    active: usize,
}

pub(super) struct Session {
    pub id: String,
    pub created_at: Timestamp,
    pub echo: Map<String, Value>,
    pub idle_timeout: Option<Duration>,
    /// Who holds it has the shell for itself.
    pub turn: Arc<Semaphore>,
    pub background: Mutex<HashMap<String, Arc<Background>>>,
    /// A descriptor of the process, which means no other when the number is used again.
    holder: OwnedFd,
    control: Channel,
    files: Channel,
    waiting: Mutex<HashMap<String, Waiting>>,
    clock: Mutex<Clock>,
    /// Turns true when the processes are gone.
    gone: watch::Sender<bool>,
}

/// What a session is known by.
pub(super) struct Identity {
    pub id: String,
    pub echo: Map<String, Value>,
    pub idle_timeout: Option<Duration>,
}

/// A session's processes before it is known whether they can do their work.
struct Started {
    holder: OwnedFd,
    exit: oneshot::Receiver<Exit>,
    control: Channel,
    files: Channel,
}

fn start(reaper: &Reaper, plan: &Plan) -> io::Result<Started> {
    let (control, init_end) = Channel::pair()?;
    let (files, holder_end) = Channel::pair()?;
    let mut text = File::from(rustix::fs::memfd_create("plan", MemfdFlags::CLOEXEC)?);
    text.write_all(&serde_json::to_vec(plan)?)?;
    text.rewind()?;
    let (control, files) = (Channel::new(control)?, Channel::new(files)?);
    // Not by way of the floor of user processes: this one makes namespaces, and sets a floor of its own.
    let child = Command::new("/proc/self/exe")
        .arg0("execd")
        .arg(inside::WORD)
        .env_clear()
        .stdin(Stdio::from(init_end))
        .stdout(Stdio::from(holder_end))
        .stderr(Stdio::from(text))
        .spawn()?;
    let number = i32::try_from(child.id()).unwrap_or(i32::MAX);
    let exit = reaper.adopt(number);
    // It cannot have been reaped yet: that happens on this thread.
    let holder = pidfd_open(Pid::from_child(&child), PidfdFlags::empty())?;
    Ok(Started { holder, exit, control, files })
}

impl Started {
    /// Waits for the word that everything is in place.
    async fn ready(&mut self) -> Result<(), String> {
        let word = tokio::time::timeout(START, self.control.receive::<Report>()).await;
        let reason = match word {
            Ok(Ok(Some((Report::Ready, _)))) => return Ok(()),
            Ok(Ok(Some((Report::Failed { reason }, _)))) => reason,
            Ok(Err(error)) => error.to_string(),
            Ok(_) => "its processes ended at once".to_owned(),
            Err(_) => "it did not start in time".to_owned(),
        };
        self.end().await;
        Err(reason)
    }

    async fn end(&mut self) {
        kill(&self.holder);
        let _ = tokio::time::timeout(END, &mut self.exit).await;
    }
}

/// Takes everything below along.
fn kill(holder: &OwnedFd) {
    // One that is gone needs no signal.
    let _ = pidfd_send_signal(holder, Signal::KILL);
}

/// Whether such a session can be made here.
pub(super) async fn probe(reaper: &Reaper, plan: &Plan) -> Result<(), String> {
    let mut started = start(reaper, plan).map_err(|error| error.to_string())?;
    started.ready().await?;
    started.end().await;
    Ok(())
}

impl Session {
    pub(super) async fn open(reaper: &Reaper, plan: &Plan, known: Identity) -> Result<Arc<Self>, String> {
        let mut started = start(reaper, plan).map_err(|error| error.to_string())?;
        started.ready().await?;
        let now = Timestamp::now();
        let session = Arc::new(Session {
            id: known.id,
            created_at: now,
            echo: known.echo,
            idle_timeout: known.idle_timeout,
            turn: Arc::new(Semaphore::new(1)),
            background: Mutex::default(),
            holder: started.holder,
            control: started.control,
            files: started.files,
            waiting: Mutex::default(),
            clock: Mutex::new(Clock { last_run: now, idle_since: Instant::now(), active: 0 }),
            gone: watch::channel(false).0,
        });
        tokio::spawn(Arc::clone(&session).attend(started.exit));
        Ok(session)
    }

    /// Listens to the session until it is over.
    async fn attend(self: Arc<Self>, mut exit: oneshot::Receiver<Exit>) {
        let mut reaped = false;
        loop {
            tokio::select! {
                report = self.control.receive::<Report>() => match report {
                    Ok(Some((Report::Over { .. } | Report::Failed { .. }, _)) | None) | Err(_) => break,
                    Ok(Some((report, fd))) => self.heard(report, fd),
                },
                _ = &mut exit => {
                    reaped = true;
                    break;
                }
            }
        }
        self.kill();
        if !reaped {
            let _ = exit.await;
        }
        // Dropping the senders tells everybody who waits.
        self.waiting().clear();
        self.turn.close();
        let _ = self.gone.send(true);
    }

    fn heard(&self, report: Report, fd: Option<OwnedFd>) {
        let mut waiting = self.waiting();
        match report {
            Report::Output { id } => {
                let sender = waiting.get_mut(&id).and_then(|run| run.output.take());
                // Without somebody who waits, the pipe closes and the run may notice.
                let _ = sender.zip(fd).map(|(sender, fd)| sender.send(fd));
            }
            Report::Away { id } => {
                let sender = waiting.get_mut(&id).and_then(|run| run.away.take());
                let _ = sender.map(|sender| sender.send(()));
            }
            Report::Ended { id, code, reason } => {
                if let Some(run) = waiting.remove(&id) {
                    let _ = run.ended.send(Ended { code, reason });
                }
            }
            Report::Ready | Report::Failed { .. } | Report::Over { .. } => {}
        }
    }

    /// Hands a script to the shell, which must be free.
    pub(super) async fn begin(&self, id: &str, how: How, script: &str) -> io::Result<Events> {
        let mut file = File::from(rustix::fs::memfd_create("run", MemfdFlags::CLOEXEC)?);
        file.write_all(script.as_bytes())?;
        file.rewind()?;
        let (output, output_seen) = oneshot::channel();
        let (away, away_seen) = oneshot::channel();
        let (ended, ended_seen) = oneshot::channel();
        let waiting = Waiting { output: Some(output), away: Some(away), ended };
        self.waiting().insert(id.to_owned(), waiting);
        let sent = self.control.send(&Order::Run { id: id.to_owned(), how }, Some(file.as_fd())).await;
        if sent.is_err() || *self.gone.borrow() {
            self.waiting().remove(id);
            return Err(sent.err().unwrap_or_else(|| io::Error::other("session terminated")));
        }
        Ok(Events { output: output_seen, away: away_seen, ended: ended_seen })
    }

    pub(super) async fn stop(&self, id: &str) {
        // A session that is gone has no runs any more.
        let _ = self.control.send(&Order::Stop { id: id.to_owned() }, None).await;
    }

    /// A connected socket, whose other end the session's holder answers.
    pub(super) async fn connect(&self) -> io::Result<tokio::net::UnixStream> {
        let (ours, theirs) = std::os::unix::net::UnixStream::pair()?;
        self.files.send(&Connection {}, Some(theirs.as_fd())).await?;
        ours.set_nonblocking(true)?;
        tokio::net::UnixStream::from_std(ours)
    }

    pub(super) fn is_gone(&self) -> bool {
        *self.gone.borrow()
    }

    /// Ends the session; false when the kernel does not get done with it in time.
    pub(super) async fn close(&self) -> bool {
        self.kill();
        let mut gone = self.gone.subscribe();
        tokio::time::timeout(END, gone.wait_for(|gone| *gone)).await.is_ok_and(|seen| seen.is_ok())
    }

    /// Counts a run for as long as the answer lives.
    pub(super) fn busy(self: &Arc<Self>) -> Busy {
        let mut clock = self.clock();
        clock.active += 1;
        clock.last_run = Timestamp::now();
        Busy(Arc::clone(self))
    }

    pub(super) fn last_run(&self) -> Timestamp {
        self.clock().last_run
    }

    /// What is left of the idle time; all of it while a run is active.
    pub(super) fn idle_left(&self) -> Option<Duration> {
        let clock = *self.clock();
        let limit = self.idle_timeout?;
        Some(if clock.active > 0 { limit } else { limit.saturating_sub(clock.idle_since.elapsed()) })
    }

    /// Returns when the session is to be forgotten: idle for too long, or dead for a while.
    pub(super) async fn outlived(&self) {
        let mut gone = self.gone.subscribe();
        let idle = async {
            loop {
                match self.idle_left() {
                    None => std::future::pending().await,
                    Some(Duration::ZERO) => return,
                    Some(left) => tokio::time::sleep(left).await,
                }
            }
        };
        tokio::select! {
            () = idle => {}
            () = async { drop(gone.wait_for(|gone| *gone).await) } => tokio::time::sleep(SHOW_DEAD).await,
        }
    }

    fn kill(&self) {
        kill(&self.holder);
    }

    fn waiting(&self) -> MutexGuard<'_, HashMap<String, Waiting>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn clock(&self) -> MutexGuard<'_, Clock> {
        self.clock.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// See [`Session::busy`].
pub(super) struct Busy(Arc<Session>);

impl Drop for Busy {
    fn drop(&mut self) {
        let mut clock = self.0.clock();
        clock.active -= 1;
        clock.idle_since = Instant::now();
    }
}
