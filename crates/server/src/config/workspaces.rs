//! `[workspaces]`: sandboxes that are made from repositories.

use std::{path::PathBuf, time::Duration};

use super::kinds::{FilePath, Int, Maybe, Span, Text};
use super::reader::Section;

#[derive(Clone, Debug, PartialEq)]
pub struct WorkspacesConfig {
    /// `host:port`; for agents that cannot use the socket of their sandbox.
    pub agent_listen: Option<String>,
    pub agent_url: Option<String>,
    pub provision_deadline: Duration,
    pub attach_timeout: Duration,
    pub grace: Duration,
    pub shutdown_grace: Duration,
    pub failed_retention: Duration,
    pub breaker_failures: u32,
    pub breaker_window: Duration,
    pub breaker_open: Duration,
    pub secrets_dir: Option<PathBuf>,
}

impl Default for WorkspacesConfig {
    fn default() -> Self {
        Self {
            agent_listen: None,
            agent_url: None,
            provision_deadline: Duration::from_secs(2700),
            attach_timeout: Duration::from_secs(60),
            grace: Duration::from_secs(45),
            shutdown_grace: Duration::from_secs(10),
            failed_retention: Duration::from_secs(600),
            breaker_failures: 3,
            breaker_window: Duration::from_secs(300),
            breaker_open: Duration::from_secs(60),
            secrets_dir: None,
        }
    }
}

impl WorkspacesConfig {
    pub(super) fn keys(&mut self, section: &mut Section<'_, '_>) {
        section.key(
            "agent_listen",
            Maybe(Text::non_empty()),
            &mut self.agent_listen,
            "Address for agents that cannot use the socket of their sandbox, because the engine is on another machine.",
        );
        section.key(
            "agent_url",
            Maybe(Text::non_empty()),
            &mut self.agent_url,
            "What such agents call, `http://host:port`, as seen from inside the sandboxes. Without it the server asks them, and git gets no credentials there.",
        );
        section.key(
            "provision_deadline_seconds",
            Span::seconds(1),
            &mut self.provision_deadline,
            "A sandbox that is not ready by then has failed; covers the build of its image.",
        );
        section.key(
            "attach_timeout_seconds",
            Span::seconds(1),
            &mut self.attach_timeout,
            "How long an agent may take to attach, from when its box was made.",
        );
        section.key(
            "grace_seconds",
            Span::seconds(1),
            &mut self.grace,
            "How long a sandbox stays unresponsive before it has failed.",
        );
        section.key(
            "shutdown_grace_seconds",
            Span::seconds(1),
            &mut self.shutdown_grace,
            "What an agent gets to end what it runs, before its box is removed.",
        );
        section.key(
            "failed_retention_seconds",
            Span::seconds(1),
            &mut self.failed_retention,
            "How long the box of a sandbox that failed stays, for diagnosis.",
        );
        section.key(
            "breaker_failures",
            Int::at_least(0),
            &mut self.breaker_failures,
            "So many sandboxes of one repository and recipe that do not become ready within the window, and no more are tried for a while. \
             0 for never.",
        );
        section.key(
            "breaker_window_seconds",
            Span::seconds(1),
            &mut self.breaker_window,
            "How long such a failure counts.",
        );
        section.key(
            "breaker_open_seconds",
            Span::seconds(1),
            &mut self.breaker_open,
            "How long none is tried the first time; doubles with every attempt that fails, up to 15 minutes.",
        );
        section.key(
            "secrets_dir",
            Maybe(FilePath::absolute()),
            &mut self.secrets_dir,
            "Folder with one file for each secret that requests name with `secretRef`; with tenants, in a folder for each tenant.",
        );
    }
}
