//! Credentials of git: a socket beside the document, behind which is the server.
//!
//! The programs of the box find it by git's own environment; nothing of it is in a configuration file. Invariant: the server is asked
//! for repositories alone that the document declares, and nothing that it answers is kept.

use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use sandglass_bridge::agent::CredentialError;
use sandglass_bridge::server::RepositoryScope;
use sandglass_bridge::wire::{GitCredential, GitCredentialRequest, Refusal};
use sandglass_repository::{RepositoryUrl, Scheme};
use sandglass_sandbox::workspace::{self, Way, Workspace as Told};
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::Semaphore;
use tokio::time::{Instant, sleep, timeout};

use super::{Document, Workspace};
use crate::envs::Env;
use crate::journal::{self, Level};

const SOCKET: &str = "git.sock";
/// Longer questions are none.
const MAX_QUESTION: u64 = 8 << 10;
/// From connecting to the question.
const PATIENCE: Duration = Duration::from_secs(10);
/// Between attempts to reach the server.
const AGAIN: Duration = Duration::from_millis(250);
/// Programs that ask at a time; more wait.
const MAX_ASKING: usize = 16;

/// An answer of the broker, one line of JSON.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) enum Answer {
    Credential(GitCredential),
    Refused(String),
}

pub(super) fn socket(document: &Document) -> PathBuf {
    document.run_dir().join(SOCKET)
}

/// Has git in every process of the box ask this agent about repositories for which the server has a credential.
pub fn export(document: &Document, env: &mut Env) {
    let Ok(agent) = std::env::current_exe() else { return };
    let quoted = |path: &Path| format!("'{}'", path.display().to_string().replace('\'', r"'\''"));
    let helper =
        format!("!{} {} {}", quoted(&agent), super::inside::GIT_CREDENTIAL, quoted(&socket(document)));
    let mut settings = helpers(&document.workspace, &helper);
    if let Some(authorities) = &document.workspace.git.authorities {
        settings.push(("http.sslCAInfo".into(), authorities.display().to_string()));
    }
    for repository in &document.workspace.repositories {
        // Root looks into them as well, and git would take it for a stranger.
        settings.push(("safe.directory".into(), repository.path.display().to_string()));
    }
    // What the image or the request had set stays.
    let first = env.get("GIT_CONFIG_COUNT").and_then(|count| count.parse::<usize>().ok()).unwrap_or(0);
    for (index, (name, value)) in settings.iter().enumerate() {
        env.insert(format!("GIT_CONFIG_KEY_{}", first + index), name.clone());
        env.insert(format!("GIT_CONFIG_VALUE_{}", first + index), value.clone());
    }
    if !settings.is_empty() {
        env.insert("GIT_CONFIG_COUNT".into(), (first + settings.len()).to_string());
    }
}

/// Settings of git that have it ask this program about every host with a repository for which the server has a credential.
fn helpers(told: &Told, helper: &str) -> Vec<(String, String)> {
    let mut settings = Vec::new();
    for url in secret_repositories(told) {
        let place = format!("credential.{}://{}", url.scheme().as_str(), url.authority());
        let setting = (format!("{place}.helper"), helper.to_owned());
        // Compared as a whole: the name of one host may be the beginning of another's.
        if !settings.contains(&setting) {
            settings.push((format!("{place}.useHttpPath"), "true".into()));
            settings.push(setting);
        }
    }
    settings
}

fn secret_repositories(told: &Told) -> impl Iterator<Item = RepositoryUrl> + '_ {
    let secret = told.repositories.iter().filter(|repository| repository.credential);
    let urls = secret.filter_map(|repository| RepositoryUrl::parse(&repository.url).ok());
    urls.filter(|url| matches!(url.scheme(), Scheme::Https | Scheme::Http))
}

/// Answers programs of the box as long as the box lives.
pub(super) fn serve(workspace: &Arc<Workspace>) {
    let told = &workspace.document.workspace;
    if !told.repositories.iter().any(|repository| repository.credential) {
        return;
    }
    let path = socket(&workspace.document);
    let listener = match listen(&path) {
        Ok(listener) => listener,
        Err(error) => {
            let text = format!("workspace: no credentials for git: {}: {error}", path.display());
            journal::note(Level::Error, &text);
            return;
        }
    };
    let workspace = Arc::clone(workspace);
    tokio::spawn(async move {
        let asking = Arc::new(Semaphore::new(MAX_ASKING));
        loop {
            let Ok(permit) = Arc::clone(&asking).acquire_owned().await else { return };
            match listener.accept().await {
                Ok((stream, _)) => {
                    let workspace = Arc::clone(&workspace);
                    tokio::spawn(async move {
                        // Whoever asked may be gone.
                        let _ = answer(&workspace, stream).await;
                        drop(permit);
                    });
                }
                Err(_) => sleep(AGAIN).await,
            }
        }
    });
}

fn listen(path: &Path) -> io::Result<UnixListener> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let listener = UnixListener::bind(path)?;
    // Who may ask is told by the kernel when somebody does.
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o666))?;
    // Only the folder that is there for this alone.
    let usual = Path::new(workspace::FILE).parent();
    if let Some(folder) = path.parent().filter(|folder| usual == Some(*folder)) {
        // The document and the token in it are nobody's but root's; the way to the socket is.
        std::fs::set_permissions(folder, std::fs::Permissions::from_mode(0o711))?;
    }
    Ok(listener)
}

async fn answer(workspace: &Workspace, stream: UnixStream) -> io::Result<()> {
    let asker = stream.peer_cred()?.uid();
    let (read, mut write) = stream.into_split();
    let mut line = String::new();
    let mut question = BufReader::new(read.take(MAX_QUESTION));
    timeout(PATIENCE, question.read_line(&mut line)).await??;
    let answer = if asker == 0 || workspace.users.contains(&asker) {
        ask(workspace, &line).await
    } else {
        Answer::Refused("this user is not the one of the box".into())
    };
    let mut text = serde_json::to_vec(&answer)?;
    text.push(b'\n');
    write.write_all(&text).await
}

async fn ask(workspace: &Workspace, line: &str) -> Answer {
    let Ok(request) = serde_json::from_str::<GitCredentialRequest>(line) else {
        return Answer::Refused("the question is not understood".into());
    };
    let told = &workspace.document.workspace;
    if !is_declared(told, &request) {
        return Answer::Refused(Refusal::NotDeclared.to_string());
    }
    if told.bridge.way == Way::Pull {
        return Answer::Refused("the server of this box cannot be asked".into());
    }
    let deadline = Instant::now() + Duration::from_secs(told.bridge.attach_grace_seconds);
    loop {
        let error = match workspace.link.git_credential(request.clone()).await {
            Ok(credential) => return Answer::Credential(credential),
            Err(error) => error,
        };
        let may_pass = matches!(
            error,
            CredentialError::Refused(Refusal::NotAttached | Refusal::Busy) | CredentialError::Transport(_)
        );
        if !may_pass || Instant::now() >= deadline {
            let reason = std::error::Error::source(&error).map(|source| format!(": {source}"));
            return Answer::Refused(format!("{error}{}", reason.unwrap_or_default()));
        }
        sleep(AGAIN).await;
    }
}

fn is_declared(told: &Told, request: &GitCredentialRequest) -> bool {
    told.repositories.iter().filter(|repository| repository.credential).any(|repository| {
        RepositoryUrl::parse(&repository.url)
            .ok()
            .and_then(|url| RepositoryScope::new(&url.authority(), url.path()).ok())
            .is_some_and(|scope| scope.covers(request))
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn each_host_has_its_helper_once() {
        let repositories: Vec<_> = [
            "https://git.example:8443/acme/web.git",
            "https://git.example.org/acme/web.git",
            "https://git.example/acme/web.git",
            "https://git.example/acme/other.git",
        ]
        .iter()
        .map(|url| json!({ "url": url, "commit": "0".repeat(40), "path": "/workspace", "credential": true }))
        .collect();
        let told: Told = serde_json::from_value(json!({
            "sandboxId": "7b0f7d1e-5f0a-4c1e-9a53-0d6e2b1f4a10", "generation": 1,
            "bridge": { "way": "pull" }, "repositories": repositories,
        }))
        .unwrap();
        let settings = helpers(&told, "ask");
        let mut places: Vec<&str> = settings
            .iter()
            .filter_map(|(name, _)| name.strip_prefix("credential.")?.strip_suffix(".helper"))
            .collect();
        places.sort_unstable();
        assert_eq!(settings.len(), 2 * places.len());
        assert_eq!(places, ["https://git.example", "https://git.example.org", "https://git.example:8443"]);
    }

    #[test]
    fn what_the_document_does_not_declare_is_not_asked_for() {
        let told: Told = serde_json::from_value(json!({
            "sandboxId": "7b0f7d1e-5f0a-4c1e-9a53-0d6e2b1f4a10", "generation": 1,
            "bridge": { "way": "pull" },
            "repositories": [
                { "url": "https://git.example/acme/web.git", "commit": "0".repeat(40), "path": "/workspace/web", "credential": true },
                { "url": "https://git.example/acme/open.git", "commit": "0".repeat(40), "path": "/workspace/open" },
            ],
        }))
        .unwrap();
        let declared = |host: &str, path: &str| {
            is_declared(&told, &GitCredentialRequest { host: host.into(), path: path.into() })
        };
        assert!(declared("git.example", "acme/web") && declared("git.example", "acme/web.git"));
        for (host, path) in [
            ("git.example", "acme/open"),
            ("git.example", "acme/other"),
            ("git.example", ""),
            ("git.example.evil", "acme/web"),
            ("git.example:8443", "acme/web"),
        ] {
            assert!(!declared(host, path), "{host} {path}");
        }
    }
}
