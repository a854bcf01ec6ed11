//! The sandbox's certificate authority: made once, trusted inside the sandbox, known nowhere else.

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use jiff::{Span, Zoned, tz::TimeZone};
use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer,
    KeyPair, KeyUsagePurpose, SanType, SerialNumber, date_time_ymd,
};
use rustls::crypto::ring;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer};
use rustls::sign::CertifiedKey;
use serde::{Deserialize, Serialize};

use crate::vault::Secret;

const FILE: &str = "mitmproxy-ca-cert.pem";
const YEARS: i64 = 10;
const LEAF_DAYS: i64 = 90;
/// Certificates that are kept; the oldest goes first.
const KEPT: usize = 256;

/// What went wrong with it.
#[derive(Debug, thiserror::Error)]
pub enum AuthorityError {
    #[error("make a certificate: {0}")]
    Certificate(#[from] rcgen::Error),
    #[error("use a key: {0}")]
    Key(#[from] rustls::Error),
    #[error("draw random numbers")]
    Random,
    /// What an earlier process left is no authority.
    #[error("the saved certificate authority cannot be read")]
    Unrestorable,
}

/// The authority and the certificates that it has signed lately.
pub struct Authority {
    issuer: Issuer<'static, KeyPair>,
    name: String,
    certificate: String,
    leaf: KeyPair,
    signing: Arc<dyn rustls::sign::SigningKey>,
    signed: Mutex<Signed>,
}

#[derive(Default)]
struct Signed {
    by_host: HashMap<String, (jiff::civil::Date, Arc<CertifiedKey>)>,
    order: VecDeque<String>,
}

#[derive(Serialize, Deserialize)]
struct Saved {
    name: String,
    key: String,
    certificate: String,
}

impl fmt::Debug for Authority {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Authority").field("name", &self.name).finish_non_exhaustive()
    }
}

impl Authority {
    /// A new one.
    pub fn create() -> Result<Self, AuthorityError> {
        let mut tag = [0; 4];
        random(&mut tag)?;
        let name = format!("Sandglass egress {}", tag.map(|byte| format!("{byte:02x}")).concat());
        let key = KeyPair::generate()?;
        let mut params = parameters(&name);
        params.serial_number = Some(serial()?);
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        validity(&mut params, Span::new().years(YEARS));
        let certificate = params.self_signed(&key)?.pem();
        Self::with(name, key, certificate)
    }

    /// The one that an earlier process exported with [`Authority::save`].
    pub fn restore(saved: &Secret) -> Result<Self, AuthorityError> {
        // Causes are dropped: they could quote the key.
        let saved: Saved = serde_json::from_str(saved.expose()).map_err(|_| AuthorityError::Unrestorable)?;
        let key = KeyPair::from_pem(&saved.key).map_err(|_| AuthorityError::Unrestorable)?;
        Self::with(saved.name, key, saved.certificate)
    }

    fn with(name: String, key: KeyPair, certificate: String) -> Result<Self, AuthorityError> {
        let leaf = KeyPair::generate()?;
        let der = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(leaf.serialize_der()));
        let signing = ring::sign::any_supported_type(&der)?;
        let issuer = Issuer::new(parameters(&name), key);
        Ok(Self { issuer, name, certificate, leaf, signing, signed: Mutex::default() })
    }

    /// Key and certificate, for the memory that outlives this process. Never to be written to a disk or a log.
    #[must_use]
    pub fn save(&self) -> Secret {
        let saved = Saved {
            name: self.name.clone(),
            key: self.issuer.key().serialize_pem(),
            certificate: self.certificate.clone(),
        };
        Secret::new(serde_json::to_string(&saved).expect("three strings always serialise"))
    }

    /// The certificate in PEM.
    #[must_use]
    pub fn certificate(&self) -> &str {
        &self.certificate
    }

    /// Writes the certificate into a directory, readable for all; whoever looks sees the whole file or none. The sandbox may
    /// write there too, so nothing that is there already is opened or followed, and what is in the way is put aside.
    pub fn export(&self, directory: &Path) -> io::Result<()> {
        fs::create_dir_all(directory)?;
        let mut tag = [0; 16];
        random(&mut tag).map_err(io::Error::other)?;
        let temporary = directory.join(format!(".{FILE}.{:032x}", u128::from_ne_bytes(tag)));
        let mut file = fs::OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(0o644)
            .custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK)
            .open(&temporary)?;
        let written = file
            .write_all(self.certificate.as_bytes())
            // A umask must not make it unreadable.
            .and_then(|()| file.set_permissions(fs::Permissions::from_mode(0o644)))
            .and_then(|()| file.sync_all())
            .and_then(|()| put_in_place(&temporary, &directory.join(FILE)));
        if written.is_err() {
            let _ = fs::remove_file(&temporary);
        }
        written
    }

    /// A certificate for a host, signed now or within the last day.
    pub(super) fn certify(&self, host: &str) -> Result<Arc<CertifiedKey>, AuthorityError> {
        let today = today().date();
        let mut signed = self.signed.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((day, key)) = signed.by_host.get(host)
            && *day == today
        {
            return Ok(Arc::clone(key));
        }
        let key = Arc::new(self.sign(host)?);
        if signed.by_host.insert(host.to_owned(), (today, Arc::clone(&key))).is_none() {
            signed.order.push_back(host.to_owned());
        }
        if signed.order.len() > KEPT
            && let Some(oldest) = signed.order.pop_front()
        {
            signed.by_host.remove(&oldest);
        }
        Ok(key)
    }

    fn sign(&self, host: &str) -> Result<CertifiedKey, AuthorityError> {
        let mut params = CertificateParams::default();
        params.distinguished_name = DistinguishedName::new();
        // A common name has 64 characters at most; the alternative name is what counts.
        params.distinguished_name.push(DnType::CommonName, host.get(..64).unwrap_or(host));
        params.subject_alt_names = vec![SanType::DnsName(host.try_into()?)];
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        params.use_authority_key_identifier_extension = true;
        params.serial_number = Some(serial()?);
        validity(&mut params, Span::new().days(LEAF_DAYS));
        let certificate = CertificateDer::from(params.signed_by(&self.leaf, &self.issuer)?);
        Ok(CertifiedKey::new(vec![certificate], Arc::clone(&self.signing)))
    }
}

/// Renames a file, also over a directory.
fn put_in_place(file: &Path, place: &Path) -> io::Result<()> {
    match fs::rename(file, place) {
        Err(error) if error.kind() == io::ErrorKind::IsADirectory => {
            let mut aside = file.as_os_str().to_owned();
            aside.push(".aside");
            fs::rename(place, aside)?;
            fs::rename(file, place)
        }
        other => other,
    }
}

/// The same for the certificate and for each that is signed later, also by another process.
fn parameters(name: &str) -> CertificateParams {
    let mut params = CertificateParams::default();
    params.distinguished_name = DistinguishedName::new();
    params.distinguished_name.push(DnType::OrganizationName, "Sandglass");
    params.distinguished_name.push(DnType::CommonName, name);
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    params
}

fn today() -> Zoned {
    jiff::Timestamp::now().to_zoned(TimeZone::UTC)
}

/// From yesterday on, because clocks differ.
fn validity(params: &mut CertificateParams, span: Span) {
    let now = today();
    let end = now.checked_add(span).unwrap_or_else(|_| now.clone());
    let start = now.checked_sub(Span::new().days(1)).unwrap_or(now);
    let date = |zoned: &Zoned| {
        let month = u8::try_from(zoned.month()).expect("months are 1 to 12");
        (i32::from(zoned.year()), month, u8::try_from(zoned.day()).expect("days are 1 to 31"))
    };
    let ((year, month, day), (last_year, last_month, last_day)) = (date(&start), date(&end));
    params.not_before = date_time_ymd(year, month, day);
    params.not_after = date_time_ymd(last_year, last_month, last_day);
}

fn serial() -> Result<SerialNumber, AuthorityError> {
    let mut bytes = [0; 16];
    random(&mut bytes)?;
    // Positive and of full length.
    bytes[0] = bytes[0] & 0x7f | 0x40;
    Ok(SerialNumber::from_slice(&bytes))
}

fn random(bytes: &mut [u8]) -> Result<(), AuthorityError> {
    ring::default_provider().secure_random.fill(bytes).map_err(|_| AuthorityError::Random)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_authority_survives_and_prints_nothing() {
        let authority = Authority::create().unwrap();
        let saved = authority.save();
        let restored = Authority::restore(&saved).unwrap();
        assert_eq!(restored.certificate(), authority.certificate());
        let printed = format!("{authority:?} {saved:?}");
        assert!(!printed.contains("PRIVATE") && !printed.contains("MII"));
        assert!(Authority::restore(&Secret::new("{}")).is_err());
    }

    #[test]
    fn the_certificate_appears_whole_and_readable() {
        let directory = tempfile::tempdir().unwrap();
        let authority = Authority::create().unwrap();
        authority.export(directory.path()).unwrap();
        authority.export(directory.path()).unwrap();
        let path = directory.path().join(FILE);
        assert_eq!(fs::read_to_string(&path).unwrap(), authority.certificate());
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o644);
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 1);
    }

    #[test]
    fn nothing_that_the_sandbox_has_put_there_is_written_to() {
        let directory = tempfile::tempdir().unwrap();
        let (victim, place) = (directory.path().join("victim"), directory.path().join(FILE));
        fs::write(&victim, "as it was").unwrap();
        let authority = Authority::create().unwrap();
        let exported = || {
            authority.export(directory.path()).unwrap();
            assert!(fs::symlink_metadata(&place).unwrap().is_file());
            assert_eq!(fs::read_to_string(&place).unwrap(), authority.certificate());
        };
        // A name that can be guessed.
        let guessed = directory.path().join(format!(".{FILE}.{}", std::process::id()));
        std::os::unix::fs::symlink(&victim, guessed).unwrap();
        std::os::unix::fs::symlink(&victim, &place).unwrap();
        exported();
        fs::remove_file(&place).unwrap();
        fs::create_dir_all(place.join("full")).unwrap();
        exported();
        fs::remove_file(&place).unwrap();
        rustix::fs::mknodat(rustix::fs::CWD, &place, rustix::fs::FileType::Fifo, 0o666.into(), 0).unwrap();
        exported();
        assert_eq!(fs::read_to_string(&victim).unwrap(), "as it was");
    }

    #[test]
    fn certificates_are_kept_and_bounded() {
        let authority = Authority::create().unwrap();
        let first = authority.certify("a.example.com").unwrap();
        assert!(Arc::ptr_eq(&first, &authority.certify("a.example.com").unwrap()));
        for number in 0..KEPT + 10 {
            authority.certify(&format!("h{number}.example.com")).unwrap();
        }
        let signed = authority.signed.lock().unwrap();
        assert_eq!(signed.by_host.len(), KEPT);
        assert_eq!(signed.order.len(), KEPT);
    }
}
