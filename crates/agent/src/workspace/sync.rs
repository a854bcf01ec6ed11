//! The port through which the boot gets its repositories: a helper runs git as the user of the box.

use std::os::unix::fs::{DirBuilderExt, chown};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use async_trait::async_trait;
use sandglass_sandbox::workspace::Workspace as Told;
use sandglass_supervise::ports::{Progress, Repositories, SyncFailure};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, BufReader};
use tokio_util::sync::CancellationToken;

use super::inside::git_sync::{Said, Task};
use super::{Document, broker, helper, inside, processes};
use crate::accounts::{Accounts, Identity, UnknownAccount};
use crate::envs;
use crate::http::router::Agent;
use crate::init::signal_group;

/// Of what a helper that broke wrote.
const MAX_ERRORS: usize = 64 << 10;
const SCRATCH: &str = "git";

pub(super) struct Sync {
    agent: Arc<Agent>,
    task: Task,
}

impl Sync {
    pub(super) fn new(agent: Arc<Agent>, document: &Document) -> Self {
        let task = Task {
            workspace: document.workspace.clone(),
            scratch: document.run_dir().join(SCRATCH),
            broker: broker::socket(document),
        };
        Sync { agent, task }
    }

    /// Folders that the user of the box cannot make: in memory for credentials, and where repositories go.
    fn prepare(&self, identity: &Identity) -> std::io::Result<()> {
        let Identity { uid, gid, .. } = *identity;
        std::fs::DirBuilder::new().recursive(true).mode(0o700).create(&self.task.scratch)?;
        own(&self.task.scratch, uid, gid)?;
        for missing in missing(&self.task.workspace.git.root) {
            std::fs::create_dir(&missing)?;
            own(&missing, uid, gid)?;
        }
        Ok(())
    }
}

/// Who owns the files of the repositories.
pub(super) fn owner(agent: &Agent, told: &Told) -> Result<Identity, UnknownAccount> {
    match &told.user {
        Some(user) => Accounts::load().resolve(user),
        None => Ok(agent.identity.clone()),
    }
}

/// The folders on the way to a path that are not there, the outermost first.
fn missing(path: &Path) -> Vec<PathBuf> {
    let mut missing: Vec<PathBuf> = path
        .ancestors()
        .take_while(|folder| !folder.exists() && !folder.as_os_str().is_empty())
        .map(Path::to_owned)
        .collect();
    missing.reverse();
    missing
}

fn own(path: &Path, uid: u32, gid: u32) -> std::io::Result<()> {
    if rustix::process::geteuid().is_root() { chown(path, Some(uid), Some(gid)) } else { Ok(()) }
}

#[async_trait]
impl Repositories for Sync {
    async fn sync(
        &self,
        _: &serde_json::Value,
        progress: Arc<dyn Progress>,
        cancel: CancellationToken,
    ) -> Result<(), SyncFailure> {
        let broken = |message: String| SyncFailure { message, ..SyncFailure::default() };
        let agent = &self.agent;
        let identity =
            owner(agent, &self.task.workspace).map_err(|error| broken(format!("its user: {error}")))?;
        self.prepare(&identity).map_err(|error| broken(format!("the folders of the workspace: {error}")))?;
        let env = envs::for_shells(&agent.env, &agent.env_file);
        let helper = helper::start(agent, inside::GIT_SYNC, &self.task, &env, Some(&identity))
            .map_err(|error| broken(error.to_string()))?;
        let errors = tokio::spawn(async move {
            let mut text = Vec::new();
            // Cut off, it has said enough.
            let _ = helper.stderr.take(MAX_ERRORS as u64).read_to_end(&mut text).await;
            text
        });
        let mut lines = BufReader::new(helper.stdout).lines();
        let mut asked = false;
        let mut said = None;
        loop {
            let line = tokio::select! {
                line = lines.next_line() => line,
                () = cancel.cancelled(), if !asked => {
                    asked = true;
                    signal_group(helper.pid, libc::SIGTERM);
                    continue;
                }
            };
            let Ok(Some(line)) = line else { break };
            match serde_json::from_str(&line) {
                Ok(Said::Progress(message)) => progress.progress(&message),
                Ok(last) => said = Some(last),
                Err(_) => {}
            }
        }
        let exit = helper.exit.await.map(processes::ended).ok();
        match said {
            Some(Said::Done) => Ok(()),
            Some(Said::Failed { cause, message, tail }) => {
                Err(SyncFailure { cause, message, exit: None, output: tail.into_bytes() })
            }
            _ => {
                let message = match exit {
                    Some(exit) => format!("the agent's {} ended: {exit}", inside::GIT_SYNC),
                    None => format!("the agent's {} ended", inside::GIT_SYNC),
                };
                let output = errors.await.unwrap_or_default();
                Err(SyncFailure { cause: None, message, exit, output })
            }
        }
    }
}
