//! The suites of a whole check, side by side: each is a command of this program, with its output in a file until it has ended.
//!
//! Owns their order and how many run at once. Most of what they do is waiting, for boxes, engines and the ends of leases, so that
//! several at once take little longer than one. Each makes what it needs for itself, and what it finds left over is its own.

use std::collections::VecDeque;
use std::fs::{self, File};
use std::num::NonZero;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use anyhow::{Context, Result, bail};

use crate::checks::Mode;
use crate::workspace::Workspace;

/// A name, and the arguments of this program that run it.
type Suite = (&'static str, &'static [&'static str]);

/// Runs before all others and by itself: it computes all the time, and much of it is about moments.
const ALONE: &[Suite] = &[("cargo test", &["unit"])];

/// The longest first, so that the last ones end at about the same time.
const SUITES: &[Suite] = &[
    ("e2e, embedded", &["e2e", "-m", "not docker and not repositories"]),
    ("e2e, Docker", &["e2e", "-m", "docker and not repositories"]),
    ("e2e, repositories", &["e2e", "-m", "repositories"]),
    ("restart, Docker", &["restart", "--runtime", "docker"]),
    ("restart loop", &["restart"]),
    ("conformance", &["conformance"]),
];

/// As many as there are processors: what waits leaves room for what compiles and computes beside it.
fn at_once() -> usize {
    std::thread::available_parallelism().map_or(2, NonZero::get).min(SUITES.len())
}

/// Runs all of them to their ends, also when one fails: one run tells everything. Returns the seconds that each took.
pub(crate) fn run(workspace: &Workspace, mode: Mode, binary: &Path) -> Result<Vec<(&'static str, f64)>> {
    let program = std::env::current_exe().context("failed to find this program")?;
    let logs = workspace.target.join("suites");
    fs::create_dir_all(&logs).with_context(|| format!("failed to make {}", logs.display()))?;
    let place = Place { program, root: workspace.root.clone(), binary: binary.into(), logs, mode };
    // What fails is told with all the rest.
    let alone = place.run_all(ALONE, 1);
    let others = place.run_all(SUITES, at_once());
    match (alone, others) {
        (Ok(mut alone), Ok(others)) => {
            alone.extend(others);
            Ok(alone)
        }
        (Err(error), Ok(_)) | (Ok(_), Err(error)) => Err(error),
        (Err(alone), Err(others)) => bail!("{alone:#}; {others:#}"),
    }
}

/// What every suite is started with.
struct Place {
    program: PathBuf,
    root: PathBuf,
    binary: PathBuf,
    logs: PathBuf,
    mode: Mode,
}

impl Place {
    fn run_all(&self, suites: &[Suite], at_once: usize) -> Result<Vec<(&'static str, f64)>> {
        let waiting = Mutex::new(suites.iter().copied().collect::<VecDeque<_>>());
        let ended = Mutex::new(Vec::new());
        let next = || waiting.lock().unwrap_or_else(PoisonError::into_inner).pop_front();
        std::thread::scope(|scope| {
            for _ in 0..at_once {
                scope.spawn(|| {
                    while let Some((name, arguments)) = next() {
                        let begun = Instant::now();
                        let outcome = self.run(name, arguments);
                        let seconds = begun.elapsed().as_secs_f64();
                        // Held while the output is shown, so that no two are mixed.
                        let mut ended = ended.lock().unwrap_or_else(PoisonError::into_inner);
                        self.show(name, &outcome, seconds);
                        ended.push((name, seconds, outcome.is_ok_and(|status| status.success())));
                    }
                });
            }
        });
        let ended = ended.into_inner().unwrap_or_else(PoisonError::into_inner);
        let failed: Vec<_> = ended.iter().filter(|(_, _, passed)| !passed).map(|(name, ..)| *name).collect();
        if !failed.is_empty() {
            bail!("not passed: {}", failed.join("; "));
        }
        Ok(ended.into_iter().map(|(name, seconds, _)| (name, seconds)).collect())
    }

    fn log(&self, name: &str) -> PathBuf {
        self.logs.join(format!("{}.log", name.replace(", ", "-").replace(' ', "-")))
    }

    fn run(&self, name: &str, arguments: &[&str]) -> Result<ExitStatus> {
        let path = self.log(name);
        let log = File::create(&path).with_context(|| format!("failed to make {}", path.display()))?;
        println!("--> {name} begins; output in {}", path.display());
        let mut command = Command::new(&self.program);
        command.args(arguments).current_dir(&self.root).env("SANDGLASS_BIN", &self.binary);
        if self.mode == Mode::Ci && arguments == ["unit"] {
            command.arg("--locked");
        }
        let errors = log.try_clone()?;
        command
            .stdin(Stdio::null())
            .stdout(log)
            .stderr(errors)
            .status()
            .context("failed to start this program")
    }

    fn show(&self, name: &str, outcome: &Result<ExitStatus>, seconds: f64) {
        let output = fs::read(self.log(name)).unwrap_or_default();
        println!("\n==> {name}\n{}", String::from_utf8_lossy(&output));
        match outcome {
            Ok(status) if status.success() => println!("--> {name} passed in {seconds:.0} s"),
            Ok(status) => println!("--> {name} FAILED after {seconds:.0} s: {status}"),
            Err(error) => println!("--> {name} FAILED: {error:#}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_suite_runs_and_those_that_failed_are_named() {
        let logs = std::env::temp_dir().join(format!("sandglass-suites-{}", std::process::id()));
        fs::create_dir_all(&logs).expect("a temporary folder");
        let place = Place {
            program: "/bin/sh".into(),
            root: "/".into(),
            binary: "/bin/sandglass".into(),
            logs: logs.clone(),
            mode: Mode::Ci,
        };
        let bad: Suite = ("bad one", &["-c", "echo gone wrong; exit 3"]);
        let good: Suite = ("good, one", &["-c", "echo $SANDGLASS_BIN >&2"]);
        let error = place.run_all(&[bad, good], 1).expect_err("one failed");
        assert_eq!(error.to_string(), "not passed: bad one");
        let read = |name: &str| fs::read_to_string(place.log(name)).expect("its output");
        assert_eq!((read("bad one"), read("good, one")), ("gone wrong\n".into(), "/bin/sandglass\n".into()));
        let passed = place.run_all(&[good, ("again", good.1)], 2).expect("none failed");
        assert_eq!(passed.len(), 2);
        let _ = fs::remove_dir_all(logs);
    }
}
