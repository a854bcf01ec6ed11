//! What is told about denials and injections: one line of JSON each on standard output, never a secret.

pub mod limit;
pub mod output;
pub mod webhook;

use std::net::IpAddr;

use serde::Serialize;

/// Something that the sandbox's owner may want to know. No value of a credential is ever part of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase", tag = "kind")]
pub enum Event {
    /// Something was not let through.
    Denied {
        by: Gate,
        /// The host name that was asked for, if one was.
        #[serde(skip_serializing_if = "Option::is_none")]
        host: Option<String>,
        #[serde(skip_serializing_if = "Option::is_none")]
        address: Option<IpAddr>,
        #[serde(skip_serializing_if = "Option::is_none")]
        port: Option<u16>,
        /// The rule that decided, as it was written (`deny *.example.com`), or `default`.
        rule: String,
    },
    /// A credential was put into a request.
    Injected { binding: String, host: String, method: String, revision: u64 },
    /// Something to know that is no denial: `policy-changed`, `vault-changed`, `restarted`.
    Noted { what: String, detail: String },
}

/// What did not let it through.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Gate {
    /// The name was not resolved.
    Dns,
    /// The kernel's rules.
    Firewall,
    /// The server name of a TLS handshake.
    Sni,
    /// The host of an HTTP request.
    Http,
    /// The credential vault.
    Vault,
}

/// Takes events. Cheap, never blocks; limits itself.
pub trait Audit: Send + Sync {
    fn tell(&self, event: Event);
}
