//! The checks of a create that need no runtime, in the documented order.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use sandglass_api::lifecycle::{
    CreateSandboxRequest, ENTRYPOINT_EXTENSION, ImageSpec, LifecycleHook, LifecycleHooks, POOL_REF_EXTENSION,
    RENEW_ON_ACCESS_EXTENSION, StringMap, WAKE_ON_ACCESS_EXTENSION,
};
use sandglass_sandbox::{
    SnapshotId, Timestamp,
    hooks::{Hook, Hooks, PeriodicHook},
    spec::{Credentials, Egress, Entrypoint, MutableFacts, NetworkPolicy, Platform, Secrets, Spec},
};

pub use super::rules::CreateRules;
use super::{
    environment::{self, Enforcer},
    labels, policies, policy,
    resources::{self, Guest},
    volumes::{self, HostVolumes},
    words,
};
use crate::{
    http::error::{ApiError, ApiResult, Code},
    workspace::Confidential,
};

/// A request that will be carried out, if the runtime admits it and its host paths can be settled.
#[derive(Debug)]
pub struct ValidatedCreate {
    pub spec: Spec,
    pub facts: MutableFacts,
    pub secrets: Secrets,
    /// The request's map as it was sent, for the answer.
    pub echoed_metadata: Option<StringMap>,
    /// The entrypoint as it was sent, for the answer; reads show it split.
    pub echoed_entrypoint: Option<Vec<String>>,
    /// What a create from a repository keeps to itself.
    pub confidential: Confidential,
    hosts: HostVolumes,
}

/// The snapshot that a request names, found and fit to be restored from.
#[derive(Clone, Debug)]
pub struct Restored {
    pub snapshot: SnapshotId,
    /// What the runtime takes as the image.
    pub image: String,
}

/// What a restored sandbox runs when the request does not say.
const RESTORED_ENTRYPOINT: [&str; 3] = ["tail", "-f", "/dev/null"];

/// The one check that comes before the snapshot is looked up.
///
/// # Errors
/// 400 when an extension with a meaning has a value without one.
pub fn before_snapshot(request: &CreateSandboxRequest) -> ApiResult<()> {
    let Some(extensions) = &request.extensions else { return Ok(()) };
    renew_extension(extensions)?;
    wake_extension(extensions)
}

/// The snapshot to look up; a template makes the request's other sources meaningless.
pub fn wanted_snapshot(request: &CreateSandboxRequest) -> Option<&str> {
    let template = given(request.template_id.as_deref());
    request.snapshot_id.as_deref().filter(|id| given(Some(id)) && !template)
}

/// Names and values together.
const MAX_ENV_BYTES: usize = 256 << 10;
const MAX_EXTENSION_BYTES: usize = 64 << 10;

/// Checks and converts. `restored` is what [`wanted_snapshot`] turned out to be.
///
/// # Errors
/// The first rule that is broken.
pub fn create(
    mut request: CreateSandboxRequest,
    restored: Option<Restored>,
    rules: &CreateRules,
    now: Timestamp,
) -> ApiResult<ValidatedCreate> {
    before_snapshot(&request)?;
    bounded(&request)?;
    let mut extensions = request.extensions.take().unwrap_or_default();
    if let Some(wakes) = request.wake_on_access {
        extensions.insert(WAKE_ON_ACCESS_EXTENSION.to_owned(), wakes.to_string());
    }
    if restored.is_none() && wanted_snapshot(&request).is_some() {
        return Err(ApiError::new(Code::SnapshotNotFound, "snapshot not found"));
    }
    let hooks = hooks(request.lifecycle.take())?;
    refuse_absent_features(&extensions, rules)?;
    let echoed_entrypoint = request.entrypoint.clone();
    let default = restored.as_ref().map(|_| RESTORED_ENTRYPOINT.map(str::to_owned).to_vec());
    let alone = request.repository.is_some() && request.entrypoint.is_none();
    let entrypoint = match entrypoint(request.entrypoint.take(), &extensions, default) {
        // The agent holds the sandbox open.
        Err(_) if alone => Entrypoint::AgentOnly,
        entrypoint => entrypoint?,
    };
    let metadata = request.metadata.clone().unwrap_or_default();
    labels::check(&metadata)?;
    let platform = request.platform.take().map(|p| platform(&p.os, &p.arch, rules)).transpose()?;
    let expires_at = expiry(request.timeout, rules.max_timeout, now)?;
    if request.secure_access && rules.runtime.shares_ports {
        // Ports of the host lead past the proxy that would ask for the token.
        return Err(ApiError::invalid_parameter(
            "secureAccess needs docker.network_mode = \"bridge\": on the host's network every port is open",
        ));
    }
    let policies = policies::check(&request, &rules.runtime)?;
    let policy = policy::check(request.network_policy.take(), proxies_credentials(&request), &rules.runtime)?;
    let windows = platform.as_ref().is_some_and(|platform| platform.os == "windows");
    if windows && !hooks.is_empty() {
        return Err(ApiError::invalid_parameter("lifecycle hooks are not available in Windows guests"));
    }
    let guest = if windows { Guest::Windows } else { Guest::Container };
    let limits =
        resources::limits(&request.resource_limits.take().unwrap_or_default(), guest, &rules.runtime)?;
    let (env, egress) = environments(&mut request, policy, rules)?;
    let volumes = volumes::check(
        &request.volumes.take().unwrap_or_default(),
        &rules.allowed_host_paths,
        &rules.runtime,
    )?;
    let (image, registry, snapshot) = match request.repository {
        // Found later.
        Some(_) => (String::new(), None, None),
        None => image(request.image, restored)?,
    };
    if let Some(egress) = &egress {
        policy::check_environment(egress, &rules.runtime)?;
    }
    Ok(ValidatedCreate {
        spec: Spec {
            image,
            entrypoint,
            env,
            limits,
            platform,
            volumes: volumes.volumes,
            extensions,
            secure_access: request.secure_access,
            snapshot,
            egress,
            tenant: None,
            hooks,
            source: None,
            policies,
            standby: None,
        },
        facts: MutableFacts { expires_at, metadata },
        secrets: Secrets { registry, object_stores: volumes.keys },
        echoed_metadata: request.metadata,
        echoed_entrypoint,
        confidential: Confidential::default(),
        hosts: volumes.hosts,
    })
}

/// What is kept with a sandbox is kept in memory, too.
fn bounded(request: &CreateSandboxRequest) -> ApiResult<()> {
    let env =
        request.env.iter().flatten().map(|(name, value)| name.len() + value.as_ref().map_or(0, String::len));
    let extensions = request.extensions.iter().flatten().map(|(name, value)| name.len() + value.len());
    for (field, bytes, most) in
        [("env", env.sum::<usize>(), MAX_ENV_BYTES), ("extensions", extensions.sum(), MAX_EXTENSION_BYTES)]
    {
        if bytes > most {
            return Err(ApiError::invalid_parameter(format!(
                "{field} has {bytes} bytes; at most {most} are kept"
            )));
        }
    }
    Ok(())
}

impl ValidatedCreate {
    /// Settles the volumes that lie on the host: the last check, because it makes directories.
    ///
    /// # Errors
    /// 400 and 500 `VOLUME::*`.
    pub async fn settle(mut self, rules: &Arc<CreateRules>) -> ApiResult<Self> {
        if self.hosts.is_empty() || !rules.host_files_are_here {
            return Ok(self);
        }
        let rules = rules.clone();
        // Paths may lie on storage that is slow, or gone.
        tokio::task::spawn_blocking(move || {
            self.hosts.settle(&rules.allowed_host_paths, &mut self.spec.volumes)?;
            Ok(self)
        })
        .await
        .map_err(|_| ApiError::internal())?
    }
}

/// What no single host has.
fn refuse_absent_features(extensions: &StringMap, rules: &CreateRules) -> ApiResult<()> {
    let name = rules.runtime.name;
    if given(extensions.get(POOL_REF_EXTENSION).map(String::as_str)) {
        let message = format!("pools are not available on the {name} runtime");
        return Err(ApiError::new(Code::UnsupportedPoolRef, message));
    }
    Ok(())
}

/// The shapes were checked when the body was read; schedules and sizes are checked here, where the agent's own rules are.
fn hooks(asked: Option<LifecycleHooks>) -> ApiResult<Hooks> {
    let Some(asked) = asked else { return Ok(Hooks::default()) };
    let seconds = |asked: Option<i64>| asked.and_then(|seconds| u64::try_from(seconds).ok());
    let hook =
        |hook: LifecycleHook| Hook { command: hook.command, timeout_seconds: seconds(hook.timeout_seconds) };
    let hooks = Hooks {
        pre_start: asked.pre_start.map(hook),
        pre_stop: asked.pre_stop.map(hook),
        periodic: asked
            .periodic
            .unwrap_or_default()
            .into_iter()
            .map(|hook| PeriodicHook {
                name: hook.name.trim().to_owned(),
                schedule: hook.schedule,
                command: hook.command,
                timeout_seconds: seconds(hook.timeout_seconds),
            })
            .collect(),
    };
    hooks.check().map_err(|broken| ApiError::invalid_parameter(broken.to_string()))?;
    Ok(hooks)
}

fn proxies_credentials(request: &CreateSandboxRequest) -> bool {
    request.credential_proxy.as_ref().is_some_and(|proxy| proxy.enabled)
}

type Environment = Vec<(String, String)>;

fn environments(
    request: &mut CreateSandboxRequest,
    policy: Option<NetworkPolicy>,
    rules: &CreateRules,
) -> ApiResult<(Environment, Option<Egress>)> {
    let credential_proxy = proxies_credentials(request);
    let enforcer = match (&policy, credential_proxy) {
        (None, _) => Enforcer::None,
        (Some(_), false) => Enforcer::Policy,
        (Some(_), true) => Enforcer::CredentialProxy,
    };
    let both = environment::divide(request.env.take().unwrap_or_default(), &rules.runtime, enforcer)?;
    Ok((both.sandbox, policy.map(|policy| Egress { policy, credential_proxy, env: both.egress })))
}

fn image(
    asked: Option<ImageSpec>,
    restored: Option<Restored>,
) -> ApiResult<(String, Option<Credentials>, Option<SnapshotId>)> {
    if let Some(restored) = restored {
        return Ok((restored.image, None, Some(restored.snapshot)));
    }
    let image = asked.ok_or_else(|| ApiError::invalid_parameter("image is required"))?;
    refuse_userinfo(&image.uri)?;
    let registry = image.auth.map(|a| Credentials { username: a.username, password: a.password });
    Ok((image.uri.trim().to_owned(), registry, None))
}

/// A password in the reference would end up in logs and answers; it belongs into `image.auth`.
fn refuse_userinfo(reference: &str) -> ApiResult<()> {
    let registry = reference.split_once('/').map_or("", |(registry, _)| registry);
    if reference.contains("://") || registry.contains('@') {
        return Err(ApiError::invalid_parameter(
            "image.uri must be [registry/]repository[:tag|@digest] without scheme and credentials; use image.auth",
        ));
    }
    Ok(())
}

fn given(text: Option<&str>) -> bool {
    text.is_some_and(|t| !t.trim().is_empty())
}

fn renew_extension(extensions: &BTreeMap<String, String>) -> ApiResult<()> {
    let Some(text) = extensions.get(RENEW_ON_ACCESS_EXTENSION) else { return Ok(()) };
    let text = text.trim();
    let digits = !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    match text.parse::<u32>() {
        Ok(seconds) if digits && (300..=86_400).contains(&seconds) => Ok(()),
        _ => Err(ApiError::invalid_parameter(format!(
            "extensions[\"{RENEW_ON_ACCESS_EXTENSION}\"] must be a whole number of seconds from 300 to 86400"
        ))),
    }
}

fn wake_extension(extensions: &BTreeMap<String, String>) -> ApiResult<()> {
    match extensions.get(WAKE_ON_ACCESS_EXTENSION).map(String::as_str) {
        None | Some("true" | "false") => Ok(()),
        Some(_) => Err(ApiError::invalid_parameter(format!(
            "extensions[\"{WAKE_ON_ACCESS_EXTENSION}\"] must be `true` or `false`"
        ))),
    }
}

fn entrypoint(
    argv: Option<Vec<String>>,
    extensions: &BTreeMap<String, String>,
    default: Option<Vec<String>>,
) -> ApiResult<Entrypoint> {
    let chosen = extensions.get(ENTRYPOINT_EXTENSION).map(String::as_str);
    let argv = match argv.as_deref() {
        Some([line]) if line.contains(' ') => Some(words::split(line).ok_or_else(|| {
            ApiError::new(Code::InvalidEntrypoint, "the entrypoint has an unclosed quote or escape")
        })?),
        _ => argv,
    };
    match (argv, chosen) {
        (Some(argv), _) if argv.first().is_none_or(|program| program.is_empty()) => {
            Err(ApiError::new(Code::InvalidEntrypoint, "the entrypoint names no program"))
        }
        (Some(argv), _) if argv.iter().any(|arg| arg.contains('\0')) => {
            Err(ApiError::new(Code::InvalidEntrypoint, "the entrypoint contains a NUL byte"))
        }
        (Some(argv), _) => Ok(Entrypoint::Command(argv)),
        (None, Some("image")) => Ok(Entrypoint::Image),
        (None, Some("none")) => Ok(Entrypoint::AgentOnly),
        (None, _) => default
            .map(Entrypoint::Command)
            .ok_or_else(|| ApiError::new(Code::InvalidEntrypoint, "an entrypoint is required")),
    }
}

fn platform(os: &str, arch: &str, rules: &CreateRules) -> ApiResult<Platform> {
    let (os, arch) = (os.trim().to_ascii_lowercase(), arch.trim().to_ascii_lowercase());
    if !["linux", "windows"].contains(&os.as_str()) || !["amd64", "arm64"].contains(&arch.as_str()) {
        return Err(ApiError::invalid_parameter(
            "platform must be one of linux, windows with one of amd64, arm64",
        ));
    }
    let here = rules.arch;
    if !rules.runtime.capabilities.foreign_platforms && (os != "linux" || arch != here) {
        return Err(ApiError::invalid_parameter(format!("this server runs linux/{here} only")));
    }
    Ok(Platform { os, arch })
}

fn expiry(timeout: Option<i64>, max: Option<Duration>, now: Timestamp) -> ApiResult<Option<Timestamp>> {
    let Some(seconds) = timeout else { return Ok(None) };
    let too_far = || ApiError::invalid_parameter("timeout is too large");
    let timeout = Duration::from_secs(u64::try_from(seconds).map_err(|_| too_far())?);
    let at = now.checked_add(timeout).ok_or_else(too_far)?;
    if let Some(max) = max.filter(|max| timeout > *max) {
        return Err(ApiError::invalid_parameter(format!(
            "timeout must be at most {} seconds on this server",
            max.as_secs()
        )));
    }
    Ok(Some(at))
}

#[cfg(test)]
#[path = "tests.rs"]
mod tests;

#[cfg(test)]
#[path = "create_tests.rs"]
mod table;
