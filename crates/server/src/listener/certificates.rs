//! The certificate of a listener with TLS, read again when its files change.
//!
//! Invariant: a certificate that once served goes on serving until a better one is there. What cannot be used is reported and not taken.

use std::{
    fmt,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError, RwLock},
    time::Duration,
};

use rustls::{
    ServerConfig,
    crypto::{CryptoProvider, ring},
    pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject},
    server::{ClientHello, ResolvesServerCert},
    sign::CertifiedKey,
};
use sha2::{Digest, Sha256};
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;
use tracing::{error, info, warn};

/// How often the files are looked at.
const LOOK_EVERY: Duration = Duration::from_secs(2);

/// Why a certificate cannot be used. Nothing of the key is in it.
#[derive(Debug, thiserror::Error)]
pub enum CertificateError {
    #[error("cannot read {}: {source}", path.display())]
    Read { path: PathBuf, source: std::io::Error },
    #[error("{} holds no certificate in PEM form", path.display())]
    NoCertificate { path: PathBuf },
    #[error("{} holds no private key in PEM form (PKCS #8, PKCS #1 or SEC 1, not encrypted)", path.display())]
    NoKey { path: PathBuf },
    #[error("the key does not belong to the certificate, or is of a kind that cannot be used: {0}")]
    Unfit(#[source] rustls::Error),
}

/// What a look at the files found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Looked {
    Unchanged,
    Replaced,
    /// There is something new that cannot be used; what there was serves on.
    Unusable,
}

/// See the module documentation.
pub struct Certificates {
    cert: PathBuf,
    key: PathBuf,
    serving: Arc<Serving>,
    /// Of the files as they were seen last, used or not.
    seen: Mutex<Option<[u8; 32]>>,
    acceptor: TlsAcceptor,
}

#[derive(Debug)]
struct Serving(RwLock<Arc<CertifiedKey>>);

impl ResolvesServerCert for Serving {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(self.0.read().unwrap_or_else(PoisonError::into_inner).clone())
    }
}

impl fmt::Debug for Certificates {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Certificates")
            .field("cert", &self.cert)
            .field("key", &self.key)
            .finish_non_exhaustive()
    }
}

/// The contents of both files.
struct Files {
    cert: Vec<u8>,
    key: Vec<u8>,
}

impl Files {
    fn read(cert: &Path, key: &Path) -> Result<Self, CertificateError> {
        let read = |path: &Path| {
            std::fs::read(path).map_err(|source| CertificateError::Read { path: path.to_owned(), source })
        };
        Ok(Self { cert: read(cert)?, key: read(key)? })
    }

    fn fingerprint(&self) -> [u8; 32] {
        let length = (self.cert.len() as u64).to_be_bytes();
        Sha256::new().chain_update(length).chain_update(&self.cert).chain_update(&self.key).finalize().into()
    }

    fn certified(&self, cert: &Path, key: &Path) -> Result<CertifiedKey, CertificateError> {
        let chain: Vec<_> = CertificateDer::pem_slice_iter(&self.cert).filter_map(Result::ok).collect();
        if chain.is_empty() {
            return Err(CertificateError::NoCertificate { path: cert.to_owned() });
        }
        let private = PrivateKeyDer::from_pem_slice(&self.key)
            .map_err(|_| CertificateError::NoKey { path: key.to_owned() })?;
        CertifiedKey::from_der(chain, private, &provider()).map_err(CertificateError::Unfit)
    }
}

fn provider() -> CryptoProvider {
    ring::default_provider()
}

impl Certificates {
    /// Reads both files. Blocking.
    ///
    /// # Errors
    /// When they cannot be used.
    pub fn open(cert: &Path, key: &Path) -> Result<Arc<Self>, CertificateError> {
        let files = Files::read(cert, key)?;
        let serving = Arc::new(Serving(RwLock::new(Arc::new(files.certified(cert, key)?))));
        let mut config = ServerConfig::builder_with_provider(Arc::new(provider()))
            .with_protocol_versions(&[&rustls::version::TLS13, &rustls::version::TLS12])
            .map_err(CertificateError::Unfit)?
            .with_no_client_auth()
            .with_cert_resolver(serving.clone());
        config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
        // Only speeds up handshakes; without it each is a full one.
        if let Ok(tickets) = ring::Ticketer::new() {
            config.ticketer = tickets;
        }
        let seen = Mutex::new(Some(files.fingerprint()));
        let acceptor = TlsAcceptor::from(Arc::new(config));
        Ok(Arc::new(Self { cert: cert.to_owned(), key: key.to_owned(), serving, seen, acceptor }))
    }

    /// Whether others than the owner could read or change the key.
    pub fn exposed(key: &Path) -> bool {
        std::fs::metadata(key).is_ok_and(|about| about.permissions().mode() & 0o027 != 0)
    }

    pub(super) fn acceptor(&self) -> &TlsAcceptor {
        &self.acceptor
    }

    /// Looks at the files, and takes what is new and in order. Open connections keep theirs. Blocking.
    pub fn look(&self) -> Looked {
        let files = Files::read(&self.cert, &self.key);
        let now = files.as_ref().ok().map(Files::fingerprint);
        {
            let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
            if std::mem::replace(&mut *seen, now) == now {
                return Looked::Unchanged;
            }
        }
        match files.and_then(|files| files.certified(&self.cert, &self.key)) {
            Ok(certified) => {
                *self.serving.0.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(certified);
                info!(cert = %self.cert.display(), "the certificate was replaced");
                if Self::exposed(&self.key) {
                    warn!(key = %self.key.display(), "others than its owner can read or change the private key");
                }
                Looked::Replaced
            }
            Err(unusable) => {
                error!(%unusable, "the new certificate cannot be used; the old one serves on");
                Looked::Unusable
            }
        }
    }

    /// Looks again and again until `stop`, and tells what changed.
    pub async fn watch(self: Arc<Self>, stop: CancellationToken, tell: impl Fn(Looked)) {
        loop {
            tokio::select! {
                () = tokio::time::sleep(LOOK_EVERY) => {}
                () = stop.cancelled() => return,
            }
            let this = self.clone();
            match tokio::task::spawn_blocking(move || this.look()).await {
                Ok(Looked::Unchanged) | Err(_) => {}
                Ok(changed) => tell(changed),
            }
        }
    }
}
