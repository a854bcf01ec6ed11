//! The black-box suites: the published clients, the conformance cases, and the loops that kill the server.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use crate::process::run;
use crate::python;
use crate::workspace::{Workspace, cargo};

/// Rounds and the time they may take; the loop stops by itself at whichever comes first and fails when it did too few.
const RESTART_DEFAULTS: &[&str] = &["--rounds", "200", "--seconds", "400"];
const DOCKER_RESTART_DEFAULTS: &[&str] = &["--rounds", "100", "--seconds", "400"];

/// What runs in an environment of its own: the variable that names its interpreter, and its requirements.
const OTHERS: &[(&str, &str)] = &[
    ("SANDGLASS_E2E_OLD_PYTHON", "old"),
    (REFERENCE, "reference"),
    ("SANDGLASS_E2E_ADAPTERS_PYTHON", "adapters"),
    ("SANDGLASS_E2E_CONSOLE_PYTHON", "console"),
];
const REFERENCE: &str = "SANDGLASS_E2E_REFERENCE_PYTHON";
const KERNELS: &str = "kernels";

/// What the suites would make when the first test needs it, each for itself and waiting for registries and mirrors: the applications for
/// browsers, and the Debian trees with Python and with kernels.
const PREPARE: &str = "import browser_apps, kernels_image; browser_apps.provide(); kernels_image.tree()";

/// Everything that the suites install, so that it can be had while something else keeps the processor busy.
pub(crate) fn environments(workspace: &Workspace) -> Result<()> {
    let folder = workspace.root.join("e2e");
    let python = python::environment(&folder.join(".venv"), &folder.join("requirements.txt"))?;
    for name in OTHERS.iter().map(|(_, name)| *name).chain([KERNELS]) {
        python::environment_named(&folder, name)?;
    }
    node_modules(&folder.join("js"))?;
    run(Command::new(python).args(["-c", PREPARE]).current_dir(&folder))
}

/// `arguments` are words of pytest's `-k`, or, when the first is one, options of pytest.
pub(crate) fn clients(workspace: &Workspace, arguments: &[String]) -> Result<()> {
    let folder = workspace.root.join("e2e");
    let binary = binary(workspace)?;
    let python = python::environment(&folder.join(".venv"), &folder.join("requirements.txt"))?;
    node_modules(&folder.join("js"))?;
    let mut command = Command::new(python);
    for (variable, name) in OTHERS {
        command.env(variable, python::environment_named(&folder, name)?);
    }
    command.args(["-m", "pytest", "-c", "pytest.ini"]).current_dir(&folder);
    if arguments.first().is_some_and(|first| first.starts_with('-')) {
        command.args(arguments);
    } else if !arguments.is_empty() {
        command.args(["-k", &arguments.join(" ")]);
    }
    run(environment(&mut command, &binary))
}

/// The conformance cases: ours on every runtime, then the reference, which has to do what is on record.
pub(crate) fn conformance(workspace: &Workspace, arguments: &[String]) -> Result<()> {
    let folder = workspace.root.join("e2e");
    let binary = binary(workspace)?;
    let python = python::environment(&folder.join(".venv"), &folder.join("requirements.txt"))?;
    let reference = python::environment_named(&folder, "reference")?;
    let results = workspace.target.join("conformance-reference.json");
    for subject in [["sandglass", "embedded"], ["sandglass", "docker"], ["reference", "docker"]] {
        let mut command = Command::new(&python);
        command.arg("conformance/run.py").args(subject).args(arguments).current_dir(&folder);
        if subject[0] == "reference" {
            command.arg("--out").arg(&results);
        }
        run(environment(&mut command, &binary).env(REFERENCE, &reference))?;
    }
    if !arguments.is_empty() {
        return Ok(());
    }
    run(Command::new(&python).args(["conformance/report.py", "check"]).arg(&results).current_dir(&folder))
}

pub(crate) fn restart(workspace: &Workspace, arguments: &[String]) -> Result<()> {
    let on_docker = arguments.iter().any(|argument| argument == "docker");
    let defaults = if on_docker { DOCKER_RESTART_DEFAULTS } else { RESTART_DEFAULTS };
    let folder = workspace.root.join("e2e");
    let binary = binary(workspace)?;
    let python = python::environment(&folder.join(".venv"), &folder.join("requirements.txt"))?;
    let mut command = Command::new(python);
    command.arg("restart.py").args(defaults).args(arguments).current_dir(&folder);
    run(environment(&mut command, &binary))
}

/// The development build, or what `SANDGLASS_BIN` names.
///
/// Of the whole workspace, though only one program is asked for: so the crates of others have the features that the tests were built
/// with, and are not compiled a second time.
pub(crate) fn binary(workspace: &Workspace) -> Result<PathBuf> {
    if let Some(given) = std::env::var_os("SANDGLASS_BIN") {
        return Ok(given.into());
    }
    run(Command::new(cargo())
        .args(["build", "--workspace", "--bin", "sandglass"])
        .current_dir(&workspace.root))?;
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
