//! Against a real engine: networks, sidecars, and boxes that need the host's devices.

use std::collections::HashMap;

use bollard::{
    models::{ContainerConfig, ContainerCreateBody, NetworkCreateRequest},
    query_parameters::{CommitContainerOptions, CreateContainerOptions, RemoveImageOptions},
};
use sandglass_sandbox::{
    ports::{
        RuntimeErrorKind as Kind,
        runtime::{Condition, Exposure, Runtime},
    },
    spec::{Egress, EgressRule, Limits, NetworkPolicy, Platform, Secrets, Spec},
};

use super::{
    live_tests::{Bench, IDLE, bench},
    observe::container_name,
    *,
};

/// An image that runs a shell script; removed by the caller.
pub(super) async fn image_of(bench: &Bench, script: &str) -> String {
    let shared = bench.shared();
    let name = format!("sandglass-test-{}", uuid::Uuid::new_v4());
    let options = CreateContainerOptions { name: Some(name.clone()), ..Default::default() };
    let command = ["sh", "-c", script].map(str::to_owned).to_vec();
    let body = ContainerCreateBody {
        image: Some(bench.image.clone()),
        cmd: Some(command.clone()),
        ..ContainerCreateBody::default()
    };
    shared.client.call(|d| async move { d.create_container(Some(options), body).await }).await.unwrap();
    let options = CommitContainerOptions {
        container: Some(name.clone()),
        repo: Some(name.clone()),
        ..CommitContainerOptions::default()
    };
    let config = ContainerConfig { cmd: Some(command), ..ContainerConfig::default() };
    shared.client.call(|d| async move { d.commit_container(options, config).await }).await.unwrap();
    shared.remove_container(&name).await.unwrap();
    name
}

pub(super) async fn remove_image(shared: &Shared, image: &str) {
    let removed =
        shared.client.call(|d| async move { d.remove_image(image, None::<RemoveImageOptions>, None).await });
    removed.await.unwrap();
}

const READY: &str = "mkdir -p /www; env > /www/env; echo ok > /www/healthz; exec httpd -f -p 18080 -h /www";

pub(super) fn policy() -> Egress {
    let rule = EgressRule { action: "allow".into(), target: "example.com".into() };
    Egress {
        policy: NetworkPolicy { default_action: Some("deny".into()), egress: vec![rule] },
        credential_proxy: false,
        env: vec![("HELLO".into(), "x".into())],
    }
}

#[tokio::test]
async fn a_policy_brings_a_sidecar_that_owns_the_ports() {
    let Some(first) = bench(|_| {}) else { return };
    let image = image_of(&first, READY).await;
    let sidecar_image = image.clone();
    let bench = bench(|config| config.egress.image = Some(sidecar_image)).unwrap();
    let spec = Spec { egress: Some(policy()), ..bench.spec(IDLE) };
    let seen = bench.start(spec.clone()).await.unwrap();
    assert_eq!(seen.condition, Condition::Running);
    let Exposure::Published { egress: Some(port), .. } = seen.exposure else {
        panic!("the sidecar publishes nothing: {:?}", seen.exposure)
    };
    let token = seen.egress_token.clone().unwrap();
    assert_eq!(token.len(), 32);

    let address = bench.shared().published_address(Ipv4Addr::LOCALHOST, port).await.unwrap();
    let status = reach::ask(address, "/env", &[], Duration::from_secs(60)).await.unwrap();
    assert_eq!(status, 200);
    // Box and sidecar share a network and a directory.
    let said = bench.run(&seen, "wget -qO- http://127.0.0.1:18080/env; ls -a /opt/opensandbox").await;
    for expected in ["defaultAction", "example.com", "HELLO=x", &token, "execd"] {
        assert!(said.contains(expected), "{expected} is not in {said}");
    }
    assert!(bench.run(&seen, "grep CapBnd /proc/self/status").await.contains("CapBnd"));

    // Again is the same box, with the same sidecar.
    let plan = Bench::plan(spec);
    let again = bench.shared().start(seen.id, &plan, &Secrets::default()).await.unwrap();
    assert_eq!((again.started_at, again.egress_token), (seen.started_at, seen.egress_token));

    bench.runtime.remove(seen.id, Duration::ZERO).await.unwrap();
    bench.nothing_is_left_of(&[seen.id]).await;
    bench.close().await;
    remove_image(first.shared(), &image).await;
}

#[tokio::test]
async fn a_sidecar_that_does_not_get_ready_takes_everything_along() {
    let Some(first) = bench(|_| {}) else { return };
    let image = image_of(&first, "sleep 1000").await;
    let sidecar_image = image.clone();
    let bench = bench(|config| {
        config.egress.image = Some(sidecar_image);
        config.egress.readiness_timeout = Duration::from_millis(300);
    })
    .unwrap();
    let failed = bench.start(Spec { egress: Some(policy()), ..bench.spec(IDLE) }).await.unwrap_err();
    assert_eq!((failed.kind, failed.phase.as_str()), (Kind::Failed, "sidecar"), "{failed}");
    let ids = bench.made.lock().unwrap().clone();
    bench.nothing_is_left_of(&ids).await;
    remove_image(first.shared(), &image).await;
}

#[tokio::test]
async fn a_network_that_does_not_exist_is_named() {
    let Some(bench) = bench(|config| config.network_mode = "sandglass-none".into()) else { return };
    let spec = bench.spec(IDLE);
    let refused = bench.shared().admit(&spec).await.unwrap_err();
    assert_eq!((refused.kind, refused.phase.as_str()), (Kind::Invalid, "network"));
    let id = SandboxId::random();
    let refused = bench.shared().start(id, &Bench::plan(spec), &Secrets::default()).await.unwrap_err();
    assert_eq!((refused.kind, refused.phase.as_str()), (Kind::Invalid, "network"));
    assert!(refused.message.contains("sandglass-none"), "{refused}");
    bench.nothing_is_left_of(&[id]).await;
}

#[tokio::test]
async fn a_box_on_a_network_of_the_users_is_reached_there() {
    let name = format!("Sandglass-test-{}", uuid::Uuid::new_v4());
    let Some(bench) = bench(|config| config.network_mode.clone_from(&name)) else { return };
    let request = NetworkCreateRequest { name: name.clone(), ..NetworkCreateRequest::default() };
    bench.shared().client.call(|d| async move { d.create_network(request).await }).await.unwrap();
    let seen = bench.start(bench.spec(IDLE)).await.unwrap();
    assert!(seen.address.is_some() && matches!(seen.exposure, Exposure::Published { .. }));
    assert!(bench.run(&seen, "echo here").await.contains("here"));
    let shared = bench.runtime.shared.clone();
    bench.close().await;
    shared.client.call(|d| async move { d.remove_network(&name).await }).await.unwrap();
}

#[tokio::test]
async fn the_hosts_network_holds_one_box() {
    let Some(bench) = bench(|config| config.network_mode = "host".into()) else { return };
    let seen = match bench.start(bench.spec(IDLE)).await {
        Ok(seen) => seen,
        // Somebody else on this machine has the port.
        Err(e) if e.phase == "ports" => return,
        Err(e) => panic!("{e}"),
    };
    assert_eq!(seen.exposure, Exposure::Host);
    assert!(bench.run(&seen, "echo here").await.contains("here"));
    let second = bench.start(bench.spec(IDLE)).await.unwrap_err();
    assert_eq!((second.kind, second.phase.as_str()), (Kind::Exhausted, "ports"), "{second}");
    bench.close().await;
}

/// An image with what a Windows box is given; removed by the caller.
async fn artifacts_image(bench: &Bench) -> String {
    let shared = bench.shared();
    let artifacts = format!("sandglass-test-{}", uuid::Uuid::new_v4());
    let options = CreateContainerOptions { name: Some(artifacts.clone()), ..Default::default() };
    let body = ContainerCreateBody {
        image: Some(bench.image.clone()),
        cmd: Some(vec!["true".to_owned()]),
        ..ContainerCreateBody::default()
    };
    shared.client.call(|d| async move { d.create_container(Some(options), body).await }).await.unwrap();
    let mut tar = tar::Builder::new(Vec::new());
    for (name, content) in [("install.bat", "rem installs"), ("execd.exe", "MZ")] {
        let mut header = tar::Header::new_gnu();
        header.set_mode(0o644);
        header.set_size(content.len() as u64);
        tar.append_data(&mut header, name, content.as_bytes()).unwrap();
    }
    let packed = bollard::body_full(bytes::Bytes::from(tar.into_inner().unwrap()));
    let to = bollard::query_parameters::UploadToContainerOptions { path: "/".into(), ..Default::default() };
    let name = &artifacts;
    shared.client.call(|d| async move { d.upload_to_container(name, Some(to), packed).await }).await.unwrap();
    let options = CommitContainerOptions {
        container: Some(artifacts.clone()),
        repo: Some(artifacts.clone()),
        ..CommitContainerOptions::default()
    };
    shared
        .client
        .call(|d| async move { d.commit_container(options, ContainerConfig::default()).await })
        .await
        .unwrap();
    shared.remove_container(&artifacts).await.unwrap();

    artifacts
}

#[tokio::test]
async fn a_windows_box_keeps_its_own_start_and_finds_the_agent_on_a_volume() {
    let Some(first) = bench(|_| {}) else { return };
    if windows::admit().is_err() {
        eprintln!("SKIPPED: the host has no /dev/kvm or /dev/net/tun");
        return;
    }
    let shared = first.shared();
    let image = image_of(&first, "cat /oem/install.bat; env; exec sleep 1000").await;
    let artifacts = artifacts_image(&first).await;
    let execd_image = artifacts.clone();
    let bench = bench(|config| config.execd_image = Some(execd_image)).unwrap();
    let spec = Spec {
        image: image.clone(),
        entrypoint: sandglass_sandbox::spec::Entrypoint::AgentOnly,
        platform: Some(Platform { os: "windows".into(), arch: "amd64".into() }),
        limits: Limits {
            cpu_millis: Some(2000),
            memory_bytes: Some(4 << 30),
            disk_bytes: Some(64 << 30),
            ..Limits::default()
        },
        ..bench.spec(IDLE)
    };
    let seen = bench.start(spec).await.unwrap();
    let look = async {
        loop {
            let lines = bench.runtime.logs(seen.id, 100).await.unwrap().join("\n");
            if lines.contains("DISK_SIZE=64G") {
                return lines;
            }
        }
    };
    let lines = tokio::time::timeout(Duration::from_secs(60), look).await.unwrap();
    for expected in ["rem installs", "CPU_CORES=2", "RAM_SIZE=4G", "USER_PORTS=44772,8080,3389,8006"] {
        assert!(lines.contains(expected), "{expected} is not in {lines}");
    }
    let name = container_name(seen.id);
    let raw = shared
        .client
        .call(|d| async move {
            d.inspect_container(&name, None::<bollard::query_parameters::InspectContainerOptions>).await
        })
        .await
        .unwrap();
    let ports: HashMap<_, _> = raw.host_config.unwrap().port_bindings.unwrap();
    assert_eq!(ports.len(), 5);
    bench.runtime.remove(seen.id, Duration::ZERO).await.unwrap();
    bench.nothing_is_left_of(&[seen.id]).await;
    remove_image(shared, &image).await;
    remove_image(shared, &artifacts).await;
}
