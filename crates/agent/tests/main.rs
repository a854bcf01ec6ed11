//! The agent as a client sees it: the binary started stand-alone, the bytes on the wire compared.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on should stop where it is")]

mod support;

#[path = "support/bridge_server.rs"]
mod bridge_server;
#[path = "support/code.rs"]
mod code;
#[path = "support/commands.rs"]
mod commands;
#[path = "support/corpora.rs"]
mod corpora;
#[path = "support/edges.rs"]
mod edges;
#[path = "support/files.rs"]
mod files;
#[path = "support/hardening.rs"]
mod hardening;
#[path = "support/hooks.rs"]
mod hooks;
#[path = "support/identity.rs"]
mod identity;
#[path = "support/init.rs"]
mod init;
#[path = "support/isolated.rs"]
mod isolated;
#[path = "support/pressure.rs"]
mod pressure;
#[path = "support/proxies.rs"]
mod proxies;
#[path = "support/robust.rs"]
mod robust;
#[path = "support/runtime_init.rs"]
mod runtime_init;
#[path = "support/sessions.rs"]
mod sessions;
#[path = "support/standby.rs"]
mod standby;
#[path = "support/start_script.rs"]
mod start_script;
#[path = "support/surface.rs"]
mod surface;
#[path = "support/telemetry.rs"]
mod telemetry;
#[path = "support/terminals.rs"]
mod terminals;
#[path = "support/workspace.rs"]
mod workspace;
