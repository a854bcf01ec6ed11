//! Putting a commit's files into a folder.

use std::fs::{self, DirBuilder, OpenOptions};
use std::io::Write;
use std::os::unix::fs::DirBuilderExt;
use std::path::Path;

use super::access::{Access, Scope};
use super::failure::{FailureClass, GitError};
use super::mirror::{Mirror, object_format, remove_leftovers};
use super::process::Call;
use super::quota::Watched;
use super::resolve::{Resolved, ResolvedKind};
use super::{Control, Git, Remote};

const OPERATION: &str = "checkout";

/// What to check out.
#[derive(Debug, Clone, Copy)]
pub struct Checkout<'a> {
    pub remote: Remote<'a>,
    pub resolved: &'a Resolved,
    /// Where the objects come from; the remote itself when absent.
    pub mirror: Option<&'a Mirror>,
    /// Made if missing. A repository that is there already is brought to the commit, its changed files overwritten; its own configuration
    /// holds then, so this has to run as the user who could write there, and not as a mightier one.
    pub folder: &'a Path,
    /// Commits of history; all of it, with every branch and tag, when absent.
    pub depth: Option<u32>,
    pub submodules: bool,
    pub lfs: bool,
}

/// A commit to check out of what its folder has.
#[derive(Debug, Clone, Copy)]
pub struct Present<'a> {
    pub remote: Remote<'a>,
    /// The complete object id.
    pub commit: &'a str,
    /// The full name of the ref that it was taken for; absent for a commit.
    pub full_name: Option<&'a str>,
    /// Absolute.
    pub folder: &'a Path,
    pub submodules: bool,
    pub lfs: bool,
}

/// What stands in the folder now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CheckedOut {
    pub commit: String,
    /// The branch that `HEAD` is on; absent when it is on the commit itself.
    pub branch: Option<String>,
    /// Submodules that were checked out, by their path in the folder.
    pub submodules: Vec<String>,
}

impl Git {
    /// Checks a commit out. What is in the folder after a failure is unfinished and may be checked out again.
    ///
    /// # Errors
    /// The class says why.
    pub async fn checkout(
        &self,
        wanted: &Checkout<'_>,
        control: Control<'_>,
    ) -> Result<CheckedOut, GitError> {
        let io = |error| GitError::io(OPERATION, "cannot use the folder", &error);
        DirBuilder::new().recursive(true).mode(0o755).create(wanted.folder).map_err(io)?;
        let watched = Watched::of_checkout(wanted.folder);
        let scope = if wanted.submodules || wanted.lfs { Scope::Host } else { Scope::Repository };
        let access = Access::prepare(&self.settings, wanted.remote, scope)?;
        let call = Call::new(OPERATION, wanted.remote, &access, wanted.folder);
        let state = self.prepare_repository(&call, wanted, control).await?;
        self.get_commit(wanted, &access, state, control).await?;
        let call = Call { watched: watched.everything(), ..call };
        let branch = self.switch(&call, wanted.resolved, state, control).await?;
        let submodules = if wanted.submodules {
            let call = Call { watched: Some(watched), ..call };
            self.update_submodules(&call, wanted.depth, control).await?
        } else {
            Vec::new()
        };
        if wanted.lfs {
            let call = Call { watched: Some(watched), ..call };
            self.get_large_files(&call, &submodules, control).await?;
        }
        Ok(CheckedOut { commit: wanted.resolved.commit().to_owned(), branch, submodules })
    }

    /// Checks a commit out as [`Git::checkout`] does, if the folder's own repository has it. The remote is then asked for nothing, unless
    /// submodules or large files are missing. `None` when the commit is not there.
    ///
    /// # Errors
    /// The class says why.
    pub async fn checkout_present(
        &self,
        present: &Present<'_>,
        control: Control<'_>,
    ) -> Result<Option<CheckedOut>, GitError> {
        let Present { remote, commit, full_name, folder, submodules, lfs } = *present;
        let resolved = Resolved::pinned(commit, full_name)?;
        if !folder.join(".git/HEAD").exists() {
            return Ok(None);
        }
        let access = Access::prepare(&self.settings, remote, Scope::Repository)?;
        if !self.has_commit(&Call::new(OPERATION, remote, &access, folder), commit, control).await? {
            return Ok(None);
        }
        let wanted =
            Checkout { remote, resolved: &resolved, mirror: None, folder, depth: None, submodules, lfs };
        self.checkout(&wanted, control).await.map(Some)
    }

    /// Brings the remote's branches in a repository up to date and touches neither its files nor its own branches.
    ///
    /// # Errors
    /// The class says why.
    pub async fn refresh(
        &self,
        remote: Remote<'_>,
        folder: &Path,
        control: Control<'_>,
    ) -> Result<(), GitError> {
        let access = Access::prepare(&self.settings, remote, Scope::Repository)?;
        let mut call = Call::new("fetch", remote, &access, folder);
        call.watched = Some(Watched::downloads(folder));
        let url = remote.url.to_string();
        let arguments =
            ["fetch", "--progress", "--prune", "--no-tags", "--no-write-fetch-head", "--", &url, BRANCHES];
        self.run(&call, &arguments, control).await.map(drop)
    }

    async fn prepare_repository(
        &self,
        call: &Call<'_>,
        wanted: &Checkout<'_>,
        control: Control<'_>,
    ) -> Result<State, GitError> {
        let own = wanted.folder.join(".git");
        // A link in its place would have git write wherever it leads.
        if fs::symlink_metadata(&own).is_ok_and(|entry| !entry.is_dir()) {
            let message = "`.git` in the folder is not a folder";
            return Err(GitError::new(FailureClass::Other, OPERATION, message));
        }
        let io = |error| GitError::io(OPERATION, "cannot prepare the repository", &error);
        let url = wanted.remote.url.to_string();
        if own.join("HEAD").exists() {
            remove_leftovers(&own).map_err(io)?;
            self.run(call, &["config", "remote.origin.url", &url], control).await?;
            self.run(call, &["config", "remote.origin.fetch", BRANCHES], control).await?;
            if let Some(branch) = wanted.resolved.branch() {
                self.run(call, &["config", &format!("branch.{branch}.remote"), "origin"], control).await?;
                let merge = format!("branch.{branch}.merge");
                self.run(call, &["config", &merge, &format!("refs/heads/{branch}")], control).await?;
            }
            return Ok(State::Used);
        }
        let format = object_format(Some(wanted.resolved.commit()));
        self.run(call, &["init", "--quiet", "--template=", format, "."], control).await?;
        // One write in place of a program for each of four values.
        let mut config = OpenOptions::new().append(true).open(own.join("config")).map_err(io)?;
        config.write_all(configuration(&url, wanted.resolved.branch()).as_bytes()).map_err(io)?;
        Ok(State::Fresh)
    }

    /// Puts the files in place.
    async fn switch(
        &self,
        call: &Call<'_>,
        resolved: &Resolved,
        state: State,
        control: Control<'_>,
    ) -> Result<Option<String>, GitError> {
        let commit = resolved.commit();
        // What the remote had under this name. A fetch has brought it up to date, unless the commit came alone or was here.
        let known = match (resolved.kind(), resolved.branch(), resolved.full_name()) {
            (_, Some(branch), _) => Some(format!("refs/remotes/origin/{branch}")),
            (ResolvedKind::Tag, _, Some(tag)) => Some(tag.to_owned()),
            _ => None,
        };
        if let Some(name) = known
            && (state == State::Fresh
                || !self.ask(call, &["show-ref", "--verify", "--quiet", &name], control).await?)
            && !call.folder.join(".git").join(&name).exists()
        {
            self.run(call, &["update-ref", &name, commit, ""], control).await.or_else(|error| {
                // It is there after all, among those that are packed into one file.
                if error.tail.contains("already exists") { Ok(String::new()) } else { Err(error) }
            })?;
        }
        let mut checkout = vec!["checkout", "--progress", "--force"];
        match resolved.branch() {
            Some(branch) => checkout.extend(["--no-track", "-B", branch, commit]),
            None => checkout.extend(["--detach", commit]),
        }
        self.run(call, &checkout, control).await?;
        Ok(resolved.branch().map(str::to_owned))
    }
}

/// Whether a folder's repository is on this commit, and on the branch of this full name if it is one. Looks at two small files: what stands
/// in them otherwise, as packed refs, counts as no.
pub fn stands_at(folder: &Path, commit: &str, full_name: Option<&str>) -> bool {
    let read = |name: &str| fs::read_to_string(folder.join(".git").join(name)).unwrap_or_default();
    let head = read("HEAD");
    match (head.trim().strip_prefix("ref: "), full_name.filter(|name| name.starts_with("refs/heads/"))) {
        (Some(on), Some(branch)) => on == branch && !branch.contains("..") && read(branch).trim() == commit,
        (None, None) => head.trim() == commit,
        _ => false,
    }
}

/// Where the remote's branches are kept.
pub(super) const BRANCHES: &str = "+refs/heads/*:refs/remotes/origin/*";

/// Whether the repository was made just now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum State {
    Fresh,
    Used,
}

/// Names where the repository comes from, so that `git pull` and `git push` work for whoever works there.
fn configuration(url: &str, branch: Option<&str>) -> String {
    let mut text = format!("[remote \"origin\"]\n\turl = \"{url}\"\n\tfetch = {BRANCHES}\n");
    if let Some(branch) = branch {
        // Of what a branch may be called, these alone mean something here; a backslash it cannot hold.
        let name = branch.replace('"', "\\\"");
        text.push_str(&format!("[branch \"{name}\"]\n\tremote = origin\n\tmerge = \"refs/heads/{name}\"\n"));
    }
    text
}
