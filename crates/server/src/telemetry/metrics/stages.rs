//! How long creates took as the server saw them, by stage: from the accepted request until the sandbox was of use.

use std::{
    collections::BTreeMap,
    sync::{Mutex, PoisonError},
};

use sandglass_sandbox::source::CacheResult;

use super::{
    family::{Family, Label, Labels},
    sharded::Histogram,
};
use crate::engine::stages::Timing;

const BOUNDS: &[u32] = &[
    5, 10, 25, 50, 100, 250, 500, 1000, 2500, 5000, 10_000, 30_000, 60_000, 120_000, 300_000, 600_000,
    1_800_000,
];
const BUCKETS: usize = BOUNDS.len() + 1;

type Seen<K> = Mutex<BTreeMap<K, Box<Histogram<BUCKETS>>>>;

/// The durations of creates that made a sandbox, by source and by what of the image was there before. All labels are words of short lists.
#[derive(Debug, Default)]
pub struct CreateStages {
    whole: Seen<(&'static str, &'static str)>,
    parts: Seen<(&'static str, &'static str, &'static str)>,
}

impl CreateStages {
    /// Records one create.
    pub fn record(&self, timing: &Timing) {
        let cache = timing.cache.map_or("none", CacheResult::word);
        let new = || Box::new(Histogram::new(BOUNDS));
        let mut whole = self.whole.lock().unwrap_or_else(PoisonError::into_inner);
        whole.entry((timing.source, cache)).or_insert_with(new).record(timing.total);
        let mut parts = self.parts.lock().unwrap_or_else(PoisonError::into_inner);
        for (stage, took) in &timing.stages {
            parts.entry((stage.word(), timing.source, cache)).or_insert_with(new).record(*took);
        }
    }

    /// What was recorded so far.
    pub fn families(&self) -> [Family; 2] {
        let about = |source: &'static str, cache: &'static str| -> Labels {
            vec![("source", source.into()), ("cache", cache.into())]
        };
        let whole = self.whole.lock().unwrap_or_else(PoisonError::into_inner);
        let whole =
            whole.iter().map(|((source, cache), times)| (about(source, cache), times.read())).collect();
        let parts = self.parts.lock().unwrap_or_else(PoisonError::into_inner);
        let of = |(stage, source, cache): &(&'static str, &'static str, &'static str)| {
            let mut labels = vec![("stage", Label::from(*stage))];
            labels.extend(about(source, cache));
            labels
        };
        let parts = parts.iter().map(|(key, times)| (of(key), times.read())).collect();
        [
            Family::durations(
                "sandglass.create.duration",
                "Time from an accepted create until its sandbox was of use; `cache` is what of a repository's image was there.",
                BOUNDS,
                whole,
            ),
            Family::durations(
                "sandglass.create.stage.duration",
                "The same by stage: resolve, build, pull, create, attach, boot.",
                BOUNDS,
                parts,
            ),
        ]
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::{engine::stages::Stage, telemetry::metrics::prometheus};

    #[test]
    fn creates_are_told_apart_by_source_and_cache() {
        let stages = CreateStages::default();
        let ms = Duration::from_millis;
        for (source, cache) in [("repository", Some(CacheResult::Built)), ("image", None)] {
            let parts = vec![(Stage::Pull, ms(7)), (Stage::Create, ms(40))];
            stages.record(&Timing { source, cache, total: ms(50), stages: parts });
        }
        let page = prometheus::page(&stages.families());
        for line in [
            "sandglass_create_duration_milliseconds_count{source=\"repository\",cache=\"built\"} 1",
            "sandglass_create_duration_milliseconds_sum{source=\"image\",cache=\"none\"} 50",
            "sandglass_create_stage_duration_milliseconds_bucket{stage=\"pull\",source=\"image\",cache=\"none\",le=\"10\"} 1",
            "sandglass_create_stage_duration_milliseconds_sum{stage=\"create\",source=\"repository\",cache=\"built\"} 40",
        ] {
            assert!(page.lines().any(|l| l == line), "{line}\n{page}");
        }
    }
}
