//! What every runtime promises, as named cases. Run against the fake and against every real runtime: a new backend is
//! "make the contract pass".

use std::{
    collections::{BTreeMap, HashSet},
    sync::Arc,
    time::Duration,
};

use futures_util::{StreamExt, future::join_all};
use sandglass_sandbox::{
    Clock, SandboxId, SystemClock, Timestamp,
    ports::{
        Runtime, RuntimeErrorKind,
        runtime::{Condition, ExitCause, Observation, RuntimeError, RuntimeEvent, StartPlan},
    },
    spec::{Entrypoint, Limits, MutableFacts, Secrets, Spec},
};
use tokio::time::timeout;

/// How long a change may take to be told.
const PATIENCE: Duration = Duration::from_secs(10);

/// What is under test.
#[derive(Clone)]
pub struct Subject {
    pub runtime: Arc<dyn Runtime>,
    /// An image that is present and has `sh`, `sleep` and `echo`.
    pub image: String,
    /// Whether entrypoints really run.
    pub runs_processes: bool,
}

/// Runs every case and says which.
///
/// # Panics
/// At the first promise that is not kept.
pub async fn run(subject: &Subject) {
    macro_rules! cases {
        ($($case:ident),* $(,)?) => {$(
            println!("contract on {}: {}", subject.runtime.name(), stringify!($case));
            $case(subject).await;
        )*};
    }
    cases!(
        a_started_box_is_running_with_the_facts_it_was_given,
        starting_again_is_success_and_makes_no_second_box,
        removing_an_absent_box_is_success,
        a_removed_box_is_gone_from_everywhere,
        pausing_and_resuming_are_idempotent,
        what_needs_a_box_says_not_found_without_one,
        changed_facts_are_what_the_list_shows,
        a_paused_box_can_be_removed,
        removing_twice_at_once_is_success,
        boxes_started_at_once_do_not_share_anything,
        later_observations_have_higher_revisions,
        changes_are_told,
    );
    if subject.runs_processes {
        cases!(
            an_image_that_nobody_has_cannot_be_prepared,
            an_exit_is_told_with_its_code,
            an_entrypoint_that_does_not_exist_is_an_invalid_start_and_leaves_nothing,
            output_of_the_entrypoint_is_in_the_logs,
            a_box_has_a_history,
            a_box_that_uses_too_much_memory_is_ended_for_that_reason,
        );
    }
    let left = subject.runtime.list().await.expect("list");
    assert!(left.is_empty(), "the cases left {} boxes", left.len());
}

fn plan(subject: &Subject, argv: &[&str]) -> StartPlan {
    let now = SystemClock.now();
    StartPlan {
        spec: Spec {
            env: vec![("GREETING".into(), "hello".into())],
            limits: Limits {
                cpu_millis: Some(1000),
                memory_bytes: Some(128 << 20),
                pids: Some(64),
                ..Limits::default()
            },
            ..Spec::new(
                subject.image.clone(),
                Entrypoint::Command(argv.iter().map(|a| (*a).to_owned()).collect()),
            )
        },
        facts: MutableFacts {
            expires_at: now.checked_add(Duration::from_secs(600)),
            metadata: BTreeMap::from([("a".into(), "b".into())]),
        },
        created_at: now,
        agent_token: "agent-token".into(),
        route_token: "route-token".into(),
    }
}

async fn prepare(subject: &Subject, image: &str) -> Result<(), RuntimeError> {
    let spec = Spec::new(image, Entrypoint::AgentOnly);
    subject.runtime.prepare(&spec, &Secrets::default(), &|_| {}).await
}

const IDLE: &[&str] = &["sleep", "1000"];

async fn started(subject: &Subject, argv: &[&str]) -> Observation {
    subject
        .runtime
        .start(SandboxId::random(), &plan(subject, argv), &Secrets::default())
        .await
        .expect("start")
}

async fn removed(subject: &Subject, id: SandboxId) {
    subject.runtime.remove(id, Duration::ZERO).await.expect("remove");
}

async fn until(subject: &Subject, id: SandboxId, what: impl Fn(&Observation) -> bool) -> Observation {
    let look = async {
        loop {
            if let Some(seen) = subject.runtime.inspect(id).await.expect("inspect").filter(&what) {
                return seen;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    timeout(PATIENCE, look).await.expect("the expected condition did not come")
}

async fn a_started_box_is_running_with_the_facts_it_was_given(subject: &Subject) {
    let id = SandboxId::random();
    let plan = plan(subject, IDLE);
    let seen = subject.runtime.start(id, &plan, &Secrets::default()).await.expect("start");
    assert_eq!(seen.condition, Condition::Running);
    let listed = subject.runtime.list().await.expect("list");
    let listed = listed.iter().find(|o| o.id == id).expect("it is listed");
    for seen in [&seen, listed] {
        assert_eq!(seen.spec, plan.spec);
        assert_eq!(seen.facts, plan.facts);
        assert_eq!(seen.created_at, plan.created_at);
        assert_eq!((seen.agent_token.as_str(), seen.route_token.as_str()), ("agent-token", "route-token"));
        assert_eq!(seen.entrypoint, IDLE);
    }
    removed(subject, id).await;
}

async fn starting_again_is_success_and_makes_no_second_box(subject: &Subject) {
    let first = started(subject, IDLE).await;
    let again = subject
        .runtime
        .start(first.id, &plan(subject, IDLE), &Secrets::default())
        .await
        .expect("start again");
    assert_eq!((again.created_at, again.address), (first.created_at, first.address));
    assert_eq!(subject.runtime.list().await.expect("list").len(), 1);
    removed(subject, first.id).await;
}

async fn removing_an_absent_box_is_success(subject: &Subject) {
    removed(subject, SandboxId::random()).await;
}

async fn a_removed_box_is_gone_from_everywhere(subject: &Subject) {
    let seen = started(subject, IDLE).await;
    removed(subject, seen.id).await;
    assert!(subject.runtime.inspect(seen.id).await.expect("inspect").is_none());
    assert!(subject.runtime.list().await.expect("list").iter().all(|o| o.id != seen.id));
}

async fn pausing_and_resuming_are_idempotent(subject: &Subject) {
    let id = started(subject, IDLE).await.id;
    for _ in 0..2 {
        assert_eq!(subject.runtime.pause(id).await.expect("pause").condition, Condition::Paused);
    }
    for _ in 0..2 {
        assert_eq!(subject.runtime.resume(id).await.expect("resume").condition, Condition::Running);
    }
    removed(subject, id).await;
}

async fn what_needs_a_box_says_not_found_without_one(subject: &Subject) {
    let id = SandboxId::random();
    let facts = MutableFacts::default();
    let kinds = [
        subject.runtime.pause(id).await.expect_err("pause").kind,
        subject.runtime.resume(id).await.expect_err("resume").kind,
        subject.runtime.update_facts(id, &facts).await.expect_err("update").kind,
    ];
    assert_eq!(kinds, [RuntimeErrorKind::NotFound; 3]);
    assert!(subject.runtime.inspect(id).await.expect("inspect").is_none());
}

async fn changed_facts_are_what_the_list_shows(subject: &Subject) {
    let id = started(subject, IDLE).await.id;
    let facts = MutableFacts {
        expires_at: Some(Timestamp::clamped(SystemClock.now().as_millis() + 3_600_000)),
        metadata: BTreeMap::from([("c".into(), "d".into())]),
    };
    assert_eq!(subject.runtime.update_facts(id, &facts).await.expect("update").facts, facts);
    let listed = subject.runtime.list().await.expect("list");
    assert_eq!(listed.iter().find(|o| o.id == id).expect("listed").facts, facts);
    removed(subject, id).await;
}

async fn a_paused_box_can_be_removed(subject: &Subject) {
    let id = started(subject, IDLE).await.id;
    subject.runtime.pause(id).await.expect("pause");
    removed(subject, id).await;
    assert!(subject.runtime.inspect(id).await.expect("inspect").is_none());
}

async fn removing_twice_at_once_is_success(subject: &Subject) {
    let id = started(subject, IDLE).await.id;
    tokio::join!(removed(subject, id), removed(subject, id));
}

async fn boxes_started_at_once_do_not_share_anything(subject: &Subject) {
    let seen = join_all((0..8).map(|_| started(subject, IDLE))).await;
    let ids: HashSet<_> = seen.iter().map(|o| o.id).collect();
    assert_eq!(ids.len(), 8);
    if subject.runs_processes {
        let addresses: HashSet<_> = seen.iter().map(|o| o.address).collect();
        assert_eq!(addresses.len(), 8);
    }
    join_all(ids.into_iter().map(|id| removed(subject, id))).await;
}

async fn later_observations_have_higher_revisions(subject: &Subject) {
    let first = started(subject, IDLE).await;
    let paused = subject.runtime.pause(first.id).await.expect("pause");
    let resumed = subject.runtime.resume(first.id).await.expect("resume");
    assert!(first.revision < paused.revision && paused.revision < resumed.revision);
    removed(subject, first.id).await;
}

async fn changes_are_told(subject: &Subject) {
    let mut told = subject.runtime.watch();
    let id = started(subject, IDLE).await.id;
    subject.runtime.pause(id).await.expect("pause");
    let facts = MutableFacts::default();
    subject.runtime.update_facts(id, &facts).await.expect("update");
    removed(subject, id).await;
    let wait = async {
        while let Some(event) = told.next().await {
            if matches!(event, RuntimeEvent::Removed(gone) if gone == id) {
                return;
            }
        }
        panic!("the watch ended");
    };
    timeout(PATIENCE, wait).await.expect("the removal was not told");
}

async fn an_image_that_nobody_has_cannot_be_prepared(subject: &Subject) {
    let failed = prepare(subject, "127.0.0.1:9/none/such:1").await.expect_err("prepare");
    assert_eq!(failed.kind, RuntimeErrorKind::ImagePull);
    let failed = prepare(subject, "Not A Reference").await.expect_err("prepare");
    assert_eq!(failed.kind, RuntimeErrorKind::Invalid);
}

async fn an_exit_is_told_with_its_code(subject: &Subject) {
    for code in [0, 42] {
        let id = started(subject, &["sh", "-c", &format!("sleep 0.2; exit {code}")]).await.id;
        let seen = until(subject, id, |o| matches!(o.condition, Condition::Exited(_))).await;
        let Condition::Exited(exit) = seen.condition else { unreachable!("until waited for it") };
        assert_eq!((exit.code, exit.cause), (Some(code), ExitCause::Exited));
        removed(subject, id).await;
    }
}

async fn an_entrypoint_that_does_not_exist_is_an_invalid_start_and_leaves_nothing(subject: &Subject) {
    let id = SandboxId::random();
    let failed = subject
        .runtime
        .start(id, &plan(subject, &["/no/such/program"]), &Secrets::default())
        .await
        .expect_err("start");
    assert_eq!((failed.kind, failed.phase.as_str()), (RuntimeErrorKind::Invalid, "entrypoint"), "{failed}");
    assert!(failed.message.contains("/no/such/program"), "{failed}");
    assert!(subject.runtime.inspect(id).await.expect("inspect").is_none());
}

async fn output_of_the_entrypoint_is_in_the_logs(subject: &Subject) {
    let id = started(subject, &["sh", "-c", "echo $GREETING; echo oops >&2; sleep 1000"]).await.id;
    let look = async {
        loop {
            let lines = subject.runtime.logs(id, 10).await.expect("logs");
            if lines.len() == 2 {
                return lines;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    let mut lines = timeout(PATIENCE, look).await.expect("two lines");
    lines.sort_by_key(|l| l.contains("stderr"));
    assert!(lines[0].ends_with(" stdout hello"), "{lines:?}");
    assert!(lines[1].ends_with(" stderr oops"), "{lines:?}");
    removed(subject, id).await;
}

async fn a_box_has_a_history(subject: &Subject) {
    let id = started(subject, IDLE).await.id;
    subject.runtime.pause(id).await.expect("pause");
    let kinds: Vec<_> =
        subject.runtime.events(id).await.expect("events").into_iter().map(|e| e.kind).collect();
    assert!(kinds.iter().any(|k| k == "started") && kinds.iter().any(|k| k == "paused"), "{kinds:?}");
    removed(subject, id).await;
}

async fn a_box_that_uses_too_much_memory_is_ended_for_that_reason(subject: &Subject) {
    let hog = "x=$(head -c 1000000 /dev/zero | tr '\\0' a); while :; do x=$x$x; done";
    let id = started(subject, &["sh", "-c", hog]).await.id;
    let seen = until(subject, id, |o| matches!(o.condition, Condition::Exited(_))).await;
    let Condition::Exited(exit) = seen.condition else { unreachable!("until waited for it") };
    assert_eq!(exit.cause, ExitCause::OutOfMemory, "{exit:?}");
    removed(subject, id).await;
}
