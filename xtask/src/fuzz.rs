//! Running the fuzz targets of `fuzz/` for a bounded time, with a stable compiler.
//!
//! The instrumentation is LLVM's and needs no unstable option: only sanitizers would, and there is little `unsafe` for them
//! to watch. What is found new stays in the target directory; a crash is kept in `fuzz/artifacts` and belongs, once
//! understood, into the corpus, which `cargo test` replays.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::process::run;
use crate::workspace::{Workspace, cargo};

const TARGETS: [&str; 6] = ["range", "multipart", "stream", "query", "envs", "kernel"];
const SECONDS: u64 = 60;
/// Named, so that build scripts and macros are built without the instrumentation.
const TRIPLE: &str = "x86_64-unknown-linux-gnu";
/// Counters at every edge, a table of their addresses and the operands of comparisons: what libFuzzer asks for.
const FLAGS: [&str; 10] = [
    "--cfg=fuzzing",
    "-Cpasses=sancov-module",
    "-Cllvm-args=-sanitizer-coverage-level=4",
    "-Cllvm-args=-sanitizer-coverage-inline-8bit-counters",
    "-Cllvm-args=-sanitizer-coverage-pc-table",
    "-Cllvm-args=-sanitizer-coverage-trace-compares",
    "-Cllvm-args=-simplifycfg-branch-fold-threshold=0",
    "-Clink-dead-code",
    "-Ccodegen-units=1",
    "-Cdebug-assertions",
];

/// `[target] [--seconds N]`.
pub(crate) fn run_targets(workspace: &Workspace, arguments: &[String]) -> Result<()> {
    let (mut seconds, mut wanted) = (SECONDS, Vec::new());
    let mut arguments = arguments.iter();
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--seconds" => {
                let value = arguments.next().context("--seconds needs a number")?;
                seconds = value.parse().with_context(|| format!("failed to read {value:?} as seconds"))?;
            }
            name if TARGETS.contains(&name) => wanted.push(name),
            other => bail!("no target {other:?}; there are {}", TARGETS.join(", ")),
        }
    }
    if wanted.is_empty() {
        wanted.extend(TARGETS);
    }
    let folder = workspace.root.join("fuzz");
    let build = workspace.target.join("fuzz");
    run(Command::new(cargo())
        .args(["build", "--release", "--bins", "--target", TRIPLE, "--target-dir"])
        .arg(&build)
        // Between the flags is the one character that cannot be in one.
        .env("CARGO_ENCODED_RUSTFLAGS", FLAGS.join("\u{1f}"))
        .current_dir(&folder))?;
    for name in wanted {
        fuzz(&folder, &build, name, seconds)?;
    }
    Ok(())
}

fn fuzz(folder: &Path, build: &Path, name: &str, seconds: u64) -> Result<()> {
    let found = build.join("corpus").join(name);
    let artifacts = folder.join("artifacts").join(name);
    for made in [&found, &artifacts] {
        fs::create_dir_all(made).with_context(|| format!("failed to create {}", made.display()))?;
    }
    run(Command::new(build.join(TRIPLE).join("release").join(name))
        .args([&found, &folder.join("corpus").join(name)])
        .arg(format!("-max_total_time={seconds}"))
        .arg(format!("-artifact_prefix={}/", artifacts.display()))
        .args(["-max_len=4096", "-timeout=10", "-rss_limit_mb=1024", "-print_final_stats=1", "-verbosity=1"]))
}
