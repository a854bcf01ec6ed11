//! The store port in memory. Survives as long as its `Arc`, so that a test can restart an engine on it.

use std::{
    collections::{BTreeMap, HashMap},
    sync::{Mutex, MutexGuard, PoisonError},
};

use async_trait::async_trait;
use sandglass_sandbox::{
    SandboxId, SnapshotId, Timestamp,
    breaker::Breaker,
    lifecycle::intent::Intent,
    policy::Usage,
    pool::Pool,
    ports::store::{
        Advance, AgentRecord, BreakerRecord, Claim, EndedSandbox, EventRecord, HistoryBounds,
        IdempotencyRecord, SequencedEvent, SnapshotFilter, Store, StoreError,
    },
    snapshot::{SnapshotRecord, SnapshotState},
};

#[derive(Debug, Default)]
struct Tables {
    intents: HashMap<SandboxId, Intent>,
    /// In order of `seq`, which is counted over all sandboxes.
    events: Vec<(SandboxId, SequencedEvent)>,
    last_seq: u64,
    keys: HashMap<String, (IdempotencyRecord, Timestamp)>,
    snapshots: HashMap<SnapshotId, SnapshotRecord>,
    agents: HashMap<SandboxId, AgentRecord>,
    usages: HashMap<SandboxId, Usage>,
    breakers: HashMap<String, BreakerRecord>,
    pools: BTreeMap<String, Pool>,
    /// Writes to refuse before the next one succeeds.
    refuse: u32,
    /// Creates to write down and answer with an error: the ambiguous case.
    deny: u32,
}

impl Tables {
    fn append(&mut self, id: SandboxId, events: &[EventRecord]) {
        for event in events {
            self.last_seq += 1;
            self.events.push((id, SequencedEvent { seq: self.last_seq, event: event.clone() }));
        }
    }

    fn history(&self, id: SandboxId) -> impl Iterator<Item = &SequencedEvent> {
        self.events.iter().filter(move |(of, _)| *of == id).map(|(_, e)| e)
    }
}

fn matches(filter: &SnapshotFilter, snapshot: &SnapshotRecord) -> bool {
    filter.namespace == snapshot.namespace
        && filter.source.is_none_or(|source| source == snapshot.source)
        && (filter.name.is_none() || filter.name == snapshot.name)
        && (filter.states.is_empty() || filter.states.contains(&snapshot.state))
}

/// See the module documentation.
#[derive(Debug, Default)]
pub struct MemoryStore(Mutex<Tables>);

impl MemoryStore {
    /// Makes the next `writes` writes fail as a full disk would.
    pub fn refuse_writes(&self, writes: u32) {
        self.lock().refuse = writes;
    }

    /// Writes the next creates down and says that it could not, as when the answer of a server is lost.
    pub fn deny_creates(&self, creates: u32) {
        self.lock().deny = creates;
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
                return Ok(Claim::Taken(taken.0.clone()));
            }
            tables.keys.insert(key.to_owned(), (record.clone(), intent.accepted_at));
        }
        tables.intents.insert(intent.sandbox_id, intent.clone());
        if tables.deny > 0 {
            tables.deny -= 1;
            return Err(StoreError::Unavailable("no answer (injected)".into()));
        }
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
            tables.append(intent.sandbox_id, std::slice::from_ref(event));
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
        tables.append(id, events);
        Ok(Advance::Written)
    }

    async fn append(&self, id: SandboxId, events: &[EventRecord]) -> Result<(), StoreError> {
        self.write()?.append(id, events);
        Ok(())
    }

    async fn history(&self, id: SandboxId, limit: u32) -> Result<Vec<EventRecord>, StoreError> {
        let tables = self.lock();
        let all: Vec<_> = tables.history(id).map(|e| e.event.clone()).collect();
        Ok(all[all.len().saturating_sub(limit as usize)..].to_vec())
    }

    async fn idempotency(&self, key: &str) -> Result<Option<IdempotencyRecord>, StoreError> {
        Ok(self.lock().keys.get(key).map(|(record, _)| record.clone()))
    }

    async fn release_key(&self, id: SandboxId) -> Result<(), StoreError> {
        self.write()?.keys.retain(|_, (record, _)| record.sandbox_id != id);
        Ok(())
    }

    async fn prune(&self, before: Timestamp) -> Result<u64, StoreError> {
        let mut tables = self.write()?;
        let had = tables.events.len() + tables.keys.len();
        tables.events.retain(|(_, e)| e.event.at >= before);
        tables.keys.retain(|_, (_, at)| *at >= before);
        Ok((had - tables.events.len() - tables.keys.len()) as u64)
    }

    async fn history_after(
        &self,
        id: SandboxId,
        after: u64,
        limit: u32,
    ) -> Result<Vec<SequencedEvent>, StoreError> {
        Ok(self.lock().history(id).filter(|e| e.seq > after).take(limit as usize).cloned().collect())
    }

    async fn history_bounds(&self, id: SandboxId) -> Result<Option<HistoryBounds>, StoreError> {
        let tables = self.lock();
        let first = tables.history(id).next().map(|e| e.seq);
        let last = tables.history(id).last().map(|e| e.seq);
        Ok(first.zip(last).map(|(first, last)| HistoryBounds { first, last }))
    }

    async fn ended(&self, since: Timestamp, id: Option<SandboxId>) -> Result<Vec<EndedSandbox>, StoreError> {
        let tables = self.lock();
        let of_kind = |id: SandboxId, kind: &'static str| {
            tables.history(id).filter(move |l| l.event.kind == kind).map(|l| l.event.message.clone())
        };
        let ends = tables.events.iter().rev().filter(|(of, line)| {
            line.event.kind == "removed" && line.event.at >= since && id.is_none_or(|id| id == *of)
        });
        let ended = ends.map(|(of, line)| EndedSandbox {
            sandbox_id: *of,
            at: line.event.at,
            reason: line.event.message.clone(),
            owner: of_kind(*of, "owner").next(),
            records: of_kind(*of, "record").collect(),
        });
        Ok(ended.filter(|one| !one.records.is_empty()).collect())
    }

    async fn agents(&self) -> Result<Vec<AgentRecord>, StoreError> {
        Ok(self.lock().agents.values().cloned().collect())
    }

    async fn save_agent(&self, record: &AgentRecord, events: &[EventRecord]) -> Result<(), StoreError> {
        let mut tables = self.write()?;
        tables.agents.insert(record.sandbox_id, record.clone());
        tables.append(record.sandbox_id, events);
        Ok(())
    }

    async fn forget_agent(&self, id: SandboxId) -> Result<(), StoreError> {
        self.write()?.agents.remove(&id);
        Ok(())
    }

    async fn usages(&self) -> Result<Vec<(SandboxId, Usage)>, StoreError> {
        Ok(self.lock().usages.iter().map(|(id, usage)| (*id, usage.clone())).collect())
    }

    async fn save_usage(&self, id: SandboxId, usage: &Usage) -> Result<(), StoreError> {
        self.write()?.usages.insert(id, usage.clone());
        Ok(())
    }

    async fn forget_usage(&self, id: SandboxId) -> Result<(), StoreError> {
        self.write()?.usages.remove(&id);
        Ok(())
    }

    async fn breaker(&self, key: &str) -> Result<Option<BreakerRecord>, StoreError> {
        Ok(self.lock().breakers.get(key).cloned())
    }

    async fn save_breaker(
        &self,
        key: &str,
        expected: Option<u64>,
        breaker: &Breaker,
        _: Timestamp,
    ) -> Result<Advance, StoreError> {
        let mut tables = self.write()?;
        let known = tables.breakers.get(key).map(|record| record.version);
        if known != expected {
            return Ok(Advance::Lost);
        }
        let version = expected.map_or(1, |version| version + 1);
        tables.breakers.insert(key.to_owned(), BreakerRecord { version, breaker: breaker.clone() });
        Ok(Advance::Written)
    }

    async fn pools(&self) -> Result<Vec<Pool>, StoreError> {
        Ok(self.lock().pools.values().cloned().collect())
    }

    async fn insert_pool(&self, pool: &Pool) -> Result<Advance, StoreError> {
        let mut tables = self.write()?;
        if tables.pools.contains_key(&pool.name) {
            return Ok(Advance::Lost);
        }
        tables.pools.insert(pool.name.clone(), pool.clone());
        Ok(Advance::Written)
    }

    async fn replace_pool(&self, pool: &Pool) -> Result<Advance, StoreError> {
        let mut tables = self.write()?;
        let there = tables.pools.contains_key(&pool.name);
        if there {
            tables.pools.insert(pool.name.clone(), pool.clone());
        }
        Ok(if there { Advance::Written } else { Advance::Lost })
    }

    async fn delete_pool(&self, name: &str) -> Result<Advance, StoreError> {
        let removed = self.write()?.pools.remove(name);
        Ok(if removed.is_some() { Advance::Written } else { Advance::Lost })
    }

    async fn insert_snapshot(&self, snapshot: &SnapshotRecord) -> Result<(), StoreError> {
        let mut tables = self.write()?;
        if tables.snapshots.contains_key(&snapshot.id) {
            return Err(StoreError::Unavailable("a snapshot of that id exists".into()));
        }
        tables.snapshots.insert(snapshot.id, snapshot.clone());
        Ok(())
    }

    async fn advance_snapshot(
        &self,
        expected: SnapshotState,
        snapshot: &SnapshotRecord,
    ) -> Result<Advance, StoreError> {
        let mut tables = self.write()?;
        match tables.snapshots.get_mut(&snapshot.id) {
            Some(kept) if kept.state == expected => {
                *kept = snapshot.clone();
                Ok(Advance::Written)
            }
            _ => Ok(Advance::Lost),
        }
    }

    async fn delete_snapshot(&self, id: SnapshotId, expected: SnapshotState) -> Result<Advance, StoreError> {
        let mut tables = self.write()?;
        if tables.snapshots.get(&id).map(|s| s.state) != Some(expected) {
            return Ok(Advance::Lost);
        }
        tables.snapshots.remove(&id);
        Ok(Advance::Written)
    }

    async fn snapshot(&self, id: SnapshotId) -> Result<Option<SnapshotRecord>, StoreError> {
        Ok(self.lock().snapshots.get(&id).cloned())
    }

    async fn snapshots(
        &self,
        filter: &SnapshotFilter,
        offset: u64,
        limit: u64,
    ) -> Result<(Vec<SnapshotRecord>, u64), StoreError> {
        let tables = self.lock();
        let mut found: Vec<_> = tables.snapshots.values().filter(|s| matches(filter, s)).cloned().collect();
        found.sort_by_key(|s| std::cmp::Reverse((s.created_at, s.id)));
        let total = found.len() as u64;
        let (offset, limit) =
            (usize::try_from(offset).unwrap_or(usize::MAX), usize::try_from(limit).unwrap_or(usize::MAX));
        Ok((found.into_iter().skip(offset).take(limit).collect(), total))
    }

    async fn snapshots_in(&self, state: SnapshotState) -> Result<Vec<SnapshotRecord>, StoreError> {
        Ok(self.lock().snapshots.values().filter(|s| s.state == state).cloned().collect())
    }

    async fn shut(&self) {}
}
