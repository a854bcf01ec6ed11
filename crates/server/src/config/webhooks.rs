//! `[webhooks]`: events that are sent to receivers.

use std::time::Duration;

use ipnet::IpNet;

use super::kinds::{Flag, Int, ListOf, Maybe, Span, Text};
use super::reader::Section;

#[derive(Clone, Debug, PartialEq)]
pub struct WebhooksConfig {
    pub plain_http: bool,
    /// `None`: this machine's own addresses, unless there are tenants.
    pub private_networks: Option<Vec<String>>,
    pub timeout: Duration,
    pub concurrency: usize,
    pub max_webhooks: usize,
    pub give_up_after: Duration,
    pub disable_after: Duration,
    pub secret_overlap: Duration,
}

impl Default for WebhooksConfig {
    fn default() -> Self {
        Self {
            plain_http: false,
            private_networks: None,
            timeout: Duration::from_secs(10),
            concurrency: 8,
            max_webhooks: 32,
            give_up_after: Duration::from_secs(24 * 3600),
            disable_after: Duration::from_secs(72 * 3600),
            secret_overlap: Duration::from_secs(24 * 3600),
        }
    }
}

/// What leads to this machine and no further.
const LOOPBACK: [&str; 2] = ["127.0.0.0/8", "::1/128"];

fn is_network(text: &str) -> bool {
    text.parse::<IpNet>().is_ok()
}

impl WebhooksConfig {
    /// The networks in which receivers may be although they are not public. `shared`: whoever names receivers is not the operator.
    pub fn networks(&self, shared: bool) -> Vec<IpNet> {
        let parsed = |text: &str| text.parse().ok();
        match &self.private_networks {
            Some(networks) => networks.iter().filter_map(|network| parsed(network)).collect(),
            None if shared => Vec::new(),
            None => LOOPBACK.iter().filter_map(|network| parsed(network)).collect(),
        }
    }

    pub(super) fn keys(&mut self, section: &mut Section<'_, '_>) {
        section.key(
            "plain_http",
            Flag,
            &mut self.plain_http,
            "Whether receivers on other machines may be called without TLS. Messages would travel readable.",
        );
        section.key(
            "private_networks",
            Maybe(ListOf(Text::that("a network such as 10.0.0.0/8", is_network))),
            &mut self.private_networks,
            "Networks in which receivers may be although their addresses are private. Without it: this machine, or none with tenants.",
        );
        section.key(
            "timeout_seconds",
            Span::seconds(1),
            &mut self.timeout,
            "How long a receiver may take to answer.",
        );
        section.key(
            "concurrency",
            Int::at_least(1),
            &mut self.concurrency,
            "Deliveries to one receiver at a time; of one sandbox there is never more than one.",
        );
        section.key("max_webhooks", Int::at_least(1), &mut self.max_webhooks, "Webhooks of one owner.");
        section.key(
            "give_up_after_seconds",
            Span::seconds(1),
            &mut self.give_up_after,
            "How long a delivery is tried again before it is dead.",
        );
        section.key(
            "disable_after_seconds",
            Span::seconds(1),
            &mut self.disable_after,
            "A webhook to which nothing could be delivered for so long is disabled.",
        );
        section.key(
            "secret_overlap_seconds",
            Span::seconds(0),
            &mut self.secret_overlap,
            "How long messages are signed with a secret that was replaced, beside the new one.",
        );
    }
}
