//! `[renew_intent]`: sandboxes that live on while they are used.

use std::time::Duration;

use super::kinds::{Flag, Int, Maybe, SecretText, Span, Text};
use super::reader::Section;
use super::values::Secret;

#[derive(Clone, Debug, PartialEq)]
pub struct RenewIntentConfig {
    pub enabled: bool,
    pub min_interval: Duration,
    pub redis: RedisConfig,
}

impl Default for RenewIntentConfig {
    fn default() -> Self {
        Self { enabled: false, min_interval: Duration::from_secs(60), redis: RedisConfig::default() }
    }
}

#[derive(Clone, Debug, PartialEq)]
pub struct RedisConfig {
    pub enabled: bool,
    /// Always set when enabled. A Redis URL may hold a password.
    pub dsn: Option<Secret>,
    pub queue_key: String,
    pub consumer_concurrency: usize,
}

impl Default for RedisConfig {
    fn default() -> Self {
        Self {
            enabled: false,
            dsn: None,
            queue_key: "opensandbox:renew:intent".to_owned(),
            consumer_concurrency: 8,
        }
    }
}

impl RenewIntentConfig {
    pub(super) fn keys(&mut self, section: &mut Section<'_, '_>) {
        section.key("enabled", Flag, &mut self.enabled, "Whether use of a sandbox extends its life at all.");
        section.key(
            "min_interval_seconds",
            Span::seconds(1),
            &mut self.min_interval,
            "Least time between two extensions of one sandbox.",
        );
        section.table("redis", "Messages of an ingress elsewhere.", &mut self.redis, RedisConfig::keys);
    }
}

impl RedisConfig {
    fn keys(&mut self, section: &mut Section<'_, '_>) {
        section.key("enabled", Flag, &mut self.enabled, "Whether messages are consumed.");
        section.key("dsn", Maybe(SecretText::any()), &mut self.dsn, "Redis address; required when enabled.");
        section.key("queue_key", Text::non_empty(), &mut self.queue_key, "Name of the list.");
        section.key(
            "consumer_concurrency",
            Int::at_least(1),
            &mut self.consumer_concurrency,
            "Messages handled at once.",
        );
    }
}
