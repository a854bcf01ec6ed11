//! `devcontainer.json`: image or Dockerfile, features that are scripts, commands of the life cycle, environment, user, ports.

use std::collections::BTreeMap;

use jsonc_parser::{ParseOptions, parse_to_serde_value};
use serde_json::{Map, Value};

use super::lifecycle::{Step, Written};
use super::tree::{join, parent};
use super::{Base, Origin, Recipe, RecipeError, RecipeKind, Tree, feature};

/// Where the file may be, in this order.
pub(super) const PATHS: &[&str] = &[".devcontainer/devcontainer.json", ".devcontainer.json"];

/// Properties that are read.
const READ: &[&str] = &[
    "image",
    "build",
    "dockerFile",
    "context",
    "features",
    "overrideFeatureInstallOrder",
    "onCreateCommand",
    "updateContentCommand",
    "postCreateCommand",
    "postStartCommand",
    "forwardPorts",
    "containerEnv",
    "remoteEnv",
    "remoteUser",
    "containerUser",
    "workspaceFolder",
];

/// Properties that tell an editor something and change nothing in the container.
const EDITORS_ALONE: &[&str] = &[
    "name",
    "$schema",
    "customizations",
    "portsAttributes",
    "otherPortsAttributes",
    "shutdownAction",
    "waitFor",
    "userEnvProbe",
    "updateRemoteUserUID",
    "overrideCommand",
    "settings",
    "extensions",
    "secrets",
    "init",
];

pub(super) fn find(tree: &Tree) -> Result<Option<&'static str>, RecipeError> {
    for path in PATHS {
        if tree.is_file(path)? {
            return Ok(Some(path));
        }
    }
    Ok(None)
}

/// Reads the file at `path`. `workspace` is where the repository will be in the container.
pub(super) fn read(tree: &Tree, path: &str, workspace: &str) -> Result<Recipe, RecipeError> {
    let text = tree.read_named(path, path)?;
    let mut properties = parse_object(path, &text)?;
    let workspace = workspace_folder(path, &properties, workspace)?;
    for (name, value) in &mut properties {
        // What runs later may speak of the container's environment; that is filled in there.
        substitute(path, name, value, &workspace)?;
    }
    let reader = Reader { tree, path, folder: parent(path), properties };
    reader.refuse_the_rest()?;
    reader.recipe()
}

struct Reader<'a> {
    tree: &'a Tree,
    path: &'a str,
    folder: &'a str,
    properties: Map<String, Value>,
}

impl Reader<'_> {
    fn invalid(&self, message: impl Into<String>) -> RecipeError {
        RecipeError::invalid(self.path, message)
    }

    fn refuse_the_rest(&self) -> Result<(), RecipeError> {
        for (name, value) in &self.properties {
            let known = READ.contains(&name.as_str()) || EDITORS_ALONE.contains(&name.as_str());
            // Asking for nothing can be granted whatever it is.
            let asks_for_nothing = match value {
                Value::Null | Value::Bool(false) => true,
                Value::Array(items) => items.is_empty(),
                Value::Object(members) => members.is_empty(),
                _ => false,
            };
            if !known && !asks_for_nothing {
                return Err(RecipeError::unsupported(self.path, &format!("the property {name:?}")));
            }
        }
        Ok(())
    }

    fn recipe(&self) -> Result<Recipe, RecipeError> {
        let mut recipe =
            Recipe::new(RecipeKind::Devcontainer, Origin::File(self.path.to_owned()), self.base()?);
        recipe.read_file(self.tree, self.path)?;
        if let Some(features) = self.properties.get("features") {
            let features =
                features.as_object().ok_or_else(|| self.invalid("features: expected an object"))?;
            feature::read(self.tree, &mut recipe, self.path, self.folder, features)?;
            self.order_features(&mut recipe)?;
        }
        for name in ["onCreateCommand", "updateContentCommand", "postCreateCommand"] {
            recipe.setup.extend(self.step(name)?);
        }
        recipe.start.extend(self.step("postStartCommand")?);
        recipe.container_env = texts(self.path, "containerEnv", self.properties.get("containerEnv"))?;
        recipe.remote_env = self.remote_env()?;
        recipe.container_user = self.text("containerUser")?;
        recipe.remote_user = self.text("remoteUser")?;
        recipe.ports = self.ports()?;
        let passed_over = self.properties.keys().filter(|name| EDITORS_ALONE.contains(&name.as_str()));
        recipe.passed_over = passed_over.cloned().collect();
        Ok(recipe)
    }

    fn base(&self) -> Result<Base, RecipeError> {
        let build = match self.properties.get("build") {
            None => Map::new(),
            Some(Value::Object(build)) => build.clone(),
            Some(_) => return Err(self.invalid("build: expected an object")),
        };
        if let Some(name) =
            build.keys().find(|name| !["dockerfile", "context", "args", "target"].contains(&name.as_str()))
        {
            return Err(RecipeError::unsupported(self.path, &format!("the property \"build.{name}\"")));
        }
        let text = |value: Option<&Value>, name: &str| match value {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text.clone())),
            Some(_) => Err(self.invalid(format!("{name}: expected a text"))),
        };
        let dockerfile = match text(build.get("dockerfile"), "build.dockerfile")? {
            Some(path) => Some(path),
            // The older spelling.
            None => self.text("dockerFile")?,
        };
        let image = self.text("image")?;
        match (image, dockerfile) {
            (Some(_), Some(_)) => Err(self.invalid("image and build.dockerfile are both given")),
            (None, None) => Err(self.invalid("neither image nor build.dockerfile is given")),
            (Some(image), None) if image.trim().is_empty() => Err(self.invalid("image: the name is empty")),
            (Some(image), None) => Ok(Base::Image(image)),
            (None, Some(dockerfile)) => {
                let context = match text(build.get("context"), "build.context")? {
                    Some(context) => Some(context),
                    None => self.text("context")?,
                };
                Ok(Base::Dockerfile {
                    path: join(self.folder, &dockerfile, self.path)?,
                    context: join(self.folder, context.as_deref().unwrap_or("."), self.path)?,
                    target: text(build.get("target"), "build.target")?,
                    args: texts(self.path, "build.args", build.get("args"))?,
                })
            }
        }
    }

    /// `overrideFeatureInstallOrder` puts the named ones first.
    fn order_features(&self, recipe: &mut Recipe) -> Result<(), RecipeError> {
        let Some(order) = self.properties.get("overrideFeatureInstallOrder") else { return Ok(()) };
        let order: Vec<&str> = order
            .as_array()
            .map(|names| names.iter().filter_map(Value::as_str).collect())
            .ok_or_else(|| self.invalid("overrideFeatureInstallOrder: expected an array of texts"))?;
        if let Some(unknown) =
            order.iter().find(|name| !recipe.features.iter().any(|feature| feature.id == **name))
        {
            return Err(
                self.invalid(format!("overrideFeatureInstallOrder: {unknown:?} is not among the features"))
            );
        }
        recipe
            .features
            .sort_by_key(|feature| order.iter().position(|name| *name == feature.id).unwrap_or(order.len()));
        Ok(())
    }

    fn step(&self, name: &str) -> Result<Option<Step>, RecipeError> {
        let Some(value) = self.properties.get(name).filter(|value| !value.is_null()) else { return Ok(None) };
        let written: Written = serde_json::from_value(value.clone()).map_err(|_| {
            self.invalid(format!("{name}: expected a text, an array of texts, or an object of these"))
        })?;
        let command = written.into_command().map_err(|message| self.invalid(format!("{name}: {message}")))?;
        Ok(command.map(|command| Step { name: name.to_owned(), command }))
    }

    fn remote_env(&self) -> Result<BTreeMap<String, Option<String>>, RecipeError> {
        let Some(value) = self.properties.get("remoteEnv") else { return Ok(BTreeMap::new()) };
        serde_json::from_value(value.clone())
            .map_err(|_| self.invalid("remoteEnv: expected an object of texts and nulls"))
    }

    fn ports(&self) -> Result<Vec<u16>, RecipeError> {
        let Some(value) = self.properties.get("forwardPorts") else { return Ok(Vec::new()) };
        let items = value.as_array().ok_or_else(|| self.invalid("forwardPorts: expected an array"))?;
        items
            .iter()
            .map(|item| match item {
                Value::Number(number) => number
                    .as_u64()
                    .and_then(|number| u16::try_from(number).ok())
                    .filter(|port| *port > 0)
                    .ok_or_else(|| self.invalid(format!("forwardPorts: {number} is not a port"))),
                // A port of another container, which only a composition of several has.
                Value::String(text) => match text
                    .strip_prefix("localhost:")
                    .and_then(|port| port.parse().ok())
                {
                    Some(port) if port > 0 => Ok(port),
                    _ => Err(RecipeError::unsupported(self.path, &format!("the forwarded port {text:?}"))),
                },
                _ => Err(self.invalid("forwardPorts: expected numbers")),
            })
            .collect()
    }

    fn text(&self, name: &str) -> Result<Option<String>, RecipeError> {
        match self.properties.get(name) {
            None | Some(Value::Null) => Ok(None),
            Some(Value::String(text)) => Ok(Some(text.clone())),
            Some(_) => Err(self.invalid(format!("{name}: expected a text"))),
        }
    }
}

/// The repository is where the request puts it; a file that wants it elsewhere would find nothing there.
fn workspace_folder(
    path: &str,
    properties: &Map<String, Value>,
    workspace: &str,
) -> Result<String, RecipeError> {
    let Some(wanted) = properties.get("workspaceFolder").and_then(Value::as_str) else {
        return Ok(workspace.to_owned());
    };
    let name = workspace.rsplit('/').next().unwrap_or_default();
    let plain = wanted.replace("${localWorkspaceFolderBasename}", name);
    let usual = format!("/workspaces/{name}");
    if plain.trim_end_matches('/') == workspace || plain.trim_end_matches('/') == usual {
        return Ok(workspace.to_owned());
    }
    Err(RecipeError::unsupported(
        path,
        &format!("a workspaceFolder other than {workspace}, where the request puts the repository,"),
    ))
}

/// JSON with comments and trailing commas, whose top is an object.
pub(super) fn parse_object(path: &str, text: &str) -> Result<Map<String, Value>, RecipeError> {
    // The format is JSON with comments; the parser's other leniencies are not part of it.
    let options = ParseOptions {
        allow_comments: true,
        allow_loose_object_property_names: false,
        allow_trailing_commas: true,
        allow_missing_commas: false,
        allow_single_quoted_strings: false,
        allow_hexadecimal_numbers: false,
        allow_unary_plus_numbers: false,
        allow_bare_decimal_point_numbers: false,
        allow_non_finite_numbers: false,
        allow_extended_string_escapes: false,
    };
    let value: Option<Value> = parse_to_serde_value(text, &options)
        .map_err(|error| RecipeError::invalid(path, error.to_string()))?;
    match value {
        Some(Value::Object(properties)) => Ok(properties),
        _ => Err(RecipeError::invalid(path, "expected an object")),
    }
}

pub(super) fn texts(
    path: &str,
    name: &str,
    value: Option<&Value>,
) -> Result<BTreeMap<String, String>, RecipeError> {
    let Some(value) = value else { return Ok(BTreeMap::new()) };
    serde_json::from_value(value.clone())
        .map_err(|_| RecipeError::invalid(path, format!("{name}: expected an object of texts")))
}

/// Fills in `${…}` in every text of a value.
fn substitute(path: &str, property: &str, value: &mut Value, workspace: &str) -> Result<(), RecipeError> {
    match value {
        Value::String(text) => *text = substituted(path, property, text, workspace)?,
        Value::Array(items) => {
            items.iter_mut().try_for_each(|item| substitute(path, property, item, workspace))?
        }
        Value::Object(members) => {
            members.values_mut().try_for_each(|item| substitute(path, property, item, workspace))?
        }
        _ => {}
    }
    Ok(())
}

fn substituted(path: &str, property: &str, text: &str, workspace: &str) -> Result<String, RecipeError> {
    let mut out = String::new();
    let mut rest = text;
    while let Some(start) = rest.find("${") {
        out.push_str(&rest[..start]);
        let Some(end) = rest[start..].find('}') else { break };
        let whole = &rest[start..=start + end];
        let (kind, argument) =
            whole[2..whole.len() - 1].split_once(':').unwrap_or((&whole[2..whole.len() - 1], ""));
        match kind {
            "localWorkspaceFolder" | "containerWorkspaceFolder" => out.push_str(workspace),
            "localWorkspaceFolderBasename" | "containerWorkspaceFolderBasename" => {
                out.push_str(workspace.rsplit('/').next().unwrap_or_default());
            }
            "containerEnv" if property == "remoteEnv" => out.push_str(whole),
            "containerEnv" => {
                return Err(RecipeError::unsupported(
                    path,
                    &format!("{whole} outside remoteEnv, in {property:?},"),
                ));
            }
            // There is no machine of the user's own; what the file says for the case that the variable is not set holds.
            "localEnv" => match argument.split_once(':') {
                Some((_, default)) => out.push_str(default),
                None => {
                    return Err(RecipeError::unsupported(
                        path,
                        &format!("{whole} without a default, in {property:?},"),
                    ));
                }
            },
            "devcontainerId" => {
                return Err(RecipeError::unsupported(path, &format!("{whole} in {property:?}")));
            }
            // A variable of the shell that runs the command.
            _ => out.push_str(whole),
        }
        rest = &rest[start + end + 1..];
    }
    out.push_str(rest);
    Ok(out)
}
