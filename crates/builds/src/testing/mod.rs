//! In-memory ports with faults on demand, for tests.

mod engine;
mod faults;
mod logs;
mod resolver;
mod store;
mod tables;

use std::sync::Arc;

use sandglass_sandbox::{Clock, Timestamp};
use tokio::time::Instant;

pub use engine::{FakeEngine, World};
pub use faults::{Fault, Faults};
pub use logs::MemoryLogs;
pub use resolver::FakeResolver;
pub use store::MemoryStore;
pub use tables::Tables;

use crate::{
    driver::{Ports, Settings},
    ports::{Filter, Filters, MemoryVault, Silent},
    submission::Confidential,
};

/// A wall clock on tokio's (pausable) time. Starts at a fixed instant; create it inside a runtime.
#[derive(Debug, Clone, Copy)]
pub struct TokioClock {
    started: Instant,
}

impl Default for TokioClock {
    fn default() -> Self {
        Self { started: Instant::now() }
    }
}

impl Clock for TokioClock {
    fn now(&self) -> Timestamp {
        crate::time::after(Timestamp::clamped(1_800_000_000_000), self.started.elapsed())
    }
}

/// Takes every secret out of a chunk, if it is whole in it.
#[derive(Debug, Clone, Copy, Default)]
pub struct Masking;

struct Mask(Vec<String>);

impl Filters for Masking {
    fn filter(&self, confidential: &Confidential) -> Box<dyn Filter> {
        Box::new(Mask(confidential.secrets.values().map(|secret| secret.expose().to_owned()).collect()))
    }
}

impl Filter for Mask {
    fn pass(&mut self, chunk: &[u8]) -> Vec<u8> {
        let text = String::from_utf8_lossy(chunk).into_owned();
        self.0.iter().fold(text, |text, secret| text.replace(secret.as_str(), "***")).into_bytes()
    }

    fn finish(&mut self) -> Vec<u8> {
        Vec::new()
    }
}

/// Everything that outlives a server: tables, the engine's world, the logs, the remotes, the clock.
#[derive(Clone, Default)]
pub struct Surroundings {
    pub tables: Arc<std::sync::Mutex<Tables>>,
    pub world: Arc<std::sync::Mutex<World>>,
    pub logs: Arc<MemoryLogs>,
    pub resolver: Arc<FakeResolver>,
    pub vault: Arc<MemoryVault>,
    pub clock: TokioClock,
}

impl Surroundings {
    /// The ports of one server; what its faults cut off does not touch another's.
    pub fn ports(&self, faults: &Arc<Faults>) -> Ports {
        Ports {
            store: Arc::new(MemoryStore::new(self.tables.clone(), faults.clone())),
            engine: Arc::new(FakeEngine::new(self.world.clone(), faults.clone())),
            resolver: self.resolver.clone(),
            logs: self.logs.clone(),
            filters: Arc::new(Masking),
            vault: self.vault.clone(),
            observer: Arc::new(Silent),
            clock: Arc::new(self.clock),
        }
    }

    /// Settings of the `run`-th server.
    pub fn settings(&self, run: usize) -> Settings {
        Settings::new(format!("server-{run}"))
    }
}
