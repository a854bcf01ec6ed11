//! The states of a service, and the one table of what leads from one to another.
//!
//! ```text
//!                  ┌────────── lost ──────────┐
//!   start          ▼                          │
//!   ────►  Starting ──── answered ────►  Ready ───── finished ────► Stopped
//!             ▲  │  └──── lost ────┐      │                            ▲
//!      launch │  └─── gave up ──┐  │      └── gave up ──┐              │ stop,
//!             │                 ▼  ▼                    ▼              │ from
//!           Restarting ─────► Failed ◄──────────────────┘              │ any but
//!   disable, from any ─► Disabled                                      │ Disabled, Failed
//! ```

use serde::{Deserialize, Serialize};

/// What is shown of a service.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum State {
    /// Not wanted.
    Disabled,
    /// Begun, and not answering yet.
    Starting,
    /// Answers.
    Ready,
    /// Ended or ending, and to be started again.
    Restarting,
    /// Given up, until somebody asks for it.
    Failed,
    /// Ended as it should.
    Stopped,
}

/// What happens to a service.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Event {
    /// It shall run, as far as its state allows: a boot, enabling, a command.
    Start,
    /// It shall run anew.
    Restart,
    /// The box ends, or it is no longer wanted for now.
    Stop,
    /// It is not wanted until it is enabled.
    Disable,
    /// The time before a restart is over.
    Launch,
    /// It was found to answer.
    Answered,
    /// It ended or no longer answers, and gets another start.
    Lost,
    /// The same, and it gets none.
    GaveUp,
    /// It ended well, and is not to be started again.
    Finished,
}

impl State {
    pub const ALL: [State; 6] =
        [State::Disabled, State::Starting, State::Ready, State::Restarting, State::Failed, State::Stopped];

    /// The state after an event; none when the event has no place in this one.
    pub fn on(self, event: Event) -> Option<State> {
        use State::{Disabled, Failed, Ready, Restarting, Starting, Stopped};
        Some(match (self, event) {
            (_, Event::Disable) => Disabled,
            (Disabled | Failed | Stopped, Event::Start) => Starting,
            (Starting | Ready | Restarting, Event::Start) => self,
            (Starting | Ready | Restarting, Event::Restart) => Restarting,
            (Failed | Stopped, Event::Restart) => Starting,
            (Starting | Ready | Restarting | Stopped, Event::Stop) => Stopped,
            // What was given up stays so: it says more.
            (Failed | Disabled, Event::Stop) => self,
            (Restarting, Event::Launch) => Starting,
            (Starting, Event::Answered) => Ready,
            (Starting | Ready, Event::Lost) => Restarting,
            (Starting | Ready, Event::GaveUp) => Failed,
            (Ready, Event::Finished) => Stopped,
            _ => return None,
        })
    }

    /// Whether it runs or is about to.
    pub fn is_wanted(self) -> bool {
        matches!(self, State::Starting | State::Ready | State::Restarting)
    }
}

impl Event {
    pub const ALL: [Event; 9] = [
        Event::Start,
        Event::Restart,
        Event::Stop,
        Event::Disable,
        Event::Launch,
        Event::Answered,
        Event::Lost,
        Event::GaveUp,
        Event::Finished,
    ];
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_have_an_answer_in_every_state_but_one() {
        for state in State::ALL {
            for event in [Event::Start, Event::Stop, Event::Disable, Event::Restart] {
                let refused = state.on(event).is_none();
                assert_eq!(
                    refused,
                    state == State::Disabled && event == Event::Restart,
                    "{state:?} {event:?}"
                );
            }
        }
    }

    #[test]
    fn only_an_answer_makes_a_service_ready() {
        for state in State::ALL {
            for event in Event::ALL {
                let ready = state.on(event) == Some(State::Ready);
                let asked_again = state == State::Ready && event == Event::Start;
                assert_eq!(ready, asked_again || (state == State::Starting && event == Event::Answered));
            }
        }
    }

    #[test]
    fn what_was_given_up_comes_back_only_on_request() {
        for event in Event::ALL {
            let next = State::Failed.on(event).filter(|next| *next != State::Failed);
            let asked = matches!(event, Event::Start | Event::Restart | Event::Disable);
            assert_eq!(next.is_some(), asked, "{event:?}");
            assert!(
                State::Disabled.on(event).is_none_or(|next| next == State::Disabled || event == Event::Start)
            );
        }
    }
}
