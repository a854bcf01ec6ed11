//! `sandglass exec`: a command in a running sandbox.

use std::{path::PathBuf, time::Duration};

use anyhow::{Result, bail};
use clap::Args;
use serde_json::json;

use crate::{
    Context,
    agent::Agent,
    events::Event,
    execution::{self, Command},
    interrupts::Interrupts,
    values,
};

/// Run a command in a running sandbox; exits with the command's exit code
#[derive(Args, Debug)]
#[command(after_help = "\
Exit codes: that of the command; 126 it cannot be run; 127 it was not found; 125 sandglass itself failed, including a
connection that ended early. Output travels as lines of text: `\\r\\n` arrives as `\\n`, and the last line always ends
with a newline. Ctrl-C interrupts the command, a second one leaves at once.")]
pub struct Exec {
    /// Id, unique id prefix, or name
    id: String,
    /// The command and its arguments; no shell in between
    #[arg(required = true, trailing_var_arg = true, value_name = "CMD")]
    command: Vec<String>,
    #[command(flatten)]
    settings: Settings,
    /// End the command after this time
    #[arg(long, value_name = "DURATION", value_parser = values::duration)]
    timeout: Option<Duration>,
    /// Start the command, print its id and return; `logs ID --command` shows its output
    #[arg(short, long)]
    detach: bool,
}

/// Settings of a command that `run` and `exec` share.
#[derive(Args, Debug)]
pub struct Settings {
    /// Variable for the command; without =VALUE, its value here; may be repeated
    #[arg(short, long, value_name = "KEY[=VALUE]")]
    pub env: Vec<String>,
    /// File with a KEY=VALUE a line; may be repeated
    #[arg(long, value_name = "FILE")]
    pub env_file: Vec<PathBuf>,
    /// Directory to run the command in
    #[arg(short, long, value_name = "DIR")]
    pub workdir: Option<String>,
    /// User to run the command as, by name or number
    #[arg(short, long, value_name = "USER[:GROUP]")]
    pub user: Option<String>,
}

impl Exec {
    pub async fn run(self, context: &Context) -> Result<u8> {
        let mut interrupts = Interrupts::listen()?;
        let mut command = Command {
            argv: self.command,
            env: values::environment(&self.settings.env_file, &self.settings.env)?,
            workdir: self.settings.workdir,
            timeout: self.timeout,
            background: self.detach,
            identity: None,
        };
        let prepare = async {
            let id = context.client.resolve(&self.id).await?;
            let agent = Agent::connect(&context.client, &id).await?;
            if let Some(user) = &self.settings.user {
                command.identity = Some(execution::identity(&agent, user).await?);
            }
            Ok::<_, anyhow::Error>((id, agent))
        };
        let (id, agent) = tokio::select! {
            prepared = prepare => prepared?,
            interrupt = interrupts.next() => return Ok(interrupt.exit_code()),
        };
        if self.detach {
            return detach(context, &id, &agent, &command).await;
        }
        Ok(execution::follow(&agent, &command, &mut interrupts).await?.code())
    }
}

async fn detach(context: &Context, id: &str, agent: &Agent, command: &Command) -> Result<u8> {
    let mut events = agent.run(&command.request()).await?;
    let mut started = None;
    loop {
        match events.next().await? {
            Some(Event::Started(command)) => started = Some(command),
            Some(Event::Completed) => break,
            Some(Event::Failed(failure)) => bail!("cannot run the command: {}", failure.value),
            Some(Event::Refused { code, message }) => bail!("the agent gave up: {message} ({code})"),
            Some(_) => {}
            None => bail!("the connection ended before the command was started"),
        }
    }
    let Some(started) = started else { bail!("the agent did not name the command") };
    if context.output.is_json() {
        context.output.json(&json!({ "id": id, "commandId": started }))?;
    } else {
        context.output.line(&started)?;
    }
    Ok(0)
}
