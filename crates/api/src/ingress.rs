//! What a gateway is told about sandboxes, and what it tells about their use. Ours.

use std::{fmt, net::IpAddr};

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::time::WireTime;

/// One line of `GET /ingress/sandboxes`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", tag = "kind")]
pub enum IngressLine {
    /// There is this sandbox, or it has changed.
    Put { sandbox: IngressSandbox },
    /// There is no such sandbox any more.
    Gone { id: String },
    /// All that there is has been told by now; what was not is gone.
    Whole,
    /// Nothing has changed for a while.
    Alive,
}

/// A sandbox, as far as its traffic is concerned.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct IngressSandbox {
    pub id: String,
    pub state: IngressState,
    /// Of its own, or of the machine whose ports lead to it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub address: Option<IpAddr>,
    /// Given when only these ports of the address lead into the sandbox.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ports: Option<IngressPorts>,
    /// What its agent asks for when it is to relay to another port; empty when it asks for nothing.
    pub agent_token: String,
    /// What clients have to show, or to have signed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub secure_access: Option<String>,
    /// The same for a sandbox that was created without `secureAccess`; empty when nobody has such a token.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub route_token: String,
    /// Nothing has to be shown, unless there is `secure_access`.
    #[serde(default)]
    pub open: bool,
    /// Whether a request resumes it while it is paused.
    #[serde(default)]
    pub wakes: bool,
    /// Whether use extends its life.
    #[serde(default)]
    pub renews: bool,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expires_at: Option<WireTime>,
}

/// Tokens stay out of logs.
impl fmt::Debug for IngressSandbox {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("IngressSandbox")
            .field("id", &self.id)
            .field("state", &self.state)
            .field("address", &self.address)
            .field("ports", &self.ports)
            .finish_non_exhaustive()
    }
}

/// Whether requests to a sandbox make sense.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum IngressState {
    Up,
    Paused,
    Starting,
    /// Up, but nothing leads to it.
    Unreachable,
    Over,
}

/// Ports of the host that lead into a sandbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct IngressPorts {
    /// To the agent, which relays to every port.
    pub agent: u16,
    /// To port 8080.
    pub http: u16,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub egress: Option<u16>,
}

/// Body of `POST /ingress/uses`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct IngressUses {
    /// Ids of sandboxes that were used, at most 1024.
    pub sandboxes: Vec<String>,
}
