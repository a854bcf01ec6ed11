//! Accepting connections: bounded in number, drained at the end.
//!
//! Invariant: no number of clients can use up the descriptors that the engine and its shims need.

use std::{sync::Arc, time::Duration};

use hyper::rt::Executor;
use tokio::{net::TcpListener, sync::Semaphore, task::JoinHandle};
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tracing::{debug, info, warn};

use super::{
    connection::{self, Accepted, Shared},
    settings::Serving,
    wire::Open,
};

/// Pause after an error of `accept`, such as a full descriptor table.
const ACCEPT_RETRY: Duration = Duration::from_millis(50);

/// Half of the descriptors: each proxied request needs a second one, and every sandbox a subscription.
pub fn connection_limit() -> usize {
    let files = rustix::process::getrlimit(rustix::process::Resource::Nofile).current.unwrap_or(65_536);
    usize::try_from(files / 2).unwrap_or(16_384).clamp(16, 16_384)
}

/// The tasks of a listener's connections. Ended by force when cut.
#[derive(Clone, Debug)]
pub(super) struct Tasks {
    pub(super) all: TaskTracker,
    pub(super) cut: CancellationToken,
}

impl<F> Executor<F> for Tasks
where
    F: Future + Send + 'static,
    F::Output: Send + 'static,
{
    fn execute(&self, task: F) {
        // Of this task alone: it is asked with everything that the task does.
        let cut = self.cut.child_token();
        self.all.spawn(async move { cut.run_until_cancelled_owned(task).await });
    }
}

/// Serves until `stop`, then drains: no new connections, no further requests, and a bounded time for what is under way.
///
/// # Errors
/// When the listener cannot be used.
pub fn spawn(
    listener: std::net::TcpListener,
    serving: Serving,
    stop: CancellationToken,
) -> std::io::Result<JoinHandle<()>> {
    listener.set_nonblocking(true)?;
    let listener = TcpListener::from_std(listener)?;
    let tasks = Tasks { all: TaskTracker::new(), cut: CancellationToken::new() };
    let drain = serving.limits.drain;
    let shared = Arc::new(Shared { serving, tasks: tasks.clone(), stop: stop.clone() });
    Ok(tokio::spawn(async move {
        tokio::select! {
            () = accept(&listener, &shared) => {}
            () = stop.cancelled() => {}
        }
        drop(listener);
        tasks.all.close();
        if tokio::time::timeout(drain, tasks.all.wait()).await.is_err() {
            info!(connections = tasks.all.len(), "what is still open is cut");
            tasks.cut.cancel();
            tasks.all.wait().await;
        }
    }))
}

async fn accept(listener: &TcpListener, shared: &Arc<Shared>) {
    let slots = Arc::new(Semaphore::new(shared.serving.limits.connections));
    loop {
        let Ok(slot) = slots.clone().acquire_owned().await else { return };
        let (stream, peer) = match listener.accept().await {
            Ok(accepted) => accepted,
            Err(error) => {
                warn!(%error, "a connection could not be accepted");
                tokio::time::sleep(ACCEPT_RETRY).await;
                continue;
            }
        };
        let tasks = &shared.tasks;
        let open = Open { _slot: slot, _counted: tasks.all.token(), cut: tasks.cut.child_token() };
        let served = connection::serve(shared.clone(), Accepted { stream, peer, open });
        tasks.execute(async move {
            if let Err(error) = served.await {
                // A client that went away or never finished its request is its own business.
                debug!(%peer, %error, "a connection ended early");
            }
        });
    }
}
