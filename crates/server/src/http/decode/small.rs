//! The smaller bodies.

use std::{collections::BTreeMap, time::Duration};

use sandglass_api::lifecycle::{NetworkPolicy, NetworkRule};
use sandglass_sandbox::{Timestamp, policy::LONGEST_LEASE};
use serde_json::Value;

use crate::http::{error::ApiResult, fields::Findings};

/// `{"expiresAt": instant}`
pub fn renew(value: &Value) -> ApiResult<Timestamp> {
    let mut findings = Findings::new("body");
    let at =
        findings.object(value).cloned().and_then(|o| findings.required(&o, "expiresAt", Findings::instant));
    // Clamped: an instant before 1970 is in the past whatever it is.
    findings.finish(at).map(Timestamp::clamped)
}

/// `{"leaseSeconds": seconds}`
pub fn activity(value: &Value) -> ApiResult<Duration> {
    let longest = i64::try_from(LONGEST_LEASE.as_secs()).unwrap_or(i64::MAX);
    let mut findings = Findings::new("body");
    let seconds = findings.object(value).cloned().and_then(|object| {
        findings.only(&object, &["leaseSeconds"]);
        findings.required(&object, "leaseSeconds", |f, v| f.integer(v, 1, longest))
    });
    findings.finish(seconds).map(|seconds| Duration::from_secs(seconds.unsigned_abs()))
}

/// A flat object from text to text or `null`.
pub fn metadata_patch(value: &Value) -> ApiResult<BTreeMap<String, Option<String>>> {
    let mut findings = Findings::new("body");
    let patch = findings.nullable_map(value);
    findings.finish(patch)
}

/// `{"name"?: text}`, or nothing at all: the snapshot's name.
pub fn snapshot(value: Option<&Value>) -> ApiResult<Option<String>> {
    let Some(value) = value else { return Ok(None) };
    let mut findings = Findings::new("body");
    let name =
        findings.object(value).and_then(|object| findings.optional(object, "name", Findings::nonempty));
    findings.finish(Some(name))
}

fn rule(findings: &mut Findings, value: &Value) -> Option<NetworkRule> {
    let object = findings.object(value)?;
    let action = findings.required(object, "action", Findings::string);
    let target = findings.required(object, "target", Findings::nonempty);
    Some(NetworkRule { action: action?, target: target? })
}

/// `{defaultAction?, egress: [{action, target}]}`
pub(super) fn policy_value(findings: &mut Findings, value: &Value) -> Option<NetworkPolicy> {
    let object = findings.object(value)?;
    let before = findings.count();
    let default_action = findings.optional(object, "defaultAction", Findings::string);
    let egress = findings.optional(object, "egress", |f, v| f.list(v, 0, rule)).unwrap_or_default();
    (findings.count() == before).then_some(NetworkPolicy { default_action, egress })
}

/// The body of a policy PUT.
pub fn policy(value: &Value) -> ApiResult<NetworkPolicy> {
    let mut findings = Findings::new("body");
    let policy = policy_value(&mut findings, value);
    findings.finish(policy)
}

/// The body of a policy PATCH: a list of rules.
pub fn rules(value: &Value) -> ApiResult<Vec<NetworkRule>> {
    let mut findings = Findings::new("body");
    let rules = findings.list(value, 0, rule);
    findings.finish(rules)
}

/// The body of a policy DELETE: a list of targets.
pub fn targets(value: &Value) -> ApiResult<Vec<String>> {
    let mut findings = Findings::new("body");
    let targets = findings.strings(value, 0);
    findings.finish(targets)
}

/// The body that creates a template.
pub fn template(value: &Value) -> ApiResult<()> {
    const NAMES: &[&str] =
        &["image", "publish", "resourceLimits", "entrypoint", "env", "metadata", "readiness", "format"];
    let mut findings = Findings::new("body");
    if let Some(object) = findings.object(value) {
        findings.required(object, "image", Findings::nonempty);
        findings.required(object, "publish", Findings::nonempty);
        findings.optional(object, "resourceLimits", |f, v| {
            let limits = f.string_map(v)?;
            if limits.keys().any(|k| !["cpu", "memory", "disk"].contains(&k.as_str())) {
                f.broken("only cpu, memory and disk can be limited");
            }
            Some(())
        });
        findings.optional(object, "entrypoint", |f, v| f.strings(v, 1));
        findings.optional(object, "env", Findings::string_map);
        findings.optional(object, "metadata", Findings::string_map);
        findings.optional(object, "readiness", |f, v| {
            let readiness = f.object(v)?;
            f.optional(readiness, "probe", Findings::string);
            f.optional(readiness, "warmupSeconds", |f, v| f.integer(v, 0, i64::MAX));
            Some(())
        });
        findings.optional(object, "format", |f, v| f.word(v, &["native", "overlaybd"]));
        findings.only(object, NAMES);
    }
    findings.finish(Some(()))
}

/// How a create went, as its client saw it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CreateReport {
    pub took: Duration,
    pub success: bool,
}

/// The body of a client's metric event.
pub fn metrics_event(value: &Value) -> ApiResult<CreateReport> {
    let mut findings = Findings::new("body");
    let mut report = None;
    if let Some(object) = findings.object(value) {
        findings.required(object, "eventType", |f, v| f.word(v, &["sandbox.create"]));
        let took = findings.required(object, "createDurationMs", |f, v| f.integer(v, 0, i64::MAX));
        let success = findings.required(object, "success", Findings::boolean);
        findings.optional(object, "sandboxId", Findings::string);
        findings.optional(object, "image", Findings::string);
        report = took.zip(success).map(|(took, success)| {
            let took = Duration::from_millis(u64::try_from(took).unwrap_or(0));
            CreateReport { took, success }
        });
    }
    findings.finish(report)
}
