//! `execd git-sync`: brings the repositories of a workspace to their commits, as the user of the box.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use sandglass_bridge::server::RepositoryScope;
use sandglass_repository::git::{
    Checkout, Control, FailureClass, Git, GitError, Present, Progress, Remote, Settings, stands_at,
};
use sandglass_repository::{
    Credential, HostAllowList, Policy, RepositoryUrl, Scheme, Secret, SpecError, WorkspaceRoot,
};
use sandglass_sandbox::workspace::{Repository, Source, Workspace};
use serde::{Deserialize, Serialize};
use tokio::signal::unix::{SignalKind, signal};
use tokio::time::{Instant, sleep};
use tokio_util::sync::CancellationToken;

use super::{git_credential, say};

/// Attempts at what may pass, such as a connection that broke.
const ATTEMPTS: u32 = 3;

/// What there is to do.
#[derive(Serialize, Deserialize)]
pub struct Task {
    pub workspace: Workspace,
    /// A folder in memory, this user's alone.
    pub scratch: PathBuf,
    /// Where to ask for credentials.
    pub broker: PathBuf,
}

/// A line of the output. The last one is not progress.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Said {
    Progress(String),
    Failed { cause: Option<String>, message: String, tail: String },
    Done,
}

pub(super) async fn run(task: Task) -> ExitCode {
    let cancel = CancellationToken::new();
    if let Ok(mut term) = signal(SignalKind::terminate()) {
        let cancel = cancel.clone();
        tokio::spawn(async move {
            term.recv().await;
            cancel.cancel();
        });
    }
    match sync(&task, &cancel).await {
        Ok(()) => {
            say(&Said::Done);
            ExitCode::SUCCESS
        }
        Err(failed) => {
            say(&failed);
            ExitCode::FAILURE
        }
    }
}

async fn sync(task: &Task, cancel: &CancellationToken) -> Result<(), Said> {
    let told = &task.workspace.git;
    let hosts = match told.hosts.is_empty() {
        true => HostAllowList::Any,
        false => HostAllowList::parse(told.hosts.iter().map(String::as_str)).map_err(refused)?,
    };
    let policy = Policy {
        hosts,
        allow_file: told.allow_file,
        allow_http: told.allow_http,
        root: WorkspaceRoot::parse(&told.root.to_string_lossy()).map_err(refused)?,
    };
    // What the box trusts beside the system's authorities, a proxy in between for one.
    let of_box = || std::env::var_os("SSL_CERT_FILE").map(PathBuf::from);
    let git = Git::new(Settings {
        program: "git".into(),
        scratch: task.scratch.clone(),
        mirrors: task.scratch.join("mirrors"),
        policy: policy.clone(),
        repository_limit: told.repository_bytes,
        known_hosts: told.known_hosts.clone(),
        authorities: told.authorities.clone().or_else(of_box),
        proxy: told.proxy.clone(),
    });
    for repository in &task.workspace.repositories {
        let one = One { task, git: &git, policy: &policy, repository, cancel };
        one.bring().await?;
    }
    Ok(())
}

/// A repository and what it takes.
struct One<'a> {
    task: &'a Task,
    git: &'a Git,
    policy: &'a Policy,
    repository: &'a Repository,
    cancel: &'a CancellationToken,
}

impl One<'_> {
    async fn bring(&self) -> Result<(), Said> {
        let url = &self.repository.url;
        let wrong = |error: SpecError| refused(format!("{url}: {}", error.message));
        let url = self.policy.check_url(url).map_err(wrong)?;
        if self.needs_nobody(&url).await {
            return Ok(());
        }
        let mut attempt = 1;
        loop {
            // Asked for each time: it may have expired meanwhile.
            let credential = self.credential(&url).await?;
            let error = match self.attempt(&url, credential.as_ref()).await {
                Ok(()) => return Ok(()),
                Err(error) => error,
            };
            if !error.class.is_transient() || attempt == ATTEMPTS || self.cancel.is_cancelled() {
                return Err(self.failed(error));
            }
            say(&Said::Progress(format!("{}: {}, trying again", url.name(), error.message)));
            sleep(Duration::from_secs(1 << (attempt - 1))).await;
            attempt += 1;
        }
    }

    async fn attempt(&self, url: &RepositoryUrl, credential: Option<&Credential>) -> Result<(), GitError> {
        let name = url.name();
        let progress = |progress: &Progress| {
            let percent = progress.percent.map(|percent| format!(" {percent} %")).unwrap_or_default();
            say(&Said::Progress(format!("{name}: {}{percent}", progress.phase)));
        };
        let control = self.control(&progress);
        let remote = Remote { url, credential };
        let folder = &self.repository.path;
        if self.task.workspace.source == Source::Snapshot && folder.join(".git").exists() {
            say(&Said::Progress(format!("{name}: refreshing refs")));
            return self.git.refresh(remote, folder, control).await;
        }
        let full_name = self.full_name();
        if self.is_present(remote, full_name, control).await? {
            return Ok(());
        }
        say(&Said::Progress(format!("{name}: fetching {}", self.repository.commit)));
        let resolved = self.git.resolve_pinned(remote, &self.repository.commit, full_name, control).await?;
        let checkout = Checkout {
            remote,
            resolved: &resolved,
            mirror: None,
            folder,
            depth: self.repository.depth,
            submodules: self.repository.submodules,
            lfs: self.repository.lfs,
        };
        self.git.checkout(&checkout, control).await?;
        say(&Said::Progress(format!("{name}: at {}", resolved.commit())));
        Ok(())
    }

    fn control<'c>(&'c self, progress: &'c (dyn Fn(&Progress) + Send + Sync)) -> Control<'c> {
        let deadline = Instant::now() + Duration::from_secs(self.task.workspace.boot.deadline_seconds);
        Control { deadline, cancel: self.cancel, progress }
    }

    fn full_name(&self) -> Option<&str> {
        self.repository.reference.as_deref().filter(|name| name.starts_with("refs/"))
    }

    /// An image brought the commit along: neither the network, which the box may not have, nor a credential is needed.
    async fn needs_nobody(&self, url: &RepositoryUrl) -> bool {
        let Repository { submodules, lfs, path, commit, .. } = self.repository;
        if *submodules || *lfs || self.task.workspace.source != Source::Image {
            return false;
        }
        if stands_at(path, commit, self.full_name()) {
            // Its files are as the setup left them.
            say(&Said::Progress(format!("{}: at {commit}", url.name())));
            return true;
        }
        let remote = Remote { url, credential: None };
        // A failure comes again where it is told.
        matches!(self.is_present(remote, self.full_name(), self.control(&|_| {})).await, Ok(true))
    }

    /// Puts the commit in place, if the folder's repository has it.
    async fn is_present(
        &self,
        remote: Remote<'_>,
        full_name: Option<&str>,
        control: Control<'_>,
    ) -> Result<bool, GitError> {
        let Repository { commit, path, submodules, lfs, .. } = self.repository;
        let present = Present { remote, commit, full_name, folder: path, submodules: *submodules, lfs: *lfs };
        let there = self.git.checkout_present(&present, control).await?.is_some();
        if there {
            say(&Said::Progress(format!("{}: at {commit}", remote.url.name())));
        }
        Ok(there)
    }

    async fn credential(&self, url: &RepositoryUrl) -> Result<Option<Credential>, Said> {
        if !self.repository.credential {
            return Ok(None);
        }
        let failed = |reason: String| Said::Failed {
            cause: Some("repository_auth_failed".into()),
            message: format!("{}: no credential: {reason}", self.repository.url),
            tail: String::new(),
        };
        let scope = RepositoryScope::new(&url.authority(), url.path());
        let request = scope.map_err(|error| failed(error.to_string()))?.request();
        let broker = self.task.broker.clone();
        // The agent may wait long for its server; whoever cancels does not.
        let asking = tokio::task::spawn_blocking(move || git_credential::ask(&broker, &request));
        let given = tokio::select! {
            given = asking => given.unwrap_or_else(|error| Err(error.to_string())),
            () = self.cancel.cancelled() => Err("cancelled".into()),
        };
        let given = given.map_err(failed)?;
        let secret = Secret::new(given.password.into_inner());
        Ok(Some(match url.scheme() {
            Scheme::Ssh => Credential::SshKey {
                private_key: secret,
                known_hosts: given.known_hosts.filter(|lines| !lines.is_empty()),
            },
            _ => Credential::Token { username: Some(given.username), token: secret },
        }))
    }

    fn failed(&self, error: GitError) -> Said {
        let cause = match error.class {
            FailureClass::Unreachable | FailureClass::Untrusted | FailureClass::Timeout => {
                Some("repository_unreachable")
            }
            FailureClass::AuthFailed => Some("repository_auth_failed"),
            FailureClass::RefNotFound => Some("ref_not_found"),
            FailureClass::Cancelled | FailureClass::DiskFull | FailureClass::Other => None,
        };
        Said::Failed {
            cause: cause.map(str::to_owned),
            message: format!("{}: {error}", self.repository.url),
            tail: error.tail,
        }
    }
}

fn refused(error: impl std::fmt::Display) -> Said {
    Said::Failed { cause: None, message: error.to_string(), tail: String::new() }
}
