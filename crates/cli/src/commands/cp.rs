//! `sandglass cp`: files and directories between here and a sandbox.
//!
//! Owns the meaning of the two arguments; the copying itself is in `transfer`.

use anyhow::{Context as _, Result, bail};
use clap::Args;

use super::transfer::{Skipped, from_sandbox, to_sandbox};
use crate::{Context, agent::Agent, output::note};

/// Copy files and directories between here and a sandbox
#[derive(Args, Debug)]
#[command(after_help = "\
A path in a sandbox is written ID:PATH; PATH without a leading slash is relative to /. `-` as the other side is one
file's content on standard input or output. A directory is copied into an existing directory, or becomes DEST when there
is none; DIR/. copies what is in it. Permission bits travel; owners do not. Symbolic links are copied as links.")]
pub struct Cp {
    /// PATH, ID:PATH, or -
    source: String,
    /// PATH, ID:PATH, or -
    dest: String,
}

/// One side of a copy.
#[derive(Debug, PartialEq, Eq)]
enum Side<'a> {
    Here(&'a str),
    Stream,
    There { sandbox: &'a str, path: &'a str },
}

fn side(text: &str) -> Side<'_> {
    if text == "-" {
        return Side::Stream;
    }
    match text.split_once(':') {
        // A slash or a dot in front marks a local path, whatever follows.
        Some((sandbox, path))
            if !sandbox.is_empty() && !sandbox.contains('/') && !sandbox.starts_with('.') =>
        {
            Side::There { sandbox, path }
        }
        _ => Side::Here(text),
    }
}

impl Cp {
    pub async fn run(self, context: &Context) -> Result<u8> {
        let (download, sandbox) = match (side(&self.source), side(&self.dest)) {
            (Side::There { .. }, Side::There { .. }) => {
                bail!("copying from sandbox to sandbox is not possible")
            }
            (Side::There { sandbox, .. }, _) => (true, sandbox),
            (_, Side::There { sandbox, .. }) => (false, sandbox),
            _ => bail!("neither side is in a sandbox; write one of them as ID:PATH"),
        };
        let id = context.client.resolve(sandbox).await?;
        let agent = Agent::connect(&context.client, &id).await?;
        let skipped = match (download, side(&self.source), side(&self.dest)) {
            (true, Side::There { path, .. }, Side::Here(local)) => {
                from_sandbox::copy(&agent, &absolute(path)?, local.as_ref()).await?
            }
            (true, Side::There { path, .. }, _) => from_sandbox::to_stdout(&agent, &absolute(path)?).await?,
            (_, Side::Here(local), Side::There { path, .. }) => {
                to_sandbox::copy(&agent, local.as_ref(), &absolute(path)?)
                    .await
                    .with_context(|| format!("cannot copy {local}"))?
            }
            (_, _, Side::There { path, .. }) => to_sandbox::from_stdin(&agent, &absolute(path)?).await?,
            _ => bail!("neither side is in a sandbox"),
        };
        conclude(&skipped)
    }
}

fn absolute(path: &str) -> Result<String> {
    if path.is_empty() {
        bail!("the path in the sandbox is missing after the colon");
    }
    if path.contains('\0') {
        bail!("a path cannot contain a zero byte");
    }
    Ok(if path.starts_with('/') { path.to_owned() } else { format!("/{path}") })
}

fn conclude(skipped: &Skipped) -> Result<u8> {
    for (path, reason) in &skipped.0 {
        note(&format!("warning: {path} was not copied: {reason}"));
    }
    if !skipped.0.is_empty() {
        bail!("{} of the entries could not be copied", skipped.0.len());
    }
    Ok(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sides_are_told_apart() {
        assert_eq!(side("abc:/x:y"), Side::There { sandbox: "abc", path: "/x:y" });
        assert_eq!(side("./a:b"), Side::Here("./a:b"));
        assert_eq!(side("/a:b"), Side::Here("/a:b"));
        assert_eq!(side("plain"), Side::Here("plain"));
        assert_eq!(side("-"), Side::Stream);
        assert_eq!(side(":x"), Side::Here(":x"));
    }
}
