//! Boxes kept as images under a name, by commits.

use async_trait::async_trait;
use bollard::{
    auth::DockerCredentials,
    models::{ContainerConfig, ImageInspect},
    query_parameters::{CommitContainerOptions, InspectContainerOptions, RemoveImageOptions},
};
use sandglass_sandbox::{
    SandboxId,
    ports::{
        Captures, RuntimeErrorKind,
        captures::{Captured, LocalImage, RunConfig},
        runtime::RuntimeError,
    },
};
use tracing::info;

use super::{DockerRuntime, Shared, errors::failed, freeze::no_such_box, snapshot::passed_on};

const PHASE: &str = "capture";
const TAG: &str = "latest";

impl Shared {
    async fn local(&self, name: &str) -> Result<Option<LocalImage>, RuntimeError> {
        let looked = self.client.call(|docker| async move { docker.inspect_image(name).await }).await;
        match looked {
            Ok(image) => Ok(Some(local(name, image))),
            Err(failure) if failure.is_absent() => Ok(None),
            Err(failure) => Err(failure.during(PHASE)),
        }
    }

    async fn commit(&self, id: SandboxId, name: &str, config: &RunConfig) -> Result<(), RuntimeError> {
        let _alone = self.locks.lock(id).await;
        self.unfrozen(id, PHASE).await?;
        let found = self.find(id).await.map_err(|e| e.during(PHASE))?;
        let container = found.ok_or_else(|| no_such_box(id))?;
        let key = container.key.as_str();
        let inspected = self
            .client
            .call(
                |docker| async move { docker.inspect_container(key, None::<InspectContainerOptions>).await },
            )
            .await
            .map_err(|e| e.during(PHASE))?;
        let own = inspected.config.ok_or_else(|| failed(PHASE, "the engine tells no configuration"))?;
        let options = CommitContainerOptions {
            container: Some(container.key.clone()),
            repo: Some(name.to_owned()),
            tag: Some(TAG.to_owned()),
            comment: Some("image build".to_owned()),
            pause: true,
            ..CommitContainerOptions::default()
        };
        let wanted = wanted(passed_on(own), config);
        let committed = self
            .client
            .call_patiently(|docker| async move { docker.commit_container(options, wanted).await })
            .await;
        match committed {
            Ok(_) => {
                info!(sandbox = %id, image = name, "committed");
                Ok(())
            }
            Err(failure) if failure.is_absent() => Err(no_such_box(id)),
            // It may be going on: only what there is under the name tells.
            Err(failure) if failure.is_unavailable() => Err(failed(PHASE, failure.to_string())),
            Err(failure) => Err(failure.during(PHASE)),
        }
    }
}

/// The configuration of the image: what must not be passed on is blanked already, what is asked for wins.
fn wanted(blanked: ContainerConfig, config: &RunConfig) -> ContainerConfig {
    let mut env = blanked.env.unwrap_or_default();
    for (name, value) in &config.env {
        let prefix = format!("{name}=");
        env.retain(|pair| !pair.starts_with(&prefix));
        env.push(format!("{prefix}{value}"));
    }
    let mut labels = blanked.labels.unwrap_or_default();
    labels.extend(config.labels.clone());
    ContainerConfig {
        env: Some(env),
        labels: Some(labels),
        user: Some(config.user.clone()),
        working_dir: Some(config.working_dir.clone()),
        entrypoint: Some(config.entrypoint.clone()),
        cmd: Some(config.cmd.clone()),
        stop_signal: config.stop_signal.clone(),
        exposed_ports: Some(config.exposed_ports.clone()),
        ..blanked
    }
}

fn local(name: &str, image: ImageInspect) -> LocalImage {
    let config = image.config.unwrap_or_default();
    let pair = |text: String| match text.split_once('=') {
        Some((name, value)) => (name.to_owned(), value.to_owned()),
        None => (text, String::new()),
    };
    LocalImage {
        reference: name.to_owned(),
        digest: image.id.unwrap_or_default(),
        size_bytes: image.size.and_then(|size| u64::try_from(size).ok()).unwrap_or(0),
        config: RunConfig {
            env: config.env.unwrap_or_default().into_iter().map(pair).collect(),
            user: config.user.unwrap_or_default(),
            working_dir: config.working_dir.unwrap_or_default(),
            entrypoint: config.entrypoint.unwrap_or_default(),
            cmd: config.cmd.unwrap_or_default(),
            labels: config.labels.unwrap_or_default().into_iter().collect(),
            stop_signal: config.stop_signal,
            exposed_ports: config.exposed_ports.unwrap_or_default(),
        },
    }
}

#[async_trait]
impl Captures for DockerRuntime {
    async fn capture(&self, id: SandboxId, name: &str, config: &RunConfig) -> Result<Captured, RuntimeError> {
        self.shared.commit(id, name, config).await?;
        let image = self.shared.local(name).await?;
        let image = image.ok_or_else(|| failed(PHASE, "the engine made it, and has no such image"))?;
        Ok(Captured { image, left_out: Vec::new() })
    }

    async fn find(&self, name: &str) -> Result<Option<LocalImage>, RuntimeError> {
        self.shared.local(name).await
    }

    async fn remove(&self, name: &str) -> Result<(), RuntimeError> {
        let removed = self
            .shared
            .client
            .call(|docker| async move {
                docker.remove_image(name, None::<RemoveImageOptions>, None::<DockerCredentials>).await
            })
            .await;
        self.shared.images.forget(name);
        match removed {
            Ok(_) => Ok(()),
            Err(failure) if failure.is_absent() => Ok(()),
            Err(failure) if failure.status() == Some(409) => {
                Err(RuntimeError::new(RuntimeErrorKind::InUse, PHASE, failure.to_string()))
            }
            Err(failure) => Err(failure.during(PHASE)),
        }
    }
}
