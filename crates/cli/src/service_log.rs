//! What a managed service, or a hook of the boot, has written: as the server keeps it, by position.
//!
//! Owns following one log. How much of it is kept is the server's business; what is gone is said, never skipped silently.

use std::time::Duration;

use anyhow::Result;
use reqwest::Method;
use tokio::time::sleep;

use crate::{
    client::{Client, ClientError, transport},
    follow_logs::{End, is_gone},
    interrupts::Interrupts,
    output::note,
    sink::{Channel, Sink},
    workspace::addresses::services,
};

/// Between two looks at a quiet log.
const QUIET: Duration = Duration::from_millis(300);

/// Which log of which sandbox.
#[derive(Debug, Clone, Copy)]
pub struct Log<'a> {
    pub sandbox: &'a str,
    /// A service, or a hook such as `boot.setup.NAME`.
    pub name: &'a str,
}

/// One answer.
struct Piece {
    bytes: bytes::Bytes,
    /// Where the answer begins; more than was asked for when what is before is not kept.
    offset: u64,
    next: u64,
}

/// From where on to read.
#[derive(Debug, Clone, Copy)]
pub enum Start {
    Beginning,
    /// So many lines before the end.
    Tail(u32),
}

/// Copies a log to the sink, and goes on with what is added until the sandbox is over if that is wanted.
///
/// # Errors
/// When the server cannot be asked, or there is no such log; the error names the services that there are.
pub async fn copy(
    client: &Client,
    log: Log<'_>,
    start: Start,
    follow: bool,
    sink: &Sink,
    interrupts: &mut Interrupts,
) -> Result<End> {
    let mut position = match start {
        Start::Beginning => Some(0),
        Start::Tail(_) => None,
    };
    let mut over = !follow;
    loop {
        let query = match (position, start) {
            (None, Start::Tail(lines)) => ("tail", lines.to_string()),
            (position, _) => ("from", position.unwrap_or(0).to_string()),
        };
        let piece = tokio::select! {
            piece = read(client, log, query) => match piece {
                Err(error) if is_gone(&error) && follow && position > Some(0) => return Ok(End::Gone),
                Err(error) if is_gone(&error) => return Err(explained(client, log, error).await),
                other => other?,
            },
            interrupt = interrupts.next() => return Ok(End::Interrupted(interrupt)),
        };
        if position.is_some_and(|position| piece.offset > position) {
            note("warning: the beginning of the log is not kept any more");
        }
        position = Some(piece.next);
        if !piece.bytes.is_empty() {
            tokio::select! {
                room = sink.room() => match room {
                    Ok(permit) => permit.send((Channel::Stdout, piece.bytes.to_vec())),
                    Err(_) => return Ok(End::Closed),
                },
                interrupt = interrupts.next() => return Ok(End::Interrupted(interrupt)),
            }
            continue;
        }
        if over {
            return Ok(End::Gone);
        }
        // Asked before the next read, which is then the last.
        let state = async {
            sleep(QUIET).await;
            client.get(log.sandbox).await
        };
        over = tokio::select! {
            sandbox = state => match sandbox {
                Err(error) if is_gone(&error) => return Ok(End::Gone),
                sandbox => sandbox?.is_over(),
            },
            interrupt = interrupts.next() => return Ok(End::Interrupted(interrupt)),
        };
    }
}

async fn read(client: &Client, log: Log<'_>, query: (&str, String)) -> Result<Piece> {
    let path = ["sandboxes", log.sandbox, "services", log.name, "logs"];
    let response = client.send(client.request(Method::GET, &path)?.query(&[query])).await?;
    let number = |header: &str| response.headers().get(header)?.to_str().ok()?.parse::<u64>().ok();
    let (offset, next) = (number("x-log-offset").unwrap_or(0), number("x-log-next"));
    let bytes = response.bytes().await.map_err(|error| transport(client.profile().base(), &error))?;
    Ok(Piece { offset, next: next.unwrap_or(offset + bytes.len() as u64), bytes })
}

/// Why there is no such log: what there is instead.
async fn explained(client: &Client, log: Log<'_>, error: anyhow::Error) -> anyhow::Error {
    let Ok(sandbox) = client.get(log.sandbox).await else { return error };
    let names: Vec<&str> = services(&sandbox).iter().map(|service| service.name()).collect();
    let there = if names.is_empty() { "it has no services".to_owned() } else { names.join(", ") };
    match error.downcast_ref::<ClientError>() {
        Some(ClientError::Refused(_)) => {
            error.context(format!("there is no output of {} ({there})", log.name))
        }
        _ => error,
    }
}
