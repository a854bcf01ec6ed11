//! From a repository to its commits, its recipe and its keys.

use std::{
    collections::{BTreeMap, HashMap},
    path::PathBuf,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use sandglass_builds::{
    build::{Checkout, Plan, Recipe as PlannedRecipe, RecipeKind as PlannedKind},
    key::{BuildKey, RecipeKey},
    ports::{ResolveError, ResolveErrorKind},
    submission::{Confidential, Resolved, Secret},
};
use sandglass_repository::{
    Member, Reference,
    dockerfile::{Dockerfile, Feature, Variables},
    git::{self, Control, Git, Remote},
    key::{self, RecipeInputs, build_key},
    recipe::{Base, Recipe, RecipeKind, RecipeRequest, Tree, detect},
};
use sandglass_sandbox::{
    agent,
    ports::{Captures, Runtime, RuntimeErrorKind, runtime::RuntimeError},
    spec::{Entrypoint, Secrets, Spec},
};
use tokio::{sync::Semaphore, time::Instant};
use tokio_util::sync::CancellationToken;

use super::{Located, LocatedMember, Order, git as ours};

/// Recipes that are remembered; beyond it all are forgotten, which only costs reading them again.
const REMEMBERED: usize = 512;
/// Checkouts at a time.
const CHECKOUTS: usize = 4;

/// See the module documentation.
pub(super) struct Locator {
    pub(super) git: Git,
    pub(super) runtime: Arc<dyn Runtime>,
    pub(super) captures: Arc<dyn Captures>,
    pub(super) base_image: String,
    pub(super) platform: String,
    pub(super) timeout: Duration,
    /// For checkouts that are only read.
    pub(super) scratch: PathBuf,
    /// Goes into the versions of secrets, so that nobody finds a value out by trying.
    pub(super) salt: Vec<u8>,
    pub(super) recipes: Recipes,
}

/// Recipes that were read, by everything they depend on.
pub(super) struct Recipes {
    known: Mutex<HashMap<String, Arc<ReadRecipe>>>,
    checkouts: Semaphore,
}

impl Default for Recipes {
    fn default() -> Self {
        Self { known: Mutex::default(), checkouts: Semaphore::new(CHECKOUTS) }
    }
}

/// A recipe and the images it starts from.
struct ReadRecipe {
    recipe: Arc<Recipe>,
    bases: Vec<String>,
}

fn unreadable(message: impl std::fmt::Display) -> ResolveError {
    ResolveError { kind: ResolveErrorKind::InvalidRecipe, message: message.to_string() }
}

fn unreachable(message: impl std::fmt::Display) -> ResolveError {
    ResolveError { kind: ResolveErrorKind::Unreachable, message: message.to_string() }
}

impl Locator {
    pub(super) async fn locate(
        &self,
        order: &Order,
        cancel: &CancellationToken,
    ) -> Result<Located, ResolveError> {
        let control = Control { deadline: Instant::now() + self.timeout, cancel, progress: &|_| {} };
        let mut resolved = Vec::new();
        for member in &order.source.members {
            let found = self.git.resolve(remote(member), &member.reference, control).await;
            resolved.push(found.map_err(|error| ours::located_in_vain(&error))?);
        }
        let primary = &order.source.members[0];
        let read = self.recipe(order, primary, &resolved[0], control).await?;
        let base = match &read.recipe.base {
            Base::Default => Some(self.base_image.clone()),
            Base::Image(image) => Some(image.clone()),
            Base::Dockerfile { .. } => None,
        };
        let mut digests = Vec::new();
        for image in &read.bases {
            digests.push(self.digest(image).await?);
        }
        let members = located(&order.source.members, &resolved);
        let resolved = self.plan(order, &read.recipe, (&members, base.clone()), &digests.join("\n"))?;
        Ok(Located {
            members,
            recipe: read.recipe.clone(),
            base_image: base,
            resolved,
            namespace: order.namespace.clone(),
        })
    }

    /// The recipe at a commit, read once.
    async fn recipe(
        &self,
        order: &Order,
        primary: &Member,
        at: &git::Resolved,
        control: Control<'_>,
    ) -> Result<Arc<ReadRecipe>, ResolveError> {
        let request = serde_json::to_string(&order.recipe).unwrap_or_default();
        let name = format!("{}\n{}\n{request}\n{}", primary.url, at.commit(), primary.path);
        if let Some(known) = self.recipes.remembered(&name) {
            return Ok(known);
        }
        let _turn = self.recipes.checkouts.acquire().await.map_err(unreachable)?;
        // Another request may have read it while this one waited.
        if let Some(known) = self.recipes.remembered(&name) {
            return Ok(known);
        }
        let folder = tempfile::Builder::new().prefix("recipe-").tempdir_in(&self.scratch);
        let folder = folder.map_err(|e| unreachable(format!("no room for a checkout: {e}")))?;
        // Without a recipe there is nothing to be read.
        if !matches!(order.recipe, RecipeRequest::None { .. }) {
            let in_vain = |error| ours::located_in_vain(&error);
            let mirror = self.git.mirror(remote(primary), at, control).await.map_err(in_vain)?;
            let checkout = git::Checkout {
                remote: remote(primary),
                resolved: at,
                mirror: Some(&mirror),
                folder: folder.path(),
                depth: Some(1),
                submodules: false,
                lfs: false,
            };
            self.git.checkout(&checkout, control).await.map_err(in_vain)?;
        }
        let (request, workspace) = (order.recipe.clone(), primary.path.to_string());
        let default = self.base_image.clone();
        let read = tokio::task::spawn_blocking(move || {
            let tree = Tree::open(folder.path()).map_err(unreadable)?;
            let recipe = detect(&tree, &request, &workspace).map_err(unreadable)?;
            let bases = bases(folder.path(), &recipe, &default)?;
            Ok(Arc::new(ReadRecipe { recipe: Arc::new(recipe), bases }))
        });
        let read = read.await.map_err(unreachable)??;
        self.recipes.remember(name, &read);
        Ok(read)
    }

    /// The digest of an image, which is fetched if it is not here.
    async fn digest(&self, image: &str) -> Result<String, ResolveError> {
        let failed = |error: RuntimeError| match error.kind {
            RuntimeErrorKind::Invalid => unreadable(format!("the base image {image}: {error}")),
            _ => unreachable(format!("the base image {image}: {error}")),
        };
        if let Some(found) = self.captures.find(image).await.map_err(failed)? {
            return Ok(found.digest);
        }
        let spec = Spec::new(image, Entrypoint::AgentOnly);
        self.runtime.prepare(&spec, &Secrets::default(), &|_| {}).await.map_err(failed)?;
        let found = self.captures.find(image).await.map_err(failed)?;
        found.map(|found| found.digest).ok_or_else(|| unreachable(format!("there is no base image {image}")))
    }

    fn plan(
        &self,
        order: &Order,
        recipe: &Recipe,
        (members, base): (&[LocatedMember], Option<String>),
        base_digest: &str,
    ) -> Result<Resolved, ResolveError> {
        let source = &order.source;
        let repositories: Vec<(String, String)> =
            members.iter().map(|member| (member.url.clone(), member.path.clone())).collect();
        let commits: BTreeMap<String, String> =
            members.iter().map(|member| (member.path.clone(), member.commit.clone())).collect();
        let build_args = match &recipe.base {
            Base::Dockerfile { args, .. } => args.clone(),
            Base::Default | Base::Image(_) => BTreeMap::new(),
        };
        let platform = order.platform.clone().unwrap_or_else(|| self.platform.clone());
        let parameters = serde_json::json!({
            "recipe": recipe.parameters(),
            "depth": source.depth,
            "submodules": source.submodules,
            "lfs": source.lfs,
        });
        let recipe_key = RecipeInputs {
            repositories: &repositories,
            recipe_type: recipe.kind.as_str(),
            parameters: &parameters,
            files: &recipe.files,
            base_digest,
            build_args: &build_args,
            secret_versions: &self.secret_versions(&order.secrets),
            platform: &platform,
            agent_generation: agent::GENERATION,
        }
        .recipe_key();
        let key = build_key(&recipe_key, &commits);
        let details = ours::Details {
            recipe: order.recipe.clone(),
            full_names: members.iter().map(|member| member.full_name.clone()).collect(),
            depth: source.depth,
            submodules: source.submodules,
            lfs: source.lfs,
            base,
        };
        let confidential =
            Confidential { secrets: order.secrets.clone(), credentials: ours::credentials(source) };
        let checkouts = members.iter().map(|member| Checkout {
            url: member.url.clone(),
            reference: member.reference.clone(),
            commit: member.commit.clone(),
            path: member.path.clone(),
        });
        let plan = Plan {
            repository_key: source.members[0].url.repository_key(),
            checkouts: checkouts.collect(),
            recipe: PlannedRecipe {
                kind: planned(recipe.kind),
                details: serde_json::to_value(details).map_err(unreadable)?,
            },
            platform,
            agent_generation: agent::GENERATION,
            confidential: !confidential.is_empty(),
        };
        Ok(Resolved {
            plan,
            key: key.as_str().parse::<BuildKey>().map_err(unreadable)?,
            recipe_key: recipe_key.as_str().parse::<RecipeKey>().map_err(unreadable)?,
            confidential,
        })
    }

    fn secret_versions(&self, secrets: &BTreeMap<String, Secret>) -> BTreeMap<String, String> {
        let version = |(name, secret): (&String, &Secret)| {
            let mut text = self.salt.clone();
            for part in [name.as_str(), secret.expose()] {
                text.extend((part.len() as u64).to_be_bytes());
                text.extend(part.as_bytes());
            }
            (name.clone(), key::content_digest(&text))
        };
        secrets.iter().map(version).collect()
    }
}

impl Recipes {
    fn remembered(&self, name: &str) -> Option<Arc<ReadRecipe>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner).get(name).cloned()
    }

    fn remember(&self, name: String, read: &Arc<ReadRecipe>) {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if known.len() >= REMEMBERED {
            known.clear();
        }
        known.insert(name, read.clone());
    }
}

pub(super) fn remote(member: &Member) -> Remote<'_> {
    Remote { url: &member.url, credential: member.credential.as_ref() }
}

fn located(members: &[Member], resolved: &[git::Resolved]) -> Vec<LocatedMember> {
    let of = |(member, at): (&Member, &git::Resolved)| LocatedMember {
        url: member.url.to_string(),
        path: member.path.to_string(),
        reference: (member.reference != Reference::Head).then(|| member.reference.to_string()),
        commit: at.commit().to_owned(),
        full_name: at.full_name().map(str::to_owned),
    };
    members.iter().zip(resolved).map(of).collect()
}

fn planned(kind: RecipeKind) -> PlannedKind {
    match kind {
        RecipeKind::Dockerfile => PlannedKind::Dockerfile,
        RecipeKind::Devcontainer => PlannedKind::Devcontainer,
        RecipeKind::Hooks => PlannedKind::Hooks,
        RecipeKind::None => PlannedKind::None,
    }
}

/// Every image that the recipe starts from, each once. What a Dockerfile asks for and cannot have is refused here, before anything runs.
fn bases(folder: &std::path::Path, recipe: &Recipe, default: &str) -> Result<Vec<String>, ResolveError> {
    let (path, args) = match &recipe.base {
        Base::Default => return Ok(vec![default.to_owned()]),
        Base::Image(image) => return Ok(vec![image.clone()]),
        Base::Dockerfile { path, args, .. } => (path, args),
    };
    // Read by name a moment ago, so it is no link and not too large.
    let text = std::fs::read_to_string(folder.join(path)).map_err(unreadable)?;
    let file = Dockerfile::parse(&text).map_err(|error| unreadable(format!("{path}: {error}")))?;
    if let Some(used) = file.unsupported(SUPPORTED).first() {
        return Err(unreadable(format!("{path}: line {}: {} is not supported", used.line, used.what)));
    }
    let undeclared = Variables::undeclared(&file, args);
    if !undeclared.is_empty() {
        return Err(unreadable(format!("{path}: no ARG declares {}", undeclared.join(", "))));
    }
    let globals = Variables::global(&file, args, &BTreeMap::new())
        .map_err(|error| unreadable(format!("{path}: {error}")))?;
    let mut images = Vec::new();
    for (index, stage) in file.stages.iter().enumerate() {
        let (image, _) = globals.from(stage).map_err(|error| unreadable(format!("{path}: {error}")))?;
        if file.earlier_stage(&image, index).is_none() && !images.contains(&image) {
            images.push(image);
        }
    }
    Ok(images)
}

/// What the engine of this server does of Dockerfiles beyond the plain instructions. Everything else is refused by name.
const SUPPORTED: &[Feature] = &[
    Feature::CopyLink,
    Feature::InlineFile,
    Feature::RunHeredoc,
    Feature::Healthcheck,
    Feature::StopSignal,
    Feature::Volume,
    Feature::MountSecret,
];
