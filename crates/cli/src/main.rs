//! The command line of Sandglass: client commands, and `serve` for the control plane itself.
//!
//! Owns argument parsing and exit codes. Not the behaviour of commands: each has a file under `commands`.

mod agent;
mod client;
mod commands;
mod events;
mod execution;
mod follow_logs;
mod interrupts;
mod lines;
mod mcp;
mod output;
mod profile;
mod service_log;
mod sink;
mod sse;
mod values;
mod workspace;

use std::process::ExitCode;

use anyhow::Result;
use clap::{ColorChoice, CommandFactory, FromArgMatches, Parser, error::ErrorKind};

use crate::{
    client::Client,
    commands::Command,
    output::{CLOSED_PIPE, Format, Output, OutputClosed, note},
    profile::{Connection, Profile},
};

/// Blocks are made on one thread and given back on another with every request; the system's allocator makes them wait for each other.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Sandboxes for code you do not trust.
#[derive(Parser, Debug)]
#[command(name = "sandglass", version, arg_required_else_help = true, disable_help_subcommand = true)]
struct Cli {
    #[command(flatten)]
    connection: Connection,
    /// How to print results
    #[arg(short, long, global = true, value_enum, default_value_t, value_name = "FORMAT")]
    output: Format,
    /// Print without colour, as NO_COLOR=1 does
    #[arg(long, global = true)]
    no_color: bool,
    #[command(subcommand)]
    command: Command,
}

/// What every client command gets.
#[derive(Debug, Clone)]
pub struct Context {
    pub client: Client,
    pub output: Output,
}

/// The grammar, for shell completions.
pub fn grammar() -> clap::Command {
    Cli::command()
}

fn main() -> ExitCode {
    let cli = match parse() {
        Ok(cli) => cli,
        Err(code) => return ExitCode::from(code),
    };
    let ours = cli.command.failure_code();
    match execute(cli) {
        Ok(code) => ExitCode::from(code),
        Err(error) if error.is::<OutputClosed>() => ExitCode::from(CLOSED_PIPE),
        Err(error) => {
            report(&error);
            ExitCode::from(ours)
        }
    }
}

fn parse() -> Result<Cli, u8> {
    let mut arguments: Vec<_> = std::env::args_os().collect();
    // Its flags are not this grammar's.
    if arguments.get(1).is_some_and(|command| command == "ingress") {
        arguments.insert(2, "--".into());
    }
    let own = arguments.iter().position(|a| a == "--").unwrap_or(arguments.len());
    let plain = output::no_color_variable() || arguments[..own].iter().any(|a| a == "--no-color");
    let choice = if plain { ColorChoice::Never } else { ColorChoice::Auto };
    if arguments.is_empty() {
        arguments.push("sandglass".into());
    }
    let parsed = Cli::command()
        .color(choice)
        .try_get_matches_from(&arguments)
        .and_then(|matches| Cli::from_arg_matches(&matches));
    parsed.map_err(|error| {
        // A closed pipe is no reason to complain about usage.
        let _ = error.print();
        match error.kind() {
            ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => 0,
            // The exit codes below 125 belong to the command that runs in the sandbox.
            _ if arguments[..own].iter().any(|a| a == "run" || a == "exec") => execution::OUR_FAILURE,
            _ => 2,
        }
    })
}

fn execute(cli: Cli) -> Result<u8> {
    let output = Output::new(cli.output, cli.no_color);
    let command = match cli.command.offline(output)? {
        commands::Step::Done(code) => return Ok(code),
        commands::Step::NeedsServer(command) => command,
    };
    let profile = Profile::resolve(&cli.connection, |name| std::env::var(name).ok())?;
    let context = Context { client: Client::new(profile)?, output };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let result = runtime.block_on(command.run(&context));
    // Reads of standard input may be stuck; they end with the process.
    runtime.shutdown_background();
    result
}

/// Prints an error with its causes, each only when it adds something.
fn report(error: &anyhow::Error) {
    let mut text = String::from("error: ");
    let mut last = String::new();
    for (index, cause) in error.chain().enumerate() {
        let cause = cause.to_string();
        if index > 0 && last.contains(&cause) {
            continue;
        }
        if index > 0 {
            text.push_str(": ");
        }
        text.push_str(&cause);
        last = cause;
    }
    for line in text.lines() {
        note(line);
    }
}
