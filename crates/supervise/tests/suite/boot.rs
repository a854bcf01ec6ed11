//! Boots under a paused clock.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use sandglass_supervise::boot::{Boot, Outcome};
use sandglass_supervise::plan::{BootPlan, Phase};
use sandglass_supervise::ports::{
    Entrypoint, Exit, Program, Progress, Repositories, SpawnError, SyncFailure,
};
use sandglass_supervise::report::{Failure, Reason};
use sandglass_supervise::service::restart::Backoff;
use sandglass_supervise::service::{ServiceDefinition, Services, State, definition};
use serde_json::{Value, json};
use tokio::time::{Instant, sleep};
use tokio_util::sync::CancellationToken;

use crate::fake::{Act, SECRET, World};

/// A sync that says something each second for so long, and then ends as it is told.
#[derive(Clone)]
struct Sync {
    seconds: u64,
    result: Result<(), SyncFailure>,
    heeds_cancel: bool,
}

impl Sync {
    fn done() -> Self {
        Sync { seconds: 1, result: Ok(()), heeds_cancel: true }
    }
}

#[async_trait]
impl Repositories for Sync {
    async fn sync(
        &self,
        request: &Value,
        progress: Arc<dyn Progress>,
        cancel: CancellationToken,
    ) -> Result<(), SyncFailure> {
        assert_eq!(request, &json!({ "url": "https://example.com/web.git" }));
        for second in 0..self.seconds {
            progress.progress(&format!("receiving objects {second} with {SECRET}"));
            tokio::select! {
                () = sleep(Duration::from_secs(1)) => {}
                () = cancel.cancelled(), if self.heeds_cancel => {
                    return Err(SyncFailure { message: "was cancelled".into(), ..SyncFailure::default() });
                }
            }
        }
        self.result.clone()
    }
}

/// An entrypoint whose start takes so long.
struct Main(Duration);

#[async_trait]
impl Entrypoint for Main {
    async fn start(&self, program: &Program) -> Result<(), SpawnError> {
        sleep(self.0).await;
        match program.argv[0].as_str() {
            "missing" => Err(SpawnError::new("exec: \"missing\": executable file not found in $PATH")),
            _ => Ok(()),
        }
    }
}

struct Run {
    world: World,
    services: Services,
    sync: Sync,
    entrypoint: Duration,
    cancel: CancellationToken,
}

impl Run {
    fn new() -> Run {
        let world = World::new();
        for program in ["setup", "start", "app"] {
            let act = if program == "app" { Act::forever() } else { Act::ends(2, 0) };
            world.spawn.act(program, act.writes(1, &format!("{program} says {SECRET}\n")));
        }
        let services = Services::new(world.ports.clone(), Backoff::default());
        let (sync, cancel) = (Sync::done(), CancellationToken::new());
        Run { world, services, sync, entrypoint: Duration::from_secs(1), cancel }
    }

    async fn boot(&self, plan: Value) -> Outcome {
        let plan: BootPlan = serde_json::from_value(plan).unwrap();
        plan.check().unwrap();
        let boot = Boot {
            plan,
            ports: self.world.ports.clone(),
            services: self.services.clone(),
            repositories: Arc::new(self.sync.clone()),
            entrypoint: Arc::new(Main(self.entrypoint)),
        };
        // As the agent may, on a task of its own.
        tokio::spawn(boot.run(self.cancel.clone())).await.unwrap()
    }

    async fn failure(&self, plan: Value) -> Failure {
        match self.boot(plan).await {
            Outcome::Failed(failure) => failure,
            other => panic!("{other:?}"),
        }
    }
}

fn full() -> Value {
    json!({
        "sync": { "request": { "url": "https://example.com/web.git" } },
        "setup": [{ "label": "web", "command": ["setup"] }],
        "services": [{ "name": "app", "command": ["app"], "required": true }],
        "start": [{ "label": "web", "command": ["start"] }],
        "entrypoint": { "command": ["main"] },
    })
}

fn with(mut plan: Value, key: &str, value: Value) -> Value {
    plan[key] = value;
    plan
}

#[tokio::test(start_paused = true)]
async fn a_whole_boot_in_its_order() {
    let run = Run::new();
    assert_eq!(run.boot(full()).await, Outcome::Ready { warnings: vec![] });
    let wanted = [
        "sync started",
        "sync: receiving objects 0 with ***",
        "sync Done",
        "setup of web started",
        "setup of web: setup says ***",
        "setup of web Done",
        "services started",
        "app: Stopped -> Starting",
        "services: app Starting",
        "app: Starting -> Ready",
        "services Done",
        "start of web started",
        "start of web: start says ***",
        "start of web Done",
        "entrypoint started",
        "entrypoint Done",
        "completed, 0 warnings",
    ];
    assert_eq!(run.world.heard.lines(), wanted);
    assert_eq!(run.services.snapshot("app").unwrap().state, State::Ready);
    let logs = &run.world.ports.logs;
    assert_eq!(logs.sources(), ["boot.setup.web", "boot.start.web", "service.app"]);
    let frames = logs.read("boot.setup.web", 0, 1000).unwrap().frames;
    assert_eq!(frames[0].data, b"setup says ***\n");
}

#[tokio::test(start_paused = true)]
async fn setup_is_not_repeated_where_it_is_baked() {
    for source in ["image", "snapshot"] {
        let run = Run::new();
        run.boot(with(full(), "source", source.into())).await;
        assert!(run.world.heard.lines().contains(&"setup of web Skipped".to_owned()));
        assert_eq!(run.world.spawn.plot(), ["app starts", "start starts"]);
    }
}

#[tokio::test(start_paused = true)]
async fn a_failed_hook_says_where_how_and_with_which_output() {
    let run = Run::new();
    run.world.spawn.act("setup", Act::ends(2, 3).writes(1, &format!("npm ERR! {SECRET}\nmissing script\n")));
    let failure = run.failure(full()).await;
    assert_eq!((failure.reason, failure.step.phase), (Reason::BootFailed, Phase::Setup));
    assert_eq!((failure.exit_code, failure.signal), (Some(3), None));
    assert_eq!(failure.message, "setup of web: exit status 3");
    assert_eq!(failure.output_tail, "npm ERR! ***\nmissing script");
    let lines = run.world.heard.lines();
    assert_eq!(
        &lines[lines.len() - 2..],
        ["setup of web Failed", "failed: setup of web: setup of web: exit status 3"]
    );
    assert_eq!(run.world.spawn.plot(), ["setup starts"]);
}

#[tokio::test(start_paused = true)]
async fn a_failure_that_only_warns_is_a_warning() {
    let run = Run::new();
    run.world.spawn.act("start", Act::ends(1, 1));
    let start = json!([
        { "label": "web", "command": ["start"], "onFailure": "warn" },
        { "label": "other", "command": ["absent"], "onFailure": "warn" },
    ]);
    let Outcome::Ready { warnings } = run.boot(with(full(), "start", start)).await else { panic!() };
    let messages: Vec<&str> = warnings.iter().map(|warning| warning.message.as_str()).collect();
    let missing = "start of other: exec: \"absent\": executable file not found in $PATH";
    assert_eq!(messages, ["start of web: exit status 1", missing]);
    assert_eq!(warnings[1].exit_code, Some(127));
    assert_eq!(run.world.heard.lines().last().unwrap(), "completed, 2 warnings");
}

#[tokio::test(start_paused = true)]
async fn a_sync_fails_a_fresh_box_and_warns_an_old_one() {
    let failure = SyncFailure {
        cause: Some("repository_auth_failed".into()),
        message: format!("the server refused {SECRET}"),
        exit: Some(Exit::Code(128)),
        output: format!("fatal: {SECRET}\n").into_bytes(),
    };
    let mut run = Run::new();
    run.sync.result = Err(failure.clone());
    let told = run.failure(full()).await;
    assert_eq!(told.cause.as_deref(), Some("repository_auth_failed"));
    assert_eq!(
        (told.message.as_str(), told.output_tail.as_str()),
        ("sync: the server refused ***", "fatal: ***")
    );
    let mut run = Run::new();
    run.sync.result = Err(failure);
    let Outcome::Ready { warnings } = run.boot(with(full(), "source", "image".into())).await else {
        panic!()
    };
    assert_eq!(warnings[0].cause.as_deref(), Some("repository_auth_failed"));
}

#[tokio::test(start_paused = true)]
async fn a_silent_hook_fails_at_its_deadline_and_a_talking_one_outlives_it() {
    let limits = |setup: Value| {
        with(full(), "setup", json!([{ "label": "web", "command": ["setup"], "limits": setup }]))
    };
    let run = Run::new();
    run.world.spawn.act("setup", Act::stubborn().writes(2, "started\n"));
    let failure = run.failure(limits(json!({ "timeoutSeconds": 5 }))).await;
    assert_eq!((failure.reason, failure.step.phase), (Reason::BootTimeout, Phase::Setup));
    assert_eq!(failure.message, "setup of web: no progress for 5 s");
    assert_eq!(failure.output_tail, "started");
    // The sync takes 1 s, the output comes after 2 s, and the grace is 10 s.
    let story = run.world.spawn.story();
    let told: Vec<(u64, &str)> = story.iter().map(|(at, what)| (at.round() as u64, what.as_str())).collect();
    assert_eq!(told, [(1, "setup starts"), (8, "setup is asked to end"), (18, "setup is killed")]);

    let talking = |until: u64| (1..until).fold(Act::ends(until, 0), |act, at| act.writes(at, "line\n"));
    let run = Run::new();
    run.world.spawn.act("setup", talking(60));
    assert_eq!(run.boot(limits(json!({ "timeoutSeconds": 5 }))).await, Outcome::Ready { warnings: vec![] });

    let run = Run::new();
    run.world.spawn.act("setup", talking(60));
    let failure = run.failure(limits(json!({ "timeoutSeconds": 5, "capSeconds": 30 }))).await;
    assert_eq!(failure.message, "setup of web: not done after 30 s");

    let run = Run::new();
    run.world.spawn.act("setup", talking(60));
    let plan = with(limits(json!({ "timeoutSeconds": 5 })), "limits", json!({ "deadlineSeconds": 20 }));
    let failure = run.failure(with(plan, "source", "fresh".into())).await;
    assert_eq!(failure.message, "setup of web: not done when the time of the whole boot was over");
}

#[tokio::test(start_paused = true)]
async fn other_silent_phases_are_named_as_well() {
    let mut run = Run::new();
    run.entrypoint = Duration::from_secs(1000);
    let failure = run.failure(full()).await;
    assert_eq!(failure.message, "entrypoint: no progress for 30 s");

    let run = Run::new();
    run.world.prober.answer.send_modify(|answer| *answer = Err("refused".into()));
    let services =
        json!([{ "name": "app", "command": ["app"], "required": true, "port": 1, "readySeconds": 600 }]);
    let failure = run.failure(with(full(), "services", services)).await;
    assert_eq!(
        (failure.reason, failure.message.as_str()),
        (Reason::BootTimeout, "services: no progress for 120 s")
    );
    assert_eq!(run.world.spawn.alive(), 0);

    let mut run = Run::new();
    run.sync = Sync { seconds: 10_000, heeds_cancel: false, ..Sync::done() };
    let failure = run.failure(with(full(), "limits", json!({ "deadlineSeconds": 100 }))).await;
    assert_eq!(failure.message, "sync: not done when the time of the whole boot was over");
}

#[tokio::test(start_paused = true)]
async fn a_required_service_that_is_given_up_fails_whatever_phase_it_is() {
    let run = Run::new();
    run.world.spawn.act("app", Act::ends(0, 9));
    let failure = run.failure(full()).await;
    assert_eq!((failure.reason, failure.step.step.as_deref()), (Reason::ServiceFailed, Some("app")));
    assert_eq!(failure.exit_code, Some(9));

    let run = Run::new();
    run.world.spawn.act("app", Act::ends(1, 9));
    run.world.spawn.act("start", Act::forever());
    let failure = run.failure(full()).await;
    assert_eq!(failure.reason, Reason::ServiceFailed);
    assert!(run.world.heard.lines().contains(&"start of web Failed".to_owned()));
    assert_eq!(run.world.spawn.alive(), 0);
}

#[tokio::test(start_paused = true)]
async fn an_optional_service_holds_nothing_up() {
    let run = Run::new();
    let services = json!([{ "name": "app", "command": ["absent"] }]);
    assert_eq!(run.boot(with(full(), "services", services)).await, Outcome::Ready { warnings: vec![] });
    assert_eq!(run.services.snapshot("app").unwrap().state, State::Restarting);
}

#[tokio::test(start_paused = true)]
async fn services_that_the_agent_brings_are_part_of_the_boot() {
    let run = Run::new();
    let program = definition::Run::Command(vec!["app".into()]);
    run.services.add(ServiceDefinition { required: true, ..ServiceDefinition::new("own", program) }).unwrap();
    assert_eq!(run.boot(json!({})).await, Outcome::Ready { warnings: vec![] });
    assert_eq!(run.services.snapshot("own").unwrap().state, State::Ready);
}

#[tokio::test(start_paused = true)]
async fn a_missing_entrypoint_is_what_a_shell_says() {
    let run = Run::new();
    let failure = run.failure(with(full(), "entrypoint", json!({ "command": ["missing"] }))).await;
    assert_eq!((failure.step.phase, failure.exit_code), (Phase::Entrypoint, Some(127)));
    assert_eq!(run.world.spawn.alive(), 0);
}

#[tokio::test(start_paused = true)]
async fn cancelled_in_any_phase_it_ends_within_the_grace_with_all_its_processes() {
    let grace = 4;
    for (phase, at) in [
        (Phase::Sync, 0.5),
        (Phase::Setup, 1.5),
        (Phase::Services, 3.25),
        (Phase::Start, 4.5),
        (Phase::Entrypoint, 6.0),
    ] {
        for stubborn in [false, true] {
            let mut run = Run::new();
            run.sync.heeds_cancel = !stubborn;
            run.sync.seconds = if phase == Phase::Sync && stubborn { 100 } else { 1 };
            for (program, own) in [("setup", Phase::Setup), ("start", Phase::Start), ("app", Phase::Services)]
            {
                let ends = (own != phase && own != Phase::Services).then_some((Duration::from_secs(2), 0));
                run.world.spawn.act(
                    program,
                    Act {
                        ends,
                        refuses_term: stubborn,
                        leaves_child: stubborn && own == phase,
                        ..Act::default()
                    },
                );
            }
            run.entrypoint = Duration::from_secs(100);
            let began = Instant::now();
            let cancel = run.cancel.clone();
            tokio::spawn(async move {
                sleep(Duration::from_secs_f64(at)).await;
                cancel.cancel();
            });
            let outcome = run.boot(with(full(), "limits", json!({ "graceSeconds": grace }))).await;
            assert_eq!(outcome, Outcome::Cancelled { phase }, "{:?}", run.world.heard.lines());
            let took = began.elapsed().as_secs_f64() - at;
            assert!(took <= grace as f64 + 0.1, "{phase} took {took} s: {:?}", run.world.spawn.story());
            assert_eq!(run.world.spawn.alive(), 0, "{phase}");
            assert_eq!(run.world.heard.lines().last().unwrap(), &format!("cancelled in {phase}"));
        }
    }
}

#[tokio::test(start_paused = true)]
async fn an_empty_plan_is_ready_at_once() {
    let run = Run::new();
    assert_eq!(run.boot(json!({})).await, Outcome::Ready { warnings: vec![] });
    assert_eq!(run.world.heard.lines(), ["completed, 0 warnings"]);
}
