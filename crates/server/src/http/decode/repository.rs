//! `repository` of a create and what goes with it: shapes only.

use sandglass_api::lifecycle::{
    AdditionalRepository, AgentRequest, BootRequest, CreateSandboxRequest, ImageBuildRequest,
    POOL_REF_EXTENSION, PoliciesRequest, RepositoryCredential, RepositoryRequest, ServiceRequest,
};
use serde_json::Value;

use crate::http::{
    error::{ApiError, ApiResult},
    fields::Findings,
};

/// The most services that are asked for at once.
const MOST_SERVICES: usize = 32;
const DAY: i64 = 86_400;

pub(super) fn repository(f: &mut Findings, value: &Value) -> Option<RepositoryRequest> {
    let object = f.object(value)?;
    f.only(object, &["url", "ref", "depth", "submodules", "lfs", "path", "credential", "additional"]);
    let url = f.required(object, "url", |f, v| f.bounded(v, 1, 4096));
    Some(RepositoryRequest {
        reference: f.optional(object, "ref", |f, v| f.bounded(v, 1, 1024)),
        depth: f.optional(object, "depth", |f, v| f.integer(v, 1, i64::from(u32::MAX))),
        submodules: f.optional(object, "submodules", Findings::boolean).unwrap_or(false),
        lfs: f.optional(object, "lfs", Findings::boolean).unwrap_or(false),
        path: f.optional(object, "path", |f, v| f.bounded(v, 1, 4096)),
        credential: f.optional(object, "credential", credential),
        additional: f.optional(object, "additional", |f, v| f.list(v, 0, additional)).unwrap_or_default(),
        url: url?,
    })
}

fn additional(f: &mut Findings, value: &Value) -> Option<AdditionalRepository> {
    let object = f.object(value)?;
    f.only(object, &["url", "ref", "path", "credential"]);
    let url = f.required(object, "url", |f, v| f.bounded(v, 1, 4096));
    Some(AdditionalRepository {
        reference: f.optional(object, "ref", |f, v| f.bounded(v, 1, 1024)),
        path: f.optional(object, "path", |f, v| f.bounded(v, 1, 4096)),
        credential: f.optional(object, "credential", credential),
        url: url?,
    })
}

fn credential(f: &mut Findings, value: &Value) -> Option<RepositoryCredential> {
    let object = f.object(value)?;
    f.only(object, &["username", "token", "privateKey", "knownHosts", "secretRef"]);
    let before = f.count();
    let read = RepositoryCredential {
        username: f.optional(object, "username", Findings::string),
        token: f.optional(object, "token", Findings::string),
        private_key: f.optional(object, "privateKey", Findings::string),
        known_hosts: f.optional(object, "knownHosts", Findings::string),
        secret_ref: f.optional(object, "secretRef", Findings::string),
    };
    let kinds = [&read.token, &read.private_key, &read.secret_ref];
    let kinds = kinds.into_iter().filter(|kind| kind.is_some()).count();
    if f.count() == before && kinds != 1 {
        f.broken("exactly one of token, privateKey and secretRef must be given");
    }
    Some(read)
}

pub(super) fn image_build(f: &mut Findings, value: &Value) -> Option<ImageBuildRequest> {
    let object = f.object(value)?;
    f.only(object, &["policy", "match", "tag", "recipe", "secrets", "timeoutSeconds"]);
    Some(ImageBuildRequest {
        policy: f
            .optional(object, "policy", |f, v| f.word(v, &["ifMissing", "always", "never", "requireCached"])),
        fit: f.optional(object, "match", |f, v| f.word(v, &["compatible", "exact"])),
        tag: f.optional(object, "tag", |f, v| f.bounded(v, 1, 128)),
        recipe: f.optional(object, "recipe", |f, v| f.object(v).map(|_| v.clone())),
        secrets: f.optional(object, "secrets", Findings::string_map).unwrap_or_default(),
        timeout_seconds: f.optional(object, "timeoutSeconds", |f, v| f.integer(v, 1, DAY)),
    })
}

pub(super) fn boot(f: &mut Findings, value: &Value) -> Option<BootRequest> {
    let object = f.object(value)?;
    let names =
        ["onSyncFailure", "onSetupFailure", "onStartFailure", "setupTimeoutSeconds", "startTimeoutSeconds"];
    f.only(object, &names);
    let outcome = |f: &mut Findings, v: &Value| f.word(v, &["fail", "warn"]);
    let seconds = |f: &mut Findings, v: &Value| f.integer(v, 1, DAY);
    Some(BootRequest {
        on_sync_failure: f.optional(object, names[0], outcome),
        on_setup_failure: f.optional(object, names[1], outcome),
        on_start_failure: f.optional(object, names[2], outcome),
        setup_timeout_seconds: f.optional(object, names[3], seconds),
        start_timeout_seconds: f.optional(object, names[4], seconds),
    })
}

pub(super) fn services(f: &mut Findings, value: &Value) -> Option<Vec<ServiceRequest>> {
    let all = f.list(value, 0, service)?;
    if all.len() > MOST_SERVICES {
        f.broken("there are more than 32 services");
    }
    Some(all)
}

fn service(f: &mut Findings, value: &Value) -> Option<ServiceRequest> {
    let object = f.object(value)?;
    f.only(
        object,
        &[
            "name",
            "command",
            "env",
            "cwd",
            "user",
            "port",
            "probe",
            "restart",
            "required",
            "enabled",
            "authorizedKeys",
            "forwarding",
            "folder",
        ],
    );
    let name = f.required(object, "name", |f, v| f.bounded(v, 1, 63));
    Some(ServiceRequest {
        command: f.optional(object, "command", |f, v| f.strings(v, 1)),
        env: f.optional(object, "env", Findings::string_map).unwrap_or_default(),
        cwd: f.optional(object, "cwd", |f, v| f.bounded(v, 1, 4096)),
        user: f.optional(object, "user", |f, v| f.bounded(v, 1, 255)),
        port: f.optional(object, "port", |f, v| f.integer(v, 1, 65_535)),
        probe: f.optional(object, "probe", |f, v| f.object(v).map(|_| v.clone())),
        restart: f.optional(object, "restart", |f, v| f.word(v, &["always", "onFailure", "never"])),
        required: f.optional(object, "required", Findings::boolean).unwrap_or(false),
        enabled: f.optional(object, "enabled", Findings::boolean),
        authorized_keys: f.optional(object, "authorizedKeys", |f, v| f.strings(v, 0)).unwrap_or_default(),
        forwarding: f.optional(object, "forwarding", |f, v| f.word(v, &["off", "loopback", "any"])),
        folder: f.optional(object, "folder", |f, v| f.bounded(v, 1, 4096)),
        name: name?,
    })
}

pub(super) fn policies(f: &mut Findings, value: &Value) -> Option<PoliciesRequest> {
    let object = f.object(value)?;
    let names = [
        "onExpire",
        "expireReserveSeconds",
        "idleTimeoutSeconds",
        "idleAction",
        "maxPresenceExtensionSeconds",
    ];
    f.only(object, &names);
    let action = |f: &mut Findings, v: &Value| f.word(v, &["terminate", "pause", "snapshot"]);
    let seconds = |f: &mut Findings, v: &Value| f.integer(v, 0, 30 * DAY);
    Some(PoliciesRequest {
        on_expire: f.optional(object, names[0], action),
        expire_reserve_seconds: f.optional(object, names[1], seconds),
        idle_timeout_seconds: f.optional(object, names[2], seconds),
        idle_action: f.optional(object, names[3], action),
        max_presence_extension_seconds: f.optional(object, names[4], seconds),
    })
}

pub(super) fn agent(f: &mut Findings, value: &Value) -> Option<AgentRequest> {
    let object = f.object(value)?;
    f.only(object, &["heartbeatIntervalSeconds", "heartbeatTimeoutSeconds"]);
    Some(AgentRequest {
        heartbeat_interval_seconds: f
            .optional(object, "heartbeatIntervalSeconds", |f, v| f.integer(v, 1, 300)),
        heartbeat_timeout_seconds: f
            .optional(object, "heartbeatTimeoutSeconds", |f, v| f.integer(v, 2, 3600)),
    })
}

/// A repository is the only source of its sandbox, and what goes with one goes with nothing else.
///
/// # Errors
/// 400 that names the fields.
pub(super) fn check_source(request: &CreateSandboxRequest) -> ApiResult<()> {
    if request.repository.is_none() {
        let lone = [
            ("imageBuild", request.image_build.is_some()),
            ("boot", request.boot.is_some()),
            ("services", request.services.is_some()),
            ("agent", request.agent.is_some()),
        ];
        // A pool may bring the repository along.
        let pool = request.extensions.as_ref().and_then(|e| e.get(POOL_REF_EXTENSION));
        let pool = pool.is_some_and(|name| !name.trim().is_empty());
        let named: Vec<&str> = lone.iter().filter(|(_, given)| *given).map(|(name, _)| *name).collect();
        if named.is_empty() || pool {
            return Ok(());
        }
        let message = format!("these need a repository: {}", named.join(", "));
        return Err(ApiError::invalid_parameter(message));
    }
    let others = [
        ("image", request.image.is_some()),
        ("snapshotId", request.snapshot_id.is_some()),
        ("templateId", request.template_id.is_some()),
    ];
    let named: Vec<&str> = others.iter().filter(|(_, given)| *given).map(|(name, _)| *name).collect();
    if named.is_empty() {
        return Ok(());
    }
    Err(ApiError::invalid_parameter(format!(
        "exactly one of image, snapshotId, templateId and repository must be given, not repository with {}",
        named.join(" and ")
    )))
}
