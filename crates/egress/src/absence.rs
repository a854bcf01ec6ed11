//! While there is no worker: who asks after our health is told at once, everybody else waits for the next worker.
//!
//! Bounds: 64 connections, the oldest are closed first; a look at them each time the supervisor has nothing else to do, which is every 50 ms.

use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::time::Duration;

use rustix::net::SocketFlags;

/// How often to look.
pub const TURN: Duration = Duration::from_millis(50);

const MOST: usize = 64;
/// Of the beginning of a request, which has its path in it.
const BEGINNING: usize = 1024;

const UNREADY: &[u8] =
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: text/plain; charset=utf-8\r\nContent-Length: 19\r\n\
    Connection: close\r\n\r\nmitmproxy not ready";

/// Connections to the control API that were made while there was no worker.
#[derive(Debug, Default)]
pub struct Waiting(Vec<TcpStream>);

impl Waiting {
    /// Takes what has come to these listeners, and answers what can be answered without a worker. Never blocks.
    pub fn turn(&mut self, listeners: impl Iterator<Item = impl AsFd>) {
        for listener in listeners {
            let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
            for _ in 0..MOST {
                let Ok(stream) = rustix::net::accept_with(&listener, flags) else { break };
                if self.0.len() == MOST {
                    self.0.remove(0);
                }
                self.0.push(stream.into());
            }
        }
        self.0.retain_mut(|stream| {
            let mut beginning = [0; BEGINNING];
            match stream.peek(&mut beginning) {
                Ok(0) => false,
                Ok(length) if asks_for_health(&beginning[..length]) => {
                    // Whoever is too slow for these few bytes sees the connection end.
                    let _ = tell_unready(stream);
                    false
                }
                Ok(_) => true,
                Err(error) => error.kind() == io::ErrorKind::WouldBlock,
            }
        });
    }

    /// Their descriptors, for the next worker.
    pub fn numbers(&self) -> impl Iterator<Item = RawFd> {
        self.0.iter().map(AsRawFd::as_raw_fd)
    }

    /// The next worker has them.
    pub fn clear(&mut self) {
        self.0.clear();
    }
}

fn asks_for_health(beginning: &[u8]) -> bool {
    let line = beginning.split(|byte| matches!(byte, b'\r' | b'\n')).next().unwrap_or_default();
    let words: Vec<&[u8]> = line.split(|byte| *byte == b' ').collect();
    matches!(words[..], [_, b"/healthz", _])
}

fn tell_unready(stream: &mut TcpStream) -> io::Result<()> {
    // What is not read would end the connection before the answer is.
    let mut request = [0; 16 << 10];
    let _ = stream.read(&mut request)?;
    stream.write_all(UNREADY)?;
    stream.shutdown(Shutdown::Write)
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    fn listener() -> TcpListener {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        listener.set_nonblocking(true).unwrap();
        listener
    }

    fn asking(listener: &TcpListener, request: &str) -> TcpStream {
        let mut stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        stream.write_all(request.as_bytes()).unwrap();
        stream
    }

    #[test]
    fn health_is_answered_and_the_rest_waits() {
        let listener = listener();
        let mut waiting = Waiting::default();
        let mut health = asking(&listener, "GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n");
        let policy = asking(&listener, "GET /policy HTTP/1.1\r\nHost: x\r\n\r\n");
        let mut late = asking(&listener, "GET /heal");
        let gone = asking(&listener, "");
        drop(gone);
        waiting.turn([&listener].into_iter());
        let mut answer = String::new();
        health.read_to_string(&mut answer).unwrap();
        assert!(
            answer.starts_with("HTTP/1.1 503 ") && answer.ends_with("\r\n\r\nmitmproxy not ready"),
            "{answer}"
        );
        assert_eq!(waiting.numbers().count(), 2);
        late.write_all(b"thz HTTP/1.1\r\nHost: x\r\n\r\n").unwrap();
        waiting.turn([&listener].into_iter());
        let mut answer = String::new();
        late.read_to_string(&mut answer).unwrap();
        assert!(answer.starts_with("HTTP/1.1 503 "), "{answer}");
        assert_eq!(waiting.numbers().count(), 1);
        drop(policy);
    }

    #[test]
    fn of_too_many_the_oldest_end() {
        let listener = listener();
        let mut waiting = Waiting::default();
        let mut all = Vec::new();
        for _ in 0..MOST + 3 {
            all.push(asking(&listener, ""));
            waiting.turn([&listener].into_iter());
        }
        assert_eq!(waiting.numbers().count(), MOST);
        assert_eq!(all[2].read(&mut [0]).unwrap(), 0);
        let health = asking(&listener, "HEAD /healthz HTTP/1.1\r\n\r\n");
        waiting.turn([&listener].into_iter());
        assert_eq!(waiting.numbers().count(), MOST - 1);
        drop(health);
    }

    #[test]
    fn other_paths_are_no_question_about_health() {
        for line in [
            "GET /healthz",
            "GET /healthz HTTP/1.1 x",
            "GET /healthzz HTTP/1.1",
            "GET  /healthz HTTP/1.1",
            "",
        ] {
            assert!(!asks_for_health(line.as_bytes()), "{line}");
        }
    }
}
