//! `[workspaces]`: sandboxes that are made from repositories.

use std::time::Duration;

use super::kinds::{Maybe, Span, Text};
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
            "What such agents call, `http://host:port`, as seen from inside the sandboxes.",
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
    }
}
