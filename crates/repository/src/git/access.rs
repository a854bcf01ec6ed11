//! How a credential reaches git: in files of a private folder, through a helper that answers only for its own repository.

use std::fs::{self, OpenOptions, Permissions};
use std::io::{self, Write};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use tempfile::TempDir;

use super::failure::{FailureClass, GitError};
use super::{Remote, Settings};
use crate::spec::Credential;
use crate::url::Scheme;

const DEFAULT_USER: &str = "x-access-token";

/// For whom the helper answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Scope {
    /// The one repository.
    Repository,
    /// Every path on the repository's host: its submodules and its large files.
    Host,
}

/// The private folder of one call. Gone when dropped.
#[derive(Debug)]
pub(crate) struct Access {
    folder: TempDir,
    pub(crate) askpass: Option<PathBuf>,
    /// The command for ssh. For a repository reached otherwise it serves its submodules, and has no key.
    pub(crate) ssh_command: String,
}

impl Access {
    pub(crate) fn prepare(settings: &Settings, remote: Remote<'_>, scope: Scope) -> Result<Self, GitError> {
        if let Some(Credential::SecretRef { .. }) = remote.credential {
            let message = "the credential is still the name of a secret; its value has to be looked up first";
            return Err(GitError::new(FailureClass::Other, "credential", message));
        }
        let write =
            |error: io::Error| GitError::io("credential", "cannot write to the scratch folder", &error);
        let folder = tempfile::Builder::new()
            .prefix("git-")
            .permissions(Permissions::from_mode(0o700))
            .tempdir_in(&settings.scratch)
            .map_err(write)?;
        plain(folder.path())?;
        let mut access = Self { folder, askpass: None, ssh_command: String::new() };
        if let Some(Credential::Token { username, token }) = remote.credential {
            let username = username.as_deref().unwrap_or(DEFAULT_USER);
            access.write("username", username, 0o600).map_err(write)?;
            access.write("password", token.expose(), 0o600).map_err(write)?;
            let script = askpass_script(access.path(), remote, username, scope);
            access.askpass = Some(access.write("askpass", &script, 0o700).map_err(write)?);
        }
        access.ssh_command = access.prepare_ssh(settings, remote)?;
        Ok(access)
    }

    pub(crate) fn path(&self) -> &Path {
        self.folder.path()
    }

    fn prepare_ssh(&self, settings: &Settings, remote: Remote<'_>) -> Result<String, GitError> {
        let write =
            |error: io::Error| GitError::io("credential", "cannot write to the scratch folder", &error);
        let (key, own_hosts) = match remote.credential {
            Some(Credential::SshKey { private_key, known_hosts }) => {
                (Some(private_key), known_hosts.as_ref())
            }
            _ => (None, None),
        };
        let known_hosts = own_hosts.or(settings.known_hosts.as_ref());
        if known_hosts.is_none() && remote.url.scheme() == Scheme::Ssh {
            let message = format!(
                "the ssh host keys of {} are not known; give `knownHosts` with the credential",
                remote.url.host()
            );
            return Err(GitError::new(FailureClass::AuthFailed, "credential", message));
        }
        let hosts =
            self.write("known_hosts", known_hosts.map_or("", String::as_str), 0o600).map_err(write)?;
        let mut command = format!("{SSH} -o UserKnownHostsFile={}", hosts.display());
        if let Some(key) = key {
            // A key without a line break at its end is not read.
            let text = format!("{}\n", key.expose().trim_end().replace("\r\n", "\n"));
            let file = self.write("key", &text, 0o600).map_err(write)?;
            command.push_str(&format!(" -o IdentityFile={}", file.display()));
        }
        Ok(command)
    }

    fn write(&self, name: &str, text: &str, mode: u32) -> io::Result<PathBuf> {
        let path = self.path().join(name);
        let mut file = OpenOptions::new().write(true).create_new(true).mode(mode).open(&path)?;
        file.write_all(text.as_bytes())?;
        // The mask of the process may have taken bits away that the owner needs.
        fs::set_permissions(&path, Permissions::from_mode(mode))?;
        Ok(path)
    }
}

/// Nothing of the user's, no agent, no other way in than the key, and no host whose key is not known.
const SSH: &str = "ssh -F /dev/null -o BatchMode=yes -o StrictHostKeyChecking=yes -o GlobalKnownHostsFile=/dev/null \
    -o UpdateHostKeys=no -o IdentitiesOnly=yes -o IdentityAgent=none -o PasswordAuthentication=no -o KbdInteractiveAuthentication=no \
    -o ControlMaster=no -o ControlPath=none -o ForwardAgent=no -o ClearAllForwardings=yes -o PermitLocalCommand=no \
    -o ConnectTimeout=20 -o ServerAliveInterval=15 -o ServerAliveCountMax=4";

/// The path becomes part of shell commands.
fn plain(path: &Path) -> Result<(), GitError> {
    let text = path.to_str().unwrap_or(" ");
    if text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"/._-".contains(&byte)) {
        return Ok(());
    }
    let message = "the scratch folder's path holds other characters than letters, digits and `/._-`";
    Err(GitError::new(FailureClass::Other, "credential", message))
}

/// A program that prints the user or the password when asked for exactly this repository, and fails otherwise.
///
/// Git asks in words that hold the address, also after a redirect and for addresses that a repository names; so they are compared as a
/// whole or from their beginning, never searched.
fn askpass_script(folder: &Path, remote: Remote<'_>, username: &str, scope: Scope) -> String {
    let scheme = remote.url.scheme().as_str();
    let authority = remote.url.authority();
    let users = forms(username);
    let path = percent_encoding::percent_decode_str(remote.url.path()).decode_utf8_lossy();
    let paths: Vec<String> = path.split('/').map(forms).fold(vec![String::new(); FORMS], |paths, part| {
        paths.iter().zip(part).map(|(path, part)| format!("{path}/{part}")).collect()
    });
    let patterns = |word: &str, user: &str| match scope {
        Scope::Repository => paths
            .iter()
            .map(|path| quoted(&format!("{word} for '{scheme}://{user}{authority}{path}': ")))
            .collect(),
        Scope::Host => vec![
            format!("{}*", quoted(&format!("{word} for '{scheme}://{user}{authority}/"))),
            // The large-file client asks with double quotes, and without the path.
            format!("{}*", quoted(&format!("{word} for \"{scheme}://{user}{authority}/"))),
            format!("{}*", quoted(&format!("{word} for \"{scheme}://{user}{authority}\""))),
        ],
    };
    let password: Vec<String> =
        users.iter().flat_map(|user| patterns("Password", &format!("{user}@"))).collect();
    format!(
        "#!/bin/sh\ncase \"$1\" in\n{})\n\texec cat {folder}/username ;;\n{})\n\texec cat {folder}/password ;;\n*)\n\texit 1 ;;\nesac\n",
        patterns("Username", "").join("|"),
        password.join("|"),
        folder = folder.display(),
    )
}

/// How many ways there are to write a part of an address.
const FORMS: usize = 3;

/// A part of an address as git may write it in a question: as it is, and with escapes, of which some programs spare what needs none.
fn forms(part: &str) -> [String; FORMS] {
    let all = percent_encoding::utf8_percent_encode(part, percent_encoding::NON_ALPHANUMERIC).to_string();
    let few = all.replace("%2D", "-").replace("%2E", ".").replace("%5F", "_").replace("%7E", "~");
    [part.to_owned(), all, few]
}

/// A word of the shell in which nothing is interpreted.
fn quoted(text: &str) -> String {
    format!("'{}'", text.replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::secret::Secret;
    use crate::spec::Policy;
    use crate::{HostAllowList, RepositoryUrl, WorkspaceRoot};

    const WEB: &str = "https://github.com/acme/web.git";

    fn answers(url: &str, scope: Scope, username: &str, prompt: &str) -> Option<String> {
        let scratch = tempfile::tempdir().unwrap();
        let settings = Settings {
            program: "git".into(),
            scratch: scratch.path().into(),
            mirrors: scratch.path().into(),
            policy: Policy {
                hosts: HostAllowList::Any,
                allow_file: false,
                allow_http: false,
                root: WorkspaceRoot::default(),
            },
            repository_limit: u64::MAX,
            known_hosts: None,
            authorities: None,
            proxy: None,
        };
        let url = RepositoryUrl::parse(url).unwrap();
        let credential =
            Credential::Token { username: Some(username.into()), token: Secret::new("the-token") };
        let access =
            Access::prepare(&settings, Remote { url: &url, credential: Some(&credential) }, scope).unwrap();
        for name in ["username", "password"] {
            assert_eq!(fs::metadata(access.path().join(name)).unwrap().permissions().mode() & 0o777, 0o600);
        }
        assert_eq!(fs::metadata(access.path()).unwrap().permissions().mode() & 0o777, 0o700);
        let script = access.askpass.as_ref().unwrap();
        // Run by name of the shell: another thread that forks while the script is written would keep it from being executed.
        let output = std::process::Command::new("/bin/sh").arg(script).arg(prompt).output().unwrap();
        output.status.success().then(|| String::from_utf8(output.stdout).unwrap())
    }

    #[test]
    fn the_helper_answers_for_its_repository_alone() {
        let repository = |prompt| answers(WEB, Scope::Repository, "bot", prompt);
        assert_eq!(repository("Username for 'https://github.com/acme/web.git': ").as_deref(), Some("bot"));
        assert_eq!(
            repository("Password for 'https://bot@github.com/acme/web.git': ").as_deref(),
            Some("the-token")
        );
        for prompt in [
            "Username for 'https://github.com/acme/other.git': ",
            "Username for 'https://github.com': ",
            "Username for 'https://evil.example/acme/web.git': ",
            "Password for 'https://bot@evil.example/acme/web.git': ",
            "Password for 'https://bot@evil.example/x@github.com/acme/web.git': ",
            "Password for 'https://eve@github.com/acme/web.git': ",
            "Password for 'https://bot@github.com.evil.example/acme/web.git': ",
            "Password for 'http://bot@github.com/acme/web.git': ",
            "",
        ] {
            assert_eq!(repository(prompt), None, "{prompt}");
        }
    }

    #[test]
    fn the_helper_knows_its_repository_with_escapes_and_without() {
        let asked = |prompt: &str| {
            answers("https://github.com/my%20org/it%27s@x.git", Scope::Repository, "bot", prompt)
        };
        for path in ["my org/it's@x.git", "my%20org/it%27s%40x.git"] {
            let prompt = format!("Password for 'https://bot@github.com/{path}': ");
            assert_eq!(asked(&prompt).as_deref(), Some("the-token"), "{path}");
        }
        for path in ["my org/it's@x", "my/it's@x.git", "my%2520org/it%27s%40x.git", "my org'", ""] {
            let prompt = format!("Password for 'https://bot@github.com/{path}': ");
            assert_eq!(asked(&prompt), None, "{path}");
        }
    }

    #[test]
    fn the_helper_of_a_host_answers_for_the_whole_host_alone() {
        let host = |prompt| answers(WEB, Scope::Host, "a+b's", prompt);
        assert_eq!(host("Username for 'https://github.com/acme/lib': ").as_deref(), Some("a+b's"));
        assert_eq!(
            host("Password for 'https://a%2Bb%27s@github.com/acme/lib': ").as_deref(),
            Some("the-token")
        );
        assert_eq!(host("Password for 'https://a+b's@github.com/acme/lib': ").as_deref(), Some("the-token"));
        assert_eq!(host("Password for \"https://a%2Bb%27s@github.com\"").as_deref(), Some("the-token"));
        for prompt in [
            "Username for 'https://github.com.evil.example/acme/lib': ",
            "Username for 'https://github.com:8443/acme/lib': ",
            "Password for 'https://eve@evil.example/a+b's@github.com/acme/lib': ",
        ] {
            assert_eq!(host(prompt), None, "{prompt}");
        }
    }
}
