//! `sandglass ps`: the list of sandboxes.

use anyhow::Result;
use clap::Args;
use serde_json::Value;

use crate::{
    Context,
    client::Sandbox,
    output::{relative, shortened},
    values,
};

/// Characters of an id in the table; enough to be unique in practice and accepted everywhere.
const SHORT_ID: usize = 12;

/// List sandboxes, in whatever state they are
#[derive(Args, Debug)]
#[command(visible_alias = "ls")]
pub struct Ps {
    /// Only sandboxes in this state, e.g. Running; may be repeated
    #[arg(long, value_name = "STATE")]
    state: Vec<String>,
    /// Only sandboxes with this metadata; may be repeated
    #[arg(long, value_name = "KEY=VALUE", value_parser = values::pair)]
    filter: Vec<(String, String)>,
    /// Print full ids only
    #[arg(short, long)]
    quiet: bool,
    /// Do not shorten ids and commands
    #[arg(long)]
    no_trunc: bool,
}

impl Ps {
    pub async fn run(self, context: &Context) -> Result<u8> {
        let all = context.client.list(&self.state, &self.filter).await?;
        if self.quiet {
            let ids: Vec<&str> = all.iter().map(Sandbox::id).collect();
            if context.output.is_json() {
                context.output.json(&ids)?;
            } else {
                context.output.text(&ids.join("\n"))?;
            }
        } else if context.output.is_json() {
            context.output.json(&all.into_iter().map(|sandbox| sandbox.0).collect::<Vec<_>>())?;
        } else {
            let now = jiff::Timestamp::now();
            let rows: Vec<_> = all.iter().map(|sandbox| self.row(sandbox, now)).collect();
            context
                .output
                .table(&["ID", "IMAGE", "COMMAND", "STATE", "PHASE", "CREATED", "EXPIRES", "NAME"], &rows)?;
        }
        Ok(0)
    }

    fn row(&self, sandbox: &Sandbox, now: jiff::Timestamp) -> Vec<String> {
        let cut = |text: &str, width| if self.no_trunc { text.to_owned() } else { shortened(text, width) };
        let id =
            if self.no_trunc { sandbox.id() } else { sandbox.id().get(..SHORT_ID).unwrap_or(sandbox.id()) };
        let expires = match sandbox.expires_at() {
            "" => "never".to_owned(),
            at => relative(at, now),
        };
        vec![
            id.to_owned(),
            cut(&origin(sandbox), 40),
            cut(&command_line(sandbox), 30),
            sandbox.state().to_owned(),
            phase(sandbox),
            relative(sandbox.created_at(), now),
            expires,
            sandbox.metadata("name").unwrap_or("-").to_owned(),
        ]
    }
}

/// The image, or the repository that one was made of.
pub fn origin(sandbox: &Sandbox) -> String {
    let repository = sandbox.0.pointer("/source/repositories/0");
    let text = |name: &str| repository.and_then(|one| one.get(name)).and_then(Value::as_str);
    match (text("url"), text("ref")) {
        (None, _) => sandbox.image().to_owned(),
        (Some(url), None) => url.to_owned(),
        (Some(url), Some(reference)) => format!("{url}#{reference}"),
    }
}

/// How far a sandbox is that starts, or what is not well with one that runs; `-` when there is nothing to say.
fn phase(sandbox: &Sandbox) -> String {
    let text = |pointer: &str| sandbox.0.pointer(pointer).and_then(Value::as_str).unwrap_or_default();
    let told = match (sandbox.state(), text("/progress/phase")) {
        ("Pending", "") => text("/progress/stage"),
        ("Pending", phase) => phase,
        (_, _) if sandbox.0.get("source").is_some() => sandbox.reason(),
        _ => "",
    };
    if told.is_empty() { "-".to_owned() } else { told.to_owned() }
}

/// The entrypoint on one line, `-` when there is none.
pub fn command_line(sandbox: &Sandbox) -> String {
    let words: Vec<&str> = sandbox
        .0
        .get("entrypoint")
        .and_then(Value::as_array)
        .map(|list| list.iter().filter_map(Value::as_str).collect())
        .unwrap_or_default();
    if words.is_empty() { "-".to_owned() } else { words.join(" ") }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn workspaces_show_their_repository_and_how_far_they_are() {
        let mut sandbox = Sandbox(json!({
            "id": "i", "status": { "state": "Pending", "reason": "booting" },
            "source": { "type": "repository", "repositories": [{ "url": "https://h/a", "ref": "main" }] },
            "progress": { "stage": "booting", "phase": "setup" },
        }));
        assert_eq!((origin(&sandbox).as_str(), phase(&sandbox).as_str()), ("https://h/a#main", "setup"));
        sandbox.0["progress"] = json!({ "stage": "image_building" });
        assert_eq!(phase(&sandbox), "image_building");
        sandbox.0["status"] = json!({ "state": "Running", "reason": "degraded" });
        assert_eq!(phase(&sandbox), "degraded");
        let plain = Sandbox(
            json!({ "image": { "uri": "a:1" }, "status": { "state": "Running", "reason": "CONTAINER_RUNNING" } }),
        );
        assert_eq!((origin(&plain).as_str(), phase(&plain).as_str()), ("a:1", "-"));
    }
}
