//! A timer that stays registered from one exchange of a connection to the next.
//!
//! Registering a timer and taking it back costs more than a small exchange; that it goes off once too early, and looks when it should, costs
//! nothing.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use tokio::time::{Instant, Sleep, sleep_until};

#[derive(Debug, Default)]
pub(crate) struct Alarm {
    /// Goes off at its time or before.
    registered: Option<Pin<Box<Sleep>>>,
}

impl Alarm {
    /// Ready when it is this late.
    pub(crate) fn poll(&mut self, cx: &mut Context<'_>, at: Instant) -> Poll<()> {
        let sleep = self.registered.get_or_insert_with(|| Box::pin(sleep_until(at)));
        if sleep.deadline() > at {
            sleep.as_mut().reset(at);
        }
        loop {
            ready!(sleep.as_mut().poll(cx));
            if sleep.deadline() >= at {
                return Poll::Ready(());
            }
            sleep.as_mut().reset(at);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;
    use std::time::Duration;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn it_goes_off_when_it_is_late_enough_whatever_was_asked_before() {
        let begun = Instant::now();
        let after = |seconds| begun + Duration::from_secs(seconds);
        let mut alarm = Alarm::default();
        for (asked, expected) in [(10, 10), (20, 20), (5, 20), (30, 30)] {
            // Asked once for later, and given up.
            assert!(poll_fn(|cx| Poll::Ready(alarm.poll(cx, after(1000)))).await.is_pending());
            poll_fn(|cx| alarm.poll(cx, after(asked))).await;
            assert_eq!(begun.elapsed().as_secs(), expected);
        }
    }
}
