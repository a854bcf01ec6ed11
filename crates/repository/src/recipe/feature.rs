//! Features of a devcontainer that are folders of the repository: a script and a description of its options.

use std::collections::BTreeMap;

use serde::Serialize;
use serde_json::{Map, Value};

use super::tree::join;
use super::{Recipe, RecipeError, Tree};

const FILES_LIMIT: usize = 256;
/// Of a description, what needs nothing done.
const DESCRIPTIVE: &[&str] = &[
    "id",
    "version",
    "name",
    "description",
    "documentationURL",
    "licenseURL",
    "keywords",
    "options",
    "containerEnv",
    "customizations",
    "deprecated",
    "legacyIds",
    "installsAfter",
    "$schema",
];

/// One script that runs as root on the base image, in its own folder.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct FeatureScript {
    /// As `devcontainer.json` names it.
    pub id: String,
    /// Its folder in the repository; the script is `install.sh` in it.
    pub folder: String,
    /// The options as the script finds them in its environment.
    pub options: BTreeMap<String, String>,
    /// What it adds to the container's environment.
    pub container_env: BTreeMap<String, String>,
}

/// Reads the `features` of a devcontainer file that lies in `folder`.
pub(super) fn read(
    tree: &Tree,
    recipe: &mut Recipe,
    named_by: &str,
    folder: &str,
    features: &Map<String, Value>,
) -> Result<(), RecipeError> {
    for (id, chosen) in features {
        if !id.starts_with("./") && !id.starts_with("../") {
            return Err(RecipeError::unsupported(
                named_by,
                &format!("the feature {id:?}, which is not a folder of the repository,"),
            ));
        }
        let script = read_one(tree, recipe, named_by, join(folder, id, named_by)?, id, chosen)?;
        recipe.features.push(script);
    }
    Ok(())
}

fn read_one(
    tree: &Tree,
    recipe: &mut Recipe,
    named_by: &str,
    folder: String,
    id: &str,
    chosen: &Value,
) -> Result<FeatureScript, RecipeError> {
    let description_path = format!("{folder}/devcontainer-feature.json");
    let text = tree.read_named(&description_path, named_by)?;
    let description = super::devcontainer::parse_object(&description_path, &text)?;
    if let Some(name) = description.keys().find(|name| !DESCRIPTIVE.contains(&name.as_str())) {
        return Err(RecipeError::unsupported(
            &description_path,
            &format!("the property {name:?} of a feature"),
        ));
    }
    if !tree.is_file(&format!("{folder}/install.sh"))? {
        return Err(RecipeError::invalid(named_by, format!("the feature {id:?} has no install.sh")));
    }
    for file in tree.files_below(&folder, FILES_LIMIT)? {
        recipe.read_file(tree, &file)?;
    }
    let options = options(&description_path, named_by, id, description.get("options"), chosen)?;
    let container_env =
        super::devcontainer::texts(&description_path, "containerEnv", description.get("containerEnv"))?;
    Ok(FeatureScript { id: id.to_owned(), folder, options, container_env })
}

/// The options by the names of their variables: defaults, then what was chosen.
fn options(
    description_path: &str,
    named_by: &str,
    id: &str,
    declared: Option<&Value>,
    chosen: &Value,
) -> Result<BTreeMap<String, String>, RecipeError> {
    let empty = Map::new();
    let declared = match declared {
        None => &empty,
        Some(Value::Object(declared)) => declared,
        Some(_) => return Err(RecipeError::invalid(description_path, "options: expected an object")),
    };
    let mut options = BTreeMap::new();
    for (name, option) in declared {
        let default = option.get("default").and_then(scalar);
        options.insert(variable(name), default.unwrap_or_default());
    }
    let chosen = match chosen {
        Value::Object(chosen) => chosen.clone(),
        // A text alone is the version.
        Value::String(_) => Map::from_iter([("version".to_owned(), chosen.clone())]),
        _ => {
            return Err(RecipeError::invalid(
                named_by,
                format!("features: {id:?}: expected an object or a text"),
            ));
        }
    };
    for (name, value) in &chosen {
        let Some(option) = declared.get(name) else {
            return Err(RecipeError::invalid(named_by, format!("features: {id:?} has no option {name:?}")));
        };
        let text = scalar(value).ok_or_else(|| {
            RecipeError::invalid(named_by, format!("features: {id:?}: {name:?} is not a text or switch"))
        })?;
        if let Some(Value::Array(allowed)) = option.get("enum")
            && !allowed.contains(value)
        {
            return Err(RecipeError::invalid(
                named_by,
                format!("features: {id:?}: {name:?} has none of its values"),
            ));
        }
        options.insert(variable(name), text);
    }
    Ok(options)
}

fn scalar(value: &Value) -> Option<String> {
    match value {
        Value::String(text) => Some(text.clone()),
        Value::Bool(switch) => Some(switch.to_string()),
        Value::Number(number) => Some(number.to_string()),
        _ => None,
    }
}

/// `some-option` becomes `SOME_OPTION`, as the features' specification has it.
fn variable(name: &str) -> String {
    let replaced: String = name
        .chars()
        .map(|c| if c.is_ascii_alphanumeric() || c == '_' { c.to_ascii_uppercase() } else { '_' })
        .collect();
    let rest = replaced.trim_start_matches(|c: char| c.is_ascii_digit() || c == '_');
    if rest.len() == replaced.len() { replaced } else { format!("_{rest}") }
}
