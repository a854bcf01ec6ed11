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

use super::{
    DockerRuntime, Shared,
    errors::{failed, invalid},
    freeze::no_such_box,
    image::{ImageFacts, is_named},
    snapshot::{self, passed_on},
};

const PHASE: &str = "capture";
const TAG: &str = "latest";

impl Shared {
    async fn local(&self, name: &str) -> Result<Option<LocalImage>, RuntimeError> {
        let looked = self.client.call(|docker| async move { docker.inspect_image(name).await }).await;
        match looked {
            // Whose snapshot it is, only the server knows.
            Ok(image) if image.repo_tags.iter().flatten().any(|tag| snapshot::is_artifact(tag)) => {
                Err(invalid(PHASE, "the image is a snapshot"))
            }
            Ok(image) => {
                let named = is_named(name, &ImageFacts::from(image.clone()));
                Ok(named.then(|| local(name, image)))
            }
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

/// The configuration of the image: what must not be passed on is blanked already, what is asked for wins. Variables that the box had beside
/// those are its own; the engine leaves none out, so they are emptied.
fn wanted(blanked: ContainerConfig, config: &RunConfig) -> ContainerConfig {
    let mut env: Vec<String> = config.env.iter().map(|(name, value)| format!("{name}={value}")).collect();
    for pair in blanked.env.unwrap_or_default() {
        let name = pair.split_once('=').map_or(pair.as_str(), |(name, _)| name);
        if !config.env.iter().any(|(known, _)| known == name) {
            env.push(format!("{name}="));
        }
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
        // The commit is done: that the engine cannot be asked any more says nothing else.
        let image = self.shared.local(name).await.map_err(|error| failed(PHASE, error.message))?;
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

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;

    #[test]
    fn an_image_has_the_variables_that_were_asked_for_and_none_of_the_box() {
        let pairs = ["PATH=/bin", "OPENSANDBOX_ID=x", "EXECD_ACCESS_TOKEN=", "OLD=1"].map(str::to_owned);
        let own = ContainerConfig {
            env: Some(pairs.to_vec()),
            labels: Some(HashMap::from([("opensandbox.io/id".to_owned(), String::new())])),
            user: Some("0:0".into()),
            ..ContainerConfig::default()
        };
        let config = RunConfig {
            env: vec![
                ("PATH".into(), "/opt/bin".into()),
                ("OLD".into(), "2".into()),
                ("NEW".into(), "3".into()),
            ],
            user: "ann".into(),
            labels: [("team".to_owned(), "web".to_owned())].into(),
            ..RunConfig::default()
        };
        let image = wanted(own, &config);
        let expected = ["PATH=/opt/bin", "OLD=2", "NEW=3", "OPENSANDBOX_ID=", "EXECD_ACCESS_TOKEN="];
        assert_eq!(image.env.unwrap(), expected);
        assert_eq!(image.user.as_deref(), Some("ann"));
        let labels = image.labels.unwrap();
        assert_eq!((labels["team"].as_str(), labels["opensandbox.io/id"].as_str()), ("web", ""));
    }
}
