//! Telling the agent of a box that waited in a pool whose it is now.

use std::{io, net::SocketAddr, time::Duration};

use sandglass_sandbox::{
    SandboxId,
    hooks::Hooks,
    ports::{RuntimeErrorKind, runtime::RuntimeError},
};
use serde::Serialize;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};

/// The agent answers when the entrypoint was started. What may take long before it are hooks, which have deadlines of their own.
const PATIENCE: Duration = Duration::from_secs(20);
/// A box that has been up for a while is connected to at once.
const CONNECT: Duration = Duration::from_secs(1);
/// Answers are a few hundred bytes.
const MAX_ANSWER: u64 = 64 << 10;

/// The body of `POST /internal/assign`.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Assignment<'a> {
    pub sandbox_id: SandboxId,
    pub access_token: &'a str,
    pub entrypoint: &'a [String],
    /// Over the environment that the agent was started with.
    pub env: &'a [(String, String)],
    #[serde(skip_serializing_if = "Hooks::is_empty")]
    pub lifecycle: &'a Hooks,
}

fn failed(message: impl Into<String>) -> RuntimeError {
    RuntimeError::new(RuntimeErrorKind::Failed, "assign", message)
}

impl Assignment<'_> {
    /// Tells the agent at `address`, which was started with `token`. Telling it again is answered like the first time.
    ///
    /// # Errors
    /// When the agent cannot be asked, or could not start the entrypoint: then its message says why.
    pub(crate) async fn deliver(&self, address: SocketAddr, token: &str) -> Result<(), RuntimeError> {
        let body = serde_json::to_vec(self).map_err(|e| failed(e.to_string()))?;
        let patience = PATIENCE + self.lifecycle.pre_start.as_ref().map_or(Duration::ZERO, |h| h.timeout());
        let answer = tokio::time::timeout(patience, exchange(address, token, &body)).await;
        let answer = answer
            .map_err(|_| failed(format!("the agent at {address} does not answer")))?
            .map_err(|e| failed(format!("the agent at {address} cannot be asked: {e}")))?;
        match status(&answer) {
            Some(200) => Ok(()),
            Some(status) => Err(failed(format!("the agent answered {status}: {}", told(&answer)))),
            None => Err(failed("what listens in the box is no agent")),
        }
    }
}

async fn exchange(address: SocketAddr, token: &str, body: &[u8]) -> io::Result<String> {
    let connected = tokio::time::timeout(CONNECT, TcpStream::connect(address)).await;
    let mut stream = connected.map_err(|_| io::ErrorKind::TimedOut)??;
    stream.set_nodelay(true)?;
    let length = body.len();
    let head = format!(
        "POST /internal/assign HTTP/1.1\r\nHost: box\r\nX-EXECD-ACCESS-TOKEN: {token}\r\n\
         Content-Type: application/json\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n"
    );
    stream.write_all(&[head.as_bytes(), body].concat()).await?;
    let mut answer = Vec::new();
    stream.take(MAX_ANSWER).read_to_end(&mut answer).await?;
    Ok(String::from_utf8_lossy(&answer).into_owned())
}

fn status(answer: &str) -> Option<u16> {
    answer.strip_prefix("HTTP/1.")?.split(' ').nth(1)?.parse().ok()
}

/// The message of the agent's error, else whatever it said.
fn told(answer: &str) -> String {
    let body = answer.split_once("\r\n\r\n").map_or("", |(_, body)| body);
    let message = serde_json::from_str(body).ok().and_then(|value: serde_json::Value| {
        value.get("message").or(value.get("error"))?.as_str().map(str::to_owned)
    });
    message.unwrap_or_else(|| body.trim().chars().take(200).collect())
}

#[cfg(test)]
mod tests {
    use tokio::net::TcpListener;

    use super::*;

    async fn told_by(answer: &'static str) -> Result<(), RuntimeError> {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        tokio::spawn(async move {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut request = vec![0; 4096];
            let _ = stream.read(&mut request).await;
            let _ = stream.write_all(answer.as_bytes()).await;
        });
        let assignment = Assignment {
            sandbox_id: SandboxId::random(),
            access_token: "secret",
            entrypoint: &[],
            env: &[],
            lifecycle: &Hooks::default(),
        };
        assignment.deliver(address, "token").await
    }

    #[tokio::test]
    async fn the_agents_reason_is_passed_on() {
        assert!(told_by("HTTP/1.1 200 OK\r\n\r\n{}").await.is_ok());
        let refused = told_by("HTTP/1.1 500 X\r\n\r\n{\"message\":\"entrypoint: no such file\"}").await;
        assert!(refused.unwrap_err().message.ends_with("answered 500: entrypoint: no such file"));
        assert!(told_by("SSH-2.0-x\r\n").await.unwrap_err().message.contains("no agent"));
    }
}
