//! The open channels of one connection: where arriving bytes go, and what ends with each.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use russh::ChannelId;
use tokio_util::sync::CancellationToken;

use crate::flow::{Flow, Inbox, Overrun};
use crate::session::Session;

/// Clones are the same channels. Whoever serves a channel removes it; the peer's closing removes it too.
#[derive(Clone)]
pub(crate) struct Channels {
    open: Arc<Mutex<HashMap<ChannelId, Entry>>>,
    flow: Arc<Flow>,
    closing: CancellationToken,
}

struct Entry {
    inbox: Inbox,
    closing: CancellationToken,
    session: Option<Session>,
}

impl Channels {
    pub(crate) fn new(flow: Arc<Flow>, closing: CancellationToken) -> Self {
        Channels { open: Arc::default(), flow, closing }
    }

    /// The bytes that arrive, and a token that is cancelled once the channel or its connection has gone.
    pub(crate) fn open(&self, id: ChannelId, session: Option<Session>) -> (Inbox, CancellationToken) {
        let (inbox, closing) = (Inbox::new(Arc::clone(&self.flow)), self.closing.child_token());
        self.lock().insert(id, Entry { inbox: inbox.clone(), closing: closing.clone(), session });
        (inbox, closing)
    }

    /// What was made for a channel that the peer has confirmed, unless it has closed it since.
    pub(crate) fn forwarded(&self, id: ChannelId) -> Option<(Inbox, CancellationToken)> {
        self.lock().get(&id).map(|entry| (entry.inbox.clone(), entry.closing.clone()))
    }

    pub(crate) fn sessions(&self) -> usize {
        self.lock().values().filter(|entry| entry.session.is_some()).count()
    }

    /// None for a channel that has no session, or is not open.
    pub(crate) fn session<T>(
        &self,
        id: ChannelId,
        work: impl FnOnce(&mut Session, &Inbox, &CancellationToken) -> T,
    ) -> Option<T> {
        let mut open = self.lock();
        let entry = open.get_mut(&id)?;
        Some(work(entry.session.as_mut()?, &entry.inbox, &entry.closing))
    }

    pub(crate) fn push(&self, id: ChannelId, data: &[u8]) -> Result<(), Overrun> {
        self.lock().get(&id).map_or(Ok(()), |entry| entry.inbox.push(data))
    }

    pub(crate) fn end(&self, id: ChannelId) {
        if let Some(entry) = self.lock().get(&id) {
            entry.inbox.end();
        }
    }

    /// Also when it is not there any more.
    pub(crate) fn remove(&self, id: ChannelId) {
        let removed = self.lock().remove(&id);
        if let Some(entry) = removed {
            entry.closing.cancel();
            entry.inbox.discard();
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<ChannelId, Entry>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
