//! How boxes end by themselves.

use std::time::Duration;

use futures_util::StreamExt;
use sandglass_sandbox::{
    SandboxId,
    ports::{
        RuntimeErrorKind,
        runtime::{Condition, Exit, ExitCause, Observation, RuntimeEvent},
    },
};
use tokio::time::timeout;

use super::{PATIENCE, Subject, plan, removed, said, started, started_as, storage, try_start, until};

async fn ended(subject: &Subject, id: SandboxId) -> (Observation, Exit) {
    let seen = until(subject, id, |o| matches!(o.condition, Condition::Exited(_))).await;
    let Condition::Exited(exit) = seen.condition.clone() else { unreachable!("until waited for it") };
    (seen, exit)
}

pub(super) async fn an_exit_is_told_with_its_code(subject: &Subject) {
    for code in [0, 42] {
        let id = started(subject, &["sh", "-c", &format!("sleep 0.2; exit {code}")]).await.id;
        let (seen, exit) = ended(subject, id).await;
        assert_eq!((exit.code, exit.cause), (Some(code), ExitCause::Exited));
        assert!(seen.started_at.is_some_and(|at| at <= exit.at) && seen.since == exit.at, "{seen:?}");
        let all = subject.runtime.list().await.expect("list");
        let listed = all.iter().find(|o| o.id == id).expect("what ended stays until it is removed");
        assert_eq!((&listed.condition, &listed.spec), (&seen.condition, &seen.spec));
        removed(subject, id).await;
    }
}

pub(super) async fn an_exit_is_watched(subject: &Subject) {
    let mut told = subject.runtime.watch();
    let id = started(subject, &["sh", "-c", "sleep 0.5; exit 7"]).await.id;
    let wait = async {
        while let Some(event) = told.next().await {
            if let RuntimeEvent::Observed(seen) = event
                && let (true, Condition::Exited(exit)) = (seen.id == id, &seen.condition)
            {
                return exit.code;
            }
        }
        panic!("the watch ended");
    };
    assert_eq!(timeout(PATIENCE, wait).await.expect("the exit was not told"), Some(7));
    removed(subject, id).await;
}

pub(super) async fn an_entrypoint_that_does_not_exist_is_an_invalid_start_and_leaves_nothing(
    subject: &Subject,
) {
    let id = SandboxId::random();
    let plan = plan(subject, &["/no/such/program"]);
    let failed = try_start(subject, id, &plan).await.expect_err("start");
    assert_eq!((failed.kind, failed.phase.as_str()), (RuntimeErrorKind::Invalid, "entrypoint"), "{failed}");
    assert!(failed.message.contains("/no/such/program"), "{failed}");
    assert!(subject.runtime.inspect(id).await.expect("inspect").is_none());
}

pub(super) async fn a_box_that_uses_too_much_memory_is_ended_for_that_reason(subject: &Subject) {
    let hog = "x=$(head -c 1000000 /dev/zero | tr '\\0' a); while :; do x=$x$x; done";
    let id = started(subject, &["sh", "-c", hog]).await.id;
    let (_, exit) = ended(subject, id).await;
    assert_eq!(exit.cause, ExitCause::OutOfMemory, "{exit:?}");
    removed(subject, id).await;
}

/// Pausing is no way to bring a box back.
pub(super) async fn pausing_a_box_that_ended_tells_its_end(subject: &Subject) {
    let id = started(subject, &["sh", "-c", "sleep 0.2; exit 3"]).await.id;
    ended(subject, id).await;
    let answers = [subject.runtime.pause(id).await, subject.runtime.resume(id).await];
    for seen in answers.into_iter().flatten() {
        assert!(matches!(seen.condition, Condition::Exited(_)), "{seen:?}");
    }
    assert_eq!(ended(subject, id).await.1.code, Some(3));
    removed(subject, id).await;
}

pub(super) async fn a_box_is_given_time_to_end(subject: &Subject) {
    let Some(dir) = &subject.host_dir else { return };
    let script = "trap 'echo bye > /shared/farewell; exit 0' TERM; echo ready; while :; do sleep 0.1; done";
    let mut plan = plan(subject, &["sh", "-c", script]);
    let inside = storage::directory(dir, "graceful");
    plan.spec.volumes.push(storage::of_host(&inside, "/shared", false));
    let id = started_as(subject, &plan).await.id;
    said(subject, id, "ready").await;
    subject.runtime.remove(id, Duration::from_secs(10)).await.expect("remove");
    assert_eq!(std::fs::read_to_string(inside.join("farewell")).expect("its last words"), "bye\n");
    assert!(subject.runtime.inspect(id).await.expect("inspect").is_none());
}
