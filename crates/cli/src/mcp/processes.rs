//! The tools that run commands.
//!
//! Invariant: a command whose call is taken back is interrupted, also when the call is taken back before the command's id is
//! known. Bound: `max_output_bytes` for each stream, and what `report` holds.

use std::time::Duration;

use serde_json::{Map, Value, json};
use tokio::time::timeout;

use super::{
    arguments::{CommandLogs, CommandOnly, CommandRun},
    call::Call,
    excerpt::{Excerpt, without_cut_end},
    failure::Failure,
    report::Reporter,
    results::{Done, Execution, ExecutionStatus, LogPiece},
};
use crate::{
    agent::{Agent, EventReader},
    events::Event,
};

/// How long the agent may take to say that it has begun.
const STARTING: Duration = Duration::from_secs(60);
/// How long a command may take to say its id when all we want is to interrupt it.
const NAMING: Duration = Duration::from_secs(5);
const SMALLEST_OUTPUT: u32 = 1 << 10;
const LARGEST_OUTPUT: u32 = 1 << 20;

fn size(asked: u32) -> usize {
    asked.clamp(SMALLEST_OUTPUT, LARGEST_OUTPUT) as usize
}

pub async fn run(call: Call, arguments: CommandRun) -> Result<Execution, Failure> {
    let body = request(&arguments)?;
    let agent = call.agent(arguments.sandbox_id.as_str()).await?;
    let limit = size(arguments.max_output_bytes);
    // Not given up when the call is: the command may have been started, and can be interrupted once it is known.
    let Ok(started) = timeout(STARTING, agent.run(&body)).await else {
        return Err(Failure::new(
            "NO_ANSWER",
            "the sandbox's agent did not say in time that it started the command; it may be running",
        ));
    };
    let mut following = Following {
        agent: &agent,
        events: started?,
        id: None,
        stdout: Excerpt::new(limit),
        stderr: Excerpt::new(limit),
        reporter: call.reporter(),
    };
    let ending = tokio::select! {
        ending = following.until_ended() => ending?,
        () = call.cancelled() => {
            following.interrupt().await;
            return Err(Failure::cancelled());
        }
    };
    following.reporter.flush().await;
    let (exit_code, error) = match ending {
        Ending::Completed if arguments.background => (None, None),
        Ending::Completed => (Some(0), None),
        Ending::Failed { code, reason } => (code, reason),
    };
    Ok(Execution {
        id: following.id,
        exit_code,
        error,
        background: arguments.background,
        stdout: following.stdout.finish(),
        stderr: following.stderr.finish(),
    })
}

/// The agent's command request.
fn request(arguments: &CommandRun) -> Result<Value, Failure> {
    if arguments.command.trim().is_empty() {
        return Err(Failure::arguments("the command is empty"));
    }
    let mut body = Map::new();
    body.insert("command".into(), json!(arguments.command));
    if arguments.background {
        body.insert("background".into(), json!(true));
    }
    if let Some(directory) = &arguments.working_directory {
        body.insert("cwd".into(), json!(directory));
    }
    if let Some(env) = &arguments.env {
        body.insert("envs".into(), json!(env));
    }
    if let Some(seconds) = arguments.timeout_seconds {
        let limit = Duration::try_from_secs_f64(seconds).ok().filter(|limit| !limit.is_zero());
        let Some(limit) = limit else {
            return Err(Failure::arguments("timeout_seconds must be more than 0"));
        };
        // The agent counts milliseconds and takes 0 for no limit.
        body.insert("timeout".into(), json!(u64::try_from(limit.as_millis()).unwrap_or(u64::MAX).max(1)));
    }
    Ok(Value::Object(body))
}

/// How a command ended.
#[derive(Debug, PartialEq, Eq)]
enum Ending {
    Completed,
    Failed { code: Option<i64>, reason: Option<String> },
}

impl Ending {
    /// The agent gives a number, `-1` for a signal, or a reason why there was nothing to end.
    fn of(value: &str, traceback: &[String]) -> Self {
        match value.trim().parse::<i64>() {
            Ok(code) => Self::Failed {
                code: Some(code),
                reason: traceback.iter().find(|line| line.starts_with("signal: ")).cloned(),
            },
            Err(_) => Self::Failed { code: None, reason: Some(value.to_owned()) },
        }
    }
}

struct Following<'a> {
    agent: &'a Agent,
    events: EventReader,
    id: Option<String>,
    stdout: Excerpt,
    stderr: Excerpt,
    reporter: Reporter,
}

impl Following<'_> {
    async fn until_ended(&mut self) -> Result<Ending, Failure> {
        loop {
            let event = tokio::select! {
                event = self.events.next() => event?,
                () = self.reporter.due() => {
                    self.reporter.flush().await;
                    continue;
                }
            };
            match event {
                Some(Event::Started(id)) => self.id = Some(id),
                Some(Event::Stdout(bytes)) => {
                    self.stdout.push(&bytes);
                    self.reporter.output(&bytes).await;
                }
                Some(Event::Stderr(bytes)) => {
                    self.stderr.push(&bytes);
                    self.reporter.output(&bytes).await;
                }
                Some(Event::Completed) => return Ok(Ending::Completed),
                Some(Event::Failed(failure)) => return Ok(Ending::of(&failure.value, &failure.traceback)),
                Some(Event::Refused { code, message }) => return Err(Failure::new(&code, message)),
                None => return Err(self.cut()),
            }
        }
    }

    async fn interrupt(&mut self) {
        if self.id.is_none() {
            // Whatever this brings, what counts is whether there is an id now.
            let _ = timeout(NAMING, self.first_word()).await;
        }
        if let Some(id) = &self.id {
            // The command may have ended, or the sandbox; there is nobody left to tell.
            let _ = self.agent.interrupt(id).await;
        }
    }

    async fn first_word(&mut self) {
        while self.id.is_none() {
            match self.events.next().await {
                Ok(Some(Event::Started(id))) => self.id = Some(id),
                Ok(Some(Event::Stdout(_) | Event::Stderr(_))) => {}
                _ => break,
            }
        }
    }

    fn cut(&self) -> Failure {
        let which = self.id.as_ref().map(|id| format!(" {id}")).unwrap_or_default();
        Failure::new(
            "STREAM_CUT",
            format!("the connection ended before command{which} did; it may still be running"),
        )
    }
}

pub async fn status(call: Call, arguments: CommandOnly) -> Result<ExecutionStatus, Failure> {
    let agent = call.agent(arguments.sandbox_id.as_str()).await?;
    let id = arguments.execution_id.as_str();
    Ok(ExecutionStatus::of(id, &agent.command_status(id).await?))
}

pub async fn logs(call: Call, arguments: CommandLogs) -> Result<LogPiece, Failure> {
    let agent = call.agent(arguments.sandbox_id.as_str()).await?;
    let (limit, id) = (size(arguments.max_bytes), arguments.execution_id.as_str());
    let mut output = agent.command_output_stream(id, arguments.cursor).await?;
    let mut bytes = Vec::new();
    while bytes.len() <= limit
        && let Some(piece) = output.next().await?
    {
        bytes.extend_from_slice(&piece);
    }
    Ok(piece_of(&bytes, arguments.cursor, limit))
}

/// At most `limit` of the bytes that follow the cursor, without half a character at the end while more may come.
fn piece_of(bytes: &[u8], cursor: u64, limit: usize) -> LogPiece {
    let truncated = bytes.len() > limit;
    let shown = without_cut_end(&bytes[..bytes.len().min(limit)]);
    LogPiece {
        output: String::from_utf8_lossy(shown).into_owned(),
        cursor: cursor + shown.len() as u64,
        truncated,
    }
}

pub async fn interrupt(call: Call, arguments: CommandOnly) -> Result<Done, Failure> {
    let agent = call.agent(arguments.sandbox_id.as_str()).await?;
    agent.interrupt(arguments.execution_id.as_str()).await?;
    Ok(Done { status: "interrupted" })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn body(arguments: Value) -> Result<Value, Failure> {
        request(&serde_json::from_value(arguments).unwrap())
    }

    #[test]
    fn only_what_was_asked_for_is_sent() {
        let sent = body(json!({ "sandbox_id": "a", "command": "ls | wc" })).unwrap();
        assert_eq!(sent, json!({ "command": "ls | wc" }));
        let sent = body(json!({
            "sandbox_id": "a", "command": "ls", "background": true, "working_directory": "/w",
            "env": { "A": "b" }, "timeout_seconds": 1.5,
        }));
        let expected = json!({
            "command": "ls", "background": true, "cwd": "/w", "envs": { "A": "b" }, "timeout": 1500
        });
        assert_eq!(sent.unwrap(), expected);
    }

    #[test]
    fn empty_commands_and_impossible_limits_are_refused_and_tiny_ones_are_limits() {
        assert!(body(json!({ "sandbox_id": "a", "command": " \n" })).is_err());
        for wrong in [0.0, -1.0, 1e300] {
            assert!(body(json!({ "sandbox_id": "a", "command": "ls", "timeout_seconds": wrong })).is_err());
        }
        let sent = body(json!({ "sandbox_id": "a", "command": "ls", "timeout_seconds": 0.0001 })).unwrap();
        assert_eq!(sent["timeout"], 1);
    }

    #[test]
    fn endings_tell_codes_signals_and_reasons_apart() {
        let failed = |code, reason: Option<&str>| Ending::Failed { code, reason: reason.map(str::to_owned) };
        assert_eq!(Ending::of("7", &["exit status 7".into()]), failed(Some(7), None));
        assert_eq!(Ending::of("-1", &["signal: killed".into()]), failed(Some(-1), Some("signal: killed")));
        assert_eq!(Ending::of("no such file", &[]), failed(None, Some("no such file")));
    }

    #[test]
    fn logs_go_on_where_a_whole_character_ends() {
        let text = "ab\u{20ac}cd".as_bytes();
        let first = piece_of(text, 100, 4);
        assert_eq!((first.output.as_str(), first.cursor, first.truncated), ("ab", 102, true));
        let rest = piece_of(&text[2..], first.cursor, 64);
        assert_eq!((rest.output.as_str(), rest.cursor, rest.truncated), ("\u{20ac}cd", 107, false));
    }
}
