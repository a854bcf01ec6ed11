//! Output of hooks and services, sent on to the server as it is kept.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use sandglass_sandbox::workspace::Way;

use super::Workspace;

/// Read at a time.
const PIECE: usize = 64 << 10;
/// Output comes in many small pieces; nobody reads them one by one.
const PAUSE: Duration = Duration::from_millis(100);

pub(super) fn follow(workspace: &Arc<Workspace>) {
    if workspace.document.workspace.bridge.way == Way::Pull {
        // A server that asks reads the logs where they are.
        return;
    }
    let workspace = Arc::clone(workspace);
    tokio::spawn(async move {
        let logs = &workspace.ports.logs;
        let mut changed = logs.changed();
        // What an earlier life of the box wrote, its server has, or it is in the box for whoever asks.
        let ends = logs.sources().into_iter().filter_map(|name| Some((logs.extent(&name)?.end, name)));
        let mut sent: BTreeMap<String, u64> = ends.map(|(end, name)| (name, end)).collect();
        while changed.changed().await.is_ok() {
            changed.borrow_and_update();
            if workspace.link.handle().is_none() {
                // There is no bridge yet; what was written is still there when there is.
                continue;
            }
            for source in logs.sources() {
                let next = sent.entry(source.clone()).or_default();
                while let Ok(batch) = logs.read(&source, *next, PIECE)
                    && !batch.frames.is_empty()
                {
                    for frame in &batch.frames {
                        workspace.link.log(&source, frame.offset, &frame.data);
                    }
                    *next = batch.next;
                    tokio::task::yield_now().await;
                }
            }
            tokio::time::sleep(PAUSE).await;
        }
    });
}
