//! Output of hooks and services, sent on to the server as it is kept.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use sandglass_sandbox::workspace::Way;
use sandglass_supervise::Logs;
use tokio::sync::Mutex;

use super::Workspace;
use super::link::Link;

/// Read at a time.
const PIECE: usize = 64 << 10;
/// Output comes in many small pieces; nobody reads them one by one.
const PAUSE: Duration = Duration::from_millis(100);

/// How far the output of each source was sent on.
pub(super) struct Sent(Mutex<BTreeMap<String, u64>>);

impl Sent {
    /// What an earlier life of the box wrote, its server has, or it is in the box for whoever asks.
    pub(super) fn all_of(logs: &Logs) -> Self {
        let ends = logs.sources().into_iter().filter_map(|name| Some((logs.extent(&name)?.end, name)));
        Sent(Mutex::new(ends.map(|(end, name)| (name, end)).collect()))
    }

    /// Hands everything that is new to the channel.
    pub(super) async fn send_new(&self, logs: &Logs, link: &Link) {
        if link.handle().is_none() {
            // There is no bridge yet; what was written is still there when there is.
            return;
        }
        let mut sent = self.0.lock().await;
        for source in logs.sources() {
            let next = sent.entry(source.clone()).or_default();
            while let Ok(batch) = logs.read(&source, *next, PIECE)
                && !batch.frames.is_empty()
            {
                for frame in &batch.frames {
                    link.log(&source, frame.offset, &frame.data);
                }
                *next = batch.next;
                tokio::task::yield_now().await;
            }
        }
    }
}

pub(super) fn follow(workspace: &Arc<Workspace>) {
    if workspace.document.workspace.bridge.way == Way::Pull {
        // A server that asks reads the logs where they are.
        return;
    }
    let workspace = Arc::clone(workspace);
    tokio::spawn(async move {
        let mut changed = workspace.ports.logs.changed();
        while changed.changed().await.is_ok() {
            changed.borrow_and_update();
            workspace.sent.send_new(&workspace.ports.logs, &workspace.link).await;
            tokio::time::sleep(PAUSE).await;
        }
    });
}
