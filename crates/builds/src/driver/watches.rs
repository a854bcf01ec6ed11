//! Who waits for changes of a build in this process.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
};

use sandglass_sandbox::ImageBuildId;
use tokio::sync::watch;

use crate::build::ImageBuild;

type Latest = Option<Arc<ImageBuild>>;

/// The latest row of each build that somebody watches; nothing for the others.
#[derive(Debug, Default)]
pub(super) struct Watches(Mutex<HashMap<ImageBuildId, watch::Sender<Latest>>>);

impl Watches {
    /// Sees every row that is told from now on, at least the latest.
    pub(super) fn watch(&self, id: ImageBuildId) -> watch::Receiver<Latest> {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.entry(id).or_insert_with(|| watch::channel(None).0).subscribe()
    }

    /// Tells a row that was written or read. An older one than was told before is not told again.
    pub(super) fn tell(&self, row: &ImageBuild) {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(sender) = all.get(&row.id) else { return };
        sender.send_if_modified(|latest| {
            let newer = latest.as_ref().is_none_or(|latest| latest.version < row.version);
            if newer {
                *latest = Some(Arc::new(row.clone()));
            }
            newer
        });
        // Nothing but cleaning follows an end, and nobody is left to be told when all are gone.
        if row.state.terminal() || sender.receiver_count() == 0 {
            all.remove(&row.id);
        }
    }
}
