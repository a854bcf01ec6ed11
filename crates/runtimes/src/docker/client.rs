//! The connection to the engine: where it is, which API version both speak, and how long a call may take.
//!
//! Connects on first use and again after a loss, so that a server may start before its engine. The version is negotiated once per
//! connection, because an engine may come back as another version.

use std::{
    fmt,
    future::Future,
    path::{Path, PathBuf},
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use bollard::{API_DEFAULT_VERSION, BollardRequest, Docker, errors::Error};
use http::HeaderValue;
use sandglass_sandbox::ports::runtime::RuntimeError;

use super::errors::{Failure, invalid};

/// Longest wait for a connection and the engine's version.
pub(super) const CONNECT_PATIENCE: Duration = Duration::from_secs(5);
/// The library's own limit ends streams that are slow to begin (pulls) and not bodies that never end; ours does better.
const LIBRARY_TIMEOUT_SECONDS: u64 = 7 * 24 * 3600;
const DEFAULT_SOCKET: &str = "/var/run/docker.sock";

/// Where the engine listens.
#[derive(Clone, PartialEq, Eq)]
pub enum EngineAddress {
    Unix(PathBuf),
    /// `host:port`, without encryption.
    Tcp(String),
    /// `host:port`, and the directory with `ca.pem`, `cert.pem` and `key.pem`.
    Tls {
        address: String,
        certificates: PathBuf,
    },
}

impl EngineAddress {
    /// From `DOCKER_HOST`, `DOCKER_TLS_VERIFY` and `DOCKER_CERT_PATH`, as every Docker client does.
    ///
    /// # Errors
    /// `Invalid` when the address is of a kind that is not supported.
    pub fn from_environment() -> Result<Self, RuntimeError> {
        let text = |name: &str| std::env::var(name).ok().filter(|v| !v.is_empty());
        let certificates = text("DOCKER_CERT_PATH")
            .map(PathBuf::from)
            .or_else(|| text("HOME").map(|home| Path::new(&home).join(".docker")));
        let certificates = certificates.filter(|_| text("DOCKER_TLS_VERIFY").is_some());
        Self::parse(text("DOCKER_HOST").as_deref(), certificates)
    }

    /// From the value of `DOCKER_HOST` and, when TLS is asked for, the directory of the certificates.
    ///
    /// # Errors
    /// `Invalid` when the address is of a kind that is not supported.
    pub fn parse(host: Option<&str>, certificates: Option<PathBuf>) -> Result<Self, RuntimeError> {
        let Some(host) = host else { return Ok(Self::Unix(DEFAULT_SOCKET.into())) };
        let refuse = |why: &str| Err(invalid("engine", format!("DOCKER_HOST {host:?} {why}")));
        match host.split_once("://") {
            Some(("unix", path)) if path.starts_with('/') => Ok(Self::Unix(path.into())),
            Some(("unix", _)) => refuse("must name an absolute path"),
            Some((scheme @ ("tcp" | "http" | "https"), address)) => {
                let address = address.trim_end_matches('/');
                let tls = scheme == "https" || certificates.is_some();
                if address.is_empty() || address.contains('/') || address.contains('@') {
                    return refuse("must be host:port");
                }
                let has_port = address.rsplit_once(':').is_some_and(|(_, port)| port.parse::<u16>().is_ok());
                let default_port = if tls { 2376 } else { 2375 };
                let address = if has_port { address.to_owned() } else { format!("{address}:{default_port}") };
                match certificates {
                    Some(certificates) => Ok(Self::Tls { address, certificates }),
                    None if tls => refuse("needs DOCKER_TLS_VERIFY=1 and DOCKER_CERT_PATH"),
                    None => Ok(Self::Tcp(address)),
                }
            }
            Some(("ssh", _)) => {
                refuse("is not supported; forward the socket (ssh -L) and name it with unix://")
            }
            Some(_) => refuse("has a scheme that is not supported; use unix:// or tcp://"),
            None if host.starts_with('/') => Ok(Self::Unix(host.into())),
            None => refuse("has no scheme; use unix:// or tcp://"),
        }
    }

    /// Whether the engine's files and container addresses are, as far as the address tells, those of this machine.
    pub(super) fn is_local(&self) -> bool {
        matches!(self, Self::Unix(_))
    }

    /// The host name under which the engine's published ports are reached, when it is not this machine.
    pub fn remote_host(&self) -> Option<&str> {
        match self {
            Self::Unix(_) => None,
            Self::Tcp(address) | Self::Tls { address, .. } => {
                address.rsplit_once(':').map(|(host, _)| host.trim_matches(['[', ']']))
            }
        }
    }

    fn connect(&self) -> Result<Docker, Error> {
        let docker = match self {
            Self::Unix(path) => Docker::connect_with_unix(
                &path.to_string_lossy(),
                LIBRARY_TIMEOUT_SECONDS,
                API_DEFAULT_VERSION,
            ),
            Self::Tcp(address) => {
                Docker::connect_with_http(address, LIBRARY_TIMEOUT_SECONDS, API_DEFAULT_VERSION)
            }
            Self::Tls { address, certificates } => Docker::connect_with_ssl(
                address,
                &certificates.join("key.pem"),
                &certificates.join("cert.pem"),
                &certificates.join("ca.pem"),
                LIBRARY_TIMEOUT_SECONDS,
                API_DEFAULT_VERSION,
            ),
        };
        docker.map(|docker| docker.with_request_modifier(url_safe_credentials))
    }
}

impl fmt::Display for EngineAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unix(path) => write!(f, "unix://{}", path.display()),
            Self::Tcp(address) | Self::Tls { address, .. } => write!(f, "tcp://{address}"),
        }
    }
}

impl fmt::Debug for EngineAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// The engine reads registry credentials in the URL-safe alphabet and silently goes on without them when it meets the other one, which
/// is what the library writes.
pub(super) fn url_safe_credentials(mut request: BollardRequest) -> BollardRequest {
    const NAME: &str = "x-registry-auth";
    let text = request.headers().get(NAME).and_then(|v| v.to_str().ok()).map(url_safe);
    if let Some(mut value) = text.and_then(|text| HeaderValue::try_from(text).ok()) {
        value.set_sensitive(true);
        request.headers_mut().insert(NAME, value);
    }
    request
}

fn url_safe(base64: &str) -> String {
    base64.replace('+', "-").replace('/', "_")
}

/// The engine, connected to when it is needed.
pub(super) struct Client {
    address: EngineAddress,
    patience: Duration,
    connected: Mutex<Option<Docker>>,
}

impl Client {
    pub(super) fn new(address: EngineAddress, patience: Duration) -> Self {
        Self { address, patience, connected: Mutex::default() }
    }

    fn connected(&self) -> MutexGuard<'_, Option<Docker>> {
        self.connected.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Forgets the connection; the next call negotiates again.
    pub(super) fn forget(&self) {
        *self.connected() = None;
    }

    /// The engine, with a version that both speak.
    pub(super) async fn engine(&self) -> Result<Docker, Failure> {
        if let Some(docker) = &*self.connected() {
            return Ok(docker.clone());
        }
        let negotiated = async { self.address.connect()?.negotiate_version().await };
        let docker = match tokio::time::timeout(CONNECT_PATIENCE.min(self.patience), negotiated).await {
            Ok(negotiated) => negotiated.map_err(|e| match Failure::from(e) {
                Failure::Unreachable(why) => Failure::Unreachable(format!("{}: {why}", self.address)),
                other => other,
            })?,
            Err(_) => return Err(Failure::TimedOut),
        };
        *self.connected() = Some(docker.clone());
        Ok(docker)
    }

    /// One call, body included, within the configured time.
    pub(super) async fn call<T, F>(&self, ask: impl FnOnce(Docker) -> F) -> Result<T, Failure>
    where
        F: Future<Output = Result<T, Error>>,
    {
        self.call_within(self.patience, ask).await
    }

    /// One call within the given time or the configured one, whichever is shorter.
    pub(super) async fn call_within<T, F>(
        &self,
        patience: Duration,
        ask: impl FnOnce(Docker) -> F,
    ) -> Result<T, Failure>
    where
        F: Future<Output = Result<T, Error>>,
    {
        let docker = self.engine().await?;
        let answered = match tokio::time::timeout(patience.min(self.patience), ask(docker)).await {
            Ok(answered) => answered.map_err(Failure::from),
            Err(_) => Err(Failure::TimedOut),
        };
        self.note(&answered);
        answered
    }

    /// A call that may take as long as it takes; dropping it ends it.
    pub(super) async fn call_patiently<T, F>(&self, ask: impl FnOnce(Docker) -> F) -> Result<T, Failure>
    where
        F: Future<Output = Result<T, Error>>,
    {
        let docker = self.engine().await?;
        let answered = ask(docker).await.map_err(Failure::from);
        self.note(&answered);
        answered
    }

    fn note<T>(&self, answered: &Result<T, Failure>) {
        match answered {
            Err(Failure::Unreachable(_)) => self.forget(),
            // "client version 1.47 is too new" after a downgrade of the engine.
            Err(Failure::Refused { status: 400, message }) if message.contains("client version") => {
                self.forget();
            }
            Ok(_) | Err(_) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use sandglass_sandbox::ports::RuntimeErrorKind;

    use super::*;

    #[test]
    fn addresses_as_other_clients_read_them() {
        let certs = || Some(PathBuf::from("/certs"));
        let table = [
            (None, None, "unix:///var/run/docker.sock"),
            (Some("unix:///tmp/d.sock"), None, "unix:///tmp/d.sock"),
            (Some("/tmp/d.sock"), None, "unix:///tmp/d.sock"),
            (Some("unix:///tmp/d.sock"), certs(), "unix:///tmp/d.sock"),
            (Some("tcp://h"), None, "tcp://h:2375"),
            (Some("tcp://h:1"), None, "tcp://h:1"),
            (Some("http://h:1/"), None, "tcp://h:1"),
            (Some("tcp://h"), certs(), "tcp://h:2376"),
            (Some("https://h:9"), certs(), "tcp://h:9"),
        ];
        for (host, certificates, expected) in table {
            let address = EngineAddress::parse(host, certificates).unwrap();
            assert_eq!(address.to_string(), expected);
        }
        assert_eq!(EngineAddress::parse(Some("tcp://[::1]:2375"), None).unwrap().remote_host(), Some("::1"));
        for bad in
            ["ssh://h", "npipe:////./pipe/x", "h:2375", "unix://rel", "tcp://", "tcp://u@h:1", "https://h"]
        {
            let refused = EngineAddress::parse(Some(bad), None).unwrap_err();
            assert_eq!(refused.kind, RuntimeErrorKind::Invalid, "{bad}");
        }
    }

    #[test]
    fn credentials_are_sent_in_the_alphabet_that_the_engine_reads() {
        assert_eq!(url_safe("ab+/=="), "ab-_==");
    }

    #[tokio::test]
    async fn an_absent_engine_is_told_at_once_and_asked_again_later() {
        let dir = tempfile::tempdir().unwrap();
        let address = EngineAddress::Unix(dir.path().join("docker.sock"));
        let client = Client::new(address, Duration::from_secs(60));
        for _ in 0..2 {
            let failure = client.call(|d| async move { d.ping().await }).await.unwrap_err();
            assert!(failure.is_unavailable(), "{failure}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn an_engine_that_accepts_and_never_answers_is_given_up() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("docker.sock");
        let _silent = tokio::net::UnixListener::bind(&path).unwrap();
        let client = Client::new(EngineAddress::Unix(path), Duration::from_secs(60));
        let failure = client.call(|d| async move { d.ping().await }).await.unwrap_err();
        assert_eq!(failure, Failure::TimedOut);
    }
}
