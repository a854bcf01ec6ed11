//! Boxes that are started ahead and become sandboxes later.

use sandglass_sandbox::{
    SandboxId,
    pool::Standby,
    ports::{
        RuntimeErrorKind,
        runtime::{Condition, StartPlan},
    },
    spec::{Entrypoint, MutableFacts, Spec},
};

use super::{IDLE, Subject, plan, removed, said, started_as};

fn ahead(subject: &Subject) -> StartPlan {
    let usual = plan(subject, IDLE);
    let standby = Standby { pool: "p".into(), revision: "r".into(), image: String::new() };
    let spec = Spec {
        standby: Some(standby),
        entrypoint: Entrypoint::AgentOnly,
        env: Vec::new(),
        ..usual.spec.clone()
    };
    let token = |kind: &str| format!("{kind}-of-the-pool");
    let (agent_token, route_token) = (token("agent"), token("route"));
    StartPlan { spec, facts: MutableFacts::default(), agent_token, route_token, ..usual }
}

pub(super) async fn a_box_that_waits_keeps_its_mark_until_it_is_assigned(subject: &Subject) {
    let waiting = started_as(subject, &ahead(subject)).await;
    assert_eq!(waiting.condition, Condition::Running);
    assert_eq!(waiting.spec.standby.as_ref().map(|mark| mark.pool.as_str()), Some("p"));
    let listed = subject.runtime.list().await.expect("list");
    let listed = listed.into_iter().find(|o| o.id == waiting.id).expect("it is listed");
    assert_eq!(listed.spec, waiting.spec);

    let asked = plan(subject, IDLE);
    for _ in 0..2 {
        let seen = subject.runtime.assign(waiting.id, &asked).await.expect("assign");
        assert_eq!((seen.id, &seen.condition), (waiting.id, &Condition::Running));
        assert_eq!((&seen.spec, &seen.facts), (&asked.spec, &asked.facts));
        assert_eq!(
            (seen.entrypoint.as_slice(), seen.created_at),
            (&["sleep", "1000"].map(str::to_owned)[..], asked.created_at)
        );
        assert_eq!((seen.agent_token.as_str(), seen.route_token.as_str()), ("agent-token", "route-token"));
        assert!(seen.revision > waiting.revision);
    }
    let seen = subject.runtime.inspect(waiting.id).await.expect("inspect").expect("it is there");
    assert_eq!((&seen.spec, &seen.facts), (&asked.spec, &asked.facts));
    let moved = MutableFacts { expires_at: None, ..asked.facts.clone() };
    let seen = subject.runtime.update_facts(waiting.id, &moved).await.expect("update");
    assert_eq!(seen.facts, moved);
    removed(subject, waiting.id).await;
}

pub(super) async fn nothing_can_be_assigned_where_nothing_waits(subject: &Subject) {
    let refused = subject.runtime.assign(SandboxId::random(), &plan(subject, IDLE)).await;
    assert_eq!(refused.expect_err("assign").kind, RuntimeErrorKind::NotFound);
}

pub(super) async fn an_assigned_box_is_so_after_a_restart(subject: &Subject) {
    let (waiting, assigned) =
        (started_as(subject, &ahead(subject)).await, started_as(subject, &ahead(subject)).await);
    let asked = plan(subject, IDLE);
    subject.runtime.assign(assigned.id, &asked).await.expect("assign");
    let again = subject.restarted.as_ref().expect("only run with one")().await;
    let listed = again.list().await.expect("list");
    let find = |id| listed.iter().find(|o| o.id == id).expect("it is listed");
    assert!(find(waiting.id).spec.standby.is_some());
    assert_eq!((&find(assigned.id).spec, &find(assigned.id).facts), (&asked.spec, &asked.facts));
    again.assign(waiting.id, &asked).await.expect("assign");
    for id in [waiting.id, assigned.id] {
        again.remove(id, std::time::Duration::ZERO).await.expect("remove");
    }
}

pub(super) async fn an_assigned_box_runs_what_was_asked_for(subject: &Subject) {
    let id = started_as(subject, &ahead(subject)).await.id;
    let asked = plan(subject, &["sh", "-c", "echo $GREETING $OPENSANDBOX_ID; echo complete; sleep 1000"]);
    subject.runtime.assign(id, &asked).await.expect("assign");
    let lines = said(subject, id, "complete").await;
    assert!(lines.contains(&format!("hello {id}")), "{lines:?}");
    removed(subject, id).await;
    let id = started_as(subject, &ahead(subject)).await.id;
    let refused = subject.runtime.assign(id, &plan(subject, &["/no/such/program"])).await;
    assert!(refused.expect_err("assign").message.contains("/no/such/program"));
    removed(subject, id).await;
}
