//! Tells that bytes still move, for exchanges that last.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

/// Whom to tell, and how often at most.
#[derive(Clone)]
pub struct Pulse {
    every: Duration,
    tell: Arc<dyn Fn() + Send + Sync>,
}

impl fmt::Debug for Pulse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pulse").field("every", &self.every).finish_non_exhaustive()
    }
}

impl Pulse {
    /// `tell` is called when bytes move, whichever way, and the last call or the beginning was this long ago. It must not block.
    pub fn new(every: Duration, tell: impl Fn() + Send + Sync + 'static) -> Self {
        Self { every, tell: Arc::new(tell) }
    }
}

/// The pulse of one exchange.
#[derive(Debug, Default)]
pub(crate) struct Beat(Option<(Pulse, Instant)>);

impl Beat {
    pub(crate) fn of(pulse: Option<Pulse>) -> Self {
        Self(pulse.map(|pulse| {
            let next = Instant::now() + pulse.every;
            (pulse, next)
        }))
    }

    /// Bytes have moved. Costs a reading of the clock when there is somebody to tell.
    pub(crate) fn moved(&mut self) {
        let Some((pulse, next)) = &mut self.0 else { return };
        let now = Instant::now();
        if now >= *next {
            *next = now + pulse.every;
            (pulse.tell)();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn what_moves_is_told_at_most_so_often_and_silence_is_not() {
        let told = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&told);
        let pulse = Pulse::new(Duration::from_secs(10), move || {
            count.fetch_add(1, Relaxed);
        });
        let mut beat = Beat::of(Some(pulse));
        for (pause, expected) in [(0, 0), (9, 0), (1, 1), (9, 1), (1, 2), (1000, 3), (1, 3)] {
            tokio::time::advance(Duration::from_secs(pause)).await;
            beat.moved();
            beat.moved();
            assert_eq!(told.load(Relaxed), expected);
        }
        Beat::of(None).moved();
    }
}
