use sandglass_sandbox::{ports::runtime::Exposure, spec::Entrypoint};

use super::*;

fn observed(id: SandboxId, revision: u64) -> Observation {
    let at = Timestamp::clamped(1);
    Observation {
        id,
        revision,
        spec: Spec::new("i", Entrypoint::AgentOnly),
        entrypoint: vec![],
        facts: MutableFacts::default(),
        condition: Condition::Running,
        created_at: at,
        started_at: None,
        since: at,
        address: None,
        exposure: Exposure::None,
        agent_token: String::new(),
        route_token: String::new(),
        egress_token: None,
    }
}

#[test]
fn an_observation_that_was_under_way_does_not_bring_a_removed_sandbox_back() {
    let (index, id) = (Index::default(), SandboxId::random());
    assert_eq!(index.observe(observed(id, 1)), News::Appeared);
    assert!(index.vanished(id).is_some());
    assert_eq!(index.observe(observed(id, 2)), News::Stale);
    assert!(index.get(id).is_none());
}

#[test]
fn an_older_observation_does_not_overwrite_a_newer_one() {
    let (index, id) = (Index::default(), SandboxId::random());
    index.observe(observed(id, 5));
    let mut paused = observed(id, 4);
    paused.condition = Condition::Paused;
    assert_eq!(index.observe(paused), News::Stale);
    assert_eq!(index.get(id).and_then(|e| e.observed).map(|o| o.condition.clone()), Some(Condition::Running));
}
