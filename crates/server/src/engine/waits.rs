//! The build that a create waits for, as lines of its sandbox's history.

use std::collections::HashMap;

use sandglass_sandbox::{
    ImageBuildId, SandboxId,
    lifecycle::{
        boot::Failure,
        intent::{Intent, Operation, Progress},
    },
    ports::store::{EventRecord, StoreError},
    source::{BuildStep, FoundImage},
};
use serde::Deserialize;
use serde_json::json;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender};

use super::Engine;

const QUEUED: &str = "image.build_queued";
const STEP: &str = "image.build_step";
const FINISHED: &str = "image.build_finished";
/// The longest beginning of a history that is read after a restart: a build has few steps and few attempts.
const RECALLED: u32 = 1000;

/// Takes lines to where they are written; whoever tells of progress must not wait.
pub(super) type Lines = (UnboundedSender<EventRecord>, UnboundedReceiver<EventRecord>);

/// What is written of the builds that creates wait for: a create that is begun again joins the same build, which is no news.
#[derive(Debug, Default)]
pub(super) struct Waits(HashMap<SandboxId, Wait>);

#[derive(Debug)]
struct Wait {
    build: ImageBuildId,
    /// As last told, by name.
    steps: HashMap<String, BuildStep>,
}

impl Waits {
    /// Whether that is news.
    fn begin(&mut self, id: SandboxId, build: ImageBuildId) -> bool {
        let known = self.0.get(&id).is_some_and(|wait| wait.build == build);
        if !known {
            self.0.insert(id, Wait { build, steps: HashMap::new() });
        }
        !known
    }

    /// Whether that is news. Nothing of a build that is not waited for is.
    fn step(&mut self, id: SandboxId, step: &BuildStep) -> bool {
        let Some(wait) = self.0.get_mut(&id).filter(|wait| wait.build == step.image_build_id) else {
            return false;
        };
        wait.steps.insert(step.step.clone(), step.clone()).as_ref() != Some(step)
    }

    pub(super) fn end(&mut self, id: SandboxId) -> Option<ImageBuildId> {
        self.0.remove(&id).map(|wait| wait.build)
    }

    /// Takes in a line that an earlier server wrote.
    fn recall(&mut self, id: SandboxId, line: &EventRecord) {
        #[derive(Deserialize)]
        #[serde(rename_all = "camelCase")]
        struct Queued {
            image_build_id: ImageBuildId,
        }
        match line.kind.as_str() {
            QUEUED => {
                if let Ok(queued) = serde_json::from_str::<Queued>(&line.message) {
                    self.begin(id, queued.image_build_id);
                }
            }
            STEP => {
                if let Ok(step) = serde_json::from_str(&line.message) {
                    self.step(id, &step);
                }
            }
            FINISHED => {
                self.end(id);
            }
            _ => {}
        }
    }
}

impl Engine {
    /// The line for a build that is waited for from now on.
    pub(super) fn waits_for(&self, id: SandboxId, progress: &Progress) -> Option<EventRecord> {
        let (build, state) = match progress {
            Progress::Queued { build } => (*build, "Queued"),
            Progress::Building { build } => (*build, "Running"),
            _ => return None,
        };
        let news = self.journal.waits().begin(id, build);
        news.then(|| self.event(QUEUED, &json!({"imageBuildId": build, "state": state}).to_string()))
    }

    /// The line for a step of the build that is waited for.
    pub(super) fn steps_on(&self, id: SandboxId, step: &BuildStep) -> Option<EventRecord> {
        let line = serde_json::to_string(step).ok()?;
        self.journal.waits().step(id, step).then(|| self.event(STEP, &line))
    }

    /// After a restart: what is written of the build that this create waits for.
    pub(super) async fn recall_wait(&self, intent: &Intent) -> Result<(), StoreError> {
        if !matches!(&intent.operation, Operation::Create(create) if create.spec.source.is_some()) {
            return Ok(());
        }
        let id = intent.sandbox_id;
        for line in self.store.history_after(id, 0, RECALLED).await? {
            self.journal.waits().recall(id, &line.event);
        }
        Ok(())
    }

    /// Writes lines as they come, for ever.
    pub(super) async fn write_lines(&self, id: SandboxId, lines: &mut UnboundedReceiver<EventRecord>) {
        while let Some(line) = lines.recv().await {
            if let Err(error) = self.append(id, &[line]).await {
                tracing::warn!(sandbox = %id, %error, "an event could not be recorded");
            }
        }
        std::future::pending().await
    }

    /// Writes what was left, and how the build ended if one was waited for. Returns that build.
    pub(super) async fn waited_for(
        &self,
        id: SandboxId,
        lines: &mut UnboundedReceiver<EventRecord>,
        found: &Result<FoundImage, Failure>,
    ) -> Result<Option<ImageBuildId>, StoreError> {
        let mut rest: Vec<EventRecord> = std::iter::from_fn(|| lines.try_recv().ok()).collect();
        let build = self.journal.waits().end(id);
        if let Some(build) = build {
            let data = match found {
                Ok(found) => json!({"imageBuildId": build, "state": "Succeeded", "imageId": found.image}),
                Err(failure) => {
                    json!({"imageBuildId": build, "state": "Failed", "reason": failure.reason.word()})
                }
            };
            rest.push(self.event(FINISHED, &data.to_string()));
        }
        if !rest.is_empty() {
            self.append(id, &rest).await?;
        }
        Ok(build)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn step(build: ImageBuildId, state: &str, attempt: u32) -> BuildStep {
        BuildStep {
            image_build_id: build,
            step: "setup".into(),
            state: state.into(),
            attempt,
            exit_code: None,
        }
    }

    #[test]
    fn what_is_told_is_told_once_also_by_the_next_server() {
        let (id, build) = (SandboxId::random(), ImageBuildId::random());
        let mut waits = Waits::default();
        assert!(!waits.step(id, &step(build, "Running", 1)), "nobody waits for it");
        assert!(waits.begin(id, build) && !waits.begin(id, build));
        assert!(waits.step(id, &step(build, "Running", 1)) && !waits.step(id, &step(build, "Running", 1)));
        assert!(waits.step(id, &step(build, "Running", 2)), "its next attempt");
        assert!(!waits.step(id, &step(ImageBuildId::random(), "Failed", 2)), "of another build");

        let line = |kind: &str, data: serde_json::Value| EventRecord {
            at: sandglass_sandbox::Timestamp::clamped(0),
            kind: kind.into(),
            message: data.to_string(),
        };
        let mut next = Waits::default();
        for line in [
            line("accepted", json!("x")),
            line(QUEUED, json!({"imageBuildId": build, "state": "Queued"})),
            line(STEP, serde_json::to_value(step(build, "Running", 1)).unwrap()),
        ] {
            next.recall(id, &line);
        }
        assert!(!next.begin(id, build) && !next.step(id, &step(build, "Running", 1)));
        assert!(next.step(id, &step(build, "Succeeded", 1)));
        next.recall(id, &line(FINISHED, json!({})));
        assert_eq!(next.end(id), None);
    }
}
