//! From what the engine knows to what the wire says.

use sandglass_api::lifecycle::{
    AllocationSummary, CreateSandboxResponse, ECHOED_EXTENSION_PREFIX, ImageSpec, PlatformSpec, Sandbox,
    SandboxPolicies, SandboxStatus, StringMap,
};
use sandglass_sandbox::{
    lifecycle::state::{State, Status},
    policy::Action,
    spec::Spec,
};

use super::present_workspace;
pub(super) use super::present_workspace::{complete, in_short, service};
use crate::engine::{index::Entry, policies::UseView};

fn status(status: Status) -> SandboxStatus {
    SandboxStatus {
        state: status.state.word().to_owned(),
        reason: Some(status.reason.to_owned()),
        message: status.message,
        last_transition_at: Some(status.since.into()),
    }
}

fn status_of(entry: &Entry) -> SandboxStatus {
    entry.status().map_or_else(
        || SandboxStatus {
            state: State::Stopping.word().to_owned(),
            reason: None,
            message: None,
            last_transition_at: None,
        },
        status,
    )
}

fn platform(spec: &Spec) -> Option<PlatformSpec> {
    spec.platform.as_ref().map(|p| PlatformSpec { os: p.os.clone(), arch: p.arch.clone() })
}

/// Only extensions that were made to be round-tripped are echoed.
fn extensions(spec: &Spec) -> Option<StringMap> {
    let echoed: StringMap = spec
        .extensions
        .iter()
        .filter(|(name, _)| name.starts_with(ECHOED_EXTENSION_PREFIX))
        .map(|(name, value)| (name.clone(), value.clone()))
        .collect();
    (!echoed.is_empty()).then_some(echoed)
}

fn allocation(pool: &str) -> AllocationSummary {
    AllocationSummary { mode: "pool".to_owned(), pool_ref: pool.to_owned(), state: "allocated".to_owned() }
}

/// A sandbox as GET and list show it.
pub fn sandbox(entry: &Entry) -> Sandbox {
    let spec = entry.spec();
    let facts = entry.facts();
    Sandbox {
        id: entry.id.to_string(),
        // What a snapshot is restored from is the runtime's own business.
        image: spec.filter(|s| s.snapshot.is_none()).map(|s| ImageSpec { uri: s.image.clone(), auth: None }),
        snapshot_id: spec.and_then(|s| s.snapshot).map(|snapshot| snapshot.to_string()),
        platform: spec.and_then(platform),
        status: status_of(entry),
        metadata: facts.map(|f| f.metadata.clone()).unwrap_or_default(),
        extensions: spec.and_then(extensions),
        allocation: entry.pool().map(allocation),
        entrypoint: entry.entrypoint(),
        expires_at: facts.and_then(|f| f.expires_at).map(Into::into),
        created_at: entry.created_at().into(),
        source: None,
        generation: None,
        progress: None,
        agent: None,
        services: None,
        uptime_seconds: None,
        last_failure: None,
        policies: None,
        seed_state: None,
        seed_uptime_seconds: None,
    }
}

/// The policies of a sandbox and how far they are.
pub fn policies(entry: &Entry, usage: Option<UseView>) -> Option<SandboxPolicies> {
    let policies = entry.policies()?;
    let idle = policies.idle;
    let reserve = (policies.on_expire != Action::Terminate).then_some(policies.expire_reserve_seconds);
    Some(SandboxPolicies {
        on_expire: policies.on_expire.word().to_owned(),
        expire_reserve_seconds: reserve,
        idle_timeout_seconds: idle.map(|idle| idle.timeout_seconds),
        idle_action: idle.map(|idle| idle.action.word().to_owned()),
        max_presence_extension_seconds: idle.map(|idle| idle.max_presence_seconds),
        leased_until: usage.as_ref().and_then(|usage| usage.leased_until).map(Into::into),
        idle_at: usage.as_ref().and_then(|usage| usage.idle_at).map(Into::into),
        in_use_until: usage.as_ref().filter(|_| idle.is_some()).map(|usage| usage.in_use_until.into()),
        last_failure: usage.and_then(|usage| usage.failure),
    })
}

/// The answer to a create. `metadata` is the request's map as it came.
pub fn created(entry: &Entry, metadata: Option<StringMap>) -> CreateSandboxResponse {
    let spec = entry.spec();
    CreateSandboxResponse {
        id: entry.id.to_string(),
        status: status_of(entry),
        metadata,
        extensions: spec.and_then(extensions),
        platform: spec.and_then(platform),
        expires_at: entry.facts().and_then(|f| f.expires_at).map(Into::into),
        created_at: entry.created_at().into(),
        entrypoint: entry.entrypoint(),
        source: present_workspace::source(entry),
        generation: spec.and_then(|s| s.source.as_ref()).map(|_| present_workspace::GENERATION),
    }
}
