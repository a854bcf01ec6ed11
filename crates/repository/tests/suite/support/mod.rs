//! Real git servers on loopback, and repositories to serve.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use sandglass_repository::git::{Control, Git, Progress, Settings};
use sandglass_repository::{Credential, HostAllowList, Policy, RepositoryUrl, Secret, WorkspaceRoot};
use tempfile::TempDir;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

pub const TOKEN: &str = "tok-3f9a7c5e1b";

/// Runs git as the author of test repositories.
pub fn git(folder: &Path, arguments: &[&str]) -> String {
    let output = Command::new("git")
        .args(["-c", "protocol.file.allow=always", "-c", "uploadpack.allowFilter=true"])
        .args(arguments)
        .current_dir(folder)
        .env_clear()
        .env("PATH", std::env::var("PATH").unwrap())
        .env("HOME", "/nonexistent")
        .env("GIT_CONFIG_NOSYSTEM", "1")
        .env("GIT_AUTHOR_NAME", "A")
        .env("GIT_AUTHOR_EMAIL", "a@example.com")
        .env("GIT_COMMITTER_NAME", "A")
        .env("GIT_COMMITTER_EMAIL", "a@example.com")
        .env("GIT_AUTHOR_DATE", "2026-01-01T00:00:00Z")
        .env("GIT_COMMITTER_DATE", "2026-01-01T00:00:00Z")
        .output()
        .unwrap();
    assert!(output.status.success(), "git {arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap().trim().to_owned()
}

/// A repository with a work tree in which tests commit.
pub struct Author {
    pub folder: TempDir,
}

impl Author {
    pub fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        git(folder.path(), &["init", "--quiet", "-b", "main", "."]);
        Self { folder }
    }

    pub fn path(&self) -> &Path {
        self.folder.path()
    }

    /// Writes a file, commits it and gives the commit.
    pub fn commit(&self, file: &str, text: &str) -> String {
        let path = self.path().join(file);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
        git(self.path(), &["add", "-A"]);
        git(self.path(), &["commit", "--quiet", "-m", file]);
        git(self.path(), &["rev-parse", "HEAD"])
    }

    pub fn push(&self, bare: &Path) {
        if !bare.exists() {
            std::fs::create_dir_all(bare).unwrap();
            git(bare, &["init", "--quiet", "--bare", "-b", "main", "."]);
        }
        git(
            self.path(),
            &[
                "push",
                "--quiet",
                "--force",
                bare.to_str().unwrap(),
                "+refs/heads/*:refs/heads/*",
                "+refs/tags/*:refs/tags/*",
            ],
        );
    }
}

/// A child that is ended by its id when the test is over.
pub struct Running(pub Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The HTTP server over a folder of bare repositories.
pub struct HttpServer {
    pub root: TempDir,
    pub port: u16,
    _running: Running,
}

impl HttpServer {
    pub fn start() -> Self {
        Self::start_with(&[])
    }

    pub fn start_with(environment: &[(&str, &str)]) -> Self {
        let root = tempfile::tempdir().unwrap();
        let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/suite/support/git_server.py");
        let mut child = Command::new("python3")
            .args([script, root.path().to_str().unwrap()])
            .env("SERVER_TOKEN", TOKEN)
            .envs(environment.iter().copied())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        Self { root, port: line.trim().parse().unwrap(), _running: Running(child) }
    }

    pub fn bare(&self, name: &str) -> PathBuf {
        self.root.path().join(name)
    }

    pub fn url(&self, path: &str) -> RepositoryUrl {
        RepositoryUrl::parse(&format!("http://127.0.0.1:{}/{path}", self.port)).unwrap()
    }

    /// What was asked so far, a line each.
    pub fn requests(&self) -> Vec<String> {
        let log = std::fs::read_to_string(self.root.path().join("requests.log")).unwrap_or_default();
        log.lines().map(str::to_owned).collect()
    }
}

/// Git behind its fence, with folders of its own.
pub struct Bench {
    pub folder: TempDir,
    pub git: Git,
    pub cancel: CancellationToken,
}

impl Bench {
    pub fn new() -> Self {
        Self::with(|_| {})
    }

    pub fn with(change: impl FnOnce(&mut Settings)) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let scratch = folder.path().join("scratch");
        std::fs::create_dir(&scratch).unwrap();
        let mut settings = Settings {
            program: "git".into(),
            scratch,
            mirrors: folder.path().join("mirrors"),
            policy: Policy {
                hosts: HostAllowList::Any,
                allow_file: true,
                allow_http: true,
                root: WorkspaceRoot::default(),
            },
            repository_limit: u64::MAX,
            known_hosts: None,
            authorities: None,
            proxy: None,
        };
        change(&mut settings);
        Self { folder, git: Git::new(settings), cancel: CancellationToken::new() }
    }

    pub fn work(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub fn scratch(&self) -> PathBuf {
        self.folder.path().join("scratch")
    }

    pub fn control(&self) -> Control<'_> {
        self.control_until(Duration::from_secs(120))
    }

    pub fn control_until(&self, time: Duration) -> Control<'_> {
        Control { deadline: Instant::now() + time, cancel: &self.cancel, progress: &|_: &Progress| {} }
    }

    /// Processes that a call has started and that still run, with their arguments and environment.
    pub fn processes(&self) -> Vec<(String, String)> {
        let scratch = self.scratch().to_string_lossy().into_owned();
        let read = |path: PathBuf| {
            std::fs::read(path).map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).unwrap_or_default()
        };
        let entries = std::fs::read_dir("/proc").unwrap().flatten();
        entries
            .map(|entry| (read(entry.path().join("cmdline")), read(entry.path().join("environ"))))
            .filter(|(_, environment)| environment.contains(&scratch))
            .collect()
    }
}

pub fn token(value: &str) -> Credential {
    Credential::Token { username: Some("bot".into()), token: Secret::new(value) }
}

/// Waits, within bounds, until something is so.
pub async fn until(what: &str, condition: impl Fn() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !condition() {
        assert!(Instant::now() < deadline, "{what}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}
