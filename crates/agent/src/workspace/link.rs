//! The channel to the server, whichever way it goes: events and reports in, commands and credentials out.
//!
//! A box that is resumed or restored gets a new token, and with it a new generation, while its agent goes on: what ends because of the
//! old token is begun again with the new one, over the same events.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustix::process::{Signal, getpid, kill_process};
use sandglass_bridge::agent::{
    Address, Bridge, Config, CredentialError, Delivered, Ending, Handle, HttpTransport, Identity, Jitter,
    Notice, Pace,
};
use sandglass_bridge::ring::{Draft, Ring};
use sandglass_bridge::wire::{
    BootId, FatalReport, GitCredential, GitCredentialRequest, Refusal, SandboxId, Secret,
};
use sandglass_sandbox::workspace::Way;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;

use super::document::Document;
use super::vitals::Signs;
use crate::journal::{self, Level};
use crate::resolver;

/// Between looks for a new token, after the old one was refused: whoever replaces it does so around the same time.
const NEW_TOKEN: Duration = Duration::from_millis(250);
const NEW_TOKEN_LOOKS: u32 = 8;
/// Between looks whether the server has asked for the last of what happened.
const ASKED_AGAIN: Duration = Duration::from_millis(50);
/// Between attempts at what a bridge needs.
const CONNECT_AGAIN: Duration = Duration::from_secs(1);
const CONNECT_MOST: Duration = Duration::from_secs(30);

pub(super) struct Link {
    boot: BootId,
    state: Mutex<State>,
    /// Commands of all bridges, one after the other.
    deliver: mpsc::UnboundedSender<Delivered>,
    commands: Mutex<Option<mpsc::UnboundedReceiver<Delivered>>>,
    /// No bridge will be there any more.
    over: watch::Sender<bool>,
    leaving: AtomicBool,
    vitals: Signs,
}

struct State {
    generation: u64,
    /// What is to be reported as soon as there is a bridge.
    fatal: Option<FatalReport>,
    channel: Channel,
}

enum Channel {
    Bridge(Handle),
    /// The server asks, or it cannot be reached ever.
    Ring(Box<Ring>),
}

/// A bridge that goes on.
struct Running {
    token: Secret<String>,
    notices: mpsc::UnboundedReceiver<Notice>,
    commands: mpsc::UnboundedReceiver<Delivered>,
    task: JoinHandle<Ending>,
}

impl Link {
    /// Begins to talk to the server. Never fails: what is wrong is in the log, and the box goes on alone.
    pub(super) fn open(document: &Document, vitals: Signs) -> Arc<Self> {
        let boot = new_boot();
        let dir = document.workspace.state_dir.join("events");
        let ring = std::fs::create_dir_all(&dir).and_then(|()| Ring::open(&dir, boot.clone()));
        let ring = ring.map(|(ring, _)| ring).unwrap_or_else(|error| {
            journal::note(Level::Warning, &format!("workspace: events are kept in memory only: {error}"));
            Ring::in_memory(boot.clone())
        });
        let (deliver, commands) = mpsc::unbounded_channel();
        let link = Arc::new(Link {
            boot,
            state: Mutex::new(State {
                generation: document.workspace.generation,
                fatal: None,
                channel: Channel::Ring(Box::new(ring)),
            }),
            deliver,
            commands: Mutex::new(Some(commands)),
            over: watch::Sender::new(false),
            leaving: AtomicBool::new(false),
            vitals,
        });
        let way = &document.workspace.bridge.way;
        if *way != Way::Pull {
            let known = literal(way).map(|address| link.connect(document, address));
            let (link, document) = (Arc::clone(&link), document.clone());
            tokio::spawn(async move {
                let running = match known {
                    Some(Ok(running)) => running,
                    _ => link.connect_at_last(&document).await,
                };
                link.keep(document, running).await;
            });
        }
        link
    }

    /// Tries until there is a bridge: the name of the server may not be known yet, or its token not be there.
    async fn connect_at_last(&self, document: &Document) -> Running {
        let mut wait = CONNECT_AGAIN;
        loop {
            let connected = match address(&document.workspace.bridge.way).await {
                Ok(address) => self.connect(document, address),
                Err(why) => Err(why),
            };
            match connected {
                Ok(running) => return running,
                Err(why) => journal::note(Level::Error, &format!("workspace: no bridge yet: {why}")),
            }
            tokio::time::sleep(wait).await;
            wait = (wait * 2).min(CONNECT_MOST);
        }
    }

    /// Starts a bridge over the events that are there.
    fn connect(&self, document: &Document, address: Address) -> Result<Running, String> {
        let workspace = &document.workspace;
        let sandbox: SandboxId = workspace.sandbox_id.to_string().parse().map_err(|e| format!("{e}"))?;
        let token = document.token().map_err(|error| error.to_string())?;
        let transport = HttpTransport::new(address, &sandbox, workspace.generation, &token)
            .map_err(|error| error.to_string())?;
        let identity = Identity {
            sandbox,
            generation: workspace.generation,
            boot: self.boot.clone(),
            agent_version: env!("CARGO_PKG_VERSION").into(),
            capabilities: Vec::new(),
        };
        let config = Config { identity, pace: Pace::default(), jitter: Jitter::random() };
        let mut state = self.state();
        let ring = state.channel.take(&self.boot);
        let bridge = Bridge::start(config, transport, ring, self.vitals.clone());
        if let Some(report) = state.fatal.take() {
            bridge.handle.fatal(report);
        }
        state.channel = Channel::Bridge(bridge.handle);
        state.generation = workspace.generation;
        Ok(Running { token, notices: bridge.notices, commands: bridge.commands, task: bridge.task })
    }

    /// Sees one bridge after the other to its end.
    async fn keep(self: Arc<Self>, document: Document, running: Running) {
        let exit = document.workspace.bridge.exit_on_revoke;
        let revoked = self.keep_until_revoked(document, running).await;
        self.over.send_replace(true);
        if let Some(refusal) = revoked.filter(|_| !self.leaving.load(Ordering::Relaxed)) {
            journal::note(
                Level::Error,
                &format!("workspace: the server wants nothing of this box: {refusal}"),
            );
            if exit {
                end_box();
            }
        }
    }

    async fn keep_until_revoked(&self, mut document: Document, mut running: Running) -> Option<Refusal> {
        loop {
            let ending = self.follow(&document, &mut running).await;
            let Ending::Revoked(refusal) = ending else { return None };
            if self.leaving.load(Ordering::Relaxed) {
                return Some(refusal);
            }
            if let Some(newer) = newer(&document, &running.token).await {
                journal::note(Level::Info, "workspace: the server has given this box a new token");
                running = self.connect_at_last(&newer).await;
                document = newer;
                continue;
            }
            return Some(refusal);
        }
    }

    async fn follow(&self, document: &Document, running: &mut Running) -> Ending {
        let Running { notices, commands, task, .. } = running;
        let patience = Duration::from_secs(document.workspace.bridge.attach_grace_seconds);
        let alone = tokio::time::sleep(patience);
        tokio::pin!(alone);
        let mut waiting = true;
        loop {
            tokio::select! {
                Some(notice) = notices.recv() => match notice {
                    Notice::Attached(_) => waiting = false,
                    Notice::Detached => {
                                    journal::note(Level::Warning, "workspace: the server is out of reach");
                    }
                    Notice::Rejected { lane, status } => {
                        journal::note(Level::Warning, &format!("workspace: the server answered {status} to {lane:?}"));
                    }
                    Notice::Draining | Notice::FatalReported | Notice::Ended(_) => {}
                },
                Some(command) = commands.recv() => {
                    let _ = self.deliver.send(command);
                }
                ended = &mut *task => return ended.unwrap_or(Ending::Drained),
                () = &mut alone, if waiting => {
                    waiting = false;
                    journal::note(Level::Warning, "workspace: no server yet; the boot goes on alone");
                }
            }
        }
    }

    /// Commands of the server, once.
    pub(super) fn take_commands(&self) -> Option<mpsc::UnboundedReceiver<Delivered>> {
        self.commands.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// Tells that something happened.
    pub(super) fn emit(&self, draft: Draft) {
        let kind = draft.kind.clone();
        let pushed = match &mut self.state().channel {
            Channel::Bridge(handle) => handle.emit(draft),
            Channel::Ring(ring) => ring.push(draft),
        };
        if let Err(error) = pushed {
            journal::note(Level::Error, &format!("workspace: the event {kind} is lost: {error}"));
        }
    }

    pub(super) fn log(&self, source: &str, offset: u64, bytes: &[u8]) {
        if let Channel::Bridge(handle) = &self.state().channel {
            // Offsets count both streams of a source together.
            handle.log(source, "output", offset, bytes);
        }
    }

    pub(super) fn fatal(&self, report: FatalReport) {
        let mut state = self.state();
        match &state.channel {
            Channel::Bridge(handle) => handle.fatal(report),
            Channel::Ring(_) => state.fatal = Some(report),
        }
    }

    /// The way into the bridge of this moment.
    pub(super) fn handle(&self) -> Option<Handle> {
        match &self.state().channel {
            Channel::Bridge(handle) => Some(handle.clone()),
            Channel::Ring(_) => None,
        }
    }

    pub(super) async fn git_credential(
        &self,
        request: GitCredentialRequest,
    ) -> Result<GitCredential, CredentialError> {
        let Some(handle) = self.handle() else { return Err(CredentialError::Ended) };
        handle.git_credential(request).await
    }

    pub(super) fn with_ring<T>(&self, use_it: impl FnOnce(&mut Ring) -> T) -> T {
        match &mut self.state().channel {
            Channel::Bridge(handle) => handle.with_ring(use_it),
            Channel::Ring(ring) => use_it(ring),
        }
    }

    pub(super) fn generation(&self) -> u64 {
        self.state().generation
    }

    pub(super) fn vitals(&self) -> &Signs {
        &self.vitals
    }

    /// Ends the channel when everything is delivered, or when the time is over.
    pub(super) async fn close(&self, limit: Duration) {
        self.leaving.store(true, Ordering::Relaxed);
        let Some(handle) = self.handle() else {
            let _ = tokio::time::timeout(limit, self.asked()).await;
            return;
        };
        let mut over = self.over.subscribe();
        handle.drain();
        let _ = tokio::time::timeout(limit, over.wait_for(|over| *over)).await;
    }

    /// Returns when a server that asks has everything. One that never asked is not waited for.
    async fn asked(&self) {
        let waits = |ring: &mut Ring| {
            let status = ring.status();
            !ring.is_unreconciled() && status.acked_seq < status.last_seq
        };
        while self.with_ring(waits) {
            tokio::time::sleep(ASKED_AGAIN).await;
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Channel {
    /// Takes the events out, wherever they are.
    fn take(&mut self, boot: &BootId) -> Ring {
        let empty = Ring::in_memory(boot.clone());
        match self {
            Channel::Bridge(handle) => handle.with_ring(|ring| std::mem::replace(ring, empty)),
            Channel::Ring(ring) => std::mem::replace(&mut **ring, empty),
        }
    }
}

/// Ends the box as its runtime would.
pub(super) fn end_box() {
    // Sent to this process, which handles it as PID 1 too.
    let _ = kill_process(getpid(), Signal::TERM);
}

/// The document, once its token or generation is another one than the refused one.
async fn newer(before: &Document, refused: &Secret<String>) -> Option<Document> {
    for _ in 0..NEW_TOKEN_LOOKS {
        if let Ok(now) = before.again()
            && let Ok(token) = now.token()
            && (now.workspace.generation != before.workspace.generation || token != *refused)
        {
            return Some(now);
        }
        tokio::time::sleep(NEW_TOKEN).await;
    }
    None
}

/// An address that nobody has to be asked for.
fn literal(way: &Way) -> Option<Address> {
    match way {
        Way::Socket(path) => Some(Address::Unix(path.clone())),
        Way::Url(url) => url.parse().ok(),
        Way::Pull => None,
    }
}

async fn address(way: &Way) -> Result<Address, String> {
    if let Some(address) = literal(way) {
        return Ok(address);
    }
    let Way::Url(url) = way else { return Err("the server asks".into()) };
    let named = url.strip_prefix("http://").and_then(|rest| rest.trim_end_matches('/').rsplit_once(':'));
    let port = |text: &str| text.parse::<u16>().ok().filter(|port| *port != 0);
    let Some((host, port)) = named.and_then(|(host, text)| Some((host, port(text)?))) else {
        return Err(format!("{url} is not http://host:port"));
    };
    let ip = resolver::resolve(host).await.ok_or_else(|| format!("{host} has no address"))?;
    Ok(Address::Tcp((ip, port).into()))
}

/// This process is PID 1 or ends with the box: each of its lives is a boot of its own.
fn new_boot() -> BootId {
    let id = uuid::Uuid::new_v4().simple().to_string();
    id.parse().unwrap_or_else(|_| unreachable!("a UUID holds hexadecimal digits alone"))
}
