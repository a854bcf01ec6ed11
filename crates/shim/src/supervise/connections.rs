//! Clients of the control socket: requests in, answers and events out, both bounded.
//!
//! Invariant: a client that does not read is cut off; the shim never waits for one.

use std::io::{self, Read, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::time::Duration;

use rustix::event::PollFlags;
use rustix::net::{RecvFlags, recv};

use super::{Next, Shim};
use crate::cgroup::Frozen;
use crate::client::SOCKET;
use crate::directory::BoxDir;
use crate::protocol::{self, Request, Response};
use crate::spec::Phase;

/// Distinguishes connections, also of those that are gone.
pub type ConnectionId = u64;

/// More clients than this are refused.
const MOST_CONNECTIONS: usize = 64;

/// Unsent bytes at which a client is cut off.
const MOST_UNSENT: usize = 1 << 20;

pub struct Connection {
    pub id: ConnectionId,
    pub subscribed: bool,
    stream: UnixStream,
    incoming: Vec<u8>,
    outgoing: Vec<u8>,
    closed: bool,
}

/// Binds the control socket, by way of an open directory because socket addresses are short.
pub fn listen(dir: &BoxDir) -> io::Result<UnixListener> {
    match std::fs::remove_file(dir.socket()) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let handle = std::fs::File::open(dir.path())?;
    let listener = UnixListener::bind(format!("/proc/self/fd/{}/{SOCKET}", handle.as_raw_fd()))?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

impl Connection {
    pub fn queue(&mut self, frame: &[u8]) {
        if self.outgoing.len() + frame.len() > MOST_UNSENT {
            self.closed = true;
            return;
        }
        self.outgoing.extend_from_slice(frame);
        self.flush();
    }

    pub fn interest(&self) -> PollFlags {
        if self.outgoing.is_empty() { PollFlags::IN } else { PollFlags::IN | PollFlags::OUT }
    }

    pub fn finished(&self) -> bool {
        self.closed
    }

    /// Whether the client has closed its end and everything it sent was read.
    fn hung_up(&self) -> bool {
        let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
        matches!(recv(&self.stream, &mut [0_u8; 1][..], flags), Ok((0, _)))
    }

    pub fn flush_before_exit(&mut self) {
        let _ = self.stream.set_nonblocking(false);
        let _ = self.stream.set_write_timeout(Some(Duration::from_millis(500)));
        let _ = self.stream.write_all(&self.outgoing);
        self.outgoing.clear();
    }

    fn flush(&mut self) {
        while !self.outgoing.is_empty() && !self.closed {
            match self.stream.write(&self.outgoing) {
                Ok(0) => self.closed = true,
                Ok(written) => drop(self.outgoing.drain(..written)),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => self.closed = true,
            }
        }
    }

    /// Reads what is there, at most a few frames' worth a turn.
    fn fill(&mut self) {
        let mut chunk = [0; 4096];
        while self.incoming.len() <= protocol::MAX_FRAME {
            match self.stream.read(&mut chunk) {
                Ok(0) => {
                    self.closed = true;
                    return;
                }
                Ok(length) => self.incoming.extend_from_slice(&chunk[..length]),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Err(_) => {
                    self.closed = true;
                    return;
                }
            }
        }
    }
}

impl AsFd for Connection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

impl Shim {
    /// Takes new clients; one too many is told so and refused. Nobody who is connected makes room: a subscriber is how
    /// the server hears of a box's end.
    pub(super) fn accept(&mut self) {
        for _ in 0..MOST_CONNECTIONS {
            let Ok((stream, _)) = self.listener.accept() else { return };
            if stream.set_nonblocking(true).is_err() {
                continue;
            }
            self.next_connection += 1;
            let mut connection = Connection {
                id: self.next_connection,
                subscribed: false,
                stream,
                incoming: Vec::new(),
                outgoing: Vec::new(),
                closed: false,
            };
            if self.connections.len() >= MOST_CONNECTIONS {
                // Those that hung up in this very turn do not count.
                self.connections.retain(|other| !other.finished() && !other.hung_up());
            }
            if self.connections.len() < MOST_CONNECTIONS {
                self.connections.push(connection);
            } else if let Ok(frame) = protocol::encode(&refused("too many clients are connected")) {
                connection.queue(&frame);
            }
        }
    }

    pub(super) fn serve_connection(&mut self, id: ConnectionId, flags: PollFlags) -> Next {
        let Some(connection) = self.connection(id) else { return Next::Continue };
        if flags.contains(PollFlags::OUT) {
            connection.flush();
        }
        connection.fill();
        loop {
            let Some(connection) = self.connection(id) else { return Next::Continue };
            match protocol::decode::<Request>(&mut connection.incoming) {
                Ok(None) => return Next::Continue,
                Ok(Some(request)) => {
                    if let Next::Exit(code) = self.obey(id, &request) {
                        return Next::Exit(code);
                    }
                }
                Err(error) => {
                    self.answer(id, &refused(&error.to_string()));
                    if let Some(connection) = self.connection(id) {
                        connection.closed = true;
                    }
                    return Next::Continue;
                }
            }
        }
    }

    fn obey(&mut self, id: ConnectionId, request: &Request) -> Next {
        let answer = match request {
            Request::State => {
                // A v1 kernel counts refused forks without waking anybody.
                self.report_mishaps();
                let usage = self.remains.cgroup.as_ref().map(crate::cgroup::Cgroup::usage);
                Response { usage, ..self.current() }
            }
            Request::Pause => self.set_paused(Frozen::Yes),
            Request::Resume => self.set_paused(Frozen::No),
            Request::FactsChanged => {
                self.reload_facts();
                self.arm_expiry();
                self.current()
            }
            Request::Subscribe => {
                let answer = self.current();
                self.answer(id, &answer);
                if let Some(connection) = self.connection(id) {
                    connection.subscribed = true;
                }
                return Next::Continue;
            }
            Request::Remove { grace_ms } => {
                return self.remove(Duration::from_millis(*grace_ms), Some(id));
            }
        };
        self.answer(id, &answer);
        Next::Continue
    }

    fn set_paused(&mut self, wanted: Frozen) -> Response {
        let pausing = wanted == Frozen::Yes;
        if self.state.phase != Phase::Running {
            return refused("the box does not run");
        }
        if self.state.paused == pausing {
            return self.current();
        }
        let Some(cgroup) = &self.remains.cgroup else { return refused("the box has no control group") };
        if let Err(error) = cgroup.set_frozen(wanted) {
            return refused(&error.to_string());
        }
        self.state.paused = pausing;
        self.write_state();
        let kind = if pausing { "paused" } else { "resumed" };
        self.event(kind, kind, serde_json::json!({}));
        self.current()
    }

    fn current(&self) -> Response {
        Response { ok: true, state: Some(self.state.clone()), ..Response::default() }
    }

    /// Answers everybody who waits for a removal; an empty message means success.
    pub(super) fn answer_all(&mut self, waiting: &[ConnectionId], message: &str) {
        let answer =
            if message.is_empty() { Response { ok: true, ..Response::default() } } else { refused(message) };
        for id in waiting {
            self.answer(*id, &answer);
        }
    }

    fn answer(&mut self, id: ConnectionId, answer: &Response) {
        if let (Some(connection), Ok(frame)) = (self.connection(id), protocol::encode(answer)) {
            connection.queue(&frame);
        }
    }

    fn connection(&mut self, id: ConnectionId) -> Option<&mut Connection> {
        self.connections.iter_mut().find(|connection| connection.id == id)
    }
}

fn refused(message: &str) -> Response {
    Response { ok: false, message: Some(message.into()), ..Response::default() }
}
