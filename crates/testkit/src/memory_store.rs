//! The store port in memory. Survives as long as its `Arc`, so that a test can restart an engine on it.

use std::{
    collections::HashMap,
    sync::{Mutex, MutexGuard, PoisonError},
};

use async_trait::async_trait;
use sandglass_sandbox::{
    SandboxId, Timestamp,
    lifecycle::intent::Intent,
    ports::store::{Advance, Claim, EventRecord, IdempotencyRecord, Store, StoreError},
};

#[derive(Debug, Default)]
struct Tables {
    intents: HashMap<SandboxId, Intent>,
    events: Vec<(SandboxId, EventRecord)>,
    keys: HashMap<String, IdempotencyRecord>,
    /// Writes to refuse before the next one succeeds.
    refuse: u32,
}

/// See the module documentation.
#[derive(Debug, Default)]
pub struct MemoryStore(Mutex<Tables>);

impl MemoryStore {
    /// Makes the next `writes` writes fail as a full disk would.
    pub fn refuse_writes(&self, writes: u32) {
        self.lock().refuse = writes;
    }

    fn lock(&self) -> MutexGuard<'_, Tables> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> Result<MutexGuard<'_, Tables>, StoreError> {
        let mut tables = self.lock();
        if tables.refuse > 0 {
            tables.refuse -= 1;
            return Err(StoreError::Unavailable("disk full (injected)".into()));
        }
        Ok(tables)
    }
}

#[async_trait]
impl Store for MemoryStore {
    async fn open_intents(&self) -> Result<Vec<Intent>, StoreError> {
        Ok(self.lock().intents.values().cloned().collect())
    }

    async fn insert_create(
        &self,
        intent: &Intent,
        key: Option<(&str, &IdempotencyRecord)>,
    ) -> Result<Claim, StoreError> {
        let mut tables = self.write()?;
        if let Some((key, record)) = key {
            if let Some(taken) = tables.keys.get(key) {
                return Ok(Claim::Taken(taken.clone()));
            }
            tables.keys.insert(key.to_owned(), record.clone());
        }
        tables.intents.insert(intent.sandbox_id, intent.clone());
        Ok(Claim::Claimed)
    }

    async fn advance(
        &self,
        expected: Option<u64>,
        intent: &Intent,
        event: Option<&EventRecord>,
    ) -> Result<Advance, StoreError> {
        let mut tables = self.write()?;
        if tables.intents.get(&intent.sandbox_id).map(|i| i.generation) != expected {
            return Ok(Advance::Lost);
        }
        tables.intents.insert(intent.sandbox_id, intent.clone());
        if let Some(event) = event {
            tables.events.push((intent.sandbox_id, event.clone()));
        }
        Ok(Advance::Written)
    }

    async fn close(
        &self,
        id: SandboxId,
        expected: u64,
        events: &[EventRecord],
    ) -> Result<Advance, StoreError> {
        let mut tables = self.write()?;
        if tables.intents.get(&id).map(|i| i.generation) != Some(expected) {
            return Ok(Advance::Lost);
        }
        tables.intents.remove(&id);
        tables.events.extend(events.iter().map(|e| (id, e.clone())));
        Ok(Advance::Written)
    }

    async fn append(&self, id: SandboxId, events: &[EventRecord]) -> Result<(), StoreError> {
        self.write()?.events.extend(events.iter().map(|e| (id, e.clone())));
        Ok(())
    }

    async fn history(&self, id: SandboxId, limit: u32) -> Result<Vec<EventRecord>, StoreError> {
        let tables = self.lock();
        let all: Vec<_> = tables.events.iter().filter(|(of, _)| *of == id).map(|(_, e)| e.clone()).collect();
        Ok(all[all.len().saturating_sub(limit as usize)..].to_vec())
    }

    async fn idempotency(&self, key: &str) -> Result<Option<IdempotencyRecord>, StoreError> {
        Ok(self.lock().keys.get(key).cloned())
    }

    async fn release_key(&self, id: SandboxId) -> Result<(), StoreError> {
        self.write()?.keys.retain(|_, record| record.sandbox_id != id);
        Ok(())
    }

    async fn prune(&self, before: Timestamp) -> Result<u64, StoreError> {
        let mut tables = self.write()?;
        let had = tables.events.len();
        tables.events.retain(|(_, e)| e.at >= before);
        Ok((had - tables.events.len()) as u64)
    }
}
