//! What one service does next, as a pure machine: inputs and the time go in, at most one action and one change of state come out.
//!
//! Invariant: a start is only asked for when nothing of an earlier one is left, and an end only for what runs.

use std::time::Duration;

use super::definition::RestartPolicy;
use super::restart::{Backoff, Restarts, Verdict};
use super::state::{Event, State};
use crate::clock::Moment;
use crate::ports::Exit;

/// What the machine is told.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Input {
    Start,
    Restart,
    Stop,
    Disable,
    /// The start that was asked for came to nothing.
    NotLaunched {
        message: String,
        outlook: Outlook,
    },
    /// It does not answer yet, and this is why.
    NotYet {
        message: String,
    },
    Answered,
    /// It was ready and does not answer any more.
    Unanswered {
        message: String,
    },
    /// Everything of it has ended, by itself or because it was asked to.
    Gone {
        exit: Exit,
        message: Option<String>,
    },
    /// Time has passed.
    Tick,
}

/// Whether trying again can help.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outlook {
    MayPass,
    Hopeless,
}

/// What is to be done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    Launch,
    /// Ask it to end, and see to it that it does.
    End,
}

/// What an input led to.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Step {
    pub action: Option<Action>,
    pub change: Option<Change>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Change {
    pub from: State,
    pub to: State,
}

/// A request that has no place in a state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Refused {
    pub state: State,
}

/// What there is of it right now; the state says what it is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Activity {
    Idle,
    Waiting { until: Moment },
    Running { ready_by: Moment },
    Ending { then: Then },
}

/// What comes when it has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Then {
    Rest,
    LaunchAt(Moment),
}

/// See the module documentation.
#[derive(Debug, Clone)]
pub struct Machine {
    policy: RestartPolicy,
    ready_within: Duration,
    state: State,
    activity: Activity,
    restarts: Restarts,
    restarted: u64,
    last_exit: Option<Exit>,
    last_error: Option<String>,
    /// Why it does not answer yet.
    hint: Option<String>,
}

impl Machine {
    /// A service that is not running.
    pub fn new(policy: RestartPolicy, ready_within: Duration, backoff: Backoff, state: State) -> Self {
        Machine {
            policy,
            ready_within,
            state,
            activity: Activity::Idle,
            restarts: Restarts::new(backoff),
            restarted: 0,
            last_exit: None,
            last_error: None,
            hint: None,
        }
    }

    pub fn state(&self) -> State {
        self.state
    }

    /// How often it was started again since the box began.
    pub fn restarted(&self) -> u64 {
        self.restarted
    }

    pub fn restarts_left(&self, now: Moment) -> u32 {
        self.restarts.left(now)
    }

    pub fn last_exit(&self) -> Option<Exit> {
        self.last_exit
    }

    pub fn last_error(&self) -> Option<&str> {
        self.last_error.as_deref()
    }

    /// Whether nothing of it runs or will by itself.
    pub fn is_idle(&self) -> bool {
        self.activity == Activity::Idle
    }

    /// When it wants a [`Input::Tick`].
    pub fn wakeup(&self) -> Option<Moment> {
        match self.activity {
            Activity::Waiting { until } => Some(until),
            Activity::Running { ready_by } if self.state == State::Starting => Some(ready_by),
            _ => None,
        }
    }

    /// Takes an input. `draw` is chance. A fact that comes too late to matter changes nothing.
    pub fn handle(&mut self, input: Input, now: Moment, draw: u64) -> Result<Step, Refused> {
        let from = self.state;
        let action = match input {
            Input::Start => self.start(Event::Start, now)?,
            Input::Restart => self.start(Event::Restart, now)?,
            Input::Stop => self.rest(Event::Stop)?,
            Input::Disable => self.rest(Event::Disable)?,
            Input::NotLaunched { message, outlook } => self.not_launched(message, outlook, now, draw),
            Input::NotYet { message } => {
                self.hint = Some(message);
                None
            }
            Input::Answered => self.answered(now),
            Input::Unanswered { message } => self.unanswered(message, now, draw),
            Input::Gone { exit, message } => self.gone(exit, message, now, draw),
            Input::Tick => self.tick(now, draw),
        };
        let to = self.state;
        Ok(Step { action, change: (from != to).then_some(Change { from, to }) })
    }

    fn start(&mut self, event: Event, now: Moment) -> Result<Option<Action>, Refused> {
        let next = self.state.on(event).ok_or(Refused { state: self.state })?;
        if event == Event::Start && self.state.is_wanted() {
            return Ok(None);
        }
        self.state = next;
        self.restarts.restore();
        Ok(match self.activity {
            Activity::Idle => Some(self.launch(now)),
            Activity::Waiting { .. } => self.launch_again(now),
            Activity::Running { .. } => {
                self.activity = Activity::Ending { then: Then::LaunchAt(now) };
                Some(Action::End)
            }
            Activity::Ending { .. } => {
                self.activity = Activity::Ending { then: Then::LaunchAt(now) };
                None
            }
        })
    }

    fn rest(&mut self, event: Event) -> Result<Option<Action>, Refused> {
        self.state = self.state.on(event).ok_or(Refused { state: self.state })?;
        Ok(match self.activity {
            Activity::Idle => None,
            Activity::Waiting { .. } => {
                self.activity = Activity::Idle;
                None
            }
            Activity::Running { .. } => {
                self.activity = Activity::Ending { then: Then::Rest };
                Some(Action::End)
            }
            Activity::Ending { .. } => {
                self.activity = Activity::Ending { then: Then::Rest };
                None
            }
        })
    }

    fn launch(&mut self, now: Moment) -> Action {
        self.hint = None;
        self.activity = Activity::Running { ready_by: now + self.ready_within };
        Action::Launch
    }

    fn launch_again(&mut self, now: Moment) -> Option<Action> {
        // It is `Starting` already when somebody asked for it while an earlier one was ending.
        self.state = self.state.on(Event::Launch).unwrap_or(self.state);
        self.restarted += 1;
        Some(self.launch(now))
    }

    fn not_launched(&mut self, message: String, outlook: Outlook, now: Moment, draw: u64) -> Option<Action> {
        if !matches!(self.activity, Activity::Running { .. }) {
            return None;
        }
        self.activity = Activity::Idle;
        self.lost(message, outlook, now, draw)
    }

    fn answered(&mut self, now: Moment) -> Option<Action> {
        if matches!(self.activity, Activity::Running { .. })
            && let Some(next) = self.state.on(Event::Answered)
        {
            self.state = next;
            self.restarts.ready(now);
        }
        None
    }

    fn unanswered(&mut self, message: String, now: Moment, draw: u64) -> Option<Action> {
        let running = matches!(self.activity, Activity::Running { .. });
        if running && self.state == State::Ready {
            self.lost(message, Outlook::MayPass, now, draw)
        } else {
            None
        }
    }

    fn gone(&mut self, exit: Exit, message: Option<String>, now: Moment, draw: u64) -> Option<Action> {
        let (was, state) = (self.activity, self.state);
        match was {
            Activity::Running { .. } => {
                self.last_exit = Some(exit);
                self.activity = Activity::Idle;
                let finished = exit.is_success() && self.policy != RestartPolicy::Always;
                if finished && let Some(next) = state.on(Event::Finished) {
                    self.state = next;
                    return None;
                }
                let how = message.unwrap_or_else(|| exit.to_string());
                let error = if state == State::Ready { how } else { format!("{how} before it was ready") };
                self.lost(error, Outlook::MayPass, now, draw)
            }
            Activity::Ending { then } => {
                self.last_exit = Some(exit);
                match then {
                    Then::Rest => self.activity = Activity::Idle,
                    Then::LaunchAt(until) if until > now => self.activity = Activity::Waiting { until },
                    Then::LaunchAt(_) => return self.launch_again(now),
                }
                None
            }
            Activity::Idle | Activity::Waiting { .. } => None,
        }
    }

    fn tick(&mut self, now: Moment, draw: u64) -> Option<Action> {
        match self.activity {
            Activity::Waiting { until } if now >= until => self.launch_again(now),
            Activity::Running { ready_by } if self.state == State::Starting && now >= ready_by => {
                let hint = self.hint.take().map_or_else(String::new, |hint| format!(": {hint}"));
                let error = format!("not ready within {} s{hint}", self.ready_within.as_secs());
                self.lost(error, Outlook::MayPass, now, draw)
            }
            _ => None,
        }
    }

    /// It failed: decides whether it is started again, and ends what still runs of it.
    fn lost(&mut self, error: String, outlook: Outlook, now: Moment, draw: u64) -> Option<Action> {
        self.last_error = Some(error);
        let hopeless = outlook == Outlook::Hopeless || self.policy == RestartPolicy::Never;
        let verdict = if hopeless { Verdict::GiveUp } else { self.restarts.lost(now, draw) };
        let (event, then) = match verdict {
            Verdict::Retry { after } => (Event::Lost, Then::LaunchAt(now + after)),
            Verdict::GiveUp => (Event::GaveUp, Then::Rest),
        };
        self.state = self.state.on(event).unwrap_or(self.state);
        let running = matches!(self.activity, Activity::Running { .. });
        self.activity = match then {
            _ if running => Activity::Ending { then },
            Then::LaunchAt(until) => Activity::Waiting { until },
            Then::Rest => Activity::Idle,
        };
        running.then_some(Action::End)
    }
}

#[cfg(test)]
#[path = "machine_tests.rs"]
mod tests;
