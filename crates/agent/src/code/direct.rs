//! A kernel that the agent starts itself and talks to over its sockets.
//!
//! Owns the process, its connection file and its connections. Invariant: the process group ends with the value, and a
//! kernel is handed out only once its output is known to arrive.

use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use serde_json::json;
use tokio::net::unix::pipe;
use tokio::sync::oneshot;
use tokio::time::{Instant, sleep, sleep_until, timeout};

use super::connection::{ConnectionFile, Ports};
use super::kernel::{News, StartError};
use super::message::{Channel, Key, Message, Session};
use super::socket::Socket;
use super::spec::{Interrupt, Spec};
use super::zmtp::{Multipart, Role};
use crate::command::pipes::{self, Read};
use crate::envs::Env;
use crate::http::router::Agent;
use crate::init::reap::Exit;
use crate::init::signal_group;
use crate::init::spawn::Launch;

/// From the start of the process to its first answer. Kernels on a virtual machine of their own take their time.
const START: Duration = Duration::from_secs(60);
/// How often a kernel that said nothing on its output channel is asked again.
const ASK_AGAIN: Duration = Duration::from_millis(50);
/// What a kernel that is asked to end gets for its last words.
const GOODBYE: Duration = Duration::from_secs(1);
/// And one that closes its sockets by itself.
const LEAVING: Duration = Duration::from_secs(5);
/// For what is still in the socket of a kernel that has ended.
const DRAIN: Duration = Duration::from_millis(100);
/// The end of what a kernel wrote to its real standard output and error, for when it does not start.
const TAIL: usize = 4 << 10;

/// The process, killed with its group unless it has ended.
struct Process {
    pid: i32,
    exit: oneshot::Receiver<Exit>,
    ended: Option<Exit>,
}

impl Process {
    async fn wait(&mut self) -> Exit {
        if let Some(ended) = self.ended {
            return ended;
        }
        let ended = (&mut self.exit).await.unwrap_or(Exit::Code(255));
        self.ended = Some(ended);
        ended
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // Also when it has ended: what it left behind in its group has nobody any more.
        signal_group(self.pid, libc::SIGKILL);
    }
}

#[derive(Clone, Default)]
struct Tail(Arc<Mutex<Vec<u8>>>);

impl Tail {
    fn text(&self) -> String {
        let bytes = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        String::from_utf8_lossy(&bytes).trim().to_owned()
    }

    /// Reads until the last writer is gone; nobody dies of a closed pipe.
    async fn follow(self, pipe: pipe::Receiver) {
        while pipe.readable().await.is_ok() {
            let read = pipes::try_read(&pipe, |bytes| {
                let mut tail = self.0.lock().unwrap_or_else(PoisonError::into_inner);
                tail.extend_from_slice(bytes);
                let excess = tail.len().saturating_sub(TAIL);
                tail.drain(..excess);
                tail.shrink_to(TAIL);
            });
            if matches!(read, Read::End) {
                return;
            }
        }
    }
}

pub(super) struct Direct {
    process: Process,
    shell: Socket,
    control: Socket,
    iopub: Socket,
    session: Session,
    key: Key,
    interrupt: Interrupt,
    /// When a kernel that closed its sockets is given up.
    closing: Option<Instant>,
    _file: ConnectionFile,
}

impl Direct {
    pub(super) async fn start(agent: &Agent, spec: &Spec, env: Env, cwd: &Path) -> Result<Self, StartError> {
        let mut tries = 3;
        loop {
            tries -= 1;
            match Self::try_start(agent, spec, env.clone(), cwd).await {
                // Somebody was faster with one of the ports.
                Err(StartError::Ended { tail, .. })
                    if tries > 0 && tail.contains("Address already in use") => {}
                done => return done,
            }
        }
    }

    async fn try_start(agent: &Agent, spec: &Spec, mut env: Env, cwd: &Path) -> Result<Self, StartError> {
        let (ports, key) = (Ports::choose().map_err(StartError::Ports)?, Key::new());
        let file =
            ConnectionFile::write(&env, &agent.identity, ports, &key).map_err(StartError::ConnectionFile)?;
        spec.extend(&mut env);
        // It would make some kernels end themselves because their parent is the first process of the box.
        env.remove("JPY_PARENT_PID");
        env.insert("PWD".into(), cwd.to_string_lossy().into_owned());
        let (mut process, tail) = spawn(agent, &spec.command(file.path()), &env, cwd)?;
        let connected = async {
            // First, so that the subscription is in force when the first question is answered.
            let iopub = reach(ports.iopub, Role::Subscriber).await?;
            let shell = reach(ports.shell, Role::Dealer).await?;
            let control = reach(ports.control, Role::Dealer).await?;
            Ok((shell, iopub, control))
        };
        let reached = tokio::select! {
            reached = timeout(START, connected) => reached.map_err(|_| StartError::Slow(tail.text()))?,
            exit = process.wait() => {
                // Its last words may still be in the pipe.
                sleep(Duration::from_millis(20)).await;
                return Err(StartError::Ended { exit, tail: tail.text() });
            }
        };
        let (shell, iopub, control) = reached.map_err(StartError::Connect)?;
        let (session, interrupt) = (Session::new(), spec.interrupt);
        let mut kernel =
            Direct { process, shell, control, iopub, session, key, interrupt, closing: None, _file: file };
        match timeout(START, kernel.introduce()).await {
            Ok(Ok(())) => Ok(kernel),
            Ok(Err(exit)) => Err(StartError::Ended { exit, tail: tail.text() }),
            Err(_) => Err(StartError::Slow(tail.text())),
        }
    }

    /// Asks who the kernel is until both the answer and something about it on the output channel have arrived: before
    /// that, the subscription may not be in force and output would be lost.
    async fn introduce(&mut self) -> Result<(), Exit> {
        let (mut answered, mut heard) = (false, false);
        while !(answered && heard) {
            let request = self.session.request("kernel_info_request", json!({}));
            send(&mut self.shell, &self.key, &request);
            let again = Instant::now() + ASK_AGAIN;
            while !(answered && heard) {
                let news = tokio::select! {
                    news = self.next() => news,
                    // A kernel that is not through with the first question needs no second one.
                    () = sleep_until(again), if answered => break,
                };
                match news {
                    News::Message(message) => match message.channel {
                        Channel::Shell => answered = true,
                        // Newer kernels greet their subscribers.
                        Channel::Iopub => {
                            heard |= message.parent == request.id || message.kind == "iopub_welcome";
                        }
                    },
                    News::Ended(_) => return Err(self.process.wait().await),
                }
            }
        }
        Ok(())
    }

    pub(super) fn execute(&mut self, code: &str) -> String {
        let request = self.session.execute(code);
        send(&mut self.shell, &self.key, &request);
        request.id
    }

    /// May be cancelled at any time.
    pub(super) async fn next(&mut self) -> News {
        loop {
            if self.process.ended.is_some() {
                return self.last_words().await;
            }
            let lost = self.closing;
            let given_up = async {
                match lost {
                    Some(at) => sleep_until(at).await,
                    None => std::future::pending().await,
                }
            };
            let open = lost.is_none();
            let (channel, read) = tokio::select! {
                read = self.iopub.next(), if open => (Some(Channel::Iopub), read),
                read = self.shell.next(), if open => (Some(Channel::Shell), read),
                read = self.control.next(), if open => (None, read),
                _ = self.process.wait() => continue,
                () = given_up => {
                    signal_group(self.process.pid, libc::SIGKILL);
                    self.process.wait().await;
                    continue;
                }
            };
            match read {
                Ok(message) => {
                    if let Some(message) = self.open(channel, message) {
                        return News::Message(message);
                    }
                }
                // It is about to end; only its end is worth telling.
                Err(_) => self.closing = Some(Instant::now() + LEAVING),
            }
        }
    }

    fn open(&self, channel: Option<Channel>, message: Multipart) -> Option<Message> {
        self.key.open(channel?, message)
    }

    /// What the kernel said before it ended, then that it has.
    async fn last_words(&mut self) -> News {
        while let Ok(Ok(message)) = timeout(DRAIN, self.iopub.next()).await {
            if let Some(message) = self.open(Some(Channel::Iopub), message) {
                return News::Message(message);
            }
        }
        let exit = self.process.ended.unwrap_or(Exit::Code(255));
        News::Ended(if self.is_leaving() { "it closed its connections".to_owned() } else { why(exit) })
    }

    /// It takes no more code, but has not ended yet.
    pub(super) fn is_leaving(&self) -> bool {
        self.closing.is_some()
    }

    pub(super) fn interrupt(&mut self) {
        match self.interrupt {
            // To the group, so that programs which the code waits for end as well.
            Interrupt::Signal => {
                if self.process.ended.is_none() {
                    signal_group(self.process.pid, libc::SIGINT);
                }
            }
            Interrupt::Message => {
                let request = self.session.request("interrupt_request", json!({}));
                send(&mut self.control, &self.key, &request);
            }
        }
    }

    /// Lets the kernel say goodbye, then ends its group.
    pub(super) async fn end(mut self) {
        let request = self.session.request("shutdown_request", json!({ "restart": false }));
        send(&mut self.control, &self.key, &request);
        let ended = async { while !matches!(self.next().await, News::Ended(_)) {} };
        let _ = timeout(GOODBYE, ended).await;
    }
}

fn send(socket: &mut Socket, key: &Key, request: &super::message::Request) {
    socket.send(&key.seal(request).each_ref().map(Vec::as_slice));
}

fn spawn(agent: &Agent, argv: &[String], env: &Env, cwd: &Path) -> Result<(Process, Tail), StartError> {
    let (read, write) = pipes::pipe().map_err(StartError::Descriptors)?;
    let write_too = write.try_clone().map_err(StartError::Descriptors)?;
    let launch = Launch {
        argv,
        env,
        cwd: Some(cwd),
        identity: Some(&agent.identity),
        stdin: Some(pipes::empty_input().map_err(StartError::Descriptors)?),
        stdout: Some(write),
        stderr: Some(write_too),
    };
    let (pid, exit) = agent.reaper.spawn_dependent(launch)?;
    let tail = Tail::default();
    tokio::spawn(tail.clone().follow(read));
    Ok((Process { pid, exit, ended: None }, tail))
}

/// Connects as soon as somebody listens.
async fn reach(port: u16, role: Role) -> std::io::Result<Socket> {
    let mut step = Duration::from_millis(1);
    loop {
        match Socket::connect(port, role).await {
            Err(error) if error.kind() == std::io::ErrorKind::ConnectionRefused => {
                sleep(step).await;
                step = (step * 2).min(Duration::from_millis(10));
            }
            done => return done,
        }
    }
}

fn why(exit: Exit) -> String {
    match exit {
        Exit::Code(code) => format!("it exited with status {code}"),
        Exit::Signal { number: libc::SIGKILL, .. } => {
            "it was killed by signal 9, by somebody in the sandbox or for lack of memory".to_owned()
        }
        Exit::Signal { number, .. } => format!("it was killed by signal {number}"),
    }
}
