//! The `Runtime` port, one verb a method. What they do is in the other files of this folder.

use std::{collections::BTreeMap, time::Duration};

use async_trait::async_trait;
use futures_util::stream::BoxStream;
use sandglass_sandbox::{
    SandboxId, SnapshotId,
    ports::runtime::{
        BoxEvent, Capabilities, Observation, PrepareProgress, Runtime, RuntimeError, RuntimeEvent, StartPlan,
        Usage,
    },
    spec::{MutableFacts, Secrets, Spec},
};

use super::{DockerRuntime, snapshot, watch};

#[async_trait]
impl Runtime for DockerRuntime {
    fn name(&self) -> &'static str {
        "docker"
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            pause: true,
            snapshot: true,
            gpu: true,
            network_policy: true,
            named_volumes: true,
            object_store_volumes: true,
            foreign_platforms: true,
            sockets: self.shared.agent.mount().is_some(),
            standby: true,
        }
    }

    async fn admit(&self, spec: &Spec) -> Result<(), RuntimeError> {
        self.shared.admit(spec).await
    }

    async fn prepare(
        &self,
        spec: &Spec,
        secrets: &Secrets,
        progress: &(dyn Fn(PrepareProgress) + Send + Sync),
    ) -> Result<(), RuntimeError> {
        self.shared.prepare(spec, secrets, progress).await
    }

    async fn start(
        &self,
        id: SandboxId,
        plan: &StartPlan,
        secrets: &Secrets,
    ) -> Result<Observation, RuntimeError> {
        self.shared.start(id, plan, secrets).await
    }

    async fn assign(&self, id: SandboxId, plan: &StartPlan) -> Result<Observation, RuntimeError> {
        self.shared.assign(id, plan).await
    }

    async fn image_identity(&self, image: &str) -> Result<String, RuntimeError> {
        self.shared.image_identity(image).await
    }

    async fn pause(&self, id: SandboxId) -> Result<Observation, RuntimeError> {
        self.shared.pause(id).await
    }

    async fn resume(&self, id: SandboxId) -> Result<Observation, RuntimeError> {
        self.shared.resume(id).await
    }

    async fn remove(&self, id: SandboxId, grace: Duration) -> Result<(), RuntimeError> {
        self.shared.remove(id, grace).await
    }

    async fn update_facts(&self, id: SandboxId, facts: &MutableFacts) -> Result<Observation, RuntimeError> {
        self.shared.update_facts(id, facts).await
    }

    async fn inspect(&self, id: SandboxId) -> Result<Option<Observation>, RuntimeError> {
        self.shared.observe(id).await.map_err(|e| e.during("inspect"))
    }

    async fn list(&self) -> Result<Vec<Observation>, RuntimeError> {
        self.shared.observe_all().await
    }

    fn watch(&self) -> BoxStream<'static, RuntimeEvent> {
        watch::watch(&self.shared)
    }

    async fn logs(&self, id: SandboxId, lines: usize) -> Result<Vec<String>, RuntimeError> {
        self.shared.logs(id, lines).await
    }

    async fn events(&self, id: SandboxId) -> Result<Vec<BoxEvent>, RuntimeError> {
        self.shared.events(id).await
    }

    async fn usage(&self, id: SandboxId) -> Result<Usage, RuntimeError> {
        self.shared.usage(id).await
    }

    async fn describe(&self, id: SandboxId) -> Result<BTreeMap<String, String>, RuntimeError> {
        self.shared.describe(id).await
    }

    fn snapshot_image(&self, snapshot: SnapshotId) -> String {
        snapshot::image(snapshot)
    }

    async fn snapshot(&self, id: SandboxId, snapshot: SnapshotId) -> Result<(), RuntimeError> {
        self.shared.snapshot(id, snapshot).await
    }

    async fn has_snapshot(&self, snapshot: SnapshotId) -> Result<bool, RuntimeError> {
        self.shared.has_snapshot(snapshot).await
    }

    async fn still_saves(&self, snapshot: SnapshotId) -> bool {
        self.shared.still_saves(snapshot).await
    }

    async fn remove_snapshot(&self, snapshot: SnapshotId) -> Result<(), RuntimeError> {
        self.shared.remove_snapshot(snapshot).await
    }
}

impl Drop for DockerRuntime {
    /// The watcher holds what all verbs share; containers are left as they are.
    fn drop(&mut self) {
        self.shared.watching.stop();
    }
}
