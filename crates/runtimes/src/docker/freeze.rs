//! Pausing and resuming: a box and its sidecar stop and go on together.
//!
//! The application is frozen before its sidecar and thawed after it, so that it never runs unguarded. A half that fails takes the other
//! half back. Invariant: what is answered is what the engine shows afterwards; a box that ended meanwhile is told as ended.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError, Weak},
};

use sandglass_sandbox::{
    Clock, SandboxId, SystemClock,
    ports::{
        RuntimeErrorKind,
        runtime::{Observation, RuntimeError},
    },
};
use tracing::warn;

use super::{
    Shared,
    container::{Container, Status},
    errors::{Failure, failed},
};

/// One task at a time freezes, thaws or saves a box, because saving freezes it for a while too.
#[derive(Default)]
pub(super) struct Locks(Mutex<HashMap<SandboxId, Weak<tokio::sync::Mutex<()>>>>);

impl Locks {
    pub(super) async fn lock(&self, id: SandboxId) -> tokio::sync::OwnedMutexGuard<()> {
        self.of(id).lock_owned().await
    }

    fn of(&self, id: SandboxId) -> Arc<tokio::sync::Mutex<()>> {
        let mut locks = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(lock) = locks.get(&id).and_then(Weak::upgrade) {
            return lock;
        }
        locks.retain(|_, lock| lock.strong_count() > 0);
        let lock = Arc::new(tokio::sync::Mutex::new(()));
        locks.insert(id, Arc::downgrade(&lock));
        lock
    }
}

pub(super) fn no_such_box(id: SandboxId) -> RuntimeError {
    RuntimeError::new(RuntimeErrorKind::NotFound, "find", format!("the engine has no sandbox {id}"))
}

/// Which way.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Turn {
    Freeze,
    Thaw,
}

impl Turn {
    fn phase(self) -> &'static str {
        match self {
            Self::Freeze => "pause",
            Self::Thaw => "resume",
        }
    }

    fn back(self) -> Self {
        match self {
            Self::Freeze => Self::Thaw,
            Self::Thaw => Self::Freeze,
        }
    }

    /// The status of a container that has this turn still before it.
    fn from(self) -> Status {
        match self {
            Self::Freeze => Status::Running,
            Self::Thaw => Status::Paused,
        }
    }
}

impl Shared {
    pub(super) async fn pause(&self, id: SandboxId) -> Result<Observation, RuntimeError> {
        self.turn(id, Turn::Freeze).await
    }

    pub(super) async fn resume(&self, id: SandboxId) -> Result<Observation, RuntimeError> {
        self.turn(id, Turn::Thaw).await
    }

    async fn turn(&self, id: SandboxId, turn: Turn) -> Result<Observation, RuntimeError> {
        let phase = turn.phase();
        let _alone = self.locks.lock(id).await;
        self.unfrozen(id, phase).await?;
        let found = self.find(id).await.map_err(|e| e.during(phase))?;
        let box_ = found.ok_or_else(|| no_such_box(id))?;
        if matches!(box_.status, Status::Running | Status::Paused) {
            let sidecar = match box_.joined() {
                Some(key) => Some(self.sidecar(key, phase).await?),
                None => None,
            };
            self.turn_both(id, &box_, sidecar.as_ref(), turn).await?;
        }
        let observed = self.observe(id).await.map_err(|e| e.during(phase))?;
        observed.ok_or_else(|| no_such_box(id))
    }

    /// Without its sidecar a box has no network that could be trusted, so it is left as it is.
    async fn sidecar(&self, key: &str, phase: &str) -> Result<Container, RuntimeError> {
        let found = self.inspect_container(key).await.map_err(|e| e.during(phase))?;
        found.ok_or_else(|| failed(phase, "its egress sidecar is gone; the sandbox can only be removed"))
    }

    async fn turn_both(
        &self,
        id: SandboxId,
        box_: &Container,
        sidecar: Option<&Container>,
        turn: Turn,
    ) -> Result<(), RuntimeError> {
        let (first, second) = match turn {
            Turn::Freeze => (Some(box_), sidecar),
            Turn::Thaw => (sidecar, Some(box_)),
        };
        let mut turned = None;
        for container in [first, second].into_iter().flatten().filter(|c| c.status == turn.from()) {
            if let Err(failure) = self.turn_one(&container.key, turn).await {
                let mut error = failure.during(turn.phase());
                if let Some(turned) = turned
                    && let Err(stuck) = self.turn_one(turned, turn.back()).await
                {
                    warn!(sandbox = %id, error = %stuck, "one half of a sandbox could not be turned back");
                    error.message = format!("{}; and the other half stays as it is: {stuck}", error.message);
                }
                return Err(error);
            }
            if container.key == box_.key {
                self.memory.turned(id, SystemClock.now());
            }
            turned = Some(container.key.as_str());
        }
        Ok(())
    }

    /// A container that is so already, or has ended, is success; the look afterwards tells which.
    async fn turn_one(&self, key: &str, turn: Turn) -> Result<(), Failure> {
        let done = self.client.call(|docker| async move {
            match turn {
                Turn::Freeze => docker.pause_container(key).await,
                Turn::Thaw => docker.unpause_container(key).await,
            }
        });
        match done.await {
            Err(failure) if !is_harmless(&failure) => Err(failure),
            Ok(()) | Err(_) => Ok(()),
        }
    }
}

/// Engines answer 409 here, and 500 before version 1.44 of the API to some.
fn is_harmless(failure: &Failure) -> bool {
    let Failure::Refused { status, message } = failure else { return false };
    let told = ["is already paused", "is not paused", "is not running", "container not running"];
    *status == 404 || told.iter().any(|text| message.to_ascii_lowercase().contains(text))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_engine_says_of_a_container_that_is_so_already() {
        let refused = |status, message: &str| Failure::Refused { status, message: message.to_owned() };
        for harmless in [
            refused(409, "Container abc is already paused"),
            refused(500, "Container abc is not paused"),
            refused(409, "Container abc is not running"),
            refused(404, "No such container: abc"),
        ] {
            assert!(is_harmless(&harmless), "{harmless}");
        }
        for real in [
            refused(409, "Container abc is restarting, wait until the container is running"),
            refused(500, "Cannot pause container abc: OCI runtime pause failed: unable to freeze"),
            Failure::TimedOut,
        ] {
            assert!(!is_harmless(&real), "{real}");
        }
    }

    #[tokio::test]
    async fn one_lock_for_each_box_and_none_kept() {
        let locks = Locks::default();
        let [a, b] = [(); 2].map(|()| SandboxId::random());
        let held = locks.lock(a).await;
        drop(locks.lock(b).await);
        assert!(locks.of(a).try_lock().is_err());
        drop(held);
        drop(locks.lock(SandboxId::random()).await);
        assert_eq!(locks.0.lock().unwrap().len(), 1);
    }
}
