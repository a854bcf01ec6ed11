//! A second chance for single tests of `cargo test`.
//!
//! Thousands of tests share two processors with engines and boxes, and one that was late once says little. What failed runs once more by
//! itself; a test that passes then is told as `FLAKY` and is a fault of the test or of the program to be found, but not a reason to throw
//! the run away. More than a few failures are no accident: they get no second chance.

use std::io::{BufRead, BufReader, Read};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

use crate::process::shown;

/// More failures than these are told as they are.
const FEW: usize = 3;

/// What a run of `cargo test --no-fail-fast` said about its failures.
#[derive(Default, Debug, PartialEq, Eq)]
struct Failures {
    /// Paths of tests, as `--exact` wants them.
    tests: Vec<String>,
    /// Arguments that choose the test program of each, as cargo tells them.
    targets: Vec<String>,
    /// Tests that were begun.
    ran: usize,
}

impl Failures {
    fn hear(&mut self, line: &str) {
        if let Some(test) = line.strip_prefix("---- ").and_then(|rest| rest.strip_suffix(" stdout ----")) {
            self.tests.push(test.into());
        } else if let Some((_, rest)) = line.split_once("test failed, to rerun pass `") {
            self.targets.extend(rest.split('`').next().map(Into::into));
        } else if let Some(tests) = line.strip_prefix("running ").and_then(|rest| rest.split(' ').next()) {
            self.ran += tests.parse().unwrap_or(0);
        }
    }

    /// A program that ended without telling which of its tests it was has no test to run again.
    fn deserve_another(&self) -> bool {
        (1..=FEW).contains(&self.tests.len()) && (1..=self.tests.len()).contains(&self.targets.len())
    }
}

/// Runs `cargo test`, which `command` makes with the given arguments.
pub(crate) fn test(arguments: &[&str], command: impl Fn(&[&str]) -> Command) -> Result<()> {
    test_and_show(arguments, command, |line| println!("{line}"))
}

fn test_and_show(
    arguments: &[&str],
    command: impl Fn(&[&str]) -> Command,
    show: impl Fn(&str) + Sync,
) -> Result<()> {
    let mut first = command(arguments);
    let (passed, failures) = heard(&mut first, &show)?;
    if passed {
        return Ok(());
    }
    if !failures.deserve_another() {
        bail!("{} failed", shown(&first));
    }
    let mut again = 0;
    for target in &failures.targets {
        let mut arguments = vec!["test"];
        arguments.extend(target.split_whitespace());
        arguments.extend(["--", "--exact"]);
        arguments.extend(failures.tests.iter().map(String::as_str));
        let mut second = command(&arguments);
        let (passed, heard) = heard(&mut second, &show)?;
        // A program that ended before it could tell has none of the tests that are known to have failed.
        if !passed || heard.ran == 0 {
            bail!("{} failed a second time, or had nothing to run", shown(&second));
        }
        again += heard.ran;
    }
    if again < failures.tests.len() {
        bail!("only {again} of {} tests that had failed were found again", failures.tests.len());
    }
    for test in &failures.tests {
        show(&format!("FLAKY: {test} failed once and passed by itself"));
    }
    Ok(())
}

/// Shows what the program says while it says it, and hears what it says of failures.
fn heard(command: &mut Command, show: &(impl Fn(&str) + Sync)) -> Result<(bool, Failures)> {
    println!("$ {}", shown(command));
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| format!("failed to start {}", command.get_program().display()))?;
    let (output, errors) = (child.stdout.take(), child.stderr.take());
    let (output, errors) = std::thread::scope(|scope| {
        let output = scope.spawn(|| listen(output, show));
        let errors = scope.spawn(|| listen(errors, show));
        (output.join().unwrap_or_default(), errors.join().unwrap_or_default())
    });
    let status = child.wait().context("failed to wait for the tests")?;
    Ok((status.success(), Failures { targets: errors.targets, ..output }))
}

fn listen(stream: Option<impl Read>, show: &impl Fn(&str)) -> Failures {
    let mut failures = Failures::default();
    let Some(stream) = stream else { return failures };
    for line in BufReader::new(stream).split(b'\n').map_while(Result::ok) {
        let line = String::from_utf8_lossy(&line);
        failures.hear(&line);
        show(&line);
    }
    failures
}

#[cfg(test)]
mod tests {
    use super::*;

    fn heard_of(lines: &str) -> Failures {
        let mut failures = Failures::default();
        lines.lines().for_each(|line| failures.hear(line));
        failures
    }

    #[test]
    fn what_failed_is_heard() {
        let lines = "running 7 tests\ntest a::b ... FAILED\n\n---- a::b stdout ----\n\nthread 'a::b' panicked\nfailures:\n    a::b\n\
            error: test failed, to rerun pass `-p sandglass-egress --test main`\n\
            error: 1 target failed:\n    `-p sandglass-egress --test main`\n";
        let failures = heard_of(lines);
        let targets = vec!["-p sandglass-egress --test main".into()];
        assert_eq!(failures, Failures { tests: vec!["a::b".into()], targets, ran: 7 });
        assert!(failures.deserve_another());
    }

    #[test]
    fn only_a_few_that_are_known_deserve_another() {
        let target = "error: test failed, to rerun pass `-p a --lib`\n";
        assert!(!heard_of(target).deserve_another());
        assert!(!heard_of("error: could not compile `a`").deserve_another());
        let many: String = (0..4).map(|at| format!("---- t{at} stdout ----\n")).collect();
        assert!(!heard_of(&(many + target)).deserve_another());
        let two_programs_one_name = format!("---- t stdout ----\n{target}{target}");
        assert!(!heard_of(&two_programs_one_name).deserve_another());
    }

    #[test]
    fn a_second_failure_is_one_and_a_second_success_is_none() {
        let marks = std::env::temp_dir().join(format!("sandglass-chance-{}", std::process::id()));
        std::fs::create_dir_all(&marks).expect("a temporary folder");
        let script = "echo $* >> $MARKS/calls; \
            if test $1 != all; then echo running $RUNS test; exec test -z \"$STUBBORN\"; fi; echo '---- a stdout ----'; \
            echo 'error: test failed, to rerun pass `-p x --lib`' >&2; exit 1";
        let outcome = |stubborn: &str, runs: &str| {
            let command = |arguments: &[&str]| {
                let mut command = Command::new("/bin/sh");
                command.args(["-c", script, "sh"]).args(arguments);
                command.env("MARKS", &marks).env("STUBBORN", stubborn).env("RUNS", runs);
                command
            };
            // Not to the output of this test, in which the same lines would be heard.
            test_and_show(&["all"], command, |_| {})
        };
        assert!(outcome("", "1").is_ok());
        assert!(outcome("yes", "1").is_err());
        assert!(outcome("", "0").is_err(), "nothing was run");
        let calls = std::fs::read_to_string(marks.join("calls")).expect("calls");
        let again = "test -p x --lib -- --exact a";
        assert_eq!(calls.lines().collect::<Vec<_>>(), ["all", again, "all", again, "all", again]);
        let _ = std::fs::remove_dir_all(marks);
    }
}
