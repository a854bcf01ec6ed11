//! What happens to an image build, as lines of history: written with the rows that it happened to. Pure.

use sandglass_builds::build::{BuildState, ImageBuild, StepState};
use sandglass_sandbox::ports::store::EventRecord;
use serde_json::{Map, Value, json};

/// The kinds of lines are the types of the events.
const QUEUED: &str = "image_build.queued";
const STEP: &str = "image_build.step";
const FINISHED: &str = "image_build.finished";

/// A line; beside its data it says whose the build is and how it is labelled, because the row may go before it is told.
fn line(kind: &str, build: &ImageBuild, data: Value) -> EventRecord {
    let message = json!({"namespace": build.slot.namespace, "metadata": build.metadata, "data": data});
    EventRecord { at: build.last_transition_at, kind: kind.into(), message: message.to_string() }
}

/// The build waits for its turn.
pub(super) fn queued(build: &ImageBuild) -> EventRecord {
    let repository = build.plan.checkouts.first();
    let data = json!({
        "repository": repository.map(|checkout| json!({"url": checkout.url, "ref": checkout.reference, "commit": checkout.commit})),
        "attempt": build.attempt + 1,
        "priority": format!("{:?}", build.priority).to_lowercase(),
    });
    line(QUEUED, build, data)
}

/// What the newer row tells.
pub(super) fn between(before: &ImageBuild, after: &ImageBuild) -> Vec<EventRecord> {
    let mut lines = Vec::new();
    for step in &after.steps {
        let known = before.steps.iter().find(|known| known.name == step.name);
        let pending = [StepState::Pending, StepState::Skipped].contains(&step.state);
        if pending || known.is_some_and(|known| known.state == step.state) {
            continue;
        }
        let mut data =
            json!({"step": step.name.word(), "state": format!("{:?}", step.state), "attempt": after.attempt});
        if let Some(code) = step.exit_code {
            data["exitCode"] = code.into();
        }
        let at = step.finished_at.or(step.started_at).unwrap_or(after.last_transition_at);
        lines.push(EventRecord { at, ..line(STEP, after, data) });
    }
    if after.state == BuildState::Queued && before.state != BuildState::Queued {
        lines.push(queued(after));
    }
    if after.state.terminal() && !before.state.terminal() {
        lines.push(line(FINISHED, after, Value::Object(outcome(after))));
    }
    lines
}

fn outcome(build: &ImageBuild) -> Map<String, Value> {
    let mut data = Map::from_iter([
        ("state".to_owned(), json!(build.state.word())),
        ("attempt".to_owned(), json!(build.attempt)),
    ]);
    if let Some(image) = build.image {
        data.insert("imageId".into(), image.to_string().into());
    }
    if let Some(cause) = &build.cause {
        data.insert("reason".into(), cause.kind.word().into());
        data.insert("message".into(), cause.message.clone().into());
        if let Some(step) = cause.step {
            data.insert("step".into(), step.word().into());
        }
        if let Some(code) = cause.exit_code {
            data.insert("exitCode".into(), code.into());
        }
    }
    data
}
