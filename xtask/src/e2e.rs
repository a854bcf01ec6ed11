//! The black-box suites: the published clients, and the loop that kills the server.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use crate::process::run;
use crate::python;
use crate::workspace::{Workspace, cargo};

/// Rounds and the time they may take; the loop stops by itself at whichever comes first and fails when it did too few.
const RESTART_DEFAULTS: &[&str] = &["--rounds", "200", "--seconds", "240"];

pub(crate) fn clients(workspace: &Workspace, filter: &[String]) -> Result<()> {
    let folder = workspace.root.join("e2e");
    let binary = binary(workspace)?;
    let python = python::environment(&folder.join(".venv"), &folder.join("requirements.txt"))?;
    let old = python::environment(&folder.join(".venv-old"), &folder.join("requirements-old.txt"))?;
    node_modules(&folder.join("js"))?;
    let mut command = Command::new(python);
    command.args(["-m", "pytest", "-c", "pytest.ini"]).current_dir(&folder);
    if !filter.is_empty() {
        command.args([OsStr::new("-k"), OsStr::new(&filter.join(" "))]);
    }
    run(environment(&mut command, &binary).env("SANDGLASS_E2E_OLD_PYTHON", old))
}

pub(crate) fn restart(workspace: &Workspace, arguments: &[String]) -> Result<()> {
    let folder = workspace.root.join("e2e");
    let binary = binary(workspace)?;
    let python = python::environment(&folder.join(".venv"), &folder.join("requirements.txt"))?;
    let mut command = Command::new(python);
    command.arg("restart.py").args(RESTART_DEFAULTS).args(arguments).current_dir(&folder);
    run(environment(&mut command, &binary))
}

/// The development build, or what `SANDGLASS_BIN` names.
fn binary(workspace: &Workspace) -> Result<PathBuf> {
    if let Some(given) = std::env::var_os("SANDGLASS_BIN") {
        return Ok(given.into());
    }
    run(Command::new(cargo()).args(["build", "--package", "sandglass"]).current_dir(&workspace.root))?;
    Ok(workspace.target.join("debug/sandglass"))
}

fn environment<'a>(command: &'a mut Command, binary: &Path) -> &'a mut Command {
    command
        .env("SANDGLASS_BIN", binary)
        .env("PYTHONUNBUFFERED", "1")
        .env("PYTHONDONTWRITEBYTECODE", "1")
        .env("OPENSANDBOX_DISABLE_METRICS", "0")
}

/// Installed from the lock file, once for each lock file.
fn node_modules(folder: &Path) -> Result<()> {
    let wanted =
        fs::read_to_string(folder.join("package-lock.json")).context("failed to read the lock file")?;
    let stamp = folder.join("node_modules/installed-lock.json");
    if fs::read_to_string(&stamp).is_ok_and(|installed| installed == wanted) {
        return Ok(());
    }
    run(Command::new("npm").args(["ci", "--no-audit", "--no-fund", "--ignore-scripts"]).current_dir(folder))?;
    fs::write(stamp, wanted)?;
    Ok(())
}
