//! Whose output is kept of a box: of what was declared for it. A name is a folder on the server's disk, and an agent's own choice.

use sandglass_bridge::wire::{AckedLog, LogFrame};
use sandglass_sandbox::spec::Spec;
use sandglass_supervise::plan::Phase;

/// How the agent calls the hook that the request brings along.
const PRE_START: &str = "preStart";

/// Whether the spec has a service, a phase or a hook whose output this is.
fn is_declared(spec: &Spec, name: &str) -> bool {
    let Some(source) = spec.source.as_deref() else { return false };
    if let Some(service) = name.strip_prefix("service.") {
        return source.services.iter().any(|known| known.name == service);
    }
    let Some(step) = name.strip_prefix("boot.") else { return false };
    let (phase, label) = step.split_once('.').map_or((step, None), |(phase, label)| (phase, Some(label)));
    let Some(phase) = Phase::ALL.into_iter().find(|known| known.name() == phase) else { return false };
    let Some(label) = label else { return true };
    let of_recipe = source.found.as_ref().map(|found| match phase {
        Phase::Setup => found.setup.as_slice(),
        Phase::Start => found.start.as_slice(),
        Phase::Sync | Phase::Services | Phase::Entrypoint => &[],
    });
    let of_request = phase == Phase::Start && label == PRE_START && spec.hooks.pre_start.is_some();
    of_request || of_recipe.is_some_and(|hooks| hooks.iter().any(|hook| hook.label == label))
}

/// Takes out what nobody declared. It is acknowledged, so that an agent with more sources than this server knows does not stand still.
pub(super) fn take_out_undeclared(spec: &Spec, frames: &mut Vec<LogFrame>) -> Vec<AckedLog> {
    let undeclared = frames.extract_if(.., |frame| !is_declared(spec, &frame.source));
    undeclared
        .map(|frame| AckedLog { offset: frame.end(), source: frame.source, stream: frame.stream })
        .collect()
}
