//! `sandglass inspect`: everything the server tells about sandboxes.

use anyhow::Result;
use clap::Args;
use serde_json::Value;

use super::ps::{command_line, origin};
use crate::{
    Context,
    client::Sandbox,
    workspace::{addresses::services, boot::failure},
};

/// Show everything about one or more sandboxes
#[derive(Args, Debug)]
pub struct Inspect {
    /// Ids, unique id prefixes, or names
    #[arg(required = true, value_name = "ID")]
    ids: Vec<String>,
}

impl Inspect {
    pub async fn run(self, context: &Context) -> Result<u8> {
        let mut found = Vec::new();
        for reference in &self.ids {
            let id = context.client.resolve(reference).await?;
            found.push(context.client.get(&id).await?);
        }
        if context.output.is_json() {
            context.output.json(&found.into_iter().map(|sandbox| sandbox.0).collect::<Vec<_>>())?;
            return Ok(0);
        }
        for (index, sandbox) in found.iter().enumerate() {
            if index > 0 {
                context.output.line("")?;
            }
            show(context, sandbox)?;
        }
        Ok(0)
    }
}

fn show(context: &Context, sandbox: &Sandbox) -> Result<()> {
    let or_dash = |text: &str| if text.is_empty() { "-".to_owned() } else { text.to_owned() };
    let is_workspace = sandbox.0.get("source").is_some();
    let mut fields = vec![
        ("Id", sandbox.id().to_owned()),
        (if is_workspace { "Repository" } else { "Image" }, or_dash(&origin(sandbox))),
        ("State", sandbox.state().to_owned()),
        ("Reason", or_dash(sandbox.reason())),
        ("Message", or_dash(sandbox.message())),
        ("Entrypoint", command_line(sandbox)),
        ("Created", or_dash(sandbox.created_at())),
        (
            "Expires",
            if sandbox.expires_at().is_empty() { "never".into() } else { sandbox.expires_at().into() },
        ),
    ];
    for (label, key) in [("Metadata", "metadata"), ("Extension", "extensions"), ("Platform", "platform")] {
        let map = sandbox.0.get(key).and_then(Value::as_object);
        for (name, value) in map.into_iter().flatten() {
            fields.push((label, format!("{name}={}", value.as_str().unwrap_or_default())));
        }
    }
    for service in services(sandbox) {
        let port = service.port().map(|port| format!(" on {port}")).unwrap_or_default();
        let error = if service.last_error().is_empty() {
            String::new()
        } else {
            format!(": {}", service.last_error())
        };
        fields.push(("Service", format!("{} {}{port}{error}", service.name(), service.state())));
    }
    if is_workspace && sandbox.0.get("lastFailure").is_some_and(|failure| !failure.is_null()) {
        let (why, tail) = failure(sandbox);
        fields.push(("Failure", why));
        fields.extend(tail.into_iter().map(|line| ("Output", line)));
    }
    context.output.fields(&fields)
}
