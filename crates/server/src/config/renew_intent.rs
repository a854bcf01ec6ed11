//! `[renew_intent]`: sandboxes that live on while they are used.

use std::time::Duration;

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
