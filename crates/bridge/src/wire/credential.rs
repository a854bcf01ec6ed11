//! `POST /internal/agent/v1/credentials/git`

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use super::Secret;

/// What git asks its helper for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GitCredentialRequest {
    /// With a port where it is not the scheme's own.
    pub host: String,
    /// As in the address but without its escapes, which is how git asks; with or without `.git`.
    pub path: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct GitCredential {
    pub username: String,
    /// Over ssh the private key.
    pub password: Secret<String>,
    /// There over ssh alone: the lines of `known_hosts` that the server's key has to match.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub known_hosts: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expires_at: Option<Timestamp>,
}
