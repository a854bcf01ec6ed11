//! `sandglass run`: a sandbox for one command.
//!
//! Invariant: unless it is to be kept, the sandbox is removed on every way out. For the ways out that nobody sees, such
//! as a kill or a lost network, it carries a short time to live that is renewed while we are there.

use std::{io::IsTerminal, time::Duration};

use anyhow::{Context as _, Result, bail, ensure};
use clap::Args;
use indicatif::ProgressBar;
use serde_json::{Map, Value, json};
use tokio::time::{sleep, timeout};

use super::{exec::Settings, logs};
use crate::{
    Context,
    agent::Agent,
    client::{Client, Sandbox},
    execution::{self, Command, Ending},
    follow_logs::{self, End, MOST_LINES, Selection},
    interrupts::{Interrupt, Interrupts},
    output::{CLOSED_PIPE, note},
    sink::Sink,
    values,
};

/// Time to live of a sandbox whose end is ours to bring about.
const LEASE: Duration = Duration::from_secs(15 * 60);
const RENEWAL: Duration = Duration::from_secs(4 * 60);
const LONGEST_POLL: Duration = Duration::from_millis(500);
/// How long a removal may keep a user waiting who has pressed Ctrl-C twice.
const PARTING: Duration = Duration::from_secs(10);

/// Run a command in a new sandbox, stream its output, then remove the sandbox
#[derive(Args, Debug)]
#[command(after_help = "\
Without CMD, the image's own entrypoint and command run and their output is followed.
Exit codes: that of the command; 126 it cannot be run; 127 it was not found; 125 sandglass itself failed, including a
connection that ended early. Output travels as lines of text: `\\r\\n` arrives as `\\n`, and the last line always ends
with a newline. Ctrl-C interrupts the command, a second one removes the sandbox and leaves.")]
pub struct Run {
    /// Image reference; `host` is a sandbox of this machine's own system directories
    image: String,
    /// The command and its arguments; no shell in between
    #[arg(trailing_var_arg = true, value_name = "CMD")]
    command: Vec<String>,
    #[command(flatten)]
    settings: Settings,
    /// Leave the sandbox there and print its id to standard error
    #[arg(long)]
    keep: bool,
    /// Remove the sandbox after this time, whatever happens
    #[arg(long, value_name = "DURATION", value_parser = values::duration)]
    timeout: Option<Duration>,
    /// Processors, e.g. 2 or 500m
    #[arg(long, value_name = "CPUS")]
    cpu: Option<String>,
    /// Memory, e.g. 512Mi or 2G
    #[arg(short, long, value_name = "BYTES")]
    memory: Option<String>,
    /// Processes and threads
    #[arg(long, value_name = "COUNT")]
    pids: Option<u64>,
    /// Name to find the sandbox by, kept as its metadata `name`
    #[arg(long)]
    name: Option<String>,
    /// Metadata; may be repeated
    #[arg(short, long, value_name = "KEY=VALUE", value_parser = values::pair)]
    label: Vec<(String, String)>,
    /// Run CMD, or without it the image's own entrypoint and command, as what the sandbox lives for, and follow its output
    #[arg(long)]
    image_entrypoint: bool,
}

impl Run {
    pub async fn run(self, context: &Context) -> Result<u8> {
        let entrypoint = self.image_entrypoint || self.command.is_empty();
        ensure!(
            !entrypoint || (self.settings.user.is_none() && self.settings.workdir.is_none()),
            "--user and --workdir belong to a command; the image decides both for its own entrypoint"
        );
        let body = self.request(entrypoint)?;
        let mut interrupts = Interrupts::listen()?;
        let client = &context.client;
        let (sandbox, stopped) = create(client, &body, &mut interrupts).await?;
        let id = sandbox.id().to_owned();
        let outcome = match stopped {
            Some(interrupt) => Ok(interrupt.exit_code()),
            None => tokio::select! {
                outcome = self.work(context, sandbox, entrypoint, &mut interrupts) => outcome,
                never = self.keep_alive(client, &id) => never,
            },
        };
        if self.keep {
            note(&id);
            return outcome;
        }
        remove(client, &id, &mut interrupts).await;
        outcome
    }

    fn request(&self, entrypoint: bool) -> Result<Value> {
        let mut limits = Map::new();
        let mut limit = |name: &str, value: Option<String>| {
            if let Some(value) = value {
                limits.insert(name.to_owned(), Value::String(value));
            }
        };
        limit("cpu", self.cpu.clone());
        limit("memory", self.memory.clone());
        limit("pids", self.pids.map(|count| count.to_string()));
        let env: Map<String, Value> = values::environment(&self.settings.env_file, &self.settings.env)?
            .into_iter()
            .map(|(key, value)| (key, Value::String(value)))
            .collect();
        let labels =
            self.label.iter().cloned().chain(self.name.clone().map(|name| ("name".to_owned(), name)));
        let metadata: Map<String, Value> = labels.map(|(key, value)| (key, Value::String(value))).collect();
        let mode = if entrypoint { "image" } else { "none" };
        let mut body = json!({
            "image": { "uri": self.image },
            "resourceLimits": limits,
            "extensions": { "sandglass.entrypoint": mode },
        });
        if self.image_entrypoint && !self.command.is_empty() {
            body["entrypoint"] = json!(self.command);
        }
        for (key, map) in [("env", env), ("metadata", metadata)] {
            if !map.is_empty() {
                body[key] = Value::Object(map);
            }
        }
        let ttl = self.timeout.or_else(|| (!self.keep).then_some(LEASE));
        if let Some(ttl) = ttl {
            body["timeout"] = json!(ttl.as_secs());
        }
        Ok(body)
    }

    /// Renews the lease for ever; a failure is left to the next time, or to the expiry.
    async fn keep_alive(&self, client: &Client, id: &str) -> Result<u8> {
        if self.keep || self.timeout.is_some() {
            return std::future::pending().await;
        }
        loop {
            sleep(RENEWAL).await;
            if let Err(error) = client.renew(id, LEASE).await {
                note(&format!("warning: the sandbox's time to live could not be renewed: {error}"));
            }
        }
    }

    async fn work(
        &self,
        context: &Context,
        sandbox: Sandbox,
        entrypoint: bool,
        interrupts: &mut Interrupts,
    ) -> Result<u8> {
        let client = &context.client;
        let id = sandbox.id().to_owned();
        let sandbox = tokio::select! {
            ready = until_up(client, sandbox) => ready?,
            interrupt = interrupts.next() => return Ok(interrupt.exit_code()),
        };
        if entrypoint {
            return self.follow_entrypoint(client, &id, interrupts).await;
        }
        if sandbox.is_over() {
            bail!("the sandbox did not start: {}", why(&sandbox));
        }
        let mut command = Command {
            argv: self.command.clone(),
            workdir: self.settings.workdir.clone(),
            ..Command::default()
        };
        let prepare = async {
            let agent = Agent::connect_new(client, &id).await?;
            if let Some(user) = &self.settings.user {
                command.identity = Some(execution::identity(&agent, user).await?);
            }
            Ok::<_, anyhow::Error>(agent)
        };
        let agent = tokio::select! {
            agent = prepare => agent?,
            interrupt = interrupts.next() => return Ok(interrupt.exit_code()),
        };
        match execution::follow(&agent, &command, interrupts).await? {
            Ending::Exited(code) | Ending::Left(code) => Ok(code),
        }
    }

    async fn follow_entrypoint(&self, client: &Client, id: &str, interrupts: &mut Interrupts) -> Result<u8> {
        let selection = Selection { tail: MOST_LINES, since: None, timestamps: false };
        let sink = Sink::start();
        let end = follow_logs::follow(client, id, selection, &sink, interrupts).await?;
        if let Some(code) = logs::conclude(sink, end).await? {
            return Ok(code);
        }
        match end {
            End::Over(code) => judge(&client.get(id).await?, code),
            End::Closed => Ok(CLOSED_PIPE),
            End::Interrupted(interrupt) => Ok(interrupt.exit_code()),
            End::Gone => bail!("the sandbox was removed before its entrypoint ended"),
        }
    }
}

/// The exit code of an entrypoint that has ended, or the reason why it never ran.
fn judge(sandbox: &Sandbox, code: u8) -> Result<u8> {
    match sandbox.reason() {
        "CONTAINER_EXITED" | "CONTAINER_EXITED_ERROR" => Ok(code),
        "OUT_OF_MEMORY" => {
            note("the sandbox ran out of memory");
            Ok(code)
        }
        "ENTRYPOINT_FAILED" => {
            note(&format!("error: cannot run the entrypoint: {}", sandbox.message()));
            Ok(execution::refused_start(sandbox.message()))
        }
        _ => bail!("the sandbox failed: {}", why(sandbox)),
    }
}

/// Creates the sandbox. An interrupt does not abandon the request: the sandbox it makes must be removed.
pub(super) async fn create(
    client: &Client,
    body: &Value,
    interrupts: &mut Interrupts,
) -> Result<(Sandbox, Option<Interrupt>)> {
    let mut request = std::pin::pin!(client.create(body));
    let stopped = tokio::select! {
        created = &mut request => return Ok((created?, None)),
        interrupt = interrupts.next() => interrupt,
    };
    tokio::select! {
        created = &mut request => Ok((created?, Some(stopped))),
        _ = interrupts.next() => bail!("left before the server had answered; the sandbox may exist"),
    }
}

/// Waits until the sandbox is running or over.
async fn until_up(client: &Client, mut sandbox: Sandbox) -> Result<Sandbox> {
    let mut pause = Duration::from_millis(20);
    let mut spinner = None;
    while !sandbox.is_over() && sandbox.state() != "Running" {
        if spinner.is_none() && pause == LONGEST_POLL && std::io::stderr().is_terminal() {
            let bar = ProgressBar::new_spinner();
            bar.enable_steady_tick(Duration::from_millis(100));
            spinner = Some(bar);
        }
        if let Some(bar) = &spinner {
            let text = if sandbox.message().is_empty() { "preparing the sandbox" } else { sandbox.message() };
            bar.set_message(crate::output::plain(text).into_owned());
        }
        sleep(pause).await;
        pause = (pause * 2).min(LONGEST_POLL);
        sandbox = client.get(sandbox.id()).await.context("waiting for the sandbox")?;
    }
    if let Some(bar) = spinner {
        bar.finish_and_clear();
    }
    Ok(sandbox)
}

fn why(sandbox: &Sandbox) -> String {
    match (sandbox.message(), sandbox.reason()) {
        ("", "") => sandbox.state().to_owned(),
        ("", reason) => reason.to_owned(),
        (message, "") => message.to_owned(),
        (message, reason) => format!("{message} ({reason})"),
    }
}

/// Removes the sandbox. The outcome of the command stands, so a failure is only told.
pub(super) async fn remove(client: &Client, id: &str, interrupts: &mut Interrupts) {
    let failure = tokio::select! {
        removed = client.delete(id) => removed.err().map(|error| error.to_string()),
        interrupt = interrupts.next() => match timeout(PARTING, client.delete(id)).await {
            Ok(Ok(_)) => None,
            Ok(Err(error)) => Some(error.to_string()),
            Err(_) => Some(format!("left on {interrupt:?} before the server had answered")),
        },
    };
    if let Some(reason) = failure {
        note(&format!("warning: sandbox {id} could not be removed and will expire by itself: {reason}"));
    }
}
