//! Numbers, printed, not asserted.

use std::time::{Duration, Instant};

use super::program::{Home, Program, change};
use super::stage::{Place, Stage};

#[test]
fn measure_changes() {
    let stage = Stage::new(Place::Gateway);
    let home = Home::new("");
    let _program = Program::start(&stage, &home);
    let network = |number: usize| format!("100.{}.{}.0/24", 64 + number / 256 % 64, number % 256);
    let name = |number: usize| format!("host-{number}.measured.test");
    let targets: [(&str, &dyn Fn(usize) -> String); 2] = [("networks", &network), ("names", &name)];
    for (what, target) in targets {
        for count in [0, 1000, 4096] {
            let rules: Vec<_> = (0..count)
                .map(|number| format!(r#"{{"action":"allow","target":"{}"}}"#, target(number)))
                .collect();
            let policy = format!(r#"{{"egress":[{}]}}"#, rules.join(","));
            let mut took: Vec<Duration> = (0..10)
                .map(|_| {
                    let begun = Instant::now();
                    change(&stage, "PUT", &policy);
                    begun.elapsed()
                })
                .collect();
            took.sort_unstable();
            println!("put {count} {what}: median {:?}, worst {:?}", took[5], took[9]);
        }
    }
}
