use serde_json::value::RawValue;

use super::super::{Caller, FatalVerdict, Settled};
use super::*;
use crate::wire::{AttachRequest, BootId, Event, GitCredentialRequest, HeartbeatReply, LogBytes, LogFrame};

const WALL: Timestamp = Timestamp::UNIX_EPOCH;

fn at(seconds: u64) -> Moment {
    Moment::from_millis(seconds * 1_000)
}

fn registration(sandbox: &str, generation: u64, token: &str) -> Registration {
    Registration {
        sandbox: sandbox.parse().unwrap(),
        generation,
        token: TokenHash::of(token),
        repositories: vec![RepositoryScope::new("git.example.com", "acme/web").unwrap()],
        times: LeaseTimes::default(),
    }
}

fn caller<'a>(sandbox: &'a str, token: &'a str, lease: Option<&'a str>) -> Caller<'a> {
    Caller { sandbox, generation: 1, token, lease }
}

fn request(boot: &str) -> AttachRequest {
    AttachRequest {
        sandbox_id: "s".parse().unwrap(),
        generation: 1,
        boot_id: boot.parse().unwrap(),
        agent_version: "1".into(),
        protocol_version: 1,
        capabilities: Vec::new(),
        last_seq: 0,
    }
}

fn event(seq: u64) -> Event {
    Event { seq, time: WALL, kind: "t".into(), data: RawValue::NULL.to_owned() }
}

fn registry() -> Registry {
    let mut registry = Registry::new(0xf);
    registry.register(registration("s", 1, "t"), at(0)).unwrap();
    registry
}

fn attach(registry: &mut Registry, boot: &str, now: Moment) -> Result<String, Refusal> {
    registry
        .attach(&caller("s", "t", None), &request(boot), now, WALL)
        .map(|reply| reply.lease_id.to_string())
}

fn beat(registry: &mut Registry, lease: &str, now: Moment) -> Result<HeartbeatReply, Refusal> {
    registry.heartbeat(&caller("s", "t", Some(lease)), now)
}

fn names(registry: &mut Registry) -> Vec<String> {
    let name = |notice: Notice| match notice {
        Notice::Attached { epoch, new_boot, .. } => format!("attached {epoch} new={new_boot}"),
        Notice::Live { epoch, recovered, .. } => format!("live {epoch} recovered={recovered}"),
        Notice::Unresponsive { epoch, .. } => format!("unresponsive {epoch}"),
        Notice::Lost { epoch, .. } => format!("lost {epoch}"),
        Notice::CommandExpired { command, .. } => format!("expired {command}"),
        Notice::CommandAbandoned { command, .. } => format!("abandoned {command}"),
    };
    registry.take_notices().map(name).collect()
}

#[test]
fn a_caller_must_be_who_the_token_says() {
    let mut registry = registry();
    registry.register(registration("other", 1, "u"), at(0)).unwrap();
    let mut refusal = |caller: Caller<'_>| registry.attach(&caller, &request("b"), at(1), WALL).unwrap_err();
    assert_eq!(refusal(caller("s", "wrong", None)), Refusal::BadToken);
    assert_eq!(refusal(caller("s", "", None)), Refusal::BadToken);
    assert_eq!(
        refusal(caller("unknown", "wrong", None)),
        Refusal::BadToken,
        "nothing is revealed without a token"
    );
    assert_eq!(refusal(caller("other", "t", None)), Refusal::WrongSandbox);
    assert_eq!(refusal(Caller { generation: 2, ..caller("s", "t", None) }), Refusal::WrongSandbox);
    assert_eq!(refusal(Caller { generation: 0, ..caller("s", "t", None) }), Refusal::Superseded);
    let other = AttachRequest { sandbox_id: "other".parse().unwrap(), ..request("b") };
    assert_eq!(
        registry.attach(&caller("s", "t", None), &other, at(1), WALL).unwrap_err(),
        Refusal::WrongSandbox
    );
}

#[test]
fn an_older_generation_is_superseded_whatever_it_tries() {
    let mut registry = registry();
    let lease = attach(&mut registry, "b", at(0)).unwrap();
    registry.register(registration("s", 2, "t2"), at(1)).unwrap();
    let old = caller("s", "t", Some(&lease));
    let git = GitCredentialRequest { host: "git.example.com".into(), path: "acme/web".into() };
    assert_eq!(attach(&mut registry, "b", at(2)), Err(Refusal::Superseded));
    assert_eq!(registry.heartbeat(&old, at(2)).unwrap_err(), Refusal::Superseded);
    assert_eq!(registry.admit(&old, vec![event(1)], at(2)).unwrap_err(), Refusal::Superseded);
    assert_eq!(registry.credential(&old, &git).unwrap_err(), Refusal::Superseded);
    assert_eq!(registry.fatal(&old).unwrap_err(), Refusal::Superseded);
    assert_eq!(registry.commands(&old, None, at(2)).unwrap_err(), Refusal::Superseded);
    assert_eq!(registry.register(registration("s", 1, "t"), at(2)), Err(Refusal::Superseded));
    let new = Caller { generation: 2, ..caller("s", "t2", None) };
    let request = AttachRequest { generation: 2, ..request("b2") };
    assert!(registry.attach(&new, &request, at(3), WALL).is_ok());
}

#[test]
fn a_newer_boot_takes_over_for_good_and_counts_its_events_anew() {
    let mut registry = registry();
    let old = attach(&mut registry, "b1", at(0)).unwrap();
    let admitted = registry.admit(&caller("s", "t", Some(&old)), vec![event(1), event(2)], at(0)).unwrap();
    assert_eq!(registry.commit("s", &admitted.ticket.unwrap()), Some(2));
    let pending =
        registry.admit(&caller("s", "t", Some(&old)), vec![event(3)], at(0)).unwrap().ticket.unwrap();
    let reply = registry.attach(&caller("s", "t", None), &request("b2"), at(1), WALL).unwrap();
    assert_eq!(reply.acked_seq, 0);
    assert_eq!(registry.commit("s", &pending), None, "of the boot before");
    assert_eq!(beat(&mut registry, &old, at(2)).unwrap_err(), Refusal::Superseded);
    assert_eq!(attach(&mut registry, "b1", at(2)), Err(Refusal::Superseded));
    assert!(beat(&mut registry, reply.lease_id.as_str(), at(2)).is_ok());
}

#[test]
fn a_newer_attachment_of_the_same_boot_takes_over_and_goes_on() {
    let mut registry = registry();
    let old = attach(&mut registry, "b", at(0)).unwrap();
    let admitted = registry.admit(&caller("s", "t", Some(&old)), vec![event(1)], at(0)).unwrap();
    let new = attach(&mut registry, "b", at(1)).unwrap();
    assert_eq!(registry.commit("s", &admitted.ticket.unwrap()), Some(1), "stored is stored");
    assert_eq!(beat(&mut registry, &old, at(2)).unwrap_err(), Refusal::Superseded);
    assert!(beat(&mut registry, &new, at(2)).is_ok());
    for odd in ["f-3", "e-1", "f", "", "f-x"] {
        assert_eq!(beat(&mut registry, odd, at(2)).unwrap_err(), Refusal::NotAttached, "{odd}");
    }
}

#[test]
fn an_agent_that_attaches_in_a_loop_is_slowed_down_to_once_a_second() {
    let mut registry = registry();
    registry.register(registration("other", 1, "u"), at(0)).unwrap();
    let now = Moment::from_millis;
    let mut at_once = 0;
    for ms in 0..500 {
        at_once += u32::from(attach(&mut registry, &format!("b{ms}"), now(10_000 + ms)).is_ok());
    }
    assert_eq!((at_once, registry.take_notices().count()), (5, 5));
    let lease = attach(&mut registry, "b", now(11_000)).unwrap();
    assert_eq!(attach(&mut registry, "b", now(11_500)), Err(Refusal::TooOften));
    assert!(beat(&mut registry, &lease, now(11_500)).is_ok(), "the lease that there is goes on");
    let other = AttachRequest { sandbox_id: "other".parse().unwrap(), ..request("b") };
    assert!(registry.attach(&caller("other", "u", None), &other, now(11_500), WALL).is_ok());
    assert!((12..60).all(|second| attach(&mut registry, "b", at(second)).is_ok()), "as often as agents try");
    let saved = registry.saved();
    let mut registry = Registry::restored(2, saved, at(0));
    assert!(attach(&mut registry, "b", at(0)).is_ok(), "another server begins anew");
}

#[test]
fn a_lease_goes_silent_by_the_clock_of_the_server_step_by_step() {
    let mut registry = registry();
    let lease = attach(&mut registry, "b", at(10)).unwrap();
    registry.advance(at(24));
    assert_eq!(names(&mut registry), ["attached 1 new=true"]);
    registry.advance(at(25));
    assert_eq!(names(&mut registry), ["unresponsive 1"], "the first heartbeat has a deadline of its own");
    beat(&mut registry, &lease, at(26)).unwrap();
    beat(&mut registry, &lease, at(41)).unwrap();
    assert_eq!(names(&mut registry), ["live 1 recovered=true"]);
    registry.advance(Moment::from_millis(85_999));
    assert_eq!(names(&mut registry), [""; 0]);
    registry.advance(at(86));
    registry.advance(at(130));
    assert_eq!(names(&mut registry), ["unresponsive 1"]);
    registry.advance(at(131));
    assert_eq!(names(&mut registry), ["lost 1"]);
    assert_eq!(beat(&mut registry, &lease, at(132)).unwrap_err(), Refusal::NotAttached);
    assert_eq!(registry.next_due(), None);
}

#[test]
fn an_agent_that_never_attaches_is_noticed() {
    let mut registry = registry();
    registry.advance(at(59));
    assert_eq!(registry.lease_state("s"), Some(LeaseState::Expected));
    registry.advance(at(60));
    assert_eq!(names(&mut registry), ["lost 0"]);
}

#[test]
fn a_clock_that_jumps_fires_each_deadline_once() {
    let mut registry = registry();
    let lease = attach(&mut registry, "b", at(0)).unwrap();
    beat(&mut registry, &lease, at(0)).unwrap();
    registry.enqueue("s", &Command::Ping, Some(Duration::from_secs(5)), at(0), WALL).unwrap();
    names(&mut registry);
    registry.advance(at(36_000));
    registry.advance(at(36_000));
    registry.advance(at(3));
    assert_eq!(names(&mut registry), ["expired f-1", "unresponsive 1"]);
    beat(&mut registry, &lease, at(36_001)).unwrap();
    assert_eq!(
        names(&mut registry),
        ["live 1 recovered=true"],
        "the grace begins at the jump, not before it"
    );
}

#[test]
fn a_comeback_wins_against_the_verdict_that_it_is_lost() {
    let mut registry = registry();
    attach(&mut registry, "b", at(0)).unwrap();
    registry.advance(at(15));
    registry.advance(at(60));
    assert_eq!(registry.lease_state("s"), Some(LeaseState::Lost));
    let lease = attach(&mut registry, "b", at(61)).unwrap();
    assert!(!registry.condemn("s", 1));
    assert!(beat(&mut registry, &lease, at(62)).is_ok());
    registry.advance(at(107));
    registry.advance(at(152));
    assert!(registry.condemn("s", 2));
    assert_eq!(attach(&mut registry, "b", at(153)), Err(Refusal::Gone));
}

#[test]
fn a_stopping_sandbox_takes_what_is_left_and_hands_out_nothing() {
    let mut registry = registry();
    let lease = attach(&mut registry, "b", at(0)).unwrap();
    registry.enqueue("s", &Command::Ping, None, at(0), WALL).unwrap();
    registry.stop("s");
    let me = caller("s", "t", Some(&lease));
    let git = GitCredentialRequest { host: "git.example.com".into(), path: "acme/web".into() };
    assert!(registry.heartbeat(&me, at(1)).unwrap().draining);
    assert_eq!(registry.credential(&me, &git).unwrap_err(), Refusal::Draining);
    assert!(registry.admit(&me, vec![event(1)], at(1)).unwrap().ticket.is_some());
    let frame =
        LogFrame { source: "a".into(), stream: "stdout".into(), offset: 0, data: LogBytes(b"x".into()) };
    assert_eq!(registry.logs(&me, vec![frame]).unwrap().unwrap().pieces.len(), 1);
    assert_eq!(registry.settle(&me, "f-1"), Ok(Settled::First));
    let again = registry.attach(&caller("s", "t", None), &request("b"), at(2), WALL).unwrap();
    assert!(again.draining, "a cut link does not cost the last events");
    assert_eq!(attach(&mut registry, "b2", at(2)), Err(Refusal::Gone));
    registry.enqueue("s", &Command::Ping, None, at(3), WALL).unwrap();
    names(&mut registry);
    registry.gone("s");
    assert_eq!(names(&mut registry), ["abandoned f-2"]);
    assert_eq!(beat(&mut registry, again.lease_id.as_str(), at(3)).unwrap_err(), Refusal::Gone);
    assert_eq!(registry.enqueue("s", &Command::Ping, None, at(3), WALL), Err(Refusal::Gone));
    registry.forget("s");
    assert_eq!(attach(&mut registry, "b", at(4)), Err(Refusal::BadToken));
}

#[test]
fn a_frozen_box_is_not_expected_to_beat() {
    let mut registry = registry();
    let lease = attach(&mut registry, "b", at(0)).unwrap();
    beat(&mut registry, &lease, at(0)).unwrap();
    registry.hold("s", at(1));
    registry.advance(at(100_000));
    assert_eq!(registry.lease_state("s"), Some(LeaseState::Held));
    registry.release("s", at(100_000));
    assert!(beat(&mut registry, &lease, at(100_010)).is_ok(), "the same lease goes on");
    registry.advance(at(100_055));
    assert_eq!(registry.lease_state("s"), Some(LeaseState::Unresponsive));
}

#[test]
fn only_the_first_fatal_report_decides_and_needs_no_lease() {
    let mut registry = registry();
    assert_eq!(registry.fatal(&caller("s", "t", None)), Ok(FatalVerdict::First));
    assert_eq!(registry.fatal(&caller("s", "t", None)), Ok(FatalVerdict::Repeated));
    assert_eq!(registry.fatal(&caller("s", "x", None)), Err(Refusal::BadToken));
}

#[test]
fn credentials_are_for_declared_repositories_of_attached_agents() {
    let mut registry = registry();
    let git = |path: &str| GitCredentialRequest { host: "git.example.com".into(), path: path.into() };
    assert_eq!(registry.credential(&caller("s", "t", None), &git("acme/web")), Err(Refusal::NotAttached));
    let lease = attach(&mut registry, "b", at(0)).unwrap();
    let me = caller("s", "t", Some(&lease));
    assert_eq!(registry.credential(&me, &git("acme/web.git")).unwrap().path(), "acme/web");
    assert_eq!(registry.credential(&me, &git("acme/other")), Err(Refusal::NotDeclared));
}

#[test]
fn a_restarted_server_knows_what_it_stored_and_expects_the_rest() {
    let mut registry = registry();
    registry.register(registration("s2", 1, "u"), at(0)).unwrap();
    registry.gone("s2");
    let lease = attach(&mut registry, "b1", at(0)).unwrap();
    attach(&mut registry, "b2", at(0)).unwrap();
    let lease2 = attach(&mut registry, "b2", at(1)).unwrap();
    let me = caller("s", "t", Some(&lease2));
    let ticket = registry.admit(&me, vec![event(1)], at(1)).unwrap().ticket.unwrap();
    registry.commit("s", &ticket);
    registry.fatal(&me).unwrap();
    let saved = serde_json::to_string(&registry.saved()).unwrap();
    assert!(!saved.contains("\"t\""), "no token is stored: {saved}");
    let saved: Vec<_> = serde_json::from_str(&saved).unwrap();
    let mut registry = Registry::restored(0xe, saved, at(5));
    assert_eq!(registry.saved_sandbox("s").unwrap().acked_seq, 1);
    assert_eq!(
        beat(&mut registry, &lease, at(6)).unwrap_err(),
        Refusal::NotAttached,
        "attach again, not: stop"
    );
    assert_eq!(attach(&mut registry, "b1", at(6)), Err(Refusal::Superseded));
    assert_eq!(registry.fatal(&caller("s", "t", None)), Ok(FatalVerdict::Repeated));
    assert_eq!(registry.heartbeat(&caller("s2", "u", None), at(6)).unwrap_err(), Refusal::Gone);
    registry.advance(at(94));
    assert_eq!(registry.lease_state("s"), Some(LeaseState::Expected), "as long as an agent may be silent");
    let reply = registry.attach(&caller("s", "t", None), &request("b2"), at(94), WALL).unwrap();
    assert_eq!(reply.acked_seq, 1);
}

#[test]
fn an_agent_that_is_asked_lives_by_its_answers() {
    let mut registry = registry();
    let boot: BootId = "b".parse().unwrap();
    assert_eq!(registry.polled("s", &boot, at(1)), Ok(0));
    let admitted = registry.admit_polled("s", &boot, vec![event(1), event(2)], at(1)).unwrap();
    assert_eq!(registry.commit("s", &admitted.ticket.unwrap()), Some(2));
    assert_eq!(registry.polled("s", &boot, at(15)), Ok(2));
    assert_eq!(names(&mut registry), ["attached 1 new=true", "live 1 recovered=false"]);
    registry.advance(at(60));
    registry.advance(at(105));
    assert_eq!(names(&mut registry), ["unresponsive 1", "lost 1"]);
    assert_eq!(registry.polled("s", &"b2".parse().unwrap(), at(106)), Ok(0));
    let old = registry.admit_polled("s", &boot, vec![event(3)], at(106));
    assert_eq!(old.unwrap_err(), Refusal::Superseded);
}

#[test]
fn heartbeats_of_a_thousand_sandboxes_leave_one_timer_each() {
    let mut registry = Registry::new(1);
    let name = |n: u64| format!("s{n}");
    let mut leases = Vec::new();
    for n in 0..1_000 {
        registry.register(registration(&name(n), 1, &name(n)), at(0)).unwrap();
        let request = AttachRequest { sandbox_id: name(n).parse().unwrap(), ..request("b") };
        let reply = registry.attach(&caller(&name(n), &name(n), None), &request, at(0), WALL).unwrap();
        leases.push(reply.lease_id.to_string());
    }
    for round in 0..40 {
        for n in 0..1_000 {
            let me = name(n);
            registry.heartbeat(&caller(&me, &me, Some(&leases[n as usize])), at(round * 15)).unwrap();
        }
        registry.advance(at(round * 15 + 14));
    }
    // The one of the attach deadline, which is superseded by an earlier one, goes when it comes up.
    assert!(registry.timers.len() <= 1_000, "{} timers", registry.timers.len());
    assert!(
        registry
            .take_notices()
            .all(|notice| !matches!(notice, Notice::Unresponsive { .. } | Notice::Lost { .. }))
    );
    for n in 0..1_000 {
        registry.forget(&name(n));
    }
    registry.advance(at(100_000));
    assert_eq!((registry.timers.len(), registry.free.len(), registry.by_token.len()), (0, 1_000, 0));
    assert_eq!(registry.take_notices().count(), 0);
}
