//! The values callers see: an image, its configuration, platforms, credentials and progress.

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::error::ImageError;

/// A sha-256 digest, written `sha256:<64 hex digits>`.
///
/// The digest of an image's configuration is its id.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct ImageDigest(String);

impl ImageDigest {
    /// Returns the 64 hex digits without the algorithm, which is safe as a file name.
    pub fn hex(&self) -> &str {
        &self.0["sha256:".len()..]
    }

    /// Returns the twelve digits people see.
    pub fn short(&self) -> &str {
        &self.hex()[..12]
    }

    /// Returns `sha256:<hex>`.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Digests `bytes`.
    pub fn of(bytes: &[u8]) -> Self {
        use sha2::Digest as _;
        Self::from_hash(&sha2::Sha256::digest(bytes).into())
    }

    pub(crate) fn from_hash(hash: &[u8; 32]) -> Self {
        use fmt::Write as _;
        let mut text = String::with_capacity(71);
        text.push_str("sha256:");
        for byte in hash {
            write!(text, "{byte:02x}").expect("writing to a string cannot fail");
        }
        Self(text)
    }
}

impl FromStr for ImageDigest {
    type Err = ImageError;

    fn from_str(text: &str) -> Result<Self, ImageError> {
        let hex = text
            .strip_prefix("sha256:")
            .ok_or_else(|| ImageError::Unsupported(format!("digest {text:?} is not sha256")))?;
        let is_hex = hex.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b));
        if hex.len() != 64 || !is_hex {
            return Err(ImageError::corrupt(format!("{text:?} is not a sha256 digest")));
        }
        Ok(Self(text.to_owned()))
    }
}

impl TryFrom<String> for ImageDigest {
    type Error = ImageError;

    fn try_from(text: String) -> Result<Self, ImageError> {
        text.parse()
    }
}

impl From<ImageDigest> for String {
    fn from(digest: ImageDigest) -> Self {
        digest.0
    }
}

impl fmt::Display for ImageDigest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for ImageDigest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Operating system and processor, in the names the registries use (`linux`, `amd64`).
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Platform {
    /// Operating system, such as `linux`.
    pub os: String,
    /// Processor, such as `amd64` or `arm64`.
    pub arch: String,
}

impl Default for Platform {
    /// The platform of the host.
    fn default() -> Self {
        let arch = match std::env::consts::ARCH {
            "x86_64" => "amd64",
            "aarch64" => "arm64",
            "x86" => "386",
            "powerpc64" => "ppc64le",
            other => other,
        };
        Self { os: "linux".to_owned(), arch: arch.to_owned() }
    }
}

impl fmt::Display for Platform {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.os, self.arch)
    }
}

/// How to log in at a registry.
///
/// An empty user name makes the password a bearer token that is sent as it is.
#[derive(Clone, PartialEq, Eq)]
pub struct Credentials {
    /// User name, or empty for a bearer token.
    pub username: String,
    /// Password or token.
    pub password: String,
}

impl fmt::Debug for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Credentials(redacted)")
    }
}

/// What an operation is busy with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum ProgressPhase {
    /// Asking the registry (or the archive) what the image consists of.
    Resolving,
    /// Fetching a layer.
    Downloading,
    /// Writing a layer's files.
    Unpacking,
    /// The layer, or with no layer the image, is there.
    Done,
}

/// A step of a pull or import.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Progress {
    /// What is being done.
    pub phase: ProgressPhase,
    /// The layer it is about; none when it is about the whole image.
    pub layer: Option<ImageDigest>,
    /// Bytes done.
    pub current: u64,
    /// Bytes in all, when known.
    pub total: Option<u64>,
    /// How many layers the image has; zero before that is known.
    pub layers: usize,
}

/// Receives progress, possibly from several layers at once.
pub type ProgressFn<'a> = &'a (dyn Fn(Progress) + Send + Sync);

/// The part of an image's configuration that says how to run it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ImageConfig {
    /// Environment in the order given.
    pub env: Vec<(String, String)>,
    /// `uid[:gid]` or `name[:group]`; empty is root.
    pub user: String,
    /// Working directory; empty is `/`.
    pub working_dir: String,
    /// Entry point.
    pub entrypoint: Vec<String>,
    /// Arguments, or the command when there is no entry point.
    pub cmd: Vec<String>,
    /// Labels.
    pub labels: BTreeMap<String, String>,
    /// Signal that asks the entry point to stop.
    pub stop_signal: Option<String>,
    /// Ports such as `80/tcp`.
    pub exposed_ports: Vec<String>,
}

/// An image whose layers are unpacked and ready to be mounted.
#[derive(Clone, Debug)]
pub struct Image {
    /// Digest of the configuration.
    pub id: ImageDigest,
    /// Names that lead to it, in their short form (`python:3.12`).
    pub references: Vec<String>,
    /// Unpacked layers, the top one first: overlay lower directories.
    pub layers: Vec<PathBuf>,
    /// How to run it.
    pub config: ImageConfig,
    /// Bytes of file content in all layers.
    pub size_bytes: u64,
    /// When it was built, as the image says.
    pub created_at: Option<String>,
    /// What it runs on.
    pub platform: Platform,
    /// Host directories that appear in the image as further overlays: (host path, path inside). Only `host` has any.
    pub grafts: Vec<(PathBuf, PathBuf)>,
}

/// What a garbage collection removed.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Collected {
    /// Images without a name that nothing uses.
    pub images: Vec<ImageDigest>,
    /// How many layers no image needs.
    pub layers: usize,
    /// Bytes of file content in them.
    pub bytes: u64,
}
