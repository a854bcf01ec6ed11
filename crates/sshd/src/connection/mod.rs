//! One connection: what its peer may ask for, and who answers.
//!
//! Runs on the protocol library's task, which carries all traffic of the connection: nothing here waits for a program,
//! a name or another machine.

mod channels;
mod handler;

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;

use russh::ChannelId;
use russh::server::{Auth, Session as Protocol};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};
use tokio_util::sync::CancellationToken;

pub(crate) use self::channels::Channels;
use crate::access::{Grant, Refusal};
use crate::flow::Flow;
use crate::forward::Forwarding;
use crate::forward::remote::{Listening, listen};
use crate::launch::{Account, Program};
use crate::server::Shared;
use crate::session::environment::{self, Own};
use crate::session::process::{Leader, Run, Unconnected};
use crate::session::terminal::{Shape, Terminal};
use crate::session::{Request, words};
use crate::settings::{Event, Peer};
use crate::transport::Breath;

/// Why a connection is ended by this side.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Broken {
    #[error(transparent)]
    Protocol(#[from] russh::Error),
    #[error("the peer sent more than the window of its channel")]
    Overrun,
}

type Handled = Result<(), Broken>;

pub(crate) struct Connection {
    server: Arc<Shared>,
    peer: Peer,
    login: Option<Login>,
    channels: Channels,
    flow: Arc<Flow>,
    closing: CancellationToken,
    signed_in: Option<oneshot::Sender<()>>,
    /// Ports that are listened on, by the host and port that the peer knows them by.
    listeners: HashMap<(String, u32), CancellationToken>,
    forwarded: Arc<Semaphore>,
}

struct Login {
    account: Account,
    grant: Grant,
}

impl Connection {
    pub(crate) fn new(
        server: Arc<Shared>,
        peer: Peer,
        closing: CancellationToken,
        breath: Arc<Breath>,
        signed_in: oneshot::Sender<()>,
    ) -> Self {
        let flow = Arc::new(Flow::new(breath));
        Connection {
            channels: Channels::new(Arc::clone(&flow), closing.clone()),
            forwarded: Arc::new(Semaphore::new(server.settings.limits.forwarded)),
            server,
            peer,
            login: None,
            flow,
            closing,
            signed_in: Some(signed_in),
            listeners: HashMap::new(),
        }
    }

    async fn account(&self, login: &str) -> Option<Account> {
        let (launch, login) = (Arc::clone(&self.server.settings.launch), login.to_owned());
        tokio::task::spawn_blocking(move || launch.account(&login)).await.ok().flatten()
    }

    /// Who a checked signature signs in, or why it does not.
    async fn sign_in(&mut self, login: &str, key: &str, grant: Result<Grant, Refusal>) -> Auth {
        let observe = &self.server.settings.observe;
        let grant = match grant {
            Ok(grant) => grant,
            Err(reason) => {
                observe(Event::Refused { login, reason: &reason, peer: &self.peer });
                return Auth::reject();
            }
        };
        let Some(account) = self.account(login).await else {
            observe(Event::Refused { login, reason: &Refusal::Account, peer: &self.peer });
            return Auth::reject();
        };
        observe(Event::SignedIn { login, key, peer: &self.peer });
        self.login = Some(Login { account, grant });
        Auth::Accept
    }

    fn forwarding(&self) -> Forwarding {
        match &self.login {
            Some(login) if login.grant.forwarding => self.server.settings.forwarding,
            _ => Forwarding::Off,
        }
    }

    fn forwarded_place(&self) -> Option<OwnedSemaphorePermit> {
        Arc::clone(&self.forwarded).try_acquire_owned().ok()
    }

    fn answer(protocol: &mut Protocol, id: ChannelId, taken: bool) -> Handled {
        if taken {
            protocol.channel_success(id)?
        } else {
            protocol.channel_failure(id)?
        }
        Ok(())
    }

    /// Starts what was asked for, unless the channel has had its one program or there is nothing to serve the request.
    fn start(&mut self, id: ChannelId, request: &Request, protocol: &mut Protocol) -> Handled {
        let Some((run, program)) = self.prepare(id, request, protocol) else {
            return Self::answer(protocol, id, false);
        };
        Self::answer(protocol, id, true)?;
        let channels = self.channels.clone();
        self.server.tasks.spawn(async move {
            run.run(program).await;
            channels.remove(id);
        });
        Ok(())
    }

    fn prepare(&self, id: ChannelId, request: &Request, protocol: &Protocol) -> Option<(Run, Unconnected)> {
        let Login { account, grant } = self.login.as_ref()?;
        let settings = &self.server.settings;
        let words = words(request, account, grant, settings.sftp.as_ref())?;
        let prepared = self.channels.session(id, |session, inbox, closing| {
            if session.leader.is_some() {
                return None;
            }
            let terminal = session.terminal.clone();
            let leader = Arc::new(Leader::new(Arc::clone(&settings.launch), terminal.clone()));
            session.leader = Some(Arc::clone(&leader));
            let own = Own {
                peer: &self.peer,
                terminal: terminal.as_ref().map(|terminal| (terminal.kind.as_str(), terminal.file.as_ref())),
                original: words.original,
            };
            let env = environment::build(account, &session.wishes, own);
            let (account, path, argv) = (account.clone(), PathBuf::from(words.path), words.argv);
            let program: Unconnected = Box::new(move |stdio| {
                let cwd = account.home.clone();
                Program { path, argv, env, cwd, account, stdio }
            });
            let run = Run {
                id,
                handle: protocol.handle(),
                writer: Arc::clone(&session.writer),
                inbox: inbox.clone(),
                leader,
                terminal,
                closing: closing.clone(),
                linger: settings.limits.linger,
                hangup_grace: settings.limits.hangup_grace,
                counted: self.server.activity.count(),
            };
            Some((run, program))
        });
        prepared.flatten()
    }

    fn open_terminal(&self, id: ChannelId, shape: &Shape<'_>) -> bool {
        let Some(Login { account, grant }) = &self.login else { return false };
        if !grant.terminal {
            return false;
        }
        let opened = self.channels.session(id, |session, _, _| {
            if session.terminal.is_some() || session.leader.is_some() {
                return false;
            }
            session.terminal = Terminal::open(shape, account).ok().map(Arc::new);
            session.terminal.is_some()
        });
        opened.unwrap_or(false)
    }

    /// The port that is listened on now.
    fn listen(&mut self, host: &str, port: u32, protocol: &Protocol) -> Option<u32> {
        let wanted = u16::try_from(port).ok()?;
        let login = self.login.as_ref()?;
        let addresses = self.forwarding().listening(host);
        if self.listeners.len() >= self.server.settings.limits.listeners {
            return None;
        }
        let listener = listen(&addresses, wanted, login.account.uid).ok()?;
        let port = u32::from(listener.local_addr().ok()?.port());
        let closing = self.closing.child_token();
        self.listeners.insert((host.to_owned(), port), closing.clone());
        let listening = Listening {
            listener,
            host: host.to_owned(),
            port,
            handle: protocol.handle(),
            channels: self.channels.clone(),
            places: Arc::clone(&self.forwarded),
            tasks: self.server.tasks.clone(),
            closing,
        };
        self.server.tasks.spawn(listening.run());
        Some(port)
    }
}

impl Drop for Connection {
    /// The protocol's task is over, however it ended.
    fn drop(&mut self) {
        self.channels.all_closed();
    }
}
