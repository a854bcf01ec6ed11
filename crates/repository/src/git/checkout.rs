//! Putting a commit's files into a folder.

use std::fs::{self, DirBuilder};
use std::os::unix::fs::DirBuilderExt;
use std::path::Path;

use super::access::{Access, Scope};
use super::failure::{FailureClass, GitError};
use super::mirror::{Mirror, mirror_url, object_format, remove_leftovers};
use super::process::Call;
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
        let scope = if wanted.submodules || wanted.lfs { Scope::Host } else { Scope::Repository };
        let access = Access::prepare(&self.settings, wanted.remote, scope)?;
        let call = Call::new(OPERATION, wanted.remote, &access, wanted.folder);
        self.prepare_repository(&call, wanted, control).await?;
        self.get_commit(wanted, &access, control).await?;
        let branch = self.switch(&call, wanted.resolved, control).await?;
        let submodules = if wanted.submodules {
            self.update_submodules(wanted, &access, control).await?
        } else {
            Vec::new()
        };
        if wanted.lfs {
            self.get_large_files(wanted, &access, &submodules, control).await?;
        }
        Ok(CheckedOut { commit: wanted.resolved.commit().to_owned(), branch, submodules })
    }

    async fn prepare_repository(
        &self,
        call: &Call<'_>,
        wanted: &Checkout<'_>,
        control: Control<'_>,
    ) -> Result<(), GitError> {
        let own = wanted.folder.join(".git");
        // A link in its place would have git write wherever it leads.
        match fs::symlink_metadata(&own) {
            Ok(entry) if entry.is_dir() => {
                remove_leftovers(&own)
                    .map_err(|error| GitError::io(OPERATION, "cannot clean the repository", &error))?;
            }
            Ok(_) => {
                return Err(GitError::new(
                    FailureClass::Other,
                    OPERATION,
                    "`.git` in the folder is not a folder",
                ));
            }
            Err(_) => {
                let format = object_format(Some(wanted.resolved.commit()));
                self.run(call, &["init", "--quiet", "--template=", format, "."], control).await?;
            }
        }
        let url = wanted.remote.url.to_string();
        self.run(call, &["config", "remote.origin.url", &url], control).await?;
        self.run(call, &["config", "remote.origin.fetch", "+refs/heads/*:refs/remotes/origin/*"], control)
            .await?;
        Ok(())
    }

    async fn get_commit(
        &self,
        wanted: &Checkout<'_>,
        access: &Access,
        control: Control<'_>,
    ) -> Result<(), GitError> {
        let mut call = Call::new("fetch", wanted.remote, access, wanted.folder);
        let commit = wanted.resolved.commit();
        if self.has_commit(&call, commit, control).await? {
            return Ok(());
        }
        let from = match wanted.mirror {
            Some(mirror) => {
                // Reading the mirror is reading files, whatever protocols the repository may use.
                call.environment = &[("GIT_ALLOW_PROTOCOL", "file")];
                mirror_url(mirror)
            }
            None => wanted.remote.url.to_string(),
        };
        let depth = wanted.depth.map(|depth| format!("--depth={depth}"));
        let mut fetch = vec!["fetch", "--progress", "--no-tags", "--no-write-fetch-head", "--force"];
        fetch.extend(depth.as_deref());
        fetch.extend(["--", from.as_str()]);
        let all = ["+refs/heads/*:refs/remotes/origin/*", "+refs/tags/*:refs/tags/*"];
        if depth.is_none() {
            self.run(&call, &[&fetch[..], &all[..]].concat(), control).await?;
            if self.has_commit(&call, commit, control).await? {
                return Ok(());
            }
        }
        match self.run(&call, &[&fetch[..], &[commit]].concat(), control).await {
            Ok(_) => return Ok(()),
            Err(error) if error.class != FailureClass::RefNotFound || depth.is_none() => return Err(error),
            Err(_) => {}
        }
        // The server hands out only what a ref points to. The ref may have moved on, then the whole history has the commit.
        if let Some(name) = wanted.resolved.full_name() {
            self.run(&call, &[&fetch[..], &[name]].concat(), control).await?;
            if self.has_commit(&call, commit, control).await? {
                return Ok(());
            }
        }
        let mut whole = vec!["fetch", "--progress", "--no-tags", "--no-write-fetch-head", "--force"];
        if wanted.folder.join(".git/shallow").exists() {
            whole.push("--unshallow");
        }
        whole.extend(["--", from.as_str()]);
        self.run(&call, &[&whole[..], &all[..]].concat(), control).await?;
        if self.has_commit(&call, commit, control).await? {
            return Ok(());
        }
        Err(GitError::new(
            FailureClass::RefNotFound,
            "fetch",
            format!("the remote does not hand out commit {commit}"),
        ))
    }

    /// Puts the files in place and names where they come from, so that `git pull` and `git push` work for whoever works there.
    async fn switch(
        &self,
        call: &Call<'_>,
        resolved: &Resolved,
        control: Control<'_>,
    ) -> Result<Option<String>, GitError> {
        let commit = resolved.commit();
        match (resolved.kind(), resolved.branch()) {
            (ResolvedKind::Branch, Some(branch)) => {
                self.run(call, &["update-ref", &format!("refs/remotes/origin/{branch}"), commit], control)
                    .await?;
                self.run(
                    call,
                    &["checkout", "--progress", "--force", "--no-track", "-B", branch, commit],
                    control,
                )
                .await?;
                self.run(call, &["config", &format!("branch.{branch}.remote"), "origin"], control).await?;
                self.run(
                    call,
                    &["config", &format!("branch.{branch}.merge"), &format!("refs/heads/{branch}")],
                    control,
                )
                .await?;
                Ok(Some(branch.to_owned()))
            }
            (kind, _) => {
                if let (ResolvedKind::Tag, Some(tag)) = (kind, resolved.full_name()) {
                    // The commit alone came over; the tag's own object, with its message, did not.
                    if !self.ask(call, &["show-ref", "--verify", "--quiet", tag], control).await? {
                        self.run(call, &["update-ref", tag, commit], control).await?;
                    }
                }
                self.run(call, &["checkout", "--progress", "--force", "--detach", commit], control).await?;
                Ok(None)
            }
        }
    }
}
