//! Python environments for the suites: found, created, and recreated only when their requirements changed.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::process::{run, succeeds};

/// The packages' own lower bound.
const OLDEST: &str = "import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 10))";

/// A Python that can make virtual environments: the first on the path, else the system's own.
pub(crate) fn with_venv() -> Option<&'static str> {
    ["python3", "python3.11", "python3.12", "python3.13", "/usr/bin/python3"]
        .into_iter()
        .find(|python| succeeds(Command::new(python).args(["-c", OLDEST])))
}

/// The interpreter of the environment that `requirements-NAME.txt` describes.
pub(crate) fn environment_named(folder: &Path, name: &str) -> Result<PathBuf> {
    environment(&folder.join(format!(".venv-{name}")), &folder.join(format!("requirements-{name}.txt")))
}

/// A virtual environment at `folder` with exactly the given requirements; returns its interpreter.
pub(crate) fn environment(folder: &Path, requirements: &Path) -> Result<PathBuf> {
    let wanted = fs::read_to_string(requirements)
        .with_context(|| format!("failed to read {}", requirements.display()))?;
    let python = folder.join("bin/python");
    let stamp = folder.join("installed-requirements.txt");
    let installed = fs::read_to_string(&stamp).unwrap_or_default();
    if installed == wanted && succeeds(Command::new(&python).args(["-c", ""])) {
        return Ok(python);
    }
    let Some(system) = with_venv() else {
        bail!("no python3 (3.10 or newer) with venv; `cargo xtask setup` installs one");
    };
    if folder.exists() {
        fs::remove_dir_all(folder).with_context(|| format!("failed to remove {}", folder.display()))?;
    }
    run(Command::new(system).args(["-m", "venv"]).arg(folder))?;
    run(Command::new(&python)
        .args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--requirement"])
        .arg(requirements))?;
    // Written last: a half-made environment is made again.
    fs::write(&stamp, wanted)?;
    Ok(python)
}
