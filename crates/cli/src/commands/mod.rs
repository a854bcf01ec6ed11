//! All commands, one file each.

mod build;
mod code;
mod completions;
mod config;
mod cp;
mod demo;
mod doctor;
mod endpoint;
mod events;
mod exec;
mod image;
mod ingress;
mod inspect;
mod logs;
mod mcp;
mod pause;
mod ps;
mod renew;
mod rm;
mod run;
mod serve;
mod ssh;
mod store;
mod transfer;
mod up;

use anyhow::Result;
use clap::Subcommand;

use crate::{Context, execution::OUR_FAILURE, output::Output};

/// What can be asked for.
#[derive(Subcommand, Debug)]
pub enum Command {
    Run(run::Run),
    Up(up::Up),
    Ps(ps::Ps),
    Inspect(inspect::Inspect),
    Exec(exec::Exec),
    Logs(logs::Logs),
    Cp(cp::Cp),
    Rm(rm::Rm),
    Renew(renew::Renew),
    Pause(pause::Pause),
    Resume(pause::Resume),
    Endpoint(endpoint::EndpointOf),
    Events(events::Events),
    Ssh(ssh::Ssh),
    SshConfig(ssh::SshConfig),
    Code(code::Code),
    Build(build::Build),
    Image(image::Image),
    Mcp(mcp::Mcp),
    Serve(serve::Serve),
    Ingress(ingress::Ingress),
    Demo(demo::Demo),
    Doctor(doctor::Doctor),
    Config(config::Config),
    Store(store::Store),
    Completions(completions::Completions),
}

/// Where a command goes on.
#[derive(Debug)]
pub enum Step {
    Done(u8),
    NeedsServer(Box<Command>),
}

impl Command {
    /// Exit code when the command fails for a reason of ours.
    pub fn failure_code(&self) -> u8 {
        match self {
            Self::Run(_) | Self::Exec(_) => OUR_FAILURE,
            Self::Ssh(_) => ssh::FAILURE,
            _ => 1,
        }
    }

    /// Runs the commands that need no server and no asynchronous runtime of ours.
    pub fn offline(self, output: Output) -> Result<Step> {
        match self {
            Self::Completions(command) => command.run().map(Step::Done),
            Self::Serve(command) => command.run().map(Step::Done),
            Self::Ingress(command) => command.run().map(Step::Done),
            Self::Demo(command) => command.run(output).map(Step::Done),
            Self::Doctor(command) => command.run(output).map(Step::Done),
            Self::Config(command) => command.run(output).map(Step::Done),
            Self::Store(command) => command.run(output).map(Step::Done),
            other => Ok(Step::NeedsServer(Box::new(other))),
        }
    }

    /// Runs a client command.
    pub async fn run(self, context: &Context) -> Result<u8> {
        match self {
            Self::Run(command) => command.run(context).await,
            Self::Up(command) => command.run(context).await,
            Self::Ps(command) => command.run(context).await,
            Self::Inspect(command) => command.run(context).await,
            Self::Exec(command) => command.run(context).await,
            Self::Logs(command) => command.run(context).await,
            Self::Cp(command) => command.run(context).await,
            Self::Rm(command) => command.run(context).await,
            Self::Renew(command) => command.run(context).await,
            Self::Pause(command) => command.run(context).await,
            Self::Resume(command) => command.run(context).await,
            Self::Endpoint(command) => command.run(context).await,
            Self::Events(command) => command.run(context).await,
            Self::Ssh(command) => command.run(context).await,
            Self::SshConfig(command) => command.run(context).await,
            Self::Code(command) => command.run(context).await,
            Self::Build(command) => command.run(context).await,
            Self::Image(command) => command.run(context).await,
            Self::Mcp(command) => command.run(context).await,
            Self::Completions(_)
            | Self::Serve(_)
            | Self::Ingress(_)
            | Self::Demo(_)
            | Self::Doctor(_)
            | Self::Config(_)
            | Self::Store(_) => {
                unreachable!("commands without a server were run before")
            }
        }
    }
}
