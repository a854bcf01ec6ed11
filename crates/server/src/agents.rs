//! Which agent a box has: asked once, when something that not every agent knows is to be used with it.
//!
//! An agent never changes while its box lives. Invariant: forgetting is always safe, and a box whose agent cannot be asked is treated as
//! one whose agent says nothing, for that one time.

use std::{
    collections::HashMap,
    io,
    net::SocketAddr,
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use sandglass_sandbox::{SandboxId, agent};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};

/// An agent answers in a millisecond; a box that is overwhelmed is not waited for.
const PATIENCE: Duration = Duration::from_millis(500);
/// Answers are a few hundred bytes.
const MAX_ANSWER: u64 = 16 << 10;
/// Beyond this many all are forgotten, and asked again when they are needed.
const MOST: usize = 16_384;

/// See the module documentation.
#[derive(Debug, Default)]
pub struct Agents(Mutex<HashMap<SandboxId, agent::Agent>>);

/// Whether a box's own program has been started, as far as its agent can say.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Readiness {
    Ready,
    /// Something comes before the entrypoint and is not over.
    Preparing,
    Unknown,
}

impl Agents {
    fn known(&self) -> MutexGuard<'_, HashMap<SandboxId, agent::Agent>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What the agent at `address` is.
    pub async fn of(&self, id: SandboxId, address: SocketAddr) -> agent::Agent {
        if let Some(known) = self.known().get(&id).copied() {
            return known;
        }
        let Ok(answer) = ask(address, "/ping").await else { return agent::Agent::SILENT };
        let found = answer.agent.unwrap_or(agent::Agent::SILENT);
        let mut known = self.known();
        if known.len() >= MOST {
            known.clear();
        }
        known.insert(id, found);
        found
    }

    /// Whether the box has got as far as its entrypoint. Agents that cannot tell are not asked.
    pub async fn readiness(known: agent::Agent, address: SocketAddr) -> Readiness {
        if !known.has(agent::Feature::Hooks) {
            return Readiness::Unknown;
        }
        match ask(address, "/ready").await.map(|answer| answer.status) {
            Ok(200) => Readiness::Ready,
            Ok(503) => Readiness::Preparing,
            Ok(_) | Err(_) => Readiness::Unknown,
        }
    }
}

struct Answer {
    status: u16,
    agent: Option<agent::Agent>,
}

/// One request over a connection of its own.
async fn ask(address: SocketAddr, path: &str) -> io::Result<Answer> {
    let exchange = async {
        let mut stream = TcpStream::connect(address).await?;
        let request = format!("GET {path} HTTP/1.1\r\nHost: box\r\nConnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).await?;
        let mut text = Vec::new();
        stream.take(MAX_ANSWER).read_to_end(&mut text).await?;
        read(&String::from_utf8_lossy(&text)).ok_or_else(|| io::Error::other("not an HTTP answer"))
    };
    tokio::time::timeout(PATIENCE, exchange).await.map_err(|_| io::ErrorKind::TimedOut)?
}

fn read(text: &str) -> Option<Answer> {
    let head = text.split("\r\n\r\n").next()?;
    let mut lines = head.lines();
    let status = lines.next()?.strip_prefix("HTTP/1.")?.split(' ').nth(1)?.parse().ok()?;
    let named = lines.filter_map(|line| line.split_once(':'));
    let mut told = named.filter(|(name, _)| name.eq_ignore_ascii_case(agent::HEADER));
    Some(Answer { status, agent: told.find_map(|(_, value)| value.trim().parse().ok()) })
}

#[cfg(test)]
mod tests {
    use std::sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    };

    use tokio::net::TcpListener;

    use super::*;

    /// An agent of some generation that counts what it is asked.
    async fn stub(introduction: &'static str, ready: &'static str) -> (SocketAddr, Arc<AtomicUsize>) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let asked = Arc::new(AtomicUsize::new(0));
        let count = asked.clone();
        tokio::spawn(async move {
            while let Ok((mut stream, _)) = listener.accept().await {
                count.fetch_add(1, Ordering::Relaxed);
                let mut request = [0; 1024];
                let length = stream.read(&mut request).await.unwrap_or(0);
                let status = if request[..length].starts_with(b"GET /ready") { ready } else { "200 OK" };
                let answer = format!("HTTP/1.1 {status}\r\n{introduction}Content-Length: 0\r\n\r\n");
                let _ = stream.write_all(answer.as_bytes()).await;
            }
        });
        (address, asked)
    }

    #[tokio::test]
    async fn an_old_agent_is_asked_once_and_only_what_it_knows() {
        let (address, asked) = stub("", "404 Not Found").await;
        let (agents, id) = (Agents::default(), SandboxId::random());
        assert_eq!(agents.of(id, address).await, agent::Agent::SILENT);
        assert_eq!(Agents::readiness(agents.of(id, address).await, address).await, Readiness::Unknown);
        assert_eq!(asked.load(Ordering::Relaxed), 1);
    }

    #[tokio::test]
    async fn an_agent_of_ours_and_a_newer_one_are_used_as_far_as_we_know_them() {
        for introduction in [
            "X-Sandglass-Agent: generation=2; oldest=1\r\n",
            "x-sandglass-agent: generation=99; oldest=2; more=x\r\n",
        ] {
            for (ready, seen) in
                [("200 OK", Readiness::Ready), ("503 Service Unavailable", Readiness::Preparing)]
            {
                let (address, asked) = stub(introduction, ready).await;
                let (agents, id) = (Agents::default(), SandboxId::random());
                assert_eq!(Agents::readiness(agents.of(id, address).await, address).await, seen);
                assert_eq!(Agents::readiness(agents.of(id, address).await, address).await, seen);
                assert_eq!(asked.load(Ordering::Relaxed), 3, "one question about the agent itself");
            }
        }
    }

    #[tokio::test]
    async fn one_that_cannot_be_asked_is_asked_again() {
        let (agents, id) = (Agents::default(), SandboxId::random());
        let nobody = TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap();
        assert_eq!(agents.of(id, nobody).await, agent::Agent::SILENT);
        let (address, _) = stub("X-Sandglass-Agent: generation=2; oldest=1\r\n", "200 OK").await;
        assert_eq!(agents.of(id, address).await.generation, 2);
    }
}
