//! Running code in a session: a foreground run as an event stream, a background run with a log to come back to.
//!
//! Back-pressure: nothing is read while a chunk waits for the client, so a slow reader slows its run. A client that
//! went away ends its run.
//! Bounds: one run of a session at a time, [`MAX_BACKGROUND`] background runs remembered, each log a ring.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::{HeaderValue, StatusCode};
use jiff::Timestamp;
use serde_json::{Value, json};
use tokio::net::unix::pipe;

use super::request::{RunRequest, refused};
use super::session::{Ended, Events, Session};
use super::wire::How;
use crate::command::log::{self, Log};
use crate::command::pipes::{self, Read};
use crate::events::{self, Stamp};
use crate::http::body::{Body, ChunkSender};
use crate::http::query::Query;
use crate::http::reply::{self, Code, Failure, Outcome};
use crate::http::router::Agent;
use crate::lines::LineSplitter;

const CURSOR_HEADER: &str = "execd-isolated-tail-cursor";
/// Waiting, running and ended together; the oldest ended ones go first.
const MAX_BACKGROUND: usize = 64;
/// More of a log than this takes another request.
const MAX_READ: u64 = 16 << 20;
/// Chunks are sent from this size on.
const BATCH: usize = 128 << 10;

/// `POST …/run`.
pub(super) fn run(agent: &Arc<Agent>, session: &Arc<Session>, request: RunRequest) -> Outcome {
    if request.background {
        return background(agent, session, &request);
    }
    let (tx, body) = Body::channel(1, None);
    tokio::spawn(foreground(Arc::clone(session), request, tx));
    Ok(reply::event_stream(body))
}

fn id() -> String {
    uuid::Uuid::new_v4().to_string()
}

async fn foreground(session: Arc<Session>, request: RunRequest, tx: ChunkSender) {
    let _busy = session.busy();
    let permit = tokio::select! {
        permit = Arc::clone(&session.turn).acquire_owned() => permit,
        () = tx.closed() => return,
    };
    let (id, started) = (id(), Instant::now());
    let how = if request.envs.is_empty() { How::Shell } else { How::Copy };
    let begun = match permit {
        Ok(_) => session.begin(&id, how, &request.script()).await.map_err(|error| reply::plain(&error)),
        Err(_) => Err("session terminated".to_owned()),
    };
    let mut events = match begun {
        Ok(events) => events,
        Err(reason) => return send_end(&tx, Err(reason), started).await,
    };
    let late = Arc::new(AtomicBool::new(false));
    let alarm = request.timeout.map(|limit| {
        let (session, id, late) = (Arc::clone(&session), id.clone(), Arc::clone(&late));
        tokio::spawn(async move {
            tokio::time::sleep(limit).await;
            late.store(true, Ordering::Relaxed);
            session.stop(&id).await;
        })
    });
    let (end, rest) = pump(&session, &id, &mut events, &tx).await;
    if let Some(alarm) = alarm {
        alarm.abort();
    }
    drop(permit);
    let outcome = if late.load(Ordering::Relaxed) {
        Err("context deadline exceeded".to_owned())
    } else {
        end.reason.map_or(Ok(end.code), Err)
    };
    send_end(&tx, outcome, started).await;
    drop(tx);
    // Whoever was left behind with the output must not die of writing to it.
    if let Some(rest) = rest {
        pipes::discard(rest).await;
    }
}

/// Moves output until the run has ended; gives back the pipe when somebody else still has it.
async fn pump(
    session: &Session,
    id: &str,
    events: &mut Events,
    tx: &ChunkSender,
) -> (Ended, Option<pipe::Receiver>) {
    let output = (&mut events.output).await.ok().and_then(|fd| pipe::Receiver::from_owned_fd(fd).ok());
    let Some(output) = output else { return (Events::end(&mut events.ended).await, None) };
    let mut lines = LineSplitter::default();
    let mut open = true;
    let end = loop {
        tokio::select! {
            biased;
            () = tx.closed() => {
                session.stop(id).await;
                let end = tokio::select! {
                    end = Events::end(&mut events.ended) => end,
                    () = swallow(&output) => Events::end(&mut events.ended).await,
                };
                return (end, Some(output));
            }
            read = output.readable(), if open => {
                open = read.is_ok() && relay(&output, &mut lines, tx).await.is_some();
            }
            end = Events::end(&mut events.ended) => break end,
        }
    };
    // What the run wrote before it ended; not what jobs that it left behind go on to write.
    let mut owed = pipes::waiting(&output);
    while open && owed > 0 && output.readable().await.is_ok() {
        let count = relay(&output, &mut lines, tx).await;
        open = count.is_some();
        owed = owed.saturating_sub(count.unwrap_or(0));
    }
    let (mut last, stamp) = (Vec::new(), Stamp::now());
    lines.finish(|line| events::line(&mut last, "stdout", line, &stamp));
    if !last.is_empty() {
        let _ = tx.send(Ok(last.into())).await;
    }
    (end, open.then_some(output))
}

/// Reads what is there, up to a batch, and sends it on; says how much it was. `None` at the end of the output.
async fn relay(output: &pipe::Receiver, lines: &mut LineSplitter, tx: &ChunkSender) -> Option<usize> {
    let (mut batch, stamp, mut total) = (Vec::new(), Stamp::now(), Some(0));
    while batch.len() < BATCH && total.is_some_and(|sum| sum < BATCH) {
        let read = pipes::try_read(output, |bytes| {
            lines.push(bytes, |line| {
                // Blank lines are not events here.
                if !line.is_empty() {
                    events::line(&mut batch, "stdout", line, &stamp);
                }
            });
        });
        match read {
            Read::Some(count) => total = total.map(|sum| sum + count),
            Read::Nothing => break,
            Read::End => {
                total = None;
                break;
            }
        }
    }
    if batch.is_empty() {
        // Blank lines fill no batch: a pipe that is never empty would keep the thread.
        tokio::task::yield_now().await;
    } else {
        // A reader that is gone is noticed where the next step is chosen.
        let _ = tx.send(Ok(Bytes::from(batch))).await;
    }
    total
}

/// Keeps the pipe empty while the run is being stopped.
async fn swallow(output: &pipe::Receiver) {
    while output.readable().await.is_ok() {
        if matches!(pipes::try_read(output, |_| ()), Read::End) {
            return;
        }
        tokio::task::yield_now().await;
    }
}

async fn send_end(tx: &ChunkSender, outcome: Result<i32, String>, started: Instant) {
    let (mut last, stamp) = (Vec::with_capacity(256), Stamp::now());
    match outcome {
        Ok(0) => {
            let millis = u64::try_from(started.elapsed().as_millis()).unwrap_or(u64::MAX);
            events::complete(&mut last, millis, &stamp);
        }
        Ok(code) => {
            let text = format!("exit status {code}");
            events::named_error(&mut last, "ExitError", &code.to_string(), &text, &stamp);
        }
        Err(reason) => events::named_error(&mut last, "RuntimeError", &reason, &reason, &stamp),
    }
    let _ = tx.send(Ok(last.into())).await;
}

/// A background run, for as long as the session remembers it.
pub(super) struct Background {
    started_at: Timestamp,
    log: Arc<Log>,
    end: Mutex<Option<(Ended, Timestamp)>>,
}

impl Background {
    fn end(&self) -> Option<(Ended, Timestamp)> {
        self.end.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn ended(&self, end: Ended) {
        *self.end.lock().unwrap_or_else(PoisonError::into_inner) = Some((end, Timestamp::now()));
    }
}

fn background(agent: &Arc<Agent>, session: &Arc<Session>, request: &RunRequest) -> Outcome {
    if session.is_gone() {
        return Err(Failure::runtime("session terminated"));
    }
    let tmp = agent.env.get("TMPDIR").map_or("/tmp", String::as_str);
    let log = Log::create(tmp.as_ref())
        .map_err(|e| Failure::runtime(format!("no place for the output: {}", reply::plain(&e))))?;
    let run =
        Arc::new(Background { started_at: Timestamp::now(), log: Arc::new(log), end: Mutex::default() });
    let id = id();
    remember(session, &id, &run)?;
    tokio::spawn(follow(Arc::clone(session), id.clone(), Arc::clone(&run), request.script()));
    let shape = json!({ "session_id": session.id, "run_id": id, "started_at": run.started_at.to_string() });
    Ok(reply::json_reply(StatusCode::ACCEPTED, &shape))
}

fn remember(session: &Session, id: &str, run: &Arc<Background>) -> Result<(), Failure> {
    let mut known = session.background.lock().unwrap_or_else(PoisonError::into_inner);
    if known.len() >= MAX_BACKGROUND {
        let oldest = known.iter().filter_map(|(id, run)| Some((run.end()?.1, id.clone()))).min();
        let Some((_, oldest)) = oldest else {
            let message = format!("{MAX_BACKGROUND} background runs have not ended yet");
            return Err(Failure::new(StatusCode::SERVICE_UNAVAILABLE, Code::ServiceUnavailable, message));
        };
        known.remove(&oldest);
    }
    known.insert(id.to_owned(), Arc::clone(run));
    Ok(())
}

/// From the wait for the shell to the end of the run.
async fn follow(session: Arc<Session>, id: String, run: Arc<Background>, script: String) {
    let _busy = session.busy();
    let terminated = || Ended { code: -1, reason: Some("session terminated".into()) };
    let Ok(permit) = Arc::clone(&session.turn).acquire_owned().await else { return run.ended(terminated()) };
    let Ok(mut events) = session.begin(&id, How::Background, &script).await else {
        return run.ended(terminated());
    };
    drop(script);
    if let Ok(output) = (&mut events.output).await
        && let Ok(output) = pipe::Receiver::from_owned_fd(output)
    {
        tokio::spawn(log::fill(Arc::clone(&run.log), output));
    }
    // The shell is free again as soon as it has sent the run away, or when that failed.
    let end = tokio::select! {
        end = Events::end(&mut events.ended) => Some(end),
        _ = &mut events.away => None,
    };
    drop(permit);
    let end = match end {
        Some(end) => end,
        None => Events::end(&mut events.ended).await,
    };
    run.ended(end);
}

fn find(session: &Session, id: &str) -> Result<Arc<Background>, Failure> {
    let known = session.background.lock().unwrap_or_else(PoisonError::into_inner);
    known.get(id).map(Arc::clone).ok_or_else(|| {
        Failure::new(StatusCode::NOT_FOUND, Code::SessionNotFound, format!("run not found: {id}"))
    })
}

/// `GET …/runs/{run}`.
pub(super) fn status(session: &Session, id: &str) -> Outcome {
    let run = find(session, id)?;
    let end = run.end();
    let mut shape = json!({
        "session_id": session.id,
        "run_id": id,
        "running": end.is_none(),
        "started_at": run.started_at.to_string(),
    });
    if let (Value::Object(map), Some((end, at))) = (&mut shape, end) {
        match end.reason {
            Some(reason) => map.insert("error".into(), reason.into()),
            None => map.insert("exit_code".into(), end.code.into()),
        };
        map.insert("finished_at".into(), at.to_string().into());
    }
    Ok(reply::json(&shape))
}

/// `GET …/runs/{run}/logs?cursor=`.
pub(super) fn logs(session: &Session, id: &str, query: &Query) -> Outcome {
    let run = find(session, id)?;
    let cursor = match query.get("cursor").filter(|c| !c.is_empty()) {
        None => 0,
        Some(text) => text
            .parse::<u64>()
            .map_err(|_| refused(format!("cursor must be a non-negative integer, not {text:?}")))?,
    };
    run.log.catch_up();
    let (from, end) = run.log.range(cursor);
    let end = end.min(from.saturating_add(MAX_READ)).max(from);
    let body = if from < end { Log::body(Arc::clone(&run.log), from, end) } else { Body::Empty };
    let mut reply = reply::with_type(StatusCode::OK, reply::TEXT, body);
    reply.headers_mut().insert(CURSOR_HEADER, HeaderValue::from(end));
    Ok(reply)
}

/// How long is left before a session goes for being idle, in whole seconds.
pub(super) fn seconds(left: Duration) -> u64 {
    left.as_secs() + u64::from(left.subsec_nanos() > 0)
}
