//! Pools of repositories over the whole router: a fake runtime, fake images, and agents that speak over real sockets.

use std::{collections::BTreeSet, os::unix::fs::MetadataExt, sync::atomic::Ordering::SeqCst, time::Duration};

use sandglass_sandbox::{ImageId, SandboxId, ports::Store, workspace};
use sandglass_testkit::Fault;
use serde_json::{Value, json};

use crate::{
    service::Service,
    workspaces::{Fate, Stage, URL, tell},
};

const PATIENCE: Duration = Duration::from_secs(600);

fn pool(count: u64) -> Value {
    let capacity = json!({"bufferMin": count, "bufferMax": count, "poolMin": 0, "poolMax": 20});
    json!({"name": "web", "repository": {"url": URL, "ref": "main"}, "capacitySpec": capacity})
}

fn taking() -> Value {
    json!({
        "repository": {"url": URL, "ref": "feature", "credential": {"username": "bot", "token": "hunter2-token"}},
        "services": [{"name": "app", "command": ["npm", "start"], "port": 3000}],
        "extensions": {"poolRef": "web"}, "env": {"A": "b"}, "timeout": 6000,
    })
}

async fn until(what: &str, mut done: impl FnMut() -> bool) {
    let wait = async {
        while !done() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    assert!(tokio::time::timeout(PATIENCE, wait).await.is_ok(), "waited for {what}");
}

impl Stage {
    async fn with_pool(fate: Fate, count: u64) -> Self {
        let stage = Self::new(fate).await;
        let made = stage.service.call("POST", "/v1/pools", pool(count)).await;
        assert_eq!(made.status, 201, "{}", made.body);
        stage
    }

    /// So many boxes wait and can be taken, nothing is on its way, and these are they.
    async fn settled(&self, count: usize) -> BTreeSet<SandboxId> {
        let engine = &self.service.engine;
        until(&format!("{count} boxes"), || {
            let view = engine.pool("web").unwrap();
            (view.available, view.starting) == (count as u64, 0) && self.waiting().len() == count
        })
        .await;
        self.waiting()
    }

    fn waiting(&self) -> BTreeSet<SandboxId> {
        self.service.runtime.waiting().into_iter().collect()
    }

    fn holders(&self) -> BTreeSet<SandboxId> {
        self.images.holds.lock().unwrap().iter().map(|(holder, _)| *holder).collect()
    }

    fn holds(&self, id: &str) -> Vec<ImageId> {
        let holds = self.images.holds.lock().unwrap();
        holds.iter().filter(|(holder, _)| holder.to_string() == id).map(|(_, image)| *image).collect()
    }

    fn starts(&self, id: &str) -> u32 {
        self.service.runtime.starts(id.parse().unwrap())
    }

    async fn boots(&self, id: &str) {
        self.until(id, "Pending", "agent_connecting").await;
        let bridge = self.agent(id);
        tell(&bridge, "boot.completed", &json!({"warnings": 0}));
        self.until(id, "Running", "ready").await;
        bridge.task.abort();
    }
}

#[tokio::test(start_paused = true)]
async fn its_boxes_wait_with_empty_files_and_hold_their_image() {
    let stage = Stage::with_pool(Fate::Building, 2).await;
    until("a build", || stage.images.asked.load(SeqCst) > 0).await;
    tokio::time::sleep(Duration::from_secs(30)).await;
    assert_eq!(stage.images.asked.load(SeqCst), 1, "one start waits for the build, and not each");
    let view = stage.service.get("/v1/pools/web").await.body;
    assert_eq!((&view["status"]["starting"], &view["image"]), (&json!(1), &Value::Null));
    stage.images.fate.send_replace(Fate::Found);
    let waiting = stage.settled(2).await;
    assert_eq!(stage.holders(), waiting);
    for id in &waiting {
        let files = stage.files(&id.to_string());
        for name in ["workspace.json", "workspace.token"] {
            assert_eq!(std::fs::metadata(files.join(name)).unwrap().len(), 0);
        }
        assert!(stage.dir.path().join("bridge").join(id.to_string()).is_dir());
    }
    assert_eq!(stage.service.get("/v1/sandboxes").await.body["items"], json!([]));
    let view = stage.service.get("/v1/pools/web").await.body;
    assert_eq!((&view["repository"]["url"], &view["image"]["uri"]), (&json!(URL), &json!("built:1")));
    // Nothing of a pool outlives it.
    assert_eq!(stage.service.call("DELETE", "/v1/pools/web", Value::Null).await.status, 204);
    until("no box", || stage.service.runtime.boxes().is_empty() && stage.holders().is_empty()).await;
    until("no file", || waiting.iter().all(|id| !stage.files(&id.to_string()).exists())).await;
}

#[tokio::test(start_paused = true)]
async fn a_sandbox_takes_a_box_and_is_told_everything_then() {
    let stage = Stage::with_pool(Fate::Found, 1).await;
    let waiting = stage.settled(1).await;
    let shown = stage.files(&waiting.first().unwrap().to_string()).join("workspace.json");
    let file = std::fs::metadata(&shown).unwrap().ino();
    let id = stage.create(taking()).await;
    assert!(waiting.contains(&id.parse().unwrap()));
    stage.until(&id, "Pending", "agent_connecting").await;
    assert_eq!(std::fs::metadata(&shown).unwrap().ino(), file, "the box sees that file and no other");
    let document: workspace::Workspace = serde_json::from_slice(&std::fs::read(&shown).unwrap()).unwrap();
    assert_eq!((document.sandbox_id.to_string(), document.services[0].name.as_str()), (id.clone(), "app"));
    assert!(document.repositories[0].credential);
    let observed = stage.service.engine.find(&id).unwrap().observed.unwrap();
    assert!(observed.spec.standby.is_none());
    assert!(observed.spec.env.contains(&("RECIPE".into(), "yes".into())));
    stage.boots(&id).await;
    assert_eq!(stage.starts(&id), 1, "the box was not made again");
    let types = stage.types(&id).await;
    assert!(types.contains(&"pool.taken".to_owned()) && !types.contains(&"pool.missed".to_owned()));
    let next = stage.settled(1).await;
    assert!(!next.contains(&id.parse().unwrap()));
    assert_eq!(stage.holds(&id).len(), 1);
    assert_eq!(stage.delete(&id).await, 204);
    assert!(stage.holds(&id).is_empty() && !stage.files(&id).exists());
    assert_eq!(stage.holders(), stage.waiting());
}

#[tokio::test(start_paused = true)]
async fn what_a_request_leaves_out_is_the_pools() {
    let stage = Stage::with_pool(Fate::Found, 1).await;
    stage.settled(1).await;
    let id = stage.create(json!({"extensions": {"poolRef": "web"}, "timeout": 600})).await;
    let seen = stage.until(&id, "Pending", "agent_connecting").await;
    assert_eq!(seen["source"]["repositories"][0]["url"], URL);
    assert_eq!(stage.starts(&id), 1);
    stage.boots(&id).await;
}

#[tokio::test(start_paused = true)]
async fn boxes_follow_the_newest_image() {
    let stage = Stage::with_pool(Fate::Found, 2).await;
    let before = stage.settled(2).await;
    let newest = stage.images.moves("built:2");
    until("other boxes", || stage.waiting().is_disjoint(&before)).await;
    let after = stage.settled(2).await;
    assert_eq!(stage.service.get("/v1/pools/web").await.body["image"]["uri"], "built:2");
    let holds: BTreeSet<_> = stage.images.holds.lock().unwrap().clone();
    assert_eq!(holds, after.iter().map(|id| (*id, newest)).collect::<BTreeSet<_>>());
    // Something newer that is not for these boxes, of another branch: looked for once.
    *stage.images.newest.lock().unwrap() = Some(ImageId::random());
    let asked = stage.images.asked.load(SeqCst);
    until("a look", || stage.images.asked.load(SeqCst) > asked).await;
    tokio::time::sleep(Duration::from_secs(60)).await;
    assert_eq!((stage.images.asked.load(SeqCst), stage.settled(2).await), (asked + 1, after));
}

#[tokio::test(start_paused = true)]
async fn a_box_of_another_image_than_the_one_that_is_found_is_made_anew() {
    let stage = Stage::with_pool(Fate::Found, 1).await;
    let waiting = stage.settled(1).await;
    // Taken before the pool has seen that there is a newer image.
    let newest = stage.images.moves("built:2");
    let id = stage.create(taking()).await;
    assert!(waiting.contains(&id.parse().unwrap()));
    stage.boots(&id).await;
    assert_eq!((stage.starts(&id), stage.holds(&id)), (2, vec![newest]));
    assert_eq!(stage.get(&id).await["image"]["uri"], "built:2");
    let types = stage.types(&id).await;
    assert!(types.contains(&"pool.missed".to_owned()), "{types:?}");
    assert_eq!(stage.delete(&id).await, 204);
    assert!(stage.holds(&id).is_empty());
}

#[tokio::test(start_paused = true)]
async fn what_waits_outlives_its_server() {
    let mut stage = Stage::with_pool(Fate::Found, 2).await;
    let before = stage.settled(2).await;
    // Of a create that was never written down.
    let first = before.first().unwrap().to_string();
    std::fs::write(stage.files(&first).join("confidential"), "{}").unwrap();
    stage.service.restart().await;
    assert_eq!((stage.settled(2).await, stage.holders()), (before.clone(), before.clone()));
    assert!(!stage.files(&first).join("confidential").exists());
    let id = stage.create(taking()).await;
    assert!(before.contains(&id.parse().unwrap()));
    stage.boots(&id).await;
    assert_eq!(stage.starts(&id), 1);
    stage.service.restart().await;
    stage.settled(2).await;
    assert_eq!(stage.service.call("DELETE", "/v1/pools/web", Value::Null).await.status, 204);
    until("one box", || stage.service.runtime.boxes().len() == 1).await;
    until("one hold", || stage.holders() == BTreeSet::from([id.parse().unwrap()])).await;
}

/// The server ends when the create is written down and its image is looked for; or when its box was told.
#[tokio::test(start_paused = true)]
async fn an_assignment_that_was_cut_short_is_carried_on() {
    for told in [false, true] {
        let mut stage = Stage::with_pool(Fate::Found, 1).await;
        let waiting = stage.settled(1).await;
        if !told {
            stage.images.fate.send_replace(Fate::Building);
        }
        let id = stage.create(taking()).await;
        assert!(waiting.contains(&id.parse().unwrap()));
        stage.until(&id, "Pending", if told { "agent_connecting" } else { "image_building" }).await;
        let token = std::fs::read_to_string(stage.files(&id).join("workspace.token")).unwrap();
        stage.service.restart().await;
        stage.images.fate.send_replace(Fate::Found);
        stage.boots(&id).await;
        assert_eq!(stage.starts(&id), 1, "told: {told}");
        if told {
            let now = std::fs::read_to_string(stage.files(&id).join("workspace.token")).unwrap();
            assert_eq!(now, token, "the agent has the first");
        }
        stage.settled(1).await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_sandbox_that_goes_before_its_assignment_takes_its_box_along() {
    let stage = Stage::with_pool(Fate::Found, 1).await;
    stage.settled(1).await;
    stage.images.fate.send_replace(Fate::Building);
    let id = stage.create(taking()).await;
    stage.until(&id, "Pending", "image_building").await;
    assert_eq!(stage.delete(&id).await, 204);
    assert!(stage.holds(&id).is_empty() && !stage.files(&id).exists());
    assert!(!stage.service.runtime.boxes().contains(&id.parse().unwrap()));
    stage.images.fate.send_replace(Fate::Found);
    assert!(!stage.settled(1).await.contains(&id.parse().unwrap()));
}

#[tokio::test(start_paused = true)]
async fn a_box_that_was_handed_secrets_goes_to_nobody_else() {
    let stage = Stage::with_pool(Fate::Found, 1).await;
    let before = stage.settled(1).await;
    stage.service.store.refuse_writes(1);
    let refused = stage.service.call("POST", "/v1/sandboxes", taking()).await;
    assert_eq!(refused.status, 503, "{}", refused.body);
    until("another box", || stage.waiting().is_disjoint(&before) && !stage.waiting().is_empty()).await;
    let after = stage.settled(1).await;
    assert_eq!(stage.holders(), after);
    for id in before {
        assert!(!stage.files(&id.to_string()).exists());
    }
}

#[tokio::test(start_paused = true)]
async fn a_box_that_cannot_be_assigned_is_made_anew() {
    let stage = Stage::with_pool(Fate::Found, 1).await;
    stage.settled(1).await;
    stage.service.runtime.inject("assign", Fault::Refuse);
    let id = stage.create(taking()).await;
    stage.boots(&id).await;
    assert_eq!((stage.starts(&id), stage.holds(&id).len()), (2, 1));
}

#[tokio::test(start_paused = true)]
async fn a_box_that_vanishes_lets_go_of_its_image() {
    let stage = Stage::with_pool(Fate::Found, 1).await;
    let before = stage.settled(1).await;
    stage.service.runtime.vanishes(*before.first().unwrap());
    until("another box", || stage.waiting().is_disjoint(&before) && !stage.waiting().is_empty()).await;
    until("its hold", || stage.holders() == stage.waiting()).await;
    assert!(before.iter().all(|id| !stage.files(&id.to_string()).exists()));
}

#[tokio::test(start_paused = true)]
async fn what_no_pool_can_be_is_refused_with_its_reason() {
    let stage = Stage::new(Fate::Found).await;
    let with = |changes: Value| {
        let mut body = pool(1);
        body.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
        body
    };
    let repository = |credential: Value| json!({"repository": {"url": URL, "credential": credential}});
    for (changes, says) in [
        (repository(json!({"token": "hunter2"})), "secretRef"),
        (repository(json!({"privateKey": "hunter2"})), "secretRef"),
        (repository(json!({"secretRef": "bot"})), "keeps no secrets by name"),
        (json!({"imageBuild": {"secrets": {"A": "hunter2"}}}), "imageBuild.secrets"),
        (json!({"image": {"uri": "x"}}), "exactly one"),
        (json!({"repository": {"url": "ftp://x/y"}}), "url"),
    ] {
        let refused = stage.service.call("POST", "/v1/pools", with(changes.clone())).await;
        assert_eq!(refused.status, 400, "{changes} {}", refused.body);
        let message = refused.body["message"].as_str().unwrap();
        assert!(message.contains(says) && !message.contains("hunter"), "{changes}: {message}");
    }
    let image = json!({"name": "img", "image": {"uri": "img"}, "capacitySpec": pool(0)["capacitySpec"]});
    assert_eq!(stage.service.call("POST", "/v1/pools", image).await.status, 201);
    assert_eq!(stage.service.call("POST", "/v1/pools", pool(0)).await.status, 201);
    for (pool, changes, says) in [
        ("img", json!({"repository": {"url": URL}}), "is of an image"),
        ("img", json!({"services": []}), "is of an image"),
        ("web", json!({"image": {"uri": "img"}}), "is of a repository"),
    ] {
        let mut body = json!({"extensions": {"poolRef": pool}});
        body.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
        let refused = stage.service.call("POST", "/v1/sandboxes", body).await;
        assert_eq!(refused.status, 400, "{}", refused.body);
        assert!(refused.body["message"].as_str().unwrap().contains(says), "{}", refused.body);
    }
    let without = Service::new().await;
    let refused = without.call("POST", "/v1/pools", pool(1)).await;
    assert_eq!(refused.code(), (400, "SANDBOX::API_NOT_SUPPORTED"));
}

#[tokio::test(start_paused = true)]
async fn what_does_not_fit_starts_cold_and_says_why() {
    let stage = Stage::with_pool(Fate::Found, 1).await;
    let waiting = stage.settled(1).await;
    for (changes, says) in [
        (json!({"repository": {"url": "https://git.example.com/acme/other.git"}}), "other repositories"),
        (json!({"imageBuild": {"recipe": {"type": "none"}}}), "recipe"),
        (json!({"imageBuild": {"policy": "always"}}), "build of its own"),
    ] {
        let mut body = taking();
        body.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
        let id = stage.create(body).await;
        stage.until(&id, "Pending", "agent_connecting").await;
        assert!(!waiting.contains(&id.parse().unwrap()));
        let lines = stage.service.store.history(id.parse().unwrap(), 10).await.unwrap();
        let missed = lines.iter().find(|line| line.kind == "pool.missed").unwrap();
        assert!(missed.message.contains(says), "{missed:?}");
    }
    assert_eq!(stage.settled(1).await, waiting);
}
