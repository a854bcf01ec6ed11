//! Which sessions there are. Each is one task; what is asked of it waits in its queue.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;

use super::unknown;
use super::worker::{Job, Worker};
use crate::http::reply::Failure;
use crate::http::router::Agent;

/// With the bound on the state of each, 32 MiB at most.
pub(super) const MAX_SESSIONS: usize = 128;
/// Runs that wait for their turn in one session.
const MAX_WAITING: usize = 32;
/// A session that is being destroyed is waited for this long; it goes on ending after that.
const DESTROY_WAIT: Duration = Duration::from_secs(5);

struct Entry {
    jobs: mpsc::Sender<Job>,
    closing: watch::Sender<bool>,
    task: JoinHandle<()>,
}

#[derive(Default)]
pub struct Sessions {
    table: Mutex<HashMap<String, Entry>>,
}

impl Sessions {
    pub(super) fn open(&self, agent: &Arc<Agent>, cwd: PathBuf) -> Result<String, Failure> {
        let mut table = self.lock();
        if table.len() >= MAX_SESSIONS {
            return Err(Failure::unavailable(format!(
                "there are {MAX_SESSIONS} sessions already; delete one first"
            )));
        }
        let id = uuid::Uuid::new_v4().to_string();
        let (jobs, queue) = mpsc::channel(MAX_WAITING);
        let (closing, closed) = watch::channel(false);
        let task = tokio::spawn(Worker::new(Arc::clone(agent), cwd, closed).serve(queue));
        table.insert(id.clone(), Entry { jobs, closing, task });
        Ok(id)
    }

    pub(super) fn submit(&self, id: &str, job: Job) -> Result<(), Failure> {
        let table = self.lock();
        let entry = table.get(id).ok_or_else(|| unknown(id))?;
        entry.jobs.try_send(job).map_err(|error| match error {
            mpsc::error::TrySendError::Full(_) => {
                Failure::unavailable(format!("{MAX_WAITING} runs wait in this session already"))
            }
            mpsc::error::TrySendError::Closed(_) => unknown(id),
        })
    }

    /// Ends a session and all that runs in it; false when there is none of that name.
    pub async fn destroy(&self, id: &str) -> bool {
        let Some(Entry { jobs, closing, task }) = self.lock().remove(id) else { return false };
        drop(jobs);
        // Fails only when the task has ended.
        let _ = closing.send(true);
        let _ = tokio::time::timeout(DESTROY_WAIT, task).await;
        true
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, Entry>> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
