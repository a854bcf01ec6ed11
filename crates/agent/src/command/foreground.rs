//! One foreground run: two pipes in, an event stream out.
//!
//! Back-pressure: nothing is read while a chunk waits for the client; what all streams hold together is bounded in
//! `output`. A client that went away is not waited for, the process runs on and its output is read and dropped.
//! Invariant: exactly one terminal event, after everything the process itself wrote.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::net::unix::pipe;
use tokio::sync::oneshot;
use tokio::time::{Instant as Clock, MissedTickBehavior, interval_at, sleep};

use super::output::{Held, Output, Share};
use super::pipes::{self, Read};
use super::registry::End;
use crate::events::{self, Stamp};
use crate::http::body::ChunkSender;
use crate::lines::LineSplitter;
use crate::telemetry::{Outcome, Telemetry};

const PING_EVERY: Duration = Duration::from_secs(3);
/// How long a quiet pipe that a left-behind child holds open is waited for after the process ended.
const IDLE_GRACE: Duration = Duration::from_millis(100);
/// And how long a busy one.
const BUSY_GRACE: Duration = Duration::from_secs(1);
/// Chunks are sent from this size on; one read can add a little over 2 MiB of events to it at worst.
const BATCH: usize = 128 << 10;

pub(super) struct Run {
    pub out: pipe::Receiver,
    pub err: pipe::Receiver,
    pub tx: ChunkSender,
    /// Events to send before any output.
    pub head: Vec<u8>,
    pub done: oneshot::Receiver<End>,
    pub started: Instant,
    pub telemetry: Telemetry,
    pub output: Arc<Output>,
}

struct Side {
    kind: &'static str,
    pipe: Option<pipe::Receiver>,
    lines: LineSplitter,
    /// Bytes the process wrote before it ended that have not been read yet. Only meaningful after its end.
    owed: usize,
    held: Held,
}

impl Side {
    fn new(kind: &'static str, pipe: pipe::Receiver, output: &Arc<Output>) -> Self {
        let (lines, held) = (LineSplitter::default(), Held::new(output));
        Side { kind, pipe: Some(pipe), lines, owed: 0, held }
    }

    async fn readable(&self) {
        match &self.pipe {
            // An error shows again on the read, which treats it as the end.
            Some(pipe) => drop(pipe.readable().await),
            None => std::future::pending().await,
        }
    }

    /// Turns what is there into events, up to a batch.
    fn read_into(&mut self, batch: &mut Vec<u8>, share: Share) {
        let stamp = Stamp::now();
        self.lines.hold_at_most(share.line);
        let most = BATCH.min(share.read * 2);
        while batch.len() < most {
            let Some(pipe) = &self.pipe else { break };
            let (lines, kind) = (&mut self.lines, self.kind);
            let sink = |bytes: &[u8]| lines.push(bytes, |l| events::line(batch, kind, l, &stamp));
            match pipes::try_read_some(pipe, share.read, sink) {
                Read::Some(count) => self.owed = self.owed.saturating_sub(count),
                Read::Nothing => break,
                Read::End => {
                    self.pipe = None;
                    self.owed = 0;
                }
            }
        }
        self.held.set(self.lines.held());
    }

    /// Takes what is there and keeps nothing of it.
    fn forget(&mut self) {
        let Some(pipe) = &self.pipe else { return };
        if matches!(pipes::try_read(pipe, |_| ()), Read::End) {
            self.pipe = None;
        }
        self.lines = LineSplitter::default();
        self.held.set(0);
    }

    fn finish_into(&mut self, batch: &mut Vec<u8>) {
        let stamp = Stamp::now();
        self.lines.finish(|l| events::line(batch, self.kind, l, &stamp));
    }

    fn note_owed(&mut self) {
        self.owed = self.pipe.as_ref().map_or(0, pipes::waiting);
    }
}

/// Runs until the stream has ended, then keeps the pipes empty for whoever still writes to them.
pub(super) async fn stream(run: Run) {
    let mut out = Side::new("stdout", run.out, &run.output);
    let mut err = Side::new("stderr", run.err, &run.output);
    let mut client = Client { tx: Some(run.tx), output: run.output };
    client.send(run.head).await;
    let end = pump(&mut out, &mut err, &mut client, run.done).await;
    let outcome = if end.code == 0 { Outcome::Success } else { Outcome::Failure };
    run.telemetry.execution("run_command", outcome, run.started.elapsed());
    drain(&mut out, &mut err, &mut client).await;
    if client.is_there() {
        let mut last = Vec::new();
        out.finish_into(&mut last);
        err.finish_into(&mut last);
        let stamp = Stamp::now();
        if end.code == 0 {
            let millis = u64::try_from(run.started.elapsed().as_millis()).unwrap_or(u64::MAX);
            events::complete(&mut last, millis, &stamp);
        } else {
            events::error(&mut last, &end.code.to_string(), &end.error, &stamp);
        }
        client.send(last).await;
    }
    drop(client);
    for pipe in [out.pipe, err.pipe].into_iter().flatten() {
        tokio::spawn(pipes::discard(pipe));
    }
}

/// Moves output until the process has ended.
async fn pump(out: &mut Side, err: &mut Side, client: &mut Client, mut done: oneshot::Receiver<End>) -> End {
    let mut pings = interval_at(Clock::now() + PING_EVERY, PING_EVERY);
    pings.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            ended = &mut done => {
                return ended.unwrap_or(End { code: -1, error: "lost track of the process".into() });
            }
            () = out.readable() => relay(out, err, client).await,
            () = err.readable() => relay(out, err, client).await,
            _ = pings.tick(), if client.is_there() => {
                let mut ping = Vec::with_capacity(64);
                events::ping(&mut ping, &Stamp::now());
                client.send(ping).await;
            }
        }
    }
}

/// After the end: everything already written, then a bounded wait for children left behind with the pipes.
async fn drain(out: &mut Side, err: &mut Side, client: &mut Client) {
    out.note_owed();
    err.note_owed();
    let mut busy_until = None;
    while client.is_there() && (out.pipe.is_some() || err.pipe.is_some()) {
        let owed = out.owed + err.owed > 0;
        if !owed {
            let limit = *busy_until.get_or_insert_with(|| Clock::now() + BUSY_GRACE);
            if Clock::now() >= limit {
                return;
            }
        }
        tokio::select! {
            () = out.readable() => {}
            () = err.readable() => {}
            () = sleep(IDLE_GRACE) => return,
        }
        relay(out, err, client).await;
    }
}

async fn relay(out: &mut Side, err: &mut Side, client: &mut Client) {
    if !client.is_there() {
        out.forget();
        err.forget();
        // There is always more of what some programs write, and nobody whose reading would make this wait.
        return tokio::task::yield_now().await;
    }
    let mut batch = Vec::new();
    out.read_into(&mut batch, client.output.share());
    err.read_into(&mut batch, client.output.share());
    client.send(batch).await;
}

/// The reader of the stream, for as long as there is one.
struct Client {
    tx: Option<ChunkSender>,
    output: Arc<Output>,
}

impl Client {
    fn is_there(&self) -> bool {
        self.tx.as_ref().is_some_and(|tx| !tx.is_closed())
    }

    async fn send(&mut self, chunk: Vec<u8>) {
        if chunk.is_empty() {
            return;
        }
        let Some(tx) = &self.tx else { return };
        if tx.send(Ok(self.output.chunk(chunk))).await.is_err() {
            self.tx = None;
        }
    }
}
