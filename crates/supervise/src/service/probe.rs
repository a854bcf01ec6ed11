//! Asking a service whether it answers.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;

use async_trait::async_trait;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::definition::{Check, ServiceDefinition};
use crate::capture::Outputs;
use crate::clock::Clock;
use crate::filter::Unfiltered;
use crate::log::Logs;
use crate::ports::{Builtins, Draw, Exit, NoBuiltins, Ports, Program, Signal, Spawn};
use crate::process::Child;
use crate::report::{Events, Report, Reporter};

/// A check with everything it needs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Target {
    Tcp { port: u16 },
    Http { port: u16, path: String },
    Exec(Program),
}

impl Target {
    /// What to ask for a service; none when a port is missing, which a checked definition does not lack.
    pub fn of(definition: &ServiceDefinition, check: &Check) -> Option<Target> {
        Some(match check {
            Check::Tcp { port } => Target::Tcp { port: port.or(definition.port)? },
            Check::Http { port, path } => {
                Target::Http { port: port.or(definition.port)?, path: path.clone() }
            }
            Check::Exec { command } => Target::Exec(definition.program(command.clone())),
        })
    }
}

/// Asks once. Dropped when its time is over, it must leave nothing behind.
#[async_trait]
pub trait Prober: Send + Sync + 'static {
    async fn probe(&self, target: &Target) -> Result<(), String>;
}

/// Asks over the loopback, and runs commands in the box.
pub struct LoopbackProber {
    ports: Ports,
}

/// Of an answer, its first line must be within this.
const MAX_HEAD: usize = 4 << 10;

impl LoopbackProber {
    pub fn new(spawn: Arc<dyn Spawn>, clock: Arc<dyn Clock>) -> Self {
        let reporter = Reporter::new(Arc::new(Unheard), Arc::clone(&clock));
        // Of the ports, commands use the clock and the spawner only; their output is not kept.
        let ports = Ports {
            clock,
            spawn,
            builtins: Arc::new(NoBuiltins) as Arc<dyn Builtins>,
            prober: Arc::new(Silent),
            filter: Arc::new(Unfiltered),
            logs: Logs::nowhere(),
            reporter,
            draw: Draw::default(),
        };
        LoopbackProber { ports }
    }

    async fn exec(&self, program: &Program) -> Result<(), String> {
        let child =
            Child::start(&self.ports, program, None, Outputs::Together).map_err(|error| error.to_string())?;
        let mut killed = KillOnDrop { spawn: Arc::clone(&self.ports.spawn), child };
        match killed.child.exited().await {
            Exit::Code(0) => Ok(()),
            exit => Err(format!("the probe's command: {exit}")),
        }
    }
}

struct Unheard;

impl Events for Unheard {
    fn emit(&self, _: Report) {}
}

struct Silent;

#[async_trait]
impl Prober for Silent {
    async fn probe(&self, _: &Target) -> Result<(), String> {
        Ok(())
    }
}

struct KillOnDrop {
    spawn: Arc<dyn Spawn>,
    child: Child,
}

impl Drop for KillOnDrop {
    fn drop(&mut self) {
        // Also what a command left running that has ended.
        self.spawn.signal(self.child.group(), Signal::Kill);
    }
}

#[async_trait]
impl Prober for LoopbackProber {
    async fn probe(&self, target: &Target) -> Result<(), String> {
        match target {
            Target::Tcp { port } => connect(*port).await.map(drop),
            Target::Http { port, path } => get(connect(*port).await?, path).await,
            Target::Exec(program) => self.exec(program).await,
        }
    }
}

async fn connect(port: u16) -> Result<TcpStream, String> {
    let at = |ip: IpAddr| TcpStream::connect(SocketAddr::new(ip, port));
    match at(Ipv4Addr::LOCALHOST.into()).await {
        Ok(stream) => Ok(stream),
        // Some servers listen on what `localhost` means first.
        Err(error) => at(Ipv6Addr::LOCALHOST.into()).await.map_err(|_| format!("port {port}: {error}")),
    }
}

async fn get(mut stream: TcpStream, path: &str) -> Result<(), String> {
    let broken = |error: std::io::Error| format!("GET {path}: {error}");
    let request = format!("GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await.map_err(broken)?;
    let mut head = Vec::new();
    while !head.contains(&b'\n') && head.len() < MAX_HEAD {
        let mut piece = [0; 256];
        match stream.read(&mut piece).await.map_err(broken)? {
            0 => break,
            count => head.extend_from_slice(&piece[..count]),
        }
    }
    match status(&head) {
        Some(status) if (200..400).contains(&status) => Ok(()),
        Some(status) => Err(format!("GET {path}: status {status}")),
        None => Err(format!("GET {path}: no HTTP answer")),
    }
}

fn status(head: &[u8]) -> Option<u16> {
    let line = std::str::from_utf8(head.split(|byte| *byte == b'\n').next()?).ok()?;
    line.strip_prefix("HTTP/1.")?.split(' ').nth(1)?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_an_http_answer_has_a_status() {
        assert_eq!(status(b"HTTP/1.1 204 No Content\r\nA: b"), Some(204));
        assert_eq!(status(b"HTTP/1.0 500\r\n"), Some(500));
        for head in [b"SSH-2.0-x\r\n".as_slice(), b"", b"HTTP/1.1\n", b"HTTP/1.1 \xff\n"] {
            assert_eq!(status(head), None);
        }
    }
}
