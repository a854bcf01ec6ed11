//! Faults at chosen points: each port call is two points, before and after its effect.

use std::sync::{Mutex, MutexGuard, PoisonError};

use tokio::sync::watch;

/// What happens at a point.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// Nothing of this server goes on from there.
    Crash,
    /// The call fails; after the effect, only its answer is lost.
    Fail,
}

/// A call failed because it was told to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Injected;

#[derive(Debug, Default)]
struct State {
    passed: usize,
    plan: Vec<(usize, Fault)>,
    /// Every point that was passed, by name.
    names: Vec<String>,
    named: Vec<(String, usize, Fault)>,
}

/// Counts the points of one server and makes faults at those that were chosen.
#[derive(Debug)]
pub struct Faults {
    state: Mutex<State>,
    dead: watch::Sender<bool>,
}

impl Default for Faults {
    fn default() -> Self {
        Self { state: Mutex::default(), dead: watch::channel(false).0 }
    }
}

impl Faults {
    /// With a fault at the `at`-th point, the first being 0.
    pub fn at(at: usize, fault: Fault) -> Self {
        let faults = Self::default();
        faults.state().plan.push((at, fault));
        faults
    }

    /// Adds a fault at the next `times` points of that name, e.g. `capture:after`.
    pub fn on(&self, name: &str, times: usize, fault: Fault) {
        self.state().named.push((name.to_owned(), times, fault));
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Points passed so far.
    pub fn passed(&self) -> usize {
        self.state().passed
    }

    /// The name of a point that was passed.
    pub fn name(&self, at: usize) -> Option<String> {
        self.state().names.get(at).cloned()
    }

    /// Whether the server crashed.
    pub fn crashed(&self) -> bool {
        *self.dead.borrow()
    }

    /// Returns when the server crashed.
    pub async fn crash(&self) {
        let mut dead = self.dead.subscribe();
        let _ = dead.wait_for(|dead| *dead).await;
    }

    /// Ends the server here and now.
    pub fn kill(&self) {
        self.dead.send_replace(true);
    }

    /// A point before an effect.
    pub(super) async fn before(&self, call: &str) -> Result<(), Injected> {
        self.point(&format!("{call}:before")).await
    }

    /// A point after an effect.
    pub(super) async fn after(&self, call: &str) -> Result<(), Injected> {
        self.point(&format!("{call}:after")).await
    }

    async fn point(&self, name: &str) -> Result<(), Injected> {
        // A call is never answered at once, as in the world.
        tokio::task::yield_now().await;
        let fault = if self.crashed() { Some(Fault::Crash) } else { self.pass(name) };
        match fault {
            None => Ok(()),
            Some(Fault::Fail) => Err(Injected),
            Some(Fault::Crash) => {
                self.kill();
                std::future::pending().await
            }
        }
    }

    fn pass(&self, name: &str) -> Option<Fault> {
        let mut state = self.state();
        let at = state.passed;
        state.passed += 1;
        state.names.push(name.to_owned());
        if let Some(named) = state.named.iter_mut().find(|(n, times, _)| n == name && *times > 0) {
            named.1 -= 1;
            return Some(named.2);
        }
        state.plan.iter().find(|(point, _)| *point == at).map(|(_, fault)| *fault)
    }
}
