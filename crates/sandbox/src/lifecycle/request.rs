//! What may be asked of a sandbox when: the one table.
//!
//! ```text
//!              Pending  Running  Pausing  Paused   Resuming Stopping Terminated Failed
//!   pause      refused  accept   again    refused  refused  gone     refused    refused
//!   resume     refused  refused  refused  accept   again    gone     refused    refused
//!   delete     accept   accept   accept   accept   accept   again    accept     accept
//!   renew      accept   accept   accept   accept   accept   gone     accept     accept
//!   metadata   accept   accept   accept   accept   accept   gone     accept     accept
//! ```
//!
//! `again` joins the operation in flight; `gone` answers as if the sandbox no longer existed, because it has been
//! promised to go. Renewing or labelling a sandbox never changes its state.

use super::state::State;

/// What a user asks of an existing sandbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Request {
    Pause,
    Resume,
    Delete,
    Renew,
    PatchMetadata,
}

impl Request {
    pub const ALL: [Self; 5] = [Self::Pause, Self::Resume, Self::Delete, Self::Renew, Self::PatchMetadata];
}

/// The three outcomes of asking.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    Accept,
    /// The same operation is in flight: wait for it instead of starting another.
    Again,
    Refused(Refused),
}

/// Why a request is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    #[error("the sandbox is not running (its state is {})", .0.word())]
    NotRunning(State),
    #[error("the sandbox is not paused (its state is {})", .0.word())]
    NotPaused(State),
    #[error("the sandbox is being removed")]
    Gone,
}

/// Looks the answer up.
pub fn ask(request: Request, state: State) -> Verdict {
    use State::{Paused, Pausing, Resuming, Running, Stopping};
    match (request, state) {
        (Request::Delete, Stopping) => Verdict::Again,
        (Request::Delete, _) => Verdict::Accept,
        (_, Stopping) => Verdict::Refused(Refused::Gone),
        (Request::Renew | Request::PatchMetadata, _) => Verdict::Accept,
        (Request::Pause, Running) | (Request::Resume, Paused) => Verdict::Accept,
        (Request::Pause, Pausing) | (Request::Resume, Resuming) => Verdict::Again,
        (Request::Pause, other) => Verdict::Refused(Refused::NotRunning(other)),
        (Request::Resume, other) => Verdict::Refused(Refused::NotPaused(other)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_cell_of_the_table() {
        let mut table = String::new();
        for request in Request::ALL {
            let cells = State::ALL.map(|state| match ask(request, state) {
                Verdict::Accept => "accept",
                Verdict::Again => "again",
                Verdict::Refused(Refused::Gone) => "gone",
                Verdict::Refused(_) => "refused",
            });
            table.push_str(&format!("{request:?}: {}\n", cells.join(" ")));
        }
        assert_eq!(
            table,
            "Pause: refused accept again refused refused gone refused refused\n\
             Resume: refused refused refused accept again gone refused refused\n\
             Delete: accept accept accept accept accept again accept accept\n\
             Renew: accept accept accept accept accept gone accept accept\n\
             PatchMetadata: accept accept accept accept accept gone accept accept\n"
        );
    }
}
