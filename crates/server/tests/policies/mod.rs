//! Policies over the whole router: idle sandboxes, expiries with an action, the hook before the end and the circuit breaker.

mod breaker;
mod expiry;
mod idle;
mod pre_stop;

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use sandglass_bridge::{
    agent::{Bridge, VitalSigns, Vitals},
    wire::{Activity, Outcome},
};
use sandglass_sandbox::Clock;
use serde_json::{Value, json};

use crate::workspaces::{Stage, URL, agent_with, tell};

/// What the heartbeats of an agent carry, as a test wants it.
#[derive(Clone, Default)]
struct Signs(Arc<Mutex<Activity>>);

impl Signs {
    fn set(&self, change: impl FnOnce(&mut Activity)) {
        let mut activity = self.0.lock().unwrap();
        *activity = Activity::default();
        change(&mut activity);
    }
}

impl Vitals for Signs {
    fn read(&self) -> VitalSigns {
        VitalSigns { activity: *self.0.lock().unwrap(), ..VitalSigns::default() }
    }
}

/// An agent that ends when it is told to.
struct Agent {
    signs: Signs,
    task: tokio::task::JoinHandle<()>,
}

impl Drop for Agent {
    fn drop(&mut self) {
        self.task.abort();
    }
}

fn attach(stage: &Stage, id: &str) -> Agent {
    let signs = Signs::default();
    let mut bridge: Bridge = agent_with(stage.dir.path(), id, signs.clone());
    tell(&bridge, "boot.completed", &json!({"warnings": 0}));
    let task = tokio::spawn(async move {
        while let Some(command) = bridge.commands.recv().await {
            bridge.handle.settle(command.id, Outcome::done());
        }
    });
    Agent { signs, task }
}

fn asked(policies: Value, timeout: Option<u64>) -> Value {
    let mut body = json!({"repository": {"url": URL}, "policies": policies});
    if let Some(timeout) = timeout {
        body["timeout"] = json!(timeout);
    }
    body
}

async fn ready(stage: &Stage, body: Value) -> (String, Agent) {
    let id = stage.create(body).await;
    stage.until(&id, "Pending", "agent_connecting").await;
    let agent = attach(stage, &id);
    stage.until(&id, "Running", "ready").await;
    (id, agent)
}

async fn pass(seconds: u64) {
    tokio::time::sleep(Duration::from_secs(seconds)).await;
}

async fn state(stage: &Stage, id: &str) -> String {
    stage.get(id).await["status"]["state"].as_str().unwrap_or("gone").to_owned()
}

/// Waits until nothing of the sandbox is left. Returns the seconds that took.
async fn gone(stage: &Stage, id: &str) -> u64 {
    let begun = stage.service.clock.now();
    let look = async {
        while stage.service.get(&format!("/v1/sandboxes/{id}")).await.status != 404 {
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(20_000), look).await.expect("it never went");
    begun.until(stage.service.clock.now()).as_secs()
}

async fn events(stage: &Stage, id: &str, kind: &str) -> Vec<Value> {
    let page = stage.service.get(&format!("/v1/sandboxes/{id}/events?limit=1000")).await.body;
    let items = page["items"].as_array().unwrap().iter();
    items.filter(|e| e["type"] == kind).map(|e| e["data"].clone()).collect()
}
