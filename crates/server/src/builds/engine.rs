//! The engine: builds in sandboxes of the runtime, and keeps what they leave as images.
//!
//! A build sandbox is an ordinary sandbox with the label `role=build`, without entrypoint, services or ports. Its files become the image, under
//! the name that the orchestration gave, labelled with the build and attempt.

use std::{
    collections::{BTreeMap, HashMap},
    path::PathBuf,
    sync::{Arc, Mutex, MutexGuard, PoisonError, atomic::AtomicUsize},
    time::Duration,
};

use async_trait::async_trait;
use sandglass_builds::{
    build::StepName,
    key::ArtifactName,
    ports::{Artifact, Engine, EngineError, Job},
};
use sandglass_repository::{
    RepositoryUrl,
    git::{Checkout, Control, FailureClass, Git, GitError, Remote},
    recipe::{Base, Recipe, Tree, detect},
};
use sandglass_sandbox::{
    Clock, ImageBuildId,
    ports::{
        Captures, Dockerfiles, Runtime, RuntimeErrorKind,
        captures::{LocalImage, RunConfig},
    },
    spec::Limits,
};
use tokio::time::Instant;

use super::{
    archive::{Archive, Dress},
    attempt::{Attempt, Workshop, folder, of_disk, of_runtime},
    dockerfile::STAGES,
    git as ours,
    increment::{SOURCES, names},
    inside::Inside,
    layers::Layers,
};

/// Labels by which an image tells who made it.
pub(super) const MADE_BY_BUILD: &str = "io.sandglass.image-build";
const MADE_BY_ATTEMPT: &str = "io.sandglass.image-build.attempt";
/// A deadline beyond every build's own, which ends it by cancelling.
const GIT_PATIENCE: Duration = Duration::from_secs(6 * 3600);

/// What an operator sets of build sandboxes.
#[derive(Debug, Clone)]
pub(super) struct EngineSettings {
    pub(super) limits: Limits,
    /// After which a build sandbox ends by itself.
    pub(super) lifetime: Duration,
    /// For checkouts and archives.
    pub(super) scratch: PathBuf,
    pub(super) base_image: String,
    /// This server, as its sandboxes say it.
    pub(super) builder: String,
    /// Whose ports lead into sandboxes.
    pub(super) host: std::net::IpAddr,
    /// What an instruction of a Dockerfile has to take for what it made to be kept.
    pub(super) layer_after: Duration,
}

/// See the module documentation.
pub(super) struct SandboxEngine {
    pub(super) runtime: Arc<dyn Runtime>,
    pub(super) captures: Arc<dyn Captures>,
    /// The runtime's own builder, where it has one.
    pub(super) dockerfiles: Option<Arc<dyn Dockerfiles>>,
    pub(super) inside: Arc<dyn Inside>,
    pub(super) git: Git,
    pub(super) clock: Arc<dyn Clock>,
    pub(super) settings: EngineSettings,
    pub(super) attempts: Attempts,
    /// What instructions of Dockerfiles made, where it pays to keep it.
    pub(super) layers: Option<Layers>,
}

/// Attempts that this process works on.
#[derive(Default)]
pub(super) struct Attempts(Mutex<ByNumber>);

type ByNumber = HashMap<(ImageBuildId, u32), Arc<tokio::sync::Mutex<Attempt>>>;

impl Attempts {
    fn lock(&self) -> MutexGuard<'_, ByNumber> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn of(&self, job: &Job) -> Result<Arc<tokio::sync::Mutex<Attempt>>, EngineError> {
        let known = self.lock().get(&(job.build, job.attempt)).cloned();
        known.ok_or_else(|| EngineError::transient("the attempt was begun by a server that ended"))
    }
}

fn of_git(error: &GitError) -> EngineError {
    match error.class {
        FailureClass::Unreachable | FailureClass::Timeout | FailureClass::DiskFull => {
            EngineError::transient(error.to_string())
        }
        FailureClass::Cancelled => EngineError::Cancelled,
        FailureClass::AuthFailed
        | FailureClass::Untrusted
        | FailureClass::RefNotFound
        | FailureClass::Other => EngineError::Rejected(error.to_string()),
    }
}

#[async_trait]
impl Engine for SandboxEngine {
    fn name(&self) -> &str {
        self.runtime.name()
    }

    async fn run(&self, job: &Job, step: StepName) -> Result<(), EngineError> {
        match step {
            StepName::Resolve => Ok(()),
            StepName::Clone => self.clone_sources(job).await,
            _ => {
                let attempt = self.attempts.of(job)?;
                let mut attempt = attempt.lock().await;
                match step {
                    StepName::Build => self.build(job, &mut attempt).await,
                    StepName::Setup => self.set_up(job, &mut attempt).await,
                    StepName::Sanitize => self.sanitise(job, &mut attempt).await,
                    StepName::Resolve | StepName::Clone | StepName::Export => Ok(()),
                }
            }
        }
    }

    async fn capture(&self, job: &Job, name: &ArtifactName) -> Result<Artifact, EngineError> {
        let attempt = self.attempts.of(job)?;
        let attempt = attempt.lock().await;
        let workshop = attempt.workshop.as_ref();
        let workshop = workshop.ok_or_else(|| EngineError::Rejected("nothing was built".into()))?;
        let mut config = workshop.config.clone();
        config.labels.insert(MADE_BY_BUILD.to_owned(), job.build.to_string());
        config.labels.insert(MADE_BY_ATTEMPT.to_owned(), job.attempt.to_string());
        // Not given up half way: whether it was done would not be known.
        let captured = self.captures.capture(workshop.id, name.as_str(), &config).await;
        let captured = captured.map_err(|error| match error.kind {
            RuntimeErrorKind::Unavailable => EngineError::transient(error.to_string()),
            RuntimeErrorKind::Invalid | RuntimeErrorKind::NotFound => {
                EngineError::Rejected(error.to_string())
            }
            RuntimeErrorKind::Exists => EngineError::Conflict(error.to_string()),
            _ => EngineError::Ambiguous(error.to_string()),
        })?;
        for note in &captured.left_out {
            job.log.write(StepName::Export, format!("{note}\n").as_bytes()).await;
        }
        Ok(artifact(name, captured.image))
    }

    async fn lookup(&self, name: &ArtifactName) -> Result<Option<Artifact>, EngineError> {
        let found = self.captures.find(name.as_str()).await.map_err(of_runtime)?;
        Ok(found.map(|image| artifact(name, image)))
    }

    async fn remove(&self, name: &ArtifactName) -> Result<(), EngineError> {
        self.captures.remove(name.as_str()).await.map_err(of_runtime)
    }

    async fn discard(&self, build: ImageBuildId, attempt: u32) -> Result<(), EngineError> {
        self.attempts.lock().remove(&(build, attempt));
        self.remove_sandboxes(build, attempt).await?;
        self.remove_stages(build, attempt).await
    }
}

fn artifact(name: &ArtifactName, image: LocalImage) -> Artifact {
    let label = |name| image.config.labels.get(name);
    let build = label(MADE_BY_BUILD).and_then(|id| id.parse().ok());
    let attempt = label(MADE_BY_ATTEMPT).and_then(|attempt| attempt.parse().ok());
    Artifact {
        name: name.clone(),
        made_by: build.zip(attempt),
        reference: image.reference,
        digest: Some(image.digest),
        size_bytes: image.size_bytes,
    }
}

impl SandboxEngine {
    /// Checks everything out on this machine, and reads the recipe there.
    async fn clone_sources(&self, job: &Job) -> Result<(), EngineError> {
        let details: ours::Details = serde_json::from_value(job.plan.recipe.details.clone())
            .map_err(|error| EngineError::Rejected(format!("the build's plan is unreadable: {error}")))?;
        let scratch = tempfile::Builder::new().prefix("build-").tempdir_in(&self.settings.scratch);
        let scratch = scratch.map_err(of_disk("make a folder for the checkout"))?;
        let control =
            Control { deadline: Instant::now() + GIT_PATIENCE, cancel: &job.cancelled, progress: &|_| {} };
        let mut folders = Vec::new();
        for (number, checkout) in job.plan.checkouts.iter().enumerate() {
            let line = format!("checking out {} at {}\n", checkout.url, checkout.commit);
            job.log.write(StepName::Clone, line.as_bytes()).await;
            let url = RepositoryUrl::parse(&checkout.url);
            let url = url.map_err(|error| EngineError::Rejected(error.to_string()))?;
            let credential = ours::credential(&job.confidential, &checkout.url);
            let remote = Remote { url: &url, credential: credential.as_ref() };
            let full_name = details.full_names.get(number).and_then(Option::as_deref);
            let failed = |error: GitError| {
                let tail = error.tail.clone();
                (of_git(&error), tail)
            };
            let place = folder(scratch.path(), number);
            let done = async {
                let resolved = self.git.resolve_pinned(remote, &checkout.commit, full_name, control).await?;
                let mirror = self.git.mirror(remote, &resolved, control).await?;
                let wanted = Checkout {
                    remote,
                    resolved: &resolved,
                    mirror: Some(&mirror),
                    folder: &place,
                    depth: details.depth,
                    submodules: details.submodules,
                    lfs: details.lfs,
                };
                self.git.checkout(&wanted, control).await
            };
            if let Err((error, tail)) = done.await.map_err(failed) {
                job.log.write(StepName::Clone, tail.as_bytes()).await;
                return Err(error);
            }
            folders.push(place);
        }
        let recipe = self.read_recipe(job, &details, &folders).await?;
        let more = AtomicUsize::new(STAGES);
        let attempt = Attempt { folders, recipe, workshop: None, from_parent: false, more, scratch };
        let attempt = Arc::new(tokio::sync::Mutex::new(attempt));
        self.attempts.lock().insert((job.build, job.attempt), attempt);
        Ok(())
    }

    async fn read_recipe(
        &self,
        job: &Job,
        details: &ours::Details,
        folders: &[PathBuf],
    ) -> Result<Recipe, EngineError> {
        let (request, primary) = (details.recipe.clone(), folders[0].clone());
        let workspace = job.plan.checkouts[0].path.clone();
        let read = tokio::task::spawn_blocking(move || {
            let tree = Tree::open(&primary)?;
            detect(&tree, &request, &workspace)
        });
        let read = read.await.map_err(|error| EngineError::Rejected(error.to_string()))?;
        read.map_err(|error| EngineError::Rejected(error.to_string()))
    }

    /// The sandbox of a recipe without a Dockerfile, with the sources in it.
    pub(super) async fn workshop(&self, job: &Job, attempt: &mut Attempt) -> Result<Workshop, EngineError> {
        if let Some(workshop) = &attempt.workshop {
            return Ok(workshop.clone());
        }
        let image = match &attempt.recipe.base {
            Base::Default => self.settings.base_image.clone(),
            Base::Image(image) => image.clone(),
            Base::Dockerfile { .. } => {
                return Err(EngineError::Rejected("the Dockerfile was not built".into()));
            }
        };
        if let Some(workshop) = self.start_from_parent(job, attempt).await? {
            return Ok(workshop);
        }
        let number = usize::from(job.parent.is_some());
        let workshop = self.open(job, number, &image).await?;
        attempt.workshop = Some(workshop.clone());
        self.put_sources(job, attempt, &workshop).await?;
        Ok(workshop)
    }

    /// Puts every checkout at its path.
    pub(super) async fn put_sources(
        &self,
        job: &Job,
        attempt: &Attempt,
        workshop: &Workshop,
    ) -> Result<(), EngineError> {
        let places: Vec<(PathBuf, PathBuf)> = job
            .plan
            .checkouts
            .iter()
            .zip(&attempt.folders)
            .map(|(checkout, folder)| (folder.clone(), PathBuf::from(&checkout.path)))
            .collect();
        // Whoever works there owns the files.
        let recipe = &attempt.recipe;
        let user = recipe.remote_user.as_ref().or(recipe.container_user.as_ref());
        let user = user.unwrap_or(&workshop.config.user);
        let ids = self.ids(job, workshop, user).await?.unwrap_or((0, 0));
        let scratch = attempt.scratch.path().to_owned();
        let incremental = job.plan.incremental;
        let packed = tokio::task::spawn_blocking(move || {
            let mut archive = Archive::begin(&scratch)?;
            let dress = Dress { ids: Some(ids), mode: None };
            for (folder, path) in places {
                archive.add(&folder, &path, dress, &|_| true)?;
                if incremental && folder.join(".git").is_dir() {
                    // By it the next build knows what its commit took away.
                    archive.text(&path.join(SOURCES), &names(&folder)?, dress)?;
                }
            }
            archive.finish()
        });
        let packed = packed.await.map_err(|error| EngineError::transient(error.to_string()))?;
        self.unpack(job, workshop, packed.map_err(of_disk("pack the sources"))?).await
    }
}

/// The environment of an image with more, later names winning.
pub(super) fn with_environment(config: &mut RunConfig, more: &BTreeMap<String, String>) {
    for (name, value) in more {
        match config.env.iter_mut().find(|(known, _)| known == name) {
            Some(known) => known.1.clone_from(value),
            None => config.env.push((name.clone(), value.clone())),
        }
    }
}
