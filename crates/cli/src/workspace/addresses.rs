//! The ways into a sandbox that is ready, and how to get rid of it.

use anyhow::Result;
use reqwest::Method;
use serde_json::{Value, json};

use crate::client::{Client, Route, Sandbox};

/// The service of the editor in the browser.
pub const EDITOR: &str = "code-server";
/// The service that `ssh` talks to.
pub const SSH: &str = "ssh";

/// A managed service as the server describes it.
#[derive(Debug, Clone, Copy)]
pub struct Service<'a>(&'a Value);

impl<'a> Service<'a> {
    fn text(self, name: &str) -> &'a str {
        self.0.get(name).and_then(Value::as_str).unwrap_or_default()
    }

    pub fn name(self) -> &'a str {
        self.text("name")
    }

    pub fn state(self) -> &'a str {
        self.text("state")
    }

    pub fn port(self) -> Option<u16> {
        u16::try_from(self.0.get("port")?.as_u64()?).ok()
    }

    pub fn last_error(self) -> &'a str {
        self.text("lastError")
    }
}

/// The services of a sandbox, as they were when it was read.
pub fn services(sandbox: &Sandbox) -> Vec<Service<'_>> {
    sandbox
        .0
        .get("services")
        .and_then(Value::as_array)
        .map(|all| all.iter().map(Service).collect())
        .unwrap_or_default()
}

/// One way in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Way {
    /// `SSH`, `IDE` or `App`.
    pub label: &'static str,
    /// The service, or the port.
    pub name: String,
    /// An address, or the command that leads there.
    pub text: String,
    /// Something about it that is not well.
    pub remark: Option<String>,
}

/// Collects the ways into a sandbox. `ports` are wanted beside those of its services.
///
/// # Errors
/// When the server cannot be asked; what it refuses is a remark.
pub async fn ways(client: &Client, sandbox: &Sandbox, ports: &[u16]) -> Result<Vec<Way>> {
    let id = sandbox.id();
    let mut ways = Vec::new();
    for service in services(sandbox) {
        let remark = match (service.state(), service.last_error()) {
            ("Ready" | "Disabled" | "Stopped", _) => None,
            (state, "") => Some(state.to_lowercase()),
            (state, error) => Some(format!("{}: {error}", state.to_lowercase())),
        };
        let name = service.name().to_owned();
        match (service.name(), service.port()) {
            (SSH, _) => ways.push(Way { label: "SSH", name, text: format!("sandglass ssh {id}"), remark }),
            (EDITOR, _) => {
                let open = if service.state() == "Ready" { signed(client, id, EDITOR).await? } else { None };
                let text = open.unwrap_or_else(|| format!("sandglass code {id}"));
                ways.push(Way { label: "IDE", name, text, remark });
            }
            (_, Some(port)) => {
                let ready = service.state() == "Ready";
                let open = if ready { signed(client, id, service.name()).await? } else { None };
                let text = match open {
                    Some(open) => open,
                    None => address(client, id, port).await?,
                };
                ways.push(Way { label: "App", name, text, remark });
            }
            _ => {}
        }
    }
    for port in ports {
        let known = services(sandbox).iter().any(|service| service.port() == Some(*port));
        if !known {
            let text = address(client, id, *port).await?;
            ways.push(Way { label: "App", name: port.to_string(), text, remark: None });
        }
    }
    Ok(ways)
}

/// An address of a service that opens in a browser for a few minutes; `None` when the server gives none.
async fn signed(client: &Client, id: &str, service: &str) -> Result<Option<String>> {
    Ok(access(client, id, service, &json!({}))
        .await
        .ok()
        .and_then(|access| url_of(&access).map(str::to_owned)))
}

/// What opens a service for a short time. Must not be kept.
///
/// # Errors
/// When the server refuses.
pub async fn access(client: &Client, id: &str, service: &str, body: &Value) -> Result<Value> {
    client.call(Method::POST, &["sandboxes", id, "services", service, "access"], Some(body)).await
}

/// The address in the answer of [`access`].
pub fn url_of(access: &Value) -> Option<&str> {
    access.pointer("/credential/url").and_then(Value::as_str)
}

async fn address(client: &Client, id: &str, port: u16) -> Result<String> {
    let endpoint = client.endpoint(id, port, Route::Default).await?;
    Ok(format!("{}://{}", client.profile().scheme(), endpoint.address))
}

/// The ways as JSON, in the order of the services.
pub fn as_json(ways: &[Way]) -> Value {
    let shown = |way: &Way| {
        let mut shown = json!({ "kind": way.label.to_lowercase(), "name": way.name, "address": way.text });
        if let Some(remark) = &way.remark {
            shown["remark"] = json!(remark);
        }
        shown
    };
    ways.iter().map(shown).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn services_are_read_in_their_order() {
        let sandbox = Sandbox(json!({ "id": "i", "services": [
            { "name": "ssh", "state": "Ready", "port": 2222 },
            { "name": "code-server", "state": "Disabled", "port": 8443 },
        ]}));
        let told: Vec<_> = services(&sandbox).iter().map(|s| (s.name(), s.port(), s.state())).collect();
        assert_eq!(told, [("ssh", Some(2222), "Ready"), ("code-server", Some(8443), "Disabled")]);
        assert!(services(&Sandbox(json!({ "id": "i" }))).is_empty());
    }

    #[test]
    fn ways_are_told_to_programs() {
        let way = Way {
            label: "App",
            name: "web".into(),
            text: "http://h:1".into(),
            remark: Some("starting".into()),
        };
        let expected =
            json!([{ "kind": "app", "name": "web", "address": "http://h:1", "remark": "starting" }]);
        assert_eq!(as_json(&[way]), expected);
    }
}
