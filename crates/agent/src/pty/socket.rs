//! One connection to a terminal: who may have it, the handshake, and the messages until one side leaves.
//!
//! Bounds for each: one message of at most [`MAX_MESSAGE`] bytes from the client, as much input that the shell has not
//! taken yet, and one frame to the client. Frames of a replay are the large ones; few are sent at a time.

use std::sync::Arc;
use std::time::Duration;

use bytes::{Buf, BytesMut};
use futures_util::stream::{SplitSink, SplitStream};
use futures_util::{SinkExt as _, StreamExt as _};
use http::{Request, StatusCode};
use hyper::body::Incoming;
use hyper::upgrade::{OnUpgrade, Upgraded};
use hyper_util::rt::TokioIo;
use serde_json::json;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, watch};
use tokio::time::{Instant, MissedTickBehavior, interval_at, sleep, timeout};
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::protocol::frame::coding::CloseCode;
use tokio_tungstenite::tungstenite::protocol::{CloseFrame, Role, WebSocketConfig};
use tokio_tungstenite::tungstenite::{Error, Message};

use super::frames::{self, Asked};
use super::shell::{Handle, Mode};
use super::terminal::{Next, Reader, Terminal};
use crate::http::query::Query;
use crate::http::reply::{Code, Failure, Outcome};
use crate::http::router::Agent;
use crate::http::websocket;

const MAX_MESSAGE: usize = 1 << 20;
const FRAME: usize = 32 << 10;
/// A frame of a whole replay stays within the mebibyte that clients accept unless told otherwise.
const REPLAY: usize = (1 << 20) - 9;
const PING_EVERY: Duration = Duration::from_secs(30);
const READ_LIMIT: Duration = Duration::from_secs(60);
const WRITE_LIMIT: Duration = Duration::from_secs(10);
const EVICT_WAIT: Duration = Duration::from_millis(200);
const TAKEOVER_WAIT: Duration = Duration::from_secs(5);
const TAKEN_OVER: u16 = 4001;
/// A viewer that goes on trying to type is broken.
const MAX_REFUSALS: u32 = 5;

type Socket = WebSocketStream<TokioIo<Upgraded>>;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    Holder,
    Viewer,
}

struct Wish {
    place: Place,
    mode: Mode,
    since: u64,
    takeover: bool,
}

impl Wish {
    fn parse(query: &Query) -> Self {
        let is = |name: &str, value: &str| query.get(name) == Some(value);
        Wish {
            place: if is("mode", "viewer") { Place::Viewer } else { Place::Holder },
            mode: if is("pty", "0") { Mode::Pipe } else { Mode::Pty },
            since: query.get("since").and_then(|since| since.parse().ok()).unwrap_or(0),
            takeover: is("takeover", "1"),
        }
    }
}

/// Answers the upgrade, or why there is none.
pub(super) fn accept(
    agent: &Arc<Agent>,
    terminal: &Arc<Terminal>,
    query: &Query,
    mut request: Request<Incoming>,
) -> Outcome {
    let wish = Wish::parse(query);
    let key = websocket::handshake_key(request.headers());
    let conflict = |code: Code, message: &str| Err(Failure::new(StatusCode::CONFLICT, code, message));
    let permit = match wish.place {
        Place::Viewer if !terminal.running() => {
            return conflict(Code::ViewerNotRunning, "no shell runs yet that could be viewed");
        }
        Place::Viewer => match Arc::clone(&terminal.viewers).try_acquire_owned() {
            Ok(permit) => Some(permit),
            Err(_) => return Err(Failure::unavailable("too many viewers of this terminal")),
        },
        Place::Holder => Arc::clone(&terminal.holder).try_acquire_owned().ok(),
    };
    if permit.is_none() && (!wish.takeover || key.is_none()) {
        return conflict(Code::AlreadyConnected, "another client is connected to this terminal");
    }
    let Some(key) = key else {
        return Err(websocket::not_a_handshake());
    };
    let upgrade = hyper::upgrade::on(&mut request);
    let (agent, terminal) = (Arc::clone(agent), Arc::clone(terminal));
    tokio::spawn(connect(agent, terminal, wish, permit, upgrade));
    websocket::switch(&key)
}

/// How a connection ends.
enum Ending {
    /// The other side is gone, or as good as.
    Gone,
    Close {
        last: Option<Message>,
        code: u16,
        reason: &'static str,
    },
}

impl Ending {
    fn failed(code: &str, message: &str) -> Self {
        let last = Some(frames::error(code, message));
        Ending::Close { last, code: CloseCode::Error.into(), reason: "error" }
    }
}

async fn connect(
    agent: Arc<Agent>,
    terminal: Arc<Terminal>,
    wish: Wish,
    permit: Option<OwnedSemaphorePermit>,
    upgrade: OnUpgrade,
) {
    let Ok(upgraded) = upgrade.await else { return };
    let config = WebSocketConfig::default()
        .read_buffer_size(4 << 10)
        .write_buffer_size(0)
        .max_message_size(Some(MAX_MESSAGE))
        .max_frame_size(Some(MAX_MESSAGE));
    let socket = WebSocketStream::from_raw_socket(TokioIo::new(upgraded), Role::Server, Some(config)).await;
    let (mut sink, mut stream) = socket.split();
    let permit = match permit {
        Some(permit) => permit,
        None => {
            terminal.evictions.send_modify(|count| *count += 1);
            match timeout(TAKEOVER_WAIT, Arc::clone(&terminal.holder).acquire_owned()).await {
                Ok(Ok(permit)) => permit,
                _ => {
                    let ending = Ending::failed("ALREADY_CONNECTED", "the other client does not leave");
                    return leave(sink, stream, Vec::new(), ending).await;
                }
            }
        }
    };
    // From here on, a later takeover is meant for this connection.
    let evictions = terminal.evictions.subscribe();
    if wish.place == Place::Holder
        && let Err(message) = terminal.ensure_shell(&agent, wish.mode).await
    {
        drop(permit);
        return leave(sink, stream, Vec::new(), Ending::failed("START_FAILED", &message)).await;
    }
    let Some(reader) = terminal.attach(wish.since) else {
        drop(permit);
        let ending = Ending::failed("START_FAILED", "the shell ended before it was connected");
        return leave(sink, stream, Vec::new(), ending).await;
    };
    let (tell, told) = mpsc::channel(16);
    let mut writer = Writer {
        terminal: &terminal,
        reader,
        place: wish.place,
        told,
        evictions,
        replays: &agent.terminals.replays,
    };
    let ending = tokio::select! {
        ending = writer.write(&mut sink) => ending,
        ending = read(&mut stream, &terminal, wish.place, tell) => ending,
    };
    let unsaid: Vec<Message> = std::iter::from_fn(|| writer.told.try_recv().ok()).collect();
    drop(writer);
    drop(permit);
    leave(sink, stream, unsaid, ending).await;
}

/// Says the last words, and waits for the other side to have heard them: closing on unread input would lose them.
async fn leave(
    mut sink: SplitSink<Socket, Message>,
    mut stream: SplitStream<Socket>,
    unsaid: Vec<Message>,
    ending: Ending,
) {
    let Ending::Close { last, code, reason } = ending else { return };
    let limit = if code == TAKEN_OVER { EVICT_WAIT } else { Duration::from_secs(2) };
    let words = async {
        for message in unsaid.into_iter().chain(last) {
            sink.send(message).await?;
        }
        sink.send(Message::Close(Some(CloseFrame { code: code.into(), reason: reason.into() }))).await
    };
    if !matches!(timeout(limit, words).await, Ok(Ok(()))) {
        return;
    }
    let _ = timeout(limit, async { while let Some(Ok(_)) = stream.next().await {} }).await;
}

struct Writer<'a> {
    terminal: &'a Arc<Terminal>,
    reader: Reader,
    place: Place,
    told: mpsc::Receiver<Message>,
    evictions: watch::Receiver<u64>,
    replays: &'a Semaphore,
}

impl Writer<'_> {
    async fn write(&mut self, sink: &mut SplitSink<Socket, Message>) -> Ending {
        let mut evictions = self.evictions.clone();
        let viewer = self.place == Place::Viewer;
        let ending = async {
            match self.show(sink).await {
                Ok(ending) => ending,
                Err(_) => Ending::Gone,
            }
        };
        let evicted = async {
            match viewer {
                true => std::future::pending().await,
                // An error would mean that the terminal is gone, which holds the sender.
                false => drop(evictions.changed().await),
            }
        };
        tokio::select! {
            ending = ending => ending,
            () = evicted => Ending::Close { last: None, code: TAKEN_OVER, reason: "TAKEN_OVER" },
        }
    }

    async fn show(&mut self, sink: &mut SplitSink<Socket, Message>) -> Result<Ending, Error> {
        let mut changed = self.terminal.changed.subscribe();
        let mut pings = interval_at(Instant::now() + PING_EVERY, PING_EVERY);
        pings.set_missed_tick_behavior(MissedTickBehavior::Delay);
        self.replay(sink).await?;
        send(sink, self.connected()).await?;
        loop {
            changed.mark_unchanged();
            let message = match self.reader.next(FRAME) {
                Next::Output { from, bytes, .. } if self.place == Place::Viewer => {
                    frames::replay(from, &bytes)
                }
                // The offset tells a reader that was too slow that it missed something.
                Next::Output { from, bytes, gap: true, .. } => frames::replay(from, &bytes),
                Next::Output { origin, bytes, .. } => frames::output(origin, &bytes),
                Next::Exit(code) => {
                    let last = Some(frames::text(&json!({ "type": "exit", "exit_code": code })));
                    return Ok(Ending::Close {
                        last,
                        code: CloseCode::Normal.into(),
                        reason: "process exited",
                    });
                }
                Next::Nothing => tokio::select! {
                    told = self.told.recv() => match told {
                        Some(message) => message,
                        None => std::future::pending().await,
                    },
                    _ = pings.tick() => Message::Ping(bytes::Bytes::new()),
                    _ = changed.changed() => continue,
                },
            };
            send(sink, message).await?;
            while let Ok(message) = self.told.try_recv() {
                send(sink, message).await?;
            }
        }
    }

    /// What was written before, so that live output begins where it ends.
    async fn replay(&mut self, sink: &mut SplitSink<Socket, Message>) -> Result<(), Error> {
        let until = self.terminal.offset();
        if self.reader.at >= until {
            return Ok(());
        }
        // Never closed, so this only waits for replays of others.
        let _turn = self.replays.acquire().await;
        while let Some((from, bytes)) = self.reader.catch_up(until, REPLAY) {
            send(sink, frames::replay(from, &bytes)).await?;
        }
        Ok(())
    }

    fn connected(&self) -> Message {
        let role = match self.place {
            Place::Holder => "holder",
            Place::Viewer => "viewer",
        };
        let (id, mode) = (&self.terminal.id, self.reader.mode.name());
        frames::text(&json!({ "type": "connected", "session_id": id, "mode": mode, "role": role }))
    }
}

async fn send(sink: &mut SplitSink<Socket, Message>, message: Message) -> Result<(), Error> {
    match timeout(WRITE_LIMIT, sink.send(message)).await {
        Ok(sent) => sent,
        Err(_) => Err(Error::ConnectionClosed),
    }
}

/// Does what the client asks until it leaves.
async fn read(
    stream: &mut SplitStream<Socket>,
    terminal: &Terminal,
    place: Place,
    tell: mpsc::Sender<Message>,
) -> Ending {
    let mut pending = BytesMut::new();
    let mut refusals = 0;
    loop {
        let shell = terminal.shell();
        let feed = async {
            match &shell {
                Some(shell) if !pending.is_empty() => shell.write(&pending).await,
                _ => std::future::pending().await,
            }
        };
        let message = tokio::select! {
            written = feed => match written {
                Ok(count) => {
                    pending.advance(count);
                    continue;
                }
                Err(error) => {
                    // A shell that is ending tells more by its exit.
                    sleep(Duration::from_millis(500)).await;
                    return Ending::failed("STDIN_WRITE_FAILED", &crate::http::reply::plain(&error));
                }
            },
            message = timeout(READ_LIMIT, stream.next()), if pending.len() < MAX_MESSAGE => match message {
                Ok(Some(Ok(message))) => message,
                _ => return Ending::Gone,
            },
        };
        if matches!(message, Message::Close(_)) {
            return Ending::Gone;
        }
        let asked = Asked::parse(message);
        if place == Place::Viewer && asked.changes() {
            refusals += 1;
            let refusal = frames::error("READ_ONLY", "a viewer can only watch");
            if refusals >= MAX_REFUSALS {
                let last = Some(refusal);
                return Ending::Close { last, code: CloseCode::Policy.into(), reason: "READ_ONLY" };
            }
            let _ = tell.send(refusal).await;
        } else if let Some(answer) = obey(asked, shell.as_ref(), &mut pending) {
            // The writer leaves first only when the connection ends, which ends this too.
            let _ = tell.send(answer).await;
        }
    }
}

/// Does what is asked; what there is to say to it.
fn obey(asked: Asked, shell: Option<&Handle>, pending: &mut BytesMut) -> Option<Message> {
    match asked {
        Asked::Input(bytes) => pending.extend_from_slice(&bytes),
        Asked::Ping => return Some(frames::text(&json!({ "type": "pong" }))),
        Asked::Unknown(kind) => {
            return Some(frames::error("INVALID_FRAME", &format!("unknown frame type {kind:?}")));
        }
        Asked::Resize { cols, rows } => {
            shell.inspect(|shell| shell.resize(cols, rows));
        }
        Asked::Signal(number) => {
            shell.inspect(|shell| shell.signal(number));
        }
        Asked::Ignored => {}
    }
    None
}
