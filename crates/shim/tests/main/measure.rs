//! How long things take and how much they hold. Not run by default: figures from a busy machine mean nothing.
//!
//! `SANDGLASS_SHIM_BINARY=<static build> cargo test -p sandglass-shim --test main measure -- --ignored --nocapture`

use std::collections::BTreeMap;
use std::fs;
use std::time::{Duration, Instant};

use crate::stage::{TestBox, stage};

fn median<T: Copy + Ord>(values: &mut [T]) -> T {
    values.sort_unstable();
    values[values.len() / 2]
}

#[test]
#[ignore = "a measurement, not a check"]
fn measure_create_and_remove() {
    let stage = stage();
    let (mut creates, mut removes) = (Vec::new(), Vec::new());
    let mut steps: BTreeMap<String, Vec<u64>> = BTreeMap::new();
    for _ in 0..50 {
        let spec = stage.spec();
        let begun = Instant::now();
        let boxed = stage.create(spec).unwrap_or_else(|error| panic!("{error:?}"));
        creates.push(begun.elapsed());
        for (step, micros) in &boxed.timings {
            steps.entry(step.clone()).or_default().push(*micros);
        }
        let begun = Instant::now();
        assert!(boxed.remove().ok);
        removes.push(begun.elapsed());
    }
    println!("create {:?} (min {:?}), remove {:?}", median(&mut creates), creates[0], median(&mut removes));
    let mut steps: Vec<(u64, String)> =
        steps.into_iter().map(|(step, mut all)| (median(&mut all), step)).collect();
    steps.sort();
    for (micros, step) in steps {
        println!("{micros:6} us  {step}");
    }
}

#[test]
#[ignore = "a measurement, not a check"]
fn measure_fifty_at_once() {
    let stage = stage();
    let begun = Instant::now();
    let boxes: Vec<TestBox> = std::thread::scope(|scope| {
        let started: Vec<_> = (0..50).map(|_| scope.spawn(|| stage.boxed())).collect();
        started.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    let took = begun.elapsed();
    let (mut rss, mut pss) = (Vec::new(), Vec::new());
    for boxed in &boxes {
        let rollup = fs::read_to_string(format!("/proc/{}/smaps_rollup", boxed.state.shim_pid)).unwrap();
        let field = |name: &str| {
            let line = rollup.lines().find(|line| line.starts_with(name)).unwrap();
            line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap()
        };
        rss.push(field("Rss:"));
        pss.push(field("Pss:"));
    }
    println!(
        "50 creates at once {took:?}; a shim: rss {} KiB, pss {} KiB",
        median(&mut rss),
        median(&mut pss)
    );
    let begun = Instant::now();
    std::thread::scope(|scope| {
        for boxed in &boxes {
            scope.spawn(|| assert!(boxed.remove().ok));
        }
    });
    println!("50 removals at once {:?}", begun.elapsed());
    assert!(took < Duration::from_millis(1500), "{took:?}");
}
