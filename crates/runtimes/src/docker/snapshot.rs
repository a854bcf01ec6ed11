//! Snapshots: a committed image for each, named by the snapshot's id.
//!
//! Invariant: the image passes nothing on that belongs to its source: no system label, no token, and not the agent as its entrypoint.

use bollard::{
    auth::DockerCredentials,
    models::ContainerConfig,
    query_parameters::{CommitContainerOptions, InspectContainerOptions, RemoveImageOptions},
};
use sandglass_sandbox::{
    SandboxId, SnapshotId,
    ports::{RuntimeErrorKind, runtime::RuntimeError},
};
use tracing::{info, warn};

use super::{
    Shared, agent,
    container::Status,
    errors::{Failure, failed},
    freeze::no_such_box,
    labels,
};

const REPOSITORY: &str = "opensandbox-snapshots";

/// Whether a tag is that of some snapshot, ours or the upstream server's.
pub(super) fn is_artifact(tag: &str) -> bool {
    tag.strip_prefix(REPOSITORY).is_some_and(|rest| rest.starts_with(':'))
}
/// Variables that open the source, that were asked for with it, or that tell of its sidecar.
const SECRETS: [&str; 3] =
    ["EXECD_ACCESS_TOKEN", sandglass_sandbox::hooks::VARIABLE, crate::enforcement::TRANSPARENT];

/// The snapshot that an image of that name is.
pub(super) fn of_image(name: &str) -> Option<SnapshotId> {
    name.strip_prefix(REPOSITORY)?.strip_prefix(':')?.parse().ok()
}

pub(super) fn image(snapshot: SnapshotId) -> String {
    format!("{REPOSITORY}:{snapshot}")
}

impl Shared {
    pub(super) async fn snapshot(&self, id: SandboxId, snapshot: SnapshotId) -> Result<(), RuntimeError> {
        self.memory.wanted(snapshot);
        // A tag appears only when the image is whole.
        if self.has_snapshot(snapshot).await? {
            return Ok(());
        }
        let _alone = self.locks.lock(id).await;
        self.unfrozen(id, "snapshot").await?;
        let found = self.find(id).await.map_err(|e| e.during("snapshot"))?;
        let container = found.ok_or_else(|| no_such_box(id))?;
        let key = container.key.as_str();
        let inspected = self
            .client
            .call(
                |docker| async move { docker.inspect_container(key, None::<InspectContainerOptions>).await },
            )
            .await
            .map_err(|e| e.during("snapshot"))?;
        let config =
            inspected.config.ok_or_else(|| failed("snapshot", "the engine tells no configuration"))?;
        let options = CommitContainerOptions {
            container: Some(container.key.clone()),
            repo: Some(REPOSITORY.to_owned()),
            tag: Some(snapshot.to_string()),
            comment: Some(format!("snapshot of sandbox {id}")),
            pause: true,
            ..CommitContainerOptions::default()
        };
        // A box that is paused already is neither frozen nor thawed by its commit.
        let saving = (container.status == Status::Running).then(|| self.saves.begin(id, snapshot));
        let committed = self
            .client
            .call_patiently(|docker| async move { docker.commit_container(options, passed_on(config)).await })
            .await;
        // Without an answer of the engine the commit may be going on.
        if !matches!(committed, Err(Failure::Unreachable(_) | Failure::TimedOut))
            && let Some(saving) = saving
        {
            saving.end();
        }
        committed.map_err(|e| if e.is_absent() { no_such_box(id) } else { e.during("snapshot") })?;
        info!(sandbox = %id, snapshot = %snapshot, "committed");
        Ok(())
    }

    pub(super) async fn has_snapshot(&self, snapshot: SnapshotId) -> Result<bool, RuntimeError> {
        let name = image(snapshot);
        let looked = self.client.call(|docker| async move { docker.inspect_image(&name).await }).await;
        match looked {
            Ok(_) => Ok(true),
            Err(failure) if failure.is_absent() => Ok(false),
            Err(failure) => Err(failure.during("snapshot")),
        }
    }

    pub(super) async fn remove_snapshot(&self, snapshot: SnapshotId) -> Result<(), RuntimeError> {
        let name = image(snapshot);
        // A commit that a killed server asked for goes on in the engine and may end after this.
        self.memory.unwanted(snapshot);
        let removed = self
            .client
            .call(|docker| {
                let name = name.clone();
                async move {
                    docker.remove_image(&name, None::<RemoveImageOptions>, None::<DockerCredentials>).await
                }
            })
            .await;
        self.images.forget(&name);
        match removed {
            Ok(_) => Ok(()),
            Err(failure) if failure.is_absent() => Ok(()),
            Err(failure) if failure.status() == Some(409) => {
                // The name goes, and then the engine refuses to remove layers that a later snapshot is made from: all that was asked.
                if !self.has_snapshot(snapshot).await? {
                    return Ok(());
                }
                self.memory.wanted(snapshot);
                Err(RuntimeError::new(RuntimeErrorKind::InUse, "snapshot", failure.to_string()))
            }
            Err(failure) => Err(failure.during("snapshot")),
        }
    }

    /// A commit has ended. If its snapshot was removed before, it goes now.
    pub(super) async fn committed(&self, snapshot: SnapshotId) {
        if !self.memory.is_unwanted(snapshot) {
            return;
        }
        match self.remove_snapshot(snapshot).await {
            Ok(()) => {
                info!(snapshot = %snapshot, "a snapshot that was whole only after its removal was removed")
            }
            Err(error) => warn!(snapshot = %snapshot, error = %error, "a removed snapshot has come back"),
        }
    }
}

/// The configuration of the image. The engine merges it over the container's own, so that what must not be passed on is blanked: it cannot be
/// left out.
pub(super) fn passed_on(container: ContainerConfig) -> ContainerConfig {
    let source = container.labels.unwrap_or_default();
    let record = labels::parse(&source).and_then(|parsed| parsed.record);
    let metadata = record.map(|record| record.facts.metadata).unwrap_or_default();
    let is_the_sources = |key: &String| key.starts_with(labels::SYSTEM) || metadata.contains_key(key);
    let labels = source.into_keys().filter(is_the_sources).map(|key| (key, String::new())).collect();
    let env = container.env.unwrap_or_default().into_iter().map(|pair| {
        let name = pair.split_once('=').map_or(pair.as_str(), |(name, _)| name);
        if SECRETS.contains(&name) { format!("{name}=") } else { pair }
    });
    let entrypoint = container.entrypoint.unwrap_or_default();
    ContainerConfig {
        labels: Some(labels),
        env: Some(env.collect()),
        // The agent's own user is not that of the image.
        user: agent::user_of(&entrypoint).map(str::to_owned).or(container.user),
        entrypoint: Some(Vec::new()),
        hostname: None,
        domainname: None,
        ..container
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, HashMap};

    use sandglass_sandbox::{
        Timestamp,
        ports::runtime::StartPlan,
        spec::{Entrypoint, MutableFacts, Spec},
    };

    use super::{super::Made, *};

    #[test]
    fn the_name_of_an_image_tells_its_snapshot() {
        let snapshot = SnapshotId::random();
        assert_eq!(of_image(&image(snapshot)), Some(snapshot));
        for other in ["opensandbox-snapshots", "opensandbox-snapshots:latest", "busybox:1", ""] {
            assert_eq!(of_image(other), None);
        }
    }

    #[test]
    fn an_image_passes_nothing_of_its_source_on() {
        let plan = StartPlan {
            spec: Spec::new("i", Entrypoint::Image),
            facts: MutableFacts {
                expires_at: None,
                metadata: BTreeMap::from([("project".to_owned(), "p".to_owned())]),
            },
            created_at: Timestamp::clamped(1),
            agent_token: "secret".into(),
            route_token: "secret".into(),
            delivery: Vec::new(),
            root_agent: false,
        };
        let mut labels =
            labels::for_create(SandboxId::random(), &plan, &[], &Made::default(), &HashMap::new());
        labels.insert("maintainer".into(), "somebody".into());
        let source = ContainerConfig {
            labels: Some(labels.clone()),
            env: Some(vec![
                "A=b=c".into(),
                "EXECD_ACCESS_TOKEN=secret".into(),
                "NAKED".into(),
                format!("{}=true", SECRETS[2]),
            ]),
            entrypoint: Some(vec!["/opt/opensandbox/execd".into(), "--init".into(), "--".into()]),
            cmd: Some(vec!["sleep".into(), "9".into()]),
            user: Some("1000".into()),
            ..ContainerConfig::default()
        };
        let image = passed_on(source);
        // As the engine merges them.
        labels.extend(image.labels.unwrap());
        labels.retain(|_, value| !value.is_empty());
        assert_eq!(labels, HashMap::from([("maintainer".to_owned(), "somebody".to_owned())]));
        assert_eq!(
            image.env.unwrap(),
            ["A=b=c", "EXECD_ACCESS_TOKEN=", "NAKED", &format!("{}=", SECRETS[2])]
        );
        assert_eq!(
            (image.entrypoint.unwrap().len(), image.cmd.unwrap()),
            (0, vec!["sleep".into(), "9".into()])
        );
        assert_eq!(image.user.as_deref(), Some("1000"));

        let apart = ContainerConfig {
            entrypoint: Some(agent::command(Some("ann"), false)),
            user: Some("0:0".into()),
            ..ContainerConfig::default()
        };
        assert_eq!(passed_on(apart).user.as_deref(), Some("ann"));
    }
}
