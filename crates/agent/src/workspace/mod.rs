//! The box as a workspace: the agent as supervisor of its boot and services, and as the server's side door into it.
//!
//! ```text
//!  workspace.json ─► document ─► plan ─► supervise::Boot ──► sync, setup, services, start, entrypoint ─► Ready
//!                        │                   │    ports: processes (reaper), sync, builtin (ssh, terminal)
//!                        ▼                   ▼ reports
//!                      link ◄────────────── events ──► ring ──► bridge ──► server ──► commands
//! ```
//!
//! PID 1 does nothing here that could hang or panic: git, the SSH server and git's credential helper are this binary started again
//! ([`inside`]). Invariants: the boot waits for the server only where it needs a credential; nothing secret leaves the memory of
//! the agent but into files of mode 0600 beside the document.

mod boot;
mod broker;
mod builtin;
mod commands;
pub mod document;
mod events;
mod helper;
pub mod inside;
mod link;
mod logs;
mod plan;
mod processes;
pub mod routes;
mod sync;
mod tunnel;
mod vitals;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use sandglass_supervise::{Logs, Ports, Services};
use tokio_util::sync::CancellationToken;

pub use boot::Begun;
pub use broker::export;
pub use document::{Document, DocumentError};

use crate::http::router::Agent;
use crate::journal::{self, Level};
use builtin::HostKeys;
use link::Link;

/// How long what happened last may take to reach the server.
const FAREWELL: Duration = Duration::from_secs(3);

/// What the agent keeps of its workspace.
pub struct Workspace {
    document: Document,
    ports: Ports,
    services: Services,
    link: Arc<Link>,
    shared: Arc<Shared>,
    boot: CancellationToken,
    sent: logs::Sent,
    /// Who may ask for credentials beside root.
    users: [u32; 2],
}

/// What adapters of the ports and of the channel share.
#[derive(Default)]
struct Shared {
    /// Variables that came after the start; `None` takes one away.
    env: Mutex<BTreeMap<String, Option<String>>>,
    ssh_sessions: AtomicUsize,
    host_keys: HostKeys,
    /// Milliseconds that everything has to end; 0 for what the document says.
    grace: AtomicU64,
}

impl Workspace {
    /// Takes a document in use: opens logs and ring, and begins to talk to the server.
    pub fn open(document: Document, agent: &Arc<Agent>) -> Arc<Self> {
        let shared = Arc::new(Shared::default());
        let state = &document.workspace.state_dir;
        let logs = Logs::open(&state.join("logs"), Default::default()).unwrap_or_else(|error| {
            journal::note(Level::Warning, &format!("workspace: output is not kept: {error}"));
            Logs::nowhere()
        });
        let vitals = vitals::Signs::new(agent, Arc::clone(&shared));
        let link = Link::open(&document, vitals);
        let spawn = Arc::new(processes::Processes::new(Arc::clone(agent), Arc::clone(&shared)));
        let events = Arc::new(events::ToServer::new(Arc::clone(&link)));
        let mut ports = Ports::new(spawn, logs, Arc::new(document.filter()), events);
        ports.builtins = Arc::new(builtin::Builtins {
            agent: Arc::clone(agent),
            document: document.clone(),
            logs: ports.logs.clone(),
            link: Arc::clone(&link),
            shared: Arc::clone(&shared),
        });
        let backoff = plan::restarts(&document.workspace).backoff();
        let services = Services::new(ports.clone(), backoff);
        let boot = CancellationToken::new();
        let sent = logs::Sent::all_of(&ports.logs);
        // A user that the image does not know is told by the sync.
        let owner = sync::owner(agent, &document.workspace);
        let users = [agent.identity.uid, owner.map_or(agent.identity.uid, |owner| owner.uid)];
        let workspace = Arc::new(Workspace { document, ports, services, link, shared, boot, sent, users });
        broker::serve(&workspace);
        commands::follow(&workspace);
        logs::follow(&workspace);
        workspace
    }

    /// The boot shall end.
    pub fn cancel_boot(&self) {
        self.boot.cancel();
    }

    /// What the boot, the entrypoint and the services each have to end.
    pub fn grace(&self) -> Duration {
        match self.shared.grace.load(Ordering::Relaxed) {
            0 => Duration::from_secs(self.document.workspace.boot.grace_seconds),
            millis => Duration::from_millis(millis),
        }
    }

    /// Ends the services, the last started one first.
    pub async fn stop_services(&self) {
        self.services.stop_all(self.grace()).await;
    }

    /// Has the server hear the last of what happened.
    pub async fn take_leave(&self) {
        // The last words of what failed are those that are asked for.
        self.sent.send_new(&self.ports.logs, &self.link).await;
        self.link.close(FAREWELL).await;
    }
}

impl Shared {
    fn overlay(&self, env: &mut crate::envs::Env) {
        for (name, value) in &*self.env.lock().unwrap_or_else(PoisonError::into_inner) {
            match value {
                Some(value) => env.insert(name.clone(), value.clone()),
                None => env.remove(name),
            };
        }
    }
}
