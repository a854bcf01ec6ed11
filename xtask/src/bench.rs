//! The benchmark: builds a release binary, prepares an environment, and lets `bench/` do the rest in one run.

use std::process::Command;

use anyhow::Result;

use crate::process::run;
use crate::python;
use crate::setup;
use crate::workspace::{Workspace, cargo};

pub(crate) fn run_benchmark(workspace: &Workspace, arguments: &[String]) -> Result<()> {
    setup::run()?;
    let folder = workspace.root.join("bench");
    run(Command::new(cargo())
        .args(["build", "--release", "--package", "sandglass"])
        .current_dir(&workspace.root))?;
    let python = python::environment(&folder.join(".venv"), &folder.join("requirements.txt"))?;
    let (half, arguments) = match arguments {
        [first, rest @ ..] if first == "docker" => ("docker_", rest),
        [first, rest @ ..] if first == "agent" => ("agent_", rest),
        [first, rest @ ..] if first == "proxy" => ("proxy_", rest),
        [first, rest @ ..] if first == "egress" => ("egress_", rest),
        [first, rest @ ..] if first == "workspace" => ("workspace_", rest),
        all => ("", all),
    };
    run(Command::new(&python)
        .arg(format!("{half}bench.py"))
        .args(arguments)
        .env("SANDGLASS_BIN", workspace.target.join("release/sandglass"))
        // The one inside that binary, as its build left it.
        .env("SANDGLASS_AGENT", workspace.target.join("guest/x86_64-unknown-linux-gnu/guest/sandglass-agent"))
        .env("PYTHONUNBUFFERED", "1")
        .env("PYTHONDONTWRITEBYTECODE", "1")
        .current_dir(&folder))?;
    run(Command::new(&python).arg(format!("{half}report.py")).current_dir(&folder))
}
