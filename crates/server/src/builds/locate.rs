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
    ports::{BuildStore, ResolveError, ResolveErrorKind},
    submission::{Confidential, Resolved, Secret},
};
use sandglass_repository::{
    Member, Reference,
    dockerfile::{Dockerfile, DockerfileError, Feature, Variables},
    git::{self, Control, Git, Remote},
    key::{self, RecipeInputs, build_key},
    recipe::{Base, Recipe, RecipeKind, RecipeRequest, Tree, detect},
};
use sandglass_sandbox::{
    agent,
    ports::{Captures, Dockerfiles, Runtime, RuntimeErrorKind, runtime::RuntimeError},
    spec::{Entrypoint, Secrets, Spec},
};
use tokio::{sync::Semaphore, time::Instant};
use tokio_util::sync::CancellationToken;

use super::{Located, LocatedMember, Order, by_engine, dockerfile, git as ours, ownership};

/// Recipes that are remembered; beyond it all are forgotten, which only costs reading them again.
const REMEMBERED: usize = 512;
/// Checkouts at a time.
const CHECKOUTS: usize = 4;

/// See the module documentation.
pub(super) struct Locator {
    pub(super) git: Git,
    pub(super) runtime: Arc<dyn Runtime>,
    pub(super) captures: Arc<dyn Captures>,
    pub(super) rows: Arc<dyn BuildStore>,
    /// The runtime's own builder, where it has one.
    pub(super) dockerfiles: Option<Arc<dyn Dockerfiles>>,
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
    bases: Bases,
}

/// The images that a recipe starts from, each once.
#[derive(Default)]
struct Bases {
    images: Vec<String>,
    /// The Dockerfile that the runtime's own builder gets, and which image begins which of its stages.
    for_engine: Option<(Dockerfile, Vec<(usize, String)>)>,
}

fn unreadable(message: impl std::fmt::Display) -> ResolveError {
    ResolveError::new(ResolveErrorKind::InvalidRecipe, message.to_string())
}

fn unreachable(message: impl std::fmt::Display) -> ResolveError {
    ResolveError::new(ResolveErrorKind::Unreachable, message.to_string())
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
        for image in &read.bases.images {
            let foreign = ownership::is_foreign(
                self.rows.as_ref(),
                self.runtime.name(),
                image,
                order.namespace.as_deref(),
            );
            if foreign.await.map_err(unreachable)? {
                return Err(unreadable(format!("there is no base image {image}")));
            }
            digests.push(self.digest(image).await?);
        }
        self.check_triggers(&read.bases).await?;
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

    /// Refuses what base images have done first and nobody may, before anything runs.
    async fn check_triggers(&self, bases: &Bases) -> Result<(), ResolveError> {
        let (Some(builder), Some((file, starts))) = (&self.dockerfiles, &bases.for_engine) else {
            return Ok(());
        };
        for (stage, image) in starts {
            let triggers = builder.triggers(image).await.map_err(unreachable)?;
            if let Some(trigger) = by_engine::refused_trigger(file, *stage, &triggers) {
                return Err(unreadable(by_engine::trigger_refusal(image, trigger)));
            }
        }
        Ok(())
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
        let platform = order.platform.as_ref().unwrap_or(&self.platform);
        let name = format!("{}\n{}\n{request}\n{}\n{platform}", primary.url, at.commit(), primary.path);
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
        let known = dockerfile::platform(platform);
        let (default, engine_builds) = (self.base_image.clone(), self.dockerfiles.is_some());
        let read = tokio::task::spawn_blocking(move || {
            let tree = Tree::open(folder.path()).map_err(unreadable)?;
            let recipe = detect(&tree, &request, &workspace).map_err(unreadable)?;
            let bases = bases(folder.path(), &recipe, &default, (engine_builds, known))?;
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
            // A checkout alone is made as fast from the base.
            incremental: !matches!(recipe.base, Base::Dockerfile { .. }) && !recipe.setup.is_empty(),
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

/// Every image that the recipe starts from. What a Dockerfile asks for and cannot have is refused here, before anything runs. `known` is what
/// the builder will know by itself: a name may depend on it.
fn bases(
    folder: &std::path::Path,
    recipe: &Recipe,
    default: &str,
    (engine_builds, known): (bool, BTreeMap<String, String>),
) -> Result<Bases, ResolveError> {
    let one = |image: &str| Bases { images: vec![image.to_owned()], for_engine: None };
    let (path, context, args) = match &recipe.base {
        Base::Default => return Ok(one(default)),
        Base::Image(image) => return Ok(one(image)),
        Base::Dockerfile { path, context, args, .. } => (path, context, args),
    };
    // Read by name a moment ago, so it is no link and not too large.
    let text = std::fs::read_to_string(folder.join(path)).map_err(unreadable)?;
    let named = |error: DockerfileError| unreadable(format!("{path}: {error}"));
    let file = Dockerfile::parse(&text).map_err(named)?;
    let by_engine = engine_builds
        && by_engine::is_for_engine(&file, &text)
        && by_engine::below(&folder.join(path), &folder.join(context)).is_some();
    if !by_engine && let Some(used) = file.unsupported(SUPPORTED).first() {
        return Err(unreadable(format!("{path}: line {}: {} is not supported", used.line, used.what)));
    }
    let undeclared = Variables::undeclared(&file, args);
    if !undeclared.is_empty() {
        return Err(unreadable(format!("{path}: no ARG declares {}", undeclared.join(", "))));
    }
    let globals = match by_engine {
        true => Variables::global(&file, &by_engine::arguments(&file, args.clone(), known), &BTreeMap::new()),
        false => Variables::global(&file, args, &known),
    };
    let starts = by_engine::starts(&file, &globals.map_err(named)?).map_err(named)?;
    let mut images = Vec::new();
    for image in starts.iter().map(|(_, image)| image.clone()).chain(by_engine::copied(&file)) {
        if !images.contains(&image) {
            images.push(image);
        }
    }
    Ok(Bases { images, for_engine: by_engine.then_some((file, starts)) })
}

/// What the sandboxes of this server do of Dockerfiles beyond the plain instructions. Everything else is refused by name.
const SUPPORTED: &[Feature] = &[
    // In a sandbox no address is fetched: it is no file of the context.
    Feature::AddUncertain,
    Feature::CopyLink,
    Feature::InlineFile,
    Feature::RunHeredoc,
    Feature::Healthcheck,
    Feature::StopSignal,
    Feature::Volume,
    Feature::MountSecret,
];
