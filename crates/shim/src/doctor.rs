//! Can this machine run boxes?
use serde::Serialize;

/// One probe's finding.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Check {
    pub name: &'static str,
    pub ok: bool,
    pub required: bool,
    pub found: String,
    pub remedy: String,
}

/// Probes this machine; `state_dir` need not exist.
pub fn probe(_state_dir: &std::path::Path) -> Vec<Check> {
    Vec::new()
}
