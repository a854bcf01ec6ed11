//! Where things are: the repository's root and the target directory, as cargo sees them.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use serde::Deserialize;

use crate::process::capture;

pub(crate) struct Workspace {
    pub(crate) root: PathBuf,
    pub(crate) target: PathBuf,
    pub(crate) packages: Vec<Package>,
}

#[derive(Deserialize)]
pub(crate) struct Package {
    pub(crate) name: String,
    pub(crate) manifest_path: PathBuf,
    pub(crate) dependencies: Vec<Dependency>,
}

#[derive(Deserialize)]
pub(crate) struct Dependency {
    pub(crate) name: String,
    /// `None` is an ordinary dependency; otherwise `dev` or `build`.
    pub(crate) kind: Option<String>,
}

#[derive(Deserialize)]
struct Metadata {
    packages: Vec<Package>,
    workspace_root: PathBuf,
    target_directory: PathBuf,
}

impl Workspace {
    pub(crate) fn find() -> Result<Self> {
        let here = Path::new(env!("CARGO_MANIFEST_DIR"));
        let text = capture(
            std::process::Command::new(cargo())
                .args(["metadata", "--format-version", "1", "--no-deps"])
                .current_dir(here),
        )?;
        let metadata: Metadata = serde_json::from_str(&text).context("failed to read cargo metadata")?;
        if metadata.packages.is_empty() {
            bail!("cargo metadata names no packages");
        }
        Ok(Self {
            root: metadata.workspace_root,
            target: metadata.target_directory,
            packages: metadata.packages,
        })
    }
}

/// The cargo that runs us, so that a `+toolchain` choice holds for the children too.
pub(crate) fn cargo() -> String {
    std::env::var("CARGO").unwrap_or_else(|_| "cargo".into())
}
