//! The log of events as receivers are told of it: history, in the words of the event stream, with whose it is and how that is labelled.

use std::{
    collections::{BTreeMap, HashMap},
    sync::{Arc, Weak},
};

use async_trait::async_trait;
use sandglass_sandbox::{
    SandboxId, Timestamp,
    ports::store::{SequencedEvent, StoreError},
};
use sandglass_webhooks::{Events, Message, Owner, Subject, Taken};
use serde::Deserialize;
use serde_json::{Map, Value};

use crate::{
    engine::{
        Engine,
        history::{OWNER, RECORD},
    },
    http::translate,
    store::{LoggedEvent, OF_BUILD, SqlStore},
};

/// See the module documentation.
pub(super) struct Log {
    store: SqlStore,
    /// The engine ends when the server does; then nothing is written any more.
    engine: Weak<Engine>,
}

/// Whose a sandbox is and how it is labelled.
type Labels = (Owner, BTreeMap<String, String>);

impl Log {
    pub(super) fn new(store: SqlStore, engine: &Arc<Engine>) -> Self {
        Self { store, engine: Arc::downgrade(engine) }
    }

    async fn labels(&self, id: SandboxId) -> Result<Labels, StoreError> {
        let entry = self.engine.upgrade().and_then(|engine| engine.index().get(id));
        if let Some(entry) = entry.filter(|entry| entry.spec().is_some()) {
            let owner = Owner { tenant: entry.tenant().map(str::to_owned), namespace: None };
            return Ok((owner, entry.facts().map(|facts| facts.metadata.clone()).unwrap_or_default()));
        }
        // It is gone: its history tells.
        let (mut owner, mut metadata) = Labels::default();
        for (kind, message) in self.store.kept_of(id).await? {
            match kind.as_str() {
                OWNER => owner.tenant = Some(message),
                RECORD => metadata = recorded(&message),
                _ => {}
            }
        }
        Ok((owner, metadata))
    }
}

/// What a line about an image build holds.
#[derive(Deserialize)]
struct OfBuild {
    namespace: Option<String>,
    #[serde(default)]
    metadata: BTreeMap<String, String>,
    #[serde(default)]
    data: Map<String, Value>,
}

fn recorded(record: &str) -> BTreeMap<String, String> {
    #[derive(Default, Deserialize)]
    struct Record {
        #[serde(default)]
        metadata: BTreeMap<String, String>,
    }
    serde_json::from_str::<Record>(record).unwrap_or_default().metadata
}

fn of_build(line: &LoggedEvent, id: &str) -> Option<Message> {
    let told: OfBuild = serde_json::from_str(&line.event.message).ok()?;
    Some(Message {
        seq: line.seq,
        subject: Subject::ImageBuild(id.parse().ok()?),
        kind: line.event.kind.clone(),
        at: line.event.at,
        owner: Owner { tenant: None, namespace: told.namespace },
        metadata: told.metadata,
        data: told.data,
    })
}

/// A message without whose it is.
fn of_sandbox(line: &LoggedEvent, id: SandboxId) -> Option<Message> {
    let event = translate::event(&SequencedEvent { seq: line.seq, event: line.event.clone() })?;
    Some(Message {
        seq: line.seq,
        subject: Subject::Sandbox(id),
        kind: event.kind,
        at: Timestamp::clamped(line.event.at.as_millis()),
        owner: Owner::default(),
        metadata: BTreeMap::new(),
        data: event.data,
    })
}

#[async_trait]
impl Events for Log {
    async fn settled(&self) -> Result<u64, StoreError> {
        self.store.settled().await
    }

    async fn after(&self, after: u64, settled: u64, limit: u32) -> Result<Taken, StoreError> {
        let lines = self.store.logged(after, settled, limit).await?;
        let whole = u32::try_from(lines.len()).is_ok_and(|read| read < limit);
        let read_to = if whole { settled } else { lines.last().map_or(settled, |last| last.seq) };
        let mut known: HashMap<SandboxId, Labels> = HashMap::new();
        let mut messages = Vec::with_capacity(lines.len());
        for line in &lines {
            if let Some(id) = line.subject.strip_prefix(OF_BUILD) {
                messages.extend(of_build(line, id));
                continue;
            }
            let Ok(id) = line.subject.parse::<SandboxId>() else { continue };
            let Some(message) = of_sandbox(line, id) else { continue };
            let labels = match known.get(&id) {
                Some(labels) => labels.clone(),
                None => known.entry(id).or_insert(self.labels(id).await?).clone(),
            };
            messages.push(Message { owner: labels.0, metadata: labels.1, ..message });
        }
        Ok(Taken { messages, read_to })
    }

    async fn grown(&self) {
        match self.engine.upgrade() {
            Some(engine) => engine.history_grown().await,
            None => std::future::pending().await,
        }
    }
}
