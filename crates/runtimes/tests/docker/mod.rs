//! The Docker runtime on a real engine: the contract of every runtime, and what only an engine shows.
//!
//! `SANDGLASS_TEST_DOCKER` is the engine's address and `SANDGLASS_TEST_DOCKER_IMAGE` an image there that has a shell; `docker` must be installed.
//! Nobody else may use the engine meanwhile, because full lists are compared.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on ends")]

mod engine;
mod registry;
mod relay;

use std::{sync::Arc, time::Duration};

use futures_util::{StreamExt, stream::BoxStream};
use sandglass_runtimes::docker::DockerRuntime;
use sandglass_sandbox::{
    Clock, SandboxId, SnapshotId, SystemClock,
    ports::{
        Runtime, RuntimeErrorKind,
        runtime::{Condition, ExitCause, Exposure, Observation, RuntimeEvent, StartPlan},
    },
    spec::{Entrypoint, MutableFacts, Secrets, Spec},
};
use sandglass_testkit::runtime_contract::{self, Hands, Subject};
use tokio::time::timeout;

use engine::Engine;
use registry::Registry;
use relay::Relay;

const PATIENCE: Duration = Duration::from_secs(60);

fn plan(engine: &Engine) -> StartPlan {
    let entrypoint = Entrypoint::Command(vec!["sleep".into(), "1000".into()]);
    StartPlan {
        spec: Spec::new(engine.image.clone(), entrypoint),
        facts: MutableFacts::default(),
        created_at: SystemClock.now(),
        agent_token: "t".into(),
        route_token: "r".into(),
        delivery: Vec::new(),
        root_agent: false,
    }
}

async fn started(runtime: &DockerRuntime, engine: &Engine) -> Observation {
    runtime.start(SandboxId::random(), &plan(engine), &Secrets::default()).await.unwrap()
}

async fn told(
    events: &mut BoxStream<'static, RuntimeEvent>,
    what: impl Fn(&RuntimeEvent) -> bool,
) -> Vec<RuntimeEvent> {
    let mut seen = Vec::new();
    let wait = async {
        loop {
            let event = events.next().await.expect("the watch ended");
            let found = what(&event);
            seen.push(event);
            if found {
                return;
            }
        }
    };
    let done = timeout(PATIENCE, wait).await;
    assert!(done.is_ok(), "it was not told, but {seen:?}");
    seen
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_docker_runtime_keeps_the_contract() {
    let Some(engine) = Engine::alone().await else { return };
    let engine = Arc::new(engine);
    let again = engine.clone();
    let registry = Registry::with(&engine).await;
    let subject = Subject {
        runs_processes: true,
        pullable: registry.as_ref().map(Registry::image),
        host_dir: Some(engine.shared_dir()),
        hands: Some(engine.clone()),
        restarted: Some(Arc::new(move || {
            let again: Arc<dyn Runtime> = Arc::new(again.runtime());
            Box::pin(async move { again })
        })),
        ..Subject::new(Arc::new(engine.runtime()), engine.image.clone())
    };
    runtime_contract::run(&subject).await;
    if let Some(registry) = registry {
        engine.docker(&["rmi", &registry.image()]).await;
    }
    assert_eq!(engine.side_files(), Vec::<String>::new());
    assert_eq!(engine.everything().await, Vec::<String>::new());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_engine_that_goes_away_is_told_lost_and_what_happened_meanwhile_when_it_is_back() {
    let Some(engine) = Engine::alone().await else { return };
    let relay = Relay::to(engine.socket()).await;
    let runtime = engine.runtime_at(relay.address());
    let [goes, ends, stays] = [
        started(&runtime, &engine).await.id,
        started(&runtime, &engine).await.id,
        started(&runtime, &engine).await.id,
    ];
    let mut events = runtime.watch();
    told(&mut events, |event| matches!(event, RuntimeEvent::Observed(seen) if seen.id == stays)).await;

    relay.cut().await;
    told(&mut events, |event| matches!(event, RuntimeEvent::Lost(_))).await;
    let refused = runtime.list().await.unwrap_err();
    assert_eq!((refused.kind, refused.phase.as_str()), (RuntimeErrorKind::Unavailable, "engine"));
    assert!(runtime.inspect(stays).await.is_err_and(|e| e.retryable()));
    assert!(runtime.admit(&plan(&engine).spec).await.is_err_and(|e| e.retryable()));
    engine.remove(goes).await;
    engine.kill(ends).await;

    relay.mend().await;
    let seen = told(&mut events, |event| matches!(event, RuntimeEvent::Back)).await;
    let lost = seen.iter().filter(|event| matches!(event, RuntimeEvent::Lost(_))).count();
    assert_eq!(lost, 0, "one loss is told once");
    let has = |what: &dyn Fn(&RuntimeEvent) -> bool| seen.iter().any(what);
    assert!(has(&|e| matches!(e, RuntimeEvent::Removed(id) if *id == goes)), "{seen:?}");
    assert!(has(
        &|e| matches!(e, RuntimeEvent::Observed(o) if o.id == ends && matches!(o.condition, Condition::Exited(_)))
    ));
    assert!(has(
        &|e| matches!(e, RuntimeEvent::Observed(o) if o.id == stays && o.condition == Condition::Running)
    ));
    // And it goes on as before.
    engine.pause(stays).await;
    told(
        &mut events,
        |e| matches!(e, RuntimeEvent::Observed(o) if o.id == stays && o.condition == Condition::Paused),
    )
    .await;
    for id in [goes, ends, stays] {
        runtime.remove(id, Duration::ZERO).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_engine_that_hangs_is_lost_too() {
    let Some(engine) = Engine::alone().await else { return };
    let relay = Relay::to(engine.socket()).await;
    let runtime = engine.runtime_at(relay.address());
    let id = started(&runtime, &engine).await.id;
    let mut events = runtime.watch();
    told(&mut events, |event| matches!(event, RuntimeEvent::Observed(seen) if seen.id == id)).await;
    relay.hang();
    told(&mut events, |event| matches!(event, RuntimeEvent::Lost(_))).await;
    relay.mend().await;
    told(&mut events, |event| matches!(event, RuntimeEvent::Back)).await;
    runtime.remove(id, Duration::ZERO).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_container_started_by_hand_with_our_labels_is_a_sandbox_like_any_other() {
    let Some(engine) = Engine::alone().await else { return };
    let runtime = engine.runtime();
    let mut events = runtime.watch();
    let id = SandboxId::random();
    let label = format!("opensandbox.io/id={id}");
    let run = [
        "run",
        "-d",
        "--name",
        "by-hand",
        "--label",
        &label,
        "--label",
        "team=blue",
        &engine.image,
        "sleep",
        "1000",
    ];
    engine.docker(&run).await;
    told(
        &mut events,
        |e| matches!(e, RuntimeEvent::Observed(o) if o.id == id && o.condition == Condition::Running),
    )
    .await;
    let seen = runtime.inspect(id).await.unwrap().unwrap();
    assert_eq!((seen.facts.expires_at, seen.facts.metadata["team"].as_str()), (None, "blue"));
    assert_eq!(seen.spec.entrypoint, Entrypoint::Command(vec!["sleep".into(), "1000".into()]));
    assert_eq!((seen.spec.image.as_str(), seen.agent_token.as_str()), (engine.image.as_str(), ""));
    let facts = MutableFacts { expires_at: Some(SystemClock.now()), ..seen.facts };
    assert_eq!(runtime.update_facts(id, &facts).await.unwrap().facts, facts);
    assert_eq!(runtime.pause(id).await.unwrap().condition, Condition::Paused);
    assert_eq!(runtime.list().await.unwrap().len(), 1);
    runtime.remove(id, Duration::ZERO).await.unwrap();
    assert_eq!(engine.everything().await, Vec::<String>::new());
    assert_eq!(engine.side_files(), Vec::<String>::new());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_not_a_sandbox_is_neither_shown_nor_touched() {
    let Some(engine) = Engine::alone().await else { return };
    let runtime = engine.runtime();
    let id = SandboxId::random();
    let name = format!("sandbox-{id}");
    engine.docker(&["run", "-d", "--name", &name, &engine.image, "sleep", "1000"]).await;
    let odd = [
        "run",
        "-d",
        "--name",
        "odd",
        "--label",
        "opensandbox.io/id=../../x",
        &engine.image,
        "sleep",
        "1000",
    ];
    engine.docker(&odd).await;
    engine
        .docker(&[
            "run",
            "-d",
            "--name",
            "blank",
            "--label",
            "opensandbox.io/id=",
            &engine.image,
            "sleep",
            "9",
        ])
        .await;
    assert!(runtime.inspect(id).await.unwrap().is_none());
    assert_eq!(runtime.list().await.unwrap().len(), 0);
    runtime.remove(id, Duration::ZERO).await.unwrap();
    let refused = runtime.start(id, &plan(&engine), &Secrets::default()).await.unwrap_err();
    assert_eq!(refused.kind, RuntimeErrorKind::Exists, "{refused}");
    assert_eq!(engine.everything().await.len(), 3);
    engine.docker(&["rm", "-f", "-v", &name, "odd", "blank"]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn removing_a_sandbox_that_never_came_to_be_removes_what_was_made_for_it() {
    let Some(engine) = Engine::alone().await else { return };
    let runtime = engine.runtime();
    let id = SandboxId::random();
    let sidecar = format!("opensandbox.io/egress-sidecar-for={id}");
    let volume = format!("opensandbox-runtime-{id}");
    let by_server = "opensandbox.io/volume-managed-by=server";
    engine.docker(&["volume", "create", "--label", by_server, &volume]).await;
    engine.docker(&["volume", "create", "callers-own"]).await;
    let mount = format!("{volume}:/opt/opensandbox");
    engine.docker(&["run", "-d", "--label", &sidecar, "-v", &mount, &engine.image, "sleep", "1000"]).await;
    assert_eq!(runtime.list().await.unwrap().len(), 0, "a sidecar is no sandbox");
    runtime.remove(id, Duration::ZERO).await.unwrap();
    assert_eq!(engine.everything().await, ["volume callers-own"]);
    engine.docker(&["volume", "rm", "callers-own"]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_box_removed_behind_our_back_takes_its_volumes_and_side_files_along() {
    let Some(engine) = Engine::alone().await else { return };
    let runtime = engine.runtime();
    let mut events = runtime.watch();
    let id = SandboxId::random();
    let mut plan = plan(&engine);
    plan.spec.volumes.push(sandglass_sandbox::spec::Volume {
        name: "data".into(),
        source: sandglass_sandbox::spec::VolumeSource::Named {
            claim: "for-this-box".into(),
            sub_path: None,
            create_if_missing: true,
            delete_with_sandbox: true,
        },
        target: "/data".into(),
        read_only: false,
    });
    runtime.start(id, &plan, &Secrets::default()).await.unwrap();
    runtime.list().await.unwrap();
    let facts = MutableFacts { expires_at: Some(SystemClock.now()), ..MutableFacts::default() };
    runtime.update_facts(id, &facts).await.unwrap();
    assert_eq!(engine.side_files().len(), 1);
    engine.remove(id).await;
    told(&mut events, |event| matches!(event, RuntimeEvent::Removed(gone) if *gone == id)).await;
    assert_eq!(engine.everything().await, Vec::<String>::new());
    assert_eq!(engine.side_files(), Vec::<String>::new());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_snapshot_that_is_whole_only_after_its_removal_is_removed() {
    let Some(engine) = Engine::alone().await else { return };
    let runtime = engine.runtime();
    let id = started(&runtime, &engine).await.id;
    let mut events = runtime.watch();
    told(&mut events, |event| matches!(event, RuntimeEvent::Observed(seen) if seen.id == id)).await;
    let [late, wanted] = [SnapshotId::random(), SnapshotId::random()];
    runtime.remove_snapshot(late).await.unwrap();
    // What a killed server asked for.
    for snapshot in [late, wanted] {
        engine.docker(&["commit", &format!("sandbox-{id}"), &runtime.snapshot_image(snapshot)]).await;
    }
    let gone = async {
        while runtime.has_snapshot(late).await.unwrap() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    timeout(PATIENCE, gone).await.expect("it stays");
    assert!(runtime.has_snapshot(wanted).await.unwrap());
    runtime.remove_snapshot(wanted).await.unwrap();
    runtime.remove(id, Duration::ZERO).await.unwrap();
    assert_eq!(engine.everything().await, Vec::<String>::new());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_commit_of_a_server_that_has_ended_is_no_pause() {
    let Some(engine) = Engine::alone().await else { return };
    let before = Arc::new(engine.runtime());
    let id = started(&before, &engine).await.id;
    let name = format!("sandbox-{id}");
    // Enough to copy for all that happens meanwhile.
    engine.docker(&["exec", &name, "dd", "if=/dev/urandom", "of=/big", "bs=1M", "count=300"]).await;
    let snapshot = SnapshotId::random();
    let saving = tokio::spawn({
        let before = before.clone();
        async move { before.snapshot(id, snapshot).await }
    });
    let paused =
        async || engine.docker(&["inspect", "-f", "{{.State.Paused}}", &name]).await.trim() == "true";
    let frozen = async {
        while !paused().await {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    timeout(PATIENCE, frozen).await.expect("the engine did not freeze it");
    saving.abort();
    let _ = saving.await;

    let after = engine.runtime();
    let seen = after.inspect(id).await.unwrap().unwrap();
    let is_going_on = paused().await && !after.has_snapshot(snapshot).await.unwrap();
    assert!(is_going_on, "the commit was over too soon to show anything");
    assert_eq!(seen.condition, Condition::Running);
    assert!(after.still_saves(snapshot).await);
    assert_eq!(after.pause(id).await.unwrap().condition, Condition::Paused);
    assert!(after.has_snapshot(snapshot).await.unwrap() && !after.still_saves(snapshot).await);
    assert!(paused().await, "the end of the commit thawed what was paused since");
    assert_eq!(after.resume(id).await.unwrap().condition, Condition::Running);
    after.remove_snapshot(snapshot).await.unwrap();
    after.remove(id, Duration::ZERO).await.unwrap();
    assert_eq!(engine.everything().await, Vec::<String>::new());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_commit_that_never_began_is_not_waited_for() {
    let Some(engine) = Engine::alone().await else { return };
    let before = engine.runtime();
    let id = started(&before, &engine).await.id;
    let snapshot = SnapshotId::random();
    engine.notes_a_commit(id, snapshot);
    let after = engine.runtime();
    assert!(after.still_saves(snapshot).await, "the engine may freeze it any moment");
    let over = async {
        while after.still_saves(snapshot).await {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    timeout(PATIENCE, over).await.expect("it is waited for");
    after.remove(id, Duration::ZERO).await.unwrap();
    assert_eq!(engine.everything().await, Vec::<String>::new());
}

/// A sandbox of the reference's making, with a sidecar.
async fn guarded(engine: &Engine) -> (SandboxId, String) {
    let id = SandboxId::random();
    let (app, sidecar) = (format!("sandbox-{id}"), format!("sandbox-egress-{id}"));
    let mark = format!("opensandbox.io/egress-sidecar-for={id}");
    let publish = ["-p", "127.0.0.1::44772", "-p", "127.0.0.1::8080", "-p", "127.0.0.1::18080"];
    let run = ["run", "-d", "--name", &sidecar, "--label", &mark];
    engine.docker(&[&run[..], &publish, &[&engine.image, "sleep", "1000"]].concat()).await;
    let (mark, network) = (format!("opensandbox.io/id={id}"), format!("container:{sidecar}"));
    let token = "opensandbox.io/egress-auth-token=secret";
    let run = ["run", "-d", "--name", &app, "--label", &mark, "--label", token, "--network", &network];
    engine.docker(&[&run[..], &[&engine.image, "sleep", "1000"]].concat()).await;
    (id, sidecar)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_box_and_its_sidecar_stop_and_go_on_together() {
    let Some(engine) = Engine::alone().await else { return };
    let runtime = engine.runtime();
    let (id, sidecar) = guarded(&engine).await;
    let seen = runtime.inspect(id).await.unwrap().unwrap();
    let listed = runtime.list().await.unwrap();
    assert_eq!((listed.len(), listed[0].exposure, listed[0].address), (1, seen.exposure, seen.address));
    assert!(matches!(seen.exposure, Exposure::Published { egress: Some(_), .. }), "{:?}", seen.exposure);
    assert!(seen.address.is_some() && seen.spec.egress.is_some());
    assert_eq!(seen.egress_token.as_deref(), Some("secret"));

    let states = async || {
        let app = format!("sandbox-{id}");
        engine
            .docker(&["inspect", "-f", "{{.State.Status}}", &app, &sidecar])
            .await
            .split_whitespace()
            .collect::<Vec<_>>()
            .join(" ")
    };
    assert_eq!(runtime.pause(id).await.unwrap().condition, Condition::Paused);
    assert_eq!(states().await, "paused paused");
    assert_eq!(runtime.resume(id).await.unwrap().condition, Condition::Running);
    assert_eq!(states().await, "running running");
    // Half of it, as after a server that died in between.
    engine.docker(&["pause", &sidecar]).await;
    runtime.resume(id).await.unwrap();
    assert_eq!(states().await, "running running");

    engine.docker(&["rm", "-f", &sidecar]).await;
    let refused = runtime.pause(id).await.unwrap_err();
    assert_eq!((refused.kind, refused.phase.as_str()), (RuntimeErrorKind::Failed, "pause"), "{refused}");
    let seen = runtime.inspect(id).await.unwrap().unwrap();
    let lost = matches!(&seen.condition, Condition::Exited(exit) if exit.cause == ExitCause::EgressLost);
    assert!(lost && seen.address.is_none(), "without its network it is over: {seen:?}");
    runtime.remove(id, Duration::ZERO).await.unwrap();
    let (id, _) = guarded(&engine).await;
    runtime.remove(id, Duration::ZERO).await.unwrap();
    assert_eq!(engine.everything().await, Vec::<String>::new());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_full_list_of_many_boxes_is_read_once_and_then_cheaply() {
    let Some(engine) = Engine::alone().await else { return };
    let runtime = engine.runtime();
    let relay = Relay::to(engine.socket()).await;
    let counted = engine.runtime_at(relay.address());
    let boxes: Vec<_> = futures_util::future::join_all((0..10).map(|_| started(&runtime, &engine))).await;
    assert_eq!(counted.list().await.unwrap().len(), 10);
    let first = relay.requests();
    assert_eq!(counted.list().await.unwrap().len(), 10);
    let second = relay.requests() - first;
    assert!(first >= 11, "{first}: ten inspects and the list");
    assert_eq!(second, 1, "what did not change is not asked for again");
    runtime.pause(boxes[0].id).await.unwrap();
    let listed = counted.list().await.unwrap();
    let paused = listed.iter().filter(|o| o.condition == Condition::Paused).count();
    assert_eq!((listed.len(), paused), (10, 1));
    for seen in boxes {
        runtime.remove(seen.id, Duration::ZERO).await.unwrap();
    }
}
