//! Following one command in a sandbox to its end: output, interruption, exit code.
//!
//! Used by `run` and `exec`. Invariant: a stream that ends without a terminal event is an error, never a success.

use std::time::Duration;

use anyhow::{Result, bail};
use serde_json::{Map, Value, json};

use crate::{
    agent::{Agent, EventReader},
    events::{Event, Failure},
    interrupts::{Interrupt, Interrupts},
    output::{CLOSED_PIPE, note},
    sink::{Channel, Piece, Sink, Stopped},
};

/// Exit code when we failed, as opposed to the command.
pub const OUR_FAILURE: u8 = 125;
const CANNOT_RUN: u8 = 126;
const NOT_FOUND: u8 = 127;
/// How long we wait for the agent to confirm an interrupt when we are about to leave anyway.
const PARTING: Duration = Duration::from_secs(5);

/// What to run.
#[derive(Debug, Clone, Default)]
pub struct Command {
    pub argv: Vec<String>,
    pub env: Vec<(String, String)>,
    pub workdir: Option<String>,
    pub identity: Option<(u32, Option<u32>)>,
    pub timeout: Option<Duration>,
    pub background: bool,
}

impl Command {
    /// The request the agent understands.
    pub fn request(&self) -> Value {
        let mut body = Map::new();
        body.insert("argv".into(), json!(self.argv));
        if let Some(directory) = &self.workdir {
            body.insert("cwd".into(), json!(directory));
        }
        if !self.env.is_empty() {
            let env: Map<String, Value> = self.env.iter().map(|(k, v)| (k.clone(), json!(v))).collect();
            body.insert("envs".into(), Value::Object(env));
        }
        if let Some((uid, gid)) = self.identity {
            body.insert("uid".into(), json!(uid));
            if let Some(gid) = gid {
                body.insert("gid".into(), json!(gid));
            }
        }
        if let Some(timeout) = self.timeout {
            body.insert("timeout".into(), json!(u64::try_from(timeout.as_millis()).unwrap_or(u64::MAX)));
        }
        if self.background {
            body.insert("background".into(), json!(true));
        }
        Value::Object(body)
    }
}

/// How following ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ending {
    /// The command ended with this code.
    Exited(u8),
    /// We left before the command's end was known; the code to exit with.
    Left(u8),
}

impl Ending {
    /// The code to exit with.
    pub fn code(self) -> u8 {
        match self {
            Self::Exited(code) | Self::Left(code) => code,
        }
    }
}

/// Runs a command and copies its output until it ends.
pub async fn follow(agent: &Agent, command: &Command, interrupts: &mut Interrupts) -> Result<Ending> {
    let request = command.request();
    let events = tokio::select! {
        events = agent.run(&request) => events?,
        // Nothing has been heard of the command yet, so there is nothing to interrupt it by.
        interrupt = interrupts.next() => return Ok(Ending::Left(interrupt.exit_code())),
    };
    let sink = Sink::start();
    let mut following = Following { agent, events, sink: &sink, id: None, asked: false };
    let ending = following.run(interrupts).await;
    let finished = tokio::select! {
        finished = sink.finish() => finished,
        interrupt = interrupts.next() => return Ok(Ending::Left(interrupt.exit_code())),
    };
    match finished {
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => Ok(Ending::Left(CLOSED_PIPE)),
        Err(error) => bail!("cannot write the command's output: {error}"),
        Ok(()) => ending,
    }
}

struct Following<'a> {
    agent: &'a Agent,
    events: EventReader,
    sink: &'a Sink,
    id: Option<String>,
    asked: bool,
}

impl Following<'_> {
    async fn run(&mut self, interrupts: &mut Interrupts) -> Result<Ending> {
        let mut waiting: Option<Piece> = None;
        let (mut interrupting, sink) = (None, self.sink);
        loop {
            tokio::select! {
                biased;
                interrupt = interrupts.next() => {
                    if self.asked || interrupt == Interrupt::Quit || self.id.is_none() {
                        if !self.asked {
                            self.interrupt_and_leave().await;
                        }
                        return Ok(Ending::Left(interrupt.exit_code()));
                    }
                    self.asked = true;
                    note("interrupting the command; press Ctrl-C again to leave at once");
                    let (agent, id) = (self.agent.clone(), self.id.clone().unwrap_or_default());
                    interrupting = Some(Box::pin(async move { agent.interrupt(&id).await }));
                }
                result = async { interrupting.as_mut().expect("guarded").await }, if interrupting.is_some() => {
                    interrupting = None;
                    if let Err(error) = result {
                        note(&format!("the command could not be interrupted: {error}"));
                    }
                }
                room = sink.room(), if waiting.is_some() => match (room, waiting.take()) {
                    (Ok(permit), Some(piece)) => permit.send(piece),
                    (Err(Stopped), _) => {
                        self.interrupt_and_leave().await;
                        return Ok(Ending::Left(CLOSED_PIPE));
                    }
                    (Ok(_), None) => {}
                },
                event = self.events.next(), if waiting.is_none() => match event? {
                    Some(Event::Started(id)) => self.id = Some(id),
                    Some(Event::Stdout(bytes)) => waiting = Some((Channel::Stdout, bytes)),
                    Some(Event::Stderr(bytes)) => waiting = Some((Channel::Stderr, bytes)),
                    Some(Event::Completed) => return Ok(Ending::Exited(0)),
                    Some(Event::Failed(failure)) => return Ok(Ending::Exited(verdict(&failure))),
                    Some(Event::Refused { code, message }) => bail!("the agent gave up: {message} ({code})"),
                    None => bail!("{}", self.cut()),
                },
            }
        }
    }

    async fn interrupt_and_leave(&mut self) {
        if let Some(id) = self.id.take() {
            // The sandbox may be gone already; we are leaving either way.
            let _ = tokio::time::timeout(PARTING, self.agent.interrupt(&id)).await;
        }
    }

    fn cut(&self) -> String {
        let which = self.id.as_ref().map(|id| format!(" (command {id})")).unwrap_or_default();
        format!(
            "the connection ended before the command{which} did; its output is incomplete and it may still be running"
        )
    }
}

/// Exit code for a command that did not end with 0; says on standard error why when there is no code to tell it.
fn verdict(failure: &Failure) -> u8 {
    match failure.value.trim().parse::<i64>() {
        Ok(code @ 0..=255) => u8::try_from(code).unwrap_or(OUR_FAILURE),
        Ok(_) => signalled(&failure.traceback).unwrap_or(OUR_FAILURE),
        Err(_) => {
            note(&format!("error: cannot run the command: {}", failure.value));
            refused_start(&failure.value)
        }
    }
}

fn signalled(traceback: &[String]) -> Option<u8> {
    let text = traceback.iter().find_map(|line| line.split_once("signal: "))?.1;
    let name = text.split(" (").next().unwrap_or(text).trim();
    let number = match name {
        "hangup" => 1,
        "interrupt" => 2,
        "quit" => 3,
        "illegal instruction" => 4,
        "trace/breakpoint trap" => 5,
        "aborted" => 6,
        "bus error" => 7,
        "floating point exception" => 8,
        "killed" => 9,
        "user defined signal 1" => 10,
        "segmentation fault" => 11,
        "user defined signal 2" => 12,
        "broken pipe" => 13,
        "alarm clock" => 14,
        "terminated" => 15,
        other => other.trim_start_matches("signal ").parse::<u8>().ok().filter(|n| *n < 65)?,
    };
    Some(128 + number)
}

/// Exit code for a command that could not be started.
pub fn refused_start(reason: &str) -> u8 {
    let reason = reason.to_ascii_lowercase();
    let about_directory =
        reason.contains("chdir") || reason.contains("cwd") || reason.contains("working directory");
    if !about_directory && (reason.contains("not found") || reason.contains("no such file")) {
        NOT_FOUND
    } else {
        CANNOT_RUN
    }
}

/// Resolves `--user`: numbers are taken as they are, names are looked up in the sandbox's own files.
pub async fn identity(agent: &Agent, user: &str) -> Result<(u32, Option<u32>)> {
    let (name, group) = match user.split_once(':') {
        Some((name, group)) => (name, Some(group)),
        None => (user, None),
    };
    let (uid, own_group) = match name.parse() {
        Ok(uid) => (uid, None),
        Err(_) => {
            let entry = lookup(&database(agent, "/etc/passwd").await?, name);
            let Some(fields) = entry else { bail!("the sandbox has no user `{name}`") };
            (numeric(&fields, 2)?, Some(numeric(&fields, 3)?))
        }
    };
    let gid = match group {
        None => own_group,
        Some(group) => match group.parse() {
            Ok(gid) => Some(gid),
            Err(_) => match lookup(&database(agent, "/etc/group").await?, group) {
                Some(fields) => Some(numeric(&fields, 2)?),
                None => bail!("the sandbox has no group `{group}`"),
            },
        },
    };
    Ok((uid, gid))
}

async fn database(agent: &Agent, path: &str) -> Result<String> {
    let mut download = agent.download(path).await?;
    let mut bytes = Vec::new();
    while let Some(chunk) = download.next().await? {
        bytes.extend_from_slice(&chunk);
        if bytes.len() > 16 << 20 {
            bail!("{path} in the sandbox is too large");
        }
    }
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

fn lookup(text: &str, name: &str) -> Option<Vec<String>> {
    text.lines()
        .map(|line| line.split(':').map(str::to_owned).collect::<Vec<_>>())
        .find(|fields| fields[0] == name)
}

fn numeric(fields: &[String], index: usize) -> Result<u32> {
    match fields.get(index).and_then(|field| field.parse().ok()) {
        Some(number) => Ok(number),
        None => bail!("the sandbox's entry for `{}` is damaged", fields[0]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failure(value: &str, traceback: &str) -> Failure {
        Failure { value: value.into(), traceback: vec![traceback.into()] }
    }

    #[test]
    fn exit_codes_follow_the_shell() {
        assert_eq!(verdict(&failure("7", "exit status 7")), 7);
        assert_eq!(verdict(&failure("-1", "signal: killed")), 137);
        assert_eq!(verdict(&failure("-1", "signal: segmentation fault (core dumped)")), 139);
        assert_eq!(verdict(&failure("-1", "signal: signal 34")), 162);
        assert_eq!(verdict(&failure("-1", "who knows")), 125);
    }

    #[test]
    fn start_failures_are_told_apart() {
        assert_eq!(refused_start("exec: \"nope\": executable file not found in $PATH"), 127);
        assert_eq!(refused_start("fork/exec /bin/x: no such file or directory"), 127);
        assert_eq!(refused_start("fork/exec /etc/passwd: permission denied"), 126);
        assert_eq!(refused_start("chdir /gone: no such file or directory"), 126);
    }

    #[test]
    fn only_what_was_asked_for_is_sent() {
        let command = Command { argv: vec!["ls".into()], ..Command::default() };
        assert_eq!(command.request(), json!({ "argv": ["ls"] }));
        let command = Command {
            argv: vec!["ls".into()],
            env: vec![("A".into(), "b".into())],
            workdir: Some("/x".into()),
            identity: Some((1, Some(2))),
            timeout: Some(Duration::from_secs(2)),
            background: true,
        };
        let expected = json!({ "argv": ["ls"], "envs": { "A": "b" }, "cwd": "/x", "uid": 1, "gid": 2,
                               "timeout": 2000, "background": true });
        assert_eq!(command.request(), expected);
    }

    #[test]
    fn databases_are_matched_by_whole_name() {
        let passwd = "root:x:0:0::/root:/bin/sh\nrootless:x:10:11::/:\n";
        assert_eq!(numeric(&lookup(passwd, "rootless").unwrap(), 3).unwrap(), 11);
        assert!(lookup(passwd, "roo").is_none());
    }
}
