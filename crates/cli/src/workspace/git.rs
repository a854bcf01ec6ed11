//! What `up` and `build` are pointed at: the address of a repository, or a working tree of this machine.
//!
//! A server fetches from the remote and never sees this machine's files, so a working tree is taken only when the remote has its commit.
//! Owns the reading of the argument and of the working tree, by the `git` command; whether an address is allowed is the server's business.

use std::{
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context as _, Result, bail, ensure};

use crate::output::note;

/// What the server is asked to fetch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Source {
    pub url: String,
    /// A branch, tag or commit; the remote's own choice without one.
    pub reference: Option<String>,
}

/// Reads the argument. `reference` is the one that was asked for by its flag; `as_file` takes a working tree by its path.
///
/// # Errors
/// When a working tree is no repository, has no remote, or is ahead of it; each says what to do.
pub fn source(argument: &str, reference: Option<&str>, as_file: bool) -> Result<Source> {
    let directory = Path::new(argument);
    if is_address(argument) && !directory.is_dir() {
        ensure!(!as_file, "--file goes with a directory, and {argument} is an address");
        return address(argument, reference);
    }
    ensure!(
        directory.is_dir(),
        "there is no directory {argument}; give a directory, or an address such as https://host/group/name.git"
    );
    Tree::find(directory)?.source(reference, as_file)
}

/// `scheme://…` and `user@host:path`.
fn is_address(text: &str) -> bool {
    text.contains("://")
        || text
            .split_once(':')
            .is_some_and(|(host, path)| !path.is_empty() && host.contains('@') && !host.contains('/'))
}

fn address(argument: &str, reference: Option<&str>) -> Result<Source> {
    let (url, named) = match argument.split_once('#') {
        Some((url, named)) if !named.is_empty() => (url, Some(named)),
        Some((url, _)) => (url, None),
        None => (argument, None),
    };
    if let (Some(named), Some(asked)) = (named, reference) {
        ensure!(named == asked, "the address says #{named} and --ref says {asked}; give one of them");
    }
    Ok(Source { url: url.to_owned(), reference: reference.or(named).map(str::to_owned) })
}

/// A working tree.
struct Tree {
    root: PathBuf,
}

impl Tree {
    fn find(directory: &Path) -> Result<Self> {
        let found = Git::at(directory).read(&["rev-parse", "--show-toplevel"]);
        let root = found.with_context(|| {
            format!(
                "{} is no git working tree; give one, or the address of a repository",
                directory.display()
            )
        })?;
        Ok(Self { root: root.into() })
    }

    fn source(&self, reference: Option<&str>, as_file: bool) -> Result<Source> {
        let git = Git::at(&self.root);
        let commit = git
            .read(&["rev-parse", "--verify", "--end-of-options", "HEAD^{commit}"])
            .context("the repository has no commit yet; make one and push it")?;
        let branch = git.read(&["symbolic-ref", "--quiet", "--short", "HEAD"]).ok();
        self.tell_of_changes(&git);
        if as_file {
            let path = self.root.to_str().context("the directory's name is not text")?;
            let reference = reference.map(str::to_owned).or(branch).unwrap_or(commit);
            return Ok(Source { url: format!("file://{path}"), reference: Some(reference) });
        }
        let remote = git.read(&["remote", "get-url", "origin"]).context(
            "the working tree has no remote `origin` that a server could fetch from; push it somewhere and add that as `origin`, or \
             use --file where the server reads this machine's directories",
        )?;
        let url = without_credentials(&remote);
        if let Some(reference) = reference {
            return Ok(Source { url, reference: Some(reference.to_owned()) });
        }
        let short = commit.get(..12).unwrap_or(&commit);
        let Some(branch) = branch else {
            self.require_known(&git, &commit, &format!("commit {short} (no branch is checked out)"), &url)?;
            return Ok(Source { url, reference: Some(commit) });
        };
        let push =
            format!("push it with `git push -u origin {branch}`, or name with --ref what the remote has");
        match git.read(&["ls-remote", "origin", &format!("refs/heads/{branch}")]) {
            Ok(answer) => match answer.split_whitespace().next() {
                None => bail!("the branch {branch} is not on the remote {url}; {push}"),
                Some(there) if there == commit => {}
                Some(there) => {
                    let older = git.read(&["merge-base", "--is-ancestor", &commit, there]).is_ok();
                    ensure!(
                        older,
                        "commit {short} of the branch {branch} is not on the remote {url}; {push}"
                    );
                    note(&format!(
                        "the remote's {branch} is ahead of this working tree; the remote's is taken"
                    ));
                }
            },
            Err(error) => {
                note(&format!("warning: the remote could not be asked: {error:#}"));
                self.require_known(&git, &commit, &format!("commit {short} of the branch {branch}"), &url)?;
            }
        }
        Ok(Source { url, reference: Some(branch) })
    }

    /// That the remote had the commit when it was last fetched from or pushed to.
    fn require_known(&self, git: &Git<'_>, commit: &str, what: &str, url: &str) -> Result<()> {
        let list = ["for-each-ref", "--contains", commit, "--format=%(refname)", "refs/remotes/origin"];
        let known = git.read(&list).is_ok_and(|refs| !refs.is_empty());
        ensure!(
            known,
            "{what} is not known to be on the remote {url}; push it, or name with --ref what the remote has"
        );
        Ok(())
    }

    fn tell_of_changes(&self, git: &Git<'_>) {
        if git.read(&["status", "--porcelain"]).is_ok_and(|changes| !changes.is_empty()) {
            note("the working tree has changes that are not committed; they stay here");
        }
    }
}

/// A password in an address would be refused, and shown.
fn without_credentials(remote: &str) -> String {
    if let Some(path) = remote.strip_prefix('/') {
        return format!("file:///{path}");
    }
    match reqwest::Url::parse(remote) {
        Ok(mut url) if matches!(url.scheme(), "http" | "https") && !url.username().is_empty() => {
            // An address with a host can be without both.
            let _ = url.set_username("");
            let _ = url.set_password(None);
            note(
                "note: the remote's address carries credentials, which are left out; give a token with --token",
            );
            url.into()
        }
        _ => remote.to_owned(),
    }
}

struct Git<'a> {
    directory: &'a Path,
}

impl<'a> Git<'a> {
    fn at(directory: &'a Path) -> Self {
        Self { directory }
    }

    /// Standard output of a command that succeeds, without the last line break.
    fn read(&self, arguments: &[&str]) -> Result<String> {
        let output = Command::new("git")
            .arg("-C")
            .arg(self.directory)
            .args(arguments)
            .stdin(Stdio::null())
            .output()
            .context("cannot run `git`; it has to be installed")?;
        if !output.status.success() {
            let complaint = String::from_utf8_lossy(&output.stderr);
            bail!("{}", complaint.lines().next().unwrap_or("git failed").trim_start_matches("fatal: "));
        }
        Ok(String::from_utf8_lossy(&output.stdout).trim_end().to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn git(directory: &Path, arguments: &[&str]) {
        let status = Command::new("git")
            .args([
                "-c",
                "user.name=t",
                "-c",
                "user.email=t@example.invalid",
                "-c",
                "init.defaultBranch=main",
            ])
            .arg("-C")
            .arg(directory)
            .args(arguments)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .status()
            .unwrap();
        assert!(status.success(), "{arguments:?}");
    }

    fn of(url: &str, reference: Option<&str>) -> Source {
        Source { url: url.into(), reference: reference.map(Into::into) }
    }

    #[test]
    fn addresses_may_name_what_to_check_out() {
        for (given, flag, expected) in [
            ("https://h/a/b.git", None, of("https://h/a/b.git", None)),
            ("https://h/a/b#v1", None, of("https://h/a/b", Some("v1"))),
            ("https://h/a/b#", Some("x"), of("https://h/a/b", Some("x"))),
            ("git@h:a/b.git#main", Some("main"), of("git@h:a/b.git", Some("main"))),
        ] {
            assert_eq!(source(given, flag, false).unwrap(), expected);
        }
        assert!(source("https://h/a#b", Some("c"), false).is_err());
        assert!(source("https://h/a", None, true).is_err());
        assert!(source("/nowhere/at/all", None, false).unwrap_err().to_string().contains("no directory"));
    }

    #[test]
    fn credentials_do_not_travel_in_addresses() {
        assert_eq!(without_credentials("https://me:pw@h/a/b.git"), "https://h/a/b.git");
        assert_eq!(without_credentials("git@h:a/b.git"), "git@h:a/b.git");
        assert_eq!(without_credentials("/srv/git/a.git"), "file:///srv/git/a.git");
    }

    #[test]
    fn a_working_tree_is_taken_when_its_remote_has_its_commit() {
        let dir = tempfile::tempdir().unwrap();
        let (remote, tree) = (dir.path().join("remote.git"), dir.path().join("tree"));
        std::fs::create_dir(&tree).unwrap();
        git(dir.path(), &["init", "--bare", "remote.git"]);
        let read = || source(tree.to_str().unwrap(), None, false);
        assert!(read().unwrap_err().to_string().contains("no git working tree"));
        git(&tree, &["init"]);
        assert!(read().unwrap_err().to_string().contains("no commit"));
        git(&tree, &["commit", "--allow-empty", "-m", "one"]);
        assert!(read().unwrap_err().to_string().contains("no remote"));
        let file = source(tree.to_str().unwrap(), None, true).unwrap();
        assert_eq!(file.reference.as_deref(), Some("main"));
        assert!(file.url.starts_with("file:///"));
        git(&tree, &["remote", "add", "origin", remote.to_str().unwrap()]);
        assert!(read().unwrap_err().to_string().contains("git push -u origin main"));
        git(&tree, &["push", "-u", "origin", "main"]);
        let url = format!("file://{}", remote.display());
        assert_eq!(read().unwrap(), of(&url, Some("main")));
        git(&tree, &["commit", "--allow-empty", "-m", "two"]);
        assert!(read().unwrap_err().to_string().contains("git push -u origin main"));
        assert_eq!(source(tree.to_str().unwrap(), Some("main"), false).unwrap(), of(&url, Some("main")));
        git(&tree, &["push"]);
        git(&tree, &["reset", "--hard", "HEAD~1"]);
        assert_eq!(read().unwrap(), of(&url, Some("main")), "the remote is ahead");
        git(&tree, &["checkout", "--detach"]);
        let detached = read().unwrap();
        assert_eq!(detached.reference.map(|commit| commit.len()), Some(40));
    }
}
