use jiff::Timestamp;
use serde_json::json;

use super::*;

fn at(ms: u64) -> Moment {
    Moment::from_millis(ms)
}

fn core() -> Core {
    Core::new(Pace::default(), Jitter::seeded(1))
}

fn reply(lease: &str) -> AttachReply {
    AttachReply {
        lease_id: lease.parse().unwrap(),
        heartbeat_interval_seconds: 15,
        lease_timeout_seconds: 45,
        acked_seq: 0,
        server_time: Timestamp::UNIX_EPOCH,
        expires_at: None,
        draining: false,
        config: Default::default(),
    }
}

fn beat(draining: bool) -> HeartbeatReply {
    HeartbeatReply { lease_timeout_seconds: 45, expires_at: None, commands_pending: 0, draining }
}

fn frame(id: &str, kind: &str) -> CommandFrame {
    let data = if kind == "service.start" { json!({"name": "ssh"}) } else { json!({}) };
    serde_json::from_value(json!({"commandId": id, "type": kind, "data": data})).unwrap()
}

fn polled(core: &mut Core, now: Moment) -> Vec<Action> {
    std::iter::from_fn(|| core.poll(now)).collect()
}

fn lanes(actions: &[Action]) -> Vec<Lane> {
    let call = |action: &Action| if let Action::Call(call) = action { Some(call.lane()) } else { None };
    actions.iter().filter_map(call).collect()
}

fn notices(actions: Vec<Action>) -> Vec<Notice> {
    let notice = |action| if let Action::Tell(notice) = action { Some(notice) } else { None };
    actions.into_iter().filter_map(notice).collect()
}

fn attached(now: Moment) -> (Core, LeaseId) {
    let mut core = core();
    assert_eq!(lanes(&polled(&mut core, now)), [Lane::Attach]);
    core.attached(reply("l-1"), now);
    assert_eq!(lanes(&polled(&mut core, now)), [Lane::Stream, Lane::Heartbeat]);
    (core, "l-1".parse().unwrap())
}

#[test]
fn it_attaches_first_then_listens_and_beats_at_once() {
    let (mut core, lease) = attached(at(0));
    core.heartbeat_answered(&lease, &beat(false));
    assert_eq!(core.next_wake(), Some(at(15_000)));
    assert_eq!(polled(&mut core, at(14_999)), []);
    assert_eq!(lanes(&polled(&mut core, at(15_000))), [Lane::Heartbeat]);
    assert_eq!(core.next_wake(), None, "one heartbeat at a time");
}

#[test]
fn attempts_to_attach_go_on_forever_and_never_faster_than_a_second() {
    let mut core = core();
    let mut now = at(0);
    for _ in 0..500 {
        assert_eq!(lanes(&polled(&mut core, now)), [Lane::Attach]);
        core.failed(&Call::Attach, Failure::Link, now);
        let next = core.next_wake().unwrap();
        assert!((1_000..=30_000).contains(&(next.as_millis() - now.as_millis())));
        now = next;
    }
}

#[test]
fn every_status_that_ends_the_bridge_does_so_in_every_lane() {
    for refusal in [Refusal::BadToken, Refusal::WrongSandbox, Refusal::Superseded, Refusal::Gone] {
        let (_, lease) = attached(at(0));
        let calls = [
            Call::Stream { lease: lease.clone(), last_event_id: None },
            Call::Heartbeat { lease: lease.clone() },
            Call::Events { lease: lease.clone() },
            Call::Logs { lease },
            Call::Attach,
        ];
        for call in calls {
            let (mut core, _) = attached(at(0));
            core.failed(&call, Failure::Refused(refusal), at(5));
            let told = notices(polled(&mut core, at(1_000_000)));
            assert_eq!(told, [Notice::Ended(Ending::Revoked(refusal))], "{call:?}");
            assert_eq!((core.next_wake(), core.has_ended()), (None, true));
        }
    }
}

#[test]
fn an_answer_to_an_earlier_lease_does_not_end_the_present_one() {
    let (mut core, old) = attached(at(0));
    core.events_pending(at(0));
    assert_eq!(lanes(&polled(&mut core, at(20))), [Lane::Events]);
    core.failed(&Call::Heartbeat { lease: old.clone() }, Failure::Refused(Refusal::NotAttached), at(30));
    let actions = polled(&mut core, at(30));
    assert!(actions.contains(&Action::CloseStream) && actions.contains(&Action::Tell(Notice::Detached)));
    assert_eq!(lanes(&polled(&mut core, at(3_000))), [Lane::Attach]);
    core.attached(reply("l-2"), at(3_000));
    polled(&mut core, at(3_000));
    core.failed(&Call::Events { lease: old }, Failure::Refused(Refusal::Superseded), at(3_001));
    assert_eq!(core.lease().map(LeaseId::as_str), Some("l-2"));
    assert_eq!(lanes(&polled(&mut core, at(6_000))), [Lane::Events], "and the events are sent again");
}

#[test]
fn a_server_that_disowns_every_lease_is_asked_ever_more_slowly() {
    let mut core = core();
    let mut now = at(0);
    for _ in 0..20 {
        polled(&mut core, now);
        core.attached(reply("l-1"), now);
        polled(&mut core, now);
        let lease = core.lease().unwrap().clone();
        core.failed(&Call::Heartbeat { lease }, Failure::Refused(Refusal::NotAttached), now);
        polled(&mut core, now);
        let next = core.next_wake().unwrap();
        assert!(next.since(now) >= Duration::from_secs(1));
        now = next;
    }
    assert!(now > at(100_000), "twenty rounds took {now:?}");
}

#[test]
fn a_lane_that_gets_through_frees_those_that_only_waited_for_the_link() {
    let (mut core, lease) = attached(at(0));
    core.events_pending(at(0));
    core.logs_pending(at(0));
    polled(&mut core, at(20));
    core.failed(&Call::Events { lease: lease.clone() }, Failure::Link, at(20));
    core.failed(&Call::Logs { lease: lease.clone() }, Failure::Status(500), at(20));
    assert_eq!(polled(&mut core, at(21)), []);
    core.heartbeat_answered(&lease, &beat(false));
    assert_eq!(lanes(&polled(&mut core, at(21))), [Lane::Events], "a server that failed is not hurried");
}

#[test]
fn a_command_that_comes_twice_is_carried_out_once() {
    let (mut core, _) = attached(at(0));
    core.command_arrived(&frame("c-1", "service.start"), at(0));
    core.command_arrived(&frame("c-1", "service.start"), at(0));
    let actions = polled(&mut core, at(0));
    assert!(
        matches!(&actions[..], [Action::Deliver { command: Command::ServiceStart { .. }, .. }]),
        "{actions:?}"
    );
    let id: CommandId = "c-1".parse().unwrap();
    core.settle(id.clone(), Outcome::done());
    core.settle(id.clone(), Outcome::failed("X", "again"));
    let [Action::Call(call @ Call::Result { .. })] = &polled(&mut core, at(0))[..] else {
        panic!("no result")
    };
    core.failed(call, Failure::Link, at(0));
    let [Action::Call(again)] = &polled(&mut core, at(2_000))[..] else { panic!("no retry") };
    assert_eq!(again, call);
    core.result_answered(&id);
    assert_eq!(polled(&mut core, at(3_000)), []);
    core.command_arrived(&frame("c-1", "service.start"), at(3_000));
    assert_eq!(
        lanes(&polled(&mut core, at(3_000))),
        [Lane::Results],
        "the server asks again for what it lost"
    );
}

#[test]
fn what_needs_no_owner_is_answered_here() {
    let (mut core, _) = attached(at(0));
    core.command_arrived(&frame("c-1", "ping"), at(0));
    core.command_arrived(&frame("c-2", "service.paint"), at(0));
    core.command_arrived(&frame("c-3", "shutdown"), at(0));
    let mut late = frame("c-4", "service.start");
    late.remaining_ms = Some(0);
    core.command_arrived(&late, at(0));
    let mut codes = Vec::new();
    while let Some(Action::Call(Call::Result { command, outcome, .. })) = core.poll(at(0)) {
        codes.push(match outcome {
            Outcome::Done(_) => "done".to_owned(),
            Outcome::Failed(error) => error.code,
        });
        core.result_answered(&command);
    }
    assert_eq!(codes, ["done", "COMMAND::UNSUPPORTED", "COMMAND::MALFORMED", "COMMAND::EXPIRED"]);
}

#[test]
fn the_stream_resumes_behind_the_last_command_that_arrived() {
    let (mut core, lease) = attached(at(0));
    core.command_arrived(&frame("c-7", "service.start"), at(0));
    polled(&mut core, at(0));
    let call = Call::Stream { lease: lease.clone(), last_event_id: None };
    core.stream_ended(&call, Failure::Link, at(0));
    let wake = at(2_000);
    let resumed = Call::Stream { lease, last_event_id: Some("c-7".into()) };
    assert_eq!(polled(&mut core, wake), [Action::Call(resumed)]);
}

#[test]
fn a_fatal_report_needs_no_lease_and_is_repeated_until_it_arrived() {
    let mut core = core();
    let report = FatalReport::bounded("setup", Some(1), None, "setup failed", "boom");
    core.fatal(report.clone());
    core.fatal(FatalReport::bounded("start", None, None, "later", ""));
    assert_eq!(lanes(&polled(&mut core, at(0))), [Lane::Attach, Lane::Fatal]);
    let call = Call::Fatal(report);
    core.failed(&call, Failure::Link, at(0));
    assert_eq!(polled(&mut core, at(2_000)), [Action::Call(call)]);
    core.fatal_answered();
    assert_eq!(notices(polled(&mut core, at(2_000))), [Notice::FatalReported]);
}

#[test]
fn draining_ends_when_everything_is_delivered() {
    let (mut core, lease) = attached(at(0));
    core.heartbeat_answered(&lease, &beat(true));
    core.heartbeat_answered(&lease, &beat(true));
    assert_eq!(notices(polled(&mut core, at(0))), [Notice::Draining], "told once");
    core.events_pending(at(0));
    core.drain();
    assert_eq!(lanes(&polled(&mut core, at(20))), [Lane::Events]);
    core.events_answered(true, at(30));
    assert_eq!(lanes(&polled(&mut core, at(30))), [Lane::Events]);
    core.failed(&Call::Events { lease }, Failure::Link, at(30));
    assert_eq!(polled(&mut core, at(31)), [], "not while something is left");
    assert_eq!(lanes(&polled(&mut core, at(3_000))), [Lane::Events]);
    core.events_answered(false, at(3_000));
    assert_eq!(notices(polled(&mut core, at(3_000))), [Notice::Ended(Ending::Drained)]);
}

#[test]
fn what_the_server_will_never_take_does_not_block_the_rest() {
    let (mut core, lease) = attached(at(0));
    core.logs_pending(at(0));
    core.command_arrived(&frame("c-1", "ping"), at(0));
    polled(&mut core, at(20));
    core.failed(&Call::Logs { lease: lease.clone() }, Failure::Status(413), at(20));
    let command: CommandId = "c-1".parse().unwrap();
    core.failed(
        &Call::Result { lease: lease.clone(), command, outcome: Outcome::done() },
        Failure::Status(400),
        at(20),
    );
    let rejected = |lane, status| Notice::Rejected { lane, status };
    assert_eq!(notices(polled(&mut core, at(20))), [rejected(Lane::Logs, 413), rejected(Lane::Results, 400)]);
    assert_eq!(lanes(&polled(&mut core, at(5_000))), [Lane::Logs], "the next batch, after a pause");
    core.events_pending(at(5_000));
    polled(&mut core, at(5_020));
    core.failed(&Call::Events { lease }, Failure::Status(400), at(5_020));
    assert_eq!(lanes(&polled(&mut core, at(9_000))), [Lane::Events], "events are never given up");
}
