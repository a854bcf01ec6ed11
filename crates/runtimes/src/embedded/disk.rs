//! Watching the disk under the boxes: writes inside fail when it is full, and the boxes' histories should say why.

use std::{path::Path, sync::Weak, time::Duration};

use sandglass_sandbox::ports::runtime::{BoxEvent, Condition, RuntimeEvent};
use sandglass_sandbox::{Clock, SystemClock};

use super::Shared;

const PERIOD: Duration = Duration::from_secs(2);
/// Below this the disk counts as full.
const FULL_BELOW_BYTES: u64 = 4 << 20;
/// Above this it counts as having room again; the gap keeps one episode from being told many times.
const ROOM_ABOVE_BYTES: u64 = 32 << 20;

/// Tells each running box once per episode. Ends with the runtime.
pub(super) async fn watch(shared: Weak<Shared>) {
    let mut full = false;
    loop {
        tokio::time::sleep(PERIOD).await;
        let Some(shared) = shared.upgrade() else { return };
        let Some(free) = free_bytes(&shared.sandboxes) else { continue };
        if full {
            full = free < ROOM_ABOVE_BYTES;
            continue;
        }
        if free >= FULL_BELOW_BYTES {
            continue;
        }
        full = true;
        for observed in shared.boxes.observe_all() {
            if observed.condition == Condition::Running {
                let event = BoxEvent {
                    at: SystemClock.now(),
                    kind: "disk-full".into(),
                    message: format!(
                        "the disk under the sandboxes is full ({free} bytes left); writes inside fail"
                    ),
                };
                shared.boxes.tell(RuntimeEvent::Noticed(observed.id, event));
            }
        }
    }
}

fn free_bytes(path: &Path) -> Option<u64> {
    let stat = rustix::fs::statvfs(path).ok()?;
    Some(stat.f_bavail.saturating_mul(stat.f_frsize))
}
