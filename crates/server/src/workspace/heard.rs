//! Rows of a build as they are found, and what of them is news to a create that waits for it.

use std::{
    collections::HashMap,
    sync::{Mutex, MutexGuard, PoisonError},
};

use sandglass_builds::build::{BuildState, ImageBuild, StepName, StepState};
use sandglass_sandbox::{
    lifecycle::intent::Progress,
    source::{BuildStep, ImageNews},
};

/// What a create was told of the build that it waits for. Rows come as they are found; of each only what is new is passed on.
pub(super) struct Heard<'a> {
    told: &'a (dyn Fn(ImageNews) + Send + Sync),
    last: Mutex<Last>,
}

#[derive(Default)]
struct Last {
    stands: Option<Progress>,
    steps: HashMap<StepName, (StepState, u32)>,
}

impl<'a> Heard<'a> {
    pub(super) fn new(told: &'a (dyn Fn(ImageNews) + Send + Sync)) -> Self {
        Self { told, last: Mutex::default() }
    }

    fn last(&self) -> MutexGuard<'_, Last> {
        self.last.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn row(&self, row: &ImageBuild) {
        let stands = match row.state {
            BuildState::Queued => Progress::Queued { build: row.id },
            _ => Progress::Building { build: row.id },
        };
        if !row.state.terminal() && self.last().stands.replace(stands.clone()).as_ref() != Some(&stands) {
            (self.told)(ImageNews::Stands(stands));
        }
        self.steps(row);
    }

    /// At most two states of each step and attempt: what is over before it was seen to run is told as over.
    pub(super) fn steps(&self, row: &ImageBuild) {
        if row.attempt == 0 {
            // It waits for its turn: what its first attempt need not do again is told with that.
            return;
        }
        for step in &row.steps {
            if matches!(step.state, StepState::Pending | StepState::Skipped) {
                continue;
            }
            let state = (step.state, row.attempt);
            if self.last().steps.insert(step.name, state) == Some(state) {
                continue;
            }
            (self.told)(ImageNews::Step(BuildStep {
                image_build_id: row.id,
                step: step.name.word().to_owned(),
                state: format!("{:?}", step.state),
                attempt: row.attempt,
                exit_code: step.exit_code,
            }));
        }
    }
}
