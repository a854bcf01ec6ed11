//! `sandglass events`: the history of a sandbox.

use anyhow::Result;
use clap::Args;
use serde_json::Value;

use crate::Context;

/// Show what happened to a sandbox
#[derive(Args, Debug)]
pub struct Events {
    /// Id, unique id prefix, or name
    id: String,
    /// At most so many
    #[arg(long, default_value_t = 200, value_parser = clap::value_parser!(u32).range(1..=500))]
    limit: u32,
}

impl Events {
    pub async fn run(self, context: &Context) -> Result<u8> {
        let id = context.client.resolve(&self.id).await?;
        let path = ["sandboxes", &id, "diagnostics", "events"];
        if context.output.is_json() {
            let text = context.client.text(&path, &[("scope", "all".to_owned())]).await?;
            context.output.json(&serde_json::from_str::<Value>(&text)?)?;
        } else {
            context.output.text(&context.client.text(&path, &[("limit", self.limit.to_string())]).await?)?;
        }
        Ok(0)
    }
}
