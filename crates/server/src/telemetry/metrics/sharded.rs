//! Numbers that many threads add to at once.
//!
//! Each thread has its own cache lines for most of its additions, so that counting never makes two cores wait for each
//! other. Reading adds the parts up; a sum read during an addition may lag behind by it.

use std::{
    sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed},
    time::Duration,
};

/// Parts of a number. More threads than this share.
const SHARDS: usize = 4;

static NEXT: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    static OWN: usize = NEXT.fetch_add(1, Relaxed) % SHARDS;
}

fn own() -> usize {
    OWN.with(|own| *own)
}

/// Two cache lines, because processors fetch them in pairs.
#[derive(Debug)]
#[repr(align(128))]
struct Padded<T>(T);

/// A number that only grows.
#[derive(Debug)]
pub struct Counter([Padded<AtomicU64>; SHARDS]);

impl Default for Counter {
    fn default() -> Self {
        Self(std::array::from_fn(|_| Padded(AtomicU64::new(0))))
    }
}

impl Counter {
    /// Counts one.
    pub fn count(&self) {
        self.add(1);
    }

    /// Counts several.
    pub fn add(&self, several: u64) {
        self.0[own()].0.fetch_add(several, Relaxed);
    }

    /// What was counted so far.
    pub fn value(&self) -> u64 {
        self.0.iter().map(|part| part.0.load(Relaxed)).sum()
    }
}

#[derive(Debug)]
struct Part<const BUCKETS: usize> {
    buckets: [AtomicU64; BUCKETS],
    microseconds: AtomicU64,
}

impl<const BUCKETS: usize> Default for Part<BUCKETS> {
    fn default() -> Self {
        Self { buckets: std::array::from_fn(|_| AtomicU64::new(0)), microseconds: AtomicU64::new(0) }
    }
}

/// Durations by bucket. `BUCKETS` is one more than there are bounds: the last bucket is what lies above them all.
#[derive(Debug)]
pub struct Histogram<const BUCKETS: usize> {
    bounds: &'static [u32],
    parts: [Padded<Part<BUCKETS>>; SHARDS],
}

/// A histogram at one moment.
#[derive(Debug, Clone, PartialEq)]
pub struct Distribution {
    /// How many fell into each bucket; not cumulative.
    pub buckets: Vec<u64>,
    pub sum_ms: f64,
}

impl Distribution {
    /// How many there are.
    pub fn count(&self) -> u64 {
        self.buckets.iter().sum()
    }
}

impl<const BUCKETS: usize> Histogram<BUCKETS> {
    /// Upper bounds in milliseconds, inclusive and ascending.
    pub fn new(bounds: &'static [u32]) -> Self {
        debug_assert_eq!(bounds.len() + 1, BUCKETS);
        Self { bounds, parts: std::array::from_fn(|_| Padded(Part::default())) }
    }

    /// Adds one duration.
    pub fn record(&self, duration: Duration) {
        let microseconds = u64::try_from(duration.as_micros()).unwrap_or(u64::MAX);
        let bucket = self.bounds.partition_point(|bound| microseconds > u64::from(*bound) * 1000);
        let part = &self.parts[own()].0;
        part.buckets[bucket.min(BUCKETS - 1)].fetch_add(1, Relaxed);
        part.microseconds.fetch_add(microseconds, Relaxed);
    }

    /// The sum over all threads.
    pub fn read(&self) -> Distribution {
        let bucket = |n: usize| self.parts.iter().map(|part| part.0.buckets[n].load(Relaxed)).sum();
        let microseconds = self.parts.iter().map(|part| part.0.microseconds.load(Relaxed));
        // Above 2^53 microseconds (285 years) the last digits are lost.
        let sum_ms = microseconds.fold(0_u64, u64::wrapping_add) as f64 / 1000.0;
        Distribution { buckets: (0..BUCKETS).map(bucket).collect(), sum_ms }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bounds_are_inclusive_and_the_last_bucket_is_open() {
        let histogram = Histogram::<3>::new(&[1, 5]);
        for microseconds in [0, 1000, 1001, 5000, 5001, 900_000_000] {
            histogram.record(Duration::from_micros(microseconds));
        }
        let read = histogram.read();
        assert_eq!(read.buckets, [2, 2, 2]);
        assert_eq!(read.count(), 6);
        assert!((read.sum_ms - 900_012.002).abs() < 1e-6, "{}", read.sum_ms);
    }

    #[test]
    fn nothing_is_lost_between_threads() {
        let (counter, histogram) = (Counter::default(), Histogram::<2>::new(&[10]));
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    for _ in 0..1000 {
                        counter.count();
                        histogram.record(Duration::from_millis(1));
                    }
                });
            }
        });
        assert_eq!(counter.value(), 8000);
        assert_eq!(histogram.read(), Distribution { buckets: vec![8000, 0], sum_ms: 8000.0 });
    }
}
