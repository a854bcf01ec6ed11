//! `sandglass renew`: moving the expiry.

use std::time::Duration;

use anyhow::Result;
use clap::Args;
use serde_json::json;

use crate::{Context, values};

/// Let a sandbox expire a given time from now
#[derive(Args, Debug)]
pub struct Renew {
    /// Id, unique id prefix, or name
    id: String,
    /// From now, e.g. 10m or 1h30m
    #[arg(long, value_name = "DURATION", value_parser = values::duration)]
    timeout: Duration,
}

impl Renew {
    pub async fn run(self, context: &Context) -> Result<u8> {
        let id = context.client.resolve(&self.id).await?;
        let expires = context.client.renew(&id, self.timeout).await?;
        if context.output.is_json() {
            context.output.json(&json!({ "id": id, "expiresAt": expires }))?;
        } else {
            context.output.line(&expires)?;
        }
        Ok(0)
    }
}
