//! The protocol library's callbacks: each request to its answer.

use std::sync::Arc;

use russh::keys::Certificate;
use russh::keys::ssh_key::public::KeyData;
use russh::server::{
    Auth, ChannelOpenHandle, Handler, Msg, PublicKeyOffer, Session as Protocol, VerifiedPublicKey,
};
use russh::{Channel, ChannelId, ChannelOpenFailure, Pty, Sig};

use super::{Broken, Connection, Handled};
use crate::access::{Refusal, fingerprint};
use crate::forward::Forwarding;
use crate::forward::local::{Direct, Target};
use crate::session::terminal::{Shape, Size};
use crate::session::{Request, Session, signals};
use crate::settings::Event;

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
