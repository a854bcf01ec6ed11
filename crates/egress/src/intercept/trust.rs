//! The authorities that upstream servers are verified with.

use std::fmt;
use std::fs;
use std::path::Path;
use std::sync::Arc;

use rustls::crypto::ring;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use rustls::{ClientConfig, RootCertStore};

/// A bundle of all public authorities has a few hundred KiB.
const MAX_FILE: u64 = 4 << 20;
const MAX_FILES: usize = 2048;

/// Authorities, and how to connect with them.
#[derive(Clone)]
pub struct Trust {
    config: Arc<ClientConfig>,
    /// How many authorities there are, for a diagnostic line.
    pub authorities: usize,
}

impl fmt::Debug for Trust {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Trust").field("authorities", &self.authorities).finish_non_exhaustive()
    }
}

impl Trust {
    /// Every certificate in the directory's files, or the public authorities that this program carries if there is none; and those of `extra`.
    pub fn load(directory: &Path, extra: Option<&Path>) -> Result<Self, rustls::Error> {
        let mut roots = RootCertStore::empty();
        let files = fs::read_dir(directory).into_iter().flatten().flatten().take(MAX_FILES);
        for file in files {
            add(&mut roots, &file.path());
        }
        if roots.is_empty() {
            roots.extend(webpki_roots::TLS_SERVER_ROOTS.iter().cloned());
        }
        if let Some(extra) = extra {
            add(&mut roots, extra);
        }
        Self::of(roots)
    }

    /// Exactly these.
    pub fn of(roots: RootCertStore) -> Result<Self, rustls::Error> {
        let authorities = roots.len();
        let config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()?
            .with_root_certificates(roots)
            .with_no_client_auth();
        Ok(Self { config: Arc::new(config), authorities })
    }

    /// A client that offers these protocols.
    pub(crate) fn client(&self, protocols: Vec<Vec<u8>>) -> Arc<ClientConfig> {
        if self.config.alpn_protocols == protocols {
            return Arc::clone(&self.config);
        }
        let mut config = ClientConfig::clone(&self.config);
        config.alpn_protocols = protocols;
        Arc::new(config)
    }
}

/// Certificates that cannot be used are left out: a bundle with one old entry is still a bundle.
fn add(roots: &mut RootCertStore, path: &Path) {
    let small = fs::metadata(path).is_ok_and(|meta| meta.is_file() && meta.len() <= MAX_FILE);
    let Some(bytes) = small.then(|| fs::read(path).ok()).flatten() else { return };
    for certificate in CertificateDer::pem_slice_iter(&bytes).flatten() {
        let known = roots.len();
        if roots.add(certificate).is_ok() && roots.roots[..known].contains(&roots.roots[known]) {
            roots.roots.pop();
        }
    }
}
