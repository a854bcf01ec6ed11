//! The decisions as tables, and what holds for all of them.

use proptest::prelude::*;

use super::*;

fn at(seconds: i64) -> Timestamp {
    Timestamp::clamped(seconds * 1000)
}

fn policies(on_expire: Action, idle: Option<Action>) -> Policies {
    Policies {
        on_expire,
        expire_reserve_seconds: 100,
        idle: idle.map(|action| Idle { timeout_seconds: 60, action, max_presence_seconds: 600 }),
        life_seconds: Some(1000),
        namespace: None,
    }
}

fn decide(
    policies: &Policies,
    state: State,
    (now, expires): (i64, Option<i64>),
    (usage, taking): (Option<&Usage>, Option<&Taking>),
    capture: Capture,
) -> Next {
    let (expires_at, now) = (expires.map(at), at(now));
    next(&Case { policies, state, expires_at, usage, taking, capture, now })
}

#[test]
fn an_expiry_by_action_state_and_time() {
    use Action::{Pause, Snapshot, Terminate};
    let expiry = Cause::Expiry;
    for (action, state, now, expected) in [
        (Terminate, State::Running, 950, Next::Wait(at(1000))),
        (Terminate, State::Running, 1000, Next::Remove(expiry)),
        (Terminate, State::Paused, 1000, Next::Remove(expiry)),
        (Terminate, State::Pausing, 1000, Next::Hold),
        (Terminate, State::Stopping, 1000, Next::Rest),
        (Pause, State::Running, 899, Next::Wait(at(900))),
        (Pause, State::Running, 900, Next::Pause(expiry)),
        (Pause, State::Running, 1500, Next::Pause(expiry)),
        (Pause, State::Pausing, 950, Next::Hold),
        (Pause, State::Paused, 5000, Next::Rest),
        (Pause, State::Failed, 950, Next::Wait(at(1000))),
        (Pause, State::Terminated, 1000, Next::Remove(expiry)),
        (Snapshot, State::Running, 899, Next::Wait(at(900))),
        (Snapshot, State::Running, 900, Next::Capture(expiry)),
        (Snapshot, State::Paused, 900, Next::Capture(expiry)),
        (Snapshot, State::Resuming, 1001, Next::Hold),
        (Snapshot, State::Running, 2000, Next::Capture(expiry)),
        (Snapshot, State::Failed, 1000, Next::Remove(expiry)),
    ] {
        let policies = policies(action, None);
        let seen = decide(&policies, state, (now, Some(1000)), (None, None), Capture::None);
        assert_eq!(seen, expected, "{action:?} {state:?} {now}");
    }
}

#[test]
fn a_snapshot_of_expiry_is_let_end_and_is_tried_three_times() {
    let policies = policies(Action::Snapshot, None);
    let first = Taking::first(Cause::Expiry, Some(SnapshotId::random()));
    let judge = |taking: &Taking, capture, now| {
        decide(&policies, State::Running, (now, Some(1000)), (None, Some(taking)), capture)
    };
    assert_eq!(judge(&first, Capture::UnderWay, 1200), Next::Hold);
    assert_eq!(judge(&first, Capture::Ready, 950), Next::Wait(at(1000)));
    assert_eq!(judge(&first, Capture::Ready, 1000), Next::Remove(Cause::Expiry));
    // A server that died before the record was written.
    assert_eq!(judge(&first, Capture::None, 905), Next::Capture(Cause::Expiry));
    let failed = first.failed("disk full".into(), at(905));
    assert_eq!(failed.not_before, Some(at(920)));
    assert_eq!(judge(&failed, Capture::Failed, 910), Next::Wait(at(920)));
    assert_eq!(judge(&failed, Capture::Failed, 920), Next::Capture(Cause::Expiry));
    assert_eq!(judge(&failed, Capture::Failed, 1000), Next::Remove(Cause::Expiry), "not for ever");
    let third = failed.again(None).failed("e".into(), at(921)).again(None).failed("e".into(), at(960));
    assert_eq!(third.attempts, 3);
    assert_eq!(judge(&third, Capture::Failed, 999), Next::Wait(at(1000)));
}

#[test]
fn a_pause_that_fails_ends_with_the_expiry() {
    let policies = policies(Action::Pause, None);
    let failed = Taking::first(Cause::Expiry, None).failed("no".into(), at(990));
    let judge =
        |now| decide(&policies, State::Running, (now, Some(1000)), (None, Some(&failed)), Capture::None);
    assert_eq!(judge(995), Next::Wait(at(1000)));
    assert_eq!(judge(1000), Next::Remove(Cause::Expiry));
}

#[test]
fn idleness_by_action_and_time() {
    let idle = Cause::Idle;
    let usage = Usage::begun(at(100));
    for (action, state, now, expected) in [
        (Action::Terminate, State::Running, 159, Next::Wait(at(160))),
        (Action::Terminate, State::Running, 160, Next::Remove(idle)),
        (Action::Pause, State::Running, 160, Next::Pause(idle)),
        (Action::Snapshot, State::Running, 160, Next::Capture(idle)),
        (Action::Terminate, State::Paused, 900, Next::Rest),
        (Action::Terminate, State::Pausing, 900, Next::Rest),
    ] {
        let policies = policies(Action::Terminate, Some(action));
        let seen = decide(&policies, state, (now, None), (Some(&usage), None), Capture::None);
        assert_eq!(seen, expected, "{action:?} {state:?} {now}");
    }
    let both = policies(Action::Terminate, Some(Action::Pause));
    let seen = decide(&both, State::Running, (120, Some(130)), (Some(&usage), None), Capture::None);
    assert_eq!(seen, Next::Wait(at(130)), "whichever is sooner");
    let unknown = decide(&both, State::Running, (900, None), (None, None), Capture::None);
    assert_eq!(unknown, Next::Rest, "nothing is concluded from not knowing");
    let policies = policies(Action::Terminate, Some(Action::Snapshot));
    let first = Taking::first(Cause::Idle, Some(SnapshotId::random()));
    let judge = |taking: &Taking, capture, now| {
        decide(&policies, State::Running, (now, None), (Some(&usage), Some(taking)), capture)
    };
    assert_eq!(judge(&first, Capture::UnderWay, 200), Next::Hold);
    assert_eq!(judge(&first, Capture::Ready, 200), Next::Remove(idle));
    let failed = first.failed("no".into(), at(200));
    assert_eq!(judge(&failed, Capture::Failed, 210), Next::Wait(at(215)));
    assert_eq!(judge(&failed, Capture::Failed, 215), Next::Capture(idle));
}

#[test]
fn what_counts_as_use() {
    let policies = policies(Action::Terminate, Some(Action::Terminate));
    let mut usage = Usage::begun(at(100));
    assert_eq!(usage.idle_at(&policies), Some(at(160)));
    usage.present(at(150));
    assert_eq!(usage.idle_at(&policies), Some(at(210)));
    // An open terminal alone is of use for ten minutes.
    usage.present(at(50_000));
    assert_eq!(usage.idle_at(&policies), Some(at(760)));
    usage.used(at(300));
    assert_eq!(usage.idle_at(&policies), Some(at(960)));
    usage.lease(at(2000));
    assert_eq!(usage.idle_at(&policies), Some(at(2060)));
    usage.lease(at(400));
    assert_eq!(usage.idle_at(&policies), Some(at(2060)), "a lease never shortens another");
}

#[test]
fn what_is_begun_is_withdrawn_by_a_renewal_or_a_use() {
    let policies = policies(Action::Snapshot, Some(Action::Snapshot));
    let mut usage = Usage::begun(at(100));
    let case = |cause, usage: &Usage, now, expires| {
        let taking = Taking::first(cause, None);
        withdrawn(&Case {
            policies: &policies,
            state: State::Running,
            expires_at: Some(at(expires)),
            usage: Some(usage),
            taking: Some(&taking),
            capture: Capture::UnderWay,
            now: at(now),
        })
    };
    assert!(!case(Cause::Expiry, &usage, 950, 1000));
    assert!(case(Cause::Expiry, &usage, 950, 2000));
    assert!(!case(Cause::Idle, &usage, 200, 1000));
    usage.used(at(190));
    assert!(case(Cause::Idle, &usage, 200, 1000));
}

#[derive(Debug, Clone)]
enum Sign {
    Used,
    Present,
    Lease(u32),
}

fn sign() -> impl Strategy<Value = Sign> {
    prop_oneof![Just(Sign::Used), Just(Sign::Present), (1u32..3600).prop_map(Sign::Lease)]
}

fn states() -> impl Strategy<Value = State> {
    prop::sample::select(State::ALL.to_vec())
}

fn actions() -> impl Strategy<Value = Action> {
    prop::sample::select(vec![Action::Terminate, Action::Pause, Action::Snapshot])
}

proptest! {
    #[test]
    fn no_sign_of_use_brings_the_end_nearer(
        begun in 0i64..1_000_000,
        signs in prop::collection::vec((0i64..10_000, sign()), 0..40),
        timeout in 1u64..5000,
        presence in 0u64..5000,
    ) {
        let idle = Idle { timeout_seconds: timeout, action: Action::Terminate, max_presence_seconds: presence };
        let policies = Policies { idle: Some(idle), ..Policies::default() };
        let mut usage = Usage::begun(at(begun));
        let (mut last_use, mut leased) = (begun, begun);
        let mut before = usage.idle_at(&policies).unwrap();
        let mut now = begun;
        for (pause, sign) in signs {
            now += pause;
            match sign {
                Sign::Used => { usage.used(at(now)); last_use = now; }
                Sign::Present => usage.present(at(now)),
                Sign::Lease(seconds) => {
                    let until = now + i64::from(seconds);
                    usage.lease(at(until));
                    leased = leased.max(until);
                }
            }
            let idle_at = usage.idle_at(&policies).unwrap();
            prop_assert!(idle_at >= before, "it went backwards");
            before = idle_at;
            let timeout = i64::try_from(timeout).unwrap();
            // At least a whole timeout after the last use or lease, and presence alone adds no more than it may.
            prop_assert!(idle_at >= at(last_use.max(leased) + timeout));
            let most = (last_use + i64::try_from(presence).unwrap()).max(leased) + timeout;
            prop_assert!(idle_at <= at(most));
        }
    }

    #[test]
    fn nothing_is_done_before_its_time_and_nothing_stays_for_ever(
        on_expire in actions(),
        state in states(),
        reserve in 0u64..1000,
        now in 0i64..5000,
        expires in 1i64..5000,
        attempts in 0u32..5,
        failed in any::<bool>(),
        capture in prop::sample::select(vec![Capture::None, Capture::UnderWay, Capture::Ready, Capture::Failed]),
    ) {
        let policies = Policies { on_expire, expire_reserve_seconds: reserve, ..Policies::default() };
        let taking = (attempts > 0).then(|| {
            let first = Taking { attempts, ..Taking::first(Cause::Expiry, None) };
            if failed { first.failed("e".into(), at(now)) } else { first }
        });
        let begins = policies.begins_at(at(expires));
        let seen = decide(&policies, state, (now, Some(expires)), (None, taking.as_ref()), capture);
        match seen {
            Next::Remove(_) => prop_assert!(at(now) >= at(expires)),
            Next::Pause(_) => prop_assert!(at(now) >= begins && on_expire == Action::Pause && attempts < ATTEMPTS),
            Next::Capture(_) => prop_assert!(at(now) >= begins && on_expire == Action::Snapshot && attempts < ATTEMPTS),
            Next::Wait(until) => prop_assert!(until > at(now), "no busy waiting"),
            Next::Hold => prop_assert!(capture == Capture::UnderWay || matches!(state, State::Pausing | State::Resuming)),
            // Only what is frozen by its policy, or goes already, is left alone.
            Next::Rest => prop_assert!(
                state == State::Stopping || (on_expire == Action::Pause && state == State::Paused)
            ),
        }
    }
}
