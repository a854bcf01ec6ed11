//! `sandglass rm`: removal of sandboxes.

use anyhow::{Result, bail};
use clap::Args;
use futures_util::{StreamExt, stream};

use crate::{Context, client::Sandbox, output::note};

/// Removals under way at a time.
const AT_ONCE: usize = 8;

/// Remove sandboxes with everything in them, in whatever state they are
#[derive(Args, Debug)]
pub struct Rm {
    /// Ids, unique id prefixes, or names
    #[arg(required_unless_present = "all", conflicts_with = "all", value_name = "ID")]
    ids: Vec<String>,
    /// Remove every sandbox of the server
    #[arg(short, long)]
    all: bool,
    /// Do not complain about sandboxes that do not exist
    #[arg(short, long)]
    force: bool,
}

impl Rm {
    pub async fn run(self, context: &Context) -> Result<u8> {
        let client = &context.client;
        let mut failed = 0usize;
        let mut ids = Vec::new();
        if self.all {
            ids.extend(client.list(&[], &[]).await?.iter().map(|sandbox: &Sandbox| sandbox.id().to_owned()));
        }
        for reference in &self.ids {
            match client.resolve(reference).await {
                Ok(id) => ids.push(id),
                Err(error) if error.is::<crate::client::ClientError>() => return Err(error),
                Err(_) if self.force => {}
                Err(error) => {
                    note(&format!("error: {error}"));
                    failed += 1;
                }
            }
        }
        let mut results = stream::iter(ids)
            .map(|id| async move { (client.delete(&id).await, id) })
            .buffer_unordered(AT_ONCE);
        let mut removed = Vec::new();
        while let Some((result, id)) = results.next().await {
            match result {
                Ok(true) => removed.push(id),
                // Gone in the meantime is what was asked for.
                Ok(false) if self.force || self.all => {}
                Ok(false) => {
                    note(&format!("error: there is no sandbox `{id}`"));
                    failed += 1;
                }
                Err(error) => {
                    note(&format!("error: {id}: {error}"));
                    failed += 1;
                }
            }
        }
        if context.output.is_json() {
            context.output.json(&removed)?;
        } else {
            context.output.text(&removed.join("\n"))?;
        }
        if failed > 0 {
            bail!("{failed} of the sandboxes could not be removed");
        }
        Ok(0)
    }
}
