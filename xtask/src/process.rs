//! Running programs: echoed, waited for, and reported with the time they took.

use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::{Context, Result, bail};

/// Runs with our own standard output, so that test runners' summaries stay readable where they were printed.
pub(crate) fn run(command: &mut Command) -> Result<()> {
    println!("$ {}", shown(command));
    let status = command
        .stdin(Stdio::null())
        .status()
        .with_context(|| format!("failed to start {}", command.get_program().display()))?;
    if !status.success() {
        bail!("{} ended with {status}", shown(command));
    }
    Ok(())
}

/// Runs and returns standard output; standard error stays visible.
pub(crate) fn capture(command: &mut Command) -> Result<String> {
    let output = command
        .stdin(Stdio::null())
        .stderr(Stdio::inherit())
        .output()
        .with_context(|| format!("failed to start {}", command.get_program().display()))?;
    if !output.status.success() {
        bail!("{} ended with {}", shown(command), output.status);
    }
    String::from_utf8(output.stdout).context("output is not UTF-8")
}

/// Whether a program can be started at all and says yes.
pub(crate) fn succeeds(command: &mut Command) -> bool {
    command
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .is_ok_and(|status| status.success())
}

/// The program and its arguments, as one would type them.
pub(crate) fn shown(command: &Command) -> String {
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    words.map(|word| word.to_string_lossy().into_owned()).collect::<Vec<_>>().join(" ")
}

/// Names each step as it starts and lists the times at the end: the first place to look when CI gets slow.
pub(crate) struct Report {
    begun: Instant,
    steps: Vec<(String, f64)>,
}

impl Report {
    pub(crate) fn start() -> Self {
        Self { begun: Instant::now(), steps: Vec::new() }
    }

    pub(crate) fn step<T>(&mut self, name: &'static str, body: impl FnOnce() -> Result<T>) -> Result<T> {
        println!("\n==> {name}");
        let begun = Instant::now();
        let made = body().with_context(|| format!("{name} failed"))?;
        self.steps.push((name.into(), begun.elapsed().as_secs_f64()));
        Ok(made)
    }

    /// What the last step was made of, with the seconds of each; they overlap.
    pub(crate) fn within(&mut self, parts: Vec<(&'static str, f64)>) {
        self.steps.extend(parts.into_iter().map(|(name, seconds)| (format!("  {name}"), seconds)));
    }

    pub(crate) fn finish(self) {
        println!("\n==> done in {:.0} s", self.begun.elapsed().as_secs_f64());
        for (name, seconds) in self.steps {
            println!("    {name:<20} {seconds:>7.1} s");
        }
    }
}
