//! Outgoing webhooks of this server: the log of events that they are told of, and the settings of the driver.
//!
//! Owns the translation from lines of history to messages. Does not own the driver or the rules for receivers (those are the crate
//! `webhooks`), nor the rows.

mod log;

use std::{sync::Arc, time::Duration};

use sandglass_sandbox::Clock;
use sandglass_webhooks::{ClientError, Couriers, HttpSender, Receivers, Settings, WebhookStore, pace::Pace};
use uuid::Uuid;

use crate::{
    config::{Config, StoreKind},
    engine::Engine,
    store::SqlStore,
};

/// The name of a server that shares its store with no other: started again it has its leases at once.
const ALONE: &str = "this";

/// Webhooks, as the HTTP side uses them.
#[derive(Clone)]
pub struct Webhooks {
    pub couriers: Couriers,
    pub store: Arc<dyn WebhookStore>,
    pub receivers: Arc<Receivers>,
    /// Webhooks of one owner at most.
    pub most: usize,
    /// How long a secret that was replaced is still signed with.
    pub overlap: Duration,
}

impl std::fmt::Debug for Webhooks {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Webhooks").field("couriers", &self.couriers).finish_non_exhaustive()
    }
}

impl Webhooks {
    /// Begins to send.
    ///
    /// # Errors
    /// When the HTTP client cannot be set up.
    pub fn start(
        config: &Config,
        store: &SqlStore,
        engine: &Arc<Engine>,
        clock: Arc<dyn Clock>,
    ) -> Result<Self, ClientError> {
        crate::tls::use_ring();
        let wanted = &config.webhooks;
        let receivers = Arc::new(Receivers {
            plain_http: wanted.plain_http,
            private_networks: wanted.networks(config.tenants.is_some()),
        });
        let sender = HttpSender::new(receivers.clone(), wanted.timeout)?;
        let settings = Settings {
            pace: Pace { give_up_after: wanted.give_up_after, ..Pace::default() },
            disable_after: wanted.disable_after,
            concurrency: wanted.concurrency,
            ..Settings::default()
        };
        let name = match config.store.kind {
            StoreKind::Sqlite => ALONE.to_owned(),
            StoreKind::Postgresql => Uuid::new_v4().to_string(),
        };
        let rows: Arc<dyn WebhookStore> = Arc::new(store.clone());
        let events = Arc::new(log::Log::new(store.clone(), engine));
        let couriers = Couriers::start(name, (rows.clone(), events), Arc::new(sender), clock, settings);
        let overlap = wanted.secret_overlap;
        Ok(Self { couriers, store: rows, receivers, most: wanted.max_webhooks, overlap })
    }
}
