//! Following what the entrypoint of a sandbox prints.
//!
//! The log route answers the last lines as text, each `<instant> [stdout|stderr] <text>`; following asks again and
//! again for what is new. Lines already seen are recognised by their instant, so nothing depends on clocks agreeing.

use std::time::Duration;

use anyhow::Result;
use tokio::time::{Instant, sleep};

use crate::{
    client::{Client, ClientError},
    interrupts::{Interrupt, Interrupts},
    output::note,
    sink::{Channel, Piece, Sink, Stopped},
};

/// The most lines the route answers at once.
pub const MOST_LINES: u32 = 10_000;
const SHORTEST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// Which lines to show.
#[derive(Debug, Clone, Copy)]
pub struct Selection {
    pub tail: u32,
    pub since: Option<Duration>,
    pub timestamps: bool,
}

/// One answer of the log route.
pub async fn fetch(client: &Client, id: &str, tail: u32, since: Option<Duration>) -> Result<String> {
    let mut query = vec![("tail", tail.to_string())];
    if let Some(since) = since {
        query.push(("since", format!("{}s", since.as_secs().max(1))));
    }
    client.text(&["sandboxes", id, "diagnostics", "logs"], &query).await
}

/// Remembers which lines were shown.
#[derive(Debug, Default)]
pub struct Progress {
    last: String,
    at_last: usize,
    streams: Option<bool>,
}

impl Progress {
    /// The lines of an answer that were not shown before; the flag tells that some in between are lost.
    pub fn news(&mut self, text: &str, timestamps: bool) -> (Vec<Piece>, bool) {
        let mut pieces = Vec::new();
        let (mut at_last, mut fresh, mut lines) = (0, 0, 0);
        let before = self.last.clone();
        for line in text.split_terminator('\n') {
            lines += 1;
            let Some((instant, rest)) = stamped(line) else {
                // Continuation of a message, or a remark such as `(no logs)`.
                if !line.starts_with("(no ") {
                    pieces.push((Channel::Stdout, format!("{line}\n").into_bytes()));
                }
                continue;
            };
            if instant < before.as_str() {
                continue;
            }
            if instant == before {
                at_last += 1;
                if at_last <= self.at_last {
                    continue;
                }
            }
            fresh += 1;
            pieces.push(self.piece(line, instant, rest, timestamps));
        }
        let lost = !before.is_empty() && fresh == lines && lines >= MOST_LINES as usize;
        (pieces, lost)
    }

    fn piece(&mut self, line: &str, instant: &str, rest: &str, timestamps: bool) -> Piece {
        if instant == self.last {
            self.at_last += 1;
        } else {
            self.last = instant.to_owned();
            self.at_last = 1;
        }
        let (word, text) = rest.split_once(' ').unwrap_or((rest, ""));
        let streams = *self.streams.get_or_insert(matches!(word, "stdout" | "stderr"));
        let channel = if streams && word == "stderr" { Channel::Stderr } else { Channel::Stdout };
        let shown = match (timestamps, streams) {
            (true, _) => line,
            (false, true) => text,
            (false, false) => rest,
        };
        (channel, format!("{shown}\n").into_bytes())
    }
}

fn stamped(line: &str) -> Option<(&str, &str)> {
    let (instant, rest) = line.split_once(' ').unwrap_or((line, ""));
    instant.parse::<jiff::Timestamp>().ok().map(|_| (instant, rest))
}

/// How following ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// The entrypoint has ended, with this exit code.
    Over(u8),
    /// The sandbox was removed.
    Gone,
    /// The user or the system wants us to stop.
    Interrupted(Interrupt),
    /// Nobody reads our output any more.
    Closed,
}

/// Copies log lines to `sink` until the sandbox is over.
pub async fn follow(
    client: &Client,
    id: &str,
    selection: Selection,
    sink: &Sink,
    interrupts: &mut Interrupts,
) -> Result<End> {
    let mut progress = Progress::default();
    let (mut tail, mut since) = (selection.tail, selection.since);
    let mut pause = SHORTEST_PAUSE;
    loop {
        let asked = Instant::now();
        let step = async {
            // The state is read before the lines: once it is final, the lines read after it are complete.
            let sandbox = client.get(id).await?;
            let text = fetch(client, id, tail, since).await?;
            Ok::<_, anyhow::Error>((sandbox, text))
        };
        let (sandbox, text) = tokio::select! {
            answer = step => match answer {
                Err(error) if is_gone(&error) => return Ok(End::Gone),
                other => other?,
            },
            interrupt = interrupts.next() => return Ok(End::Interrupted(interrupt)),
        };
        let (pieces, lost) = progress.news(&text, selection.timestamps);
        if lost {
            note("warning: the sandbox prints faster than its log can be followed; some lines are missing");
        }
        pause = if pieces.is_empty() { (pause * 2).min(LONGEST_PAUSE) } else { SHORTEST_PAUSE };
        for piece in pieces {
            tokio::select! {
                room = sink.room() => match room {
                    Ok(permit) => permit.send(piece),
                    Err(Stopped) => return Ok(End::Closed),
                },
                interrupt = interrupts.next() => return Ok(End::Interrupted(interrupt)),
            }
        }
        if sandbox.is_over() {
            return Ok(End::Over(sandbox.exit_code()));
        }
        tokio::select! {
            () = sleep(pause) => {}
            interrupt = interrupts.next() => return Ok(End::Interrupted(interrupt)),
        }
        tail = MOST_LINES;
        since = Some(asked.elapsed() + Duration::from_secs(3));
    }
}

/// Whether the server knows nothing by that name.
pub fn is_gone(error: &anyhow::Error) -> bool {
    matches!(error.downcast_ref::<ClientError>(), Some(ClientError::Refused(e)) if e.status.as_u16() == 404)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(progress: &mut Progress, text: &str) -> Vec<(Channel, String)> {
        let (pieces, _) = progress.news(text, false);
        pieces.into_iter().map(|(channel, bytes)| (channel, String::from_utf8(bytes).unwrap())).collect()
    }

    #[test]
    fn lines_are_shown_once_even_when_instants_repeat() {
        let mut progress = Progress::default();
        let (a, b) = ("2030-01-01T00:00:00.000000001Z", "2030-01-01T00:00:00.000000002Z");
        let first = shown(&mut progress, &format!("{a} stdout one\n{a} stderr two\n"));
        assert_eq!(first, [(Channel::Stdout, "one\n".into()), (Channel::Stderr, "two\n".into())]);
        let text = format!("{a} stdout one\n{a} stderr two\n{a} stdout three\n{b} stdout \n");
        let second = shown(&mut progress, &text);
        assert_eq!(second, [(Channel::Stdout, "three\n".into()), (Channel::Stdout, "\n".into())]);
        assert_eq!(shown(&mut progress, &text), []);
    }

    #[test]
    fn logs_without_stream_names_go_to_stdout_whole() {
        let mut progress = Progress::default();
        let text = "2030-01-01T00:00:00Z hello there\n2030-01-01T00:00:01Z stderr is a word\n";
        let expected =
            [(Channel::Stdout, "hello there\n".into()), (Channel::Stdout, "stderr is a word\n".into())];
        assert_eq!(shown(&mut progress, text), expected);
        assert_eq!(shown(&mut Progress::default(), "(no logs)"), []);
    }

    #[test]
    fn timestamps_can_be_kept() {
        let line = "2030-01-01T00:00:00Z stdout x\n";
        let (pieces, lost) = Progress::default().news(line, true);
        assert_eq!((pieces, lost), (vec![(Channel::Stdout, line.as_bytes().to_vec())], false));
    }
}
