//! Takes connections, gives each its task and its deadline, and ends them all.

use std::future::Future;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use russh::keys::{Algorithm, EcdsaCurve};
use russh::server::{Config, run_stream};
use russh::{MethodKind, MethodSet, Preferred, SshId, cipher, compression, kex, mac};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, UnixListener};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::activity::Activity;
use crate::connection::Connection;
use crate::flow::WINDOW;
use crate::settings::{Event, Limits, Peer, Settings};
use crate::transport::{Breath, Transport};

/// After an error of accepting, which is mostly a lack of descriptors.
const PAUSE: Duration = Duration::from_millis(100);
const PACKET: u32 = 32 << 10;

/// An SSH server. Clones are the same server.
#[derive(Clone)]
pub struct Server {
    shared: Arc<Shared>,
}

pub(crate) struct Shared {
    pub settings: Settings,
    pub activity: Activity,
    pub tasks: TaskTracker,
    config: Arc<Config>,
    closing: CancellationToken,
    connections: Arc<Semaphore>,
    unauthenticated: Arc<Semaphore>,
}

impl Server {
    pub fn new(settings: Settings) -> Self {
        let limits = &settings.limits;
        Server {
            shared: Arc::new(Shared {
                config: Arc::new(protocol(&settings)),
                activity: Activity::new(),
                tasks: TaskTracker::new(),
                closing: CancellationToken::new(),
                connections: Arc::new(Semaphore::new(limits.connections)),
                unauthenticated: Arc::new(Semaphore::new(limits.unauthenticated)),
                settings,
            }),
        }
    }

    pub fn activity(&self) -> Activity {
        self.shared.activity.clone()
    }

    /// `SHA256:…` of the host key.
    pub fn fingerprint(&self) -> String {
        self.shared.settings.host_key.fingerprint()
    }

    /// Serves what connects to a port, until [`Server::shut_down`].
    pub async fn serve_tcp(&self, listener: TcpListener) {
        self.accept(|| async {
            let (stream, remote) = listener.accept().await?;
            let _ = stream.set_nodelay(true);
            let peer = Peer { remote: Some(remote), local: stream.local_addr().ok() };
            Ok((stream, peer))
        })
        .await;
    }

    /// Serves what connects to a Unix socket, until [`Server::shut_down`].
    pub async fn serve_unix(&self, listener: UnixListener) {
        self.accept(|| async { Ok((listener.accept().await?.0, Peer::default())) }).await;
    }

    /// Serves one connection until its end. Over the limit of connections, that is at once.
    pub async fn serve_stream<S>(&self, stream: S, peer: Peer)
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        match self.shared.places() {
            Some(places) if !self.shared.closing.is_cancelled() => {
                Arc::clone(&self.shared).serve(stream, peer, places).await;
            }
            _ => (self.shared.settings.observe)(Event::TurnedAway { peer: &peer }),
        }
    }

    /// Ends every connection, and with it the programs of its sessions, and waits until all have gone.
    pub async fn shut_down(&self) {
        self.shared.closing.cancel();
        self.shared.tasks.close();
        self.shared.tasks.wait().await;
    }

    async fn accept<S, A, F>(&self, accept: A)
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
        A: Fn() -> F,
        F: Future<Output = io::Result<(S, Peer)>>,
    {
        loop {
            let accepted = tokio::select! {
                accepted = accept() => accepted,
                () = self.shared.closing.cancelled() => return,
            };
            match accepted {
                Ok((stream, peer)) => {
                    let server = self.clone();
                    self.shared.tasks.spawn(async move { server.serve_stream(stream, peer).await });
                }
                Err(_) => tokio::time::sleep(PAUSE).await,
            }
        }
    }
}

/// A connection's place among all, and among those that have not signed in.
struct Places {
    connection: OwnedSemaphorePermit,
    unauthenticated: OwnedSemaphorePermit,
}

impl Shared {
    fn places(&self) -> Option<Places> {
        Some(Places {
            connection: Arc::clone(&self.connections).try_acquire_owned().ok()?,
            unauthenticated: Arc::clone(&self.unauthenticated).try_acquire_owned().ok()?,
        })
    }

    async fn serve<S>(self: Arc<Self>, stream: S, peer: Peer, places: Places)
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let Places { connection, unauthenticated } = places;
        let closing = self.closing.child_token();
        let deadline = tokio::time::Instant::now() + self.settings.limits.login_grace;
        let breath = Arc::new(Breath::default());
        let (signed_in, mut signing_in) = oneshot::channel();
        let handler =
            Connection::new(Arc::clone(&self), peer, closing.clone(), Arc::clone(&breath), signed_in);
        let transport = Transport::new(stream, closing.clone(), breath);
        let greeting = run_stream(Arc::clone(&self.config), transport, handler);
        let Ok(Ok(session)) = tokio::time::timeout_at(deadline, greeting).await else { return };
        tokio::pin!(session);
        // An end of either kind is an end; what was wrong with it was the peer's business.
        tokio::select! {
            _ = &mut session => return,
            signed_in = &mut signing_in => {
                drop(unauthenticated);
                if signed_in.is_err() {
                    closing.cancel();
                }
            }
            () = tokio::time::sleep_until(deadline) => closing.cancel(),
        }
        let _ = session.await;
        drop(connection);
    }
}

fn protocol(settings: &Settings) -> Config {
    const KEX: &[kex::Name] = &[
        kex::MLKEM768X25519_SHA256,
        kex::CURVE25519,
        kex::CURVE25519_PRE_RFC_8731,
        kex::EXTENSION_SUPPORT_AS_SERVER,
        kex::EXTENSION_OPENSSH_STRICT_KEX_AS_SERVER,
    ];
    const CIPHERS: &[cipher::Name] =
        &[cipher::CHACHA20_POLY1305, cipher::AES_256_GCM, cipher::AES_128_GCM, cipher::AES_256_CTR];
    const MACS: &[mac::Name] = &[mac::HMAC_SHA256_ETM, mac::HMAC_SHA512_ETM, mac::HMAC_SHA256];
    // Also what user keys may be, as it is told to clients.
    const KEYS: &[Algorithm] = &[
        Algorithm::Ed25519,
        Algorithm::Ecdsa { curve: EcdsaCurve::NistP256 },
        Algorithm::Ecdsa { curve: EcdsaCurve::NistP384 },
        Algorithm::Ecdsa { curve: EcdsaCurve::NistP521 },
        Algorithm::SkEd25519,
        Algorithm::SkEcdsaSha2NistP256,
    ];
    let Limits { auth_attempts, refusal_time, keepalive, .. } = settings.limits;
    Config {
        server_id: SshId::Standard("SSH-2.0-Sandglass".into()),
        methods: MethodSet::from(&[MethodKind::PublicKey][..]),
        auth_rejection_time: refusal_time,
        // The probe for the methods that there are.
        auth_rejection_time_initial: Some(Duration::ZERO),
        keys: vec![settings.host_key.key.clone()],
        preferred: Preferred {
            kex: KEX.into(),
            key: KEYS.into(),
            host_key_certificates: (&[][..]).into(),
            cipher: CIPHERS.into(),
            mac: MACS.into(),
            compression: (&[compression::NONE][..]).into(),
        },
        window_size: WINDOW,
        maximum_packet_size: PACKET,
        max_auth_attempts: auth_attempts,
        keepalive_interval: Some(keepalive),
        keepalive_max: 3,
        // Only reached where questions cannot even be sent: the peer reads nothing.
        inactivity_timeout: Some(keepalive.saturating_mul(8)),
        ..Config::default()
    }
}
