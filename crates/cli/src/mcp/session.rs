//! What one run of the server knows: whom to ask, what it created, and which calls are under way.
//!
//! Bound: the ids of the last 4,096 sandboxes created; older ones are left to their time to live.

use std::{
    collections::VecDeque,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use tokio_util::task::TaskTracker;

use crate::{client::Client, output::note};

/// Created sandboxes that are remembered.
const REMEMBERED: usize = 4096;
/// How long calls may take to wind down, and sandboxes to be removed, when the run ends.
const PARTING: Duration = Duration::from_secs(15);

/// What becomes of the sandboxes that were created, when the run ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AtEnd {
    /// They stay until they expire.
    Keep,
    /// They are removed.
    Remove,
}

#[derive(Debug)]
struct Inner {
    client: Client,
    created: Mutex<VecDeque<String>>,
    calls: TaskTracker,
}

/// The state that all connections share.
#[derive(Debug, Clone)]
pub struct Session(Arc<Inner>);

impl Session {
    /// A run in which nothing has been created yet.
    pub fn new(client: Client) -> Self {
        Self(Arc::new(Inner { client, created: Mutex::default(), calls: TaskTracker::new() }))
    }

    /// The client of the sandbox server.
    pub fn client(&self) -> &Client {
        &self.0.client
    }

    /// To be held for as long as a call may leave something behind.
    pub fn calls(&self) -> &TaskTracker {
        &self.0.calls
    }

    /// A sandbox was created.
    pub fn created(&self, id: &str) {
        let mut all = self.0.created.lock().unwrap_or_else(PoisonError::into_inner);
        if all.len() == REMEMBERED {
            all.pop_front();
        }
        all.push_back(id.to_owned());
    }

    /// A sandbox is gone.
    pub fn removed(&self, id: &str) {
        self.0.created.lock().unwrap_or_else(PoisonError::into_inner).retain(|known| known != id);
    }

    /// What was created in this run and not removed, oldest first.
    pub fn creations(&self) -> Vec<String> {
        self.0.created.lock().unwrap_or_else(PoisonError::into_inner).iter().cloned().collect()
    }

    /// Waits for calls that wind down, then does what was asked for with the sandboxes and says what stays.
    pub async fn end(&self, at_end: AtEnd) {
        self.0.calls.close();
        if tokio::time::timeout(PARTING, self.0.calls.wait()).await.is_err() {
            note("warning: left with calls still under way");
        }
        if at_end == AtEnd::Remove && tokio::time::timeout(PARTING, self.remove_all()).await.is_err() {
            note("warning: the sandbox server took too long to remove this run's sandboxes");
        }
        let left = self.creations();
        if !left.is_empty() {
            note(&format!("sandboxes created here that stay until they expire: {}", left.join(", ")));
        }
    }

    async fn remove_all(&self) {
        for id in self.creations() {
            match self.0.client.delete(&id).await {
                Ok(_) => self.removed(&id),
                Err(error) => note(&format!("warning: sandbox {id} could not be removed: {error}")),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::profile::Profile;

    fn session() -> Session {
        Session::new(Client::new(Profile::known("http://127.0.0.1:9", None).unwrap()).unwrap())
    }

    #[test]
    fn creations_are_remembered_until_they_are_removed() {
        let session = session();
        session.created("a");
        session.created("b");
        session.removed("a");
        session.removed("never");
        assert_eq!(session.creations(), ["b"]);
    }

    #[test]
    fn the_memory_of_creations_is_bounded() {
        let session = session();
        for number in 0..REMEMBERED + 2 {
            session.created(&number.to_string());
        }
        let all = session.creations();
        assert_eq!((all.len(), all[0].as_str()), (REMEMBERED, "2"));
    }
}
