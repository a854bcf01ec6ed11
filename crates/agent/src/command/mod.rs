//! `/command`: running programs for clients, in the foreground as an event stream or in the background.

mod foreground;
mod launch;
pub(crate) mod log;
mod output;
pub(crate) mod pipes;
mod registry;
mod request;

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use http::HeaderValue;
use hyper::body::Incoming;
use serde_json::{Value, json};
use tokio::sync::oneshot;

use crate::events::{self, Stamp};
use crate::http::body::Body;
use crate::http::query::{Query, read_json};
use crate::http::reply::{self, Code, Failure, Outcome};
use crate::http::router::Agent;
use crate::init::reap::Exit;
use crate::init::signal_group;
use launch::StartError;
use log::Log;
pub use output::Output;
use registry::Command;
pub use registry::Commands;
pub(crate) use registry::End;
use request::CommandRequest;
pub(crate) use request::envs as envs_of;

const CURSOR_HEADER: &str = "execd-commands-tail-cursor";
const INTERRUPT_GRACE: Duration = Duration::from_secs(3);

/// `POST /command`.
pub async fn run(agent: &Arc<Agent>, body: Incoming) -> Outcome {
    run_value(agent, read_json(body).await?).await
}

/// The same for a body that somebody else has read.
pub async fn run_value(agent: &Arc<Agent>, body: Value) -> Outcome {
    let request = Arc::new(CommandRequest::parse(body)?);
    let prepared = launch::prepare(agent, &request).await?;
    if request.background {
        let agent = Arc::clone(agent);
        // A task of its own: a client that leaves now must not leave a process that nobody knows of.
        let started = tokio::spawn(async move { background(&agent, &request, prepared).await });
        started.await.unwrap_or_else(|error| Err(Failure::runtime(error.to_string())))
    } else {
        foreground(agent, &request, prepared)
    }
}

fn foreground(agent: &Arc<Agent>, request: &CommandRequest, prepared: launch::Prepared) -> Outcome {
    let started = Instant::now();
    let (out, out_write) = pipes::pipe().map_err(no_pipe)?;
    let (err, err_write) = pipes::pipe().map_err(no_pipe)?;
    let command = Command::new(&request.content, None);
    agent.commands.add(&command);
    let (tx, body) = Body::channel(1, None);
    let (agent, timeout) = (Arc::clone(agent), request.timeout);
    // What the process does does not depend on whether somebody reads about it.
    tokio::spawn(async move {
        let mut head = Vec::with_capacity(256);
        let stamp = Stamp::now();
        events::init(&mut head, &command.id, &stamp);
        events::ping(&mut head, &stamp);
        match start(&agent, prepared, out_write, err_write).await {
            Ok((pid, exit)) => {
                command.set_running(pid);
                let done = registry::watch(&command, exit, timeout);
                let (output, telemetry) = (Arc::clone(&agent.output), agent.telemetry.clone());
                let run = foreground::Run { out, err, tx, head, done, started, telemetry, output };
                foreground::stream(run).await;
            }
            Err(error) => {
                let message = error.to_string();
                command.set_ended(End { code: 255, error: message.clone() });
                events::error(&mut head, &message, &message, &stamp);
                // Nobody to tell when the client has left.
                let _ = tx.send(Ok(head.into())).await;
            }
        }
    });
    Ok(reply::event_stream(body))
}

async fn background(agent: &Agent, request: &CommandRequest, prepared: launch::Prepared) -> Outcome {
    let started = Instant::now();
    let (out, write) = pipes::pipe().map_err(no_pipe)?;
    let write_too = write.try_clone().map_err(no_pipe)?;
    let tmp = agent.env.get("TMPDIR").map_or("/tmp", String::as_str);
    let log = Log::create(tmp.as_ref()).map_err(|e| {
        Failure::runtime(format!("error running commands: no place for the output: {}", reply::plain(&e)))
    })?;
    let log = Arc::new(log);
    let command = Command::new(&request.content, Some(Arc::clone(&log)));
    agent.commands.add(&command);
    match start(agent, prepared, write, write_too).await {
        Ok((pid, exit)) => {
            command.set_running(pid);
            drop(registry::watch(&command, exit, request.timeout));
            tokio::spawn(log::fill(log, out));
        }
        Err(error) => command.set_ended(End { code: 255, error: error.to_string() }),
    }
    let (mut events, stamp) = (Vec::with_capacity(256), Stamp::now());
    events::init(&mut events, &command.id, &stamp);
    let millis = u64::try_from(started.elapsed().as_millis()).unwrap_or(0);
    events::complete(&mut events, millis, &stamp);
    Ok(reply::event_stream(Body::Full(events.into())))
}

async fn start(
    agent: &Agent,
    prepared: launch::Prepared,
    stdout: OwnedFd,
    stderr: OwnedFd,
) -> Result<(i32, oneshot::Receiver<Exit>), StartError> {
    Ok(agent.reaper.spawn_aside(prepared.program(stdout, stderr)?).await?)
}

fn no_pipe(error: std::io::Error) -> Failure {
    Failure::runtime(format!("error running commands: {}", reply::plain(&error)))
}

/// `DELETE /command?id=`: asks the group to end, then makes it.
pub async fn interrupt(agent: &Agent, query: &Query) -> Outcome {
    let id = query.required("id")?;
    let Some(command) = agent.commands.get(id) else {
        if agent.sessions.destroy(id).await {
            return Ok(reply::empty());
        }
        return Err(Failure::runtime("error interrupting code context. no such session"));
    };
    let Some(group) = command.running_pid() else {
        return Err(Failure::runtime(format!("command session {id} is not running")));
    };
    signal_group(group, libc::SIGTERM);
    let deadline = Instant::now() + INTERRUPT_GRACE;
    let mut step = Duration::from_millis(1);
    while signal_group(group, 0) {
        if Instant::now() >= deadline {
            signal_group(group, libc::SIGKILL);
            tokio::time::sleep(Duration::from_millis(20)).await;
            break;
        }
        tokio::time::sleep(step).await;
        step = (step * 2).min(Duration::from_millis(50));
    }
    Ok(reply::empty())
}

/// `GET /command/status/{id}`.
pub fn status(agent: &Agent, id: &str) -> Outcome {
    let Some(command) = agent.commands.get(id) else {
        return Err(Failure::new(
            http::StatusCode::NOT_FOUND,
            Code::InvalidRequestBody,
            format!("command not found: {id}"),
        ));
    };
    let state = command.state();
    let mut shape = json!({ "id": command.id, "running": state.is_running() });
    if let Value::Object(map) = &mut shape {
        if !command.content.is_empty() {
            map.insert("content".into(), command.content.as_str().into());
        }
        map.insert("started_at".into(), command.started_at.to_string().into());
        if let Some((end, at)) = state.ended() {
            map.insert("exit_code".into(), end.code.into());
            if !end.error.is_empty() {
                map.insert("error".into(), end.error.into());
            }
            map.insert("finished_at".into(), at.to_string().into());
        }
    }
    Ok(reply::json(&shape))
}

/// `GET /command/{id}/logs?cursor=`.
pub fn logs(agent: &Agent, id: &str, query: &Query) -> Outcome {
    let log = agent.commands.get(id).and_then(|command| command.log.clone());
    let Some(log) = log else {
        return Err(Failure::invalid(format!("no background command with id {id}")));
    };
    let cursor = query.get("cursor").and_then(|c| c.parse::<u64>().ok()).unwrap_or(0);
    log.catch_up();
    let (from, end) = log.range(cursor);
    let body = if from < end { Log::body(log, from, end) } else { Body::Empty };
    let mut reply = reply::with_type(http::StatusCode::OK, reply::TEXT, body);
    reply.headers_mut().insert(CURSOR_HEADER, HeaderValue::from(end.max(cursor)));
    Ok(reply)
}
