//! Snapshots over the whole router: accepted, made, listed, restored, removed; interrupted and found again.

use std::{sync::Arc, time::Duration};

use async_trait::async_trait;
use sandglass_sandbox::{
    Clock, SandboxId, SnapshotId,
    ports::{Runtime, Store},
    snapshot::{RestoreConfig, SnapshotRecord, SnapshotState},
};
use sandglass_server::tenants::{Keyring, ProviderUnavailable, Tenant, TenantProvider};
use sandglass_testkit::Fault;
use serde_json::{Value, json};

use crate::service::Service;

impl Service {
    async fn snapshot(&self, sandbox: &str, body: Value) -> String {
        let made = self.call("POST", &format!("/v1/sandboxes/{sandbox}/snapshots"), body).await;
        assert_eq!(made.status, 202, "{}", made.body);
        made.body["id"].as_str().unwrap().to_owned()
    }

    /// A snapshot of a sandbox, Ready.
    async fn ready(&self, sandbox: &str) -> String {
        let id = self.snapshot(sandbox, Value::Null).await;
        settle().await;
        assert_eq!(self.status(&id).await, ("Ready".into(), "snapshot_runtime_ready".into()));
        id
    }

    async fn status(&self, id: &str) -> (String, String) {
        let seen = self.get(&format!("/v1/snapshots/{id}")).await.body;
        let word = |name: &str| seen["status"][name].as_str().unwrap_or("-").to_owned();
        (word("state"), word("reason"))
    }

    async fn restore(&self, id: &str) -> crate::service::Answer {
        self.call("POST", "/v1/sandboxes", json!({"snapshotId": id, "resourceLimits": {}})).await
    }

    async fn remove(&self, id: &str) -> (u16, String) {
        let seen = self.call("DELETE", &format!("/v1/snapshots/{id}"), Value::Null).await;
        (seen.status, seen.code().1.to_owned())
    }

    async fn row(&self, change: impl FnOnce(&mut SnapshotRecord)) -> String {
        let now = self.clock.now();
        let id = SnapshotId::random();
        let mut record = SnapshotRecord {
            id,
            source: SandboxId::random(),
            namespace: None,
            name: None,
            description: None,
            restore: Some(RestoreConfig { backend: "fake".into(), image: self.runtime.snapshot_image(id) }),
            state: SnapshotState::Ready,
            reason: "snapshot_runtime_ready".into(),
            message: None,
            last_transition_at: now,
            created_at: now,
        };
        change(&mut record);
        self.store.insert_snapshot(&record).await.unwrap();
        record.id.to_string()
    }
}

async fn settle() {
    tokio::time::sleep(Duration::from_millis(5)).await;
}

fn refused(status: u16, code: &str) -> (u16, String) {
    (status, code.to_owned())
}

#[tokio::test(start_paused = true)]
async fn a_snapshot_is_accepted_made_and_restored_from() {
    let service = Service::new().await;
    let source = service.create().await;
    service.runtime.inject("snapshot", Fault::Slow(Duration::from_secs(5)));
    let made = service.call("POST", &format!("/sandboxes/{source}/snapshots"), json!({"name": "n"})).await;
    let id = made.body["id"].as_str().unwrap();
    assert_eq!(made.headers["location"], format!("/v1/snapshots/{id}"));
    assert_eq!(made.body["sandboxId"], json!(source));
    assert_eq!((&made.body["name"], &made.body["status"]["state"]), (&json!("n"), &json!("Creating")));
    assert_eq!(made.body["status"]["reason"], "snapshot_accepted");
    assert_eq!(service.restore(id).await.code(), (409, "SNAPSHOT::NOT_READY"));
    assert_eq!(service.remove(id).await, refused(409, "SNAPSHOT::INVALID_STATE"));
    tokio::time::sleep(Duration::from_secs(6)).await;
    assert_eq!(service.status(id).await, ("Ready".into(), "snapshot_runtime_ready".into()));

    let restored = service.restore(id).await;
    assert_eq!((restored.status, &restored.body["entrypoint"]), (202, &json!(["tail", "-f", "/dev/null"])));
    let copy = restored.body["id"].as_str().unwrap();
    let shown = service.get(&format!("/v1/sandboxes/{copy}")).await.body;
    assert_eq!((&shown["snapshotId"], shown.get("image")), (&json!(id), None));
    let spec = service.runtime.inspect(copy.parse().unwrap()).await.unwrap().unwrap().spec;
    assert_eq!(spec.image, service.runtime.snapshot_image(id.parse().unwrap()));
    assert_eq!(spec.snapshot.map(|s| s.to_string()).as_deref(), Some(id));

    let told = service.get(&format!("/v1/sandboxes/{source}/events?types=snapshot")).await.body;
    assert_eq!(told["items"][0]["data"], json!({"snapshotId": id}));
    assert_eq!(
        told["items"][1]["data"],
        json!({"snapshotId": id, "state": "Ready", "reason": "snapshot_runtime_ready"})
    );
}

#[tokio::test(start_paused = true)]
async fn the_checks_before_a_snapshot_in_their_order() {
    let service = Service::new().await;
    let source = service.create().await;
    let path = format!("/v1/sandboxes/{source}/snapshots");
    assert_eq!(service.call("POST", "/v1/sandboxes/x/snapshots", json!({"name": ""})).await.status, 422);
    let unknown = service.call("POST", "/v1/sandboxes/x/snapshots", Value::Null).await;
    assert_eq!(unknown.code(), (404, "DOCKER::SANDBOX_NOT_FOUND"));
    service.engine.pause(&source).await.unwrap();
    let paused = service.call("POST", &path, json!({})).await;
    assert_eq!(paused.code(), (409, "SNAPSHOT::INVALID_SOURCE_STATE"));
    service.engine.resume(&source).await.unwrap();
    service.runtime.lacks_snapshots();
    let lacking = service.call("POST", &path, json!({})).await;
    assert_eq!(lacking.code(), (501, "SNAPSHOT::NOT_IMPLEMENTED"));
    assert!(lacking.body["message"].as_str().unwrap().contains("fake"));
    assert_eq!(service.get("/v1/snapshots").await.body["pagination"]["totalItems"], 0);
}

#[tokio::test(start_paused = true)]
async fn what_a_create_says_about_the_snapshot_it_names() {
    let service = Service::new().await;
    let unknown = SnapshotId::random().to_string();
    let creating = service.row(|r| r.state = SnapshotState::Failed).await;
    let nothing = service.row(|r| r.restore = None).await;
    let foreign = service.row(|r| r.restore.as_mut().unwrap().backend = "docker".into()).await;
    for (id, status, code) in [
        ("x", 404, "SNAPSHOT::NOT_FOUND"),
        (&unknown, 404, "SNAPSHOT::NOT_FOUND"),
        (&creating, 409, "SNAPSHOT::NOT_READY"),
        (&nothing, 409, "SNAPSHOT::INVALID_RESTORE_CONFIG"),
        (&foreign, 409, "SNAPSHOT::INVALID_RESTORE_CONFIG"),
    ] {
        assert_eq!(service.restore(id).await.code(), (status, code));
    }
    // Found out before everything that is wrong with the rest of the request.
    let body = json!({"snapshotId": unknown, "resourceLimits": {"cpu": "nonsense"}, "lifecycle": {}});
    assert_eq!(service.call("POST", "/v1/sandboxes", body).await.code(), (404, "SNAPSHOT::NOT_FOUND"));
    assert!(service.runtime.boxes().is_empty());
}

#[tokio::test(start_paused = true)]
async fn lists_are_filtered_and_paged() {
    let service = Service::new().await;
    let (a, b) = (service.create().await, service.create().await);
    let mut ids = Vec::new();
    for (source, name) in [(&a, "one"), (&b, "two"), (&a, "two")] {
        ids.push(service.snapshot(source, json!({"name": name})).await);
        settle().await;
    }
    service.runtime.inject("snapshot", Fault::Refuse);
    ids.push(service.snapshot(&b, Value::Null).await);
    settle().await;
    ids.reverse();
    let listed = |query: &'static str| {
        let service = &service;
        async move {
            let page = service.get(&format!("/v1/snapshots{query}")).await.body;
            let total = page["pagination"]["totalItems"].as_u64().unwrap();
            let items: Vec<_> = page["items"]
                .as_array()
                .unwrap()
                .iter()
                .map(|s| s["id"].as_str().unwrap().to_owned())
                .collect();
            (items, total)
        }
    };
    assert_eq!(listed("").await, (ids.clone(), 4));
    assert_eq!(listed("?page=2&pageSize=3").await, (ids[3..].to_vec(), 4));
    assert_eq!(listed("?page=9").await, (vec![], 4));
    assert_eq!(listed("?name=two").await, (ids[1..3].to_vec(), 2));
    assert_eq!(listed("?state=Failed").await, (ids[..1].to_vec(), 1));
    assert_eq!(listed("?state=failed").await, (vec![], 0));
    assert_eq!(listed("?state=Failed&state=Ready").await.1, 4);
    assert_eq!(listed("?name=tw").await.1, 0);
    let of_a = service.get(&format!("/snapshots?sandboxId={a}&name=two")).await.body;
    assert_eq!((&of_a["items"][0]["id"], of_a["items"].as_array().unwrap().len()), (&json!(ids[1]), 1));
}

#[tokio::test(start_paused = true)]
async fn two_workers_make_what_was_asked_for() {
    let service = Service::new().await;
    let source = service.create().await;
    for _ in 0..4 {
        service.runtime.inject("snapshot", Fault::Slow(Duration::from_secs(10)));
        service.snapshot(&source, Value::Null).await;
    }
    let ready = || async {
        service.get("/v1/snapshots?state=Ready").await.body["pagination"]["totalItems"].as_u64().unwrap()
    };
    tokio::time::sleep(Duration::from_secs(11)).await;
    assert_eq!(ready().await, 2);
    tokio::time::sleep(Duration::from_secs(10)).await;
    assert_eq!(ready().await, 4);
}

#[tokio::test(start_paused = true)]
async fn how_a_snapshot_fails() {
    let service = Service::new().await;
    let source = service.create().await;
    let failed = |reason: &str| ("Failed".to_owned(), reason.to_owned());
    service.runtime.inject("snapshot", Fault::Refuse);
    let refused = service.snapshot(&source, Value::Null).await;
    settle().await;
    assert_eq!(service.status(&refused).await, failed("snapshot_runtime_failed"));

    service.runtime.inject("has_snapshot", Fault::Refuse);
    let unseen = service.snapshot(&source, Value::Null).await;
    settle().await;
    assert_eq!(service.status(&unseen).await, failed("snapshot_runtime_missing_result"));

    service.runtime.inject("snapshot", Fault::Slow(Duration::from_secs(2000)));
    let late = service.snapshot(&source, Value::Null).await;
    tokio::time::sleep(Duration::from_secs(901)).await;
    assert_eq!(service.status(&late).await, failed("snapshot_runtime_timeout"));

    // Its row goes before the runtime is done; then so does what the runtime still makes of it.
    assert_eq!(service.remove(&late).await.0, 204);
    tokio::time::sleep(Duration::from_secs(1200)).await;
    assert!(!service.runtime.artifacts().contains(&late.parse().unwrap()));
    for id in [&refused, &unseen] {
        assert_eq!(service.remove(id).await.0, 204);
    }
    assert!(service.runtime.artifacts().is_empty());
}

#[tokio::test(start_paused = true)]
async fn a_sandbox_that_goes_while_it_is_snapshotted() {
    let service = Service::new().await;
    let source = service.create().await;
    service.runtime.inject("snapshot", Fault::Slow(Duration::from_secs(5)));
    let id = service.snapshot(&source, Value::Null).await;
    service.engine.delete(&source).await.unwrap();
    tokio::time::sleep(Duration::from_secs(6)).await;
    assert_eq!(service.status(&id).await, ("Failed".into(), "snapshot_runtime_failed".into()));
    let told = service.get(&format!("/v1/sandboxes/{source}/events")).await.body;
    let items = told["items"].as_array().unwrap();
    assert_eq!(items.last().unwrap()["type"], "sandbox.terminated", "nothing is told of it after its end");
    // One that was made outlives its source.
    let other = service.create().await;
    let kept = service.ready(&other).await;
    service.engine.delete(&other).await.unwrap();
    assert_eq!(service.restore(&kept).await.status, 202);
}

#[tokio::test(start_paused = true)]
async fn a_box_that_is_held_still_for_its_copy_is_not_shown_as_paused() {
    let service = Service::new().await;
    let source = service.create().await;
    let of: SandboxId = source.parse().unwrap();
    let state = || async {
        service.get(&format!("/v1/sandboxes/{source}")).await.body["status"]["state"]
            .as_str()
            .unwrap()
            .to_owned()
    };
    service.runtime.inject("snapshot", Fault::Slow(Duration::from_secs(5)));
    service.snapshot(&source, Value::Null).await;
    tokio::time::sleep(Duration::from_secs(1)).await;
    service.runtime.is_frozen(of, true);
    settle().await;
    assert_eq!(state().await, "Running");
    // What is asked for meanwhile holds afterwards, though the copy's end thaws the box.
    service.engine.pause(&source).await.unwrap();
    service.runtime.is_frozen(of, false);
    tokio::time::sleep(Duration::from_secs(6)).await;
    assert_eq!(state().await, "Paused");
    assert_eq!(
        service.runtime.inspect(of).await.unwrap().unwrap().condition,
        sandglass_sandbox::ports::runtime::Condition::Paused
    );
}

#[tokio::test(start_paused = true)]
async fn what_is_in_use_is_not_removed_and_stays_as_it_was() {
    let service = Service::new().await;
    let id = service.ready(&service.create().await).await;
    // Not made yet, so only this server knows that it will be used.
    service.runtime.inject("prepare", Fault::Slow(Duration::from_secs(30)));
    let copy = service.restore(&id).await.body["id"].as_str().unwrap().to_owned();
    assert_eq!(service.remove(&id).await, refused(409, "SNAPSHOT::DELETE_CONFLICT"));
    assert_eq!(service.status(&id).await, ("Ready".into(), "snapshot_runtime_ready".into()));
    tokio::time::sleep(Duration::from_secs(31)).await;
    assert_eq!(service.remove(&id).await, refused(409, "SNAPSHOT::DELETE_CONFLICT"));
    service.engine.delete(&copy).await.unwrap();
    assert_eq!(service.remove(&id).await.0, 204);
    assert_eq!(service.remove(&id).await, refused(404, "SNAPSHOT::NOT_FOUND"));
    assert_eq!(service.restore(&id).await.code(), (404, "SNAPSHOT::NOT_FOUND"));
    assert!(service.runtime.artifacts().is_empty());
}

#[tokio::test(start_paused = true)]
async fn what_only_the_runtime_knows_to_be_in_use_goes_back_to_what_it_was() {
    let service = Service::new().await;
    let id = service.ready(&service.create().await).await;
    // Made from the artifact by its name, not as a restore.
    let image = service.runtime.snapshot_image(id.parse().unwrap());
    let body = json!({"image": {"uri": image}, "entrypoint": ["a"], "resourceLimits": {}});
    assert_eq!(service.call("POST", "/v1/sandboxes", body).await.status, 202);
    assert_eq!(service.remove(&id).await, refused(409, "SNAPSHOT::DELETE_CONFLICT"));
    assert_eq!(service.status(&id).await, ("Ready".into(), "snapshot_runtime_ready".into()));
    assert_eq!(service.restore(&id).await.status, 202);
}

#[tokio::test(start_paused = true)]
async fn a_removal_whose_answer_is_an_error_is_looked_at() {
    let service = Service::new().await;
    let source = service.create().await;
    let (done, undone) = (service.ready(&source).await, service.ready(&source).await);
    service.runtime.inject("remove_snapshot", Fault::DoneButFailed);
    assert_eq!(service.remove(&done).await.0, 204);
    service.runtime.inject("remove_snapshot", Fault::Refuse);
    assert_eq!(service.remove(&undone).await, refused(500, "DOCKER::SNAPSHOT_IMAGE_REMOVE_FAILED"));
    assert_eq!(service.status(&undone).await, ("Ready".into(), "snapshot_runtime_ready".into()));
    assert_eq!(service.restore(&undone).await.status, 202);
}

#[tokio::test(start_paused = true)]
async fn removals_at_once_join_and_the_loser_is_not_told_an_error() {
    let service = Service::new().await;
    let id = service.ready(&service.create().await).await;
    service.runtime.inject("remove_snapshot", Fault::Slow(Duration::from_secs(3)));
    let (a, b, c) = tokio::join!(service.remove(&id), service.remove(&id), service.remove(&id));
    assert_eq!((a.0, b.0, c.0), (204, 204, 204));
}

#[tokio::test(start_paused = true)]
async fn while_the_runtime_is_away_a_removal_waits_for_it() {
    let service = Service::new().await;
    let source = service.create().await;
    let id = service.ready(&source).await;
    service.runtime.goes_away();
    settle().await;
    assert_eq!(service.remove(&id).await, refused(503, "DOCKER::SNAPSHOT_IMAGE_REMOVE_FAILED"));
    assert_eq!(service.status(&id).await, ("Deleting".into(), "snapshot_delete_requested".into()));
    let asked = service.call("POST", &format!("/v1/sandboxes/{source}/snapshots"), Value::Null).await;
    assert_eq!(asked.code(), (503, "DOCKER::SANDBOX_QUERY_FAILED"));
    service.runtime.comes_back();
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert_eq!(service.get(&format!("/v1/snapshots/{id}")).await.status, 404);
    assert!(service.runtime.artifacts().is_empty());
}

#[tokio::test(start_paused = true)]
async fn a_snapshot_waits_for_a_runtime_that_is_away() {
    let service = Service::new().await;
    let source = service.create().await;
    service.runtime.inject("snapshot", Fault::Slow(Duration::from_secs(2)));
    let id = service.snapshot(&source, Value::Null).await;
    settle().await;
    service.runtime.goes_away();
    tokio::time::sleep(Duration::from_secs(60)).await;
    assert_eq!(service.status(&id).await.0, "Creating");
    service.runtime.comes_back();
    tokio::time::sleep(Duration::from_secs(3)).await;
    assert_eq!(service.status(&id).await.0, "Ready");
}

#[tokio::test(start_paused = true)]
async fn what_a_restart_makes_of_interrupted_snapshots() {
    let mut service = Service::new().await;
    let source = service.create().await;
    // Killed before and after the runtime was done.
    service.runtime.inject("snapshot", Fault::Slow(Duration::from_secs(50)));
    let lost = service.snapshot(&source, Value::Null).await;
    settle().await;
    let made = service.row(|r| r.state = SnapshotState::Creating).await;
    service.runtime.snapshot(source.parse().unwrap(), made.parse().unwrap()).await.unwrap();
    let foreign = service.row(|r| {
        r.state = SnapshotState::Creating;
        r.restore.as_mut().unwrap().backend = "docker".into();
    });
    let foreign = foreign.await;
    // And removals: with the artifact still there, and without.
    let kept = service.ready(&source).await;
    for id in [&kept, &service.row(|_| {}).await] {
        let mut record = service.store.snapshot(id.parse().unwrap()).await.unwrap().unwrap();
        record.state = SnapshotState::Deleting;
        service.store.advance_snapshot(SnapshotState::Ready, &record).await.unwrap();
    }
    service.restart().await;
    settle().await;
    assert_eq!(service.status(&lost).await, ("Failed".into(), "snapshot_recovery_missing_image".into()));
    assert_eq!(service.status(&made).await, ("Ready".into(), "snapshot_recovery_ready".into()));
    assert_eq!(service.status(&foreign).await, ("Failed".into(), "snapshot_recovery_failed".into()));
    assert_eq!(service.get("/v1/snapshots?state=Deleting").await.body["pagination"]["totalItems"], 0);
    assert_eq!(service.runtime.artifacts(), [made.parse().unwrap()]);
}

#[tokio::test(start_paused = true)]
async fn a_copy_that_goes_on_after_its_server_was_killed_is_waited_for() {
    let mut service = Service::new().await;
    let source = service.create().await;
    let of: SandboxId = source.parse().unwrap();
    let id = service.row(|r| (r.source, r.state) = (of, SnapshotState::Creating)).await;
    let never = service.row(|r| (r.source, r.state) = (of, SnapshotState::Creating)).await;
    service.runtime.goes_on_saving(id.parse().unwrap());
    service.restart().await;
    tokio::time::sleep(Duration::from_secs(100)).await;
    assert_eq!(service.status(&id).await.0, "Creating");
    assert_eq!(service.status(&never).await, ("Failed".into(), "snapshot_recovery_missing_image".into()));
    service.runtime.has_saved(id.parse().unwrap());
    tokio::time::sleep(Duration::from_secs(3)).await;
    assert_eq!(service.status(&id).await, ("Ready".into(), "snapshot_recovery_ready".into()));
    // One that never comes is waited for until the deadline only.
    let late = service.row(|r| (r.source, r.state) = (of, SnapshotState::Creating)).await;
    service.runtime.goes_on_saving(late.parse().unwrap());
    service.restart().await;
    tokio::time::sleep(Duration::from_secs(1000)).await;
    assert_eq!(service.status(&late).await.0, "Failed");
}

#[tokio::test(start_paused = true)]
async fn a_restart_while_the_runtime_is_away_finds_out_later() {
    let mut service = Service::new().await;
    let source = service.create().await;
    let id = service.row(|r| r.state = SnapshotState::Creating).await;
    service.runtime.snapshot(source.parse().unwrap(), id.parse().unwrap()).await.unwrap();
    service.runtime.goes_away();
    service.restart().await;
    tokio::time::sleep(Duration::from_secs(100)).await;
    assert_eq!(service.status(&id).await.0, "Creating");
    service.runtime.comes_back();
    tokio::time::sleep(Duration::from_secs(3)).await;
    assert_eq!(service.status(&id).await, ("Ready".into(), "snapshot_recovery_ready".into()));
    let broken = service.row(|r| r.state = SnapshotState::Creating).await;
    service.runtime.inject("has_snapshot", Fault::Refuse);
    service.restart().await;
    settle().await;
    assert_eq!(service.status(&broken).await, ("Failed".into(), "snapshot_recovery_inspect_failed".into()));
}

#[tokio::test(start_paused = true)]
async fn a_store_that_cannot_be_written_delays_but_loses_nothing() {
    let service = Service::new().await;
    let source = service.create().await;
    service.runtime.inject("snapshot", Fault::Slow(Duration::from_secs(1)));
    let id = service.snapshot(&source, Value::Null).await;
    settle().await;
    service.store.refuse_writes(3);
    tokio::time::sleep(Duration::from_secs(6)).await;
    assert_eq!(service.status(&id).await.0, "Ready");
    service.runtime.inject("remove_snapshot", Fault::Slow(Duration::from_secs(1)));
    let (removed, ()) = tokio::join!(service.remove(&id), async {
        settle().await;
        service.store.refuse_writes(1);
    });
    assert_eq!(removed.0, 503);
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert_eq!(service.get(&format!("/v1/snapshots/{id}")).await.status, 404);
}

struct TwoTenants;

#[async_trait]
impl TenantProvider for TwoTenants {
    async fn tenant(&self, key: &[u8]) -> Result<Option<Arc<Tenant>>, ProviderUnavailable> {
        let name = String::from_utf8_lossy(key).into_owned();
        let tenant = Tenant { namespace: format!("ns-{name}"), name: name.clone() };
        Ok(["a", "b"].contains(&name.as_str()).then(|| Arc::new(tenant)))
    }
}

#[tokio::test(start_paused = true)]
async fn another_tenants_snapshot_does_not_exist() {
    let service = Service::with(Keyring::tenants(Arc::new(TwoTenants))).await;
    let ask = |key: &'static str, method: &'static str, path: String, body: Value| {
        let service = &service;
        async move { service.call_with(method, &path, &[("open-sandbox-api-key", key)], body).await }
    };
    let body = json!({"image": {"uri": "img"}, "entrypoint": ["a"], "resourceLimits": {}});
    let made = ask("a", "POST", "/v1/sandboxes".into(), body).await;
    let source = made.body["id"].as_str().unwrap().to_owned();
    let made = ask("a", "POST", format!("/v1/sandboxes/{source}/snapshots"), Value::Null).await;
    let id = made.body["id"].as_str().unwrap().to_owned();
    settle().await;
    for (key, status, total) in [("a", 200, 1), ("b", 404, 0)] {
        assert_eq!(ask(key, "GET", format!("/snapshots/{id}"), Value::Null).await.status, status);
        let page = ask(key, "GET", "/snapshots".into(), Value::Null).await.body;
        assert_eq!(page["pagination"]["totalItems"], total);
    }
    let other = ask("b", "POST", format!("/v1/sandboxes/{source}/snapshots"), Value::Null).await;
    assert_eq!(other.code(), (404, "DOCKER::SANDBOX_NOT_FOUND"));
    let restore = json!({"snapshotId": id, "resourceLimits": {}});
    let other = ask("b", "POST", "/v1/sandboxes".into(), restore.clone()).await;
    assert_eq!(other.code(), (404, "SNAPSHOT::NOT_FOUND"));
    assert_eq!(ask("b", "DELETE", format!("/snapshots/{id}"), Value::Null).await.status, 404);
    assert_eq!(ask("a", "POST", "/v1/sandboxes".into(), restore).await.status, 202);
}
