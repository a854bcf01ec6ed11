//! Which recipe holds: that of the request, or the first that the repository has.

use std::collections::BTreeMap;

use super::lifecycle::{Command, Step, Written};
use super::manifest::{self, DockerfileChoice, DockerfileDetails, Manifest};
use super::tree::{join, parent};
use super::{Base, Origin, Recipe, RecipeError, RecipeKind, RecipeRequest, Tree, devcontainer};
use crate::dockerfile::{CopySource, Dockerfile, Instruction};

const SETUP_HOOKS: &[&str] = &[".sandbox/setup.sh", ".openinspect/setup.sh"];
const START_HOOKS: &[&str] = &[".sandbox/start.sh", ".openinspect/start.sh"];

/// Files that pin what a setup installs. When one changes, the image is another.
const LOCK_FILES: &[&str] = &[
    "Cargo.lock",
    "Gemfile.lock",
    "bun.lock",
    "bun.lockb",
    "composer.lock",
    "deno.lock",
    "flake.lock",
    "go.sum",
    "mix.lock",
    "npm-shrinkwrap.json",
    "package-lock.json",
    "pdm.lock",
    "Pipfile.lock",
    "pnpm-lock.yaml",
    "poetry.lock",
    "requirements.txt",
    "uv.lock",
    "yarn.lock",
];

/// Files of the context that a Dockerfile copies by name, beyond which no more are digested.
const COPIED_LIMIT: usize = 64;

/// Reads the recipe that holds; blocks on the disk. `workspace` is where the repository will be in the container.
///
/// # Errors
/// The recipe that holds cannot be read, or asks for something that there is not. A later source is never taken instead.
pub fn detect(tree: &Tree, request: &RecipeRequest, workspace: &str) -> Result<Recipe, RecipeError> {
    match request {
        RecipeRequest::Auto => auto(tree, workspace),
        RecipeRequest::Dockerfile { path, context, target, args } => {
            let path = path.clone().unwrap_or_else(|| "Dockerfile".into());
            let details = DockerfileDetails {
                path,
                context: context.clone(),
                target: target.clone(),
                args: args.clone(),
            };
            let mut recipe = dockerfile(tree, Origin::Request, "", details)?;
            add_hooks(tree, &mut recipe)?;
            Ok(recipe)
        }
        RecipeRequest::Devcontainer { path } => {
            let path = match path {
                Some(path) => join("", path, "")?,
                None => devcontainer::find(tree)?
                    .ok_or_else(|| RecipeError::invalid("", "the repository has no devcontainer.json"))?
                    .to_owned(),
            };
            let recipe = read_devcontainer(tree, &path, workspace)?;
            Ok(Recipe { origin: Origin::Request, ..recipe })
        }
        RecipeRequest::Hooks { image, setup, start } => {
            hooks_of_request(tree, image.as_deref(), setup.as_deref(), start.as_deref())
        }
        RecipeRequest::None { image } => {
            Ok(Recipe::new(RecipeKind::None, Origin::Request, base(image.as_deref())))
        }
    }
}

fn auto(tree: &Tree, workspace: &str) -> Result<Recipe, RecipeError> {
    if let Some(manifest) = manifest::read(tree)? {
        return from_manifest(tree, manifest, workspace);
    }
    if let Some(path) = devcontainer::find(tree)? {
        return read_devcontainer(tree, path, workspace);
    }
    if tree.is_file("Dockerfile")? {
        let details = DockerfileDetails {
            path: "Dockerfile".into(),
            context: None,
            target: None,
            args: BTreeMap::new(),
        };
        let mut recipe = dockerfile(tree, Origin::File("Dockerfile".into()), "Dockerfile", details)?;
        add_hooks(tree, &mut recipe)?;
        return Ok(recipe);
    }
    let mut recipe = Recipe::new(RecipeKind::None, Origin::Nothing, Base::Default);
    add_hooks(tree, &mut recipe)?;
    let first = recipe.setup.iter().chain(&recipe.start).next().map(|step| step.name.clone());
    if let Some(hook) = first {
        recipe.kind = RecipeKind::Hooks;
        recipe.origin = Origin::File(hook);
        add_lock_files(tree, &mut recipe)?;
    }
    Ok(recipe)
}

fn base(image: Option<&str>) -> Base {
    image.map_or(Base::Default, |image| Base::Image(image.to_owned()))
}

fn read_devcontainer(tree: &Tree, path: &str, workspace: &str) -> Result<Recipe, RecipeError> {
    let mut recipe = devcontainer::read(tree, path, workspace)?;
    if let Base::Dockerfile { path: file, context, target, .. } = recipe.base.clone() {
        read_dockerfile(tree, &mut recipe, path, &file, &context, target.as_deref())?;
    }
    add_lock_files(tree, &mut recipe)?;
    for hook in SETUP_HOOKS.iter().chain(START_HOOKS) {
        // A devcontainer has its own commands; both would do the same work twice.
        if tree.is_file(hook)? {
            recipe.passed_over.push((*hook).to_owned());
        }
    }
    Ok(recipe)
}

fn dockerfile(
    tree: &Tree,
    origin: Origin,
    named_by: &str,
    details: DockerfileDetails,
) -> Result<Recipe, RecipeError> {
    let path = join("", &details.path, named_by)?;
    let context = match &details.context {
        Some(context) => join("", context, named_by)?,
        None => parent(&path).to_owned(),
    };
    let target = details.target.clone();
    let base = Base::Dockerfile {
        path: path.clone(),
        context: context.clone(),
        target: details.target,
        args: details.args,
    };
    let mut recipe = Recipe::new(RecipeKind::Dockerfile, origin, base);
    read_dockerfile(tree, &mut recipe, named_by, &path, &context, target.as_deref())?;
    Ok(recipe)
}

/// Reads the Dockerfile, so that a wrong one is refused before a build, and notes the files that it copies by name.
fn read_dockerfile(
    tree: &Tree,
    recipe: &mut Recipe,
    named_by: &str,
    path: &str,
    context: &str,
    target: Option<&str>,
) -> Result<(), RecipeError> {
    let text = tree.read_named(path, named_by)?;
    let file = Dockerfile::parse(&text).map_err(|error| RecipeError::invalid(path, error.to_string()))?;
    if file.target(target).is_none() {
        return Err(RecipeError::invalid(
            path,
            format!("there is no stage {:?}", target.unwrap_or_default()),
        ));
    }
    recipe.read_file(tree, path)?;
    for ignore in [format!("{path}.dockerignore"), join(context, ".dockerignore", path)?] {
        recipe.read_file(tree, &ignore)?;
    }
    let instructions =
        file.stages.iter().flat_map(|stage| &stage.instructions).map(|located| &located.instruction);
    let copies = instructions.filter_map(|instruction| match instruction {
        Instruction::Copy(copy) if copy.from.is_none() => Some(copy),
        Instruction::Add(copy, _) => Some(copy),
        _ => None,
    });
    let sources = copies.flat_map(|copy| &copy.sources).filter_map(|source| match source {
        CopySource::Path(path) if !path.contains(['*', '?', '[', '$', ':', '\\']) => Some(path),
        _ => None,
    });
    for source in sources.take(COPIED_LIMIT) {
        // In a Dockerfile a leading slash means the context, and nothing leads above it.
        let relative = source.trim_start_matches('/');
        if let Ok(copied) = join(context, relative, path)
            && !copied.is_empty()
        {
            // The build copies it, or says why not; here it only tells one image from another.
            let digest = tree.digest(&copied).unwrap_or_else(|_| Some("unread".into()));
            recipe.files.extend(digest.map(|digest| (copied, digest)));
        }
    }
    Ok(())
}

fn add_hooks(tree: &Tree, recipe: &mut Recipe) -> Result<(), RecipeError> {
    if let Some(path) = first_file(tree, SETUP_HOOKS)? {
        recipe.read_file(tree, path)?;
        recipe.setup.push(script(path));
    }
    if let Some(path) = first_file(tree, START_HOOKS)? {
        recipe.start.push(script(path));
    }
    Ok(())
}

fn first_file<'a>(tree: &Tree, paths: &[&'a str]) -> Result<Option<&'a str>, RecipeError> {
    for path in paths {
        if tree.is_file(path)? {
            return Ok(Some(path));
        }
    }
    Ok(None)
}

fn script(path: &str) -> Step {
    Step { name: path.to_owned(), command: Command::Script(path.to_owned()) }
}

fn add_lock_files(tree: &Tree, recipe: &mut Recipe) -> Result<(), RecipeError> {
    LOCK_FILES.iter().try_for_each(|path| recipe.read_file(tree, path))
}

fn hooks_of_request(
    tree: &Tree,
    image: Option<&str>,
    setup: Option<&str>,
    start: Option<&str>,
) -> Result<Recipe, RecipeError> {
    let mut recipe = Recipe::new(RecipeKind::Hooks, Origin::Request, base(image));
    if setup.is_none() && start.is_none() {
        add_hooks(tree, &mut recipe)?;
        if recipe.setup.is_empty() && recipe.start.is_empty() {
            return Err(RecipeError::invalid(
                "",
                format!("the repository has neither {} nor {}", SETUP_HOOKS[0], START_HOOKS[0]),
            ));
        }
    }
    for (path, steps) in [(setup, &mut recipe.setup), (start, &mut recipe.start)] {
        let Some(path) = path else { continue };
        let path = join("", path, "")?;
        if !tree.is_file(&path)? {
            return Err(RecipeError::invalid("", format!("the hook {path} is not in the repository")));
        }
        steps.push(script(&path));
    }
    if let Some(Step { command: Command::Script(path), .. }) = recipe.setup.first().cloned() {
        recipe.read_file(tree, &path)?;
    }
    add_lock_files(tree, &mut recipe)?;
    Ok(recipe)
}

fn from_manifest(tree: &Tree, manifest: Manifest, workspace: &str) -> Result<Recipe, RecipeError> {
    let origin = Origin::File(manifest::PATH.to_owned());
    let Manifest {
        image,
        dockerfile: file,
        devcontainer: container,
        setup,
        start,
        env,
        user,
        ports,
        lock_files,
        allow_tokens,
        version: _,
    } = manifest;
    let mut recipe = match (file, container) {
        (Some(choice), _) => {
            let details = match choice {
                DockerfileChoice::Path(path) => {
                    DockerfileDetails { path, context: None, target: None, args: BTreeMap::new() }
                }
                DockerfileChoice::Details(details) => details,
            };
            dockerfile(tree, origin, manifest::PATH, details)?
        }
        (None, Some(path)) => {
            let path = join("", &path, manifest::PATH)?;
            if !tree.is_file(&path)? {
                return Err(RecipeError::invalid(
                    manifest::PATH,
                    format!("the file {path} that it names is not in the repository"),
                ));
            }
            Recipe { origin, ..read_devcontainer(tree, &path, workspace)? }
        }
        (None, None) => Recipe::new(RecipeKind::Hooks, origin, base(image.as_deref())),
    };
    recipe.read_file(tree, manifest::PATH)?;
    let mut asked = false;
    for (name, written, steps) in [("setup", setup, &mut recipe.setup), ("start", start, &mut recipe.start)] {
        asked |= written.is_some();
        steps.extend(step(name, written)?);
    }
    if !asked && recipe.kind != RecipeKind::Devcontainer {
        add_hooks(tree, &mut recipe)?;
    }
    recipe.container_env.extend(env);
    recipe.remote_user = user.or(recipe.remote_user);
    recipe.ports.extend(ports);
    recipe.allow_tokens.extend(allow_tokens);
    add_lock_files(tree, &mut recipe)?;
    for path in lock_files {
        let path = join("", &path, manifest::PATH)?;
        // A lock file that is not there yet is a state of its own.
        let digest = tree.digest(&path)?.unwrap_or_else(|| "absent".into());
        recipe.files.insert(path, digest);
    }
    Ok(recipe)
}

fn step(name: &str, written: Option<Written>) -> Result<Option<Step>, RecipeError> {
    let Some(written) = written else { return Ok(None) };
    let command = written
        .into_command()
        .map_err(|message| RecipeError::invalid(manifest::PATH, format!("{name}: {message}")))?;
    Ok(command.map(|command| Step { name: name.to_owned(), command }))
}
