//! From this machine into a sandbox.

use std::{
    fs, io,
    os::unix::fs::{FileTypeExt, MetadataExt},
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, bail};
use futures_util::stream;
use reqwest::{Body, multipart::Part};
use tokio_util::io::ReaderStream;

use super::{Skipped, joined};
use crate::agent::{Agent, Target};

/// What is read from a file at a time.
const PIECE: usize = 128 << 10;

/// Copies a file or directory.
pub async fn copy(agent: &Agent, source: &Path, dest: &str) -> Result<Skipped> {
    // Named by the user, so a symbolic link means what it points to.
    let metadata = fs::metadata(source)?;
    let contents_only = source.as_os_str().as_encoded_bytes().ends_with(b"/.") || source == Path::new(".");
    let existing = destination(agent, dest).await?;
    let target = match existing {
        Existing::Directory if !contents_only => joined(dest, &local_name(source)?),
        Existing::Other if metadata.is_dir() => bail!("{dest} in the sandbox is not a directory"),
        Existing::Nothing if !metadata.is_dir() && dest.ends_with('/') => joined(dest, &local_name(source)?),
        _ => dest.trim_end_matches('/').to_owned(),
    };
    let target = if target.is_empty() { "/".to_owned() } else { target };
    let mut skipped = Skipped::default();
    if metadata.is_dir() {
        tree(agent, source, &target, &mut skipped).await?;
    } else {
        file(agent, source, &target).await?;
    }
    Ok(skipped)
}

/// Copies standard input into one file.
pub async fn from_stdin(agent: &Agent, dest: &str) -> Result<Skipped> {
    if dest.ends_with('/') || matches!(destination(agent, dest).await?, Existing::Directory) {
        bail!("{dest} is a directory; standard input needs the name of a file");
    }
    let input = tokio::fs::File::from_std(fs::File::from(rustix::io::dup(io::stdin())?));
    let part = Part::stream(Body::wrap_stream(ReaderStream::with_capacity(input, PIECE)));
    let permissions = agent.info(dest).await?.map_or(0o644, |entry| entry.permissions());
    agent.upload(&Target { path: dest.to_owned(), permissions }, part).await?;
    Ok(Skipped::default())
}

enum Existing {
    Directory,
    Other,
    Nothing,
}

async fn destination(agent: &Agent, dest: &str) -> Result<Existing> {
    let Some(entry) = agent.info(dest).await? else { return Ok(Existing::Nothing) };
    Ok(match entry.kind.as_str() {
        "directory" => Existing::Directory,
        // A trailing dot makes the agent look through the link.
        "symlink" => match agent.info(&joined(dest, ".")).await {
            Ok(Some(inner)) if inner.kind == "directory" => Existing::Directory,
            _ => Existing::Other,
        },
        _ => Existing::Other,
    })
}

fn local_name(source: &Path) -> Result<String> {
    let resolved = if source.file_name().is_some() { source.to_owned() } else { fs::canonicalize(source)? };
    match resolved.file_name().and_then(|name| name.to_str()) {
        Some(name) => Ok(name.to_owned()),
        None => bail!("{} has no name of its own that could be used in the sandbox", source.display()),
    }
}

/// Copies a directory; unreadable and special entries are skipped and reported.
async fn tree(agent: &Agent, source: &Path, target: &str, skipped: &mut Skipped) -> Result<()> {
    let mut open: Vec<(PathBuf, String)> = vec![(source.to_owned(), target.to_owned())];
    while let Some((directory, path)) = open.pop() {
        let permissions = fs::metadata(&directory)?.mode() & 0o777;
        agent.make_directory(&Target { path: path.clone(), permissions }).await?;
        let entries = match fs::read_dir(&directory) {
            Ok(entries) => entries,
            Err(error) => {
                skipped.add(directory.display().to_string(), error.to_string());
                continue;
            }
        };
        for entry in entries {
            let entry = entry?;
            let (local, name) = (entry.path(), entry.file_name());
            let Some(name) = name.to_str() else {
                skipped.add(local.display().to_string(), "its name is not UTF-8");
                continue;
            };
            let remote = joined(&path, name);
            let kind = entry.file_type()?;
            let result = if kind.is_dir() {
                open.push((local.clone(), remote));
                Ok(())
            } else if kind.is_symlink() {
                link(agent, &local, &remote).await
            } else if kind.is_file() {
                file(agent, &local, &remote).await
            } else {
                Err(anyhow::anyhow!(if kind.is_socket() { "it is a socket" } else { "it is a special file" }))
            };
            if let Err(error) = result {
                // Without a connection every further entry would fail as well.
                if error.is::<crate::client::ClientError>() {
                    return Err(error);
                }
                skipped.add(local.display().to_string(), error.to_string());
            }
        }
    }
    Ok(())
}

async fn file(agent: &Agent, local: &Path, remote: &str) -> Result<()> {
    let file = fs::File::open(local)?;
    let metadata = file.metadata()?;
    if metadata.is_dir() {
        bail!("it became a directory");
    }
    let permissions = metadata.mode() & 0o777;
    let length = metadata.is_file().then_some(metadata.len()).filter(|length| *length > 0);
    let reader = tokio::fs::File::from_std(file);
    let part = match length {
        // The announced length must hold even when the file grows meanwhile; when it shrinks, the upload fails.
        Some(length) => {
            let limited = tokio::io::AsyncReadExt::take(reader, length);
            Part::stream_with_length(Body::wrap_stream(ReaderStream::with_capacity(limited, PIECE)), length)
        }
        None if metadata.is_file() && metadata.blocks() == 0 && !is_kernel_file(local) => {
            Part::stream_with_length(Body::wrap_stream(stream::empty::<io::Result<bytes::Bytes>>()), 0)
        }
        None => Part::stream(Body::wrap_stream(ReaderStream::with_capacity(reader, PIECE))),
    };
    agent
        .upload(&Target { path: remote.to_owned(), permissions }, part)
        .await
        .context("the sandbox refused it")
}

/// Files of these claim to be empty and are not.
fn is_kernel_file(path: &Path) -> bool {
    path.starts_with("/proc") || path.starts_with("/sys")
}

async fn link(agent: &Agent, local: &Path, remote: &str) -> Result<()> {
    let target = fs::read_link(local)?;
    let Some(target) = target.to_str() else { bail!("its target is not UTF-8") };
    match agent.output_of(&["ln", "-sfn", "--", target, remote]).await? {
        Some(_) => Ok(()),
        None => bail!("the sandbox cannot make symbolic links (it needs `ln`)"),
    }
}
