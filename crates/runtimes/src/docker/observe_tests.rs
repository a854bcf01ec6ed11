//! Containers that the reference server 1.1.1 made on Engine 20.10, as the engine showed them, and variations of them.

use std::collections::BTreeSet;

use bollard::models::{ContainerInspectResponse, ContainerSummary};

use super::*;

fn recorded() -> serde_json::Value {
    serde_json::from_str(include_str!("../../tests/fixtures/reference-containers.json")).unwrap()
}

fn inspected(which: &str) -> Container {
    let answer: ContainerInspectResponse = serde_json::from_value(recorded()[which].clone()).unwrap();
    Container::inspected(answer)
}

fn listed() -> Vec<Container> {
    let answer: Vec<ContainerSummary> = serde_json::from_value(recorded()["list"].clone()).unwrap();
    answer.into_iter().map(Container::listed).collect()
}

fn place() -> Place<'static> {
    Place { network: "bridge", host: Some(Ipv4Addr::LOCALHOST.into()), sees_containers: true }
}

fn seen(container: &Container) -> Observation {
    observation(labels::parse(&container.labels).unwrap(), container, None, &place())
}

#[test]
fn a_running_sandbox_of_the_reference_is_adopted_with_all_that_it_says() {
    let container = inspected("running");
    let seen = seen(&container);
    assert_eq!(container.name, format!("sandbox-{}", seen.id));
    assert_eq!(seen.condition, Condition::Running);
    assert_eq!(seen.spec.image, "sandglass-bench/base:1");
    assert_eq!(seen.entrypoint, ["tail", "-f", "/dev/null"]);
    assert_eq!(seen.spec.entrypoint, Entrypoint::Command(seen.entrypoint.clone()));
    assert!(seen.spec.env.contains(&("GREETING".into(), "hello".into())), "{:?}", seen.spec.env);
    assert!(seen.spec.env.iter().all(|(key, _)| key != "OPENSANDBOX_ID"));
    assert_eq!(seen.spec.limits.cpu_millis, Some(500));
    assert_eq!(seen.spec.limits.memory_bytes, Some(128 << 20));
    assert_eq!(seen.spec.limits.pids, Some(4096));
    let platform = seen.spec.platform.unwrap();
    assert_eq!((platform.os.as_str(), platform.arch.as_str()), ("linux", "amd64"));
    let extensions: Vec<_> = seen.spec.extensions.into_iter().collect();
    assert_eq!(
        extensions,
        [
            ("access.renew.extend.seconds".into(), "600".into()),
            ("opensandbox.extensions.team".into(), "blue".into())
        ]
    );
    assert_eq!(seen.facts.metadata.into_iter().collect::<Vec<_>>(), [("project".into(), "demo".into())]);
    assert_eq!(seen.facts.expires_at.unwrap().to_string(), "2026-11-29T20:33:06.303000Z");
    assert_eq!(seen.created_at.to_string(), "2026-11-29T19:33:06.310000Z");
    assert!(seen.started_at.unwrap() >= seen.created_at && seen.since == seen.started_at.unwrap());
    assert_eq!((seen.agent_token.as_str(), seen.route_token.as_str(), seen.egress_token), ("", "", None));
    let Exposure::Published { agent, http, egress: None } = seen.exposure else {
        panic!("{:?}", seen.exposure)
    };
    assert_eq!((container.published[&44772].1, container.published[&8080].1), (agent, http));
    assert!(seen.address.unwrap().to_string().starts_with("172."), "{:?}", seen.address);
}

#[test]
fn an_ended_sandbox_of_the_reference_has_its_code_and_time() {
    let seen = seen(&inspected("exited"));
    let Condition::Exited(exit) = seen.condition else { panic!("{:?}", seen.condition) };
    assert_eq!((exit.code, exit.signal, exit.cause), (Some(3), None, ExitCause::Exited));
    assert_eq!(exit.message, "exited with code 3");
    assert_eq!((exit.at.to_string().as_str(), seen.since), ("2026-11-29T19:33:08.625000Z", exit.at));
    assert_eq!((seen.facts.expires_at, seen.address), (None, None));
}

#[test]
fn a_paused_sandbox_is_paused_and_keeps_its_address() {
    let seen = seen(&inspected("paused"));
    assert_eq!(seen.condition, Condition::Paused);
    assert!(seen.address.is_some());
}

#[test]
fn a_list_tells_enough_to_know_which_inspects_to_spare() {
    let listed = listed();
    assert_eq!(listed.len(), 3);
    for which in ["running", "exited", "paused"] {
        let inspected = inspected(which);
        let listed = listed.iter().find(|c| c.key == inspected.key).unwrap();
        assert!(inspected.is_as(listed), "{which}");
        assert_eq!((&inspected.labels, &inspected.name), (&listed.labels, &listed.name));
        assert_eq!(
            (&inspected.network_mode, &inspected.addresses),
            (&listed.network_mode, &listed.addresses)
        );
        if which != "exited" {
            assert_eq!(inspected.published, listed.published);
        }
        // A container that cannot be inspected is still told of, with what the list knows.
        let (full, poor) = (seen(&inspected), seen(listed));
        assert_eq!((full.id, full.facts, full.exposure), (poor.id, poor.facts, poor.exposure));
    }
    let mut running = inspected("running");
    running.status = Status::Ended;
    assert!(!running.is_as(listed.iter().find(|c| c.key == running.key).unwrap()));
}

#[test]
fn too_much_memory_is_told_only_of_what_died_of_it() {
    let mut container = inspected("exited");
    container.out_of_memory = true;
    container.exit_code = Some(137);
    let Condition::Exited(exit) = seen(&container).condition else { panic!() };
    assert_eq!((exit.cause, exit.code), (ExitCause::OutOfMemory, Some(137)));
    container.exit_code = Some(0);
    let Condition::Exited(exit) = seen(&container).condition else { panic!() };
    assert_eq!(exit.cause, ExitCause::Exited);
}

#[test]
fn a_box_behind_a_sidecar_is_reached_at_the_sidecar() {
    let sidecar = inspected("running");
    let mut container = inspected("running");
    container.network_mode = format!("container:{}", sidecar.key);
    (container.addresses, container.published) = Default::default();
    container.labels.insert(labels::EGRESS_TOKEN.into(), "tok".into());
    let parsed = labels::parse(&container.labels).unwrap();
    let with = observation(parsed.clone(), &container, Some(&sidecar), &place());
    assert_eq!((with.address, with.egress_token.as_deref()), (sidecar.address("bridge"), Some("tok")));
    assert!(with.spec.egress.is_some());
    let without = observation(parsed, &container, None, &place());
    assert_eq!(without.address, None);
    let Condition::Exited(exit) = without.condition else { panic!("{:?}", without.condition) };
    assert_eq!(exit.cause, ExitCause::EgressLost);
    // A token that an image brought along makes no sidecar.
    container.network_mode = "bridge".into();
    let alone = seen(&container);
    assert_eq!((alone.egress_token, alone.spec.egress), (None, None));
}

#[test]
fn the_hosts_own_network_and_engines_elsewhere() {
    let mut container = inspected("running");
    let far = Place { network: "bridge", host: Some([192, 0, 2, 7].into()), sees_containers: false };
    let parsed = labels::parse(&container.labels).unwrap();
    let bridged = observation(parsed.clone(), &container, None, &far);
    assert_eq!(bridged.address, None);
    assert!(matches!(bridged.exposure, Exposure::Published { .. }));
    container.network_mode = "host".into();
    let near = seen(&container);
    assert_eq!((near.address, near.exposure), (Some(Ipv4Addr::LOCALHOST.into()), Exposure::Host));
    assert_eq!(observation(parsed, &container, None, &far).address, Some([192, 0, 2, 7].into()));
}

#[test]
fn of_two_containers_with_one_id_the_one_of_the_right_name_is_the_sandbox() {
    let right = inspected("running");
    let mut other = right.clone();
    (other.name, other.key) = ("by-hand".into(), "other".into());
    let id = labels::parse(&right.labels).unwrap().id;
    for both in [vec![right.clone(), other.clone()], vec![other.clone(), right.clone()]] {
        let chosen = choose(both, &BTreeSet::new());
        assert_eq!(chosen.iter().map(|(_, c)| c.key.as_str()).collect::<Vec<_>>(), [right.key.as_str()]);
    }
    assert_eq!(choose(vec![other], &BTreeSet::new()).len(), 1, "one started by hand with the labels appears");
    let mut new = right;
    new.status = Status::Created;
    assert_eq!(choose(vec![new.clone()], &BTreeSet::from([id])).len(), 0);
    assert_eq!(choose(vec![new], &BTreeSet::new()).len(), 1);
}
