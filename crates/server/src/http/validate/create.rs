//! The checks of a create that need no runtime, in the documented order.

use std::{collections::BTreeMap, path::PathBuf, time::Duration};

use sandglass_api::lifecycle::{
    CreateSandboxRequest, ENTRYPOINT_EXTENSION, POOL_REF_EXTENSION, RENEW_ON_ACCESS_EXTENSION, StringMap,
};
use sandglass_sandbox::{
    Timestamp,
    spec::{Credentials, Entrypoint, MutableFacts, Platform, Secrets, Spec},
};
use tracing::warn;

use super::{labels, resources, volumes, words};
use crate::http::error::{ApiError, ApiResult, Code};

/// What the configuration says about creates.
#[derive(Clone, Debug)]
pub struct CreateRules {
    pub max_timeout: Option<Duration>,
    pub allowed_host_paths: Vec<PathBuf>,
    /// The only architecture that runs here.
    pub arch: &'static str,
}

/// A request that will be carried out.
#[derive(Debug)]
pub struct ValidatedCreate {
    pub spec: Spec,
    pub facts: MutableFacts,
    pub secrets: Secrets,
    /// The request's map as it was sent, for the answer.
    pub echoed_metadata: Option<StringMap>,
    /// The entrypoint as it was sent, for the answer; reads show it split.
    pub echoed_entrypoint: Option<Vec<String>>,
}

/// Environment names that only an egress sidecar reads.
const EGRESS_PREFIX: &str = "OPENSANDBOX_EGRESS_";
const EGRESS_ALLOWED: &[&str] = &[
    "LOG_LEVEL",
    "DNS_UPSTREAM_TIMEOUT",
    "MITMPROXY_SSL_INSECURE",
    "MITMPROXY_TRANSPARENT",
    "MITMPROXY_EXTRA_PORTS",
    "DENY_WEBHOOK",
    "METRICS_EXTRA_ATTRS",
    "CREDENTIAL_VAULT_REQUIRE_TLS",
    "CREDENTIAL_VAULT_REQUIRE_SCOPED_MATCH",
    "CREDENTIAL_VAULT_TRUSTED_PROXY_CIDRS",
    "POLICY_FILE",
];

/// Checks and converts.
pub fn create(
    request: CreateSandboxRequest,
    rules: &CreateRules,
    now: Timestamp,
) -> ApiResult<ValidatedCreate> {
    let extensions = request.extensions.unwrap_or_default();
    renew_extension(&extensions)?;
    let template = given(request.template_id.as_deref());
    if !template && given(request.snapshot_id.as_deref()) {
        return Err(ApiError::new(Code::SnapshotNotFound, "snapshot not found"));
    }
    if request.lifecycle.is_some() {
        return Err(ApiError::invalid_parameter("lifecycle hooks are not available on the embedded runtime"));
    }
    if given(extensions.get(POOL_REF_EXTENSION).map(String::as_str)) {
        return Err(ApiError::new(
            Code::UnsupportedPoolRef,
            "pools are not available on the embedded runtime",
        ));
    }
    let echoed_entrypoint = request.entrypoint.clone();
    let entrypoint = entrypoint(request.entrypoint, &extensions)?;
    let metadata = request.metadata.clone().unwrap_or_default();
    labels::check(&metadata)?;
    let platform = request.platform.map(|p| platform(&p.os, &p.arch, rules.arch)).transpose()?;
    let expires_at = expiry(request.timeout, rules.max_timeout, now)?;
    if request.network_policy.is_some() || request.credential_proxy.as_ref().is_some_and(|p| p.enabled) {
        return Err(ApiError::invalid_parameter(
            "networkPolicy and credentialProxy are not available on the embedded runtime yet",
        ));
    }
    let limits = resources::limits(&request.resource_limits.unwrap_or_default())?;
    let env = environment(request.env.unwrap_or_default())?;
    let volumes = volumes::check(&request.volumes.unwrap_or_default(), &rules.allowed_host_paths)?;
    let image = request.image.ok_or_else(|| ApiError::invalid_parameter("image is required"))?;
    refuse_userinfo(&image.uri)?;
    let registry = image.auth.map(|a| Credentials { username: a.username, password: a.password });
    Ok(ValidatedCreate {
        spec: Spec {
            image: image.uri.trim().to_owned(),
            entrypoint,
            env,
            limits,
            platform,
            volumes,
            extensions,
            secure_access: request.secure_access,
            snapshot: None,
            egress: None,
            tenant: None,
        },
        facts: MutableFacts { expires_at, metadata },
        secrets: Secrets { registry, ..Secrets::default() },
        echoed_metadata: request.metadata,
        echoed_entrypoint,
    })
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

fn entrypoint(argv: Option<Vec<String>>, extensions: &BTreeMap<String, String>) -> ApiResult<Entrypoint> {
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
        (None, _) => Err(ApiError::new(Code::InvalidEntrypoint, "an entrypoint is required")),
    }
}

fn platform(os: &str, arch: &str, here: &str) -> ApiResult<Platform> {
    let (os, arch) = (os.trim().to_ascii_lowercase(), arch.trim().to_ascii_lowercase());
    if !["linux", "windows"].contains(&os.as_str()) || !["amd64", "arm64"].contains(&arch.as_str()) {
        return Err(ApiError::invalid_parameter(
            "platform must be one of linux, windows with one of amd64, arm64",
        ));
    }
    if os != "linux" || arch != here {
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

fn environment(asked: BTreeMap<String, Option<String>>) -> ApiResult<Vec<(String, String)>> {
    let mut env = Vec::with_capacity(asked.len());
    for (name, value) in asked {
        if let Some(setting) = name.strip_prefix(EGRESS_PREFIX) {
            if !EGRESS_ALLOWED.contains(&setting) {
                return Err(ApiError::invalid_parameter(format!(
                    "env must not contain {EGRESS_PREFIX}… names of this kind"
                )));
            }
            warn!(name, "an egress setting without a network policy is ignored");
            continue;
        }
        let Some(value) = value else { continue };
        if name.is_empty() || name.contains(['=', '\0']) || value.contains('\0') {
            return Err(ApiError::invalid_parameter(
                "env names must not be empty or contain '=', and nothing may contain NUL",
            ));
        }
        env.push((name, value));
    }
    Ok(env)
}

#[cfg(test)]
#[path = "tests.rs"]
mod tests;

#[cfg(test)]
#[path = "create_tests.rs"]
mod table;
