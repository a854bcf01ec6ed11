//! What a build does inside its sandbox: running commands and putting files there, through the sandbox's agent.

use std::{
    collections::BTreeMap,
    net::{IpAddr, SocketAddr},
    path::Path,
    time::Duration,
};

use async_trait::async_trait;
use futures_util::StreamExt;
use reqwest::multipart::{Form, Part};
use sandglass_sandbox::ports::runtime::{Exposure, Observation};
use serde::Deserialize;
use serde_json::json;

/// Where the agent listens in every sandbox.
const AGENT_PORT: u16 = 44_772;
pub(crate) const TOKEN_HEADER: &str = "x-execd-access-token";
/// An agent says that it lives every three seconds.
const SILENCE: Duration = Duration::from_secs(60);
/// The longest event that is taken from an agent.
const EVENT_LIMIT: usize = 8 << 20;
/// What is read of a refusal.
const REFUSAL_MOST: usize = 4 << 10;
/// Characters of what an agent says about itself that go into messages.
const SAID_MOST: usize = 500;
/// The largest file that is taken out of a sandbox: it comes to lie on the server's disk.
pub(super) const FILE_MOST: u64 = 16 << 30;

/// How to reach the agent of a build sandbox.
#[derive(Debug, Clone)]
pub struct Door {
    pub(crate) address: SocketAddr,
    pub(crate) token: String,
}

impl Door {
    /// `None` when the sandbox cannot be reached from here. `host`: whose ports lead into sandboxes without an address of their own.
    pub(crate) fn of(observed: &Observation, host: IpAddr) -> Option<Self> {
        let address = match (observed.address, observed.exposure) {
            (Some(address), _) => SocketAddr::new(address, AGENT_PORT),
            (None, Exposure::Published { agent, .. }) => SocketAddr::new(host, agent),
            (None, Exposure::Address | Exposure::Host | Exposure::None) => return None,
        };
        Some(Self { address, token: observed.agent_token.clone() })
    }
}

/// One command.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Command {
    pub argv: Vec<String>,
    /// Absolute; the agent's own when absent.
    pub cwd: Option<String>,
    pub env: BTreeMap<String, String>,
    /// User and group; the agent's own when absent.
    pub ids: Option<(u32, u32)>,
}

/// Why something did not happen inside.
#[derive(Debug, thiserror::Error)]
pub enum InsideError {
    /// The sandbox does not answer, or no more.
    #[error("the build sandbox does not answer: {0}")]
    Unreachable(String),
    #[error("the build sandbox refused: {0}")]
    Refused(String),
}

/// Takes lines, without line breaks.
pub type Lines<'l> = dyn FnMut(&str) + Send + 'l;

/// The inside of build sandboxes.
#[async_trait]
pub trait Inside: Send + Sync + 'static {
    /// Runs the command to its end and gives its exit code. `output` gets what it writes, line by line, without line breaks. Dropped, the
    /// command may run on: the sandbox is removed then.
    async fn run(&self, door: &Door, command: &Command, output: &mut Lines<'_>) -> Result<i32, InsideError>;

    /// Puts a file of this machine at an absolute path, with permissions in octal digits.
    async fn put(&self, door: &Door, file: &Path, target: &str, mode: u32) -> Result<(), InsideError>;

    /// Gets a file from an absolute path.
    async fn get(&self, door: &Door, source: &str, file: &Path) -> Result<(), InsideError>;
}

/// The way into sandboxes that speaks to their agents over HTTP.
///
/// # Errors
/// When there can be no HTTP client.
pub fn over_http() -> Result<std::sync::Arc<dyn Inside>, reqwest::Error> {
    Ok(std::sync::Arc::new(Agents::new()?))
}

/// Speaks to agents over HTTP.
#[derive(Debug, Clone)]
pub(super) struct Agents(reqwest::Client);

/// What is needed of an event.
#[derive(Deserialize)]
struct Event {
    #[serde(rename = "type")]
    kind: String,
    #[serde(default)]
    text: String,
    #[serde(default)]
    error: Option<Ended>,
}

#[derive(Deserialize)]
struct Ended {
    #[serde(default)]
    evalue: String,
    #[serde(default)]
    traceback: Vec<String>,
}

impl Agents {
    pub(super) fn new() -> Result<Self, reqwest::Error> {
        crate::tls::use_ring();
        let client = reqwest::Client::builder().no_proxy().connect_timeout(Duration::from_secs(10));
        Ok(Self(client.read_timeout(SILENCE).redirect(reqwest::redirect::Policy::none()).build()?))
    }

    fn url(door: &Door, path: &str) -> String {
        format!("http://{}{path}", door.address)
    }
}

fn lost(error: reqwest::Error) -> InsideError {
    InsideError::Unreachable(error.without_url().to_string())
}

async fn accepted(answer: reqwest::Response) -> Result<reqwest::Response, InsideError> {
    let status = answer.status();
    if status.is_success() {
        return Ok(answer);
    }
    // Whatever answers there may never end.
    let mut text = Vec::new();
    let mut chunks = answer.bytes_stream();
    while let Some(Ok(chunk)) = chunks.next().await {
        text.extend_from_slice(&chunk[..chunk.len().min(REFUSAL_MOST - text.len())]);
        if text.len() >= REFUSAL_MOST {
            break;
        }
    }
    Err(InsideError::Refused(format!("{status}: {}", beginning(&String::from_utf8_lossy(&text)))))
}

fn beginning(text: &str) -> String {
    text.chars().take(SAID_MOST).collect()
}

#[async_trait]
impl Inside for Agents {
    async fn run(&self, door: &Door, command: &Command, output: &mut Lines<'_>) -> Result<i32, InsideError> {
        let mut body = json!({ "argv": command.argv, "envs": command.env });
        if let Some(cwd) = &command.cwd {
            body["cwd"] = json!(cwd);
        }
        if let Some((uid, gid)) = command.ids {
            body["uid"] = json!(uid);
            body["gid"] = json!(gid);
        }
        let request = self.0.post(Self::url(door, "/command")).header(TOKEN_HEADER, &door.token).json(&body);
        let answer = accepted(request.send().await.map_err(lost)?).await?;
        let mut chunks = answer.bytes_stream();
        let mut waiting: Vec<u8> = Vec::new();
        while let Some(chunk) = chunks.next().await {
            waiting.extend_from_slice(&chunk.map_err(lost)?);
            while let Some(end) = waiting.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = waiting.drain(..=end).collect();
                let Ok(event) = serde_json::from_slice::<Event>(&line) else { continue };
                match event.kind.as_str() {
                    "stdout" | "stderr" => output(event.text.trim_end_matches('\n')),
                    "execution_complete" => return Ok(0),
                    "error" => return ended(event.error),
                    _ => {}
                }
            }
            if waiting.len() > EVENT_LIMIT {
                return Err(InsideError::Refused("an event is larger than 8 MiB".into()));
            }
        }
        Err(InsideError::Unreachable("it ended before the command did".into()))
    }

    async fn put(&self, door: &Door, file: &Path, target: &str, mode: u32) -> Result<(), InsideError> {
        let unreadable = |error: std::io::Error| InsideError::Refused(format!("cannot read a file: {error}"));
        let length = tokio::fs::metadata(file).await.map_err(unreadable)?.len();
        let file = tokio::fs::File::open(file).await.map_err(unreadable)?;
        let about = json!({ "path": target, "mode": format!("{mode:o}").parse::<u32>().unwrap_or(644) });
        let content =
            reqwest::Body::wrap_stream(tokio_util::io::ReaderStream::with_capacity(file, 256 << 10));
        let form = Form::new()
            .part(
                "metadata",
                Part::text(about.to_string())
                    .file_name("metadata")
                    .mime_str("application/json")
                    .map_err(lost)?,
            )
            .part("file", Part::stream_with_length(content, length).file_name("file"));
        let request =
            self.0.post(Self::url(door, "/files/upload")).header(TOKEN_HEADER, &door.token).multipart(form);
        accepted(request.send().await.map_err(lost)?).await.map(drop)
    }

    async fn get(&self, door: &Door, source: &str, file: &Path) -> Result<(), InsideError> {
        let request = self.0.get(Self::url(door, "/files/download")).query(&[("path", source)]);
        let answer = accepted(request.header(TOKEN_HEADER, &door.token).send().await.map_err(lost)?).await?;
        let unwritable =
            |error: std::io::Error| InsideError::Refused(format!("cannot write a file: {error}"));
        let mut out = tokio::fs::File::create(file).await.map_err(unwritable)?;
        let mut chunks = answer.bytes_stream();
        let mut left = FILE_MOST;
        while let Some(chunk) = chunks.next().await {
            let chunk = chunk.map_err(lost)?;
            left = left.checked_sub(chunk.len() as u64).ok_or_else(|| {
                InsideError::Refused(format!("{} is larger than {} GiB", beginning(source), FILE_MOST >> 30))
            })?;
            tokio::io::AsyncWriteExt::write_all(&mut out, &chunk).await.map_err(unwritable)?;
        }
        tokio::io::AsyncWriteExt::flush(&mut out).await.map_err(unwritable)
    }
}

/// A command that did not end well: with a code, or because it could not be run at all.
fn ended(error: Option<Ended>) -> Result<i32, InsideError> {
    let Some(error) = error else { return Ok(-1) };
    match error.evalue.parse() {
        Ok(code) => Ok(code),
        Err(_) => {
            let said = format!("{} {}", beginning(&error.evalue), beginning(&error.traceback.join(" ")));
            Err(InsideError::Refused(said))
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::{
        io::{AsyncReadExt, AsyncWriteExt},
        net::TcpListener,
    };

    use super::*;

    /// Answers every request with this head, and then with chunks that never end.
    async fn endless(head: &'static str) -> Door {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let door = Door { address: listener.local_addr().unwrap(), token: "t".into() };
        tokio::spawn(async move {
            while let Ok((mut stream, _)) = listener.accept().await {
                tokio::spawn(async move {
                    let _ = stream.read(&mut [0; 4096]).await;
                    let _ = stream.write_all(head.as_bytes()).await;
                    let chunk = [b"10000\r\n".to_vec(), vec![b'a'; 0x10000], b"\r\n".to_vec()].concat();
                    while stream.write_all(&chunk).await.is_ok() {}
                });
            }
        });
        door
    }

    #[tokio::test]
    async fn answers_that_never_end_are_cut() {
        let agents = Agents::new().unwrap();
        let chunked = "Transfer-Encoding: chunked\r\n\r\n";
        let refusing = endless(Box::leak(format!("HTTP/1.1 500 X\r\n{chunked}").into_boxed_str())).await;
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("x");
        std::fs::write(&file, "x").unwrap();
        let command = Command { argv: vec!["true".into()], ..Command::default() };
        let put = agents.put(&refusing, &file, "/x", 0o600).await.unwrap_err().to_string();
        let got = agents.get(&refusing, "/x", &dir.path().join("y")).await.unwrap_err().to_string();
        let ran = agents.run(&refusing, &command, &mut |_: &str| {}).await.unwrap_err().to_string();
        for said in [put, got, ran] {
            assert!(said.contains("500") && said.len() < 700, "{} bytes", said.len());
        }
        let flooding = endless(Box::leak(format!("HTTP/1.1 200 OK\r\n{chunked}").into_boxed_str())).await;
        let ran = agents.run(&flooding, &command, &mut |_: &str| {}).await.unwrap_err().to_string();
        assert!(ran.contains("larger than 8 MiB"), "{ran}");
    }
}
