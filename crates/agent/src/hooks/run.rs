//! One run of a hook, from its start to its end or its timeout.

use std::fmt;
use std::time::Duration;

use tokio::net::unix::pipe;
use tokio::sync::oneshot;
use tokio::time::{Instant, sleep_until};

use crate::command::pipes::{self, Read};
use crate::envs;
use crate::http::router::Agent;
use crate::init::reap::Exit;
use crate::init::signal_group;
use crate::init::spawn::Launch;

/// What is kept of the output.
pub const MAX_TAIL: usize = 2048;

/// Why a run is no success. One line, with the end of the output quoted.
#[derive(Debug, PartialEq, Eq)]
pub struct Failed {
    pub reason: String,
    pub tail: String,
}

impl fmt::Display for Failed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.reason)?;
        if self.tail.is_empty() {
            return Ok(());
        }
        write!(f, "; its output ended with \"{}\"", self.tail.escape_debug())
    }
}

impl Failed {
    fn before(reason: impl ToString) -> Self {
        Failed { reason: reason.to_string(), tail: String::new() }
    }
}

/// Runs `command` as user processes run, without a shell and with nothing to read. Returns the end of its output.
pub async fn run(agent: &Agent, command: &[String], limit: Duration) -> Result<String, Failed> {
    let (mut out, write) = pipes::pipe().map_err(Failed::before)?;
    let (group, exit) = start(agent, command, write)?;
    let mut tail = Tail::default();
    let ended = follow(&mut out, &mut tail, exit, Instant::now() + limit, group).await;
    // What it wrote before it ended; what it left running may write for ever.
    let mut owed = pipes::waiting(&out);
    while owed > 0
        && let Read::Some(count) = pipes::try_read(&out, |bytes| tail.push(bytes))
    {
        owed = owed.saturating_sub(count);
    }
    // What it left running must not die of writing.
    tokio::spawn(pipes::discard(out));
    let reason = match ended {
        Some(Exit::Code(0)) => return Ok(tail.text()),
        Some(Exit::Code(code)) => format!("exit status {code}"),
        Some(Exit::Signal { number, .. }) => format!("ended by signal {number}"),
        None => format!("was killed because it took longer than {} s", limit.as_secs()),
    };
    Err(Failed { reason, tail: tail.text() })
}

fn start(
    agent: &Agent,
    command: &[String],
    write: std::os::fd::OwnedFd,
) -> Result<(i32, oneshot::Receiver<Exit>), Failed> {
    let env = envs::for_shells(&agent.env, &agent.env_file);
    let launch = Launch {
        argv: command,
        env: &env,
        cwd: Some(&agent.cwd),
        identity: Some(&agent.identity),
        stdin: Some(pipes::empty_input().map_err(Failed::before)?),
        stdout: Some(write.try_clone().map_err(Failed::before)?),
        stderr: Some(write),
    };
    agent.reaper.spawn(launch).map_err(Failed::before)
}

/// Reads until the process has ended; `None` when it had to be killed.
async fn follow(
    out: &mut pipe::Receiver,
    tail: &mut Tail,
    mut exit: oneshot::Receiver<Exit>,
    deadline: Instant,
    group: i32,
) -> Option<Exit> {
    let mut open = true;
    let mut killed = false;
    loop {
        tokio::select! {
            exited = &mut exit => {
                return exited.ok().filter(|_| !killed);
            }
            _ = out.readable(), if open => {
                open = !matches!(pipes::try_read(out, |bytes| tail.push(bytes)), Read::End);
                // A pipe that is never empty would keep the thread.
                tokio::task::yield_now().await;
            }
            () = sleep_until(deadline), if !killed => {
                killed = true;
                signal_group(group, libc::SIGKILL);
            }
        }
    }
}

/// The last bytes of an output.
#[derive(Default)]
struct Tail(Vec<u8>);

impl Tail {
    fn push(&mut self, bytes: &[u8]) {
        let bytes = &bytes[bytes.len().saturating_sub(MAX_TAIL)..];
        let excess = (self.0.len() + bytes.len()).saturating_sub(MAX_TAIL);
        self.0.drain(..excess);
        self.0.extend_from_slice(bytes);
    }

    /// Whole characters, without the white space around.
    fn text(&self) -> String {
        let first = self.0.iter().position(|byte| byte & 0xc0 != 0x80).unwrap_or(0);
        String::from_utf8_lossy(&self.0[first..]).trim().to_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_end_of_the_output_is_kept() {
        let mut tail = Tail::default();
        tail.push(&[b'a'; 3 * MAX_TAIL]);
        for _ in 0..MAX_TAIL {
            tail.push("é".as_bytes());
        }
        tail.push(b"!\n");
        let text = tail.text();
        assert!(tail.0.len() == MAX_TAIL && text.ends_with("éé!") && text.starts_with('é'), "{text}");
    }

    #[test]
    fn a_failure_is_one_line() {
        let failed = Failed { reason: "exit status 3".into(), tail: "a\n\"b\"\t\u{1b}[0m".into() };
        let text = failed.to_string();
        assert_eq!(text, r#"exit status 3; its output ended with "a\n\"b\"\t\u{1b}[0m""#);
        assert_eq!(Failed { tail: String::new(), ..failed }.to_string(), "exit status 3");
    }
}
