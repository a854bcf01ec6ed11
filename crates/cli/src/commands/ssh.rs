//! `sandglass ssh` and `sandglass ssh-config`: the system's `ssh`, led into a sandbox through the server.

use std::os::unix::process::CommandExt as _;

use anyhow::{Result, ensure};
use clap::Args;
use serde_json::json;

use crate::{
    Context,
    interrupts::Interrupts,
    output::shortened,
    workspace::{
        addresses::SSH,
        ssh::{LOGIN, Route},
        tunnel::Tunnel,
    },
};

/// What `ssh` itself exits with when it fails; other codes belong to what runs in the sandbox.
pub const FAILURE: u8 = 255;

/// Sign in to a sandbox, or run a command there, with the system's ssh
#[derive(Args, Debug)]
#[command(after_help = "\
The connection goes through the server, so nothing has to be reachable but that. A certificate of a few minutes lets you in, made for a
key that is kept in ~/.local/state/sandglass/ssh; the sandbox's host key is the one that the server names. Exit codes are those of ssh.
Examples:
  sandglass ssh web                              a shell
  sandglass ssh -L 3000:localhost:3000 web       with a port of the sandbox on this machine
  rsync -e 'sandglass ssh' -a ./ web:/workspace/ other programs that take a command in place of ssh
  sandglass ssh-config web >> ~/.ssh/config      for everything else: sftp, scp, editors")]
pub struct Ssh {
    /// Id, unique id prefix, or name
    id: String,
    /// Command for the sandbox's shell, as ssh takes it; a shell of its own without one
    #[arg(trailing_var_arg = true, value_name = "COMMAND")]
    command: Vec<String>,
    /// Account in the sandbox
    #[arg(short, long, default_value = LOGIN)]
    login: String,
    /// Forward a port of this machine: [ADDRESS:]PORT:HOST:PORT; may be repeated
    #[arg(short = 'L', long, value_name = "FORWARD")]
    forward: Vec<String>,
    /// Forward a port of the sandbox: [ADDRESS:]PORT:HOST:PORT; may be repeated
    #[arg(short = 'R', long, value_name = "FORWARD")]
    reverse: Vec<String>,
    /// Another option of ssh, e.g. --option ServerAliveInterval=30; may be repeated
    #[arg(long, value_name = "NAME=VALUE")]
    option: Vec<String>,
    /// The service that is the SSH server
    #[arg(long, default_value = SSH)]
    service: String,
    /// Only carry the connection between standard input and output, as a ProxyCommand does
    #[arg(long, conflicts_with_all = ["command", "login", "forward", "reverse", "option", "refresh"])]
    proxy: bool,
    /// Only get a new certificate, as `ssh-config` makes ssh do
    #[arg(long, conflicts_with_all = ["command", "login", "forward", "reverse", "option"])]
    refresh: bool,
}

impl Ssh {
    pub async fn run(self, context: &Context) -> Result<u8> {
        let client = &context.client;
        let id = client.resolve(&self.id).await?;
        if self.proxy {
            let mut interrupts = Interrupts::listen()?;
            let tunnel = Tunnel::open(client, &id, &self.service).await?;
            return tokio::select! {
                carried = tunnel.carry(tokio::io::stdin(), tokio::io::stdout()) => carried.map(|()| 0),
                interrupt = interrupts.next() => Ok(interrupt.exit_code()),
            };
        }
        let route = Route::new(client, &id, &self.service, &self.login)?;
        route.refresh(client).await?;
        if self.refresh {
            return Ok(0);
        }
        let mut command = route.command();
        for (flag, values) in [("-L", &self.forward), ("-R", &self.reverse), ("-o", &self.option)] {
            for value in values {
                command.arg(flag).arg(value);
            }
        }
        command.arg("--").arg(&id).args(&self.command);
        // Only a failure returns: the terminal, the signals and the exit code are ssh's from here on.
        let error = command.exec();
        Err(anyhow::Error::new(error).context("cannot run `ssh`; install OpenSSH's client"))
    }
}

/// Print a block for ~/.ssh/config, by which ssh, sftp, rsync and editors get into a sandbox
#[derive(Args, Debug)]
pub struct SshConfig {
    /// Id, unique id prefix, or name
    id: String,
    /// Name that the block is for [default: the sandbox's name, or sandglass- and the beginning of its id]
    #[arg(long, value_name = "NAME")]
    host: Option<String>,
    /// Account in the sandbox
    #[arg(short, long, default_value = LOGIN)]
    login: String,
    /// The service that is the SSH server
    #[arg(long, default_value = SSH)]
    service: String,
}

impl SshConfig {
    pub async fn run(self, context: &Context) -> Result<u8> {
        let client = &context.client;
        let sandbox = client.get(&client.resolve(&self.id).await?).await?;
        let short = sandbox.id().get(..8).unwrap_or(sandbox.id());
        let host = match (self.host, sandbox.metadata("name")) {
            (Some(host), _) => host,
            (None, Some(name)) if is_host(name) => name.to_owned(),
            (None, _) => format!("sandglass-{short}"),
        };
        ensure!(
            is_host(&host),
            "{} is no name for a host: use letters, digits, `.`, `_` and `-`",
            shortened(&host, 40)
        );
        let route = Route::new(client, sandbox.id(), &self.service, &self.login)?;
        let text = route.configuration(&host);
        if context.output.is_json() {
            context.output.json(&json!({ "host": host, "configuration": text }))?;
        } else {
            context.output.text(&text)?;
        }
        Ok(0)
    }
}

fn is_host(name: &str) -> bool {
    let plain = |b: u8| b.is_ascii_alphanumeric() || b"._-".contains(&b);
    !name.is_empty() && !name.starts_with('-') && name.bytes().all(plain)
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        ssh: Ssh,
    }

    #[test]
    fn what_follows_the_sandbox_is_for_its_shell() {
        let words = ["ssh", "-l", "node", "-L", "1:h:2", "web", "rsync", "--server", "-e.Lsf", "."];
        let ssh = Line::try_parse_from(words).unwrap_or_else(|error| panic!("{error}")).ssh;
        assert_eq!((ssh.id.as_str(), ssh.login.as_str()), ("web", "node"));
        assert_eq!(ssh.command, ["rsync", "--server", "-e.Lsf", "."]);
        assert!(Line::try_parse_from(["ssh", "--proxy", "web", "ls"]).is_err());
        assert!(
            Line::try_parse_from(["ssh", "--proxy", "--service", "ssh", "--", "web"])
                .is_ok_and(|line| line.ssh.proxy)
        );
    }

    #[test]
    fn names_of_hosts_are_plain() {
        assert!(is_host("web-1.x") && !is_host("a b") && !is_host("-a") && !is_host("a\"b") && !is_host(""));
    }
}
