//! `sandglass pause` and `sandglass resume`.

use anyhow::Result;
use clap::Args;

use crate::Context;

/// Freeze every process of sandboxes; their time to live goes on
#[derive(Args, Debug)]
pub struct Pause {
    /// Ids, unique id prefixes, or names
    #[arg(required = true, value_name = "ID")]
    ids: Vec<String>,
}

/// Let paused sandboxes go on
#[derive(Args, Debug)]
pub struct Resume {
    /// Ids, unique id prefixes, or names
    #[arg(required = true, value_name = "ID")]
    ids: Vec<String>,
}

impl Pause {
    pub async fn run(self, context: &Context) -> Result<u8> {
        ask(context, &self.ids, "pause").await
    }
}

impl Resume {
    pub async fn run(self, context: &Context) -> Result<u8> {
        ask(context, &self.ids, "resume").await
    }
}

async fn ask(context: &Context, references: &[String], verb: &str) -> Result<u8> {
    let mut done = Vec::new();
    for reference in references {
        let id = context.client.resolve(reference).await?;
        context.client.ask(&id, verb).await?;
        if !context.output.is_json() {
            context.output.line(&id)?;
        }
        done.push(id);
    }
    if context.output.is_json() {
        context.output.json(&done)?;
    }
    Ok(0)
}
