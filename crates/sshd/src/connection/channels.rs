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
    served: Served,
}

/// Whether somebody serves a channel already. One that this side opened may be confirmed, filled and closed by the peer
/// before the task that opened it gets to run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Served {
    Yes,
    NotYet,
}

impl Channels {
    pub(crate) fn new(flow: Arc<Flow>, closing: CancellationToken) -> Self {
        Channels { open: Arc::default(), flow, closing }
    }

    /// A channel that the peer opens: the bytes that arrive, and a token that is cancelled once the channel or its
    /// connection has gone.
    pub(crate) fn open(&self, id: ChannelId, session: Option<Session>) -> (Inbox, CancellationToken) {
        let entry = Entry { session, ..self.entry(Served::Yes) };
        let ends = entry.ends();
        self.lock().insert(id, entry);
        ends
    }

    /// A channel that this side has opened was confirmed: from here on, bytes may arrive.
    pub(crate) fn confirmed(&self, id: ChannelId) {
        self.lock().entry(id).or_insert_with(|| self.entry(Served::NotYet));
    }

    /// The same as of [`Channels::open`] for whoever opened the channel, before or after it hears of the confirmation.
    pub(crate) fn opened(&self, id: ChannelId) -> (Inbox, CancellationToken) {
        let mut open = self.lock();
        let entry = open.entry(id).or_insert_with(|| self.entry(Served::NotYet));
        entry.served = Served::Yes;
        entry.ends()
    }

    fn entry(&self, served: Served) -> Entry {
        let (inbox, closing) = (Inbox::new(Arc::clone(&self.flow)), self.closing.child_token());
        Entry { inbox, closing, session: None, served }
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

    /// The peer has closed it; what it sent before can still be taken.
    pub(crate) fn closed(&self, id: ChannelId) {
        let mut open = self.lock();
        let Some(entry) = open.get(&id) else { return };
        entry.inbox.end();
        entry.closing.cancel();
        if entry.served == Served::Yes {
            open.remove(&id);
        }
    }

    /// The connection has gone, and with it all its channels.
    pub(crate) fn all_closed(&self) {
        let open = std::mem::take(&mut *self.lock());
        for entry in open.into_values() {
            entry.inbox.end();
        }
        self.closing.cancel();
    }

    /// Whoever served it is done; also when it is not there any more.
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

impl Entry {
    fn ends(&self) -> (Inbox, CancellationToken) {
        (self.inbox.clone(), self.closing.clone())
    }
}

#[cfg(test)]
mod tests {
    use russh::keys::ssh_encoding::Decode;

    use super::*;

    fn channels() -> (Channels, ChannelId) {
        (
            Channels::new(Arc::default(), CancellationToken::new()),
            ChannelId::decode(&mut &[0, 0, 0, 7][..]).unwrap(),
        )
    }

    #[tokio::test]
    async fn who_opened_a_channel_may_hear_of_it_before_or_after_its_bytes_come() {
        let (channels, id) = channels();
        channels.confirmed(id);
        channels.push(id, b"early").unwrap();
        let (inbox, _) = channels.opened(id);
        assert_eq!(inbox.next().await.as_deref(), Some(&b"early"[..]));
        let (channels, id) = self::channels();
        let (inbox, _) = channels.opened(id);
        channels.confirmed(id);
        channels.push(id, b"late").unwrap();
        assert_eq!(inbox.next().await.as_deref(), Some(&b"late"[..]));
    }

    #[tokio::test]
    async fn a_channel_that_was_closed_before_it_was_served_is_known_as_closed() {
        let (channels, id) = channels();
        channels.confirmed(id);
        channels.closed(id);
        let (inbox, closing) = channels.opened(id);
        assert!(closing.is_cancelled());
        assert_eq!(inbox.next().await, None);
        channels.remove(id);
        assert!(channels.lock().is_empty());
    }
}
