//! The checks that need only cargo.

use std::process::Command;

use anyhow::{Result, bail};

use crate::postgres;
use crate::process::{run, succeeds};
use crate::python;
use crate::second_chance;
use crate::workspace::{Workspace, cargo};

/// Names the interpreter whose kernels the agent's tests run code in.
const KERNELS: &str = "SANDGLASS_KERNELS_PYTHON";

/// Where the checks run. CI builds exactly what the lock file says.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mode {
    Local,
    Ci,
}

pub(crate) fn format(workspace: &Workspace) -> Result<()> {
    run(Command::new(cargo()).args(["fmt", "--all", "--check"]).current_dir(&workspace.root))
}

pub(crate) fn clippy(workspace: &Workspace, mode: Mode) -> Result<()> {
    let mut command = in_root(workspace);
    run(command
        .args(["clippy", "--workspace", "--all-targets"])
        .args(locked(mode))
        .args(["--", "-D", "warnings"]))
}

/// Everything that `unit_tests` runs, so that this is compiled while nothing else keeps the processors busy.
pub(crate) fn build_tests(workspace: &Workspace, mode: Mode) -> Result<()> {
    run(in_root(workspace).args(["test", "--workspace", "--no-run"]).args(locked(mode)))
}

/// Beside a private Docker engine and a private PostgreSQL where there are such; elsewhere the tests that need them say
/// that they are skipped.
pub(crate) fn unit_tests(workspace: &Workspace, mode: Mode) -> Result<()> {
    let database = match postgres::programs() {
        Some(programs) => Some(postgres::Private::start(&programs)?),
        None if mode == Mode::Ci => bail!("the tests need PostgreSQL; cargo xtask setup installs it"),
        None => None,
    };
    let kernels = (KERNELS, python::environment_named(&workspace.root.join("e2e"), "kernels")?);
    let address = database.as_ref().map(|database| (postgres::VARIABLE, database.address()));
    let tests = ["test", "--workspace", "--no-fail-fast"];
    if mode == Mode::Local && !succeeds(Command::new("dockerd").arg("--version")) {
        return second_chance::test(&tests, |arguments| {
            let mut command = in_root(workspace);
            command.args(arguments).envs(address.clone()).envs([kernels.clone()]);
            command
        });
    }
    let folder = workspace.root.join("e2e");
    let python = python::environment(&folder.join(".venv"), &folder.join("requirements.txt"))?;
    let tests: Vec<&str> = tests.iter().chain(locked(mode)).copied().collect();
    second_chance::test(&tests, |arguments| {
        let mut command = Command::new(&python);
        command.arg(folder.join("with_docker.py")).arg(cargo()).args(arguments);
        command.envs(address.clone()).envs([kernels.clone()]).current_dir(&workspace.root);
        command
    })
}

fn locked(mode: Mode) -> &'static [&'static str] {
    if mode == Mode::Ci { &["--locked"] } else { &[] }
}

fn in_root(workspace: &Workspace) -> Command {
    let mut command = Command::new(cargo());
    command.current_dir(&workspace.root);
    command
}
