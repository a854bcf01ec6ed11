//! The engine on a fake runtime, a store in memory and a manual clock.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use proptest::prelude::*;
use sandglass_sandbox::{
    Clock, SandboxId, Timestamp,
    lifecycle::state::State,
    ports::{Store, store::SnapshotFilter},
    snapshot::{SnapshotRecord, SnapshotState},
    spec::{Entrypoint, MutableFacts, Spec},
};
use sandglass_server::engine::{
    Engine, Settings,
    commit::{EngineError, NewSandbox},
};
use sandglass_testkit::{FakeRuntime, Fault, ManualClock, MemoryStore};

struct Stack {
    runtime: Arc<FakeRuntime>,
    store: Arc<MemoryStore>,
    clock: Arc<ManualClock>,
    engine: Arc<Engine>,
}

impl Stack {
    async fn new() -> Self {
        let (runtime, store, clock) = (Arc::default(), Arc::default(), Arc::new(ManualClock::default()));
        let engine = Self::start(&runtime, &store, &clock).await;
        Self { runtime, store, clock, engine }
    }

    async fn start(
        runtime: &Arc<FakeRuntime>,
        store: &Arc<MemoryStore>,
        clock: &Arc<ManualClock>,
    ) -> Arc<Engine> {
        let engine = Engine::new(runtime.clone(), store.clone(), clock.clone(), Settings::default());
        engine.recover().await.unwrap();
        engine
    }

    /// Another server on the same runtime and store, as after a crash.
    async fn restart(&mut self) {
        self.engine.stop().await;
        self.engine = Self::start(&self.runtime, &self.store, &self.clock).await;
    }

    fn new_sandbox(&self, ttl: Option<u64>) -> NewSandbox {
        let expires_at = ttl.and_then(|s| self.clock.now().checked_add(Duration::from_secs(s)));
        NewSandbox {
            spec: Spec::new("img", Entrypoint::Command(vec!["sleep".into(), "1d".into()])),
            facts: MutableFacts { expires_at, metadata: BTreeMap::new() },
            secrets: Default::default(),
            key: None,
            pool: None,
            confidential: Default::default(),
        }
    }

    async fn create(&self, ttl: Option<u64>) -> String {
        self.engine.create(self.new_sandbox(ttl), self.clock.now()).await.unwrap().id.to_string()
    }

    fn state(&self, id: &str) -> Option<State> {
        self.engine.find(id).ok().and_then(|e| e.status()).map(|s| s.state)
    }

    async fn all_snapshots(&self) -> Vec<SnapshotRecord> {
        self.store.snapshots(&SnapshotFilter::default(), 0, u64::MAX).await.unwrap().0
    }

    async fn pick_snapshot(&self, n: usize) -> Option<SnapshotRecord> {
        let all = self.all_snapshots().await;
        all.get(n % all.len().max(1)).cloned()
    }

    /// No removal takes the artifact from under a sandbox that was accepted.
    fn every_restored_sandbox_has_its_artifact(&self) {
        let artifacts = self.runtime.artifacts();
        for entry in self.engine.index().newest_first().iter().filter(|e| e.observed.is_some()) {
            if let Some(snapshot) = entry.spec().and_then(|s| s.snapshot) {
                assert!(artifacts.contains(&snapshot), "{} lost its snapshot", entry.id);
            }
        }
    }

    async fn no_intent_is_open(&self) -> bool {
        self.store.open_intents().await.unwrap().is_empty()
    }
}

#[tokio::test(start_paused = true)]
async fn a_fast_create_is_answered_running_and_leaves_no_intent() {
    let stack = Stack::new().await;
    let id = stack.create(Some(60)).await;
    assert_eq!(stack.state(&id), Some(State::Running));
    tokio::time::sleep(Duration::from_millis(1)).await;
    assert!(stack.no_intent_is_open().await);
}

#[tokio::test(start_paused = true)]
async fn a_slow_create_is_answered_pending_and_finishes() {
    let stack = Stack::new().await;
    stack.runtime.inject("prepare", Fault::Slow(Duration::from_secs(30)));
    let id = stack.create(Some(600)).await;
    assert_eq!(stack.state(&id), Some(State::Pending));
    tokio::time::sleep(Duration::from_secs(31)).await;
    assert_eq!(stack.state(&id), Some(State::Running));
}

#[tokio::test(start_paused = true)]
async fn a_create_that_fails_at_once_is_an_error_and_leaves_nothing() {
    let stack = Stack::new().await;
    stack.runtime.inject("start", Fault::Refuse);
    let failed = stack.engine.create(stack.new_sandbox(None), stack.clock.now()).await;
    assert!(matches!(failed, Err(EngineError::CreateFailed(ref e)) if e.phase == "start"));
    assert!(stack.engine.index().is_empty());
    assert!(stack.no_intent_is_open().await);
}

#[tokio::test(start_paused = true)]
async fn a_create_that_fails_late_shows_why_until_it_is_deleted() {
    let stack = Stack::new().await;
    stack.runtime.inject("prepare", Fault::Slow(Duration::from_secs(10)));
    stack.runtime.inject("start", Fault::Refuse);
    let id = stack.create(None).await;
    tokio::time::sleep(Duration::from_secs(11)).await;
    let status = stack.engine.find(&id).unwrap().status().unwrap();
    assert_eq!((status.state, status.reason), (State::Failed, "CREATE_FAILED"));
    assert!(status.message.unwrap().contains("phase start"));
    stack.engine.delete(&id).await.unwrap();
    assert!(matches!(stack.engine.find(&id), Err(EngineError::NotFound(_))));
    assert!(stack.no_intent_is_open().await);
}

#[tokio::test(start_paused = true)]
async fn a_failed_create_that_nobody_collects_is_forgotten() {
    let stack = Stack::new().await;
    stack.runtime.inject("prepare", Fault::Slow(Duration::from_secs(10)));
    stack.runtime.inject("start", Fault::Refuse);
    let id = stack.create(None).await;
    tokio::time::sleep(Duration::from_secs(3700)).await;
    assert_eq!(stack.state(&id), None);
    assert!(stack.no_intent_is_open().await);
}

#[tokio::test(start_paused = true)]
async fn deleting_a_pending_sandbox_ends_the_pull() {
    let stack = Stack::new().await;
    stack.runtime.inject("prepare", Fault::Slow(Duration::from_secs(500)));
    let id = stack.create(None).await;
    let before = stack.clock.now();
    stack.engine.delete(&id).await.unwrap();
    assert!(before.until(stack.clock.now()) < Duration::from_secs(1));
    tokio::time::sleep(Duration::from_secs(600)).await;
    assert!(stack.runtime.boxes().is_empty());
}

#[tokio::test(start_paused = true)]
async fn concurrent_deletes_all_succeed_and_a_later_one_is_not_found() {
    let stack = Stack::new().await;
    let id = stack.create(None).await;
    stack.runtime.inject("remove", Fault::Slow(Duration::from_millis(50)));
    let (a, b, c) =
        tokio::join!(stack.engine.delete(&id), stack.engine.delete(&id), stack.engine.delete(&id));
    assert!(a.is_ok() && b.is_ok() && c.is_ok(), "{a:?} {b:?} {c:?}");
    assert!(matches!(stack.engine.delete(&id).await, Err(EngineError::NotFound(_))));
}

#[tokio::test(start_paused = true)]
async fn a_failed_removal_stays_stopping_and_is_tried_again() {
    let stack = Stack::new().await;
    let id = stack.create(Some(600)).await;
    stack.runtime.inject("remove", Fault::Refuse);
    let failed = stack.engine.delete(&id).await;
    assert!(matches!(failed, Err(EngineError::OperationFailed { operation: "remove", .. })));
    assert_eq!(stack.state(&id), Some(State::Stopping));
    tokio::time::sleep(Duration::from_secs(31)).await;
    assert_eq!(stack.state(&id), None);
}

#[tokio::test(start_paused = true)]
async fn a_second_delete_does_not_wait_for_the_retry() {
    let stack = Stack::new().await;
    let id = stack.create(None).await;
    stack.runtime.inject("remove", Fault::Refuse);
    assert!(stack.engine.delete(&id).await.is_err());
    stack.engine.delete(&id).await.unwrap();
    assert_eq!(stack.state(&id), None);
}

#[tokio::test(start_paused = true)]
async fn a_paused_sandbox_expires() {
    let stack = Stack::new().await;
    let id = stack.create(Some(60)).await;
    stack.engine.pause(&id).await.unwrap();
    assert_eq!(stack.state(&id), Some(State::Paused));
    assert!(matches!(stack.engine.pause(&id).await, Err(EngineError::Refused(_))));
    tokio::time::sleep(Duration::from_secs(62)).await;
    assert_eq!(stack.state(&id), None);
    assert!(stack.runtime.boxes().is_empty());
}

#[tokio::test(start_paused = true)]
async fn a_pause_that_the_runtime_refuses_is_told_and_the_box_runs_on() {
    let stack = Stack::new().await;
    let id = stack.create(None).await;
    stack.runtime.inject("pause", Fault::Refuse);
    let failed = stack.engine.pause(&id).await;
    assert!(matches!(failed, Err(EngineError::OperationFailed { operation: "pause", .. })), "{failed:?}");
    assert_eq!(stack.state(&id), Some(State::Running));
    stack.engine.pause(&id).await.unwrap();
    stack.engine.resume(&id).await.unwrap();
    assert_eq!(stack.state(&id), Some(State::Running));
}

#[tokio::test(start_paused = true)]
async fn a_renewal_moves_the_expiry_and_survives_a_restart() {
    let mut stack = Stack::new().await;
    let id = stack.create(Some(60)).await;
    let later = stack.clock.now().checked_add(Duration::from_secs(600)).unwrap();
    assert_eq!(stack.engine.renew(&id, later).await.unwrap(), later);
    stack.restart().await;
    tokio::time::sleep(Duration::from_secs(300)).await;
    assert_eq!(stack.engine.find(&id).unwrap().facts().unwrap().expires_at, Some(later));
    tokio::time::sleep(Duration::from_secs(302)).await;
    assert_eq!(stack.state(&id), None);
}

#[tokio::test(start_paused = true)]
async fn a_renewal_at_the_moment_of_expiry_is_either_kept_or_refused() {
    let (mut kept, mut refused) = (0, 0);
    for early in 0..80u64 {
        let stack = Stack::new().await;
        let id = stack.create(Some(60)).await;
        if early % 2 == 0 {
            stack.runtime.inject("update_facts", Fault::Slow(Duration::from_millis(early % 7 * 4)));
        }
        // From 20 ms before the expiry to 20 ms after it.
        tokio::time::sleep(Duration::from_millis(60_020 - early / 2)).await;
        let later = stack.clock.now().checked_add(Duration::from_secs(300)).unwrap();
        match stack.engine.renew(&id, later).await {
            Ok(_) => {
                tokio::time::sleep(Duration::from_secs(200)).await;
                assert_eq!(stack.state(&id), Some(State::Running), "a confirmed renewal was lost");
                tokio::time::sleep(Duration::from_secs(102)).await;
                assert_eq!(stack.state(&id), None, "the renewed timer was lost");
                kept += 1;
            }
            Err(EngineError::NotFound(_)) => {
                tokio::time::sleep(Duration::from_secs(2)).await;
                assert_eq!(stack.state(&id), None, "a refused renewal kept the sandbox");
                refused += 1;
            }
            Err(other) => panic!("{other}"),
        }
        stack.engine.stop().await;
    }
    assert!(kept > 10 && refused > 10, "kept {kept}, refused {refused}");
}

#[tokio::test(start_paused = true)]
async fn what_cannot_be_renewed_says_so() {
    let stack = Stack::new().await;
    let manual = stack.create(None).await;
    let later = stack.clock.now().checked_add(Duration::from_secs(600)).unwrap();
    assert!(matches!(stack.engine.renew(&manual, later).await, Err(EngineError::ManualCleanup)));
    let past = Timestamp::clamped(5);
    assert!(matches!(stack.engine.renew(&manual, past).await, Err(EngineError::NotInFuture)));
}

#[tokio::test(start_paused = true)]
async fn a_renewal_of_a_pending_sandbox_reaches_the_box() {
    let stack = Stack::new().await;
    stack.runtime.inject("prepare", Fault::Slow(Duration::from_secs(5)));
    let id = stack.create(Some(60)).await;
    let later = stack.clock.now().checked_add(Duration::from_secs(6000)).unwrap();
    stack.engine.renew(&id, later).await.unwrap();
    tokio::time::sleep(Duration::from_secs(120)).await;
    assert_eq!(stack.state(&id), Some(State::Running));
    assert_eq!(stack.engine.find(&id).unwrap().facts().unwrap().expires_at, Some(later));
}

#[tokio::test(start_paused = true)]
async fn an_exit_shows_and_a_paused_or_exited_box_cannot_be_resumed_wrongly() {
    let stack = Stack::new().await;
    let (ok, bad) = (stack.create(None).await, stack.create(None).await);
    stack.runtime.exits(ok.parse().unwrap(), 0, stack.clock.now());
    stack.runtime.exits(bad.parse().unwrap(), 3, stack.clock.now());
    tokio::time::sleep(Duration::from_millis(5)).await;
    assert_eq!(stack.state(&ok), Some(State::Terminated));
    assert_eq!(stack.state(&bad), Some(State::Failed));
    assert!(matches!(stack.engine.resume(&ok).await, Err(EngineError::Refused(_))));
}

#[tokio::test(start_paused = true)]
async fn an_idempotency_key_gives_the_same_sandbox_or_a_conflict() {
    let stack = Stack::new().await;
    let with = |fingerprint: &str| NewSandbox {
        key: Some(("k".into(), fingerprint.into())),
        ..stack.new_sandbox(None)
    };
    let now = stack.clock.now();
    let (a, b) = tokio::join!(stack.engine.create(with("x"), now), stack.engine.create(with("x"), now));
    assert_eq!(a.unwrap().id, b.unwrap().id);
    assert!(matches!(stack.engine.create(with("y"), now).await, Err(EngineError::KeyReused)));
    assert_eq!(stack.runtime.boxes().len(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_key_whose_create_failed_may_be_used_again() {
    let stack = Stack::new().await;
    let with = || NewSandbox { key: Some(("k".into(), "x".into())), ..stack.new_sandbox(None) };
    stack.runtime.inject("start", Fault::Refuse);
    assert!(stack.engine.create(with(), stack.clock.now()).await.is_err());
    assert!(stack.engine.create(with(), stack.clock.now()).await.is_ok());
}

#[tokio::test(start_paused = true)]
async fn a_key_is_spent_when_its_sandbox_is_over_and_not_before_it_is_seen() {
    let stack = Stack::new().await;
    // It has not seen yet what the first one writes down.
    let other = Stack::start(&stack.runtime, &stack.store, &stack.clock).await;
    let with = || NewSandbox { key: Some(("k".into(), "x".into())), ..stack.new_sandbox(None) };
    stack.runtime.inject("prepare", Fault::Slow(Duration::from_secs(60)));
    let id = stack.engine.create(with(), stack.clock.now()).await.unwrap().id;
    let early = other.create(with(), stack.clock.now()).await;
    assert!(matches!(early, Err(EngineError::Contended)), "{early:?}");
    tokio::time::sleep(Duration::from_secs(120)).await;
    assert_eq!(other.create(with(), stack.clock.now()).await.unwrap().id, id);
    stack.runtime.vanishes(id);
    tokio::time::sleep(Duration::from_secs(31)).await;
    let late = stack.engine.create(with(), stack.clock.now()).await;
    assert!(matches!(late, Err(EngineError::KeySpent)), "{late:?}");
}

#[tokio::test(start_paused = true)]
async fn a_box_that_vanished_is_noticed() {
    let stack = Stack::new().await;
    let id = stack.create(None).await;
    stack.runtime.vanishes(id.parse().unwrap());
    tokio::time::sleep(Duration::from_secs(31)).await;
    assert_eq!(stack.state(&id), None);
}

#[tokio::test(start_paused = true)]
async fn a_store_that_cannot_be_written_delays_but_loses_nothing() {
    let stack = Stack::new().await;
    let id = stack.create(Some(60)).await;
    tokio::time::sleep(Duration::from_millis(1)).await;
    stack.store.refuse_writes(3);
    assert!(matches!(stack.engine.delete(&id).await, Err(EngineError::Store(_))));
    tokio::time::sleep(Duration::from_secs(70)).await;
    assert_eq!(stack.state(&id), None, "expiry came through once the disk had room again");
}

#[tokio::test(start_paused = true)]
async fn what_expires_while_the_store_is_away_goes_on_time() {
    let stack = Stack::new().await;
    let id = stack.create(Some(60)).await;
    let kept = stack.create(Some(600)).await;
    tokio::time::sleep(Duration::from_millis(1)).await;
    stack.store.refuse_writes(u32::MAX);
    tokio::time::sleep(Duration::from_secs(61)).await;
    assert_eq!((stack.state(&id), stack.state(&kept)), (None, Some(State::Running)));
    assert_eq!(stack.runtime.boxes(), [kept.parse().unwrap()]);
}

#[tokio::test(start_paused = true)]
async fn what_expired_while_the_runtime_was_away_goes_at_once_when_it_is_back() {
    let stack = Stack::new().await;
    let id = stack.create(Some(60)).await;
    tokio::time::sleep(Duration::from_secs(50)).await;
    stack.runtime.goes_away();
    tokio::time::sleep(Duration::from_secs(15)).await;
    assert_eq!(stack.state(&id), Some(State::Stopping));
    stack.runtime.comes_back();
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert_eq!(stack.state(&id), None);
    assert!(stack.runtime.boxes().is_empty());
}

#[tokio::test(start_paused = true)]
async fn a_half_made_box_without_a_create_is_removed() {
    let mut stack = Stack::new().await;
    let id = SandboxId::random();
    stack.runtime.half_made(id, stack.clock.now());
    tokio::time::sleep(Duration::from_secs(50)).await;
    assert_eq!(stack.state(&id.to_string()), Some(State::Pending));
    // Its time counts from when a server saw it, so that a slow create of another process is not cut short.
    stack.restart().await;
    tokio::time::sleep(Duration::from_secs(50)).await;
    assert_eq!(stack.state(&id.to_string()), Some(State::Pending));
    // Nothing is done about it while nobody knows what is so.
    stack.runtime.goes_away();
    tokio::time::sleep(Duration::from_secs(300)).await;
    stack.runtime.comes_back();
    tokio::time::sleep(Duration::from_secs(50)).await;
    assert_eq!(stack.state(&id.to_string()), None);
    assert!(stack.runtime.boxes().is_empty());
    let kinds: Vec<_> =
        stack.store.history(id, 9).await.unwrap().into_iter().map(|e| (e.kind, e.message)).collect();
    assert_eq!(
        kinds,
        [
            ("remove_requested".to_owned(), "create_failed".to_owned()),
            ("removed".to_owned(), "create_failed".to_owned())
        ]
    );
}

#[tokio::test(start_paused = true)]
async fn a_box_that_its_create_is_working_on_is_no_orphan() {
    let stack = Stack::new().await;
    stack.runtime.inject("prepare", Fault::Slow(Duration::from_secs(300)));
    let id = stack.create(None).await;
    stack.runtime.half_made(id.parse().unwrap(), stack.clock.now());
    tokio::time::sleep(Duration::from_secs(200)).await;
    assert_eq!(stack.state(&id), Some(State::Pending));
}

#[tokio::test(start_paused = true)]
async fn a_pause_whose_answer_was_lost_is_seen_to_have_worked() {
    let stack = Stack::new().await;
    let id = stack.create(None).await;
    stack.runtime.inject("pause", Fault::DoneButFailed);
    stack.engine.pause(&id).await.unwrap();
    assert_eq!(stack.state(&id), Some(State::Paused));
}

#[derive(Debug, Clone)]
enum Action {
    Create(u64),
    Delete(usize),
    Pause(usize),
    Resume(usize),
    Renew(usize, u64),
    Exit(usize, i32),
    Vanish(usize),
    Snapshot(usize),
    Restore(usize),
    Unsnapshot(usize),
    HalfMade,
    Away(u64),
    Fault(&'static str, Fault),
    RefuseWrites(u32),
    Wait(u64),
    Restart,
}

fn action() -> impl Strategy<Value = Action> {
    let fault = prop_oneof![
        Just(Fault::Refuse),
        Just(Fault::DoneButFailed),
        (1u64..20).prop_map(|s| Fault::Slow(Duration::from_secs(s))),
    ];
    let method = prop::sample::select(vec![
        "prepare",
        "start",
        "pause",
        "resume",
        "remove",
        "update_facts",
        "snapshot",
        "has_snapshot",
        "remove_snapshot",
    ]);
    prop_oneof![
        4 => (60u64..400).prop_map(Action::Create),
        2 => (0usize..8).prop_map(Action::Delete),
        2 => (0usize..8).prop_map(Action::Pause),
        2 => (0usize..8).prop_map(Action::Resume),
        2 => ((0usize..8), (1u64..300)).prop_map(|(n, s)| Action::Renew(n, s)),
        1 => ((0usize..8), (0i32..3)).prop_map(|(n, c)| Action::Exit(n, c)),
        1 => (0usize..8).prop_map(Action::Vanish),
        3 => (0usize..8).prop_map(Action::Snapshot),
        2 => (0usize..8).prop_map(Action::Restore),
        2 => (0usize..8).prop_map(Action::Unsnapshot),
        1 => Just(Action::HalfMade),
        1 => (1u64..60).prop_map(Action::Away),
        3 => (method, fault).prop_map(|(m, f)| Action::Fault(m, f)),
        1 => (1u32..4).prop_map(Action::RefuseWrites),
        2 => (1u64..40).prop_map(Action::Wait),
        2 => Just(Action::Restart),
    ]
}

/// Runs the actions without waiting for their answers (a client that gave up), then lets all time pass.
async fn run(actions: Vec<Action>) {
    let mut stack = Stack::new().await;
    for action in actions {
        let known: Vec<_> = stack.engine.index().newest_first().iter().map(|e| e.id.to_string()).collect();
        let pick = |n: usize| known.get(n % known.len().max(1)).cloned().unwrap_or_default();
        let (engine, now) = (stack.engine.clone(), stack.clock.now());
        match action {
            Action::Create(ttl) => {
                let new = stack.new_sandbox(Some(ttl));
                tokio::spawn(async move { engine.create(new, now).await.map(drop) });
            }
            Action::Delete(n) => {
                let id = pick(n);
                tokio::spawn(async move { engine.delete(&id).await });
            }
            Action::Pause(n) => {
                let id = pick(n);
                tokio::spawn(async move { engine.pause(&id).await });
            }
            Action::Resume(n) => {
                let id = pick(n);
                tokio::spawn(async move { engine.resume(&id).await });
            }
            Action::Renew(n, secs) => {
                let at = now.checked_add(Duration::from_secs(secs)).unwrap();
                let _ = engine.renew(&pick(n), at).await;
            }
            Action::Exit(n, code) => {
                let half_made = stack.state(&pick(n)) == Some(State::Pending);
                if let Ok(id) = pick(n).parse()
                    && !half_made
                {
                    stack.runtime.exits(id, code, now);
                }
            }
            Action::Vanish(n) => {
                if let Ok(id) = pick(n).parse() {
                    stack.runtime.vanishes(id);
                }
            }
            Action::Snapshot(n) => {
                let id = pick(n);
                tokio::spawn(async move { engine.create_snapshot(&id, None, None).await.map(drop) });
            }
            Action::Restore(n) => {
                let Some(snapshot) = stack.pick_snapshot(n).await else { continue };
                let mut new = stack.new_sandbox(Some(300));
                if let Ok(image) = engine.restore_image(&snapshot) {
                    new.spec.image = image;
                    new.spec.snapshot = Some(snapshot.id);
                    tokio::spawn(async move { engine.create(new, now).await.map(drop) });
                }
            }
            Action::Unsnapshot(n) => {
                let Some(snapshot) = stack.pick_snapshot(n).await else { continue };
                tokio::spawn(async move { engine.delete_snapshot(snapshot.id).await });
            }
            Action::HalfMade => stack.runtime.half_made(SandboxId::random(), now),
            Action::Away(s) => {
                stack.runtime.goes_away();
                let runtime = stack.runtime.clone();
                tokio::spawn(async move {
                    tokio::time::sleep(Duration::from_secs(s)).await;
                    runtime.comes_back();
                });
            }
            Action::Fault(method, fault) => stack.runtime.inject(method, fault),
            Action::RefuseWrites(n) => stack.store.refuse_writes(n),
            Action::Wait(s) => tokio::time::sleep(Duration::from_secs(s)).await,
            Action::Restart => stack.restart().await,
        }
        stack.every_restored_sandbox_has_its_artifact();
        tokio::time::sleep(Duration::from_millis(3)).await;
    }
    // Every TTL was at most 400 s, every retention an hour: after two hours of quiet nothing may be left.
    stack.restart().await;
    tokio::time::sleep(Duration::from_secs(7200)).await;
    let left: Vec<_> = stack.engine.index().newest_first().iter().map(|e| (e.id, e.status())).collect();
    assert!(left.is_empty(), "left: {left:?}");
    assert!(stack.no_intent_is_open().await, "an intent has no end");
    assert!(stack.runtime.boxes().is_empty(), "a box has no owner");
    for state in [SnapshotState::Creating, SnapshotState::Deleting] {
        let left = stack.store.snapshots_in(state).await.unwrap();
        assert!(left.is_empty(), "a snapshot has no end: {left:?}");
    }
    let all = stack.all_snapshots().await;
    for artifact in stack.runtime.artifacts() {
        assert!(all.iter().any(|s| s.id == artifact), "an artifact has no row");
    }
    for snapshot in all.iter().filter(|s| s.state == SnapshotState::Ready) {
        assert!(stack.runtime.artifacts().contains(&snapshot.id), "a Ready snapshot has no artifact");
    }
    stack.engine.stop().await;
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, ..ProptestConfig::default() })]

    #[test]
    fn whatever_happens_nothing_is_left_in_the_end(actions in prop::collection::vec(action(), 1..40)) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build().unwrap();
        runtime.block_on(run(actions));
    }
}
