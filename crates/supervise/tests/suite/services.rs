//! Services under a paused clock.

use std::time::Duration;

use sandglass_supervise::ports::{BuiltinRun, Builtins, Exit, SpawnError};
use sandglass_supervise::report::Event;
use sandglass_supervise::service::definition::{Check, Probe, RestartPolicy, Run};
use sandglass_supervise::service::restart::Backoff;
use sandglass_supervise::service::{Health, ServiceDefinition, ServiceError, Services, State};
use tokio::time::{Instant, sleep};

use crate::fake::{Act, SECRET, World};

fn service(name: &str) -> ServiceDefinition {
    ServiceDefinition { port: None, ..ServiceDefinition::new(name, Run::Command(vec![name.into()])) }
}

fn seconds(seconds: f64) -> Duration {
    Duration::from_secs_f64(seconds)
}

fn state(services: &Services, name: &str) -> State {
    services.snapshot(name).unwrap().state
}

async fn reaches(services: &Services, name: &str, wanted: State) {
    let mut changed = services.changed();
    while state(services, name) != wanted {
        changed.changed().await.unwrap();
    }
}

async fn restarted(services: &Services, name: &str, count: u64) {
    let mut changed = services.changed();
    while services.snapshot(name).unwrap().restart_count < count {
        changed.changed().await.unwrap();
    }
}

async fn started(world: &World, definitions: impl IntoIterator<Item = ServiceDefinition>) -> Services {
    let services = Services::new(world.ports.clone(), Backoff::default());
    for definition in definitions {
        services.add(definition).unwrap();
    }
    services.start_enabled().await.unwrap();
    services
}

#[tokio::test(start_paused = true)]
async fn a_killed_service_is_restarted_with_back_off_and_counted() {
    let world = World::new();
    world.spawn.act("web", Act::forever());
    let services = started(&world, [service("web")]).await;
    for count in 1..=3 {
        reaches(&services, "web", State::Ready).await;
        world.spawn.kill("web");
        reaches(&services, "web", State::Restarting).await;
        let snapshot = services.snapshot("web").unwrap();
        assert_eq!((snapshot.last_exit, snapshot.restart_count), (Some(Exit::Signal(9)), count - 1));
        assert_eq!(snapshot.last_error.as_deref(), Some("ended by signal 9"));
    }
    reaches(&services, "web", State::Ready).await;
    let snapshot = services.snapshot("web").unwrap();
    assert_eq!((snapshot.restart_count, snapshot.restarts_left), (3, 2));
    assert!(snapshot.started_at.is_some());
    // Settling takes half a second, and the waits double.
    let starts: Vec<f64> =
        world.spawn.story().into_iter().map(|(at, _)| (at * 10.0).round() / 10.0).collect();
    assert_eq!(starts, [0.0, 1.5, 4.0, 8.5]);
}

#[tokio::test(start_paused = true)]
async fn every_change_tells_when_a_process_was_started_if_one_was() {
    let world = World::new();
    world.spawn.act("web", Act::forever());
    let services = started(&world, [service("web"), service("absent")]).await;
    reaches(&services, "web", State::Ready).await;
    reaches(&services, "absent", State::Failed).await;
    let told = |name: &str| -> Vec<_> {
        let changes = world.heard.reports().into_iter().filter_map(|report| match report.event {
            Event::ServiceChanged(change) if change.name == name => Some((change.to, change.started_at)),
            _ => None,
        });
        changes.collect()
    };
    let at = services.snapshot("web").unwrap().started_at;
    assert!(at.is_some());
    assert_eq!(told("web"), [(State::Starting, at), (State::Ready, at)]);
    let absent = told("absent");
    assert!(absent.len() > 2 && absent.iter().all(|(_, at)| at.is_none()), "{absent:?}");
}

#[tokio::test(start_paused = true)]
async fn an_exhausted_optional_service_leaves_the_box_degraded_and_recovers_on_request() {
    let world = World::new();
    world.spawn.act("web", Act::ends(1, 3).writes(0, "cannot bind\n"));
    let services = started(&world, [service("web")]).await;
    reaches(&services, "web", State::Failed).await;
    assert_eq!(services.health(), Health::Degraded { services: vec!["web".into()] });
    let snapshot = services.snapshot("web").unwrap();
    assert_eq!((snapshot.restart_count, snapshot.restarts_left), (5, 0));
    assert!(!world.heard.lines().iter().any(|line| line.starts_with("lost")));
    world.spawn.act("web", Act::forever());
    services.restart("web").await.unwrap();
    reaches(&services, "web", State::Ready).await;
    assert_eq!(services.health(), Health::Healthy);
    assert_eq!(services.snapshot("web").unwrap().restarts_left, 5);
}

#[tokio::test(start_paused = true)]
async fn healthy_minutes_give_the_budget_back() {
    let world = World::new();
    world.spawn.act("web", Act::ends(301, 1));
    let services = started(&world, [service("web")]).await;
    sleep(Duration::from_secs(3600)).await;
    let snapshot = services.snapshot("web").unwrap();
    assert!(snapshot.restart_count > 6, "{snapshot:?}");
    assert_ne!(snapshot.state, State::Failed);
}

#[tokio::test(start_paused = true)]
async fn a_required_service_that_is_given_up_is_a_failure_with_its_output() {
    let world = World::new();
    world.spawn.act("db", Act::ends(1, 7).writes(0, "no space for s3cr3t-value\n"));
    let services = started(&world, [ServiceDefinition { required: true, ..service("db") }]).await;
    let failure = services.required_failure().await;
    assert_eq!(failure.exit_code, Some(7));
    assert_eq!(failure.output_tail, "no space for ***");
    assert_eq!(failure.message, "service db, given up after being restarted 5 times: exit status 7");
    assert_eq!(services.health(), Health::Failed(Box::new(failure)));
    assert_eq!(world.heard.lines().iter().filter(|line| line.starts_with("lost: services of db")).count(), 1);
}

#[tokio::test(start_paused = true)]
async fn readiness_is_an_answer_and_not_a_start() {
    let world = World::new();
    world.spawn.act("web", Act::forever());
    world.prober.answer.send_modify(|answer| *answer = Err("port 80: connection refused".into()));
    let services = started(&world, [ServiceDefinition { port: Some(80), ..service("web") }]).await;
    sleep(Duration::from_secs(59)).await;
    assert_eq!(state(&services, "web"), State::Starting);
    reaches(&services, "web", State::Restarting).await;
    let snapshot = services.snapshot("web").unwrap();
    assert_eq!(snapshot.last_error.as_deref(), Some("not ready within 60 s: port 80: connection refused"));
    world.prober.answer.send_modify(|answer| *answer = Ok(()));
    reaches(&services, "web", State::Ready).await;
}

#[tokio::test(start_paused = true)]
async fn what_no_longer_answers_is_started_anew() {
    let world = World::new();
    world.spawn.act("web", Act::stubborn());
    let check = Check::Http { port: Some(80), path: "/".into() };
    let probe = Probe { check, interval_seconds: 5, timeout_seconds: 1, threshold: 3 };
    let definition = ServiceDefinition { probe: Some(probe), grace_seconds: 4, ..service("web") };
    let services = started(&world, [definition]).await;
    reaches(&services, "web", State::Ready).await;
    world.prober.answer.send_modify(|answer| *answer = Err("status 500".into()));
    reaches(&services, "web", State::Restarting).await;
    world.prober.answer.send_modify(|answer| *answer = Ok(()));
    reaches(&services, "web", State::Ready).await;
    let story = world.spawn.story();
    let told: Vec<(u64, &str)> = story.iter().map(|(at, what)| (at.round() as u64, what.as_str())).collect();
    let wanted = [(0, "web starts"), (15, "web is asked to end"), (19, "web is killed"), (19, "web starts")];
    assert_eq!(told, wanted);
    let error = services.snapshot("web").unwrap().last_error.unwrap();
    assert_eq!(error, "status 500 (3 times in a row)");
}

#[tokio::test(start_paused = true)]
async fn what_a_dead_service_left_running_is_gone_before_the_next_start() {
    let world = World::new();
    world.spawn.act("web", Act { leaves_child: true, ..Act::forever() });
    let services = started(&world, [service("web")]).await;
    reaches(&services, "web", State::Ready).await;
    world.spawn.kill("web");
    reaches(&services, "web", State::Restarting).await;
    assert_eq!(world.spawn.plot(), ["web starts", "web is asked to end", "web is killed"]);
    assert_eq!(world.spawn.alive(), 0);
}

#[tokio::test(start_paused = true)]
async fn requests_at_run_time() {
    let world = World::new();
    for name in ["a", "b"] {
        world.spawn.act(name, Act::forever());
    }
    let off = ServiceDefinition { enabled: false, ..service("b") };
    let services = started(&world, [service("a"), off]).await;
    reaches(&services, "a", State::Ready).await;
    assert_eq!(state(&services, "b"), State::Disabled);
    let refused = services.restart("b").await.unwrap_err();
    assert_eq!(
        (refused.code(), refused.to_string().as_str()),
        ("SERVICE::DISABLED", "service \"b\" is Disabled: enable it first")
    );
    services.start("b").await.unwrap();
    reaches(&services, "b", State::Ready).await;
    services.disable("a").await.unwrap();
    services.stop("b").await.unwrap();
    assert_eq!((state(&services, "a"), state(&services, "b")), (State::Disabled, State::Stopped));
    services.start("a").await.unwrap();
    reaches(&services, "a", State::Ready).await;
    assert_eq!(services.restart("c").await.unwrap_err(), ServiceError::NotFound("c".into()));
    assert_eq!(services.add(service("a")).unwrap_err(), ServiceError::Exists("a".into()));
    services.add(ServiceDefinition { port: Some(1), ..service("d") }).unwrap();
    let taken = services.add(ServiceDefinition { port: Some(1), ..service("e") }).unwrap_err();
    assert_eq!(taken.code(), "SERVICE::PORT_CONFLICT");
    services.stop_all(seconds(5.0)).await;
    assert_eq!(services.start("a").await.unwrap_err(), ServiceError::Ending);
}

#[tokio::test(start_paused = true)]
async fn all_stop_in_reverse_order_of_start_within_the_grace() {
    let world = World::new();
    for name in ["a", "b", "c"] {
        world.spawn.act(name, Act::stubborn());
    }
    let services = started(&world, ["a", "b", "c"].map(service)).await;
    reaches(&services, "c", State::Ready).await;
    // Started again, it is the last one.
    world.spawn.kill("a");
    restarted(&services, "a", 1).await;
    reaches(&services, "a", State::Ready).await;
    let before = world.spawn.plot().len();
    let began = Instant::now();
    services.stop_all(seconds(9.0)).await;
    assert!(began.elapsed() <= seconds(9.1), "{:?}", began.elapsed());
    let plot = world.spawn.plot().split_off(before);
    let asked_and_killed = |name: &str| [format!("{name} is asked to end"), format!("{name} is killed")];
    assert_eq!(plot, ["a", "c", "b"].map(asked_and_killed).concat());
    assert_eq!(world.spawn.alive(), 0);
    for name in ["a", "b", "c"] {
        assert_eq!(state(&services, name), State::Stopped);
    }
    // Nothing comes back.
    sleep(Duration::from_secs(100)).await;
    assert_eq!(world.spawn.alive(), 0);
}

#[tokio::test(start_paused = true)]
async fn nothing_starts_while_the_box_is_ending() {
    let world = World::new();
    world.spawn.act("waits", Act::ends(1, 1));
    world.spawn.act("crashes", Act::ends(4, 1));
    world.spawn.act("slow", Act::stubborn());
    let required = ServiceDefinition { required: true, restart: RestartPolicy::Never, ..service("crashes") };
    let services = started(&world, [service("waits"), required, service("slow")]).await;
    reaches(&services, "slow", State::Ready).await;
    reaches(&services, "waits", State::Restarting).await;
    let before = world.spawn.plot().len();
    services.stop_all(seconds(30.0)).await;
    // One of them ended by itself meanwhile.
    assert_eq!(world.spawn.plot().split_off(before), ["slow is asked to end", "slow is killed"]);
    for name in ["waits", "crashes", "slow"] {
        assert_eq!(state(&services, name), State::Stopped);
    }
    assert_eq!(services.health(), Health::Healthy);
}

#[tokio::test(start_paused = true)]
async fn leftovers_have_no_more_time_than_the_box() {
    let world = World::new();
    world.spawn.act("a", Act { refuses_term: true, leaves_child: true, ..Act::forever() });
    let services = started(&world, [service("a")]).await;
    reaches(&services, "a", State::Ready).await;
    world.spawn.kill("a");
    sleep(seconds(0.1)).await;
    let began = Instant::now();
    services.stop_all(seconds(0.5)).await;
    assert!(began.elapsed() <= seconds(0.6), "{:?}", began.elapsed());
    assert_eq!(world.spawn.alive(), 0);
}

#[tokio::test(start_paused = true)]
async fn the_end_of_the_box_shortens_an_end_that_goes_on() {
    let world = World::new();
    world.spawn.act("a", Act::stubborn());
    let services = started(&world, [ServiceDefinition { grace_seconds: 300, ..service("a") }]).await;
    reaches(&services, "a", State::Ready).await;
    services.restart("a").await.unwrap();
    let began = Instant::now();
    services.stop_all(seconds(2.0)).await;
    assert!(began.elapsed() <= seconds(2.1), "{:?}", began.elapsed());
    assert_eq!((world.spawn.alive(), state(&services, "a")), (0, State::Stopped));
}

#[tokio::test(start_paused = true)]
async fn services_that_nobody_holds_any_more_end() {
    let world = World::new();
    world.spawn.act("a", Act::forever());
    let services = started(&world, [service("a")]).await;
    reaches(&services, "a", State::Ready).await;
    drop(services);
    sleep(Duration::from_secs(1)).await;
    assert_eq!(world.spawn.alive(), 0);
}

#[tokio::test(start_paused = true)]
async fn policies_and_missing_programs() {
    let world = World::new();
    world.spawn.act("once", Act::ends(2, 0));
    let once = ServiceDefinition { restart: RestartPolicy::OnFailure, ..service("once") };
    let editor = ServiceDefinition {
        port: Some(8080),
        ..ServiceDefinition::new(
            "code-server",
            Run::CodeServer(sandglass_supervise::code_server::CodeServer {
                program: Some("/nowhere/code-server".into()),
                ..sandglass_supervise::code_server::CodeServer::of("/workspace")
            }),
        )
    };
    let services = started(&world, [once, service("missing"), editor]).await;
    assert_eq!(state(&services, "code-server"), State::Failed);
    let error = services.snapshot("code-server").unwrap().last_error.unwrap();
    assert!(error.starts_with("code-server is not installed"), "{error}");
    reaches(&services, "once", State::Stopped).await;
    assert_eq!(state(&services, "missing"), State::Restarting);
    reaches(&services, "missing", State::Failed).await;
    let error = services.snapshot("missing").unwrap().last_error.unwrap();
    assert!(error.contains("not found in $PATH"), "{error}");
    assert_eq!(
        services.health(),
        Health::Degraded { services: vec!["missing".into(), "code-server".into()] }
    );
}

struct Echo;

impl Builtins for Echo {
    fn start(&self, builtin: &str, definition: &ServiceDefinition) -> Result<BuiltinRun, SpawnError> {
        assert_eq!((builtin, definition.name.as_str()), ("echo", "inner"));
        let stop = tokio_util::sync::CancellationToken::new();
        let (tell, ended) = tokio::sync::oneshot::channel();
        let stopped = stop.clone();
        tokio::spawn(async move {
            let result = tokio::select! {
                () = stopped.cancelled() => Ok(()),
                () = sleep(Duration::from_secs(20)) => Err(format!("the host key is not {SECRET}")),
            };
            let _ = tell.send(result);
        });
        Ok(BuiltinRun { stop, ended })
    }
}

#[tokio::test(start_paused = true)]
async fn a_part_of_the_agent_is_a_service_like_others() {
    let mut world = World::new();
    world.ports.builtins = std::sync::Arc::new(Echo);
    let services = started(&world, [ServiceDefinition::new("inner", Run::Builtin("echo".into()))]).await;
    reaches(&services, "inner", State::Ready).await;
    reaches(&services, "inner", State::Restarting).await;
    assert_eq!(services.snapshot("inner").unwrap().last_error.as_deref(), Some("the host key is not ***"));
    reaches(&services, "inner", State::Ready).await;
    services.stop_all(seconds(3.0)).await;
    assert_eq!(state(&services, "inner"), State::Stopped);
}
