//! What runs in a box, what it sees and what it says.

use std::{sync::Mutex, time::Duration};

use sandglass_sandbox::{
    ports::{
        RuntimeErrorKind,
        runtime::{Condition, PrepareProgress, RuntimeError},
    },
    spec::{Entrypoint, Secrets, Spec},
};
use tokio::time::timeout;

use super::{IDLE, PATIENCE, Subject, plan, removed, said, started, started_as, started_saying};

async fn prepare(subject: &Subject, image: &str) -> Result<(), RuntimeError> {
    let spec = Spec::new(image, Entrypoint::AgentOnly);
    subject.runtime.prepare(&spec, &Secrets::default(), &|_| {}).await
}

pub(super) async fn an_image_that_nobody_has_cannot_be_prepared(subject: &Subject) {
    let failed = prepare(subject, "127.0.0.1:9/none/such:1").await.expect_err("prepare");
    assert_eq!((failed.kind, failed.phase.as_str()), (RuntimeErrorKind::ImagePull, "image"), "{failed}");
    let failed = prepare(subject, "Not A Reference").await.expect_err("prepare");
    assert_eq!((failed.kind, failed.phase.as_str()), (RuntimeErrorKind::Invalid, "image"), "{failed}");
}

pub(super) async fn fetching_an_image_tells_its_progress_and_happens_once(subject: &Subject) {
    let image = subject.pullable.as_deref().expect("only run with one");
    let mut plan = plan(subject, &["sh", "-c", "echo complete; sleep 1000"]);
    plan.spec.image = image.to_owned();
    let told: Mutex<Vec<String>> = Mutex::default();
    let note = |progress: PrepareProgress| told.lock().expect("no panic").push(progress.message);
    subject.runtime.prepare(&plan.spec, &Secrets::default(), &note).await.expect("prepare");
    let first = told.lock().expect("no panic").len();
    assert!(first > 0, "nothing was told");
    subject.runtime.prepare(&plan.spec, &Secrets::default(), &note).await.expect("prepare again");
    assert_eq!(told.lock().expect("no panic").len(), first, "it was fetched again");
    let id = started_as(subject, &plan).await.id;
    said(subject, id, "complete").await;
    removed(subject, id).await;
}

pub(super) async fn a_box_without_an_entrypoint_is_held_by_its_agent(subject: &Subject) {
    let mut plan = plan(subject, IDLE);
    plan.spec.entrypoint = Entrypoint::AgentOnly;
    let seen = started_as(subject, &plan).await;
    assert_eq!((&seen.condition, seen.entrypoint.len()), (&Condition::Running, 0));
    assert_eq!(seen.spec.entrypoint, Entrypoint::AgentOnly);
    removed(subject, seen.id).await;
}

pub(super) async fn the_environment_is_as_asked_for_and_holds_no_token(subject: &Subject) {
    let mut plan = plan(subject, &["sh", "-c", "env; echo complete; sleep 1000"]);
    let asked =
        [("GREETING", "later wins"), ("EMPTY", ""), ("ODD", "a=b 'c' \"d\" $HOME"), ("OPENSANDBOX_ID", "x")];
    plan.spec.env.extend(asked.map(|(k, v)| (k.to_owned(), v.to_owned())));
    let id = started_as(subject, &plan).await.id;
    let lines = said(subject, id, "complete").await;
    let mine = format!("OPENSANDBOX_ID={id}");
    for expected in ["GREETING=later wins", "EMPTY=", "ODD=a=b 'c' \"d\" $HOME", &mine] {
        assert!(lines.iter().any(|line| line == expected), "{expected} is not among {lines:?}");
    }
    assert!(
        lines.iter().all(|line| !line.contains("agent-token") && !line.contains("route-token")),
        "{lines:?}"
    );
    removed(subject, id).await;
}

pub(super) async fn arguments_arrive_as_they_are(subject: &Subject) {
    let script = "for a in \"$@\"; do echo \"<$a>\"; done; echo complete; sleep 1000";
    let id = started(subject, &["sh", "-c", script, "sh", "a b", "", "$HOME", "--flag", "'"]).await.id;
    assert_eq!(
        said(subject, id, "complete").await,
        ["<a b>", "<>", "<$HOME>", "<--flag>", "<'>", "complete"]
    );
    removed(subject, id).await;
}

pub(super) async fn output_of_the_entrypoint_is_in_the_logs(subject: &Subject) {
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
    for line in &lines {
        let time = line.split(' ').next().unwrap_or_default();
        assert!(time.len() >= 20 && time.contains('T') && time.ends_with('Z'), "{line}");
    }
    removed(subject, id).await;
}

pub(super) async fn only_the_last_lines_are_read(subject: &Subject) {
    let script = "i=0; while [ $i -lt 200 ]; do i=$((i+1)); echo line $i; done; echo complete";
    let id = started_saying(subject, script).await.id;
    said(subject, id, "complete").await;
    let last = subject.runtime.logs(id, 3).await.expect("logs");
    let text: Vec<_> = last.iter().filter_map(|line| line.splitn(3, ' ').nth(2)).collect();
    assert_eq!(text, ["line 199", "line 200", "complete"]);
    removed(subject, id).await;
}

pub(super) async fn a_box_has_a_history(subject: &Subject) {
    let id = started(subject, IDLE).await.id;
    subject.runtime.pause(id).await.expect("pause");
    let look = async {
        loop {
            let events = subject.runtime.events(id).await.expect("events");
            let has = |kind: &str| events.iter().any(|e| e.kind == kind);
            if has("started") && has("paused") {
                return events;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    let events = timeout(PATIENCE, look).await.expect("it has no history");
    assert!(events.is_sorted_by_key(|e| e.at), "{events:?}");
    removed(subject, id).await;
}

pub(super) async fn use_of_resources_is_told(subject: &Subject) {
    let id = started(subject, IDLE).await.id;
    let usage = subject.runtime.usage(id).await.expect("usage");
    assert!(usage.memory_bytes.is_some_and(|bytes| bytes > 0 && bytes <= 128 << 20), "{usage:?}");
    assert!(usage.pids.is_some_and(|pids| (1..=64).contains(&pids)), "{usage:?}");
    assert!(usage.cpu_usec.is_some_and(|usec| usec > 0), "{usage:?}");
    removed(subject, id).await;
}

pub(super) async fn processes_are_limited(subject: &Subject) {
    // Not in this shell itself: one that cannot fork may end.
    let script = "(i=0; while [ $i -lt 100 ]; do sleep 1000 & i=$((i+1)); done) 2>/dev/null; echo complete; exec sleep 1000";
    let id = started(subject, &["sh", "-c", script]).await.id;
    said(subject, id, "complete").await;
    let usage = subject.runtime.usage(id).await.expect("usage");
    assert!(usage.pids.is_some_and(|pids| pids <= 64), "{usage:?}");
    removed(subject, id).await;
}
