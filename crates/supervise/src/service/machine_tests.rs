use proptest::prelude::*;

use super::*;

fn at(seconds: u64) -> Moment {
    Moment::since_start(Duration::from_secs(seconds))
}

/// The draw that shifts nothing.
const PLAIN: u64 = 200;

fn machine(policy: RestartPolicy) -> Machine {
    Machine::new(policy, Duration::from_secs(60), Backoff::default(), State::Stopped)
}

/// A machine whose service answers, since 1 s.
fn ready(policy: RestartPolicy) -> Machine {
    let mut machine = machine(policy);
    assert_eq!(machine.handle(Input::Start, at(0), PLAIN).unwrap().action, Some(Action::Launch));
    machine.handle(Input::Answered, at(1), PLAIN).unwrap();
    assert_eq!(machine.state(), State::Ready);
    machine
}

fn gone(code: i32) -> Input {
    Input::Gone { exit: Exit::Code(code), message: None }
}

#[test]
fn a_killed_service_comes_back_after_its_wait() {
    let mut machine = ready(RestartPolicy::Always);
    let step = machine.handle(Input::Gone { exit: Exit::Signal(9), message: None }, at(10), PLAIN).unwrap();
    let change = Some(Change { from: State::Ready, to: State::Restarting });
    assert_eq!(step, Step { action: None, change });
    assert_eq!((machine.wakeup(), machine.last_error()), (Some(at(11)), Some("ended by signal 9")));
    assert_eq!(machine.handle(Input::Tick, at(10), PLAIN).unwrap(), Step::default());
    let step = machine.handle(Input::Tick, at(11), PLAIN).unwrap();
    assert_eq!((step.action, machine.state()), (Some(Action::Launch), State::Starting));
    assert_eq!((machine.restarted(), machine.restarts_left(at(11))), (1, 4));
}

#[test]
fn the_policy_decides_about_an_exit() {
    let after = |policy, code| {
        let mut machine = ready(policy);
        machine.handle(gone(code), at(2), PLAIN).unwrap();
        machine.state()
    };
    assert_eq!(after(RestartPolicy::Always, 0), State::Restarting);
    assert_eq!(after(RestartPolicy::OnFailure, 0), State::Stopped);
    assert_eq!(after(RestartPolicy::OnFailure, 1), State::Restarting);
    assert_eq!(after(RestartPolicy::Never, 0), State::Stopped);
    assert_eq!(after(RestartPolicy::Never, 1), State::Failed);
}

#[test]
fn an_end_before_readiness_is_a_failure_whatever_its_code() {
    let mut machine = machine(RestartPolicy::OnFailure);
    machine.handle(Input::Start, at(0), PLAIN).unwrap();
    machine.handle(gone(0), at(0), PLAIN).unwrap();
    assert_eq!(machine.state(), State::Restarting);
    assert_eq!(machine.last_error(), Some("exit status 0 before it was ready"));
}

#[test]
fn what_is_never_ready_is_ended_and_tried_again() {
    let mut machine = machine(RestartPolicy::Always);
    machine.handle(Input::Start, at(0), PLAIN).unwrap();
    machine.handle(Input::NotYet { message: "connection refused".into() }, at(1), PLAIN).unwrap();
    assert_eq!(machine.wakeup(), Some(at(60)));
    let step = machine.handle(Input::Tick, at(60), PLAIN).unwrap();
    assert_eq!((step.action, machine.state()), (Some(Action::End), State::Restarting));
    assert_eq!(machine.last_error(), Some("not ready within 60 s: connection refused"));
    // Its end takes longer than the wait.
    let step = machine.handle(gone(0), at(70), PLAIN).unwrap();
    assert_eq!((step.action, machine.state()), (Some(Action::Launch), State::Starting));
}

#[test]
fn the_budget_ends_in_failure_and_a_request_restores_it() {
    let mut machine = ready(RestartPolicy::Always);
    let mut now = 1;
    for left in (0..5).rev() {
        machine.handle(gone(1), at(now), PLAIN).unwrap();
        now += 60;
        assert_eq!(machine.handle(Input::Tick, at(now), PLAIN).unwrap().action, Some(Action::Launch));
        machine.handle(Input::Answered, at(now), PLAIN).unwrap();
        assert_eq!(machine.restarts_left(at(now)), left);
    }
    machine.handle(gone(1), at(now), PLAIN).unwrap();
    assert_eq!((machine.state(), machine.wakeup(), machine.restarted()), (State::Failed, None, 5));
    assert_eq!(machine.handle(Input::Restart, at(now), PLAIN).unwrap().action, Some(Action::Launch));
    assert_eq!((machine.state(), machine.restarts_left(at(now))), (State::Starting, 5));
}

#[test]
fn a_hopeless_start_is_not_repeated() {
    let mut machine = machine(RestartPolicy::Always);
    machine.handle(Input::Start, at(0), PLAIN).unwrap();
    let missing = Input::NotLaunched { message: "not installed".into(), outlook: Outlook::Hopeless };
    machine.handle(missing, at(0), PLAIN).unwrap();
    assert_eq!((machine.state(), machine.last_error()), (State::Failed, Some("not installed")));
}

#[test]
fn a_request_during_an_end_waits_for_it() {
    let mut machine = ready(RestartPolicy::Always);
    assert_eq!(machine.handle(Input::Disable, at(2), PLAIN).unwrap().action, Some(Action::End));
    assert_eq!(machine.handle(Input::Restart, at(2), PLAIN), Err(Refused { state: State::Disabled }));
    assert_eq!(machine.handle(Input::Start, at(3), PLAIN).unwrap().action, None);
    let step = machine.handle(Input::Gone { exit: Exit::Signal(15), message: None }, at(4), PLAIN).unwrap();
    assert_eq!((step.action, machine.state()), (Some(Action::Launch), State::Starting));
    machine.handle(Input::Restart, at(5), PLAIN).unwrap();
    machine.handle(Input::Stop, at(5), PLAIN).unwrap();
    let step = machine.handle(gone(0), at(6), PLAIN).unwrap();
    assert_eq!((step.action, machine.state(), machine.is_idle()), (None, State::Stopped, true));
}

#[test]
fn a_stop_ends_a_wait() {
    let mut machine = ready(RestartPolicy::Always);
    machine.handle(gone(1), at(2), PLAIN).unwrap();
    assert_eq!(machine.handle(Input::Stop, at(2), PLAIN).unwrap().action, None);
    assert_eq!((machine.wakeup(), machine.is_idle(), machine.state()), (None, true, State::Stopped));
    assert_eq!(machine.handle(Input::Tick, at(99), PLAIN).unwrap(), Step::default());
}

fn inputs() -> impl Strategy<Value = Input> {
    let text = || "x".to_owned();
    prop_oneof![
        Just(Input::Start),
        Just(Input::Restart),
        Just(Input::Stop),
        Just(Input::Disable),
        Just(Input::Answered),
        Just(Input::NotYet { message: text() }),
        Just(Input::Unanswered { message: text() }),
        Just(Input::Tick),
        Just(Input::NotLaunched { message: text(), outlook: Outlook::MayPass }),
        Just(Input::NotLaunched { message: text(), outlook: Outlook::Hopeless }),
        (0..3).prop_map(gone),
    ]
}

proptest! {
    /// Whatever happens in whatever order: one instance at a time, changes only along the table, and nothing is forgotten.
    #[test]
    fn one_instance_at_a_time(
        policy in prop_oneof![
            Just(RestartPolicy::Always), Just(RestartPolicy::OnFailure), Just(RestartPolicy::Never)
        ],
        inputs in proptest::collection::vec((inputs(), 0u64..400, any::<u64>()), 0..120),
    ) {
        let mut machine = machine(policy);
        let (mut now, mut runs, mut ending) = (0, false, false);
        for (input, pause, draw) in inputs {
            now += pause;
            // What a driver could not say is not said.
            let possible = match &input {
                Input::Gone { .. } => runs,
                Input::NotLaunched { .. } => runs && !ending && machine.state() == State::Starting,
                Input::Answered | Input::NotYet { .. } | Input::Unanswered { .. } => runs && !ending,
                _ => true,
            };
            if !possible {
                continue;
            }
            if matches!(input, Input::Gone { .. } | Input::NotLaunched { .. }) {
                runs = false;
                ending = false;
            }
            let before = machine.state();
            let Ok(step) = machine.handle(input, at(now), draw) else { continue };
            if let Some(Change { from, to }) = step.change {
                prop_assert_eq!(from, before);
                let legal = Event::ALL.iter().any(|event| from.on(*event) == Some(to));
                prop_assert!(legal, "{:?} to {:?}", from, to);
            }
            match step.action {
                Some(Action::Launch) => {
                    prop_assert!(!runs);
                    runs = true;
                }
                Some(Action::End) => {
                    prop_assert!(runs && !ending);
                    ending = true;
                }
                None => {}
            }
            prop_assert_eq!(machine.is_idle(), !runs && machine.wakeup().is_none());
            // What is wanted runs, ends, or has a time.
            prop_assert_eq!(machine.state().is_wanted(), !machine.is_idle() && (!ending || machine.state().is_wanted()));
            prop_assert!(machine.restarts_left(at(now)) <= 5);
        }
    }
}
