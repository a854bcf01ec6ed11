use std::net::IpAddr;
use std::time::Duration;

use super::*;
use crate::rehearsal::{Free, Kernel, Rehearsal, settings};

const FIRST: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(192, 0, 2, 1));
const SECOND: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(192, 0, 2, 2));
const MINUTE: Duration = Duration::from_secs(60);

fn rehearse(policy: &str) -> Rehearsal {
    Rehearsal::new(
        &settings(&[("OPENSANDBOX_EGRESS_RULES", policy), ("SANDGLASS_EGRESS_ALWAYS_DIR", "/nonexistent")]),
        Free,
    )
}

fn connection(address: IpAddr, port: u16, host: Option<&str>) -> Connection {
    let asked = host.map_or(Asked::Nothing, |host| Asked::Host(host.to_owned()));
    Connection { protocol: 6, address, port, asked }
}

fn forgotten(address: IpAddr) -> Connection {
    Connection { asked: Asked::Forgotten, ..connection(address, 443, None) }
}

fn policy(text: &str) -> Policy {
    Policy::parse(text).unwrap()
}

const TWO: &str = r#"{"egress":[{"action":"allow","target":"a.test"},{"action":"allow","target":"b.test"}]}"#;
const ONE: &str = r#"{"egress":[{"action":"allow","target":"a.test"}]}"#;

#[test]
fn addresses_of_names_that_stay_allowed_stay_open() {
    let stand = rehearse(TWO);
    let mut plane = stand.plane.lock().unwrap();
    assert_eq!(plane.admit("a.test", &[FIRST], MINUTE).unwrap(), Admission::Open);
    assert_eq!(plane.admit("b.test", &[SECOND], MINUTE).unwrap(), Admission::Open);
    assert_eq!(plane.admit("c.test", &[SECOND], MINUTE).unwrap(), Admission::Denied);
    assert_eq!(stand.kernel.lock().admitted, [(FIRST, MINUTE), (SECOND, MINUTE)]);
    plane.set(policy(ONE)).unwrap();
    let plan = stand.kernel.lock().plans.last().unwrap().clone();
    assert_eq!(plan.dynamic.iter().map(|(address, _)| *address).collect::<Vec<_>>(), [FIRST]);
    assert_eq!((plan.names, plan.named_http), (NameGate::On, vec![80]));
    // What was forgotten is not open again when the name is.
    plane.set(policy(TWO)).unwrap();
    assert_eq!(stand.kernel.lock().plans.last().unwrap().dynamic.len(), 1);
    assert!(plane.leads_to("a.test", FIRST) && !plane.leads_to("b.test", SECOND));
}

#[test]
fn a_kernel_that_does_not_open_an_address_is_told_of() {
    let stand = rehearse(ONE);
    stand.kernel.lock().broken = Some("admit");
    let mut plane = stand.plane.lock().unwrap();
    assert!(plane.admit("a.test", &[FIRST], MINUTE).is_err());
    assert!(!plane.leads_to("a.test", FIRST));
}

#[test]
fn connections_end_by_what_they_are_for() {
    let stand = rehearse(TWO);
    let mut plane = stand.plane.lock().unwrap();
    plane.admit("a.test", &[FIRST], MINUTE).unwrap();
    plane.admit("b.test", &[FIRST, SECOND], MINUTE).unwrap();
    let unknown = IpAddr::from([192, 0, 2, 99]);
    stand.kernel.lock().connections = vec![
        connection(FIRST, 443, Some("a.test")),
        connection(FIRST, 443, Some("b.test")),
        connection(FIRST, 7, None),
        connection(SECOND, 7, None),
        connection(unknown, 7, None),
    ];
    plane.set(policy(ONE)).unwrap();
    // An address that a denied name shares tells nothing about a connection without a name.
    assert_eq!(stand.kernel.lock().connections, [connection(FIRST, 443, Some("a.test"))]);

    let listed = r#"{"defaultAction":"allow","egress":[{"action":"deny","target":"192.0.2.1"}]}"#;
    stand.kernel.lock().connections.push(connection(unknown, 7, None));
    plane.set(policy(listed)).unwrap();
    assert_eq!(stand.kernel.lock().connections, [connection(unknown, 7, None)]);
}

#[test]
fn what_was_forgotten_is_judged_as_if_it_were_denied() {
    let none = r#"{"defaultAction":"allow"}"#;
    let one = r#"{"defaultAction":"allow","egress":[{"action":"deny","target":"a.test"},{"action":"allow","target":"192.0.2.3"}]}"#;
    let stand = rehearse(none);
    let mut plane = stand.plane.lock().unwrap();
    plane.admit("a.test", &[FIRST], Duration::from_secs(1)).unwrap();
    assert!(stand.kernel.lock().admitted.is_empty());
    let other = IpAddr::from([192, 0, 2, 3]);
    let all = [
        connection(FIRST, 7, None),
        connection(SECOND, 443, Some("b.test")),
        connection(other, 7, None),
        forgotten(SECOND),
        forgotten(other),
    ];
    stand.kernel.lock().connections = all.to_vec();
    // Whoever resolves enough other names makes them forget.
    for number in 0..9000 {
        plane.admit(&format!("{number}.test"), &[other], MINUTE).unwrap();
    }
    plane
        .set(policy(r#"{"defaultAction":"allow","egress":[{"action":"allow","target":"c.test"}]}"#))
        .unwrap();
    assert_eq!(stand.kernel.lock().connections.len(), 5, "no name is denied");
    assert!(stand.kernel.lock().plans.last().unwrap().dynamic.is_empty());
    plane.set(policy(one)).unwrap();
    let left = [connection(SECOND, 443, Some("b.test")), connection(other, 7, None), forgotten(other)];
    assert_eq!(stand.kernel.lock().connections, left);
    // From here on it is known again what is not known.
    stand.kernel.lock().connections = vec![connection(SECOND, 7, None)];
    plane.set(policy(r#"{"defaultAction":"allow","egress":[{"action":"deny","target":"c.test"}]}"#)).unwrap();
    assert_eq!(stand.kernel.lock().connections.len(), 1);
}

#[test]
fn an_address_that_names_may_not_lead_to_any_more_is_left() {
    let private = IpAddr::from([10, 1, 2, 3]);
    let both =
        r#"{"egress":[{"action":"allow","target":"a.test"},{"action":"allow","target":"10.0.0.0/8"}]}"#;
    let stand = rehearse(both);
    let mut plane = stand.plane.lock().unwrap();
    plane.admit("a.test", &[private, FIRST], MINUTE).unwrap();
    stand.kernel.lock().connections = [private, FIRST]
        .iter()
        .flat_map(|at| [connection(*at, 443, Some("a.test")), connection(*at, 7, None)])
        .collect();
    plane.set(policy(ONE)).unwrap();
    let left = [connection(FIRST, 443, Some("a.test")), connection(FIRST, 7, None)];
    assert_eq!(stand.kernel.lock().connections, left);
}

#[test]
fn a_worker_that_starts_ends_what_its_rules_deny() {
    let values = settings(&[("SANDGLASS_EGRESS_ALWAYS_DIR", "/nonexistent")]);
    let held = [connection(FIRST, 443, Some("b.test")), connection(FIRST, 7, None), forgotten(FIRST)];
    let start_over = |state: &State| {
        let kernel = Kernel::default();
        kernel.lock().connections = held.to_vec();
        Rehearsal::with_kernel(&values, state.clone(), Free, kernel)
    };
    let state = State::create().unwrap();
    let stand = Rehearsal::with_state(&values, state.clone(), Free);
    stand.plane.lock().unwrap().set(policy(TWO)).unwrap();
    stand.plane.lock().unwrap().admit("a.test", &[FIRST], MINUTE).unwrap();
    // The same rules: what an earlier worker knew is not held against anybody.
    assert_eq!(start_over(&state).kernel.lock().connections, held);
    // It died when the policy was stored and not in force yet.
    state.section(Section::Policy).replace(&encoded(&policy(ONE))).unwrap();
    assert_eq!(start_over(&state).kernel.lock().connections, [connection(FIRST, 7, None)]);
}

#[test]
fn the_next_worker_knows_everything() {
    let state = State::create().unwrap();
    let values = settings(&[("SANDGLASS_EGRESS_ALWAYS_DIR", "/nonexistent")]);
    let stand = Rehearsal::with_state(&values, state.clone(), Free);
    {
        let mut plane = stand.plane.lock().unwrap();
        plane.set(policy(ONE)).unwrap();
        plane.admit("a.test", &[FIRST], MINUTE).unwrap();
    }
    let next = Rehearsal::with_state(&values, state, Free);
    assert_eq!(*next.plane.lock().unwrap().policy(), policy(ONE));
    assert_eq!(next.kernel.lock().plans[0].dynamic[0].0, FIRST);
}

#[test]
fn private_addresses_close_with_the_rule_that_opened_them() {
    let private = IpAddr::from([10, 1, 2, 3]);
    let both =
        r#"{"egress":[{"action":"allow","target":"a.test"},{"action":"allow","target":"10.0.0.0/8"}]}"#;
    let stand = rehearse(both);
    let mut plane = stand.plane.lock().unwrap();
    plane.admit("a.test", &[private], MINUTE).unwrap();
    plane.set(policy(ONE)).unwrap();
    assert!(stand.kernel.lock().plans.last().unwrap().dynamic.is_empty());
}

#[test]
fn files_with_rules_that_always_apply_are_read_again() {
    let folder = tempfile::tempdir().unwrap();
    let place = folder.path().to_str().unwrap();
    let values = settings(&[("OPENSANDBOX_EGRESS_RULES", ONE), ("SANDGLASS_EGRESS_ALWAYS_DIR", place)]);
    let stand = Rehearsal::new(&values, Free);
    let mut plane = stand.plane.lock().unwrap();
    assert!(plane.refresh().unwrap().is_none());
    std::fs::write(folder.path().join("deny.always"), "a.test\n").unwrap();
    stand.kernel.lock().broken = Some("apply");
    assert!(plane.refresh().is_err());
    assert_eq!(plane.rules().name("a.test").action, Action::Allow);
    stand.kernel.lock().broken = None;
    assert!(plane.refresh().unwrap().is_some(), "it is tried again");
    assert_eq!(plane.rules().name("a.test").rule, "deny a.test (always)");
    assert_eq!(plane.policy().egress.len(), 1, "they are not part of the policy");
    assert!(
        matches!(&stand.notebook.events()[..], [Event::Noted { what, .. }] if what == "always-rules-changed")
    );
}

#[test]
fn interception_decides_about_ports() {
    let values = settings(&[
        ("OPENSANDBOX_EGRESS_RULES", ONE),
        ("OPENSANDBOX_EGRESS_MITMPROXY_TRANSPARENT", "1"),
        ("OPENSANDBOX_EGRESS_MITMPROXY_EXTRA_PORTS", "8443"),
        ("OPENSANDBOX_EGRESS_BLOCK_DOH_443", "1"),
    ]);
    let stand = Rehearsal::new(&values, Free);
    let plan = stand.kernel.lock().plans[0].clone();
    assert_eq!(plan.intercept, [80, 443, 8443]);
    assert_eq!(plan.doh, Doh::RefuseEverywhere);
    assert!(stand.plane.lock().unwrap().hides_service_records());
}
