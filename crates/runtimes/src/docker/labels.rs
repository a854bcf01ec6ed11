//! The labels of a container: what a create writes and what a later look reads back.
//!
//! Pure. Upstream's own labels are written beside our record, so that its server can take our sandboxes over; containers without a record
//! of their own id are upstream's, and are read by its rules. An empty system label counts as absent, because labels that an image brings
//! along can be overridden but not taken away.

use std::{
    collections::{BTreeMap, HashMap},
    path::PathBuf,
};

use sandglass_sandbox::{
    SandboxId, SnapshotId, Timestamp,
    ports::runtime::StartPlan,
    spec::{MutableFacts, Platform, Spec},
};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use tracing::warn;

use super::Made;

/// Everything below is of the system, never of the user.
pub(super) const SYSTEM: &str = "opensandbox.io/";
pub(super) const ID: &str = "opensandbox.io/id";
/// Our record; see [`Record`].
pub(super) const RECORD: &str = "opensandbox.io/sandglass";
pub(super) const EXPIRES_AT: &str = "opensandbox.io/expires-at";
pub(super) const MANUAL: &str = "opensandbox.io/manual-cleanup";
pub(super) const PLATFORM_OS: &str = "opensandbox.io/platform-os";
pub(super) const PLATFORM_ARCH: &str = "opensandbox.io/platform-arch";
/// On a sandbox and on a volume: whose it is.
pub(super) const TENANT: &str = "opensandbox.io/tenant";
pub(super) const SNAPSHOT: &str = "opensandbox.io/snapshot-id";
pub(super) const RENEW_SECONDS: &str = "opensandbox.io/access-renew-extend-seconds";
pub(super) const EXTENSION: &str = "opensandbox.io/extensions.";
pub(super) const AGENT_PORT: &str = "opensandbox.io/embedding-proxy-port";
pub(super) const HTTP_PORT: &str = "opensandbox.io/http-port";
pub(super) const EGRESS_TOKEN: &str = "opensandbox.io/egress-auth-token";
/// On a sandbox: the volumes to delete with it. On a volume: [`BY_SERVER`].
pub(super) const MANAGED_VOLUMES: &str = "opensandbox.io/volume-managed-by";
pub(super) const OSSFS_MOUNTS: &str = "opensandbox.io/ossfs-mounts";
/// The one label of a sidecar: whose it is.
pub(super) const SIDECAR_FOR: &str = "opensandbox.io/egress-sidecar-for";
/// What marks volumes that a server made and may delete.
pub(super) const BY_SERVER: &str = "server";

/// Labels that are no user metadata, whoever wrote them.
const NOT_METADATA: [&str; 4] = [SYSTEM, "org.opencontainers.image.", "com.docker.", "desktop.docker."];
/// The request's names of what upstream keeps under shorter ones.
const RENEW_EXTENSION: &str = "access.renew.extend.seconds";
const REQUEST_EXTENSION: &str = "opensandbox.extensions.";
const VERSION: u32 = 1;

/// Everything that was asked for, in one label.
#[derive(Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Record {
    v: u32,
    /// Whose record it is: a container made from a committed image inherits the record of another.
    pub id: SandboxId,
    pub spec: Spec,
    /// What runs, after the image's own entrypoint was looked up.
    pub argv: Vec<String>,
    /// As created; side files hold what changed since.
    pub facts: MutableFacts,
    pub created_at: Timestamp,
    pub agent_token: String,
    pub route_token: String,
}

impl std::fmt::Debug for Record {
    /// Without the tokens.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Record").field("id", &self.id).field("spec", &self.spec).finish_non_exhaustive()
    }
}

/// The labels of a new container. `argv` is what runs in it, empty when it is the agent alone; `image_labels` are those that the image would
/// bring along.
pub(super) fn for_create(
    id: SandboxId,
    plan: &StartPlan,
    argv: &[String],
    made: &Made,
    image_labels: &HashMap<String, String>,
) -> HashMap<String, String> {
    let mut labels: HashMap<String, String> = image_labels
        .keys()
        .filter(|key| key.starts_with(SYSTEM))
        .map(|key| (key.clone(), String::new()))
        .collect();
    // Keys that readers take for the system's are in the record only.
    let metadata = plan.facts.metadata.iter().filter(|(key, _)| is_metadata(key));
    labels.extend(metadata.map(|(key, value)| (key.clone(), value.clone())));

    let mut set = |key: &str, value: String| labels.insert(key.to_owned(), value);
    set(ID, id.to_string());
    match plan.facts.expires_at {
        Some(at) => set(EXPIRES_AT, spell(at)),
        None => set(MANUAL, "true".into()),
    };
    if let Some(platform) = &plan.spec.platform {
        set(PLATFORM_OS, platform.os.clone());
        set(PLATFORM_ARCH, platform.arch.clone());
    }
    if let Some(tenant) = &plan.spec.tenant {
        set(TENANT, tenant.clone());
    }
    if let Some(snapshot) = plan.spec.snapshot {
        set(SNAPSHOT, snapshot.to_string());
    }
    for (key, value) in &plan.spec.extensions {
        if key == RENEW_EXTENSION {
            set(RENEW_SECONDS, value.clone());
        } else if let Some(suffix) = key.strip_prefix(REQUEST_EXTENSION) {
            set(&format!("{EXTENSION}{suffix}"), value.clone());
        }
    }
    if let Some(published) = &made.published {
        set(AGENT_PORT, published.agent.to_string());
        set(HTTP_PORT, published.http.to_string());
    }
    if let Some(token) = &made.egress_token {
        set(EGRESS_TOKEN, token.clone());
    }
    if !made.volumes.is_empty() {
        set(MANAGED_VOLUMES, json(&made.volumes));
    }
    if !made.object_stores.is_empty() {
        set(OSSFS_MOUNTS, json(&made.object_stores));
    }
    set(RECORD, json(&record(id, plan, argv)));
    labels
}

/// Everything that was asked for.
pub(super) fn record(id: SandboxId, plan: &StartPlan, argv: &[String]) -> Record {
    Record {
        v: VERSION,
        id,
        spec: plan.spec.clone(),
        argv: argv.to_vec(),
        facts: plan.facts.clone(),
        created_at: plan.created_at,
        agent_token: plan.agent_token.clone(),
        route_token: plan.route_token.clone(),
    }
}

fn json<T: Serialize>(value: &T) -> String {
    serde_json::to_string(value).expect("plain data with text keys can always be written as JSON")
}

/// What the labels of a sandbox's container say.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Parsed {
    pub id: SandboxId,
    /// Absent on containers of another server.
    pub record: Option<Record>,
    /// As created.
    pub facts: MutableFacts,
    pub published: Option<(u16, u16)>,
    pub egress_token: Option<String>,
    pub managed_volumes: Vec<String>,
    pub ossfs_mounts: Vec<PathBuf>,
    pub platform: Option<Platform>,
    pub snapshot: Option<SnapshotId>,
    pub tenant: Option<String>,
    /// By the names that requests use.
    pub extensions: BTreeMap<String, String>,
}

/// Reads the labels of a container; `None` when it is no sandbox whose id this server can spell.
pub(super) fn parse(labels: &HashMap<String, String>) -> Option<Parsed> {
    let get = |key: &str| labels.get(key).map(|v| v.trim()).filter(|v| !v.is_empty());
    let id: SandboxId = get(ID)?.parse().ok()?;
    let record = get(RECORD)
        .and_then(|text| serde_json::from_str::<Record>(text).ok())
        .filter(|record| record.id == id && record.v == VERSION);
    let facts = match &record {
        Some(record) => record.facts.clone(),
        None => MutableFacts { expires_at: upstream_expiry(id, labels), metadata: metadata(labels) },
    };
    let port = |key| get(key).and_then(|text| text.parse::<u16>().ok()).filter(|port| *port != 0);
    let platform = get(PLATFORM_OS)
        .zip(get(PLATFORM_ARCH))
        .map(|(os, arch)| Platform { os: os.to_owned(), arch: arch.to_owned() });
    let mut extensions: BTreeMap<String, String> = labels
        .iter()
        .filter(|(_, value)| !value.is_empty())
        .filter_map(|(key, value)| {
            let suffix = key.strip_prefix(EXTENSION)?;
            Some((format!("{REQUEST_EXTENSION}{suffix}"), value.clone()))
        })
        .collect();
    extensions.extend(get(RENEW_SECONDS).map(|value| (RENEW_EXTENSION.to_owned(), value.to_owned())));
    Some(Parsed {
        id,
        record,
        facts,
        published: port(AGENT_PORT).zip(port(HTTP_PORT)),
        egress_token: get(EGRESS_TOKEN).map(str::to_owned),
        managed_volumes: list(get(MANAGED_VOLUMES)),
        ossfs_mounts: list(get(OSSFS_MOUNTS)),
        platform,
        tenant: get(TENANT).map(str::to_owned),
        snapshot: get(SNAPSHOT).and_then(|text| text.parse().ok()),
        extensions,
    })
}

fn list<T: DeserializeOwned>(text: Option<&str>) -> Vec<T> {
    text.and_then(|text| serde_json::from_str(text).ok()).unwrap_or_default()
}

/// Whether a container may be what its labels say, by its name and the reference that it was made from. The containers in which an engine's
/// builder runs instructions inherit whatever labels a Dockerfile or its base image set: they are made from ids of images, and the engine
/// names them. What somebody started by hand is made from a name.
pub(super) fn are_genuine(labels: &HashMap<String, String>, name: &str, image: &str) -> bool {
    let of = |key: &str| labels.get(key).and_then(|id| id.parse::<SandboxId>().ok());
    let own = match (of(ID), of(SIDECAR_FOR)) {
        (None, None) => return true,
        (Some(id), _) => super::observe::container_name(id),
        (None, Some(id)) => super::sidecar::container_name(id),
    };
    name == own || !image.starts_with("sha256:")
}

/// Whose sidecar a container is.
pub(super) fn sidecar_of(labels: &HashMap<String, String>) -> Option<SandboxId> {
    labels.get(SIDECAR_FOR)?.parse().ok()
}

fn is_metadata(key: &str) -> bool {
    NOT_METADATA.iter().all(|prefix| !key.starts_with(prefix))
}

fn metadata(labels: &HashMap<String, String>) -> BTreeMap<String, String> {
    labels.iter().filter(|(key, _)| is_metadata(key)).map(|(k, v)| (k.clone(), v.clone())).collect()
}

fn upstream_expiry(id: SandboxId, labels: &HashMap<String, String>) -> Option<Timestamp> {
    let text = labels.get(EXPIRES_AT).map(|v| v.trim()).filter(|v| !v.is_empty());
    // A restored container inherits the expiry of its source; its own wish to live on is newer.
    let manual = labels.get(MANUAL).is_some_and(|v| v.trim().eq_ignore_ascii_case("true"));
    let inherited = labels.get(SNAPSHOT).is_some_and(|v| !v.is_empty());
    match text {
        Some(_) if manual && inherited => None,
        Some(text) => {
            let read = instant(text);
            if read.is_none() {
                warn!(sandbox = %id, text, "its expiry cannot be read; it never expires");
            }
            read
        }
        None => {
            if !manual {
                warn!(sandbox = %id, "it has neither an expiry nor the mark of manual cleanup; it never expires");
            }
            None
        }
    }
}

/// ISO 8601 with six digits of the second and `+00:00`, as upstream writes it.
pub(super) fn spell(at: Timestamp) -> String {
    let at = jiff::Timestamp::from_millisecond(at.as_millis()).unwrap_or(jiff::Timestamp::MIN);
    at.strftime("%Y-%m-%dT%H:%M:%S%.6f+00:00").to_string()
}

/// An instant in ISO 8601 as upstream or the engine writes it: up to nine digits of the second, without an offset UTC. Years before 1970
/// are the engine's way to say never.
pub(super) fn instant(text: &str) -> Option<Timestamp> {
    let text = text.trim();
    let parsed: Result<jiff::Timestamp, _> = text.parse();
    let read = match parsed {
        Ok(read) => read,
        Err(_) => format!("{text}Z").parse().ok()?,
    };
    Timestamp::from_millis(read.as_millisecond())
}

#[cfg(test)]
#[path = "labels_tests.rs"]
mod tests;
