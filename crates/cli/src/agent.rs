//! The client of the agent inside one sandbox: commands and files.
//!
//! Requests go through the server, so they work from wherever the API works, and carry the headers of the endpoint
//! answer. Invariant: a call either reports what the agent said or fails; nothing is assumed about a cut answer.

use std::{collections::HashMap, time::Duration};

use anyhow::{Context, Result, bail, ensure};
use reqwest::{
    Method, RequestBuilder, Response, StatusCode,
    header::HeaderMap,
    multipart::{Form, Part},
};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::{
    client::{ApiError, Client, ClientError, Route, accepted, transport},
    events::{Event, EventParser},
};

/// Port on which the agent listens in every sandbox.
const AGENT_PORT: u16 = 44772;
/// How long a new sandbox may take until its agent answers.
const READY_WITHIN: Duration = Duration::from_secs(30);
const PATIENCE: Duration = Duration::from_secs(60);
/// Output is passed on in pieces of about this size when it arrives faster than lines are handled.
const GATHERED: usize = 64 << 10;
/// Longest JSON answer that is read.
const LARGEST_ANSWER: usize = 16 << 20;

/// A file as the agent describes it.
#[derive(Debug, Clone, Deserialize)]
pub struct Entry {
    pub path: String,
    #[serde(rename = "type")]
    pub kind: String,
    /// Permission bits as decimal digits: 644 means 0644.
    #[serde(default)]
    pub mode: u32,
}

impl Entry {
    /// Permission bits.
    pub fn permissions(&self) -> u32 {
        u32::from_str_radix(&self.mode.to_string(), 8).unwrap_or(0o644)
    }
}

/// Permission bits the way the agent spells them.
pub fn spelled(permissions: u32) -> u32 {
    format!("{:o}", permissions & 0o777).parse().unwrap_or(644)
}

/// Where an uploaded file goes.
#[derive(Debug, Clone)]
pub struct Target {
    pub path: String,
    /// Permission bits; 0 leaves the choice to the agent.
    pub permissions: u32,
}

/// Whose a written file is, and who may do what with it; what is absent is left to the agent.
#[derive(Debug, Clone, Default)]
pub struct Ownership {
    /// Permission bits as decimal digits: 644 means 0644.
    pub mode: Option<u32>,
    pub owner: Option<String>,
    pub group: Option<String>,
}

/// Talks to the agent of one sandbox.
#[derive(Debug, Clone)]
pub struct Agent {
    http: reqwest::Client,
    base: String,
    headers: HeaderMap,
}

impl Agent {
    /// Looks the agent's address up.
    pub async fn connect(client: &Client, id: &str) -> Result<Self> {
        let endpoint = client.endpoint(id, AGENT_PORT, Route::ThroughServer).await?;
        let headers = client.endpoint_headers(&endpoint)?;
        let base = format!("{}://{}", client.profile().scheme(), endpoint.address.trim_end_matches('/'));
        Ok(Self { http: client.http().clone(), base, headers })
    }

    /// Like [`Agent::connect`], and waits until the agent answers.
    pub async fn connect_new(client: &Client, id: &str) -> Result<Self> {
        let started = tokio::time::Instant::now();
        loop {
            let attempt = async {
                let agent = Self::connect(client, id).await?;
                agent.ping().await?;
                Ok::<_, anyhow::Error>(agent)
            };
            match attempt.await {
                Ok(agent) => return Ok(agent),
                Err(error) if started.elapsed() < READY_WITHIN && may_become_ready(&error) => {
                    tokio::time::sleep(Duration::from_millis(50)).await;
                }
                Err(error) => return Err(error.context("the sandbox's agent does not answer")),
            }
        }
    }

    /// Starts a request to the agent.
    pub fn request(&self, method: Method, path: &str) -> RequestBuilder {
        self.http.request(method, format!("{}{path}", self.base)).headers(self.headers.clone())
    }

    /// Sends a request and turns error answers into errors.
    pub async fn send(&self, request: RequestBuilder) -> Result<Response> {
        let response = request.send().await.map_err(|error| self.broken(&error))?;
        Ok(accepted(response).await.map_err(ClientError::Refused)?)
    }

    /// Sends a request whose answer is JSON of a size that fits into memory.
    pub async fn json(&self, request: RequestBuilder) -> Result<Value> {
        let mut response = self.send(request.timeout(PATIENCE)).await?;
        let mut bytes = Vec::new();
        while let Some(piece) = response.chunk().await.map_err(|error| self.broken(&error))? {
            ensure!(
                bytes.len() + piece.len() <= LARGEST_ANSWER,
                "the sandbox's answer is too long; ask for less"
            );
            bytes.extend_from_slice(&piece);
        }
        serde_json::from_slice(&bytes).context("the sandbox's agent answered something that is not JSON")
    }

    /// Why an answer of the agent broke off.
    pub fn broken(&self, error: &reqwest::Error) -> anyhow::Error {
        match transport("the sandbox", error) {
            ClientError::Unreachable { reason, .. } => {
                anyhow::anyhow!("cannot reach the sandbox's agent: {reason}")
            }
            other => other.into(),
        }
    }

    /// Asks whether the agent answers.
    pub async fn ping(&self) -> Result<()> {
        self.send(self.request(Method::GET, "/ping").timeout(PATIENCE)).await?;
        Ok(())
    }

    /// Use of processors and memory.
    pub async fn metrics(&self) -> Result<Value> {
        self.json(self.request(Method::GET, "/metrics")).await
    }

    /// Starts a command and returns its event stream.
    pub async fn run(&self, command: &Value) -> Result<EventReader> {
        let request = self
            .request(Method::POST, "/command")
            .header("accept", "text/event-stream")
            .header("cache-control", "no-cache")
            .json(command);
        let response = self.send(request).await?;
        Ok(EventReader { response, parser: EventParser::default(), held: None, ended: false })
    }

    /// Runs a short command to its end; its standard output, or `None` when it failed.
    pub async fn output_of(&self, argv: &[&str]) -> Result<Option<String>> {
        let mut events = self.run(&json!({ "argv": argv, "timeout": 30_000 })).await?;
        let mut text = Vec::new();
        loop {
            match events.next().await? {
                Some(Event::Stdout(line)) => text.extend(line),
                Some(Event::Completed) => return Ok(Some(String::from_utf8_lossy(&text).into_owned())),
                Some(Event::Failed(_) | Event::Refused { .. }) => return Ok(None),
                Some(Event::Started(_) | Event::Stderr(_)) => {}
                None => bail!("the connection ended in the middle of a command"),
            }
        }
    }

    /// Asks the agent to end a command: SIGTERM, and SIGKILL after three seconds.
    pub async fn interrupt(&self, command: &str) -> Result<()> {
        let request = self.request(Method::DELETE, "/command").query(&[("id", command)]);
        self.send(request.timeout(Duration::from_secs(10))).await?;
        Ok(())
    }

    /// Output of a detached command from byte `cursor`, and the cursor to go on from.
    pub async fn command_output(&self, command: &str, cursor: u64) -> Result<(bytes::Bytes, u64)> {
        let path = format!("/command/{}/logs", encoded(command));
        let response = self.send(self.request(Method::GET, &path).query(&[("cursor", cursor)])).await?;
        let next = response
            .headers()
            .get("execd-commands-tail-cursor")
            .and_then(|value| value.to_str().ok()?.parse().ok());
        let body = response.bytes().await.map_err(|error| self.broken(&error))?;
        let length = body.len() as u64;
        Ok((body, next.unwrap_or(cursor + length)))
    }

    /// The same as it arrives, for who wants only the beginning.
    pub async fn command_output_stream(&self, command: &str, cursor: u64) -> Result<Download> {
        let path = format!("/command/{}/logs", encoded(command));
        let response = self.send(self.request(Method::GET, &path).query(&[("cursor", cursor)])).await?;
        Ok(Download { response })
    }

    /// What the agent knows of a command.
    pub async fn command_status(&self, command: &str) -> Result<Value> {
        self.json(self.request(Method::GET, &format!("/command/status/{}", encoded(command)))).await
    }

    /// Exit code of a detached command, `None` while it runs.
    pub async fn command_exit(&self, command: &str) -> Result<Option<i64>> {
        let status = self.command_status(command).await?;
        if status.get("running").and_then(Value::as_bool).unwrap_or(false) {
            return Ok(None);
        }
        Ok(Some(status.get("exit_code").and_then(Value::as_i64).unwrap_or(1)))
    }

    /// Describes a path without following a symbolic link; `None` when there is nothing.
    pub async fn info(&self, path: &str) -> Result<Option<Entry>> {
        let request = self.request(Method::GET, "/files/info").query(&[("path", path)]).timeout(PATIENCE);
        let response = match self.send(request).await {
            Err(error) if refusal(&error).is_some_and(|e| e.status == StatusCode::NOT_FOUND) => {
                return Ok(None);
            }
            other => other?,
        };
        let mut map: HashMap<String, Entry> = response.json().await.map_err(|error| self.broken(&error))?;
        Ok(map.remove(path).or_else(|| map.into_values().next()))
    }

    /// Everything below a directory, parents before children.
    pub async fn tree(&self, path: &str) -> Result<Vec<Entry>> {
        let request =
            self.request(Method::GET, "/directories/list").query(&[("path", path), ("depth", "4096")]);
        let response = self.send(request).await?;
        response.json().await.map_err(|error| self.broken(&error))
    }

    /// Creates a directory and its parents.
    pub async fn make_directory(&self, target: &Target) -> Result<()> {
        let body = json!({ target.path.as_str(): { "mode": spelled(target.permissions) } });
        self.send(self.request(Method::POST, "/directories").json(&body).timeout(PATIENCE)).await?;
        Ok(())
    }

    /// Opens a file for reading.
    pub async fn download(&self, path: &str) -> Result<Download> {
        let response =
            self.send(self.request(Method::GET, "/files/download").query(&[("path", path)])).await?;
        Ok(Download { response })
    }

    /// Writes a file from a stream.
    pub async fn upload(&self, target: &Target, content: Part) -> Result<()> {
        let mut metadata = json!({ "path": target.path });
        if target.permissions != 0 {
            metadata["mode"] = spelled(target.permissions).into();
        }
        self.put(&metadata, content).await
    }

    /// Writes a file with its owner.
    pub async fn write(&self, path: &str, content: Vec<u8>, ownership: &Ownership) -> Result<()> {
        let mut metadata = json!({ "path": path, "owner": ownership.owner, "group": ownership.group });
        if let Some(mode) = ownership.mode {
            metadata["mode"] = mode.into();
        }
        self.put(&metadata, Part::bytes(content)).await
    }

    async fn put(&self, metadata: &Value, content: Part) -> Result<()> {
        let description = Part::text(metadata.to_string())
            .file_name("metadata")
            .mime_str("application/json")
            .context("a constant content type")?;
        let content = content
            .file_name("file")
            .mime_str("application/octet-stream")
            .context("a constant content type")?;
        let form = Form::new().part("metadata", description).part("file", content);
        self.send(self.request(Method::POST, "/files/upload").multipart(form)).await?;
        Ok(())
    }
}

fn may_become_ready(error: &anyhow::Error) -> bool {
    match refusal(error) {
        Some(refused) => {
            refused.code == "KUBERNETES::POD_IP_NOT_AVAILABLE" || matches!(refused.status.as_u16(), 502..=504)
        }
        None => !matches!(error.downcast_ref::<ClientError>(), Some(ClientError::Unreachable { .. })),
    }
}

fn refusal(error: &anyhow::Error) -> Option<&ApiError> {
    match error.downcast_ref::<ClientError>() {
        Some(ClientError::Refused(refused)) => Some(refused),
        _ => None,
    }
}

fn encoded(segment: &str) -> String {
    let mut url = reqwest::Url::parse("http://x/").expect("a constant URL");
    if let Ok(mut path) = url.path_segments_mut() {
        path.clear().push(segment);
    }
    url.path().trim_start_matches('/').to_owned()
}

/// The content of a file, as it arrives.
#[derive(Debug)]
pub struct Download {
    response: Response,
}

impl Download {
    /// The next piece; `None` at the end. A connection that breaks early is an error.
    pub async fn next(&mut self) -> Result<Option<bytes::Bytes>> {
        self.response.chunk().await.map_err(|error| transport("the sandbox", &error).into())
    }
}

/// The event stream of one command.
#[derive(Debug)]
pub struct EventReader {
    response: Response,
    parser: EventParser,
    /// Parsed while output was gathered, and not part of it.
    held: Option<Event>,
    ended: bool,
}

impl EventReader {
    /// The next event; `None` when the stream has ended. Safe to cancel.
    pub async fn next(&mut self) -> Result<Option<Event>> {
        loop {
            if let Some(event) = self.held.take() {
                return Ok(Some(event));
            }
            if let Some(event) = self.parser.next_event()? {
                return Ok(Some(self.gathered(event)?));
            }
            if self.ended {
                return Ok(None);
            }
            match self.response.chunk().await {
                Ok(Some(chunk)) => self.parser.push(&chunk)?,
                Ok(None) => {
                    self.ended = true;
                    return Ok(self.parser.finish());
                }
                // A broken connection and a missing terminal event are the same thing to the caller: a cut stream.
                Err(_) => {
                    self.ended = true;
                    return Ok(None);
                }
            }
        }
    }

    /// Joins lines of one stream that have arrived together: one write for many lines.
    fn gathered(&mut self, event: Event) -> Result<Event> {
        let stdout = matches!(event, Event::Stdout(_));
        let mut bytes = match event {
            Event::Stdout(bytes) | Event::Stderr(bytes) => bytes,
            other => return Ok(other),
        };
        while bytes.len() < GATHERED {
            match self.parser.next_event()? {
                Some(Event::Stdout(more)) if stdout => bytes.extend_from_slice(&more),
                Some(Event::Stderr(more)) if !stdout => bytes.extend_from_slice(&more),
                other => {
                    self.held = other;
                    break;
                }
            }
        }
        Ok(if stdout { Event::Stdout(bytes) } else { Event::Stderr(bytes) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modes_are_spelled_with_decimal_digits() {
        assert_eq!(spelled(0o100_755), 755);
        let entry: Entry = serde_json::from_str(r#"{"path":"/a","type":"file","mode":640}"#).unwrap();
        assert_eq!(entry.permissions(), 0o640);
    }

    #[test]
    fn segments_are_encoded() {
        assert_eq!(encoded("a/b?c"), "a%2Fb%3Fc");
    }
}
