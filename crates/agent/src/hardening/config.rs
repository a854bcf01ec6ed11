//! The isolation file: what sessions may touch, and which layers of hardening are on.

use std::path::{Path, PathBuf};

use serde::Deserialize;

use super::capabilities;

/// All keys have defaults; unknown ones are left to newer versions.
#[derive(Debug, Clone, Deserialize)]
#[serde(default)]
pub struct Config {
    pub upper_root: PathBuf,
    pub upper_max_bytes: u64,
    pub allowed_writable: Vec<PathBuf>,
    pub seccomp: Seccomp,
    pub hardening: Hardening,
    pub landlock: Landlock,
    pub ebpf: Ebpf,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub struct Seccomp {
    /// Replaces the built-in list.
    pub deny: Option<Vec<String>>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub struct Hardening {
    pub enabled: bool,
    pub keep_capabilities: Vec<String>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub struct Landlock {
    pub enabled: bool,
    pub extra_writable: Vec<PathBuf>,
    /// Accepted; everything is readable as far as the file system's own permissions go.
    pub extra_readable: Vec<PathBuf>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub struct Ebpf {
    pub enabled: bool,
}

#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    #[error("isolation configuration {path}: {reason}")]
    File { path: String, reason: String },
    #[error("isolation configuration: unknown capability {0:?}")]
    Capability(String),
    #[error("isolation configuration: [seccomp] deny: {0}")]
    Seccomp(String),
}

impl Default for Config {
    fn default() -> Self {
        Config {
            upper_root: "/var/lib/execd/isolation".into(),
            upper_max_bytes: 8 << 30,
            allowed_writable: ["/workspace", "/mnt", "/media", "/data"].map(PathBuf::from).into(),
            seccomp: Seccomp::default(),
            hardening: Hardening::default(),
            landlock: Landlock::default(),
            ebpf: Ebpf::default(),
        }
    }
}

impl Config {
    /// A missing file is the defaults; one that cannot be read or understood is an error, because ignoring it would
    /// leave off what it asks for.
    pub fn load(path: Option<&Path>) -> Result<Self, ConfigError> {
        let Some(path) = path else { return Ok(Config::default()) };
        let failed = |reason: String| ConfigError::File { path: path.display().to_string(), reason };
        match std::fs::read_to_string(path) {
            Ok(text) => toml::from_str(&text).map_err(|error| failed(error.to_string())),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(Config::default()),
            Err(error) => Err(failed(error.to_string())),
        }
    }

    pub(super) fn kept(&self) -> Result<u64, ConfigError> {
        let bit =
            |name: &String| capabilities::bit(name).ok_or_else(|| ConfigError::Capability(name.clone()));
        self.hardening.keep_capabilities.iter().try_fold(0, |bits, name| Ok(bits | bit(name)?))
    }

    pub fn denied(&self) -> Option<&[String]> {
        self.seccomp.deny.as_deref()
    }

    /// What root of a session keeps.
    pub fn of_sessions(&self) -> Result<u64, ConfigError> {
        let all = capabilities::SESSION;
        Ok(if self.hardening.enabled { all & self.kept()? } else { all })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_have_defaults_and_unknown_ones_are_left_alone() {
        let text = "upper_max_bytes = 1\ndiff_max_bytes = 2\nnew = 3\n[hardening]\nenabled = true\n\
                    keep_capabilities = [\"CAP_NET_RAW\"]\n[ebpf]\nenabled = true\nobserve = [\"exec\"]";
        let config: Config = toml::from_str(text).unwrap();
        assert_eq!(config.upper_max_bytes, 1);
        assert_eq!(config.kept().unwrap(), 0x2000);
        assert_eq!(config.denied(), None);
        assert!(config.allowed_writable.contains(&PathBuf::from("/workspace")));
        assert_eq!(config.of_sessions().unwrap(), 0);
        let config: Config = toml::from_str("[seccomp]\ndeny = []").unwrap();
        assert_eq!(config.denied(), Some(&[][..]));
    }

    #[test]
    fn a_missing_file_is_the_defaults_and_a_broken_one_an_error() {
        assert!(Config::load(Some(Path::new("/nonexistent/x.toml"))).is_ok());
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x.toml");
        std::fs::write(&path, "[hardening]\nenabled = \"perhaps\"").unwrap();
        assert!(Config::load(Some(&path)).is_err());
        let config: Config = toml::from_str("[hardening]\nkeep_capabilities = [\"ALL\"]").unwrap();
        assert!(config.kept().is_err());
    }
}
