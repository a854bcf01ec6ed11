//! Requests that wait for a paused sandbox to run again.
//!
//! Invariants: one resume for each sandbox at a time, however many requests wait; the waiting ones are bounded in number and time; a resume that
//! has begun goes on when all of them have left.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{Semaphore, watch};
use tokio::time::{Instant, timeout_at};
use tokio_util::task::TaskTracker;

use super::directory::{Directory, WakeError};
use super::refused::Refused;
use crate::ingress::{Reach, Target};

/// How many may wait, and for how long.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ParkSettings {
    pub budget: Duration,
    pub most: usize,
}

impl Default for ParkSettings {
    fn default() -> Self {
        Self { budget: Duration::from_secs(5), most: 1024 }
    }
}

type Outcome = Option<Result<(), WakeError>>;

/// See the module documentation.
#[derive(Debug)]
pub(super) struct Wakes {
    settings: ParkSettings,
    places: Semaphore,
    flights: Arc<Mutex<HashMap<String, watch::Receiver<Outcome>>>>,
    tasks: TaskTracker,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Wakes {
    pub(super) fn new(settings: ParkSettings) -> Self {
        let places = Semaphore::new(settings.most.min(Semaphore::MAX_PERMITS));
        Self { settings, places, flights: Arc::default(), tasks: TaskTracker::new() }
    }

    /// Resumes the sandbox, or joins those who wait for it, and returns it as it is then.
    pub(super) async fn awake(&self, directory: &Arc<dyn Directory>, id: &str) -> Result<Target, Refused> {
        let deadline = Instant::now() + self.settings.budget;
        let _place = self.places.try_acquire().map_err(|_| Refused::Crowded)?;
        let mut changes = directory.changes();
        let mut outcome = self.flight(directory, id);
        let ended = timeout_at(deadline, outcome.wait_for(Option::is_some)).await;
        match ended.map_err(|_| Refused::NotWoken)?.map(|outcome| *outcome) {
            Ok(Some(Ok(()))) => {}
            _ => return Err(Refused::NotWoken),
        }
        loop {
            changes.borrow_and_update();
            match directory.find(id) {
                None => return Err(Refused::NotFound),
                Some(target) if matches!(target.reach, Reach::Addressable(_)) => return Ok(target),
                Some(_) => {}
            }
            let changed = timeout_at(deadline, changes.changed()).await;
            changed.map_err(|_| Refused::NotWoken)?.map_err(|_| Refused::NotWoken)?;
        }
    }

    fn flight(&self, directory: &Arc<dyn Directory>, id: &str) -> watch::Receiver<Outcome> {
        let mut flights = locked(&self.flights);
        if let Some(flight) = flights.get(id) {
            return flight.clone();
        }
        let (outcome, flight) = watch::channel(None);
        flights.insert(id.to_owned(), flight.clone());
        let (directory, shared, id) = (directory.clone(), self.flights.clone(), id.to_owned());
        self.tasks.spawn(async move {
            let woken = directory.wake(&id).await;
            // Out of the book first: who comes now needs a look of its own.
            locked(&shared).remove(&id);
            outcome.send_replace(Some(woken));
        });
        flight
    }
}
