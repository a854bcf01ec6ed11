//! `sandglass demo`: a whole life of a sandbox in front of one's eyes, and the proof that nothing is left of it.
//!
//! Owns the temporary server. Invariant: whatever happens, the sandboxes are removed, the server stops and the state
//! directory goes, and what could not be removed is named.

mod leftovers;
mod stages;

use std::{
    fs,
    io::Read,
    net::{SocketAddr, TcpListener},
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use clap::Args;
use sandglass_server::{
    config::{Config, HostImage, LogConfig, LogLevel, Secret},
    server::{Prepared, Server},
    telemetry::logs,
};
use sandglass_shim::doctor::probe;
use tempfile::TempDir;

use super::doctor;
use crate::{
    client::Client,
    interrupts::Interrupts,
    output::{Output, note},
    profile::Profile,
};

use leftovers::Traces;

/// Start a temporary server, take a sandbox through its life, and show that nothing is left
#[derive(Args, Debug)]
pub struct Demo {
    /// Leave the server running in the foreground and print how to use it
    #[arg(long)]
    keep: bool,
}

/// A server with state of its own.
struct Stage {
    state: TempDir,
    prepared: Prepared,
    url: String,
    key: String,
}

impl Demo {
    pub fn run(self, output: Output) -> Result<u8> {
        let Some(parent) = suitable_parent() else {
            doctor::explain(&std::env::temp_dir());
            return Ok(1);
        };
        let config = LogConfig { level: LogLevel::Warn, ..LogConfig::default() };
        logs::init(&config, std::env::var("SANDGLASS_LOG").ok().as_deref())
            .context("cannot set up logging")?;
        let begun = Instant::now();
        // Before the asynchronous runtime exists: the process is still small and single-threaded when it starts the zygote.
        let stage = prepare(&parent)?;
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
        let state_path = stage.state.path().to_owned();
        let (traces, state, played) = runtime.block_on(self.play(stage, begun, output))?;
        drop(runtime);
        let left = clear(&traces, state);
        if left.is_empty() {
            output
                .line("nothing is left: no process, mount, cgroup, network interface, namespace or file")?;
        }
        for trace in &left {
            note(&format!("left behind: {trace}"));
        }
        played?;
        ensure!(left.is_empty(), "the demo left something behind ({})", state_path.display());
        Ok(0)
    }

    /// From the start of the server to its end. The inner result is that of the demonstration.
    async fn play(
        self,
        stage: Stage,
        begun: Instant,
        output: Output,
    ) -> Result<(Traces, TempDir, Result<()>)> {
        let Stage { state, prepared, url, key } = stage;
        let mut interrupts = Interrupts::listen()?;
        let server = match prepared.start().await {
            Ok(server) => server,
            Err(error) => return Err(error).context("the demo's server could not start"),
        };
        let mut traces = Traces::new(state.path());
        let client = Client::new(Profile::known(&url, Some(key.clone()))?)?;
        let board = stages::Board::new(output);
        let played = async {
            board.done("start a server", begun.elapsed())?;
            stages::play(&client, &board, &mut traces).await?;
            if self.keep {
                output.text(&invitation(server.address(), &url, &key))?;
                std::future::pending::<()>().await;
            }
            Ok(())
        };
        let played = tokio::select! {
            played = played => played,
            _ = interrupts.next() => if self.keep { Ok(()) } else { Err(anyhow::anyhow!("interrupted")) },
        };
        let stopping = Instant::now();
        let ended = end(&client, server, &mut traces).await;
        let told = board.done("stop the server", stopping.elapsed());
        Ok((traces, state, played.and(ended).and(told)))
    }
}

/// Removes every sandbox and stops the server.
async fn end(client: &Client, server: Server, traces: &mut Traces) -> Result<()> {
    let removed = async {
        for sandbox in client.list(&[], &[]).await? {
            traces.remember(sandbox.id());
            client.delete(sandbox.id()).await?;
        }
        Ok(())
    };
    let removed = removed.await;
    server.stop().await;
    removed
}

/// Waits for the traces to vanish, then removes the state directory. What is left, if anything.
fn clear(traces: &Traces, state: TempDir) -> Vec<String> {
    let deadline = Instant::now() + Duration::from_secs(10);
    let mut left = traces.found();
    while !left.is_empty() && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(20));
        left = traces.found();
    }
    let path = state.path().to_owned();
    if left.iter().any(|trace| trace.starts_with("mount")) {
        // Removing through a mount would destroy what is mounted.
        left.push(format!("directory {}", state.keep().display()));
    } else if let Err(error) = state.close() {
        left.push(format!("directory {}: {error}", path.display()));
    }
    left
}

/// The first directory under which sandboxes can live.
fn suitable_parent() -> Option<PathBuf> {
    let candidates = [std::env::temp_dir(), PathBuf::from("/var/tmp"), PathBuf::from("/dev/shm")];
    candidates.into_iter().find(|path| path.is_dir() && doctor::fit(&probe(path)))
}

fn prepare(parent: &Path) -> Result<Stage> {
    let state = tempfile::Builder::new().prefix("sandglass-demo-").tempdir_in(parent)?;
    let listener =
        TcpListener::bind((std::net::Ipv4Addr::LOCALHOST, 0)).context("cannot listen on a port")?;
    let address = listener.local_addr()?;
    let key = generated_key()?;
    let mut config = Config::default();
    config.server.host = address.ip().to_string();
    config.server.port = address.port();
    config.server.api_key = Some(Secret::new(key.clone()));
    config.server.graceful_shutdown = Duration::from_secs(1);
    config.embedded.state_dir = state.path().to_owned();
    config.embedded.host_image = HostImage::Always;
    config.store.path = state.path().join("server.db");
    let prepared = Prepared::open_on(config, listener).context("the demo's server could not start")?;
    Ok(Stage { state, prepared, url: format!("http://{address}"), key })
}

fn generated_key() -> Result<String> {
    let mut bytes = [0u8; 24];
    fs::File::open("/dev/urandom")?.read_exact(&mut bytes).context("cannot read random bytes")?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}

/// What to do with the server that is left running.
fn invitation(address: SocketAddr, url: &str, key: &str) -> String {
    format!(
        "
The server runs until Ctrl-C; then its sandboxes are removed with it.

  export SANDGLASS_URL={url} SANDGLASS_API_KEY={key}
  sandglass run host -- sh -c 'echo hello from $(hostname)'

With the OpenSandbox SDK (pip install opensandbox):

from opensandbox import SandboxSync
from opensandbox.config import ConnectionConfigSync
sandbox = SandboxSync.create(\"host\", connection_config=ConnectionConfigSync(domain=\"{address}\", api_key=\"{key}\"))
print(sandbox.commands.run(\"echo hello from $(hostname)\").logs.stdout[0].text)
sandbox.kill()
"
    )
}
