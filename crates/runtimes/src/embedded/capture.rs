//! Boxes kept as images: what a box changed becomes a layer on its image.

use std::{io, path::PathBuf, sync::Arc};

use async_trait::async_trait;
use sandglass_images::{Commit, Image, ImageConfig, ImageDigest, ImageErrorKind};
use sandglass_sandbox::{
    SandboxId,
    ports::{
        Captures, RuntimeErrorKind,
        captures::{Captured, LocalImage, RunConfig},
        runtime::RuntimeError,
    },
};
use sandglass_shim::{protocol::Request, spec::BoxSpec};

use super::{EmbeddedRuntime, Shared, boxes::Known};

/// Files that every box gets written afresh, and places that hold nothing of their own.
const PLANTED: [&str; 8] = [
    "etc/hosts",
    "etc/hostname",
    "etc/resolv.conf",
    "proc",
    "sys",
    "dev",
    "run/.execd",
    "opt/opensandbox/execd",
];

fn failed(message: impl Into<String>) -> RuntimeError {
    RuntimeError::new(RuntimeErrorKind::Failed, "capture", message)
}

fn of_image(error: &sandglass_images::ImageError) -> RuntimeError {
    let kind = match error.kind() {
        ImageErrorKind::InvalidReference => RuntimeErrorKind::Invalid,
        ImageErrorKind::NoSpace | ImageErrorKind::TooLarge => RuntimeErrorKind::Exhausted,
        ImageErrorKind::InUse => RuntimeErrorKind::InUse,
        ImageErrorKind::NotFound => RuntimeErrorKind::NotFound,
        _ => RuntimeErrorKind::Failed,
    };
    RuntimeError::new(kind, "capture", error.to_string())
}

async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, RuntimeError> + Send + 'static,
) -> Result<T, RuntimeError> {
    match tokio::task::spawn_blocking(work).await {
        Ok(done) => done,
        Err(error) => Err(failed(error.to_string())),
    }
}

fn run_config(config: ImageConfig) -> RunConfig {
    RunConfig {
        env: config.env,
        user: config.user,
        working_dir: config.working_dir,
        entrypoint: config.entrypoint,
        cmd: config.cmd,
        labels: config.labels,
        stop_signal: config.stop_signal,
        exposed_ports: config.exposed_ports,
    }
}

fn image_config(config: RunConfig) -> ImageConfig {
    ImageConfig {
        env: config.env,
        user: config.user,
        working_dir: config.working_dir,
        entrypoint: config.entrypoint,
        cmd: config.cmd,
        labels: config.labels,
        stop_signal: config.stop_signal,
        exposed_ports: config.exposed_ports,
    }
}

fn local(reference: &str, image: Image) -> LocalImage {
    LocalImage {
        reference: reference.to_owned(),
        digest: image.id.to_string(),
        size_bytes: image.size_bytes,
        config: run_config(image.config),
    }
}

impl Shared {
    fn known(&self, id: SandboxId) -> Result<(Arc<BoxSpec>, ImageDigest), RuntimeError> {
        let boxes = self.boxes.lock();
        let absent = || RuntimeError::new(RuntimeErrorKind::NotFound, "find", format!("no box {id}"));
        let Known { spec, about, .. } = boxes.get(&id).ok_or_else(absent)?;
        let image = about.image_id.parse().map_err(|_| failed("the box's image is not known"))?;
        Ok((spec.clone(), image))
    }
}

/// Mount points hold files of others.
fn leave_out(spec: &BoxSpec) -> Vec<PathBuf> {
    let inside = |target: &PathBuf| target.strip_prefix("/").map_or_else(|_| target.clone(), PathBuf::from);
    let mounted = spec.root.volumes.iter().map(|volume| inside(&volume.target));
    PLANTED.iter().map(PathBuf::from).chain(mounted).collect()
}

#[async_trait]
impl Captures for EmbeddedRuntime {
    async fn capture(&self, id: SandboxId, name: &str, config: &RunConfig) -> Result<Captured, RuntimeError> {
        let shared = self.shared.clone();
        let (spec, base) = shared.known(id)?;
        // Nothing is written while it is read.
        shared.freeze(id, Request::Pause, "pause").await?;
        let (name, config) = (name.to_owned(), image_config(config.clone()));
        blocking(move || {
            let dir = shared.dir(id);
            let leave_out = leave_out(&spec);
            let commit = Commit {
                base: &base,
                upper: &dir.join("upper"),
                ids: (spec.ids.base, spec.ids.count),
                leave_out: &leave_out,
                config: &config,
                name: &name,
            };
            let image = shared.images.commit(&commit).map_err(|e| of_image(&e))?;
            let left_out = spec.root.grafts.iter().enumerate().filter_map(|(index, graft)| {
                let target = graft.target.display();
                has_files(&dir.join(format!("upper-{index}"))).then(|| {
                    format!("changes below {target} are not kept, because they are the machine's own files")
                })
            });
            Ok(Captured { left_out: left_out.collect(), image: local(&name, image) })
        })
        .await
    }

    async fn find(&self, name: &str) -> Result<Option<LocalImage>, RuntimeError> {
        let image = self.shared.find_image(name).await?;
        Ok(image.map(|image| local(name, image)))
    }

    fn layered(&self) -> bool {
        true
    }

    async fn remove(&self, name: &str) -> Result<(), RuntimeError> {
        let (shared, name) = (self.shared.clone(), name.to_owned());
        blocking(move || {
            let in_use = |id: &ImageDigest| shared.boxes.image_ids().contains(id.as_str());
            match shared.images.remove(&name, &in_use) {
                Ok(_) => Ok(()),
                Err(error) if error.kind() == ImageErrorKind::NotFound => Ok(()),
                Err(error) => Err(of_image(&error)),
            }
        })
        .await
    }
}

fn has_files(folder: &std::path::Path) -> bool {
    let any = |folder| -> io::Result<bool> { Ok(std::fs::read_dir(folder)?.next().is_some()) };
    any(folder).unwrap_or(false)
}
