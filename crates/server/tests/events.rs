//! The history of a sandbox as a page and as a stream.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::Duration,
};

use async_trait::async_trait;
use sandglass_sandbox::ports::{Store, runtime::BoxEvent, store::EventRecord};
use sandglass_sandbox::{Clock, SandboxId, Timestamp};
use sandglass_server::tenants::{Keyring, ProviderUnavailable, Tenant, TenantProvider};
use sandglass_testkit::Fault;
use serde_json::{Value, json};

use crate::service::{Frame, Service, Stream};

fn path(id: &str) -> String {
    format!("/v1/sandboxes/{id}/events")
}

fn types(page: &Value) -> Vec<&str> {
    page["items"].as_array().unwrap().iter().map(|e| e["type"].as_str().unwrap()).collect()
}

fn kinds(frames: &[Frame]) -> Vec<&str> {
    frames.iter().map(|f| f.kind.as_str()).collect()
}

#[tokio::test(start_paused = true)]
async fn a_page_tells_a_whole_life_and_outlives_the_sandbox() {
    let service = Service::new().await;
    let id = service.create().await;
    let sandbox = format!("/v1/sandboxes/{id}");
    assert_eq!(service.call("POST", &format!("{sandbox}/pause"), Value::Null).await.status, 202);
    assert_eq!(service.call("POST", &format!("{sandbox}/resume"), Value::Null).await.status, 202);
    let patch = json!({"a": "b", "c": null});
    assert_eq!(service.call("PATCH", &format!("{sandbox}/metadata"), patch).await.status, 200);
    assert_eq!(service.call("DELETE", &sandbox, Value::Null).await.status, 204);
    assert_eq!(service.get(&sandbox).await.status, 404);

    let page = service.get(&path(&id)).await.body;
    assert_eq!(
        types(&page),
        [
            "sandbox.created",
            "image.progress",
            "sandbox.state_changed",
            "sandbox.state_changed",
            "sandbox.state_changed",
            "sandbox.state_changed",
            "sandbox.state_changed",
            "sandbox.metadata_changed",
            "sandbox.state_changed",
            "sandbox.terminated",
        ]
    );
    let items = page["items"].as_array().unwrap();
    let steps: Vec<_> = items.iter().filter_map(|e| e["data"]["to"].as_str()).collect();
    assert_eq!(steps, ["Pending", "Running", "Pausing", "Paused", "Resuming", "Running", "Stopping"]);
    assert_eq!(items[7]["data"], json!({"keys": ["a", "c"]}));
    assert_eq!(items[9]["data"], json!({"reason": "user_delete"}));
    let seqs: Vec<_> = items.iter().map(|e| e["seq"].as_u64().unwrap()).collect();
    assert!(seqs.is_sorted_by(|a, b| a < b), "{seqs:?}");
    assert!(items.iter().all(|e| e["generation"] == 1), "{page}");
    assert_eq!((page["lastSeq"].as_u64(), page["hasMore"].as_bool()), (seqs.last().copied(), Some(false)));

    let two = service.get(&format!("{}?limit=2&after={}", path(&id), seqs[1])).await.body;
    assert_eq!(
        two["items"].as_array().unwrap().iter().map(|e| e["seq"].as_u64().unwrap()).collect::<Vec<_>>(),
        seqs[2..4]
    );
    assert_eq!((two["nextAfter"].as_u64(), two["hasMore"].as_bool()), (Some(seqs[3]), Some(true)));
    let some = service.get(&format!("/sandboxes/{id}/events?types=image,sandbox.terminated")).await.body;
    assert_eq!(types(&some), ["image.progress", "sandbox.terminated"]);
}

#[tokio::test(start_paused = true)]
async fn what_never_was_is_not_found_and_nonsense_is_malformed() {
    let service = Service::new().await;
    for id in ["x", "../..", &SandboxId::random().to_string()] {
        assert_eq!(service.get(&path(id)).await.status, 404, "{id}");
    }
    let id = service.create().await;
    for query in ["limit=0", "limit=1001", "after=-1", "after=x"] {
        assert_eq!(service.get(&format!("{}?{query}", path(&id))).await.status, 422, "{query}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_stream_begins_with_the_sandbox_and_ends_with_its_end() {
    let service = Service::new().await;
    let id = service.create().await;
    let mut stream = service.stream(&path(&id), &[]).await;
    assert_eq!(stream.raw().await.unwrap(), "retry: 2000");
    let first = stream.next().await.unwrap();
    let shown = service.get(&format!("/v1/sandboxes/{id}")).await.body;
    assert_eq!((first.kind.as_str(), &first.data["data"]), ("sandbox.snapshot", &shown));
    assert_eq!((first.id, &first.data["generation"]), (first.data["seq"].as_u64(), &json!(1)));

    service.engine.pause(&id).await.unwrap();
    let next = stream.next().await.unwrap();
    assert_eq!(
        (next.kind.as_str(), next.data["data"]["to"].as_str()),
        ("sandbox.state_changed", Some("Pausing"))
    );
    service.engine.delete(&id).await.unwrap();
    let rest = stream.rest().await;
    assert_eq!(kinds(&rest), ["sandbox.state_changed", "sandbox.state_changed", "sandbox.terminated"]);
    let ids: Vec<_> = [&first, &next].into_iter().chain(&rest).map(|f| f.id.unwrap()).collect();
    assert!(ids.is_sorted_by(|a, b| a < b), "{ids:?}");
    assert_eq!(service.engine.listened_to(), 0, "a bell was left hanging");
}

#[tokio::test(start_paused = true)]
async fn a_stream_goes_on_where_it_was_cut() {
    let service = Service::new().await;
    let id = service.create().await;
    let mut stream = service.stream(&path(&id), &[]).await;
    let seen = stream.next().await.unwrap().id.unwrap().to_string();
    drop(stream);
    service.engine.pause(&id).await.unwrap();
    service.engine.resume(&id).await.unwrap();
    let mut again = service.stream(&path(&id), &[("last-event-id", &seen)]).await;
    let mut told = Vec::new();
    for _ in 0..4 {
        told.push(again.next().await.unwrap());
    }
    let steps: Vec<_> = told.iter().map(|f| f.data["data"]["to"].as_str().unwrap()).collect();
    assert_eq!(steps, ["Pausing", "Paused", "Resuming", "Running"]);
    // The same by the query, for clients that cannot send headers.
    let mut same = service.stream(&format!("{}?after={seen}", path(&id)), &[]).await;
    assert_eq!(same.next().await.unwrap(), told[0]);
    // From the very beginning.
    let mut whole = service.stream(&format!("{}?after=0", path(&id)), &[]).await;
    assert_eq!(whole.next().await.unwrap().kind, "sandbox.created");
}

#[tokio::test(start_paused = true)]
async fn a_position_that_is_not_kept_begins_anew() {
    let service = Service::new().await;
    let id = service.create().await;
    let seen = service.stream(&path(&id), &[]).await.next().await.unwrap().id.unwrap();
    tokio::time::sleep(Duration::from_secs(60)).await;
    service.engine.pause(&id).await.unwrap();
    let before = service.clock.now().as_millis() - 30_000;
    service.store.prune(Timestamp::clamped(before)).await.unwrap();
    for position in [seen.to_string(), "999999".into(), "nonsense".into(), "0".into()] {
        let mut stream = service.stream(&path(&id), &[("last-event-id", &position)]).await;
        let reset = stream.next().await.unwrap();
        assert_eq!((reset.kind.as_str(), reset.id), ("stream.reset", None), "{position}");
        let shown = stream.next().await.unwrap();
        assert_eq!(shown.kind, "sandbox.snapshot");
        assert_eq!(shown.data["data"]["status"]["state"], "Paused");
    }
}

#[tokio::test(start_paused = true)]
async fn an_ended_history_is_told_once_more_and_then_no_more() {
    let service = Service::new().await;
    let id = service.create().await;
    service.engine.delete(&id).await.unwrap();
    let told = service.stream(&path(&id), &[]).await.rest().await;
    assert_eq!(kinds(&told)[0], "sandbox.created");
    assert_eq!(told.last().unwrap().kind, "sandbox.terminated");
    let last = told.last().unwrap().id.unwrap().to_string();
    let headers = [("accept", "text/event-stream"), ("last-event-id", last.as_str())];
    assert_eq!(service.call_with("GET", &path(&id), &headers, Value::Null).await.status, 204);
}

#[tokio::test(start_paused = true)]
async fn a_silent_stream_keeps_alive_and_ends_with_the_server() {
    let service = Service::new().await;
    let id = service.create().await;
    let mut stream = service.stream(&path(&id), &[]).await;
    stream.next().await.unwrap();
    let before = service.clock.now();
    assert_eq!(stream.raw().await.unwrap(), ": keep-alive");
    assert_eq!(before.until(service.clock.now()), Duration::from_secs(15));
    service.engine.close_streams();
    assert_eq!(stream.raw().await, None);
}

fn lines(n: usize) -> Vec<EventRecord> {
    let at = Timestamp::clamped(1_800_000_000_000);
    (0..n).map(|i| EventRecord { at, kind: "disk-full".into(), message: i.to_string() }).collect()
}

#[tokio::test(start_paused = true)]
async fn a_reader_that_falls_behind_is_told_and_may_come_back() {
    let service = Service::new().await;
    let id = service.create().await;
    let mut stream = service.stream(&path(&id), &[]).await;
    let seen = stream.next().await.unwrap().id.unwrap();
    // The writer does not wait for anybody.
    service.store.append(id.parse().unwrap(), &lines(3000)).await.unwrap();
    let told = stream.rest().await;
    assert_eq!(kinds(&told), ["stream.lagged"]);
    assert_eq!((told[0].id, told[0].data["data"]["lastSeq"].as_u64()), (None, Some(seen)));

    let mut again = service.stream(&path(&id), &[("last-event-id", &seen.to_string())]).await;
    for i in 0..3000 {
        let frame = again.next().await.unwrap();
        assert_eq!(
            (frame.kind.as_str(), &frame.data["data"]["message"]),
            ("sandbox.warning", &json!(i.to_string()))
        );
    }
}

/// What a client knows: the body it was shown, and every step after that. For a sandbox that is gone, all steps.
async fn follow(mut stream: Stream) -> (String, Vec<u64>) {
    let first = stream.next().await.unwrap();
    let shown = first.data["data"]["status"]["state"].as_str();
    let mut state = shown.or(first.data["data"]["to"].as_str()).unwrap().to_owned();
    let mut ids = vec![first.id.unwrap()];
    while let Some(frame) = stream.next().await {
        ids.push(frame.id.unwrap());
        if let Some(to) = frame.data["data"]["to"].as_str() {
            if let Some(from) = frame.data["data"]["from"].as_str() {
                assert_eq!(from, state, "a step is missing before {frame:?}");
            }
            state = to.to_owned();
        }
    }
    (state, ids)
}

#[tokio::test(start_paused = true)]
async fn a_stream_that_begins_in_the_middle_of_everything_misses_nothing_and_repeats_nothing() {
    let service = Arc::new(Service::new().await);
    let mut begun = std::collections::BTreeSet::new();
    for delay in 0..90u64 {
        let id = service.create().await;
        let (at_work, subject) = (service.clone(), id.clone());
        for (n, method) in ["pause", "resume"].into_iter().enumerate() {
            let fault = Fault::Slow(Duration::from_millis(delay % (3 + n as u64)));
            service.runtime.inject(method, fault);
        }
        let work = tokio::spawn(async move {
            for _ in 0..3 {
                at_work.engine.pause(&subject).await.unwrap();
                at_work.engine.resume(&subject).await.unwrap();
            }
            at_work.engine.delete(&subject).await.unwrap();
        });
        for _ in 0..delay {
            if delay % 3 == 0 {
                tokio::task::yield_now().await;
            } else {
                tokio::time::sleep(Duration::from_micros(300)).await;
            }
        }
        begun.insert(service.get(&format!("/v1/sandboxes/{id}")).await.body["status"]["state"].to_string());
        let stream = service.stream(&path(&id), &[]).await;
        let (state, ids) = follow(stream).await;
        assert_eq!(state, "Stopping");
        assert!(ids.is_sorted_by(|a, b| a < b), "{ids:?}");
        work.await.unwrap();
        let page = service.get(&format!("{}?limit=1000&after={}", path(&id), ids[0])).await.body;
        let all: Vec<_> =
            page["items"].as_array().unwrap().iter().map(|e| e["seq"].as_u64().unwrap()).collect();
        assert_eq!(ids[1..], all, "after {delay} turns");
    }
    assert!(begun.len() > 3, "the streams began in too few states: {begun:?}");
}

#[tokio::test(start_paused = true)]
async fn what_others_do_to_a_box_is_told() {
    let service = Service::new().await;
    let id = service.create().await;
    let of: SandboxId = id.parse().unwrap();
    let mut stream = service.stream(&path(&id), &[]).await;
    stream.next().await.unwrap();
    service.runtime.is_frozen(of, true);
    service.runtime.is_frozen(of, false);
    let event = BoxEvent { at: service.clock.now(), kind: "disk-full".into(), message: "m".into() };
    service.runtime.notices(of, event);
    service.runtime.exits(of, 3, service.clock.now());
    tokio::time::sleep(Duration::from_millis(10)).await;
    service.runtime.vanishes(of);
    let told = stream.rest().await;
    assert_eq!(
        kinds(&told),
        [
            "sandbox.state_changed",
            "sandbox.state_changed",
            "sandbox.warning",
            "sandbox.failed",
            "sandbox.terminated"
        ]
    );
    assert_eq!(told[3].data["data"]["reason"], "CONTAINER_EXITED_ERROR");
    assert_eq!(told[4].data["data"], json!({"reason": "found missing"}));
}

#[tokio::test(start_paused = true)]
async fn a_create_is_announced_once_whatever_becomes_of_it() {
    let mut service = Service::new().await;
    service.runtime.inject("prepare", Fault::Slow(Duration::from_secs(30)));
    let slow = service.create().await;
    let begun = service.get(&path(&slow)).await.body;
    assert_eq!(types(&begun), ["sandbox.created", "image.progress"], "progress is told while it is made");
    // Begun again by another server.
    service.restart().await;
    tokio::time::sleep(Duration::from_secs(1)).await;
    service.runtime.inject("prepare", Fault::Slow(Duration::from_secs(30)));
    let deleted = service.create().await;
    service.engine.delete(&deleted).await.unwrap();
    service.runtime.inject("prepare", Fault::Slow(Duration::from_secs(10)));
    service.runtime.inject("start", Fault::Refuse);
    let failed = service.create().await;
    tokio::time::sleep(Duration::from_secs(60)).await;
    for (id, last) in
        [(&slow, "sandbox.state_changed"), (&deleted, "sandbox.terminated"), (&failed, "sandbox.failed")]
    {
        let page = service.get(&path(id)).await.body;
        let told = types(&page);
        assert_eq!(told.first(), Some(&"sandbox.created"), "{told:?}");
        assert_eq!(told.iter().filter(|t| **t == "sandbox.created").count(), 1, "{told:?}");
        assert_eq!(told.last(), Some(&last), "{told:?}");
    }
}

#[derive(Default)]
struct TwoTenants {
    /// Nobody's key is valid any more.
    revoked: AtomicBool,
}

#[async_trait]
impl TenantProvider for TwoTenants {
    async fn tenant(&self, key: &[u8]) -> Result<Option<Arc<Tenant>>, ProviderUnavailable> {
        let name = String::from_utf8_lossy(key).into_owned();
        let known = !self.revoked.load(Relaxed) && ["a", "b"].contains(&name.as_str());
        Ok(known.then(|| Arc::new(Tenant { name: name.clone(), namespace: format!("ns-{name}") })))
    }
}

#[tokio::test(start_paused = true)]
async fn a_history_belongs_to_its_tenant_also_when_the_sandbox_is_gone() {
    let service = Service::with(Keyring::tenants(Arc::new(TwoTenants::default()))).await;
    let key = |name: &'static str| [("open-sandbox-api-key", name)];
    let body = json!({"image": {"uri": "img"}, "entrypoint": ["sleep", "1d"], "resourceLimits": {}});
    let made = service.call_with("POST", "/v1/sandboxes", &key("a"), body).await;
    let id = made.body["id"].as_str().unwrap().to_owned();
    for removed in [false, true] {
        if removed {
            service.engine.delete(&id).await.unwrap();
        }
        let own = service.call_with("GET", &path(&id), &key("a"), Value::Null).await;
        assert_eq!(own.status, 200);
        assert!(!own.body.to_string().contains("owner"));
        assert_eq!(
            service.call_with("GET", &path(&id), &key("b"), Value::Null).await.status,
            404,
            "{removed}"
        );
    }
}

#[tokio::test(start_paused = true)]
async fn a_stream_ends_when_its_key_is_taken_back() {
    let tenants = Arc::new(TwoTenants::default());
    let service = Service::with(Keyring::tenants(tenants.clone())).await;
    let key = [("open-sandbox-api-key", "a")];
    let body = json!({"image": {"uri": "img"}, "entrypoint": ["sleep", "1d"], "resourceLimits": {}});
    let made = service.call_with("POST", "/v1/sandboxes", &key, body).await;
    let id = made.body["id"].as_str().unwrap().to_owned();
    let mut stream = service.stream(&path(&id), &key).await;
    assert_eq!(stream.next().await.unwrap().kind, "sandbox.snapshot");
    tenants.revoked.store(true, Relaxed);
    service.engine.pause(&id).await.unwrap();
    assert_eq!(kinds(&stream.rest().await), Vec::<&str>::new());
    assert_eq!(service.engine.listened_to(), 0, "a bell was left hanging");
}
