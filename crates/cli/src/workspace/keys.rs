//! The user's public keys, which a sandbox's SSH server lets in.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context as _, Result, ensure};

/// More are of no use: a server ends a connection after a few keys that it does not know.
const MOST: usize = 16;
/// Longer lines are no keys.
const LONGEST: usize = 16 << 10;

/// The keys in these files; without any, those in `~/.ssh` and of the agent. Lines as in `authorized_keys`, each key once.
///
/// # Errors
/// When a file that was named cannot be read or holds no public key.
pub fn public_keys(files: &[PathBuf]) -> Result<Vec<String>> {
    let mut keys = Keys::default();
    for file in files {
        let text = fs::read_to_string(file).with_context(|| format!("cannot read {}", file.display()))?;
        let found = keys.add(&text);
        ensure!(
            found > 0,
            "{} holds no public key that sandboxes accept (ed25519 or ecdsa); name the file that ends in .pub",
            file.display()
        );
    }
    if files.is_empty() {
        if let Some(home) = std::env::var_os("HOME") {
            keys.add_directory(&Path::new(&home).join(".ssh"));
        }
        if std::env::var_os("SSH_AUTH_SOCK").is_some() {
            keys.add_agent();
        }
    }
    keys.lines.truncate(MOST);
    Ok(keys.lines)
}

#[derive(Debug, Default)]
struct Keys {
    lines: Vec<String>,
    known: BTreeSet<String>,
}

impl Keys {
    /// How many public keys the text holds.
    fn add(&mut self, text: &str) -> usize {
        let mut found = 0;
        for line in text.lines().map(str::trim) {
            let Some(material) = material(line) else { continue };
            found += 1;
            if self.known.insert(material.to_owned()) {
                self.lines.push(line.to_owned());
            }
        }
        found
    }

    fn add_directory(&mut self, directory: &Path) {
        let mut files: Vec<PathBuf> = fs::read_dir(directory)
            .into_iter()
            .flatten()
            .filter_map(|entry| Some(entry.ok()?.path()))
            .filter(|path| path.extension().is_some_and(|extension| extension == "pub"))
            .collect();
        files.sort();
        for file in files {
            // What cannot be read is not offered either.
            self.add(&fs::read_to_string(file).unwrap_or_default());
        }
    }

    fn add_agent(&mut self) {
        let listed = Command::new("ssh-add").arg("-L").stdin(Stdio::null()).stderr(Stdio::null()).output();
        if let Ok(output) = listed {
            self.add(&String::from_utf8_lossy(&output.stdout));
        }
    }
}

/// How the types begin that the SSH server of a sandbox takes.
const TYPES: [&str; 4] = ["ssh-ed25519", "ecdsa-sha2-nistp", "sk-ssh-ed25519@", "sk-ecdsa-sha2-nistp256@"];

/// The key itself of a line `TYPE KEY [COMMENT]`; certificates are none, and keys of other types would be refused.
fn material(line: &str) -> Option<&str> {
    let mut words = line.split_ascii_whitespace();
    let (kind, material) = (words.next()?, words.next()?);
    let known = TYPES.iter().any(|prefix| kind.starts_with(prefix));
    let plain = |b: u8| b.is_ascii_alphanumeric() || b"+/=".contains(&b);
    let fits = line.len() <= LONGEST && material.starts_with("AAAA") && material.bytes().all(plain);
    (known && fits && !kind.contains("-cert-")).then_some(material)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_key_counts_once_and_nothing_else_is_one() {
        let dir = tempfile::tempdir().unwrap();
        let put = |name: &str, text: &str| fs::write(dir.path().join(name), text).unwrap();
        put("b.pub", "ssh-ed25519 AAAAB me@here\n");
        put("a.pub", "ecdsa-sha2-nistp256 AAAAA\n");
        put("c-cert.pub", "ssh-ed25519-cert-v01@openssh.com AAAAC me\n");
        put("d.pub", "-----BEGIN OPENSSH PRIVATE KEY-----\nAAAAD\n");
        put("id", "ssh-ed25519 AAAAX\n");
        put("rsa.pub", "ssh-rsa AAAAR me@here\n");
        let mut keys = Keys::default();
        keys.add_directory(dir.path());
        keys.add("ssh-ed25519 AAAAB another comment\n# x\n\n");
        assert_eq!(keys.lines, ["ecdsa-sha2-nistp256 AAAAA", "ssh-ed25519 AAAAB me@here"]);
        assert!(public_keys(&[dir.path().join("d.pub")]).unwrap_err().to_string().contains(".pub"));
        assert_eq!(public_keys(&[dir.path().join("b.pub")]).unwrap().len(), 1);
    }
}
