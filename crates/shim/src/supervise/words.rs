//! What the agent says about its start: lines of JSON over a pipe that it closes when nothing more is to say.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use serde_json::Value;

use super::Failure;
use crate::protocol::MAX_FRAME;

/// One line, or the end of the pipe.
#[derive(Debug)]
pub(super) enum Status {
    Started,
    Failed(Failure),
    Ended,
}

/// The pipe, and what has come of a line.
pub(super) struct Words {
    pipe: OwnedFd,
    heard: Vec<u8>,
}

impl Words {
    pub(super) fn new(pipe: OwnedFd) -> Self {
        Self { pipe, heard: Vec::new() }
    }

    /// Takes the next line. Waits only when there is neither a line nor anything to read.
    pub(super) fn hear(&mut self) -> io::Result<Option<Status>> {
        if let Some(status) = self.line() {
            return Ok(Some(status));
        }
        let mut chunk = [0; 4096];
        match rustix::io::read(&self.pipe, &mut chunk) {
            Ok(0) => Ok(Some(Status::Ended)),
            Ok(length) => {
                self.heard.extend_from_slice(&chunk[..length]);
                if self.heard.len() > MAX_FRAME {
                    return Err(io::Error::other("the agent's status has no end"));
                }
                Ok(self.line())
            }
            Err(rustix::io::Errno::INTR | rustix::io::Errno::AGAIN) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    fn line(&mut self) -> Option<Status> {
        let end = self.heard.iter().position(|byte| *byte == b'\n')?;
        let line: Vec<u8> = self.heard.drain(..=end).collect();
        let status: Value = serde_json::from_slice(&line).unwrap_or_default();
        let text = |key: &str| status.get(key).and_then(Value::as_str);
        Some(match text("status") {
            Some("started") => Status::Started,
            Some(_) => Status::Failed(Failure::new(
                text("phase").unwrap_or("entrypoint"),
                text("message").unwrap_or("the agent gave no reason"),
            )),
            None => Status::Failed(Failure::new("process", "the agent's status cannot be read")),
        })
    }
}

impl AsFd for Words {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.pipe.as_fd()
    }
}
