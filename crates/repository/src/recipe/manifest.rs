//! `.sandbox.yml`: a recipe in the project's own words.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_saphyr::budget;

use super::lifecycle::Written;
use super::{RecipeError, Tree};
use crate::redact::TokenKind;

pub(super) const PATH: &str = ".sandbox.yml";

/// The manifest as written. One of `image`, `dockerfile` and `devcontainer` at most.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(super) struct Manifest {
    /// 1, or absent.
    #[serde(default)]
    pub(super) version: Option<u32>,
    #[serde(default)]
    pub(super) image: Option<String>,
    #[serde(default)]
    pub(super) dockerfile: Option<DockerfileChoice>,
    #[serde(default)]
    pub(super) devcontainer: Option<String>,
    /// Runs once, while the image is built.
    #[serde(default)]
    pub(super) setup: Option<Written>,
    /// Runs at each boot.
    #[serde(default)]
    pub(super) start: Option<Written>,
    #[serde(default)]
    pub(super) env: BTreeMap<String, String>,
    #[serde(default)]
    pub(super) user: Option<String>,
    #[serde(default)]
    pub(super) ports: Vec<u16>,
    /// Files besides the known ones whose change asks for a new image.
    #[serde(default)]
    pub(super) lock_files: Vec<String>,
    /// Kinds of tokens that the image may hold.
    #[serde(default)]
    pub(super) allow_tokens: Vec<TokenKind>,
}

#[derive(Debug, Deserialize)]
#[serde(untagged)]
pub(super) enum DockerfileChoice {
    Path(String),
    Details(DockerfileDetails),
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(super) struct DockerfileDetails {
    pub(super) path: String,
    #[serde(default)]
    pub(super) context: Option<String>,
    #[serde(default)]
    pub(super) target: Option<String>,
    #[serde(default)]
    pub(super) args: BTreeMap<String, String>,
}

/// Reads the manifest, `None` when there is none.
pub(super) fn read(tree: &Tree) -> Result<Option<Manifest>, RecipeError> {
    let Some(text) = tree.read(PATH)? else { return Ok(None) };
    // Small, and without the tricks by which a short document becomes a large one.
    let options = serde_saphyr::options! {
        budget: budget! { max_depth: 16, max_nodes: 4096, max_aliases: 64, max_anchors: 64 },
    };
    let manifest: Manifest = serde_saphyr::from_str_with_options(&text, options)
        .map_err(|error| RecipeError::invalid(PATH, first_line(&error.to_string())))?;
    if manifest.version.is_some_and(|version| version != 1) {
        return Err(RecipeError::invalid(PATH, "the version is not 1"));
    }
    let bases = [manifest.image.is_some(), manifest.dockerfile.is_some(), manifest.devcontainer.is_some()];
    if bases.into_iter().filter(|given| *given).count() > 1 {
        return Err(RecipeError::invalid(
            PATH,
            "only one of image, dockerfile and devcontainer can be given",
        ));
    }
    if manifest.ports.contains(&0) {
        return Err(RecipeError::invalid(PATH, "ports: 0 is not a port"));
    }
    Ok(Some(manifest))
}

/// The parser's report goes on with an excerpt of the file.
fn first_line(message: &str) -> String {
    message.lines().next().unwrap_or_default().to_owned()
}
