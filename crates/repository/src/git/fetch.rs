//! Getting a commit into a checkout's repository.

use super::access::Access;
use super::checkout::{BRANCHES, Checkout, State};
use super::failure::{FailureClass, GitError};
use super::mirror::mirror_url;
use super::process::Call;
use super::quota::Watched;
use super::{Control, Git};

const OPERATION: &str = "fetch";
const TAGS: &str = "+refs/tags/*:refs/tags/*";
const FETCH: [&str; 5] = ["fetch", "--progress", "--no-tags", "--no-write-fetch-head", "--force"];

impl Git {
    /// Gets the commit from the mirror or the remote, with as much history as is asked for.
    pub(super) async fn get_commit(
        &self,
        wanted: &Checkout<'_>,
        access: &Access,
        state: State,
        control: Control<'_>,
    ) -> Result<(), GitError> {
        let mut call = Call::new(OPERATION, wanted.remote, access, wanted.folder);
        call.watched = Some(Watched::downloads(wanted.folder));
        let commit = wanted.resolved.commit();
        if state == State::Used && self.has_commit(&call, commit, control).await? {
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
        match wanted.depth {
            Some(depth) => self.get_shallow(&call, wanted, &from, depth, control).await,
            None => self.get_whole(&call, wanted, &from, control).await,
        }
    }

    async fn get_whole(
        &self,
        call: &Call<'_>,
        wanted: &Checkout<'_>,
        from: &str,
        control: Control<'_>,
    ) -> Result<(), GitError> {
        let mut fetch = FETCH.to_vec();
        if wanted.folder.join(".git/shallow").exists() {
            fetch.push("--unshallow");
        }
        fetch.extend(["--", from]);
        self.run(call, &[&fetch[..], &[BRANCHES, TAGS]].concat(), control).await?;
        let commit = wanted.resolved.commit();
        if self.has_commit(call, commit, control).await? {
            return Ok(());
        }
        // No branch and no tag leads to it; many servers hand it out all the same.
        self.run(call, &[&FETCH[..], &["--", from, commit]].concat(), control).await.map(drop)
    }

    async fn get_shallow(
        &self,
        call: &Call<'_>,
        wanted: &Checkout<'_>,
        from: &str,
        depth: u32,
        control: Control<'_>,
    ) -> Result<(), GitError> {
        let depth = format!("--depth={depth}");
        let commit = wanted.resolved.commit();
        let alone = [&FETCH[..], &[depth.as_str(), "--", from, commit]].concat();
        match self.run(call, &alone, control).await {
            Ok(_) => return Ok(()),
            Err(error) if error.class != FailureClass::RefNotFound => return Err(error),
            Err(_) => {}
        }
        // The server hands out only what a ref points to. The ref may have moved on; then the whole history has the commit.
        if let Some(name) = wanted.resolved.full_name() {
            self.run(call, &[&FETCH[..], &[depth.as_str(), "--", from, name]].concat(), control).await?;
            if self.has_commit(call, commit, control).await? {
                return Ok(());
            }
        }
        self.get_whole(call, wanted, from, control).await
    }
}
