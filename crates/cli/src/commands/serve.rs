//! `sandglass serve`: the control plane in the foreground.

use std::path::PathBuf;

use anyhow::{Context as _, Result, bail};
use clap::Args;
use sandglass_server::{
    config::{self, LoadOptions, Loaded, ProcessEnvironment, RuntimeKind, guard},
    server::Prepared,
    telemetry::logs,
};
use tokio::signal::unix::{SignalKind, signal};

/// Run the server
#[derive(Args, Debug)]
pub struct Serve {
    /// Configuration file (default: SANDBOX_CONFIG_PATH, then ~/.sandbox.toml)
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Address to listen on, instead of the configured one
    #[arg(long)]
    pub host: Option<String>,
    /// Port to listen on, instead of the configured one
    #[arg(long)]
    pub port: Option<u16>,
}

impl Serve {
    /// Serves until told to stop. Sandboxes stay alive.
    pub fn run(self) -> Result<u8> {
        let loaded = load(self.config)?;
        let mut config = loaded.config.clone();
        if let Some(host) = self.host {
            config.server.host = host;
        }
        if let Some(port) = self.port {
            config.server.port = port;
        }
        admit(&loaded)?;
        // A command, not a request: whoever starts the server has read this.
        rustls::crypto::ring::default_provider().install_default().ok();
        logs::init(&config.log, std::env::var("SANDGLASS_LOG").ok().as_deref())
            .context("cannot set up logging")?;
        for warning in config::check::report(&loaded) {
            tracing::warn!("{warning}");
        }
        // Before the asynchronous runtime exists: the process is still small and single-threaded when it starts the zygote.
        let embedded =
            (config.runtime.kind == RuntimeKind::Embedded).then(|| config.embedded.state_dir.clone());
        let prepared = Prepared::open(config).inspect_err(|_| {
            if let Some(state_dir) = &embedded {
                super::doctor::explain(state_dir);
            }
        })?;
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
        runtime.block_on(async {
            let mut terminate = signal(SignalKind::terminate())?;
            let mut interrupt = signal(SignalKind::interrupt())?;
            let server = prepared.start().await?;
            tokio::select! {
                _ = terminate.recv() => {}
                _ = interrupt.recv() => {}
            }
            tracing::info!("stopping; sandboxes stay alive");
            server.stop().await;
            anyhow::Ok(())
        })?;
        Ok(0)
    }
}

/// Reads the configuration; every problem is in the error.
pub fn load(path: Option<PathBuf>) -> Result<Loaded> {
    config::load(LoadOptions { path, env: &ProcessEnvironment }).map_err(anyhow::Error::from)
}

/// The startup guard: a server without a key starts only when somebody said so explicitly.
fn admit(loaded: &Loaded) -> Result<()> {
    let answer = guard::insecure_answer(&ProcessEnvironment);
    let mut verdict = guard::startup_guard(
        guard::Authentication::of(&loaded.config),
        answer.as_deref(),
        guard::Operator::on_stdin(),
    );
    if verdict == guard::Verdict::AskOperator {
        verdict = guard::ask_operator(std::io::stdin(), &mut std::io::stderr(), guard::ANSWER_LIMIT)?;
    }
    match verdict {
        guard::Verdict::Allowed => Ok(()),
        guard::Verdict::Refused(why) => bail!(why),
        guard::Verdict::AskOperator => bail!("the question was not answered"),
    }
}
