//! What is asked of a build on the command line: its recipe, its secrets, and the credentials of its repository.

use std::path::PathBuf;

use anyhow::{Context as _, Result, bail, ensure};
use clap::Args;
use serde_json::{Map, Value, json};

use super::git::{self, Source};

/// How the image comes about; `up` and `build` share these.
#[derive(Args, Debug, Default)]
pub struct BuildOptions {
    /// Branch, tag or commit; for an address also as `ADDRESS#REF`
    #[arg(long = "ref", value_name = "REF")]
    pub reference: Option<String>,
    /// auto, dockerfile[:PATH], devcontainer[:PATH], hooks[:IMAGE], none[:IMAGE], or a recipe as a JSON object
    #[arg(long, value_name = "RECIPE", value_parser = recipe)]
    pub recipe: Option<Value>,
    /// Name of a variable of this environment that the build's steps get and nothing keeps; may be repeated
    #[arg(long, value_name = "NAME")]
    pub secret: Vec<String>,
    /// Name of a variable of this environment that holds the token of a private repository
    #[arg(long, value_name = "NAME")]
    pub token: Option<String>,
    /// User that goes with the token
    #[arg(long, value_name = "USER", requires = "token")]
    pub token_user: Option<String>,
    /// File with the private key of a repository that is fetched over ssh
    #[arg(long, value_name = "FILE", conflicts_with = "token")]
    pub deploy_key: Option<PathBuf>,
    /// Check submodules out as well
    #[arg(long)]
    pub submodules: bool,
    /// Get the files of git LFS
    #[arg(long)]
    pub lfs: bool,
    /// Take a directory by its path instead of its remote, where the server reads this machine's directories
    #[arg(long)]
    pub file: bool,
}

impl BuildOptions {
    /// What is to be fetched.
    ///
    /// # Errors
    /// See [`git::source`].
    pub fn source(&self, repository: &str) -> Result<Source> {
        git::source(repository, self.reference.as_deref(), self.file)
    }

    /// `repository` of a request. `variable` looks a name up in the environment.
    ///
    /// # Errors
    /// When a variable or a file that was named is not there.
    pub fn repository(&self, source: &Source, variable: impl Fn(&str) -> Option<String>) -> Result<Value> {
        let mut body = json!({ "url": source.url });
        if let Some(reference) = &source.reference {
            body["ref"] = json!(reference);
        }
        for (name, wanted) in [("submodules", self.submodules), ("lfs", self.lfs)] {
            if wanted {
                body[name] = json!(true);
            }
        }
        if let Some(name) = &self.token {
            let mut credential = json!({ "token": secret(name, "--token", &variable)? });
            if let Some(user) = &self.token_user {
                credential["username"] = json!(user);
            }
            body["credential"] = credential;
        } else if let Some(file) = &self.deploy_key {
            let key =
                std::fs::read_to_string(file).with_context(|| format!("cannot read {}", file.display()))?;
            body["credential"] = json!({ "privateKey": key });
        }
        Ok(body)
    }

    /// Build secrets by name; `None` when there are none.
    ///
    /// # Errors
    /// When a variable is not there.
    pub fn secrets(&self, variable: impl Fn(&str) -> Option<String>) -> Result<Option<Value>> {
        let mut secrets = Map::new();
        for name in &self.secret {
            secrets.insert(name.clone(), json!(secret(name, "--secret", &variable)?));
        }
        Ok((!secrets.is_empty()).then_some(Value::Object(secrets)))
    }
}

/// A value of the environment. Never of the command line, which other users of the machine can read.
fn secret(name: &str, flag: &str, variable: &impl Fn(&str) -> Option<String>) -> Result<String> {
    if let Some((name, _)) = name.split_once('=') {
        bail!("{flag} takes a name, and its value from the environment: {name}=… sandglass … {flag} {name}");
    }
    let value = variable(name)
        .with_context(|| format!("{flag} {name}: there is no such variable in the environment"))?;
    ensure!(!value.is_empty(), "{flag} {name}: the variable is empty");
    Ok(value)
}

/// Reads a recipe: a word, perhaps with what it is about, or JSON.
pub fn recipe(text: &str) -> Result<Value, String> {
    if text.trim_start().starts_with('{') {
        return serde_json::from_str(text).map_err(|error| format!("the recipe is not JSON: {error}"));
    }
    let (kind, detail) = match text.split_once(':') {
        Some((kind, detail)) => (kind, Some(detail).filter(|detail| !detail.is_empty())),
        None => (text, None),
    };
    let member = match kind {
        "dockerfile" | "devcontainer" => Some("path"),
        "hooks" | "none" => Some("image"),
        "auto" => None,
        _ => return Err(format!("`{kind}` is none of auto, dockerfile, devcontainer, hooks and none")),
    };
    match (member, detail) {
        (_, None) => Ok(json!({ "type": kind })),
        (Some(member), Some(detail)) => Ok(json!({ "type": kind, member: detail })),
        (None, Some(_)) => Err("the recipe auto is about nothing".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn recipes_are_words_or_objects() {
        for (text, expected) in [
            ("auto", json!({ "type": "auto" })),
            ("dockerfile", json!({ "type": "dockerfile" })),
            ("dockerfile:docker/Dockerfile", json!({ "type": "dockerfile", "path": "docker/Dockerfile" })),
            ("none:debian:12", json!({ "type": "none", "image": "debian:12" })),
            (r#"{"type":"dockerfile","target":"dev"}"#, json!({ "type": "dockerfile", "target": "dev" })),
        ] {
            assert_eq!(recipe(text).unwrap(), expected, "{text}");
        }
        for bad in ["", "docker", "auto:x", "{"] {
            assert!(recipe(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn secrets_come_from_the_environment() {
        let of = |name: &str| (name == "NPM_TOKEN").then(|| "s3cret".to_owned());
        let source = Source { url: "https://h/a".into(), reference: Some("main".into()) };
        let options = BuildOptions {
            secret: vec!["NPM_TOKEN".into()],
            token: Some("NPM_TOKEN".into()),
            token_user: Some("x-access-token".into()),
            lfs: true,
            ..BuildOptions::default()
        };
        assert_eq!(options.secrets(of).unwrap(), Some(json!({ "NPM_TOKEN": "s3cret" })));
        let expected = json!({ "url": "https://h/a", "ref": "main", "lfs": true,
                               "credential": { "token": "s3cret", "username": "x-access-token" } });
        assert_eq!(options.repository(&source, of).unwrap(), expected);
        for (name, said) in [("OTHER", "no such variable"), ("NPM_TOKEN=x", "takes a name")] {
            let options = BuildOptions { secret: vec![name.into()], ..BuildOptions::default() };
            let error = options.secrets(of).unwrap_err().to_string();
            assert!(error.contains(said) && !error.contains("=x"), "{error}");
        }
    }
}
