//! `sandglass doctor`: can this machine hold sandboxes, and what is missing.

use std::path::{Path, PathBuf};

use anyhow::Result;
use clap::Args;
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
        let dir = self.state_dir.unwrap_or_else(|| {
            super::serve::load(None)
                .map_or_else(|_| PathBuf::from("/var/lib/sandglass"), |l| l.config.embedded.state_dir)
        });
        let checks = probe(&dir);
        if output.is_json() {
            output.json(&serde_json::to_value(&checks)?)?;
        } else {
            output.text(&table(&checks))?;
        }
        Ok(u8::from(!fit(&checks)))
    }
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
