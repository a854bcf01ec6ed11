//! A session's program while it runs: its input, its output, its end.
//!
//! Output is read only while the peer's window has room for it. The program's end is told after all that it wrote.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::BytesMut;
use russh::server::Handle;
use russh::{ChannelId, Sig};
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::process::Signal;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::unix::pipe;
use tokio_util::sync::CancellationToken;

use super::terminal::Terminal;
use super::{Writer, signals};
use crate::activity::Counted;
use crate::flow::Inbox;
use crate::launch::{Exit, ExitFuture, Launch, Program, Stdio};

/// What one read takes at most, and about what one packet holds.
const READ: usize = 32 << 10;
/// Of the protocol's data types beside the standard output, the standard error's.
const STDERR: u32 = 1;

/// The group that a session's program leads, for signals.
pub(crate) struct Leader {
    launch: Arc<dyn Launch>,
    terminal: Option<Arc<Terminal>>,
    state: Mutex<State>,
}

enum State {
    /// What came before the program did is sent to it then.
    Starting(Vec<Signal>),
    Running(i32),
    Ended,
}

impl Leader {
    pub(crate) fn new(launch: Arc<dyn Launch>, terminal: Option<Arc<Terminal>>) -> Self {
        Leader { launch, terminal, state: Mutex::new(State::Starting(Vec::new())) }
    }

    /// Reaches the program's group, and what is in front of its terminal if that is another.
    pub(crate) fn signal(&self, signal: Signal) {
        let mut state = self.lock();
        match &mut *state {
            State::Starting(early) if early.len() < 16 => early.push(signal),
            State::Running(group) => self.send(*group, signal),
            _ => {}
        }
    }

    fn send(&self, group: i32, signal: Signal) {
        let foreground = self.terminal.as_ref().and_then(|terminal| terminal.foreground());
        if let Some(foreground) = foreground.filter(|foreground| *foreground != group) {
            self.launch.signal(foreground, signal);
        }
        self.launch.signal(group, signal);
    }

    fn runs(&self, group: i32) {
        let early = std::mem::replace(&mut *self.lock(), State::Running(group));
        if let State::Starting(signals) = early {
            signals.into_iter().for_each(|signal| self.send(group, signal));
        }
    }

    /// From here on the number may be somebody else's.
    fn ended(&self) {
        *self.lock() = State::Ended;
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Everything that a running session needs of its channel.
pub(crate) struct Run {
    pub id: ChannelId,
    pub handle: Handle,
    pub writer: Writer,
    pub inbox: Inbox,
    pub leader: Arc<Leader>,
    pub terminal: Option<Arc<Terminal>>,
    /// The channel or its connection has gone.
    pub closing: CancellationToken,
    pub linger: Duration,
    pub hangup_grace: Duration,
    /// Counts the session as one that is going on.
    pub counted: Counted,
}

/// A program without its descriptors.
pub(crate) type Unconnected = Box<dyn FnOnce(Stdio) -> Program + Send>;

impl Run {
    /// Starts the program and stays until it and its channel have ended.
    pub(crate) async fn run(self, program: Unconnected) {
        self.serve(program).await;
        let Run { counted, .. } = self;
        drop(counted);
    }

    async fn serve(&self, program: Unconnected) {
        let launch = Arc::clone(&self.leader.launch);
        let connected = match self.connect() {
            Ok(connected) => connected,
            Err(error) => return self.fail(&error).await,
        };
        let Connected { stdio, input, output, errors } = connected;
        let started = tokio::task::spawn_blocking(move || launch.start(program(stdio))).await;
        let started = match started.unwrap_or_else(|error| Err(io::Error::other(error))) {
            Ok(started) => started,
            Err(error) => return self.fail(&error).await,
        };
        self.leader.runs(started.pid);
        self.follow(started.pid, started.exit, Ends { input, output, errors }).await;
    }

    async fn follow(&self, group: i32, mut exit: ExitFuture, ends: Ends) {
        let Ends { input, output, errors } = ends;
        let progress = Progress::default();
        let mut feeding = Box::pin(async {
            feed(&self.inbox, input).await;
            self.inbox.discard();
            // Not to be over before the program is.
            std::future::pending::<()>().await;
        });
        let mut draining = Box::pin(async {
            tokio::join!(
                drain(output, &self.writer, None, &progress),
                drain(errors, &self.writer, Some(STDERR), &progress)
            );
        });
        let mut drained = false;
        let ended = loop {
            tokio::select! {
                ended = &mut exit => break ended,
                () = &mut draining, if !drained => drained = true,
                () = &mut feeding => {}
                () = self.closing.cancelled() => {
                    // Nobody listens any more, which the program may notice by itself.
                    drop(draining);
                    return self.hang_up(group, exit, feeding).await;
                }
            }
        };
        self.leader.ended();
        if !drained {
            tokio::select! {
                () = &mut draining => {}
                () = progress.stops(self.linger) => {}
                () = self.closing.cancelled() => {}
            }
        }
        tokio::select! {
            () = self.tell(ended) => {}
            () = self.closing.cancelled() => {}
        }
    }

    /// Ends whatever the session has running in its own groups: by the end of its input, then asked, then made to.
    async fn hang_up(&self, group: i32, mut exit: ExitFuture, feeding: impl Future<Output = ()>) {
        let mut ended = false;
        if self.terminal.is_none() {
            // What the peer sent before it went is still owed to a program that only has to write it down.
            tokio::select! {
                _ = &mut exit => ended = true,
                () = feeding => {}
                () = tokio::time::sleep(self.hangup_grace) => {}
            }
        }
        let foreground = self.terminal.as_ref().and_then(|terminal| terminal.foreground());
        if !ended {
            self.leader.signal(Signal::HUP);
            ended = tokio::time::timeout(self.hangup_grace, &mut exit).await.is_ok();
        }
        // Also when the leader has gone: a group outlives it, and its number stays taken as long.
        let groups = [Some(group), foreground.filter(|foreground| *foreground != group)];
        groups.into_iter().flatten().for_each(|group| self.leader.launch.signal(group, Signal::KILL));
        self.leader.ended();
        if !ended {
            exit.await;
        }
    }

    async fn tell(&self, ended: Exit) {
        let _ = self.writer.eof().await;
        let _ = match ended {
            Exit::Code(code) => {
                self.handle.exit_status_request(self.id, u32::try_from(code).unwrap_or(255)).await
            }
            Exit::Signal { number, core_dumped } => {
                let name: Sig = signals::to_name(number);
                let no_text = String::new();
                self.handle.exit_signal_request(self.id, name, core_dumped, no_text, String::new()).await
            }
        };
        let _ = self.writer.close().await;
    }

    async fn fail(&self, error: &io::Error) {
        let code = if error.kind() == io::ErrorKind::NotFound { 127 } else { 126 };
        let text = format!("cannot start the program: {error}\r\n");
        self.inbox.discard();
        self.leader.ended();
        tokio::select! {
            () = async {
                let _ = self.writer.extended_data_bytes(STDERR, text.into_bytes()).await;
                self.tell(Exit::Code(code)).await;
            } => {}
            () = self.closing.cancelled() => {}
        }
    }

    fn connect(&self) -> io::Result<Connected> {
        if let Some(terminal) = &self.terminal {
            let program = terminal.take_program_end().ok_or(io::ErrorKind::ResourceBusy)?;
            return Ok(Connected {
                stdio: Stdio::Terminal(program),
                input: Input::Terminal(Arc::clone(terminal)),
                output: Output::Terminal(Arc::clone(terminal)),
                errors: Output::None,
            });
        }
        let (stdin, input) = pipe()?;
        let (output, stdout) = pipe()?;
        let (errors, stderr) = pipe()?;
        Ok(Connected {
            stdio: Stdio::Pipes { stdin, stdout, stderr },
            input: Input::Pipe(pipe::Sender::from_owned_fd(input)?),
            output: Output::Pipe(pipe::Receiver::from_owned_fd(output)?),
            errors: Output::Pipe(pipe::Receiver::from_owned_fd(errors)?),
        })
    }
}

fn pipe() -> io::Result<(OwnedFd, OwnedFd)> {
    Ok(pipe_with(PipeFlags::CLOEXEC)?)
}

struct Connected {
    stdio: Stdio,
    input: Input,
    output: Output,
    errors: Output,
}

struct Ends {
    input: Input,
    output: Output,
    errors: Output,
}

enum Input {
    Pipe(pipe::Sender),
    Terminal(Arc<Terminal>),
}

enum Output {
    Pipe(pipe::Receiver),
    Terminal(Arc<Terminal>),
    None,
}

/// Gives the program what the peer sends, until either has enough.
async fn feed(inbox: &Inbox, input: Input) {
    match input {
        Input::Pipe(mut pipe) => {
            while let Some(piece) = inbox.next().await {
                if pipe.write_all(&piece).await.is_err() {
                    return;
                }
            }
        }
        Input::Terminal(terminal) => {
            while let Some(piece) = inbox.next().await {
                if terminal.write_all(&piece).await.is_err() {
                    return;
                }
            }
            // A terminal has no half that closes: as with OpenSSH, its program goes on until it is told to end.
        }
    }
}

/// Sends what the program writes, until nobody has the other end any more or nobody listens.
async fn drain(mut output: Output, writer: &Writer, kind: Option<u32>, progress: &Progress) {
    let mut buffer = BytesMut::new();
    loop {
        buffer.clear();
        buffer.reserve(READ);
        let count = match &mut output {
            Output::Pipe(pipe) => pipe.read_buf(&mut buffer).await.unwrap_or(0),
            Output::Terminal(terminal) => {
                buffer.resize(READ, 0);
                let count = terminal.read(&mut buffer).await;
                buffer.truncate(count);
                count
            }
            Output::None => 0,
        };
        if count == 0 {
            return;
        }
        let sending = progress.sending();
        let bytes = buffer.split().freeze();
        let sent = match kind {
            None => writer.data_bytes(bytes).await,
            Some(kind) => writer.extended_data_bytes(kind, bytes).await,
        };
        drop(sending);
        if sent.is_err() {
            return;
        }
    }
}

/// Whether output still comes, as opposed to waiting for processes that were left behind with the pipes.
#[derive(Default)]
struct Progress {
    reads: AtomicUsize,
    sending: AtomicUsize,
}

struct Sending<'a>(&'a Progress);

impl Progress {
    fn sending(&self) -> Sending<'_> {
        self.reads.fetch_add(1, Ordering::Relaxed);
        self.sending.fetch_add(1, Ordering::Relaxed);
        Sending(self)
    }

    /// Over once nothing was read for that long, a peer that takes its time not counted.
    async fn stops(&self, quiet: Duration) {
        loop {
            let before = self.reads.load(Ordering::Relaxed);
            tokio::time::sleep(quiet).await;
            if self.sending.load(Ordering::Relaxed) == 0 && self.reads.load(Ordering::Relaxed) == before {
                return;
            }
        }
    }
}

impl Drop for Sending<'_> {
    fn drop(&mut self) {
        self.0.sending.fetch_sub(1, Ordering::Relaxed);
    }
}
