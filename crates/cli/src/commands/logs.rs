//! `sandglass logs`: what the entrypoint, a managed service or a detached command has printed.

use std::time::Duration;

use anyhow::{Result, bail};
use clap::Args;

use crate::{
    Context,
    agent::Agent,
    follow_logs::{End, MOST_LINES, Progress, Selection, fetch, follow},
    interrupts::Interrupts,
    output::CLOSED_PIPE,
    service_log::{self, Log, Start},
    sink::{Channel, Piece, Sink},
    values,
};

/// Print what a sandbox's entrypoint has printed, each stream to its own
#[derive(Args, Debug)]
pub struct Logs {
    /// Id, unique id prefix, or name
    id: String,
    /// Only so many lines from the end
    #[arg(long, default_value_t = MOST_LINES, value_parser = clap::value_parser!(u32).range(1..=i64::from(MOST_LINES)))]
    tail: u32,
    /// Only lines of the last e.g. 10m
    #[arg(long, value_name = "DURATION", value_parser = values::duration)]
    since: Option<Duration>,
    /// Go on until the entrypoint ends
    #[arg(short, long)]
    follow: bool,
    /// Keep the instant in front of each line
    #[arg(short, long)]
    timestamps: bool,
    /// Output of a command started with `exec --detach` instead, as it is
    #[arg(long, value_name = "COMMAND_ID", conflicts_with_all = ["tail", "since", "timestamps"])]
    command: Option<String>,
    /// Output of a managed service instead, as it is; or of a hook, e.g. boot.setup.NAME
    #[arg(long, value_name = "NAME", conflicts_with_all = ["command", "since", "timestamps"])]
    service: Option<String>,
}

impl Logs {
    pub async fn run(self, context: &Context) -> Result<u8> {
        let id = context.client.resolve(&self.id).await?;
        if let Some(command) = &self.command {
            return self.detached(context, &id, command).await;
        }
        if let Some(service) = &self.service {
            let (sink, mut interrupts) = (Sink::start(), Interrupts::listen()?);
            let log = Log { sandbox: &id, name: service };
            let start = if self.tail < MOST_LINES { Start::Tail(self.tail) } else { Start::Beginning };
            let end =
                service_log::copy(&context.client, log, start, self.follow, &sink, &mut interrupts).await?;
            return Ok(conclude(sink, end).await?.unwrap_or(0));
        }
        let selection = Selection { tail: self.tail, since: self.since, timestamps: self.timestamps };
        let sink = Sink::start();
        let mut interrupts = Interrupts::listen()?;
        let end = if self.follow {
            follow(&context.client, &id, selection, &sink, &mut interrupts).await?
        } else {
            let text = fetch(&context.client, &id, self.tail, self.since).await?;
            let (pieces, _) = Progress::default().news(&text, self.timestamps);
            write(&sink, pieces, &mut interrupts).await
        };
        Ok(conclude(sink, end).await?.unwrap_or(0))
    }

    async fn detached(&self, context: &Context, id: &str, command: &str) -> Result<u8> {
        let agent = Agent::connect(&context.client, id).await?;
        let sink = Sink::start();
        let mut interrupts = Interrupts::listen()?;
        let mut cursor = 0;
        let end = loop {
            // Asked before the output is read, so that nothing printed in between is missed.
            let over = !self.follow || agent.command_exit(command).await?.is_some();
            let (bytes, next) = agent.command_output(command, cursor).await?;
            cursor = next;
            let quiet = bytes.is_empty();
            let pieces = if quiet { vec![] } else { vec![(Channel::Stdout, bytes.to_vec())] };
            let end = write(&sink, pieces, &mut interrupts).await;
            if over || end != End::Gone {
                break end;
            }
            let pause = Duration::from_millis(if quiet { 300 } else { 50 });
            tokio::select! {
                () = tokio::time::sleep(pause) => {}
                interrupt = interrupts.next() => break End::Interrupted(interrupt),
            }
        };
        Ok(conclude(sink, end).await?.unwrap_or(0))
    }
}

/// Hands pieces to the sink; `Gone` means that all were taken.
async fn write(sink: &Sink, pieces: Vec<Piece>, interrupts: &mut Interrupts) -> End {
    for piece in pieces {
        tokio::select! {
            room = sink.room() => match room {
                Ok(permit) => permit.send(piece),
                Err(_) => return End::Closed,
            },
            interrupt = interrupts.next() => return End::Interrupted(interrupt),
        }
    }
    End::Gone
}

/// Waits for the output to be written. The exit code, unless everything went well.
pub async fn conclude(sink: Sink, end: End) -> Result<Option<u8>> {
    if let End::Interrupted(interrupt) = end {
        return Ok(Some(interrupt.exit_code()));
    }
    match sink.finish().await {
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => Ok(Some(CLOSED_PIPE)),
        Err(error) => bail!("cannot write the output: {error}"),
        Ok(()) => Ok(None),
    }
}
