use proptest::prelude::*;

use super::*;

fn at(seconds: i64) -> Timestamp {
    Timestamp::clamped(seconds * 1000)
}

const LIMITS: Limits = Limits {
    failures: 3,
    window: Duration::from_secs(300),
    open: Duration::from_secs(60),
    probe: Duration::from_secs(2700),
};

fn opened() -> Breaker {
    let mut breaker = Breaker::default();
    for second in 0..3 {
        breaker.failed(SandboxId::random(), at(second), &LIMITS);
    }
    breaker
}

#[test]
fn three_failures_open_it_and_one_probe_decides() {
    let mut breaker = opened();
    let (probe, other) = (SandboxId::random(), SandboxId::random());
    assert_eq!(breaker.admit(probe, at(2), &LIMITS), Admission::Refused(Duration::from_secs(60)));
    assert_eq!(breaker.admit(probe, at(61), &LIMITS), Admission::Refused(Duration::from_secs(1)));
    assert_eq!(breaker.admit(probe, at(62), &LIMITS), Admission::Probe);
    assert_eq!(breaker.admit(probe, at(62), &LIMITS), Admission::Probe, "asked again by itself");
    assert_eq!(breaker.admit(other, at(63), &LIMITS), Admission::Refused(WHILE_PROBING));
    // One from before does not decide.
    breaker.failed(other, at(64), &LIMITS);
    assert!(matches!(breaker, Breaker::HalfOpen { .. }));
    breaker.failed(probe, at(70), &LIMITS);
    assert_eq!(breaker, Breaker::Open { until: at(190), times: 2 }, "twice as long");
    assert_eq!(breaker.admit(other, at(190), &LIMITS), Admission::Probe);
    breaker.ready();
    assert!(breaker.is_empty());
}

#[test]
fn failures_far_apart_and_repeated_reports_do_not_open_it() {
    let mut breaker = Breaker::default();
    for minute in 0..20 {
        breaker.failed(SandboxId::random(), at(minute * 150), &LIMITS);
        assert_eq!(breaker.admit(SandboxId::random(), at(minute * 150), &LIMITS), Admission::Pass);
    }
    let (mut breaker, id) = (Breaker::default(), SandboxId::random());
    for _ in 0..9 {
        breaker.failed(id, at(1), &LIMITS);
    }
    assert_eq!(breaker.admit(id, at(1), &LIMITS), Admission::Pass);
}

#[test]
fn a_probe_that_is_cancelled_or_lost_makes_room_for_another() {
    let mut breaker = opened();
    let (probe, other) = (SandboxId::random(), SandboxId::random());
    assert_eq!(breaker.admit(probe, at(100), &LIMITS), Admission::Probe);
    breaker.withdrawn(other, at(101));
    assert!(matches!(breaker, Breaker::HalfOpen { .. }));
    breaker.withdrawn(probe, at(101));
    assert_eq!(breaker.admit(other, at(101), &LIMITS), Admission::Probe);
    assert_eq!(breaker.admit(probe, at(101 + 2700), &LIMITS), Admission::Probe, "nothing was heard of it");
}

#[test]
fn it_can_be_switched_off_and_is_read_as_it_was_written() {
    let off = Limits { failures: 0, ..LIMITS };
    let mut breaker = opened();
    assert_eq!(breaker.admit(SandboxId::random(), at(3), &off), Admission::Pass);
    breaker = Breaker::default();
    breaker.failed(SandboxId::random(), at(1), &off);
    assert!(breaker.is_empty());
    let id = SandboxId::random();
    let mut half = opened();
    half.admit(id, at(500), &LIMITS);
    let mut closed = Breaker::default();
    closed.failed(id, at(1), &LIMITS);
    for breaker in [Breaker::default(), closed, opened(), half] {
        let text = serde_json::to_string(&breaker).unwrap();
        assert_eq!(serde_json::from_str::<Breaker>(&text).unwrap(), breaker, "{text}");
    }
}

#[derive(Debug, Clone)]
enum Event {
    Admit,
    Fail(usize),
    Ready(usize),
    Withdraw(usize),
}

fn events() -> impl Strategy<Value = Vec<(i64, Event)>> {
    let event = prop_oneof![
        3 => Just(Event::Admit),
        4 => (0usize..8).prop_map(Event::Fail),
        1 => (0usize..8).prop_map(Event::Ready),
        1 => (0usize..8).prop_map(Event::Withdraw),
    ];
    prop::collection::vec((0i64..200, event), 0..120)
}

proptest! {
    /// Whatever happens: one probe at a time, no admission while it is open, a refusal that is over in bounded time, and no create is ever
    /// refused for good.
    #[test]
    fn the_machine_keeps_its_word(events in events()) {
        let mut breaker = Breaker::default();
        let mut now = 0;
        let mut alive: Vec<SandboxId> = Vec::new();
        for (pause, event) in events {
            now += pause;
            let pick = |n: usize| alive.get(n % alive.len().max(1)).copied();
            match event {
                Event::Admit => {
                    let id = SandboxId::random();
                    let before = breaker.clone();
                    match breaker.admit(id, at(now), &LIMITS) {
                        Admission::Pass => {
                            let passes = matches!(before, Breaker::Empty | Breaker::Closed { .. });
                            prop_assert!(passes);
                            prop_assert_eq!(&breaker, &before);
                            alive.push(id);
                        }
                        Admission::Probe => {
                            let is_probe = matches!(breaker, Breaker::HalfOpen { probe, .. } if probe == id);
                            prop_assert!(is_probe);
                            if let Breaker::HalfOpen { given_up_at, .. } = before {
                                prop_assert!(given_up_at <= at(now), "two probes");
                            }
                            alive.push(id);
                        }
                        Admission::Refused(after) => {
                            prop_assert_eq!(&breaker, &before);
                            prop_assert!(!after.is_zero() && after <= LONGEST_OPEN);
                        }
                    }
                }
                Event::Fail(n) => if let Some(id) = pick(n) {
                    breaker.failed(id, at(now), &LIMITS);
                    let again = { let mut again = breaker.clone(); again.failed(id, at(now), &LIMITS); again };
                    prop_assert_eq!(&again, &breaker, "reported twice");
                },
                Event::Ready(n) => if pick(n).is_some() {
                    breaker.ready();
                    prop_assert_eq!(breaker.admit(SandboxId::random(), at(now), &LIMITS), Admission::Pass);
                },
                Event::Withdraw(n) => if let Some(id) = pick(n) {
                    let before = breaker.clone();
                    breaker.withdrawn(id, at(now));
                    let was_probe = matches!(before, Breaker::HalfOpen { probe, .. } if probe == id);
                    prop_assert!(was_probe || breaker == before, "a cancelled one counts as nothing");
                },
            }
            if let Breaker::Closed { failures } = &breaker {
                prop_assert!(failures.len() < 3);
            }
            let mut later = breaker.clone();
            let admitted = later.admit(SandboxId::random(), at(now + 2700), &LIMITS);
            prop_assert!(!matches!(admitted, Admission::Refused(_)), "refused for ever");
        }
    }
}
