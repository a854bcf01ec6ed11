//! The decisions as tables: a reviewer sees every cell that a change touches.

use super::*;
use crate::{
    SandboxId,
    lifecycle::{
        intent::{Create, RemoveReason, StoredError},
        state::compute,
    },
    ports::{
        RuntimeErrorKind,
        runtime::{Exit, ExitCause, Exposure},
    },
    spec::{Entrypoint, MutableFacts, Spec},
};

const NOW: i64 = 1_000;

fn at(ms: i64) -> Timestamp {
    Timestamp::clamped(ms)
}

fn spec() -> Spec {
    Spec::new("i", Entrypoint::AgentOnly)
}

fn observed(condition: Condition) -> Observation {
    Observation {
        id: SandboxId::random(),
        revision: 1,
        spec: spec(),
        entrypoint: vec![],
        facts: MutableFacts::default(),
        condition,
        created_at: at(1),
        started_at: None,
        since: at(2),
        address: None,
        exposure: Exposure::None,
        agent_token: String::new(),
        route_token: String::new(),
        egress_token: None,
    }
}

fn exit(cause: ExitCause, code: Option<i32>) -> Condition {
    Condition::Exited(Exit { code, signal: None, cause, message: "m".into(), at: at(2) })
}

fn conditions() -> Vec<(&'static str, Option<Observation>)> {
    vec![
        ("none", None),
        ("starting", Some(observed(Condition::Starting))),
        ("running", Some(observed(Condition::Running))),
        ("paused", Some(observed(Condition::Paused))),
        ("exit0", Some(observed(exit(ExitCause::Exited, Some(0))))),
        ("exit1", Some(observed(exit(ExitCause::Exited, Some(1))))),
        ("oom", Some(observed(exit(ExitCause::OutOfMemory, None)))),
    ]
}

fn create(progress: Progress) -> Operation {
    Operation::Create(Box::new(Create {
        origin: None,
        spec: spec(),
        facts: MutableFacts::default(),
        agent_token: String::new(),
        route_token: String::new(),
        had_credentials: false,
        progress,
    }))
}

fn operations() -> Vec<(&'static str, Operation)> {
    let error = StoredError { kind: RuntimeErrorKind::Failed, phase: "p".into(), message: "m".into() };
    let remove =
        |not_before| Operation::Remove { reason: RemoveReason::UserDelete, not_before, last_error: None };
    vec![
        ("accepted", create(Progress::Accepted)),
        ("preparing", create(Progress::Preparing)),
        ("making", create(Progress::Starting)),
        ("failed", create(Progress::Failed { error, at: at(3), failure: None, keep_until: None })),
        ("pause", Operation::Pause),
        ("resume", Operation::Resume),
        ("remove", remove(None)),
        ("retry", remove(Some(at(NOW + 7)))),
    ]
}

fn intent(operation: Operation, deadline: i64) -> Intent {
    Intent {
        sandbox_id: SandboxId::random(),
        generation: 1,
        operation,
        accepted_at: at(1),
        deadline: at(deadline),
    }
}

fn table(cell: impl Fn(Option<&Intent>, Option<&Observation>) -> String, deadline: i64) -> String {
    let mut text = String::new();
    let mut row = |name: &str, intent: Option<&Intent>| {
        let cells: Vec<String> =
            conditions().iter().map(|(c, seen)| format!("{c}={}", cell(intent, seen.as_ref()))).collect();
        text.push_str(&format!("{name}: {}\n", cells.join(" ")));
    };
    row("-", None);
    for (name, operation) in operations() {
        row(name, Some(&intent(operation, deadline)));
    }
    text
}

fn word(step: Step) -> String {
    match step {
        Step::WaitUntil(t) => format!("Wait({})", t.as_millis() - NOW),
        Step::Close(outcome) => format!("Close{outcome:?}"),
        Step::FailCreate(_) => "FailCreate".into(),
        other => format!("{other:?}"),
    }
}

#[test]
fn what_happens_next_before_the_deadline() {
    let text = table(|i, o| word(next(i, o, None, false, at(NOW))), NOW + 9);
    assert_eq!(
        text,
        "\
-: none=Nothing starting=Nothing running=Nothing paused=Nothing exit0=Nothing exit1=Nothing oom=Nothing
accepted: none=Prepare starting=Prepare running=CloseDone paused=CloseDone exit0=CloseDone exit1=CloseDone oom=CloseDone
preparing: none=Prepare starting=Prepare running=CloseDone paused=CloseDone exit0=CloseDone exit1=CloseDone oom=CloseDone
making: none=Start starting=Start running=CloseDone paused=CloseDone exit0=CloseDone exit1=CloseDone oom=CloseDone
failed: none=Nothing starting=Discard running=Discard paused=Discard exit0=Discard exit1=Discard oom=Discard
pause: none=CloseOvertaken starting=CloseTimedOut running=Pause paused=CloseDone exit0=CloseOvertaken exit1=CloseOvertaken oom=CloseOvertaken
resume: none=CloseOvertaken starting=CloseTimedOut running=CloseDone paused=Resume exit0=CloseOvertaken exit1=CloseOvertaken oom=CloseOvertaken
remove: none=Remove starting=Remove running=Remove paused=Remove exit0=Remove exit1=Remove oom=Remove
retry: none=Wait(7) starting=Wait(7) running=Wait(7) paused=Wait(7) exit0=Wait(7) exit1=Wait(7) oom=Wait(7)
"
    );
}

#[test]
fn what_happens_next_after_the_deadline() {
    let text = table(|i, o| word(next(i, o, None, false, at(NOW))), NOW - 1);
    assert_eq!(
        text,
        "\
-: none=Nothing starting=Nothing running=Nothing paused=Nothing exit0=Nothing exit1=Nothing oom=Nothing
accepted: none=FailCreate starting=FailCreate running=CloseDone paused=CloseDone exit0=CloseDone exit1=CloseDone oom=CloseDone
preparing: none=FailCreate starting=FailCreate running=CloseDone paused=CloseDone exit0=CloseDone exit1=CloseDone oom=CloseDone
making: none=FailCreate starting=FailCreate running=CloseDone paused=CloseDone exit0=CloseDone exit1=CloseDone oom=CloseDone
failed: none=Nothing starting=Discard running=Discard paused=Discard exit0=Discard exit1=Discard oom=Discard
pause: none=CloseOvertaken starting=CloseTimedOut running=CloseTimedOut paused=CloseDone exit0=CloseOvertaken exit1=CloseOvertaken oom=CloseOvertaken
resume: none=CloseOvertaken starting=CloseTimedOut running=CloseDone paused=CloseTimedOut exit0=CloseOvertaken exit1=CloseOvertaken oom=CloseOvertaken
remove: none=Remove starting=Remove running=Remove paused=Remove exit0=Remove exit1=Remove oom=Remove
retry: none=Wait(7) starting=Wait(7) running=Wait(7) paused=Wait(7) exit0=Wait(7) exit1=Wait(7) oom=Wait(7)
"
    );
}

#[test]
fn what_clients_see() {
    let text = table(
        |i, o| compute(i, o, None).map_or("-".into(), |s| format!("{}/{}", s.state.word(), s.reason)),
        NOW + 9,
    );
    assert_eq!(
        text,
        "\
-: none=- starting=Pending/STARTING running=Running/CONTAINER_RUNNING paused=Paused/CONTAINER_PAUSED exit0=Terminated/CONTAINER_EXITED exit1=Failed/CONTAINER_EXITED_ERROR oom=Failed/OUT_OF_MEMORY
accepted: none=Pending/ACCEPTED starting=Pending/ACCEPTED running=Running/CONTAINER_RUNNING paused=Paused/CONTAINER_PAUSED exit0=Terminated/CONTAINER_EXITED exit1=Failed/CONTAINER_EXITED_ERROR oom=Failed/OUT_OF_MEMORY
preparing: none=Pending/PREPARING_IMAGE starting=Pending/PREPARING_IMAGE running=Running/CONTAINER_RUNNING paused=Paused/CONTAINER_PAUSED exit0=Terminated/CONTAINER_EXITED exit1=Failed/CONTAINER_EXITED_ERROR oom=Failed/OUT_OF_MEMORY
making: none=Pending/STARTING starting=Pending/STARTING running=Running/CONTAINER_RUNNING paused=Paused/CONTAINER_PAUSED exit0=Terminated/CONTAINER_EXITED exit1=Failed/CONTAINER_EXITED_ERROR oom=Failed/OUT_OF_MEMORY
failed: none=Failed/CREATE_FAILED starting=Failed/CREATE_FAILED running=Failed/CREATE_FAILED paused=Failed/CREATE_FAILED exit0=Failed/CREATE_FAILED exit1=Failed/CREATE_FAILED oom=Failed/CREATE_FAILED
pause: none=Failed/BOX_LOST starting=Pending/STARTING running=Pausing/PAUSING paused=Paused/CONTAINER_PAUSED exit0=Terminated/CONTAINER_EXITED exit1=Failed/CONTAINER_EXITED_ERROR oom=Failed/OUT_OF_MEMORY
resume: none=Failed/BOX_LOST starting=Pending/STARTING running=Running/CONTAINER_RUNNING paused=Resuming/RESUMING exit0=Terminated/CONTAINER_EXITED exit1=Failed/CONTAINER_EXITED_ERROR oom=Failed/OUT_OF_MEMORY
remove: none=- starting=Stopping/USER_DELETE running=Stopping/USER_DELETE paused=Stopping/USER_DELETE exit0=Stopping/USER_DELETE exit1=Stopping/USER_DELETE oom=Stopping/USER_DELETE
retry: none=- starting=Stopping/USER_DELETE running=Stopping/USER_DELETE paused=Stopping/USER_DELETE exit0=Stopping/USER_DELETE exit1=Stopping/USER_DELETE oom=Stopping/USER_DELETE
"
    );
}

#[test]
fn credentials_are_not_repeated_after_a_restart() {
    let mut operation = create(Progress::Accepted);
    if let Operation::Create(create) = &mut operation {
        create.had_credentials = true;
    }
    let wanted = intent(operation, NOW + 9);
    assert_eq!(next(Some(&wanted), None, None, true, at(NOW)), Step::Prepare);
    assert!(matches!(next(Some(&wanted), None, None, false, at(NOW)), Step::FailCreate(_)));
}
