//! `sandglass up`: from a repository to a sandbox that is ready to work in.
//!
//! Invariant: a sandbox that was interrupted on its way is removed; one that failed stays as long as the server keeps it, so that somebody
//! can look why.

use std::{path::PathBuf, time::Duration, time::Instant};

use anyhow::{Result, bail};
use clap::Args;
use serde_json::{Map, Value, json};

use super::run::{create, remove};
use crate::{
    Context,
    client::Sandbox,
    interrupts::Interrupts,
    output::note,
    values,
    workspace::{
        addresses::{self, EDITOR, SSH, Way},
        boot::{self, Outcome},
        journal::line,
        keys,
        progress::{Progress, took},
        recipe::BuildOptions,
    },
};

/// Make a sandbox from a repository: build its image if need be, boot it, and print the ways in
#[derive(Args, Debug)]
#[command(after_help = "\
A directory stands for its remote `origin` and the branch that is checked out; what is not pushed is not there. Progress and the
build's log go to standard error, the ways in to standard output. Exit codes: 0 it is ready; 1 it is not, with the reason and the
end of what was printed. Ctrl-C on the way removes the sandbox.
Examples:
  sandglass up https://github.com/acme/web.git#main
  sandglass up --recipe devcontainer --secret NPM_TOKEN --service ssh --service 'web:3000=npm run dev'")]
pub struct Up {
    /// Address of a repository, or a directory inside a git working tree
    #[arg(default_value = ".", value_name = "REPO|DIR")]
    repository: String,
    #[command(flatten)]
    build: BuildOptions,
    /// Take only an image of exactly this commit, not an older one that is brought up to date
    #[arg(long)]
    exact: bool,
    /// Build even if there is an image
    #[arg(long)]
    no_cache: bool,
    /// Movable name of the image
    #[arg(long, value_name = "TAG")]
    tag: Option<String>,
    /// Variable for everything in the sandbox; without =VALUE, its value here; may be repeated
    #[arg(short, long, value_name = "KEY[=VALUE]")]
    env: Vec<String>,
    /// File with a KEY=VALUE a line; may be repeated
    #[arg(long, value_name = "FILE")]
    env_file: Vec<PathBuf>,
    /// Remove the sandbox after this time
    #[arg(long, value_name = "DURATION", value_parser = values::duration)]
    timeout: Option<Duration>,
    /// What to keep running: ssh, terminal, code-server, or NAME[:PORT]=COMMAND; may be repeated
    /// [default: ssh and terminal, and code-server once `sandglass code` asks for it]
    #[arg(long, value_name = "SERVICE", value_parser = service)]
    service: Vec<Value>,
    /// File with a public key that may sign in; may be repeated [default: those in ~/.ssh and of the SSH agent]
    #[arg(long, value_name = "FILE")]
    ssh_key: Vec<PathBuf>,
    /// Port whose address is printed as well; may be repeated
    #[arg(short, long, value_name = "PORT", value_parser = clap::value_parser!(u16).range(1..))]
    port: Vec<u16>,
    /// Processors, e.g. 2 or 500m
    #[arg(long, value_name = "CPUS")]
    cpu: Option<String>,
    /// Memory, e.g. 512Mi or 2G
    #[arg(short, long, value_name = "BYTES")]
    memory: Option<String>,
    /// Name to find the sandbox by, kept as its metadata `name`
    #[arg(long)]
    name: Option<String>,
    /// Metadata; may be repeated
    #[arg(short, long, value_name = "KEY=VALUE", value_parser = values::pair)]
    label: Vec<(String, String)>,
    /// Print the sandbox's id as soon as there is one, and return
    #[arg(short, long)]
    detach: bool,
}

impl Up {
    pub async fn run(self, context: &Context) -> Result<u8> {
        let body = self.request(|name| std::env::var(name).ok())?;
        let mut interrupts = Interrupts::listen()?;
        let client = &context.client;
        let begun = Instant::now();
        let (sandbox, stopped) = create(client, &body, &mut interrupts).await?;
        let id = sandbox.id().to_owned();
        if let Some(interrupt) = stopped {
            remove(client, &id, &mut interrupts).await;
            return Ok(interrupt.exit_code());
        }
        if self.detach {
            if context.output.is_json() {
                context.output.json(&sandbox.0)?;
            } else {
                context.output.line(&id)?;
            }
            return Ok(0);
        }
        let progress = Progress::start();
        progress.line(&format!("sandbox {id} from {}", described(&body)));
        let outcome = boot::follow(client, sandbox, &progress, &mut interrupts).await;
        let sandbox = match outcome? {
            Outcome::Ready(sandbox) => sandbox,
            Outcome::Failed(sandbox) => {
                drop(progress);
                return failed(&sandbox);
            }
            Outcome::Interrupted(interrupt) => {
                drop(progress);
                note("interrupted; removing the sandbox");
                remove(client, &id, &mut interrupts).await;
                return Ok(interrupt.exit_code());
            }
        };
        progress.line(&line("ready", &took(begun.elapsed())));
        progress.doing("waiting for the services");
        let sandbox = tokio::select! {
            sandbox = boot::settled(client, *sandbox) => sandbox?,
            interrupt = interrupts.next() => {
                drop(progress);
                note(&format!("the sandbox {id} is ready and stays"));
                return Ok(interrupt.exit_code());
            }
        };
        drop(progress);
        let ways = addresses::ways(client, &sandbox, &self.port).await?;
        self.show(context, sandbox, &ways)?;
        Ok(0)
    }

    fn request(&self, variable: impl Fn(&str) -> Option<String> + Copy) -> Result<Value> {
        let source = self.build.source(&self.repository)?;
        let mut build = Map::new();
        if self.no_cache {
            build.insert("policy".into(), json!("always"));
        }
        if self.exact {
            build.insert("match".into(), json!("exact"));
        }
        build.extend(self.tag.as_ref().map(|tag| ("tag".into(), json!(tag))));
        build.extend(self.build.recipe.as_ref().map(|recipe| ("recipe".into(), recipe.clone())));
        build.extend(self.build.secrets(variable)?.map(|secrets| ("secrets".into(), secrets)));
        let limits = [("cpu", &self.cpu), ("memory", &self.memory)];
        let limits: Map<String, Value> = limits
            .into_iter()
            .filter_map(|(name, value)| Some((name.to_owned(), json!(value.as_ref()?))))
            .collect();
        let env = values::environment(&self.env_file, &self.env)?;
        let env: Map<String, Value> =
            env.into_iter().map(|(key, value)| (key, Value::String(value))).collect();
        let labels =
            self.label.iter().cloned().chain(self.name.clone().map(|name| ("name".to_owned(), name)));
        let metadata: Map<String, Value> = labels.map(|(key, value)| (key, Value::String(value))).collect();
        let mut body = json!({
            "repository": self.build.repository(&source, variable)?,
            "services": self.services()?,
        });
        for (key, map) in
            [("imageBuild", build), ("resourceLimits", limits), ("env", env), ("metadata", metadata)]
        {
            if !map.is_empty() {
                body[key] = Value::Object(map);
            }
        }
        if let Some(ttl) = self.timeout {
            body["timeout"] = json!(ttl.as_secs());
        }
        Ok(body)
    }

    fn services(&self) -> Result<Vec<Value>> {
        let mut services = self.service.clone();
        if services.is_empty() {
            // An editor nobody opens costs memory, and the image may be without one.
            services = vec![
                json!({ "name": SSH }),
                json!({ "name": "terminal" }),
                json!({ "name": EDITOR, "enabled": false }),
            ];
        }
        for service in &mut services {
            if service["name"] == SSH {
                let keys = keys::public_keys(&self.ssh_key)?;
                if !keys.is_empty() {
                    service["authorizedKeys"] = json!(keys);
                }
            }
        }
        Ok(services)
    }

    fn show(&self, context: &Context, mut sandbox: Sandbox, ways: &[Way]) -> Result<()> {
        if context.output.is_json() {
            sandbox.0["addresses"] = addresses::as_json(ways);
            return context.output.json(&sandbox.0);
        }
        let id = sandbox.id().to_owned();
        let mut fields = vec![("Id", id.clone())];
        if let Some(name) = sandbox.metadata("name") {
            fields.push(("Name", name.to_owned()));
        }
        let state = match sandbox.message() {
            "" => sandbox.reason().to_owned(),
            message => format!("{} ({message})", sandbox.reason()),
        };
        fields.push(("State", state));
        for way in ways {
            let named =
                if way.label == "App" { format!("{}  {}", way.text, way.name) } else { way.text.clone() };
            let text = match &way.remark {
                Some(remark) => format!("{named}  ({remark})"),
                None => named,
            };
            fields.push((way.label, text));
        }
        fields.push(("Stop", format!("sandglass rm {id}")));
        context.output.fields(&fields)
    }
}

/// The repository, as it was asked for.
fn described(body: &Value) -> String {
    let text = |name: &str| body["repository"][name].as_str().unwrap_or_default();
    if text("ref").is_empty() { text("url").to_owned() } else { format!("{} ({})", text("url"), text("ref")) }
}

fn failed(sandbox: &Sandbox) -> Result<u8> {
    let (why, tail) = boot::failure(sandbox);
    for line in &tail {
        note(&format!("  │ {line}"));
    }
    let id = sandbox.id();
    bail!(
        "the sandbox is not ready: {why}\n`sandglass events {id}` tells its history, `sandglass rm {id}` removes it"
    )
}

/// Reads a service: a name that is known, or a command of the user's.
fn service(text: &str) -> Result<Value, String> {
    let Some((name, command)) = text.split_once('=') else {
        return match text {
            SSH | EDITOR | "terminal" => Ok(json!({ "name": text })),
            _ => Err(format!("`{text}` needs a command; write it like {text}:3000='npm run dev'")),
        };
    };
    let (name, port) = match name.split_once(':') {
        Some((name, port)) => match port.parse::<u16>() {
            Ok(port) if port > 0 => (name, Some(port)),
            _ => return Err(format!("`{port}` is no port")),
        },
        None => (name, None),
    };
    if name.is_empty() || command.trim().is_empty() {
        return Err("write it like web:3000='npm run dev'".to_owned());
    }
    let mut service = json!({ "name": name, "command": ["/bin/sh", "-c", command] });
    if let Some(port) = port {
        service["port"] = json!(port);
    }
    Ok(service)
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        up: Up,
    }

    fn up(words: &[&str]) -> Up {
        Line::try_parse_from(["up"].iter().chain(words)).unwrap_or_else(|error| panic!("{error}")).up
    }

    #[test]
    fn the_request_says_what_was_asked_for() {
        let dir = tempfile::tempdir().unwrap();
        let key = dir.path().join("k.pub");
        std::fs::write(&key, "ssh-ed25519 AAAAK me\n").unwrap();
        let key = key.to_str().unwrap();
        let words = [
            "https://h/a/b.git#dev",
            "--recipe",
            "none:debian:12",
            "--exact",
            "--no-cache",
            "--secret",
            "S",
            "--timeout",
            "1h",
            "--env",
            "A=b",
            "--name",
            "n",
            "--label",
            "k=v",
            "--memory",
            "1Gi",
            "--ssh-key",
            key,
            "--service",
            "ssh",
            "--service",
            "web:3000=npm run dev",
        ];
        let body = up(&words).request(|name| (name == "S").then(|| "hush".to_owned())).unwrap();
        let expected = json!({
            "repository": { "url": "https://h/a/b.git", "ref": "dev" },
            "imageBuild": { "policy": "always", "match": "exact", "recipe": { "type": "none", "image": "debian:12" },
                            "secrets": { "S": "hush" } },
            "services": [
                { "name": "ssh", "authorizedKeys": ["ssh-ed25519 AAAAK me"] },
                { "name": "web", "port": 3000, "command": ["/bin/sh", "-c", "npm run dev"] },
            ],
            "resourceLimits": { "memory": "1Gi" },
            "env": { "A": "b" },
            "metadata": { "k": "v", "name": "n" },
            "timeout": 3600,
        });
        assert_eq!(body, expected);
        assert_eq!(described(&body), "https://h/a/b.git (dev)");
    }

    #[test]
    fn without_services_the_editor_waits_until_it_is_wanted() {
        let services = up(&["https://h/a"]).services().unwrap();
        let names: Vec<_> =
            services.iter().map(|service| (service["name"].as_str(), service["enabled"].as_bool())).collect();
        assert_eq!(
            names,
            [(Some("ssh"), None), (Some("terminal"), None), (Some("code-server"), Some(false))]
        );
    }

    #[test]
    fn services_of_ones_own_need_a_command() {
        for bad in ["web", "web:0=x", "web:x=y", "=x", "web="] {
            assert!(service(bad).is_err(), "{bad}");
        }
    }
}
