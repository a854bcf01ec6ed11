//! Cache keys: what an image is made from, as one digest.
//!
//! Two builds with the same recipe key differ at most in the commits they contain; with the same key they are the same build.
//!
//! Invariant: the bytes that are digested never change for the same inputs. A change of the format is a change of [`FORMAT`], and
//! the golden vectors in the tests say so.

use std::collections::BTreeMap;
use std::fmt;
use std::io::{self, Read};

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

/// Goes into every key.
pub const FORMAT: u32 = 1;

/// A SHA-256 in lower-case hexadecimal digits.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Key(String);

impl Key {
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The first 12 digits, for names of things.
    pub fn short(&self) -> &str {
        self.0.get(..12).unwrap_or(&self.0)
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Everything that decides what an image holds, except the commits.
#[derive(Debug, Clone)]
pub struct RecipeInputs<'a> {
    /// Normalised address and path of each repository, in the order of the request.
    pub repositories: &'a [(String, String)],
    /// `dockerfile`, `devcontainer`, `hooks` or `none`.
    pub recipe_type: &'a str,
    /// What the recipe asks for beyond its files: target stage, commands of the request.
    pub parameters: &'a Value,
    /// Digests of the files that the recipe reads, by a name that tells repositories apart.
    pub files: &'a BTreeMap<String, String>,
    /// Of the base image, by content.
    pub base_digest: &'a str,
    pub build_args: &'a BTreeMap<String, String>,
    /// Versions of build secrets, never values.
    pub secret_versions: &'a BTreeMap<String, String>,
    /// `linux/amd64`.
    pub platform: &'a str,
    pub agent_generation: u32,
}

impl RecipeInputs<'_> {
    pub fn recipe_key(&self) -> Key {
        let repositories: Vec<Value> =
            self.repositories.iter().map(|(url, path)| json!({ "path": path, "url": url })).collect();
        digest(&json!({
            "agentGeneration": self.agent_generation,
            "baseDigest": self.base_digest,
            "buildArgs": self.build_args,
            "files": self.files,
            "format": FORMAT,
            "parameters": self.parameters,
            "platform": self.platform,
            "recipeType": self.recipe_type,
            "repositories": repositories,
            "secretVersions": self.secret_versions,
        }))
    }
}

/// The key of one build: a recipe and the commit at each path.
pub fn build_key(recipe: &Key, commits: &BTreeMap<String, String>) -> Key {
    digest(&json!({ "commits": commits, "format": FORMAT, "recipeKey": recipe.as_str() }))
}

/// SHA-256 of bytes, as in `files` of [`RecipeInputs`].
pub fn content_digest(bytes: &[u8]) -> String {
    hexadecimal(&Sha256::digest(bytes))
}

/// The same of what a reader gives.
pub(crate) fn stream_digest(mut input: impl Read) -> io::Result<String> {
    let mut digest = Sha256::new();
    let mut buffer = vec![0; 64 * 1024];
    loop {
        match input.read(&mut buffer) {
            Ok(0) => return Ok(hexadecimal(&digest.finalize())),
            Ok(read) => digest.update(&buffer[..read]),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}

fn digest(value: &Value) -> Key {
    let mut text = String::new();
    write_canonical(value, &mut text);
    Key(content_digest(text.as_bytes()))
}

fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// JSON with one spelling: no blanks, members sorted by the bytes of their names, texts escaped as little as JSON allows. The order of
/// members must not depend on how the JSON library is built elsewhere in the program.
fn write_canonical(value: &Value, out: &mut String) {
    match value {
        Value::Array(items) => {
            out.push('[');
            for (index, item) in items.iter().enumerate() {
                if index > 0 {
                    out.push(',');
                }
                write_canonical(item, out);
            }
            out.push(']');
        }
        Value::Object(members) => {
            let sorted: BTreeMap<&String, &Value> = members.iter().collect();
            out.push('{');
            for (index, (name, member)) in sorted.into_iter().enumerate() {
                if index > 0 {
                    out.push(',');
                }
                out.push_str(&Value::String(name.clone()).to_string());
                out.push(':');
                write_canonical(member, out);
            }
            out.push('}');
        }
        scalar => out.push_str(&scalar.to_string()),
    }
}
