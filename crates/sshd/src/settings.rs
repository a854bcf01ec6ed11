//! What a server is given: keys, ports to the outside, policy and bounds.

use std::ffi::OsString;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use tokio::sync::watch;

use crate::access::{Access, Refusal};
use crate::forward::{Forwarding, Resolve};
use crate::host_key::HostKey;
use crate::launch::Launch;

/// What time it is, for certificates and keys that expire.
pub type Clock = Arc<dyn Fn() -> SystemTime + Send + Sync>;

/// Called with what an audit log wants to know. It runs on the connection's task and must not block.
pub type Observe = Arc<dyn Fn(Event<'_>) + Send + Sync>;

pub struct Settings {
    pub host_key: HostKey,
    /// Who may sign in. A new value counts from the next attempt on; whoever is signed in stays.
    pub access: watch::Receiver<Arc<Access>>,
    pub launch: Arc<dyn Launch>,
    pub resolve: Arc<dyn Resolve>,
    pub clock: Clock,
    pub observe: Observe,
    /// Without one, the `sftp` subsystem is refused.
    pub sftp: Option<SftpProgram>,
    pub forwarding: Forwarding,
    pub limits: Limits,
}

/// The program behind the `sftp` subsystem, started as the session's user: one that calls [`crate::sftp::serve`].
#[derive(Debug, Clone)]
pub struct SftpProgram {
    pub path: PathBuf,
    /// All words, the program's own name first.
    pub argv: Vec<OsString>,
}

/// Bounds of a server; each is a policy, none is needed for safety of memory.
#[derive(Debug, Clone)]
pub struct Limits {
    /// Connections at a time; more are closed at once.
    pub connections: usize,
    /// Those of them that have not signed in.
    pub unauthenticated: usize,
    /// From the first byte to the end of signing in.
    pub login_grace: Duration,
    /// Refused attempts of one connection; the next is answered by the end of the connection.
    pub auth_attempts: usize,
    /// How long a refusal takes at least.
    pub refusal_time: Duration,
    /// Programs of one connection at a time.
    pub sessions: usize,
    /// Forwarded connections of one connection at a time, both directions together.
    pub forwarded: usize,
    /// Ports that one connection listens on.
    pub listeners: usize,
    /// A peer that says nothing for this long is asked whether it is there, and dropped after three such questions.
    pub keepalive: Duration,
    /// After its program has ended, a session waits for output of processes left behind while there was some within this time.
    pub linger: Duration,
    /// Between the hangup of a session whose connection has gone and the kill.
    pub hangup_grace: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Limits {
            connections: 256,
            unauthenticated: 64,
            login_grace: Duration::from_secs(30),
            auth_attempts: 6,
            refusal_time: Duration::from_millis(100),
            sessions: 64,
            forwarded: 256,
            listeners: 16,
            keepalive: Duration::from_secs(30),
            linger: Duration::from_secs(1),
            hangup_grace: Duration::from_secs(2),
        }
    }
}

/// The two ends of a connection, where they are known: a Unix socket has none.
#[derive(Debug, Clone, Copy, Default)]
pub struct Peer {
    pub remote: Option<SocketAddr>,
    pub local: Option<SocketAddr>,
}

impl Peer {
    /// `client address, client port, server address, server port`, as `SSH_CONNECTION` has it.
    pub(crate) fn connection_variable(&self) -> String {
        let end = |address: Option<SocketAddr>| match address {
            Some(address) => format!("{} {}", address.ip().to_canonical(), address.port()),
            None => "UNKNOWN 65535".to_owned(),
        };
        format!("{} {}", end(self.remote), end(self.local))
    }

    /// `client address, client port, server port`, as `SSH_CLIENT` has it.
    pub(crate) fn client_variable(&self) -> String {
        let port = self.local.map_or(65535, |address| address.port());
        match self.remote {
            Some(address) => format!("{} {} {port}", address.ip().to_canonical(), address.port()),
            None => format!("UNKNOWN 65535 {port}"),
        }
    }
}

/// Something for an audit log. No variant carries a secret.
#[derive(Debug)]
pub enum Event<'a> {
    /// `key` is a fingerprint, and for a certificate its id and serial number too.
    SignedIn {
        login: &'a str,
        key: &'a str,
        peer: &'a Peer,
    },
    Refused {
        login: &'a str,
        reason: &'a Refusal,
        peer: &'a Peer,
    },
    /// A connection was closed before it was served, for want of a free place.
    TurnedAway {
        peer: &'a Peer,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ends_of_a_connection_are_written_as_openssh_does() {
        let peer = Peer {
            remote: Some("[::ffff:10.0.0.7]:4000".parse().unwrap()),
            local: Some("10.0.0.1:22".parse().unwrap()),
        };
        assert_eq!(peer.connection_variable(), "10.0.0.7 4000 10.0.0.1 22");
        assert_eq!(peer.client_variable(), "10.0.0.7 4000 22");
        assert_eq!(Peer::default().connection_variable(), "UNKNOWN 65535 UNKNOWN 65535");
    }
}
