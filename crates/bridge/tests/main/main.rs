//! The two sides against each other: in virtual time with every fault there is, and over a real socket.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod end_to_end;
mod measure;
mod simulation;
mod test_server;
