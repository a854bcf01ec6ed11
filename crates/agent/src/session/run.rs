//! The stream of one run: output as it comes, what can end it early, and exactly one terminal event.
//!
//! Back-pressure: nothing is read while a batch waits for the client, so a slow client slows the run.

use std::time::{Duration, Instant};

use bytes::Bytes;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::{Instant as Clock, MissedTickBehavior, interval_at, sleep_until};

use super::shell::{self, Shell};
use crate::command::End;
use crate::command::pipes::{self, Read};
use crate::events::{self, Stamp};
use crate::http::body::ChunkSender;
use crate::lines::LineSplitter;

const PING_EVERY: Duration = Duration::from_secs(3);
/// Chunks are sent from this size on; one read can add a little over 2 MiB of events to it at worst.
const BATCH: usize = 128 << 10;

/// Keeps a stream alive until its run begins.
pub(super) async fn wait_in_line(tx: ChunkSender, mut started: oneshot::Receiver<()>) {
    let mut pings = interval_at(Clock::now() + PING_EVERY, PING_EVERY);
    loop {
        tokio::select! {
            _ = &mut started => return,
            () = tx.closed() => return,
            _ = pings.tick() => {
                let mut ping = Vec::with_capacity(64);
                events::ping(&mut ping, &Stamp::now());
                // A full channel means that the client has something to read anyway.
                let _ = tx.try_send(Ok(ping.into()));
            }
        }
    }
}

/// What ends a run before its text does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Cause {
    Timeout,
    ClientGone,
    Closing,
}

/// Waits for the session to be destroyed.
pub(super) async fn closed(closing: &mut watch::Receiver<bool>) {
    // An error means that the session's entry is gone, which is the same.
    drop(closing.wait_for(|closing| *closing).await);
}

/// Watches for the causes.
pub(super) struct Abort {
    pub client: ChunkSender,
    pub deadline: Option<Clock>,
    pub closing: watch::Receiver<bool>,
}

impl Abort {
    pub(super) async fn cause(&mut self) -> Cause {
        let Abort { client, deadline, closing } = self;
        let late = async {
            match deadline {
                Some(deadline) => sleep_until(*deadline).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            () = closed(closing) => Cause::Closing,
            () = client.closed() => Cause::ClientGone,
            () = late => Cause::Timeout,
        }
    }
}

/// How a run ended.
pub(super) enum Outcome {
    /// The text ended; the shell reports its state next.
    Reported(End),
    /// The shell itself ended.
    Exited(End),
    Aborted(Cause),
}

/// Output on its way to the client.
pub(super) struct Stream {
    tx: ChunkSender,
    batch: Vec<u8>,
    lines: LineSplitter,
    begun: Instant,
}

impl Stream {
    pub(super) fn new(tx: ChunkSender) -> Self {
        Stream { tx, batch: Vec::new(), lines: LineSplitter::default(), begun: Instant::now() }
    }

    /// Moves output until the run has ended, however it does.
    pub(super) async fn pump(&mut self, shell: &mut Shell, abort: &mut Abort) -> Outcome {
        let mut pings = interval_at(Clock::now() + PING_EVERY, PING_EVERY);
        pings.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let tx = self.tx.clone();
        loop {
            tokio::select! {
                cause = abort.cause() => return Outcome::Aborted(cause),
                status = shell.reports.next() => return Outcome::Reported(end_of(status.as_deref())),
                exit = &mut shell.exit => {
                    // It may have reported just before it ended.
                    let end = match shell.reports.ready() {
                        Some(status) => end_of(status.as_deref()),
                        None => exit.map_or_else(|_| lost(), End::from),
                    };
                    return Outcome::Exited(end);
                }
                permit = tx.reserve(), if !self.batch.is_empty() => match permit {
                    Ok(permit) => permit.send(Ok(Bytes::from(std::mem::take(&mut self.batch)))),
                    Err(_) => return Outcome::Aborted(Cause::ClientGone),
                },
                () = shell::readable(&shell.out), if self.batch.len() < BATCH => {
                    self.read(shell);
                    // Blank lines fill no batch: a pipe that is never empty would keep the thread.
                    tokio::task::yield_now().await;
                }
                _ = pings.tick(), if self.batch.is_empty() => events::ping(&mut self.batch, &Stamp::now()),
            }
        }
    }

    /// One read's worth; how many bytes it was.
    fn read(&mut self, shell: &mut Shell) -> usize {
        let Some(pipe) = &shell.out else { return 0 };
        let (lines, batch, stamp) = (&mut self.lines, &mut self.batch, Stamp::now());
        match pipes::try_read(pipe, |bytes| lines.push(bytes, |line| put(batch, line, &stamp))) {
            Read::Some(count) => count,
            Read::Nothing => 0,
            Read::End => {
                shell.out = None;
                0
            }
        }
    }

    /// Everything that was written before the end, then the terminal event. What a job of the background writes later
    /// is not of this run.
    pub(super) async fn finish(mut self, shell: &mut Shell, end: &End, abort: &mut Abort) {
        let mut owed = shell.out.as_ref().map_or(0, pipes::waiting);
        // The run is over: being late no longer matters.
        abort.deadline = None;
        while owed > 0 {
            if self.batch.len() >= BATCH {
                tokio::select! {
                    _ = abort.cause() => return,
                    permit = self.tx.reserve() => match permit {
                        Ok(permit) => permit.send(Ok(Bytes::from(std::mem::take(&mut self.batch)))),
                        Err(_) => return,
                    },
                }
            }
            match self.read(shell) {
                0 => break,
                count => owed = owed.saturating_sub(count),
            }
        }
        self.end(end);
    }

    /// The terminal event after what is there.
    pub(super) fn end(self, end: &End) {
        let millis = u64::try_from(self.begun.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.conclude(|batch, stamp| match end.code {
            0 => events::complete(batch, millis, stamp),
            code => events::error(batch, &code.to_string(), &end.error, stamp),
        });
    }

    /// The terminal event of a run that could not begin: its value is the reason.
    pub(super) fn refuse(self, reason: &str) {
        self.conclude(|batch, stamp| events::error(batch, reason, reason, stamp));
    }

    fn conclude(self, event: impl FnOnce(&mut Vec<u8>, &Stamp)) {
        let Stream { tx, mut batch, mut lines, .. } = self;
        let stamp = Stamp::now();
        lines.finish(|line| put(&mut batch, line, &stamp));
        event(&mut batch, &stamp);
        // A client that reads slowly must not hold up the next run; the task lives no longer than its connection.
        if let Err(mpsc::error::TrySendError::Full(last)) = tx.try_send(Ok(batch.into())) {
            tokio::spawn(async move { drop(tx.send(last).await) });
        }
    }
}

/// Sessions have no blank lines.
fn put(batch: &mut Vec<u8>, line: &[u8], stamp: &Stamp) {
    if !line.is_empty() {
        events::line(batch, "stdout", line, stamp);
    }
}

/// What a run is told to have come to when it was made to end.
pub(super) fn killed() -> End {
    End { code: -1, error: "signal: killed".into() }
}

fn lost() -> End {
    End { code: -1, error: "lost track of the process".into() }
}

fn end_of(status: Option<&[u8]>) -> End {
    let code = status.and_then(|status| std::str::from_utf8(status).ok()?.parse::<u8>().ok());
    match code {
        Some(0) => End { code: 0, error: String::new() },
        Some(code) => End { code: code.into(), error: format!("exit status {code}") },
        None => lost(),
    }
}
