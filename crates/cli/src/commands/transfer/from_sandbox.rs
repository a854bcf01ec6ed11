//! From a sandbox to this machine.
//!
//! What a sandbox says is not to be trusted. Invariant: nothing is written outside of the destination, whatever names
//! and links the sandbox reports and whatever links an earlier copy has left behind.

use std::{
    fs, io,
    io::Write,
    os::unix::fs::{PermissionsExt, symlink},
    path::{Component, Path, PathBuf},
};

use anyhow::{Context, Result, bail};

use super::{Skipped, base_name, joined};
use crate::{
    agent::{Agent, Download, Entry},
    output::{OutputClosed, shortened},
};

/// Prints one file.
pub async fn to_stdout(agent: &Agent, source: &str) -> Result<Skipped> {
    if let Some(entry) = agent.info(source).await?
        && entry.kind == "directory"
    {
        bail!("{source} is a directory; standard output takes one file");
    }
    let mut download = agent.download(source).await?;
    let mut out = io::stdout().lock();
    while let Some(chunk) = download.next().await? {
        match out.write_all(&chunk) {
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => return Err(OutputClosed.into()),
            other => other.context("cannot write to standard output")?,
        }
    }
    match out.flush() {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Err(OutputClosed.into()),
        other => Ok(other.map(|()| Skipped::default())?),
    }
}

/// Copies a file or directory.
pub async fn copy(agent: &Agent, source: &str, dest: &Path) -> Result<Skipped> {
    let Some(mut entry) = agent.info(source).await? else { bail!("there is no {source} in the sandbox") };
    if entry.kind == "symlink" {
        // Named by the user, so the link means what it points to. Only a directory answers to a trailing dot.
        entry = match agent.info(&joined(source, ".")).await {
            Ok(Some(inner)) if inner.kind == "directory" => inner,
            _ => Entry { kind: "file".to_owned(), ..entry },
        };
    }
    let contents_only = source.ends_with("/.");
    let into = dest.is_dir() && !contents_only;
    let target = if into { dest.join(safe_name(source)?) } else { dest.to_owned() };
    let mut skipped = Skipped::default();
    if entry.kind == "directory" {
        tree(agent, source, &target, entry.permissions(), &mut skipped).await?;
        return Ok(skipped);
    }
    if !into && dest.as_os_str().as_encoded_bytes().ends_with(b"/") {
        bail!("there is no directory {}", dest.display());
    }
    let permissions = permissions_of_file(&entry);
    receive(agent.download(source).await?, &target, permissions)
        .await
        .with_context(|| format!("cannot write {}", target.display()))?;
    Ok(skipped)
}

/// A symbolic link's own bits say nothing about the file behind it.
fn permissions_of_file(entry: &Entry) -> u32 {
    match entry.permissions() {
        0 | 0o777 => 0o644,
        bits => bits,
    }
}

fn safe_name(source: &str) -> Result<&str> {
    base_name(source)
        .with_context(|| format!("{source} has no name of its own; name a destination that does not exist"))
}

async fn tree(agent: &Agent, source: &str, target: &Path, bits: u32, skipped: &mut Skipped) -> Result<()> {
    let entries = agent.tree(source).await?;
    let root = clean(source);
    make_root(target, bits)?;
    let mut links = Vec::new();
    let mut closed = Vec::new();
    for entry in entries {
        let Some(relative) = relative_to(&root, &entry.path) else {
            skipped.add(shortened(&entry.path, 200), "the sandbox reports it outside of the directory");
            continue;
        };
        let local = target.join(&relative);
        let result = match safe_parent(target, &relative) {
            Err(error) => Err(error),
            Ok(()) => match entry.kind.as_str() {
                "directory" => make_directory(&local, entry.permissions(), &mut closed),
                "symlink" => {
                    links.push((entry.path.clone(), local, relative));
                    continue;
                }
                "file" => one_file(agent, &entry, &local).await,
                _ => Err(anyhow::anyhow!("it is a special file")),
            },
        };
        if let Err(error) = result {
            if error.is::<crate::client::ClientError>() {
                return Err(error);
            }
            skipped.add(entry.path, format!("{error:#}"));
        }
    }
    // Last, so that nothing in this copy can be written through one of them.
    for (remote, local, relative) in links {
        let result = match safe_parent(target, &relative) {
            Ok(()) => make_link(agent, &remote, &local).await,
            Err(error) => Err(error),
        };
        if let Err(error) = result {
            skipped.add(remote, format!("{error:#}"));
        }
    }
    for (path, bits) in closed.into_iter().rev() {
        fs::set_permissions(&path, fs::Permissions::from_mode(bits))?;
    }
    fs::set_permissions(target, fs::Permissions::from_mode(bits))?;
    Ok(())
}

async fn one_file(agent: &Agent, entry: &Entry, local: &Path) -> Result<()> {
    if fs::symlink_metadata(local).is_ok_and(|found| !found.is_file() && !found.is_symlink()) {
        bail!("{} is in the way", local.display());
    }
    receive(agent.download(&entry.path).await?, local, entry.permissions()).await
}

fn make_root(target: &Path, bits: u32) -> Result<()> {
    match fs::create_dir(target) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists && target.is_dir() => Ok(()),
        other => other.with_context(|| format!("cannot create {}", target.display())),
    }?;
    fs::set_permissions(target, fs::Permissions::from_mode(bits | 0o700))?;
    Ok(())
}

/// Creates a directory that we can write to; its own bits follow when everything is in it.
fn make_directory(local: &Path, bits: u32, closed: &mut Vec<(PathBuf, u32)>) -> Result<()> {
    match fs::create_dir(local) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            if !fs::symlink_metadata(local)?.is_dir() {
                bail!("{} is in the way", local.display());
            }
        }
        other => other?,
    }
    fs::set_permissions(local, fs::Permissions::from_mode(bits | 0o700))?;
    closed.push((local.to_owned(), bits));
    Ok(())
}

async fn make_link(agent: &Agent, remote: &str, local: &Path) -> Result<()> {
    let Some(text) = agent.output_of(&["readlink", "-n", "--", remote]).await? else {
        bail!("the sandbox cannot read symbolic links (it needs `readlink`)");
    };
    let link = text.strip_suffix('\n').unwrap_or(&text);
    match fs::symlink_metadata(local) {
        Ok(found) if found.is_dir() => bail!("{} is in the way", local.display()),
        Ok(_) => fs::remove_file(local)?,
        Err(_) => {}
    }
    Ok(symlink(link, local)?)
}

/// Writes a download to its place in one step, so that a cut copy leaves nothing half-written. Something that exists
/// and is no regular file, such as a pipe or a device, is written to.
async fn receive(mut download: Download, local: &Path, permissions: u32) -> Result<()> {
    if fs::metadata(local).is_ok_and(|found| !found.is_file()) {
        let mut file = fs::OpenOptions::new().write(true).open(local)?;
        while let Some(chunk) = download.next().await? {
            file.write_all(&chunk)?;
        }
        return Ok(());
    }
    let directory = match local.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    let mut file = tempfile::Builder::new().prefix(".sandglass-").tempfile_in(directory)?;
    while let Some(chunk) = download.next().await? {
        file.write_all(&chunk)?;
    }
    file.as_file().set_permissions(fs::Permissions::from_mode(permissions))?;
    file.persist(local).map_err(|error| error.error)?;
    Ok(())
}

/// A path as the agent reports it: absolute, without `.` and doubled slashes.
fn clean(path: &str) -> PathBuf {
    let mut result = PathBuf::from("/");
    for part in Path::new(path).components() {
        match part {
            Component::Normal(name) => result.push(name),
            Component::ParentDir => {
                result.pop();
            }
            _ => {}
        }
    }
    result
}

/// The path below `root`, if it is one and consists of plain names only.
fn relative_to(root: &Path, path: &str) -> Option<PathBuf> {
    let relative = Path::new(path).strip_prefix(root).ok()?;
    let plain = relative.components().all(|part| matches!(part, Component::Normal(_)));
    (plain && !relative.as_os_str().is_empty()).then(|| relative.to_owned())
}

/// Refuses a place that is reached through a symbolic link below `root`.
fn safe_parent(root: &Path, relative: &Path) -> Result<()> {
    let mut path = root.to_owned();
    for part in relative.parent().into_iter().flat_map(Path::components) {
        path.push(part);
        if fs::symlink_metadata(&path).is_ok_and(|found| found.is_symlink()) {
            bail!("{} is a symbolic link that leads elsewhere", path.display());
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reported_paths_must_stay_below_the_root() {
        let root = clean("/srv//data/./x/..");
        assert_eq!(root, Path::new("/srv/data"));
        assert_eq!(relative_to(&root, "/srv/data/a/b"), Some(PathBuf::from("a/b")));
        for bad in ["/srv/data", "/srv/data/../x", "/etc/passwd", "a/b", "/srv/database/x"] {
            assert_eq!(relative_to(&root, bad), None, "{bad}");
        }
        assert_eq!(relative_to(&clean("/"), "/etc/x"), Some(PathBuf::from("etc/x")));
    }

    #[test]
    fn links_left_behind_are_not_followed() {
        let dir = tempfile::tempdir().unwrap();
        symlink("/etc", dir.path().join("out")).unwrap();
        assert!(safe_parent(dir.path(), Path::new("out/passwd")).is_err());
        assert!(safe_parent(dir.path(), Path::new("out")).is_ok());
        assert!(safe_parent(dir.path(), Path::new("new/deep/x")).is_ok());
    }
}
