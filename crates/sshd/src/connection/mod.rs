//! One connection: what its peer may ask for, and who answers.
//!
//! Runs on the protocol library's task, which carries all traffic of the connection: nothing here waits for a program,
//! a name or another machine.

mod channels;

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;

use russh::keys::Certificate;
use russh::keys::ssh_key::public::KeyData;
use russh::server::{
    Auth, ChannelOpenHandle, Handler, Msg, PublicKeyOffer, Session as Protocol, VerifiedPublicKey,
};
use russh::{Channel, ChannelId, ChannelOpenFailure, Pty, Sig};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};
use tokio_util::sync::CancellationToken;

pub(crate) use self::channels::Channels;
use crate::access::{Grant, Refusal, fingerprint};
use crate::flow::Flow;
use crate::forward::Forwarding;
use crate::forward::local::{Direct, Target};
use crate::forward::remote::{Listening, listen};
use crate::launch::{Account, Program};
use crate::server::Shared;
use crate::session::environment::{self, Own};
use crate::session::process::{Leader, Run, Unconnected};
use crate::session::terminal::{Shape, Size, Terminal};
use crate::session::{Request, Session, signals, words};
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

impl Handler for Connection {
    type Error = Broken;

    async fn auth_publickey_offered(
        &mut self,
        login: &str,
        offer: PublicKeyOffer<'_>,
    ) -> Result<Auth, Broken> {
        let key: &KeyData = offer.public_key.key_data();
        let worth = self.server.settings.access.borrow().worth_a_signature(key);
        if worth {
            return Ok(Auth::Accept);
        }
        (self.server.settings.observe)(Event::Refused { login, reason: &Refusal::Key, peer: &self.peer });
        Ok(Auth::reject())
    }

    async fn auth_publickey(&mut self, login: &str, key: VerifiedPublicKey<'_>) -> Result<Auth, Broken> {
        let key = key.public_key.key_data();
        let now = (self.server.settings.clock)();
        let source = self.peer.remote.map(|address| address.ip());
        let grant = self.server.settings.access.borrow().key(key, now, source);
        Ok(self.sign_in(login, &fingerprint(key), grant).await)
    }

    async fn auth_openssh_certificate(
        &mut self,
        login: &str,
        certificate: &Certificate,
    ) -> Result<Auth, Broken> {
        let now = (self.server.settings.clock)();
        let source = self.peer.remote.map(|address| address.ip());
        let grant = self.server.settings.access.borrow().certificate(certificate, login, now, source);
        let (id, serial) = (certificate.key_id(), certificate.serial());
        let key = format!("{} id {id:?} serial {serial}", fingerprint(certificate.public_key()));
        Ok(self.sign_in(login, &key, grant).await)
    }

    async fn auth_succeeded(&mut self, _: &mut Protocol) -> Handled {
        if let Some(signed_in) = self.signed_in.take() {
            let _ = signed_in.send(());
        }
        Ok(())
    }

    async fn channel_open_session(
        &mut self,
        channel: Channel<Msg>,
        reply: ChannelOpenHandle,
        _: &mut Protocol,
    ) -> Handled {
        if self.channels.sessions() >= self.server.settings.limits.sessions {
            reply.reject(ChannelOpenFailure::ResourceShortage).await;
            return Ok(());
        }
        let id = channel.id();
        // Bytes come by `data` below, which unlike the channel's own queue never makes the connection wait.
        let (_, writer) = channel.split();
        self.channels.open(id, Some(Session::new(Arc::new(writer))));
        reply.accept().await;
        Ok(())
    }

    async fn channel_open_direct_tcpip(
        &mut self,
        channel: Channel<Msg>,
        host: &str,
        port: u32,
        _: &str,
        _: u32,
        reply: ChannelOpenHandle,
        _: &mut Protocol,
    ) -> Handled {
        let policy = self.forwarding();
        let Some(port) = u16::try_from(port).ok().filter(|_| policy != Forwarding::Off) else {
            reply.reject(ChannelOpenFailure::AdministrativelyProhibited).await;
            return Ok(());
        };
        let Some(place) = self.forwarded_place() else {
            reply.reject(ChannelOpenFailure::ResourceShortage).await;
            return Ok(());
        };
        let id = channel.id();
        let (_, writer) = channel.split();
        let (inbox, closing) = self.channels.open(id, None);
        let direct = Direct {
            target: Target { host: host.to_owned(), port },
            policy,
            resolve: Arc::clone(&self.server.settings.resolve),
            reply,
            writer: Arc::new(writer),
            inbox,
            closing,
        };
        let channels = self.channels.clone();
        self.server.tasks.spawn(async move {
            let _place = place;
            direct.run().await;
            channels.remove(id);
        });
        Ok(())
    }

    async fn channel_open_confirmation(
        &mut self,
        id: ChannelId,
        _: u32,
        _: u32,
        _: &mut Protocol,
    ) -> Handled {
        self.channels.confirmed(id);
        Ok(())
    }

    async fn channel_close(&mut self, id: ChannelId, _: &mut Protocol) -> Handled {
        self.channels.closed(id);
        Ok(())
    }

    async fn channel_eof(&mut self, id: ChannelId, _: &mut Protocol) -> Handled {
        self.channels.end(id);
        Ok(())
    }

    async fn data(&mut self, id: ChannelId, data: &[u8], _: &mut Protocol) -> Handled {
        self.channels.push(id, data).map_err(|_| Broken::Overrun)
    }

    fn adjust_window(&mut self, _: ChannelId, current: u32) -> u32 {
        self.flow.next_window(current)
    }

    async fn pty_request(
        &mut self,
        id: ChannelId,
        kind: &str,
        columns: u32,
        rows: u32,
        width: u32,
        height: u32,
        modes: &[(Pty, u32)],
        protocol: &mut Protocol,
    ) -> Handled {
        let shape = Shape { kind, size: Size { columns, rows, width, height }, modes };
        let opened = self.open_terminal(id, &shape);
        Self::answer(protocol, id, opened)
    }

    async fn window_change_request(
        &mut self,
        id: ChannelId,
        columns: u32,
        rows: u32,
        width: u32,
        height: u32,
        _: &mut Protocol,
    ) -> Handled {
        self.channels.session(id, |session, _, _| {
            if let Some(terminal) = &session.terminal {
                terminal.resize(Size { columns, rows, width, height });
            }
        });
        Ok(())
    }

    async fn env_request(
        &mut self,
        id: ChannelId,
        name: &str,
        value: &str,
        protocol: &mut Protocol,
    ) -> Handled {
        let taken = self.channels.session(id, |session, _, _| session.wishes.set(name, value));
        Self::answer(protocol, id, taken.unwrap_or(false))
    }

    async fn shell_request(&mut self, id: ChannelId, protocol: &mut Protocol) -> Handled {
        self.start(id, &Request::Shell, protocol)
    }

    async fn exec_request(&mut self, id: ChannelId, command: &[u8], protocol: &mut Protocol) -> Handled {
        self.start(id, &Request::exec(command), protocol)
    }

    async fn subsystem_request(&mut self, id: ChannelId, name: &str, protocol: &mut Protocol) -> Handled {
        match name {
            "sftp" => self.start(id, &Request::Sftp, protocol),
            _ => Self::answer(protocol, id, false),
        }
    }

    async fn x11_request(
        &mut self,
        id: ChannelId,
        _: bool,
        _: &str,
        _: &str,
        _: u32,
        protocol: &mut Protocol,
    ) -> Handled {
        Self::answer(protocol, id, false)
    }

    async fn signal(&mut self, id: ChannelId, signal: Sig, protocol: &mut Protocol) -> Handled {
        let leader = self.channels.session(id, |session, _, _| session.leader.clone()).flatten();
        let sent = match (leader, signals::from_name(&signal)) {
            (Some(leader), Some(signal)) => {
                leader.signal(signal);
                true
            }
            _ => false,
        };
        // Clients rarely want to know.
        Self::answer(protocol, id, sent)
    }

    async fn tcpip_forward(
        &mut self,
        host: &str,
        port: &mut u32,
        protocol: &mut Protocol,
    ) -> Result<bool, Broken> {
        let listening = self.listen(host, *port, protocol);
        if let Some(listening) = listening {
            *port = listening;
        }
        Ok(listening.is_some())
    }

    async fn cancel_tcpip_forward(
        &mut self,
        host: &str,
        port: u32,
        _: &mut Protocol,
    ) -> Result<bool, Broken> {
        let listener = self.listeners.remove(&(host.to_owned(), port));
        if let Some(closing) = &listener {
            closing.cancel();
        }
        Ok(listener.is_some())
    }
}
