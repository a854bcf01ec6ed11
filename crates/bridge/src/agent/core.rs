//! The agent's side as a state machine without IO.
//!
//! ```text
//!              attached                      412: no lease
//!  Detached ─────────────► Attached ──┐ ◄──────────────────┐
//!     ▲                       │       └────────────────────┘ attach again
//!     └───────────────────────┘
//!  any ── 401, 403, 409, 410 of the current lease ──► Ended(Revoked)
//!  any ── drain, and nothing left to send ──────────► Ended(Drained)
//! ```
//!
//! A broken link changes no state: each [lane](Lane) tries again on its own, and the lease is the server's to judge. Answers to
//! calls of an earlier lease free their lane and nothing else.

use std::collections::VecDeque;
use std::time::Duration;

use crate::moment::Moment;
use crate::wire::{
    AttachReply, Command, CommandFrame, CommandId, FatalReport, HeartbeatReply, LeaseId, Outcome, Refusal,
};

use super::action::{Action, Call, Ending, Notice, Pace};
use super::backoff::Jitter;
use super::lane::{Failure, Lane, LaneState};
use super::seen::{Arrival, Seen};

#[derive(Debug)]
enum Phase {
    Detached,
    Attached { lease: LeaseId, interval: Duration, draining: bool },
    Ended,
}

/// The state machine. Tell it what happened, then [poll](Core::poll) until there is nothing to do before [`next_wake`](Core::next_wake).
#[derive(Debug)]
pub struct Core {
    phase: Phase,
    lanes: [LaneState; Lane::ALL.len()],
    jitter: Jitter,
    pace: Pace,
    heartbeat_at: Moment,
    events_at: Option<Moment>,
    logs_at: Option<Moment>,
    results: VecDeque<(CommandId, Outcome)>,
    fatal: Option<FatalReport>,
    seen: Seen,
    last_event_id: Option<String>,
    drain: bool,
    todo: VecDeque<Action>,
}

impl Core {
    pub fn new(pace: Pace, jitter: Jitter) -> Self {
        Self {
            phase: Phase::Detached,
            lanes: Default::default(),
            jitter,
            pace,
            heartbeat_at: Moment::default(),
            events_at: None,
            logs_at: None,
            results: VecDeque::new(),
            fatal: None,
            seen: Seen::default(),
            last_event_id: None,
            drain: false,
            todo: VecDeque::new(),
        }
    }

    pub fn lease(&self) -> Option<&LeaseId> {
        match &self.phase {
            Phase::Attached { lease, .. } => Some(lease),
            Phase::Detached | Phase::Ended => None,
        }
    }

    pub fn has_ended(&self) -> bool {
        matches!(self.phase, Phase::Ended)
    }

    /// What to do now; `None` until something happens or [`Core::next_wake`] comes.
    pub fn poll(&mut self, now: Moment) -> Option<Action> {
        if let Some(action) = self.todo.pop_front() {
            return Some(action);
        }
        if self.is_drained() {
            self.end(Ending::Drained);
            return self.todo.pop_front();
        }
        let lane = Lane::ALL.into_iter().find(|lane| self.due(*lane).is_some_and(|due| due <= now))?;
        let call = self.call(lane, now)?;
        self.lanes[lane as usize].busy = true;
        Some(Action::Call(call))
    }

    /// When to poll again if nothing happens before.
    pub fn next_wake(&self) -> Option<Moment> {
        Lane::ALL.into_iter().filter_map(|lane| self.due(lane)).min()
    }

    /// When a lane's next call may start, if it has something to do.
    fn due(&self, lane: Lane) -> Option<Moment> {
        let always = Moment::default();
        let wanted = match (&self.phase, lane) {
            (Phase::Ended, _) => None,
            (_, Lane::Fatal) => self.fatal.as_ref().map(|_| always),
            (Phase::Detached, Lane::Attach) => Some(always),
            (Phase::Detached, _) | (_, Lane::Attach) => None,
            (_, Lane::Stream) => Some(always),
            (_, Lane::Heartbeat) => Some(self.heartbeat_at),
            (_, Lane::Events) => self.events_at,
            (_, Lane::Logs) => self.logs_at,
            (_, Lane::Results) => (!self.results.is_empty()).then_some(always),
        };
        self.lanes[lane as usize].ready_at(wanted?)
    }

    fn call(&mut self, lane: Lane, now: Moment) -> Option<Call> {
        let attached = match &self.phase {
            Phase::Attached { lease, interval, .. } => Some((lease.clone(), *interval)),
            Phase::Detached | Phase::Ended => None,
        };
        Some(match (lane, attached) {
            (Lane::Attach, _) => Call::Attach,
            (Lane::Fatal, _) => Call::Fatal(self.fatal.clone()?),
            (_, None) => return None,
            (Lane::Stream, Some((lease, _))) => {
                Call::Stream { lease, last_event_id: self.last_event_id.clone() }
            }
            (Lane::Heartbeat, Some((lease, interval))) => {
                self.heartbeat_at = now.after(interval);
                Call::Heartbeat { lease }
            }
            (Lane::Events, Some((lease, _))) => {
                self.events_at = None;
                Call::Events { lease }
            }
            (Lane::Logs, Some((lease, _))) => {
                self.logs_at = None;
                Call::Logs { lease }
            }
            (Lane::Results, Some((lease, _))) => {
                let (command, outcome) = self.results.front()?.clone();
                Call::Result { lease, command, outcome }
            }
        })
    }

    // What the owner wants.

    /// There are events that the server does not have.
    pub fn events_pending(&mut self, now: Moment) {
        self.events_at.get_or_insert(now.after(self.pace.linger));
    }

    /// There are log bytes to send.
    pub fn logs_pending(&mut self, now: Moment) {
        self.logs_at.get_or_insert(now.after(self.pace.linger));
    }

    /// How a command ended. Told until the server has it; a second outcome of one command is ignored.
    pub fn settle(&mut self, command: CommandId, outcome: Outcome) {
        if self.seen.settle(&command, &outcome) {
            self.results.push_back((command, outcome));
        }
    }

    /// The box cannot go on. Told with or without a lease; only the first report counts.
    pub fn fatal(&mut self, report: FatalReport) {
        self.fatal.get_or_insert(report);
    }

    /// Deliver what there is and then end.
    pub fn drain(&mut self) {
        self.drain = true;
    }

    fn is_drained(&self) -> bool {
        let nothing_waits = self.events_at.is_none()
            && self.logs_at.is_none()
            && self.results.is_empty()
            && self.fatal.is_none();
        let under_way =
            [Lane::Events, Lane::Logs, Lane::Results].into_iter().any(|lane| self.lanes[lane as usize].busy);
        self.drain && !self.has_ended() && nothing_waits && !under_way
    }

    // What the server answered.

    pub fn attached(&mut self, reply: AttachReply, now: Moment) {
        self.free(Lane::Attach);
        if self.has_ended() {
            return;
        }
        // The attach lane is in order again once the lease has proven good for a heartbeat; until then a server that gives leases
        // and disowns them is asked ever more slowly.
        for lane in Lane::ALL {
            self.lanes[lane as usize].link_is_up();
        }
        self.heartbeat_at = now;
        self.phase = Phase::Attached {
            lease: reply.lease_id.clone(),
            interval: Duration::from_secs(reply.heartbeat_interval_seconds.max(1)),
            draining: reply.draining,
        };
        let draining = reply.draining;
        self.tell(Notice::Attached(Box::new(reply)));
        if draining {
            self.tell(Notice::Draining);
        }
    }

    pub fn heartbeat_answered(&mut self, lease: &LeaseId, reply: &HeartbeatReply) {
        self.succeeded(Lane::Heartbeat);
        if self.lease() != Some(lease) {
            return;
        }
        self.lanes[Lane::Attach as usize].succeeded();
        if let Phase::Attached { draining, .. } = &mut self.phase
            && reply.draining
            && !std::mem::replace(draining, true)
        {
            self.tell(Notice::Draining);
        }
    }

    /// A batch arrived. `more`: the server still lacks events.
    pub fn events_answered(&mut self, more: bool, now: Moment) {
        self.succeeded(Lane::Events);
        if more {
            self.events_at = Some(now);
        }
    }

    pub fn logs_answered(&mut self, more: bool, now: Moment) {
        self.succeeded(Lane::Logs);
        if more {
            self.logs_at = Some(now);
        }
    }

    pub fn result_answered(&mut self, command: &CommandId) {
        self.succeeded(Lane::Results);
        self.drop_result(command);
    }

    pub fn fatal_answered(&mut self) {
        self.succeeded(Lane::Fatal);
        self.fatal = None;
        self.tell(Notice::FatalReported);
    }

    /// A call came to nothing.
    pub fn failed(&mut self, call: &Call, failure: Failure, now: Moment) {
        let lane = call.lane();
        self.free(lane);
        self.lanes[lane as usize].failed(&failure, now, &mut self.jitter);
        match call {
            // Only the pause between attempts delays it now.
            Call::Heartbeat { .. } => self.heartbeat_at = now,
            Call::Events { .. } => self.events_at = Some(now),
            Call::Logs { .. } => self.logs_at = Some(now),
            Call::Attach | Call::Stream { .. } | Call::Result { .. } | Call::Fatal(_) => {}
        }
        let of_the_past = call.lease().is_some() && call.lease() != self.lease();
        match failure {
            Failure::Refused(refusal) if refusal.ends_the_bridge() && !of_the_past => {
                self.end(Ending::Revoked(refusal));
            }
            Failure::Refused(Refusal::NotAttached) if !of_the_past && call.lease().is_some() => {
                self.detach(now)
            }
            Failure::Status(status @ 400..=499) if !matches!(status, 408 | 425 | 429) => {
                self.reject(call, status)
            }
            Failure::Refused(Refusal::TooLarge) => self.reject(call, Refusal::TooLarge.status()),
            Failure::Link | Failure::Useless | Failure::Refused(_) | Failure::Status(_) => {}
        }
    }

    // What the stream brings.

    /// Something came over the stream, be it a comment.
    pub fn stream_alive(&mut self) {
        let lane = &mut self.lanes[Lane::Stream as usize];
        lane.succeeded();
        lane.busy = true;
        self.link_is_up();
    }

    /// The stream is over, or was never opened.
    pub fn stream_ended(&mut self, call: &Call, failure: Failure, now: Moment) {
        self.failed(call, failure, now);
    }

    /// A command arrived.
    pub fn command_arrived(&mut self, frame: &CommandFrame, now: Moment) {
        let id = frame.command_id.clone();
        self.last_event_id = Some(id.to_string());
        match self.seen.arrive(&id) {
            Arrival::Running => return,
            Arrival::Settled(outcome) => {
                if !self.results.iter().any(|(waiting, _)| *waiting == id) {
                    self.results.push_back((id, outcome));
                }
                return;
            }
            Arrival::New => {}
        }
        let refused = |code: &str, message: String| Outcome::failed(code, message);
        match frame.command() {
            Ok(Command::Ping) => self.settle(id, Outcome::done()),
            Ok(Command::Unknown { kind }) => {
                let message = format!("this agent does not know the command {kind}");
                self.settle(id, refused("COMMAND::UNSUPPORTED", message));
            }
            Ok(_) if frame.remaining_ms == Some(0) => {
                self.settle(
                    id,
                    refused("COMMAND::EXPIRED", "the command arrived after its deadline".to_owned()),
                );
            }
            Ok(command) => {
                let expires = frame.remaining_ms.map(|ms| now.after(Duration::from_millis(ms)));
                self.todo.push_back(Action::Deliver { id, command, expires });
            }
            Err(error) => self.settle(id, refused("COMMAND::MALFORMED", error.to_string())),
        }
    }

    fn free(&mut self, lane: Lane) {
        self.lanes[lane as usize].busy = false;
    }

    fn succeeded(&mut self, lane: Lane) {
        self.free(lane);
        self.lanes[lane as usize].succeeded();
        self.link_is_up();
    }

    fn link_is_up(&mut self) {
        for lane in &mut self.lanes {
            lane.link_is_up();
        }
    }

    fn drop_result(&mut self, command: &CommandId) {
        self.results.retain(|(waiting, _)| waiting != command);
    }

    /// The server will never take it. Events are not dropped: a server that cannot read them now may later.
    fn reject(&mut self, call: &Call, status: u16) {
        match call {
            Call::Result { command, .. } => self.drop_result(command),
            Call::Fatal(_) => self.fatal = None,
            // Whoever holds them drops them when told.
            Call::Logs { .. } => {}
            Call::Attach | Call::Stream { .. } | Call::Heartbeat { .. } | Call::Events { .. } => return,
        }
        self.tell(Notice::Rejected { lane: call.lane(), status });
    }

    fn detach(&mut self, now: Moment) {
        self.phase = Phase::Detached;
        self.close_stream();
        self.lanes[Lane::Attach as usize].failed(&Failure::Useless, now, &mut self.jitter);
        self.tell(Notice::Detached);
    }

    fn end(&mut self, ending: Ending) {
        if !self.has_ended() {
            self.phase = Phase::Ended;
            self.close_stream();
            self.tell(Notice::Ended(ending));
        }
    }

    fn close_stream(&mut self) {
        if std::mem::take(&mut self.lanes[Lane::Stream as usize].busy) {
            self.todo.push_back(Action::CloseStream);
        }
    }

    fn tell(&mut self, notice: Notice) {
        self.todo.push_back(Action::Tell(notice));
    }
}

#[cfg(test)]
mod tests;
