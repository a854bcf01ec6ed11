//! Developer commands: what CI runs, and the pieces of it one at a time.
//!
//! Owns the order of the checks and the environments they run in. It knows no crate's insides: everything is driven
//! through `cargo`, `pytest` and the built binary. Every process that it starts has ended when it returns.

mod bench;
mod checks;
mod deps;
mod e2e;
mod fuzz;
mod postgres;
mod process;
mod python;
mod second_chance;
mod setup;
mod suites;
mod workspace;

use std::process::ExitCode;

use anyhow::{Result, bail};
use workspace::Workspace;

const USAGE: &str = "\
usage: cargo xtask COMMAND

  setup                            install what the tests need (Debian, root)
  test                             setup, fmt, deps, clippy; then side by side cargo test, e2e, conformance, restart
  ci                               the same, with the lock file as it is
  deps                             the dependency rules, from cargo metadata
  unit [--locked]                  cargo test beside a private Docker engine and a private PostgreSQL
  e2e [FILTER | PYTEST OPTIONS]    the published clients against the built binary
  conformance [PYTEST OPTIONS]     the conformance cases against ours and the reference
  restart [--rounds N] [--seed S] [--runtime docker]
                                   kill the server at random moments, check what is left
  fuzz [TARGET] [--seconds N]      the agent's parsers against random input, a minute each
  bench [docker|agent|proxy|egress|workspace] [--quick]
                                   measure beside the reference server and Docker, or one part alone";

/// Errors are printed as one chain of causes: a backtrace of this program explains nothing.
fn main() -> ExitCode {
    match dispatch() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn dispatch() -> Result<()> {
    let mut arguments = std::env::args().skip(1);
    let command = arguments.next().unwrap_or_default();
    let rest: Vec<String> = arguments.collect();
    let workspace = Workspace::find()?;
    match command.as_str() {
        "setup" => setup::run(),
        "test" => test(&workspace, checks::Mode::Local),
        "ci" => test(&workspace, checks::Mode::Ci),
        "deps" => deps::run(&workspace),
        "unit" => {
            let mode = if rest.iter().any(|word| word == "--locked") {
                checks::Mode::Ci
            } else {
                checks::Mode::Local
            };
            checks::unit_tests(&workspace, mode)
        }
        "e2e" => e2e::clients(&workspace, &rest),
        "conformance" => e2e::conformance(&workspace, &rest),
        "restart" => e2e::restart(&workspace, &rest),
        "fuzz" => fuzz::run_targets(&workspace, &rest),
        "bench" => bench::run_benchmark(&workspace, &rest),
        "help" | "--help" | "-h" => {
            println!("{USAGE}");
            Ok(())
        }
        other => bail!("no command {other:?}\n\n{USAGE}"),
    }
}

/// Cheap checks first, so that a slip is reported in a minute and not after the suites. What compiles has the processors to itself.
fn test(workspace: &Workspace, mode: checks::Mode) -> Result<()> {
    let mut report = process::Report::start();
    report.step("setup", setup::run)?;
    report.step("format", || checks::format(workspace))?;
    report.step("dependency rules", || deps::run(workspace))?;
    report.step("clippy, installs", || {
        // One waits for registries while the other compiles.
        std::thread::scope(|scope| {
            let installed = scope.spawn(|| e2e::environments(workspace));
            checks::clippy(workspace, mode)?;
            installed.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    })?;
    let binary = report.step("build", || {
        checks::build_tests(workspace, mode)?;
        e2e::binary(workspace)
    })?;
    let taken = report.step("suites", || suites::run(workspace, mode, &binary))?;
    report.within(taken);
    report.finish();
    Ok(())
}
