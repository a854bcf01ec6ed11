//! Commands that a recipe has run, and the forms in which they are written.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// A command with the name under which people know it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Step {
    /// `postCreateCommand`, `setup`, `.sandbox/setup.sh`.
    pub name: String,
    pub command: Command,
}

/// What is run, in the repository's folder.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum Command {
    /// Text for `/bin/sh -c`.
    Shell(String),
    /// Program and arguments.
    Exec(Vec<String>),
    /// Several at the same time, each with its name; one that fails fails the step.
    Parallel(BTreeMap<String, Command>),
    /// A script of the repository, for bash.
    Script(String),
}

/// The three forms of a command in JSON and YAML.
#[derive(Debug, Clone, Deserialize)]
#[serde(untagged)]
pub(super) enum Written {
    Text(String),
    Words(Vec<String>),
    Named(BTreeMap<String, Written>),
}

impl Written {
    /// `Ok(None)` for a command that is empty, which switches it off.
    pub(super) fn into_command(self) -> Result<Option<Command>, &'static str> {
        Ok(match self {
            Self::Text(text) if text.trim().is_empty() => None,
            Self::Text(text) => Some(Command::Shell(text)),
            Self::Words(words) if words.is_empty() => None,
            Self::Words(words) if words[0].is_empty() => return Err("the program of the command is empty"),
            Self::Words(words) => Some(Command::Exec(words)),
            Self::Named(named) => {
                let mut commands = BTreeMap::new();
                for (name, written) in named {
                    if matches!(written, Self::Named(_)) {
                        return Err("a named command cannot hold named commands");
                    }
                    if let Some(command) = written.into_command()? {
                        commands.insert(name, command);
                    }
                }
                (!commands.is_empty()).then_some(Command::Parallel(commands))
            }
        })
    }
}
