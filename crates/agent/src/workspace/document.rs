//! The document of the workspace, found and checked.

use std::io;
use std::path::{Path, PathBuf};

use sandglass_bridge::wire::Secret;
use sandglass_sandbox::workspace::{self, Workspace};
use sandglass_supervise::filter::KnownSecrets;

use super::plan;

/// Larger ones are somebody else's file.
const MAX_BYTES: u64 = 4 << 20;

/// A document that was read, with where it was.
#[derive(Debug, Clone)]
pub struct Document {
    pub workspace: Workspace,
    path: PathBuf,
}

/// Why there is no workspace although there should be.
#[derive(Debug, thiserror::Error)]
pub enum DocumentError {
    #[error("workspace document {}: {source}", path.display())]
    Read { path: PathBuf, source: io::Error },
    #[error("workspace document {}: {source}", path.display())]
    Json { path: PathBuf, source: serde_json::Error },
    #[error("workspace document {}: {reason}", path.display())]
    Plan { path: PathBuf, reason: String },
    #[error("token of the workspace in {}: {source}", path.display())]
    Token { path: PathBuf, source: io::Error },
}

impl Document {
    /// Reads the named document; without a name the usual one, which need not exist. `own`: the box that this is, where it is known.
    pub fn find(named: Option<&Path>, own: Option<&str>) -> Result<Option<Self>, DocumentError> {
        match named {
            Some(path) => Self::read(path).map(Some),
            None => Self::usual(Path::new(workspace::FILE), own),
        }
    }

    /// A box that was made from a copy of a workspace has the empty file at which that one was shown its document, or the document itself.
    fn usual(path: &Path, own: Option<&str>) -> Result<Option<Self>, DocumentError> {
        if std::fs::metadata(path).is_ok_and(|meta| meta.is_file() && meta.len() == 0) {
            return Ok(None);
        }
        match Self::read(path) {
            Err(DocumentError::Read { source, .. }) if source.kind() == io::ErrorKind::NotFound => Ok(None),
            Ok(document) if own.is_some_and(|own| own != document.workspace.sandbox_id.to_string()) => {
                Ok(None)
            }
            read => read.map(Some),
        }
    }

    fn read(path: &Path) -> Result<Self, DocumentError> {
        let text =
            read_bounded(path).map_err(|source| DocumentError::Read { path: path.to_owned(), source })?;
        let workspace = serde_json::from_slice(&text)
            .map_err(|source| DocumentError::Json { path: path.to_owned(), source })?;
        let document = Document { workspace, path: path.to_owned() };
        let checked = plan::of(&document.workspace, &[], None).check();
        checked.map_err(|error| DocumentError::Plan { path: path.to_owned(), reason: error.to_string() })?;
        Ok(document)
    }

    /// The same file as it is now.
    pub fn again(&self) -> Result<Self, DocumentError> {
        Self::read(&self.path)
    }

    /// The token of the channel as it is now.
    pub fn token(&self) -> Result<Secret<String>, DocumentError> {
        let path = &self.workspace.bridge.token_file;
        let wrong = |source| DocumentError::Token { path: path.clone(), source };
        let text = read_bounded(path).map_err(wrong)?;
        let token = String::from_utf8_lossy(&text).trim().to_owned();
        if token.is_empty() {
            return Err(wrong(io::Error::new(io::ErrorKind::InvalidData, "it is empty")));
        }
        Ok(Secret::new(token))
    }

    /// What output must never show.
    pub fn filter(&self) -> KnownSecrets {
        KnownSecrets::new(self.token().into_iter().map(Secret::into_inner))
    }

    /// The folder of the document, which is in memory.
    pub fn run_dir(&self) -> PathBuf {
        self.path.parent().map_or_else(|| PathBuf::from("/run"), Path::to_owned)
    }
}

fn read_bounded(path: &Path) -> io::Result<Vec<u8>> {
    use std::io::Read;

    use crate::envs::NonblockingOpen;
    let file = std::fs::OpenOptions::new().read(true).custom_flags_nonblocking().open(path)?;
    if !file.metadata()?.is_file() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "it is no file"));
    }
    let mut text = Vec::new();
    file.take(MAX_BYTES + 1).read_to_end(&mut text)?;
    if text.len() as u64 > MAX_BYTES {
        return Err(io::Error::new(
            io::ErrorKind::FileTooLarge,
            format!("it is larger than {MAX_BYTES} bytes"),
        ));
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    const ID: &str = "7b0f7d1e-5f0a-4c1e-9a53-0d6e2b1f4a10";

    #[test]
    fn what_a_copied_file_system_brought_along_makes_no_workspace() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("workspace.json");
        let found = |own: Option<&str>| Document::usual(&path, own).map(|document| document.is_some());
        assert!(!found(None).unwrap());
        std::fs::write(&path, "").unwrap();
        assert!(!found(Some(ID)).unwrap());
        let text = json!({ "sandboxId": ID, "generation": 1, "bridge": { "way": "pull" } });
        std::fs::write(&path, text.to_string()).unwrap();
        assert!(found(Some(ID)).unwrap() && found(None).unwrap());
        assert!(!found(Some("0c5c9d5e-0000-4c1e-9a53-0d6e2b1f4a10")).unwrap());
        std::fs::write(&path, "{").unwrap();
        assert!(found(Some(ID)).is_err());
    }
}
