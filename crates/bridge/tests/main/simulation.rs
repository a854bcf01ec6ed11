//! The agent's core and ring against the registry, in virtual time, with a link that loses, repeats and breaks, and with restarts
//! of either side at any moment.

use std::collections::BTreeMap;

use jiff::Timestamp;
use proptest::prelude::*;
use sandglass_bridge::Moment;
use sandglass_bridge::agent::{Action, Call, Core, Failure, Jitter, Notice as Told, Pace};
use sandglass_bridge::ring::{Draft, Ring};
use sandglass_bridge::server::{
    Caller, LeaseState, LeaseTimes, Notice, Registration, Registry, SavedSandbox, Settled, TokenHash,
};
use sandglass_bridge::wire::{
    AttachRequest, BootId, Class, Command, CommandId, Event, LeaseId, Outcome, Refusal, read_events,
};
use tempfile::TempDir;

const SANDBOX: &str = "box";
const TOKEN: &str = "token";

/// How the next calls fare.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Link {
    Up,
    Down,
    /// Calls arrive, answers do not.
    Deaf,
    /// Calls arrive twice.
    Stutter,
}

/// What the server has on disk: events, and the registry's values with the position of the same transaction.
#[derive(Default)]
struct Store {
    events: Vec<Event>,
    acked: u64,
}

struct World {
    dir: TempDir,
    /// Virtual milliseconds, as the server's clock has them.
    now: u64,
    /// The agent's clock against the server's.
    skew_ms: i64,
    core: Core,
    ring: Option<Ring>,
    stream: Option<Call>,
    registry: Registry,
    store: Store,
    link: Link,
    emitted: BTreeMap<u64, (Class, String)>,
    commands: Vec<CommandId>,
    settled: Vec<CommandId>,
    carried_out: BTreeMap<CommandId, u32>,
    lives: u64,
    notices: Vec<(u64, Notice)>,
    /// Every batch that was ever sent, with the lease of then: any of them may arrive again.
    sent: Vec<(LeaseId, Vec<u8>)>,
    /// The server dies after storing the next batch and before saying so.
    dies_storing: bool,
    died: bool,
}

impl World {
    fn new(skew_ms: i64, budget: u64) -> Self {
        let dir = TempDir::new().unwrap();
        let now = 10_000_000;
        let mut registry = Registry::new(1);
        registry
            .register(
                Registration {
                    sandbox: SANDBOX.parse().unwrap(),
                    generation: 1,
                    token: TokenHash::of(TOKEN),
                    repositories: Vec::new(),
                    times: LeaseTimes::default(),
                },
                Moment::from_millis(now),
            )
            .unwrap();
        let ring = Ring::with_budget(dir.path(), boot(), budget).unwrap().0;
        Self {
            dir,
            now,
            skew_ms,
            core: Core::new(Pace::default(), Jitter::seeded(9)),
            ring: Some(ring),
            stream: None,
            registry,
            store: Store::default(),
            link: Link::Up,
            emitted: BTreeMap::new(),
            commands: Vec::new(),
            settled: Vec::new(),
            carried_out: BTreeMap::new(),
            lives: 1,
            notices: Vec::new(),
            sent: Vec::new(),
            dies_storing: false,
            died: false,
        }
    }

    fn server_now(&self) -> Moment {
        Moment::from_millis(self.now)
    }

    fn agent_now(&self) -> Moment {
        Moment::from_millis(self.now.checked_add_signed(self.skew_ms).unwrap())
    }

    fn ring(&mut self) -> &mut Ring {
        self.ring.as_mut().unwrap()
    }

    fn emit(&mut self, class: Class, size: usize) {
        let time = Timestamp::from_millisecond(self.agent_now().as_millis() as i64).unwrap();
        let text = format!("{}-{}", self.emitted.len(), "x".repeat(size));
        let draft = Draft::new(class, time, "happened", &text).unwrap().keyed("k");
        let seq = self.ring().push(draft).unwrap();
        assert_eq!(self.emitted.insert(seq, (class, text)), None, "number {seq} was given twice");
        let now = self.agent_now();
        self.core.events_pending(now);
    }

    fn enqueue(&mut self) {
        let command = Command::ServiceRestart { name: "web".into() };
        if let Ok(id) =
            self.registry.enqueue(SANDBOX, &command, None, self.server_now(), Timestamp::UNIX_EPOCH)
        {
            self.commands.push(id);
        }
    }

    fn restart_agent(&mut self, budget: u64) {
        self.ring = None;
        self.ring = Some(Ring::with_budget(self.dir.path(), boot(), budget).unwrap().0);
        self.core = Core::new(Pace::default(), Jitter::seeded(self.now));
        self.stream = None;
        self.carried_out.clear();
    }

    fn restart_server(&mut self) {
        let mut saved: Vec<SavedSandbox> = self.registry.saved();
        saved[0].acked_seq = self.store.acked;
        self.lives += 1;
        self.registry = Registry::restored(self.lives, saved, self.server_now());
        // Commands end with the life that sent them.
        self.commands.clear();
        self.break_stream();
    }

    fn break_stream(&mut self) {
        if let Some(call) = self.stream.take() {
            let now = self.agent_now();
            self.core.stream_ended(&call, Failure::Link, now);
        }
    }

    fn set_link(&mut self, link: Link) {
        self.link = link;
        if link == Link::Down {
            self.break_stream();
        }
    }

    /// Lets time go by, from one thing that is due to the next.
    fn run(&mut self, ms: u64) {
        let end = self.now + ms;
        loop {
            self.settle_down();
            let agent = self.core.next_wake().map(|wake| (wake.as_millis() as i64 - self.skew_ms) as u64);
            let server = self.registry.next_due().map(Moment::as_millis);
            let next = agent.into_iter().chain(server).min().unwrap_or(end).max(self.now);
            if next >= end {
                self.now = end;
                self.settle_down();
                return;
            }
            self.now = next;
        }
    }

    fn settle_down(&mut self) {
        self.registry.advance(self.server_now());
        for _ in 0..10_000 {
            let now = self.now;
            self.notices.extend(self.registry.take_notices().map(|notice| (now, notice)));
            self.push_commands();
            let Some(action) = self.core.poll(self.agent_now()) else { return };
            match action {
                Action::Call(call) => self.call(call),
                Action::CloseStream => self.stream = None,
                Action::Deliver { id, .. } => {
                    *self.carried_out.entry(id.clone()).or_default() += 1;
                    self.core.settle(id, Outcome::done());
                }
                Action::Tell(told) => assert!(!matches!(told, Told::Ended(_)), "{told:?}"),
            }
        }
        panic!("the agent never comes to rest");
    }

    /// The server writes what waits to the open stream.
    fn push_commands(&mut self) {
        if self.link != Link::Up {
            return;
        }
        let Some(Call::Stream { lease, .. }) = self.stream.clone() else { return };
        let now = self.server_now();
        let Ok(frames) = self.registry.commands(&caller(Some(lease.as_str())), None, now) else {
            return self.break_stream();
        };
        let now = self.agent_now();
        for frame in frames {
            // Known ones are repeated on purpose: delivery is at least once.
            self.core.command_arrived(&frame, now);
        }
    }

    fn call(&mut self, call: Call) {
        if matches!(call, Call::Stream { .. }) && self.link == Link::Up {
            self.core.stream_alive();
            self.stream = Some(call);
            return;
        }
        if self.link == Link::Down || matches!(call, Call::Stream { .. }) {
            let now = self.agent_now();
            return self.core.failed(&call, Failure::Link, now);
        }
        let body = if matches!(call, Call::Events { .. }) { self.batch() } else { None };
        if let (Some(lease), Some(body)) = (call.lease(), &body) {
            self.sent.push((lease.clone(), body.clone()));
        }
        if self.link == Link::Stutter {
            let _ = self.serve(&call, body.clone());
        }
        let answer = self.serve(&call, body);
        let now = self.agent_now();
        let died = std::mem::take(&mut self.died);
        match answer {
            _ if died || self.link == Link::Deaf => self.core.failed(&call, Failure::Link, now),
            Err(refusal) => self.core.failed(&call, Failure::Refused(refusal), now),
            Ok(finish) => finish(self, now),
        }
    }

    fn batch(&mut self) -> Option<Vec<u8>> {
        let acked = self.ring().status().acked_seq;
        self.ring().batch_of(acked, 7, 4_096).map(|batch| batch.body)
    }

    /// The server's side of a call, and what its answer does to the agent if it arrives.
    #[expect(clippy::type_complexity, reason = "a closure that is used once, here")]
    fn serve(
        &mut self,
        call: &Call,
        body: Option<Vec<u8>>,
    ) -> Result<Box<dyn FnOnce(&mut World, Moment)>, Refusal> {
        let now = self.server_now();
        let lease = call.lease().map(ToString::to_string);
        let caller = caller(lease.as_deref());
        Ok(match call.clone() {
            Call::Attach => {
                let reply = self.registry.attach(&caller, &attachment(), now, Timestamp::UNIX_EPOCH)?;
                Box::new(move |world, now| {
                    world.ring().reconcile(reply.acked_seq);
                    world.core.attached(reply, now);
                    if world.ring().has_unacked() {
                        world.core.events_pending(now);
                    }
                })
            }
            Call::Heartbeat { lease } => {
                let reply = self.registry.heartbeat(&caller, now)?;
                Box::new(move |world, _| world.core.heartbeat_answered(&lease, &reply))
            }
            Call::Events { .. } => {
                let Some(body) = body else {
                    return Ok(Box::new(|world, now| world.core.events_answered(false, now)));
                };
                let admitted = self.registry.admit(&caller, read_events(&body).unwrap(), now)?;
                let mut acked = admitted.from;
                if let Some(ticket) = admitted.ticket {
                    assert_eq!(admitted.from, self.store.acked);
                    self.store.events.extend(admitted.events);
                    self.store.acked = admitted.to;
                    if std::mem::take(&mut self.dies_storing) {
                        self.died = true;
                        self.restart_server();
                        return Err(Refusal::Busy);
                    }
                    acked = self.registry.commit(SANDBOX, &ticket).unwrap();
                }
                let call = call.clone();
                Box::new(move |world, now| {
                    let before = world.ring().status().acked_seq;
                    world.ring().ack(acked);
                    if world.ring().status().acked_seq == before {
                        world.core.failed(&call, Failure::Useless, now);
                    } else {
                        let more = world.ring().has_unacked();
                        world.core.events_answered(more, now);
                    }
                })
            }
            Call::Result { command, .. } => {
                if self.registry.settle(&caller, command.as_str())? == Settled::First {
                    self.settled.push(command.clone());
                }
                Box::new(move |world, _| world.core.result_answered(&command))
            }
            Call::Logs { .. } | Call::Stream { .. } | Call::Fatal(_) => unreachable!("not used here"),
        })
    }

    /// A batch of the past arrives once more, late.
    fn replay(&mut self, which: usize) {
        if let Some((lease, body)) = self.sent.get(which % self.sent.len().max(1)).cloned() {
            let _ = self.serve(&Call::Events { lease }, Some(body));
            self.died = false;
        }
    }

    /// Every number up to the newest is stored once, in order; nothing that was kept differs; of state nothing is missing.
    fn assert_everything_arrived(&mut self) {
        let mut at = 0;
        for event in &self.store.events {
            assert_eq!(event.first_seq(), at + 1, "order is broken at {event:?}");
            at = event.seq;
            if event.gap().is_none() {
                let text: String = serde_json::from_str(event.data.get()).unwrap();
                assert_eq!(self.emitted.get(&event.seq).map(|(_, text)| text), Some(&text));
            }
        }
        let last = self.emitted.last_key_value().map_or(0, |(seq, _)| *seq);
        assert_eq!(at, last, "events are missing at the end");
        for (seq, (class, _)) in &self.emitted {
            let kept = self.store.events.iter().any(|event| event.seq == *seq && event.gap().is_none());
            assert!(kept || *class != Class::State, "state event {seq} is missing");
        }
        assert!(!self.ring().has_unacked());
    }
}

fn boot() -> BootId {
    "boot".parse().unwrap()
}

fn caller(lease: Option<&str>) -> Caller<'_> {
    Caller { sandbox: SANDBOX, generation: 1, token: TOKEN, lease }
}

fn attachment() -> AttachRequest {
    AttachRequest {
        sandbox_id: SANDBOX.parse().unwrap(),
        generation: 1,
        boot_id: boot(),
        agent_version: "1".into(),
        protocol_version: 1,
        capabilities: Vec::new(),
        last_seq: 0,
    }
}

#[derive(Debug, Clone)]
enum Op {
    Emit(u8, usize),
    Run(u64),
    Link(Link),
    RestartAgent,
    RestartServer,
    BreakStream,
    Command,
    Replay(usize),
    DieStoring,
}

fn op() -> impl Strategy<Value = Op> {
    let link = prop_oneof![
        2 => Just(Link::Up),
        1 => Just(Link::Down),
        1 => Just(Link::Deaf),
        1 => Just(Link::Stutter),
    ];
    prop_oneof![
        8 => (0..3u8, 0..200usize).prop_map(|(class, size)| Op::Emit(class, size)),
        4 => prop_oneof![0..100u64, 0..40_000u64].prop_map(Op::Run),
        3 => link.prop_map(Op::Link),
        1 => Just(Op::RestartAgent),
        1 => Just(Op::RestartServer),
        1 => Just(Op::BreakStream),
        1 => Just(Op::Command),
        1 => any::<usize>().prop_map(Op::Replay),
        1 => Just(Op::DieStoring),
    ]
}

const HOUR_MS: i64 = 3_600_000;

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn nothing_is_lost_doubled_or_reordered(
        ops in prop::collection::vec(op(), 1..80),
        skew in prop_oneof![Just(0), Just(HOUR_MS), Just(-HOUR_MS)],
        budget in prop_oneof![Just(1_500u64), Just(8 * 1024 * 1024)],
    ) {
        let mut world = World::new(skew, budget);
        for op in ops {
            match op {
                Op::Emit(class, size) => {
                    world.emit([Class::State, Class::Progress, Class::Output][usize::from(class)], size);
                }
                Op::Run(ms) => world.run(ms),
                Op::Link(link) => world.set_link(link),
                Op::RestartAgent => world.restart_agent(budget),
                Op::RestartServer => world.restart_server(),
                Op::BreakStream => world.break_stream(),
                Op::Command => world.enqueue(),
                Op::Replay(which) => world.replay(which),
                Op::DieStoring => world.dies_storing = true,
            }
        }
        world.dies_storing = false;
        world.set_link(Link::Up);
        world.run(300_000);
        world.assert_everything_arrived();
        prop_assert!(world.commands.iter().all(|id| world.settled.contains(id)), "a command has no result");
        prop_assert!(world.carried_out.values().all(|times| *times == 1), "{:?}", world.carried_out);
        prop_assert_eq!(world.registry.lease_state(SANDBOX), Some(LeaseState::Live));
    }
}

/// The agent's clock is an hour off in either direction; the server's verdicts come at the same moments.
#[test]
fn a_lease_is_judged_the_same_whatever_the_clock_of_the_box_says() {
    let verdicts = |skew_ms| {
        let mut world = World::new(skew_ms, 1_000_000);
        world.run(100_000);
        world.set_link(Link::Down);
        world.run(60_000);
        world.set_link(Link::Up);
        world.run(60_000);
        world.set_link(Link::Down);
        world.run(200_000);
        let verdict = |(at, notice): &(u64, Notice)| match notice {
            Notice::Unresponsive { .. } => Some((*at, "unresponsive")),
            Notice::Lost { .. } => Some((*at, "lost")),
            Notice::Live { recovered: true, .. } => Some((0, "recovered")),
            _ => None,
        };
        world
            .notices
            .iter()
            .filter_map(verdict)
            .map(|(at, what)| (at.saturating_sub(10_000_000), what))
            .collect()
    };
    let honest: Vec<(u64, &str)> = verdicts(0);
    // The last heartbeat before the cut is that of 90 s, so silence is noticed at 135 s.
    assert_eq!(honest[0], (135_000, "unresponsive"));
    assert_eq!(honest[1].1, "recovered");
    assert_eq!((honest[2].1, honest[3].1), ("unresponsive", "lost"));
    assert_eq!(honest[3].0 - honest[2].0, 45_000);
    assert_eq!(honest.len(), 4);
    assert_eq!(verdicts(HOUR_MS), honest);
    assert_eq!(verdicts(-HOUR_MS), honest);
}

#[test]
fn five_minutes_without_a_link_cost_nothing_but_time() {
    let mut world = World::new(0, 8 * 1024 * 1024);
    world.run(20_000);
    world.set_link(Link::Down);
    for _ in 0..300 {
        world.emit(Class::State, 20);
        world.run(1_000);
    }
    world.set_link(Link::Up);
    world.run(31_000);
    world.assert_everything_arrived();
    assert_eq!(world.store.events.len(), 300);
}
