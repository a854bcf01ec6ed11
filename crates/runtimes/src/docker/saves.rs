//! Which boxes are frozen only because they are being saved, also by a server that has ended since.
//!
//! An engine freezes a container while it commits it, and goes on with both when the server that asked is gone. A note on disk for each such
//! commit tells the next server that the box is not paused by anybody's wish and will be thawed by the engine.
//! Invariant: a box that was paused by a wish when its commit began has no note; one that is frozen by its commit has one.

use std::{
    collections::HashMap,
    fs, io,
    path::{Path, PathBuf},
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use sandglass_sandbox::{SandboxId, SnapshotId, ports::runtime::RuntimeError};
use tokio::time::{Instant, sleep, sleep_until};
use tracing::{info, warn};

use super::{Shared, container::Status, errors::failed};
use crate::host_paths::private_dir;

/// How long whoever wants to freeze or save the box waits for a commit of an earlier server.
const PATIENCE: Duration = Duration::from_secs(60);
/// After that time the engine has forgotten the commit, because it was itself ended in the middle, and the box is thawed here.
const FORGOTTEN: Duration = Duration::from_secs(300);
/// An engine may take so long until it freezes the box: what is seen of an inherited commit before that says nothing.
const UNTIL_FROZEN: Duration = Duration::from_secs(1);
const LOOK_AGAIN: Duration = Duration::from_millis(50);
/// Pause after a thaw that failed.
const THAW_AGAIN: Duration = Duration::from_secs(5);

#[derive(Clone, Copy)]
struct Entry {
    snapshot: SnapshotId,
    /// Since when only the engine knows of the commit; `None`: it is this process's own.
    inherited: Option<Instant>,
}

/// See the module documentation.
pub(super) struct Saves {
    dir: PathBuf,
    entries: Mutex<HashMap<SandboxId, Entry>>,
}

/// A commit of this process. Dropped without `end`, it is as if an earlier server had asked for it.
pub(super) struct Save<'a> {
    saves: &'a Saves,
    id: SandboxId,
}

impl Save<'_> {
    /// The engine has answered: the box is as it was before.
    pub(super) fn end(self) {
        self.saves.forget(self.id);
    }
}

impl Drop for Save<'_> {
    fn drop(&mut self) {
        if let Some(entry) = self.saves.lock().get_mut(&self.id) {
            entry.inherited = Some(Instant::now());
        }
    }
}

impl Saves {
    /// Reads the notes of earlier servers.
    pub(super) fn open(dir: PathBuf) -> io::Result<Self> {
        private_dir(&dir)?;
        let mut entries = HashMap::new();
        for entry in fs::read_dir(&dir)? {
            let path = entry?.path();
            let id = path.file_name().and_then(|name| name.to_str()).and_then(|name| name.parse().ok());
            let snapshot = fs::read_to_string(&path).ok().and_then(|text| text.trim().parse().ok());
            if let Some((id, snapshot)) = id.zip(snapshot) {
                entries.insert(id, Entry { snapshot, inherited: Some(Instant::now()) });
            } else {
                // Cut short by a full disk or a crash: it says nothing that could be used.
                fs::remove_file(&path)?;
            }
        }
        Ok(Self { dir, entries: Mutex::new(entries) })
    }

    /// Notes that the box is about to be frozen for that snapshot.
    pub(super) fn begin(&self, id: SandboxId, snapshot: SnapshotId) -> Save<'_> {
        if let Err(error) = fs::write(self.note(id), snapshot.to_string()) {
            warn!(sandbox = %id, %error, "that it is being saved cannot be noted; should this server end meanwhile, it will seem to be paused");
        }
        self.lock().insert(id, Entry { snapshot, inherited: None });
        Save { saves: self, id }
    }

    /// Whether the box is being saved: if it is frozen, then only for that.
    pub(super) fn has(&self, id: SandboxId) -> bool {
        self.lock().contains_key(&id)
    }

    /// The box of which an earlier server's commit for that snapshot may still be going on.
    fn source(&self, snapshot: SnapshotId) -> Option<SandboxId> {
        let entries = self.lock();
        let mut of_it = entries.iter().filter(|(_, e)| e.snapshot == snapshot && e.inherited.is_some());
        of_it.next().map(|(id, _)| *id)
    }

    /// The box was seen, and not frozen: an earlier server's commit is over.
    pub(super) fn seen_unfrozen(&self, id: SandboxId, now: Instant) {
        let inherited = self.lock().get(&id).and_then(|entry| entry.inherited);
        if inherited.is_some_and(|since| now.duration_since(since) >= UNTIL_FROZEN) {
            self.forget(id);
        }
    }

    /// Nothing of the box is being saved.
    pub(super) fn forget(&self, id: SandboxId) {
        if self.lock().remove(&id).is_none() {
            return;
        }
        match fs::remove_file(self.note(id)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                warn!(sandbox = %id, %error, "the note that it is being saved stays");
            }
            Ok(()) | Err(_) => {}
        }
    }

    fn inherited(&self) -> Vec<(SandboxId, Instant)> {
        self.lock().iter().filter_map(|(id, entry)| Some((*id, entry.inherited?))).collect()
    }

    /// Whether nobody will thaw the box any more.
    fn is_forgotten(&self, id: SandboxId, now: Instant) -> bool {
        let inherited = self.lock().get(&id).and_then(|entry| entry.inherited);
        inherited.is_some_and(|since| now.duration_since(since) >= FORGOTTEN)
    }

    fn note(&self, id: SandboxId) -> PathBuf {
        self.dir.join(id.to_string())
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<SandboxId, Entry>> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

pub(super) fn dir(state_dir: &Path) -> PathBuf {
    state_dir.join("saving")
}

impl Shared {
    /// Whether an earlier server's commit for that snapshot may still be going on. A look at its box is what ends the entry.
    pub(super) async fn still_saves(&self, snapshot: SnapshotId) -> bool {
        let Some(id) = self.saves.source(snapshot) else { return false };
        if let Ok(None) = self.observe(id).await {
            self.saves.forget(id);
        }
        self.saves.source(snapshot).is_some()
    }

    /// Waits until the box is frozen by nobody's commit. With the box's lock held, so that nobody here begins one.
    ///
    /// # Errors
    /// When the engine cannot be asked, or takes too long.
    pub(super) async fn unfrozen(&self, id: SandboxId, phase: &str) -> Result<(), RuntimeError> {
        let deadline = Instant::now() + PATIENCE;
        // A look at the box is what ends the entry.
        while self.saves.has(id) && self.observe(id).await.map_err(|e| e.during(phase))?.is_some() {
            if Instant::now() >= deadline {
                return Err(failed(
                    phase,
                    "the engine is still saving it for a snapshot that was asked for before",
                ));
            }
            sleep(LOOK_AGAIN).await;
        }
        Ok(())
    }

    /// Thaws the boxes whose commits the engine has forgotten. Ends when there are none: an engine that forgets another one has ended in
    /// between, and this begins again when it is back.
    pub(super) async fn thaw_forgotten(&self) {
        while let Some(oldest) = self.saves.inherited().into_iter().map(|(_, since)| since).min() {
            sleep_until((oldest + FORGOTTEN).max(Instant::now() + THAW_AGAIN)).await;
            for (id, _) in self.saves.inherited() {
                if !self.saves.is_forgotten(id, Instant::now()) {
                    continue;
                }
                let _alone = self.locks.lock(id).await;
                // Whoever held the lock may have ended the entry, or left a new one.
                if self.saves.is_forgotten(id, Instant::now()) {
                    self.thaw_saved(id).await;
                }
            }
        }
    }

    /// With the box's lock held.
    async fn thaw_saved(&self, id: SandboxId) {
        let container = match self.find(id).await {
            Ok(Some(container)) => container,
            Ok(None) => return self.saves.forget(id),
            Err(_) => return,
        };
        if container.status == Status::Paused {
            info!(sandbox = %id, "thawing it: whoever froze it to save it has ended");
            let key = container.key.as_str();
            let thawed = self.client.call(|docker| async move { docker.unpause_container(key).await });
            if let Err(error) = thawed.await {
                warn!(sandbox = %id, %error, "it stays frozen for now");
                return;
            }
        }
        self.saves.forget(id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_commit_without_an_answer_outlives_its_server() {
        let dir = tempfile::tempdir().unwrap();
        let [cut, ended] = [(); 2].map(|()| SandboxId::random());
        let [of_cut, of_ended] = [(); 2].map(|()| SnapshotId::random());
        let saves = Saves::open(dir.path().join("saving")).unwrap();
        let save = saves.begin(cut, of_cut);
        saves.begin(ended, of_ended).end();
        assert!(saves.has(cut) && !saves.has(ended));
        assert_eq!(saves.source(of_cut), None, "it is our own");
        let later = || Instant::now() + UNTIL_FROZEN;
        saves.seen_unfrozen(cut, later());
        assert!(saves.has(cut));
        drop(save);
        fs::write(dir.path().join("saving/nonsense"), "x").unwrap();

        let next = Saves::open(dir.path().join("saving")).unwrap();
        assert!(next.has(cut) && !next.has(ended));
        assert_eq!((next.source(of_cut), next.source(of_ended)), (Some(cut), None));
        assert!(!next.is_forgotten(cut, later()) && next.is_forgotten(cut, later() + FORGOTTEN));
        next.seen_unfrozen(cut, Instant::now());
        assert!(next.has(cut), "the engine freezes a moment after it was asked");
        next.seen_unfrozen(cut, later());
        assert!(!next.has(cut));
        assert_eq!(fs::read_dir(dir.path().join("saving")).unwrap().count(), 0);
    }
}
