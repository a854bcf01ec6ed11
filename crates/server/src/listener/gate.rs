//! What the two ends of one HTTP/1 connection tell each other: who reads its bytes, and who answers its requests.

use std::{
    sync::{Mutex, MutexGuard, PoisonError},
    task::{Context, Poll, Waker},
};

use http::Method;

use super::malformed::Malformed;

/// Passed on in place of a request that is refused, so that the refusal is answered in its turn and the connection ends after it.
pub(super) const STAND_IN: &[u8] = b"REFUSED / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n";

#[derive(Debug, Default)]
struct State {
    refused: Option<Malformed>,
    broken: Option<Malformed>,
    upgraded: Option<bool>,
    reader: Option<Waker>,
}

/// See the module documentation.
#[derive(Debug, Default)]
pub(super) struct Gate(Mutex<State>);

impl Gate {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The last request of this connection is refused.
    pub(super) fn refuse(&self, why: Malformed) {
        self.state().refused = Some(why);
    }

    /// Why this request is refused, if it stands in for one. Nobody but the reader gets anything through after a refusal.
    pub(super) fn refusal(&self, method: &Method) -> Option<Malformed> {
        if method.as_str() == "REFUSED" { self.state().refused } else { None }
    }

    /// The body that is being read cannot be read on.
    pub(super) fn break_off(&self, why: Malformed) {
        self.state().broken = Some(why);
    }

    pub(super) fn broken(&self) -> Option<Malformed> {
        self.state().broken
    }

    /// A request for an upgrade was answered.
    pub(super) fn decide(&self, upgraded: bool) {
        let mut state = self.state();
        state.upgraded = Some(upgraded);
        if let Some(reader) = state.reader.take() {
            reader.wake();
        }
    }

    /// Whether the upgrade was granted.
    pub(super) fn poll_decision(&self, cx: &Context<'_>) -> Poll<bool> {
        let mut state = self.state();
        match state.upgraded.take() {
            Some(upgraded) => Poll::Ready(upgraded),
            None => {
                state.reader = Some(cx.waker().clone());
                Poll::Pending
            }
        }
    }
}
