//! The server against the programs that people use: OpenSSH's clients and rsync, over loopback.
//!
//! Needs the Debian packages `openssh-client`, `rsync` and `python3`. Tests that become somebody else need root, and say so
//! and pass where they are not.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on should stop where it is")]

mod activity;
mod authentication;
mod files;
mod forwarding;
mod host;
mod limits;
mod programs;
mod terminals;
