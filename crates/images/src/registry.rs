//! Talking to a registry: documents and blobs, verified, with retries and time limits.
//!
//! Does not know the store. Invariant: bytes leave this module only after their digest was checked, and errors leave it
//! without credentials, tokens or query strings (which may be signatures).

use std::fs::File;
use std::io::{Seek as _, SeekFrom, Write as _};
use std::path::Path;
use std::sync::Once;
use std::time::Duration;

use futures_util::StreamExt as _;
use oci_client::RegistryOperation;
use oci_client::client::{BlobResponse, Client, ClientConfig, ClientProtocol, SizedStream};
use oci_client::errors::{OciDistributionError as Oci, OciErrorCode};
use oci_client::manifest::OciDescriptor;
use oci_client::secrets::RegistryAuth;
use sha2::{Digest as _, Sha256};

use crate::error::ImageError;
use crate::image::{Credentials, ImageDigest};
use crate::manifest::{Descriptor, MANIFEST_TYPES, MAX_DOCUMENT};
use crate::reference::Reference;

const ATTEMPTS: u32 = 4;
/// A host that does not answer at all gets fewer, so that a wrong name is noticed soon.
const CONNECT_ATTEMPTS: u32 = 2;
const FIRST_PAUSE: Duration = Duration::from_millis(250);
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// How long a connection may be silent.
const READ_TIMEOUT: Duration = Duration::from_secs(60);
/// How long a manifest or configuration may take.
const DOCUMENT_TIMEOUT: Duration = Duration::from_secs(120);
const CHUNK: usize = 1 << 20;

/// A repository in a registry, and how to get in.
pub(crate) struct Registry {
    client: Client,
    auth: RegistryAuth,
    reference: Reference,
    target: oci_client::Reference,
}

/// Whether a failure may pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Outlook {
    Final,
    Unconnected,
    Passing,
}

/// What is asked of a registry besides layers.
#[derive(Clone, Copy)]
enum Question<'a> {
    LogIn,
    Manifest(&'a oci_client::Reference),
    Document(&'a Descriptor),
}

struct Failure {
    error: ImageError,
    outlook: Outlook,
}

impl From<ImageError> for Failure {
    fn from(error: ImageError) -> Self {
        Self { error, outlook: Outlook::Final }
    }
}

impl Registry {
    pub(crate) fn new(
        reference: &Reference,
        credentials: Option<Credentials>,
        insecure: &[String],
    ) -> Result<Self, ImageError> {
        install_tls_provider();
        let plain = reference.is_loopback() || insecure.iter().any(|host| host == reference.registry());
        let auth = match credentials {
            None => RegistryAuth::Anonymous,
            Some(Credentials { username, password }) if username.is_empty() => RegistryAuth::Bearer(password),
            Some(Credentials { username, password }) => RegistryAuth::Basic(username, password),
        };
        let from_env =
            |names: [&str; 2]| names.iter().find_map(|n| std::env::var(n).ok()).filter(|v| !v.is_empty());
        let config = ClientConfig {
            protocol: if plain { ClientProtocol::Http } else { ClientProtocol::Https },
            read_timeout: Some(READ_TIMEOUT),
            connect_timeout: Some(CONNECT_TIMEOUT),
            user_agent: concat!("sandglass/", env!("CARGO_PKG_VERSION")),
            // What is spoken to without TLS is near; a proxy would be the wrong way there.
            https_proxy: if plain { None } else { from_env(["HTTPS_PROXY", "https_proxy"]) },
            no_proxy: if plain { None } else { from_env(["NO_PROXY", "no_proxy"]) },
            platform_resolver: None,
            ..ClientConfig::default()
        };
        let client = make_client(config)?;
        let (host, repository) = (reference.registry().to_owned(), reference.repository().to_owned());
        let target = match (reference.digest(), reference.tag()) {
            (Some(digest), _) => oci_client::Reference::with_digest(host, repository, digest.to_string()),
            (None, tag) => {
                oci_client::Reference::with_tag(host, repository, tag.unwrap_or("latest").to_owned())
            }
        };
        Ok(Self { client, auth, reference: reference.clone(), target })
    }

    /// Gets a token if the registry wants one. Without this step its refusal would look like that of the image.
    pub(crate) async fn log_in(&self) -> Result<(), ImageError> {
        self.ask(Question::LogIn).await.map(drop)
    }

    /// Fetches the manifest or list the reference names.
    pub(crate) async fn manifest(&self) -> Result<(Vec<u8>, ImageDigest), ImageError> {
        let bytes = self.ask(Question::Manifest(&self.target)).await?;
        let digest = ImageDigest::of(&bytes);
        match self.reference.digest() {
            Some(wanted) if *wanted != digest => Err(self.wrong_content(wanted)),
            _ => Ok((bytes, digest)),
        }
    }

    /// Fetches a manifest from a list.
    pub(crate) async fn manifest_by_digest(&self, digest: &ImageDigest) -> Result<Vec<u8>, ImageError> {
        let target = self.target.clone_with_digest(digest.to_string());
        let bytes = self.ask(Question::Manifest(&target)).await?;
        if ImageDigest::of(&bytes) == *digest { Ok(bytes) } else { Err(self.wrong_content(digest)) }
    }

    /// Fetches a small blob.
    pub(crate) async fn document(&self, descriptor: &Descriptor) -> Result<Vec<u8>, ImageError> {
        if descriptor.size > MAX_DOCUMENT {
            return Err(ImageError::TooLarge(format!("a configuration of {} bytes", descriptor.size)));
        }
        self.ask(Question::Document(descriptor)).await
    }

    /// Asks until there is an answer, or no hope of one.
    async fn ask(&self, question: Question<'_>) -> Result<Vec<u8>, ImageError> {
        let mut failures = 0;
        loop {
            let answer = tokio::time::timeout(DOCUMENT_TIMEOUT, self.ask_once(question)).await;
            match answer.unwrap_or_else(|_| Err(self.timed_out())) {
                Ok(bytes) => return Ok(bytes),
                Err(failure) => {
                    failures += 1;
                    self.pause(failure, failures).await?;
                }
            }
        }
    }

    async fn ask_once(&self, question: Question<'_>) -> Result<Vec<u8>, Failure> {
        match question {
            Question::LogIn => {
                let login = self.client.auth(&self.target, &self.auth, RegistryOperation::Pull).await;
                login.map(|_| Vec::new()).map_err(|e| self.failure(e))
            }
            Question::Manifest(target) => {
                let fetched = self.client.pull_manifest_raw(target, &self.auth, MANIFEST_TYPES).await;
                let (bytes, _) = fetched.map_err(|e| self.failure(e))?;
                match bytes.len() as u64 {
                    length if length > MAX_DOCUMENT => {
                        Err(ImageError::TooLarge(format!("a manifest of {length} bytes")).into())
                    }
                    _ => Ok(bytes.to_vec()),
                }
            }
            Question::Document(descriptor) => self.read_document(descriptor).await,
        }
    }

    async fn read_document(&self, descriptor: &Descriptor) -> Result<Vec<u8>, Failure> {
        let blob = self.client.pull_blob_stream(&self.target, &describe(descriptor)).await;
        let mut stream = blob.map_err(|e| self.failure(e))?.stream;
        let mut bytes = Vec::new();
        while let Some(chunk) = stream.next().await {
            bytes.extend_from_slice(&chunk.map_err(|e| self.stream_failure(&e))?);
            if bytes.len() as u64 > MAX_DOCUMENT {
                return Err(ImageError::TooLarge("a configuration that does not end".to_owned()).into());
            }
        }
        if ImageDigest::of(&bytes) == descriptor.digest {
            Ok(bytes)
        } else {
            Err(self.wrong_content(&descriptor.digest).into())
        }
    }

    /// Fetches a blob into a new file, going on where a broken connection left off.
    pub(crate) async fn download(
        &self,
        descriptor: &Descriptor,
        path: &Path,
        report: &(dyn Fn(u64) + Send + Sync),
    ) -> Result<(), ImageError> {
        let mut sink = Some(BlobSink::create(path)?);
        let mut failures = 0;
        loop {
            let mut taken = sink.take().expect("the sink is put back after every attempt");
            let result = self.download_more(descriptor, &mut taken, report).await;
            let Err(failure) = result else {
                let BlobSink { hasher, .. } = taken;
                let digest = ImageDigest::from_hash(&hasher.finalize().into());
                return if digest == descriptor.digest {
                    Ok(())
                } else {
                    Err(self.wrong_content(&descriptor.digest))
                };
            };
            sink = Some(taken);
            failures += 1;
            self.pause(failure, failures).await?;
        }
    }

    async fn download_more(
        &self,
        descriptor: &Descriptor,
        sink: &mut BlobSink,
        report: &(dyn Fn(u64) + Send + Sync),
    ) -> Result<(), Failure> {
        let layer = describe(descriptor);
        let mut stream = self.open_blob(&layer, sink).await?.stream;
        let mut pending: Vec<u8> = Vec::with_capacity(CHUNK);
        loop {
            let chunk = match stream.next().await {
                None => break,
                Some(Ok(chunk)) => chunk,
                Some(Err(e)) => {
                    // What did arrive is good: the digest is checked over everything at the end.
                    sink.write(std::mem::take(&mut pending)).await?;
                    return Err(self.stream_failure(&e));
                }
            };
            pending.extend_from_slice(&chunk);
            let have = sink.length + pending.len() as u64;
            if have > descriptor.size {
                return Err(ImageError::Corrupt(format!(
                    "blob {} is longer than it should be",
                    descriptor.digest
                ))
                .into());
            }
            if pending.len() >= CHUNK {
                sink.write(std::mem::replace(&mut pending, Vec::with_capacity(CHUNK))).await?;
            }
            report(have);
        }
        sink.write(pending).await?;
        if sink.length < descriptor.size {
            let reason = "the connection ended in the middle of a layer".to_owned();
            return Err(self.unreachable(reason, Outlook::Passing));
        }
        Ok(())
    }

    async fn open_blob(&self, layer: &OciDescriptor, sink: &mut BlobSink) -> Result<SizedStream, Failure> {
        if sink.length == 0 {
            return self.client.pull_blob_stream(&self.target, layer).await.map_err(|e| self.failure(e));
        }
        match self.client.pull_blob_stream_partial(&self.target, layer, sink.length, None).await {
            Ok(BlobResponse::Partial(stream)) => Ok(stream),
            Ok(BlobResponse::Full(stream)) => {
                sink.restart()?;
                Ok(stream)
            }
            Err(e) => Err(self.failure(e)),
        }
    }

    /// Waits before the next attempt, or gives up.
    async fn pause(&self, failure: Failure, failures: u32) -> Result<(), ImageError> {
        let allowed = match failure.outlook {
            Outlook::Final => 1,
            Outlook::Unconnected => CONNECT_ATTEMPTS,
            Outlook::Passing => ATTEMPTS,
        };
        if failures >= allowed {
            return Err(failure.error);
        }
        tracing::debug!(registry = self.reference.registry(), failures, "trying the registry again");
        tokio::time::sleep(FIRST_PAUSE * 2_u32.pow(failures - 1)).await;
        Ok(())
    }

    fn failure(&self, error: Oci) -> Failure {
        match error {
            Oci::UnauthorizedError { .. } | Oci::AuthenticationFailure(_) => self.unauthorized(),
            Oci::ImageManifestNotFoundError(_) => self.not_found(),
            Oci::RegistryError { envelope, .. } => {
                let has = |code: OciErrorCode| envelope.errors.iter().any(|e| e.code == code);
                if has(OciErrorCode::Unauthorized) || has(OciErrorCode::Denied) {
                    self.unauthorized()
                } else if has(OciErrorCode::Toomanyrequests) {
                    self.unreachable("too many requests".to_owned(), Outlook::Passing)
                } else if [
                    OciErrorCode::ManifestUnknown,
                    OciErrorCode::NameUnknown,
                    OciErrorCode::NotFound,
                    OciErrorCode::BlobUnknown,
                    OciErrorCode::ManifestBlobUnknown,
                ]
                .into_iter()
                .any(has)
                {
                    self.not_found()
                } else {
                    let codes: Vec<String> =
                        envelope.errors.iter().map(|e| format!("{:?}", e.code)).collect();
                    self.unreachable(format!("it answered {}", shorten(&codes.join(", "))), Outlook::Final)
                }
            }
            Oci::ServerError { code, .. } => match code {
                401 | 403 => self.unauthorized(),
                404 => self.not_found(),
                408 | 429 | 500..=599 => {
                    self.unreachable(format!("it answered with status {code}"), Outlook::Passing)
                }
                _ => self.unreachable(format!("it answered with status {code}"), Outlook::Final),
            },
            Oci::RequestError(error) => self.request_failure(&error),
            Oci::DigestError(_) => ImageError::Corrupt(format!(
                "registry {} sent other content than its digest",
                self.reference.registry()
            ))
            .into(),
            Oci::IoError(error) => self.stream_failure(&error),
            Oci::JsonError(_)
            | Oci::ManifestEncodingError(_)
            | Oci::ManifestParsingError(_)
            | Oci::VersionedParsingError(_) => {
                ImageError::corrupt("the registry sent a malformed manifest").into()
            }
            // The texts of the others may quote what the registry sent, so only their kind is told.
            Oci::UnsupportedMediaTypeError(_) | Oci::UnsupportedSchemaVersionError(_) => {
                ImageError::Unsupported("the manifest has an unknown form".to_owned()).into()
            }
            _ => self.unreachable("it does not speak the distribution protocol".to_owned(), Outlook::Final),
        }
    }

    fn request_failure(&self, error: &reqwest::Error) -> Failure {
        if error.is_connect() {
            return self.unreachable(innermost(error), Outlook::Unconnected);
        }
        if error.is_redirect() || error.is_builder() {
            return self.unreachable("it sent a redirect that cannot be followed".to_owned(), Outlook::Final);
        }
        let reason =
            if error.is_timeout() { "it does not answer in time".to_owned() } else { innermost(error) };
        self.unreachable(reason, Outlook::Passing)
    }

    /// A failure in the middle of a body, which arrives wrapped.
    fn stream_failure(&self, error: &std::io::Error) -> Failure {
        let inner = error.get_ref();
        if inner.is_some_and(|e| e.is::<oci_client::errors::DigestError>()) {
            return ImageError::corrupt("a blob has other content than its digest").into();
        }
        match inner.and_then(|e| e.downcast_ref::<reqwest::Error>()) {
            Some(error) => self.request_failure(error),
            None => self.unreachable("the connection broke".to_owned(), Outlook::Passing),
        }
    }

    fn timed_out(&self) -> Failure {
        self.unreachable("it does not answer in time".to_owned(), Outlook::Final)
    }

    fn unreachable(&self, reason: String, outlook: Outlook) -> Failure {
        let registry = self.reference.registry().to_owned();
        Failure { error: ImageError::Unreachable { registry, reason }, outlook }
    }

    fn unauthorized(&self) -> Failure {
        let reason = match self.auth {
            RegistryAuth::Anonymous => "it needs credentials, or the image does not exist",
            _ => "the credentials are wrong or do not reach this image",
        };
        ImageError::Unauthorized {
            registry: self.reference.registry().to_owned(),
            repository: self.reference.repository().to_owned(),
            reason: reason.to_owned(),
        }
        .into()
    }

    fn not_found(&self) -> Failure {
        ImageError::NotFound {
            reference: self.reference.familiar(),
            place: format!("in registry {}", self.reference.registry()),
        }
        .into()
    }

    fn wrong_content(&self, digest: &ImageDigest) -> ImageError {
        ImageError::Corrupt(format!("registry {} sent other content for {digest}", self.reference.registry()))
    }
}

/// A blob on its way to the disk, digested as it comes.
struct BlobSink {
    file: Option<File>,
    hasher: Sha256,
    length: u64,
}

impl BlobSink {
    fn create(path: &Path) -> Result<Self, ImageError> {
        let file = File::create_new(path).map_err(download_failed)?;
        Ok(Self { file: Some(file), hasher: Sha256::new(), length: 0 })
    }

    /// Writes and digests on a thread that may block.
    async fn write(&mut self, bytes: Vec<u8>) -> Result<(), ImageError> {
        let mut file = self.file.take().expect("the file is put back after every write");
        let mut hasher = self.hasher.clone();
        let length = bytes.len() as u64;
        let write = tokio::task::spawn_blocking(move || {
            let result = file.write_all(&bytes);
            hasher.update(&bytes);
            (file, hasher, result)
        });
        let (file, hasher, result) = write.await.map_err(|e| download_failed(std::io::Error::other(e)))?;
        self.file = Some(file);
        result.map_err(download_failed)?;
        self.hasher = hasher;
        self.length += length;
        Ok(())
    }

    fn restart(&mut self) -> Result<(), ImageError> {
        let file = self.file.as_mut().expect("the file is put back after every write");
        file.set_len(0).and_then(|()| file.seek(SeekFrom::Start(0))).map_err(download_failed)?;
        self.hasher = Sha256::new();
        self.length = 0;
        Ok(())
    }
}

fn download_failed(error: std::io::Error) -> ImageError {
    ImageError::io("writing a downloaded layer", error)
}

fn describe(descriptor: &Descriptor) -> OciDescriptor {
    OciDescriptor {
        media_type: descriptor.media_type.clone(),
        digest: descriptor.digest.to_string(),
        size: i64::try_from(descriptor.size).unwrap_or(i64::MAX),
        // Addresses in a manifest are not followed: they could point into the network of this machine.
        urls: None,
        ..OciDescriptor::default()
    }
}

fn make_client(config: ClientConfig) -> Result<Client, ImageError> {
    let no_tls = |e: &dyn std::fmt::Display| {
        ImageError::Unsupported(format!("pulling on this host: {e}; are the CA certificates installed?"))
    };
    // The library panics where it cannot make a client of its own, which happens without any CA certificate.
    reqwest::Client::builder().build().map_err(|e| no_tls(&innermost(&e)))?;
    Client::try_from(config).map_err(|e| no_tls(&e))
}

/// Chooses ring once for the process; a binary that has chosen already keeps its choice.
fn install_tls_provider() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| drop(rustls::crypto::ring::default_provider().install_default()));
}

/// The cause at the bottom, which names no address.
fn innermost(error: &dyn std::error::Error) -> String {
    let mut cause = error;
    while let Some(next) = cause.source() {
        cause = next;
    }
    shorten(&cause.to_string())
}

fn shorten(text: &str) -> String {
    text.chars().filter(|c| !c.is_control()).take(200).collect()
}
