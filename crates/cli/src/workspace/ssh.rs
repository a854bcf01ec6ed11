//! What the system's `ssh` needs to get into a sandbox: a key of ours, a certificate for it that the sandbox believes for some minutes, the
//! sandbox's host key, and a command that carries the connection.
//!
//! Everything lies in one folder of the user's state directory, so that configurations that were printed once go on working. The key is made
//! by `ssh-keygen` and never leaves the folder.

use std::{
    fs::{self, OpenOptions},
    io::Write as _,
    os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::Duration,
};

use anyhow::{Context as _, Result, bail, ensure};
use serde_json::{Value, json};
use tokio::time::sleep;

use super::addresses::access;
use crate::client::Client;

/// The login name where none is asked for: every image has it.
pub const LOGIN: &str = "root";

/// How long a server that starts may take to say its host key.
const HOST_KEY_PATIENCE: Duration = Duration::from_secs(10);
const HOST_KEY_PAUSE: Duration = Duration::from_millis(100);

/// The folder of keys and certificates.
#[derive(Debug, Clone)]
pub struct Folder(PathBuf);

impl Folder {
    /// The user's own, made if need be.
    ///
    /// # Errors
    /// When there is no home, or the folder cannot be made.
    pub fn of_user(variable: impl Fn(&str) -> Option<String>) -> Result<Self> {
        let set = |name: &str| variable(name).filter(|value| value.starts_with('/')).map(PathBuf::from);
        let state = set("XDG_STATE_HOME").or_else(|| Some(set("HOME")?.join(".local/state")));
        Self::at(state.context("set HOME; the keys for sandboxes are kept below it")?.join("sandglass/ssh"))
    }

    fn at(path: PathBuf) -> Result<Self> {
        fs::DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(&path)
            .with_context(|| format!("cannot make {}", path.display()))?;
        Ok(Self(path))
    }

    fn key(&self) -> PathBuf {
        self.0.join("id_ed25519")
    }

    /// The public half, for which certificates are made.
    fn public_key(&self) -> Result<String> {
        let (lock, key) = (self.0.join("lock"), self.key());
        let lock = OpenOptions::new().create(true).append(true).mode(0o600).open(&lock)?;
        // Given back when the file is closed.
        lock.lock().context("cannot lock the folder of keys")?;
        if !key.exists() {
            let made = ssh_keygen(&["-q", "-t", "ed25519", "-N", "", "-C", "sandglass", "-f"], &key)?;
            ensure!(made.status.success(), "ssh-keygen made no key: {}", complaint(&made.stderr));
        }
        // From the private half: the other file may be lost.
        let told = ssh_keygen(&["-y", "-f"], &key)?;
        ensure!(told.status.success(), "the key {} is damaged: {}", key.display(), complaint(&told.stderr));
        Ok(String::from_utf8_lossy(&told.stdout).trim().to_owned())
    }

    fn write(&self, name: &str, text: &str) -> Result<PathBuf> {
        let path = self.0.join(name);
        let whole = || -> std::io::Result<()> {
            let mut file = tempfile::NamedTempFile::new_in(&self.0)?;
            file.write_all(text.as_bytes())?;
            file.persist(&path)?;
            Ok(())
        };
        whole().with_context(|| format!("cannot write {}", path.display()))?;
        Ok(path)
    }
}

fn ssh_keygen(arguments: &[&str], file: &Path) -> Result<std::process::Output> {
    Command::new("ssh-keygen")
        .args(arguments)
        .arg(file)
        .stdin(Stdio::null())
        .output()
        .context("cannot run `ssh-keygen`; install OpenSSH's client")
}

fn complaint(stderr: &[u8]) -> String {
    String::from_utf8_lossy(stderr).trim().to_owned()
}

/// How to reach one sandbox.
#[derive(Debug, Clone)]
pub struct Route {
    pub id: String,
    pub service: String,
    pub login: String,
    /// Shell text that carries the connection.
    proxy: String,
    /// Shell text that gets a new certificate.
    refresh: String,
    folder: Folder,
}

impl Route {
    /// A route by this program to this server.
    ///
    /// # Errors
    /// When the folder of keys cannot be made.
    pub fn new(client: &Client, id: &str, service: &str, login: &str) -> Result<Self> {
        let program = std::env::current_exe().context("cannot find this program")?;
        let program = program.to_str().context("the name of this program is not text")?;
        let call = |verb: &str| {
            let words =
                [program, "--url", client.profile().base(), "ssh", "--service", service, verb, "--", id];
            words.map(quoted).join(" ")
        };
        Ok(Self {
            id: id.to_owned(),
            service: service.to_owned(),
            login: login.to_owned(),
            proxy: call("--proxy"),
            refresh: call("--refresh"),
            folder: Folder::of_user(|name| std::env::var(name).ok())?,
        })
    }

    /// Gets a certificate and the host key, and writes them down.
    ///
    /// # Errors
    /// When the server gives none.
    pub async fn refresh(&self, client: &Client) -> Result<()> {
        let body = json!({ "publicKey": self.folder.public_key()? });
        let mut patience = HOST_KEY_PATIENCE;
        let (certificate, host_key) = loop {
            let access = access(client, &self.id, &self.service, &body).await?;
            let text = |pointer: &str| {
                let text = access.pointer(pointer).and_then(Value::as_str).map(str::trim);
                text.filter(|text| is_line(text)).map(str::to_owned)
            };
            let Some(certificate) = text("/credential/certificate") else {
                bail!("the server gave no certificate for the service {}; is it an SSH server?", self.service)
            };
            if let Some(host_key) = text("/credential/hostKey/publicKey") {
                break (certificate, host_key);
            }
            let Some(left) = patience.checked_sub(HOST_KEY_PAUSE) else {
                bail!(
                    "the sandbox's SSH server has not started; `sandglass inspect {}` says how it is",
                    self.id
                )
            };
            patience = left;
            sleep(HOST_KEY_PAUSE).await;
        };
        self.folder.write(&self.certificate(), &format!("{certificate}\n"))?;
        self.folder.write(&self.known_hosts(), &format!("{} {host_key}\n", self.id))?;
        Ok(())
    }

    fn certificate(&self) -> String {
        format!("{}-cert.pub", self.id)
    }

    fn known_hosts(&self) -> String {
        format!("{}.known_hosts", self.id)
    }

    /// Options of `ssh`, as they are written in its configuration.
    fn options(&self) -> Vec<(&'static str, String)> {
        let file = |name: &str| format!("\"{}\"", self.folder.0.join(name).display()).replace('%', "%%");
        vec![
            ("HostName", self.id.clone()),
            ("User", self.login.clone()),
            ("ProxyCommand", self.proxy.replace('%', "%%")),
            ("HostKeyAlias", self.id.clone()),
            ("UserKnownHostsFile", file(&self.known_hosts())),
            ("GlobalKnownHostsFile", "/dev/null".to_owned()),
            ("StrictHostKeyChecking", "yes".to_owned()),
            ("UpdateHostKeys", "no".to_owned()),
            ("IdentityFile", file("id_ed25519")),
            ("CertificateFile", file(&self.certificate())),
            ("IdentitiesOnly", "yes".to_owned()),
        ]
    }

    /// `ssh` with all that; the caller adds what else it is to do.
    pub fn command(&self) -> Command {
        let mut command = Command::new("ssh");
        for (name, value) in self.options() {
            command.arg("-o").arg(format!("{name}={value}"));
        }
        command
    }

    /// A block for `~/.ssh/config`, by which every program that uses `ssh` gets in under the name `host`.
    pub fn configuration(&self, host: &str) -> String {
        let refresh = self.refresh.replace('%', "%%");
        // A certificate lasts for minutes, so there is a new one before each connection.
        let mut text = format!("Match originalhost {host} exec \"{refresh}\"\nHost {host}\n");
        for (name, value) in self.options() {
            text.push_str(&format!("    {name} {value}\n"));
        }
        text
    }
}

/// Whether a text can stand in a line of its own.
fn is_line(text: &str) -> bool {
    !text.is_empty() && !text.contains(['\n', '\r'])
}

/// A word for a POSIX shell.
fn quoted(word: &str) -> String {
    let plain = |b: u8| b.is_ascii_alphanumeric() || b"-_./:@=+,".contains(&b);
    if !word.is_empty() && word.bytes().all(plain) {
        word.to_owned()
    } else {
        format!("'{}'", word.replace('\'', r"'\''"))
    }
}

/// Opens the folder for tests.
#[cfg(test)]
fn opened(path: &Path) -> Folder {
    Folder::at(path.to_owned()).unwrap()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn route(folder: &Path) -> Route {
        Route {
            id: "7b0c".into(),
            service: "ssh".into(),
            login: "root".into(),
            proxy: "sandglass ssh --proxy -- 7b0c".into(),
            refresh: "'/a b/sandglass' --url http://[::1%25x] ssh --refresh -- 7b0c".into(),
            folder: opened(folder),
        }
    }

    #[test]
    fn the_configuration_gets_a_certificate_before_each_connection() {
        let dir = tempfile::tempdir().unwrap();
        let text = route(dir.path()).configuration("box");
        let first = text.lines().next().unwrap();
        assert_eq!(
            first,
            "Match originalhost box exec \"'/a b/sandglass' --url http://[::1%%25x] ssh --refresh -- 7b0c\""
        );
        for expected in [
            "Host box\n",
            "    HostKeyAlias 7b0c\n",
            "    StrictHostKeyChecking yes\n",
            "    ProxyCommand sandglass ssh --proxy -- 7b0c\n",
            "7b0c-cert.pub\"\n",
        ] {
            assert!(text.contains(expected), "{expected} in {text}");
        }
    }

    #[test]
    fn words_for_a_shell() {
        for (word, expected) in [("a-b/c", "a-b/c"), ("a b", "'a b'"), ("it's", r"'it'\''s'"), ("", "''")] {
            assert_eq!(quoted(word), expected);
        }
    }

    #[test]
    fn the_key_is_made_once_and_is_nobody_elses() {
        use std::os::unix::fs::PermissionsExt as _;
        let dir = tempfile::tempdir().unwrap();
        let folder = opened(&dir.path().join("deep/er"));
        let first = folder.public_key().unwrap();
        assert!(first.starts_with("ssh-ed25519 AAAA"), "{first}");
        assert_eq!(folder.public_key().unwrap(), first);
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!((mode(&folder.0), mode(&folder.key())), (0o700, 0o600));
        let written = folder.write("x", "text").unwrap();
        assert_eq!((mode(&written), fs::read_to_string(written).unwrap().as_str()), (0o600, "text"));
    }
}
