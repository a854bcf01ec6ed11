//! Mirrors: bare repositories on the server's disk that follow their remotes, so that a commit is downloaded once.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::access::{Access, Scope};
use super::failure::{FailureClass, GitError};
use super::process::Call;
use super::quota::Watched;
use super::resolve::Resolved;
use super::{Control, Git, Remote, fence};

const OPERATION: &str = "fetch";
const LOCK_POLL: Duration = Duration::from_millis(20);

/// A mirror that holds what was asked for. It is locked for reading as long as this lives.
#[derive(Debug)]
pub struct Mirror {
    path: PathBuf,
    _lock: File,
}

impl Mirror {
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Git {
    /// A mirror that has the resolved commit. The remote is asked for more only when it is not there yet.
    ///
    /// # Errors
    /// The class says why; a commit that the remote does not hand out is [`FailureClass::RefNotFound`].
    pub async fn mirror(
        &self,
        remote: Remote<'_>,
        resolved: &Resolved,
        control: Control<'_>,
    ) -> Result<Mirror, GitError> {
        self.fetch_mirror(remote, Some(resolved.commit()), control).await
    }

    pub(super) async fn fetch_mirror(
        &self,
        remote: Remote<'_>,
        commit: Option<&str>,
        control: Control<'_>,
    ) -> Result<Mirror, GitError> {
        let io = |error: io::Error| GitError::io(OPERATION, "cannot use the mirror's folder", &error);
        fs::DirBuilder::new().recursive(true).mode(0o700).create(&self.settings.mirrors).map_err(io)?;
        let slug = remote.url.slug();
        let lock_path = self.settings.mirrors.join(format!("{slug}.lock"));
        let path = self.settings.mirrors.join(format!("{slug}.git"));
        let access = Access::prepare(&self.settings, remote, Scope::Repository)?;
        let call =
            Call { watched: Some(Watched::downloads(&path)), ..Call::new(OPERATION, remote, &access, &path) };
        if let Some(commit) = commit {
            let lock = lock(&lock_path, File::try_lock_shared, control).await?;
            if path.join("HEAD").exists() && self.has_commit(&call, commit, control).await? {
                return Ok(Mirror { path, _lock: lock });
            }
        }
        let lock = lock(&lock_path, File::try_lock, control).await?;
        self.ensure_mirror(remote, &access, &path, commit, control).await?;
        if let Err(error) = self.update(&call, commit, control).await {
            // What is too large would otherwise be there the next time, and pass.
            if Watched::downloads(&path).exceeds(self.settings.repository_limit).await {
                fs::remove_dir_all(&path).map_err(io)?;
            }
            return Err(error);
        }
        // From the lock of a writer to that of a reader; nothing is ever taken out of a mirror while it is locked.
        lock.lock_shared().map_err(io)?;
        Ok(Mirror { path, _lock: lock })
    }

    /// Brings the mirror up to date, unless another call has got the commit meanwhile.
    async fn update(
        &self,
        call: &Call<'_>,
        commit: Option<&str>,
        control: Control<'_>,
    ) -> Result<(), GitError> {
        if let Some(commit) = commit
            && self.has_commit(call, commit, control).await?
        {
            return Ok(());
        }
        let url = call.remote.url.to_string();
        let all = ["fetch", "--progress", "--prune", "--no-tags", "--no-write-fetch-head", "--", &url];
        let refs = ["+refs/heads/*:refs/heads/*", "+refs/tags/*:refs/tags/*"];
        self.run(call, &[&all[..], &refs[..]].concat(), control).await?;
        if let Some(commit) = commit
            && !self.has_commit(call, commit, control).await?
        {
            // No branch leads to it any more, or it belongs to a pull request; many servers hand it out all the same. It gets a ref, or
            // the next cleaning would take it away.
            let keep = format!("+{commit}:refs/kept/{commit}");
            self.run(call, &[&all[..], &[keep.as_str()]].concat(), control).await?;
        }
        // Every fetch leaves a pack. Nobody reads meanwhile, and a mirror that stays as it is does its work.
        let mut tidy = Call::new(OPERATION, call.remote, call.access, call.folder);
        tidy.configuration = &[("gc.auto", "6700"), ("gc.autoPackLimit", "50"), ("gc.autoDetach", "false")];
        let _ = self.run(&tidy, &["gc", "--auto", "--quiet"], control).await;
        Ok(())
    }

    /// Makes the mirror if it is not there, and repairs what an earlier run left half done.
    async fn ensure_mirror(
        &self,
        remote: Remote<'_>,
        access: &Access,
        path: &Path,
        commit: Option<&str>,
        control: Control<'_>,
    ) -> Result<(), GitError> {
        let io = |error: io::Error| GitError::io(OPERATION, "cannot use the mirror's folder", &error);
        if path.join("HEAD").exists() {
            remove_leftovers(path).map_err(io)?;
            let call = Call::new(OPERATION, remote, access, path);
            if self.ask(&call, &["rev-parse", "--is-bare-repository"], control).await? {
                return Ok(());
            }
        }
        if path.exists() {
            fs::remove_dir_all(path).map_err(io)?;
        }
        // Made beside its place: a mirror that exists is a whole one.
        let fresh = path.with_extension("new");
        if fresh.exists() {
            fs::remove_dir_all(&fresh).map_err(io)?;
        }
        fs::DirBuilder::new().mode(0o700).create(&fresh).map_err(io)?;
        let call = Call::new(OPERATION, remote, access, &fresh);
        let format = object_format(commit);
        self.run(&call, &["init", "--quiet", "--bare", "--template=", format, "."], control).await?;
        // A checkout asks the mirror for one commit, whether or not a branch ends there.
        self.run(&call, &["config", "uploadpack.allowAnySHA1InWant", "true"], control).await?;
        fs::rename(&fresh, path).map_err(io)
    }

    pub(super) async fn has_commit(
        &self,
        call: &Call<'_>,
        commit: &str,
        control: Control<'_>,
    ) -> Result<bool, GitError> {
        let call = Call { watched: None, ..*call };
        self.ask(&call, &["cat-file", "-e", &format!("{commit}^{{commit}}")], control).await
    }
}

pub(super) fn object_format(commit: Option<&str>) -> &'static str {
    match commit {
        Some(commit) if commit.len() == 64 => "--object-format=sha256",
        _ => "--object-format=sha1",
    }
}

/// The address under which a checkout reads the mirror.
pub(super) fn mirror_url(mirror: &Mirror) -> String {
    fence::folder_url(mirror.path())
}

/// Takes the lock, also against other processes, within the call's time.
async fn lock(
    path: &Path,
    take: fn(&File) -> Result<(), fs::TryLockError>,
    control: Control<'_>,
) -> Result<File, GitError> {
    let io = |error: io::Error| GitError::io(OPERATION, "cannot lock the mirror", &error);
    let file = OpenOptions::new().create(true).truncate(false).write(true).open(path).map_err(io)?;
    loop {
        match take(&file) {
            Ok(()) => {
                file.set_modified(std::time::SystemTime::now()).map_err(io)?;
                return Ok(file);
            }
            Err(fs::TryLockError::WouldBlock) => {}
            Err(fs::TryLockError::Error(error)) => return Err(io(error)),
        }
        tokio::select! {
            () = tokio::time::sleep(LOCK_POLL) => {}
            () = control.cancel.cancelled() => return Err(GitError::new(FailureClass::Cancelled, OPERATION, "cancelled")),
            () = tokio::time::sleep_until(control.deadline) => {
                let message = "another call held the repository's mirror until the time was over";
                return Err(GitError::new(FailureClass::Timeout, OPERATION, message));
            }
        }
    }
}

/// Lock files and half packs of a git that was killed. Nobody else is at work here: the lock is ours.
pub(super) fn remove_leftovers(repository: &Path) -> io::Result<()> {
    remove_files(repository, false, &|name| name.ends_with(".lock"))?;
    remove_files(&repository.join("refs"), true, &|name| name.ends_with(".lock"))?;
    remove_files(&repository.join("objects/pack"), false, &|name| name.starts_with("tmp_"))
}

fn remove_files(folder: &Path, recursive: bool, unwanted: &dyn Fn(&str) -> bool) -> io::Result<()> {
    let entries = match fs::read_dir(folder) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error),
    };
    for entry in entries {
        let entry = entry?;
        let kind = entry.file_type()?;
        if kind.is_dir() && recursive {
            remove_files(&entry.path(), true, unwanted)?;
        } else if kind.is_file() && entry.file_name().to_str().is_some_and(unwanted) {
            fs::remove_file(entry.path())?;
        }
    }
    Ok(())
}
