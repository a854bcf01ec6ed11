//! `sandglass doctor`: can this machine hold sandboxes, and what is missing.

use std::path::{Path, PathBuf};

use anyhow::Result;
use clap::Args;
use sandglass_server::{
    config::{Config, RuntimeKind},
    runtimes,
};
use sandglass_shim::doctor::{Check, probe};

use crate::output::{Output, note};

/// Check whether this machine can run sandboxes
#[derive(Args, Debug)]
pub struct Doctor {
    /// State directory to check (default: the configured one)
    #[arg(long, value_name = "DIR")]
    state_dir: Option<PathBuf>,
}

impl Doctor {
    /// Exit code 1 when something that is required is missing.
    pub fn run(self, output: Output) -> Result<u8> {
        let checks = checks(self.state_dir)?;
        if output.is_json() {
            output.json(&serde_json::to_value(&checks)?)?;
        } else {
            output.text(&table(&checks))?;
        }
        Ok(u8::from(!fit(&checks)))
    }
}

/// What the configured runtime needs; a state directory given by hand asks for the embedded one.
fn checks(state_dir: Option<PathBuf>) -> Result<Vec<Check>> {
    let config = super::serve::load(None).map(|loaded| loaded.config).unwrap_or_default();
    match state_dir {
        Some(dir) => Ok(probe(&dir)),
        None if config.runtime.kind == RuntimeKind::Docker => Ok(vec![engine(&config)?]),
        None => Ok(probe(&config.embedded.state_dir)),
    }
}

fn engine(config: &Config) -> Result<Check> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let (ok, found, remedy) = match runtime.block_on(runtimes::about_engine(config)) {
        Ok(about) => (true, about, String::new()),
        Err(why) => (false, why, "start the engine, or name it in DOCKER_HOST".to_owned()),
    };
    Ok(Check { name: "docker engine", ok, required: true, found, remedy })
}

/// Tells on standard error what is missing, if something required is.
pub fn explain(state_dir: &Path) {
    let checks = probe(state_dir);
    if !fit(&checks) {
        note("this machine cannot hold sandboxes:");
        let missing: Vec<Check> = checks.into_iter().filter(|check| !check.ok && check.required).collect();
        for line in table(&missing).lines() {
            note(line);
        }
    }
}

/// Whether everything required is there.
pub fn fit(checks: &[Check]) -> bool {
    checks.iter().all(|c| c.ok || !c.required)
}

/// One line a check, and what to do about those that failed.
pub fn table(checks: &[Check]) -> String {
    let width = checks.iter().map(|c| c.name.len()).max().unwrap_or(0);
    let mut text = String::new();
    for check in checks {
        let mark = match (check.ok, check.required) {
            (true, _) => "ok",
            (false, true) => "MISSING",
            (false, false) => "absent",
        };
        text.push_str(&format!("{mark:<8} {:<width$}  {}\n", check.name, check.found));
        if !check.ok {
            text.push_str(&format!("{:<8} {:<width$}  → {}\n", "", "", check.remedy));
        }
    }
    text
}
