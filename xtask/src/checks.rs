//! The checks that need only cargo.

use std::process::Command;

use anyhow::Result;

use crate::process::run;
use crate::workspace::{Workspace, cargo};

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

pub(crate) fn unit_tests(workspace: &Workspace, mode: Mode) -> Result<()> {
    let mut command = in_root(workspace);
    run(command.args(["test", "--workspace", "--no-fail-fast"]).args(locked(mode)))
}

fn locked(mode: Mode) -> &'static [&'static str] {
    if mode == Mode::Ci { &["--locked"] } else { &[] }
}

fn in_root(workspace: &Workspace) -> Command {
    let mut command = Command::new(cargo());
    command.current_dir(&workspace.root);
    command
}
