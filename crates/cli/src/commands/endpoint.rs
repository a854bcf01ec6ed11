//! `sandglass endpoint`: where a port of a sandbox is reached.

use anyhow::Result;
use clap::Args;

use crate::{Context, client::Route};

/// Show the address of a port of a sandbox, and the headers to send there
#[derive(Args, Debug)]
#[command(name = "endpoint")]
pub struct EndpointOf {
    /// Id, unique id prefix, or name
    id: String,
    /// Port inside the sandbox
    #[arg(value_parser = clap::value_parser!(u16).range(1..))]
    port: u16,
    /// An address that leads through the server
    #[arg(long)]
    proxy: bool,
}

impl EndpointOf {
    pub async fn run(self, context: &Context) -> Result<u8> {
        let id = context.client.resolve(&self.id).await?;
        let route = if self.proxy { Route::ThroughServer } else { Route::Default };
        let endpoint = context.client.endpoint(&id, self.port, route).await?;
        if context.output.is_json() {
            context.output.json(&endpoint.raw)?;
            return Ok(0);
        }
        context.output.line(&format!("{}://{}", context.client.profile().scheme(), endpoint.address))?;
        for (name, value) in &endpoint.headers {
            context.output.line(&format!("{name}: {value}"))?;
        }
        Ok(0)
    }
}
