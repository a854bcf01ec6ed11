//! Sandboxes that are made from repositories: what is asked for, and what is shown beyond a box.

use std::{collections::BTreeMap, fmt};

use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::ToSchema;

use super::{Endpoint, StringMap};
use crate::time::WireTime;

/// The repository to work in, and others beside it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct RepositoryRequest {
    pub url: String,
    /// Branch, tag or commit; the remote's default branch when absent.
    #[serde(rename = "ref", default, skip_serializing_if = "Option::is_none")]
    pub reference: Option<String>,
    /// Commits of history; all when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1)]
    pub depth: Option<i64>,
    #[serde(default)]
    pub submodules: bool,
    #[serde(default)]
    pub lfs: bool,
    /// Absolute, below the workspace's root; `/workspace/<name>` when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub credential: Option<RepositoryCredential>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schema(max_items = 9)]
    pub additional: Vec<AdditionalRepository>,
}

/// One more repository.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct AdditionalRepository {
    pub url: String,
    #[serde(rename = "ref", default, skip_serializing_if = "Option::is_none")]
    pub reference: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path: Option<String>,
    /// The primary repository's when absent and the host is the same.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub credential: Option<RepositoryCredential>,
}

/// A token for https, or a private key for ssh. Never returned.
#[derive(Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct RepositoryCredential {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub username: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub token: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub private_key: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub known_hosts: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub secret_ref: Option<String>,
}

impl fmt::Debug for RepositoryCredential {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("RepositoryCredential(***)")
    }
}

/// Under which conditions an image is built for the repository.
#[derive(Clone, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct ImageBuildRequest {
    /// `ifMissing` (default), `always`, `never` or `requireCached`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub policy: Option<String>,
    /// `compatible` (default) or `exact`.
    #[serde(rename = "match", default, skip_serializing_if = "Option::is_none")]
    pub fit: Option<String>,
    /// Movable name of an image.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tag: Option<String>,
    /// `{"type": "auto" | "dockerfile" | "devcontainer" | "hooks" | "none", …}`
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Object)]
    pub recipe: Option<Value>,
    /// Known to the build alone. Never returned.
    #[serde(default, skip_serializing_if = "StringMap::is_empty")]
    pub secrets: StringMap,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1)]
    pub timeout_seconds: Option<i64>,
}

impl fmt::Debug for ImageBuildRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ImageBuildRequest")
            .field("policy", &self.policy)
            .field("fit", &self.fit)
            .field("tag", &self.tag)
            .finish_non_exhaustive()
    }
}

/// What failures of the boot mean, `fail` or `warn`, and how long its steps may be silent.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct BootRequest {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub on_sync_failure: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub on_setup_failure: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub on_start_failure: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1, maximum = 86400)]
    pub setup_timeout_seconds: Option<i64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1, maximum = 86400)]
    pub start_timeout_seconds: Option<i64>,
}

/// Something to keep running: `code-server`, `ssh` and `terminal` by their names, anything else with a command.
#[derive(Clone, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct ServiceRequest {
    pub name: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub command: Option<Vec<String>>,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub env: StringMap,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cwd: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1, maximum = 65535)]
    pub port: Option<i64>,
    /// `{"type": "tcp" | "http" | "exec", …}`; a connection to the port when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Object)]
    pub probe: Option<Value>,
    /// `always` (default), `onFailure` or `never`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub restart: Option<String>,
    /// Without it the sandbox is not ready.
    #[serde(default)]
    pub required: bool,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub enabled: Option<bool>,
    /// Of `ssh`: lines as in `authorized_keys`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub authorized_keys: Vec<String>,
    /// Of `ssh`: `off`, `loopback` (default) or `any`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub forwarding: Option<String>,
    /// Of `code-server`: the folder that it opens.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub folder: Option<String>,
}

impl fmt::Debug for ServiceRequest {
    /// Environments hold secrets.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ServiceRequest").field("name", &self.name).finish_non_exhaustive()
    }
}

/// What happens to a sandbox that is not used, or whose time is over.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct PoliciesRequest {
    /// `terminate` (default); `pause` and `snapshot` need a runtime that can, and a `timeout`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub on_expire: Option<String>,
    /// How long before the expiry `pause` or `snapshot` begins; 300, or half the timeout if that is less.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 0, maximum = 2_592_000)]
    pub expire_reserve_seconds: Option<i64>,
    /// Counts from when the sandbox is ready and starts again with every use. Null or 0: use does not matter. Needs a repository.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 0, maximum = 2_592_000)]
    pub idle_timeout_seconds: Option<i64>,
    /// `terminate` (default), `pause` or `snapshot`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub idle_action: Option<String>,
    /// For how long after the last use something that is merely open counts as use; 3600 when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 0, maximum = 2_592_000)]
    pub max_presence_extension_seconds: Option<i64>,
}

/// The policies of a sandbox, and how far they are.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct SandboxPolicies {
    /// `terminate`, `pause` or `snapshot`.
    pub on_expire: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expire_reserve_seconds: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub idle_timeout_seconds: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub idle_action: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_presence_extension_seconds: Option<u64>,
    /// Until when it counts as used, as far as is known; from when it is ready.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub in_use_until: Option<WireTime>,
    /// When `idleAction` takes effect unless it is used before.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub idle_at: Option<WireTime>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub leased_until: Option<WireTime>,
    /// Why the last attempt of an action failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_failure: Option<String>,
}

/// Keeps a sandbox from becoming idle.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ActivityRequest {
    /// The sandbox counts as used for so long.
    #[schema(minimum = 1, maximum = 3600)]
    pub lease_seconds: i64,
}

/// A sandbox that counts as used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct ActivityResponse {
    pub leased_until: WireTime,
    /// When its idle action takes effect unless it is used before; absent without such a policy.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub idle_at: Option<WireTime>,
}

/// How the life of the agent in the sandbox is judged.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct AgentRequest {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1, maximum = 300)]
    pub heartbeat_interval_seconds: Option<i64>,
    /// More than the interval.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 2, maximum = 3600)]
    pub heartbeat_timeout_seconds: Option<i64>,
}

/// What a sandbox is made from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct SandboxSource {
    /// `repository`; clients must tolerate others.
    #[serde(rename = "type")]
    pub kind: String,
    /// The build that was waited for, or that made the image; `null` without one.
    pub image_build_id: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image_id: Option<String>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub repositories: Vec<SandboxRepository>,
}

/// A repository in a sandbox.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct SandboxRepository {
    pub url: String,
    #[serde(rename = "ref", default, skip_serializing_if = "Option::is_none")]
    pub reference: Option<String>,
    /// Once it is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub commit: Option<String>,
    pub path: String,
}

/// How far a sandbox is that is not ready yet.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct SandboxProgress {
    /// As the reason of the status.
    pub stage: String,
    /// The part of the boot: `sync`, `setup`, `services`, `start` or `entrypoint`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub phase: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub started_at: Option<WireTime>,
    /// By when it fails, unless it makes progress.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub deadline_at: Option<WireTime>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
}

/// The agent in a sandbox.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct SandboxAgent {
    /// `Connecting`, `Attached` or `Unresponsive`; clients must tolerate others.
    pub state: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub version: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_heartbeat_at: Option<WireTime>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lease_expires_at: Option<WireTime>,
}

/// Why a sandbox failed, or what was passed over on its way.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct SandboxFailure {
    pub reason: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub phase: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub exit_code: Option<i32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub signal: Option<i32>,
    /// The end of what it wrote.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub output_tail: Option<String>,
}

/// A managed service, in short.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct SandboxService {
    pub name: String,
    /// `code-server`, `ssh`, `terminal`, `bridge` or `custom`; clients must tolerate others.
    pub kind: String,
    /// `Disabled`, `Starting`, `Ready`, `Restarting`, `Failed` or `Stopped`; clients must tolerate others.
    pub state: String,
    pub required: bool,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub port: Option<u16>,
    #[serde(default)]
    pub restart_count: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_exit_code: Option<i32>,
    /// How its process last ended, once one has.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_exit: Option<ServiceExit>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_error: Option<String>,
    /// When the process that runs, or ran last, was started; absent while none was.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub started_at: Option<WireTime>,
    /// Of its port, where it has one that can be reached now. Told by the routes of services alone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub endpoint: Option<Endpoint>,
    /// Of `ssh`, once it has started for the first time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host_key: Option<SshHostKey>,
}

/// How a process ended: one of the two.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct ServiceExit {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub code: Option<i32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub signal: Option<i32>,
}

/// The key by which an SSH server is known.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct SshHostKey {
    /// As in `known_hosts`: `ssh-ed25519 AAAA…`.
    pub public_key: String,
    /// `SHA256:…`.
    pub fingerprint: String,
}

/// How to be let into a service.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct ServiceAccessRequest {
    /// Of `ssh`, needed there: the key to be certified, as in `authorized_keys` without options.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub public_key: Option<String>,
}

/// What opens a service for a short time. Not to be stored.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct ServiceAccess {
    /// Where it is opened; `ssh`: its tunnel.
    pub endpoint: Endpoint,
    pub credential: ServiceCredential,
    /// By when it has to be used. What was opened with it may last longer.
    pub expires_at: WireTime,
}

/// What opens a service.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(tag = "type", rename_all = "camelCase", rename_all_fields = "camelCase")]
pub enum ServiceCredential {
    /// For a browser, which gets a cookie for it.
    Url {
        /// With its scheme.
        url: String,
    },
    /// For an SSH client.
    SshCertificate {
        /// One line, as a file `…-cert.pub` has it.
        certificate: String,
        /// The key by which the server is known, when it has started already.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        host_key: Option<SshHostKey>,
    },
}

impl fmt::Debug for ServiceAccess {
    /// It opens something.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ServiceAccess").field("expires_at", &self.expires_at).finish_non_exhaustive()
    }
}

/// The services of a sandbox.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct SandboxServices {
    pub items: Vec<SandboxService>,
}

/// Switches a service on or off.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ServiceSwitch {
    pub enabled: bool,
}
