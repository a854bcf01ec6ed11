//! Against a real engine: our own enforcer beside a box, its end, and boxes that only the server may reach.

use bollard::{
    auth::DockerCredentials,
    models::ContainerInspectResponse,
    query_parameters::{
        InspectContainerOptions, InspectNetworkOptions, KillContainerOptions, RemoveImageOptions,
        RestartContainerOptions,
    },
};
use futures_util::StreamExt;
use sandglass_sandbox::{
    ports::{
        RuntimeErrorKind as Kind,
        runtime::{Condition, ExitCause, Exposure, Observation, Runtime, RuntimeEvent},
    },
    spec::{Limits, Secrets, Spec},
};
use tokio::{net::TcpStream, time::timeout};

use super::{
    live_network_tests::policy,
    live_tests::{Bench, IDLE, bench},
    observe::container_name,
    *,
};

/// Far longer than anything here takes.
const GUARD: Duration = Duration::from_secs(60);

async fn inspect(bench: &Bench, name: &str) -> ContainerInspectResponse {
    let asked = bench
        .shared()
        .client
        .call(|d| async move { d.inspect_container(name, None::<InspectContainerOptions>).await });
    asked.await.unwrap()
}

async fn remove_image(bench: &Bench, name: &str) -> Result<(), errors::Failure> {
    let removed = bench.shared().client.call(|d| async move {
        d.remove_image(name, None::<RemoveImageOptions>, None::<DockerCredentials>).await
    });
    removed.await.map(drop)
}

fn own(config: &mut DockerConfig) {
    config.egress.image = None;
}

fn with_policy(bench: &Bench) -> Spec {
    Spec { egress: Some(policy()), ..bench.spec(IDLE) }
}

/// Asks until it is so.
async fn until<F: Future<Output = bool>>(mut so: impl FnMut() -> F) {
    let asked = async {
        while !so().await {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    timeout(GUARD, asked).await.expect("it comes about in time");
}

#[tokio::test]
async fn our_own_enforcer_is_out_of_the_boxs_reach() {
    let Some(bench) = bench(|config| {
        own(config);
        config.drop_capabilities = vec![];
        config.egress.limits = Limits { memory_bytes: Some(96 << 20), ..Limits::default() };
    }) else {
        return;
    };
    let seen = bench.start(with_policy(&bench)).await.unwrap();
    assert_eq!(seen.condition, Condition::Running);
    assert!(matches!(seen.exposure, Exposure::Published { egress: Some(_), .. }), "{:?}", seen.exposure);

    let sidecar = inspect(&bench, &sidecar::container_name(seen.id)).await;
    let host = sidecar.host_config.unwrap();
    assert!(sidecar.config.unwrap().image.unwrap().starts_with("sandglass-egress:"));
    assert_eq!((host.memory, host.readonly_rootfs), (Some(96 << 20), Some(true)));
    assert_eq!(host.cap_drop, Some(vec!["ALL".to_owned()]));
    // Some engines spell it with the kernel's prefix.
    assert!(host.cap_add.unwrap().iter().all(|name| name.ends_with("NET_ADMIN")));

    // Bits 12 and 13: no interface is changed, no packet is made by hand, and none is marked as the enforcer's.
    let said = bench.run(&seen, "grep CapBnd /proc/self/status").await;
    let digits = said.split("CapBnd:").nth(1).unwrap().trim_start_matches(['\\', 't', '\t', ' ']);
    let bounds = u64::from_str_radix(&digits[..16], 16).unwrap();
    assert_eq!(bounds & (1 << 12 | 1 << 13), 0, "{said}");
    let said = bench.run(&seen, "cat /proc/[0-9]*/cmdline | tr '\\0' ' '").await;
    assert!(!said.contains("sandglass-egress") && said.contains("sleep"), "{said}");
    bench.close().await;
}

#[tokio::test]
async fn the_enforcers_image_is_made_again_after_somebody_removed_it_and_old_ones_are_swept() {
    let Some(bench) = bench(own) else { return };
    let first = bench.start(with_policy(&bench)).await.unwrap();
    let name = bench.shared().own_image_name().await.unwrap();
    let used = bench.runtime.shared.look(&name).await.unwrap().unwrap();
    assert_eq!(remove_image(&bench, &name).await.unwrap_err().status(), Some(409), "it is in use");
    bench.runtime.remove(first.id, Duration::ZERO).await.unwrap();
    // Another test may use it right now; then it is there all the same.
    let gone = remove_image(&bench, &name).await.is_ok();

    // `prepare` does not run again for a create that was admitted before.
    let id = SandboxId::random();
    bench.made.lock().unwrap().push(id);
    let plan = Bench::plan(with_policy(&bench));
    let again = bench.shared().start(id, &plan, &Secrets::default()).await.unwrap();
    assert_eq!(again.condition, Condition::Running, "the image had gone: {gone}");
    let made = bench.runtime.shared.look(&name).await.unwrap().unwrap();
    assert_eq!(used.id, made.id, "the same content is the same image");

    let old = "sandglass-egress:00000000deadbeef";
    let packed = enforcer::archive(old, b"", b"no program").unwrap();
    bench.shared().load(packed).await.unwrap();
    assert!(bench.runtime.shared.look(old).await.unwrap().is_some());
    bench.shared().sweep_own_images().await;
    assert!(bench.runtime.shared.look(old).await.unwrap().is_none(), "nothing uses it");
    assert!(bench.runtime.shared.look(&name).await.unwrap().is_some());
    bench.close().await;
}

/// The next observation of a box that has ended.
async fn end_of(
    events: &mut (impl futures_util::Stream<Item = RuntimeEvent> + Unpin),
    id: SandboxId,
) -> Observation {
    let told = async {
        loop {
            match events.next().await.unwrap() {
                RuntimeEvent::Observed(seen)
                    if seen.id == id && matches!(seen.condition, Condition::Exited(_)) =>
                {
                    return *seen;
                }
                _ => {}
            }
        }
    };
    timeout(GUARD, told).await.expect("its end is told")
}

fn lost_because(seen: &Observation) -> &str {
    match &seen.condition {
        Condition::Exited(exit) if exit.cause == ExitCause::EgressLost => &exit.message,
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn a_box_whose_enforcer_is_killed_is_told_as_lost_and_ended() {
    let Some(bench) = bench(own) else { return };
    let seen = bench.start(with_policy(&bench)).await.unwrap();
    let mut events = bench.runtime.watch();
    let (name, sidecar) = (container_name(seen.id), sidecar::container_name(seen.id));
    bench
        .shared()
        .client
        .call(|d| async move { d.kill_container(&sidecar, None::<KillContainerOptions>).await })
        .await
        .unwrap();
    let ended = end_of(&mut events, seen.id).await;
    assert!(lost_because(&ended).contains("ended with code 137"), "{ended:?}");
    assert_eq!(ended.address, None);
    until(|| async { !inspect(&bench, &name).await.state.unwrap().running.unwrap() }).await;
    // Looked at again, also by a server that has just been started, it is the same.
    let again = bench.runtime.inspect(seen.id).await.unwrap().unwrap();
    assert_eq!((lost_because(&again), again.since), (lost_because(&ended), ended.since));
    let other = DockerRuntime::open(bench.shared().config.clone()).unwrap();
    let listed = other.list().await.unwrap();
    let listed = listed.iter().find(|o| o.id == seen.id).unwrap();
    assert_eq!(lost_because(listed), lost_because(&ended));
    drop(events);
    bench.runtime.remove(seen.id, Duration::ZERO).await.unwrap();
    bench.nothing_is_left_of(&[seen.id]).await;
}

#[tokio::test]
async fn an_enforcer_that_was_started_again_does_not_guard_the_box() {
    let Some(bench) = bench(own) else { return };
    let restarted = bench.start(with_policy(&bench)).await.unwrap();
    let removed = bench.start(with_policy(&bench)).await.unwrap();
    let paused = bench.start(with_policy(&bench)).await.unwrap();
    bench.runtime.pause(paused.id).await.unwrap();
    let (first, second) = (sidecar::container_name(restarted.id), sidecar::container_name(removed.id));
    let mut events = bench.runtime.watch();
    let again = RestartContainerOptions { t: Some(0), ..RestartContainerOptions::default() };
    bench
        .shared()
        .client
        .call(|d| async move { d.restart_container(&first, Some(again)).await })
        .await
        .unwrap();
    let ended = end_of(&mut events, restarted.id).await;
    lost_because(&ended);
    bench.shared().remove_container(&second).await.unwrap();
    let ended = end_of(&mut events, removed.id).await;
    lost_because(&ended);
    let third = sidecar::container_name(paused.id);
    bench.shared().remove_container(&third).await.unwrap();
    let ended = end_of(&mut events, paused.id).await;
    lost_because(&ended);
    let refused = bench.runtime.resume(paused.id).await;
    assert!(refused.is_err() || matches!(refused.unwrap().condition, Condition::Exited(_)));
    drop(events);
    bench.close().await;
}

#[tokio::test]
async fn a_box_with_our_enforcer_is_paused_resumed_and_adopted() {
    let Some(bench) = bench(own) else { return };
    let seen = bench.start(with_policy(&bench)).await.unwrap();
    assert_eq!(bench.runtime.pause(seen.id).await.unwrap().condition, Condition::Paused);
    assert_eq!(bench.runtime.resume(seen.id).await.unwrap().condition, Condition::Running);
    let other = DockerRuntime::open(bench.shared().config.clone()).unwrap();
    let listed = other.list().await.unwrap();
    let adopted = listed.iter().find(|o| o.id == seen.id).unwrap();
    assert_eq!((&adopted.condition, &adopted.egress_token), (&Condition::Running, &seen.egress_token));
    assert_eq!((adopted.exposure, adopted.address), (seen.exposure, seen.address));
    bench.close().await;
}

#[tokio::test]
async fn what_the_enforcer_refuses_is_told_live_and_in_the_history() {
    let Some(bench) = bench(own) else { return };
    let mut events = bench.runtime.watch();
    let seen = bench.start(with_policy(&bench)).await.unwrap();
    let told = async {
        loop {
            match events.next().await.unwrap() {
                RuntimeEvent::Happened(id, event) if id == seen.id && event.kind == "egress.denied" => {
                    return event;
                }
                _ => {}
            }
        }
    };
    let asked = bench.run(&seen, "nslookup evil.example; true");
    let (told, _) = tokio::join!(timeout(GUARD, told), asked);
    let told = told.expect("the denial is told live");
    assert!(told.message.contains("evil.example") && told.message.contains("default"), "{told:?}");
    let history = bench.runtime.events(seen.id).await.unwrap();
    assert!(history.iter().any(|event| event.kind == "egress.denied" && event.at == told.at), "{history:?}");
    assert!(history.is_sorted_by_key(|event| event.at));
    drop(events);
    bench.close().await;
}

async fn gateway(bench: &Bench) -> Ipv4Addr {
    let asked = bench
        .shared()
        .client
        .call(|d| async move { d.inspect_network("bridge", None::<InspectNetworkOptions>).await });
    let ranges = asked.await.unwrap().ipam.unwrap().config.unwrap();
    ranges.into_iter().find_map(|range| range.gateway).unwrap().parse().unwrap()
}

#[tokio::test]
async fn a_secure_box_publishes_nothing_where_the_server_reaches_it() {
    let Some(bench) = bench(|config| {
        own(config);
        config.publish_host = Ipv4Addr::UNSPECIFIED;
    }) else {
        return;
    };
    for egress in [None, Some(policy())] {
        let spec = Spec { secure_access: true, egress, ..bench.spec(IDLE) };
        let seen = bench.start(spec.clone()).await.unwrap();
        assert_eq!(seen.exposure, Exposure::None);
        let owner = match spec.egress {
            None => container_name(seen.id),
            Some(_) => sidecar::container_name(seen.id),
        };
        let raw = inspect(&bench, &owner).await;
        let bound = raw.host_config.unwrap().port_bindings.unwrap_or_default();
        assert!(bound.is_empty(), "{bound:?}");
        assert!(bench.run(&seen, "echo here").await.contains("here"));
        let again = bench.runtime.inspect(seen.id).await.unwrap().unwrap();
        assert_eq!((again.exposure, again.address), (Exposure::None, seen.address));
    }
    bench.close().await;
}

#[tokio::test]
async fn a_secure_boxs_ports_are_those_of_this_machine_alone() {
    let Some(bench) = bench(|config| {
        own(config);
        config.publish_host = Ipv4Addr::UNSPECIFIED;
        config.reaches_containers = false;
    }) else {
        return;
    };
    let elsewhere = gateway(&bench).await;
    let open = bench.start(bench.spec(IDLE)).await.unwrap();
    let Exposure::Published { agent, .. } = open.exposure else { panic!("{:?}", open.exposure) };
    assert!(TcpStream::connect((elsewhere, agent)).await.is_ok(), "published everywhere");
    for egress in [None, Some(policy())] {
        let spec = Spec { secure_access: true, egress, ..bench.spec(IDLE) };
        let seen = bench.start(spec).await.unwrap();
        let Exposure::Published { agent, http, egress } = seen.exposure else {
            panic!("{:?}", seen.exposure)
        };
        assert!(TcpStream::connect((Ipv4Addr::LOCALHOST, agent)).await.is_ok());
        for port in [Some(agent), Some(http), egress].into_iter().flatten() {
            let refused = TcpStream::connect((elsewhere, port)).await.unwrap_err();
            assert_eq!(refused.kind(), std::io::ErrorKind::ConnectionRefused, "{port}");
        }
        assert!(bench.run(&seen, "echo here").await.contains("here"));
    }
    bench.close().await;
}

#[tokio::test]
async fn a_secure_box_is_refused_where_its_ports_would_be_open() {
    let Some(bench) = bench(|config| config.network_mode = "host".into()) else { return };
    let spec = Spec { secure_access: true, ..bench.spec(IDLE) };
    let refused = bench.shared().admit(&spec).await.unwrap_err();
    assert_eq!((refused.kind, refused.phase.as_str()), (Kind::Invalid, "network"));
}
