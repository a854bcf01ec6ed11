//! Recipes: what a repository says about the machine it wants to be worked on in.
//!
//! Owns the order in which sources of a recipe are looked at, and the reading of each. Does not build anything.
//!
//! Invariant: what a recipe asks for and cannot have is an error that names it. What has no meaning outside an editor is passed over,
//! and the recipe says that it was.

mod detect;
mod devcontainer;
mod feature;
mod lifecycle;
mod manifest;
mod tree;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use serde::{Deserialize, Serialize};
use serde_json::Value;

pub use detect::detect;
pub use feature::FeatureScript;
pub use lifecycle::{Command, Step};
pub use tree::Tree;

use crate::redact::TokenKind;

/// `imageBuild.recipe` of a request.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(tag = "type", rename_all = "lowercase", rename_all_fields = "camelCase", deny_unknown_fields)]
pub enum RecipeRequest {
    /// The first source that the repository has.
    #[default]
    Auto,
    Dockerfile {
        #[serde(default, skip_serializing_if = "Option::is_none")]
        path: Option<String>,
        /// The folder of the Dockerfile when absent.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        context: Option<String>,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        target: Option<String>,
        #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
        args: BTreeMap<String, String>,
    },
    Devcontainer {
        #[serde(default, skip_serializing_if = "Option::is_none")]
        path: Option<String>,
    },
    Hooks {
        /// The server's own base image when absent.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        image: Option<String>,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        setup: Option<String>,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        start: Option<String>,
    },
    /// The base image and the files, whatever the repository says.
    None {
        #[serde(default, skip_serializing_if = "Option::is_none")]
        image: Option<String>,
    },
}

/// How the image comes about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RecipeKind {
    Dockerfile,
    Devcontainer,
    Hooks,
    None,
}

impl RecipeKind {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Dockerfile => "dockerfile",
            Self::Devcontainer => "devcontainer",
            Self::Hooks => "hooks",
            Self::None => "none",
        }
    }
}

/// Where the recipe was found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Origin {
    Request,
    /// A file of the repository.
    File(String),
    Nothing,
}

/// What the image is based on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase", rename_all_fields = "camelCase")]
pub enum Base {
    /// The server's own base image.
    Default,
    Image(String),
    /// Paths in the repository; the context is empty for the whole of it.
    Dockerfile {
        path: String,
        context: String,
        target: Option<String>,
        args: BTreeMap<String, String>,
    },
}

/// A read recipe. Written out it holds what shapes the image, which is what goes into its key.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Recipe {
    pub kind: RecipeKind,
    #[serde(skip)]
    pub origin: Origin,
    pub base: Base,
    /// Scripts that run on the base image, in order.
    pub features: Vec<FeatureScript>,
    /// What runs once in the repository, while the image is built.
    pub setup: Vec<Step>,
    /// What runs at each boot.
    #[serde(skip)]
    pub start: Vec<Step>,
    /// The environment of the container.
    pub container_env: BTreeMap<String, String>,
    /// The environment of what is run in it later; `None` takes a variable away. `${containerEnv:NAME}` is filled in there.
    #[serde(skip)]
    pub remote_env: BTreeMap<String, Option<String>>,
    pub container_user: Option<String>,
    pub remote_user: Option<String>,
    /// Kinds of tokens that the image may hold although they look like secrets.
    #[serde(skip_serializing_if = "BTreeSet::is_empty")]
    pub allow_tokens: BTreeSet<TokenKind>,
    /// Ports that are of interest to people.
    #[serde(skip)]
    pub ports: Vec<u16>,
    /// Digests of every file that was read, by path in the repository.
    #[serde(skip)]
    pub files: BTreeMap<String, String>,
    /// What was passed over because it means something to editors alone, by name.
    #[serde(skip)]
    pub passed_over: Vec<String>,
}

impl Recipe {
    fn new(kind: RecipeKind, origin: Origin, base: Base) -> Self {
        Self {
            kind,
            origin,
            base,
            features: Vec::new(),
            setup: Vec::new(),
            start: Vec::new(),
            container_env: BTreeMap::new(),
            remote_env: BTreeMap::new(),
            container_user: None,
            remote_user: None,
            allow_tokens: BTreeSet::new(),
            ports: Vec::new(),
            files: BTreeMap::new(),
            passed_over: Vec::new(),
        }
    }

    /// What of the recipe shapes the image, for `parameters` of [`crate::key::RecipeInputs`].
    pub fn parameters(&self) -> Value {
        serde_json::to_value(self).expect("a recipe has text keys alone")
    }

    /// Notes that a file was read.
    fn read_file(&mut self, tree: &Tree, path: &str) -> Result<(), RecipeError> {
        if let Some(digest) = tree.digest(path)? {
            self.files.insert(path.to_owned(), digest);
        }
        Ok(())
    }
}

/// What is wrong with a recipe.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Problem {
    /// It cannot be read, or says something impossible.
    Invalid,
    /// It is right and asks for something that there is not.
    Unsupported,
    /// It names a file outside the repository.
    Escape,
}

/// A recipe that is refused.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RecipeError {
    pub problem: Problem,
    /// The file of the repository, empty for the request.
    pub path: String,
    pub message: String,
}

impl RecipeError {
    fn invalid(path: &str, message: impl Into<String>) -> Self {
        Self { problem: Problem::Invalid, path: path.to_owned(), message: message.into() }
    }

    fn unsupported(path: &str, what: &str) -> Self {
        Self {
            problem: Problem::Unsupported,
            path: path.to_owned(),
            message: format!("{what} is not supported"),
        }
    }

    fn escape(path: &str) -> Self {
        Self {
            problem: Problem::Escape,
            path: path.to_owned(),
            message: "the path leads out of the repository".into(),
        }
    }
}

impl fmt::Display for RecipeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.path.as_str() {
            "" => f.write_str(&self.message),
            path => write!(f, "{path}: {}", self.message),
        }
    }
}

impl std::error::Error for RecipeError {}
