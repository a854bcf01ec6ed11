//! The agent as a client sees it: the binary started stand-alone, the bytes on the wire compared.

mod support;

#[path = "support/commands.rs"]
mod commands;
#[path = "support/edges.rs"]
mod edges;
#[path = "support/files.rs"]
mod files;
#[path = "support/init.rs"]
mod init;
