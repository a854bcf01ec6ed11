//! `sandglass config`: what the server would run with.

use std::path::PathBuf;

use anyhow::{Context as _, Result};
use clap::{Args, Subcommand};
use sandglass_server::{
    config::{check, show},
    listener::Certificates,
    server::certificates,
};

use crate::output::{Output, note};

/// Check or show the server's configuration
#[derive(Args, Debug)]
pub struct Config {
    #[command(subcommand)]
    action: Action,
}

#[derive(Subcommand, Debug)]
enum Action {
    /// Report every problem; exit code 1 when there is one
    Check(Source),
    /// Print every effective value with its origin; secrets are hidden
    Show(Source),
}

#[derive(Args, Debug)]
struct Source {
    /// Configuration file (default: SANDBOX_CONFIG_PATH, then ~/.sandbox.toml)
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
}

impl Config {
    /// Runs without a server.
    pub fn run(self, output: Output) -> Result<u8> {
        match self.action {
            Action::Check(source) => {
                let loaded = super::serve::load(source.config)?;
                for warning in check::report(&loaded) {
                    note(&format!("warning: {warning}"));
                }
                certificates(&loaded.config).context("server.tls_cert, server.tls_key")?;
                if loaded.config.server.tls_key.as_deref().is_some_and(Certificates::exposed) {
                    note("warning: server.tls_key: others than its owner can read or change the private key");
                }
                output.line("the configuration is valid")?;
            }
            Action::Show(source) => {
                let loaded = super::serve::load(source.config)?;
                let format = if output.is_json() { show::Format::Json } else { show::Format::Table };
                output.text(&show::render(&loaded, format))?;
            }
        }
        Ok(0)
    }
}
