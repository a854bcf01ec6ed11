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
                .table(&["ID", "IMAGE", "COMMAND", "STATE", "CREATED", "EXPIRES", "NAME"], &rows)?;
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
            cut(sandbox.image(), 40),
            cut(&command_line(sandbox), 30),
            sandbox.state().to_owned(),
            relative(sandbox.created_at(), now),
            expires,
            sandbox.metadata("name").unwrap_or("-").to_owned(),
        ]
    }
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
