//! The time that a connection may be without a request, kept by one timer for the whole connection.
//!
//! The library sets a timer for every head it waits for and drops it when the head is there. Registering and removing one costs more than
//! everything else that is done for a small request, so the timer that is there already stays, and looks again when it was too early.

use std::{
    pin::Pin,
    sync::{Arc, Mutex, PoisonError},
    task::{Context, Poll},
    time::{Duration, Instant},
};

use hyper::rt::{Sleep, Timer};
use hyper_util::rt::TokioTimer;
use tokio::time;

type Registered = Pin<Box<time::Sleep>>;

/// The timer of one connection.
#[derive(Clone, Debug, Default)]
pub(super) struct KeptTimer {
    /// The one that is registered, while nobody waits for it.
    unused: Arc<Mutex<Option<Registered>>>,
}

impl KeptTimer {
    fn take(&self) -> Option<Registered> {
        self.unused.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

impl Timer for KeptTimer {
    fn sleep(&self, duration: Duration) -> Pin<Box<dyn Sleep>> {
        self.sleep_until(self.now() + duration)
    }

    fn sleep_until(&self, deadline: Instant) -> Pin<Box<dyn Sleep>> {
        let deadline = time::Instant::from_std(deadline);
        Box::pin(Waiting { deadline, registered: self.take(), timer: self.clone() })
    }

    fn now(&self) -> Instant {
        TokioTimer::new().now()
    }
}

/// One wait.
#[derive(Debug)]
struct Waiting {
    deadline: time::Instant,
    registered: Option<Registered>,
    timer: KeptTimer,
}

impl Future for Waiting {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let deadline = self.deadline;
        let registered = self.registered.get_or_insert_with(|| Box::pin(time::sleep_until(deadline)));
        if registered.deadline() > deadline {
            registered.as_mut().reset(deadline);
        }
        loop {
            std::task::ready!(registered.as_mut().poll(cx));
            if registered.deadline() >= deadline {
                return Poll::Ready(());
            }
            registered.as_mut().reset(deadline);
        }
    }
}

impl Sleep for Waiting {}

impl Drop for Waiting {
    fn drop(&mut self) {
        if let Some(registered) = self.registered.take() {
            *self.timer.unused.lock().unwrap_or_else(PoisonError::into_inner) = Some(registered);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn each_wait_takes_its_own_time() {
        let timer = KeptTimer::default();
        let begun = time::Instant::now();
        let second = Duration::from_secs(1);
        // One that is given up early leaves its timer to the next, which is later, and that to one that is earlier.
        let early = time::timeout(second, timer.sleep(10 * second)).await;
        assert!(early.is_err());
        timer.sleep(20 * second).await;
        assert_eq!(begun.elapsed().as_secs(), 21);
        let early = time::timeout(second, timer.sleep(100 * second)).await;
        assert!(early.is_err());
        timer.sleep(3 * second).await;
        assert_eq!(begun.elapsed().as_secs(), 25);
    }
}
