//! `sandglass code`: the editor of a sandbox, in the browser.

use std::{
    process::{Command, Stdio},
    time::Duration,
};

use anyhow::{Context as _, Result, bail, ensure};
use clap::Args;
use reqwest::Method;
use serde_json::json;
use tokio::time::sleep;

use crate::{
    Context,
    client::{Client, Sandbox},
    interrupts::Interrupts,
    output::note,
    workspace::addresses::{self, EDITOR},
};

/// How often it is looked whether the editor is ready.
const PAUSE: Duration = Duration::from_millis(250);

/// Print an address that opens a sandbox's editor in a browser for the next minutes
#[derive(Args, Debug)]
#[command(after_help = "\
An editor that was not started yet is. Whoever has the address gets in until it expires, and stays in; pass it on with care.")]
pub struct Code {
    /// Id, unique id prefix, or name
    id: String,
    /// Open the address as well
    #[arg(long)]
    open: bool,
    /// Another service with a port, e.g. one of your own
    #[arg(long, default_value = EDITOR)]
    service: String,
}

impl Code {
    pub async fn run(self, context: &Context) -> Result<u8> {
        let client = &context.client;
        let id = client.resolve(&self.id).await?;
        let mut interrupts = Interrupts::listen()?;
        tokio::select! {
            ready = self.until_ready(client, &id) => ready?,
            interrupt = interrupts.next() => return Ok(interrupt.exit_code()),
        }
        let access = addresses::access(client, &id, &self.service, &json!({})).await?;
        let url = addresses::url_of(&access).context("the server gave no address to open")?;
        if self.open {
            open(url)?;
        }
        if context.output.is_json() {
            context.output.json(&access)?;
        } else {
            context.output.line(url)?;
        }
        Ok(0)
    }

    /// Waits until the service answers; one that is switched off is switched on.
    async fn until_ready(&self, client: &Client, id: &str) -> Result<()> {
        let name = self.service.as_str();
        let mut switched = false;
        loop {
            let sandbox = client.get(id).await?;
            match judge(&sandbox, name)? {
                Found::Ready => return Ok(()),
                Found::Starting => {}
                // A switch takes a moment to be seen.
                Found::Off if switched => {}
                Found::Off => {
                    note(&format!("starting {name}"));
                    let path = ["sandboxes", id, "services", name];
                    client.call(Method::PUT, &path, Some(&json!({ "enabled": true }))).await?;
                    switched = true;
                }
            }
            sleep(PAUSE).await;
        }
    }
}

/// What there is of a service.
#[derive(Debug, PartialEq, Eq)]
enum Found {
    Ready,
    Starting,
    Off,
}

fn judge(sandbox: &Sandbox, name: &str) -> Result<Found> {
    let state = sandbox.state();
    ensure!(
        !sandbox.is_over() && !matches!(state, "Paused" | "Pausing"),
        "the sandbox is {state}; it has to run"
    );
    let services = addresses::services(sandbox);
    let Some(service) = services.iter().find(|service| service.name() == name) else {
        let names: Vec<&str> = services.iter().map(|service| service.name()).collect();
        let there = if names.is_empty() {
            "it has no services".to_owned()
        } else {
            format!("it has {}", names.join(", "))
        };
        bail!("the sandbox has no service {name} ({there}); make one with `sandglass up --service {name}`")
    };
    Ok(match service.state() {
        "Ready" => Found::Ready,
        "Disabled" | "Stopped" => Found::Off,
        "Failed" => {
            let why = match service.last_error() {
                "" => "it failed",
                error => error,
            };
            bail!("{name} does not run: {why}")
        }
        _ => Found::Starting,
    })
}

/// Hands an address to the user's browser.
fn open(url: &str) -> Result<()> {
    let chosen = std::env::var("BROWSER").ok().filter(|browser| !browser.is_empty());
    let program = chosen.as_deref().unwrap_or("xdg-open");
    Command::new(program)
        .arg(url)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .spawn()
        .with_context(|| format!("cannot run {program}; set BROWSER, or open the address yourself: {url}"))?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    fn with(state: &str, services: Value) -> Sandbox {
        Sandbox(json!({ "id": "i", "status": { "state": state }, "services": services }))
    }

    #[test]
    fn only_a_service_that_can_become_ready_is_waited_for() {
        let of = |state: &str| {
            judge(
                &with("Running", json!([{ "name": "code-server", "state": state, "lastError": "gone" }])),
                EDITOR,
            )
        };
        assert_eq!(of("Ready").unwrap(), Found::Ready);
        assert_eq!(of("Restarting").unwrap(), Found::Starting);
        assert_eq!(of("Disabled").unwrap(), Found::Off);
        assert!(of("Failed").unwrap_err().to_string().contains("gone"));
        let other = with("Running", json!([{ "name": "ssh", "state": "Ready" }]));
        assert!(judge(&other, EDITOR).unwrap_err().to_string().contains("--service code-server"));
        assert!(judge(&with("Failed", json!([])), EDITOR).is_err());
    }
}
