//! Sandboxes on the images of real builds: who waits, who holds, and what becomes of images that no box can be made of.

use std::sync::Arc;

use futures_util::future::join_all;
use sandglass_server::workspace::FromBuilds;
use serde_json::{Value, json};
use tokio::sync::Semaphore;

use super::harness::{PATIENCE, Stage};
use crate::service::Service;

const HOOK: &[(&str, &str)] = &[(".sandbox/setup.sh", "npm ci\n")];

/// A server that makes sandboxes, beside the one that builds.
struct Sandboxes {
    stage: Stage,
    service: Service,
}

impl Sandboxes {
    async fn new() -> Self {
        let stage = Stage::new().await;
        let images = Arc::new(FromBuilds(stage.builds.clone()));
        let service = Service::with_repositories(images, stage.dir.path().join("sandboxes")).await;
        Self { stage, service }
    }

    async fn create(&self, image_build: Value) -> String {
        let body =
            json!({"repository": {"url": self.stage.url()}, "imageBuild": image_build, "timeout": 600});
        let made = self.service.call("POST", "/v1/sandboxes", body).await;
        assert_eq!(made.status, 202, "{}", made.body);
        made.body["id"].as_str().unwrap().to_owned()
    }

    async fn until(&self, id: &str, reason: &str) -> Value {
        let path = format!("/v1/sandboxes/{id}");
        let look = async {
            loop {
                let seen = self.service.get(&path).await.body;
                if seen["status"]["reason"] == reason {
                    return seen;
                }
                tokio::time::sleep(std::time::Duration::from_millis(20)).await;
            }
        };
        match tokio::time::timeout(PATIENCE, look).await {
            Ok(seen) => seen,
            Err(_) => panic!("it never was {reason}, but is {}", self.service.get(&path).await.body),
        }
    }

    async fn delete(&self, id: &str) {
        let answer = self.service.call("DELETE", &format!("/v1/sandboxes/{id}"), Value::Null).await;
        assert_eq!(answer.status, 204, "{}", answer.body);
    }

    async fn image(&self, id: &str) -> Value {
        self.stage.get(&format!("/v1/images/{id}")).await.json()
    }

    async fn builds(&self) -> Vec<Value> {
        let page = self.stage.get("/v1/image-builds?pageSize=100").await.json();
        page["items"].as_array().unwrap().clone()
    }

    async fn events(&self, id: &str) -> Vec<Value> {
        let page = self.service.get(&format!("/v1/sandboxes/{id}/events?limit=1000")).await.body;
        page["items"].as_array().unwrap().clone()
    }

    async fn kinds(&self, id: &str) -> Vec<String> {
        let all = self.events(id).await;
        all.iter().map(|event| event["type"].as_str().unwrap().to_owned()).collect()
    }

    async fn told(&self, id: &str, kind: &str) -> Vec<Value> {
        let all = self.events(id).await.into_iter();
        all.filter(|event| event["type"] == kind).map(|event| event["data"].clone()).collect()
    }

    /// Steps of the build that a sandbox waits for, as it was told of them: name, state, and the exit code of one that failed.
    async fn steps(&self, id: &str) -> Vec<String> {
        let told = self.told(id, "image.build_step").await;
        let words = |step: &Value| {
            let code = step["exitCode"]
                .as_i64()
                .filter(|code| *code != 0)
                .map(|code| format!(" {code}"))
                .unwrap_or_default();
            format!("{} {}{code}", step["step"].as_str().unwrap(), step["state"].as_str().unwrap())
        };
        told.iter().map(words).collect()
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sandboxes_of_one_key_wait_for_one_build_and_share_its_fate() {
    let all = Sandboxes::new().await;
    all.stage.commit(HOOK);
    let gate = Arc::new(Semaphore::new(0));
    *all.stage.inside.gate.lock().unwrap() = Some(gate.clone());
    let ids = join_all((0..30).map(|_| all.create(Value::Null))).await;
    for id in &ids {
        all.until(id, "image_building").await;
    }
    let builds = all.builds().await;
    assert_eq!((builds.len(), &builds[0]["waiters"]), (1, &json!(30)), "{builds:?}");
    gate.add_permits(1);
    for id in &ids {
        let seen = all.until(id, "agent_connecting").await;
        assert_eq!(seen["source"]["imageBuildId"], builds[0]["id"]);
    }
    assert_eq!(all.stage.inside.times("setup.sh"), 1);
    let image = all.builds().await[0]["imageId"].as_str().unwrap().to_owned();
    assert_eq!(all.image(&image).await["sandboxCount"], 30);
    let resolved = all.told(&ids[0], "image.resolved").await;
    assert_eq!((&resolved[0]["cache"], &resolved[0]["imageId"]), (&json!("built"), &json!(image)));
    assert_eq!(resolved[0]["match"], "exact");
    for id in &ids {
        let kinds = all.kinds(id).await;
        let at = |kind: &str| kinds.iter().position(|known| known == kind).unwrap();
        let steps = at("image.build_queued") + 1..at("image.build_finished");
        assert!(kinds[steps.clone()].iter().all(|kind| kind == "image.build_step"), "{kinds:?}");
        let told = all.steps(id).await;
        assert_eq!(told.len(), steps.len());
        let mut once = told.clone();
        once.sort();
        once.dedup();
        assert_eq!(once.len(), told.len(), "none twice: {told:?}");
        let ended: Vec<&str> = told.iter().filter_map(|step| step.strip_suffix(" Succeeded")).collect();
        assert!(ended.contains(&"setup") && ended.contains(&"export"), "{told:?}");
    }

    // The next commit's build fails, for all who wait for it alike.
    all.stage.commit(&[("x", "y")]);
    *all.stage.inside.hook.lock().unwrap() = (vec!["no such package".into()], 3);
    let ids = join_all((0..5).map(|_| all.create(json!({"match": "exact"})))).await;
    for id in &ids {
        all.until(id, "image_building").await;
    }
    gate.add_permits(1);
    let mut causes = Vec::new();
    for id in &ids {
        causes.push(all.until(id, "image_build_failed").await["lastFailure"].clone());
    }
    assert!(all.steps(&ids[0]).await.contains(&"setup Failed 3".to_owned()));
    causes.dedup();
    assert_eq!(causes.len(), 1, "{causes:?}");
    assert_eq!((&causes[0]["phase"], &causes[0]["exitCode"]), (&json!("setup"), &json!(3)));
    assert!(causes[0]["outputTail"].as_str().unwrap().contains("no such package"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_last_sandbox_to_go_takes_the_build_along_that_only_it_wanted() {
    let all = Sandboxes::new().await;
    all.stage.commit(HOOK);
    *all.stage.inside.gate.lock().unwrap() = Some(Arc::new(Semaphore::new(0)));
    let ids = [all.create(Value::Null).await, all.create(Value::Null).await];
    for id in &ids {
        all.until(id, "image_building").await;
    }
    all.stage.when("the setup runs", |stage| stage.inside.times("setup.sh") == 1).await;
    let build = all.builds().await[0]["id"].as_str().unwrap().to_owned();
    let path = format!("/v1/image-builds/{build}");
    all.delete(&ids[0]).await;
    let left = all.stage.until(&path, |build| build["waiters"] == 1).await;
    assert_eq!(left["status"]["state"], "Running");
    all.delete(&ids[1]).await;
    assert_eq!(all.stage.ended(&build).await["status"]["state"], "Cancelled");
    all.stage
        .when("nothing is left", |stage| stage.runtime.boxes().is_empty() && stage.images.made().is_empty())
        .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_moved_commit_starts_from_the_older_image_while_its_own_is_built_once() {
    let all = Sandboxes::new().await;
    all.stage.commit(HOOK);
    let first = all.create(Value::Null).await;
    let older = all.until(&first, "agent_connecting").await["source"]["imageId"].clone();
    let gate = Arc::new(Semaphore::new(0));
    *all.stage.inside.gate.lock().unwrap() = Some(gate.clone());
    let commit = all.stage.commit(&[("x", "y")]);
    for _ in 0..3 {
        let id = all.create(Value::Null).await;
        let seen = all.until(&id, "agent_connecting").await;
        assert_eq!(seen["source"]["imageId"], older);
        assert_eq!(seen["source"]["repositories"][0]["commit"], commit.as_str(), "it is checked out at boot");
        let resolved = all.told(&id, "image.resolved").await;
        assert_eq!((&resolved[0]["cache"], &resolved[0]["match"]), (&json!("behind"), &json!("compatible")));
        assert!(all.steps(&id).await.is_empty(), "it waits for no build");
    }
    assert_eq!(all.builds().await.len(), 2, "one in the background");
    let exact = all.create(json!({"match": "exact"})).await;
    all.until(&exact, "image_building").await;
    assert_eq!(all.builds().await.len(), 2);
    gate.add_permits(1);
    let seen = all.until(&exact, "agent_connecting").await;
    assert_ne!(seen["source"]["imageId"], older);
    let late = all.create(Value::Null).await;
    all.until(&late, "agent_connecting").await;
    let resolved = all.told(&late, "image.resolved").await;
    assert_eq!((&resolved[0]["cache"], &resolved[0]["match"]), (&json!("hit"), &json!("exact")));
    assert_eq!(all.image(older.as_str().unwrap()).await["state"], "Superseded");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_image_that_no_box_can_be_made_of_is_quarantined_and_the_sandbox_goes_on() {
    let all = Sandboxes::new().await;
    all.stage.commit(HOOK);
    let first = all.create(Value::Null).await;
    let seen = all.until(&first, "agent_connecting").await;
    let (broken, reference) =
        (seen["source"]["imageId"].as_str().unwrap(), seen["image"]["uri"].as_str().unwrap());
    all.service.runtime.cannot_use(reference);
    let second = all.create(Value::Null).await;
    let seen = all.until(&second, "agent_connecting").await;
    let other = seen["source"]["imageId"].as_str().unwrap();
    assert_ne!(other, broken);
    let quarantined = all.image(broken).await;
    assert_eq!(
        (&quarantined["state"], &quarantined["restoreFailures"], &quarantined["sandboxCount"]),
        (&json!("Quarantined"), &json!(2), &json!(1)),
        "{quarantined}"
    );
    assert_eq!((all.builds().await.len(), all.image(other).await["sandboxCount"].clone()), (2, json!(1)));
    let told = all.told(&second, "image.rejected").await;
    assert_eq!(told.len(), 2, "{told:?}");
    assert!(told.iter().all(|event| event["imageId"] == broken), "{told:?}");
    let message = seen["status"]["message"].as_str().unwrap();
    assert!(message.contains(broken) && message.contains("the image cannot be mounted"), "{message}");

    // Where none may be built, the base serves, and the sandbox says why.
    all.service.runtime.cannot_use(seen["image"]["uri"].as_str().unwrap());
    let third = all.create(json!({"policy": "never"})).await;
    let seen = all.until(&third, "agent_connecting").await;
    assert_eq!((&seen["source"]["imageId"], &seen["image"]["uri"]), (&Value::Null, &json!("base")));
    assert_eq!(all.told(&third, "image.resolved").await.last().unwrap()["cache"], "base");
    for id in [&first, &second, &third] {
        all.delete(id).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_image_is_held_by_its_sandboxes_and_free_when_they_are_gone() {
    let all = Sandboxes::new().await;
    all.stage.commit(HOOK);
    let ids = [all.create(Value::Null).await, all.create(Value::Null).await];
    let mut image = String::new();
    for id in &ids {
        image = all.until(id, "agent_connecting").await["source"]["imageId"].as_str().unwrap().to_owned();
    }
    let path = format!("/v1/images/{image}");
    for left in [1, 0] {
        let refused = all.stage.call("DELETE", &path, Value::Null).await;
        assert_eq!((refused.status, refused.code()), (409, "IMAGE::IN_USE".into()));
        all.delete(&ids[left]).await;
        all.stage.until(&path, |image| image["sandboxCount"] == left).await;
    }
    // The image outlives its sandboxes: the next one has it at once.
    let next = all.create(Value::Null).await;
    all.until(&next, "agent_connecting").await;
    assert_eq!(
        (all.told(&next, "image.resolved").await[0]["cache"].clone(), all.builds().await.len()),
        (json!("hit"), 1)
    );
    all.delete(&next).await;
    all.stage.until(&path, |image| image["sandboxCount"] == 0).await;
    assert_eq!(all.stage.call("DELETE", &path, Value::Null).await.status, 202);
    all.stage.when("the image is removed", |stage| stage.images.made().is_empty()).await;
}
