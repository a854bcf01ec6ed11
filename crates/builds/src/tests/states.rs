//! No decision writes what the tables forbid, whatever comes in whatever order.

use proptest::prelude::*;
use sandglass_sandbox::Timestamp;

use super::*;
use crate::{
    build::{Cancel, CauseKind, StepName},
    decide::{
        Rules,
        attempt::{self, Stopped},
        ending::{self, Outcome},
        recover, waiters,
    },
    key::ArtifactName,
    ports::{Artifact, EngineError},
};

pub(super) fn queued() -> ImageBuild {
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build().unwrap();
    runtime.block_on(async {
        let stage = Stage::with(Surroundings::default(), 0, |s| s.rules.per_host = 1).await;
        stage.around.world.lock().unwrap().step_takes = Duration::from_secs(3600);
        stage.submit(explicit(9, 9)).await;
        stage.submit(sandbox(1, 1, "a")).await
    })
}

#[derive(Debug, Clone)]
enum Event {
    Begin,
    Step,
    Finalize,
    Accept,
    End(u8),
    Cancel(u8),
    Leave,
    Takeover,
    StaleOwner,
}

fn events() -> impl Strategy<Value = Vec<Event>> {
    let event = prop_oneof![
        3 => Just(Event::Begin),
        3 => Just(Event::Step),
        3 => Just(Event::Finalize),
        2 => Just(Event::Accept),
        2 => (0_u8..6).prop_map(Event::End),
        1 => (0_u8..3).prop_map(Event::Cancel),
        1 => Just(Event::Leave),
        1 => Just(Event::Takeover),
        1 => Just(Event::StaleOwner),
    ];
    prop::collection::vec(event, 1..40)
}

fn outcome(n: u8) -> Outcome {
    match n {
        0 => Outcome::Failed { step: None, error: EngineError::transient("503") },
        1 => Outcome::Failed { step: Some(StepName::Setup), error: EngineError::Rejected("no".to_owned()) },
        2 => Outcome::CaptureLost("lost".to_owned()),
        3 => Outcome::PastDeadline,
        4 => Outcome::Interrupted,
        _ => Outcome::SecretsLost,
    }
}

fn apply(
    row: &ImageBuild,
    event: &Event,
    now: Timestamp,
    rules: &Rules,
) -> Result<Option<ImageBuild>, Stopped> {
    let fence = row.last_fence;
    let name = ArtifactName::new(&row.slot.key, u64::from(row.attempt));
    Ok(Some(match event {
        Event::Begin => attempt::begin(row, "me", rules, now)?,
        Event::Step => attempt::step_began(row, fence, StepName::Clone, now)?,
        Event::Finalize => attempt::finalizing(row, fence, &name, rules, now)?,
        Event::Accept => {
            let artifact = Artifact {
                name,
                made_by: Some((row.id, row.attempt)),
                reference: "r".to_owned(),
                digest: None,
                size_bytes: 1,
            };
            ending::accepted(row, fence, &artifact, &[], now)?.0
        }
        Event::End(n) => ending::after_attempt(row, &outcome(*n), None, rules, now)?.row,
        Event::Cancel(0) => waiters::cancel(row, Cancel::Requested, now)?,
        Event::Cancel(_) => waiters::cancel(row, Cancel::SupersededBy(row.id), now)?,
        Event::Leave => return Ok(waiters::leave(row, "a", now)?),
        Event::Takeover => attempt::take_over(row, "other", rules, now),
        Event::StaleOwner => attempt::renew(row, fence.wrapping_sub(1), rules, now)?,
    }))
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, ..ProptestConfig::default() })]

    #[test]
    fn decisions_keep_to_the_table(events in events()) {
        thread_local!(static QUEUED: ImageBuild = queued());
        let rules = Rules::default();
        let mut row = QUEUED.with(Clone::clone);
        let mut now = row.created_at;
        for event in events {
            now = crate::time::after(now, Duration::from_secs(1));
            let Ok(Some(next)) = apply(&row, &event, now, &rules) else { continue };
            if row.state.terminal() {
                prop_assert_eq!(next.state, row.state, "{:?} after the end", event);
                continue;
            }
            prop_assert!(next.state == row.state || row.state.may_become(next.state), "{:?}", event);
            prop_assert!(!matches!(event, Event::StaleOwner), "a stale owner wrote");
            prop_assert!(next.last_fence >= row.last_fence && next.attempt >= row.attempt);
            // What is under way has an owner and an end; what ended has neither, and says why.
            let owned = matches!(next.state, BuildState::Running | BuildState::Finalizing);
            prop_assert!(!owned || next.lease.is_some());
            prop_assert_eq!(next.state.terminal(), next.finished_at.is_some());
            if next.state.terminal() {
                prop_assert!(next.lease.is_none() && next.current_step().is_none());
                prop_assert_eq!(next.state == BuildState::Succeeded, next.image.is_some());
                prop_assert_eq!(next.state == BuildState::Succeeded, next.cause.is_none());
            }
            // Every attempt that was begun is either owed or current.
            prop_assert!(next.transient_failures <= rules.retries && next.interruptions <= rules.interruptions);
            if owned {
                let current = recover::Due::Discard { attempt: next.attempt };
                prop_assert!(!recover::due(&next, now).contains(&current), "the workspace is in use");
            }
            row = next;
        }
    }
}

#[test]
fn a_step_that_runs_at_the_end_ends_with_its_build() {
    let (rules, row) = (Rules::default(), queued());
    let now = row.created_at;
    let row = attempt::begin(&row, "me", &rules, now).unwrap();
    let row = attempt::step_began(&row, row.last_fence, StepName::Clone, now).unwrap();
    let ended = ending::after_attempt(&row, &Outcome::PastDeadline, None, &rules, now).unwrap();
    assert_eq!(ended.row.cause.unwrap().kind, CauseKind::TimedOut);
    let states: Vec<_> = ended.row.steps.iter().map(|s| (s.name.word(), format!("{:?}", s.state))).collect();
    let text: Vec<_> = states.iter().map(|(name, state)| format!("{name} {state}")).collect();
    assert_eq!(
        text,
        ["resolve Succeeded", "clone Failed", "setup Skipped", "sanitize Skipped", "export Skipped"]
    );
}

#[test]
fn a_build_that_finishes_after_that_of_a_later_request_does_not_take_its_place() {
    let (rules, row) = (Rules::default(), queued());
    let now = crate::time::after(row.created_at, Duration::from_secs(60));
    let row = attempt::begin(&row, "me", &rules, now).unwrap();
    let name = ArtifactName::new(&row.slot.key, 1);
    let row = attempt::finalizing(&row, row.last_fence, &name, &rules, now).unwrap();
    let artifact = Artifact { name, made_by: None, reference: "r".to_owned(), digest: None, size_bytes: 1 };
    let created = row.created_at.as_millis();
    for (other, expected) in [(created + 1, ImageState::Superseded), (created - 1, ImageState::Ready)] {
        let other = super::admission::image(1, 2, other);
        let lineage = std::slice::from_ref(&other);
        let (_, new) = ending::accepted(&row, row.last_fence, &artifact, lineage, now).unwrap();
        assert_eq!(new.image.state, expected);
        assert_eq!(new.supersedes == [other.id], expected == ImageState::Ready);
    }
}
