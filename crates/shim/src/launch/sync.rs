//! How the shim and the box's first process keep in step until exec.
//!
//! One packet socket: single bytes down, timings and at most one failure up. It closes by exec, which is how success
//! is told, and by death on either side, so nobody waits for the other in vain.

use std::io;
use std::os::fd::OwnedFd;
use std::time::Instant;

use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, recv, send, socketpair};

use super::{Failure, Timings};

/// What the shim has done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    Mapped = 1,
    Rooted = 2,
    Linked = 3,
}

/// One end.
#[derive(Debug)]
pub struct Sync {
    pub fd: OwnedFd,
}

const READY: u8 = b'R';
const TIMING: u8 = b'T';
const FAILURE: u8 = b'F';
const LONGEST: usize = 4096;

impl Sync {
    pub fn pair() -> io::Result<(Self, Self)> {
        let (a, b) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
        Ok((Self { fd: a }, Self { fd: b }))
    }

    pub fn tell(&self, step: Step) -> io::Result<()> {
        self.send(&[step as u8])
    }

    /// Waits for a step; an error when the shim is gone or has given up.
    pub fn await_step(&self, step: Step) -> io::Result<()> {
        let mut packet = [0];
        match self.receive(&mut packet)? {
            1 if packet[0] == step as u8 => Ok(()),
            _ => Err(io::Error::other("the shim gave up")),
        }
    }

    /// The child's part of the order: no interface may come before its namespace is told how to treat it.
    pub fn report_ready(&self) -> io::Result<()> {
        self.send(&[READY])
    }

    pub fn report_time(&self, name: &str, start: Instant) {
        let micros = start.elapsed().as_micros();
        // Only for information.
        let _ = self.send(format!("T{micros} {name}").as_bytes());
    }

    pub fn report_failure(&self, failure: &Failure) {
        let mut text = format!("F{}\n{}", failure.phase, failure.message).into_bytes();
        text.truncate(LONGEST);
        // When the shim is gone nobody is left to tell.
        let _ = self.send(&text);
    }

    /// Waits until the child's network namespace may get an interface.
    pub fn until_ready(&self, timings: &mut Timings) -> Result<(), Failure> {
        match self.collect(timings)? {
            Some(()) => Ok(()),
            None => Err(Failure::new("process", "the box's first process died")),
        }
    }

    /// Collects the child's timings until it has executed the agent.
    pub fn until_exec(&self, timings: &mut Timings) -> Result<(), Failure> {
        while self.collect(timings)?.is_some() {}
        Ok(())
    }

    fn collect(&self, timings: &mut Timings) -> Result<Option<()>, Failure> {
        let mut packet = [0; LONGEST];
        loop {
            let length = self.receive(&mut packet).map_err(|error| Failure::new("process", error))?;
            match packet[..length].split_first() {
                None => return Ok(None),
                Some((&READY, _)) => return Ok(Some(())),
                Some((&TIMING, rest)) => {
                    let text = String::from_utf8_lossy(rest);
                    if let Some((micros, name)) = text.split_once(' ') {
                        timings.marks.insert(format!("box-{name}"), micros.parse().unwrap_or(0));
                    }
                }
                Some((_, rest)) => return Err(parse_failure(rest)),
            }
        }
    }

    /// A failure that the child has already told, if any. Does not wait.
    pub fn reason(&self) -> Option<Failure> {
        let mut packet = [0; LONGEST];
        loop {
            let (length, _) = recv(&self.fd, &mut packet[..], RecvFlags::DONTWAIT).ok()?;
            match packet[..length].split_first()? {
                (&FAILURE, rest) => return Some(parse_failure(rest)),
                _ => continue,
            }
        }
    }

    fn send(&self, packet: &[u8]) -> io::Result<()> {
        Ok(send(&self.fd, packet, SendFlags::NOSIGNAL).map(|_| ())?)
    }

    fn receive(&self, packet: &mut [u8]) -> io::Result<usize> {
        loop {
            match recv(&self.fd, &mut *packet, RecvFlags::empty()) {
                Ok((length, _)) => return Ok(length),
                Err(rustix::io::Errno::INTR) => {}
                // A packet that was still unread when the other side died.
                Err(rustix::io::Errno::CONNRESET) => return Ok(0),
                Err(error) => return Err(error.into()),
            }
        }
    }
}

fn parse_failure(rest: &[u8]) -> Failure {
    let text = String::from_utf8_lossy(rest);
    let (phase, message) = text.split_once('\n').unwrap_or(("process", &text));
    Failure::new(phase, message)
}
