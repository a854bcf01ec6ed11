//! Following an image build: its log line by line, and its steps with their times.

use std::time::Duration;

use anyhow::Result;
use reqwest::Method;
use serde_json::Value;
use tokio::time::timeout;

use super::{journal::line, progress::took};
use crate::{
    client::Client,
    interrupts::{Interrupt, Interrupts},
    lines::LineSplitter,
    sse::{EventStream, Frame},
};

/// How long the last lines of a log may take once its build has ended.
const LAST_LINES: Duration = Duration::from_secs(2);

/// A build as the server describes it.
#[derive(Debug, Clone)]
pub struct ImageBuild(pub Value);

impl ImageBuild {
    fn text(&self, pointer: &str) -> &str {
        self.0.pointer(pointer).and_then(Value::as_str).unwrap_or_default()
    }

    pub fn id(&self) -> &str {
        self.text("/id")
    }

    pub fn state(&self) -> &str {
        self.text("/status/state")
    }

    pub fn image_id(&self) -> &str {
        self.text("/imageId")
    }

    pub fn is_over(&self) -> bool {
        !matches!(self.state(), "Queued" | "Running" | "Finalizing")
    }

    pub fn succeeded(&self) -> bool {
        self.state() == "Succeeded"
    }

    /// Another cell of a table; `-` for what is not there.
    pub fn cell(&self, pointer: &str) -> String {
        match self.text(pointer) {
            "" => "-".to_owned(),
            text => text.to_owned(),
        }
    }

    /// A line for each step that ran.
    pub fn steps(&self) -> Vec<String> {
        let steps = self.0.get("steps").and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
        steps.iter().filter_map(step).collect()
    }

    /// Why it has no image: the reason, where, and with what exit code.
    pub fn why(&self) -> String {
        let mut text = match (self.text("/failure/message"), self.text("/status/message")) {
            ("", "") => format!("the build is {}", self.state()),
            ("", message) => message.to_owned(),
            (message, _) => message.to_owned(),
        };
        let mut facts = Vec::new();
        for (name, pointer) in [("", "/status/reason"), ("step ", "/failure/step")] {
            let value = self.text(pointer);
            if !value.is_empty() {
                facts.push(format!("{name}{value}"));
            }
        }
        if let Some(code) = self.0.pointer("/failure/exitCode").and_then(Value::as_i64) {
            facts.push(format!("exit code {code}"));
        }
        if !facts.is_empty() {
            text = format!("{text} ({})", facts.join(", "));
        }
        text
    }
}

fn step(step: &Value) -> Option<String> {
    let text = |name: &str| step.get(name).and_then(Value::as_str);
    let at = |name: &str| text(name)?.parse::<jiff::Timestamp>().ok();
    let (begun, ended) = (at("startedAt")?, at("finishedAt")?);
    let time = took(Duration::try_from(ended.duration_since(begun)).unwrap_or_default());
    let state = text("state").unwrap_or_default();
    let told = if state == "Succeeded" { time } else { format!("{time} {}", state.to_lowercase()) };
    Some(line(text("name").unwrap_or_default(), &told))
}

/// One read of a build.
pub async fn get(client: &Client, id: &str) -> Result<ImageBuild> {
    Ok(ImageBuild(client.call(Method::GET, &["image-builds", id], None).await?))
}

/// The log of a build, as it grows.
#[derive(Debug)]
pub struct BuildLog {
    stream: EventStream,
    /// The end of a line that has not ended yet, and the step that prints it.
    pending: LineSplitter,
    step: String,
}

impl BuildLog {
    /// From its beginning.
    pub fn follow(client: &Client, id: &str) -> Self {
        let query = vec![("follow", "true".to_owned())];
        let stream = EventStream::open(client, &["image-builds", id, "logs"], query);
        Self { stream, pending: LineSplitter::default(), step: String::new() }
    }

    /// The next lines; `None` at the end of the log. Safe to cancel.
    pub async fn next(&mut self) -> Result<Option<Vec<String>>> {
        while let Some(frame) = self.stream.next().await? {
            if frame.event == "end" {
                self.stream.end();
                let rest = self.finish();
                return Ok(Some(rest.into_iter().collect()));
            }
            let lines = self.take(&frame)?;
            if !lines.is_empty() {
                return Ok(Some(lines));
            }
        }
        Ok(None)
    }

    /// Says that there is something to be read now.
    pub fn hurry(&self) {
        self.stream.hurry();
    }

    fn take(&mut self, frame: &Frame) -> Result<Vec<String>> {
        let data: Value = serde_json::from_str(&frame.data).unwrap_or_default();
        let text = |name: &str| data.get(name).and_then(Value::as_str).unwrap_or_default();
        if frame.event == "elided" {
            let mut lines: Vec<String> = self.finish().into_iter().collect();
            lines.push("… (the log is longer than what is kept of it)".to_owned());
            return Ok(lines);
        }
        if frame.event != "output" {
            return Ok(Vec::new());
        }
        let mut lines = Vec::new();
        if self.step != text("step") {
            lines.extend(self.finish());
            text("step").clone_into(&mut self.step);
        }
        self.pending.push(text("text").as_bytes())?;
        while let Some(line) = self.pending.next_line() {
            lines.push(in_step(&self.step, line));
        }
        Ok(lines)
    }

    fn finish(&mut self) -> Option<String> {
        let rest = self.pending.finish();
        let line = (!rest.is_empty()).then(|| in_step(&self.step, rest));
        self.pending = LineSplitter::default();
        line
    }
}

fn in_step(step: &str, line: &[u8]) -> String {
    format!("  {step:>8} │ {}", readable(&String::from_utf8_lossy(line)))
}

/// A line without colours, and of what a program wrote over and over again the last.
pub(super) fn readable(line: &str) -> String {
    let mut text = String::with_capacity(line.len());
    let mut rest = line.trim_end_matches('\r').rsplit('\r').next().unwrap_or_default().chars().peekable();
    while let Some(c) = rest.next() {
        if c != '\u{1b}' {
            text.push(c);
            continue;
        }
        if rest.next_if_eq(&'[').is_some() {
            // Parameters, up to the letter that ends the sequence.
            while rest.next().is_some_and(|c| !('\u{40}'..='\u{7e}').contains(&c)) {}
        }
    }
    text
}

/// Shows the log of a build until it ends; returns the build, or what interrupted.
///
/// # Errors
/// When the server cannot be asked, or what `show` says.
pub async fn follow(
    client: &Client,
    id: &str,
    mut show: impl FnMut(&[String]) -> Result<()>,
    interrupts: &mut Interrupts,
) -> Result<Result<ImageBuild, Interrupt>> {
    let mut log = BuildLog::follow(client, id);
    let ended = ended(client, id);
    tokio::pin!(ended);
    let mut whole = false;
    let build = loop {
        tokio::select! {
            lines = log.next(), if !whole => match lines? {
                Some(lines) => show(&lines)?,
                None => whole = true,
            },
            build = &mut ended => break build?,
            interrupt = interrupts.next() => return Ok(Err(interrupt)),
        }
    };
    // One that never began has none.
    log.hurry();
    while let Ok(Some(lines)) = timeout(LAST_LINES, log.next()).await.unwrap_or(Ok(None)) {
        show(&lines)?;
    }
    Ok(Ok(build))
}

/// Waits for the end of a build.
async fn ended(client: &Client, id: &str) -> Result<ImageBuild> {
    let mut pause = Duration::from_millis(20);
    loop {
        let build = get(client, id).await?;
        if build.is_over() {
            return Ok(build);
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(Duration::from_secs(1));
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[tokio::test]
    async fn log_lines_carry_their_step_and_no_colours() {
        let client =
            Client::new(crate::profile::Profile::known("http://127.0.0.1:1", None).unwrap()).unwrap();
        let mut log = BuildLog::follow(&client, "b");
        let frame =
            |event: &str, data: Value| Frame { event: event.into(), data: data.to_string(), id: None };
        let mut of = |event: &str, data: Value| log.take(&frame(event, data)).unwrap();
        assert_eq!(of("output", json!({ "step": "clone", "text": "one\ntw" })), ["     clone │ one"]);
        let next = of("output", json!({ "step": "setup", "text": "\u{1b}[32mgreen\u{1b}[0m\n10%\r20%\n" }));
        assert_eq!(next, ["     clone │ tw", "     setup │ green", "     setup │ 20%"]);
        assert_eq!(of("elided", json!({ "from": 1, "to": 2 })).len(), 1);
        assert_eq!(of("news", json!({})), Vec::<String>::new());
    }

    #[test]
    fn a_failed_build_says_where_and_why() {
        let build = ImageBuild(json!({
            "id": "b", "status": { "state": "Failed", "reason": "setup_failed", "message": "the setup failed" },
            "failure": { "reason": "setup_failed", "step": "setup", "exitCode": 3, "message": "the setup failed", "outputTail": "a\nb\n" },
            "steps": [
                { "name": "clone", "state": "Succeeded", "startedAt": "2030-01-01T00:00:00Z", "finishedAt": "2030-01-01T00:00:01.500Z" },
                { "name": "setup", "state": "Failed", "startedAt": "2030-01-01T00:00:02Z", "finishedAt": "2030-01-01T00:00:12Z" },
                { "name": "export", "state": "Pending" },
            ],
        }));
        assert_eq!(build.why(), "the setup failed (setup_failed, step setup, exit code 3)");
        assert_eq!(build.steps(), ["  clone       1.50s", "  setup       10.0s failed"]);
        assert!(build.is_over() && !build.succeeded());
    }
}
